"""The tables of results in README and docs are what their raw files say."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gaupipe.settings.load import load, read_yaml
from stages.compare.measures import difference
from stages.compare.rows import default_rows, sweep_rows

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "results" / "data"
KEYS = {"command", "commit", "data", "images", "epochs", "seed", "val", "core_seconds"}


@pytest.fixture
def collect(script):
    return script("docs/results/collect.py")


def test_every_page_has_the_tables_of_its_raw_files(collect):
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        page = path.read_text()
        assert collect.draw_tables(page) == page, f"{path}: python docs/results/collect.py pages"


def test_a_table_says_means_and_paired_differences(collect):
    tests = {"labels": (0.50, 0.60, 0.64), "local": (0.51, 0.63, 0.66)}
    trainings = [
        {"name": name, "epochs": 2, "seed": seed, "val": 0.5, "test": test, "core_seconds": 10}
        for name, shares in tests.items()
        for seed, test in zip((2, 0, 1), shares, strict=True)
    ]
    head, _, labels, local = collect.table(trainings, [("local", "labels")]).splitlines()
    assert head.startswith("| row (3 seeds) | test | core seconds |")
    assert labels == "| labels | 58.0 ± 7.2 | 10 |  |"
    paired = difference([1.0, 3.0, 2.0])
    interval = f"({paired.low:+.1f} to {paired.high:+.1f})"
    assert local == f"| local | 60.0 ± 7.9 | 10 | +2.0 {interval} above `labels`: not decided |"


def test_pairs_are_tested_as_one_family_over_common_seeds(collect):
    tests = {"labels": (0.50, 0.60, 0.64), "local": (0.51, 0.63, 0.66), "slice": (0.58, 0.67)}
    trainings = [
        {"name": name, "seed": seed, "test": test}
        for name, shares in tests.items()
        for seed, test in enumerate(shares)
    ]
    pairs = [("local", "labels"), ("slice", "local")]
    table = collect.table_of_pairs(trainings, pairs)
    [first, second] = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]
    above_labels = difference([1.0, 3.0, 2.0])
    above_local = difference([7.0, 4.0])
    assert first[:2] == ["local", "labels"] and first[2].startswith("+2.0 (")
    assert second[:2] == ["slice", "local"] and second[2].startswith("+5.5 (")
    assert first[3] == f"{2 * above_labels.p:.3f}"  # the smaller p of two
    assert second[3] == f"{max(2 * above_labels.p, above_local.p):.3f}"
    with pytest.raises(ValueError, match="labels: two trainings with seed 0"):
        collect.table_of_pairs([*trainings, trainings[0]], pairs)


def test_no_p_is_said_to_be_zero(collect):
    tests = {"labels": (0.5, 0.6, 0.7), "local": (0.6, 0.7, 0.8001), "slice": (0.6, 0.7, 0.82)}
    trainings = [
        {"name": name, "seed": seed, "test": test}
        for name, shares in tests.items()
        for seed, test in enumerate(shares)
    ]
    table = collect.table_of_pairs(trainings, [("local", "labels"), ("slice", "labels")])
    [small, larger] = [line.split(" | ")[3] for line in table.splitlines()[2:]]
    assert small == "< 0.001"
    assert larger == f"{difference([10.0, 10.0, 12.0]).p:.3f}" == "0.004"


def test_pairs_say_where_only_seeds_are_tested(collect):
    """Of twelve images nine are right and eight, a bit each: one image is no difference."""
    tests = {"labels": (0.660, 0.661, 0.662), "local": (0.760, 0.762, 0.763)}
    trainings = [
        {"name": name, "seed": seed, "test": test}
        for name, shares in tests.items()
        for seed, test in enumerate(shares)
    ]
    pairs = [("local", "labels")]
    assert collect.table_of_pairs(trainings, pairs).endswith("| confirmed, seeds only |")
    for training in trainings:
        digits = "ff00" if training["name"] == "labels" else "ff80"
        training |= {"right": digits, "test_images": 12}
    assert collect.right_images(trainings[0]).tolist() == [True] * 8 + [False] * 4
    line = collect.table_of_pairs(trainings, pairs).splitlines()[-1]
    assert "(+0.0 to +25.0) |" in line and line.endswith("| not decided |")


def test_a_table_leaves_out_columns_that_say_nothing_and_rows_of_too_few_seeds(collect):
    trainings = [
        {"name": name, "epochs": 2, "seed": seed, "val": 0.5, "core_seconds": None}
        for name, seed in [("labels", 0), ("labels", 1), ("once", 0)]
    ]
    assert collect.table(trainings).splitlines() == [
        "| row | seeds | validation |",
        "|---|---|---|",
        "| labels | 2 | 50.0 ± 0.0 |",
        "| once | 1 | 50.0 |",
    ]
    assert collect.table(trainings, least_seeds=2).splitlines() == [
        "| row (2 seeds) | validation |",
        "|---|---|",
        "| labels | 50.0 ± 0.0 |",
    ]
    tested = {**trainings[0], "name": "tested", "epochs": 3, "test": 0.4}
    assert (
        collect.table([*trainings, tested]).splitlines()[-1] == "| tested | 3 | 1 | 50.0 | 40.0 |"
    )


def test_a_table_of_ways_says_where_the_advice_was_right(collect):
    probe, svm = "linear probe, 200 images", "SVM on gradients, 200 images"
    names = (probe, svm, "random weights", "pretrained")
    values = {"a": (0.8, 0.7, 0.6, 0.9), "b": (0.5, 0.7, 0.6, 0.9), "c": (0.5, 0.7)}
    trainings = [
        {"name": name, "data": data, "images": 1000, "val": value}
        for data, row in values.items()
        for name, value in zip(names, row, strict=False)
    ]
    first, second, third = collect.table_of_ways(trainings).splitlines()[2:]
    assert first == "| a | 1,000 | 80.0 | 70.0 | pretrained | 60.0 | 90.0 | yes |"
    assert second == "| b | 1,000 | 50.0 | 70.0 | random weights | 60.0 | 90.0 | no |"
    assert third == "| c | 1,000 | 50.0 | 70.0 | random weights | - | - | - |"


def test_a_table_of_retests_has_means_over_seeds_of_the_rows_that_are_named(collect):
    shares = {"nearest_is_image": 0.07, "nearest_is_class": 0.99, "of_another_image": 0.4}
    rows = [
        {"name": name, "seed": seed, "same_image": 0.2, "of_its_class": 0.3, **shares, "none": none}
        for name in ("table", "decoder")
        for seed, none in ((0, 0.9), (1, 1.0))
    ]
    assert collect.table_of_retests(rows, ["table"]).splitlines()[2:] == [
        "| table | 2 | 0.20 | 0.30 | 7 % | 99 % | 95 % | 40 % |"
    ]
    assert len(collect.table_of_retests(rows).splitlines()) == 4


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.name)
def test_raw_files_are_lists_of_entries_with_all_keys(path):
    """Measurements of time and memory have a title, and no accuracy; trainings have a name."""
    measured = path.name in ("benchmarks.json", "explain.json", "inference.json", "scale.json")
    for entry in json.loads(path.read_text()):
        name = entry["title" if measured else "name"]
        missing = KEYS - entry.keys()
        assert not missing, f"{name}: {missing} is missing"
        assert entry["command"] and re.fullmatch("[0-9a-f]{7,40}", entry["commit"]), name
        assert entry["data"], name
        assert not measured or entry["val"] is None, name


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.name)
def test_commands_of_raw_files_name_files_settings_and_rows_that_there_are(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    rows_of = {}
    for entry in json.loads(path.read_text()):
        commands = [entry["command"], *filter(None, [entry.get("page")])]
        for command in "; ".join(commands).split("; "):
            words = shlex.split(command)
            for word in words:
                assert not word.startswith(("docs/", "benchmarks/")) or Path(word).exists(), word
            if words[0] != "gaupipe" or words[1] not in ("compare", "phase-a", "run", "train"):
                continue
            changes = [word for option, word in pairwise(words) if option == "--set"]
            config = "digits"
            if words[2:] and not words[2].startswith("-"):
                config = words[2]
            settings = load(config, changes)
            if words[1] != "compare":
                continue
            if command not in rows_of:
                rows = default_rows(settings, [settings.model.attention])
                [sweep] = [word for option, word in pairwise(words) if option == "--sweep"]
                rows = sweep_rows(read_yaml(sweep, "sweeps"), sweep, rows)
                rows_of[command] = {row.name for row in rows}
            asked = [word for option, word in pairwise(words) if option == "--row"]
            assert {entry.get("row", entry["name"]), *asked} <= rows_of[command], command


def test_maps_within_two_standard_errors_of_the_best_are_bold(collect):
    """Photo by photo: the spread of the photos themselves hides no difference."""
    draw = np.random.default_rng(0)
    photos = draw.random(100)
    noise = draw.normal(size=100)
    noise -= noise.mean()
    error = noise.std(ddof=1) / 10  # of the mean of 100
    measured = {
        "best": photos,
        "as good": photos + noise + 1.9 * error,
        "worse": photos + noise + 2.1 * error,
    }
    rows = [
        {"title": name, "photos": {"removed, grey": list(values)}}
        for name, values in measured.items()
    ]
    lines = collect.table_of_maps(rows).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines if "**" in line] == ["best", "as good"]
    spread = photos.std(ddof=1) / 10
    assert f"**{photos.mean():.3f} ± {spread:.3f}**" in lines[0]
    inside = [
        {"title": row["title"], "photos": {"inside": row["photos"]["removed, grey"]}}
        for row in rows
    ]
    head, _, line = collect.table_of_maps([*rows, *inside], ["worse"]).splitlines()
    assert head == "| map | removed, grey | inside |"
    assert [cell.count("**") for cell in line.split("|")[2:4]] == [0, 2]  # higher is better inside


def test_the_front_has_the_rows_above_which_no_cheaper_one_lies(script, tmp_path):
    unlabelled = script("docs/figures/unlabelled.py")
    tests = {"labels": (10, 0.5), "dear": (40, 0.6), "best": (30, 0.8), "worse": (20, 0.4)}
    rows = [
        {
            "name": name,
            "images": 3000,
            "unlabelled": 0,
            "core_seconds": seconds + 5,  # of which a teacher's are no student's
            "teacher_seconds": 5,
            "test": test,
        }
        for name, (seconds, test) in tests.items()
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    read = unlabelled.read(tmp_path / "rows.json")
    assert [row.name for row in read] == ["labels", "worse", "best", "dear"]
    assert [row.name for row in unlabelled.front(read)] == ["labels", "best"]


def test_the_page_of_stores_says_what_an_export_took():
    entries = json.loads((DATA / "scale.json").read_text())
    page = (ROOT / "docs" / "store.md").read_text()
    [exported] = [entry for entry in entries if entry["title"] == "12,800 images exported"]
    said = f"{exported['core_seconds']} seconds, and {exported['measured']['files']} files"
    assert said in " ".join(page.split())
