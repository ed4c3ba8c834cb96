"""How weights start."""

import pytest
import torch

from gaupipe.data.load import load_data
from gaupipe.settings import DataSettings, ModelSettings
from gaupipe.system.errors import UserError
from gaupipe.vit.build import build_vit

DIGITS = DataSettings(name="digits")


def build(key: str = "standard", **model) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_vit(ModelSettings(**model), load_data(DIGITS), key)


def diagonal(matrix: torch.Tensor) -> float:
    return matrix.diagonal().mean().item()


def rest(matrix: torch.Tensor) -> float:
    return (matrix - diagonal(matrix) * torch.eye(len(matrix))).std().item()


@pytest.mark.parametrize("key", ["standard", "belief2", "gaussian"])
def test_a_mimetic_start_looks_trained(key):
    """W_V W_proj is 0.4 Z - 0.4 I, and of each head W_Q W_K' is near 0.7 Z + 0.7 I."""
    vit, width = build(key, init="mimetic"), 64
    for block in vit.blocks:
        attention = block.attn
        v = attention.v.weight if key == "gaussian" else attention.qkv.weight[2 * width :]
        value_projection = (attention.proj.weight @ v).detach()  # x -> proj(v(x))
        assert diagonal(value_projection) == pytest.approx(-0.4, abs=0.03)
        assert rest(value_projection) == pytest.approx(0.4 / width**0.5, rel=0.05)
        if key != "gaussian":
            weights = attention.qkv.weight.detach().unflatten(0, (3, 4, 16))
            for q, k in zip(weights[0], weights[1], strict=True):
                assert diagonal(q.mT @ k) > 3 * rest(q.mT @ k) / width**0.5
            assert not attention.qkv.bias.any()
    sines = (vit.pos_embed[0].detach() ** 2).sum(-1)
    torch.testing.assert_close(sines, torch.full((16,), 32.0))
    for places in (False, True):
        args = {"class_token": True, "reg_tokens": 2, "no_embed_class": places}
        position = build(init="mimetic", args=args).pos_embed
        torch.testing.assert_close(position[:, -16:], vit.pos_embed)


def test_starts_of_given_width():
    def stds(**model):
        vit = build(**model)
        return vit.blocks[0].mlp.fc1.weight.std().item(), vit.pos_embed.std().item()

    # cut at two standard deviations
    assert stds(init_std=0.1, pos_embed_std=0.5) == pytest.approx((0.088, 0.44), rel=0.1)
    assert stds()[0] == pytest.approx(0.02, rel=0.1)
    assert stds(init="mimetic", pos_embed_std=0.5)[1] == pytest.approx(0.44, rel=0.1)


@pytest.mark.parametrize(
    "args, message",
    [
        ({"embed_dim": 42, "num_heads": 3}, "multiple of 4, got 42"),
        ({"pos_embed": "none"}, "without a position embedding"),
    ],
)
def test_what_cannot_start_mimetic_is_refused(args, message):
    with pytest.raises(UserError, match=message):
        build(init="mimetic", args=args)
