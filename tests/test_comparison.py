"""The arithmetic of comparisons on made-up curves; which runs are the same run; a tiny
comparison from end to end."""

import contextlib
import gzip
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from safetensors.numpy import load_file
from scipy.stats import norm
from scipy.stats import t as student_t

import store
from arguments import sets, tiny
from gaupipe.attention import ATTENTION
from gaupipe.data.load import load_data
from gaupipe.settings.load import flatten, load
from gaupipe.settings.sections import Scope
from gaupipe.system.errors import UserError
from gaupipe.training.curves import save
from gaupipe.training.student import build_student
from gaupipe.vit.stem import STEMS
from pictures import write_idx
from runs import run_main
from stages import phase_b
from stages.compare import measures
from stages.compare.costs import with_probe
from stages.compare.figures import curves
from stages.compare.measures import (
    Difference,
    Spread,
    difference,
    differences,
    epochs_to,
    first_passages,
    front,
    gains_of_images,
    smoothed,
    spread,
)
from stages.compare.report import (
    Comparison,
    Final,
    RowResult,
    final_values,
    over_controls,
    report,
)
from stages.compare.rows import BASELINE, DISTILLED, Row, default_rows, resolve, sweep_rows
from stages.compare.run import check_folder, plan, reader
from stages.compare.tables import _epochs, tables
from stages.compare.trainings import FinishedTraining, as_teacher, digest
from stages.runs.directory import RunDirectory
from stages.runs.locks import locked
from stages.runs.students import StudentRequest

TINY = [*tiny(100, 50, 2, depth=1), "phase_a.max_epochs=1"]


def made_up(accuracies: list[float], phase_a: int = 0, **curves) -> FinishedTraining:
    costs: dict = {"parameters": 1, "multiply_adds": 3e9, "processor_seconds": 1.0}
    empty: dict = {
        "val_loss": [0.0],
        "loss_hard": [0.0],
        "seconds": [0.0],
        "processor_seconds": [0.0],
        "phase_a_costs": {},
    }
    return FinishedTraining(
        seed=0,
        folder="a",
        phase_a_epochs=phase_a,
        test_acc=None,
        test_images=None,
        right=None,
        val_acc=accuracies,
        costs=costs,
        **(empty | curves),
    )


def test_epochs_to_an_accuracy_count_from_one_to_the_first_that_reaches_it():
    for curve, accuracy, epochs in [
        ([0.1, 0.5, 0.4, 0.6], 0.5, 2),
        ([0.1, 0.5, 0.4, 0.6], 0.55, 4),
        ([0.1, 0.5], 0.1, 1),
        ([0.1, 0.5], 0.500001, None),
        ([], 0.1, None),
    ]:
        assert epochs_to(curve, accuracy) == epochs
    assert spread([3]) == Spread(mean=3, std=None) and spread([]) == Spread(None, None)


def test_a_curve_is_the_mean_of_its_last_five_epochs():
    curve = [0.1, 0.3, 0.2, 0.6, 0.8, 0.9, 0.1]
    expected = [0.1, 0.2, 0.2, 0.3, 0.4, 0.56, 0.52]
    assert smoothed(curve) == pytest.approx(expected)
    # one high epoch passes 0.8, but the curve does not
    assert epochs_to(curve, 0.8) == 5 and epochs_to(smoothed(curve), 0.8) is None


def test_speed_up_is_taken_seed_by_seed_phase_a_counted():
    # means of the last five: .2 .3 .4 .5 and .1 .2 .4 .5
    reference = [made_up([0.2, 0.4, 0.6, 0.8]), made_up([0.1, 0.3, 0.8, 0.8])]
    # .3 .4 .5 .5 and .5 .5
    runs = [made_up([0.3, 0.5, 0.7, 0.5], phase_a=1), made_up([0.5, 0.5], phase_a=2)]
    row = first_passages(runs, reference, 1.0)  # of .5
    assert row.reached == 2
    assert row.epochs == Spread(2, pytest.approx(2**0.5))  # 3 and 1 against 4 and 4
    assert row.epochs_with_phase_a.mean == 3.5  # 4 and 3
    assert row.speedup.mean == pytest.approx((4 / 4 + 4 / 3) / 2)
    assert row.saved_by_seed == [0, 1]
    # a share is of what the reference has with the same seed over its last five epochs, here .5
    runs = [made_up([0.39, 0.61]), made_up([0.51, 0.49])]
    at = [first_passages(runs, reference, share).epochs.mean for share in (1.0, 0.7)]
    assert at == [1.5, 1]
    # the reference has its own first passage, here before its last epoch: .2 .55 .5
    early = [made_up([0.2, 0.9, 0.4])]
    assert first_passages(early, early, 1.0).epochs.mean == 2
    assert first_passages([made_up([0.8])], early, 1.0).speedup.mean == 2


def test_core_seconds_are_those_until_the_goal_and_of_what_came_before_it():
    """The student's first three of four epochs, and all of phase A and the export or its share."""
    reference = [made_up([0.1, 0.3, 0.8, 0.8], processor_seconds=[5.0, 5.0, 4.0, 9.0])]
    student = made_up(
        [0.3, 0.5, 0.7, 0.9],
        processor_seconds=[1.0, 2.0, 4.0, 8.0],
        phase_a_costs={"multiply_adds": 1, "processor_seconds": 12.0},
        sharing=3,
    )
    row = first_passages([student], reference, 1.0)
    assert row.core_seconds.mean == 1 + 2 + 4 + 12
    assert row.core_seconds_shared.mean == 1 + 2 + 4 + 12 / 3
    plain = first_passages(reference, reference, 0.7)
    assert plain.core_seconds.mean == plain.core_seconds_shared.mean == 5 + 5 + 4
    assert first_passages([made_up([0.4])], reference, 1.0).core_seconds.mean is None


