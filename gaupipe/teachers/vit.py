"""A trained vision transformer as a teacher, and the attention maps that it shows.

Maps are read where every fused attention passes: at the calls of torch's
``scaled_dot_product_attention``. No hook is put on a module, so any ViT that attends through that
function can be read, whatever it does to queries and keys before (norms, rotary positions).

Axis letters: B images, L blocks, H heads, P class and register tokens, T patches, C classes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from gaupipe.attention import ATTENTION
from gaupipe.data.splits import ImageData
from gaupipe.maps.fits import fit_gaussians
from gaupipe.maps.views import without_prefix
from gaupipe.system.errors import UserError

SETTING = "phase_a.teacher"
READABLE = "a ViT, DeiT, BEiT, EVA-02, DINOv2, DINOv3 or SigLIP model can be read"


class AttentionReader(TorchFunctionMode):
    """While it is active, keeps the attention maps of every ``scaled_dot_product_attention``.

    ``maps`` holds float32 [B, H, queries, keys] in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            with torch._C.DisableTorchFunction():
                self.maps.append(softmax_of_scores(*args, **kwargs))
        return func(*args, **kwargs)


def softmax_of_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The map [..., queries, keys] float32 that ``scaled_dot_product_attention`` would use. A query
    whose keys are all masked has a row of zeros."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    device = query.device.type
    exact = torch.autocast(device, enabled=False) if device != "meta" else contextlib.nullcontext()
    with exact:
        scores = (query.float() * scale) @ key.float().mT  # [..., queries, keys]
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    if not is_causal and attn_mask is None:
        return scores.softmax(-1)
    without_keys = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(without_keys, 0.0)


