"""The hand-written gradients: vectors of any length, second derivatives, torch.func's
transforms."""

import numpy as np
import pytest
import timm
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gaupipe.attention import ATTENTION
from gaupipe.attention.functional import per_head
from gaupipe.attention.kernels import perpendicular, perpendicular_twice

torch.set_num_threads(1)

STUDENTS = [key for key in ATTENTION if key != "gaussian"]
HEADS = 2
PROJECTIONS = {
    "over all heads": perpendicular,
    "in each head": lambda m, v: per_head(perpendicular, m, v, HEADS),
    "both": lambda m, v: sum(perpendicular_twice(m, v, HEADS)),
}


# ---- the oracle: numpy, float64, from D = m - <m, v> / <v, v> v ---------------------------------


def oracle(m, v, sensitivity):
    """(D, dm, dv) over the last axis; a vector of length 0 takes nothing away."""
    m, v, g = (x.astype(np.float64) for x in (m, v, sensitivity))
    squared = (v * v).sum(-1, keepdims=True)
    squared[squared == 0] = np.inf
    a, c = (m * v).sum(-1, keepdims=True) / squared, (g * v).sum(-1, keepdims=True) / squared
    return m - a * v, g - c * v, -(a * (g - c * v) + c * (m - a * v))


def oracle_of(projection, m, v, sensitivity):
    split = [x.reshape(*x.shape[:-1], HEADS, -1) for x in (m, v, sensitivity)]
    each = [x.reshape(m.shape) for x in oracle(*split)]
    over_all = oracle(m, v, sensitivity)
    if projection == "both":
        return [a + b for a, b in zip(over_all, each, strict=True)]
    return over_all if projection == "over all heads" else each


def numbers(*shape):
    return np.random.default_rng(len(shape)).standard_normal((3, *shape)).astype(np.float32)


def compare(projection, m, v, sensitivity, function=None):
    """Value and gradients against the oracle, relative to the largest number of each row."""
    wanted = oracle_of(projection, m, v, sensitivity)
    mine_m, mine_v = (torch.tensor(x, requires_grad=True) for x in (m, v))
    d = (function or PROJECTIONS[projection])(mine_m, mine_v)
    d.backward(torch.tensor(sensitivity))
    for found, right in zip((d.detach(), mine_m.grad, mine_v.grad), wanted, strict=True):
        assert found.isfinite().all()
        size = np.abs(right).max(-1, keepdims=True) + 1e-300
        np.testing.assert_allclose(found.double().numpy() / size, right / size, atol=3e-6)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("size", [1e-28, 1e-25, 1e-22, 1e-20, 1e-19, 1e-10, 1.0, 1e10, 1e19, 1e30])
def test_values_and_gradients_for_v_of_any_length(projection, size):
    m, v, sensitivity = numbers(5, 8)
    compare(projection, m, v * np.float32(size), sensitivity)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("size", [1e-31, 1e-37, 1e-40, 1e-44])
def test_v_too_short_for_a_gradient_still_has_a_direction(projection, size):
    m, v, sensitivity = numbers(5, 8)
    v = v * np.float32(size)
    d, grad_m, _ = oracle_of(projection, m, v, sensitivity)
    mine_m, mine_v = (torch.tensor(x, requires_grad=True) for x in (m, v))
    found = PROJECTIONS[projection](mine_m, mine_v)
    found.backward(torch.tensor(sensitivity))
    np.testing.assert_allclose(found.detach(), d, atol=1e-5)
    np.testing.assert_allclose(mine_m.grad, grad_m, atol=1e-5)
    assert not mine_v.grad.any()


def test_heads_of_very_different_lengths():
    m, v, sensitivity = numbers(6, 8)
    v[0, :4] *= 1e-20
    v[1, 4:] *= 1e-28
    v[2, :4] = 0
    v[3, :4] *= 1e25
    v[4] = 0
    for projection in PROJECTIONS:
        compare(projection, m, v, sensitivity)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_compiled_as_well(projection):
    m, v, sensitivity = numbers(6, 8)
    v[0] *= 1e-20
    v[1] *= 1e-28
    v[2, :4] = 0
    v[3] *= 1e25
    compare(
        projection,
        m,
        v,
        sensitivity,
        torch.compile(PROJECTIONS[projection], backend="aot_eager", fullgraph=True),
    )
    torch._dynamo.reset()


