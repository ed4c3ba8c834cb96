"""The student attentions against the papers' equations, written out in numpy."""

import math

import numpy as np
import pytest
import timm
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gaupipe.attention import ATTENTION, comparing
from gaupipe.system.errors import UserError
from oracles import map_of

STUDENTS = comparing()
VARIANTS = [(key, {}) for key in STUDENTS] + [
    ("belief", {"signal": "projected"}),
    ("belief", {"signal": "value"}),
    ("belief", {"gated": True}),
    ("belief_star", {"signal": "projected"}),
    ("belief_star", {"signal": "concat"}),
    ("belief2", {"activation": "identity"}),
    ("belief2", {"activation": "silu"}),
    ("belief2", {"zz": False}),
    ("attentionx", {"gamma": 3.0, "mask_diagonal": False}),
    ("attentionx", {"gamma": 1.5}),
    ("gaussian", {}),
    ("standard", {"prior": True}),
]
PHI = {
    "identity": lambda u: u,
    "silu": lambda u: u / (1 + np.exp(-u)),
    "gelu": lambda u: u * 0.5 * (1 + np.vectorize(math.erf)(u / math.sqrt(2))),
}


def project_onto(m, v):
    """The part of m along v, over the last axis."""
    squared = (v * v).sum(-1, keepdims=True)
    return (m * v).sum(-1, keepdims=True) / np.where(squared > 0, squared, 1) * v


