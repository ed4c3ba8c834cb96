"""AttentionX: the update is how far a token's value is from what its neighbours say."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch import Tensor

from gaupipe.attention.base import StudentAttention, causal_mask, hidden_by, matrix_of_mh


class AttentionX(StudentAttention):
    """Update (V - gamma MH) W, the consensus discrepancy (*AttentionX, eqs. 10-11*).

    ``mask_diagonal`` hides every token from itself before the softmax, for which the paper uses
    ``gamma`` = 1; without it, gamma > 1 (3 for language). A token without any key (the first one of
    a causal sequence) has MH = 0 and log-probabilities -inf. For the keys that an additive mask
    hides see ``gaupipe.attention.base.hidden_by``.
    """

    def __init__(
        self, *args: Any, gamma: float = 1.0, mask_diagonal: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.gamma = gamma
        self.mask_diagonal = mask_diagonal

    def matrices(self) -> dict[str, Tensor]:
        """MH enters with the opposite sign, so W is minus the matrix of other attentions."""
        return {"MH": -self.proj.weight, "V": self.proj.weight}

    def start_from(self, matrices: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"proj": -matrix_of_mh(matrices)}

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        return self.proj(torch.sub(v, mh, alpha=self.gamma))

    def hidden_keys(self, tokens: int, device: torch.device) -> Tensor | None:
        if not self.mask_diagonal:
            return None
        return torch.eye(tokens, dtype=torch.bool, device=device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        return super().attend(q, k, v, *self.masks(q, attn_mask, is_causal))

    def log_map(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        return super().log_map(q, k, *self.masks(q, attn_mask, is_causal))

    def masks(
        self, q: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor | None, bool]:
        if not self.mask_diagonal:
            return attn_mask, is_causal
        return without_diagonal(q, attn_mask, is_causal), False


@torch.fx.wrap
def without_diagonal(q: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """The additive mask, in the type of q [B, H, T, .], with the diagonal hidden as well; -inf also
    where ``attn_mask`` has a lowest number."""
    tokens = q.shape[-2]
    visible = torch.eye(tokens, device=q.device) == 0  # onnxruntime has no eye of bool
    if is_causal:
        visible = causal_mask(visible, tokens)
    if attn_mask is None:
        return torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
    hidden = hidden_by(attn_mask) | ~visible
    scores = attn_mask
    if attn_mask.dtype == torch.bool:
        scores = torch.zeros_like(attn_mask)
    return scores.to(q.dtype).masked_fill(hidden, -torch.inf)
