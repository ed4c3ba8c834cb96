"""Bad inputs: the table of tests/bad_inputs.py, and damaged files of a run. Each is refused in one
line, and the folder stays as it was."""

import io
import os
import random
import re
import shlex
import signal
import stat
import sys
from pathlib import Path

import pytest
import timm
import torch

from bad_inputs import INSPECT, PROBLEM, ROWS, Row
from gaupipe.models import save_student
from pictures import photos
from runs import end_of, linked, run_main

TINY = """
threads: 1
data: {train_images: 40, batch_size: 20}
model: {attention: standard, args: {depth: 1, embed_dim: 16, num_heads: 2}}
phase_a: {per_image: table, max_epochs: 1}
train: {epochs: 1}
"""
PICTURES = """
threads: 1
data: {name: folder, root: pictures, image_size: 8, batch_size: 20}
model: {attention: standard, args: {depth: 1, embed_dim: 16, num_heads: 2}}
phase_a: {per_image: table, max_epochs: 1}
train: {epochs: 1}
"""
COMMANDS = (
    "run tiny.yaml",
    "run tiny.yaml --run-dir other --set seed=1",
    "phase-a tiny.yaml --run-dir compressed --set phase_a.per_image=embedding "
    "--set phase_a.compression.embedding=3",
    "export-maps --run-dir compressed --kind embedding",
    "export-maps --run-dir runs/tiny --out shards.zarr --shard-mb 0.005",
    "phase-a tiny.yaml --run-dir vit --set phase_a.teacher=vit",
    "phase-a tiny.yaml --run-dir local --set phase_a.teacher=local --set phase_a.local.std=[0.8]",
    "train pictures.yaml --run-dir plain",
)
SECONDS = 30
"""What a row may take before it counts as a hang; the slowest takes a few."""


