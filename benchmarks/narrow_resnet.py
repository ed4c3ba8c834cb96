"""A convolutional network with about as many parameters as the small ViTs, on labels alone.

    python benchmarks/narrow_resnet.py cifar10_few --set data.root=CIFAR-10-images --lr 4e-3

timm's ResNet-18 with an eighth of its channels, 176,000 parameters. Images, augmentation, batch
size and epochs are those of ``gaupipe train`` with the same arguments. Prints one training in the
form of docs/results/data, as JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time

import torch
from timm.models.resnet import BasicBlock, ResNet
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches, train_and_val
from gaupipe.data.splits import load_data
from gaupipe.settings.load import load
from gaupipe.training.job import hard_loss
from gaupipe.training.scores import score_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--optimizer", default="muon", help="by timm's name")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--test", action="store_true", help="also score the test images")
    parser.add_argument("--name", default="narrow ResNet")
    parser.add_argument("--data-name", help="of the data set, in the row; default: data.name")
    arguments = parser.parse_args()
    settings = load(arguments.config, arguments.overrides)
    device = torch.device("cpu")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    data = load_data(settings.data, settings.download)
    training, validation = train_and_val(data, settings.data, device)
    augment = Augment(settings.augment, settings.seed)

    torch.manual_seed(settings.seed)
    model = narrow_resnet(data.num_classes)
    epochs = settings.baseline_training.epochs
    optimizer = create_optimizer_v2(
        model, opt=arguments.optimizer, lr=arguments.lr, weight_decay=arguments.weight_decay
    )
    steps = -(-len(data.train) // settings.data.batch_size)
    schedule = CosineLRScheduler(
        optimizer, t_initial=epochs * steps, warmup_t=steps, warmup_prefix=True, t_in_epochs=False
    )
    started = time.process_time()
    step = 0
    for epoch in range(epochs):
        model.train()
        for batch in training.epoch(epoch, augment):
            schedule.step_update(step)
            optimizer.zero_grad()
            loss = hard_loss(model(batch.images), batch.labels, mixed=batch.mixed)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
        print(f"epoch {epoch + 1}: {score_model(model, validation).acc:.4f}", file=sys.stderr)
    spent = time.process_time() - started
    row = {
        "name": arguments.name,
        "command": shlex.join(["python", "benchmarks/narrow_resnet.py", *sys.argv[1:]]),
        "data": arguments.data_name or settings.data.name,
        "images": len(data.train),
        "epochs": epochs,
        "seed": settings.seed,
        "val": round(score_model(model, validation).acc, 4),
        "core_seconds": round(spent),
    }
    if arguments.test:
        if data.test is None:
            parser.error(f"--test: {settings.data.name} has no test images")
        test = Batches(data.test, data, device, settings.data.batch_size, 0)
        row["test"] = round(score_model(model, test).acc, 4)
    print(json.dumps(row))


def narrow_resnet(classes: int) -> ResNet:
    """ResNet-18 with an eighth of its channels, for images of 32 pixels, whose resolution its first
    convolution keeps."""
    # only a "deep" stem may be narrower than 64 channels; what it is made of is replaced
    model = ResNet(
        BasicBlock,
        [2, 2, 2, 2],
        num_classes=classes,
        channels=(8, 16, 32, 64),
        stem_type="deep",
        stem_width=4,
    )
    model.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


if __name__ == "__main__":
    main()
