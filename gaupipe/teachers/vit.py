"""A trained vision transformer as a teacher: where it comes from, and the attention maps it shows.

Maps are read where every fused attention passes: at the calls of torch's
``scaled_dot_product_attention``. No hook is put on a module, so any ViT that attends through that
function can be read, whatever it does to queries and keys before (norms, rotary positions).

Axis letters: B images, L blocks, H heads, P class and register tokens, T patches, C classes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from timm.layers import Attention
from timm.models import get_pretrained_cfg
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from gaupipe.attention import ATTENTION
from gaupipe.data.splits import ImageData
from gaupipe.maps.views import without_prefix
from gaupipe.system.errors import UserError
from gaupipe.vit.saving import WEIGHTS, load_folder

LOCAL = "local-dir:"
SETTING = "phase_a.teacher"
RIGHT = "gaussian, vit, local-dir:FOLDER or a timm name with weights"


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
    """The map [..., queries, keys] float32 that ``scaled_dot_product_attention`` would use."""
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
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        else:
            scores = scores + attn_mask
    return scores.softmax(-1).nan_to_num(0.0)  # a query without a key looks nowhere


@dataclass
class Seen:
    """What a teacher shows of a batch.

    logits   [B, C] float32; zeros where the teacher predicts no classes
    maps     for each block [B, H, T, T] float32, from patches to patches, rows sum to 1
    dropped  [L, H]: the mean share of a patch's attention that class and register tokens had
    """

    logits: Tensor
    maps: list[Tensor]
    dropped: Tensor


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
        self.num_classes = data.num_classes
        self.predicts = self.model.num_classes > 0
        self._adapt_normalisation(data)
        self.grid, self.layers, self.heads, self.prefix = self._shape_of_maps(data)

    def forward(self, images: Tensor) -> Seen:
        """``images`` [B, channels, height, width], normalised as the data set is."""
        if self.rescale is not None:
            images = images * self.rescale + self.offset
        with AttentionReader() as reader:
            features = self.model.forward_features(images)
        if self.predicts:
            logits = self.model.forward_head(features).float()
        else:
            logits = images.new_zeros(len(images), self.num_classes, dtype=torch.float32)
        maps, dropped = [], []
        while reader.maps:  # [B, H, P + T, P + T], freed one by one
            patches, share = without_prefix(reader.maps.pop(0), self.prefix)
            maps.append(patches)  # [B, H, T, T]
            dropped.append(share.mean(0))
        return Seen(logits, maps, torch.stack(dropped))

    def predict(self, images: Tensor) -> Tensor:
        """Logits [B, C] float32 of images as :meth:`forward` takes them."""
        if self.rescale is not None:
            images = images * self.rescale + self.offset
        return self.model(images).float()

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

    def sha256(self) -> str:
        """A digest of the weights and of what they are used in."""
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

    def _adapt_normalisation(self, data: ImageData) -> None:
        """From the data set's normalisation to the one that the model was trained with."""
        config = getattr(self.model, "pretrained_cfg", None) or {}
        mean, std = (
            torch.tensor(config.get(key) or own, dtype=torch.float64)
            for key, own in (("mean", data.mean), ("std", data.std))
        )
        if len(mean) != data.channels:  # weights of three channels were summed to one
            mean, std = mean.mean().expand(data.channels), std.mean().expand(data.channels)
        own_mean, own_std = (torch.tensor(v, dtype=torch.float64) for v in (data.mean, data.std))
        same = torch.equal(mean, own_mean) and torch.equal(std, own_std)
        # (x * own_std + own_mean - mean) / std
        rescale = None if same else (own_std / std).float().view(-1, 1, 1)
        offset = ((own_mean - mean) / std).float().view(-1, 1, 1)
        self.register_buffer("rescale", rescale, persistent=False)
        self.register_buffer("offset", offset, persistent=False)

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
        readable = "a ViT, DeiT, BEiT, EVA-02, DINOv2, DINOv3 or SigLIP model can be read"
        if not reader.maps:
            raise UserError(
                f"{what} shows no attention maps: it never calls scaled_dot_product_attention; "
                f"{readable}"
            )
        grid = getattr(getattr(self.model, "patch_embed", None), "grid_size", None)
        prefix = getattr(self.model, "num_prefix_tokens", 0)
        heads = reader.maps[0].shape[1]
        if grid is None:
            raise UserError(f"{what} has no grid of patches: {readable}")
        blocks = len(getattr(self.model, "blocks", reader.maps))
        if blocks != len(reader.maps):
            raise UserError(
                f"{what} has {len(reader.maps)} attention maps in {blocks} blocks; a teacher has "
                f"one in each: {readable}"
            )
        tokens = prefix + grid[0] * grid[1]
        for block, maps in enumerate(reader.maps):
            if maps.shape != (2, heads, tokens, tokens):
                raise UserError(
                    f"{what} does not attend over all patches in every block: two images of "
                    f"{grid[0]} x {grid[1]} patches should give maps {[2, heads, tokens, tokens]}, "
                    f"block {block} gives {list(maps.shape)} (windows, pooled keys, or another "
                    f"number of heads); {readable}"
                )
        return tuple(grid), len(reader.maps), heads, prefix


def weights_of_patches(model: VisionTransformer) -> dict[str, Tensor]:
    """A ViT's state_dict, of its position embedding what belongs to patches."""
    weights = model.state_dict()
    if "pos_embed" in weights:
        weights["pos_embed"] = weights["pos_embed"][:, -model.patch_embed.num_patches :]
    return weights


