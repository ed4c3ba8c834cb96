"""Trains a ViT in a way that gaupipe has no setting for, and prints the result as a line of JSON.

    python benchmarks/variants.py random_half 12 --seed 0
    python benchmarks/variants.py impulse 12 --seed 0 --config cifar10_small --set data.root=FOLDER

The arguments are the variant and its epochs. All have standard attention, Muon with learning rate
4e-3, timm's initialisation, one thread and no teacher.

plain         a batch of 128 in each step
random_half   a random half of a batch of 256
own_loss      from the fifth epoch on the half with the largest losses when they were last seen
proxy_loss    from the fifth epoch on the half that a ViT of width 32 and 6 epochs finds hardest
infobatch     InfoBatch (arXiv 2303.04947), batches of 176: an image whose last loss is below the
              mean is left out with probability 1/2, otherwise it weighs twice; not in the first
              epoch, nor in the last eighth
impulse       Q and K whose attention starts as a shift by at most one patch (after arXiv
              2505.19985; here from the position embedding, at the rank of a head)
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm

from gaupipe.data.batches import Batch, Batches
from gaupipe.data.buckets import Buckets
from gaupipe.data.splits import ImageData, load_data
from gaupipe.settings import Settings
from gaupipe.settings.load import load
from gaupipe.training.job import LabelLosses, StepLosses, Training, build, train, training_state
from gaupipe.training.scores import score_model
from gaupipe.training.state import TrainingState
from stages.compare.costs import processor_seconds

BATCH_SIZES = {"plain": 128, "impulse": 128, "infobatch": 176}
HALVES = ("random_half", "own_loss", "proxy_loss")
FULL_EPOCHS = 4
"""Epochs in which every variant of HALVES takes random halves."""


class Selected(LabelLosses):
    """The cross-entropy with the labels of some images of each batch. ``last`` [images] has the
    last loss of each image, a large one before it was seen."""

    def __init__(self, job: Training) -> None:
        super().__init__(job)
        images = len(job.data.train)
        self.steps, self.step = Buckets(images).steps(job.settings.data.batch_size), 0
        self.last = torch.full((images,), 100.0)
        self.random = torch.Generator().manual_seed(job.settings.seed)

    def weights(self, batch: Batch, epoch: int) -> Tensor:
        """The weight of each image, float32 [B]; 0 leaves it out."""
        raise NotImplementedError

    def forward(self, batch: Batch, gamma: float = 0.0) -> StepLosses:
        weights = self.weights(batch, self.step // self.steps)
        self.step += 1
        kept = weights > 0
        rest = Batch(batch.images[kept], batch.labels[kept], batch.ids[kept])
        logits = self.forward_student(rest.images).float()
        each = cross_entropy(logits, rest.labels, reduction="none")
        self.last[rest.ids] = each.detach()
        loss = (each * weights[kept]).sum() / len(batch)
        accuracy = (logits.argmax(-1) == rest.labels).float().mean()
        return StepLosses(loss, loss, accuracy)


class Half(Selected):
    """Half of each batch: a random one, or after FULL_EPOCHS that with the largest ``hardness``
    [images], or the largest last losses."""

    def __init__(self, job: Variant) -> None:
        super().__init__(job)
        self.hardness = self.last if job.name == "own_loss" else job.hardness

    def weights(self, batch: Batch, epoch: int) -> Tensor:
        scores = torch.rand(len(batch), generator=self.random)
        if self.hardness is not None and epoch >= FULL_EPOCHS:
            scores = self.hardness[batch.ids] + 1e-6 * scores
        chosen = scores.argsort(descending=True)[: len(batch) // 2]
        return torch.zeros(len(batch)).index_fill(0, chosen, len(batch) / len(chosen))


class InfoBatch(Selected):
    """Images whose last loss is below the mean are left out half of the time."""

    def __init__(self, job: Training) -> None:
        super().__init__(job)
        self.epochs, self.mean = job.epochs, self.last.mean()

    def weights(self, batch: Batch, epoch: int) -> Tensor:
        if self.step % self.steps == 0:
            self.mean = self.last.mean()
        weights = torch.ones(len(batch))
        if 0 < epoch < 0.875 * self.epochs:
            easy = self.last[batch.ids] < self.mean
            weights[easy] = 2.0 * (torch.rand(int(easy.sum()), generator=self.random) < 0.5)
        return weights


class Variant(Training):
    """A training in one of the ways that this file's docstring names."""

    name = "plain"
    hardness: Tensor | None = None

    def losses(self) -> nn.Module:
        if self.name in HALVES:
            return Half(self)
        return InfoBatch(self) if self.name == "infobatch" else super().losses()


def variant(
    name: str, settings: Settings, data: ImageData, hardness: Tensor | None = None
) -> Variant:
    """The training ``name``, freshly started, with a proxy's ``hardness`` [images]."""
    job = build(settings, data)
    made = Variant(job.settings, data, job.device, job.student, job.train)
    made.name, made.hardness = name, hardness
    if name == "impulse":
        start_impulse(job.student, settings.seed)
    return made


