"""How weights start, and the snapshots of key selection."""

import numpy as np
import pytest
import torch

from gaupipe.data.splits import load_data
from gaupipe.settings import DataSettings, ModelSettings
from gaupipe.settings import load as config
from gaupipe.system.errors import UserError
from gaupipe.vit.build import build_vit
from gaupipe.vit.initialisation import factors
from stages import export_maps, phase_b
from stages.compare.cells import default_cells, resolve, sweep_cells
from stages.compare.run import check
from stages.figures import key_attention
from stages.phase_a import gaussian as phase_a

DIGITS = DataSettings(name="digits")


def build(key: str = "standard", **model) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_vit(ModelSettings(**model), load_data(DIGITS), key)


def diagonal(matrix: torch.Tensor) -> float:
    return matrix.diagonal().mean().item()


def rest(matrix: torch.Tensor) -> float:
    return (matrix - diagonal(matrix) * torch.eye(len(matrix))).std().item()


def test_factors_multiply_to_noise_and_identity():
    torch.manual_seed(0)
    left, right = factors(128, 0.4, -0.4)
    product = left @ right
    assert diagonal(product) == pytest.approx(-0.4, abs=0.02)
    assert rest(product) == pytest.approx(0.4 / 128**0.5, rel=0.05)
    torch.testing.assert_close(
        left.norm(dim=0), right.norm(dim=1)
    )  # the weight is shared between the two
    left, right = factors(128, 0.7, 0.7, rank=32)
    assert (
        left.shape == (128, 32) and diagonal(left @ right) > 0.2
    )  # the best of rank 32 keeps part of it


@pytest.mark.parametrize("key", ["standard", "belief2", "gaussian"])
def test_a_mimetic_start_looks_trained(key):
    vit = build(key, init="mimetic")
    for block in vit.blocks:
        attention, width = block.attn, 64
        v = attention.v.weight if key == "gaussian" else attention.qkv.weight[2 * width :]
        value_projection = (attention.proj.weight @ v).detach()  # x -> proj(v(x))
        assert diagonal(value_projection) == pytest.approx(-0.4, abs=0.03)
        if key != "gaussian":
            q, k = (
                attention.qkv.weight[part * width : (part + 1) * width]
                .detach()
                .unflatten(0, (4, 16))
                for part in (0, 1)
            )
            for head in range(4):
                assert diagonal(q[head].mT @ k[head]) > 3 * rest(q[head].mT @ k[head]) / width**0.5
            assert not attention.qkv.bias.any()
    position = vit.pos_embed[0].detach()
    assert position.abs().max() <= 1 and torch.allclose(
        (position**2).sum(-1), torch.full((16,), 32.0)
    )  # sines and cosines


@pytest.mark.parametrize("no_embed_class", [False, True])
def test_class_and_register_tokens_do_not_move_the_mimetic_position_embedding(no_embed_class):
    args = {"class_token": True, "reg_tokens": 2, "no_embed_class": no_embed_class}
    position = build(init="mimetic", args=args).pos_embed
    torch.testing.assert_close(position[:, -16:], build(init="mimetic").pos_embed)


def test_starts_of_given_width():
    vit = build(init_std=0.1, pos_embed_std=0.5)
    assert vit.blocks[0].mlp.fc1.weight.std().item() == pytest.approx(
        0.088, rel=0.1
    )  # cut at two standard deviations
    assert vit.pos_embed.std().item() == pytest.approx(0.44, rel=0.1)
    assert build().blocks[0].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert build(init="mimetic", pos_embed_std=0.5).pos_embed.std().item() == pytest.approx(
        0.44, rel=0.1
    )


def test_a_mimetic_start_needs_a_width_that_is_a_multiple_of_four():
    with pytest.raises(UserError, match="multiple of 4, got 42"):
        build(init="mimetic", args={"embed_dim": 42, "num_heads": 3})


def test_key_selection_is_kept_after_every_epoch(tmp_path):
    settings = config.load(
        "digits",
        [
            "data.train_images=100",
            "phase_a.max_epochs=2",
            "phase_a.stop_accuracy=1",
            "threads=1",
            "phase_b.epochs=3",
            "key_snapshots=5",
        ],
    )
    phase_a.run(settings, tmp_path / "run")
    export_maps.run(tmp_path / "run")
    phase_b.run(tmp_path / "run", "standard")
    for folder, epochs in (
        (tmp_path / "run" / "phase_a", 2),
        (tmp_path / "run" / "phase_b" / "standard", 3),
    ):
        kept = key_attention.read(folder)
        assert kept.shape == (epochs, 5, 4, 16)  # epochs, images, blocks, keys
        np.testing.assert_allclose(kept.sum(-1), 1, atol=1e-4)
        assert (kept[0] != kept[-1]).any()
    assert list(load_data(settings.data).train.evenly_spaced(5)) == [0, 24, 49, 74, 99]


@pytest.mark.long
def test_the_shipped_sweeps_can_be_run():
    names = config.shipped("sweeps")
    assert "loss_weights" in names
    small = ["data.name=digits", "data.train_images=null", "model.args={}"]
    small += ["model.name=gauvit_pico_patch2_8"]  # 16 tokens of the digits, for eight keys
    data = load_data(config.load("digits").data)
    vit = "fashion_mnist_vit"
    meant_for = {
        "teachers": vit,
        "goal": vit,
        "first_phases": "cifar10_small",
        "views": "cifar10_vit",
    }
    for name in names:
        base = config.load(meant_for.get(name, "fashion_mnist"), small)
        cells = sweep_cells(
            config.read_yaml(name, "sweeps"), name, default_cells(base, ["standard"], tune=False)
        )
        for cell in cells:
            check(cell, resolve(cell, {cell.name: cell for cell in cells}, {}, base), data)


def test_a_vit_without_a_position_embedding_cannot_start_mimetic():
    with pytest.raises(UserError, match="without a position embedding"):
        build(init="mimetic", args={"pos_embed": "none"})