def oracle(key, options, weights, x, heads, grid, visible, bias):
    """Update [T, d] and attention maps [H, T, T] of one image x [T, d], float64. ``visible``
    [T, T] says which keys a query may use, ``bias`` [T, T] is added to the scores."""
    tokens, width = x.shape

    def in_heads(u):
        return u.reshape(tokens, heads, -1).swapaxes(0, 1)  # [H, T, d_m]

    if key == "gaussian":
        v = x @ weights["v.weight"].T + weights["v.bias"]
        scores, raw = 0, weights["prior"] + in_heads(x @ weights["predictor"].T)
    else:
        qkv = x @ weights["qkv.weight"].T + weights["qkv.bias"]
        q, k, v = np.split(qkv, 3, axis=1)
        scores, raw = in_heads(q) @ in_heads(k).swapaxes(1, 2), weights.get("prior")
    if key == "belief2" and options.get("zz", True):
        z = in_heads(x @ weights["z.weight"].T)
        scores = scores + z @ z.swapaxes(1, 2)
    if key == "attentionx" and options.get("mask_diagonal", True):
        visible = visible & ~np.eye(tokens, dtype=bool)
    scores = scores / math.sqrt(width / heads) + bias
    if raw is not None:
        gaussians = np.concatenate([raw[..., :2], np.exp(raw[..., 2:])], axis=-1)
        scores = scores + np.log(map_of(gaussians, grid))
    maps = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    total = maps.sum(-1, keepdims=True)
    maps = maps / np.where(total > 0, total, 1)
    mh = (maps @ in_heads(v)).swapaxes(0, 1).reshape(tokens, width)

    over_all = project_onto(mh, v)
    in_each = project_onto(mh.reshape(tokens, heads, -1), v.reshape(tokens, heads, -1))
    in_each = in_each.reshape(tokens, width)
    w, signal = weights["proj.weight"].T, options.get("signal", "perpendicular")
    if key in ("standard", "gaussian"):
        update = mh @ w
    elif options.get("gated"):
        update = (mh - np.repeat(weights["head_gate"], width // heads) * over_all) @ w
    elif key == "belief":
        update = {"perpendicular": mh - over_all, "projected": over_all, "value": v}[signal] @ w
    elif key == "belief_star":
        first, second = {
            "perpendicular": (mh - over_all, mh - in_each),
            "projected": (over_all, in_each),
            "concat": (mh, v),
        }[signal]
        update = first @ w + second @ weights["proj_local.weight"].T
    elif key == "xsa":
        update = (mh - in_each) @ w
    elif key == "belief2":
        along = PHI[options.get("activation", "gelu")](over_all)
        update = (mh - over_all) @ w + along @ weights["proj_parallel.weight"].T
    elif key == "attentionx":
        update = (v - options.get("gamma", 1.0) * mh) @ w
    return update + weights["proj.bias"], maps


def masks_of(mask, is_causal, images, heads, tokens):
    """The arguments of a forward pass; and as the oracle takes them, ``visible`` and ``bias``."""
    visible, bias = np.ones((tokens, tokens), bool), np.zeros((tokens, tokens))
    attn_mask = None
    if mask == "additive":
        attn_mask = torch.randn(tokens, tokens, dtype=torch.float64)
        bias = attn_mask.numpy()
    elif mask != "none":
        attn_mask = torch.rand(tokens, tokens) < 0.7
        visible = attn_mask.numpy()
        if mask == "per head":
            attn_mask = attn_mask.expand(images, heads, -1, -1)
    if is_causal:
        visible = visible & np.tri(tokens, dtype=bool)
    return dict(attn_mask=attn_mask, is_causal=is_causal), (visible, bias)


@pytest.mark.parametrize("key, options", VARIANTS, ids=str)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 6, 3, 4))),
    mask=st.sampled_from(["none", "boolean", "additive", "per head"]),
    is_causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_updates_maps_and_gradients_follow_the_equations(
    key, options, sizes, mask, is_causal, seed
):
    """Both forward paths; gradients along a random direction in the tokens and all parameters."""
    torch.manual_seed(seed)
    images, tokens, heads, head_width = sizes
    width, rows, close = heads * head_width, 1 + (tokens % 2 == 0), 1e-9
    grid = (rows, tokens // rows)
    if key == "gaussian" or options.get("prior"):  # Gaussians are float32
        options, close = {**options, "grid": grid}, 2e-5
    module = ATTENTION[key](width, heads, qkv_bias=True, **options).double()
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2 if name in ("prior", "predictor") else 0.7)
    x, sensitivity = torch.randn(2, images, tokens, width, dtype=torch.float64)
    masks, rest = masks_of(mask, is_causal, images, heads, tokens)
    weights = {name: p.detach().numpy().copy() for name, p in module.named_parameters()}
    rng = np.random.default_rng(seed)
    along = {name: rng.standard_normal(value.shape) for name, value in weights.items()}
    along_x = rng.standard_normal(x.shape)

    def updates_and_maps(step):
        moved = {name: value + step * along[name] for name, value in weights.items()}
        shifted = x.numpy() + step * along_x
        each = [oracle(key, options, moved, image, heads, grid, *rest) for image in shifted]
        return map(np.stack, zip(*each, strict=True))

    updates, maps = updates_and_maps(0)
    rows = module.forward_with_map(x, **masks)[1].detach()
    np.testing.assert_allclose(rows.exp(), maps, atol=close)
    assert (rows[torch.from_numpy(maps == 0)] == -torch.inf).all()
    after, before = (next(updates_and_maps(step)) for step in (1e-6, -1e-6))
    slope = ((after - before) * sensitivity.numpy()).sum() / 2e-6
    for forward in (module.forward, lambda *a, **k: module.forward_with_map(*a, **k)[0]):
        given = x.clone().requires_grad_()
        module.zero_grad()
        update = forward(given, **masks)
        np.testing.assert_allclose(update.detach(), updates, atol=10 * close)
        (update * sensitivity).sum().backward()
        mine = (given.grad.numpy() * along_x).sum()
        for name, p in module.named_parameters():
            mine += 0 if p.grad is None else (p.grad.numpy() * along[name]).sum()
        if head_width > 1:  # in one dimension D is 0, and rounding rules
            assert mine == pytest.approx(slope, rel=1e-4 + 20 * close, abs=1e-4 + 100 * close)


