"""Norms and angles of *BeliefFormer, figures 4 and 8*."""

import numpy as np
import pytest
import timm
import torch
from numpy.linalg import norm

from gaupipe.attention import comparing
from gaupipe.attention.standard import in_steps
from gaupipe.vit.diagnostics import belief_geometry


@pytest.mark.parametrize("key", comparing())
def test_the_geometry_of_the_first_block(key):
    torch.manual_seed(0)
    model = timm.create_model("gauvit_pico_patch2_8", attention=key, depth=2).eval()
    images = torch.randn(2, 3, 8, 8)
    first, second = belief_geometry(model, images)
    with torch.no_grad():
        x = model.patch_embed(images) + model.pos_embed
        attention = in_steps(model.blocks[0].attn)
        tokens = model.blocks[0].norm1(x)
        maps = attention.forward_with_map(tokens)[1].double().exp().numpy()
        v = torch.nn.functional.linear(tokens, attention.qkv.weight[128:], attention.qkv.bias[128:])
        w = attention.proj.weight.double().numpy()
    x, v = x.double().numpy(), v.double().numpy()
    mh = (maps @ v.reshape(2, 16, 4, 16).swapaxes(1, 2)).swapaxes(1, 2).reshape(v.shape)
    parts = (4 if key == "xsa" else 1, -1)  # D head by head, or over all heads
    m, u = (signal.reshape(2, 16, *parts) for signal in (mh, v))
    d = m - (m * u).sum(-1, keepdims=True) / (u * u).sum(-1, keepdims=True) * u
    for name, signal in (("mh", mh), ("d", d.reshape(v.shape))):
        update = signal @ w.T
        cosine = (update * x).sum(-1) / norm(update, axis=-1) / norm(x, axis=-1)
        for field, expected in (
            ("norm", norm(signal, axis=-1)),
            ("update_norm", norm(update, axis=-1)),
            ("update_angle", np.degrees(np.arccos(cosine))),
        ):
            ours = getattr(first, f"{name}_{field}")
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
    assert (second.d_norm <= second.mh_norm * (1 + 1e-6)).all()
