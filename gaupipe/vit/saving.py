"""A trained ViT in a folder that timm reads: a student's saved, any loaded."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.layers import to_2tuple
from timm.models import load_state_dict, save_for_hf
from timm.models.vision_transformer import VisionTransformer
from timm.utils import unwrap_model
from torch import nn

from gaupipe.attention.base import NOTE
from gaupipe.settings.sections import LOCAL
from gaupipe.system.digests import sha256
from gaupipe.system.errors import UserError, one_line
from gaupipe.system.files import replaced
from gaupipe.vit.build import create_model
from gaupipe.vit.models import GauViT

STUDENT_FILES = ("config.json", "model.safetensors")
"""The files that timm reads from a student's folder."""

STOCK_ARCHITECTURE = "vit_tiny_patch16_224"
"""The timm model whose name a plain student is saved under; every size is overridden by
``model_args``."""

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files with the weights of a folder, the first of which timm takes."""

INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "box", "hamming", "lanczos")
"""What timm resizes images by."""


def save_student(
    model: Any,
    folder: str | Path,
    label_names: list[str] | None = None,
    **data_config: Any,
) -> None:
    """Writes a folder for ``timm.create_model("local-dir:FOLDER", pretrained=True)``: config.json,
    with a digest of both files, and model.safetensors. An older student is replaced as a whole, and
    stays if this one cannot be written.

    A ``gauvit`` with standard attention and ordinary blocks is saved as a stock timm model, which
    loads without gaupipe; others need ``import gaupipe`` first. ``data_config`` is timm's
    (``mean``, ``std``, ``crop_pct``, ...). Raises UserError for a model that ``timm.create_model``
    does not build, such as a pruned EVA, for a folder that holds something else than a student, and
    unless there is a name for each class, where there are any.
    """
    model = unwrap_model(model)  # of a compiled or parallel one
    if not hasattr(model, "pretrained_cfg"):
        raise UserError("save_student: takes a model that timm.create_model built")
    folder = Path(os.path.realpath(folder))  # a link stays, and what it points to is replaced
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"something else"}
    if folder.exists() and names and names.isdisjoint(STUDENT_FILES):
        raise UserError(
            f"{folder} is there and is not the folder of a student: choose another place, "
            "or remove it"
        )
    if label_names:
        check_label_names(label_names, model.num_classes)
    architecture, model_args = architecture_of(model)
    described: Any = copy.copy(model)  # with attributes that timm does not declare
    described._model_args = model_args  # timm would add gaupipe's keywords
    described.pretrained_cfg = dict(
        described.pretrained_cfg,
        architecture=architecture,
        num_classes=model.num_classes,
        input_size=(channels_of(model), *image_size_of(model)),
        **data_config,
    )
    with replaced(folder) as fresh:
        save_for_hf(
            described,
            str(fresh),
            model_config=dict(label_names=label_names),
            model_args=model_args,
            safe_serialization=True,
        )
        # safetensors makes a file that its owner alone can read
        shutil.copymode(fresh / "config.json", fresh / "model.safetensors")
        path = fresh / "config.json"
        config = json.loads(path.read_bytes())
        path.write_text(json.dumps({**config, "sha256": _sha256(config, fresh)}, indent=2))
        try:
            check_sizes(fresh, fresh / "model.safetensors")
        except OSError:
            raise
        except Exception as error:  # of whatever builds the model
            raise UserError(
                f"save_student: {type(model).__name__} is not what timm.create_model gives, so it "
                f"could not be loaded again ({one_line(error)}): save its state_dict instead"
            ) from None


def saved_sha256(folder: Path) -> str | None:
    """The digest that :func:`save_student` noted of a student; None in a folder of another program.
    Raises OSError or ValueError for a config.json that is no JSON object."""
    config = json.loads((folder / "config.json").read_bytes())
    if not isinstance(config, dict):
        raise ValueError("config.json should be an object")
    return config.get("sha256")


def _sha256(config: dict[str, Any], folder: Path) -> str:
    """A digest of a folder's config.json without its digest, and of its weights."""
    described = {name: value for name, value in config.items() if name != "sha256"}
    text = json.dumps(described, sort_keys=True) + sha256(folder / "model.safetensors")
    return hashlib.sha256(text.encode()).hexdigest()


