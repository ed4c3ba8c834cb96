"""AttentionX: the update is how far a token's value is from what its neighbours say."""

from __future__ import annotations

import torch
from torch import Tensor

from gaupipe.attention.functional import StudentAttention, matrix_of_mh


class AttentionX(StudentAttention):
    """Update (V - gamma MH) W, the consensus discrepancy (*AttentionX, eqs. 10-11*).

    ``mask_diagonal`` hides every token from itself before the softmax, for which the paper uses
    ``gamma`` = 1; without it, gamma > 1 (3 for language). A token left without any key (the first
    one of a causal sequence) attends to nothing: MH = 0, update V W, and all
    its log-probabilities are -inf, as the diagonal is. In an additive mask a key is hidden
    from half the type's lowest number on.
    """

    def __init__(self, *args, gamma: float = 1.0, mask_diagonal: bool = True, **kwargs) -> None:
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
        if not self.mask_diagonal:
            return super().attend(q, k, v, attn_mask, is_causal)
        visible = without_diagonal(q, attn_mask, is_causal)
        if attn_mask is None and not is_causal and q.shape[-2] > 1:
            return super().attend(q, k, v, visible, False)
        # not every kernel defines a query without keys: it reads all of them, and then nothing
        keyless = (visible == -torch.inf).all(-1, keepdim=True)
        heads = super().attend(q, k, v, visible.masked_fill(keyless, 0), False)
        return heads.masked_fill(keyless, 0)

    def log_map(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        if not self.mask_diagonal:
            return super().log_map(q, k, attn_mask, is_causal)
        return super().log_map(q, k, without_diagonal(q, attn_mask, is_causal), False)


def without_diagonal(q: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """The additive mask, in the type of q [B, H, T, d_m] unless ``attn_mask`` has another one, that
    hides the diagonal and what else is not to be seen.

    What ``attn_mask`` adds to a score hides the key from half the type's lowest number on, which
    stands for -inf in many programs: against it alone a token whose only visible key was itself
    would read all the hidden ones.
    """
    tokens = q.shape[-2]
    hidden = torch.eye(tokens, dtype=torch.bool, device=q.device)
    if is_causal:
        hidden = torch.ones_like(hidden).triu()
    if attn_mask is None:
        attn_mask = torch.zeros(tokens, tokens, dtype=q.dtype, device=q.device)
    elif attn_mask.dtype == torch.bool:
        hidden, attn_mask = hidden | ~attn_mask, torch.zeros_like(attn_mask, dtype=q.dtype)
    else:
        hidden = hidden | (attn_mask <= torch.finfo(attn_mask.dtype).min / 2)
    return attn_mask.masked_fill(hidden, -torch.inf)
