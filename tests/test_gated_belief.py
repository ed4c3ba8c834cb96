"""`belief` with a gate for each head, which starts as standard attention."""

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
