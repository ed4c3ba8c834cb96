"""The tests of a GPU and the times of everything there: benchmarks/gpu.sh says how to start it.

OUT/gpu.json holds every step (command, seconds, exit code, output) and every number, OUT/gpu.md is
the page. A step that fails or takes too long shows its exit code, and the next one follows.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import timm
import torch

HERE = Path(__file__).parent
STEPS = {  # name: (seconds at most, command, what follows it in a dry run)
    "tests": (
        120,
        "-m pytest -q -n 0 -m gpu {root}/tests/test_gpu.py",
        "-k 'xsa and float32'",
    ),
    "layers": (
        50,
        "{here}/attention.py layer --shapes atto --lengths 64,196,1024",
        "--lengths 64 --rounds 2 --only xsa --tokens 64",
    ),
    "layers, compiled": (
        60,
        "{here}/attention.py layer --shapes atto --lengths 64,196,1024 --compile",
        "--lengths 64 --rounds 2 --only xsa --tokens 64",
    ),
    "models": (
        40,
        "{here}/attention.py model --shapes atto,deit_s",
        "--shapes atto --rounds 2 --only xsa --tokens 64",
    ),
    "GauAttention": (30, "{here}/gauattention.py", "--tokens 64 --rounds 2 --tokens-per-batch 64"),
    "phase B": (
        60,
        "{here}/phase_b.py --tokens 64,196,1024 --kinds gaussian,predictions",
        "--tokens 64 --students xsa --rounds 2 --tokens-per-batch 64",
    ),
    "phase B, compiled": (
        60,
        "{here}/phase_b.py --students standard,belief2 --tokens 64,196 --compile",
        "--tokens 64 --students xsa --rounds 2 --tokens-per-batch 64 --no-compile",
    ),
    "export": (
        30,
        "{here}/export.py digits --set model.name=gauvit_atto_patch4_32 --set data.image_size=32",
        "--repeats 2 --set data.train_images=16",
    ),
    "bfloat16": (30, "{here}/precision.py", "--tokens 64 --rounds 2"),
    "input": (
        30,
        "{here}/input.py --images 4000 --files 500 --rounds 3",
        "--images 200 --files 10 --rounds 2 --sizes 32 --workers 0 --parts loaders",
    ),
    "phases A and B of digits": (
        50,
        "-m gaupipe run digits --run-dir digits",
        "--epochs 1 --set phase_a.max_epochs=1",
    ),
}
DRY_SECONDS = 200
OUTPUT = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--dry", action="store_true", help="tiny steps on a CPU")
    arguments = parser.parse_args()
    if not (arguments.dry or torch.cuda.is_available()):
        sys.exit("there is no GPU: --dry tries the steps on a CPU")
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = "a CPU, dry" if arguments.dry else torch.cuda.get_device_name()
    made = {"device": device, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        numbers = Path(folder) / "numbers.jsonl"
        numbers.touch()
        os.environ |= {"BENCHMARKS": str(numbers), "PYTHONUNBUFFERED": "1"}
        if arguments.dry:
            os.environ["GAUPIPE_TEST_DEVICE"] = "cpu"
        steps = [run(name, arguments.dry, folder) for name in STEPS]
        lines = [json.loads(line) for line in numbers.read_text().splitlines()]
    result = {**made, "timm": timm.__version__, "steps": steps, "numbers": lines}
    (arguments.out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (arguments.out / "gpu.md").write_text(page(result))
    print(arguments.out / "gpu.md")


def run(name: str, dry: bool, folder: str) -> dict:
    """One step, in an empty folder."""
    limit, command, small = STEPS[name]
    line = f"{command} {small}" if dry else command
    words = shlex.split(line.format(here=HERE.resolve(), root=HERE.parent.resolve()))
    print(f"{name} ...", file=sys.stderr)
    began = time.monotonic()
    try:
        limit = DRY_SECONDS if dry else limit
        done = subprocess.run([sys.executable, *words], cwd=folder, timeout=limit, **OUTPUT)
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = "timeout", (late.stdout or b"").decode()
    seconds = round(time.monotonic() - began, 1)
    shown = "python " + line.format(here="benchmarks", root=".")
    return {"name": name, "command": shown, "seconds": seconds, "exit": code, "output": output}


def page(result: dict) -> str:
    """Markdown of a result."""
    lines = [f"# {result['device']}, {result['date']}, torch {result['torch']}", ""]
    lines += ["| step | seconds | exit code |", "|---|---|---|"]
    lines += [f"| {one['name']} | {one['seconds']} | {one['exit']} |" for one in result["steps"]]
    lines += ["", "Ratios, with quartiles.", "", "| | median | |", "|---|---|---|"]
    for number in result["numbers"]:
        quartiles = f"{number['low']:.2f} to {number['high']:.2f}"
        lines.append(f"| {number['name']} | {number['median']:.2f} | {quartiles} |")
    for step in result["steps"]:
        tail = "\n".join(step["output"].splitlines()[-40:])
        lines += ["", f"## {step['name']}", "", f"    {step['command']}", "", f"```\n{tail}\n```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
