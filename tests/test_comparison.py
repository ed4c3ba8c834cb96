"""The arithmetic of comparisons on made-up curves; which runs are the same run; a tiny
comparison from end to end."""

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scipy.stats import ttest_1samp

import store
from arguments import sets, tiny
from conftest import run_main
from gaupipe.data.splits import load_data
from gaupipe.distillation.student import build_student
from gaupipe.settings import load as config
from gaupipe.settings.sections import Scope
from gaupipe.system.errors import UserError
from stages import phase_b
from stages.compare.cells import BASELINE, apply, default_cells, resolve, sweep_cells
from stages.compare.differences import Difference, corrected, front
from stages.compare.figures import draw
from stages.compare.passages import Run, Spread, compare_at, epochs_to
from stages.compare.run import check_folder, run_cells, run_trials
from stages.compare.trainings import Comparison, as_run, as_teacher, digest
from stages.runs.directory import RunDirectory, locked

TINY = [*tiny(100, 50, 2, depth=1), "phase_a.max_epochs=1"]


def made_up(seed: int, accuracies: list[float], phase_a: int = 0) -> Run:
    metrics = [{"val_acc": accuracy} for accuracy in accuracies]
    return Run(seed, metrics, {}, [{"epoch": 1 + number} for number in range(phase_a)], {})


def test_epochs_to_an_accuracy_count_from_one_to_the_first_that_reaches_it():
    for curve, accuracy, epochs in [
        ([0.1, 0.5, 0.4, 0.6], 0.5, 2),
        ([0.1, 0.5, 0.4, 0.6], 0.55, 4),
        ([0.1, 0.5], 0.1, 1),
        ([0.1, 0.5], 0.500001, None),
        ([], 0.1, None),
    ]:
        assert epochs_to(curve, accuracy) == epochs
    assert Spread.of([3]) == Spread(3, None) and Spread.of([]) == Spread(None, None)


def test_speed_up_is_taken_seed_by_seed_with_and_without_phase_a():
    reference = [made_up(0, [0.2, 0.4, 0.6, 0.8]), made_up(1, [0.1, 0.3, 0.7, 0.9])]
    cell = [made_up(0, [0.5, 0.7, 0.9, 0.9], phase_a=1), made_up(1, [0.7, 0.8], phase_a=2)]
    row = compare_at(cell, reference, target=0.7)
    assert row["reached"] == 2
    assert row["epochs"] == Spread(1.5, pytest.approx(0.5**0.5))  # 2 and 1, the reference 4 and 3
    assert row["epochs_with_phase_a"].mean == 3  # 3 and 3
    assert row["speedup"].mean == pytest.approx((4 / 2 + 3 / 1) / 2)
    assert row["speedup_with_phase_a"].mean == pytest.approx((4 / 3 + 3 / 3) / 2)
    # a share is of the final accuracy with the same seed
    cell = [made_up(1, [0.39, 0.91]), made_up(0, [0.5, 0.81])]
    means = [compare_at(cell, reference, share=share)["epochs"].mean for share in (1.0, 0.4)]
    assert means == [2, 1]
    # the reference has its own first passage, here before its last epoch
    early = [made_up(0, [0.2, 0.9, 0.8])]
    assert compare_at(early, early)["epochs"].mean == 2
    assert compare_at([made_up(0, [0.8])], early)["speedup"].mean == 2


def test_never_reached_gives_no_mean_and_no_speed_up():
    reference, cell = [made_up(0, [0.8]), made_up(1, [0.8])], [made_up(0, [0.9]), made_up(1, [0.7])]
    row = compare_at(cell, reference, target=0.8)
    assert row["reached"] == 1
    assert row["epochs"] == row["speedup"] == Spread(None, None)
    assert compare_at(cell, reference, target=0.65)["speedup"].mean == 1
    row = compare_at(cell[:1], [made_up(0, [0.1])], target=0.8)  # the reference never gets there
    assert row["epochs"].mean == 1 and row["speedup"].mean is None


