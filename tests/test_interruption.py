"""Long epochs: a training that is killed, or stopped by Ctrl-C or SIGTERM, in the middle of an
epoch goes on from there and ends with the metrics and the student of an unbroken one."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from arguments import sets, tiny
from gaupipe.data.batches import Batches
from gaupipe.data.load import load_data
from gaupipe.settings import DataSettings
from gaupipe.settings.load import load
from gaupipe.system import distributed
from killing import AtCall, exit_code
from pictures import UNCHANGED, NumberedMaps
from runs import results
from worlds import assert_close, in_world

DROPS = "model.args={depth: 2, embed_dim: 16, num_heads: 2, drop_path_rate: 0.2}"
TINY = [
    *tiny(200, 20, 2),
    DROPS,
    "phase_b.gamma=0.2",
    "phase_b.queries=5",
    "checkpoint_minutes=0",
]
CASES = {
    "memory": [
        "phase_a.mode=stochastic",
        "phase_a.optim.ema=0.9",
        "phase_a.optim.accumulate=2",
        "train.optim.ema=0.9",
        "augment.mixup=0.5",
    ],
    "files": [
        "data.buckets=2",
        "phase_a.rows.initial_std=0.1",
        "phase_a.mode=stochastic",
        "train.optim.accumulate=4",
    ],
    "vit": [
        "phase_a.teacher=vit",
        "phase_b.alpha=0.2",
        "train.optim.accumulate=2",
        "train.patch_drop_rate=0.5",
    ],
}

BATCH, RECORD = "gaupipe.training.update:Update.backward", "os:pwrite"


def command(arguments: list[str], words: Path) -> None:
    from stages.cli import main

    with words.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["gaupipe", *arguments]
    main()


def attempt(tmp_path: Path, arguments: list[str], kill: AtCall | None = None) -> tuple[int, str]:
    """Exit code and words of a command in a process of its own."""
    words = tmp_path / "words.txt"
    return exit_code(command, arguments, words, kill=kill), words.read_text()


def with_settings(command: str, run_dir: Path, settings: list[str], *more: str) -> list[str]:
    return [command, "digits", *more, "--run-dir", str(run_dir), *sets(*settings)]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Of the teacher and of the students, as the checkpoints have them."""
    return {
        f"{path.relative_to(run_dir)} {part} {name}": tensor
        for path in sorted(run_dir.glob("**/state.pt"))
        for part in ("modules", "ema")
        for name, tensor in (torch.load(path, weights_only=True)[part] or {}).items()
    }


def assert_same(run_dir: Path, expected: Path) -> None:
    """The same metrics and weights, bit for bit."""
    assert results(run_dir) == results(expected)
    found, unbroken = weights(run_dir), weights(expected)
    assert found.keys() == unbroken.keys() and len(found) > 20
    assert [name for name in found if not torch.equal(found[name], unbroken[name])] == []


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_run_interrupted_within_epochs_ends_like_an_unbroken_one(tmp_path, case):
    never = ["checkpoint_minutes=null"]
    kind = [] if case == "vit" else ["--no-baseline"]
    unbroken = with_settings("run", tmp_path / "unbroken", [*TINY, *CASES[case], *never], *kind)
    assert attempt(tmp_path, unbroken)[0] == 0
    generator = random.Random(case)
    ends = {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143}
    killed, code = 0, None
    for number in itertools.cycle(ends):
        calls = (generator.randint(4, 11) if killed else 10,)  # 10: only the evaluation is left
        kill = AtCall(BATCH, calls, number)
        if killed == 1 and case == "files":
            kill = AtCall(RECORD, (generator.randint(60, 170),))
        run = with_settings("run", tmp_path / "killed", [*TINY, *CASES[case]], *kind)
        code, words = attempt(tmp_path, run, kill)
        if code == 0:
            break
        assert code == ends[kill.number], words
        assert (code < 0) == ("to go on: gaupipe run digits" not in words)
        killed += 1
        assert killed < 30, "no progress"
    assert killed >= 4
    assert_same(tmp_path / "killed", tmp_path / "unbroken")


