"""A teacher that gives predictions: any timm model that was trained before, by its own head or by a
linear probe on its features.

Axis letters: B images, C classes.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gaupipe.data.batches import Batch
from gaupipe.data.splits import ImageData, Split
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.system.messages import LOG
from gaupipe.system.progress import EpochMetrics
from gaupipe.teachers.base import Outputs, Teacher, Wanted, metrics_of_no_epoch
from gaupipe.teachers.notes import StoreNotes
from gaupipe.teachers.probe import Probe, check_probe, fit_probe, load_probe
from gaupipe.teachers.readable_vit import PROBE_INSTEAD, PredictingModel
from gaupipe.training.scores import score_model
from gaupipe.vit.inputs import SETTING, as_taken

SAMPLE = 200
"""Training images by which it is seen whether a teacher's numbers of classes are those of the data
set."""

NEAR_CHANCE = 0.2
"""A smaller part of the way from chance to no mistake is near chance."""

PROBE = "probe.pt"
"""The linear probe in the folder of phase A, where the teacher does not predict the classes."""


@dataclass
class ModelTeacher(Teacher):
    """A trained model on the data of a run. ``probe`` is None for one that predicts the classes
    itself, and for one whose predictions nobody asked for."""

    network: PredictingModel
    probe: Probe | None = None

    def begin(self, folder: Path) -> Teacher:
        """The teacher itself. Raises UserError for one whose classes were matched by number, and
        that is hardly better for some training images than to name always the same class: its
        numbers stand for other classes, or for the same ones in another order."""
        network = self.network
        if network.matched_by != "number":
            return self
        train = self.data.train
        sample = train.evenly_spaced(SAMPLE)
        right = 0
        with torch.inference_mode():
            for batch in self.batches(train).in_order(sample):
                right += int((network(batch.images).argmax(-1) == batch.labels).sum())
        accuracy = right / len(sample)
        chance = np.bincount(train.labels).max() / len(train)
        if accuracy < chance + NEAR_CHANCE * (1 - chance):
            raise UserError(
                f"{SETTING}: {network.name}: its classes are matched by number, for want of names, "
                f"and it is right for {right} of {len(sample)} training images, which is near "
                "chance: write the names of its classes as label_names into its config.json, or "
                f"{PROBE_INSTEAD}"
            )
        return self

    def load_probe(self, folder: Path) -> None:
        """Takes the probe that phase A has left in a ``folder``, if it is this teacher's."""
        if not self.network.predicts:
            self.probe = load_probe(folder / PROBE, self.source_of_probe())

    @property
    def predicts(self) -> bool:
        return self.network.predicts or self.probe is not None

    @property
    def features(self) -> int:
        return self.network.features

    @property
    def width(self) -> int:
        return int(self.network.model.num_features)

    def as_taken(self, split: Split) -> tuple[Split, ImageData]:
        return as_taken(split, self.data, self.network.takes)

    def outputs(self, batch: Batch, wanted: Wanted) -> Outputs:
        logits, features = self.network.predict(batch.images)
        return Outputs(self.probed(logits, features, wanted.image_ids), None, features)

    def probed(
        self, logits: Tensor | None, features: Tensor, image_ids: Tensor | None
    ) -> Tensor | None:
        """The teacher's own ``logits``, or those of its probe, out of fold for training images."""
        if self.probe is None:
            return logits
        if image_ids is None:
            return self.probe.logits(features).log_softmax(-1)
        return self.probe.logits_out_of_fold(features, image_ids).log_softmax(-1)

    @cached_property
    def sha256(self) -> str:
        return self.network.sha256()

    def notes(self) -> StoreNotes:
        return replace(super().notes(), probe=None if self.probe is None else self.data.sha256)

    def timed(self) -> tuple[nn.Module, int]:
        return self.network.model, self.network.takes.size

    def check_student(self) -> None:
        if self.settings.phase_b.alpha and not self.network.predicts:
            check_probe(self.data)

    def prepare(self, folder: Path) -> None:
        """Fits the probe, where one is needed, and scores the teacher once."""
        started = time.monotonic()
        began = time.process_time()
        self.prepare_export()
        probe_seconds = time.process_time() - began
        metrics = self.measure(started)
        if self.probe is not None:
            metrics["processor_seconds"] = round(probe_seconds, 3)
        if self.network.predicts:
            self.say_own_head(metrics["val_acc"] or 0.0)
        if distributed.is_main():
            folder.mkdir(exist_ok=True)
            if self.probe is not None:
                self.probe.save(folder / PROBE, self.source_of_probe())
            write_whole(folder / "metrics.jsonl", json.dumps(metrics) + "\n")

    def measure(self, started: float) -> EpochMetrics:
        """The line of metrics.jsonl; without a head for the classes its loss and training accuracy
        are None, and its validation accuracy is that of the probe, if there is one. ``started`` is
        the monotonic time when the probe began."""
        metrics = metrics_of_no_epoch()
        if self.network.predicts:
            train = score_model(self.network, self.batches(self.data.train))
            metrics["train_loss"] = train.loss
            metrics["train_acc"] = train.acc
            metrics["val_acc"] = score_model(self.network, self.batches(self.data.val)).acc
        elif self.probe is not None:
            metrics["val_acc"] = self.probe.accuracy
        seconds = time.monotonic() - started
        metrics["seconds"] = round(seconds, 3)
        metrics["images_per_s"] = round(len(self.data.train) / seconds, 1)
        return metrics

    def source_of_probe(self) -> dict[str, object]:
        """What the probe follows from."""
        return {
            "teacher": self.sha256,
            "training images": self.data.sha256,
            "validation images": self.data.val_sha256,
            "seed": self.settings.seed,
        }

    def prepare_export(self) -> None:
        """Gives a teacher that does not predict the classes of the data set a linear probe, if it
        has none yet, and says how good it is; or why there is none, where phase B can do without.
        Collective. Raises UserError where phase B cannot."""
        network = self.network
        if network.predicts or self.probe is not None:
            return
        data = self.data
        classes = network.model.num_classes
        other = f"its {classes} classes are not the" if classes else "has no head for the"
        start = f"gaupipe: {network.name}: {other} {network.num_classes} of {data.name}"
        try:
            self.probe = fit_probe(self)
        except UserError as error:
            if self.settings.phase_b.alpha or not self.forms:
                raise
            line = f"{start}: its maps are taken without predictions ({error})"
        else:
            line = (
                f"{start}: a linear probe on its features predicts them: "
                f"{100 * self.probe.accuracy:.1f} % of the validation images"
            )
        LOG.info(line)

    def say_own_head(self, accuracy: float) -> None:
        """Says how good the teacher's own predictions are, and how its classes were matched."""
        LOG.info(
            f"gaupipe: {self.network.name}: its own head predicts the classes, matched by "
            f"{self.network.matched_by}: {100 * accuracy:.1f} % of the validation images"
        )