def make_folder(folder: Path) -> Path:
    """Finished runs and their stores, in ``folder``."""
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "pictures.yaml").write_text(PICTURES)
    for name in ("pictures", "elsewhere"):
        photos(folder / name / "train", ("cat", "dog"), 10, (8, 8))
    torch.manual_seed(0)
    sizes = dict(img_size=8, patch_size=4, embed_dim=24, depth=3, num_heads=2, num_classes=3)
    vit = timm.create_model("vit_tiny_patch16_224", **sizes)
    save_student(vit, folder / "weights", mean=(0.5,) * 3, std=(0.25,) * 3)
    for command in COMMANDS:
        assert run_main(*shlex.split(command), cwd=folder) == 0, command
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder that rows which change no file share."""
    return make_folder(tmp_path_factory.mktemp("bad"))


def contents(folder: Path) -> dict[str, tuple]:
    """Names, kinds and bytes of files, and of locks the time."""
    found: dict[str, tuple] = {}
    for top, _, names in os.walk(folder):
        found[top] = ()
        for path in (os.path.join(top, name) for name in names):
            status = os.lstat(path)
            content: bytes | str | None = None
            if stat.S_ISREG(status.st_mode):
                content = Path(path).read_bytes()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            found[path] = status.st_mode, content, path.endswith("lock") and status.st_mtime_ns
    return found


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


def is_named(name: str, line: str) -> bool:
    """Whether a name is in a line by itself, not as a part of a longer name."""
    return bool(re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w/-]|\.\w)", line))


def check(row: Row, end: SystemExit, out: str, err: str) -> None:
    """One line on stderr that begins with the program's name, after those that say what begins or,
    with --data, what is chosen. It, or stdout for problems of a store, names what the row says."""
    kind = PROBLEM if end.__context__ is None else type(end.__context__).__name__
    assert (kind, end.code) == (row.kind, 1 if row.kind == PROBLEM else 2), err
    begins = re.compile(r"gaupipe: .*( \.\.\.|\(the run used last; --run-dir names another\))")
    lines = [line for line in err.splitlines() if not begins.fullmatch(line)]
    if "--data" in row.command:
        lines = [line for line in lines if line.startswith("gaupipe: ")]
    assert len(lines) == 1 and err.splitlines()[-1] == lines[0], err
    assert lines[0].startswith("gaupipe: "), err
    assert bool(out) == (row.kind == PROBLEM), out
    said = out if row.kind == PROBLEM else lines[0]
    missing = [name for name in row.names.split() if not is_named(name, said)]
    assert not missing, f"{said} does not name {missing}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.command[:60])
def test_bad_input(row, finished, finished_contents, tmp_path, capfd, no_hang, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    asked: list = []  # of the network, which nothing but --download may ask
    monkeypatch.setattr("socket.getaddrinfo", lambda *address, **_: asked.append(address))
    folder, before = finished, finished_contents
    if row.change is not None:
        folder = linked(finished, tmp_path / "copy")  # changes leave linked files alone
        row.change(folder)
        before = contents(folder)
    capfd.readouterr()
    end = end_of(*shlex.split(row.command), cwd=folder)
    out, err = capfd.readouterr()
    after = contents(folder)
    assert {path for path in before | after if before.get(path) != after.get(path)} == set()
    check(row, end, out, err)
    assert asked == []


def test_a_bad_input_on_a_terminal_of_ascii(finished, finished_contents, monkeypatch):
    streams = []
    for name in ("stdout", "stderr"):
        streams.append(io.BytesIO())
        terminal = io.TextIOWrapper(streams[-1], encoding="ascii", write_through=True)
        monkeypatch.setattr(sys, name, terminal)
    row = Row(f"{INSPECT} --image 0 --head ²", "--head 0 1 mean")
    end = end_of(*shlex.split(row.command), cwd=finished)
    assert contents(finished) == finished_contents
    check(row, end, *(stream.getvalue().decode("ascii") for stream in streams))


READERS = {
    "phase_a/": ["phase-a tiny.yaml --resume", "export-maps --out new.zarr"],
    "phase_b/standard/student": ["evaluate --json", "inspect --student standard --image 3 --json"],
    "phase_b/": ["publish --out new", "phase-b --resume"],
    "maps.zarr/": ["verify", "inspect --image 3 --json", "phase-b --name new"],
    "": ["evaluate --json", "export-maps --out new.zarr", "run tiny.yaml"],
}
"""Commands that read the files of a run whose names begin so; the first that fits."""


def mutated(draw: random.Random, content: bytes) -> bytes:
    """Nothing, a cut, a flipped bit, a repeated or an exchanged part, or odd bytes."""
    start, end = sorted(draw.choices(range(len(content) + 1), k=2))
    odd = draw.choice([b"\0", b"\xff", b": ", b"{", b"- ", b"9" * 30, b"\n\t", b"nan", b"*a"])
    after, rest = content[start:], content[end:]
    flipped = bytes(byte ^ 4 for byte in after[:1]) + after[1:]
    parts = [b"", rest, odd + after, odd + rest, after + rest, flipped]
    return draw.choice([b"", content[:start] + draw.choice(parts)])


@pytest.mark.parametrize("number", range(24))
def test_damage_of_a_file_is_refused_or_changes_no_answer(
    number, finished, tmp_path, in_process, no_hang
):
    draw = random.Random(number)
    whole, damaged = (linked(finished, tmp_path / name) for name in ("whole", "damaged"))
    run = damaged / "runs" / "tiny"
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != "lock"]
    path = draw.choice([file for file in files if "plain" not in file.parts])
    content, name = path.read_bytes(), path.relative_to(run).as_posix()
    command = draw.choice(next(of for start, of in READERS.items() if name.startswith(start)))
    path.unlink()
    path.write_bytes(mutated(draw, content))
    code, out, err = in_process(*command.split(), cwd=damaged)
    if code:
        last = err.splitlines()[-1]
        assert code == (1 if command == "verify" else 2) and last.startswith("gaupipe: "), err
    else:
        expected = in_process(*command.split(), cwd=whole)[1]
        seconds = re.compile(r"[\d.,]+ ?s\b|\"seconds\": [\d.]+")
        assert seconds.sub("", out) == seconds.sub("", expected), f"{command} with {name}"
