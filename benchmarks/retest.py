"""Do a teacher's per-image parameters say anything about the image? Test and retest.

    python benchmarks/retest.py "table, expected" --seed 0
    python benchmarks/retest.py "table, expected" --data cifar10 --cache CACHE

Phase A trains a teacher, its network is frozen, and what makes the Gaussians of an image is fitted
again from two other starts: of the row "predicted" the part of the network that predicts them from
the image, of all others the parameters of the first images. If Gaussians say where to look in an
image, two fits of it agree better than a fit of it and one of another image.

A line of JSON for each of ``--epochs`` has mean total variations (0: the same map, 1: no key in
common) over blocks, heads and queries, from an image's map to the other fit's map of the same image
(``same_image``), of others of its class and of other classes; how often the nearest of the other
fit's maps is the image's own, or of its class; the same, ``trained_...``, where phase A's own
parameters are the other fit; and the accuracy of the refitted parameters, of none and of those of
another image. CACHE is of ``benchmarks/unlabelled.py prepare``; with
``--predictions`` a pretrained model's predictions in it take the place of the labels.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from unlabelled import Cache

import gaupipe.teachers.gaussian as phase_a
from gaupipe.data.batches import Batch
from gaupipe.data.images import ArrayImages
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData, Split
from gaupipe.maps.gaussians import raw_at_tokens
from gaupipe.models import forward_with_maps
from gaupipe.settings import Settings
from gaupipe.settings.load import load
from gaupipe.teachers.gaussian import GaussianTeacher, TeacherLoss
from gaupipe.teachers.gaussian_vit import GaussianMaps, GaussianViT
from gaupipe.vit.build import build_vit

SAMPLED = ["mode=stochastic", "parametrisation=paper", "prior=false", "rows.lr=0.1"]
ROWS = {
    "table, expected": ["per_image=table", "prior=false"],
    "table, expected, prior": ["per_image=table"],
    "table, sampled": ["per_image=table", *SAMPLED],
    "decoder, sampled": [
        "per_image=embedding",
        "compression={embedding: 32, hidden: 128}",
        *SAMPLED,
        "rows={lr: 0.02, initial_std: 1.0}",
    ],
    "predicted": [],
}
DATA = {
    "digits": ("digits_expected", []),
    "fashion_mnist": ("fashion_mnist", ["data.train_images=2000", "data.batch_size=32"]),
    "cifar10": (
        "fashion_mnist",
        ["data.batch_size=32", "model.stem=conv", "phase_a.max_epochs=20"],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--data", choices=DATA, default="digits")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--labelled", type=int, default=3_000, help="images of the cache")
    parser.add_argument("--predictions", action="store_true")
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 4, 12, 60])
    parser.add_argument("--start", type=float, default=0.02, help="std of the other starts")
    parser.add_argument("--std", type=float, default=1.0, help="of Gaussians at phase A's start")
    parser.add_argument("--pull", type=float, default=0.0, help="L2 of the parameters of an image")
    parser.add_argument("--set", action="append", default=[], metavar="phase_a.X=Y")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--maps", type=Path, help="writes images and maps of both fits (.npz)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.process_time()
    settings, data = prepared(arguments)
    targets = targets_of(arguments, data)
    if arguments.row == "predicted":
        rows = retest_of_predictor(settings, data, targets, arguments)
    else:
        rows = retest(settings, data, targets, arguments)
    name = arguments.row
    if arguments.start != 0.02:
        name += f", starts {arguments.start:g}"
    if arguments.std != 1:
        name += f", std {arguments.std:g}"
    if arguments.pull:
        name += f", pull {arguments.pull:g}"
    if arguments.predictions:
        name += ", predictions"
    for change in arguments.set:
        if change.startswith("phase_a.rows.lr="):
            name += f", rate {change.split('=')[1]}"
    for row in rows:
        facts = {
            "name": name,
            "command": shlex.join(["python", "benchmarks/retest.py", *sys.argv[1:]]),
            "data": arguments.data,
            "images": len(data.train),
            "seed": arguments.seed,
            "val": None,
            "core_seconds": round(time.process_time() - started),
        }
        print(json.dumps(facts | row), flush=True)


def prepared(arguments: argparse.Namespace) -> tuple[Settings, ImageData]:
    """The settings of a row, and its images."""
    config, changes = DATA[arguments.data]
    changes = ["phase_a.max_epochs=12", "phase_a.stop_accuracy=0.92", *changes]
    changes += [f"phase_a.{change}" for change in ROWS[arguments.row]]
    changes += [f"seed={arguments.seed}", *arguments.set]
    settings = load(config, changes)
    if arguments.cache is None:
        return settings, load_data(settings.data)
    cached = Cache(arguments.cache, arguments.labelled).images

    def split(images: str, labels: str) -> Split:
        source = ArrayImages(cached[images].transpose(0, 3, 1, 2), cached[labels])
        return Split(source, np.arange(min(arguments.labelled, len(source))))

    train = split("labelled", "labels")
    validation = split("validation", "validation_labels")
    half = (0.5,) * 3
    return settings, ImageData("cifar10", train, validation, 10, 3, 32, half, half)


def targets_of(arguments: argparse.Namespace, data: ImageData) -> Tensor:
    """Labels [N], or a pretrained model's predictions [N, C], of the training images."""
    if arguments.predictions:
        cache = Cache(arguments.cache, arguments.labelled)
        return cache.predictions("deit", "labelled", arguments.seed).float()
    return torch.from_numpy(data.train.labels)


