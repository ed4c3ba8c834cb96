"""The teacher ``gaussian``: a ViT with GauAttention, trained until its training accuracy enters the
window.

Axis letters: B images, L blocks, H heads, T tokens, P raw numbers of a Gaussian, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batch, Batches
from gaupipe.data.buckets import Buckets
from gaupipe.data.draws import seed_of
from gaupipe.data.splits import ImageData
from gaupipe.maps.gaussians import move
from gaupipe.settings import Settings
from gaupipe.system.device import choose_precision, prepare_device
from gaupipe.teachers.base import MapShape, Outputs, Teacher, Wanted, ending, identity
from gaupipe.teachers.gaussian_vit import GaussianViT
from gaupipe.teachers.image_state import ImageState
from gaupipe.teachers.notes import StoreNotes
from gaupipe.training.epochs import loop
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.scores import Score, score
from gaupipe.training.state import TrainingState, kept_weights, read_checkpoint
from gaupipe.training.update import per_image_gradient
from gaupipe.vit.build import build_vit

LABEL_PASSES = 8
"""Forward passes with newly sampled points, over which a stochastic teacher's predictions are
the mean."""

PRIOR_LR = 2e-2
"""Learning rate of the shared prior, which the network's optimizer updates at every step."""


@dataclass
class GaussianTeacher(Teacher):
    """A ViT with GauAttention; ``per_image`` is None where all images have the shared prior, and
    where nobody reads single images."""

    network: GaussianViT
    per_image: ImageState | None = None

    is_exact: ClassVar[bool] = True

    @classmethod
    def outline(cls, settings: Settings, data: ImageData) -> GaussianTeacher:
        with torch.device("meta"):
            network = build_network(settings, data)
        return cls(settings, data, prepare_device(settings.device, settings.threads), network)

    def begin(self, folder: Path) -> GaussianTeacher:
        return self.build(self.settings, self.data, folder)

    @classmethod
    def finished(
        cls, settings: Settings, data: ImageData, folder: Path, with_images: bool = True
    ) -> GaussianTeacher | None:
        teacher = cls.build(settings, data, folder, to_read=True, with_images=with_images)
        checkpoint = folder / "checkpoint"
        with read_checkpoint(checkpoint, identity(settings, data)) as state:
            if state is None or not state["finished"]:
                return None
            teacher.network.load_state_dict(kept_weights(state))
            teacher.network.eval()
            if teacher.per_image is not None:
                teacher.per_image.load(checkpoint, state["rows"])
        return teacher

    @classmethod
    def build(
        cls,
        settings: Settings,
        data: ImageData,
        folder: Path,
        *,
        to_read: bool = False,
        with_images: bool = True,
    ) -> GaussianTeacher:
        """A freshly started teacher, whose per-image parameters are to lie in ``folder``/rows.
        ``to_read``: it is not trained any more, and has the parameters of all images and not only
        of this rank's; ``with_images`` False leaves them out. Writes nothing."""
        device = prepare_device(settings.device, settings.threads)
        network = build_network(settings, data)
        per_image = None
        if with_images and settings.phase_a.learns_of_images:
            rows = settings.phase_a.rows
            buckets = Buckets(len(data.train), settings.data.num_buckets)
            numbers = None
            if to_read:
                numbers = range(buckets.count)
            per_image = ImageState(
                buckets,
                torch.zeros(network.per_image_shape),
                lr=rows.lr,
                folder=folder / "rows",
                initial_std=rows.initial_std,
                seed=settings.seed,
                numbers=numbers,
            )
        return cls(settings, data, device, network.to(device), per_image)

    @property
    def embedding(self) -> int | None:
        decoder = self.network.decoder
        return None if decoder is None else decoder.embedding

    @property
    def forms(self) -> frozenset[str]:  # type: ignore[override]  # by its settings
        forms = {"maps", "gaussians"}
        if self.settings.phase_a.per_image == "none":
            forms.add("prior")
        if self.embedding is not None:
            forms.add("embeddings")
        return frozenset(forms)

    @property
    def shape(self) -> MapShape:
        return MapShape.of(self.network)

    def parameters(self, image_ids: Tensor) -> Tensor | None:
        """The per-image parameters [B, ...] of training images, on the device."""
        return None if self.per_image is None else self.per_image.read(image_ids).to(self.device)

    def outputs(self, batch: Batch, wanted: Wanted) -> Outputs:
        """As :meth:`Teacher.outputs`; the attention costs nothing, and is always there."""
        parameters = None
        if wanted.image_ids is not None:
            parameters = self.parameters(wanted.image_ids)
        return Outputs(*self.network.forward_with_maps(batch.images, parameters, wanted.generator))

    @cached_property
    def sha256(self) -> str:
        return self.network.sha256(self.per_image)

    def notes(self) -> StoreNotes:
        passes = self.network.passes or 1
        return replace(super().notes(), mode=self.settings.phase_a.mode, label_passes=passes)

    def weights(self) -> dict[str, Tensor]:
        return self.network.weights()

    def training_state(self) -> TrainingState[GaussianViT]:
        phase = self.settings.phase_a
        network = self.network
        steps = Buckets(len(self.data.train)).steps(self.settings.data.batch_size)
        groups = []
        if phase.prior:
            groups.append({"params": [network.prior], "lr": PRIOR_LR, "weight_decay": 0.0})
        if network.decoder:
            decoder = [*network.decoder.parameters()]
            decay = phase.optim.weight_decay
            groups.append({"params": decoder, "lr": phase.optim.lr, "weight_decay": decay})
        optimizer, schedule = build_optimizer(
            network.vit, phase.optim, phase.max_epochs, steps, groups
        )
        return TrainingState(
            network,
            optimizer,
            schedule,
            phase.optim,
            choose_precision(self.settings.precision, self.device, network.vit.embed_dim),
            self.per_image,
            identity=identity(self.settings, self.data),
        )

    def training_forward(self, images: Tensor) -> Tensor:
        network = self.network
        phase = self.settings.phase_a
        parameters = None
        if phase.learns_of_images:
            parameters = torch.zeros(len(images), *network.per_image_shape, device=images.device)
        noise = None
        if phase.mode == "stochastic":
            noise = network.noise(images, None)
        return network(images, network.gaussians(parameters), noise)

    def train(self, state: TrainingState[GaussianViT], folder: Path) -> Teacher:
        """Epochs until the training accuracy enters the window or ``max_epochs`` are done."""
        settings = self.settings
        phase = settings.phase_a
        data = self.data
        per_image = self.per_image
        training = self.batches(data.train, settings.data.batch_size)
        evaluation = self.batches(data.train)
        validation = self.batches(data.val)
        augment = Augment(settings.phase_a_augment, settings.seed)
        loss_module = TeacherLoss(self)
        parameters = noise = None

        with loop(
            settings, state, training, augment, folder, "phase A", phase.max_epochs
        ) as running:
            update = running.update
            for epoch in running.epochs():
                loss_of = update.data_parallel(loss_module)
                # images [B, channels, h, w]
                for batch in training.epoch(epoch.number, augment, first=epoch.first):
                    if per_image is not None:
                        parameters = per_image.gather(batch.ids, self.device)  # leaf
                    if phase.mode == "stochastic":
                        noise = noise_of(batch, self.network)  # [B, L, H, T, 2]
                    with update.forward():
                        loss = loss_of(batch, parameters, noise)
                    scale = update.backward(loss, batch.weight)
                    update.step_if_due()
                    # an image occurs once an epoch, so its parameters step at once
                    if per_image is not None and parameters is not None:
                        per_image.update(batch.ids, per_image_gradient(parameters, scale))
                    epoch.end_batch(batch, loss=loss)
                losses = epoch.end()

                trained = replace(self, network=state.kept)
                train_acc = score_teacher(trained, evaluation, seen=True).acc
                val_acc = None  # an image that is not trained has the shared prior alone
                if phase.prior:
                    val_acc = score_teacher(trained, validation, seen=False).acc
                metrics = epoch.metrics(
                    train_loss=losses["loss"], train_acc=train_acc, val_acc=val_acc
                )
                state.finished = train_acc >= phase.stop_accuracy or running.is_last(epoch)
                running.show(epoch, losses["loss"], train=train_acc, unseen=val_acc)
                running.save(epoch, metrics)
            if per_image is not None:
                per_image.release()
        running.progress.line(f"phase A: {ending(phase, state.metrics)}")
        return replace(self, network=state.kept)


