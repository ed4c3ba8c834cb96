"""The per-image parameters of a run: an :class:`ImageState` for each of a rank's buckets of image
ids. One process alone has a single bucket."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.buckets import Buckets
from gaupipe.system import digests, distributed
from gaupipe.system.errors import UserError
from gaupipe.system.files import flush
from gaupipe.teachers.image_state import ImageState


class BucketedState:
    """The parameters of the images of some buckets, with the methods of an :class:`ImageState`.

    Image ids are those of the whole data set; the id of an image in another bucket raises KeyError.
    """

    def __init__(
        self,
        buckets: Buckets,
        numbers: Sequence[int],
        make: Callable[[int, np.ndarray], ImageState],
    ) -> None:
        """``numbers`` name the buckets of this process. ``make`` (bucket, its image ids) gives
        their states."""
        self.buckets = buckets
        self.states = {number: make(number, buckets.members(number)) for number in numbers}
        self.files: dict[str, str] = {}
        """The files of all buckets in the last checkpoint, with their sha256."""

    def __len__(self) -> int:
        return self.buckets.images

    def gather(self, image_ids: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """As :meth:`ImageState.gather`."""
        return self.read(image_ids).to(device).requires_grad_()

    def read(self, image_ids: Tensor) -> Tensor:
        """As :meth:`ImageState.read`."""
        if self.buckets.count == 1:
            return self.states[0].read(image_ids)
        first = next(iter(self.states.values()))
        parameters = torch.empty(len(image_ids), *first.initial.shape)
        for batch, state, ids in self._parts(image_ids):
            parameters[batch] = state.read(ids)
        return parameters

    def update(self, image_ids: Tensor, gradient: Tensor) -> None:
        """As :meth:`ImageState.update`."""
        gradient = gradient.to("cpu")
        for batch, state, ids in self._parts(image_ids):
            state.update(ids, gradient[batch])

    def commit(self) -> None:
        """As :meth:`ImageState.commit`."""
        for state in self.states.values():
            state.commit()

    def sha256s(self) -> list[str]:
        """A digest of the parameters of each bucket, in the order of buckets. Every rank digests
        its own buckets."""
        sha256s = {}
        for number in self.buckets.of_rank():
            digest = hashlib.sha256()
            for parameters in self.states[number].chunks():
                digest.update(np.ascontiguousarray(parameters.numpy()).data)
            sha256s[number] = digest.hexdigest()
        return [sha256 for _, sha256 in sorted(distributed.all_gather_dict(sha256s).items())]

    def release(self) -> None:
        """As :meth:`ImageState.release`."""
        for state in self.states.values():
            state.release()

    def save(self, folder: Path, moment: str) -> dict[str, Any]:
        """Writes the committed parameters of every bucket to a file in ``folder``, beside those of
        earlier moments. Returns the sha256 of every file, of all ranks, by name, as :meth:`load`
        takes it."""
        folder.mkdir(parents=True, exist_ok=True)
        written = {}
        for number, state in self.states.items():
            path = folder / f"rows.{moment}.{number:04d}.pt"
            written[path.name] = digests.save(state.state_dict(), path)
        flush(folder)
        self.files = distributed.all_gather_dict(written)
        return {"buckets": self.files}

    def load(self, folder: Path, saved: dict[str, Any]) -> None:
        """Goes back to what :meth:`save` returned. Raises UserError for a file that is missing or
        damaged; a rank compares the digests of its own buckets."""
        files: dict[str, str] = saved["buckets"]
        by_bucket = {int(name.split(".")[2]): name for name in files}
        for number, state in self.states.items():
            path = folder / by_bucket[number]
            mine = number in self.buckets.of_rank()
            if not path.is_file() or (mine and digests.sha256(path) != files[path.name]):
                raise UserError(
                    f"{path} is missing or damaged: restore it from a copy, or start afresh in "
                    "another --run-dir"
                )
            state.load_state_dict(torch.load(path, weights_only=True, mmap=True))
        self.files = files

    def remove_superseded(self, folder: Path) -> None:
        """Deletes the files in ``folder`` that the last checkpoint does not name. No rank may be in
        :meth:`save` meanwhile."""
        for path in folder.glob("rows.*.pt"):
            if self.files and path.name not in self.files:
                path.unlink()

    def _parts(self, image_ids: Tensor) -> Iterator[tuple[Tensor, ImageState, Tensor]]:
        """(positions in the batch, state, positions in it) of each bucket of the images."""
        ids = image_ids.numpy()
        buckets, positions = self.buckets.of(ids), self.buckets.positions(ids)
        for number in np.unique(buckets).tolist():
            batch = np.flatnonzero(buckets == number)
            part = torch.from_numpy(positions[batch])
            yield torch.from_numpy(batch), self.states[number], part
