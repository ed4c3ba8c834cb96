"""Settings for a folder of images that nobody has written settings for, each with its reason.

They follow from the size of the images, their number, the names of the classes, whether there is a
GPU, and the settings that the user gave: rows of the tables in presets.py, and what is computed of
them here. docs/your-own-images.md has the measurements.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gaupipe.data.folder import FolderFacts
from gaupipe.settings import FILE_IMAGE_SIZE
from gaupipe.settings.load import Tree, set_value
from gaupipe.settings.teachers import TEACHERS, teacher_kind
from gaupipe.system.files import from_here
from stages.runs import presets
from stages.runs.presets import Preset

WITH_A_TEACHER = ("phase_a.", "export.", "phase_b.")
"""Settings that a training without a teacher does not read."""

CHARACTERS = re.compile(r"(digit|letter|character|number)?[ _-]*([0-9]{1,2}|[a-zA-Z])")
"""Names of classes that are digits or letters."""


def is_given(teacher: Any) -> bool:
    """True for the name of a teacher that was trained before."""
    return isinstance(teacher, str) and teacher not in TEACHERS


@dataclass
class Choices:
    """Settings as a nested dict, at first those of the user; and reasons to tell the user."""

    tree: Tree
    reasons: dict[str, str] = field(default_factory=dict)
    chosen: list[str] = field(default_factory=list)
    """Names of the settings that the user left open."""

    def choose(self, key: str, value: Any, reason: str = "") -> Any:
        """Sets ``a.b`` unless the user gave it, and returns its value."""
        is_open = self.given(key, self) is self  # None is a value that a user may give
        if is_open:
            set_value(self.tree, key, value, key)
            self.chosen.append(key)
        if reason:
            self.reasons[key] = reason if is_open else "as you set it"
        return self.given(key)

    def take(self, preset: Preset, below: str = "") -> None:
        """Chooses all settings of a preset, whose names stand ``below`` a section."""
        for key, (value, reason) in preset.items():
            self.choose(f"{below}{key}", value, reason)

    def given(self, key: str, otherwise: Any = None) -> Any:
        """The value of ``a.b``; ``otherwise`` where it is not set."""
        value: Any = self.tree
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                return otherwise
            value = value[name]
        return value

    def lines(self, plain: bool = False) -> list[str]:
        """'setting=value  reason' of each setting, or of those that a training without a teacher,
        ``plain``, reads."""
        keys = [key for key in self.reasons if not (plain and key.startswith(WITH_A_TEACHER))]
        shown = {key: f"{key}={json.dumps(self.given(key))}".replace('"', "") for key in keys}
        width = min(40, max(map(len, shown.values()), default=0))  # a folder may be longer
        return [f"{shown[key]:<{width}}  {self.reasons[key]}" for key in keys]


def choose(
    facts: FolderFacts,
    place: Mapping[str, str | None],
    gpu: bool,
    given: dict[str, Any],
    *,
    paper: bool = False,
) -> Choices:
    """Settings for the images in ``place``, of ``data.name`` and ``data.root``. ``given`` is what
    the user set, as a nested dict: it stays, and the other choices follow it. Where the user names
    no teacher, and all images have labels, ``paper`` takes the GauTransformer paper's, and else
    evidence decides."""
    choices = Choices(given)
    for name, value in place.items():
        choices.choose(f"data.{name}", value)
    images = _choose_images(choices, facts)
    if not str(choices.given("model.name", "gauvit_")).startswith("gauvit_"):
        _choose_fine_tuning(choices, images, facts.counts)
        return choices
    dim, depth, seen = presets.GPU_MODEL if gpu else presets.MODEL
    sizes = presets.GPU_SIZES if gpu else presets.SIZES
    size, tokens = _choose_sizes(choices, facts, sizes, presets.STEM)
    maps = _choose_model(choices, dim, depth)
    if choices.given("phase_a.fine_tune_epochs"):
        choices.choose("phase_a.stop_accuracy", 1.0)
        choices.take(presets.OPTIMIZER_OF_FINE_TUNING, "phase_a.optim.")
    if facts.unlabelled or _learns_predictions(choices):
        _choose_predictions(choices, images, facts.unlabelled, seen)
    else:
        _choose_training(choices, images, epochs_of(images, seen), tokens, paper)
    query_bytes = 2 * max(8, tokens // 4)  # in a store of a quarter of the keys
    view_bytes = images * tokens * maps * query_bytes
    _choose_augmentation(choices, images, facts.counts, size, view_bytes)
    return choices


def _choose_images(choices: Choices, facts: FolderFacts) -> int:
    """Chooses the share of validation images. Returns the number of training images."""
    images = max(1, facts.images)  # 0 if all are copies, which whoever splits them refuses
    if facts.val is None:
        share = 0.2 if images < 1000 else 0.1
        one_of_each_class = math.ceil(100 * len(facts.counts) / images) / 100
        share = min(max(share, one_of_each_class), 0.5)
        reason = f"this share of the {images:,} training images is for validation"
        share = choices.choose("data.val_fraction", share, reason)
        images = max(1, images - math.ceil(images * share))
    return min(images, choices.given("data.train_images") or images)


def _choose_sizes(choices: Choices, facts: FolderFacts, table: Any, stem: str) -> tuple[int, int]:
    """Chooses the sizes of images and patches, and a ``stem`` that they allow. Returns pixels of a
    side, and tokens."""
    size = next(row[1] for row in table if facts.shorter >= row[0])
    if size is None:
        size = max(8, facts.shorter // 4 * 4)
    reason = f"of images of {facts.width} x {facts.height} pixels; larger ones take longer"
    size = choices.choose("data.image_size", size, reason) or FILE_IMAGE_SIZE

    # the patch nearest to the best one of those that divide the image
    best = 16
    if size <= 128:
        best = next(row[2] for row in table if size >= row[0])
    fitting = [patch for patch in range(1, 2 * best + 1) if size % patch == 0]
    halved = [patch for patch in fitting if _is_halved(patch)]
    if choices.given("model.stem", "patch") != "patch" and halved:
        fitting = halved
    patch = min(fitting, key=lambda patch: abs(patch - best))
    reason = f"{size // patch} x {size // patch} tokens; smaller patches take longer"
    patch = choices.choose("model.args.patch_size", patch, reason)

    if stem != "patch" and _is_halved(patch):
        choices.choose("model.stem", stem, "convolutions in place of the patch embedding")

    if not isinstance(patch, int):  # a user may give (height, width)
        patch = max(patch, default=1)
    patch = min(size, patch)
    return size, (size // patch) ** 2


def _is_halved(patch: Any) -> bool:
    """True for patches that a convolutional stem can make: it halves the image several times."""
    return isinstance(patch, int) and patch > 1 and patch.bit_count() == 1


def _choose_model(choices: Choices, dim: int, depth: int) -> int:
    """Chooses the ViT. Returns how many attention maps it has; as many as DeiT-B if it is given."""
    if choices.given("model.name") is not None:
        return 144
    choices.choose("model.name", "gauvit_pico_patch2_8")
    dim = choices.choose("model.args.embed_dim", dim, "the width")
    depth = choices.choose("model.args.depth", depth, "the number of blocks")
    heads: int = next(number for number in range(max(1, dim // 32), 0, -1) if dim % number == 0)
    heads = choices.choose("model.args.num_heads", heads)
    choices.choose("model.args.mlp_ratio", 2)
    return depth * heads


def _learns_predictions(choices: Choices) -> bool:
    """True for a teacher of which predictions alone are learned: one without maps, and a trained
    one unless the user asks for its maps."""
    teacher = choices.given("phase_a.teacher")
    if not is_given(teacher):
        return isinstance(teacher, str) and not teacher_kind(teacher).shows_maps
    asks_for_maps = (
        choices.given("phase_b.gamma")
        or choices.given("phase_b.alpha") == 0
        or choices.given("export.kind", "predictions") != "predictions"
    )
    return not asks_for_maps


def _choose_fine_tuning(choices: Choices, images: int, classes: Iterable[str]) -> None:
    """Chooses a training from published weights, with images of the size that they expect."""
    sizes = {"embed_dim", "depth", "num_heads", "mlp_ratio"}
    if sizes & {*choices.given("model.args", {})}:  # it has to learn again what a slice has lost
        choices.reasons["model.name"] = "a slice of its weights, and the images that it expects"
        epochs = epochs_of(images, presets.MODEL[-1])
        choices.choose("train.epochs", epochs, "of the training, as from the start")
        _choose_rate(choices, "train.optim", presets.MUON_RATE)
    else:
        choices.reasons["model.name"] = "its weights, a new head, and the images that it expects"
        choices.choose("train.epochs", presets.FINE_TUNING_EPOCHS, "of the training")
        choices.take(presets.OPTIMIZER_OF_FINE_TUNING, "train.optim.")
    _choose_batch(choices, images)
    _choose_flip(choices, classes)
    reason = "a random part of each image, of at least this area"
    choices.choose("augment.resized_crop", {"scale": [0.5, 1.0]}, reason)


def _choose_batch(choices: Choices, images: int, batch: int | None = None) -> None:
    """Chooses the size of a batch, by the number of images in an epoch unless it is given."""
    if batch is None:
        batch = next(size for fewer, size in presets.BATCHES if images < fewer)
    choices.choose("data.batch_size", batch, f"images in a step, of {images:,} in an epoch")


def _choose_flip(choices: Choices, classes: Iterable[str]) -> None:
    characters = all(CHARACTERS.fullmatch(name) for name in classes)
    reason = "mirrors half of the images; false for digits, letters"
    choices.choose("augment.flip", not characters, reason)


def epochs_of(images: int, seen: int) -> int:
    """The epochs that show a model so many images in all."""
    return min(max(seen // images, presets.FEWEST_EPOCHS), presets.MOST_EPOCHS)


def _choose_predictions(choices: Choices, images: int, unlabelled: int, seen: int) -> None:
    """Chooses a student that learns from a teacher's predictions, and a teacher of images without
    labels. Beside these the labels weigh as much as their share of the images."""
    choices.take(presets.RESNET)
    teacher = choices.given("phase_a.teacher")
    choices.choose("model.attention", "standard", "its attention; another one is --student NAME")
    labels_epochs = epochs_of(images, seen)
    if teacher_kind(teacher).trained:
        choices.choose("phase_a.stop_accuracy", 1.0)
        choices.choose("phase_a.max_epochs", labels_epochs, "of the teacher, on the labels")
    if teacher == "resnet":
        _choose_rate(choices, "phase_a.optim", presets.RESNET_RATE)
    both = images + unlabelled
    epochs = labels_epochs
    share = presets.SHARE_OF_LABELS
    reason = "the weight of the labels"
    if unlabelled:
        epochs = max(presets.SEEN_OF_MANY // both, presets.FEWEST_EPOCHS_OF_MANY)
        epochs = min(epochs, presets.MOST_EPOCHS)
        share = max(presets.SMALLEST_SHARE, round(images / both, 2))
        reason += ": the share of their images"
    if choices.given("train.epochs") is None:  # else it is the student's, too
        choices.choose("phase_b.epochs", epochs, f"which show it {epochs * both:,} images")
        choices.choose("train.epochs", labels_epochs, "of the baseline, on the labels alone")
    epochs = choices.given("phase_b.epochs") or choices.given("train.epochs")
    choices.choose("phase_b.beta", share, reason)
    choices.choose("phase_b.alpha", round(1 - share, 2), "the weight of the teacher's predictions")
    if not choices.given("phase_b.gamma"):
        choices.take(presets.PREDICTIONS)
    elif is_given(teacher):
        choices.choose("phase_b.head_map", "mean", presets.HEADS)
    _choose_batch(choices, both, presets.BATCH_OF_MANY if unlabelled else None)
    _choose_optimizer(choices, epochs)


def _choose_training(choices: Choices, images: int, epochs: int, tokens: int, paper: bool) -> None:
    """Chooses a teacher, a student with twice the epochs of one that is trained here, and a
    baseline with those of both."""
    choices.take(presets.PAPERS if paper else presets.LOCAL)
    teacher = choices.given("phase_a.teacher")
    choices.choose("model.attention", "standard", "its attention; another one is --student NAME")
    if choices.given("train.epochs") is None:  # else it is the student's, too
        student_epochs = epochs
        if teacher_kind(teacher).trained:  # which take a third of the time
            student_epochs = round(epochs * 2 / 3)
        choices.choose("phase_b.epochs", student_epochs, "of the student")
    student_epochs = choices.given("phase_b.epochs") or choices.given("train.epochs") or epochs
    epochs = student_epochs
    if teacher_kind(teacher).trained:
        teacher_epochs = max(1, student_epochs // 2)
        epochs += choices.choose("phase_a.max_epochs", teacher_epochs, "of the teacher, at most")
    choices.choose("train.epochs", epochs, f"which show a ViT {epochs * images:,} images")
    if teacher == "gaussian":
        _choose_the_papers(choices, tokens)
    else:
        _choose_maps(choices, teacher, student_epochs)
    _choose_batch(choices, images)
    _choose_optimizer(choices, student_epochs)


def _choose_the_papers(choices: Choices, tokens: int) -> None:
    """Chooses the GauTransformer paper's phase A, with a decoder that suits the ViT, and the
    weights of its three losses."""
    choices.take(presets.PAPERS_TEACHER)
    per_image = choices.given("phase_a.per_image")
    if per_image != "none":
        choices.choose("phase_a.prior", False)
    if per_image == "embedding":
        gaussians = tokens * choices.given("model.args.num_heads", 12)
        embedding, hidden = next(row[1:] for row in presets.COMPRESSION if gaussians < row[0])
        choices.choose("phase_a.compression.embedding", embedding, "numbers of this vector")
        choices.choose("phase_a.compression.hidden", hidden, "the width of the decoder")
        choices.take(presets.PAPERS_ROWS)
    losses = dict(presets.PAPERS_LOSSES)
    if choices.given("phase_b.gamma_epochs"):  # which a constant gamma would not read
        losses["phase_b.gamma_schedule"] = ("stop_after", "because you set gamma_epochs")
    choices.take(losses)


def _choose_maps(choices: Choices, teacher: str, student_epochs: int) -> None:
    """Chooses a training from labels and, at first, from the maps of any other teacher."""
    if is_given(teacher):
        choices.choose("phase_b.head_map", "mean", presets.HEADS)
    else:
        choices.choose("phase_a.stop_accuracy", 1.0)
    choices.take(presets.MAPS)
    weight, share = presets.LOCAL_MAPS
    if teacher_kind(teacher).stored:
        weight, share = presets.STORED_MAPS
    gamma = choices.choose("phase_b.gamma", weight, "the weight of the teacher's attention maps")
    schedule = choices.choose("phase_b.gamma_schedule", "stop_after")
    if schedule == "stop_after" and gamma:
        gamma_epochs = max(1, int(share * student_epochs))
        if is_given(teacher):
            gamma_epochs = min(gamma_epochs, presets.MOST_VIEWS)
        choices.choose("phase_b.gamma_epochs", gamma_epochs, "epochs with these maps")
    if teacher == "local":
        heads = choices.given("model.args.num_heads")
        reason = "the width of its Gaussians in tokens, by head"
        stds = presets.LOCAL_STDS.get(heads, presets.STDS_OF_MORE_HEADS)
        choices.choose("phase_a.local.std", stds, reason)


def _choose_rate(choices: Choices, section: str, of_muon: float) -> None:
    """Chooses the learning rate of the optimizer in a ``section``, timm's Muon by default."""
    optimizer = choices.given(f"{section}.name", "muon")
    if optimizer == "muon":
        choices.choose(f"{section}.lr", of_muon, "the learning rate, of timm's Muon")
    else:
        reason = f"the learning rate; try what suits {optimizer}"
        choices.choose(f"{section}.lr", presets.OTHER_RATE, reason)


