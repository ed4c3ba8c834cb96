"""Settings: what is read, what is refused and how it is said."""

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml

from gaupipe.settings import Settings, scope
from gaupipe.settings.load import (
    changed,
    dump,
    flatten,
    load,
    load_merged,
    parse,
    shipped,
    with_anytime,
    with_overrides,
)
from gaupipe.settings.sections import Scope, Section, section_of
from gaupipe.system.errors import UserError


def test_dumped_settings_load_to_the_same(tmp_path):
    settings = load(
        "digits", ["train.epochs=7", "model.args={embed_dim: 32}", "data.train_images=100"]
    )
    path = tmp_path / "config.yaml"
    path.write_text(dump(settings))
    assert load(path) == settings
    assert (settings.train.epochs, settings.model.args["embed_dim"]) == (7, 32)


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "1.0e-4"])
def test_numbers_in_scientific_notation_are_numbers(text):
    assert load("digits_expected", [f"train.optim.lr={text}"]).train.optim.lr == 1e-4


@pytest.mark.parametrize("text", ["2024", "007", "1e5", "true", "2024-05-01", "a b"])
def test_a_text_that_looks_like_something_else_stays_a_text(text):
    settings = load("digits_expected", [f"data.root={text}", f"device={text}"])
    assert (settings.data.root, settings.device) == (Path(text), text)
    assert load("digits_expected", ["data.root=x", "data.root=null"]).data.root is None


def fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, annotation) of every setting, and of every section in the settings."""
    for name, field in section.model_fields.items():
        yield prefix + name, field.annotation
        if inner := section_of(field.annotation):
            yield from fields(inner, f"{prefix}{name}.")


NO_NUMBERS = [
    *(".inf", "-.inf", ".nan", "1e400", "-1", "-1e-9", "9" * 5000),
    *("x", "true", "no", "2026-01-01", "[1]", "[]", "{a: 1}"),
]
BAD_VALUES = {
    int: [*NO_NUMBERS, "0.5", "1e30", "-0.5"],
    float: NO_NUMBERS,
    bool: ["x", "2", "null", "[1]", "{a: 1}", "0.5", ".nan"],
    str: ["[1]", "{a: 1}", "null"],
    Path: ["[1]", "{a: 1}"],
    dict: ["x", "1", "[1]", "null", "{1: 2}", "{a:1}"],
    list: ["x", "{a: 1}", "[[]]", "[-1]", "[.nan]"],
    tuple: ["x", "0.9", "[0.9]", "[0.9, x]", "[0.9, 0.9, 0.9]", "[-1, 1]", "[.nan, 1]"],
    Literal: ["x", "16", "[1]", "{a: 1}", "true"],
    Section: ["x", "1", "[1]", "{nonsense: 1}"],
}
"""For every type of a setting, YAML values that no setting of this type has."""


def bad_values(annotation: Any) -> list[str]:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    bad = set.intersection(*(set(BAD_VALUES[base(kind)]) for kind in kinds if kind is not NoneType))
    return sorted(bad - {"null"} if NoneType in kinds else bad)


def base(kind: Any) -> Any:
    if get_origin(kind) is Annotated:
        return base(get_args(kind)[0])
    return Section if section_of(kind) else get_origin(kind) or kind


@pytest.mark.parametrize(
    "name,annotation", list(fields(Settings)), ids=lambda value: str(value)[:40]
)
def test_every_setting_refuses_what_it_cannot_be(name, annotation):
    """In one line that names the setting."""
    values = bad_values(annotation)
    assert values
    for value in values:
        with pytest.raises(UserError) as error:
            parse(with_overrides({}, [f"{name}={value}"]), "--set")
        message = str(error.value)
        assert name in message and "\n" not in message and len(message) < 1000, value


def test_a_long_mapping_is_refused_as_fast_as_it_is_read(tmp_path):
    """60,000 keys took 100 s, four times as long for twice as many."""
    path, seconds = tmp_path / "long.yaml", []
    for keys in (2_000, 16_000):
        path.write_text("".join(f"k{number}: 1\n" for number in range(keys)))
        started = time.process_time()
        with pytest.raises(UserError, match="unknown setting 'k0'"):
            load(path)
        seconds.append(time.process_time() - started)
    assert seconds[1] < 25 * seconds[0]


def test_what_a_scope_says():
    names = flatten(Settings())
    anytime = names.keys() - flatten(Settings(), Scope.ANYTIME).keys()
    assert {"device", "threads", "data.root", "data.workers", "log.every"} <= anytime
    assert scope("model.args.depth") == scope("phase_a.rows.lr") == Scope.RUN
    student_settings = (
        "model.attention",
        "train.optim.lr",
        "phase_b.gamma",
        "seed",
    )
    assert {scope(name) for name in student_settings} == {Scope.STUDENT}
    assert scope("export.kind") is scope("model.name") is Scope.RUN
    other = load("digits_expected", ["threads=3", "export.k=5", "train.optim.lr=0.5"])
    before = load("digits_expected")
    assert changed(before, other, Scope.ANYTIME, Scope.STUDENT) == ["export.k"]
    assert changed(before, with_anytime(before, other)) == ["threads"]


TRAINED = {
    "train": {"epochs": 9, "patience": 3, "optim": {"lr": 0.5, "args": {"betas": [0.1, 0.2]}}},
    "phase_b": {"epochs": 4, "label_smoothing": 0.1, "optim": {"lr": 0.25, "warmup_epochs": 2}},
}


def test_phase_b_differs_from_train_where_it_says_so():
    settings = parse(copy.deepcopy(TRAINED), "here")
    student = settings.student_training
    assert (student.epochs, student.patience, student.label_smoothing) == (4, 3, 0.1)
    assert (student.optim.lr, student.optim.warmup_epochs, student.optim.clip_grad) == (0.25, 2, 1)
    assert student.optim.args == settings.train.optim.args == {"betas": [0.1, 0.2]}
    assert settings.with_training(distilled=True).train == student
    assert settings.with_training(distilled=True).student_training == student
    assert settings.with_training(distilled=False).student_training == settings.train
    assert parse(yaml.safe_load(dump(settings)), "again") == settings


@pytest.mark.parametrize(
    "override,student,baseline",
    [
        ("train.epochs=2", (2, 3, 0.25, 2), (2, 3, 0.5, 1)),
        ("train.optim.lr=0.1", (4, 3, 0.1, 2), (9, 3, 0.1, 1)),
        ("train.patience=null", (4, None, 0.25, 2), (9, None, 0.5, 1)),
        ("train={epochs: 2, optim: {warmup_epochs: 0}}", (2, None, 0.25, 0), (2, None, 4e-3, 0)),
        ("phase_b.epochs=7", (7, 3, 0.25, 2), (9, 3, 0.5, 1)),
    ],
)
def test_train_on_the_command_line_counts_for_both(override, student, baseline, tmp_path):
    """Although the file may have others for phase B."""
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(TRAINED))
    settings = [load(path, [override])]
    if "{" not in override:  # which load_merged joins
        settings.append(load_merged(path, [override]))
    for each in settings:
        for train, values in ((each.student_training, student), (each.train, baseline)):
            optim = train.optim
            assert (train.epochs, train.patience, optim.lr, optim.warmup_epochs) == values


def test_what_the_command_line_says_of_phase_b_stays_beside_train():
    settings = load("digits_expected", ["phase_b.epochs=3", "train.epochs=5"])
    assert (settings.student_training.epochs, settings.train.epochs) == (3, 5)


def test_validating_settings_reads_no_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_args": {"attention": "xsa"}}')
    tree = {"model": {"name": f"local-dir:{tmp_path}"}}
    assert Settings.model_validate(tree).model.attention == "standard"
    assert parse(tree, "here").model.attention == "xsa"


@pytest.mark.parametrize("name", shipped())
def test_shipped_settings_are_valid(name):
    assert load(name).train.epochs > 0


@pytest.mark.parametrize(
    "name,epochs,weights",
    [
        ("cifar10_atto", 500, (0.2, 0.1, 0.7)),
        ("imagenet_tiny", 400, (0.7, 0.1, 0.2)),
    ],
)
def test_the_papers_settings_are_the_papers(name, epochs, weights):
    """*GauTransformer, section 4*; what the paper does not name is switched off."""
    settings = load(name)
    teacher, phase, train = settings.phase_a, settings.phase_b, settings.student_training
    assert teacher.parametrisation == "paper" and teacher.mode == "stochastic" and not teacher.prior
    assert teacher.stop_accuracy == 0.92
    assert (train.epochs, phase.alpha, phase.beta, phase.gamma) == (epochs, *weights)
    assert phase.gamma_schedule == "constant" and phase.divergence == "student_teacher"
    assert settings.augment.geometry == "ignore" and train.optim.warmup_epochs == 15
    for optim in (teacher.optim, train.optim, settings.train.optim):
        assert (optim.name, optim.lr, optim.args) == ("adamw", 1e-4, {})
        assert (optim.weight_decay, optim.schedule, optim.min_lr) == (0.03, "cosine", 0)
        assert optim.clip_grad is None and optim.ema is None
    assert teacher.per_image == ("embedding" if name == "imagenet_tiny" else "table")
    assert settings.precision == ("bfloat16" if name == "imagenet_tiny" else "auto")
