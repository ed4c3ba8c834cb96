"""Stages in worlds of several processes (gloo, on the CPU): the same training as one process, the
same bytes in the store, one message for a mistake, and a run that survives the loss of a rank."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from arguments import sets, tiny
from damage import contents, differing
from gaupipe.settings import Settings
from gaupipe.settings.load import load
from gaupipe.system import distributed
from gaupipe.teachers.gaussian import GaussianTeacher
from killing import KILLED, AtFile, until_it_ends
from pictures import write_idx
from runs import named_like_packages, results
from worlds import assert_close, command, in_world

GAUPIPE = str(Path(sys.executable).with_name("gaupipe"))

TINY = [*tiny(301, 32, 3), "data.buckets=4"]
CASES = {
    "memory": [
        "phase_a.mode=stochastic",
        "phase_a.optim.ema=0.9",
        "phase_b.gamma=0.2",
        "phase_b.queries=5",
        "augment.mixup=0.5",
        "train.optim.accumulate=2",
    ],
    "files": [
        "model.stem=conv",
        "phase_a.rows.initial_std=0.1",
        "phase_a.augment=true",
        "augment.flip=true",
        "phase_b.warm_start=teacher",
    ],
    "compression": [
        "phase_a.per_image=embedding",
        "phase_a.compression={embedding: 4, hidden: 8}",
    ],
    "prior": [
        "phase_a.per_image=none",
        "phase_a.optim.accumulate=3",
        "phase_a.optim.clip_grad=0.1",
    ],
    "vit": [
        "phase_a.teacher=vit",
        "phase_a.augment=true",
        "augment.flip=true",
        "export.kind=topk",
        "phase_b.alpha=0.2",
        "phase_b.gamma=0.3",
    ],
    "resnet": [
        "phase_a.teacher=resnet",
        "export.kind=predictions",
        "phase_b.gamma=0",
        "phase_b.alpha=0.5",
    ],
}


BASELINES = ("memory", "vit")
"""Cases with a baseline."""


def train(run_dir: Path, settings: Settings, baseline: bool = False) -> None:
    from stages import run

    with distributed.process_group():
        run.run_all(settings, run_dir, baseline=baseline)


def train_until_killed(run_dir: Path, settings: Settings, kill: AtFile) -> None:
    """As :func:`train`; the last rank is killed once the ranks have found each other: until then,
    the launcher would have to end the others."""
    from stages import run

    with distributed.process_group():
        distributed.all_gather_object(None)
        if distributed.rank() == distributed.world_size() - 1:
            kill.arm()
        run.run_all(settings, run_dir, baseline=False)


@pytest.mark.parametrize(
    "case",
    [case if case == "files" else pytest.param(case, marks=pytest.mark.long) for case in CASES],
)
def test_any_number_of_processes_trains_the_same(tmp_path, case):
    settings = load("digits_expected", [*TINY, *CASES[case]])
    baseline = case in BASELINES
    for size in (1, 2):
        arguments = tmp_path / str(size), settings, baseline
        codes = in_world(size, tmp_path / "words", train, *arguments)
        words = [path.read_text() for path in sorted((tmp_path / "words").iterdir())]
        assert codes == [0] * size, words
        assert words[0].count("phase A epoch 3/3") == 1 and not any(words[1:])
    alone, together = (results(tmp_path / size) for size in ("1", "2"))
    assert len(alone) == (3 if baseline else 2)
    assert_close(together, alone, 1e-5)


def weights_of_ranks(settings: Settings, run_dir: Path) -> None:
    """Trains phase A, and prints what each rank has in the end."""
    from gaupipe.data.load import load_data

    with distributed.process_group():
        job = GaussianTeacher.build(settings, load_data(settings.data), run_dir)
        state = job.training_state()
        job.train(state, run_dir)
        weights = torch.cat([one.flatten() for one in state.network.state_dict().values()])
        print(f"weights {weights.tolist()}, buckets {sorted(job.per_image.records)}")


def test_ranks_end_with_the_same_bits_and_hold_their_own_images_only(tmp_path):
    settings = load("digits_expected", [*TINY, "phase_a.max_epochs=1"])
    codes = in_world(2, tmp_path / "words", weights_of_ranks, settings, tmp_path / "run")
    first, second = ((tmp_path / "words" / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert codes == [0, 0], first + second
    ends = [text.split("weights ")[1].split(", buckets ") for text in (first, second)]
    assert ends[0][0] == ends[1][0]
    assert [buckets.strip() for _, buckets in ends] == ["[0, 1]", "[2, 3]"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of one process with four buckets."""
    from stages import run

    folder = tmp_path_factory.mktemp("trained") / "run"
    run.run_all(load("digits_expected", [*TINY, "phase_b.gamma=0.1"]), folder, baseline=False)
    return folder