def test_differences_have_students_interval_and_p():
    draw = np.random.default_rng(0)
    for count in (2, 3, 10):
        values = draw.normal(0.01, 0.02, count)
        difference, test = Difference.of(list(values)), ttest_1samp(values, 0)
        assert difference.mean == pytest.approx(values.mean())
        ends = test.confidence_interval()
        assert [difference.low, difference.high] == pytest.approx([*ends])
        assert difference.p == pytest.approx(test.pvalue)
    # higher with every one of three seeds is no evidence
    assert Difference.of([0.01, 0.002, 0.03]).p > 0.05
    assert Difference.of([0.01]) == Difference(0.01)
    assert Difference.of([0.3 - 0.2, 0.2 - 0.1]).p is None  # one image more with both seeds


def test_holms_correction_is_within_the_table_and_carries_the_words():
    ps = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.2, "one seed": None}
    table = corrected({name: Difference(0.1, p=p) for name, p in ps.items()})
    # 4 x .01; 3 x .03; at least as much as before it: 2 x .04 -> .09; 1 x .2
    expected = {"a": 0.04, "c": 0.09, "b": 0.09, "d": 0.2}
    assert {name: table[name].holm for name in expected} == pytest.approx(expected)
    words = [table[name].verdict for name in ps]
    assert words == ["confirmed", "supported", "supported", "not decided", "not decided"]
    assert corrected({"a": Difference(1, p=0.7), "b": Difference(1, p=0.6)})["a"].holm == 1


def test_a_front_is_the_best_accuracy_for_as_much():
    costs_of, accuracies = [8.0, 2.0, 4.0, 4.0], [0.7, 0.5, 0.4, 0.6]
    expected = {1.0: None, 2.0: 0.5, 4.0: 0.6, 8.0: 0.7, 100.0: 0.7, 32**0.5: 0.65, 8**0.5: 0.55}
    for cost, accuracy in expected.items():
        assert front(costs_of, accuracies, cost) == (accuracy and pytest.approx(accuracy))
    assert front([1.0, 2.0], [0.6, 0.5], 2.0) == 0.6  # a worse training costs nobody anything


def products_of(vit, tokens: int) -> int:
    """Multiply-adds of a forward pass of an image, by the shapes of its matrices: each linear layer
    once a token, the head once, the patches once, and two products of all pairs of tokens."""
    count = vit.head.weight.numel() + tokens * vit.patch_embed.proj.weight.numel()
    for block in vit.blocks:
        layers = [part for part in block.modules() if isinstance(part, torch.nn.Linear)]
        count += tokens * sum(layer.weight.numel() for layer in layers)
        count += 2 * tokens**2 * vit.embed_dim
    return count


def phases_of(base, *students, best=None):
    """By default cell its resolved settings, and those of its phase B, without trials."""
    cells = {cell.name: cell for cell in default_cells(base, students, tune=False)}
    settings = {name: resolve(cell, cells, best or {}, base) for name, cell in cells.items()}
    return settings, {
        name: as_run(each, 0, baseline=cells[name].plain).phase_b for name, each in settings.items()
    }


def test_the_default_cells_are_the_baselines_the_students_and_the_controls():
    base = config.load("digits", ["phase_b.alpha=0.2", "phase_b.beta=0.1", "phase_b.gamma=0.7"])
    best = {"distilled standard": {"phase_b.optim.lr": 0.5}}
    settings, phases = phases_of(base, "standard", "belief2", best=best)
    baselines, students = [BASELINE, "plain ViT, belief2"], ["distilled standard"]
    others = ["distilled belief2", "shuffled maps", "prior alone", "no soft labels"]
    assert list(phases) == [*baselines, *students, *others]
    assert {phases[name].optim.lr for name in others} == {0.5}
    assert phases["distilled standard"].optim == base.phase_b.optim  # the caller adds its own trial
    assert settings["prior alone"].phase_a.per_image == "none"
    assert phases["shuffled maps"].shuffle_maps and phases["no soft labels"].alpha == 0
    assert phases["no soft labels"].beta == pytest.approx(0.3)
    without_prior, _ = phases_of(config.load("cifar10_atto"), "standard")
    assert without_prior["prior alone"].phase_a.prior


def test_the_plain_vit_is_plain_whatever_the_student_is():
    options = {"zz": False}
    changes = ["student=belief2", f"attention_options={options}", "model_args={rezero: true}"]
    base = config.load("digits", [f"phase_b.{one}" for one in [*changes, "match_params=true"]])
    _, phases = phases_of(base, "belief2", "attentionx")
    reference, student = phases[BASELINE], phases["distilled belief2"]
    assert not (reference.model_args or reference.match_params or reference.attention_options)
    assert phases["plain ViT, belief2"].attention_options == student.attention_options == options
    others = phases["distilled attentionx"], phases["plain ViT, attentionx"]
    assert student.model_args and not any(other.attention_options for other in others)
    assert reference.optim == base.baseline_optim != student.optim


