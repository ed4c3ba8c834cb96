"""GauAttention: a query samples one point of the grid instead of comparing itself with keys."""

from __future__ import annotations

from torch import Tensor, nn

from gaupipe.gaussians import outer


class GaussianAttention(nn.Module):
    """Reads V where the queries' Gaussians point, then projects (*GauTransformer, eq. 8*). There are no Q and K.

    Takes the arguments of timm's ``Attention``; those that concern queries and keys are ignored. There is no class
    token (the grid has no cell for one).
    """

    def __init__(self, dim: int, num_heads: int = 8, qkv_bias: bool = False, proj_bias: bool = True,
                 proj_drop: float = 0.0, device=None, dtype=None, **_unused) -> None:
        super().__init__()
        assert dim % num_heads == 0, f"dim {dim} should be divisible by num_heads {num_heads}"
        self.num_heads = num_heads
        self.v = nn.Linear(dim, dim, bias=qkv_bias, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, axes: tuple[Tensor, Tensor]) -> Tensor:
        """Residual update [B, T, d] of tokens x [B, T, d].

        ``axes`` are the two factors ([B, H, T, h], [B, H, T, w]) of the attention map, from
        :func:`gaupipe.gaussians.point_axes` (``stochastic``, at most four non-zeros a row) or
        :func:`gaupipe.gaussians.expected_axes` (``expected``).
        """
        v = self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, T, d_m]
        attention = outer(*axes).to(v.dtype)                              # [B, H, T, T]
        heads = (attention @ v).transpose(1, 2).flatten(2)                # [B, T, d]
        return self.proj_drop(self.proj(heads))

