"""`belief` with a gate for each head, which starts as standard attention."""

import numpy as np
import pytest
import torch

from gaupipe.attention import ATTENTION
from gaupipe.system.errors import UserError

TOKENS, WIDTH, HEADS = 5, 12, 3


def attentions(gate: list[float]):
    """Gated belief with these gates, standard attention and belief, with the same weights."""
    torch.manual_seed(0)
    standard = ATTENTION["standard"](WIDTH, num_heads=HEADS, qkv_bias=True).double()
    others = [
        ATTENTION["belief"](WIDTH, num_heads=HEADS, qkv_bias=True, gated=gated).double()
        for gated in (True, False)
    ]
    others[0].load_state_dict(standard.state_dict() | {"head_gate": torch.tensor(gate).double()})
    others[1].load_state_dict(standard.state_dict())
    return others[0], standard, others[1]


def expected(attention, x: np.ndarray) -> np.ndarray:
    """The update of tokens x [T, d] in numpy."""
    weights = {name: value.detach().numpy() for name, value in attention.named_parameters()}
    qkv = (x @ weights["qkv.weight"].T + weights["qkv.bias"]).reshape(TOKENS, 3, HEADS, -1)
    q, k, v = qkv.transpose(1, 2, 0, 3)  # [H, T, d_m]
    scores = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(WIDTH / HEADS))
    heads = scores / scores.sum(-1, keepdims=True) @ v
    mh, value = (part.transpose(1, 0, 2).reshape(TOKENS, WIDTH) for part in (heads, v))
    projected = (mh * value).sum(-1, keepdims=True) / (value**2).sum(-1, keepdims=True) * value
    gates = np.repeat(weights["head_gate"], WIDTH // HEADS)
    return (mh - gates * projected) @ weights["proj.weight"].T + weights["proj.bias"]


def test_gated_belief_is_its_equation_with_the_gradients_of_it():
    gated, _, _ = attentions([0.3, -0.2, 1.4])
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        gated(x)[0], torch.from_numpy(expected(gated, x[0].detach().numpy()))
    )
    gate = gated.head_gate.detach().clone().requires_grad_()

    def update(tokens, gate):
        return torch.func.functional_call(gated, {"head_gate": gate}, (tokens,))

    assert torch.autograd.gradcheck(update, (x, gate))


def test_a_gate_of_zero_is_standard_attention_and_of_one_is_belief():
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    for value, index in ((0.0, 1), (1.0, 2)):
        models = attentions([value] * HEADS)
        torch.testing.assert_close(models[0](x), models[index](x))
    fresh = ATTENTION["belief"](WIDTH, num_heads=HEADS, gated=True)
    assert fresh.head_gate.tolist() == [0] * HEADS
    assert "head_gate" not in ATTENTION["belief"](WIDTH, num_heads=HEADS).state_dict()
    with pytest.raises(UserError, match="signal"):
        ATTENTION["belief"](WIDTH, num_heads=HEADS, gated=True, signal="value")


def test_trained_standard_attention_goes_over_unchanged_and_on_to_belief2():
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    gated, standard, _ = attentions([0.3, -0.2, 1.4])
    fresh = ATTENTION["belief"](WIDTH, num_heads=HEADS, qkv_bias=True, gated=True).double()
    fresh.take_over(standard)
    torch.testing.assert_close(fresh(x), standard(x))
    cls = ATTENTION["belief2"]
    belief2 = cls(WIDTH, num_heads=HEADS, qkv_bias=True, **cls.conversion_options).double()
    belief2.take_over(gated)
    torch.testing.assert_close(belief2(x), gated(x))
