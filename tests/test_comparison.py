"""The arithmetic of comparisons on made-up curves; which runs are the same run; a tiny
comparison from end to end."""

import contextlib
import csv
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

import store
from arguments import sets
from gaupipe import settings as config
from gaupipe.cli import main
from gaupipe.settings import ExportSettings
from gaupipe.system.errors import UserError
from stages import phase_b
from stages.compare import costs
from stages.compare.cells import BASELINE, apply, default_cells, resolve, sweep_cells
from stages.compare.figures import curves, save
from stages.compare.run import best_trial, check_folder, run_cells, run_trials
from stages.compare.speed import Run, Spread, compare_at, epochs_to
from stages.compare.trainings import Comparison, Training, as_run, as_teacher, digest
from stages.runs.directory import RunDirectory, locked

TINY = [
    "model.args={depth: 1, embed_dim: 16, num_heads: 2}",
    "data.train_images=100",
    "data.batch_size=50",
    "threads=1",
    "phase_a.max_epochs=1",
    "phase_b.epochs=2",
]


def made_up(seed: int, accuracies: list[float], phase_a: int = 0, seconds: float = 2.0) -> Run:
    return Run(
        seed,
        [{"val_acc": accuracy, "seconds": seconds} for accuracy in accuracies],
        [{"epoch": 1 + number, "seconds": 10.0} for number in range(phase_a)],
    )


def test_epochs_to_an_accuracy_count_from_one_to_the_first_that_reaches_it():
    assert epochs_to([0.1, 0.5, 0.4, 0.6], 0.5) == 2
    assert epochs_to([0.1, 0.5, 0.4, 0.6], 0.55) == 4
    assert epochs_to([0.1, 0.5], 0.1) == 1
    assert epochs_to([0.1, 0.5], 0.500001) is None
    assert epochs_to([], 0.1) is None


def test_speed_up_is_taken_seed_by_seed_with_and_without_phase_a():
    reference = [made_up(0, [0.2, 0.4, 0.6, 0.8]), made_up(1, [0.1, 0.3, 0.7, 0.9])]
    cell = [
        made_up(0, [0.5, 0.7, 0.9, 0.9], phase_a=1, seconds=4.0),
        made_up(1, [0.7, 0.8, 0.8, 0.8], phase_a=2, seconds=4.0),
    ]
    row = compare_at(cell, reference, target=0.7)
    assert row["reached"] == 2
    assert row["epochs"] == Spread(1.5, pytest.approx(0.5**0.5))  # 2 and 1, the reference 4 and 3
    assert row["epochs_with_phase_a"].mean == 3  # 3 and 3
    assert row["speedup_epochs"].mean == pytest.approx((4 / 2 + 3 / 1) / 2)
    assert row["speedup_epochs_with_phase_a"].mean == pytest.approx((4 / 3 + 3 / 3) / 2)
    assert row["seconds"].mean == pytest.approx((8 + 4) / 2)
    assert row["seconds_with_phase_a"].mean == pytest.approx((18 + 24) / 2)
    assert row["speedup_seconds_with_phase_a"].mean == pytest.approx((8 / 18 + 6 / 24) / 2)
    assert row["accuracy"].mean == pytest.approx(0.7)


def test_a_share_is_of_the_references_final_accuracy_with_the_same_seed():
    reference = [made_up(0, [0.2, 0.8]), made_up(1, [0.2, 0.4])]
    cell = [made_up(1, [0.39, 0.41]), made_up(0, [0.5, 0.81])]
    assert compare_at(cell, reference, share=1.0)["epochs"].mean == 2
    assert compare_at(cell, reference, share=0.5)["epochs"].mean == 1
    assert compare_at(reference, reference, share=1.0)["speedup_epochs"] == Spread(1.0, 0.0)


def test_never_reached_gives_no_mean_and_no_speed_up():
    reference, cell = [made_up(0, [0.8]), made_up(1, [0.8])], [made_up(0, [0.9]), made_up(1, [0.7])]
    row = compare_at(cell, reference, target=0.8)
    assert row["reached"] == 1
    assert row["epochs"] == row["speedup_epochs"] == row["accuracy"] == Spread(None, None)
    row = compare_at(cell, reference, target=0.65)
    assert row["reached"] == 2 and row["speedup_epochs"].mean == 1
    row = compare_at(cell[:1], [made_up(0, [0.1])], target=0.8)  # the reference never gets there
    assert row["epochs"].mean == 1 and row["speedup_epochs"].mean is None