def test_runs_are_the_same_where_what_differs_means_nothing_to_them():
    def digests(*changes, seed=0):
        settings = config.load("digits", changes)
        runs = [digest(as_run(settings, seed, baseline=baseline)) for baseline in (True, False)]
        return [*runs, digest(as_teacher(settings))]

    plain, student, teacher = digests("threads=1", "device=cpu")
    assert digests() == [plain, student, teacher]
    other = digests("phase_b.gamma=0.5", "phase_a.mode=stochastic")
    assert other[0] == plain and other[1] != student and other[2] != teacher
    assert digests(seed=1)[0] != plain
    longer = digests("phase_b.epochs=3", "baseline.epochs=20")
    assert longer[0] == plain and longer[1] != student and longer[2] == teacher
    alone = "phase_a.per_image=none"
    assert digests(alone) == digests(alone, "phase_b.shuffle_maps=yes")

    settings = as_run(config.load("digits"), 0, baseline=False)
    flat = config.flatten(settings, Scope.ANYTIME)  # also those that have their default
    changed = [
        digest(apply(settings, {name: value / 2}, ""))
        for name, value in flat.items()
        if isinstance(value, float) and value and not name.startswith("phase_a.")
    ]
    assert len(changed) > 5 and len({digest(settings), *changed}) == len(changed) + 1


def swept(entries, base=None):
    cells = default_cells(base or config.load("digits"), ["standard"])
    return sweep_cells(entries, "mine.yaml", cells)


def test_an_entry_inherits_plain_from_the_cell_named_in_like():
    entries = [
        {"name": "longer", "plain": True, "phase_b.epochs": 3},
        {"like": "longer", "phase_b.optim.lr": 0.1},
        {"export.encoding": "uint8"},
        {"like": None, "phase_b.gamma": 2},
    ]
    cells = {cell.name: cell for cell in swept(entries)}
    assert cells["longer"].like == BASELINE and cells["lr 0.1"].plain
    assert cells["encoding uint8"].like == "distilled" and not cells["encoding uint8"].plain
    base = config.load("digits")
    best = {"distilled": {"phase_b.optim.lr": 9}, BASELINE: {"model.init": "mimetic"}}
    assert resolve(cells["gamma 2"], cells, best, base).phase_b.optim == base.phase_b.optim
    assert resolve(cells["encoding uint8"], cells, best, base).phase_b.optim.lr == 9
    assert resolve(cells["lr 0.1"], cells, best, base).model.init == "mimetic"


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
            if training.settings.phase_b.optim.lr < 1  # others fail
        }


def test_trials_build_on_the_best_trial_of_the_cell_named_in_like(tmp_path):
    rates = [{"phase_b.optim.lr": rate} for rate in (0.1, 0.3, 0.2, 9.0)]
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
    assert [training.settings.phase_b.optim.lr for training in first] == [0.1, 0.3, 0.2, 9.0]
    assert {training.settings.seed for training in first + second} == {5}
    assert [training.settings.phase_b.gamma for training in second] == [0.4, 0.6]
    assert [training.settings.phase_b.optim.lr for training in second] == [0.3, 0.3]
    assert comparison.best_trials == {"a": rates[1], "b": gammas[0]}  # equal ones: the first

    run_cells(comparison, workers)
    trainings = {name: entries[1].settings for name, entries in comparison.trainings.items()}
    assert trainings["a"].phase_b.optim.lr == trainings["b"].phase_b.optim.lr == 0.3
    assert trainings["b"].phase_b.gamma == 0.4 and trainings["b"].seed == 6
    assert trainings["distilled"].phase_b.optim.lr == base.phase_b.optim.lr


