"""Norms and angles of *BeliefFormer, figures 4 and 8*."""

import numpy as np
import pytest
import timm
import torch

from gaupipe.attention import comparing
from gaupipe.attention.standard import in_steps
from gaupipe.vit.diagnostics import belief_geometry

torch.set_num_threads(1)


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
        _, rows = attention.forward_with_map(tokens)
        v = torch.nn.functional.linear(tokens, attention.qkv.weight[128:], attention.qkv.bias[128:])
    x, maps, v, w = (
        tensor.double().numpy() for tensor in (x, rows.exp(), v, attention.proj.weight.detach())
    )
    for image in range(2):
        for token in range(16):
            mh = np.concatenate(
                [
                    maps[image, head, token] @ v[image, :, 16 * head : 16 * (head + 1)]
                    for head in range(4)
                ]
            )
            own = v[image, token]
            if key == "xsa":
                each = zip(np.split(mh, 4), np.split(own, 4), strict=True)
                d = np.concatenate([m - (m @ u) / (u @ u) * u for m, u in each])
            else:
                d = mh - (mh @ own) / (own @ own) * own
            for norm, update_norm, angle, signal in (
                (first.mh_norm, first.mh_update_norm, first.mh_update_angle, mh),
                (first.d_norm, first.d_update_norm, first.d_update_angle, d),
            ):
                update = w @ signal
                cosine = (
                    update
                    @ x[image, token]
                    / np.linalg.norm(update)
                    / np.linalg.norm(x[image, token])
                )
                assert norm[image, token] == pytest.approx(np.linalg.norm(signal), rel=1e-4)
                assert update_norm[image, token] == pytest.approx(np.linalg.norm(update), rel=1e-4)
                assert angle[image, token] == pytest.approx(np.degrees(np.arccos(cosine)), abs=0.01)
    for block in (first, second):
        assert (block.d_norm <= block.mh_norm * (1 + 1e-6)).all()
