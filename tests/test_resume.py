"""Killed at any moment and resumed, a run ends with the metrics and the student of an unbroken
one."""

from pathlib import Path

import pytest
import torch

from arguments import tiny
from gaupipe.settings import Settings
from gaupipe.settings.load import load
from gaupipe.system.errors import UserError
from killing import exit_code, until_it_ends
from runs import results

TINY = tiny(300, 20, 4)
CASES = {
    "memory": [
        "model.stem=conv",
        "phase_a.mode=stochastic",
        "train.optim.ema=0.9",
        "phase_b.gamma=0.2",
        "phase_b.queries=5",
    ],
    "files": [
        "phase_a.optim.ema=0.9",
        "phase_b.warm_start=teacher",
        "train.optim.accumulate=2",
    ],
}


def work(run_dir: Path, settings: Settings) -> None:
    """Runs, or continues."""
    from stages import run

    run.run_all(settings, run_dir)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_like_an_unbroken_one(tmp_path, case):
    settings = load("digits_expected", [*TINY, *CASES[case]])
    assert exit_code(work, tmp_path / "unbroken", settings) == 0
    killed = tmp_path / "killed"
    until_it_ends(lambda kill: exit_code(work, killed, settings, kill=kill), killed, case)
    unbroken = results(tmp_path / "unbroken")
    assert [len(rows) for rows in unbroken.values()] == [4, 4, 4]
    assert results(killed) == unbroken
    students = [
        torch.load(tmp_path / name / "phase_b/standard/checkpoint/state.pt", weights_only=True)[
            "modules"
        ]
        for name in ("unbroken", "killed")
    ]
    other = [name for name in students[0] if not torch.equal(students[0][name], students[1][name])]
    assert not other, f"{other} are not the weights of an unbroken run"


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path):
    from stages import phase_a

    settings = load(
        "digits",
        [
            *TINY,
            "phase_a.optim.lr=1e30",
            "phase_a.optim.clip_grad=null",
            "phase_a.optim.warmup_epochs=3",
            "phase_a.optim.min_lr=1e-5",
        ],
    )
    with pytest.raises(
        UserError, match=r"the loss is (nan|inf|-inf) in epoch \d, step \d+ of 15 \(lr "
    ):
        phase_a.run(settings, tmp_path / "run")
    metrics = results(tmp_path / "run")["phase_a/metrics.jsonl"]
    assert all(row["train_loss"] < 1e30 for row in metrics)
