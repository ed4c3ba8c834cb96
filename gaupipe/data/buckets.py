"""The training images of each rank, divided such that neither the batches nor anything that is
drawn depend on the number of ranks.

Image ids fall into P *buckets*. P belongs to the run, and worlds of W ranks for which W divides P
share the buckets: rank r has P / W neighbouring ones. Every bucket has a permutation of its
own in every epoch, and every batch takes its share of every bucket. So the whole batch has the same
images for any W, and an image stays with its rank as long as the world does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gaupipe.system import distributed
from gaupipe.system.errors import UserError

BLOCK = 16
"""Images with neighbouring ids in one bucket. The classes of a folder lie one after the other, so
blocks are small and go around."""


@dataclass
class Buckets:
    """``images`` image ids in ``count`` buckets: id i is in bucket (i // BLOCK) % count."""

    images: int
    count: int = 1

    def of(self, image_ids: np.ndarray) -> np.ndarray:
        """The bucket of each image id."""
        return image_ids // BLOCK % self.count

    def positions(self, image_ids: np.ndarray) -> np.ndarray:
        """The place of each image id among the members of its bucket."""
        return image_ids // (BLOCK * self.count) * BLOCK + image_ids % BLOCK

    def sizes(self) -> np.ndarray:
        """Images in each bucket, int64 [P]."""
        return np.bincount(self.of(np.arange(self.images)), minlength=self.count)

    def members(self, bucket: int) -> np.ndarray:
        """The image ids of a bucket, ascending, int64."""
        ids = np.arange(self.images)
        return ids if self.count == 1 else ids[self.of(ids) == bucket]

    def rank_buckets(self) -> range:
        """The buckets of this rank."""
        rank = distributed.rank()
        world = distributed.world_size()
        return range(rank * self.count // world, (rank + 1) * self.count // world)

    def steps(self, batch_size: int) -> int:
        """Batches in an epoch."""
        return -(-self.images // batch_size)

    def epoch(
        self, seed: int, epoch: int, batch_size: int, buckets: range | None = None
    ) -> list[dict[int, np.ndarray]]:
        """For every batch of an epoch the image ids that some ``buckets``, None for this rank's,
        have in it, by bucket.

        (seed, epoch, bucket) determine the order. With one bucket, batches are full but for the
        last. With more, whole batches differ by at most one image, and none is without images of
        some bucket.
        """
        if self.count == 1:  # full batches, which several buckets cannot all have
            order = np.random.default_rng((seed, epoch)).permutation(self.images)
            return [{0: ids} for ids in slices(order, batch_size)]
        if buckets is None:
            buckets = self.rank_buckets()
        shuffled = {
            bucket: np.random.default_rng((seed, epoch, bucket)).permutation(self.members(bucket))
            for bucket in buckets
        }
        batches: list[dict[int, np.ndarray]] = [{} for _ in range(self.steps(batch_size))]
        bounds = self._bounds(batch_size)
        for bucket, ids in shuffled.items():
            for step, batch in enumerate(batches):
                batch[bucket] = ids[bounds[bucket, step] : bounds[bucket, step + 1]]
        return batches

    def counts_below(self, image_id: int, seed: int, epoch: int, batch_size: int) -> list[int]:
        """For every whole batch of an epoch, over all ranks, the images with ids below this one."""
        order = self.epoch(seed, epoch, batch_size, range(self.count))
        batches = [np.concatenate([*parts.values()]) for parts in order]
        return [int((ids < image_id).sum()) for ids in batches]

    def batch_sizes(self, batch_size: int) -> list[int]:
        """Images in each whole batch of an epoch, over all ranks."""
        if self.count == 1:
            return [len(ids) for ids in slices(np.arange(self.images), batch_size)]
        return np.diff(self._bounds(batch_size).sum(0)).tolist()

    def _bounds(self, batch_size: int) -> np.ndarray:
        """Beginning of the share of each batch in each bucket: int64 [P, steps + 1]."""
        ends = np.cumsum([0, *self.sizes()])[:, None]  # of the buckets, laid one after the other
        steps = self.steps(batch_size)
        # the ends are rounded, not the share of each bucket, whose errors would add up: whole
        # batches differ by one image at most
        return np.diff(ends * np.arange(steps + 1) // steps, axis=0)


def slices(image_ids: np.ndarray, size: int) -> list[np.ndarray]:
    """``image_ids`` in pieces of ``size``, the last of which may be smaller."""
    return [image_ids[start : start + size] for start in range(0, len(image_ids), size)]


def check_buckets(images: int, count: int, batch_size: int, world: int | None = None) -> None:
    """Raises UserError for buckets that the ranks of a ``world`` (None: this one) cannot share, or
    that have too few images for every batch to have some of each."""
    world = world or distributed.world_size()
    if count % world:
        raise UserError(
            f"data.buckets: {count} buckets cannot be shared by {world} processes: start as many "
            f"processes as divide {count}, or another run with data.buckets a multiple of {world}"
        )
    steps = Buckets(images, count).steps(batch_size)
    if count > 1 and Buckets(images, count).sizes().min() < 2 * steps:
        raise UserError(
            f"data.buckets: {count} buckets of {images} images are too many for batches of "
            f"{batch_size}, which take two images of each: take fewer, or a larger data.batch_size"
        )