def test_one_seed_has_no_spread():
    assert Spread.of([3]) == Spread(3, None) and Spread.of([]) == Spread(None, None)


def cells_of(base, *students, tune=True):
    return {cell.name: cell for cell in default_cells(base, list(students), tune=tune)}


def test_the_default_cells_are_the_baselines_the_students_and_the_controls():
    base = config.load("digits", ["phase_b.alpha=0.2", "phase_b.beta=0.1", "phase_b.gamma=0.7"])
    cells = cells_of(base, "standard", "belief2")
    assert list(cells) == [
        BASELINE,
        "plain ViT, ReZero",
        "plain ViT, belief2",
        "distilled standard",
        "distilled belief2",
        "prior alone",
        "no soft labels",
        "shuffled maps",
    ]
    assert len(cells[BASELINE].trials) >= len(cells["distilled standard"].trials) > 1
    chosen = {"distilled standard": {"phase_b.optim.lr": 0.5}}
    settings = {name: resolve(cell, cells, chosen, base) for name, cell in cells.items()}
    assert settings["plain ViT, ReZero"].phase_b.rezero
    assert (
        settings["prior alone"].phase_a.per_image == "none"
        and settings["prior alone"].phase_b.optim.lr == 0.5
    )
    assert settings["no soft labels"].phase_b.alpha == 0 and settings[
        "no soft labels"
    ].phase_b.beta == pytest.approx(0.3)
    assert (
        settings["shuffled maps"].phase_b.shuffle_maps
        and settings["distilled belief2"].phase_b.optim.lr == 0.5
    )
    assert (
        settings["distilled standard"].phase_b.optim.lr == base.phase_b.optim.lr
    )  # its own try is added by the caller


def test_every_try_of_the_default_cells_is_another_run():
    for name in ("digits", "fashion_mnist"):
        base = config.load(name)
        cells = cells_of(base, "standard")
        for cell in cells.values():
            start = resolve(cell, cells, {}, base)
            trials = [apply(start, changes, "") for changes in cell.trials]
            runs = {digest(as_run(trial, 0, baseline=cell.plain)) for trial in trials}
            assert len(runs) == len(cell.trials)
        assert len(cells[BASELINE].trials) == len(cells["distilled"].trials) == 8


def test_the_plain_vit_is_plain_whatever_the_student_is():
    base = config.load(
        "digits",
        [
            "phase_b.student=belief2",
            "phase_b.attention_options={zz: false}",
            "phase_b.rezero=true",
            "phase_b.match_params=true",
        ],
    )
    cells = cells_of(base, "belief2", "attentionx")
    settings = {
        name: as_run(resolve(cell, cells, {}, base), 0, baseline=cell.plain).phase_b
        for name, cell in cells.items()
    }
    reference = settings[BASELINE]
    assert not reference.rezero and not reference.match_params
    assert not reference.attention_options
    assert settings["plain ViT, ReZero"].rezero and settings[
        "plain ViT, belief2"
    ].attention_options == {"zz": False}
    assert (
        settings["distilled belief2"].attention_options == {"zz": False}
        and settings["distilled belief2"].rezero
    )
    assert (
        settings["distilled attentionx"].attention_options
        == {}
        == settings["plain ViT, attentionx"].attention_options
    )
    assert settings[BASELINE].optim == base.baseline.optim != settings["distilled belief2"].optim


def test_the_controls_fit_settings_without_a_prior():
    base = config.load("cifar10_atto")
    cells = cells_of(base, "standard")
    assert resolve(cells["prior alone"], cells, {}, base).phase_a.prior


def test_runs_are_the_same_where_what_differs_means_nothing_to_them():
    base = config.load("digits")
    other = config.load(
        "digits",
        [
            "phase_b.gamma=0.5",
            "phase_b.feature_queries=0.5",
            "phase_a.mode=stochastic",
            "threads=1",
            "device=cpu",
        ],
    )
    assert digest(as_run(base, 0, baseline=True)) == digest(as_run(other, 0, baseline=True))
    assert digest(as_run(base, 0, baseline=False)) != digest(as_run(other, 0, baseline=False))
    assert digest(as_run(base, 0, baseline=True)) != digest(as_run(base, 1, baseline=True))
    alone, shuffled = (
        config.load("digits", ["phase_a.per_image=none", f"phase_b.shuffle_maps={on}"])
        for on in ("no", "yes")
    )
    assert digest(as_run(alone, 0, baseline=False)) == digest(as_run(shuffled, 0, baseline=False))
    epochs = config.load("digits", ["phase_b.epochs=3"])
    assert digest(as_teacher(base)) == digest(as_teacher(epochs)) != digest(as_teacher(other))
    assert as_run(base, 0, baseline=True).phase_b.optim == base.baseline.optim


