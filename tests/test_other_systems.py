"""gaupipe where the system lacks what Linux alone has."""

import json
import os

from arguments import sets, tiny

LINUX = ["posix_fadvise", "posix_fallocate", "sched_getaffinity", "preadv", "pwritev"]
"""Functions of ``os`` that macOS does not have, or not in every version."""


def losses_of_a_run(in_process, folder):
    """A Gaussian teacher with records in files, which go on from a checkpoint, and a student."""
    settings = sets(*tiny(40, 40, 2), "phase_a.per_image=table")
    assert in_process("phase-a", "--run-dir", folder, *settings)[0] == 0
    assert in_process("run", "--run-dir", folder, *settings)[0] == 0
    assert [*folder.rglob("records.1")]
    text = (folder / "phase_b/standard/metrics.jsonl").read_text()
    return [json.loads(line)["train_loss"] for line in text.splitlines()]


def test_a_run_is_the_same_without_what_linux_alone_has(tmp_path, in_process, monkeypatch):
    losses = losses_of_a_run(in_process, tmp_path / "linux")
    for name in dir(os):
        if name in LINUX or name.startswith("POSIX_FADV_"):
            monkeypatch.delattr(os, name)
    assert losses_of_a_run(in_process, tmp_path / "macos") == losses