def test_the_folder_of_a_comparison_is_known_by_its_lock(in_process, tmp_path):
    comparisons = "", "lock", "lock students compare.json", "lock teachers"  # the second: killed
    others = "students", "lock config.yaml phase_a", "lock zarr.json"
    for number, names in enumerate([*comparisons, *others]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in names.split():
            (folder / name).touch()
        refused = pytest.raises(UserError, match="holds no comparison")
        with refused if names in others else contextlib.nullcontext():
            check_folder(folder)
    with locked(tmp_path / "c", "comparison"):
        code, _, err = in_process("compare", "digits", "--no-tune", "--run-dir", tmp_path / "c")
        assert (code, err.count("\n")) == (2, 1) and "is using this comparison" in err, err
        assert [path.name for path in (tmp_path / "c").iterdir()] == ["lock"]


def test_a_plain_cell_changes_the_baselines_optimizer_and_epochs():
    """Which a configuration may name apart from phase B's."""
    changes = ["phase_b.epochs=6", "baseline.epochs=9", "phase_b.optim.lr=3e-3"]
    base = config.load("digits", [*changes, "baseline.optim.lr=1e-3"])
    expected = {
        BASELINE: (9, 1e-3),
        "as it is": (9, 1e-3),
        "rate": (9, 0.1),
        "longer": (24, 1e-3),
        "longest": (30, 1e-3),
        "student": (6, 3e-3),
    }
    entries = [
        {"name": "longer", "plain": True, "phase_b.epochs": 24},
        {"name": "longest", "plain": True, "baseline.epochs": 30},
        {"name": "rate", "plain": True, "like": None, "phase_b.optim.lr": 0.1},
        {"name": "as it is", "plain": True, "like": None},
        {"name": "student", "phase_b.gamma": 0.5},
    ]
    cells = {cell.name: cell for cell in swept(entries, base)}
    for name, values in expected.items():
        settings = resolve(cells[name], cells, {}, base)
        phase = as_run(settings, 0, baseline=cells[name].plain).phase_b
        assert (phase.epochs, phase.optim.lr) == values, name
    trial = apply(resolve(cells["rate"], cells, {}, base), {"phase_b.optim.lr": 0.2}, "x")
    assert as_run(trial, 0, baseline=True).phase_b.optim.lr == 0.2


def test_a_figure_of_the_same_results_is_the_same_file(tmp_path):
    """Also where losses are no numbers, which are left out."""
    nan = float("nan")
    run = {"folder": "a", "val_loss": [nan, nan], "val_acc": [0.1, 0.4], "loss_hard": [1.9, nan]}
    cell = {"row": "plain ViT", "plain": True, "runs": [run]}
    cell["final"] = {"multiply_adds": {"mean": 3e9}}
    results = {"data": "digits", "seeds": [0], "reference": "plain ViT", "rows": [cell]}
    for name in ("a", "b"):
        draw(results, tmp_path / name)
    for suffix in ("svg", "png"):
        first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in "ab")
        assert first == second


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder of a finished comparison, its sweep, and what its command printed."""
    folder = tmp_path_factory.mktemp("compare") / "c"
    sweep = folder.parent / "mine.yaml"
    sweep.write_text(
        "- {name: plain longer, plain: true, phase_b.epochs: 3}\n"
        "- {phase_b.gamma: 0.5, export.encoding: uint8}\n"
        "- {name: tuned, trials: [{phase_b.optim.lr: 5.0e-4}, {phase_b.optim.lr: 3.0e-3}]}\n"
    )
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("COLUMNS", "80")
        assert run_main(*compare(folder, "--sweep", sweep, "--jobs", 2)) == 0
    return folder, sweep, printed.getvalue()


def compare(folder, *arguments, seeds="0,1"):
    """The command's arguments."""
    options = ["--run-dir", folder, "--seeds", seeds, "--no-tune"]
    return [*map(str, ["compare", "digits", *options, *arguments]), *sets(*TINY)]


def cells_of(folder: Path, name: str) -> dict[str, dict]:
    results = json.loads((folder / f"{name}.json").read_text())
    return {cell["row"]: cell for cell in results["rows"]}