@pytest.mark.parametrize("key", STUDENTS)
def test_autocast_stays_close_to_float32(key):
    torch.manual_seed(0)
    module, x = ATTENTION[key](32, 4, qkv_bias=True), torch.randn(2, 9, 32)
    exact, exact_rows = module.forward_with_map(x)
    with torch.autocast("cpu", torch.bfloat16):
        update, rows = module.forward_with_map(x)
        fused = module(x)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.exp(), exact_rows.exp(), rtol=0.02, atol=0.02)
    for low in (update, fused):
        torch.testing.assert_close(low.float(), exact, rtol=0.05, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", STUDENTS)
def test_no_attention_reads_what_a_mask_of_lowest_numbers_hides(key, dtype):
    """Token 4, padding, sees nothing, and in attentionx token 0 sees itself alone: they read
    nothing."""
    torch.manual_seed(0)
    module = ATTENTION[key](8, 2, qkv_bias=True).to(dtype)
    readers_of_nothing = [0, 4] if key == "attentionx" else [4]
    x = torch.randn(2, 5, 8, dtype=dtype)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    visible[:, 4] = visible[4] = False
    least = torch.finfo(dtype).min
    for number in (least, least / 2, max(torch.finfo(torch.float32).min, least), -torch.inf):
        mask = torch.zeros(5, 5, dtype=dtype).masked_fill(~visible, number)
        torch.testing.assert_close(module(x, attn_mask=mask), module(x, attn_mask=visible))
        update, rows = module.forward_with_map(x, attn_mask=mask)
        torch.testing.assert_close(update, module.forward_with_map(x, attn_mask=visible)[0])
        assert (rows[..., readers_of_nothing, :] == -torch.inf).all()
        assert (rows[:, :, ~visible] == -torch.inf).all()
        assert rows[..., 1:4, 0].isfinite().all()


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("key", STUDENTS)
def test_no_attention_map_in_memory_unless_asked_for(key):
    images, tokens, width, heads = 2, 96, 16, 4
    module, x = ATTENTION[key](width, heads), torch.randn(images, tokens, width)
    with LargestTensor() as seen:
        module(x).sum().backward()
    assert seen.numel < images * heads * tokens * tokens
    with LargestTensor() as seen:
        module.forward_with_map(x)
    assert seen.numel == images * heads * tokens * tokens


@pytest.mark.parametrize("key", STUDENTS)
def test_compiles_without_graph_breaks(key):
    torch.manual_seed(0)
    module, x = ATTENTION[key](16, 2, qkv_bias=True), torch.randn(2, 5, 16)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    causal = {"is_causal": True, "attn_mask": torch.ones(5, 5, dtype=torch.bool).tril(1)}
    for arguments in ({}, causal):
        expected, ours = (
            torch.autograd.grad(one(x, **arguments).square().sum(), list(module.parameters()))
            for one in (module, compiled)
        )
        torch.testing.assert_close(ours, expected)
    torch._dynamo.reset()


ADDED = {"belief_star": {"proj_local.weight"}, "belief2": {"proj_parallel.weight", "z.weight"}}
"""Parameters that timm's attention has not."""


@pytest.mark.parametrize("key", STUDENTS)
def test_timm_weights_load_into_every_attention_that_compares(key):
    norms = dict(qk_norm=True, scale_norm=True, norm_layer=torch.nn.LayerNorm)
    stock = timm.layers.Attention(32, 4, qkv_bias=True, **norms)
    student = ATTENTION[key](32, 4, qkv_bias=True, **norms)
    names = [name for name, _ in student.named_parameters()]
    assert set(names) - stock.state_dict().keys() == ADDED.get(key, set())
    assert stock.state_dict().keys() <= set(names)
    student.load_state_dict(stock.state_dict())
    if key in ("standard", "belief2"):
        x = torch.randn(2, 6, 32)
        torch.testing.assert_close(student(x, is_causal=True), stock(x, is_causal=True))


def test_a_gated_belief_takes_over_standard_attention_unchanged_and_goes_on_to_belief2():
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    standard = ATTENTION["standard"](12, 3, qkv_bias=True).double()
    gated = ATTENTION["belief"](12, 3, qkv_bias=True, gated=True).double()
    gated.take_over(standard)
    torch.testing.assert_close(gated(x), standard(x))
    with torch.no_grad():
        gated.head_gate.copy_(torch.tensor([0.3, -0.2, 1.4]))
    cls = ATTENTION["belief2"]
    belief2 = cls(12, 3, qkv_bias=True, **cls.conversion_options).double()
    belief2.take_over(gated)
    torch.testing.assert_close(belief2(x), gated(x))
    with pytest.raises(UserError, match="unknown signal 'value'; known: perpendicular"):
        ATTENTION["belief"](12, 3, gated=True, signal="value")
