"""A trained timm model as a teacher: its predictions and features, and of a vision transformer the
attention maps that it shows.

Maps are read at the calls of torch's ``scaled_dot_product_attention``
(:mod:`gaupipe.vit.attention_maps`), so any ViT that attends through that function can be read,
whatever it does to queries and keys before (norms, rotary positions).

Axis letters: B images, L blocks, H heads, P class and register tokens, T patches, C classes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeGuard, TypeVar

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from gaupipe.attention import ATTENTION
from gaupipe.data.splits import ImageData
from gaupipe.maps.views import without_prefix
from gaupipe.system.errors import UserError, one_line
from gaupipe.teachers.base import ShownMaps
from gaupipe.vit.attention_maps import AttentionReader, attention_map, use_fused_attention
from gaupipe.vit.inputs import SETTING, input_of

T = TypeVar("T")
MatchedBy = Literal["name", "number"]

PROBE_INSTEAD = "phase_a.teacher_args={num_classes: 0} takes a linear probe on its features"

READABLE = "a ViT, DeiT, BEiT, EVA-02, DINOv2, DINOv3 or SigLIP model can be read"


class UnreadableAttention(UserError):
    """A model does not show the attention of every block over all patches."""


class PredictingModel(nn.Module):
    """Any timm model with a head or features, in eval mode.

    Raises UserError, naming the model, for one whose input cannot be made of the data set's images.

    Attributes: ``name``; ``takes``, its :class:`Input`; ``classes``, for each class of the data set
    its number in the head, and ``matched_by``, how :func:`classes_in` found them, both None for a
    model that predicts no classes or others; ``features``, the number D of its pooled features.
    """

    model: Any  # some class of timm's

    def __init__(self, model: nn.Module, data: ImageData, name: str) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.name = name
        self.num_classes = data.num_classes
        self.classes: list[int] | None = None
        self.matched_by: MatchedBy | None = None
        matched = classes_in(model, data, name)
        if matched is not None:
            self.classes, self.matched_by = matched
        self.takes = input_of(model, data, name)
        self.features: int
        self._look_at(data)

    @property
    def predicts(self) -> bool:
        """Whether it predicts the classes of the data set."""
        return self.classes is not None

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, C] float32 of images [B, channels, height, width] as the teacher ``takes``
        them, of one that predicts the data set's classes."""
        return self._in_order(self.model(images))

    @torch.inference_mode()
    def pooled(self, images: Tensor) -> Tensor:
        """Features [B, D] float32, as the head gets them, of images as :meth:`forward` takes them.
        Raises UserError for features that are not finite."""
        return self._pooled(self.model.forward_features(images))

    @torch.inference_mode()
    def predict(self, images: Tensor) -> tuple[Tensor | None, Tensor]:
        """(log-probabilities [B, C] float32, features [B, D] float32) of images; None where it
        predicts no classes. Raises UserError for those that are not finite."""
        return self._outputs(self.model.forward_features(images))

    def _outputs(self, features: Tensor) -> tuple[Tensor | None, Tensor]:
        logits = None
        if self.predicts:
            logits = self._in_order(self.model.forward_head(features)).log_softmax(-1)
        return logits, self._pooled(features)

    def _pooled(self, features: Tensor) -> Tensor:
        pooled = self.model.forward_head(features, pre_logits=True)
        return self._finite(pooled.float(), "its features")

    def _in_order(self, logits: Tensor) -> Tensor:
        """The model's logits as float32 [B, C], in the order of the data set's classes."""
        return self._finite(logits.float(), "its predictions")[:, self.classes]

    def _finite(self, values: Tensor, what: str) -> Tensor:
        """The same values. Raises UserError for infinite ones and NaN."""
        if not torch.isfinite(values).all():
            raise UserError(f"{SETTING}: {self.name}: {what} are not finite numbers")
        return values

    def sha256(self) -> str:
        """A digest of the weights and of what they are used in."""
        text = json.dumps(self._described(), sort_keys=True, default=str)
        return sha256_of(self.model.state_dict(), text)

    def _described(self) -> dict[str, Any]:
        return {
            "modules": str(self.model),
            "arguments": getattr(self.model, "gaupipe_args", None),
            "classes": self.classes,
            "takes": asdict(self.takes),
        }

    def _look_at(self, data: ImageData) -> None:
        """Raises UserError for a model that cannot take the images of the data set."""
        self.features = self._see_blank(data, self.pooled).shape[-1]

    def _see_blank(self, data: ImageData, see: Callable[[Tensor], T]) -> T:
        """What ``see`` makes of a blank image. Raises UserError where the model cannot take it."""
        size = self.takes.size
        images = torch.zeros(1, data.channels, size, size)
        try:
            return see(images.to(next(self.model.parameters()).device))
        except (AssertionError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self._start} cannot take the images of {data.name}, of {data.channels} channels "
                f"and resized to {size} x {size} pixels ({one_line(error)}): set "
                f"phase_a.teacher_args={{in_chans: {data.channels}}}, or img_size there"
            ) from None

    @property
    def _start(self) -> str:
        return f"{SETTING}: {self.name} ({type(self.model).__name__})"


