"""Bad inputs, a table of them: each is refused in one line, and the folder stays as it was.

The table is tests/bad_inputs.py. Its commands run in this process.
"""

import io
import os
import shlex
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bad_inputs import ASCII_ROWS, ROWS, Row
from conftest import linked, run_main
from fuzz_inputs import fuzz
from gaupipe.cli import main

TINY = """
threads: 1
data: {train_images: 40, batch_size: 20}
model: {args: {depth: 1, embed_dim: 16, num_heads: 2}}
phase_a: {max_epochs: 1}
phase_b: {epochs: 1}
"""
PICTURES = """
threads: 1
data: {name: folder, root: pictures, image_size: 8, batch_size: 20}
model: {args: {depth: 1, embed_dim: 16, num_heads: 2}}
phase_a: {max_epochs: 1}
phase_b: {epochs: 1}
"""
COMMANDS = (
    "run tiny.yaml",
    "run tiny.yaml --run-dir other --set seed=1",
    "phase-a tiny.yaml --run-dir compressed --set phase_a.per_image=embedding "
    "--set phase_a.compression.embedding=3",
    "export-maps --run-dir compressed --kind embedding",
    "export-maps --run-dir runs/tiny --out shards.zarr --shard-mb 0.005",
    "export-maps --run-dir runs/tiny --out dense.zarr --kind dense",
)
SECONDS = 30
"""What a row may take before it counts as a hang; the slowest takes a few."""


def make_folder(folder: Path) -> Path:
    """Finished runs and their stores, in ``folder``."""
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "pictures.yaml").write_text(PICTURES)
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / "pictures" / "train" / name).mkdir(parents=True)
        for number in range(10):
            pixels = draw.integers(256, size=(8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / "train" / name / f"{number}.png")
    for command in COMMANDS:
        assert run_main(*shlex.split(command), cwd=folder) == 0, command
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder that rows which change no file share."""
    return make_folder(tmp_path_factory.mktemp("bad"))


def contents(folder: Path) -> dict[str, tuple]:
    """What is in a folder: names, kinds, bytes, and of locks the time."""
    found = {}
    folders = [str(folder)]
    while folders:
        for entry in os.scandir(folders.pop()):
            if entry.is_dir(follow_symlinks=False):
                found[entry.path] = ()
                folders.append(entry.path)
                continue
            regular = entry.is_file(follow_symlinks=False)
            status = entry.stat(follow_symlinks=False)
            found[entry.path] = (status.st_mode, read(entry.path) if regular else None)
            if entry.name == "lock":
                found[entry.path] += (status.st_mtime_ns,)
    return found


def read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


@pytest.fixture(scope="module")
def finished_contents(finished):
    return contents(finished)


@pytest.fixture
def no_hang():
    """Fails a row that does not come back."""

    def stop(*_):
        pytest.fail(f"no answer after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def check(row: Row, code: int, out: str, err: str) -> None:
    said = err.splitlines()  # what begins, too
    lines = [line for line in said if "(the run used last; " not in line and line[-4:] != " ..."]
    assert "Traceback" not in out + err
    assert code == row.code, err
    assert len(lines) == 1, err
    assert lines[0].startswith("gaupipe: ")
    assert row.message in (out + err if code == 1 else err)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.command[:60])
def test_bad_input(row, finished, finished_contents, tmp_path, in_process, no_hang):
    folder, before = finished, finished_contents
    if row.change is not None:
        folder = linked(finished, tmp_path / "copy")  # changes leave linked files alone
        row.change(folder)
        before = contents(folder)
    code, out, err = in_process(*shlex.split(row.command), cwd=folder)
    assert contents(folder) == before
    check(row, code, out, err)


@pytest.mark.parametrize("row", ASCII_ROWS, ids=lambda row: row.command[:60])
def test_bad_input_on_a_terminal_of_ascii(row, finished, finished_contents, monkeypatch):
    monkeypatch.chdir(finished)
    monkeypatch.setattr(sys, "argv", ["gaupipe", *shlex.split(row.command)])
    streams = []
    for name in ("stdout", "stderr"):
        streams.append(io.BytesIO())
        terminal = io.TextIOWrapper(streams[-1], encoding="ascii", write_through=True)
        monkeypatch.setattr(sys, name, terminal)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert contents(finished) == finished_contents
    check(row, exit_.value.code or 0, *(stream.getvalue().decode("ascii") for stream in streams))


def test_the_table_is_without_repetition():
    inputs = [(row.command, row.change) for row in ROWS]
    assert len(set(inputs)) == len(inputs)


def test_generated_bad_inputs(finished, tmp_path):
    """A sample of what ``python tests/fuzz_inputs.py`` tries."""
    found = Counter(fuzz(finished, tmp_path, cases=60, seed=100))
    assert not {verdict: count for verdict, count in found.items() if verdict != "refused"}
