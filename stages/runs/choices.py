"""Settings for a folder of images that nobody has written settings for, each with its reason.

The choices depend on the facts of the folder, the machine and the settings that the user gave, on
nothing else. docs/your-own-images.md has the rules in words and what they reached.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from gaupipe.settings import FILE_IMAGE_SIZE, Settings, place
from gaupipe.data.folder_facts import FolderFacts

MINUTES = 10
"""What the trainings of a run should take: half for teacher and student, half for the baseline."""

CORE_FLOPS, GPU_FLOPS = 3e10, 5e12
"""Operations a second in training such small ViTs: of one processor core as measured, and of a GPU
as guessed, with an eye on the work that is not arithmetic."""

MODELS = ((64, 4), (64, 6), (96, 6), (128, 6))
"""(embed_dim, depth) from small to large, for processor cores."""
GPU_MODELS = (*MODELS, (192, 9), (256, 9))

ENOUGH_EPOCHS = 30
"""Epochs that a larger model should have before it is taken in place of a smaller one."""
FEWEST_EPOCHS, MOST_EPOCHS = 12, 90

MLP_RATIO, HEAD_DIM = 2, 32
LR = 2e-3

KEY_BYTES = 16
"""Of a query in a store of eight keys."""
MOST_BYTES = 2e9
"""What views may take in a store."""

PUBLISHED = "vit_small_patch8_224.dino"
"""A ViT with published weights whose maps suit any images, for the message."""

AS_SET = "as you set it"
OF_TWO_PHASES = ("phase_a.", "export.", "phase_b.epochs", "phase_b.gamma")
"""Settings that a training without a teacher does not read."""
WITHOUT_A_TEACHER = {
    "baseline.epochs": "more may help, and take longer",
    "phase_b.optim.lr": "the learning rate",
}
"""Reasons, where no teacher is trained."""

CHARACTERS = re.compile(r"(digit|letter|character|number)?[ _-]*([0-9]{1,2}|[a-zA-Z])")
"""Names of classes that are digits or letters."""


@dataclass(frozen=True)
class Machine:
    """What a training runs on."""

    cores: int
    gpu: bool = False

    @property
    def flops(self) -> float:
        return GPU_FLOPS if self.gpu else CORE_FLOPS * min(self.cores, 8)

    def __str__(self) -> str:
        if self.gpu:
            return "a GPU"
        return f"{self.cores} processor core{'s' if self.cores > 1 else ''}"


def this_machine(given: Mapping[str, Any]) -> Machine:
    """What the settings that the user gave leave of this machine."""
    import torch

    threads = _whole(given.get("threads"), torch.get_num_threads())
    device = given.get("device", "auto")
    gpu = device == "auto" and torch.cuda.is_available()
    return Machine(threads, gpu or str(device).startswith("cuda"))


@dataclass
class Choices:
    """Settings as a nested dict, ``tree``, which begins with what the user gave; and for each
    setting ``a.b`` with a choice to tell of, the reason."""

    tree: dict[str, Any]
    reasons: dict[str, str] = field(default_factory=dict)
    minutes: tuple[int, int] = (0, 0)
    """What the trainings of a run should take, and one without a teacher."""
    machine: str = ""

    def choose(self, key: str, value: Any, reason: str | None = None) -> Any:
        """Sets ``a.b`` unless the user gave it, and returns what it is. Without a reason nobody is
        told."""
        section: Any = self.tree
        *parents, leaf = key.split(".")
        for parent in parents:
            section = section.get(parent, {})
            if not isinstance(section, dict):  # the user gave null in place of the section
                return None
        if leaf in section:
            value, reason = section[leaf], reason and AS_SET
        else:
            place(self.tree, key, value, key)
        if reason:
            self.reasons[key] = reason
        return value

    def given(self, key: str) -> Any:
        """What ``a.b`` is; None where it is not set."""
        value: Any = self.tree
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def lines(self, plain: bool = False) -> list[str]:
        """'setting=value  reason' of each setting, or of those that a training without a teacher,
        ``plain``, reads."""
        reasons = self.reasons
        if plain:
            reasons = {
                key: why if why == AS_SET else WITHOUT_A_TEACHER.get(key, why)
                for key, why in reasons.items()
                if not key.startswith(OF_TWO_PHASES)
            }
        shown = [f"{key}={_inline(self.given(key))}" for key in reasons]
        width = max(map(len, shown))
        return [f"{one:<{width}}  {why}" for one, why in zip(shown, reasons.values(), strict=True)]

    def note(self, plain: bool = False) -> str:
        """How long the trainings should take, in one line."""
        what = "training" if plain else "trainings"
        return (
            f"the {what} should take about {self.minutes[plain]} min on {self.machine}, and the "
            "reading of the images besides; 'gaupipe plan' measures it"
        )

    def as_yaml(self, head: str) -> str:
        """The settings as a YAML file with the reasons as comments."""
        return "".join(f"# {line}\n" for line in head.splitlines()) + self._yaml(self.tree, "")

    def _yaml(self, tree: Mapping[str, Any], above: str) -> str:
        text = ""
        for name, value in tree.items():
            key, pad = f"{above}{name}", "  " * above.count(".")
            if reason := self.reasons.get(key):
                text += f"{pad}# {reason}\n"
            if isinstance(value, dict) and value:
                text += f"{pad}{name}:\n{self._yaml(value, f'{key}.')}"
            else:
                text += f"{pad}{name}: {_inline(value)}\n"
        return text


def choose(
    facts: FolderFacts, root: str, machine: Machine, given: Mapping[str, Any] | None = None
) -> Choices:
    """Settings for the folder of images ``root``. ``given`` is what the user set, as a nested dict:
    it stays, and the other choices follow it."""
    chosen = Choices(copy.deepcopy(dict(given or {})))
    chosen.choose("data.name", "folder")
    chosen.choose("data.root", root)
    images = _choose_images(chosen, facts)
    size, patch = _choose_sizes(chosen, facts, machine)
    flops, maps = _choose_model(chosen, images, (size // patch) ** 2, patch, machine)
    _choose_epochs(chosen, images, flops, machine)
    _choose_augmentation(chosen, facts, size)
    _choose_views(chosen, images, maps * (size // patch) ** 2)
    _choose_optimizer(chosen, images)
    sections = [name for name in Settings.model_fields if name in chosen.tree]
    chosen.tree = {name: chosen.tree[name] for name in dict.fromkeys([*sections, *chosen.tree])}
    return chosen


def _choose_images(chosen: Choices, facts: FolderFacts) -> int:
    """Which images are for validation. Returns the number of those left for training."""
    images = facts.images
    if facts.val is None:
        few = images < 1000
        share = max(0.2 if few else 0.1, math.ceil(100 * len(facts.counts) / images) / 100)
        reason = f"this share of the {images:,} training images is for validation"
        if few:
            reason += "; a tenth of so few would say little"
        share = chosen.choose("data.val_fraction", min(share, 0.5), reason)
        held_out = share if isinstance(share, float) and 0 < share < 1 else 0.1
        images = max(1, images - math.ceil(images * held_out))
    return min(images, _whole(chosen.given("data.train_images"), images))


def _choose_sizes(chosen: Choices, facts: FolderFacts, machine: Machine) -> tuple[int, int]:
    """Sizes of an image and of a patch, in pixels."""
    shorter = facts.shorter
    if shorter >= 48:
        size = 128 if machine.gpu and shorter >= 128 else 64
        reason = f"of images of {facts.width} x {facts.height} pixels; larger ones take longer"
    else:
        size = max(8, shorter // 4 * 4)
        reason = f"of images of {facts.width} x {facts.height} pixels"
    size = chosen.choose("data.image_size", size, reason)
    size = _whole(size, FILE_IMAGE_SIZE if size is None else facts.shorter)
    wanted = 2 if size < 24 else 4 if size < 48 else 8 if size < 144 else 16
    fitting = [patch for patch in range(-(-wanted // 2), 2 * wanted + 1) if size % patch == 0]
    # where none fits, the settings are refused with sizes that would
    patch = min(fitting, key=lambda patch: abs(patch - wanted), default=min(wanted, size))
    reason = f"{size // patch} x {size // patch} tokens; smaller patches take longer"
    taken = _whole(chosen.choose("model.args.patch_size", patch, reason), patch)
    return size, min(size, taken)


def _choose_model(
    chosen: Choices, images: int, tokens: int, patch: int, machine: Machine
) -> tuple[float, int]:
    """The largest ViT that has enough epochs. Returns the operations of an image in training, and
    the number of its attention maps."""
    if (named := chosen.given("model.name")) is not None:
        *sizes, mlp_ratio = _own_sizes(named)
        names = ("embed_dim", "depth", "num_heads")
        dim, depth, heads = (
            _whole(chosen.given(f"model.args.{name}"), own)
            for name, own in zip(names, sizes, strict=True)
        )
        return training_flops(tokens, patch, dim, depth, mlp_ratio), depth * heads
    chosen.choose("model.name", "gauvit_pico_patch2_8")
    models = GPU_MODELS if machine.gpu else MODELS
    fast_enough = [
        (dim, depth)
        for dim, depth in models
        if epochs_that_fit(images, training_flops(tokens, patch, dim, depth), machine)
        >= ENOUGH_EPOCHS
    ]
    dim, depth = max(fast_enough, default=models[0])
    reason = f"the width, for {images:,} training images on {machine}"
    dim = _whole(chosen.choose("model.args.embed_dim", dim, reason), dim)
    depth = _whole(chosen.choose("model.args.depth", depth, "the number of blocks"), depth)
    heads = next(n for n in range(max(1, dim // HEAD_DIM), 0, -1) if dim % n == 0)
    heads = _whole(chosen.choose("model.args.num_heads", heads), heads)
    chosen.choose("model.args.mlp_ratio", MLP_RATIO)
    chosen.choose(
        "model.init",
        "mimetic",
        "attention starts as trained attention looks; normal starts at random",
    )
    return training_flops(tokens, patch, dim, depth), depth * heads


def _own_sizes(name: Any) -> tuple[int, int, int, float]:
    """Width, blocks, heads and MLP ratio of a ViT that the user named; of a small one for a name
    that the settings refuse."""
    import timm
    import torch

    import gaupipe.vit.models  # noqa: F401  (timm learns gaupipe's names)

    if isinstance(name, str) and timm.is_model(name):
        with torch.device("meta"), contextlib.suppress(AttributeError, RuntimeError):  # no ViT
            vit: Any = timm.create_model(name)
            block, dim = vit.blocks[0], vit.embed_dim
            return dim, len(vit.blocks), block.attn.num_heads, block.mlp.fc1.out_features / dim
    return (*MODELS[0], MODELS[0][0] // HEAD_DIM, MLP_RATIO)


def _choose_epochs(chosen: Choices, images: int, flops: float, machine: Machine) -> None:
    """A teacher, a student with twice the teacher's epochs, and a baseline with both's."""
    together = epochs_that_fit(images, flops, machine)
    together = min(max(together, FEWEST_EPOCHS), MOST_EPOCHS)
    teacher = chosen.choose(
        "phase_a.teacher",
        "vit",
        "trained on these images; published weights may know more, such as "
        f"--teacher {PUBLISHED} --download",
    )
    chosen.choose("phase_a.stop_accuracy", 1.0)
    if not chosen.given("phase_b.attention_options"):  # which are the default attention's
        chosen.choose(
            "phase_b.student",
            "belief",
            "its attention; ended above standard, which timm loads without gaupipe",
        )
    student = chosen.choose(
        "phase_b.epochs", round(together * 2 / 3), "of the student; more may help, and take longer"
    )
    student = _whole(student, 1)
    of_teacher = chosen.choose(
        "phase_a.max_epochs", max(1, student // 2), "of the teacher, half of the student's"
    )
    both = student + _whole(of_teacher, 1) * (teacher in ("vit", "gaussian"))
    baseline = chosen.choose(
        "baseline.epochs", both, "of the baseline, as many as teacher and student have together"
    )
    plain = _whole(baseline, 0)
    whole = both + plain * (chosen.given("baseline.enabled") is not False)
    of_epoch = images * flops / machine.flops / 60
    chosen.minutes = math.ceil(whole * of_epoch), math.ceil(plain * of_epoch)
    chosen.machine = str(machine)
    _choose_losses(chosen, teacher, student)


def _choose_losses(chosen: Choices, teacher: Any, student: int) -> None:
    """The student's: labels always, maps at first."""
    chosen.choose("phase_b.alpha", 0.0)
    chosen.choose("phase_b.beta", 1.0)
    chosen.choose(
        "phase_b.gamma", 0.3, "the weight of the teacher's attention maps; 0 does without them"
    )
    schedule = chosen.choose("phase_b.gamma_schedule", "stop_after")
    if schedule == "stop_after" and chosen.given("phase_b.gamma"):
        reason = "the student learns from the maps in these first epochs"
        chosen.choose("phase_b.gamma_epochs", max(1, student // 3), reason)
    if teacher == "gaussian":
        chosen.choose("phase_a.per_image", "none")
    elif teacher != "vit" and not str(teacher).startswith("local-dir:"):
        chosen.choose("phase_a.teacher_args.num_classes", 0)  # it knows other classes
        size = chosen.given("data.image_size")
        chosen.choose("phase_a.teacher_args.img_size", size)
        chosen.choose("phase_b.mean_heads", True)
        chosen.choose("phase_b.match_grid", True)


def _choose_augmentation(chosen: Choices, facts: FolderFacts, size: int) -> None:
    characters = all(CHARACTERS.fullmatch(name) for name in facts.counts)
    reason = (
        "the classes look like digits or letters, which a mirror changes"
        if characters
        else "mirrors half of the images; false if left and right matter"
    )
    chosen.choose("augment.flip", not characters, reason)
    crop = "pixels by which an image is shifted at most"
    chosen.choose("augment.crop_padding", size // 8, crop)
    chosen.choose("phase_a.augment", True)


def _choose_views(chosen: Choices, images: int, rows: int) -> None:
    """Maps of the views themselves where shifts would move those of the images; ``rows`` are the
    queries of an image, over all blocks and heads."""
    learns = (
        chosen.given("phase_b.gamma") and chosen.given("phase_b.gamma_schedule") == "stop_after"
    )
    epochs = _whole(chosen.given("phase_b.gamma_epochs"), 1)
    if not learns or chosen.given("phase_a.teacher") != "vit":
        return
    if not chosen.given("augment.crop_padding") or chosen.given("phase_b.alpha"):
        return
    of_view = KEY_BYTES * rows
    views = min(max(2, epochs), int(MOST_BYTES / (images * of_view)))
    if views > 1:
        reason = "maps of so many views of each image are stored; moved maps fit shifts badly"
        chosen.choose("export.views", views, reason)


def _choose_optimizer(chosen: Choices, images: int) -> None:
    batch = 32 if images < 1000 else 64 if images < 10_000 else 128
    reason = f"images in a step; steps in an epoch: {-(-images // batch):,}"
    chosen.choose("data.batch_size", batch, reason)
    chosen.choose("phase_b.optim.lr", LR, "the learning rate, also of teacher and baseline")
    chosen.choose("phase_a.optim.lr", LR)


def epochs_that_fit(images: int, flops: float, machine: Machine) -> int:
    """Epochs in half of :data:`MINUTES`."""
    return int(MINUTES * 60 / 2 * machine.flops / (images * flops))


def training_flops(
    tokens: int, patch: int, dim: int, depth: int, mlp_ratio: float = MLP_RATIO
) -> float:
    """Operations for one image in one step of training: three times those of the forward pass."""
    block = 2 * (4 + 2 * mlp_ratio) * dim**2 + 4 * tokens * dim
    return 3.0 * tokens * (depth * block + 2 * 3 * patch**2 * dim)


def _whole(value: Any, otherwise: int) -> int:
    """A whole number that the user gave; ``otherwise`` for anything that the settings refuse."""
    usable = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if usable else otherwise


def _inline(value: Any) -> str:
    """A value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.removesuffix("...\n").strip()
