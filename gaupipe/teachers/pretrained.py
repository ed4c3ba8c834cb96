"""Trained weights for a ViT: from a folder, from this machine's cache, or from the hub."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from timm.models import get_pretrained_cfg
from torch import nn

from gaupipe.data.splits import ImageData
from gaupipe.settings.sections import LOCAL
from gaupipe.system.errors import UserError
from gaupipe.teachers.vit import SETTING, VitTeacher
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
        if cached_weights(published(teacher)) is None:
            check_fit(teacher, arguments, data)
        model = pretrained(teacher, arguments, download)
    except UserError as error:
        if str(error).startswith(SETTING):
            raise
        raise UserError(f"{SETTING}: {error}") from None
    return VitTeacher(model, data, teacher)


def folder_of(name: str, remedy: str) -> Path:
    """The folder that ``local-dir:FOLDER`` names. Raises UserError, ending in ``remedy``, where
    there is none."""
    folder = Path(name.removeprefix(LOCAL))
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: {remedy}")
    return folder


def check_fit(name: str, arguments: dict[str, Any], data: ImageData) -> None:
    """Raises UserError for a model of timm's that is no teacher for the data whatever its weights
    are, before they are fetched."""
    for device in ("meta", "cpu"):  # the first takes no memory; not every model runs there
        try:
            with torch.device(device):
                model = timm.create_model(name, **arguments)
        except Exception:  # no model of timm's, or keywords that it does not take: said later
            return
        try:
            VitTeacher(model, data, name)
            return
        except UserError:
            if device == "cpu":
                raise


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
    problem = ""
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
                problem = problem or _one_line(error)
            except Exception as error:  # no leave to read it, a full disk
                problem = _one_line(error)
                break
    finally:
        logger.setLevel(level)
    raise UserError(f"the weights of {name} could not be fetched from {repository}: {problem}")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
