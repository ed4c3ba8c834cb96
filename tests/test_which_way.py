"""Which way to begin on a folder of images: accuracies on held-out images, and what they say."""

import json
import math

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from gaupipe.vit.saving import save_student
from stages.which_way import MARGIN, Way, histograms, out_of_fold


def test_histograms_are_those_of_gradients():
    """By hand on two cells of 8 pixels a side: a ramp to the right, below it one to the bottom."""
    image = np.zeros((3, 16, 16))
    image[1, :8] = (np.arange(16) / 16) ** 2  # whose root is a ramp
    image[1, 8:] = ((np.arange(8) / 16) ** 2)[:, None]
    found = histograms(torch.from_numpy(image[None]).float()).numpy().reshape(2, 2, 9)
    assert found.shape == (2, 2, 9)
    # above only the direction to the right; below mostly that to the bottom, 4 of 9 (80 to 100 deg)
    assert found[0, 0].argmax() == found[0, 1].argmax() == 0
    assert found[1, 0].argmax() == found[1, 1].argmax() == 4
    assert np.linalg.norm(found) == pytest.approx(1)


def test_images_are_told_apart_in_folds_that_were_not_seen():
    from sklearn.svm import SVC

    draw = np.random.default_rng(0)
    labels = np.arange(100) % 2
    noise = draw.normal(size=(100, 5))
    assert abs(out_of_fold(SVC(), noise, labels, 0) - 0.5) < 0.2
    assert out_of_fold(SVC(), noise + 9 * labels[:, None], labels, 0) == 1


def test_the_pretrained_vit_is_the_way_where_its_features_tell_more():
    assert Way(200, 0.8, 0.7, 1.0, 1.0).pretrained
    assert not Way(200, 0.7 + MARGIN, 0.7, 1.0, 1.0).pretrained


def test_a_command_says_which_way_to_begin(tmp_path, in_process):
    """Stripes of two directions, which gradients tell apart, and an untrained ViT does not."""
    draw = np.random.default_rng(0)
    for number in range(60):
        name = "ab"[number % 2]
        angle = (number % 2) * math.pi / 2 + draw.normal(scale=0.1)
        down, across = np.mgrid[:32, :32]
        phase = (across * math.cos(angle) + down * math.sin(angle)) / 2 + draw.uniform(0, 6)
        pixels = (127 + 100 * np.sin(phase) + draw.normal(scale=9, size=(32, 32))).clip(0, 255)
        path = tmp_path / "photos" / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).convert("RGB").save(path)
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=5)
    torch.nn.init.zeros_(vit.patch_embed.proj.weight)  # it sees nothing
    save_student(vit, tmp_path / "vit")
    command = ["plan", "--data", "photos", "--model", "local-dir:vit"]
    code, out, err = in_process(*command, "--json", cwd=tmp_path)
    assert code == 0, err
    way = json.loads(out)
    assert way["hog_acc"] > 0.9 > 0.7 > way["probe_acc"] and way["images"] == 48
    assert way["pretrained"] is False and way["small_seconds"] > 0 < way["tuned_seconds"]
    code, out, err = in_process(*command, cwd=tmp_path)
    assert code == 0 and err.endswith("begin with gaupipe train --data photos\n"), err
