"""Which map of a ViT shows what its prediction rests on: each map, tested on a folder of photos.

    python benchmarks/explain.py local-dir:MODEL PHOTOS --images 200
    python benchmarks/explain.py local-dir:MODEL PHOTOS --boxes BOXES.json

Of every photo each map is a weight for each patch. ``removed`` is the probability of the predicted
class without the fifth of the patches in which the map is largest (lower: they mattered), ``kept``
that with these alone (higher: they suffice). Patches are removed twice: painted in the data set's
mean colour, which the model takes for grey, and blurred, because a sharp grey square is something
to see as well. ``border`` is the share of photos whose largest weight lies in an outermost patch.
BOXES.json has {file name: [[left, top, right, bottom], ...]} in pixels of the file; ``inside`` is
the share of photos whose largest weight lies in one of them; photos with boxes get no patches
removed. "Features" is half the squared length of what the head reads, in place of a logit: for
models without classes.

Prints the means over photos with their standard errors, and with --out writes a row a map in the
form of docs/results/data, with its numbers photo by photo.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from gaupipe.teachers.files import open_model
from gaupipe.vit.capture import Traced, trace
from gaupipe.vit.heads import length_of_features, probabilities
from stages.look.live_maps import LiveMaps
from stages.look.removal import SHARE, painted

BATCH = 32


@dataclass(frozen=True)
class Seen:
    """One photo as the model saw it.

    images    [1, channels, height, width]
    traced    the pass over it
    normed    the input of the last block's attention, [1, T, d]
    keys      those of the last block, [1, T, d]
    score     the logit of the predicted class
    features  half the squared length of what the head reads, for models without classes
    """

    model: Any
    images: Tensor
    traced: Traced
    normed: Tensor
    keys: Tensor
    score: Tensor
    features: Tensor

    @property
    def row(self) -> int | slice:
        """The token that the head reads, or those that it takes the mean of."""
        return 0 if self.model.global_pool == "token" else slice(self.model.num_prefix_tokens, None)

    def gradients(self, score: Tensor) -> list[Tensor]:
        """Of a score by each map [H, T, T]."""
        maps = torch.autograd.grad(score, self.traced.maps, retain_graph=True)
        return [gradient[0] for gradient in maps]

    def read(self, map: Tensor) -> Tensor:
        """What the head's token reads from each token [T], of a map [T, T]."""
        rows = map[self.row]
        return rows if rows.ndim == 1 else rows.mean(0)

    @property
    def maps(self) -> list[Tensor]:
        return [block[0].detach() for block in self.traced.maps]


def seen_by(model: Any, images: Tensor) -> Seen:
    inner: dict[str, Tensor] = {}
    last = model.blocks[-1]
    hooks = [
        last.norm1.register_forward_hook(lambda _m, _i, out: inner.update(normed=out)),
        last.attn.qkv.register_forward_hook(lambda _m, _i, out: inner.update(qkv=out)),
    ]
    traced = trace(model, images, len(model.blocks))
    for hook in hooks:
        hook.remove()
    keys = inner["qkv"].unflatten(-1, (3, -1))[..., 1, :].detach()
    score = traced.logits[0].max()
    features = length_of_features(model, traced.tokens[-1])
    return Seen(model, images, traced, inner["normed"], keys, score, features)


def rollout(seen: Seen) -> Tensor:
    """Abnar and Zuidema 2020, eq. 1."""
    result = identity = torch.eye(len(seen.maps[0][0]))
    for map in seen.maps:
        result = (map.mean(0) + identity) / 2 @ result
    return seen.read(result)


def gradient_rollout(seen: Seen, score: Tensor) -> Tensor:
    return seen.read(seen.traced.rollout(score)[0, -1])


def times_gradient(seen: Seen, score: Tensor, blocks: int) -> Tensor:
    """Attention times gradient, its positive part, summed over the last ``blocks``."""
    pairs = list(zip(seen.maps, seen.gradients(score), strict=True))[-blocks:]
    return sum(seen.read((map * gradient).clamp_min(0).mean(0)) for map, gradient in pairs)


def legrad(seen: Seen) -> Tensor:
    """Of the predicted class's logit."""
    target = seen.traced.logits[0].argmax()

    def logit(tokens: Tensor) -> Tensor:
        return seen.model.forward_head(seen.model.norm(tokens))[0, target]

    return seen.traced.legrad(logit)[0, -1]