def test_never_reached_gives_no_mean_and_no_speed_up():
    reference, runs = [made_up([0.8]), made_up([0.8])], [made_up([0.9]), made_up([0.7])]
    row = first_passages(runs, reference, 1.0)
    assert row.reached == 1
    assert row.epochs == row.speedup == Spread(None, None)
    assert row.saved_by_seed == [0, None]
    assert first_passages(runs, reference, 0.8).speedup.mean == 1
    at = [first_passages([made_up([last])], reference[:1], 0.95) for last in (0.9, 0.7)]
    assert [_epochs(passages, seeds=1) for passages in at] == ["1.0", "never"]


def test_differences_have_students_interval_and_p():
    draw = np.random.default_rng(0)
    for count in (2, 3, 10):
        values = draw.normal(0.01, 0.02, count)
        tested, error = difference(list(values)), values.std(ddof=1) / count**0.5
        assert tested.mean == pytest.approx(values.mean())
        margin = student_t.ppf(0.975, count - 1) * error
        ends = [values.mean() - margin, values.mean() + margin]
        assert [tested.low, tested.high] == pytest.approx(ends)
        p = 2 * student_t.sf(abs(values.mean()) / error, count - 1)
        assert tested.p == pytest.approx(p)
    # higher with every one of three seeds is no evidence
    assert difference([0.01, 0.002, 0.03]).p > 0.05
    assert difference([0.01]) == Difference(0.01, None, None, None)
    assert difference([0.3 - 0.2, 0.2 - 0.1]).p is None  # one image more with both seeds


def test_a_difference_has_the_larger_error_of_seeds_and_images():
    """Eleven images of 372, nearly the same with every seed: seeds alone are sure of them."""
    mine = np.zeros((3, 372), dtype=bool)
    other = np.zeros((3, 372), dtype=bool)
    mine[:, :30] = True
    other[:, 30:49] = True
    mine[2, 49] = True  # so that not all seeds have the same difference
    by_seed = [*(mine.mean(1) - other.mean(1))]
    of_images = gains_of_images([*mine], [*other])
    seeds = differences({"row": by_seed})["row"]
    both = differences({"row": by_seed}, {"row": of_images})["row"]
    assert (seeds.verdict, seeds.seeds_only) == ("confirmed", True)
    assert (both.verdict, both.seeds_only) == ("not decided", False)
    assert both.mean == seeds.mean == pytest.approx(of_images.mean())

    # the error of a mean over images, as if they were drawn: McNemar's, without its correction
    error = of_images.std() / 372**0.5
    assert (both.low, both.high) == pytest.approx(
        (both.mean - 1.96 * error, both.mean + 1.96 * error), abs=0.1 * error
    )
    assert both.p == pytest.approx(2 * norm.sf(both.mean / error), abs=0.02)

    mine[:, :200] = True  # now images are sure too, and seeds that differ are not
    by_seed = [0.1, 0.8, 0.3]
    assert difference(by_seed, gains_of_images([*mine], [*other])).p == difference(by_seed).p
    assert gains_of_images([*mine], [None, *other[1:]]) is None


def test_every_number_stands_in_its_column():
    def row(name: str, **more) -> RowResult:
        values = dict(
            val_acc=Spread(0.701, 0.011),
            val_loss=Spread(1.25),
            test_acc=Spread(0.682, 0.012),
            epochs=Spread(12),
            phase_a_epochs=Spread(3.5),
            parameters=Spread(163_410),
            multiply_adds=Spread(4.2e12),
            processor_seconds=Spread(512),
        )
        passages = measures.Passages(
            1.0,
            reached=2,
            epochs=Spread(7.5, 0.7),
            epochs_with_phase_a=Spread(11),
            core_seconds=Spread(345),
            core_seconds_shared=Spread(234),
            speedup=Spread(1.09),
            saved_by_seed=[1, 2],
        )
        return RowResult(
            name, name == BASELINE, "standard", {}, [], Final(**values), [passages], [], **more
        )

    def verdict(mean: float) -> measures.Verdict:
        return measures.Verdict(
            mean, mean - 0.01, mean + 0.01, p=0.02, holm=0.04, verdict="confirmed"
        )

    student = row(
        DISTILLED,
        difference=verdict(0.05),
        test_difference=verdict(0.06),
        above_front=verdict(0.07),
    )
    results = Comparison(
        "digits", [0, 1], BASELINE, [row(BASELINE), student], {"control": verdict(0.08)}
    )
    shown: dict[str, str] = {}
    for table in "\n".join(tables(results)).split("## ")[1:]:
        title, _, *lines = table.splitlines()
        cells = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line
        ]
        title = title.split(",")[0]
        shown |= {
            f"{title}: {name}": cell for name, cell in zip(cells[0][1:], cells[-1][1:], strict=True)
        }
    differences_of = {
        f"Accuracy minus that of the {BASELINE}": "+5.00; +4.00 to +6.00",
        f"Test accuracy minus that of the {BASELINE}": "+6.00; +5.00 to +7.00",
        "Accuracy of the student minus that of its controls": "+8.00; +7.00 to +9.00",
    }
    expected = {
        "Accuracy over cost: 10^12 m-adds": "4.2",
        "Accuracy over cost: core s": "512",
        "Accuracy over cost: accuracy": "70.10 ±1.10",
        "Accuracy over cost: above": "+7.00",
        "Accuracy over cost: 95 % interval": "+6.00 to +8.00",
        "Epochs until the mean of the last five accuracies reaches a goal: to 100 %": "7.5 ±0.7",
        "Epochs until the mean of the last five accuracies reaches a goal: with A": "11.0",
        "Epochs until the mean of the last five accuracies reaches a goal: speed-up": "1.09",
        "Epochs until the mean of the last five accuracies reaches a goal: core s": "345",
        "Epochs until the mean of the last five accuracies reaches a goal: shared": "234",
        "At the end: parameters": "163,410",
        "At the end: epochs": "12",
        "At the end: phase A": "3.5",
        "At the end: test acc.": "68.20 ±1.20",
        "At the end: validation loss": "1.250",
    }
    for title, numbers in differences_of.items():
        points, interval = numbers.split("; ")
        columns = {"points": points, "95 % interval": interval, "p": "0.020", "Holm's p": "0.040"}
        expected |= {f"{title}: {name}": cell for name, cell in columns.items()}
        expected[f"{title}: "] = "confirmed"
    assert shown == expected


