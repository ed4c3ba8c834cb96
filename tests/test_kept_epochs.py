"""Best and last epoch of a student: which weights are kept, early stopping, and both after an
interruption."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import binomtest

from arguments import sets
from gaupipe.settings.load import dump, load
from gaupipe.system.errors import UserError
from gaupipe.training import job as training
from gaupipe.training.scores import Score, wilson_interval
from stages import evaluate, phase_b
from stages import run as whole_run
from stages.cli.hints import say_other_epoch
from stages.runs import kept_epochs
from stages.runs.directory import RunDirectory
from stages.runs.students import StudentRequest

TINY = [
    "data.train_images=60",
    "data.batch_size=30",
    "train.epochs=7",
    "threads=1",
    "model.args={depth: 1, embed_dim: 16, num_heads: 2}",
]
CURVE = [0.2, 0.5, 0.4, 0.5, 0.3, 0.6, 0.1]
"""Made-up accuracies; the losses are their opposites but for the last, the smallest."""
LOSSES = [1.8, 1.5, 1.6, 1.5, 1.7, 1.4, 0.9]


@pytest.fixture
def seen(monkeypatch):
    """The student's weights after every epoch. Its scores are made up."""
    weights = {}

    def score(model, _batches):
        weights_now = {name: one.clone() for name, one in model.state_dict().items()}
        if len(weights) == score.fails_at:
            score.fails_at = None
            raise RuntimeError("interrupted")
        weights[len(weights) + 1] = weights_now
        return Score(acc=CURVE[len(weights) - 1], loss=LOSSES[len(weights) - 1])

    score.fails_at = None
    monkeypatch.setattr(training, "score_model", score)
    monkeypatch.setattr(training, "interrupt_at", lambda n: setattr(score, "fails_at", n), False)
    return weights


def train(folder: Path, *changes: str) -> list[dict]:
    settings = load("digits_expected", [*TINY, *changes])
    return phase_b.run_request(StudentRequest(settings, folder))


def epoch_of(folder: Path, seen: dict) -> int:
    """The number of the epoch that a saved student has the weights of."""
    saved = load_file(folder / "model.safetensors")
    [number] = [
        number
        for number, weights in seen.items()
        if all(torch.equal(saved[name], weights[name]) for name in saved)
    ]
    return number


def said(folder: Path) -> dict:
    return json.loads((folder / "student.json").read_text())


@pytest.mark.parametrize(
    "settings,student,beside",
    [
        ([], 7, ("best", 6)),
        (["train.keep=best"], 6, ("last", 7)),
        # epoch 4 is as good as epoch 2, not better
        (["train.patience=3"], 5, ("best", 2)),
        (["train.patience=3", "train.keep=best"], 2, ("last", 5)),
        (["train.patience=4"], 7, ("best", 6)),
    ],
)
def test_the_student_is_of_the_epoch_that_the_settings_choose(
    tmp_path, seen, settings, student, beside
):
    metrics = train(tmp_path / "x", *settings)
    assert len(metrics) == (5 if "train.patience=3" in settings else 7)
    assert epoch_of(tmp_path / "x/student", seen) == said(tmp_path / "x")["epoch"] == student
    others = [name for name in ("best", "last") if (tmp_path / "x" / name).exists()]
    assert others == ([] if beside is None else [beside[0]])
    if beside:
        assert epoch_of(tmp_path / "x" / beside[0], seen) == beside[1]


@pytest.mark.parametrize("fails_at", [1, 3, 4])
def test_best_epoch_and_patience_survive_an_interruption(tmp_path, seen, fails_at):
    settings = ["train.patience=3", "train.keep=best", "train.optim.ema=0.5"]
    train(tmp_path / "unbroken", *settings)
    unbroken = dict(seen)
    seen.clear()
    training.interrupt_at(fails_at)
    with pytest.raises(RuntimeError, match="interrupted"):
        train(tmp_path / "x", *settings)
    train(tmp_path / "x", *settings)
    assert len(seen) == len(unbroken) == 5
    assert epoch_of(tmp_path / "x/student", unbroken) == 2
    assert epoch_of(tmp_path / "x/last", unbroken) == 5
    assert said(tmp_path / "x") == said(tmp_path / "unbroken")


def test_a_finished_student_is_chosen_anew(tmp_path, seen):
    train(tmp_path / "x")
    train(tmp_path / "x", "train.keep=best")
    assert epoch_of(tmp_path / "x/student", seen) == 6 and epoch_of(tmp_path / "x/last", seen) == 7
    assert not (tmp_path / "x/best").exists()
    train(tmp_path / "x")
    assert epoch_of(tmp_path / "x/student", seen) == 7 and epoch_of(tmp_path / "x/best", seen) == 6
    assert not (tmp_path / "x/last").exists() and len(seen) == 7