class TeacherLoss(nn.Module):
    """The loss of the teacher on a batch."""

    def __init__(self, teacher: GaussianTeacher) -> None:
        super().__init__()
        self.network = teacher.network
        self.forward_network: Callable[..., Tensor] = teacher.network
        if teacher.settings.compile:
            self.forward_network = torch.compile(teacher.network)

    def forward(self, batch: Batch, parameters: Tensor | None, noise: Tensor | None) -> Tensor:
        """The cross-entropy with the labels, mean over the batch.

        parameters   of the images, [B, *per_image_shape]; None: the shared prior alone
        noise        [B, L, H, T, 2] of one sampled pass, or None: the expected map
        """
        gaussians = self.network.gaussians(parameters)  # [B or 1, L, H, T, 4]
        gaussians = move(gaussians, batch.geometry, self.network.grid)
        logits = self.forward_network(batch.images, gaussians, noise)  # [B, C]
        return cross_entropy(logits, batch.labels)


def noise_of(batch: Batch, network: GaussianViT) -> Tensor:
    """Standard normal numbers [B, L, H, T, 2] for a sampled pass of a batch of training. Those of a
    bucket's images follow from the place of the batch and the first of them, not from the rank."""
    images = batch.images.split([size for _, size in batch.parts])
    firsts = np.cumsum([0, *(size for _, size in batch.parts)])
    noise = []
    for part, first in zip(images, batch.ids[firsts[:-1]].tolist(), strict=True):
        noise.append(network.noise(part, generator(part.device, *batch.place, first)))
    return torch.cat(noise)


def generator(device: torch.device, *entropy: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed_of(*entropy))


@torch.no_grad()
def score_teacher(teacher: GaussianTeacher, batches: Batches, *, seen: bool) -> Score:
    """Accuracy and loss of the teacher: with the per-image parameters, or (unseen images) with the
    shared prior alone. One sampled pass in ``stochastic`` mode."""
    network = teacher.network.eval()
    seed = teacher.settings.seed
    passes = None
    if network.passes is not None:
        passes = 1

    def predictions() -> Iterator[tuple[Tensor, Tensor]]:
        parameters = None
        for batch in batches.rank_batches():
            if seen:
                parameters = teacher.parameters(batch.ids)
            gaussians = network.gaussians(parameters)
            drawn = generator(teacher.device, seed, int(batch.ids[0]))  # all of one bucket
            yield network.predict(batch.images, gaussians, passes, drawn), batch.labels

    return score(predictions())


def build_network(settings: Settings, data: ImageData) -> GaussianViT:
    """A freshly started network on the CPU."""
    phase = settings.phase_a
    torch.manual_seed(settings.seed)
    vit = build_vit(settings.model, data, "gaussian")
    compression = None
    if phase.per_image == "embedding":
        compression = (phase.compression.embedding, phase.compression.hidden)
    passes = None
    if phase.mode == "stochastic":
        passes = LABEL_PASSES
    return GaussianViT(vit, phase.parametrisation, phase.prior, compression, passes)
