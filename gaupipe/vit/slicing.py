"""A slice of a trained ViT's weights, for a smaller ViT to start with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from gaupipe.attention.base import NOTE
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
class VitSizes:
    """What a slice may have less of."""

    blocks: int
    channels: int
    heads: int
    channels_of_head: int
    hidden_units: int

    @classmethod
    def of(cls, weights: dict[str, Tensor], heads: int) -> VitSizes:
        """Of a ViT's state_dict, which does not tell the number of heads."""
        proj = weights["blocks.0.attn.proj.weight"]  # [width, heads * head width]
        fc2 = weights.get("blocks.0.mlp.fc2.weight", proj[:, :0])  # a ViT may have no FFN
        blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
        width, attended = proj.shape
        return cls(len(blocks), width, heads, attended // heads, fc2.shape[1])

    def check(self, asked: VitSizes, setting: str) -> None:
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
    last = available - 1
    steps = count - 1
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
    spread: Tensor | None = None,
) -> dict[str, Tensor]:
    """The part of a trained ViT's ``weights`` (state_dict) that has the sizes of the student, by
    the same names (after *weight selection, arXiv 2311.18823*).

    Blocks are evenly spaced, with the first and the last. Heads, the channels of each and the
    hidden units of the FFN are every n-th, the same for queries, keys and values. The student's
    residual stream has the principal components of the trained ViT's; or every n-th channel, where
    no ``spread`` is known, and of a ViT with other attention, or without :func:`has_components`.
    What is kept of a sum is made as large as the whole (:func:`rescaled`). timm resizes position
    and patch embedding. A convolutional stem of the student gets nothing, nor does a head for
    another number of classes.

    heads, grid  of the trained ViT; the grid (h, w) in patches
    setting      asked for the slice, for messages
    spread       [channels, channels], from :func:`spread_of_stream`

    Raises UserError for a student that is larger, and for one with parts that no rule slices.
    """
    first: Any = student.blocks[0]  # timm says Module
    present = student.state_dict()
    sizes = VitSizes.of(weights, heads)
    asked = VitSizes.of(present, first.attn.num_heads)
    sizes.check(asked, setting)
    channels = chosen_channels(asked, sizes)
    if spread is not None and has_components(weights):
        weights = in_components(weights, spread, asked.channels)
        channels["width"] = torch.arange(asked.channels)
    else:
        weights = with_scales_inside(weights)
    weights = rescaled(weights, sizes, asked, channels)
    sliced: dict[str, Tensor] = {}
    for name, tensor in with_blocks(weights, evenly_spaced(asked.blocks, sizes.blocks)).items():
        _, module, leaf = parts_of_name(name)
        if leaf == NOTE:  # no parameter
            sliced[name] = tensor
            continue
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
        if module in SCALE_BEHIND.values() and leaf == "gamma" and name not in present:
            continue  # which has no effect any more
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


