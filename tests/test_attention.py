"""The student attentions against the papers' equations, written out in numpy with loops over
heads and tokens."""

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

torch.set_num_threads(1)  # the cases are tiny: on a busy machine threads would wait for each other

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
]
VARIANT_NAMES = [
    " ".join([key, *(f"{name}={value}" for name, value in options.items())])
    for key, options in VARIANTS
]


# ---- the oracle: one image, float64, no vectorisation over heads or tokens -----------------------


def oracle(key, options, weights, x, heads, visible, bias):
    """Update [T, d] and attention maps [H, T, T] of one image x [T, d]. ``visible`` [T, T] says
    which keys a query may use, ``bias`` [T, T] is added to the scores."""
    defaults = {
        "signal": "perpendicular",
        "gated": False,
        "activation": "gelu",
        "zz": True,
        "gamma": 1.0,
        "mask_diagonal": True,
    }
    options = {**defaults, **options}
    tokens, width = x.shape
    head_width = width // heads
    qkv = x @ weights["qkv.weight"].T + weights["qkv.bias"]
    q, k, v = qkv[:, :width], qkv[:, width : 2 * width], qkv[:, 2 * width :]
    z = x @ weights["z.weight"].T if key == "belief2" and options["zz"] else None
    mh, maps = np.zeros((tokens, width)), np.zeros((heads, tokens, tokens))
    for head in range(heads):
        part = slice(head * head_width, (head + 1) * head_width)
        for i in range(tokens):
            keys = [
                j
                for j in range(tokens)
                if visible[i, j]
                and not (key == "attentionx" and options["mask_diagonal"] and i == j)
            ]
            scores = {}
            for j in keys:
                product = q[i, part] @ k[j, part]
                if z is not None:
                    product += z[i, part] @ z[j, part]
                scores[j] = product / math.sqrt(head_width) + bias[i, j]
            largest = max(scores.values(), default=0.0)
            total = sum(math.exp(score - largest) for score in scores.values())
            for j in keys:
                maps[head, i, j] = math.exp(scores[j] - largest) / total
                mh[i, part] += maps[head, i, j] * v[j, part]
    update = np.zeros((tokens, width))
    w, w_bias = weights["proj.weight"].T, weights["proj.bias"]
    for i in range(tokens):
        over_all = project_onto(mh[i], v[i])
        each = zip(np.split(mh[i], heads), np.split(v[i], heads), strict=True)
        in_each = np.concatenate([project_onto(m, u) for m, u in each])
        if key == "standard":
            update[i] = mh[i] @ w
        elif key == "belief":
            signal = {"perpendicular": mh[i] - over_all, "projected": over_all, "value": v[i]}[
                options["signal"]
            ]
            if options["gated"]:
                signal = mh[i] - np.repeat(weights["head_gate"], head_width) * over_all
            update[i] = signal @ w
        elif key == "belief_star":
            first, second = {
                "perpendicular": (mh[i] - over_all, mh[i] - in_each),
                "projected": (over_all, in_each),
                "concat": (mh[i], v[i]),
            }[options["signal"]]
            update[i] = first @ w + second @ weights["proj_local.weight"].T
        elif key == "xsa":
            update[i] = (mh[i] - in_each) @ w
        elif key == "belief2":
            phi = {
                "identity": lambda u: u,
                "silu": lambda u: u / (1 + math.exp(-u)),
                "gelu": lambda u: u * 0.5 * (1 + math.erf(u / math.sqrt(2))),
            }[options["activation"]]
            update[i] = (mh[i] - over_all) @ w + np.array([phi(u) for u in over_all]) @ weights[
                "proj_parallel.weight"
            ].T
        elif key == "attentionx":
            update[i] = (v[i] - options["gamma"] * mh[i]) @ w
    return update + w_bias, maps


def project_onto(m, v):
    return (m @ v) / (v @ v) * v if v @ v > 0 else np.zeros_like(v)


def numpy_weights(module):
    return {
        name: value.detach().double().numpy().copy() for name, value in module.named_parameters()
    }


