"""docs/figures/default_run.py, on a run of an epoch."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gaupipe
from exports import write_store
from gaupipe.maps.gaussians import expected_map, from_raw
from gaupipe.models import forward_with_maps
from gaupipe.settings.load import load
from stages import phase_a, phase_b


@pytest.fixture
def default_run(script):
    return script("docs/figures/default_run.py")


@pytest.fixture(scope="module")
def embedding_run(tmp_path_factory) -> Path:
    """The default run, of 40 digits and a tiny ViT, after an epoch of each phase."""
    changes = [
        "data.train_images=40",
        "phase_a.max_epochs=1",
        "phase_a.compression={embedding: 4, hidden: 8}",
        "train.epochs=1",
        "threads=1",
        "model.args={embed_dim: 16, depth: 2, num_heads: 2}",
    ]
    run_dir = tmp_path_factory.mktemp("default") / "run"
    phase_a.run(load("digits", changes), run_dir)
    write_store(run_dir)
    phase_b.run(run_dir, "belief2")
    return run_dir


def test_the_figure_shows_what_the_run_holds(default_run, embedding_run):
    seen = default_run.read(embedding_run, image=3, block=1, head=0, query=6)
    run = gaupipe.open_run(embedding_run)
    stored = run.store.decoder()  # the decoder in numpy: two layers, GELU and the shared prior
    embedding = run.store.gather([3])["embeddings"][0, 1].astype(np.float32)
    np.testing.assert_array_equal(seen.embedding, embedding)
    hidden = embedding @ stored["weight1"][1] + stored["bias1"][1]
    hidden = torch.nn.functional.gelu(torch.from_numpy(hidden)).numpy()
    raw = (hidden @ stored["weight2"][1]).reshape(stored["prior"][1].shape) + stored["prior"][1]
    gaussians = from_raw(torch.from_numpy(raw), "paper")[0]
    np.testing.assert_allclose(seen.gaussians, gaussians, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        seen.teacher_map, expected_map(gaussians, (4, 4))[6], rtol=1e-4, atol=1e-5
    )
    student = run.student("belief2")
    maps = forward_with_maps(student, run.images([3]))[1][1].exp().detach()
    np.testing.assert_allclose(seen.student_map, maps[0, 0, 6], rtol=1e-5)


def test_before_training_embeddings_are_drawn_and_gaussians_nearly_alike(
    default_run, embedding_run
):
    one = default_run.read(embedding_run, image=3, block=0, head=0, query=0)
    drawn = np.random.Generator(np.random.Philox(key=0, counter=[0, 0, 0, 3]))
    start = drawn.standard_normal(8, dtype=np.float32)  # [L * E], of seed 0 and image 3
    np.testing.assert_array_equal(one.embedding_before, start[:4])
    assert 0 < np.abs(one.embedding - one.embedding_before).max() < 0.03  # one step of rate 0.02
    assert np.abs(one.gaussians_before - [0, 0, 1, 1]).max() < 1
    assert np.abs(one.gaussians_before - one.gaussians).max() > 1e-3


def test_the_figure_is_drawn_and_its_numbers_are_said(
    default_run, embedding_run, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "default_run.png"
    arguments = ["default_run.py", embedding_run, "--query", 5, "--out", out]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in arguments])
    default_run.main()
    assert out.read_bytes().startswith(b"\x89PNG")
    seen = default_run.read(embedding_run, image=3, block=1, head=0, query=5)
    divergence = sum(
        p * np.log(p / q) for p, q in zip(seen.teacher_map, seen.student_map, strict=True)
    )
    said = capsys.readouterr().out
    assert f"KL(teacher, student) of the query: {divergence:.3f}" in said
    panels = [text.get_text() for text in default_run.draw(seen).axes[4].texts]
    assert panels == [f"{100 * weight:.0f}" for weight in seen.teacher_map]
