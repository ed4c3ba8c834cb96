"""What stored predictions of images without labels give a small ViT, and the controls beside it.

    python benchmarks/unlabelled.py prepare CIFAR-10-images CACHE \\
        --teacher local-dir:deit_tiny_in1k
    python benchmarks/unlabelled.py more CIFAR-10-images CACHE tiny-imagenet-200/train \\
        --teacher local-dir:deit_tiny_in1k
    python benchmarks/unlabelled.py train CACHE predictions --seed 1
    python benchmarks/unlabelled.py rows

``prepare`` reads the images once, takes the teacher's features (192 pixels) and attention maps (128
pixels, 8 x 8 patches) of the images as they are, and writes them to CACHE. ``more`` adds what some
rows need besides: 20,000 images of other things, and 128 pixels for the teacher. ``train`` trains
one of :data:`ROWS` with one thread and prints it as one line of JSON; rows "of views" and "of mixed
images" take a ``--teacher``, which sees those of each step, and so does "slice". Of the training
images 3,000 keep their labels (300 a class), 2,000 are validation images and 20,000 or 45,000
others have none; 5,000 test images are drawn once. Every training begins with the same images; a
seed changes the weights at the start, the views and the order.

Core seconds are the processor's, with those of what the row needs of a teacher: its pass over the
images, or its own training.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gaupipe.vit.jit  # noqa: F401  (timm learns gaupipe's names)
from gaupipe.distillation.losses import FeatureLoss, TeacherMaps, drawn_queries
from gaupipe.distillation.warm_start import start_from_teacher
from gaupipe.maps.gaussians import Geometry
from gaupipe.maps.stored import StoredRows, select_queries
from gaupipe.settings import OptimSettings
from gaupipe.teachers.probe import FOLDS, Probe, fit, stratified
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.scores import packed
from gaupipe.vit.forward import forward_with_maps
from gaupipe.vit.slicing import spread_of_stream

CLASSES = 10
VALIDATION = 200  # of each class
UNLABELLED = 20_000
TEST = 5_000
GRID = (8, 8)
BLOCKS = (0, 4, 7, 11)  # of DeiT-Ti's twelve, for the four of the student
BATCH_SIZE = 64
MEAN = torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]
STD = torch.tensor([0.247, 0.243, 0.262])[:, None, None]


@dataclass(frozen=True)
class Row:
    """A training. ``targets`` names whose predictions the images without labels have (all of them
    are left out where it is None), ``own`` whose the labelled ones have beside their labels."""

    epochs: int = 10
    targets: str | None = None
    own: str | None = None
    labels: int = 3_000
    unlabelled: int = UNLABELLED
    of_other_things: bool = False
    """The images without labels are Tiny ImageNet's."""
    teacher_pixels: int = 192
    shuffled: bool = False
    hard: bool = False
    """The most probable class in place of the probabilities."""
    soft_temperature: float = 1.0
    label_weight: float = 0.0
    """The labels' share of the loss, of which the predictions have the rest; 0: the share of the
    labelled images, so that all images count the same."""
    maps: str | None = None
    """Whose maps are learned: deit's, or a Gaussian ViT's."""
    of_other_images: bool = False
    gamma: float = 1.0
    map_epochs: int = 4
    predicted_views: bool = False
    """The teacher predicts each step's views of the images without labels, not the images once."""
    mixed: bool = False
    """Images without labels are mixed in pairs (Mixup, alpha 1): so are their predictions, unless
    the teacher predicts the mixture."""
    maps_of_views: bool = False
    queries: int = 64
    """Of the 64 patches those whose maps are compared in a step."""
    network: str = "conv"  # or residual, patch, the ViT's stem; or resnet
    sliced: bool = False
    """The ViT starts as a slice of the teacher's weights."""
    attention: str = "standard"
    more_blocks: int = 0
    """Further residual blocks in each stage of the residual stem."""
    fine_blocks: int = 0
    """The first blocks of the ViT, that see 16 x 16 tokens, which are then averaged."""
    lr: float = 4e-3
    depth: int = 4
    width: int = 64
    alpha: float = 0.5