def test_holms_correction_is_within_the_table_and_carries_the_words():
    def of(p: float) -> list[float]:
        """Two differences whose paired t-test has this p: with one degree of freedom a mean of t,
        for differences that are 2 apart."""
        t = student_t.isf(p / 2, 1)
        return [t - 1, t + 1]

    ps = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.2}
    table = differences({name: of(p) for name, p in ps.items()} | {"one seed": [0.1]})
    # 4 x .01; 3 x .03; at least as much as before it: 2 x .04 -> .09; 1 x .2
    expected = {"a": 0.04, "c": 0.09, "b": 0.09, "d": 0.2}
    assert {name: table[name].holm for name in expected} == pytest.approx(expected)
    words = [row.verdict for row in table.values()]
    assert words == ["confirmed", "supported", "supported", "not decided", "not decided"]
    assert differences({"a": of(0.7), "b": of(0.6)})["a"].holm == 1


def test_a_row_that_cannot_be_decided_counts_in_the_family():
    """Else the others' p would be smaller for what came out."""
    clear = [0.30, 0.31]  # p .01, so .02 of two
    for undecided in ([0.1, 0.1], [0.0, 0.0], [0.1, None], [None, None]):
        table = differences({"clear": clear, "other": undecided})
        assert table["clear"].holm == pytest.approx(2 * difference(clear).p)
        other = table["other"]
        assert (other.p, other.holm, other.verdict) == (None, None, "not decided")
        assert other.mean == (None if None in undecided else undecided[0])


def test_a_row_that_never_reached_the_goal_counts_among_the_epochs_saved():
    reference = [made_up([0.1] * 9 + [1.0] * 5), made_up([0.1] * 9 + [1.0] * 5)]
    curves = {
        "fast": [[0.1] * 2 + [1.0] * 5, [0.1] * 3 + [1.0] * 5],
        "never": [[0.1] * 2 + [1.0] * 5, [0.1] * 14],
        "equal": [[0.1] * 4 + [1.0] * 5, [0.1] * 4 + [1.0] * 5],
    }
    rows = {name: [made_up(curve) for curve in of_row] for name, of_row in curves.items()}
    rows[BASELINE] = reference
    passages = {name: first_passages(runs, reference, 1.0) for name, runs in rows.items()}
    saved = {
        name: row.saved for name, row in measures.tested_passages(passages, BASELINE, {}).items()
    }
    assert saved[BASELINE] is None
    assert saved["fast"].holm == pytest.approx(3 * difference([7, 6]).p)
    means = [saved[name].mean for name in curves]
    assert means == [6.5, None, 5]
    assert saved["never"].verdict == saved["equal"].verdict == "not decided"


def test_a_row_that_failed_counts_in_every_family(tmp_path):
    """Or a training whose loss diverged would make the p of all others smaller."""

    def row(name, plain=False):
        settings = SimpleNamespace(model=SimpleNamespace(attention="standard"), seed=0)
        folders = [Path(f"{name} {seed}") for seed in range(2)]
        alike: dict = dict(row=Row(name=name, plain=plain), settings=settings, needs_phase_a=False)
        return [SimpleNamespace(folder=path, phase_a_costs=path, **alike) for path in folders]

    rows: list = [row(BASELINE, plain=True), row("distilled"), row("uniform maps")]
    curves = {BASELINE: ([0.1, 0.5], [0.1, 0.6]), "distilled": ([0.6, 0.6], [0.8, 0.8])}
    outcomes: dict = {
        training.folder: made_up(curve)
        for trainings in rows[:2]
        for training, curve in zip(trainings, curves[trainings[0].row.name], strict=True)
    }
    outcomes |= {training.folder: "the loss is nan" for training in rows[2]}
    results = report("made", rows, outcomes)
    distilled, failed = results.rows[1:]
    p = difference([0.1, 0.2]).p
    assert distilled.difference is not None and distilled.above_front is not None
    assert distilled.difference.holm == distilled.above_front.holm == pytest.approx(2 * p)
    saved = distilled.at[-1].saved
    assert saved is not None and saved.mean == 1 and failed.at == []
    for verdict in (failed.difference, failed.above_front, results.over_controls["uniform maps"]):
        assert verdict is not None and (verdict.mean, verdict.verdict) == (None, "not decided")


