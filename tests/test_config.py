"""Settings: what is read, what is refused and how it is said."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from gaupipe.settings import Settings, scope
from gaupipe.settings import load as config
from gaupipe.settings.sections import Scope, Section, section_of
from gaupipe.system.errors import UserError


def test_dumped_settings_load_to_the_same(tmp_path):
    settings = config.load(
        "digits", ["phase_b.epochs=7", "model.args={embed_dim: 32}", "data.train_images=100"]
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.dump(settings))
    assert config.load(path) == settings
    assert (settings.phase_b.epochs, settings.model.args["embed_dim"]) == (7, 32)


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "1.0e-4"])
def test_numbers_in_scientific_notation_are_numbers(text):
    assert config.load("digits", [f"phase_b.optim.lr={text}"]).phase_b.optim.lr == 1e-4


@pytest.mark.parametrize("text", ["2024", "007", "1e5", "true", "2024-05-01", "a b"])
def test_a_text_that_looks_like_something_else_stays_a_text(text):
    settings = config.load("digits", [f"data.root={text}", f"device={text}"])
    assert (settings.data.root, settings.device) == (Path(text), text)
    assert config.load("digits", ["data.root=x", "data.root=null"]).data.root is None


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
            config.parse(config.with_overrides({}, [f"{name}={value}"]), "--set")
        message = str(error.value)
        assert name in message and "\n" not in message and len(message) < 1000, value


@pytest.mark.parametrize(
    "overrides,message",
    [
        ("sed=1", "unknown setting 'sed'; did you mean 'seed'"),
        ("phase_b.epoch=3", "unknown setting 'phase_b.epoch'; did you mean 'phase_b.epochs'"),
        ("phase_bb.epochs=3", "did you mean 'phase_b'"),
        ("baseline.optim.rl=1", "baseline.optim: unknown setting 'rl'; did you mean 'lr'?"),
        ("baseline.optim.lr=0", "baseline.optim: lr: input should be greater than 0, got 0"),
        ("phase_a.mode=random", "phase_a.mode: input should be 'stochastic' or 'expected', got 'r"),
        ("phase_b.epochs", "should look like"),
        ("=1", "should look like"),
        (".=1", "unknown setting"),
        ("data.name.x=1", "'name' is a value, not a section"),
        ("seed=2147483648", "less than 2147483648"),
        ("threads=3000000000", "threads"),
        ("seed=[1", "not a YAML value"),
        ("data.name=!!timestamp x", "not a YAML value"),
        ("data.name=!!python/object:os.system x", "not a YAML value"),
        ("seed=\x01", "not a YAML value"),
        ("model.args={depth: 1, depth: 2}", "twice"),
        ("model.args={depth:1}", "'depth:1' is no keyword: write {name: value}, with a space"),
        ("model.args={num_heads: [2]}", "num_heads"),
        (
            "model.args={depth: 1001}",
            "depth: input should be less than or equal to 1000",
        ),
        ("model.args={embed_dim: 1e9}", "embed_dim"),
        ("model.args={patch_size: x}", "patch_size"),
        ("model.args={mlp_ratio: null}", "mlp_ratio"),
        ("model.args={drop_rate: 2}", "drop_rate"),
        ("model.args={pos_drop_rate: true}", "pos_drop_rate"),
        ("model.args={patch_drop_rate: 0.5}", "see phase_b.patch_drop_rate"),
        *(
            (f"model.args={{{name}: 1}}", f"{name!r} cannot be given here")
            for name in ("img_size", "in_chans", "num_classes", "pretrained", "device", "attention")
        ),
        ("data.scaling={std: [1.e-320]}", "std.0: input should be greater than or equal to"),
        ("data.scaling={mean: []}", "mean: list should have at least 1 item"),
        ("data.scaling={mean: [true]}", "mean.0: input should be a valid number"),
        ("data.scaling={mean: ['0']}", "mean.0: input should be a valid number"),
        ("phase_a.prior=false & phase_a.per_image=none", "nothing is left to learn"),
        ("phase_a.compression.embedding=4", "set that too"),
        ("phase_a.teacher_args={depth: 2}", "see model.args"),
        ("phase_a.teacher=vit & phase_a.teacher_args={img_size: 3}", "the data set says it"),
        ("phase_b.warm_start=exact", "phase_b.warm_start=exact needs phase_a.per_image=none"),
        ("phase_b.alpha=0 & phase_b.beta=0 & phase_b.gamma=0", "nothing is left to learn"),
    ],
)
def test_bad_settings_are_refused_in_one_line(overrides, message):
    with pytest.raises(UserError) as error:
        config.load("digits", overrides.split(" & "))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content,message",
    [
        ("- seed: 1\n", "should hold settings"),
        ("42\n", "should hold settings"),
        ("null: 1\n", "None"),
        ("1: 2\n", "1"),
        ("seed: 2026-02-28\n", "valid integer"),
        ("seed: 25:61:61\n", "seed"),
        ("data: &a {name: *a}\n", "Circular reference"),
        ("seed: 1\nseed: 2\n", "twice"),
        ("data: {name: digits, name: folder}\n", "twice"),
        ("data: " + "[" * 100_000, "recursion"),
        ("seed: " + "9" * 5000, "digits"),
        ("seed: -.INF\n", "finite"),
        ("data:\n", "data"),
        *(
            (content, "not readable as YAML")
            for content in (
                *("[1]: 2\n", "? {a: 1}\n: 2\n", "<<: {seed: 1}\nseed: 1\nseed: 2\n"),
                *("seed: !!binary x\n", "seed: !!float x\n", "seed: !!int ''\n", "seed: !x 1\n"),
                *("seed: !!python/name:os.system\n", "data: *a\n", "data:\n\tname: digits\n"),
                *("seed: 1\0\n", "\0", "seed: 1\n---\nseed: 2\n", "seed: 1\n  phase_b: 2\n"),
                *("seed: {\n", "seed: 'x\n", "%YAML 9.9\n---\nseed: 1\n", "seed: 1 # \x1b[31m\n"),
                *(b"seed: \xff\xfe\n", "seed: 1\n".encode("utf-16"), b"\x89PNG\r\n\x1a\n"),
                "\ud800".encode("utf-8", "surrogatepass"),
            )
        ),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_files_that_are_no_settings(content, message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as error:
        config.load(path)
    said = str(error.value)
    assert said.startswith(str(path)) and message in said and "\n" not in said


def test_a_long_mapping_is_refused_as_fast_as_it_is_read(tmp_path):
    """60,000 keys took 100 s, four times as long for twice as many."""
    path, seconds = tmp_path / "long.yaml", []
    for keys in (2_000, 16_000):
        path.write_text("".join(f"k{number}: 1\n" for number in range(keys)))
        started = time.process_time()
        with pytest.raises(UserError, match="unknown setting 'k0'"):
            config.load(path)
        seconds.append(time.process_time() - started)
    assert seconds[1] < 25 * seconds[0]


def test_what_a_scope_says():
    names = config.flatten(Settings())
    anytime = names.keys() - config.flatten(Settings(), Scope.ANYTIME).keys()
    assert {"device", "threads", "data.root", "data.workers", "log.every"} <= anytime
    assert scope("model.args.depth") == scope("phase_a.rows.lr") == Scope.RUN
    assert scope("phase_b.student") == Scope.STUDENT | Scope.COMMAND
    assert scope("phase_b.optim.lr") == scope("baseline.optim.lr") == Scope.STUDENT
    assert scope("export.kind") is Scope.EXPORT and scope("seed") is Scope.PHASE
    other = config.load("digits", ["threads=3", "seed=5", "phase_b.optim.lr=0.5"])
    assert set(config.changed(config.load("digits"), other, Scope.ANYTIME | Scope.PHASE)) == {
        "phase_b.optim.lr"
    }


def test_the_baseline_has_the_optimizer_of_phase_b_but_for_its_own_settings():
    args = {"betas": [0.1, 0.2]}
    changes = [f"phase_b.optim={{lr: 0.5, args: {args}}}", "baseline.optim={lr: 0.25}"]
    optim = config.load("digits", changes).baseline_optim
    assert (optim.lr, optim.args, optim.name) == (0.25, args, "muon")


@pytest.mark.parametrize("name", config.shipped())
def test_shipped_settings_are_valid(name):
    assert config.load(name).phase_b.epochs > 0


@pytest.mark.parametrize(
    "name,epochs,weights",
    [
        ("cifar10_atto", 500, (0.2, 0.1, 0.7)),
        ("cifar100_atto", 500, (0.2, 0.1, 0.7)),
        ("imagenet_tiny", 400, (0.7, 0.1, 0.2)),
    ],
)
def test_the_papers_settings_are_the_papers(name, epochs, weights):
    """*GauTransformer, section 4*; what the paper does not name is switched off."""
    settings = config.load(name)
    teacher, phase = settings.phase_a, settings.phase_b
    assert teacher.parametrisation == "paper" and teacher.mode == "stochastic" and not teacher.prior
    assert teacher.stop_accuracy == 0.92
    assert (phase.epochs, phase.alpha, phase.beta, phase.gamma) == (epochs, *weights)
    assert phase.gamma_schedule == "constant" and phase.direction == "student_teacher"
    assert settings.augment.geometry == "ignore" and phase.optim.warmup_epochs == 15
    for optim in (teacher.optim, phase.optim, settings.baseline_optim):
        assert (optim.name, optim.lr, optim.args) == ("adamw", 1e-4, {})
        assert (optim.weight_decay, optim.schedule, optim.min_lr) == (0.03, "cosine", 0)
        assert optim.clip_grad is None and optim.ema is None
    assert teacher.per_image == ("embedding" if name == "imagenet_tiny" else "table")
    assert (settings.precision == "float32") == (name != "imagenet_tiny")
