"""Belief-attention: a token takes from the others only what is perpendicular to its own value."""

from __future__ import annotations

from torch import Tensor

from gaupipe.attention.base import StudentAttention, choice
from gaupipe.attention.kernels import perpendicular

SIGNALS = {
    "perpendicular": perpendicular,
    "projected": lambda mh, v: mh - perpendicular(mh, v),
    "value": lambda mh, v: v,
}


class BeliefAttention(StudentAttention):
    """Update D W, D the part of MH perpendicular to V per token, over all heads together
    (*BeliefFormer, eqs. 10-14*).

    ``signal``: "perpendicular" (D) or, as ablations, "projected" (MH - D) and "value" (V)
    (*Belief2, figure 3*).
    """

    def __init__(self, *args, signal: str = "perpendicular", **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.signal = choice("signal", signal, SIGNALS)

    def matrices(self) -> dict[str, Tensor]:
        signal = {"perpendicular": "D", "projected": "MH - D", "value": "V"}[self.signal]
        return {signal: self.proj.weight}

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        return self.proj(SIGNALS[self.signal](mh, v))
