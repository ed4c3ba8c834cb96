"""The training of a teacher with GauAttention, until its training accuracy enters the window.

Axis letters: B images, L blocks, H heads, T tokens, P raw numbers of a Gaussian, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batch, Batches
from gaupipe.data.buckets import Buckets
from gaupipe.data.splits import ImageData
from gaupipe.distillation.student import check_student
from gaupipe.maps.gaussians import move
from gaupipe.settings import Settings
from gaupipe.system.device import choose_precision, select_device
from gaupipe.teachers.base import TeacherJob, ending, identity
from gaupipe.teachers.gaussian_vit import Teacher
from gaupipe.teachers.image_state import ImageState
from gaupipe.training.epochs import loop
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.scores import Score, score
from gaupipe.training.state import TrainingState
from gaupipe.training.update import per_image_gradient
from gaupipe.vit.build import build_vit

LABEL_PASSES = 8
"""Forward passes with newly sampled points, over which a stochastic teacher's predictions are
the mean."""


PRIOR_LR = 2e-2
"""Learning rate of the shared prior, which the network's optimizer updates at every step."""


class TeacherLoss(nn.Module):
    """The loss of the teacher on a batch."""

    def __init__(self, job: TeacherJob[Teacher]) -> None:
        super().__init__()
        self.teacher = job.teacher
        self.forward_teacher: Callable[..., Tensor] = job.teacher
        if job.settings.compile:
            self.forward_teacher = torch.compile(job.teacher)

    def forward(self, batch: Batch, parameters: Tensor | None, noise: Tensor | None) -> Tensor:
        """The cross-entropy with the labels, mean over the batch.

        parameters   of the images, [B, *teacher.per_image_shape]; None: the shared prior alone
        noise        [B, L, H, T, 2] of one sampled pass, or None: the expected map
        """
        gaussians = self.teacher.gaussians(parameters)  # [B or 1, L, H, T, 4]
        gaussians = move(gaussians, batch.geometry, self.teacher.grid)
        logits = self.forward_teacher(batch.images, gaussians, noise)  # [B, C]
        return cross_entropy(logits, batch.labels)


def train(job: TeacherJob[Teacher], state: TrainingState[Teacher], folder: Path) -> None:
    """Epochs until the training accuracy enters the window or ``max_epochs`` are done."""
    settings = job.settings
    phase = settings.phase_a
    data = job.data
    per_image = job.per_image
    training = job.batches(data.train, settings.data.batch_size)
    evaluation = job.batches(data.train)
    validation = job.batches(data.val)
    augment = Augment(settings.phase_a_augment, settings.seed)
    draws = Draws(job, training.buckets)
    loss_module = TeacherLoss(job)
    parameters = noise = None

    with loop(settings, state, training, folder, "phase A", phase.max_epochs) as running:
        update = running.update
        for epoch in running.epochs():
            draws.seed(settings.seed * 1_000_003 + epoch.number)
            epoch.follow(draws.generators)
            loss_of = update.data_parallel(loss_module)
            # images [B, channels, h, w]
            for batch in training.epoch(epoch.number, augment, first=epoch.first):
                if per_image is not None:
                    parameters = per_image.gather(batch.ids, job.device)  # leaf
                if phase.mode == "stochastic":
                    noise = draws.noise(batch)  # [B, L, H, T, 2]
                with update.forward():
                    loss = loss_of(batch, parameters, noise)
                scale = update.backward(loss, batch.weight)
                update.step()
                # an image occurs once an epoch, so its parameters step at once
                if per_image is not None and parameters is not None:
                    per_image.update(batch.ids, per_image_gradient(parameters, scale))
                epoch.add(batch, loss=loss)
            losses = epoch.means()

            trained = replace(job, teacher=state.kept)
            train_acc = score_teacher(trained, evaluation, seen=True).acc
            val_acc = None  # an image that is not trained has the shared prior alone
            if phase.prior:
                val_acc = score_teacher(trained, validation, seen=False).acc
            metrics = epoch.metrics(train_loss=losses["loss"], train_acc=train_acc, val_acc=val_acc)
            state.finished = train_acc >= phase.stop_accuracy or running.is_last(epoch)
            running.show(epoch, losses["loss"], train=train_acc, unseen=val_acc)
            running.save(epoch, metrics)
        if per_image is not None:
            per_image.release()
    running.progress.line(f"phase A: {ending(phase, state.metrics)}")


