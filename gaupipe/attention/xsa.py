"""Exclusive self-attention: belief-attention head by head."""

from __future__ import annotations

from torch import Tensor

from gaupipe.attention.base import StudentAttention, per_head
from gaupipe.attention.kernels import perpendicular


class ExclusiveAttention(StudentAttention):
    """Update D_s W, D_s the part of MH perpendicular to V in each head (*BeliefFormer, eqs.
    15-16*, alone: the case W = 0 of *Belief2, eq. 7*)."""

    def matrices(self) -> dict[str, Tensor]:
        return {"D_s": self.proj.weight}

    def perpendicular(self, mh: Tensor, v: Tensor) -> Tensor:
        return per_head(perpendicular, mh, v, self.num_heads)

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        return self.proj(self.perpendicular(mh, v))