def test_controls_are_beside_the_student_that_they_are_of():
    """Another student's attention would be taken for what a map teaches."""

    def row(name, attention, accuracy):
        runs = [made_up([accuracy])]
        return RowResult(name, False, attention, {}, [], final_values(runs), [], runs)

    belief = row("distilled belief", "belief", 0.7)
    belief2 = row("distilled belief2", "belief2", 0.9)
    control = row("uniform maps", "belief", 0.6)
    assert over_controls([belief2, belief, control]) == {"uniform maps": [pytest.approx(0.1)]}
    assert over_controls([belief2, control]) == {}


def test_a_front_is_the_best_accuracy_for_as_much():
    trainings = [(8.0, 0.7), (2.0, 0.5), (4.0, 0.4), (4.0, 0.6)]
    expected = {1.0: None, 2.0: 0.5, 4.0: 0.6, 8.0: 0.7, 100.0: 0.7, 32**0.5: 0.65, 8**0.5: 0.55}
    for cost, accuracy in expected.items():
        assert front(trainings, cost) == (accuracy and pytest.approx(accuracy))
    assert front([(1.0, 0.6), (2.0, 0.5)], 2.0) == 0.6  # a worse training costs nobody anything


def products_of(vit, tokens: int) -> int:
    """Multiply-adds of a forward pass of an image, by the shapes of its matrices: each linear layer
    once a token, the head once, the 16 patches once, and two products of all pairs of tokens."""
    count = vit.head.weight.numel() + 16 * vit.patch_embed.proj.weight.numel()
    for block in vit.blocks:
        layers = [part for part in block.modules() if isinstance(part, torch.nn.Linear)]
        count += tokens * sum(layer.weight.numel() for layer in layers)
        count += 2 * tokens**2 * vit.embed_dim
    return count


def resolved(base, rows):
    """By name of a row its settings."""
    return {row.name: resolve(row, base) for row in rows}


def test_the_default_rows_are_the_baselines_the_students_and_the_controls():
    base = load("digits_expected", ["phase_b.alpha=0.2", "phase_b.beta=0.1", "phase_b.gamma=0.7"])
    settings = resolved(base, default_rows(base, ["standard", "belief2"]))
    baselines, students = [BASELINE, "plain ViT, belief2"], ["standard", "belief2"]
    controls = ["maps of other images", "prior alone", "no soft labels"]
    assert [*settings] == [*baselines, *(f"distilled {name}" for name in students), *controls]
    assert settings["prior alone"].phase_a.per_image == "none"
    phases = {name: each.phase_b for name, each in settings.items()}
    assert settings["distilled standard"].train == base.student_training
    assert phases["maps of other images"].shuffle_maps and phases["no soft labels"].alpha == 0
    assert phases["no soft labels"].beta == pytest.approx(0.3)
    atto = load("cifar10_atto")  # whose teacher has no prior
    assert resolved(atto, default_rows(atto, ["standard"]))["prior alone"].phase_a.prior
    shared = load("digits_expected", ["phase_a.per_image=none", "phase_a.prior=true"])
    names = [row.name for row in default_rows(shared, ["standard"])]
    assert names == [BASELINE, DISTILLED]  # all images have the maps of the prior already
    no_maps = load("digits", ["phase_a.teacher=resnet", "phase_b.gamma=0"])
    names = [row.name for row in default_rows(no_maps, ["standard"])]
    assert names == [BASELINE, DISTILLED, "no soft labels"]


def test_a_row_changes_no_other_row():
    base = load("digits_expected", ["model.attention=belief2", "model.attention_options={zz: yes}"])
    entries = [
        {"name": "gelu", "model.attention_options": {"activation": "gelu"}},
        {"name": "no zz", "like": "gelu", "model.attention_options.zz": False},
        {"name": "base, no zz", "model.attention_options.zz": False},
        {"name": "longer", "like": "gelu", "train.epochs": 5},
    ]
    rows = sweep_rows(entries, "mine.yaml", default_rows(base, ["belief2"]))
    settings = resolved(base, rows)
    options = {name: each.model.attention_options for name, each in settings.items()}
    assert options["longer"] == options["gelu"] == {"activation": "gelu"}
    assert options["no zz"] == {"activation": "gelu", "zz": False}
    assert options["base, no zz"] == {"zz": False}
    assert options["distilled belief2"] == base.model.attention_options == {"zz": True}
    again = resolved(base, rows)["distilled belief2"]
    assert again.model.attention_options == {"zz": True}


def test_the_plain_vit_is_plain_whatever_the_student_is():
    options = {"zz": False}
    changes = ["attention=belief2", f"attention_options={options}", "student_args={rezero: true}"]
    base = load("digits_expected", [f"model.{one}" for one in [*changes, "match_params=true"]])
    settings = resolved(base, default_rows(base, ["belief2", "attentionx"]))
    models = {name: each.model for name, each in settings.items()}
    reference, student = models[BASELINE], models["distilled belief2"]
    assert not (reference.student_args or reference.match_params or reference.attention_options)
    assert models["plain ViT, belief2"].attention_options == student.attention_options == options
    others = models["distilled attentionx"], models["plain ViT, attentionx"]
    assert student.student_args and not any(other.attention_options for other in others)
    assert settings[BASELINE].train == base.train
    assert settings["distilled belief2"].train == base.student_training != base.train


