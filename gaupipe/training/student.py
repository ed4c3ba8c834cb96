"""The ViT that is trained: built from the settings, freshly started or with trained weights."""

from __future__ import annotations

import torch
from timm.layers import PatchDropout
from timm.models.vision_transformer import VisionTransformer

from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings, TrainSettings
from gaupipe.system.errors import UserError
from gaupipe.training.optimizer import check_optimizer
from gaupipe.vit.build import build_vit
from gaupipe.vit.fine_tuning import fine_tunes, with_weights, without_weights


def build_student(
    settings: Settings,
    data: ImageData,
    train: TrainSettings,
    from_weights: bool = True,
    device: str | None = None,
) -> VisionTransformer:
    """The student, to be trained as ``train`` says, as the seed starts it, on the CPU. One that is
    fine-tuned starts ``from_weights``; without them the student may lie on the ``device`` "meta".
    Raises UserError where it could not drop patches."""
    if from_weights and fine_tunes(settings.model.name):
        student = with_weights(settings, data)
    else:
        student = untrained_student(settings, data, device)
    if train.patch_drop_rate:
        if any(hasattr(module, "positions") for module in student.modules()):
            raise UserError(
                "train.patch_drop_rate: should be 0 for a student with Gaussians or rotary "
                "positions, which have a place for every token"
            )
        student.patch_drop = PatchDropout(train.patch_drop_rate, student.num_prefix_tokens)
    return student


def outline_student(settings: Settings, data: ImageData, train: TrainSettings) -> VisionTransformer:
    """The student on the meta device, without weights. Raises UserError where it could not be
    trained as ``train`` says."""
    student = build_student(settings, data, train, from_weights=False, device="meta")
    check_optimizer(student, train.optim, train.epochs)
    return student


def untrained_student(
    settings: Settings, data: ImageData, device: str | None = "meta"
) -> VisionTransformer:
    """The student without trained weights; on the ``device`` "meta" without any."""
    model = settings.model
    if fine_tunes(model.name):
        return without_weights(settings, data, device)
    torch.manual_seed(settings.seed)
    options = {name: getattr(model, name) for name in ("attention_options", "match_params")}
    changes = ("model.student_args", model.student_args)
    return build_vit(model, data, model.attention, device, changes, **options)
