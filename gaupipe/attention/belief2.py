"""Belief2-attention: the projected component gets a projection of its own, and scores a
symmetric part."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn

from gaupipe.attention.base import StudentAttention, choice, matrix_of_mh
from gaupipe.attention.kernels import parts

ACTIVATIONS = {"gelu": nn.GELU, "silu": nn.SiLU, "identity": nn.Identity}

SMALL_Z = 1e-5
"""Standard deviation of W_Z that float32 does not see in the scores."""


class Belief2Attention(StudentAttention):
    """Update D W + phi(a V) W_p, with scores (Q K' + Z Z') / sqrt(d_m) (*Belief2, eqs. 11-17*).
    Adds ``proj_parallel`` (W_p, d x d) and, with ``zz``, ``z`` (W_Z, d x d).

    ``activation`` is phi: "gelu" or "silu" from scratch, "identity" for pretrained weights, where
    W_p = W and Z = 0 is standard attention (*Belief2, proposition 1*). The paper advises
    ``zz=False`` for pretrained weights.
    """

    starts_as_standard = True
    conversion_options = {"activation": "identity"}

    def __init__(
        self, *args: Any, activation: str = "gelu", zz: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.activation = ACTIVATIONS[choice("activation", activation, ACTIVATIONS)]()
        self.proj_parallel = self.linear()
        self.z = None
        if zz:
            weight = self.proj.weight
            self.z = nn.Linear(
                self.qkv.in_features,
                self.attn_dim,
                bias=False,
                device=weight.device,
                dtype=weight.dtype,
            )

    def matrices(self) -> dict[str, Tensor]:
        return {"D": self.proj.weight, "MH - D": self.proj_parallel.weight}

    def start_from(self, matrices: dict[str, Tensor]) -> dict[str, Tensor]:
        """MH W = D W + (MH - D) W, so W_p = W (*proposition 1*); what is perpendicular to V has
        nothing for W_p, which is then 0."""
        zero = torch.zeros_like(next(iter(matrices.values())))
        parallel = matrices.get("MH - D", matrices.get("MH", zero))
        rest = {name: weight for name, weight in matrices.items() if name != "MH - D"}
        weight = matrix_of_mh(rest) if rest else zero
        return {"proj": weight, "proj_parallel": parallel}

    def take_over(self, old: Attention) -> None:
        """As the base; Z starts so small that float32 does not see Z Z' (*proposition 1*), but not
        at 0: there the gradient of Z Z' vanishes and Z would never learn."""
        super().take_over(old)
        if self.z is not None and getattr(old, "z", None) is None:
            nn.init.normal_(self.z.weight, std=SMALL_Z)

    def note(self) -> str:
        """The class and phi, which is another where weights of standard attention were loaded."""
        return f"{super().note()} {type(self.activation).__name__}"

    def check_note(self, note: str) -> None:
        """As the base; phi is the one that the weights were trained with."""
        attention, _, activation = note.partition(" ")
        known = {layer.__name__: layer for layer in ACTIVATIONS.values()}
        if attention == type(self).__name__ and activation in known:
            self.activation = known[activation]()
        super().check_note(note)

    def load_standard(self, state_dict: dict[str, Any], prefix: str) -> None:
        """As :meth:`take_over`, with phi the identity."""
        super().load_standard(state_dict, prefix)
        self.activation = nn.Identity()
        if self.z is not None:
            small = state_dict[prefix + "proj.weight"].new_empty(self.z.weight.shape)
            state_dict[prefix + "z.weight"] = nn.init.normal_(small, std=SMALL_Z)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V; with ``zz`` [Q, Z] and [K, Z] of twice the head width, whose product is Q
        K' + Z Z'."""
        q, k, v = super().project(x)
        if self.z is None:
            return q, k, v
        z = self.z(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        return torch.cat([q, z], dim=-1), torch.cat([k, z], dim=-1), v

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        d, along = parts(mh, v)
        return self.proj(d) + self.proj_parallel(self.activation(along))