def test_sigterm_saves_the_step_and_says_how_to_go_on(tmp_path):
    settings = [*TINY, "phase_a.max_epochs=1", "checkpoint_minutes=10"]
    phase_a = with_settings("phase-a", tmp_path / "run", settings)
    code, words = attempt(tmp_path, phase_a, AtCall(BATCH, (7,), signal.SIGTERM))
    said = words.strip().splitlines()[-1]
    assert code == 143 and "Traceback" not in words
    assert said.startswith("gaupipe: stopped by SIGTERM in epoch 1, after batch 7 of 10, ")
    assert said.endswith(" --resume") and "gaupipe phase-a digits --run-dir" in said
    state = torch.load(tmp_path / "run/phase_a/checkpoint/state.pt", weights_only=True)
    assert state["epoch"]["batches"] == 7 and state["metrics"] == []
    assert state["finished"] is False
    code, words = attempt(tmp_path, [*phase_a, "--resume"])
    assert code == 0 and "phase A epoch 1/1" in words
    [line] = (tmp_path / "run/phase_a/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["seconds"] > state["epoch"]["seconds"] > 0


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    settings = [*TINY, "phase_a.optim.accumulate=8", "checkpoint_minutes=10"]
    phase_a = with_settings("phase-a", tmp_path / "run", settings)
    code, words = attempt(tmp_path, phase_a, AtCall(BATCH, (3, 5), signal.SIGINT))
    assert code == 130 and words.count("gaupipe: SIGINT: stops when") == 1
    assert "gaupipe: interrupted; " in words
    assert not (tmp_path / "run/phase_a/checkpoint").exists()


def test_ctrl_c_before_a_command_begins_is_one_line(in_process, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("stages.cli.program.show_messages", interrupt)
    assert in_process("plan") == (130, "", "gaupipe: interrupted\n")


def test_short_epochs_have_checkpoints_between_them_only(tmp_path, monkeypatch):
    from gaupipe.training.state import TrainingState
    from stages import phase_a

    written = []
    save = TrainingState.save

    def noted(state, folder):
        written.append(state.batches)
        save(state, folder)

    monkeypatch.setattr(TrainingState, "save", noted)
    for name, settings, expected in (
        ("default", ["checkpoint_minutes=10"], [0, 0]),
        ("always", ["data.batch_size=100"], [1, 2, 0] * 2),
        ("groups", ["phase_a.optim.accumulate=5"], [5, 10, 0] * 2),
    ):
        phase_a.run(load("digits_expected", [*TINY, *settings]), tmp_path / name)
        assert written == expected, name
        written.clear()


def test_an_epoch_that_goes_on_reads_nothing_of_what_is_done(monkeypatch):
    data = load_data(DataSettings(train_images=50))
    batches = Batches(data.train, data, torch.device("cpu"), 8, buckets=2)
    whole = list(batches.epoch(3, UNCHANGED, NumberedMaps()))
    read = []
    fetch = type(data.train.source).__getitems__

    def noted(source, positions):
        read.extend(positions)
        return fetch(source, positions)

    monkeypatch.setattr(type(data.train.source), "__getitems__", noted)
    rest = list(batches.epoch(3, UNCHANGED, NumberedMaps(), first=4))
    assert len(rest) == len(whole) - 4 == 3
    for batch, expected in zip(rest, whole[4:], strict=True):
        torch.testing.assert_close(batch.ids, expected.ids, rtol=0, atol=0)
        torch.testing.assert_close(batch.images, expected.images, rtol=0, atol=0)
        assert np.array_equal(batch.stored["maps"], expected.stored["maps"])
    ids = torch.cat([batch.ids for batch in rest]).numpy()
    assert sorted(read) == sorted(data.train.positions[ids].tolist())
    assert list(batches.epoch(3, UNCHANGED, NumberedMaps(), first=7)) == []


WITH_WORKERS = """
import os, signal, sys; sys.path[:0] = {path!r}
import gaupipe
from stages import cli
from gaupipe.training import update as training
import itertools

calls, update = itertools.count(1), training.Update.backward
def counted(self, *arguments):
    if next(calls) == 6:
        os.killpg(0, signal.SIGTERM)  # the readers of images, too
    return update(self, *arguments)
training.Update.backward = counted
if __name__ == "__main__":
    cli.main()
"""


@pytest.mark.long
def test_sigterm_to_all_processes_leaves_the_readers_of_images_alive(tmp_path):
    """As SLURM sends it. Two batches more are needed after the signal."""
    script = tmp_path / "script.py"
    script.write_text(WITH_WORKERS.format(path=[str(Path(__file__).parent.parent)]))
    settings = [*TINY, "data.workers=1", "phase_a.optim.accumulate=8", "checkpoint_minutes=10"]
    run = with_settings("phase-a", tmp_path / "run", settings)
    process = subprocess.run(
        [sys.executable, script, *run], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.returncode == 143, process.stderr
    assert "after batch 8 of 10" in process.stderr and "Traceback" not in process.stderr


DEAF_READER = """
import os, signal, sys, threading, time; sys.path[:0] = {path!r}
from pathlib import Path
import numpy as np, torch
from torch.utils.data import _utils
from gaupipe.data.loader import BatchRequest, Loader

class Deaf:
    labels = np.zeros(2, np.int64)

    def __getitems__(self, positions):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        Path("reads").touch()
        time.sleep(600)

def fails(*_):
    raise RuntimeError("unexpected")

def fail_once_it_reads():
    while not Path("reads").exists():
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGALRM)

if __name__ == "__main__":
    _utils.MP_STATUS_CHECK_INTERVAL = 0.1  # torch waits so long, twice, for a reader to end
    batches = Loader(Deaf(), torch.device("cpu"), 1)([BatchRequest(np.arange(2), np.arange(2))])
    signal.signal(signal.SIGALRM, fails)
    threading.Thread(target=fail_once_it_reads, daemon=True).start()
    next(batches)
"""


@pytest.mark.long
def test_a_process_that_fails_does_not_wait_for_a_reader_that_does_not_end(tmp_path):
    """As one does not that SIGTERM reaches while it starts."""
    script = tmp_path / "script.py"
    root = str(Path(__file__).parent.parent)
    script.write_text(DEAF_READER.format(path=[root]))
    process = subprocess.run(
        [sys.executable, script], cwd=tmp_path, text=True, capture_output=True, timeout=300
    )
    assert process.returncode == 1
    assert process.stderr.endswith("RuntimeError: unexpected\n")


# ---- worlds --------------------------------------------------------------------------------------

WORLD = [*TINY, "data.buckets=6", "data.batch_size=36"]
ALONE = "--no-baseline"


def in_rank(arguments: list[str], kill: AtCall | None = None, rank: int = 0) -> None:
    """A command in a world, of which one rank gets a signal."""
    from stages.cli import main

    if kill and distributed.launch().rank == rank:
        kill.arm()
    sys.argv = ["gaupipe", *arguments]
    main()


@pytest.mark.long
def test_a_world_stopped_within_an_epoch_goes_on_to_the_same_bits(tmp_path):
    """One rank gets the signal; the others hear of it at once where there is a checkpoint at every
    step, else some batches later."""
    size, more = 2, ["phase_a.mode=stochastic"]
    unbroken = with_settings(
        "run", tmp_path / "unbroken", [*WORLD, *more, "checkpoint_minutes=10"], ALONE
    )
    assert in_world(size, tmp_path / "words", in_rank, unbroken) == [0] * size
    for number, batch, minutes in ((signal.SIGTERM, 4, 0), (signal.SIGINT, 8, 10)):
        seldom = f"checkpoint_minutes={minutes}"
        run = with_settings("run", tmp_path / "run", [*WORLD, *more, seldom], ALONE)
        kill = AtCall(BATCH, (batch,), number)
        codes = in_world(size, tmp_path / "words", in_rank, run, kill, size - 1)
        said = (tmp_path / "words" / "rank0.txt").read_text()
        assert codes == [128 + number] * size, said
        assert said.count("gaupipe: stopped by ") == 1 and "(with torchrun, as before)" in said
    assert in_world(size, tmp_path / "words", in_rank, run) == [0] * size
    assert_same(tmp_path / "run", tmp_path / "unbroken")


@pytest.mark.long
def test_another_number_of_processes_goes_on_within_an_epoch(tmp_path):
    """But for stochastic depth, which draws other numbers then, up to rounding."""
    settings = [*WORLD, "model.args={depth: 2, embed_dim: 16, num_heads: 2}"]
    epochs = ["phase_a.max_epochs=3", "train.epochs=3", "phase_a.mode=stochastic"]
    epochs.append("data.batch_size=60")
    unbroken = with_settings("run", tmp_path / "unbroken", [*settings, *epochs], ALONE)
    assert in_world(1, tmp_path / "words", in_rank, unbroken) == [0]
    run = with_settings("run", tmp_path / "run", [*settings, *epochs], ALONE)
    for size, batch in ((2, 6), (1, 5)):
        kill = AtCall(BATCH, (batch,), signal.SIGTERM)
        assert in_world(size, tmp_path / "words", in_rank, run, kill) == [143] * size
    assert in_world(3, tmp_path / "words", in_rank, run) == [0, 0, 0]
    assert_close(results(tmp_path / "run"), results(tmp_path / "unbroken"), 1e-5)
