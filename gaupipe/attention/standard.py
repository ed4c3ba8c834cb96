"""Standard attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from timm.layers import Attention
from torch import Tensor, nn

from gaupipe.attention.base import StudentAttention
from gaupipe.attention.gaussian import Grid, gaussian_prior, log_factors, register_positions
from gaupipe.maps.gaussians import from_raw
from gaupipe.system.errors import UserError


class StandardAttention(StudentAttention):
    """Multi-head attention; update MH W (*BeliefFormer, eqs. 6-9*).

    Without ``prior``, models of ``gauvit`` have timm's own ``Attention`` in its place, see
    :func:`in_steps`.

    With ``prior`` the scores are Q K' / sqrt(d_m) + log P, with P the expected map of a learned
    Gaussian for each head and query: raw numbers (``loc_scale``) ``prior`` [H, T, 4], at the start
    on the query's token with a std of one token. Where Q K' = 0 that is GauAttention with the
    shared prior alone (*GauTransformer, eq. 8*). P lies on the ``grid`` (h, w) of a ``gauvit``
    model, which has no place for class and register tokens.
    """

    marks_weights = False  # they are timm's
    prior: nn.Parameter | None
    positions: Tensor

    def __init__(
        self, *args: Any, prior: bool = False, grid: Grid | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.grid = None
        self.prior = None
        if prior:
            if grid is None:
                raise UserError(
                    "option 'prior' of StandardAttention lies on a grid: it is for gauvit_ models "
                    "of timm.create_model"
                )
            self.grid = grid
            device = self.proj.weight.device
            self.prior = gaussian_prior(self.num_heads, grid, device)
            register_positions(self, grid, 0, device)

    @property
    def has_prior(self) -> bool:
        return getattr(self, "prior", None) is not None  # timm's Attention has no such attribute

    @classmethod
    def in_models(cls, options: dict[str, Any]) -> type[nn.Module]:
        if options.get("prior"):
            return cls
        return Attention

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V; with a prior [Q, A] and [K, positions], A the logarithms of the two factors
        of P: their product is Q K' + sqrt(d_m) log P."""
        q, k, v = super().project(x)
        if not self.has_prior:
            return q, k, v
        a = (self.log_factors() / self.scale).to(q.dtype)  # [H, T, h + w]
        positions = self.positions.to(k.dtype)  # [T, h + w]
        q = torch.cat([q, a.expand(q.shape[0], q.shape[1], -1, -1)], dim=-1)
        k = torch.cat([k, positions.expand(k.shape[0], k.shape[1], -1, -1)], dim=-1)
        return q, k, v

    def log_factors(self) -> Tensor:
        """The logarithms of the two factors of P side by side, [H, T, h + w] float32."""
        assert self.prior is not None and self.grid is not None
        return log_factors(from_raw(self.prior, "loc_scale"), self.grid)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """As the base; log P is then a mask of fused attention, which is faster than the channels
        of :meth:`project`. An export has the channels: torch's to ONNX does not take the mask."""
        masked = attn_mask is not None or is_causal
        if not self.has_prior or masked or torch.compiler.is_exporting():
            return super().forward(x, attn_mask, is_causal)
        assert self.grid is not None
        q, k, v = super().project(x)
        along_y, along_x = self.log_factors().split(self.grid, dim=-1)  # of [H, T, h + w]
        log_p = (along_y.unsqueeze(-1) + along_x.unsqueeze(-2)).flatten(-2)  # [H, T, T]
        heads = self.attend(q, k, v, log_p.to(q.dtype).unsqueeze(0), is_causal=False)
        return self.output(heads, v, x)


torch.fx.wrap("log_factors")


class TimmInSteps(StandardAttention):
    """timm's own ``Attention`` in the steps of ours: a second module around the same parts."""

    def __init__(self, attention: Attention) -> None:
        super(Attention, self).__init__()  # an empty module: the parts are there
        for name, part in attention.named_children():
            setattr(self, name, part)
        self.num_heads = attention.num_heads
        self.head_dim = attention.head_dim
        self.attn_dim = attention.attn_dim
        self.scale = attention.scale
        self.prior = None


def in_steps(attention: nn.Module) -> StudentAttention:
    """An attention with the steps of a :class:`~gaupipe.attention.base.StudentAttention`:
    ``attention`` itself or, for timm's own ``Attention``, a :class:`StandardAttention` of the same
    modules. Raises UserError for another class."""
    if isinstance(attention, StudentAttention):
        return attention
    if type(attention) is not Attention:
        raise UserError(
            f"cannot read the maps of a {type(attention).__name__}: only those of timm's Attention "
            "and of gaupipe's own"
        )
    return TimmInSteps(attention)