def _choose_optimizer(choices: Choices, student_epochs: int) -> None:
    """Chooses the learning rate, and the schedule of timm's Muon unless an optimizer is given."""
    _choose_rate(choices, "train.optim", presets.MUON_RATE)
    if choices.given("train.optim.name") is None:
        warmup = min(4, student_epochs // 4)
        choices.choose("train.optim.warmup_epochs", warmup, "epochs until it is reached")
        choices.choose("train.optim.weight_decay", 0.1, "keeps the weights small")


def _choose_augmentation(
    choices: Choices, images: int, classes: Iterable[str], size: int, view_bytes: int
) -> None:
    """Chooses flips and shifts, RandAugment for few images, and maps of views where shifts would
    move those of the images."""
    _choose_flip(choices, classes)
    reason = "pixels by which an image is shifted at most"
    choices.choose("augment.crop_padding", size // 8, reason)
    choices.choose("phase_a.augment", True)

    epochs = choices.given("phase_b.gamma_epochs")
    alpha_epochs: float = 0
    if choices.given("phase_b.alpha"):
        alpha_epochs = choices.given("phase_b.alpha_epochs") or math.inf
    # predictions after the maps would go on showing a student the stored views alone
    learns = choices.given("phase_b.gamma") and epochs and alpha_epochs <= epochs

    teacher = choices.given("phase_a.teacher")
    moves = choices.given("augment.crop_padding") and teacher_kind(teacher).shows_views
    most = int(presets.MOST_BYTES / view_bytes)
    if learns and moves and most > 1:
        views = min(max(2, epochs), most)
        reason = "views of each image whose maps are stored; moved maps fit shifts badly"
        choices.choose("export.views", views, reason)

    if is_given(teacher) and "export.kind" not in choices.chosen:
        reason = "a quarter of each query's keys, those with the largest attention"
        choices.choose("export.kind", "topk", reason)

    if teacher == "local" and images < presets.RANDAUGMENT_IMAGES:
        reason = "one operation on each image, because there are few"
        choices.choose("augment.randaugment", {"ops": 1, "magnitude": 6.0}, reason)


def fine_tuning(folder: Path) -> list[str]:
    """The command that fine-tunes a pretrained ViT on the images of a folder."""
    model = ["--model", presets.PRETRAINED, "--download"]
    return ["gaupipe", "train", "--data", from_here(folder), *model]


def has_gpu(given: Mapping[str, Any]) -> bool:
    """True where the settings that the user gave leave a GPU to train on."""
    import torch

    device = given.get("device", "auto")
    return str(device).startswith("cuda") or (device == "auto" and torch.cuda.is_available())