def test_float64_has_a_range_of_its_own():
    m, v, _sensitivity = (torch.tensor(x, dtype=torch.float64) for x in numbers(5, 8))
    expected = perpendicular(m, v)
    for size in (1e-250, 1e-160, 1e-30, 1e160, 1e300):
        torch.testing.assert_close(perpendicular(m, v * size), expected)


# ---- derivatives of any order and kind ----------------------------------------------------------


def doubles(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_second_derivatives(projection):
    function, m, v = PROJECTIONS[projection], doubles(2, 3, 6), doubles(3, 2, 6).transpose(0, 1)
    assert torch.autograd.gradcheck(function, (m, v), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, (m, v), check_batched_grad=True)


def test_second_derivatives_are_finite_where_v_is_zero():
    m, v = doubles(4, 6), torch.zeros(4, 6, dtype=torch.float64, requires_grad=True)
    for function in PROJECTIONS.values():
        first = torch.autograd.grad(function(m, v).pow(3).sum(), (m, v), create_graph=True)
        assert torch.equal(first[1], torch.zeros_like(v))
        second = torch.autograd.grad(first[0].square().sum() + first[1].sum(), (m, v))
        assert all(x.isfinite().all() for x in second)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_transforms_agree_with_autograd(projection):
    function, m, v = PROJECTIONS[projection], doubles(3, 6), doubles(2, 3, 6)[1]

    def loss(m, v):
        return function(m, v).pow(3).sum()

    expected = torch.autograd.grad(loss(m, v), (m, v))
    torch.testing.assert_close(grad(loss, (0, 1))(m, v), expected)
    per_row = vmap(grad(loss, (0, 1)))(m, v)
    torch.testing.assert_close(per_row, expected)
    torch.testing.assert_close(vmap(function, (None, 0))(m[0], v), function(m[:1].expand_as(v), v))
    torch.testing.assert_close(vmap(function, (1, 0), 1)(m.T, v), function(m, v).T)

    jacobians = torch.autograd.functional.jacobian(function, (m, v))
    torch.testing.assert_close(jacrev(function, (0, 1))(m, v), jacobians)
    torch.testing.assert_close(jacfwd(function, (0, 1))(m, v), jacobians)
    tangents = torch.randn_like(m), torch.randn_like(v)
    _, along = jvp(function, (m, v), tangents)
    expected = sum(
        torch.einsum("abcd,cd->ab", j, t) for j, t in zip(jacobians, tangents, strict=True)
    )
    torch.testing.assert_close(along, expected)
    torch.testing.assert_close(
        hessian(loss)(m, v), torch.autograd.functional.hessian(lambda m: loss(m, v), m)
    )


@pytest.mark.parametrize("key", STUDENTS)
def test_second_derivatives_of_a_layer(key):
    torch.manual_seed(0)
    layer, x = ATTENTION[key](8, HEADS, qkv_bias=True).double(), doubles(2, 4, 8)
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernels have no second derivative
        assert torch.autograd.gradgradcheck(layer, x)


@pytest.mark.parametrize("key", STUDENTS)
def test_gradients_of_single_images(key):
    """vmap over grad, of a whole model, against one backward pass an image."""
    torch.manual_seed(0)
    model = timm.create_model(
        "gauvit_pico_patch2_8", attention=key, depth=2, embed_dim=16, num_heads=2
    )
    model = model.double().eval()
    images, labels = doubles(3, 3, 8, 8).detach(), torch.tensor([1, 0, 2])
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights, image, label):
        logits = functional_call(model, weights, (image.unsqueeze(0),))
        return torch.nn.functional.cross_entropy(logits, label.unsqueeze(0))

    found = vmap(grad(loss), (None, 0, 0))(weights, images, labels)
    for i in range(3):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images[i : i + 1]), labels[i : i + 1]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name][i], parameter.grad)


@pytest.mark.parametrize("key", STUDENTS)
def test_forward_mode_derivatives_of_a_layer(key):
    torch.manual_seed(0)
    layer = ATTENTION[key](8, HEADS, qkv_bias=True).double()
    x, along = torch.randn(2, 2, 4, 8, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        found = jvp(layer, (x,), (along,))[1]
    slope = (layer(x + 1e-6 * along) - layer(x - 1e-6 * along)) / 2e-6
    torch.testing.assert_close(found, slope, rtol=1e-6, atol=1e-8)
