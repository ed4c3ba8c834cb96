"""Records of per-image parameters in files that a process may leave at any moment.

Parameters that were updated in place would be lost by a kill between two checkpoints, because the
last checkpoint's weights would meet numbers of a later step; and a copy of all of them in each
checkpoint would be tens of GB for ImageNet. So there are two places for each record: an update
reads the committed record and writes the new one to the other place, and :meth:`Records.commit`
makes the new ones the committed ones. A checkpoint then says only each image's place, checksum and
step count: nine bytes an image. Because these files lie outside the checkpoint, a record is
compared with its checksum the first time it is read after a checkpoint was loaded; without that a
flipped bit would be trained on in silence.

Axis letters: N images, n images of one call, B rows of a batch, W int32 words of a record.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from google_crc32c import value as crc32c
from torch import Tensor

from gaupipe.system.errors import UserError
from gaupipe.system.files import write_flushed


class CommittedRecords(TypedDict):
    """What a checkpoint says of records."""

    place: Tensor
    """The file that holds each image's record, uint8 [N]."""
    commits: int
    checksums: Tensor
    """crc32c of each image's record, as int32 [N]; 0 of one that was never written."""


class Records:
    """The records of N images, of W int32 words each, in two files of equal layout, ``records.0``
    and ``records.1``. Methods take positions in ``image_ids`` [N], messages name the id.

    Read and written by position, not mapped into memory: a first touch of a mapped page costs a
    page fault, and a write reads the page from disk before it overwrites it. ``files.json`` has the
    number of commits whose records are intact: by it a checkpoint that the files have left behind
    is recognised.
    """

    def __init__(self, folder: Path, image_ids: np.ndarray, words: int) -> None:
        self.folder = folder
        self.image_ids = image_ids
        self.words = words
        num_images = len(image_ids)
        self.place = torch.zeros(num_images, dtype=torch.uint8)
        """The file that holds an image's committed record."""
        self.written = torch.zeros(num_images, dtype=torch.bool)
        """Images whose other place holds a newer record, not committed yet."""
        self.checksums = np.zeros((2, num_images), dtype=np.uint32)
        """crc32c of the record in each place; 0 before its first write."""
        self.doubtful = torch.zeros(num_images, dtype=torch.bool)
        """Images whose committed record another process wrote and nothing has compared yet."""
        self.commits = 0
        self._descriptors: list[int] = []

    def read(self, into: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Reads the newest records of ``positions`` [n], or their beginnings, into the ``rows`` [n]
        of an int32 tensor [B, up to W]. Raises UserError for a record that is not what was
        written."""
        if len(positions):
            self._open()
            self._check(positions[self.doubtful[positions]])
            self._read(into, rows, positions)

    def _read(self, into: Tensor, rows: Tensor, positions: Tensor) -> None:
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

    def _check(self, positions: Tensor) -> None:
        """Compares committed records with their checksums."""
        if not len(positions):
            return
        records = torch.empty(len(positions), self.words, dtype=torch.int32)
        rows = torch.arange(len(positions))
        self._read(records, rows, positions)
        expected = self.checksums[self.place[positions].numpy(), positions.numpy()]
        wrong = checksums(records, rows) != expected
        if wrong.any():
            image_id = self.image_ids[positions[wrong.argmax()]]
            raise UserError(
                f"{self.folder}: the record of image {image_id} is damaged: restore the "
                "run directory from a copy, or start afresh in another --run-dir"
            )
        self.doubtful[positions] = False

    def write(self, records: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Stores the ``rows`` [n] of records [B, W] beside the committed ones of ``positions`` [n].
        Raises UserError where that cannot be done."""
        try:
            if not self.written.any():
                self._open()
                self._mark()
            self.written[positions] = True
            self.doubtful[positions] = False
            others = 1 - self.place[positions].numpy()  # the committed record stays as it is
            self.checksums[others, positions.numpy()] = checksums(records, rows)
            data = records.numpy().data.cast("B")
            size = self.words * 4
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
        committed = np.where(self.place.bool(), self.checksums[1], self.checksums[0])
        checksums = torch.from_numpy(committed.view(np.int32))
        return {"place": self.place, "commits": self.commits, "checksums": checksums}

    def load_state_dict(self, state: CommittedRecords) -> None:
        commits = state["commits"]
        if commits:  # else nothing was ever written, and there need be no files
            self._check_files(commits)
        self.place.copy_(state["place"])
        self.written.zero_()
        self.commits = commits
        self.checksums[:] = 0
        images = np.arange(len(self.place))
        self.checksums[self.place.numpy(), images] = state["checksums"].numpy().view(np.uint32)
        self.doubtful = torch.from_numpy(self.checksums.any(0))

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
            yield self._descriptors[place], position * self.words * 4

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


def checksums(records: Tensor, rows: Tensor) -> np.ndarray:
    """crc32c [n] uint32 of the ``rows`` [n] of records [B, W]; never 0."""
    words = records.numpy()
    return np.fromiter((crc32c(words[row]) or 1 for row in rows.tolist()), np.uint32, len(rows))
