"""How much longer a command takes to its first training step than to import torch and timm.

    python benchmarks/first_step.py FOLDER [--rounds 5]

FOLDER has images in class folders. Each round is a process of its own, whose time is the
processor's; the first one is left out, because it fills the caches of files and digests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

from timing import record, spread

MEASURED = """
import os, sys, time
import torch, timm
imported = time.process_time()
from gaupipe.training.update import Update

step = Update.step_if_due

def first_step(update):
    step(update)
    print("ratio", time.process_time() / imported, flush=True)
    os._exit(0)

Update.step_if_due = first_step
from stages.cli import main
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ratios = []
    for _ in range(arguments.rounds + 1):
        with tempfile.TemporaryDirectory() as runs:
            command = ["train", "--data", arguments.folder, "--set", "threads=1"]
            words = [sys.executable, "-c", MEASURED, *command, "--run-dir", f"{runs}/run"]
            output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        ratios.append(float(output.rsplit("ratio ", 1)[1]))
    record("first step of gaupipe train over the import of torch and timm", ratios[1:])
    print(spread(ratios[1:]))


if __name__ == "__main__":
    main()