def test_the_commands_say_which_epoch_a_student_is_of(tmp_path, seen, in_process):
    run = RunDirectory(tmp_path / "run")
    settings = load("digits_expected", [*TINY, "train.keep=best"])
    run.path.mkdir()
    run.config.write_text(dump(settings))
    code, _, err = in_process("phase-b", "--run-dir", run.path, "--no-distill")
    assert wilson_interval(0.0, 9)[0] == 0 and wilson_interval(1.0, 9)[1] == 1
    low, high = binomtest(216, 360).proportion_ci(method="wilson")  # the digits to validate on
    shown = f"60.0 % ({100 * low:.1f} to {100 * high:.1f} %), the 95 % interval of 360 images"
    kept = "standard/student is of epoch 6, the best (train.keep=best): val "
    assert code == 0 and f"{kept}{shown}; " in err and "to keep epoch" not in err
    assert evaluate.run(run.path, "standard", plain=True)["epoch"] == 6
    folder = run.student("standard", distilled=False)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    line = whole_run.line("standard, plain", metrics, folder, 360)
    assert (line.model, line.epochs) == ("standard, plain (epoch 6)", 7)
    assert line.val_acc == CURVE[5]
    again = ["phase-b", "--run-dir", run.path, "--no-distill", "--resume", "--set"]
    for keep, epoch in (("last", 7), ("best", 6), ("last", 7)):
        code, _, err = in_process(*again, f"train.keep={keep}")
        assert code == 0 and said(folder)["epoch"] == epoch
    # what the last one says brings back the best
    [line] = [line for line in err.splitlines() if "to keep epoch 6, the best" in line]
    assert in_process(*shlex.split(line.partition(": gaupipe ")[2]))[0] == 0
    assert said(folder)["epoch"] == 6


def test_train_names_itself_as_the_command_that_keeps_another_epoch(tmp_path, seen, in_process):
    run = tmp_path / "run"
    code, _, err = in_process("train", "digits_expected", "--run-dir", run, *sets(*TINY))
    [line] = [line for line in err.splitlines() if "to keep epoch 6, the best" in line]
    command = shlex.split(line.partition(": gaupipe ")[2])
    assert code == 0 and command[0] == "train" and in_process(*command)[0] == 0
    assert said(run / "plain/standard")["epoch"] == 6


@pytest.mark.parametrize("last,advised", [(0.6, False), (0.5, True)])
def test_another_epoch_is_advised_only_if_it_is_better(tmp_path, capfd, last, advised):
    kept = {"epoch": 2, "keep": "last", "best": 1, "last": 2, "sha256": None}
    (tmp_path / "student.json").write_text(json.dumps(kept))
    say_other_epoch(tmp_path, [{"val_acc": 0.6}, {"val_acc": last}])
    assert ("to keep epoch 1, the best" in capfd.readouterr().err) == advised


def test_a_student_whose_saving_was_interrupted_is_not_taken_for_another_epoch(
    tmp_path, seen, monkeypatch
):
    train(tmp_path / "x")
    folder, save = tmp_path / "x", kept_epochs.save_student

    def fails(model, place, **more):
        if place.name == "student":
            raise RuntimeError("interrupted")
        save(model, place, **more)

    monkeypatch.setattr(kept_epochs, "save_student", fails)
    with pytest.raises(RuntimeError, match="interrupted"):
        train(folder, "train.keep=best")
    assert epoch_of(folder / "student", seen) == 7  # student.json speaks of epoch 6
    with pytest.raises(UserError, match=r"is of other weights.*with --resume, or remove"):
        kept_epochs.entry(folder)
    assert not kept_epochs.finished(folder)
    monkeypatch.setattr(kept_epochs, "save_student", save)
    train(folder, "train.keep=best")
    assert epoch_of(folder / "student", seen) == kept_epochs.entry(folder)["epoch"] == 6
    assert kept_epochs.finished(folder) and not kept_epochs.finished(tmp_path)


def test_a_student_and_the_note_of_another_are_refused(tmp_path, seen):
    train(tmp_path / "x")
    assert kept_epochs.entry(tmp_path / "x")["epoch"] == 7
    seen.clear()
    train(tmp_path / "y", "seed=1")
    shutil.copy(tmp_path / "y/student.json", tmp_path / "x")
    with pytest.raises(UserError, match=r"x/student: student.json beside it is of other weights"):
        kept_epochs.entry(tmp_path / "x")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"epoch": 8, "last": 7}', '{"epoch": "7", "last": 7}', '{"last": 7}']
)
def test_a_damaged_student_json_is_not_passed_over(tmp_path, text):
    (tmp_path / "student.json").write_text(text)
    with pytest.raises(
        UserError, match=r"student.json is missing or damaged: continue the training with --resume"
    ):
        kept_epochs.entry(tmp_path)
