"""JiT-B/16 as a classifier: its parameters, its parts against numpy, a step, a student folder."""

import numpy as np
import pytest
import timm
import torch
from torch.nn.functional import cross_entropy

from gaupipe.attention import ATTENTION
from gaupipe.attention.options import count_parameters
from gaupipe.models import convert, forward_with_maps, save_student
from gaupipe.system.errors import UserError

JIT = "gauvit_jit_base_patch16_256"
TINY = dict(img_size=(16, 24), patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)


def tiny(**kwargs):
    torch.manual_seed(0)
    return timm.create_model(JIT, **{**TINY, **kwargs})


def awake(model):
    """With other modulation than at the start, where no block adds anything."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def parameters(**kwargs):
    with torch.device("meta"):
        return count_parameters(timm.create_model(JIT, device="meta", **kwargs))


def test_the_parameters_are_those_of_the_public_model_with_a_head_and_close_to_the_papers():
    """Counted by hand from JiT-B/16; the paper says 128.86 M and not what its head is."""
    d, hidden, tokens = 768, 2048, 256
    norms = 2 * d + 2 * 64
    attention = 3 * d * d + 3 * d + d * d + d
    ffn = 3 * d * hidden + 2 * hidden + d
    ada_ln = 6 * d * d + 6 * d
    condition = 4 * d  # in the place of the embeddings of time and class
    embed = 128 * 3 * 16 * 16 + 128 * d + d
    head = d + 1000 * d + 1000
    blocks = 12 * (norms + attention + ffn + ada_ln + condition)
    assert parameters() == blocks + embed + tokens * d + head
    assert parameters() == pytest.approx(128.86e6, rel=1e-3)


def test_zz_has_the_parameters_by_which_the_papers_table_4_differs():
    """128.86 M with ZZ', 121.78 M without."""
    both = [parameters(attention="belief2", attention_options={"zz": zz}) for zz in (True, False)]
    assert round((both[0] - both[1]) / 1e6, 2) == round(128.86 - 121.78, 2)


@pytest.mark.parametrize("attention", ATTENTION)
def test_match_params_keeps_the_size_to_half_a_unit_of_the_ffn(attention):
    half_a_unit = 2 * (3 * 768 + 2) / 2
    matched = parameters(attention=attention, match_params=True, depth=2)
    assert abs(matched - parameters(depth=2)) <= half_a_unit


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_step_of_four_images_moves_every_part_and_lowers_the_loss(attention):
    model = tiny(attention=attention, match_params=True)
    images, labels = torch.randn(4, 3, 16, 24), torch.tensor([0, 1, 2, 3])
    position = model.pos_embed.clone()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _step in range(4):  # the gates let gradients through after the first
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    torch.testing.assert_close(model.pos_embed, position, rtol=0, atol=0)
    still = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert still == {"pos_embed"}


def rotated(x, grid):
    """x [..., T, d_m] turned as JiT's rotary positions say, by complex numbers."""
    width = x.shape[-1]
    pairs = x.reshape(*x.shape[:-1], width // 2, 2)
    z = pairs[..., 0] + 1j * pairs[..., 1]  # [..., T, d_m / 2]
    speeds = 10000.0 ** (-np.arange(width // 4) / (width // 4))
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    angles = np.concatenate([np.outer(rows, speeds), np.outer(columns, speeds)], axis=1)
    z = z * np.exp(1j * angles)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def rms(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def test_a_block_is_jits_by_numpy():
    model = awake(tiny())
    block, heads, grid = model.blocks[1], 3, (2, 3)
    w = {name: value.detach().double().numpy() for name, value in block.named_parameters()}
    x = np.random.default_rng(0).normal(size=(6, 24))

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def silu(x):
        return x / (1 + np.exp(-x))

    def modulation(name):
        return linear(silu(w[f"{name}.condition"]), f"{name}.modulation")

    def modulated(x, name):
        shift, scale = np.split(modulation(name), 2)
        return rms(x, w[f"{name}.norm.weight"]) * (1 + scale) + shift

    qkv = linear(modulated(x, "norm1"), "attn.qkv").reshape(6, 3, heads, 8)
    q, k, v = qkv.transpose(1, 2, 0, 3)
    q, k = (rotated(rms(y, w[f"attn.{name}_norm.norm.weight"]), grid)
            for y, name in ((q, "q"), (k, "k")))  # fmt: skip
    scores = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(8))
    mh = (scores / scores.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(6, 24)
    after = x + linear(mh, "attn.proj") * modulation("ls1")
    y = modulated(after, "norm2")
    ffn = linear(silu(linear(y, "mlp.fc1_g")) * linear(y, "mlp.fc1_x"), "mlp.fc2")
    expected = after + ffn * modulation("ls2")
    got = block(torch.from_numpy(x).float()[None])[0]
    np.testing.assert_allclose(got.detach().numpy(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attention", ATTENTION)
def test_it_is_saved_converted_and_read_block_by_block_as_other_models(attention, tmp_path):
    model = awake(tiny(attention=attention))
    images = torch.randn(2, 3, 16, 24)
    logits, maps = forward_with_maps(model, images)
    torch.testing.assert_close(logits, model(images))
    assert maps[0].shape == (2, 3, 6, 6)
    save_student(model, tmp_path / "student")
    again = timm.create_model(f"local-dir:{tmp_path / 'student'}", pretrained=True).eval()
    torch.testing.assert_close(again(images), model(images))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(images), model(images))
    if attention == "standard":
        torch.testing.assert_close(convert(model, "belief2")(images), model(images))


def test_a_convolutional_stem_takes_the_place_of_the_bottleneck():
    model = tiny(stem="conv", in_chans=1)
    assert [conv.kernel_size for conv in model.modules() if isinstance(conv, torch.nn.Conv2d)] == [
        *[(3, 3)] * 3,
        (1, 1),
    ]
    assert model(torch.randn(2, 1, 16, 24)).shape == (2, 5)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(class_token=True), "class_token: a JiT"),
        (dict(rezero=True), "rezero: a JiT"),
        (dict(patch_drop_rate=0.5), "patch_drop_rate: a JiT"),
        (dict(num_heads=4), "by fours: embed_dim / num_heads is 6"),
    ],
)
def test_what_does_not_fit_is_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        tiny(**kwargs)
