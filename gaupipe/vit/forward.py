"""Forward passes of a timm ViT that show the attention. Axis letters: B images, H heads, T tokens,
d model width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gaupipe.attention.standard import in_steps
from gaupipe.system.errors import UserError


def run_blocks(
    model: VisionTransformer, images: Tensor, attend: Callable[[int, Any, Tensor], Tensor]
) -> Tensor:
    """The forward pass of a pre-norm timm ViT, block by block, with the attention in the caller's
    hands; each block is computed again for the gradient if timm's ``set_grad_checkpointing`` was
    called.

    ``attend(layer, attention, tokens)`` gets the index of the block, its attention module and the
    normalised tokens [B, T, d], and returns the update [B, T, d]. Images [B, C, height, width];
    returns logits [B, classes].
    """

    def run_block(layer: int, block: Any, x: Tensor) -> Tensor:
        x = x + block.drop_path1(block.ls1(attend(layer, block.attn, block.norm1(x))))
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))

    x = embed(model, images)
    for layer, block in enumerate(model.blocks):
        if model.grad_checkpointing:
            x = checkpoint(run_block, layer, block, x, use_reentrant=False)
        else:
            x = run_block(layer, block, x)
    return model.forward_head(model.norm(x))


def embed(model: VisionTransformer, images: Tensor) -> Tensor:
    """The tokens [B, T, d] that the first block of a timm ViT gets. Raises UserError for a model or
    blocks of another class."""
    # a compiled one is unwrapped, a parallel one not: it would exchange no gradients
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, VisionTransformer):
        raise UserError(
            f"cannot run the blocks of a {type(model).__name__} one by one: only those of timm's "
            "VisionTransformer"
        )
    for block in model.blocks:
        if not isinstance(block, Block):
            raise UserError(f"cannot run a {type(block).__name__} in steps: only timm's Block")
    return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))


def forward_with_maps(model: VisionTransformer, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(logits [B, classes], log_maps): the attention maps that the logits were computed with, a
    list over blocks of log-probabilities [B, H, T, T], float32."""
    log_maps: dict[int, Tensor] = {}

    def attend(layer: int, attention: nn.Module, tokens: Tensor) -> Tensor:
        update, log_map = in_steps(attention).forward_with_map(tokens)
        log_maps.setdefault(layer, log_map)  # gradient checkpointing computes it once more
        return update

    logits = run_blocks(model, images, attend)
    return logits, list(log_maps.values())
