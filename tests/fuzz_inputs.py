"""Bad inputs by the thousand: settings, YAML, arguments of commands, damaged files of runs and
stores.

    python tests/fuzz_inputs.py [CASES] [SEED]

Every case is drawn from its number, so that one that fails can be tried again:
``python tests/fuzz_inputs.py 1 SEED``. Each is refused in one line, or does no harm:

    refused     exit code 2 (``verify``: 1) and one line, or a command with the answer it gives
                without the damage
    traceback   anything else than a line
    silent      a bad value was taken, or damaged files gave another answer
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import yaml

from conftest import linked, run_main
from gaupipe.settings import Settings
from gaupipe.settings import load as config
from gaupipe.system.errors import UserError
from test_config import bad_values, fields

SECONDS = 60
"""A case that takes longer hangs."""

WORDS = [
    *("x", "-1", "nan", "inf", "1e400", "²", "é", "0x1", "' '", "''", "[1", "{a: 1}", "None"),
    *("absent", "absent/x", "/dev/null/x", "/dev/null", "tiny.yaml", "pictures", "~nosuchuser/x"),
    *("99999999999999999999", "9" * 5000, "n" * 300, "../..", "s3://", "ftp://x/y", "file://"),
    *("a\nb", "\x1b[31m"),
]

# Options of a number and of a name: none of WORDS is one, but for those that take a path
COMMANDS = {
    "evaluate --run-dir runs/tiny": ["--student"],
    "inspect runs/tiny/maps.zarr": ["--image", "--image 0 --layer", "--image 0 --head"],
    "inspect runs/tiny/maps.zarr --image 0": ["--query", "--view"],
    "export-maps --run-dir runs/tiny --out new.zarr": ["--kind", "--encoding", "--k", "--views"],
    "export-maps --run-dir runs/tiny --overwrite": ["--kind topk --k", "--teacher"],
    "phase-b --run-dir runs/tiny --name new": ["--student", "--maps", "--set"],
    "phase-a tiny.yaml --run-dir new": ["--teacher", "--set"],
    "train tiny.yaml --run-dir new": ["--student", "--set"],
    "run tiny.yaml --run-dir new": ["--student", "--set", "--teacher"],
    "plan tiny.yaml --steps 0": ["--images 10 --classes", "--classes 10 --images", "--world-size"],
    "verify runs/tiny/maps.zarr --teacher": ["--sample", "--run-dir"],
    "export-student --run-dir runs/tiny": ["--format", "--student"],
    "publish --run-dir runs/tiny --out new": [""],
    "compare tiny.yaml --run-dir new --no-tune": ["--students", "--seeds", "--row", "--sweep"],
    "": [*("run", "plan", "phase-a", "inspect", "verify", "predict", "settings", "nonsense")],
}

READERS = {
    "phase_a/": ["phase-a tiny.yaml --resume", "export-maps --out new.zarr"],
    "phase_b/standard/student": ["evaluate --json", "inspect --student standard --json"],
    "phase_b/standard/checkpoint": ["phase-b --resume"],
    "phase_b/": ["inspect --student standard --json", "phase-b --resume"],
    "maps.zarr/": ["verify", "inspect --image 3 --json", "phase-b --name new"],
    "": ["evaluate --json", "export-maps --out new.zarr", "phase-b --resume", "run tiny.yaml"],
}
"""Commands that read the files of a run whose names begin so; the first that fits."""


def fuzz(finished: Path, scratch: Path, cases: int, seed: int) -> Iterator[str]:
    """Verdicts on ``cases`` bad inputs. ``finished`` is the folder of test_bad_inputs, which
    stays as it is; ``seed`` is the number of the first."""
    kinds = [bad_setting, bad_yaml, bad_argument, damaged_file]
    for number in range(seed, seed + cases):
        draw = random.Random(number)
        folder = scratch / "case"
        verdict, case = kinds[number % len(kinds)](draw, finished, folder)
        if verdict != "refused":
            print(f"{number}: {verdict}: {case}", file=sys.__stderr__, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        yield verdict


def bad_setting(draw: random.Random, _finished: Path, _folder: Path) -> tuple[str, str]:
    """A setting with a value that its type does not have, after a change of another one; or a
    name that no setting has."""
    (name, annotation), (other, of_other) = draw.choices(list(fields(Settings)), k=2)
    override = f"{name}={draw.choice(bad_values(annotation))}"
    if draw.random() < 0.3:
        unknown = mutated(draw, name.encode()).decode(errors="replace")
        unknown += "_" * (unknown in dict(fields(Settings)))  # keywords may have any name
        override = f"{unknown}.x={draw.choice(WORDS)}"
    overrides = [f"{other}={draw.choice(bad_values(of_other))}", override]
    overrides = overrides[draw.randrange(2) :]
    return loads(lambda: config.load("digits", overrides)), repr(overrides)[:200]


def bad_yaml(draw: random.Random, _finished: Path, folder: Path) -> tuple[str, str]:
    """A settings file with damage; one that is still read must hold what other readers see."""
    folder.mkdir()
    path = folder / "bad.yaml"
    content = config.dump(config.load(draw.choice(config.shipped()))).encode()
    for _ in range(draw.randint(1, 4)):
        content = mutated(draw, content)
    path.write_bytes(content)
    verdict = loads(lambda: config.load(path))
    if verdict == "silent":
        names = set(config.flatten(Settings())) | {""}
        given = yaml.safe_load(content.decode()) or {}
        leaves = [name for name, _ in config._leaves(given, "")]
        known = all(any(f"{leaf}.".startswith(f"{name}.") for name in names) for leaf in leaves)
        verdict = "refused" if known or not leaves else "silent"
    return verdict, repr(content)[:200]


def bad_argument(draw: random.Random, finished: Path, folder: Path) -> tuple[str, str]:
    with_run(finished, folder)
    command = draw.choice(list(COMMANDS))
    words = [*shlex.split(command), *draw.choice(COMMANDS[command]).split(), draw.choice(WORDS)]
    return runs(words, folder), repr(words)[:200]


def damaged_file(draw: random.Random, finished: Path, folder: Path) -> tuple[str, str]:
    with_run(finished, folder)
    run = folder / "runs" / "tiny"
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != "lock"]
    path = draw.choice([file for file in files if "plain" not in file.parts])
    content, name = path.read_bytes(), path.relative_to(run).as_posix()
    path.unlink()
    damage = draw.choice(["removed", "a folder", "empty", *["mutated"] * 6])
    if damage == "a folder":
        path.mkdir()
    elif damage != "removed":
        path.write_bytes(b"" if damage == "empty" else mutated(draw, content))
    readers = next(of for start, of in READERS.items() if name.startswith(start))
    command = draw.choice(readers)
    verdict = runs(shlex.split(command), folder, expected=answer(finished, command))
    return verdict, f"{command} with {name} {damage}"


def with_run(finished: Path, folder: Path) -> None:
    """Puts the run of tiny.yaml into a folder."""
    folder.mkdir(exist_ok=True)
    shutil.copyfile(finished / "tiny.yaml", folder / "tiny.yaml")
    linked(finished / "runs", folder / "runs")


def mutated(draw: random.Random, content: bytes) -> bytes:
    """A cut, a flipped bit, a repeated or an exchanged part, odd bytes."""
    start, end = sorted(draw.choices(range(len(content) + 1), k=2))
    odd = draw.choice([b"\0", b"\xff", b": ", b"{", b"- ", b"9" * 30, b"\n\t", b"nan", b"*a"])
    before, after, rest = content[:start], content[start:], content[end:]
    flipped = bytes(byte ^ 4 for byte in after[:1]) + after[1:]
    parts = [b"", rest, odd + after, odd + rest, after + rest, flipped]
    return before + draw.choice(parts)


def loads(load: Callable[[], object]) -> str:
    try:
        load()
    except UserError as error:
        return "refused" if "\n" not in str(error) and len(str(error)) < 2000 else "traceback"
    except Exception:
        return "traceback"
    return "silent"


@cache
def answer(finished: Path, command: str) -> str:
    """What a command prints without damage; "" where it says no more than its name."""
    with tempfile.TemporaryDirectory() as folder:
        with_run(finished, Path(folder))
        return said_by(shlex.split(command), Path(folder))[1]


def said_by(words: list[str], folder: Path) -> tuple[object, str, str]:
    """Exit code, or the text of an exception, stdout and stderr of a command."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no answer after {SECONDS} s")

    out, err = io.StringIO(), io.StringIO()
    code: object = None
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_main(*words, cwd=folder)
    except BaseException:
        code = traceback.format_exc(limit=-2)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return code, out.getvalue(), err.getvalue()


def runs(words: list[str], folder: Path, expected: str | None = None) -> str:
    code, out, err = said_by(words, folder)
    lines = [line for line in err.splitlines() if "(the run used last; " not in line]
    if code == 2 or (code == 1 and words[0] == "verify"):
        return "refused" if lines and lines[-1].startswith("gaupipe: ") else f"unclear: {err}"
    if code == 0 and expected is not None:
        seconds = re.compile(r"[\d.,]+ ?s\b|\"seconds\": [\d.]+")
        same = seconds.sub("", out) == seconds.sub("", expected)
        return "refused" if same else "silent"
    if code == 0:
        return "silent"
    return f"traceback: {code}"


if __name__ == "__main__":
    from test_bad_inputs import make_folder

    cases, seed = (int(word) for word in [*sys.argv[1:], "1000", "0"][:2])
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "finished"
        made.mkdir()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            make_folder(made)
        verdicts = Counter(word.split(":")[0] for word in fuzz(made, Path(scratch), cases, seed))
        print(dict(verdicts))