OLDER = {
    "data": {"name": "fashion_mnist", "train_images": 20000, "workers": 3},
    "threads": 2,
    "model": {"init": "mimetic", "args": {"depth": 6}},
    "phase_a": {
        "stop_accuracy": 0.9,
        "rows": {"lr": 0.004},
        "compression": {"embedding": 32, "hidden": 128},
    },
    "phase_b": {
        "student": "belief2",
        "attention_options": {"zz": False},
        "gamma": 0.5,
        "gamma_epochs": 3,
        "shuffle_maps": True,
        "optim": {"lr": 0.004},
    },
    "baseline": {"optim": {"lr": 0.002}},
}


@pytest.mark.parametrize(
    "baseline, kind, encoding, student, teacher, maps",
    [
        (True, "gaussian", "float16", "6d930c3a54a9", "4ae9c3c047b8", "maps.zarr"),
        (False, "gaussian", "float16", "ba3243950f48", "ce42dcef61ef", "maps.zarr"),
        (False, "gaussian", "uint8", "cc1a8e19c9dc", "ce42dcef61ef", "maps-gaussian-uint8.zarr"),
        (
            False,
            "embedding",
            "float16",
            "d3cd5aedc3af",
            "ce42dcef61ef",
            "maps-embedding-float16.zarr",
        ),
    ],
)
def test_a_run_lies_where_version_0_1_put_it(baseline, kind, encoding, student, teacher, maps):
    training = Training(
        label="",
        settings=as_run(config.parse(OLDER, "test"), 3, baseline=baseline),
        baseline=baseline,
        export=ExportSettings(kind=kind, encoding=encoding),
        root=Path("c"),
        data_sha256="ab" * 32,
    )
    assert training.folder == Path("c/students") / student
    assert training.teacher.path == Path("c/teachers") / teacher
    assert training.maps == Path("c/teachers") / teacher / maps


@pytest.mark.parametrize(
    "changes, student, teacher",
    [
        (["phase_a.per_image=none"], "6c3c9d94219a", "f30869bc3866"),
        (
            ["phase_a.per_image=embedding", "phase_a.compression={embedding: 32, hidden: 128}"],
            "8878feacea0f",
            "7202d8924e6b",
        ),
        (["phase_a.per_image=table"], "07d2af220add", "62e5c83cbc62"),
    ],
)
def test_a_run_lies_where_the_older_names_of_its_settings_put_it(changes, student, teacher):
    """As named by a version that knew ``residual`` and no ``per_image``."""
    settings = as_run(config.load("digits", changes), 1, baseline=False)
    assert (digest(settings, "x"), digest(as_teacher(settings), "x")) == (student, teacher)


def swept(entries, base=None):
    cells = default_cells(base or config.load("digits"), ["standard"])
    return sweep_cells(entries, "mine.yaml", cells)


@pytest.mark.parametrize(
    "entries,message",
    [
        ({"a": 1}, "a sweep is a list"),
        ([], "a sweep is a list"),
        ([3], "a sweep is a list"),
        ([{1: 2}], "valid string"),
        ([{"kind": "tall"}], "'dense', 'prior', 'topk' or 'mixture'"),
        ([{"plain": "perhaps"}], "plain"),
        ([{"name": 5}], "name"),
        ([{"tries": {"phase_b.epochs": 3}}], "tries"),
        ([{"tries": None}], "tries"),
        ([{"like": ["a"]}], "like"),
        ([{"trials": 3}], "trials"),
        ([{"trials": [], "tries": []}], "tries"),
        ([{"like": "b"}], "no such cell"),
        ([{"seed": 4}], "--seeds"),
        ([{"name": "distilled"}], "two cells are called"),
        ({"cells": [{"phase_b.epochs": 3}]}, "'plain: true'"),
        ({"plain": "yes", "cells": [{"phase_b.epochs": 3}]}, "'plain: true'"),
        ({"plain": True, "cells": []}, "'plain: true'"),
        ({"plain": True, "cells": [{"name": "a", "plain": False}]}, "no cell has a teacher"),
        ({"plain": True, "cells": [{"like": "distilled"}]}, "no such cell"),
    ],
)
def test_a_wrong_sweep_is_refused_in_one_line(entries, message):
    with pytest.raises(UserError, match=message) as refused:
        swept(entries)
    assert "\n" not in str(refused.value)