ROWS = {
    "labels": Row(epochs=30),
    "labels, as many updates": Row(epochs=78),
    "labels, as many core seconds": Row(epochs=160),
    "predictions of the labelled images": Row(epochs=30, own="deit"),
    "narrow ResNet's predictions of the labelled images": Row(epochs=30, own="resnet"),
    "predictions": Row(targets="deit"),
    "shuffled predictions": Row(targets="deit", shuffled=True),
    "narrow ResNet's predictions": Row(targets="resnet"),
    "the ViT's own predictions": Row(targets="vit"),
    "predictions and maps": Row(targets="deit", maps="deit"),
    "predictions and maps of 16 queries": Row(targets="deit", maps="deit", queries=16),
    "predictions and maps of views": Row(targets="deit", maps="deit", maps_of_views=True),
    "predictions and other images' maps": Row(targets="deit", maps="deit", of_other_images=True),
    "predictions and Gaussians": Row(targets="deit", maps="gaussian"),
    "predictions and other images' Gaussians": Row(
        targets="deit", maps="gaussian", of_other_images=True
    ),
    "Gaussian ViT": Row(targets="deit", attention="gaussian"),
    "narrow ResNet, labels": Row(epochs=30, network="resnet", lr=0.016),
    "narrow ResNet, predictions": Row(targets="deit", network="resnet", lr=0.016),
    "300 labels": Row(epochs=200, labels=300),
    "300 labels, predictions": Row(targets="deit", labels=300),
    "1,000 labels": Row(epochs=90, labels=1_000),
    "1,000 labels, predictions": Row(targets="deit", labels=1_000),
    "predictions, teacher at 128 pixels": Row(targets="deit", teacher_pixels=128),
    "predictions of views, teacher at 128 pixels": Row(
        targets="deit", teacher_pixels=128, predicted_views=True
    ),
    "predictions of 45,000 images, teacher at 128 pixels": Row(
        targets="deit", teacher_pixels=128, unlabelled=45_000
    ),
    "predictions, mixed images": Row(targets="deit", mixed=True),
    "predictions of mixed images, teacher at 128 pixels": Row(
        targets="deit", teacher_pixels=128, predicted_views=True, mixed=True
    ),
    "predictions of other things": Row(targets="deit", of_other_things=True),
    "predictions, the most probable class": Row(targets="deit", hard=True),
    "predictions, temperature 2": Row(targets="deit", soft_temperature=2),
    "predictions, labels' weight .3": Row(targets="deit", label_weight=0.3),
    "predictions, labels' weight .5": Row(targets="deit", label_weight=0.5),
    "residual stem, labels": Row(epochs=30, network="residual"),
    "residual stem, predictions": Row(targets="deit", network="residual"),
    "conv stem, as many core seconds": Row(epochs=18, targets="deit"),
    "conv stem, 8 blocks": Row(targets="deit", depth=8),
    "conv stem, width 96": Row(targets="deit", width=96),
    "conv stem, two blocks of 16 x 16 tokens": Row(targets="deit", fine_blocks=2),
    "patches": Row(targets="deit", network="patch"),
    "slice": Row(targets="deit", network="patch", sliced=True),
    "residual stem, 2 blocks, labels": Row(epochs=30, network="residual", depth=2),
    "residual stem, 2 blocks": Row(targets="deit", network="residual", depth=2),
    "residual stem, twice the residual blocks, 2 blocks": Row(
        targets="deit", network="residual", depth=2, more_blocks=1
    ),
    "residual stem, twice the residual blocks": Row(
        targets="deit", network="residual", more_blocks=1
    ),
    "residual stem, 20 epochs": Row(targets="deit", network="residual", epochs=20),
    "residual stem, twice the rate": Row(targets="deit", network="residual", lr=8e-3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    prepare_command = commands.add_parser("prepare")
    prepare_command.add_argument("folder", type=Path, help="train/CLASS/*.jpg and test/CLASS/*.jpg")
    prepare_command.add_argument("cache", type=Path)
    prepare_command.add_argument("--teacher", required=True)
    more_command = commands.add_parser("more")
    more_command.add_argument("folder", type=Path)
    more_command.add_argument("cache", type=Path)
    more_command.add_argument("others", type=Path, help="any images of other things")
    more_command.add_argument("--teacher", required=True)
    train_command = commands.add_parser("train")
    train_command.add_argument("cache", type=Path)
    train_command.add_argument("row")
    train_command.add_argument("--seed", type=int, default=0)
    train_command.add_argument("--teacher", default="", help="for rows of views, and slices")
    train_command.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    commands.add_parser("rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "rows":
        print("\n".join(ROWS))
    elif arguments.command == "prepare":
        arguments.cache.mkdir(parents=True, exist_ok=True)
        prepare(arguments.folder, arguments.cache, arguments.teacher)
    elif arguments.command == "more":
        prepare_more(arguments.folder, arguments.cache, arguments.others, arguments.teacher)
    else:
        row = ROWS[arguments.row]
        changes = {}
        for change in arguments.set:
            field, value = change.split("=")
            kind = type(getattr(row, field))
            changes[field] = value if kind is type(None) else kind(value)
        name = ", ".join([arguments.row, *arguments.set])
        row = replace(row, **changes)
        needs_teacher = row.predicted_views or row.maps_of_views or row.sliced
        if needs_teacher and not arguments.teacher:
            parser.error(f"{name}: needs --teacher")
        print(json.dumps(measured(name, row, arguments.cache, arguments.seed, arguments.teacher)))


# ---------------------------------------------------------------- images and their teacher


def prepare(folder: Path, cache: Path, teacher: str) -> None:
    if not (cache / "images.npz").exists():
        np.savez(cache / "images.npz", **read_images(folder))
    images = np.load(cache / "images.npz")
    seconds = {}
    for split in ("labelled", "unlabelled", "validation", "test"):
        started = time.process_time()
        np.save(cache / f"{split}_features.npy", features_of(images[split], teacher, 192))
        seconds[f"{split} features"] = time.process_time() - started
        print(split, round(seconds[f"{split} features"]), "core seconds", flush=True)
    started = time.process_time()
    both = np.concatenate([images["labelled"], images["unlabelled"]])
    np.save(cache / "maps.npy", maps_of(both, teacher, 128))
    seconds["maps"] = time.process_time() - started
    print("maps", round(seconds["maps"]), "core seconds", flush=True)
    (cache / "seconds.json").write_text(json.dumps(seconds))


def prepare_more(folder: Path, cache: Path, others: Path, teacher: str) -> None:
    images = np.load(cache / "images.npz")
    every = read_images(folder, unlabelled=45_000)["unlabelled"]
    assert np.array_equal(every[:UNLABELLED], images["unlabelled"])
    np.savez(cache / "every_unlabelled.npz", unlabelled=every)
    np.savez(cache / "others.npz", unlabelled=read_others(others))
    seconds = json.loads((cache / "seconds.json").read_text())

    def store(name: str, images: np.ndarray, pixels: int) -> None:
        started = time.process_time()
        np.save(cache / f"{name}_features.npy", features_of(images, teacher, pixels))
        seconds[f"{name} features"] = time.process_time() - started
        (cache / "seconds.json").write_text(json.dumps(seconds))

    store("others", np.load(cache / "others.npz")["unlabelled"], 192)
    store("labelled_128", images["labelled"], 128)
    store("validation_128", images["validation"], 128)
    store("unlabelled_128", every, 128)


def read_others(folder: Path) -> np.ndarray:
    """uint8 [N, 32, 32, 3] of as many images, drawn once."""
    from PIL import Image

    files = sorted(folder.rglob("*.JPEG"))
    drawn = np.random.default_rng(9).permutation(len(files))[:UNLABELLED]
    images = [Image.open(files[index]).convert("RGB").resize((32, 32)) for index in drawn]
    return np.stack([np.asarray(image) for image in images])


def read_images(folder: Path, unlabelled: int = UNLABELLED) -> dict[str, np.ndarray]:
    """uint8 [N, 32, 32, 3] of each split and the labels [N] of those that have some. The labelled
    images of 300 labels are the first 30 of each class."""
    from PIL import Image

    def read(part: str) -> tuple[np.ndarray, np.ndarray]:
        images = []
        labels = []
        for label, class_folder in enumerate(sorted((folder / part).iterdir())):
            for file in sorted(class_folder.iterdir()):
                images.append(np.asarray(Image.open(file).convert("RGB")))
                labels.append(label)
        return np.stack(images), np.array(labels)

    images, labels = read("train")
    number = np.concatenate([np.arange(n) for n in np.bincount(labels)])  # within its class
    last = np.bincount(labels)[labels] - VALIDATION
    labelled = np.flatnonzero(number < 300)
    labelled = labelled[np.argsort(number[labelled], kind="stable")]  # class by class, in turns
    validation = np.flatnonzero(number >= last)
    rest = np.flatnonzero((number >= 300) & (number < last))
    rest = np.random.default_rng(5).permutation(rest)[:unlabelled]
    test, test_labels = read("test")
    drawn = np.random.default_rng(6).permutation(len(test))[:TEST]
    return {
        "labelled": images[labelled],
        "labels": labels[labelled],
        "validation": images[validation],
        "validation_labels": labels[validation],
        "unlabelled": images[rest],
        "test": test[drawn],
        "test_labels": test_labels[drawn],
    }


def pretrained(teacher: str, size: int) -> Any:
    return timm.create_model(teacher, pretrained=True, num_classes=0, img_size=size).eval()


def for_teacher(pixels: Tensor, size: int) -> Tensor:
    """Images [B, 3, 32, 32] of 0 to 1, as the teacher takes them."""
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    pixels = F.interpolate(pixels, (size, size), mode="bicubic").clamp(0, 1)
    return (pixels - mean) / std


def teacher_batches(images: np.ndarray, batch: int = 100) -> Iterator[Tensor]:
    """[100, 3, 32, 32] of images as they are."""
    for start in range(0, len(images), batch):
        yield torch.from_numpy(images[start : start + batch]).permute(0, 3, 1, 2) / 255


@torch.no_grad()
def pooled(model: nn.Module, pixels: Tensor, size: int) -> Tensor:
    """[B, D] float16 of images [B, 3, 32, 32]."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(for_teacher(pixels, size)).half()


def features_of(images: np.ndarray, teacher: str, size: int) -> np.ndarray:
    """Pooled features [N, D] float16."""
    model = pretrained(teacher, size)
    return torch.cat([pooled(model, batch, size) for batch in teacher_batches(images)]).numpy()


class AttentionOf:
    """The maps of a pretrained ViT."""

    def __init__(self, teacher: str, size: int) -> None:
        self.model = pretrained(teacher, size)
        self.size = size
        self.seen: dict[int, Tensor] = {}
        for block in BLOCKS:
            attention = self.model.blocks[block].attn
            attention.fused_attn = False

            def keep(module: nn.Module, inputs: Any, maps: Tensor, block: int = block) -> None:
                self.seen[block] = maps

            attention.attn_drop.register_forward_hook(keep)

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """From patches to patches, mean over heads, [B, 4, T, T] float16, rows sum to 1, of images
        [B, 3, 32, 32]."""
        self.model(for_teacher(pixels, self.size))
        maps = torch.stack([self.seen[block].mean(1)[:, 1:, 1:] for block in BLOCKS], 1)
        return (maps / maps.sum(-1, keepdim=True)).half()


def maps_of(images: np.ndarray, teacher: str, size: int) -> np.ndarray:
    """[N, 4, T, T] float16, see :class:`AttentionOf`."""
    attention = AttentionOf(teacher, size)
    tokens = GRID[0] * GRID[1]
    stored = np.empty((len(images), len(BLOCKS), tokens, tokens), np.float16)
    position = 0
    for batch in teacher_batches(images):
        stored[position : position + len(batch)] = attention(batch).numpy()
        position += len(batch)
    return stored


@dataclass
class Cache:
    """What ``prepare`` has written, and what was made of it since."""

    folder: Path
    labels_kept: int
    pixels: int = 192
    """At which the teacher saw the images."""
    of_other_things: bool = False
    teacher: str = ""
    """timm's name of the teacher, where it sees views."""

    @cached_property
    def images(self) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / "images.npz"))

    def unlabelled(self, count: int) -> np.ndarray:
        if self.of_other_things:
            return np.load(self.folder / "others.npz")["unlabelled"][:count]
        if count > UNLABELLED:
            return np.load(self.folder / "every_unlabelled.npz")["unlabelled"][:count]
        return self.images["unlabelled"][:count]

    @cached_property
    def seconds(self) -> dict[str, float]:
        return json.loads((self.folder / "seconds.json").read_text())

    def saved_as(self, split: str) -> str:
        """The file of a split's features, and the key of their core seconds."""
        if self.of_other_things and split == "unlabelled":
            split = "others"
        return split if self.pixels == 192 else f"{split}_{self.pixels}"

    def features(self, split: str) -> np.ndarray:
        path = self.folder / f"{self.saved_as(split)}_features.npy"
        features = np.load(path).astype(np.float64)
        return features[: self.labels_kept] if split == "labelled" else features

    @cached_property
    def probe(self) -> Probe:
        """On the features of the labelled images."""
        return fit(
            self.features("labelled"),
            self.images["labels"][: self.labels_kept],
            self.features("validation"),
            self.images["validation_labels"],
            CLASSES,
            seed=0,
        )

    def predictions(self, source: str, split: str, seed: int) -> Tensor:
        """Probabilities [N, C] of the ``labelled`` images, out of fold, or the ``unlabelled``
        ones, by the probe on DeiT-Ti or by a network that was trained on the labels."""
        if source == "deit":
            features = torch.from_numpy(self.features(split))
            if split == "labelled":
                ids = torch.arange(len(features))
                return self.probe.logits_out_of_fold(features, ids).softmax(-1)
            return self.probe.logits(features).softmax(-1)
        saved = np.load(trained_on_labels(self, source, split, seed))
        return torch.from_numpy(saved["logits"]).softmax(-1)

    def teacher_seconds(self, row: Row, seed: int) -> float:
        """Of the passes over the images that a training of ``row`` learns from, or of the training
        of the network that predicted."""
        seconds = 0.0
        if "deit" in (row.targets, row.own):  # the probe, too, needs the labelled images
            seconds += (
                self.seconds[f"{self.saved_as('labelled')} features"] * self.labels_kept / 3_000
            )
        if row.targets == "deit" and not row.predicted_views:
            name = self.saved_as("unlabelled")
            seen = 45_000 if name == "unlabelled_128" else UNLABELLED
            seconds += self.seconds[f"{name} features"] * row.unlabelled / seen
        for source, split in ((row.targets, "unlabelled"), (row.own, "labelled")):
            if source not in (None, "deit"):
                seconds += float(np.load(trained_on_labels(self, source, split, seed))["seconds"])
        if row.maps == "deit" and not row.maps_of_views:
            seconds += self.seconds["maps"]
        if row.maps == "gaussian":
            seconds += float(self.gaussians(seed).with_suffix(".seconds").read_text())
        return seconds

    def gaussians(self, seed: int) -> Path:
        """The maps of the row "Gaussian ViT", as :func:`maps_of` has them; made once."""
        path = self.folder / f"gaussian_maps_{seed}.npy"
        if not path.exists():
            started = time.process_time()
            network, _ = train(ROWS["Gaussian ViT"], self, seed)
            images = np.concatenate([self.images["labelled"], self.images["unlabelled"]])
            maps = learned_maps(network, images)
            path.with_suffix(".seconds").write_text(f"{time.process_time() - started:.0f}")
            np.save(path, maps)
        return path


def trained_on_labels(cache: Cache, source: str, split: str, seed: int) -> Path:
    """The logits that a network which was trained on the labels alone has for the ``unlabelled``
    images, or out of fold for the ``labelled`` ones, which takes five trainings. Made once for each
    seed."""
    path = cache.folder / f"{source}_{split}_{cache.labels_kept}_{seed}.npz"
    if path.exists():
        return path
    name = {"resnet": "narrow ResNet, labels", "vit": "labels"}[source]
    row = replace(ROWS[name], labels=cache.labels_kept)
    started = time.process_time()
    if split == "unlabelled":
        network, _ = train(row, cache, seed)
        logits = logits_of(network, cache.images["unlabelled"])
    else:
        labels = cache.images["labels"][: row.labels]
        images = cache.images["labelled"][: row.labels]
        folds = stratified(labels, seed)
        logits = np.empty((len(labels), CLASSES), np.float32)
        for fold in range(FOLDS):
            network, _ = train(row, cache, seed, np.flatnonzero(folds != fold))
            logits[folds == fold] = logits_of(network, images[folds == fold])
    np.savez(path, logits=logits, seconds=time.process_time() - started)
    return path


# ---------------------------------------------------------------- networks and their training


def build(row: Row) -> nn.Module:
    if row.network == "resnet":
        network = timm.create_model(
            "resnet18", channels=(12, 24, 48, 96), layers=(1, 1, 1, 1), num_classes=CLASSES
        )
        network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        network.maxpool = nn.Identity()
        return network
    vit: Any = timm.create_model(
        "gauvit_atto_patch4_32",
        stem=row.network,
        attention=row.attention,
        patch_size=2 if row.fine_blocks else 4,
        embed_dim=row.width,
        depth=row.depth,
        num_heads=row.width // 32,
        mlp_ratio=2,
    )
    if row.more_blocks:
        for stage in vit.patch_embed.proj:
            if isinstance(stage, nn.Sequential) and len(stage) > 1:
                stage.extend(deepcopy(stage[-1]) for _ in range(row.more_blocks))
    if row.fine_blocks:
        vit.blocks[row.fine_blocks - 1].register_forward_hook(averaged)
    return vit


def averaged(block: nn.Module, inputs: Any, tokens: Tensor) -> Tensor:
    """[B, 16 x 16, d] -> [B, 8 x 8, d]"""
    grid = tokens.transpose(1, 2).unflatten(2, (16, 16))
    return F.avg_pool2d(grid, 2).flatten(2).transpose(1, 2)


def start_as_slice(network: Any, teacher: str, images: np.ndarray) -> None:
    """Gives a ViT a part of a teacher's weights, by what the teacher makes of some images."""
    vit: Any = timm.create_model(teacher, pretrained=True).eval()
    size = vit.patch_embed.img_size[0]
    spread = spread_of_stream(vit, (for_teacher(b, size) for b in teacher_batches(images)))
    heads = vit.blocks[0].attn.num_heads
    grid = vit.patch_embed.grid_size
    start_from_teacher(network, "slice", vit.state_dict(), heads, grid, spread)


def mix(pixels: Tensor, wanted: Tensor, some: Tensor, generator: torch.Generator) -> None:
    """Mixes ``some`` images of a batch, and their targets, with each other, in place."""
    where = some.nonzero().squeeze(1)
    partners = where[torch.randperm(len(where), generator=generator)]
    share = torch.rand(len(where), generator=generator)
    pixels[where] = torch.lerp(pixels[partners], pixels[where], share[:, None, None, None])
    wanted[where] = torch.lerp(wanted[partners], wanted[where], share[:, None])


def views(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [B, 3, 32, 32] shifted by up to four pixels each way and mirrored, and which were."""
    count = len(images)
    padded = F.pad(images, (4, 4, 4, 4), mode="reflect")
    dx = torch.randint(0, 9, (count,), generator=generator)
    dy = torch.randint(0, 9, (count,), generator=generator)
    mirrored = torch.rand(count, generator=generator) < 0.5
    steps = torch.arange(32)
    rows = (dy[:, None] + steps)[:, None, :, None].expand(count, 3, 32, 40)
    columns = (dx[:, None] + steps)[:, None, None, :].expand(count, 3, 32, 32)
    moved = padded.gather(2, rows).gather(3, columns)
    moved[mirrored] = moved[mirrored].flip(-1)
    return moved, mirrored


def mirror(mirrored: Tensor) -> Geometry:
    """Where a view lies in its image, for maps that are mirrored along and not shifted."""
    scale = torch.ones(len(mirrored), 2)
    scale[mirrored, 0] = -1
    return Geometry(torch.zeros_like(scale), scale)


def targets_of(row: Row, cache: Cache, seed: int) -> Tensor:
    """The probabilities [N, C] that the images of a training have: labelled, then unlabelled."""
    targets = F.one_hot(torch.from_numpy(cache.images["labels"][: row.labels]), CLASSES).float()
    if row.own:
        own = cache.predictions(row.own, "labelled", seed)
        targets = row.alpha * own + (1 - row.alpha) * targets
    if row.targets:
        predicted = cache.predictions(row.targets, "unlabelled", seed)[: row.unlabelled]
        if row.shuffled:
            order = np.random.default_rng(8).permutation(len(predicted))
            predicted = predicted[torch.from_numpy(order)]
        if row.hard:
            predicted = F.one_hot(predicted.argmax(-1), CLASSES)
        predicted = (predicted.log() / row.soft_temperature).softmax(-1)
        targets = torch.cat([targets, predicted])
    return targets.float()


def train(
    row: Row, cache: Cache, seed: int, some: np.ndarray | None = None
) -> tuple[nn.Module, list[float]]:
    """The trained network and the loss of each epoch; ``some`` are the images that it sees."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    targets = targets_of(row, cache, seed)
    images = cache.images["labelled"][: row.labels]
    if row.targets:
        images = np.concatenate([images, cache.unlabelled(row.unlabelled)])
    if some is not None:
        images, targets = images[some], targets[some]
    network = build(row)
    if row.sliced:
        start_as_slice(network, cache.teacher, images[:128])
    maps = None
    if row.maps:
        source = cache.gaussians(seed) if row.maps == "gaussian" else cache.folder / "maps.npy"
        maps = np.load(source, mmap_mode="r")
    with_maps = FeatureLoss(network) if row.maps else None  # type: ignore[arg-type]
    teacher = pretrained(cache.teacher, row.teacher_pixels) if row.predicted_views else None
    attention_of = AttentionOf(cache.teacher, 128) if row.maps_of_views else None
    steps = len(images) // BATCH_SIZE
    optim = OptimSettings(lr=row.lr, weight_decay=0.1, warmup_epochs=min(4, row.epochs // 2))
    optimizer, schedule = build_optimizer(network, optim, row.epochs, steps)  # type: ignore[arg-type]
    losses = []
    for epoch in range(row.epochs):
        network.train()
        order = torch.randperm(len(images), generator=generator)
        total = 0.0
        for step in range(steps):
            schedule.step_update(epoch * steps + step)
            ids = order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
            pixels = torch.from_numpy(images[ids]).permute(0, 3, 1, 2) / 255
            pixels, mirrored = views(pixels, generator)
            wanted = targets[ids]
            others = ids >= row.labels
            if row.mixed:
                mix(pixels, wanted, others, generator)
            batch = (pixels - MEAN) / STD
            if teacher is not None:
                features = pooled(teacher, pixels[others], row.teacher_pixels)
                wanted[others] = cache.probe.logits(features).softmax(-1)
            if maps is not None and with_maps is not None and epoch < row.map_epochs:
                whose = (ids + 1) % len(images) if row.of_other_images else ids
                geometry = mirror(mirrored)
                if attention_of is not None:
                    rows = attention_of(pixels).float()
                    geometry = mirror(torch.zeros_like(mirrored))
                else:
                    rows = torch.from_numpy(maps[whose]).float()

                def of_block(block: int, queries: Tensor | None, rows: Tensor = rows) -> Tensor:
                    return select_queries(rows[:, block, None], queries)

                stored = StoredRows(of_block, GRID)
                teacher_maps = TeacherMaps(stored, [0, 1, 2, 3], GRID, geometry=geometry)
                teacher_maps.queries = drawn_queries(row.queries, (seed, epoch, step), 64)
                logits, divergence = with_maps(batch, teacher_maps)
                loss = row.gamma * divergence
            else:
                logits = network(batch)
                loss = torch.zeros(())
            loss = loss + loss_of(row, logits, wanted, ~others)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        losses.append(total / steps)
    return network.eval(), losses


def loss_of(row: Row, logits: Tensor, targets: Tensor, labelled: Tensor) -> Tensor:
    """Mean cross-entropy of a batch, from ``logits`` and to ``targets`` [B, C]. ``labelled`` [B]
    says which images have a label."""
    temperature = torch.where(labelled, 1.0, row.soft_temperature)
    losses = F.cross_entropy(logits / temperature[:, None], targets, reduction="none")
    losses = losses * temperature**2
    if row.label_weight:
        share = row.labels / (row.labels + row.unlabelled)
        others = (1 - row.label_weight) / (1 - share)
        losses = losses * torch.where(labelled, row.label_weight / share, others)
    return losses.mean()


def student_batches(images: np.ndarray) -> Iterator[Tensor]:
    """[500, 3, 32, 32] of images as they are."""
    for start in range(0, len(images), 500):
        pixels = torch.from_numpy(images[start : start + 500]).permute(0, 3, 1, 2) / 255
        yield (pixels - MEAN) / STD


@torch.inference_mode()
def logits_of(network: nn.Module, images: np.ndarray) -> np.ndarray:
    """[N, C] float32 of images as they are."""
    return torch.cat([network(batch) for batch in student_batches(images)]).numpy()


@torch.inference_mode()
def learned_maps(network: nn.Module, images: np.ndarray) -> np.ndarray:
    """[N, 4, T, T] float16: the mean over the heads of a ViT's maps of images as they are."""
    maps = []
    for batch in student_batches(images):
        _, log_maps = forward_with_maps(network, batch)  # type: ignore[arg-type]
        maps.append(torch.stack([rows.exp().mean(1) for rows in log_maps], 1).half())
    return torch.cat(maps).numpy()


def measured(name: str, row: Row, folder: Path, seed: int, teacher: str) -> dict[str, Any]:
    cache = Cache(folder, row.labels, row.teacher_pixels, row.of_other_things, teacher)
    teacher_seconds = cache.teacher_seconds(row, seed)
    started = time.process_time()
    network, losses = train(row, cache, seed)
    seconds = time.process_time() - started
    right = {}
    for split in ("validation", "test"):
        predicted = logits_of(network, cache.images[split]).argmax(-1)
        right[split] = predicted == cache.images[f"{split}_labels"]
    words = ["python", "benchmarks/unlabelled.py", "train", "CACHE", *sys.argv[3:]]
    result = {
        "name": name,
        "command": shlex.join(words),
        "data": "cifar10",
        "images": row.labels,
        "unlabelled": row.unlabelled if row.targets else 0,
        "epochs": row.epochs,
        "seed": seed,
        "val": round(float(right["validation"].mean()), 4),
        "test": round(float(right["test"].mean()), 4),
        "core_seconds": round(seconds + teacher_seconds),
        "teacher_seconds": round(teacher_seconds),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "loss": round(losses[-1], 3),
        "right": packed(right["test"]),
    }
    if "deit" in (row.targets, row.own):
        result["probe_val"] = round(cache.probe.accuracy, 4)
    return result


if __name__ == "__main__":
    main()
