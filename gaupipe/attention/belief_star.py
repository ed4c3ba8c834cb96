"""Belief-attention*: perpendicular over all heads together and head by head, each with its
projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gaupipe.attention.base import StudentAttention, choice, matrix_of_mh, per_head
from gaupipe.attention.kernels import parallel, perpendicular

MULTIPLIED = {
    "perpendicular": ("D", "D_s"),
    "projected": ("MH - D", "MH - D_s"),
    "concat": ("MH", "V"),
}
"""The factors of W and W_s with each signal."""


class BeliefStarAttention(StudentAttention):
    """Update D W + D_s W_s, D perpendicular to V over all heads together and D_s in each head
    (*BeliefFormer, eqs. 15-17*; *Belief2, eqs. 2-7*). Adds ``proj_local`` (W_s, d x d).

    ``signal``: "perpendicular" (D, D_s) or, as ablations, "projected" (MH - D, MH - D_s) (*Belief2,
    figure 3*) and "concat" (MH, V), which is [MH, V] through one projection of twice the size
    (*BeliefFormer, appendix C*).
    """

    def __init__(self, *args: Any, signal: str = "perpendicular", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.signal = choice("signal", signal, MULTIPLIED)
        self.proj_local = self.linear()

    def matrices(self) -> dict[str, Tensor]:
        first, second = MULTIPLIED[self.signal]
        return {first: self.proj.weight, second: self.proj_local.weight}

    def start_from(self, matrices: dict[str, Tensor]) -> dict[str, Tensor]:
        """W_s = 0, as belief-attention, unless the trained attention has a matrix for D_s. One
        without another, exclusive self-attention, leaves W at 0."""
        _first, second = MULTIPLIED[self.signal]
        zero = torch.zeros_like(next(iter(matrices.values())))
        local = matrices.get(second, zero)
        rest = {name: weight for name, weight in matrices.items() if name != second}
        weight = matrix_of_mh(rest) if rest else zero
        return {"proj": weight, "proj_local": local}

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        if self.signal == "concat":
            return self.proj(mh) + self.proj_local(v)
        part = parallel if self.signal == "projected" else perpendicular
        local = per_head(part, mh, v, self.num_heads)
        return self.proj(part(mh, v)) + self.proj_local(local)
