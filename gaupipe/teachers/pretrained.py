"""Trained weights for a ViT: from a folder, from this machine's cache, or from the hub."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import try_to_load_from_cache
from timm.models import get_pretrained_cfg
from torch import nn

from gaupipe.data.splits import ImageData
from gaupipe.settings.sections import LOCAL, with_whole_path
from gaupipe.system.errors import UserError
from gaupipe.teachers.vit import SETTING, VitTeacher
from gaupipe.vit.build import created
from gaupipe.vit.saving import WEIGHTS, load_folder

RIGHT = "gaussian, vit, local-dir:FOLDER or a timm name with weights"


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
        return VitTeacher(load_folder(folder_of(teacher, remedy), remedy, arguments), data, teacher)
    try:
        if cached_weights(published(teacher)) is None:  # a model that does not fit is not fetched
            VitTeacher(created(teacher, arguments), data, teacher)
        return VitTeacher(pretrained(teacher, arguments, download), data, teacher)
    except UserError as error:
        raise UserError(f"{SETTING}: {str(error).removeprefix(f'{SETTING}: ')}") from None


def folder_of(name: str, remedy: str) -> Path:
    """The folder that ``local-dir:FOLDER`` names. Raises UserError, ending in ``remedy``, where
    there is none."""
    folder = Path(name.removeprefix(LOCAL))
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: {remedy}")
    return folder


def absolute(name: str) -> str:
    """The name of a model as it is true in any folder: a folder's with its whole path."""
    return with_whole_path(LOCAL + name if Path(name).expanduser().is_dir() else name)


def pretrained(
    name: str,
    arguments: dict[str, Any],
    download: bool,
    right: str = RIGHT,
    consent: str = "download=true",
) -> nn.Module:
    """A timm model with its weights from this machine, or with ``download`` from the hub.

    ``arguments`` are further keywords of ``timm.create_model``. Raises UserError, which names a
    ``right`` name and how to give the ``consent`` to a download.
    """
    config = published(name, right)
    file = cached_weights(config)
    if file is None and not download:
        raise UserError(
            f"the weights of {name} ({config.hf_hub_id or config.url}) are not on this machine: "
            f"{consent} fetches them"
        )
    cached = None if file is None else {"file": file, "custom_load": False}
    return created(name, arguments, pretrained=True, pretrained_cfg_overlay=cached)


def published(name: str, right: str = RIGHT) -> Any:
    """timm's configuration of trained weights. Raises UserError where timm knows none of this
    name, and says what name would be ``right``."""
    try:
        config = get_pretrained_cfg(name)
    except RuntimeError:  # a tag that the model has not
        config = None
    if config is None or not config.has_weights:
        near = difflib.get_close_matches(name, timm.list_pretrained(), cutoff=0)
        raise UserError(f"timm has no weights {name!r}, but {', '.join(near)}; {right} is right")
    return config


def cached_weights(config: Any) -> str | None:
    """The file with the weights of timm's ``config`` in the hub's cache on this machine."""
    repository, _, revision = (config.hf_hub_id or "").partition("@")
    for name in WEIGHTS if repository else ():
        file = try_to_load_from_cache(repository, name, revision=revision or None)
        if isinstance(file, str):
            return file
    return None
