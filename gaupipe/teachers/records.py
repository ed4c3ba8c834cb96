"""Records of per-image parameters in files that a process may leave at any moment.

Parameters that were updated in place would be lost by a kill between two checkpoints, because the
last checkpoint's weights would meet numbers of a later step; and a copy of all of them in each
checkpoint would be tens of GB for ImageNet. So there are two places for each record: an update
reads the committed record and writes the new one to the other place, and :meth:`Records.commit`
makes the new ones the committed ones. A checkpoint then says only each image's place and step
count: five bytes an image.

Axis letters: N images, n images of one call, B rows of a batch, W float32 numbers of a record.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from gaupipe.system.errors import UserError
from gaupipe.system.files import write_flushed


class CommittedRecords(TypedDict):
    """What a checkpoint says of records."""

    place: Tensor
    """The file that holds each image's record, uint8 [N]."""
    commits: int


class Records:
    """The records of N images, of W numbers each, in two files of equal layout, ``records.0``
    and ``records.1``.

    Read and written by position, not mapped into memory: a first touch of a mapped page costs a
    page fault, and a write reads the page from disk before it overwrites it. ``files.json`` has the
    number of commits whose records are intact: by it a checkpoint that the files have left behind
    is recognised.
    """

    def __init__(self, folder: Path, num_images: int, size: int) -> None:
        self.folder = folder
        self.size = 4 * size
        """Bytes of a record."""
        self.place = torch.zeros(num_images, dtype=torch.uint8)
        """The file that holds an image's committed record."""
        self.written = torch.zeros(num_images, dtype=torch.bool)
        """Images whose other place holds a newer record, not committed yet."""
        self.commits = 0
        self._descriptors: list[int] = []

    def read(self, into: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Reads the newest records of ``positions`` [n], or their beginnings, into the ``rows`` [n]
        of a float32 tensor [B, up to W]. Raises UserError for a file that was cut short."""
        if not len(positions):
            return
        self._open()
        size = into.shape[1] * 4
        data = into.numpy().data.cast("B")
        sources = [*self._newest(positions)]
        if hasattr(os, "posix_fadvise"):  # macOS has none
            for descriptor, offset in sources:  # the disk looks for all of them at once
                os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        for row, (descriptor, offset) in zip(rows.tolist(), sources, strict=True):
            start = row * size
            record = os.pread(descriptor, size, offset)
            if len(record) != size:
                raise UserError(f"{self.folder}: damaged: it has no whole record at byte {offset}")
            data[start : start + size] = record

    def write(self, records: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Stores the ``rows`` [n] of records [B, W] beside the committed ones of ``positions`` [n].
        Raises UserError where that cannot be done."""
        try:
            if not self.written.any():
                self._open()
                self._mark()
            self.written[positions] = True  # the committed record stays as it is
            data = records.numpy().data.cast("B")
            size = self.size
            targets = self._newest(positions)
            for row, (descriptor, offset) in zip(rows.tolist(), targets, strict=True):
                start = row * size
                written = os.pwrite(descriptor, data[start : start + size], offset)
                if written != size:  # a full disk takes a part, and reports no error
                    raise OSError("No space left on device")
        except OSError as error:
            raise UserError(
                f"{self.folder}: per-image parameters cannot be written: "
                f"{error.strerror or error}; the last checkpoint is kept"
            ) from None

    def commit(self) -> None:
        if not self.written.any():
            return
        for descriptor in self._descriptors:  # first: a checkpoint may name only what is on disk
            os.fsync(descriptor)
        self.place ^= self.written
        self.written.zero_()
        self.commits += 1

    def release(self, used: Tensor) -> None:
        """Empties a file that holds the committed record of no image that is ``used`` [N]."""
        if (self.folder / "files.json").is_file():  # of an earlier process
            self._open()
        for place, descriptor in enumerate(self._descriptors):
            if not self.written.any() and not (self.place[used] == place).any():
                os.ftruncate(descriptor, 0)

    def state_dict(self) -> CommittedRecords:
        if self.written.any():
            raise RuntimeError("a checkpoint has committed records only: call commit() first")
        return {"place": self.place, "commits": self.commits}

    def load_state_dict(self, state: CommittedRecords) -> None:
        commits = state["commits"]
        if commits:  # else nothing was ever written, and there need be no files
            self._check_files(commits)
        self.place.copy_(state["place"])
        self.written.zero_()
        self.commits = commits

    def _check_files(self, commits: int) -> None:
        """Raises UserError for files that are not there or do not hold the records as of this
        commit."""
        try:
            written = json.loads((self.folder / "files.json").read_bytes())["commits"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise UserError(
                f"{self.folder}: the files with the per-image parameters are missing or unreadable"
            ) from None
        if written not in (commits - 1, commits):
            raise UserError(
                f"{self.folder} holds the per-image parameters of checkpoint {written}, state.pt "
                f"needs those of checkpoint {commits}: they do not belong together"
            )

    def _newest(self, positions: Tensor) -> Iterator[tuple[int, int]]:
        """(file descriptor, byte offset) of each image's newest record."""
        newest = self.place[positions] ^ self.written[positions]
        for position, place in zip(positions.tolist(), newest.tolist(), strict=True):
            yield self._descriptors[place], position * self.size

    def _open(self) -> None:
        if self._descriptors:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for place in range(2):
            path = self.folder / f"records.{place}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._descriptors.append(descriptor)
            weakref.finalize(self, os.close, descriptor)

    def _mark(self) -> None:
        """Notes, before the first write after a commit, which commit's records stay intact
        meanwhile."""
        write_flushed(self.folder / "files.json", json.dumps({"commits": self.commits}))
