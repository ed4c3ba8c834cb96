"""A trained vision transformer as a teacher, and the attention maps that it shows.

Maps are read at the calls of torch's ``scaled_dot_product_attention``
(:mod:`gaupipe.vit.capture`), so any ViT that attends through that function can be read, whatever it
does to queries and keys before (norms, rotary positions).

Axis letters: B images, L blocks, H heads, P class and register tokens, T patches, C classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from gaupipe.attention import ATTENTION
from gaupipe.data.splits import ImageData
from gaupipe.maps.views import pool_map, without_prefix
from gaupipe.system.errors import UserError, one_line
from gaupipe.vit.capture import AttentionReader, attention_map, use_fused_attention

SETTING = "phase_a.teacher"
READABLE = "a ViT, DeiT, BEiT, EVA-02, DINOv2, DINOv3 or SigLIP model can be read"


@dataclass(eq=False)
class VitMaps:
    """The attention of a batch from a ViT."""

    blocks: Sequence[Tensor]
    """For each block [B, H, T, T] float32, from patches to patches; rows sum to 1. With
    the ``kept_prefix`` of its teacher [B, H, P + T, P + T]."""
    grid: tuple[int, int]
    """(h, w) in patches."""
    dropped: Tensor
    """[L, H]: the mean share of a patch's attention that class and register tokens had."""
    pooled: Tensor | None = None
    """[B, D] float32, of a teacher without predictions: the features that its head would get."""

    def maps(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[B, L, H, T, T], rounded to ``dtype``."""
        images, *rest = self.blocks[0].shape
        maps = self.blocks[0].new_empty(images, len(self.blocks), *rest, dtype=dtype)
        for layer, block in enumerate(self.blocks):
            maps[:, layer] = block
        return maps

    def reduced(self, layers: Sequence[int] | None, grid: tuple[int, int]) -> VitMaps:
        """The same of these blocks alone, None for all, and on a coarser ``grid`` (h, w)."""
        chosen = range(len(self.blocks)) if layers is None else layers
        blocks = [self.blocks[layer] for layer in chosen]
        if grid != self.grid:
            blocks = [pool_map(block, self.grid, grid) for block in blocks]
        return VitMaps(blocks, grid, self.dropped[list(chosen)], self.pooled)


class VitTeacher(nn.Module):
    """Any timm model whose blocks attend over all patches, in eval mode.

    Raises UserError, naming the model, for one whose attention cannot be read, and for one that
    does not take the data set's images.

    Attributes: ``name``; ``grid`` (h, w); ``layers``; ``heads``; ``prefix``, the number of class
    and register tokens, and ``kept_prefix``, of those in its maps; ``classes``, as of
    :func:`classes_in`.
    """

    model: Any  # some class of timm's
    rescale: Tensor | None
    offset: Tensor
    kept_prefix = 0

    def __init__(self, model: nn.Module, data: ImageData, name: str) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.name = name
        use_fused_attention(self.model)
        self.num_classes = data.num_classes
        self.classes = classes_in(model, data)
        self._adapt_normalisation(data)
        self.grid, self.layers, self.heads, self.prefix = self._shape_of_maps(data)

    @property
    def predicts(self) -> bool:
        """Whether it predicts the classes of the data set."""
        return self.classes is not None

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
        features, maps = self._features(self._normalised(images))
        logits = images.new_zeros(len(images), self.num_classes, dtype=torch.float32)
        pooled = None
        if self.predicts:
            logits = self._in_order(self.model.forward_head(features)).log_softmax(-1)
        else:
            pooled = self._pooled(features)
        blocks: list[Tensor] = []
        dropped: list[Tensor] = []
        while maps:  # [B, H, P + T, P + T], freed one by one
            map = maps.pop(0)
            self._finite(map.sum(), f"the attention of its block {len(blocks)}")
            patches, share = without_prefix(map, self.prefix - self.kept_prefix)
            blocks.append(patches)  # [B, H, T, T]
            dropped.append(share.mean(0))
        return logits, VitMaps(blocks, self.grid, torch.stack(dropped), pooled)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, C] float32 of images as :meth:`forward_with_maps` takes them, of a teacher
        that predicts the data set's classes."""
        return self._in_order(self.model(self._normalised(images)))

    @torch.inference_mode()
    def pooled(self, images: Tensor) -> Tensor:
        """Features [B, D] float32, as the head gets them, of images as :meth:`forward_with_maps`
        takes them. Raises UserError for features that are not finite."""
        return self._pooled(self.model.forward_features(self._normalised(images)))

    def _pooled(self, features: Tensor) -> Tensor:
        pooled = self.model.forward_head(features, pre_logits=True)
        return self._finite(pooled.float(), "its features")

    def _in_order(self, logits: Tensor) -> Tensor:
        """The model's logits as float32 [B, C], in the order of the data set's classes."""
        return self._finite(logits.float(), "its predictions")[:, self.classes]

    def _features(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Features of normalised images, and the map of each attention."""
        maps: list[Tensor] = []
        with AttentionReader(lambda *args, **kwargs: maps.append(attention_map(*args, **kwargs))):
            return self.model.forward_features(images), maps

    def _normalised(self, images: Tensor) -> Tensor:
        """The data set's images in the normalisation that the model was trained with."""
        if self.rescale is None:
            return images
        return images * self.rescale + self.offset

    def _finite(self, values: Tensor, what: str) -> Tensor:
        """The same values. Raises UserError for infinite ones and NaN."""
        if not torch.isfinite(values).all():
            raise UserError(f"{SETTING}: {self.name}: {what} are not finite numbers")
        return values

    def weights(self) -> dict[str, Tensor]:
        """Its weights by timm's names, for a student that starts from them: of the position
        embedding what belongs to patches, and the head, if it has one for the data set's classes,
        in their order. Raises UserError for a model that is not timm's ``VisionTransformer`` with
        standard attention."""
        attentions = [getattr(block, "attn", None) for block in getattr(self.model, "blocks", ())]
        known = (Attention, ATTENTION["standard"])
        standard = all(
            type(attention) in known and getattr(attention, "prior", None) is None
            for attention in attentions
        )
        if not isinstance(self.model, VisionTransformer) or not standard:
            raise UserError(
                f"phase_b.warm_start: the weights of {self.name} do not fit a student: take "
                "phase_b.warm_start=none, or a VisionTransformer with standard attention"
            )
        weights = weights_of_patches(self.model)
        for name in ("head.weight", "head.bias"):
            head = weights.pop(name, None)
            if head is not None and self.classes is not None:
                weights[name] = head[self.classes]
        return weights

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
            "classes": self.classes,
            "mean": [],
            "std": [],
        }
        if self.rescale is not None:
            described["mean"] = self.offset.flatten().tolist()
            described["std"] = self.rescale.flatten().tolist()
        text = json.dumps(described, sort_keys=True, default=str)
        return sha256_of(self.model.state_dict(), text)

    def _adapt_normalisation(self, data: ImageData) -> None:
        """From the data set's normalisation to the one that the model was trained with."""
        config = getattr(self.model, "pretrained_cfg", None) or {}

        def trained_with(name: str, default: Tensor) -> Tensor:
            """The model's mean or std [C]; where it names none, the data set's."""
            channels = len(default)
            try:
                values = default
                if config.get(name):
                    values = torch.tensor(config[name], dtype=torch.float64)
                if len(values) == 3 and channels != 3:
                    # timm summed the weights of three channels to one
                    values = values.mean().expand(channels)
                if not torch.isfinite(values).all():
                    raise ValueError
                if name == "std" and not (values > 0).all():
                    raise ValueError
                return values.expand_as(default)
            except (TypeError, ValueError, RuntimeError):
                raise UserError(
                    f"{SETTING}: {self.name}: its pretrained_cfg has the {name} {config[name]!r}: "
                    f"should be a number for each of {channels} channels"
                ) from None

        mean = torch.tensor(data.mean, dtype=torch.float64)
        std = torch.tensor(data.std, dtype=torch.float64)
        new_mean = trained_with("mean", mean)
        new_std = trained_with("std", std)
        # (x * std + mean - new_mean) / new_std
        rescale = None
        if not (torch.equal(mean, new_mean) and torch.equal(std, new_std)):
            rescale = (std / new_std).float().view(-1, 1, 1)
        offset = ((mean - new_mean) / new_std).float().view(-1, 1, 1)
        self.register_buffer("rescale", rescale, persistent=False)
        self.register_buffer("offset", offset, persistent=False)

    @torch.no_grad()
    def _shape_of_maps(self, data: ImageData) -> tuple[tuple[int, int], int, int, int]:
        """(grid, blocks, heads, prefix) as a blank image shows them."""
        model = self.model
        size = data.image_size
        start = f"{SETTING}: {self.name} ({type(model).__name__})"
        images = torch.zeros(1, data.channels, size, size)
        try:
            _, maps = self._features(images.to(next(model.parameters()).device))
        except (AssertionError, RuntimeError, ValueError, TypeError) as error:
            raise UserError(
                f"{start} cannot take the images of {data.name} ({one_line(error)}): set "
                "data.image_size, or "
                f"phase_a.teacher_args={{img_size: {size}, in_chans: {data.channels}}}"
            ) from None
        patches = getattr(model, "patch_embed", None)
        grid = getattr(patches, "grid_size", None) or (0, 0)
        prefix = getattr(model, "num_prefix_tokens", 0)
        tokens = prefix + grid[0] * grid[1]
        heads = maps[0].shape[1] if maps else 0
        blocks = getattr(model, "blocks", maps)
        shapes = [tuple(map.shape) for map in maps]
        if not maps or shapes != [(1, heads, tokens, tokens)] * len(blocks):
            raise UserError(
                f"{start} does not attend over all patches once in every block: {len(maps)} "
                f"attention maps, of the shapes {sorted({*shapes})}, in {len(blocks)} blocks of "
                f"{grid[0]} x {grid[1]} patches: {READABLE}"
            )
        return tuple(grid), len(maps), heads, prefix


def classes_in(model: nn.Module, data: ImageData) -> list[int] | None:
    """For each class of the data set its number in the model's head, or None for a model that
    predicts no classes or others. Classes are matched by name; where the model or the data set has
    no names, by number, if both have as many."""
    count: Any = model.num_classes
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    names = [str(name) for name in config.get("label_names") or ()]
    if len(names) != count or not data.class_names:
        if count != data.num_classes:
            return None
        return list(range(count))
    if names == data.class_names:  # two classes may share a name
        return list(range(count))
    numbers = {name: number for number, name in enumerate(names)}
    if not numbers.keys() >= {*data.class_names}:
        return None
    return [numbers[name] for name in data.class_names]


def weights_of_patches(model: VisionTransformer) -> dict[str, Tensor]:
    """A ViT's state_dict, of its position embedding what belongs to patches."""
    weights = model.state_dict()
    if "pos_embed" in weights:
        weights["pos_embed"] = weights["pos_embed"][:, -model.patch_embed.num_patches :]
    return weights


def sha256_of(weights: dict[str, Tensor], described: str) -> str:
    """A digest of a state_dict and of a text that says what it is used in."""
    digest = hashlib.sha256(described.encode())
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