def test_runs_are_the_same_where_what_differs_means_nothing_to_them():
    def digests(*changes):
        settings = load("digits_expected", changes)
        plain, student = (resolve(Row(name="", plain=plain), settings) for plain in (True, False))
        return [digest(plain), digest(student), digest(as_teacher(student))]

    plain, student, teacher = digests("threads=1", "device=cpu")
    assert digests() == [plain, student, teacher]
    other = digests("phase_b.gamma=0.5", "phase_a.mode=stochastic")
    assert other[0] == plain and other[1] != student and other[2] != teacher
    assert digests("seed=1")[0] != plain
    longer = digests("phase_b.epochs=3")
    assert longer[0] == plain and longer[1] != student and longer[2] == teacher
    alone = "phase_a.per_image=none"
    assert digests(alone) == digests(alone, "phase_b.shuffle_maps=yes")
    for teacher, shared in (("vit_tiny_patch16_224", True), ("local", True), ("vit", False)):
        names = [f"phase_a.teacher={teacher}", "phase_b.alpha=0"]
        stems = [load("digits_expected", [*names, f"model.stem={stem}"]) for stem in STEMS]
        assert (len({digest(as_teacher(one)) for one in stems}) == 1) == shared

    base = load("digits_expected")
    flat = flatten(resolve(Row(name=""), base), Scope.ANYTIME)  # also those with a default
    changed = [
        digest(resolve(Row(name="", settings={name: value / 2}), base))
        for name, value in flat.items()
        if isinstance(value, float) and value and not name.startswith("phase_a.")
    ]
    assert len(changed) > 5 and len({student, *changed}) == len(changed) + 1


def swept(entries, base):
    return sweep_rows(entries, "mine.yaml", default_rows(base, ["standard"]))


def test_an_entry_changes_the_row_named_in_like_and_inherits_plain():
    entries = [
        {"name": "longer", "plain": True, "train.epochs": 3},
        {"like": "longer", "train.optim.lr": 0.1},
        {"export.encoding": "uint8"},
        {"name": "mine", "like": None, "model.student_args": {"mlp_ratio": 3}},
        {"name": "smaller", "like": "mine", "model.student_args.mlp_ratio": 2},
    ]
    base = load("digits_expected")
    rows = {row.name: row for row in swept(entries, base)}
    settings = resolved(base, rows.values())
    assert rows["longer"].plain and rows["lr 0.1"].plain and not rows["encoding uint8"].plain
    train = settings["lr 0.1"].train
    assert (train.epochs, train.optim.lr) == (3, 0.1)
    assert settings["encoding uint8"].export.encoding == "uint8"
    assert [settings[name].model.student_args["mlp_ratio"] for name in ("mine", "smaller")] == [
        3,
        2,
    ]


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
        code, _, err = in_process("compare", "digits_expected", "--run-dir", tmp_path / "c")
        assert (code, err.count("\n")) == (2, 1) and "is using this comparison" in err, err
        assert [path.name for path in (tmp_path / "c").iterdir()] == ["lock"]


def test_a_plain_row_changes_the_baselines_optimizer_and_epochs():
    """Which a configuration may name apart from those of phase B, and a distilled row those."""
    changes = ["phase_b.epochs=6", "train.epochs=9", "phase_b.optim.lr=3e-3"]
    base = load("digits_expected", [*changes, "train.optim.lr=1e-3"])
    expected = {
        BASELINE: (9, 1e-3),
        "as it is": (9, 1e-3),
        "rate": (9, 0.1),
        "longer": (24, 1e-3),
        "student": (6, 3e-3),
        "short student": (2, 3e-3),
        "shorter student": (1, 3e-3),
    }
    entries = [
        {"name": "longer", "plain": True, "train.epochs": 24},
        {"name": "rate", "plain": True, "like": None, "train.optim.lr": 0.1},
        {"name": "as it is", "plain": True, "like": None},
        {"name": "student", "phase_b.gamma": 0.5},
        {"name": "short student", "train.epochs": 2},
        {"name": "shorter student", "phase_b.epochs": 1},
    ]
    settings = resolved(base, swept(entries, base))
    for name, values in expected.items():
        train = settings[name].train
        assert (train.epochs, train.optim.lr) == values, name
    with pytest.raises(UserError, match=r"mine: phase_b\.epochs: .* set train\.epochs"):
        resolved(base, swept([{"name": "mine", "plain": True, "phase_b.epochs": 2}], base))


def test_a_figure_of_the_same_results_is_the_same_file(tmp_path):
    """Also where losses are no numbers, which are left out."""
    nan = float("nan")
    runs = [made_up([0.1, 0.4], val_loss=[nan, nan], loss_hard=[1.9, nan])]
    row = RowResult("plain ViT", True, "standard", {}, [], final_values(runs), [], runs)
    results = Comparison("digits", [0], "plain ViT", [row], {})
    for name in ("a", "b"):
        save(curves(results), tmp_path / name)
    for suffix in ("svg", "png"):
        first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in "ab")
        assert first == second


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder of a finished comparison, its sweep, and what its command printed."""
    folder = tmp_path_factory.mktemp("compare") / "c"
    sweep = folder.parent / "mine.yaml"
    sweep.write_text(
        "- {name: plain longer, plain: true, train.epochs: 3, train.patch_drop_rate: 0.5}\n"
        "- {phase_b.gamma: 0.5, export.encoding: uint8}\n"
    )
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("COLUMNS", "80")
        assert run_main(*compare(folder, "--sweep", sweep)) == 0
    return folder, sweep, printed.getvalue()


def compare(folder, *arguments, seeds="0,1"):
    """The command's arguments."""
    options = ["--run-dir", folder, "--seeds", seeds]
    return [*map(str, ["compare", "digits_expected", *options, *arguments]), *sets(*TINY)]


def rows_of(folder: Path, name: str) -> dict[str, dict]:
    results = json.loads((folder / f"{name}.json").read_text())
    return {row["row"]: row for row in results["rows"]}


