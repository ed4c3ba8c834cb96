"""Fused attention with its log-normaliser, against explicit maps."""

import pytest
import torch

from gaupipe.attention import kernels
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
