"""Fused attention with its log-normaliser, and attention with summed scores, against explicit
maps."""

import numpy as np
import pytest
import torch

from gaupipe.attention import ATTENTION, kernels, summed_scores
from gaupipe.attention.kernels import (
    attention_with_normaliser,
    flex_with_normaliser,
    has_normaliser_kernel,
)


def explicit(q, k, v, hidden, scale):
    scores = scale * q @ k.mT
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def inputs(tokens=16, width=16, value_width=16):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 3, tokens, size, generator=generator) for size in (width, width, value_width)
    ]


HIDDEN = [None, torch.eye(16, dtype=torch.bool)]


@pytest.mark.parametrize("hidden", HIDDEN, ids=["all keys", "no diagonal"])
def test_the_cpu_kernel_has_the_values_and_gradients_of_explicit_attention(hidden):
    results = []
    for attend in (attention_with_normaliser, explicit):
        leaves = [x.requires_grad_() for x in inputs(width=32)]
        heads, normaliser = attend(*leaves, hidden, 0.3)
        (heads.square().sum() + normaliser.sin().sum()).backward()
        results.append([heads, normaliser, *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("hidden", HIDDEN, ids=["all keys", "no diagonal"])
def test_the_public_function_for_gpus_has_the_same_values(hidden):
    """flex_attention has no backward pass on a CPU."""
    q, k, v = inputs()
    with torch.no_grad():
        got = flex_with_normaliser(q, k, v, hidden, 0.3)
    for part, expected in zip(got, explicit(q, k, v, hidden, 0.3), strict=True):
        torch.testing.assert_close(part, expected, rtol=2e-5, atol=2e-5)


def test_without_the_private_operator_there_is_no_kernel(monkeypatch):
    q, *_ = inputs()
    assert has_normaliser_kernel(q, dropout=0.0)
    assert not has_normaliser_kernel(q, dropout=0.1)
    assert not has_normaliser_kernel(q[..., :1, :], dropout=0.0)
    monkeypatch.setattr(kernels, "CPU_KERNEL", "no_such_operator")
    assert not has_normaliser_kernel(q, dropout=0.0)


def summed_by_numpy(v, scale, *products):
    scores = sum(q @ k.swapaxes(-1, -2) for q, k in products) * scale
    rows = np.exp(scores - scores.max(-1, keepdims=True))
    return rows / rows.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("sharpness", [1.0, 1e4], ids=["soft", "one key"])
@pytest.mark.parametrize("cache", [1, 2000, 5000, 2**20], ids=lambda size: f"{size} bytes")
def test_summed_scores_have_the_values_and_gradients_of_explicit_maps(
    monkeypatch, cache, sharpness
):
    """3 images of 5 heads: a head at a time, some of an image, some images, and all. Values
    against numpy, gradients against differences along a direction."""
    monkeypatch.setattr(summed_scores, "CACHE_BYTES", cache)
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 5, 7, width) for width in (4, 4, 4, 6, 6)]
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    leaves[1] *= sharpness
    v, q, k, z_q, z_k = (leaf.requires_grad_() for leaf in leaves)
    out = summed_scores.summed_scores_attention(v, 0.3, (q, k), (z_q, z_k))
    assert out.transpose(1, 2).is_contiguous()
    arrays = [leaf.detach().numpy() for leaf in leaves]

    def expected(v, q, k, z_q, z_k):
        return summed_by_numpy(v, 0.3, (q, k), (z_q, z_k))

    np.testing.assert_allclose(out.detach().numpy(), expected(*arrays), atol=1e-12)
    sensitivity = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    found = torch.autograd.grad(out, leaves, sensitivity)
    for number, slope in enumerate(found):
        along = torch.randn(slope.shape, generator=generator, dtype=torch.float64).numpy()
        eps = 1e-6 / (sharpness if number in (2, 3, 4) else 1)
        values = []
        for sign in (1, -1):
            moved = [*arrays]
            moved[number] = moved[number] + sign * eps * along
            values.append((expected(*moved) * sensitivity.numpy()).sum())
        difference = (values[0] - values[1]) / (2 * eps)
        assert (slope.numpy() * along).sum() == pytest.approx(difference, rel=1e-5, abs=1e-4)


def test_summed_scores_have_second_derivatives():
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(1, 2, 3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]

    def attend(v, q, k):
        return summed_scores.summed_scores_attention(v, 0.5, (q, k), (k, k))

    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)


def test_belief2_is_the_same_with_and_without_padding(monkeypatch):
    """Update and gradients; with a mask, a causal mask and dropout the fused kernel is used."""
    torch.manual_seed(0)
    layer, x = (
        ATTENTION["belief2"](32, 4, qkv_bias=True, attn_drop=0.5).eval(),
        torch.randn(2, 9, 32),
    )
    mask, used = torch.rand(9, 9) < 0.7, []
    attend = summed_scores.summed_scores_attention
    monkeypatch.setattr(
        "gaupipe.attention.belief2.summed_scores_attention",
        lambda *arguments: used.append(1) or attend(*arguments),
    )
    results = []
    for longest in (summed_scores.LONGEST, 0):
        monkeypatch.setattr(summed_scores, "LONGEST", longest)
        update = layer(x)
        q, k, v = layer.project(x)
        found = [update, layer.attend(q, k, v, None, False)]
        gradients = torch.autograd.grad(
            update.square().sum() + found[1].sin().sum(), [*layer.parameters()], allow_unused=True
        )
        results.append([*found, *(g for g in gradients if g is not None)])
        assert len(used) == 2
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
    monkeypatch.setattr(summed_scores, "LONGEST", 512)
    layer(x, attn_mask=mask)
    layer(x, is_causal=True)
    layer.train()(x)
    with torch.autocast("cpu", torch.bfloat16):
        layer.eval()(x)
    assert len(used) == 2