def test_the_older_name_of_trials_is_read():
    changes = [{"phase_b.optim.lr": 0.1}, {"phase_b.optim.lr": 0.2}]
    newer, older = (swept([{"name": "a", key: changes}])[-1] for key in ("trials", "tries"))
    assert newer == older and older.trials == tuple(changes)


def test_an_entry_inherits_plain_from_the_cell_named_in_like():
    cells = {
        cell.name: cell
        for cell in swept(
            [
                {"name": "longer", "plain": True, "phase_b.epochs": 3},
                {"like": "longer", "phase_b.optim.lr": 0.1},
                {"encoding": "uint8"},
                {"like": None, "phase_b.gamma": 2},
            ]
        )
    }
    assert cells["longer"].like == BASELINE and cells["lr 0.1"].plain
    assert cells["encoding uint8"].like == "distilled" and not cells["encoding uint8"].plain
    base = config.load("digits")
    best = {"distilled": {"phase_b.optim.lr": 9}, BASELINE: {"model.init": "mimetic"}}
    assert resolve(cells["gamma 2"], cells, best, base).phase_b.optim == base.phase_b.optim
    assert resolve(cells["encoding uint8"], cells, best, base).phase_b.optim.lr == 9
    assert resolve(cells["lr 0.1"], cells, best, base).model.init == "mimetic"


def test_a_sweep_without_teachers_has_plain_cells_alone():
    entries = [{"phase_b.student": "xsa"}, {"name": "b", "like": "student xsa"}]
    content = {"plain": True, "cells": [*entries, {"name": "c", "like": None}]}
    base = config.load("digits", ["phase_b.rezero=true"])
    cells = sweep_cells(content, "mine.yaml", default_cells(base, ["standard"]))
    assert [cell.name for cell in cells] == [BASELINE, "student xsa", "b", "c"]
    assert all(cell.plain for cell in cells)
    by_name = {cell.name: cell for cell in cells}
    settings = {name: resolve(cell, by_name, {}, base).phase_b for name, cell in by_name.items()}
    assert settings["b"].student == "xsa" and not settings["b"].rezero and settings["c"].rezero


def test_models_are_timed_in_turns(monkeypatch):
    calls = []
    monkeypatch.setattr(costs, "ROUNDS", 4)
    monkeypatch.setattr(costs, "seconds_of", lambda work, device: work() or len(calls))
    works = [lambda: calls.append("a"), lambda: calls.append("b")]
    times = costs.in_turns(works, torch.device("cpu"))
    assert "".join(calls) == "ab" + "baab" * 2  # each once to warm up
    assert times == [[4, 5, 8, 9], [3, 6, 7, 10]]
    assert costs.ratios([4.0, 9.0], [2.0, 3.0]) == [2, 3]


