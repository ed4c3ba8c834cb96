"""The ViT that is trained: built from the settings, freshly started or with trained weights."""

from __future__ import annotations

import torch
from timm.layers import PatchDropout
from timm.models.vision_transformer import VisionTransformer

from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.system.errors import UserError
from gaupipe.teachers.fine_tuning import fine_tunes, with_weights
from gaupipe.training.optimizer import build_optimizer
from gaupipe.vit.build import build_vit


def build_student(
    settings: Settings, data: ImageData, device: str | None = None, trained: bool = True
) -> VisionTransformer:
    """The student as the seed starts it, on the CPU; without weights on the ``device`` "meta".
    One that is fine-tuned has its trained weights, unless ``trained`` is False."""
    phase = settings.phase_b
    if fine_tunes(settings.model.name):
        student = with_weights(settings, data, device, trained)
    else:
        torch.manual_seed(settings.seed)
        options = {name: getattr(phase, name) for name in ("attention_options", "match_params")}
        changes = ("phase_b.model_args", phase.model_args)
        student = build_vit(settings.model, data, phase.student, device, changes, **options)
    if phase.patch_drop_rate:
        if any(hasattr(module, "places") for module in student.modules()):
            raise UserError("phase_b.patch_drop_rate: should be 0 for a student with Gaussians")
        student.patch_drop = PatchDropout(phase.patch_drop_rate, student.num_prefix_tokens)
    return student


def check_baseline(settings: Settings, data: ImageData, trained: bool = False) -> None:
    """Raises UserError for what training on the labels alone could not do. ``trained`` weights of
    a fine-tuning are then on this machine."""
    device = None if trained and fine_tunes(settings.model.name) else "meta"
    student = build_student(settings, data, device)
    build_optimizer(student, settings.baseline_optim, settings.phase_b.epochs, steps_per_epoch=100)
