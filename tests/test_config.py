"""Settings: what is read, what is refused and how it is said."""

from pathlib import Path

import pytest

from gaupipe import settings as config
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


@pytest.mark.parametrize("text", ["2024", "007", "1e5", "true", "2024-05-01", "2024-13-45", "a b"])
def test_a_text_that_looks_like_something_else_stays_a_text(text):
    settings = config.load("digits", [f"data.root={text}", f"log.project={text}"])
    assert (settings.data.root, settings.log.project) == (Path(text), text)
    assert config.load("digits", ["data.root=x", "data.root=null"]).data.root is None


@pytest.mark.parametrize(
    "override,message",
    [
        ("phase_b.epoch=3", "unknown setting 'phase_b.epoch'; did you mean 'phase_b.epochs'"),
        ("phase_bb.epochs=3", "did you mean 'phase_b'"),
        ("baseline.optim.rl=1", "baseline.optim.lr"),
        (
            "phase_a.mode=random",
            "phase_a.mode: input should be 'stochastic' or 'expected', got 'random'",
        ),
        ("phase_b.alpha=-1", "phase_b.alpha"),
        ("phase_b.epochs=many", "phase_b.epochs"),
        ("phase_b.epochs", "should look like"),
        ("data.name.x=1", "'name' is a value, not a section"),
        ("phase_b={alpha: 0, beta: 0, gamma: 0}", "nothing is left to learn"),
        ("phase_a={prior: false, residual: false}", "nothing is left to learn"),
    ],
)
def test_bad_settings_are_refused_in_one_line(override, message):
    with pytest.raises(UserError) as error:
        config.load("digits", [override])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "older,per_image,sizes",
    [
        ({"residual": True}, "table", None),
        ({"residual": True, "compression": None}, "table", None),
        ({"residual": False}, "none", None),
        ({"compression": None}, "table", None),
        ({"compression": {"embedding": 4}}, "embedding", (4, 768)),
        ({"residual": True, "compression": {"hidden": 8}}, "embedding", (256, 8)),
        ({"residual": False, "compression": {"embedding": 4}}, "none", (4, 768)),
        ({"per_image": "embedding"}, "embedding", (256, 768)),
        ({"per_image": "embedding", "residual": True}, "embedding", (256, 768)),
        ({"per_image": "predicted", "compression": None}, "predicted", None),
        ({}, "table", None),
    ],
)
def test_older_names_say_what_they_said(older, per_image, sizes, tmp_path):
    """In a file, and as changes of whatever a file says; and a dump says it again."""
    file = tmp_path / "mine.yaml"
    file.write_text(config.yaml.safe_dump({"phase_a": older}))
    changes = [f"phase_a.{name}={config.yaml.safe_dump(of)}" for name, of in older.items()]
    for settings in (config.load(file), config.load("digits", changes)):
        phase = settings.phase_a
        found = phase.compression and (phase.compression.embedding, phase.compression.hidden)
        assert (phase.per_image, found) == (per_image, sizes)
        (tmp_path / "again.yaml").write_text(config.dump(settings))
        assert config.load(tmp_path / "again.yaml") == settings
        assert "residual" not in config.dump(settings)


@pytest.mark.parametrize(
    "before,change,after",
    [
        ("table", "residual=false", "none"),
        ("none", "residual=true", "table"),
        ("predicted", "residual=true", "table"),
        ("embedding", "residual=true", "embedding"),
        ("embedding", "compression=null", "table"),
        ("none", "compression=null", "none"),
        ("none", "compression={embedding: 3}", "none"),
        ("table", "compression={embedding: 3}", "embedding"),
        ("embedding", "compression.embedding=3", "embedding"),
        ("embedding", "per_image=predicted", "predicted"),
        ("embedding", "per_image=none", "none"),
    ],
)
def test_a_change_overrules_the_file_in_older_names_too(before, change, after, tmp_path):
    dumped = config.dump(config.load("digits", [f"phase_a.per_image={before}"]))
    (tmp_path / "run.yaml").write_text(dumped)
    phase = config.load(tmp_path / "run.yaml", [f"phase_a.{change}"]).phase_a
    assert phase.per_image == after
    assert (phase.compression is not None) == (after == "embedding" or "{" in change)


@pytest.mark.parametrize(
    "phase",
    [
        {"per_image": "none", "residual": True},
        {"per_image": "table", "residual": False},
        {"per_image": "predicted", "residual": True},
        {"per_image": "table", "compression": {"embedding": 4}},
        {"per_image": "predicted", "compression": {"embedding": 4}},
        {"per_image": "embedding", "compression": None},
    ],
)
def test_names_that_contradict_each_other_are_refused_in_one_line(phase, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(config.yaml.safe_dump({"phase_a": phase}))
    changes = [f"phase_a.{name}={config.yaml.safe_dump(of)}" for name, of in phase.items()]
    for source, overrides in ((file, []), ("digits", changes), ("digits", changes[::-1])):
        with pytest.raises(UserError) as error:
            config.load(source, overrides)
        assert "per_image is" in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_no_settings(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    for name in ("list.yaml", "broken.yaml", "absent.yaml"):
        with pytest.raises(UserError) as error:
            config.load(tmp_path / name)
        assert name in str(error.value) and "\n" not in str(error.value)


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
    assert (teacher.stop_accuracy, teacher.upper_accuracy) == (0.92, 0.98)
    assert (phase.epochs, phase.alpha, phase.beta, phase.gamma) == (epochs, *weights)
    assert phase.gamma_schedule == "constant" and phase.direction == "student_teacher"
    assert settings.augment.geometry == "ignore" and phase.optim.warmup_epochs == 15
    for optim in (teacher.optim, phase.optim, settings.baseline.optim or phase.optim):
        assert (optim.name, optim.lr, optim.betas) == ("adamw", 1e-4, (0.9, 0.999))
        assert (optim.weight_decay, optim.schedule, optim.min_lr) == (0.03, "cosine", 0)
        assert optim.clip_grad is None and optim.ema is None
    assert bool(teacher.compression) == (name == "imagenet_tiny")
    assert (settings.precision == "float32") == (name != "imagenet_tiny")