def load_vit(
    teacher: str,
    data: ImageData,
    arguments: dict[str, Any],
    *,
    download: bool = False,
    remedy: str = f"{SETTING} should name a folder with a trained ViT that timm reads",
) -> VitTeacher:
    """The teacher that ``phase_a.teacher`` names, with its trained weights, on the CPU.

    teacher     ``local-dir:FOLDER``, as a student of ours is saved, or a timm model with weights,
                such as ``deit_small_patch16_224.fb_in1k``
    arguments   further keywords of ``timm.create_model``, such as ``{img_size: 32}``
    download    fetch weights that are not on this machine
    remedy      what to do where the folder is not whole

    Raises UserError for what cannot be loaded, and for a model that is no teacher for the data.
    """
    if teacher.startswith(LOCAL):
        folder = Path(teacher.removeprefix(LOCAL)).expanduser()
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}: {remedy}")
        model = load_folder(folder, remedy, arguments)
    else:
        with _of_setting():
            config = published(teacher)
        if cached_weights(config) is None:
            check_fit(teacher, arguments, data)
        with _of_setting():
            model = pretrained(teacher, arguments, download)
    return VitTeacher(model, data, teacher)


@contextlib.contextmanager
def _of_setting() -> Iterator[None]:
    """Puts the name of the setting before messages."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{SETTING}: {error}") from None


def check_fit(name: str, arguments: dict[str, Any], data: ImageData) -> None:
    """Raises UserError for a model of timm's that is no teacher for the data, whatever its weights
    are: before they are fetched."""
    for device in ("meta", "cpu"):  # the first takes no memory; not every model runs there
        try:
            with torch.device(device):
                model = timm.create_model(name, **arguments)
        except Exception:  # no model of timm's, or keywords that it does not take: said later
            return
        try:
            VitTeacher(model, data, name)
        except UserError:
            if device == "cpu":
                raise
        else:
            return


def pretrained(
    name: str,
    arguments: dict[str, Any],
    download: bool,
    right: str = RIGHT,
    consent: str = "phase_a.download=true",
) -> nn.Module:
    """A timm model with its weights from this machine, or from the hub where ``download`` allows
    it.

    ``arguments`` are further keywords of ``timm.create_model``. Raises UserError, which says what
    name would be ``right`` and how to give the ``consent`` to a download.
    """
    config = published(name, right)
    file = cached_weights(config)
    if file is None and not download:
        source = _repository(config)[0] if _on_hub(config) else config.url or config.hf_hub_id
        raise UserError(
            f"the weights of {name} ({source}) are not on this machine: {consent} fetches them"
        )
    overlay = None
    if _on_hub(config):
        overlay = {"file": file or _fetched(name, config), "custom_load": False}
    try:
        return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **arguments)
    except Exception as error:  # whatever timm makes of keywords or of a broken download
        raise UserError(f"timm cannot build {name} with {arguments}: {_one_line(error)}") from None


def published(name: str, right: str = RIGHT) -> Any:
    """timm's configuration of trained weights. Raises UserError where timm knows none of this
    name, and says what name would be ``right``."""
    try:
        config = get_pretrained_cfg(name)
    except RuntimeError:  # a tag that the model has not
        config = None
    if config is None:
        near = timm.list_pretrained(f"*{name.split('.')[0]}*")[:3]
        hint = f"; there are {', '.join(near)}" if near else ""
        if name and Path(name).is_dir():
            hint += f"; for the folder write {LOCAL}{name}"
        raise UserError(f"timm has no weights {name!r}{hint}; {right} is right")
    if not config.has_weights:
        raise UserError(f"timm has no trained weights for {name}: train one first")
    return config


def cached_weights(config: Any) -> str | None:
    """The file on this machine with the weights of timm's ``config``; None where there is none."""
    if _on_hub(config):
        repository, revision = _repository(config)
        for file in _files(config):
            cached = try_to_load_from_cache(repository, file, revision=revision)
            if isinstance(cached, str):
                return cached
        return None
    name = Path(config.url or "none").name
    local = Path(config.file or Path(torch.hub.get_dir()) / "checkpoints" / name)
    return str(local) if local.is_file() else None


def _on_hub(config: Any) -> bool:
    return bool(config.hf_hub_id and config.custom_load != "hf")


def _repository(config: Any) -> tuple[str, str | None]:
    """Name and revision."""
    repository, _, revision = config.hf_hub_id.partition("@")
    return repository, revision or None


def _files(config: Any) -> tuple[str, str]:
    """The files of a repository that may hold the weights, the likeliest first."""
    return config.hf_hub_filename or WEIGHTS[0], WEIGHTS[1]


def _fetched(name: str, config: Any) -> str:
    """The weights of a model on the hub, fetched to this machine."""
    repository, revision = _repository(config)
    problem: Exception | None = None
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # of every attempt that failed it writes a line
    try:
        for file in _files(config):
            try:
                return hf_hub_download(repository, file, revision=revision)
            except LocalEntryNotFoundError:
                why = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else f"no connection to {ENDPOINT}"
                raise UserError(f"the weights of {name} could not be fetched: {why}") from None
            except EntryNotFoundError as error:  # no such file there: maybe the other one is
                problem = problem or error
            except Exception as error:  # no leave to read it, a full disk
                problem = error
                break
    finally:
        logger.setLevel(level)
    raise UserError(
        f"the weights of {name} could not be fetched from {repository}: {_one_line(problem)}"
    )


def _one_line(error: Exception | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
