"""Belief-attention*: perpendicular over all heads together and head by head, each with its projection."""

from __future__ import annotations

from torch import Tensor, nn

from gaupipe.attention.functional import StudentAttention, choice, per_head, perpendicular

SIGNALS = {
    "perpendicular": lambda mh, v, heads: (perpendicular(mh, v), per_head(perpendicular, mh, v, heads)),
    "projected": lambda mh, v, heads: (mh - perpendicular(mh, v), mh - per_head(perpendicular, mh, v, heads)),
    "concat": lambda mh, v, heads: (mh, v),
}


class BeliefStarAttention(StudentAttention):
    """Update D W + D_s W_s, D perpendicular to V over all heads together and D_s in each head (*BeliefFormer,
    eqs. 15-17*; *Belief2, eqs. 2-7*). Adds ``proj_local`` (W_s, d x d).

    ``signal``: "perpendicular" (D, D_s) or, as ablations, "projected" (MH - D, MH - D_s) (*Belief2, figure 3*) and
    "concat" (MH, V), which is [MH, V] through one projection of twice the size (*BeliefFormer, appendix C*).
    """

    def __init__(self, *args, signal: str = "perpendicular", **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.signal = choice("signal", signal, SIGNALS)
        self.proj_local = nn.Linear(self.proj.in_features, self.proj.out_features, bias=False,
                                    device=self.proj.weight.device, dtype=self.proj.weight.dtype)

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        over_all, in_each = SIGNALS[self.signal](mh, v, self.num_heads)
        return self.proj(over_all) + self.proj_local(in_each)