def test_what_a_killed_save_left_is_removed_when_the_run_goes_on(tmp_path, trained):
    from stages import phase_a
    from stages.runs import directory as run_directory

    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    before = contents(run_dir / "phase_a" / "checkpoint")
    assert {f"rows.0003.{bucket:04d}.pt" for bucket in range(4)} < before.keys()
    for name in ("rows.0002.0001.pt", "rows.0004.0000.pt"):
        (run_dir / "phase_a" / "checkpoint" / name).write_bytes(b"of a killed save")
    settings = run_directory.RunDirectory(run_dir).settings()
    assert len(phase_a.run(settings, run_dir, resume=True)) == 3
    assert differing(contents(run_dir / "phase_a" / "checkpoint"), before) == []


def test_the_ranks_write_what_the_plan_says(trained):
    from stages import plan
    from stages.runs.directory import RunDirectory

    planned = plan.plan_run(RunDirectory(trained).settings(), trained, world_size=2)
    files = [*trained.glob("phase_a/checkpoint/*.pt"), *trained.glob("phase_a/rows/*/records.*")]
    written = sum(file.stat().st_size for file in files)  # half of the records are superseded
    assert planned["stages"]["phase_a"]["disk_bytes"] == pytest.approx(2 * written, rel=0.2)


def test_a_store_has_the_same_bytes_for_any_number_of_processes(tmp_path, trained):
    stores = []
    for size in (1, 3):
        out = tmp_path / f"{size}.zarr"
        export = ["export-maps", "--run-dir", str(trained), "--out", str(out)]
        codes = in_world(size, tmp_path / "words", command, *export, "--shard-mb", "0.02")
        assert codes == [0] * size, (tmp_path / "words" / "rank0.txt").read_text()
        stores.append(contents(out))
    assert len(stores[0]) > 20  # several shards
    assert stores[0] == stores[1]


