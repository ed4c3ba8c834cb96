"""Loads a trained ViT from a folder that timm reads, such as a student's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open
from torch import nn

from gaupipe.system import digests
from gaupipe.system.errors import UserError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files with the weights of a folder, the first of which timm takes."""


def load_folder(folder: Path, remedy: str, arguments: dict[str, Any] | None = None) -> nn.Module:
    """The model of ``folder`` (config.json beside model.safetensors or pytorch_model.bin), in eval
    mode.

    ``arguments`` are further keywords of ``timm.create_model``. Files that SHA256SUMS lists are
    checked. Raises UserError, ending in ``remedy``, for a folder that is not whole.
    """
    there = (folder / name for name in WEIGHTS if (folder / name).is_file())
    weights = next(there, folder / WEIGHTS[0])
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
    except (
        Exception
    ) as error:  # json, safetensors and timm raise whatever a foreign file makes of them
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{folder} is damaged, or no model that timm reads ({reason[:200]}): {remedy}"
        ) from None
    if not arguments:
        return model
    try:
        return timm.create_model(f"local-dir:{folder}", pretrained=True, **arguments).eval()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{folder}: cannot be built with {arguments}: {reason[:200]}") from None


def check_sizes(folder: Path, weights: Path) -> None:
    """Raises ValueError unless a folder's config.json describes a model with these ``weights``.

    timm adapts weights to another size where it can, without a word, and makes the model first,
    however large. So the model is made on the meta device, which takes no memory.
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
    if different := sorted(
        name for name in built.keys() | stored.keys() if built.get(name) != stored.get(name)
    ):
        name = different[0]
        raise ValueError(
            f"{name} is {stored.get(name)} in {weights.name}, {built.get(name)} by config.json"
        )


def check_normalisation(config: Any) -> None:
    """Raises ValueError unless ``mean`` and ``std`` of a ``pretrained_cfg`` are lists of finite
    numbers, those of ``std`` positive."""
    for key, lowest in (("mean", -math.inf), ("std", 0)):
        values = config.get(key) or []
        if not isinstance(values, list | tuple) or not all(
            type(value) in (int, float) and lowest < value < math.inf for value in values
        ):
            raise ValueError(f"{key} is {values!r}, should be a list of numbers such as [0.5]")
