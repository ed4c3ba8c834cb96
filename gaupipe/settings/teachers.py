"""The teachers of phase A by name, and what is known of each before it is loaded.

A new teacher is a file in ``gaupipe/teachers/`` and an entry of :data:`TEACHERS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TeacherKind:
    """What settings and commands know of a teacher without torch."""

    implementation: str
    """Module and class in ``gaupipe.teachers``."""
    words: str
    """What it is, on a model card."""
    trained: bool
    """Whether phase A trains it, in epochs."""
    stored: bool = True
    """Whether an export writes what it shows. Phase B makes the maps of any other teacher."""
    shows_maps: bool = True
    """Whether it may show attention maps."""
    shows_views: bool = False
    """Whether it may show those of any view of an image. Others have those of the image alone,
    which move."""
    predicts: bool = True
    """Whether it may predict the classes of the training images."""
    predicts_new_images: bool = False
    """Whether it may predict those of other images too."""
    learns_images: bool = False
    """Whether it may have parameters of single images."""
    mixes_images: bool = True
    """Whether its training may mix images."""
    warm_starts: tuple[str, ...] = ()
    """The values of ``phase_b.warm_start`` that its weights allow, besides none."""
    takes_args: bool = False
    """Whether it reads ``phase_a.teacher_args``."""
    controls: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Rows of a comparison that lack what it is to teach: their settings, by name."""


TEACHERS = {
    "gaussian": TeacherKind(
        implementation="gaussian.GaussianTeacher",
        words="a ViT with GauAttention, trained in phase A",
        trained=True,
        learns_images=True,
        mixes_images=False,
        warm_starts=("teacher", "exact"),
        controls={"prior alone": {"phase_a.prior": True, "phase_a.per_image": "none"}},
    ),
    "vit": TeacherKind(
        implementation="trained.TrainedVit",
        words="a ViT, trained in phase A",
        trained=True,
        shows_views=True,
        predicts_new_images=True,
        warm_starts=("teacher", "slice"),
        takes_args=True,
    ),
    "resnet": TeacherKind(
        implementation="resnet.ResNetTeacher",
        words="a ResNet, trained in phase A",
        trained=True,
        shows_maps=False,
        predicts_new_images=True,
        takes_args=True,
    ),
    "local": TeacherKind(
        implementation="local.LocalTeacher",
        words="a Gaussian round each token, the same for all images",
        trained=False,
        stored=False,
        predicts=False,
        controls={
            "wrong places": {"phase_a.local.permuted": True},
            "uniform maps": {"phase_a.local.std": [math.inf]},
        },
    ),
}
"""Teachers that phase A makes, by the values of ``phase_a.teacher``."""

GIVEN = TeacherKind(
    implementation="vit.VitTeacher",
    words="a trained model",
    trained=False,
    shows_views=True,
    predicts_new_images=True,
    warm_starts=("teacher", "slice"),
    takes_args=True,
)
"""A teacher that was trained before: any other value of ``phase_a.teacher`` names its weights."""


FINE_TUNED = replace(
    GIVEN,
    implementation="fine_tuned.FineTuned",
    words="a trained model, fine-tuned in phase A",
    trained=True,
)
"""A teacher that was trained before and is fine-tuned in ``phase_a.fine_tune_epochs``."""


def teacher_kind(name: str, fine_tuned: bool = False) -> TeacherKind:
    """What is known of the teacher that ``phase_a.teacher`` names."""
    return TEACHERS.get(name, FINE_TUNED if fine_tuned else GIVEN)