def test_a_tiny_comparison(compared):
    folder, _, printed = compared
    cells = cells_of(folder, "mine")
    students = ["distilled", "shuffled maps", "prior alone"]
    assert list(cells) == [
        *(BASELINE, *students, "plain longer", "gamma 0.5, encoding uint8", "tuned")
    ]
    assert all(name in printed for name in cells) and "Trials of tuned" in printed
    assert max(map(len, printed.splitlines())) <= 80
    goals = [run["val_acc"][-1] for run in cells[BASELINE]["runs"]]
    losses = {}
    for name, cell in cells.items():
        runs, last = cell["runs"], cell["at"][-1]
        assert [run["seed"] for run in runs] == [0, 1] and last["share"] == 1
        assert {len(run["val_acc"]) for run in runs} == {3 if name == "plain longer" else 2}
        reached = [epochs_to(run["val_acc"], goal) for run, goal in zip(runs, goals, strict=True)]
        assert last["reached"] == sum(epochs is not None for epochs in reached)
        weights = load_file(folder / runs[0]["folder"] / "student" / "model.safetensors")
        parameters = sum(array.size for array in weights.values())
        assert cell["final"]["parameters"]["mean"] == parameters
        metrics = (folder / runs[0]["folder"] / "metrics.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in metrics]
        losses[name] = entries[0].get("loss_feat")
    assert len({losses[name] for name in students}) == 3
    trials = cells["tuned"]["trials"]
    assert [trial["settings"]["phase_b.optim.lr"] for trial in trials] == [5e-4, 3e-3]
    (taken,) = (trial for trial in trials if trial["taken"])
    assert taken["val_acc"] == max(trial["val_acc"] for trial in trials)
    assert taken["val_acc"] == cells["tuned"]["runs"][0]["val_acc"][-1]
    assert (folder / "mine.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (folder / "mine.svg").read_text()


def test_the_costs_of_a_tiny_comparison(compared):
    """100 images, 2 or 3 epochs of the student, 1 of the teacher, which compares no queries."""
    settings = config.load("digits", TINY)
    vit = build_student(settings, load_data(settings.data))
    forward, cells = products_of(vit, tokens=16), cells_of(compared[0], "mine")
    for name, epochs in ((BASELINE, 2), ("plain longer", 3)):
        run = cells[name]["runs"][0]
        assert run["costs"]["multiply_adds"] == epochs * 3 * 100 * forward
        assert run["phase_a_costs"] == {}
    run = cells["distilled"]["runs"][0]
    student, teacher = run["costs"]["multiply_adds"], run["phase_a_costs"]["multiply_adds"]
    # the map of a Gaussian is separable: its two factors, 16 x 4 numbers each
    assert student >= 2 * 3 * 100 * forward
    scores = 2 * 16**2 * vit.embed_dim  # which the teacher has not, nor the weights of Q and K
    of_teacher = forward - scores - 2 * 16 * vit.embed_dim**2
    assert (3 + 1) * 100 * of_teacher <= teacher < (3 + 1) * 100 * forward
    assert cells["distilled"]["final"]["multiply_adds"]["mean"] == student + teacher


def test_the_differences_of_a_tiny_comparison(compared):
    """Those of the two seeds, and those above the front of the two plain ViTs."""
    cells = cells_of(compared[0], "mine")
    assert cells[BASELINE]["difference"] is cells[BASELINE]["above_front"] is None
    final = {name: [run["val_acc"][-1] for run in cell["runs"]] for name, cell in cells.items()}
    difference = cells["distilled"]["difference"]
    expected = Difference.of(list(np.subtract(final["distilled"], final[BASELINE])))
    assert difference["mean"] == pytest.approx(expected.mean)
    assert (difference["p"], difference["low"]) == (expected.p, expected.low)
    assert difference["verdict"] == "not decided"
    highest = np.maximum(final[BASELINE], final["plain longer"])  # the student is dearer than both
    above = np.subtract(final["distilled"], highest).mean()
    assert cells["distilled"]["above_front"]["mean"] == pytest.approx(above)


def test_a_sweep_of_plain_runs_trains_no_teacher(in_process, tmp_path):
    folder, sweep = tmp_path / "c", tmp_path / "plain.yaml"
    sweep.write_text(
        "- {name: no FFN, plain: true, phase_b.student: belief2, "
        "phase_b.model_args: {mlp_ratio: 0}}\n- {name: diverges, plain: true, "
        "phase_b.optim.lr: 1.0e+30, phase_b.optim.clip_grad: null}\n"
    )
    code, out, err = in_process(*compare(folder, "--sweep", sweep, seeds="0"))
    assert code == 0, err
    assert not (folder / "teachers").exists() and "phase A ┃" not in out
    cells = cells_of(folder, "plain")
    assert list(cells) == [BASELINE, "no FFN", "diverges"]
    sizes = {name: cell["final"]["parameters"]["mean"] for name, cell in cells.items()}
    assert sizes["no FFN"] < sizes[BASELINE] and sizes["diverges"] is None
    assert cells["diverges"]["failed"] and "failed" in out


def test_finished_cells_are_not_run_again(compared, in_process):
    folder, sweep, _ = compared

    def written():
        return {path: path.stat().st_mtime_ns for path in folder.rglob("state.pt")}

    before = written()
    again = compare(folder, "--sweep", sweep, "--jobs", 2, "--targets", "0.05,0.99")
    code, out, err = in_process(*again)
    assert code == 0 and "seed" not in err
    assert "to 5 %" in out and "never" in out and written() == before
    other = shutil.copy(sweep, folder.parent / "few.yaml")  # leaves the other tests their tables
    selected = ["--row", "plain longer", "--row", "shuffled maps"]
    code, out, err = in_process(*compare(folder, "--sweep", other, *selected, "--json"))
    assert code == 0 and "seed" not in err
    names = [cell["row"] for cell in json.loads(out)["rows"]]
    assert names == [BASELINE, "distilled", "shuffled maps", "plain longer"]
    teachers, students, tuned = 4, 12, 3
    assert len(before) == teachers + students + tuned


@pytest.mark.long
def test_students_that_draw_the_same_views_share_a_store(in_process, tmp_path):
    folder, sweep = tmp_path / "c", tmp_path / "views.yaml"
    sweep.write_text(
        "- {name: xsa, phase_b.student: xsa}\n"
        "- {name: flips, augment.flip: true}\n"
        "- {name: the images themselves, export.views: null}\n"
    )
    views = ["phase_a.teacher=vit", "phase_b.alpha=0.0", "augment.crop_padding=1"]
    rows = [part for name in ("xsa", "flips", "the images themselves") for part in ("--row", name)]
    changes = sets(*views, "export.views=2")
    code, _, err = in_process(*compare(folder, "--sweep", sweep, *rows, *changes))
    assert code == 0, err
    cells = cells_of(folder, "views")
    assert {name: len(cell["runs"]) for name, cell in cells.items()} == dict.fromkeys(
        [BASELINE, "distilled", "xsa", "flips", "the images themselves"], 2
    )
    teachers = [path for path in (folder / "teachers").iterdir() if path.is_dir()]
    for teacher in teachers:
        schemas = [store.open(path).schema for path in teacher.glob("*.zarr")]
        assert sorted(schema.views for schema in schemas) == [1, 2, 2]
        views = [schema.extra["views"] for schema in schemas if schema.views == 2]
        assert {one["seed"] for one in views} == {RunDirectory(teacher).settings().seed}
        assert {one["augment"]["flip"] for one in views} == {False, True}
    assert sorted(RunDirectory(teacher).settings().seed for teacher in teachers) == [0, 1]


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
        "phase_b.head_map=mean",
        "phase_b.alpha=0.0",
    ]
    code, out, err = in_process(*compare(folder, "--row", "distilled", *sets(*changes), seeds="0"))
    assert code == 0 and "failed" not in out, out
    assert "teacher, 0 epochs" in err, err
    runs = cells_of(folder, "compare")["distilled"]["runs"]
    assert [run["phase_a_epochs"] for run in runs] == [0]


@pytest.mark.long
def test_a_killed_comparison_goes_on_and_ends_as_an_unbroken_one(compared, in_process, tmp_path):
    folder, sweep, _ = compared
    call = compare(tmp_path / "c", "--sweep", sweep, seeds="0")
    process = subprocess.Popen(
        [sys.executable, "-m", "gaupipe.cli", *call, "--jobs", "2"],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    while len(list(tmp_path.glob("c/students/*/student"))) < 3:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=120)  # its workers have the same stdout, and have ended too
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "c" / "mine.json").exists()
    code, _, err = in_process(*call)
    assert code == 0, err
    resumed, unbroken = (cells_of(path, "mine").values() for path in (tmp_path / "c", folder))
    for cell, other in zip(resumed, unbroken, strict=True):
        assert cell["runs"][0]["val_loss"] == other["runs"][0]["val_loss"]
