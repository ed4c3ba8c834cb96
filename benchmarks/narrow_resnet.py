"""A convolutional network with about as many parameters as the ViT of a configuration: timm's
ResNet with one narrow block a stage, trained on the labels.

    python benchmarks/narrow_resnet.py cifar10_few --test
    python benchmarks/narrow_resnet.py cifar10_few --set train.optim.lr=0.016 --seed 1

The images, their augmentation, the number of epochs, the optimizer and its schedule are those of
``gaupipe train`` with the same arguments. The stem is one 3 x 3 convolution without pooling,
because of 32 pixels a side ResNet's own would leave a single one in the last stage; it has a
stride of 2 from 64 pixels on. Prints one training in the form of docs/results/data, as JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time

import timm
import torch
from torch import nn

from gaupipe.attention.options import count_parameters
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches, train_and_val
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.settings.load import load
from gaupipe.training.job import hard_loss
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.scores import score_model

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels", default="12,24,48,96", help="of the four stages")
    parser.add_argument("--test", action="store_true", help="also score the test images")
    parser.add_argument("--data-name", help="of the data set, in the row; default: data.name")
    arguments = parser.parse_args()
    settings = load(arguments.config, [*arguments.overrides, f"seed={arguments.seed}"])
    torch.set_num_threads(settings.threads or 1)
    data = load_data(settings.data, settings.download)

    started = time.process_time()
    torch.manual_seed(settings.seed)
    channels = tuple(int(number) for number in arguments.channels.split(","))
    network = narrow_resnet(channels, settings.data.image_size, data)
    training, validation = train_and_val(data, settings.data, CPU)
    train(network, settings, training)
    val = score_model(network, validation).acc
    spent = time.process_time() - started

    row = {
        "name": "narrow ResNet",
        "command": shlex.join(["python", "benchmarks/narrow_resnet.py", *sys.argv[1:]]),
        "data": arguments.data_name or settings.data.name,
        "images": len(data.train),
        "epochs": settings.train.epochs,
        "seed": settings.seed,
        "val": round(val, 4),
        "core_seconds": round(spent),
    }
    if arguments.test:
        if data.test is None:
            parser.error(f"--test: {settings.data.name} has no test images")
        test = Batches(data.test, data, CPU, settings.data.eval_batch_size)
        row["test"] = round(score_model(network, test).acc, 4)
    print(json.dumps(row))
    print(f"{count_parameters(network):,} parameters", file=sys.stderr)


def narrow_resnet(channels: tuple[int, ...], image_size: int | None, data: ImageData) -> nn.Module:
    network = timm.create_model(
        "resnet18", channels=channels, layers=(1, 1, 1, 1), num_classes=data.num_classes
    )
    width = network.conv1.out_channels
    stride = 2 if (image_size or 32) >= 64 else 1
    network.conv1 = nn.Conv2d(data.channels, width, 3, stride, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network


def train(network: nn.Module, settings: Settings, training: Batches) -> None:
    """The epochs of ``train`` on the labels, as a ViT of the same settings has them."""
    augment = Augment(settings.augment, settings.seed)
    epochs = settings.train.epochs
    optim = settings.train.optim
    optimizer, schedule = build_optimizer(network, optim, epochs, training.steps)
    step = 0
    for epoch in range(epochs):
        network.train()
        for batch in training.epoch(epoch, augment):
            schedule.step_update(step)
            logits = network(batch.images)
            loss = hard_loss(logits, batch.labels, settings.train.label_smoothing, batch.mixed)
            optimizer.zero_grad()
            loss.backward()
            if optim.clip_grad is not None:
                nn.utils.clip_grad_norm_(network.parameters(), optim.clip_grad)
            optimizer.step()
            step += 1


if __name__ == "__main__":
    main()
