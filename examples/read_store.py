"""Attention maps from a store without gaupipe, with numpy and zarr alone.

    python examples/read_store.py runs/mine/maps.zarr 7    prints the map [L, H, T, T] of image 7

docs/store.md has the equations of the 8-bit codes, docs/how-it-works.md that of a Gaussian's map.
"""

import math
import sys

import numpy as np
import zarr


def read_map(group: zarr.Group, image: int) -> np.ndarray:
    """[L, H, T, T] from the kinds gaussian (float16), topk and dense."""
    kind = group.attrs["kind"]
    if kind == "gaussian":
        return map_of_gaussians(group["gaussians"][image], group.attrs["grid"])
    if kind == "dense":
        maps = read_weights(group["maps"], image)
    else:
        keys = group["keys"][image].astype(int)
        weights = read_weights(group["weights"], image)
        tokens = int(np.prod(group.attrs["grid"])) + group.attrs["prefix_tokens"]
        # what the k keys leave is spread evenly over the other keys
        rest = np.clip(1 - weights.sum(-1, keepdims=True), 0, None)
        maps = np.repeat(rest / max(tokens - keys.shape[-1], 1), tokens, axis=-1)
        np.put_along_axis(maps, keys, weights, axis=-1)
    return maps / maps.sum(-1, keepdims=True)


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
