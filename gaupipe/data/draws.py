"""Random numbers that are a function of what they are for: (seed, epoch, image id), not of the
batch, the process, or what was drawn before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

# Each kind of draw has numbers of its own, so that switching one augmentation on leaves the draws
# of the others alone.
RESIZED_CROP, SHIFT, FLIP, RANDAUGMENT, ERASING, PAIRING, MIXING, QUERIES = range(8)


def uniforms(
    seed: int, epoch: int | np.ndarray, image_ids: Tensor | np.ndarray, k: int, stream: int
) -> np.ndarray:
    """k random numbers for every image, float64 [B, k] in (0, 1), a function of the arguments and
    of nothing else. ``epoch`` is one for all, or that of each image [B].

    Philox4x32-10 (Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*) with the seed as
    its key and (image id, epoch, stream, number of four draws) as its counter. ``stream`` below
    2^16 tells uses apart; at most 2^18 draws each.
    """
    ids = np.asarray(image_ids, dtype=np.uint64)[:, None]
    blocks = np.arange(-(-k // 4), dtype=np.uint64)[None]
    epochs = np.asarray(epoch, dtype=np.uint64).reshape(-1, 1)
    counter = np.broadcast_arrays(
        ids & _WORD, ids >> _HALF, epochs, np.uint64(stream << 16) | blocks
    )
    words = np.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)), axis=-1)
    return (words.reshape(len(ids), -1)[:, :k] + 0.5) * 2.0**-32


def seed_of(*entropy: int) -> int:
    """A seed for one of torch's generators, a function of these numbers."""
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


_WORD = np.uint64(0xFFFFFFFF)  # the lower 32 bits
_HALF = np.uint64(32)  # shifts the upper 32 bits down


def philox(counter: Sequence[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32-10 of four equally shaped uint64 arrays, each holding 32 bits; returns four
    such arrays."""
    a, b, c, d = counter
    for number in range(10):
        key_a, key_b = (
            np.uint64(word + number * step & 0xFFFFFFFF)
            for word, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
        )
        from_a = a * np.uint64(0xD2511F53)
        from_c = c * np.uint64(0xCD9E8D57)
        a = from_c >> _HALF ^ b ^ key_a
        b = from_c & _WORD
        c = from_a >> _HALF ^ d ^ key_b
        d = from_a & _WORD
    return [a, b, c, d]
