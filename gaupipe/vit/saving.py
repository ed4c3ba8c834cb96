"""A trained ViT in a folder that timm reads: a student's saved, any loaded."""

from __future__ import annotations

import copy
import inspect
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open
from timm.models import save_for_hf
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import gaupipe.vit.models  # noqa: F401  (timm learns gaupipe's names)
from gaupipe.system import digests
from gaupipe.system.errors import UserError
from gaupipe.system.files import replaced

STUDENT_FILES = ("config.json", "model.safetensors")
"""The files that timm reads from a student's folder."""

STOCK_ARCHITECTURE = "vit_tiny_patch16_224"
"""The timm model whose name a plain student is saved under; every size is overridden by
``model_args``."""

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files with the weights of a folder, the first of which timm takes."""


def save_student(
    model: VisionTransformer,
    folder: str | Path,
    label_names: list[str] | None = None,
    **data_config,
) -> None:
    """Writes a folder for ``timm.create_model("local-dir:FOLDER", pretrained=True)``: config.json
    and model.safetensors, with their digests in SHA256SUMS. An older student is replaced as a
    whole, and stays if this one cannot be written.

    A ``gauvit`` with standard attention and ordinary blocks is saved as a stock timm model, which
    loads without gaupipe; others need ``import gaupipe`` first. ``data_config`` is timm's
    (``mean``, ``std``, ``crop_pct``, ...). Raises UserError for a model that ``timm.create_model``
    did not build and for a folder that holds something else than a student.
    """
    if not (isinstance(model, VisionTransformer) and hasattr(model, "pretrained_cfg")):
        raise UserError("save_student: takes a VisionTransformer that timm.create_model built")
    folder = Path(os.path.realpath(folder))  # a link stays, and what it points to is replaced
    if folder.exists() and not _is_replaceable(folder):
        raise UserError(
            f"{folder} is there and is not the folder of a student: choose another place, "
            "or remove it"
        )
    architecture, model_args = architecture_of(model)
    described: Any = copy.copy(model)  # with attributes that timm does not declare
    described._model_args = model_args  # timm would add gaupipe's keywords
    described.pretrained_cfg = dict(
        described.pretrained_cfg,
        architecture=architecture,
        num_classes=model.num_classes,
        input_size=(model.in_chans, *model.patch_embed.img_size),
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
        digests.write(fresh)


def _is_replaceable(folder: Path) -> bool:
    """True for a folder that is empty or holds a student, perhaps a damaged one."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"something else"}
    return not names or not names.isdisjoint({*STUDENT_FILES, digests.SUMS})


def architecture_of(model: VisionTransformer) -> tuple[str, dict]:
    """(timm architecture, model_args) that rebuild a model, a stock one where possible."""
    now: dict[str, Any] = dict(
        img_size=list(model.patch_embed.img_size),
        patch_size=list(model.patch_embed.patch_size),
        num_classes=model.num_classes,
        global_pool=model.global_pool,
        fc_norm=not isinstance(model.fc_norm, nn.Identity),
    )  # what timm lets one change after construction
    notes = vars(model)  # what timm and gaupipe note of how it was built
    if "gaupipe_args" not in notes:
        return notes["pretrained_cfg"]["architecture"], {**notes.get("_model_args", {}), **now}
    args = {**notes["gaupipe_args"], **now}
    if "base" in args:
        return "gauvit_converted", args
    plain = args["attention"] == "standard" and not args["attention_options"]
    if plain and not args["rezero"] and args.get("mlp_ratio") != 0:
        keywords = inspect.signature(VisionTransformer).parameters
        return STOCK_ARCHITECTURE, {name: args[name] for name in args if name in keywords}
    return notes["pretrained_cfg"]["architecture"], args


def load_folder(folder: Path, remedy: str, arguments: dict[str, Any] | None = None) -> nn.Module:
    """The model of ``folder`` (config.json beside model.safetensors or pytorch_model.bin), in eval
    mode.

    ``arguments`` are further keywords of ``timm.create_model``. Files that SHA256SUMS lists are
    checked. Raises UserError, ending in ``remedy``, for a folder that is not whole.
    """
    files = [folder / name for name in WEIGHTS]
    weights = next(filter(Path.is_file, files), files[0])
    for file in (folder / "config.json", weights):
        if not file.is_file():
            raise UserError(f"{file} is not there: {remedy}")
        digests.check(file)
    try:
        check_sizes(folder, weights)
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        check_normalisation(model.pretrained_cfg)
    except OSError:
        raise
    except Exception as error:  # json, safetensors and timm raise many kinds for a foreign file
        reason = f"is damaged, or no model that timm reads ({_reason(error)})"
        raise UserError(f"{folder} {reason}: {remedy}") from None
    if not arguments:
        return model
    try:
        return timm.create_model(f"local-dir:{folder}", pretrained=True, **arguments).eval()
    except Exception as error:
        reason = f"cannot be built with {arguments}: {_reason(error)}"
        raise UserError(f"{folder}: {reason}") from None


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def check_sizes(folder: Path, weights: Path) -> None:
    """Raises ValueError unless a folder's config.json describes a model with these ``weights``.

    timm adapts weights to another size without a word. The meta device takes no memory.
    """
    config = json.loads((folder / "config.json").read_bytes())
    if weights.suffix == ".bin":
        tensors = torch.load(weights, map_location="meta", weights_only=True)
        stored = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    else:
        with safe_open(weights, "pt") as file:
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (no dict)
    depth = config.get("model_args", {}).get("depth", 1)
    if depth > len(stored):
        raise ValueError(f"{depth} blocks cannot have {len(stored)} weights in all")
    with torch.device("meta"):
        model = timm.create_model(f"local-dir:{folder}")
    built = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(built.keys() | stored.keys()):
        if (here := built.get(name)) != (there := stored.get(name)):
            raise ValueError(f"{name} is {there} in {weights.name}, {here} by config.json")


def check_normalisation(config: Any) -> None:
    """Raises ValueError unless ``mean`` and ``std`` of a ``pretrained_cfg`` are lists of finite
    numbers, those of ``std`` positive."""
    for key, lowest in (("mean", -math.inf), ("std", 0)):
        values = config.get(key) or []
        if not isinstance(values, list | tuple) or not all(
            type(value) in (int, float) and lowest < value < math.inf for value in values
        ):
            raise ValueError(f"{key} is {values!r}, should be a list of numbers such as [0.5]")
