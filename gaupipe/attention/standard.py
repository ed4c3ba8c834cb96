"""Standard attention."""

from __future__ import annotations

from torch import Tensor

from gaupipe.attention.functional import StudentAttention


class StandardAttention(StudentAttention):
    """Multi-head attention as in timm; update MH W (*BeliefFormer, eqs. 6-9*)."""

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        return self.proj(mh)
