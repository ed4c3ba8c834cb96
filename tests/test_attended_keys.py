"""docs/figures/attended_keys.py, on runs of an epoch."""

import shutil

import numpy as np
import pytest

import gaupipe
from gaupipe.models import forward_with_maps


@pytest.fixture
def attended_keys(script):
    return script("docs/figures/attended_keys.py")


@pytest.fixture
def root(copied_run, tmp_path):
    """A ViT without maps and a teacher, after one epoch and, for ten, the same again."""
    for epochs in (10, 1):
        copied_run(f"gaussian-{epochs}")
        vit = copied_run(f"vit-{epochs}")
        shutil.rmtree(vit / "maps.zarr")
        (vit / "phase_b").rename(vit / "plain")
    return tmp_path


def test_attention_is_the_mean_over_heads_and_queries_of_the_first_block(attended_keys, root):
    ids = list(attended_keys.IMAGES)
    run = gaupipe.open_run(root / "gaussian-1")
    stored = run.maps(ids)[0].numpy()
    expected = np.einsum("bhqk->bk", stored) / np.prod(stored.shape[1:3])
    epochs, keys = attended_keys.read(root, "gaussian")
    assert epochs == [1, 10]
    np.testing.assert_allclose(keys[0], expected, rtol=1e-5)
    student = gaupipe.open_run(root / "vit-1").student("standard", plain=True)
    maps = forward_with_maps(student, run.images(ids))[1][0].exp().detach().numpy()
    _epochs, vit_keys = attended_keys.read(root, "vit")
    np.testing.assert_allclose(vit_keys[1], maps.mean(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_allclose(vit_keys.sum(-1), 1, rtol=1e-5)


def test_the_figure_is_drawn_and_its_numbers_are_said(attended_keys, root, capsys):
    figure = attended_keys.draw(root)
    figure.savefig(root / "keys.png")
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [len(panel.images[0].get_array()) for panel in panels] == [2] * 6
    lines = capsys.readouterr().out.splitlines()
    _epochs, keys = attended_keys.read(root, "vit")
    strongest = keys[0, 2].argmax(), keys[0, 2].max()
    said = "ViT, image 3, strongest key after epoch 1: {} ({:.3f})".format(*strongest)
    assert any(line.startswith(said) for line in lines)
    assert "ViT: correlation with the last epoch [1. 1.]" in lines