def test_scores_are_those_of_one_process(tmp_path, trained):
    """360 validation images in a world of 7, which does not divide them."""
    scores = []
    for size in (1, 7):
        arguments = ["evaluate", "--run-dir", str(trained), "--json"]
        codes = in_world(size, tmp_path / str(size), command, *arguments)
        words = (tmp_path / str(size) / "rank0.txt").read_text()
        assert codes == [0] * size, words
        scores.append(json.loads(words.splitlines()[-1]))
    alone, together = scores
    assert together.pop("map_kl") == pytest.approx(alone.pop("map_kl"), rel=1e-6)
    assert together == {
        name: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        for name, value in alone.items()
    }


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["phase-a", "digits", "--set", "data.buckets=3"], "3 buckets cannot be shared by 2"),
        (["inspect", "RUN/maps.zarr"], "inspect is a job for one process"),
        (["run", "--nosuch"], "No such option"),
    ],
)
def test_a_mistake_is_said_once_and_ends_every_rank(tmp_path, trained, arguments, words):
    arguments = [argument.replace("RUN", str(trained)) for argument in arguments]
    with contextlib.chdir(tmp_path):
        codes = in_world(2, tmp_path / "words", command, *arguments)
    first, second = ((tmp_path / "words" / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert codes == [2, 2] and second == ""
    [*begins, mistake] = first.splitlines()
    assert words in mistake and all(line.endswith(" ...") for line in begins)
    assert not (tmp_path / "runs").exists()


FAILURES = {
    "full disk": (OSError(28, "No space left on device", "state.pt"), 2),
    "bug": (KeyError("oops"), 1),
}


def command_that_fails(rank: int, what: str, *arguments: str) -> None:
    """As :func:`command`; one rank fails in the middle of an epoch, where the others wait for
    it."""
    from gaupipe.training.update import Update

    if distributed.launch().rank == rank:
        update, calls = Update.backward, itertools.count(1)

        def fails(*arguments, **keywords):
            if next(calls) == 4:
                raise FAILURES[what][0]
            return update(*arguments, **keywords)

        Update.backward = fails
    command(*arguments)


@pytest.mark.parametrize("rank,what", [(0, "full disk"), (1, "bug")])
def test_a_failure_of_any_rank_ends_all_with_one_line(tmp_path, rank, what):
    phase_a = ["phase-a", "digits", *sets(*TINY), "--run-dir", str(tmp_path / "run")]
    codes = in_world(2, tmp_path / "words", command_that_fails, rank, what, *phase_a)
    words = [(tmp_path / "words" / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    code = FAILURES[what][1]
    assert codes == [code, code], words
    said = "state.pt: No space left on device" if code == 2 else "KeyError: 'oops'"
    line = f"gaupipe: rank {rank}: {said}" if rank else f"gaupipe: {said}"
    assert words[0].splitlines()[-1] == line
    assert [text.count("gaupipe: phase A: digits") for text in words] == [1, 0]
    assert [text.count("Traceback") for text in words] == [
        int(what == "bug" and rank == each) for each in (0, 1)
    ]
    if code == 2:
        assert words[1] == ""


def command_elsewhere(place: Path, *arguments: str) -> None:
    """As :func:`command`, with the rank's number for RANK. A rank is in a folder of its own, and
    finds another Fashion-MNIST."""
    os.environ["GAUPIPE_FASHION_MNIST"] = str(place / os.environ["RANK"] / "fashion-mnist")
    os.chdir(place / os.environ["RANK"])
    command(*(argument.replace("RANK", os.environ["RANK"]) for argument in arguments))


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> Path:
    """Folders of two ranks, each with a data set and a trained ViT of its own."""
    from gaupipe.data.load import load_data
    from gaupipe.models import save_student
    from gaupipe.vit.build import build_vit

    place = tmp_path_factory.mktemp("machines")
    settings = load("digits_expected", TINY)
    data = load_data(settings.data)
    for rank in (0, 1):
        folder = place / str(rank) / "fashion-mnist"
        folder.mkdir(parents=True)
        draw = np.random.default_rng(rank)
        for prefix in ("train", "t10k"):
            images = draw.integers(256, size=(100, 8, 8), dtype=np.uint8)
            write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images)
            labels = np.arange(100, dtype=np.uint8) % 10
            write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels)
        torch.manual_seed(rank)
        vit = build_vit(settings.model, data, "standard")
        save_student(vit, place / str(rank) / "teacher", mean=data.mean, std=data.std)
    return place


PHASE_A = ["phase-a", "digits", *sets(*TINY), "--run-dir", "NEW"]
EXPORT = ["export-maps", "--run-dir", "RUN", "--out"]
FASHION = sets("data.name=fashion_mnist", "data.train_images=80")
NO_HEAD = ["--set", "phase_a.teacher_args.num_classes=0"]
TEACHER = ["--teacher", "local-dir:/proc/self/cwd/teacher", *NO_HEAD]


@pytest.mark.parametrize(
    "arguments,words",
    [
        ([*PHASE_A, "--set", "seed=RANK"], "seed: 1 in rank 1 (on "),
        ([*PHASE_A, *FASHION], "data set fashion_mnist, sha256 of the training images: "),
        ([*EXPORT, "NEW", *TEACHER], "cwd/teacher, sha256: "),
        (["phase-a", "digits", "--run-dir", "RANK"], "run: 1 in rank 1 (on "),
        (["run", "digits", *sets(*TINY), "--run-dir", "mine"], "rank 1: mine is not a run"),
        ([*EXPORT, "maps.zarr"], "rank 1: maps.zarr: no attention-map store there"),
    ],
)
def test_ranks_that_do_not_have_the_same_are_refused(tmp_path, trained, machines, arguments, words):
    places = {"RUN": str(trained), "NEW": str(tmp_path / "new")}
    arguments = [places.get(argument, argument) for argument in arguments]
    codes = in_world(2, tmp_path / "words", command_elsewhere, machines, *arguments)
    first, second = ((tmp_path / "words" / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert codes == [2, 2] and second == ""
    assert words in first.splitlines()[-1]
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_a_run_survives_the_loss_of_a_rank_at_any_moment(tmp_path):
    """Rank 1 is killed again and again; the others end by themselves, and one or two processes
    continue. The run ends as one that nothing happened to."""
    settings = load("digits_expected", [*TINY, "phase_b.gamma=0.1"])
    assert in_world(2, tmp_path / "words", train, tmp_path / "unbroken", settings) == [0, 0]
    run_dir, sizes = tmp_path / "killed", itertools.cycle((2, 1))

    def attempt(kill: AtFile) -> int:
        arguments = train_until_killed, run_dir, settings, kill
        codes = in_world(next(sizes), tmp_path / "words", *arguments)
        assert None not in codes, "a rank waited for one that was gone"
        assert codes[-1] in KILLED or not any(codes), codes
        return codes[-1]

    until_it_ends(attempt, run_dir, seed=0)
    assert_close(results(tmp_path / "killed"), results(tmp_path / "unbroken"), 1e-5)


TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--standalone", "--nproc-per-node", "2"),
]


@pytest.mark.long
def test_torchrun_starts_the_ranks_of_the_package(tmp_path):
    """Also beside a user's own store.py and stages/."""
    named_like_packages(tmp_path)
    program = ["-m", "gaupipe", "phase-a", "digits", *sets(*TINY, "phase_a.max_epochs=1")]
    done = subprocess.run([*TORCHRUN, *program], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "runs/digits"
    assert done.stderr.count("phase A epoch 1/1") == 1
    assert "a module of the user" not in done.stderr


def test_torchrun_starts_the_ranks_of_the_command(tmp_path):
    program = ["--no-python", GAUPIPE, "evaluate", "--run-dir", "absent"]
    done = subprocess.run([*TORCHRUN, *program], cwd=tmp_path, text=True, capture_output=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("gaupipe: ")]
    [mistake] = [line for line in said if not line.endswith(" ...")]
    assert "absent is not a run directory" in mistake


FAILS = """
import os, sys
from stages import cli
from gaupipe.training.update import Update

def fails(*arguments):
    raise OSError(28, "No space left on device", "state.pt")

if os.environ["RANK"] == "1":
    Update.backward = fails
cli.main()
"""


@pytest.mark.long
def test_torchrun_ends_when_one_rank_fails(tmp_path):
    """torchrun kills the others as soon as one has ended."""
    (tmp_path / "fails.py").write_text(FAILS)
    command = [*TORCHRUN, "fails.py", "phase-a", "digits", *sets(*TINY)]
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, env=environment)
    lines = [line for line in done.stderr.splitlines() if line.startswith("gaupipe: rank")]
    assert done.returncode == 1  # torchrun's own
    assert lines == ["gaupipe: rank 1: state.pt: No space left on device"], done.stderr
    assert "exitcode  : 2" in done.stderr


def test_ranks_that_are_gone_are_not_taken_for_the_living():
    """A store in which an earlier rank 1 reported, was answered and confirmed."""
    store = torch.distributed.HashStore()
    for key, value in {
        "reported/1": "old",
        "answer/old": "earlier",
        "confirmed/earlier/1": "",
    }.items():
        store.set(key, value)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(distributed.name_of_start, store, 0, 2)
        while store.get("answer/old") == b"earlier":
            time.sleep(0.001)
        assert not first.done()
        name = distributed.name_of_start(store, 1, 2)
        assert first.result(10) == name != "earlier"


def test_ranks_are_read_from_torchrun():
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert distributed.launch(torchrun) == distributed.Launch(3, 8, 1, 2)
    assert distributed.launch({**torchrun, "WORLD_SIZE": "1"}) == distributed.Launch()
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}  # starts torchrun
    assert distributed.launch(slurm) == distributed.launch({}) == distributed.Launch()
