"""Linear probes: predictions of training images by regressions that have not seen them."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from arguments import sets
from gaupipe.data.splits import Split
from gaupipe.system import progress
from gaupipe.system.errors import UserError
from gaupipe.teachers.probe import check_probe, fit, stratified
from gaupipe.vit.saving import save_student
from pictures import photos
from vits import small

CLASSES = 4


def test_predictions_out_of_fold_never_saw_their_image():
    """With random labels and more features than images, a regression is right about nearly all
    images that it has seen, and about others as often as chance."""
    draw = np.random.default_rng(0)
    features = draw.normal(size=(200, 1200))
    labels = draw.permutation(np.arange(200) % CLASSES)
    probe = fit(features, labels, features, labels, CLASSES, seed=0)
    image_features, ids = torch.from_numpy(features).float(), torch.arange(200)
    assert (probe.logits(image_features).argmax(-1).numpy() == labels).mean() > 0.95
    out_of_fold = probe.logits_out_of_fold(image_features, ids).argmax(-1).numpy()
    assert abs((out_of_fold == labels).mean() - 1 / CLASSES) < 0.1
    in_fold = probe.logits_out_of_fold(image_features, ids.roll(1)).argmax(-1).numpy()
    assert (in_fold == labels).mean() > 0.7  # the ids say which regression is asked


@pytest.mark.parametrize("classes", [2, 5])
def test_classes_that_lie_apart_are_predicted_in_their_order(classes):
    draw = np.random.default_rng(0)
    labels = np.arange(60) % classes
    features = 10 * np.eye(classes)[labels] + draw.normal(size=(60, classes))
    probe = fit(features, labels, features, labels, classes, seed=0)
    logits = probe.logits_out_of_fold(torch.from_numpy(features), torch.arange(60))
    assert logits.shape == (60, classes) and logits.argmax(-1).tolist() == labels.tolist()
    assert probe.accuracy == 1


def test_a_feature_that_is_constant_but_for_rounding_gets_no_weight():
    draw = np.random.default_rng(0)
    labels = np.arange(60) % 2
    features = 10 * np.eye(2)[labels] + draw.normal(size=(60, 2))
    rounded = 1e3 + np.spacing(np.float32(1e3)) * draw.integers(-1, 2, size=(60, 1))
    features = np.concatenate([features, rounded], axis=1)
    probe = fit(features, labels, features, labels, 2, seed=0)
    assert probe.weights[..., 2].abs().max() < 1e-3
    assert probe.accuracy == 1


def test_a_long_fit_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SILENCE", 0)
    features = np.random.default_rng(0).normal(size=(20, 3))
    labels = np.arange(20) % 2
    fit(features, labels, features, labels, 2, seed=0)
    shares = re.findall(r"linear probe: (\d+)%", "".join(capsys.readouterr()))
    assert len(shares) == 26 and shares[-1] == "100"


def test_every_fold_has_its_share_of_each_class():
    labels = np.repeat([0, 1, 2], [50, 20, 2])
    folds = stratified(labels, seed=0)
    shares = [np.bincount(folds[labels == label], minlength=5) for label in range(3)]
    assert shares[0].tolist() == [10] * 5 and shares[1].tolist() == [4] * 5
    assert shares[2].max() == 1
    assert not np.array_equal(folds, stratified(labels, seed=1))


@pytest.mark.parametrize(
    "labels, message",
    [
        ([0, 0, 1, 1], "4 training images are fewer than its 5 folds"),
        ([0, 0, 0, 1, 0, 0], "the class dog has 1 training images"),
    ],
)
def test_too_few_images_are_refused(labels, message):
    source = SimpleNamespace(labels=np.array(labels))
    train = Split(source, np.arange(len(labels)))
    data = SimpleNamespace(name="pets", num_classes=2, class_names=["cat", "dog"], train=train)
    with pytest.raises(UserError, match=f"a linear probe on pets: {message}"):
        check_probe(data)


@pytest.mark.parametrize("alpha", [0, 0.5])
def test_a_run_that_cannot_have_a_probe_goes_without_or_is_refused(tmp_path, in_process, alpha):
    photos(tmp_path / "photos", count=2, size=(8, 8))
    save_student(small(size=8, patch_size=4, num_classes=3), tmp_path / "vit")
    teacher = ("--teacher", f"local-dir:{tmp_path / 'vit'}", "--run-dir", tmp_path / "run")
    model = "model.args={embed_dim: 12, depth: 1, num_heads: 3}"
    changes = sets(f"phase_b.alpha={alpha}", "threads=1", model, "data.image_size=8")
    code, _, err = in_process("phase-a", "--data", tmp_path / "photos", *teacher, *changes)
    assert "are fewer than its 5 folds" in err
    if alpha:
        assert code == 2 and not (tmp_path / "run").exists()
    else:
        assert code == 0 and "its maps are taken without predictions" in err