def test_a_tiny_comparison(compared):
    folder, _, printed = compared
    rows = rows_of(folder, "mine")
    students = ["distilled", "maps of other images", "prior alone"]
    assert list(rows) == [BASELINE, *students, "plain longer", "gamma 0.5, encoding uint8"]
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 10, printed
    text = (folder / "report-mine.md").read_text()
    for name, row in rows.items():
        accuracy = f"{100 * row['final']['val_acc']['mean']:.2f}"
        assert any(line.startswith(name) and accuracy in line for line in lines)
        assert f"| {name} |" in text
    tested = [table for table in text.split("\n## ") if "| Holm's p |" in table]
    assert tested and all("confirmed: Holm's p" in table for table in tested)
    losses = {}
    for name, row in rows.items():
        runs, last = row["runs"], row["at"][-1]
        assert [run["seed"] for run in runs] == [0, 1] and last["share"] == 1
        assert {len(run["val_acc"]) for run in runs} == {3 if name == "plain longer" else 2}
        weights = load_file(folder / runs[0]["folder"] / "student" / "model.safetensors")
        parameters = sum(array.size for array in weights.values())
        assert row["final"]["parameters"]["mean"] == parameters
        metrics = (folder / runs[0]["folder"] / "metrics.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in metrics]
        losses[name] = entries[0].get("loss_feat")
    assert len({losses[name] for name in students}) == 3
    assert (folder / "mine.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (folder / "mine.svg").read_text()


def test_the_costs_of_a_tiny_comparison(compared):
    """100 images, 2 or 3 epochs of the student, 1 of the teacher, which compares no queries."""
    settings = load("digits_expected", TINY)
    vit = build_student(settings, load_data(settings.data), settings.train)
    forward, rows = products_of(vit, tokens=16), rows_of(compared[0], "mine")
    dropped = products_of(vit, tokens=8)  # in the first of three epochs
    for name, forwards in ((BASELINE, 2 * forward), ("plain longer", dropped + 2 * forward)):
        run = rows[name]["runs"][0]
        assert run["costs"]["multiply_adds"] == 3 * 100 * forwards
        assert run["phase_a_costs"] == {}
    run = rows["distilled"]["runs"][0]
    student, teacher = run["costs"]["multiply_adds"], run["phase_a_costs"]["multiply_adds"]
    # the map of a Gaussian is separable: its two factors, 16 x 4 numbers each
    assert student >= 2 * 3 * 100 * forward
    scores = 2 * 16**2 * vit.embed_dim  # which the teacher has not, nor the weights of Q and K
    teacher_forward = forward - scores - 2 * 16 * vit.embed_dim**2
    assert (3 + 1) * 100 * teacher_forward <= teacher < (3 + 1) * 100 * forward
    assert rows["distilled"]["final"]["multiply_adds"]["mean"] == student + teacher


def test_the_differences_of_a_tiny_comparison(compared):
    """Those of the two seeds, and those above the front of the two plain ViTs."""
    rows = rows_of(compared[0], "mine")
    assert rows[BASELINE]["difference"] is rows[BASELINE]["above_front"] is None
    final = {name: [run["val_acc"][-1] for run in row["runs"]] for name, row in rows.items()}
    paired = rows["distilled"]["difference"]
    expected = difference(list(np.subtract(final["distilled"], final[BASELINE])))
    assert paired["mean"] == pytest.approx(expected.mean)
    assert (paired["p"], paired["low"]) == (expected.p, expected.low)
    assert paired["verdict"] == "not decided"
    over_controls = json.loads((compared[0] / "mine.json").read_text())["over_controls"]
    assert set(over_controls) == {"maps of other images", "prior alone"}
    expected = difference(list(np.subtract(final["distilled"], final["maps of other images"])))
    assert over_controls["maps of other images"]["mean"] == pytest.approx(expected.mean)
    tables = (compared[0] / "report-mine.md").read_text()
    assert "minus that of its controls" in tables
    assert "a row dearer than all of these is compared with the best of them" in tables
    highest = np.maximum(final[BASELINE], final["plain longer"])  # the student is dearer than both
    above = np.subtract(final["distilled"], highest).mean()
    assert rows["distilled"]["above_front"]["mean"] == pytest.approx(above)


def test_a_sweep_of_plain_runs_trains_no_teacher(in_process, tmp_path):
    folder, sweep = tmp_path / "c", tmp_path / "plain.yaml"
    sweep.write_text(
        "- {name: no FFN, plain: true, model.attention: belief2, "
        "model.student_args: {mlp_ratio: 0}}\n- {name: diverges, plain: true, "
        "train.optim.lr: 1.0e+30, train.optim.clip_grad: null}\n"
        # no loss is computed behind its only update
        "- {name: one step, like: diverges, train.epochs: 1, train.optim.warmup_epochs: 0, "
        "data.batch_size: 100}\n"
    )
    code, out, err = in_process(*compare(folder, "--sweep", sweep, seeds="0"))
    assert code == 0 and "compare: 4 of 4 trainings are left, about" in err, err
    text = (folder / "report-plain.md").read_text()
    assert not (folder / "teachers").exists() and "| phase A |" not in text
    rows = rows_of(folder, "plain")
    assert list(rows) == [BASELINE, "no FFN", "diverges", "one step"]
    assert "one step, seed 0: the validation loss is not finite after epoch 1" in err
    sizes = {name: row["final"]["parameters"]["mean"] for name, row in rows.items()}
    assert sizes["no FFN"] < sizes[BASELINE] and sizes["diverges"] is None
    assert rows["diverges"]["failed"] and "failed" in out


def test_a_row_that_is_asked_for_is_told_with_those_that_have_finished(in_process, tmp_path):
    folder, sweep = tmp_path / "c", tmp_path / "plain.yaml"
    names = {"a": 1, "[b]|c": 3}
    lines = [f"- {{name: '{name}', plain: true, train.epochs: {n}}}" for name, n in names.items()]
    sweep.write_text("\n".join(lines))
    for count, row in enumerate(names, 1):
        code, out, err = in_process(*compare(folder, "--sweep", sweep, "--row", row, seeds="0"))
        assert code == 0 and f"{row}, seed 0: " in err, err
        assert [*rows_of(folder, "plain")] == [BASELINE, *names][: 1 + count]
    assert "| [b]\\|c |" in (folder / "report-plain.md").read_text() and "[b]|c" in out


def test_finished_rows_are_not_run_again(compared, in_process):
    folder, sweep, _ = compared

    def written():
        return {path: path.stat().st_mtime_ns for path in folder.rglob("state.pt")}

    before = written()
    again = compare(folder, "--sweep", sweep, "--jobs", 2)
    code, out, err = in_process(*again)
    assert code == 0 and "seed" not in err and "are left" not in err
    assert written() == before
    results = (folder / "mine.json").read_text()
    selected = ["--row", "plain longer", "--row", "maps of other images"]
    code, out, err = in_process(*compare(folder, "--sweep", sweep, *selected, "--json"))
    assert code == 0 and "seed" not in err
    # with all others that have finished, whose number Holm's correction counts
    assert json.loads(out) == json.loads(results)
    teachers, students = 4, 12
    assert len(before) == teachers + students


def test_other_test_images_are_scored_afresh(machine, tmp_path, in_process, monkeypatch):
    """With the students that are there, which are not trained again."""
    images = Path(shutil.copytree(machine / "fashion-mnist", tmp_path / "images"))
    monkeypatch.setenv("GAUPIPE_FASHION_MNIST", str(images))
    changes = sets(*TINY, "model.args={depth: 1, embed_dim: 16, num_heads: 2, patch_size: 4}")
    command = ["compare", "fashion_mnist_plain", "--seeds", "0", "--row", BASELINE, "--test"]
    command += ["--run-dir", tmp_path / "c", "--json", *changes]

    def scored() -> tuple[float, str, int]:
        code, out, err = in_process(*command)
        assert code == 0, err
        (row,) = json.loads(out)["rows"]
        (state,) = (tmp_path / "c/students").rglob("state.pt")
        right = row["runs"][0]["right"]
        return row["final"]["test_acc"]["mean"], right, state.stat().st_mtime_ns

    first, right, trained = scored()
    (student,) = (tmp_path / "c/students").glob("*/student")
    model = timm.create_model(f"local-dir:{student}", pretrained=True).eval()
    mean, std = (model.pretrained_cfg[name][0] for name in ("mean", "std"))
    with gzip.open(images / "t10k-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(50, 1, 8, 8)
    scaled = torch.tensor((pixels / 255 - mean) / std, dtype=torch.float32)
    classes = model(scaled).argmax(1).numpy()
    assert first == pytest.approx((classes == np.arange(50) % 10).mean())
    bits = "".join("01"[int(image)] for image in (classes == np.arange(50) % 10)).ljust(56, "0")
    assert right == f"{int(bits, 2):014x}"
    labels = np.where(np.arange(50) < 40, classes, (classes + 1) % 10).astype(np.uint8)
    write_idx(images / "t10k-labels-idx1-ubyte.gz", labels)
    assert scored() == (pytest.approx(0.8), f"{(2**40 - 1) << 16:014x}", trained)


@pytest.mark.long
def test_students_that_draw_the_same_views_share_a_store(in_process, tmp_path):
    folder, sweep = tmp_path / "c", tmp_path / "views.yaml"
    sweep.write_text(
        "- {name: xsa, model.attention: xsa}\n"
        "- {name: flips, augment.flip: true}\n"
        "- {name: the images themselves, export.views: null}\n"
    )
    views = ["phase_a.teacher=vit", "phase_b.alpha=0.0", "augment.crop_padding=1"]
    rows = [part for name in ("xsa", "flips", "the images themselves") for part in ("--row", name)]
    changes = sets(*views, "export.views=2")
    code, _, err = in_process(*compare(folder, "--sweep", sweep, *rows, *changes))
    assert code == 0, err
    rows = rows_of(folder, "views")
    assert {name: len(row["runs"]) for name, row in rows.items()} == dict.fromkeys(
        [BASELINE, "xsa", "flips", "the images themselves"], 2
    )
    teachers = [path for path in (folder / "teachers").iterdir() if path.is_dir()]
    for teacher in teachers:
        schemas = [store.open(path).schema for path in teacher.glob("*.zarr")]
        assert sorted(schema.views for schema in schemas) == [1, 2, 2]
        views = [schema.extra["views"] for schema in schemas if schema.views == 2]
        assert {one["seed"] for one in views} == {RunDirectory(teacher).settings().seed}
        assert {one["augment"]["flip"] for one in views} == {False, True}
    assert sorted(RunDirectory(teacher).settings().seed for teacher in teachers) == [0, 1]


def test_a_teacher_without_a_head_and_with_other_heads_counts_no_epoch(in_process, tmp_path):
    """What is no setting of a teacher does not keep a comparison from its students, and one that
    has nothing but a slice of its weights does not pay for the export of its maps."""
    vit = load("digits_expected", [*TINY, "model.attention=standard"])
    phase_b.run_request(StudentRequest(vit, tmp_path / "vit"))
    folder = tmp_path / "c"
    changes = [
        f"phase_a.teacher=local-dir:{tmp_path / 'vit' / 'student'}",
        "phase_a.teacher_args={num_classes: 0}",
        "model.student_args={num_heads: 1}",
        "phase_b.head_map=mean",
        "phase_b.alpha=0.0",
    ]
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        "- {name: slice, phase_b.warm_start: slice, phase_b.gamma: 0.0, "
        "model.student_args: {num_heads: 1, embed_dim: 8}}\n"
    )
    rows = ["--sweep", sweep, "--row", "distilled", "--row", "slice"]
    code, out, err = in_process(*compare(folder, *rows, *sets(*changes), seeds="0"))
    assert code == 0 and "failed" not in out, (out, err)
    assert "teacher, 0 epochs" in err, err
    rows = rows_of(folder, "sweep")
    [distilled], [slice_alone] = rows["distilled"]["runs"], rows["slice"]["runs"]
    assert distilled["phase_a_epochs"] == slice_alone["phase_a_epochs"] == 0
    assert distilled["phase_a_costs"]["processor_seconds"] > 0
    assert slice_alone["phase_a_costs"] == {}


def test_a_probe_is_paid_by_those_who_learn_its_predictions(in_process, tmp_path):
    vit = load("digits_expected", [*TINY, "model.attention=standard"])
    phase_b.run_request(StudentRequest(vit, tmp_path / "vit"))
    folder = tmp_path / "c"
    teacher = f"phase_a.teacher=local-dir:{tmp_path / 'vit' / 'student'}"
    changes = [teacher, "phase_a.teacher_args={num_classes: 0}", "phase_b.alpha=0.5"]
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("- {name: maps alone, phase_b.alpha: 0.0}\n")
    rows = ["--sweep", sweep, "--row", "distilled", "--row", "maps alone"]
    code, out, err = in_process(*compare(folder, *rows, *sets(*changes), seeds="0"))
    assert code == 0 and "failed" not in out, (out, err)
    rows = rows_of(folder, "sweep")
    [predictions], [maps] = (rows[name]["runs"] for name in ("distilled", "maps alone"))
    [written] = [json.loads(path.read_bytes()) for path in folder.glob("teachers/*/topk-*.json")]
    probe = written["probe"]
    assert probe["processor_seconds"] > 0
    exported = maps["phase_a_costs"]["multiply_adds"]  # of 100 images
    assert 100 * probe["multiply_adds"] == (100 + 360) * exported  # also of those for validation
    for key, value in probe.items():
        paid = predictions["phase_a_costs"][key] - maps["phase_a_costs"][key]
        assert paid == pytest.approx(value)
    assert with_probe({"multiply_adds": 2, "processor_seconds": 1.0}, True)["multiply_adds"] == 2


def test_a_file_that_was_changed_makes_other_trainings(tmp_path, monkeypatch):
    """Weights in a folder, and a user's own attention: a finished training is not taken for one
    with a file of the same name."""
    vit = load("digits_expected", [*TINY, "model.attention=standard"])
    phase_b.run_request(StudentRequest(vit, tmp_path / "vit"))
    folder = tmp_path / "vit" / "student"
    base = load(
        "digits_expected",
        [*TINY, f"phase_a.teacher=local-dir:{folder}", "phase_a.teacher_args={num_classes: 0}"],
    )
    monkeypatch.setitem(ATTENTION, "mine", ATTENTION["belief"])
    own = tmp_path / "mine.py"
    own.write_text("first")
    rows = [Row(name="plain", plain=True), Row(name="distilled")]
    rows.append(Row(name="mine", settings={"model.attention": "mine"}))

    def folders():
        read = reader(download=False, unlabelled=False)
        trainings = plan(rows, base, [0], tmp_path / "c", read, imports=[own])
        [_, [distilled], [mine]] = trainings
        assert (
            mine.teacher_run.path == distilled.teacher_run.path
        )  # an attention has no teacher of its own
        return [one.folder for [one] in trainings], distilled.teacher_run.path

    before, teacher = folders()
    own.write_text("second")
    after, _ = folders()
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, False]
    other = vit.model_copy(update={"seed": 1})
    phase_b.run_request(StudentRequest(other, tmp_path / "other"))
    shutil.copytree(tmp_path / "other" / "student", folder, dirs_exist_ok=True)
    last, other_teacher = folders()
    assert [old == new for old, new in zip(after, last, strict=True)] == [True, False, False]
    assert other_teacher != teacher
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"]["std"] = [0.9]
    del config["sha256"]
    (folder / "config.json").write_text(json.dumps(config))
    prepared_otherwise, _ = folders()
    assert [old == new for old, new in zip(last, prepared_otherwise, strict=True)][1:] == [
        False
    ] * 2


@pytest.mark.long
def test_a_killed_comparison_goes_on_and_ends_as_an_unbroken_one(compared, in_process, tmp_path):
    folder, sweep, _ = compared
    call = compare(tmp_path / "c", "--sweep", sweep, seeds="0")
    process = subprocess.Popen(
        [sys.executable, "-m", "gaupipe", *call, "--jobs", "2"],
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
    resumed, unbroken = (rows_of(path, "mine").values() for path in (tmp_path / "c", folder))
    for row, other in zip(resumed, unbroken, strict=True):
        assert row["runs"][0]["val_loss"] == other["runs"][0]["val_loss"]
