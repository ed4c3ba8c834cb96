"""Belief-attention*: perpendicular over all heads together and head by head, each with its
projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gaupipe.attention.functional import StudentAttention, choice, matrix_of_mh
from gaupipe.attention.kernels import perpendicular_twice

SIGNALS = {
    "perpendicular": lambda mh, v, heads: perpendicular_twice(mh, v, heads),
    "projected": lambda mh, v, heads: tuple(mh - d for d in perpendicular_twice(mh, v, heads)),
    "concat": lambda mh, v, heads: (mh, v),
}
MULTIPLIED = {
    "perpendicular": ("D", "D_s"),
    "projected": ("MH - D", "MH - D_s"),
    "concat": ("MH", "V"),
}
"""What W and W_s multiply with each signal."""


class BeliefStarAttention(StudentAttention):
    """Update D W + D_s W_s, D perpendicular to V over all heads together and D_s in each head
    (*BeliefFormer, eqs. 15-17*; *Belief2, eqs. 2-7*). Adds ``proj_local`` (W_s, d x d).

    ``signal``: "perpendicular" (D, D_s) or, as ablations, "projected" (MH - D, MH - D_s) (*Belief2,
    figure 3*) and "concat" (MH, V), which is [MH, V] through one projection of twice the size
    (*BeliefFormer, appendix C*).
    """

    def __init__(self, *args, signal: str = "perpendicular", **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.signal = choice("signal", signal, SIGNALS)
        self.proj_local = nn.Linear(
            self.proj.in_features,
            self.proj.out_features,
            bias=False,
            device=self.proj.weight.device,
            dtype=self.proj.weight.dtype,
        )

    def matrices(self) -> dict[str, Tensor]:
        first, second = MULTIPLIED[self.signal]
        return {first: self.proj.weight, second: self.proj_local.weight}

    def start_from(self, matrices: dict[str, Tensor]) -> dict[str, Tensor]:
        """W_s is 0, and so this is belief-attention, unless the trained attention has a matrix for
        D_s; one that has no other, exclusive self-attention, leaves W at 0."""
        _first, second = MULTIPLIED[self.signal]
        rest = {name: weight for name, weight in matrices.items() if name != second}
        nothing = torch.zeros_like(self.proj.weight)
        return {
            "proj": matrix_of_mh(rest) if rest else nothing,
            "proj_local": matrices.get(second, nothing),
        }

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        over_all, in_each = SIGNALS[self.signal](mh, v, self.num_heads)
        return self.proj(over_all) + self.proj_local(in_each)