def check_label_names(label_names: Sequence[str], num_classes: int) -> None:
    """Raises UserError unless there is a name for each class."""
    if len(label_names) != num_classes:
        raise UserError(
            f"label_names has {len(label_names)} names, the model {num_classes} classes: it should "
            "name each class once, in the order of the model's outputs"
        )


def class_names(model: Any, count: int) -> tuple[str, ...]:
    """The names of a model's ``count`` classes as its config.json or timm has them, or those of
    ImageNet for a model that timm's weights for these classes are in; otherwise 0, 1, ... Raises
    UserError where there are fewer or more names."""
    config = model.pretrained_cfg or {}
    names = config.get("label_names")
    subset = infer_imagenet_subset({"num_classes": count})
    if not names and subset and config.get("tag"):
        return tuple(ImageNetInfo(subset).label_descriptions())
    if not names:
        return tuple(map(str, range(count)))
    check_label_names(names, count)
    return tuple(names)


def image_size_of(model: Any) -> tuple[int, int]:
    """(height, width) in pixels of the images that a model is for."""
    if isinstance(model, VisionTransformer):
        return tuple(model.patch_embed.img_size)
    size = getattr(model, "img_size", model.pretrained_cfg["input_size"][1:])
    return to_2tuple(size)


def channels_of(model: Any) -> int:
    """The channels of the images that a model is for."""
    default = getattr(model, "in_chans", model.pretrained_cfg["input_size"][0])
    return int(getattr(model, "_model_args", {}).get("in_chans", default))


def architecture_of(model: Any) -> tuple[str, dict[str, Any]]:
    """(timm architecture, model_args) that rebuild a model, a stock one where possible."""
    if not isinstance(model, VisionTransformer):
        config: Any = model.pretrained_cfg
        return config["architecture"], {**model._model_args, "num_classes": model.num_classes}
    norms = (model.norm, model.fc_norm)  # one of which is the final norm
    now: dict[str, Any] = dict(
        depth=len(model.blocks),
        img_size=list(model.patch_embed.img_size),
        patch_size=list(model.patch_embed.patch_size),
        num_classes=model.num_classes,
        global_pool=model.global_pool,
        final_norm=not all(isinstance(norm, nn.Identity) for norm in norms),
        fc_norm=not isinstance(model.fc_norm, nn.Identity),
    )  # what timm lets one change after construction
    notes = vars(model)  # what timm and gaupipe note of how it was built
    if "gaupipe_args" not in notes:
        return notes["pretrained_cfg"]["architecture"], {**notes.get("_model_args", {}), **now}
    args = {**notes["gaupipe_args"], **now}
    if "base" in args:
        return "gauvit_converted", args
    plain = args["attention"] == "standard" and not args["attention_options"]
    plain = plain and args["stem"] == "patch"
    plain = plain and type(model) is GauViT  # not a subclass with parts of its own
    if plain and not args["rezero"] and args.get("mlp_ratio") != 0:
        keywords = inspect.signature(VisionTransformer).parameters
        return STOCK_ARCHITECTURE, {name: args[name] for name in args if name in keywords}
    return notes["pretrained_cfg"]["architecture"], args


