"""The network of a teacher that was trained before, with its weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from gaupipe.data.splits import ImageData
from gaupipe.settings.places import REMEDY
from gaupipe.settings.teachers import TEACHERS
from gaupipe.system.errors import UserError
from gaupipe.teachers.readable_vit import PredictingModel, ReadableViT, UnreadableAttention
from gaupipe.vit.inputs import SETTING
from gaupipe.vit.pretrained import load_pretrained


def load_network(
    teacher: str,
    data: ImageData,
    arguments: dict[str, Any],
    *,
    download: bool = False,
    remedy: str = f"{', '.join(TEACHERS)}, {REMEDY}",
    asked_by: str = SETTING,
) -> PredictingModel:
    """The network that ``phase_a.teacher`` names, with its trained weights, on the CPU.

    teacher     ``local-dir:FOLDER``, as a student of ours is saved, or a timm model with weights,
                such as ``deit_small_patch16_224.fb_in1k``
    arguments   further keywords of ``timm.create_model``, such as ``{img_size: 32}``
    download    fetch weights that are not on this machine
    remedy      what to do where the folder is not whole
    asked_by    the setting or option that names it

    Raises UserError for what cannot be loaded, and for a model that is no teacher for the data.
    """
    try:
        return readable(load_pretrained(teacher, arguments, download, remedy), data, teacher)
    except UserError as error:
        raise UserError(f"{asked_by}: {str(error).removeprefix(f'{SETTING}: ')}") from None


def readable(model: nn.Module, data: ImageData, name: str) -> PredictingModel:
    """A model with its attention, where that can be read."""
    try:
        return ReadableViT(model, data, name)
    except UnreadableAttention:
        return PredictingModel(model, data, name)