def legrad_of_features(seen: Seen) -> Tensor:
    return seen.traced.legrad(partial(length_of_features, seen.model))[0, -1]


def grad_cam(seen: Seen) -> Tensor:
    """Selvaraju et al. 2017, on what the last block's attention reads."""
    [gradient] = torch.autograd.grad(seen.score, seen.normed, retain_graph=True)
    prefix = seen.model.num_prefix_tokens
    weights = gradient[0, prefix:].mean(0)
    return (seen.normed[0].detach() * weights).sum(-1).clamp_min(0)


def least_entropy(seen: Seen) -> Tensor:
    """The last block's head that reads the fewest tokens."""
    rows = [seen.read(head) for head in seen.maps[-1]]
    return min(rows, key=lambda row: float(-torch.xlogy(row, row).sum()))


def by_values(seen: Seen) -> Tensor:
    """Attention times the length of what is read, mean over heads: Kobayashi et al. 2020."""
    lengths = seen.traced.values[-1][0].detach().norm(dim=-1)  # [H, T]
    heads = zip(seen.maps[-1], lengths, strict=True)
    return sum(seen.read(map) * length for map, length in heads)


def without_peaks(weights: Tensor, grid: tuple[int, int]) -> Tensor:
    """A map [T] in which no patch is brighter than its brightest neighbour: a lone bright patch,
    which is often a sink, is as bright as what is beside it."""
    padded = torch.nn.functional.pad(weights.view(1, 1, *grid), (1, 1, 1, 1), value=-torch.inf)
    patches = padded.unfold(2, 3, 1).unfold(3, 3, 1).reshape(-1, 9)  # [T, 9]
    patches[:, 4] = -torch.inf  # the patch itself
    neighbours = patches.amax(-1)
    return torch.minimum(weights, neighbours)


MAPS: dict[str, Callable[[Seen], Tensor]] = {
    "gradient rollout": lambda seen: gradient_rollout(seen, seen.score),
    "attention x gradient, all blocks": lambda seen: times_gradient(seen, seen.score, 10**6),
    "attention x gradient, last block": lambda seen: times_gradient(seen, seen.score, 1),
    "LeGrad": legrad,
    "Grad-CAM, last block": grad_cam,
}
WITHOUT_CLASSES: dict[str, Callable[[Seen], Tensor]] = {
    "gradient rollout, features": lambda seen: gradient_rollout(seen, seen.features),
    "attention x gradient, all blocks, features": lambda seen: times_gradient(
        seen, seen.features, 10**6
    ),
    "attention x gradient, last block, features": lambda seen: times_gradient(
        seen, seen.features, 1
    ),
    "LeGrad, features": legrad_of_features,
    "attention rollout": rollout,
    "last block, mean over heads": lambda seen: seen.read(seen.maps[-1].mean(0)),
    "last block, times length of values": by_values,
    "last block, head of least entropy": least_entropy,
    "all blocks, mean": lambda seen: seen.read(torch.stack(seen.maps).mean((0, 1))),
    "length of keys, last block": lambda seen: seen.keys[0].norm(dim=-1),
    "length of tokens, last block": lambda seen: seen.traced.tokens[-1][0].detach().norm(dim=-1),
    "random": lambda seen: torch.rand(len(seen.maps[0][0])),
}


CAPPED = ("gradient rollout", "gradient rollout, features", "last block, mean over heads")
"""Maps that are tested without lone bright patches too."""


def fillings(images: Tensor, patch: int) -> dict[str, Tensor]:
    """What stands where patches are removed. Zero is the data set's mean."""
    blurred = gaussian_blur(images, 4 * patch + 1, sigma=float(patch))
    return {"grey": torch.zeros_like(images), "blurred": blurred}