def load_folder(folder: Path, remedy: str, arguments: dict[str, Any] | None = None) -> nn.Module:
    """The model of ``folder`` (config.json beside model.safetensors or pytorch_model.bin), in eval
    mode.

    ``arguments`` are further keywords of ``timm.create_model``. Raises UserError, ending in
    ``remedy``, for a folder that is not whole.
    """
    files = [folder / name for name in WEIGHTS]
    weights = next(filter(Path.is_file, files), files[0])
    for file in (folder / "config.json", weights):
        if not file.is_file():
            raise UserError(f"{file} is not there: {remedy}")
    try:
        check_digest(folder)
        check_sizes(folder, weights)
    except OSError:
        raise
    except Exception as error:  # json, safetensors and timm raise many kinds for a foreign file
        reason = f"is damaged, or no model that timm reads ({one_line(error)})"
        raise UserError(f"{folder} {reason}: {remedy}") from None
    model = create_model(f"{LOCAL}{folder}", arguments or {}, pretrained=True).eval()
    check_config(folder / "config.json", getattr(model, "pretrained_cfg", None) or {})
    return model


def check_config(path: Path, config: dict[str, Any]) -> None:
    """Raises UserError, naming the file at ``path``, for names of classes and ways to scale images
    in a model's ``config`` that are none."""
    names = config.get("label_names")
    if names and not (isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)):
        _refuse(path, config, "label_names", "a list with a name for each class")
    check_scaling(path, config)
    share = config.get("crop_pct")
    if share is not None and not (is_finite(share) and 0 < share <= 1):
        _refuse(path, config, "crop_pct", "above 0 and at most 1")
    if config.get("interpolation", "bicubic") not in INTERPOLATIONS:
        _refuse(path, config, "interpolation", f"one of {', '.join(INTERPOLATIONS)}")


def check_scaling(where: str | Path, config: dict[str, Any]) -> None:
    """Raises UserError, saying ``where``, for a mean or std in a model's ``config`` by which no
    pixels can be scaled."""
    for key in ("mean", "std"):
        values = config.get(key)
        if values is None:
            continue
        if not isinstance(values, list | tuple) or not all(map(is_finite, values)):
            _refuse(where, config, key, "a list with a number for each channel")
        if key == "std" and min(values, default=1) <= 0:
            _refuse(where, config, key, "a list with a number above 0 for each channel")


def _refuse(where: str | Path, config: dict[str, Any], key: str, right: str) -> NoReturn:
    raise UserError(f"{where}: {key} is {config[key]!r:.100}: should be {right}")


def is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def check_digest(folder: Path) -> None:
    """Raises ValueError if a file of a saved student is not what was written. A folder without the
    digest, such as another program writes, is not checked."""
    noted = saved_sha256(folder)
    if noted is None:
        return
    config = json.loads((folder / "config.json").read_bytes())
    if _sha256(config, folder) != noted:
        raise ValueError("the files have changed since; whoever meant it takes sha256 out")


def check_sizes(folder: Path, weights: Path) -> None:
    """Raises ValueError unless a folder's config.json describes a model with these ``weights``:
    timm adapts weights to another size without a word. The meta device takes no memory, but timm
    lists all blocks, for which a depth of millions takes minutes."""
    stored = _shapes(load_state_dict(str(weights)))
    arguments = json.loads((folder / "config.json").read_bytes()).get("model_args") or {}
    depth = arguments.get("depth", 0)
    if isinstance(depth, int) and depth > len(stored):
        raise ValueError(f"model_args.depth is {depth}, of {len(stored)} arrays in {weights.name}")
    with torch.device("meta"):
        built = _shapes(timm.create_model(f"{LOCAL}{folder}").state_dict())
    for name in sorted(built.keys() | stored.keys()):
        here = built.get(name)
        there = stored.get(name)
        if here != there:
            raise ValueError(f"{name} is {there} in {weights.name}, {here} by config.json")


def _shapes(weights: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Without notes, which loading reads: one has as many bytes as its attention has options."""
    arrays = {name: tensor for name, tensor in weights.items() if not name.endswith(f".{NOTE}")}
    return {name: tuple(tensor.shape) for name, tensor in arrays.items()}