class ReadableViT(PredictingModel):
    """Any timm model whose blocks attend over all patches, in eval mode.

    Raises UserError, naming the model, for one whose attention cannot be read
    (:class:`UnreadableAttention`), and for one whose input cannot be made of the data set's images.

    Attributes: those of :class:`PredictingModel`; ``grid`` (h, w); ``layers``; ``heads``;
    ``prefix``, the number of class and register tokens, and ``kept_prefix``, of those in its maps.
    """

    kept_prefix = 0

    def __init__(self, model: nn.Module, data: ImageData, name: str) -> None:
        use_fused_attention(model)
        super().__init__(model, data, name)

    @torch.inference_mode()
    def forward_with_maps(
        self, images: Tensor, layers: Sequence[int] | None = None
    ) -> tuple[Tensor | None, Tensor, ShownMaps]:
        """(log-probabilities [B, C] float32, features [B, D] float32, attention of the blocks
        ``layers``, by default of all) of images [B, channels, height, width] as the teacher
        ``takes`` them; None where it predicts no classes.

        Raises UserError for attention, features or predictions that are not finite.
        """
        read = list(range(self.layers) if layers is None else layers)
        features, maps = self._features(images, read)
        logits, pooled = self._outputs(features)
        blocks: list[Tensor] = []
        dropped: list[Tensor] = []
        for layer in read:
            map = maps.pop(layer)  # [B, H, P + T, P + T], freed one by one
            self._finite(map.sum(), f"the attention of its block {layer}")
            patches, share = without_prefix(map, self.prefix - self.kept_prefix)
            blocks.append(patches)  # [B, H, T, T]
            dropped.append(share.mean(0))
        return logits, pooled, ShownMaps(blocks, self.grid, torch.stack(dropped))

    def _features(
        self, images: Tensor, layers: Collection[int] | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Features of images, and the maps of the attentions with these numbers, None for all."""
        maps: dict[int, Tensor] = {}
        numbers = itertools.count()

        def see(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            number = next(numbers)
            if layers is not None and number not in layers:
                return None
            maps[number] = attention_map(query, key, value, *args, **kwargs)
            if maps[number].shape[1] != value.shape[1]:  # grouped queries
                return None
            return maps[number].to(value.dtype) @ value  # so that no attention is computed twice

        with AttentionReader(see):
            return self.model.forward_features(images), maps

    def weights(self) -> dict[str, Tensor]:
        """Its weights by timm's names, for a student that starts from them, with the head, if it
        has one for the data set's classes, in their order. Raises UserError for a model that is not
        timm's ``VisionTransformer`` with standard attention."""
        if not has_standard_attention(self.model):
            raise UserError(
                f"phase_b.warm_start: the weights of {self.name} do not fit a student: take "
                "phase_b.warm_start=none, or a VisionTransformer with standard attention"
            )
        weights = self.model.state_dict()
        for name in ("head.weight", "head.bias"):
            head = weights.pop(name, None)
            if head is not None and self.classes is not None:
                weights[name] = head[self.classes]
        return weights

    def _described(self) -> dict[str, Any]:
        shape = {"grid": self.grid, "layers": self.layers, "heads": self.heads}
        return super()._described() | shape | {"prefix": self.prefix}

    @torch.no_grad()
    def _look_at(self, data: ImageData) -> None:
        """Finds the grid, blocks, heads and prefix as a blank image shows them."""
        model = self.model
        features, seen = self._see_blank(data, self._features)
        maps = [seen[number] for number in sorted(seen)]
        patches = getattr(model, "patch_embed", None)
        grid = getattr(patches, "grid_size", None) or (0, 0)
        prefix = getattr(model, "num_prefix_tokens", 0)
        tokens = prefix + grid[0] * grid[1]
        heads = maps[0].shape[1] if maps else 0
        blocks = getattr(model, "blocks", maps)
        shapes = [tuple(map.shape) for map in maps]
        if not maps or shapes != [(1, heads, tokens, tokens)] * len(blocks):
            raise UnreadableAttention(
                f"{self._start} does not attend over all patches once in every block: {len(maps)} "
                f"attention maps, of the shapes {sorted({*shapes})}, in {len(blocks)} blocks of "
                f"{grid[0]} x {grid[1]} patches: {READABLE}"
            )
        self.features = model.forward_head(features, pre_logits=True).shape[-1]
        self.grid: tuple[int, int] = tuple(grid)
        self.layers = len(maps)
        self.heads: int = heads
        self.prefix: int = prefix


def classes_in(model: nn.Module, data: ImageData, name: str) -> tuple[list[int], MatchedBy] | None:
    """(for each class of the data set its number in the model's head, how they were matched), or
    None for a model that predicts no classes or others. Classes are matched by name; where the
    model or the data set has no names, by number, if both have as many.

    Raises UserError, with the model's ``name``, for a class that is the name of several in its
    head: a photo of a crane may show a bird.
    """
    count: Any = model.num_classes
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    names = [str(name) for name in config.get("label_names") or ()]
    if len(names) != count or not data.class_names:
        if count != data.num_classes:
            return None
        return list(range(count)), "number"
    if names == data.class_names:  # two classes may share a name
        return list(range(count)), "name"
    numbers = {name: number for number, name in enumerate(names)}
    if not numbers.keys() >= {*data.class_names}:
        return None
    for shared in data.class_names:
        if names.count(shared) > 1:
            raise UserError(
                f"{SETTING}: {name}: {names.count(shared)} of its classes are named {shared!r}, as "
                f"one of {data.name} is: {PROBE_INSTEAD}, or name that class otherwise"
            )
    return [numbers[name] for name in data.class_names], "name"


def parts_of_teachers(model: nn.Module) -> list[str]:
    """Names of the parts that a ViT has and its student lacks, of those for which students lost up
    to 5 points (*arXiv 2605.07191*)."""
    names = {type(module).__name__ for module in model.modules()}
    parameters = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    parts = {
        "register tokens": getattr(model, "num_reg_tokens", 0) or "reg_token" in parameters,
        "LayerScale": "LayerScale" in names or "gamma_1" in parameters,
        "rotary positions": getattr(model, "rope", None) is not None,
    }
    return [part for part, has in parts.items() if has]


def has_standard_attention(model: nn.Module) -> TypeGuard[VisionTransformer]:
    """True for a VisionTransformer of timm's with standard attention, without a prior of ours, and
    with its norms before attention and FFN."""
    known = (Attention, ATTENTION["standard"])
    return isinstance(model, VisionTransformer) and all(
        isinstance(block, Block)
        and type(block.attn) in known
        and getattr(block.attn, "prior", None) is None
        for block in model.blocks
    )


def sha256_of(weights: dict[str, Tensor], described: str) -> str:
    """A digest of a state_dict and of a text that says what it is used in."""
    digest = hashlib.sha256(described.encode())
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