@torch.inference_mode()
def spread_of_stream(vit: VisionTransformer, batches: Iterable[Tensor]) -> Tensor | None:
    """The second moments [channels, channels] float64, of trace 1, of the tokens of some images in
    the residual stream of a ViT, as its LayerNorms scale them: the mean over the LayerNorms. None
    for a ViT with other norms."""
    spreads: dict[nn.Module, Tensor] = {}

    def see(norm: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        tokens = inputs[0].flatten(0, -2).double()
        tokens = tokens - tokens.mean(-1, keepdim=True)
        tokens = tokens / tokens.square().mean(-1, keepdim=True).clamp_min(1e-12).sqrt()
        spreads[norm] = spreads.get(norm, 0) + tokens.mT @ tokens

    blocks: Any = vit.blocks
    norms = [norm for block in blocks for norm in (block.norm1, block.norm2)]
    hooks = [
        norm.register_forward_hook(see)
        for norm in (*norms, vit.norm, vit.fc_norm)
        if isinstance(norm, nn.LayerNorm)
    ]
    for images in batches:
        vit(images)
    for hook in hooks:
        hook.remove()
    if not spreads:
        return None
    return torch.stack([spread / spread.trace() for spread in spreads.values()]).mean(0).cpu()


NORM_BEFORE = {
    "attn.qkv": "norm1",
    "mlp.fc1": "norm2",
    "mlp.fc1_g": "norm2",
    "mlp.fc1_x": "norm2",
    "head": "norm",
    "head_dist": "norm",
}
"""The LayerNorm whose output a module reads."""
SCALE_BEHIND = {
    "attn.proj": "ls1",
    "attn.proj_local": "ls1",
    "attn.proj_parallel": "ls1",
    "mlp.fc2": "ls2",
}
"""The LayerScale, where there is one, that scales what a module adds to the residual stream."""
NEUTRAL = {*NORM_BEFORE.values(), "fc_norm", *SCALE_BEHIND.values()}
"""Modules that :func:`in_components` leaves without an effect: gains and scales of 1, biases of
0."""


def has_components(weights: dict[str, Tensor]) -> bool:
    """True for a ViT whose residual stream may be turned: standard attention and FFN alone read it,
    each behind a LayerNorm whose bias its own can take over, and add to it."""
    modules = {parts_of_name(name)[1] for name in weights}
    biased = {parts_of_name(name)[1] for name in weights if name.endswith(".bias")}
    behind_norms = modules & NORM_BEFORE.keys()
    others = {"attn.v", "attn.z", "attn.gate", "attn.proj_local", "attn.proj_parallel", "norm_pre"}
    if not ({"norm1", "norm2", "attn.qkv"} <= modules and modules.isdisjoint(others)):
        return False
    if not modules.isdisjoint(HEADS) and modules.isdisjoint(("norm", "fc_norm")):
        return False  # the head reads the stream itself
    return {"norm1", *behind_norms} <= biased  # RMSNorm has no bias, and removes no mean


def with_scales_inside(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with LayerScale in the matrices and biases that it scales: its own is 1."""
    scaled = {}
    for name, tensor in weights.items():
        block, module, leaf = parts_of_name(name)
        scale = weights.get(f"{block}{SCALE_BEHIND.get(module)}.gamma")
        if scale is not None:
            tensor = tensor * scale.view(-1, *[1] * (tensor.ndim - 1))
        elif module in SCALE_BEHIND.values() and leaf == "gamma":
            tensor = torch.ones_like(tensor)
        scaled[name] = tensor
    return scaled


def in_components(weights: dict[str, Tensor], spread: Tensor, width: int) -> dict[str, Tensor]:
    """The weights of a ViT whose residual stream has ``width`` channels: the trained one's
    principal components, turned so that their mean is 0, as LayerNorm makes it (as in *SliceGPT,
    arXiv 2401.15024*). Gains and biases of LayerNorm, and LayerScale, go into the matrices beside
    them.

    With as many components as the stream has, the ViT computes what it did. LayerNorm divides by
    the root of the mean square, which fewer components, with a part of the whole spread, do not
    keep: what is read is scaled by that.
    """
    values, vectors = torch.linalg.eigh(spread)  # ascending
    count = min(width - 1, len(values))
    mean_free = torch.linalg.qr(torch.cat([torch.ones(width, 1), torch.eye(width)], 1).double())[0]
    basis = mean_free[:, 1 : count + 1] @ vectors[:, -count:].mT  # [width, channels]
    scale = float((values[-count:].sum() / values.sum() * len(values) / width).sqrt())
    turned = {}
    for name, tensor in with_scales_inside(weights).items():
        block, module, leaf = parts_of_name(name)
        if module in NEUTRAL:  # its neighbours take over what it did
            turned[name] = torch.full((width,), float(leaf != "bias")).to(tensor)
            continue
        if leaf == NOTE:
            turned[name] = tensor
            continue
        part = tensor.double().cpu()
        norm = norm_before(weights, block, module)
        if norm is not None:
            gain, bias = norm
            if leaf == "bias":
                part = part + weights[f"{block}{module}.weight"].double().cpu() @ bias
            else:
                part = part * gain * scale
        for axis, kind in enumerate(AXES.get(module, ())[: part.ndim]):
            if kind == "width":
                part = (part.movedim(axis, -1) @ basis.mT).movedim(-1, axis)
        turned[name] = part.to(tensor)
    return turned


def parts_of_name(name: str) -> tuple[str, str, str]:
    """("blocks.N." or "", module within it, parameter) of a name in a state_dict."""
    block = ""
    if name.startswith("blocks."):
        _, number, name = name.split(".", 2)
        block = f"blocks.{number}."
    module, _, leaf = name.rpartition(".")
    return block, module, leaf


def norm_before(
    weights: dict[str, Tensor], block: str, module: str
) -> tuple[Tensor, Tensor] | None:
    """Gain and bias, float64 [channels], of the LayerNorm whose output a module reads; None for one
    that reads none."""
    norm = NORM_BEFORE.get(module)
    if norm == "norm" and "fc_norm.weight" in weights:  # a head behind pooled tokens
        norm = "fc_norm"
    if f"{block}{norm}.weight" not in weights:
        return None
    gain, bias = (weights[f"{block}{norm}.{leaf}"] for leaf in ("weight", "bias"))
    return gain.double().cpu(), bias.double().cpu()


def with_blocks(weights: dict[str, Tensor], blocks: list[int]) -> dict[str, Tensor]:
    """The weights of a ViT that has these ``blocks`` of another, renumbered."""
    named = {name: tensor for name, tensor in weights.items() if not name.startswith("blocks.")}
    for block, source in enumerate(blocks):
        start = f"blocks.{source}."
        for name, tensor in weights.items():
            if name.startswith(start):
                named[f"blocks.{block}.{name.removeprefix(start)}"] = tensor
    return named


def chosen_channels(asked: VitSizes, sizes: VitSizes) -> dict[str, Tensor]:
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


def rescaled(
    weights: dict[str, Tensor], sizes: VitSizes, asked: VitSizes, channels: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The weights with what is kept of each sum made as large as the whole: scores of queries and
    keys, and what attention and FFN add to the residual stream.

    A term of a sum counts by the squares of the two weights beside it. Scores of a head have the
    mean of all their terms, because these go together; the others keep the root of their mean
    square. Where all other terms are zero, nothing changes.
    """
    scaled = dict(weights)
    for number in range(sizes.blocks):
        block = f"blocks.{number}."
        if f"{block}attn.qkv.weight" in weights:
            scaled |= _scaled_attention(weights, f"{block}attn.", sizes, asked, channels)
        if f"{block}mlp.fc1.weight" in weights:
            rows = weights[f"{block}mlp.fc1.weight"].square().sum(1)
            last = f"{block}mlp.fc2.weight"
            hidden = rows[: sizes.hidden_units] * weights[last].square().sum(0)
            scaled[last] = weights[last] * _whole_over(hidden, channels["hidden"]).sqrt()
    return scaled


def _scaled_attention(
    weights: dict[str, Tensor],
    attention: str,
    sizes: VitSizes,
    asked: VitSizes,
    channels: dict[str, Tensor],
) -> dict[str, Tensor]:
    rows = weights[f"{attention}qkv.weight"].square().sum(1)  # [3 * heads * channels of a head]
    query, key, value = rows.view(3, sizes.heads, sizes.channels_of_head)
    scores = _whole_over((query * key).mT, channels["head"])  # [heads]
    # the smaller head divides its scores by the root of fewer channels
    scores = scores * (asked.channels_of_head / sizes.channels_of_head) ** 0.5
    row_scale = scores.sqrt().repeat_interleave(sizes.channels_of_head)
    row_scale = torch.cat([row_scale, row_scale, torch.ones_like(row_scale)])
    proj = weights[f"{attention}proj.weight"]
    attended = _whole_over(value.flatten() * proj.square().sum(0), channels["heads"])
    scaled = {f"{attention}proj.weight": proj * attended.sqrt()}
    if f"{attention}q_norm.weight" in weights:  # each channel has one size, and fewer are summed
        gain = (sizes.channels_of_head / asked.channels_of_head) ** 0.25
        for name in ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"):
            if f"{attention}{name}" in weights:
                scaled[f"{attention}{name}"] = weights[f"{attention}{name}"] * gain
        return scaled
    scaled[f"{attention}qkv.weight"] = weights[f"{attention}qkv.weight"] * row_scale[:, None]
    if f"{attention}qkv.bias" in weights:
        scaled[f"{attention}qkv.bias"] = weights[f"{attention}qkv.bias"] * row_scale
    return scaled


def _whole_over(terms: Tensor, kept: Tensor) -> Tensor:
    """The sum of ``terms`` along the first axis over that of the ``kept`` ones; 1 where these are
    zero."""
    part = terms[kept.to(terms.device)].sum(0)
    return torch.where(part > 0, terms.sum(0) / part, 1.0)


def hidden_units(tensor: Tensor, axis: int, units: Tensor, available: int) -> Tensor:
    """The same ``units`` of each half of a gated FFN's first matrix, or of the only part."""
    parts = range(0, tensor.shape[axis], available)
    both = torch.cat([units + start for start in parts])
    return tensor.index_select(axis, both.to(tensor.device))
