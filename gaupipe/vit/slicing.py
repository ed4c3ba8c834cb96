"""A slice of a trained ViT's weights, for a smaller ViT to start with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from gaupipe.system.errors import UserError
from gaupipe.vit.stem import ConvPatchEmbed

AXES: dict[str, tuple[str, ...]] = {
    "": ("all", "all", "width"),  # class and register tokens, position embedding
    "patch_embed.proj": ("width",),
    "norm_pre": ("width",),
    "norm1": ("width",),
    "attn.qkv": ("qkv", "width"),
    "attn.v": ("heads", "width"),
    "attn.z": ("heads", "width"),
    "attn.q_norm": ("head",),
    "attn.k_norm": ("head",),
    "attn.norm": ("heads",),
    "attn.gate": ("heads", "width"),
    "attn.proj": ("width", "heads"),
    "attn.proj_local": ("width", "heads"),
    "attn.proj_parallel": ("width", "heads"),
    "ls1": ("width",),
    "norm2": ("width",),
    "mlp.fc1": ("hidden", "width"),
    "mlp.fc1_g": ("hidden", "width"),
    "mlp.fc1_x": ("hidden", "width"),
    "mlp.norm": ("hidden",),
    "mlp.fc2": ("width", "hidden"),
    "ls2": ("width",),
    "norm": ("width",),
    "fc_norm": ("width",),
    "head": ("all", "width"),
    "head_dist": ("all", "width"),
}
"""The channels along the first axes of the parameters of each module of timm's
``VisionTransformer``, by its name within the block or the model: "width" those of the residual
stream, "head" of a single head, "heads" of all heads side by side, "qkv" the same three times."""

HEADS = ("head", "head_dist")


@dataclass(frozen=True)
class Sizes:
    """What a slice may have less of."""

    blocks: int
    channels: int
    heads: int
    channels_of_head: int
    hidden_units: int

    @classmethod
    def of(cls, weights: dict[str, Tensor], heads: int) -> Sizes:
        """Of a ViT's state_dict, which does not tell the number of heads."""
        proj = weights["blocks.0.attn.proj.weight"]  # [width, heads * head width]
        fc2 = weights.get("blocks.0.mlp.fc2.weight", proj[:, :0])  # a ViT may have no FFN
        blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
        width, attended = proj.shape
        return cls(len(blocks), width, heads, attended // heads, fc2.shape[1])

    def check(self, asked: Sizes, setting: str) -> None:
        """Raises UserError for a slice that is ``asked`` to be larger."""
        for name, available in vars(self).items():
            wanted = getattr(asked, name)
            if wanted > available:
                raise UserError(
                    f"{setting}: the student has {name.replace('_', ' ')}: {wanted}, the trained "
                    f"ViT {available}: a slice is at most as large as what it is cut from"
                )


def evenly_spaced(count: int, available: int) -> list[int]:
    """``count`` numbers from 0 to ``available`` - 1, both among them; of a single one the last."""
    if count == 1:
        return [available - 1]
    last, steps = available - 1, count - 1
    return [(2 * number * last + steps) // (2 * steps) for number in range(count)]  # halves go up


def every_nth(count: int, available: int) -> Tensor:
    """The first channel of each of ``count`` equal parts of the ``available`` ones."""
    return torch.arange(count) * available // max(count, 1)


@torch.no_grad()
def slice_weights(
    weights: dict[str, Tensor],
    heads: int,
    grid: tuple[int, int],
    student: VisionTransformer,
    setting: str,
) -> dict[str, Tensor]:
    """The part of a trained ViT's ``weights`` (state_dict) that has the sizes of the student, by
    the same names (*weight selection, arXiv 2311.18823*).

    Blocks are evenly spaced, with the first and the last. Channels are every n-th: the same of the
    residual stream everywhere, the same within each head for queries, keys and values; so are heads
    and the hidden units of the FFN. timm resizes position and patch embedding. A convolutional stem
    of the student gets nothing, nor does a head for another number of classes.

    heads, grid  of the trained ViT; the grid (h, w) in patches
    setting      asked for the slice, for messages

    Raises UserError for a student that is larger, and for one with parts that no rule slices.
    """
    first: Any = student.blocks[0]  # timm says Module
    present = student.state_dict()
    sizes, asked = Sizes.of(weights, heads), Sizes.of(present, first.attn.num_heads)
    sizes.check(asked, setting)
    channels = chosen_channels(asked, sizes)
    sliced: dict[str, Tensor] = {}
    for name, tensor in with_blocks(weights, evenly_spaced(asked.blocks, sizes.blocks)).items():
        module = re.sub(r"^blocks\.\d+\.", "", name).rpartition(".")[0]
        if module.startswith("patch_embed.") and isinstance(student.patch_embed, ConvPatchEmbed):
            continue
        if name in present and module not in AXES:
            raise UserError(f"{setting}: no rule slices the part {name} of the trained ViT")
        axes = AXES.get(module, ()) if tensor.ndim else ()  # the scalars of rezero are whole
        for axis, kind in enumerate(axes[: tensor.ndim]):
            if kind == "hidden":
                tensor = hidden_units(tensor, axis, channels["hidden"], sizes.hidden_units)
            elif kind != "all":
                tensor = tensor.index_select(axis, channels[kind].to(tensor.device))
        other_classes = name in present and tensor.shape[:1] != present[name].shape[:1]
        if not (module in HEADS and other_classes):
            sliced[name] = tensor
    if "patch_embed.proj.weight" in sliced:
        kernel = sliced["patch_embed.proj.weight"]
        patch = list(student.patch_embed.patch_size)
        sliced["patch_embed.proj.weight"] = resample_patch_embed(kernel, patch)
    if "pos_embed" in sliced:
        positions = sliced["pos_embed"]
        size = list(student.patch_embed.grid_size)
        prefix = positions.shape[1] - grid[0] * grid[1]
        sliced["pos_embed"] = resample_abs_pos_embed(positions, size, list(grid), prefix)
    return sliced


def with_blocks(weights: dict[str, Tensor], blocks: list[int]) -> dict[str, Tensor]:
    """The weights of a ViT that has these ``blocks`` of another, renumbered."""
    named = {name: tensor for name, tensor in weights.items() if not name.startswith("blocks.")}
    for block, source in enumerate(blocks):
        start = f"blocks.{source}."
        for name, tensor in weights.items():
            if name.startswith(start):
                named[f"blocks.{block}.{name.removeprefix(start)}"] = tensor
    return named


def chosen_channels(asked: Sizes, sizes: Sizes) -> dict[str, Tensor]:
    """Channels of each kind of axis of :data:`AXES`, by their numbers in the trained ViT."""
    head = every_nth(asked.channels_of_head, sizes.channels_of_head)
    starts = every_nth(asked.heads, sizes.heads) * sizes.channels_of_head
    heads = (starts[:, None] + head).flatten()
    attended = sizes.heads * sizes.channels_of_head
    return {
        "width": every_nth(asked.channels, sizes.channels),
        "head": head,
        "heads": heads,
        "qkv": torch.cat([heads + third * attended for third in range(3)]),
        "hidden": every_nth(asked.hidden_units, sizes.hidden_units),
    }


def hidden_units(tensor: Tensor, axis: int, units: Tensor, available: int) -> Tensor:
    """The same ``units`` of each half of a gated FFN's first matrix, or of the only part."""
    parts = range(0, tensor.shape[axis], available)
    both = torch.cat([units + start for start in parts])
    return tensor.index_select(axis, both.to(tensor.device))