@pytest.mark.parametrize("text", ["", "[", "[]", "3", '{"here": 3}', '{"here": {"a": {"b": 1}}}'])
def test_damaged_costs_are_measured_again(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    assert costs.read_costs(tmp_path / "costs.json", "here") == {}


def test_a_slow_model_is_timed_a_few_times(monkeypatch):
    monkeypatch.setattr(costs, "ROUNDS", 10)
    monkeypatch.setattr(costs, "LIMIT", -1)
    monkeypatch.setattr(costs, "seconds_of", lambda work, device: 1.0)
    assert costs.in_turns([lambda: None], torch.device("cpu")) == [[1.0] * costs.FEWEST_ROUNDS]


class MadeUpWorkers:
    """Returns for each training a run that is as accurate as its rate is high."""

    def __init__(self):
        self.rounds = []

    def train(self, trainings, failures):
        trainings = list(trainings)
        self.rounds.append(trainings)
        return {
            training.folder: made_up(training.settings.seed, [training.settings.phase_b.optim.lr])
            for training in trainings
            if training.folder not in failures
        }


def test_trials_build_on_the_best_trial_of_the_cell_named_in_like(tmp_path):
    rates = [{"phase_b.optim.lr": rate} for rate in (0.1, 0.3, 0.2)]
    gammas = [{"phase_b.gamma": gamma} for gamma in (0.4, 0.6)]
    base = config.load("digits")
    cells = sweep_cells(
        [{"name": "a", "trials": rates}, {"name": "b", "like": "a", "trials": gammas}],
        "mine.yaml",
        default_cells(base, ["standard"], tune=False),
    )
    comparison = Comparison(settings=base, cells=cells, seeds=[5, 6], run_dir=tmp_path, test=False)
    workers = MadeUpWorkers()
    run_trials(comparison, workers)
    first, second = workers.rounds
    assert [training.settings.phase_b.optim.lr for training in first] == [0.1, 0.3, 0.2]
    assert {training.settings.seed for training in first + second} == {5}
    assert [training.settings.phase_b.gamma for training in second] == [0.4, 0.6]
    assert [training.settings.phase_b.optim.lr for training in second] == [0.3, 0.3]
    assert comparison.best_trials == {"a": rates[1], "b": gammas[0]}  # equal ones: the first

    run_cells(comparison, workers)
    trainings = {name: entries[1].settings for name, entries in comparison.trainings.items()}
    assert trainings["a"].phase_b.optim.lr == trainings["b"].phase_b.optim.lr == 0.3
    assert trainings["b"].phase_b.gamma == 0.4 and trainings["b"].seed == 6
    assert trainings["distilled"].phase_b.optim.lr == base.phase_b.optim.lr


def test_a_trial_that_failed_is_worse_than_any():
    trials = [({"x": 1}, None), ({"x": 2}, 0.0), ({"x": 3}, None)]
    assert best_trial(trials) == {"x": 2}


@pytest.mark.parametrize(
    "names, is_comparison",
    [
        ([], True),
        (["lock"], True),  # killed at once
        (["lock", "students", "compare.json"], True),
        (["lock", "teachers"], True),
        (["lock", "costs.json", "compare.json"], True),  # its trainings were removed
        (["comparison.lock", "students", "compare.json"], True),  # of an earlier version
        (["students"], False),
        (["lock", "config.yaml", "phase_a"], False),  # a run
        (["lock", "zarr.json"], False),
    ],
)
def test_the_folder_of_a_comparison_is_known_by_its_lock(names, is_comparison, tmp_path):
    for name in names:
        (tmp_path / name).touch()
    if is_comparison:
        check_folder(tmp_path)
    else:
        with pytest.raises(UserError, match="holds no comparison"):
            check_folder(tmp_path)


def test_a_second_comparison_in_the_folder_is_refused(in_process, tmp_path):
    with locked(tmp_path / "c", "comparison"):
        code, _, err = in_process("compare", "digits", "--no-tune", "--run-dir", tmp_path / "c")
        assert (code, err.count("\n")) == (2, 1) and "is using this comparison" in err, err
        assert [path.name for path in (tmp_path / "c").iterdir()] == ["lock"]


def test_a_plain_cell_changes_the_baselines_optimizer_and_epochs():
    """Which a configuration may name apart from phase B's."""
    base = config.load(
        "digits",
        [
            "phase_b.epochs=6",
            "baseline.epochs=9",
            "phase_b.optim.lr=3.0e-3",
            "baseline.optim.lr=1e-3",
        ],
    )
    cells = swept(
        [
            {"name": "longer", "plain": True, "phase_b.epochs": 24},
            {"name": "longest", "plain": True, "baseline.epochs": 30},
            {"name": "rate", "plain": True, "like": None, "phase_b.optim.lr": 0.1},
            {"name": "as it is", "plain": True, "like": None},
            {"name": "student", "phase_b.gamma": 0.5},
        ],
        base,
    )
    by_name = {cell.name: cell for cell in cells}
    found = {}
    for cell in cells:
        phase = as_run(resolve(cell, by_name, {}, base), 0, baseline=cell.plain).phase_b
        found[cell.name] = (phase.epochs, phase.optim.lr)
    assert found[BASELINE] == found["as it is"] == (9, 1e-3)
    assert (found["longer"], found["longest"]) == ((24, 1e-3), (30, 1e-3))
    assert found["rate"] == (9, 0.1)
    assert found["student"] == (6, 3e-3)
    trial = apply(resolve(by_name["rate"], by_name, {}, base), {"phase_b.optim.lr": 0.2}, "x")
    assert as_run(trial, 0, baseline=True).phase_b.optim.lr == 0.2


def test_a_figure_leaves_out_losses_that_are_no_numbers(tmp_path):
    nan = float("nan")
    run = {"folder": "a", "val_loss": [nan, nan], "val_acc": [0.1, 0.4], "loss_hard": [1.9, nan]}
    run |= {"seconds": [3.0, 2.0], "phase_a_seconds": 4.0}
    cells = [{"cell": "plain ViT", "plain": True, "runs": [run]}]
    results = {"data": "digits", "seeds": [0], "reference": "plain ViT", "cells": cells}
    save(curves(results), tmp_path / "a")
    assert (tmp_path / "a.png").stat().st_size


def test_a_figure_of_the_same_results_is_the_same_file(tmp_path):
    run = {"folder": "a", "val_loss": [2.0, 1.0], "val_acc": [0.1, 0.4], "loss_hard": [1.9, 0.8]}
    run |= {"seconds": [3.0, 2.0], "phase_a_seconds": 4.0}
    cells = [{"cell": "plain ViT", "plain": True, "runs": [run]}]
    results = {"data": "digits", "seeds": [0], "reference": "plain ViT", "cells": cells}
    for name in ("a", "b"):
        save(curves(results), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.fixture(scope="module", autouse=True)
def few_turns():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder of a finished comparison, its sweep, and what its command printed."""
    folder = tmp_path_factory.mktemp("compare") / "c"
    sweep = folder.parent / "mine.yaml"
    sweep.write_text(
        "- {name: plain longer, plain: true, phase_b.epochs: 3}\n"
        "- {phase_b.gamma: 0.5, encoding: uint8}\n"
        "- {name: tuned, tries: [{phase_b.optim.lr: 5.0e-4}, {phase_b.optim.lr: 3.0e-3}]}\n"
    )
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "argv", ["gaupipe", *compare(folder, "--sweep", sweep, "--jobs", 2)])
        with pytest.raises(SystemExit) as exit_:
            main()
    assert not exit_.value.code
    return folder, sweep, printed.getvalue()


def compare(folder, *arguments, seeds="0,1"):
    """The command's arguments."""
    options = ["--run-dir", folder, "--seeds", seeds, "--no-tune"]
    return [*map(str, ["compare", "digits", *options, *arguments]), *sets(*TINY)]


def test_a_tiny_comparison(compared):
    folder, _, printed = compared
    results = json.loads((folder / "mine.json").read_text())
    names = [cell["cell"] for cell in results["cells"]]
    assert names == [
        BASELINE,
        "plain ViT, ReZero",
        "distilled",
        "prior alone",
        "no soft labels",
        "shuffled maps",
        "plain longer",
        "gamma 0.5, encoding uint8",
        "tuned",
    ]
    assert all(name in printed for name in names)
    assert max(map(len, printed.splitlines())) <= 80
    by_name = {cell["cell"]: cell for cell in results["cells"]}
    assert [len(run["val_acc"]) for run in by_name["plain longer"]["runs"]] == [3, 3]
    for cell in results["cells"]:
        runs, last = cell["runs"], cell["at"][-1]
        assert [run["seed"] for run in runs] == [0, 1] and last["share"] == 1
        assert cell["final"]["val_acc"]["mean"] == pytest.approx(
            sum(run["val_acc"][-1] for run in runs) / 2
        )
        goals = [run["val_acc"][-1] for run in by_name[BASELINE]["runs"]]
        reached = [epochs_to(run["val_acc"], goal) for run, goal in zip(runs, goals, strict=True)]
        assert last["reached"] == sum(epochs is not None for epochs in reached)
        if None not in reached:
            assert last["epochs"]["mean"] == pytest.approx(sum(reached) / 2)
            assert last["epochs_with_phase_a"]["mean"] == pytest.approx(
                sum(reached) / 2 + (not cell["plain"])
            )
    curves = {name: [run["val_loss"] for run in cell["runs"]] for name, cell in by_name.items()}
    assert (
        curves["distilled"] == curves["no soft labels"]
    )  # the digits' settings have none: one run stands for both
    feature_losses = {
        name: [
            json.loads(line)["loss_feat"]
            for run in by_name[name]["runs"]
            for line in (folder / run["folder"] / "metrics.jsonl").open()
        ]
        for name in ("distilled", "shuffled maps", "prior alone")
    }
    assert len({*map(tuple, feature_losses.values())}) == 3
    trials = by_name["tuned"]["tries"]
    assert [trial["settings"]["phase_b.optim.lr"] for trial in trials] == [5e-4, 3e-3]
    (taken,) = (trial for trial in trials if trial["taken"])
    assert taken["val_acc"] == max(trial["val_acc"] for trial in trials)
    assert taken["val_acc"] == by_name["tuned"]["runs"][0]["val_acc"][-1]
    assert "Trials of tuned" in printed
    with (folder / "mine.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * len(names)
    for cell in results["cells"]:
        found = cell["costs"]
        assert found["parameters"] == parameters(folder / cell["runs"][0]["folder"]), cell["cell"]
        assert found["step_seconds"] > 0 and found["images_per_s"] > 0, cell["cell"]
    assert by_name[BASELINE]["costs"]["step_ratio"] == 1 and "images / s" in printed
    assert int(rows[0]["parameters"]) == by_name[BASELINE]["costs"]["parameters"]
    final = by_name[BASELINE]["final"]
    assert float(rows[0]["final_val_acc_mean"]) == pytest.approx(final["val_acc"]["mean"])
    for name in ("mine", "key_selection"):
        assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG" and "<svg" in (
            folder / f"{name}.svg"
        ).read_text()


def parameters(folder: Path) -> int:
    """How many numbers the weights of a student have."""
    weights = load_file(folder / "student" / "model.safetensors")
    return sum(array.size for array in weights.values())


def test_a_sweep_of_plain_runs_trains_no_teacher(in_process, tmp_path):
    folder, sweep = tmp_path / "c", tmp_path / "plain.yaml"
    sweep.write_text(
        "plain: true\ncells:\n- {name: no FFN, phase_b.student: belief2, "
        "phase_b.model_args: {mlp_ratio: 0}}\n- {name: diverges, phase_b.optim.lr: 1.0e+30, "
        "phase_b.optim.clip_grad: null}\n"
    )
    code, out, err = in_process(*compare(folder, "--sweep", sweep, seeds="0"))
    assert code == 0, err
    assert {path.name for path in folder.iterdir()} == {
        *("lock", "students", "costs.json"),
        *(f"plain.{kind}" for kind in ("json", "csv", "png", "svg")),
    }
    assert "with A" not in out and "phase A" not in out
    results = json.loads((folder / "plain.json").read_text())
    cells = {cell["cell"]: cell for cell in results["cells"]}
    assert list(cells) == [BASELINE, "no FFN", "diverges"]
    assert cells["no FFN"]["costs"]["parameters"] < cells[BASELINE]["costs"]["parameters"]
    assert cells["diverges"]["costs"]["parameters"] == cells[BASELINE]["costs"]["parameters"]
    assert cells["diverges"]["failed"] and cells["diverges"]["costs"]["step_seconds"] is None
    # what was measured once is printed again
    again = in_process(*compare(folder, "--sweep", sweep, seeds="0"))
    assert again[1] == out and json.loads((folder / "plain.json").read_text()) == results


def test_finished_cells_are_not_run_again(compared, in_process):
    folder, sweep, _ = compared
    (folder / "lock").rename(folder / "comparison.lock")  # as an earlier version left the folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("state.pt")}
    code, out, err = in_process(
        *compare(folder, "--sweep", sweep, "--jobs", 2, "--targets", "0.05,0.99")
    )
    assert code == 0 and "seed" not in err
    assert "To 5.0 % accuracy" in out and "never" in out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("state.pt")} == before
    _, out, _ = in_process(*compare(folder, "--row", BASELINE, "--json"))
    assert [cell["cell"] for cell in json.loads(out)["cells"]] == [BASELINE]
    other = shutil.copy(
        sweep, folder.parent / "few.yaml"
    )  # its tables leave those of the other tests alone
    selected = ["--row", "plain longer", "--row", "shuffled maps"]
    code, out, err = in_process(*compare(folder, "--sweep", other, *selected, "--json"))
    assert code == 0 and "seed" not in err
    names = [cell["cell"] for cell in json.loads(out)["cells"]]
    assert names == [BASELINE, "distilled", "shuffled maps", "plain longer"]
    teachers, students, tuned = 4, 14, 3  # one of eight cells is the same runs as another
    assert len(before) == teachers + students + tuned


def test_students_that_draw_the_same_views_share_a_store(in_process, tmp_path):
    folder, sweep = tmp_path / "c", tmp_path / "views.yaml"
    sweep.write_text(
        "- {name: xsa, phase_b.student: xsa}\n"
        "- {name: flips, augment.flip: true}\n"
        "- {name: the images themselves, export.views: null}\n"
    )
    views = ["phase_a.teacher=vit", "phase_b.alpha=0.0", "augment.crop_padding=1"]
    rows = [part for name in ("xsa", "flips", "the images themselves") for part in ("--row", name)]
    command = compare(folder, "--sweep", sweep, *rows, *sets(*views, "export.views=2"))
    code, _, err = in_process(*command)
    assert code == 0, err
    cells = {
        cell["cell"]: cell for cell in json.loads((folder / "views.json").read_text())["cells"]
    }
    assert {name: len(cell["runs"]) for name, cell in cells.items()} == dict.fromkeys(
        [BASELINE, "distilled", "xsa", "flips", "the images themselves"], 2
    )
    drawn = []
    for teacher in (path for path in (folder / "teachers").iterdir() if path.is_dir()):
        stores = {path: store.open(path).schema for path in teacher.glob("*.zarr")}
        assert sorted(schema.views for schema in stores.values()) == [1, 2, 2]
        seed = RunDirectory(teacher).settings().seed
        views = [schema.extra["views"] for schema in stores.values() if schema.views == 2]
        assert [one["seed"] for one in views] == [seed, seed]
        assert {one["augment"]["flip"] for one in views} == {False, True}
        drawn.append(seed)
    assert sorted(drawn) == [0, 1]
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*/*")}
    code, _, err = in_process(*command)
    assert code == 0, err
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*/*/*")}


def test_a_folder_with_files_of_two_trainings_is_refused(compared, in_process, tmp_path):
    folder = shutil.copytree(compared[0], tmp_path / "c")
    metrics = next(folder.glob("students/*/metrics.jsonl"))
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    code, _, err = in_process(*compare(folder, "--sweep", compared[1]))
    assert (code, err.count("\n")) == (2, 1), err
    assert str(metrics.parent) in err and "metrics.jsonl has 1" in err


def test_a_teacher_without_a_head_and_with_other_heads_counts_no_epoch(in_process, tmp_path):
    """What is no setting of a teacher does not keep a comparison from its students."""
    vit = config.load("digits", [*TINY, "phase_b.student=standard"])
    phase_b.train_student(vit, tmp_path / "vit", teacher=None)
    folder = tmp_path / "c"
    changes = [
        f"phase_a.teacher=local-dir:{tmp_path / 'vit' / 'student'}",
        "phase_a.teacher_args={num_classes: 0}",
        "phase_b.model_args={num_heads: 1}",
        "phase_b.mean_heads=true",
        "phase_b.alpha=0.0",
    ]
    code, out, err = in_process(*compare(folder, "--row", "distilled", *sets(*changes), seeds="0"))
    assert code == 0 and "failed" not in out, out
    assert "teacher, 0 epochs" in err, err
    [found] = {*folder.glob("*.json")} - {folder / "costs.json"}
    results = json.loads(found.read_text())
    distilled = {cell["cell"]: cell for cell in results["cells"]}["distilled"]
    assert [run["phase_a_epochs"] for run in distilled["runs"]] == [0]


def test_mistakes_give_one_line_and_write_nothing(in_process, tmp_path):
    wrong, unknown = tmp_path / "wrong.yaml", tmp_path / "unknown.yaml"
    wrong.write_text("- {kind: prior, encoding: uint8}")
    unknown.write_text("- {phase_b.gama: 1}")
    for arguments, message in [
        (["--seeds", "0,x"], "--seeds"),
        (["--students", "standart"], "standart"),
        (["--targets", "84"], "from 0 to 1"),
        (["--sweep", "none"], "loss_weights"),
        (["--test"], "test split"),
        (["--set", "phase_a.optim.name=adamv"], "adamv"),
        (["--sweep", wrong], "--kind prior"),
        (["--row", "prior"], "prior alone"),
        (["--sweep", tmp_path / "costs.yaml"], "rename the sweep"),
        (["--sweep", unknown], "did you mean 'phase_b.gamma'"),
    ]:
        code, _, err = in_process("compare", "digits", "--run-dir", tmp_path / "new", *arguments)
        assert (code, err.count("\n")) == (2, 1) and message in err, err
        assert not (tmp_path / "new").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    code, _, err = in_process("compare", "digits", "--run-dir", tmp_path / "full")
    assert (code, err.count("\n")) == (2, 1) and "holds no comparison" in err


def test_a_killed_comparison_goes_on_and_ends_as_an_unbroken_one(compared, in_process, tmp_path):
    folder, sweep, _ = compared
    call = compare(tmp_path / "c", "--sweep", sweep, seeds="0")
    process = subprocess.Popen(
        [sys.executable, "-m", "gaupipe.cli", *call, "--jobs", "2"],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("c/students/*/student"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)  # its workers have the same stdout, and have ended too
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "c" / "mine.json").exists()
    code, _, err = in_process(*call)
    assert code == 0, err
    resumed = json.loads((tmp_path / "c" / "mine.json").read_text())
    unbroken = json.loads((folder / "mine.json").read_text())
    for cell, other in zip(resumed["cells"], unbroken["cells"], strict=True):
        (run,) = cell["runs"]
        assert run["val_loss"] == other["runs"][0]["val_loss"]