# ---- values and gradients ------------------------------------------------------------------------


@st.composite
def cases(draw):
    heads, head_width = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    images, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 6))
    return dict(
        heads=heads,
        width=heads * head_width,
        images=images,
        tokens=tokens,
        mask=draw(st.sampled_from(["none", "boolean", "additive", "per head"])),
        is_causal=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def build(key, options, case):
    torch.manual_seed(case["seed"])
    module = ATTENTION[key](case["width"], case["heads"], qkv_bias=True, **options).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    x = torch.randn(case["images"], case["tokens"], case["width"], dtype=torch.float64)
    tokens = case["tokens"]
    attn_mask, visible, bias = None, np.ones((tokens, tokens), bool), np.zeros((tokens, tokens))
    if case["mask"] == "boolean":
        attn_mask = torch.rand(tokens, tokens) < 0.7
        visible = attn_mask.numpy().copy()
    elif case["mask"] == "additive":
        attn_mask = torch.randn(tokens, tokens, dtype=torch.float64)
        bias = attn_mask.numpy().copy()
    elif case["mask"] == "per head":
        attn_mask = (torch.rand(tokens, tokens) < 0.7).expand(case["images"], case["heads"], -1, -1)
        visible = attn_mask[0, 0].numpy().copy()
    if case["is_causal"]:
        visible = visible & np.tri(tokens, dtype=bool)
    return (
        module,
        x,
        dict(attn_mask=attn_mask, is_causal=case["is_causal"]),
        (case["heads"], visible, bias),
    )


@pytest.mark.parametrize("key, options", VARIANTS, ids=VARIANT_NAMES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_update_and_maps_follow_the_equations(key, options, case):
    module, x, masks, rest = build(key, options, case)
    expected = [oracle(key, options, numpy_weights(module), image.numpy(), *rest) for image in x]
    update = module(x, **masks)
    update_too, rows = module.forward_with_map(x, **masks)
    for i, (expected_update, expected_map) in enumerate(expected):
        np.testing.assert_allclose(update[i].detach(), expected_update, atol=1e-9)
        np.testing.assert_allclose(update_too[i].detach(), expected_update, atol=1e-9)
        np.testing.assert_allclose(rows[i].detach().exp(), expected_map, atol=1e-9)
    hidden = torch.from_numpy(np.stack([expected_map for _, expected_map in expected]) == 0)
    assert (rows.detach()[hidden] == -torch.inf).all()


@pytest.mark.parametrize("key, options", VARIANTS, ids=VARIANT_NAMES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_gradients_are_the_slopes_of_the_equations(key, options, case):
    """Both forward paths, along a random direction in the tokens and every parameter at once."""
    case["width"] = case["heads"] * max(
        2, case["width"] // case["heads"]
    )  # in one dimension D is 0, and rounding rules
    module, x, masks, rest = build(key, options, case)
    weights, tokens = numpy_weights(module), x.numpy()
    rng = np.random.default_rng(case["seed"])
    sensitivity = rng.standard_normal(x.shape)
    along = {name: rng.standard_normal(value.shape) for name, value in weights.items()}
    along_x = rng.standard_normal(x.shape)

    def loss(step):
        moved = {name: value + step * along[name] for name, value in weights.items()}
        return sum(
            (oracle(key, options, moved, image, *rest)[0] * s).sum()
            for image, s in zip(tokens + step * along_x, sensitivity, strict=True)
        )

    eps = 1e-6
    slope = (loss(eps) - loss(-eps)) / (2 * eps)
    for forward in (module.forward, lambda *a, **k: module.forward_with_map(*a, **k)[0]):
        x.grad = None
        module.zero_grad()
        (forward(x.requires_grad_(), **masks) * torch.from_numpy(sensitivity)).sum().backward()
        mine = (x.grad.numpy() * along_x).sum()
        mine += sum(
            (p.grad.numpy() * along[name]).sum()
            for name, p in module.named_parameters()
            if p.grad is not None
        )
        assert mine == pytest.approx(slope, rel=1e-4, abs=1e-4)


# ---- precision ----------------------------------------------------------------------------------


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


# ---- AttentionX ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lowest", ["finfo.min", "half of finfo.min", "float32's", "-inf"])
def test_attentionx_does_not_read_what_a_mask_of_lowest_numbers_hides(dtype, lowest):
    """The first token of a causal sequence sees itself alone, and padding nothing: both read
    nothing."""
    torch.manual_seed(0)
    module, x = (
        ATTENTION["attentionx"](8, 2, qkv_bias=True).to(dtype),
        torch.randn(2, 5, 8, dtype=dtype),
    )
    least = {
        "finfo.min": torch.finfo(dtype).min,
        "half of finfo.min": torch.finfo(dtype).min / 2,
        "float32's": max(torch.finfo(torch.float32).min, torch.finfo(dtype).min),
        "-inf": -torch.inf,
    }
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    visible[:, 4] = visible[4] = False
    mask = torch.zeros(5, 5, dtype=dtype).masked_fill(~visible, least[lowest])
    for update, reference in (
        (module(x, attn_mask=mask), module(x, attn_mask=visible)),
        (
            module.forward_with_map(x, attn_mask=mask)[0],
            module.forward_with_map(x, attn_mask=visible)[0],
        ),
    ):
        torch.testing.assert_close(update, reference)
    changed = x.clone()
    changed[:, 1:] += 1
    torch.testing.assert_close(
        module(changed, attn_mask=mask)[:, 0], module(x, attn_mask=mask)[:, 0]
    )
    rows = module.forward_with_map(x, attn_mask=mask)[1]
    assert (rows[..., [0, 4], :] == -torch.inf).all()


# ---- what the classes promise beyond values ------------------------------------------------------


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
    for arguments in (
        {},
        {"is_causal": True, "attn_mask": torch.ones(5, 5, dtype=torch.bool).tril(1)},
    ):
        expected = torch.autograd.grad(
            module(x, **arguments).square().sum(), list(module.parameters())
        )
        found = torch.autograd.grad(
            compiled(x, **arguments).square().sum(), list(module.parameters())
        )
        torch.testing.assert_close(found, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("key", STUDENTS)
def test_timm_weights_load_with_only_the_added_matrices_missing(key):
    stock = timm.layers.Attention(32, 4, qkv_bias=True, qk_norm=True, norm_layer=torch.nn.LayerNorm)
    student = ATTENTION[key](32, 4, qkv_bias=True, qk_norm=True, norm_layer=torch.nn.LayerNorm)
    missing, unexpected = student.load_state_dict(stock.state_dict(), strict=False)
    added = {"belief_star": {"proj_local.weight"}, "belief2": {"proj_parallel.weight", "z.weight"}}
    assert set(missing) == added.get(key, set()) and not unexpected


def test_standard_is_timms_attention():
    torch.manual_seed(0)
    arguments = dict(
        dim=24,
        num_heads=3,
        qkv_bias=True,
        qk_norm=True,
        scale_norm=True,
        norm_layer=torch.nn.LayerNorm,
    )
    stock, student = timm.layers.Attention(**arguments), ATTENTION["standard"](**arguments)
    student.load_state_dict(stock.state_dict())
    x = torch.randn(2, 6, 24)
    for masks in ({}, {"is_causal": True}, {"attn_mask": torch.randn(6, 6)}):
        torch.testing.assert_close(student(x, **masks), stock(x, **masks))


@pytest.mark.parametrize(
    "key, options, message",
    [
        ("belief2", {"activation": "gelo"}, "did you mean 'gelu'"),
        ("belief", {"signal": "perpendiculer"}, "did you mean 'perpendicular'"),
        ("belief_star", {"signal": "value"}, "known: perpendicular, projected, concat"),
    ],
)
def test_an_unknown_choice_names_the_right_one(key, options, message):
    with pytest.raises(UserError, match=message):
        ATTENTION[key](16, 2, **options)
