"""How far a moved map is from the map that a trained ViT shows of the view itself.

    gaupipe phase-a cifar10_vit --run-dir runs/cifar10 --set phase_a.max_epochs=12
    python benchmarks/moved_maps.py runs/cifar10

For each augmentation the teacher of a run looks at training images and at one view of each. Three
stand-ins for the maps of the view are compared with these: the maps of the image, moved; the mean
of the views' maps over the images; and the map of the next image's view, which in a folder of
classes is of the same class. The distance of two rows is their total variation, from 0 (alike) to 1
(no key in common): the mean over images, blocks, heads and queries.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from timing import record
from torch import Tensor

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.splits import load_data
from gaupipe.maps.views import move_map
from gaupipe.settings.augment import AugmentSettings, ResizedCropSettings
from stages.runs.directory import RunDirectory
from stages.runs.trained import load_teacher

CROPS = ResizedCropSettings()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    run = RunDirectory(arguments.run_dir)
    settings = run.settings()
    data = load_data(settings.data)
    job = load_teacher(run, data)
    ids = np.arange(arguments.images)
    batches = Batches(data.train, data, job.device, len(ids))

    @torch.no_grad()
    def maps(images: Tensor) -> Tensor:
        """[B, L * H, T, T] of a teacher, on the CPU."""
        return torch.cat(job.network.forward_with_maps(images)[2].blocks, dim=1).float().cpu()

    [batch] = batches.in_order(ids)
    own, grid = maps(batch.images), job.shape.grid
    padding = data.image_size // 8
    augmentations = {
        "flip": AugmentSettings(flip=True),
        f"shift by up to {padding} pixels": AugmentSettings(crop_padding=padding),
        "flip and shift": AugmentSettings(flip=True, crop_padding=padding),
        f"crops of {CROPS.scale[0]:.0%} of the area and more": AugmentSettings(resized_crop=CROPS),
    }
    print("| augmentation | moved | mean map | map of the next image |\n|---|---|---|---|")
    for name, augmentation in augmentations.items():
        augment = Augment(augmentation, settings.seed)
        [views] = batches.views(ids, augment, 1)
        view_maps = maps(views.images)
        empty = torch.zeros(len(ids), data.channels, *[data.image_size] * 2, dtype=torch.uint8)
        geometry = augment(empty, torch.from_numpy(ids), 0)[1]
        stand_ins = {
            "moved": move_map(own, geometry, grid),
            "mean map": view_maps.mean(0, keepdim=True),
            "map of the next image": view_maps.roll(1, 0),
        }
        cells = [name]
        for stand_in, instead in stand_ins.items():
            far = (view_maps - instead).abs().sum(-1).flatten(1).mean(1) / 2
            record(f"{name}, {stand_in}, total variation", far.tolist())
            cells.append(f"{far.mean():.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