# ---------------------------------------------------------------- parameters of each image


def retest(
    settings: Settings, data: ImageData, targets: Tensor, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    class Loss(TeacherLoss):
        """Phase A's, with the targets in place of the labels."""

        def forward(self, batch: Batch, parameters: Tensor | None, noise: Tensor | None) -> Tensor:
            gaussians = self.network.gaussians(parameters)
            logits = self.forward_network(batch.images, gaussians, noise)
            return F.cross_entropy(logits, targets[batch.ids])

    phase_a.TeacherLoss = Loss
    with tempfile.TemporaryDirectory() as folder:
        teacher = GaussianTeacher.build(settings, data, Path(folder))
        if arguments.std != 1:
            assert settings.phase_a.parametrisation == "paper"
            teacher.network.prior.data[..., 2:4] = arguments.std  # sigma_s of eq. 5
        state = teacher.training_state()
        teacher.train(state, Path(folder))
        ids = data.train.evenly_spaced(arguments.images)
        finished = GaussianTeacher.finished(settings, data, Path(folder))
        assert finished is not None
        trained = finished.parameters(torch.from_numpy(ids))
    network = finished.network.requires_grad_(False)
    maps_of_phase_a = maps_of(network, trained)
    [batch] = teacher.batches(data.train, len(ids)).in_order(ids)
    of_images = targets[ids]
    rows = settings.phase_a.rows
    std = rows.initial_std or arguments.start
    fits = [fitted(network, batch, of_images, arguments, rows.lr, std, start) for start in (1, 2)]
    for epochs, one, other in zip(sorted(arguments.epochs), *fits, strict=True):
        maps = [maps_of(network, parameters) for parameters in (one, other)]
        if arguments.maps:
            shape = (len(ids), network.layers, network.heads, -1, maps[0].shape[-1])
            saved = [fit.reshape(shape).numpy() for fit in maps]
            np.savez(arguments.maps, images=batch.images, labels=batch.labels, maps=saved)
        yield {
            "epochs": epochs,
            "teacher_epochs": len(state.metrics),
            "train": round(state.metrics[-1]["train_acc"], 4),
            **agreement(*maps, batch.labels),
            **named("trained", agreement(maps[0], maps_of_phase_a, batch.labels)),
            "refitted": accuracy(network, batch, one),
            "none": accuracy(network, batch, torch.zeros_like(one)),
            "of_another_image": accuracy(network, batch, one.roll(1, 0)),
        }


def fitted(
    network: GaussianViT,
    batch: Batch,
    targets: Tensor,
    arguments: argparse.Namespace,
    lr: float,
    std: float,
    start: int,
) -> Iterator[Tensor]:
    """The parameters of the images after each number of epochs; a step of Adam in each, as in phase
    A. ``start`` draws the first ones, and the points of sampled passes."""
    generator = torch.Generator().manual_seed(start)
    first = torch.randn(len(batch.images), *network.per_image_shape, generator=generator)
    parameters = (std * first).requires_grad_()
    optimizer = torch.optim.Adam([parameters], lr=lr)
    for epoch in range(1, max(arguments.epochs) + 1):
        noise = None
        if network.passes is not None:
            noise = network.noise(batch.images, generator)
        logits = network(batch.images, network.gaussians(parameters), noise)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        loss = loss + arguments.pull * parameters.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch in arguments.epochs:
            yield parameters.detach().clone()


@torch.no_grad()
def maps_of(network: GaussianViT, parameters: Tensor) -> Tensor:
    """[B, L * H * T, T]."""
    return GaussianMaps(network.grid, network.gaussians(parameters)).maps().flatten(1, 3)


@torch.no_grad()
def accuracy(network: GaussianViT, batch: Batch, parameters: Tensor) -> float:
    generator = torch.Generator().manual_seed(0)
    gaussians = network.gaussians(parameters)
    logits = network.predict(batch.images, gaussians, network.passes, generator)
    return round((logits.argmax(-1) == batch.labels).float().mean().item(), 4)


def agreement(one: Tensor, other: Tensor, labels: Tensor) -> dict[str, float]:
    """How well two fits [B, rows, T] of the maps of the same images agree."""
    queries = one.shape[1]
    distances = torch.cdist(one.flatten(1), other.flatten(1), p=1) / 2 / queries  # [B, B]
    itself = torch.eye(len(labels), dtype=torch.bool)
    of_class = (labels[:, None] == labels) & ~itself
    nearest = distances.argmin(1)
    means = {
        "same_image": distances[itself].mean(),
        "of_its_class": distances[of_class].mean(),
        "of_another_class": distances[~of_class & ~itself].mean(),
        "nearest_is_image": (nearest == torch.arange(len(labels))).float().mean(),
        "nearest_is_class": (labels[nearest] == labels).float().mean(),
    }
    return {name: round(value.item(), 4) for name, value in means.items()}


def named(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


# ---------------------------------------------------------------- Gaussians that images predict


def retest_of_predictor(
    settings: Settings, data: ImageData, targets: Tensor, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """As :func:`retest`, where a linear map of each token predicts its Gaussian: this map and the
    prior are fitted again. Images that were not trained on have Gaussians too."""
    torch.manual_seed(settings.seed)
    vit = build_vit(settings.model, data, "gaussian")
    optim = settings.phase_a.optim
    teacher_epochs = 20
    for _ in fit_vit(vit, vit.parameters(), data, targets, settings, optim.lr, [teacher_epochs]):
        pass
    vit.requires_grad_(False)
    seen, unseen = (batch_of(settings, data, split, arguments.images) for split in ("train", "val"))
    maps: list[list[list[Tensor]]] = []
    for start in (1, 2):
        torch.manual_seed(start)
        fitted_anew = []
        for block in vit.blocks:
            attention: Any = block.attn
            raw = raw_at_tokens(attention.grid)
            attention.prior.copy_(raw + arguments.start * torch.randn_like(attention.prior))
            attention.predictor.copy_(arguments.start * torch.randn_like(attention.predictor))
            fitted_anew += [attention.prior, attention.predictor]
        for parameter in fitted_anew:
            parameter.requires_grad_(True)
        fits = fit_vit(vit, fitted_anew, data, targets, settings, optim.lr, arguments.epochs)
        maps.append([[predicted_maps(vit, batch) for batch in (seen, unseen)] for _ in fits])
        vit.requires_grad_(False)
    for epochs, one, other in zip(sorted(arguments.epochs), *maps, strict=True):
        on_unseen = agreement(one[1], other[1], unseen.labels)
        yield {
            "epochs": epochs,
            "teacher_epochs": teacher_epochs,
            **agreement(one[0], other[0], seen.labels),
            **named("unseen", on_unseen),
        }


def fit_vit(
    vit: Any,
    parameters: Iterable[nn.Parameter],
    data: ImageData,
    targets: Tensor,
    settings: Settings,
    lr: float,
    epochs: list[int],
) -> Iterator[None]:
    """Trains some parameters of a ViT, and stops after each number of epochs."""
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    everything = batch_of(settings, data, "train", len(data.train))
    for epoch in range(1, max(epochs) + 1):
        order = torch.randperm(len(targets))
        for ids in order.split(settings.data.batch_size):
            loss = F.cross_entropy(vit(everything.images[ids]), targets[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch in epochs:
            yield


def batch_of(settings: Settings, data: ImageData, split: str, count: int) -> Batch:
    teacher = GaussianTeacher.outline(settings, data)
    images = data.split(split)
    ids = images.evenly_spaced(count)
    [batch] = teacher.batches(images, len(ids)).in_order(ids)
    return batch


@torch.no_grad()
def predicted_maps(vit: Any, batch: Batch) -> Tensor:
    """[B, L * H * T, T]."""
    _, rows = forward_with_maps(vit, batch.images)
    return torch.stack([*rows], dim=1).exp().flatten(1, 3)


if __name__ == "__main__":
    main()
