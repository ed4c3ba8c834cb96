"""The section ``phase_b``: what distillation adds to a training."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import model_validator

from gaupipe.settings.sections import Count, Positive, Rate, Weight
from gaupipe.settings.train import TrainChanges


class PhaseBSettings(TrainChanges):
    """Phase B: what distillation adds to a training. The student, an ordinary ViT, learns from the
    labels, the teacher's predictions and the stored maps."""

    alpha: Weight = 0.0
    """Weight of L_soft, the cross-entropy with the teacher's predictions, mean over all images of a
    batch, also those without labels. In the GauTransformer
    paper alpha, beta and gamma are 0.2, 0.1 and 0.7 on CIFAR, and gamma is constant."""
    alpha_epochs: Positive | None = None
    """Epochs until alpha is 0, and the labels weigh alpha + beta; null means all. With a store of
    views the student sees only these while it learns predictions, and views of its own
    afterwards."""
    beta: Weight = 1.0
    """Weight of L_hard, the cross-entropy with the labels, mean over the images that have one."""
    gamma: Weight = 0.1
    """Weight of L_feat, the divergence from the stored attention maps, at the start of the
    schedule."""
    gamma_schedule: Literal["constant", "linear", "cosine", "stop_after"] = "stop_after"
    """``linear`` and ``cosine`` lower gamma to 0 over ``gamma_epochs``; ``stop_after`` switches
    gamma off after ``gamma_epochs``; ``constant`` never changes gamma, as in the GauTransformer
    paper."""
    gamma_epochs: Positive | None = None
    """Epochs until gamma is 0; null means a third of the student's epochs. A ``constant`` gamma
    takes null alone."""
    queries: Positive | None = 16
    """The number of queries of an image whose maps L_feat compares in a step, drawn anew in each
    step; null compares all. The mean over the draws is L_feat over all queries, and 16 make a step
    cheaper, because the work grows with the number of tokens, not with its square. The queries of a
    batch are the same in all its images, blocks and heads."""
    layer_map: list[Count | None] | None = None
    """For each block of the student the number of the stored block that it is compared with,
    counted from 0, or null for no comparison. Without a list each block is compared with the stored
    block of the same number. If the numbers of blocks differ, evenly spaced stored blocks are
    taken."""
    head_map: list[Count] | Literal["mean"] | None = None
    """For each head of the student the number of the stored head that it is compared with, counted
    from 0. ``mean`` compares each head with the mean over the stored heads, of which there may then
    be another number. Null compares each head with the stored head of the same number."""
    shuffle_maps: bool = False
    """A control: every image gets the maps of another image. The control shows whether it matters
    that the maps belong to the image."""
    shuffle_predictions: bool = False
    """A control: every image gets the teacher's prediction of another image."""
    soft_temperature: Rate = 1.0
    """Logits of teacher and student are divided by it before L_soft compares them, and L_soft is
    multiplied by its square, so that its gradient keeps its size (Hinton et al., arXiv
    1503.02531)."""
    warm_start: Literal["none", "teacher", "slice", "exact"] = "none"
    """``teacher`` copies the teacher's patch and position embedding, V, output projection, FFN,
    norms and head. If the teacher is a trained ViT, ``teacher`` also copies Q and K. A student that
    has Gaussians itself gets the teacher's. ``exact`` is for ``phase_a.per_image: none`` and
    students with ``attention_options: {prior: true}``: the prior goes into the scores and Q is 0,
    so that the student computes what the teacher does before its first step. ``slice`` is for a
    student that is smaller than a trained ViT: evenly spaced blocks and heads of the teacher, and
    the principal components of its residual stream."""
    temperature: Rate = 1.0
    """The attention maps p of teacher and student become softmax(log p / temperature) before they
    are compared."""
    divergence: Literal["teacher_student", "student_teacher", "printed"] = "teacher_student"
    """How L_feat compares two maps. ``teacher_student`` is KL(teacher || student), which makes the
    student attend wherever the teacher does. ``student_teacher`` is KL(student || teacher), which
    *GauTransformer, eq. 9* is if its maps are scores; all of a query's attention on keys that the
    teacher gives nothing costs 17 nats, divided by ``temperature``, because a store in float16
    cannot tell less than 2^-25 from nothing. ``printed`` is eq. 9 literally, with a second softmax
    of maps that are softmaxed already: it has hardly any gradient, and its minimum is not at the
    teacher's map."""

    def gamma_ends(self, epochs: int) -> int:
        """``gamma_epochs``, or what null means for a student of so many ``epochs``."""
        return self.gamma_epochs or -(-epochs // 3)

    def gammas(self, epochs: int) -> list[float]:
        """The weight of L_feat in each epoch of a student of so many ``epochs``."""
        end = self.gamma_ends(epochs)
        gammas = []
        for epoch in range(epochs):
            progress = min(epoch / end, 1.0)
            factors = {
                "constant": 1.0,
                "linear": 1 - progress,
                "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
                "stop_after": float(epoch < end),
            }
            gammas.append(self.gamma * factors[self.gamma_schedule])
        return gammas

    @model_validator(mode="after")
    def _consistent(self) -> PhaseBSettings:
        if self.alpha + self.beta + self.gamma == 0:
            raise ValueError("alpha, beta and gamma are all 0: nothing is left to learn from")
        if self.divergence == "printed" and self.temperature != 1:
            raise ValueError("temperature cancels in the divergence printed: leave it at 1")
        if self.gamma_schedule == "constant" and self.gamma_epochs is not None:
            raise ValueError(
                f"gamma_epochs {self.gamma_epochs} has no effect on a constant gamma: set "
                "phase_b.gamma_epochs=null, or another phase_b.gamma_schedule"
            )
        return self
