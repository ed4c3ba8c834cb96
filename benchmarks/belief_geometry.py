"""Norms and angles of BeliefFormer's figures 4 and 8, while a ViT with ``belief`` is trained.

    python benchmarks/belief_geometry.py cifar10_small

The figures show, in the first epoch, that the update of belief-attention D W is considerably
shorter than that of standard attention MH W, and that both have about the same angle with the
token. A line of JSON for each block at steps of the first epoch, on held-out images: means over all
tokens of |D| / |MH|, |D W| / |MH W| and of the two angles in degrees.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
import torch.nn.functional as F

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.load import load_data
from gaupipe.settings.load import load
from gaupipe.training.optimizer import build_optimizer
from gaupipe.vit.build import build_vit
from gaupipe.vit.diagnostics import belief_geometry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="X=Y")
    parser.add_argument("--moments", type=int, default=4, help="of the first epoch")
    parser.add_argument("--images", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = load(arguments.config, arguments.set)
    data = load_data(settings.data)
    torch.manual_seed(settings.seed)
    vit = build_vit(settings.model, data, "belief")
    training = Batches(data.train, data, torch.device("cpu"), settings.data.batch_size)
    held_out = Batches(data.val, data, torch.device("cpu"), arguments.images)
    [seen] = held_out.in_order(data.val.evenly_spaced(arguments.images))
    train = settings.train
    optimizer, schedule = build_optimizer(vit, train.optim, train.epochs, training.steps)
    moments = np.linspace(0, training.steps, arguments.moments + 1).astype(int)[1:]
    augment = Augment(settings.augment, settings.seed)
    for step, batch in enumerate(training.epoch(0, augment), 1):
        F.cross_entropy(vit(batch.images), batch.labels).backward()
        optimizer.step()
        schedule.step_update(step)
        optimizer.zero_grad()
        if step in moments:
            for number, block in enumerate(belief_geometry(vit.eval(), seen.images)):
                row = {
                    "step": step,
                    "block": number,
                    "d_over_mh": block.d_norm / block.mh_norm,
                    "d_update_over_mh_update": block.d_update_norm / block.mh_update_norm,
                    "d_update_angle": block.d_update_angle,
                    "mh_update_angle": block.mh_update_angle,
                }
                for name, value in row.items():
                    if isinstance(value, torch.Tensor):
                        row[name] = round(value.mean().item(), 3)
                print(json.dumps(row), flush=True)
            vit.train()


if __name__ == "__main__":
    main()
