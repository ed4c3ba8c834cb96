"""Trained weights for a ViT: from a folder, from this machine's cache, or from the hub."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import try_to_load_from_cache
from timm.models import PretrainedCfg, get_pretrained_cfg
from torch import nn

from gaupipe.settings.places import REMEDY, folder_of
from gaupipe.settings.sections import LOCAL
from gaupipe.system.errors import UserError
from gaupipe.vit.build import create_model
from gaupipe.vit.saving import WEIGHTS, load_folder

HUB = "hf-hub:"


def load_pretrained(
    name: str, arguments: dict[str, Any], download: bool, remedy: str = REMEDY
) -> nn.Module:
    """A timm model with its weights from a folder, from this machine's cache, or with ``download``
    from the hub.

    ``arguments`` are further keywords of ``timm.create_model``. Raises UserError, ending in
    ``remedy`` where there is no such folder or name.
    """
    if name.startswith(LOCAL):
        return load_folder(folder_of(name, remedy), remedy, arguments)
    config = find_published(name, remedy)
    file = cached_weights(config)
    if file is None and not download:
        raise UserError(
            f"the weights of {name} ({config.hf_hub_id or config.url}) are not on this machine: "
            "download=True (--download) fetches them"
        )
    cached = None
    if file is not None:
        cached = {"file": file, "custom_load": False}
    return create_model(name, arguments, pretrained=True, pretrained_cfg_overlay=cached)


def find_published(name: str, remedy: str = REMEDY) -> Any:
    """timm's configuration of trained weights. Raises UserError, ending in ``remedy``, where timm
    knows none of this name. Of ``hf-hub:OWNER/MODEL`` the hub has the rest."""
    if re.fullmatch(HUB + "[a-zA-Z0-9][\\w-]*/[a-zA-Z0-9][\\w.@-]*", name, re.ASCII):
        return PretrainedCfg(hf_hub_id=name.removeprefix(HUB))
    try:
        config = get_pretrained_cfg(name)
    except RuntimeError:  # a tag that the model has not
        config = None
    if config is None or not config.has_weights:
        near = difflib.get_close_matches(name, timm.list_pretrained(), cutoff=0)
        raise UserError(f"timm has no weights {name!r}, but {', '.join(near)}; {remedy}")
    return config


def cached_weights(config: Any) -> str | None:
    """The file with the weights of timm's ``config`` in the hub's cache on this machine."""
    if not config.hf_hub_id:
        return None
    repository, _, revision = config.hf_hub_id.partition("@")
    for name in WEIGHTS:
        file = try_to_load_from_cache(repository, name, revision=revision or None)
        if isinstance(file, str):
            return file
    return None


def load_model(source: str, download: bool = False) -> nn.Module:
    """A timm model in eval mode, by its ``source``: a student's folder or the training folder
    around it, ``local-dir:FOLDER``, or a timm name. Raises UserError."""
    folder = Path(os.path.expanduser(source.removeprefix(LOCAL)))
    if (folder / "student").is_dir():
        folder = folder / "student"
    if source.startswith(LOCAL) or folder.is_dir():
        return load_folder(folder, REMEDY)
    return load_pretrained(source, {}, download).eval()