def tested(seen: Seen, weights: dict[str, Tensor], grid: tuple[int, int]) -> dict[str, Any]:
    """The probabilities of the predicted class for each map [T], filling and part."""
    target = seen.traced.logits[0].argmax()
    patch = seen.images.shape[-1] // grid[1]
    wholes = fillings(seen.images, patch)
    rows = []
    for map in weights.values():
        row = torch.zeros(len(map), dtype=torch.bool)
        row[map.topk(round(SHARE * len(map))).indices] = True
        rows.append(row)
    brightest = torch.stack(rows)  # [maps, T]
    found: dict[str, Any] = {}
    for filling, whole in wholes.items():
        for part, hidden in (("removed", brightest), ("kept", ~brightest)):
            images = painted(seen.images, hidden, grid, whole)
            with torch.inference_mode():
                logits = torch.cat([seen.model(few) for few in images.split(BATCH)])
            shares = probabilities(logits)[:, target].tolist()
            found[f"{part}, {filling}"] = dict(zip(weights, shares, strict=True))
    return found


def within(place: tuple[float, float], boxes: list[list[float]]) -> bool:
    x, y = place
    return any(left <= x <= right and top <= y <= bottom for left, top, right, bottom in boxes)


def measured(
    live: LiveMaps, image: int, boxes: list[list[float]] | None
) -> tuple[float, dict[str, dict[str, float]]]:
    """The probability of the predicted class, and the numbers of each map of a photo."""
    height, width = live.grid
    seen = seen_by(live.model, live.batch(image).images)
    prefix = live.model.num_prefix_tokens
    weights = {}
    for name, make in (MAPS | WITHOUT_CLASSES).items():
        weights[name] = make(seen).detach()[prefix:]
    for name in CAPPED:
        weights[f"{name}, without peaks"] = without_peaks(weights[name], live.grid)
    numbers: dict[str, dict[str, float]] = {name: {} for name in weights}
    if boxes is None:
        for part, shares in tested(seen, weights, live.grid).items():
            for name, share in shares.items():
                numbers[name][part] = share
    source = live.data.train.source
    picture_size = None
    if boxes is not None:
        pixels = source.pixels(image)
        picture_size = pixels.shape[2], pixels.shape[1]
    for name, map in weights.items():
        y, x = divmod(int(map.argmax()), width)
        numbers[name]["border"] = float(y in (0, height - 1) or x in (0, width - 1))
        if picture_size is not None and boxes is not None:
            left, top, right, bottom = source.crop(*picture_size)
            place = (
                picture_size[0] * (left + (right - left) * (x + 0.5) / width),
                picture_size[1] * (top + (bottom - top) * (y + 0.5) / height),
            )
            numbers[name]["inside"] = float(within(place, boxes))
    return float(probabilities(seen.traced.logits[0].detach()).max()), numbers


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    return subprocess.check_output(command, text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="as `gaupipe view --model` takes it")
    parser.add_argument("photos", type=Path)
    parser.add_argument("--images", type=int, help="the first so many alone")
    parser.add_argument("--boxes", type=Path, help="where the object lies in each photo")
    parser.add_argument("--data", help="what the photos are called in a row")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    teacher, _ = open_model(arguments.model, [arguments.photos], to_look=True)
    live = LiveMaps(teacher.network.name, teacher.network.model, teacher.data)
    live.model.requires_grad_(False)
    boxes_of = json.loads(arguments.boxes.read_text()) if arguments.boxes else None
    count = min(arguments.images or live.images, live.images)

    started = time.process_time()
    whole = []
    found = []
    for image in range(count):
        boxes = None
        if boxes_of is not None:
            boxes = boxes_of[Path(live.data.train.path(image)).name]
        probability, numbers = measured(live, image, boxes)
        whole.append(probability)
        found.append(numbers)
        print(f"{image + 1} of {count}", end="\r", file=sys.stderr)
    facts = {
        "command": shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]),
        "commit": commit(),
        "data": arguments.data or arguments.photos.name,
        "images": count,
        "epochs": None,
        "seed": 0,
        "val": None,
        "core_seconds": round(time.process_time() - started),
    }

    print(f"{count} photos, probability of the predicted class {mean_and_error(whole)}")
    print("| map |", " | ".join(found[0]["random"]), "|")
    rows = []
    for name in found[0]:
        photos = {part: [round(each[name][part], 3) for each in found] for part in found[0][name]}
        print(f"| {name} |", " | ".join(map(mean_and_error, photos.values())), "|")
        rows.append({"title": name, **facts, "photos": photos})
    if arguments.out:
        lines = ",\n ".join(map(json.dumps, rows))
        arguments.out.write_text(f"[\n {lines}\n]\n")


def mean_and_error(values: list[float]) -> str:
    """The mean, and its standard error."""
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


if __name__ == "__main__":
    main()
