"""Belief-attention: a token takes from the others only what is perpendicular to its own value."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gaupipe.attention.base import StudentAttention, choice
from gaupipe.attention.kernels import parallel, perpendicular

SIGNALS = {
    "perpendicular": perpendicular,
    "projected": parallel,
    "value": lambda mh, v: v,
}


class BeliefAttention(StudentAttention):
    """Update D W, D the part of MH perpendicular to V per token, over all heads together
    (*BeliefFormer, eqs. 10-14*).

    ``signal``: "perpendicular" (D) or, as ablations, "projected" (MH - D) and "value" (V)
    (*Belief2, figure 3*).

    ``gated``: (MH - g (MH - D)) W with a learned number g for each head, which starts at 0 as
    standard attention; at 1 it is D W.
    """

    def __init__(
        self, *args: Any, signal: str = "perpendicular", gated: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        known = ["perpendicular"] if gated else list(SIGNALS)
        self.signal = choice("signal", signal, known)
        self.head_gate = None
        if gated:
            self.head_gate = nn.Parameter(self.proj.weight.detach().new_zeros(self.num_heads))

    @property
    def starts_as_standard(self) -> bool:  # type: ignore[override]  # the gates are 0 at first
        return self.head_gate is not None

    def load_standard(self, state_dict: dict[str, Any], prefix: str) -> None:
        super().load_standard(state_dict, prefix)
        if self.head_gate is not None:
            weight = state_dict[prefix + "proj.weight"]
            state_dict[prefix + "head_gate"] = weight.new_zeros(self.num_heads)

    def gates(self) -> Tensor:
        """g of each channel [d]."""
        assert self.head_gate is not None
        return self.head_gate.repeat_interleave(self.head_dim)

    def matrices(self) -> dict[str, Tensor]:
        if self.head_gate is not None:
            weight = self.proj.weight
            return {"D": weight, "MH - D": weight * (1 - self.gates())}
        signal = {"perpendicular": "D", "projected": "MH - D", "value": "V"}[self.signal]
        return {signal: self.proj.weight}

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        if self.head_gate is not None:
            return self.proj(mh - self.gates() * parallel(mh, v))
        return self.proj(SIGNALS[self.signal](mh, v))
