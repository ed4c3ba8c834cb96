"""The orthogonal projection, for vectors of any length and derivatives of any order: against
numpy."""

import numpy as np
import pytest
import timm
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gaupipe.attention import ATTENTION, comparing
from gaupipe.attention.base import per_head
from gaupipe.attention.kernels import parallel, perpendicular

HEADS = 2
PROJECTIONS = {1: perpendicular, HEADS: lambda m, v: per_head(perpendicular, m, v, HEADS)}


def oracle(heads, *arrays):
    """(D, dm, dv) of D = m - <m, v> / <v, v> v and its gradient, head by head, in numpy's widest
    type; a vector of length 0 takes nothing away."""
    m, v, g = (x.astype(np.longdouble).reshape(*x.shape[:-1], heads, -1) for x in arrays)
    squared = (v * v).sum(-1, keepdims=True)
    squared[squared == 0] = np.inf
    a, c = (m * v).sum(-1, keepdims=True) / squared, (g * v).sum(-1, keepdims=True) / squared
    results = m - a * v, g - c * v, -(a * (g - c * v) + c * (m - a * v))
    return [result.reshape(arrays[0].shape) for result in results]


def numbers(*shape, dtype=np.float32):
    return np.random.default_rng(len(shape)).standard_normal((3, *shape)).astype(dtype)


def compare(heads, function, m, v, sensitivity, close=3e-6):
    """Value and gradients against the oracle, relative to the largest number of each row."""
    expected = oracle(heads, m, v, sensitivity)
    mine_m, mine_v = (torch.tensor(x, requires_grad=True) for x in (m, v))
    d = function(mine_m, mine_v)
    d.backward(torch.tensor(sensitivity))
    for value, right in zip((d.detach(), mine_m.grad, mine_v.grad), expected, strict=True):
        assert value.isfinite().all()
        size = np.abs(right).max(-1, keepdims=True)
        size[size == 0] = 1
        np.testing.assert_allclose(value.numpy() / size, right / size, atol=close)


LENGTHS = [(1, size) for size in (1e-33, 1e-30, 1e-19, 1e-10, 1, 1e19, 1e30, 1e38)]
LENGTHS += [(1e30, 1e30), (1e-30, 1e-30), (1e-38, 1e-38), (1e-38, 1), (1e37, 1e37), (1e30, 1)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("heads", PROJECTIONS)
def test_values_and_gradients_for_vectors_of_any_length(heads, compiled):
    function = PROJECTIONS[heads]
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    m, v, sensitivity = numbers(5, 8)
    for m_length, v_length in LENGTHS:
        # numbers below 1e-38 have fewer digits
        close = 3e-6 if min(m_length, v_length) > 1e-37 else 1e-4
        m_now, v_now = m * np.float32(m_length), (v / 4 * np.float32(v_length)).astype(np.float32)
        compare(heads, function, m_now, v_now, sensitivity, close=close)
    v[0, :4] *= 1e-20  # heads of very different lengths
    v[1, 4:] *= 1e-28
    v[2, :4] = 0
    v[3, :4] *= 1e25
    v[4] = 0
    compare(heads, function, m, v, sensitivity)
    m, v, sensitivity = numbers(5, 8, dtype=np.float64)
    for size in (1e-250, 1e-160, 1e-30, 1e160, 1e300):
        compare(heads, function, m, v * size, sensitivity, close=1e-12)
        compare(heads, function, m * size, v * size, sensitivity, close=1e-12)
    torch._dynamo.reset()


def test_the_projection_is_exact_up_to_the_last_rounding_in_half_precision_and_under_autocast():
    torch.manual_seed(0)
    m, v = torch.randn(2, 64, 768).bfloat16()
    m = (m + 20 * v).bfloat16()  # nearly parallel: rounding the coefficient alone costs 8 %
    exact = torch.from_numpy(oracle(1, *(x.double().numpy() for x in (m, v, v)))[0].astype(float))
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = perpendicular(m.float(), v.float())
    assert perpendicular(m, v).dtype == torch.bfloat16
    torch.testing.assert_close(perpendicular(m, v).double(), exact, rtol=2**-8, atol=5e-5)
    torch.testing.assert_close(under_autocast.double(), exact, rtol=1e-5, atol=1e-4)


def test_the_parallel_part_is_rounded_once():
    """It is a tenth of m: a difference of rounded numbers would be off by some of their last
    bits."""
    torch.manual_seed(0)
    m, v = torch.randn(2, 64, 768).bfloat16()
    d, *_ = oracle(1, *(x.double().numpy() for x in (m, v, v)))
    exact = m.double() - torch.from_numpy(d.astype(float))
    assert parallel(m, v).dtype == torch.bfloat16
    torch.testing.assert_close(parallel(m, v).double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(parallel(m.double(), v.double()), exact, rtol=1e-9, atol=1e-12)


def doubles(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("heads", PROJECTIONS)
def test_derivatives_of_any_order_and_kind(heads):
    """Backward, forward, one over the other, and batches of them."""
    function, m, v = PROJECTIONS[heads], doubles(2, 3, 6), doubles(3, 2, 6).transpose(0, 1)
    assert torch.autograd.gradcheck(function, (m, v), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, (m, v), check_batched_grad=True)
    jacobian = torch.autograd.functional.jacobian(function, (m, v))
    torch.testing.assert_close(jacfwd(function, (0, 1))(m, v), jacobian)

    def loss(m):
        return function(m, v).pow(3).sum()

    second = torch.autograd.functional.hessian(loss, m)
    torch.testing.assert_close(hessian(loss)(m), second)
    torch.testing.assert_close(vmap(function, (0, None))(m, v[0]), function(m, v[:1].expand_as(m)))
    v = torch.zeros(2, 3, 6, dtype=torch.float64, requires_grad=True)
    first = torch.autograd.grad(function(m, v).pow(3).sum(), (m, v), create_graph=True)
    torch.testing.assert_close(first[1], torch.zeros_like(v), rtol=0, atol=0)
    second = torch.autograd.grad(first[0].square().sum() + first[1].sum(), (m, v))
    assert all(x.isfinite().all() for x in second)


@pytest.mark.parametrize("key", comparing())
def test_derivatives_of_a_layer_and_of_single_images(key):
    """Second order, forward mode, and vmap over grad of a whole model."""
    torch.manual_seed(0)
    layer, x = ATTENTION[key](8, HEADS, qkv_bias=True).double(), doubles(2, 4, 8)
    along = torch.randn_like(x)
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernels have no second derivative
        assert torch.autograd.gradgradcheck(layer, x)
        forward = jvp(layer, (x,), (along,))[1]
    slope = (layer(x + 1e-6 * along) - layer(x - 1e-6 * along)) / 2e-6
    torch.testing.assert_close(forward, slope, rtol=1e-6, atol=1e-8)

    sizes = dict(depth=2, embed_dim=16, num_heads=2)
    model = timm.create_model("gauvit_pico_patch2_8", attention=key, **sizes).double().eval()
    images, labels = doubles(3, 3, 8, 8).detach(), torch.tensor([1, 0, 2])
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights, image, label):
        logits = functional_call(model, weights, (image.unsqueeze(0),))
        return torch.nn.functional.cross_entropy(logits, label.unsqueeze(0))

    gradients = vmap(grad(loss), (None, 0, 0))(weights, images, labels)
    for i in range(3):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images[i : i + 1]), labels[i : i + 1]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad)