class VitMaps:
    """The attention of a batch as a ViT shows it.

    blocks      for each block [B, H, T, T] float32, from patches to patches, rows sum to 1
    grid        (h, w) in patches
    dropped     [L, H]: the mean share of a patch's attention that class and register tokens had
    divergence  [L, H], after Gaussians were fitted: the KL that is left, mean over images and
                queries
    """

    def __init__(self, blocks: Sequence[Tensor], grid: tuple[int, int], dropped: Tensor) -> None:
        self.blocks, self.grid, self.dropped = blocks, grid, dropped
        self.divergence: Tensor | None = None

    def maps(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[B, L, H, T, T], rounded to ``dtype``."""
        images, *rest = self.blocks[0].shape
        maps = self.blocks[0].new_empty(images, len(self.blocks), *rest, dtype=dtype)
        for layer, block in enumerate(self.blocks):
            maps[:, layer] = block
        return maps

    @property
    def gaussians(self) -> Tensor:
        """The maps as one Gaussian a query: [B, L, H, T, 4]."""
        gaussians, left = fit_gaussians(self.maps(), self.grid)
        self.divergence = left.mean((0, 3))  # of [B, L, H, T]
        return gaussians


class VitTeacher(nn.Module):
    """Any timm model whose blocks attend over all patches, in eval mode.

    Raises UserError, naming the model, for one whose attention cannot be read, and for one that
    does not take the data set's images or predict its classes.

    Attributes: ``name``; ``grid`` (h, w); ``layers``; ``heads``; ``prefix``, the number of class
    and register tokens; ``predicts``, whether it has a head for the classes.
    """

    model: Any  # some class of timm's
    rescale: Tensor | None
    offset: Tensor

    def __init__(self, model: nn.Module, data: ImageData, name: str) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.name = name
        for module in self.model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = True  # else the module never calls what is read
        self._check_images(data)
        self._check_weights()
        self.num_classes = data.num_classes
        self.predicts = self.model.num_classes > 0
        self._adapt_normalisation(data)
        self.grid, self.layers, self.heads, self.prefix = self._shape_of_maps(data)

    @torch.inference_mode()
    def forward_with_maps(
        self,
        images: Tensor,
        parameters: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, VitMaps]:
        """(log-probabilities [B, C] float32, attention) of images [B, channels, height, width],
        normalised as the data set is; zeros where the teacher predicts no classes. A ViT has no
        ``parameters`` of images and draws nothing.

        Raises UserError for attention or predictions that are not finite.
        """
        with AttentionReader() as reader:
            features = self.model.forward_features(self._normalised(images))
        logits = images.new_zeros(len(images), self.num_classes, dtype=torch.float32)
        if self.predicts:
            logits = self._finite(self.model.forward_head(features).float(), "its predictions")
            logits = logits.log_softmax(-1)
        blocks: list[Tensor] = []
        dropped: list[Tensor] = []
        while reader.maps:  # [B, H, P + T, P + T], freed one by one
            maps = reader.maps.pop(0)
            self._finite(maps.sum(), f"the attention of its block {len(blocks)}")
            patches, share = without_prefix(maps, self.prefix)
            blocks.append(patches)  # [B, H, T, T]
            dropped.append(share.mean(0))
        return logits, VitMaps(blocks, self.grid, torch.stack(dropped))

    def predict(self, images: Tensor) -> Tensor:
        """Logits [B, C] float32 of images as :meth:`forward_with_maps` takes them."""
        return self._finite(self.model(self._normalised(images)).float(), "its predictions")

    def _normalised(self, images: Tensor) -> Tensor:
        """The data set's images in the normalisation that the model was trained with."""
        return images if self.rescale is None else images * self.rescale + self.offset

    def _finite(self, values: Tensor, what: str) -> Tensor:
        """The same values. Raises UserError for infinite ones and NaN."""
        if not torch.isfinite(values).all():
            raise UserError(f"{SETTING}: {self.name}: {what} are not finite numbers")
        return values

    def weights(self) -> dict[str, Tensor]:
        """Its weights by timm's names, for a student that starts from them; of the position
        embedding what belongs to patches. Raises UserError for a model that is not timm's
        ``VisionTransformer`` with standard attention."""
        attentions = [getattr(block, "attn", None) for block in getattr(self.model, "blocks", ())]
        standard = Attention, ATTENTION["standard"]
        if not isinstance(self.model, VisionTransformer) or not all(
            type(attention) in standard and getattr(attention, "prior", None) is None
            for attention in attentions
        ):
            raise UserError(
                f"phase_b.warm_start: the weights of {self.name} do not fit a student: take "
                "phase_b.warm_start=none, or a VisionTransformer with standard attention"
            )
        return weights_of_patches(self.model)

    def sha256(self, per_image: Any = None) -> str:
        """A digest of the weights and of what they are used in. A ViT has no per-image
        parameters."""
        described = {
            "modules": str(self.model),
            "arguments": getattr(self.model, "gaupipe_args", None),
            "grid": self.grid,
            "layers": self.layers,
            "heads": self.heads,
            "prefix": self.prefix,
            "predicts": self.predicts,
            "mean": [] if self.rescale is None else self.offset.flatten().tolist(),
            "std": [] if self.rescale is None else self.rescale.flatten().tolist(),
        }
        digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def _check_images(self, data: ImageData) -> None:
        model, what = self.model, f"{SETTING}: {self.name}"
        if not hasattr(model, "forward_features") or not hasattr(model, "num_classes"):
            raise UserError(f"{what} ({type(model).__name__}) is not a vision transformer of timm")
        patches = getattr(model, "patch_embed", None)
        size = getattr(patches, "img_size", None)
        if size is not None and tuple(size) != (data.image_size, data.image_size):
            raise UserError(
                f"{what} takes images of {size[0]} x {size[1]} pixels, {data.name} has "
                f"{data.image_size} x {data.image_size}: set data.image_size={size[0]}, or "
                f"phase_a.teacher_args={{img_size: {data.image_size}}}"
            )
        channels = getattr(model, "in_chans", data.channels)
        if channels != data.channels:
            raise UserError(
                f"{what} takes images of {channels} channels, {data.name} has {data.channels}: set "
                f"phase_a.teacher_args={{in_chans: {data.channels}}}"
            )
        if model.num_classes not in (0, data.num_classes):
            raise UserError(
                f"{what} predicts {model.num_classes} classes, {data.name} has {data.num_classes}: "
                "fine-tune it, or take its maps alone with phase_a.teacher_args={num_classes: 0} "
                "and phase_b.alpha=0"
            )

    def _check_weights(self) -> None:
        for name, weight in self.model.state_dict().items():
            if weight.is_floating_point() and not weight.is_meta:
                self._finite(weight, f"the weights {name}")

    def _adapt_normalisation(self, data: ImageData) -> None:
        """From the data set's normalisation to the one that the model was trained with."""
        own_mean, own_std = (torch.tensor(v, dtype=torch.float64) for v in (data.mean, data.std))
        mean, std = self._statistics("mean", own_mean), self._statistics("std", own_std)
        same = torch.equal(mean, own_mean) and torch.equal(std, own_std)
        # (x * own_std + own_mean - mean) / std
        rescale = None if same else (own_std / std).float().view(-1, 1, 1)
        offset = ((own_mean - mean) / std).float().view(-1, 1, 1)
        self.register_buffer("rescale", rescale, persistent=False)
        self.register_buffer("offset", offset, persistent=False)

    def _statistics(self, name: str, default: Tensor) -> Tensor:
        """The "mean" or "std" of the channels that the model was trained with; the ``default``
        [channels] where its weights do not say. Raises UserError for what is no such list."""
        config = getattr(self.model, "pretrained_cfg", None) or {}
        values, least = config.get(name), 0 if name == "std" else -math.inf
        if values is None:
            return default
        numbers = values if isinstance(values, list | tuple) else ()
        if len(numbers) not in (1, 3, len(default)) or not all(
            isinstance(number, int | float) and least < number < math.inf for number in numbers
        ):
            right = "a number above 0" if name == "std" else "a number"
            raise UserError(
                f"{SETTING}: {self.name}: its pretrained_cfg has the {name} {values!r}: should be "
                f"{right} for each of {len(default)} channels"
            )
        statistics = torch.tensor(numbers, dtype=torch.float64)
        if len(statistics) == len(default):
            return statistics
        return statistics.mean().expand(len(default))  # weights of three channels, summed to one

    @torch.no_grad()
    def _shape_of_maps(self, data: ImageData) -> tuple[tuple[int, int], int, int, int]:
        """(grid, blocks, heads, prefix) as two blank images show them."""
        what = f"{SETTING}: {self.name} ({type(self.model).__name__})"
        images = torch.zeros(2, data.channels, data.image_size, data.image_size)
        images = images.to(next(self.model.parameters()).device)
        try:
            with AttentionReader() as reader:
                self.model.forward_features(images)
        except (AssertionError, RuntimeError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{what} cannot take images of {data.image_size} x {data.image_size} pixels: "
                f"{reason[:200]}"
            ) from None
        if not reader.maps:
            raise UserError(
                f"{what} shows no attention maps: it never calls scaled_dot_product_attention; "
                f"{READABLE}"
            )
        grid = getattr(getattr(self.model, "patch_embed", None), "grid_size", None)
        prefix = getattr(self.model, "num_prefix_tokens", 0)
        heads = reader.maps[0].shape[1]
        if grid is None:
            raise UserError(f"{what} has no grid of patches: {READABLE}")
        blocks = len(getattr(self.model, "blocks", reader.maps))
        if blocks != len(reader.maps):
            raise UserError(
                f"{what} has {len(reader.maps)} attention maps in {blocks} blocks; a teacher has "
                f"one in each: {READABLE}"
            )
        tokens = prefix + grid[0] * grid[1]
        for block, maps in enumerate(reader.maps):
            if maps.shape != (2, heads, tokens, tokens):
                raise UserError(
                    f"{what} does not attend over all patches in every block: two images of "
                    f"{grid[0]} x {grid[1]} patches should give maps {[2, heads, tokens, tokens]}, "
                    f"block {block} gives {list(maps.shape)} (windows, pooled keys, or another "
                    f"number of heads); {READABLE}"
                )
        return tuple(grid), len(reader.maps), heads, prefix


def weights_of_patches(model: VisionTransformer) -> dict[str, Tensor]:
    """A ViT's state_dict, of its position embedding what belongs to patches."""
    weights = model.state_dict()
    if "pos_embed" in weights:
        weights["pos_embed"] = weights["pos_embed"][:, -model.patch_embed.num_patches :]
    return weights