class Draws:
    """The random numbers of sampled passes: those of an image depend on its bucket and on the
    images before it there, not on the rank."""

    def __init__(self, job: TeacherJob[Teacher], buckets: Buckets) -> None:
        self.teacher = job.teacher
        self.count = buckets.count
        self.generators = {number: torch.Generator(job.device) for number in buckets.rank_buckets()}

    def seed(self, seed: int) -> None:
        """Starts the draws of every bucket from (``seed``, bucket)."""
        for number, generator in self.generators.items():
            generator.manual_seed(seed * self.count + number)

    def noise(self, batch: Batch) -> Tensor:
        """Standard normal numbers [B, L, H, T, 2] for the images of a batch."""
        images = batch.images.split([size for _, size in batch.parts])
        parts = zip(images, batch.parts, strict=True)
        return torch.cat(
            [self.teacher.noise(part, self.generators[bucket]) for part, (bucket, _) in parts]
        )


@torch.no_grad()
def score_teacher(job: TeacherJob[Teacher], batches: Batches, *, seen: bool) -> Score:
    """Accuracy and loss of the teacher: with the per-image parameters, or (unseen images) with the
    shared prior alone. One sampled pass in ``stochastic`` mode."""
    teacher = job.teacher.eval()
    draws = Draws(job, batches.buckets)
    draws.seed(job.settings.seed)
    passes = None
    if teacher.passes is not None:
        passes = 1

    def predictions() -> Iterator[tuple[Tensor, Tensor]]:
        parameters = None
        for batch in batches.rank_batches():
            [(bucket, _)] = batch.parts  # one bucket in each batch, so that its draws are its own
            if seen:
                parameters = job.parameters(batch.ids)
            gaussians = teacher.gaussians(parameters)
            generator = draws.generators[bucket]
            yield teacher.predict(batch.images, gaussians, passes, generator), batch.labels

    return score(predictions())


def checked_teacher(settings: Settings, data: ImageData, students: bool = True) -> Teacher:
    """The teacher before its training, on the meta device: what does not fit is said before it is
    allocated. Raises UserError for settings that do not fit, those of its students too unless
    ``students`` is False."""
    with torch.device("meta"):
        teacher = build_teacher(settings, data)
    if students:
        check_student(settings, data, teacher, teacher.weights())
    return teacher


def build(
    settings: Settings,
    folder: Path,
    data: ImageData,
    *,
    to_read: bool = False,
    with_images: bool = True,
) -> TeacherJob[Teacher]:
    """Phase A, freshly started; per-image parameters are to lie in ``folder``/rows. ``to_read``: a
    teacher that is not trained any more, with the parameters of all images and not only of this
    rank's; ``with_images`` False leaves them out. Writes nothing; raises UserError."""
    device = select_device(settings.device, settings.threads)
    teacher = build_teacher(settings, data)
    per_image = None
    if with_images and settings.phase_a.learns_of_images:
        rows = settings.phase_a.rows
        buckets = Buckets(len(data.train), settings.data.num_buckets)
        numbers = None
        if to_read:
            numbers = range(buckets.count)
        per_image = ImageState(
            buckets,
            torch.zeros(teacher.per_image_shape),
            lr=rows.lr,
            folder=folder / "rows",
            initial_std=rows.initial_std,
            seed=settings.seed,
            numbers=numbers,
        )
    return TeacherJob(settings, data, device, teacher.to(device), per_image)


def build_teacher(settings: Settings, data: ImageData) -> Teacher:
    """A freshly started teacher on the CPU."""
    phase = settings.phase_a
    torch.manual_seed(settings.seed)
    vit = build_vit(settings.model, data, "gaussian")
    compression = None
    if phase.per_image == "embedding":
        compression = (phase.compression.embedding, phase.compression.hidden)
    passes = None
    if phase.mode == "stochastic":
        passes = LABEL_PASSES
    return Teacher(vit, phase.parametrisation, phase.prior, compression, passes)


def training_state(job: TeacherJob[Teacher]) -> TrainingState[Teacher]:
    """The optimizer of the network and its schedule, freshly started."""
    phase = job.settings.phase_a
    teacher = job.teacher
    steps = Buckets(len(job.data.train)).steps(job.settings.data.batch_size)
    groups = []
    if phase.prior:
        groups.append({"params": [teacher.prior], "lr": PRIOR_LR, "weight_decay": 0.0})
    if teacher.decoder:
        decoder = [*teacher.decoder.parameters()]
        decay = phase.optim.weight_decay
        groups.append({"params": decoder, "lr": phase.optim.lr, "weight_decay": decay})
    optimizer, schedule = build_optimizer(teacher.vit, phase.optim, phase.max_epochs, steps, groups)
    return TrainingState(
        teacher,
        optimizer,
        schedule,
        phase.optim,
        choose_precision(job.settings.precision, job.device, teacher.vit.embed_dim),
        job.per_image,
        identity=identity(job.settings, job.data),
    )