@torch.no_grad()
def start_impulse(vit: VisionTransformer, seed: int, top: float = 0.3, cut: float = 0.2) -> None:
    """Gives Q and K of each head the attention of a random shift by at most one patch.

    The shift is projected on the position embedding, without its singular values below ``cut`` of
    the largest, and to the rank of a head. It is scaled until the largest weight of a query is
    ``top`` in the mean, without the patches' content.
    """
    random = torch.Generator().manual_seed(seed)
    height, width = vit.patch_embed.grid_size
    dim = vit.embed_dim
    assert vit.pos_embed is not None
    positions = build_sincos2d_pos_embed([height, width], dim=dim)
    vit.pos_embed[:, -len(positions) :] = positions
    positions = layer_norm(positions, (dim,))
    inverse = torch.linalg.pinv(positions, rtol=cut)
    for block in vit.blocks:
        attention: Any = block.attn
        rank = dim // attention.num_heads
        queries, keys = [], []
        for _ in range(attention.num_heads):
            dy, dx = torch.randint(-1, 2, (2,), generator=random).tolist()
            left, values, right = torch.linalg.svd(
                inverse @ shift(height, width, dy, dx) @ inverse.mT
            )
            root = values[:rank].sqrt()
            q, k = left[:, :rank] * root, right[:rank].mT * root
            scale = sharpness((positions @ q) @ (positions @ k).mT / rank**0.5, top) ** 0.5
            queries.append(scale * q)
            keys.append(scale * k)
        attention.qkv.weight[: 2 * dim] = torch.cat(queries + keys, 1).mT
        if attention.qkv.bias is not None:
            attention.qkv.bias.zero_()


def shift(height: int, width: int, dy: int, dx: int) -> Tensor:
    """A matrix [T, T] with a 1 where the key lies ``dy`` rows and ``dx`` columns from the query."""
    target = torch.zeros(height, width, height, width)
    for y in range(max(0, -dy), min(height, height - dy)):
        for x in range(max(0, -dx), min(width, width - dx)):
            target[y, x, y + dy, x + dx] = 1
    return target.view(height * width, -1)


def sharpness(scores: Tensor, top: float) -> float:
    """The factor of scores [T, T] at which the largest weight of a query is ``top`` in the mean."""
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        if (middle * scores).softmax(-1).amax(-1).mean() < top:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def losses_of_proxy(settings: Settings, data: ImageData, folder: Path) -> Tensor:
    """The losses [images] of a ViT of width 32 after 6 epochs."""
    args = settings.model.args | {"embed_dim": 32}
    settings = settings.with_training(distilled=False)
    settings = settings.with_section("model", args=args).with_section("train", epochs=6)
    job = variant("plain", settings.with_section("data", batch_size=128), data)
    model = trained(job, folder).kept.eval()
    losses = torch.empty(len(data.train))
    with torch.inference_mode():
        for batch in Batches(data.train, data, job.device, 500).in_order():
            logits = model(batch.images).float()
            losses[batch.ids] = cross_entropy(logits, batch.labels, reduction="none")
    return losses


def trained(job: Variant, folder: Path) -> TrainingState[VisionTransformer]:
    """The student and its metrics after its training into ``folder``."""
    state = training_state(job)
    folder.mkdir(parents=True)
    train(job, state, folder)
    return state


def main() -> None:
    names = [*HALVES, *BATCH_SIZES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variant", choices=names)
    parser.add_argument("epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="fashion_mnist_plain")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    name = arguments.variant
    settings = load(
        arguments.config,
        [
            *["threads=1", "model.init=normal", "train.optim.name=muon", "train.optim.lr=4e-3"],
            *["train.label_smoothing=0.0", f"seed={arguments.seed}"],
            *[
                f"data.batch_size={BATCH_SIZES.get(name, 256)}",
                f"train.epochs={arguments.epochs}",
            ],
            *arguments.set,
        ],
    )
    data = load_data(settings.data, False)
    assert data.test is not None
    with tempfile.TemporaryDirectory() as directory:
        began = time.process_time()
        hardness = None
        if name == "proxy_loss":
            hardness = losses_of_proxy(settings, data, Path(directory) / "proxy")
        proxy_seconds = time.process_time() - began
        job = variant(name, settings, data, hardness)
        state = trained(job, Path(directory) / name)
    test = score_model(state.kept, Batches(data.test, data, job.device, 500))
    print(
        json.dumps(
            {
                "seed": arguments.seed,
                "variant": name,
                "epochs": arguments.epochs,
                "val_acc": [entry["val_acc"] for entry in state.metrics],
                "test_acc": test.acc,
                "processor_seconds": processor_seconds(state.metrics),
                "proxy_seconds": proxy_seconds if name == "proxy_loss" else None,
            }
        )
    )


if __name__ == "__main__":
    main()
