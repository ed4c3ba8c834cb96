"""Attention maps from a store without gaupipe, with numpy and zarr alone.

    python examples/read_store.py runs/mine/maps.zarr 7    prints the map [L, H, T, T] of image 7

docs/store.md has the equations of the 8-bit codes, docs/how-it-works.md those of a Gaussian.
"""

import math
import sys

import numpy as np
import zarr


def read_map(group: zarr.Group, image: int) -> np.ndarray:
    """[L, H, T, T] from every kind of store that has maps."""
    kind = group.attrs["kind"]
    if kind == "predictions":
        sys.exit(
            f"no attention maps: its predictions of image {image} are group['logits'][{image}]"
        )
    if kind in ("gaussian", "prior", "embedding"):
        return map_of_gaussians(read_gaussians(group, image), group.attrs["grid"])
    if kind == "dense":
        maps = read_weights(group["maps"], image)
    else:
        keys = group["keys"][image].astype(int)
        weights = read_weights(group["weights"], image)
        tokens = int(np.prod(group.attrs["grid"])) + group.attrs["prefix_tokens"]
        # what the k keys leave is spread evenly over the other keys
        rest = (1 - weights.sum(-1, keepdims=True)) / max(tokens - keys.shape[-1], 1)
        maps = np.repeat(np.maximum(rest, 0), tokens, axis=-1)
        np.put_along_axis(maps, keys, weights, axis=-1)
    return maps / maps.sum(-1, keepdims=True)


def read_gaussians(group: zarr.Group, image: int) -> np.ndarray:
    """Gaussians [L, H, T, 4] of an image: mean_x, mean_y, std_x, std_y."""
    if group.attrs["kind"] == "gaussian":
        array = group["gaussians"]
        numbers = array[image].astype(float)
        if array.dtype == np.uint8:
            facts = array.attrs
            means = (numbers[..., :2] - 128) * facts["mean_step"]
            log_stds = facts["log_std_min"] + (numbers[..., 2:] - 1) * facts["log_std_step"]
            numbers = np.concatenate([means, np.exp(log_stds)], axis=-1)
        return numbers
    raw = group["decoder/prior"][:]  # [L, H, T, P], the same for all images
    if group.attrs["kind"] == "embedding":
        raw = raw + decode(group, image).reshape(raw.shape)
    if group.attrs["parametrisation"] == "loc_scale":
        return np.concatenate([raw[..., :2], np.exp(raw[..., 2:])], axis=-1)
    mu_s, sigma_s, mu_l, sigma_l = np.split(raw, 4, axis=-1)  # each for x and y
    shrink = np.maximum(sigma_l**2, 1e-6)
    return np.concatenate([(mu_s + mu_l) / shrink, np.abs(sigma_s) / shrink], axis=-1)


def decode(group: zarr.Group, image: int) -> np.ndarray:
    """Raw numbers [L, H * T * P] from the image's embeddings [L, E], by a network of two layers
    for each block."""
    weight1, bias1, weight2 = (
        group[f"decoder/{name}"][:] for name in ("weight1", "bias1", "weight2")
    )
    hidden = np.einsum("le,leh->lh", group["embeddings"][image], weight1) + bias1
    gelu = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
    return np.einsum("lh,lho->lo", gelu, weight2)


def read_weights(array: zarr.Array, image: int) -> np.ndarray:
    """Attention [L, H, T, ...] of the arrays weights and maps."""
    numbers = array[image].astype(np.float32)
    if array.dtype == np.uint8:
        return ((numbers - 1) * array.attrs["sqrt_step"]) ** 2
    return numbers


def map_of_gaussians(gaussians: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """[..., 4] -> [..., T]"""
    height, width = grid
    mean_x, mean_y, std_x, std_y = np.moveaxis(gaussians.astype(float), -1, 0)
    along_y, along_x = expected(mean_y, std_y, height), expected(mean_x, std_x, width)
    maps = along_y[..., :, None] * along_x[..., None, :]
    return maps.reshape(*mean_x.shape, height * width)


def expected(mean: np.ndarray, std: np.ndarray, n: int) -> np.ndarray:
    """[...] -> [..., n]: the shares of the n > 1 tokens of an axis."""
    m = (mean[..., None] + 1) / 2 * (n - 1)  # in tokens
    s = std[..., None] * (n - 1) / 2
    z = (m - np.arange(n)) / s
    below = (1 + np.vectorize(math.erf)(z / math.sqrt(2))) / 2
    beyond = s * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) + (m - np.arange(n)) * below
    return np.diff(np.diff(beyond), prepend=-1, append=0)


if __name__ == "__main__":
    print(read_map(zarr.open_group(sys.argv[1], mode="r"), int(sys.argv[2])))
