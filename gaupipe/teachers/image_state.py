"""Per-image parameters: numbers that belong to one training image each, kept on the CPU and stepped
once per epoch.

They never become part of a module. A batch gathers those of its images as a leaf tensor, and after
backward their gradient updates them at once. Every image occurs once per epoch, so that is the same
as one optimizer step over all images at the end of the epoch, without holding the gradients of all
images (*GauTransformer, section 3.3.1*).

An image's parameters and their two Adam moments form one *record* in a file, which the page cache
keeps in memory as far as there is room. There are two places for each record: an update reads the
committed record and writes the new one to the other place, and :meth:`ImageState.commit` makes the
new ones the committed ones. A process killed at any moment has therefore destroyed nothing that the
last checkpoint needs, and a checkpoint says only each image's place, checksum and step count: nine
bytes an image. A record is compared with its checksum the first time it is read after a checkpoint
was loaded.

Axis letters: N images, B images of a batch, R parameters of an image, W int32 words of a record.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google_crc32c import value as crc32c
from torch import Tensor

from gaupipe.system.errors import UserError
from gaupipe.system.files import flush

CHUNK_BYTES = 64 * 2**20
"""Bytes that :meth:`ImageState.chunks` reads at a time."""

BETAS, EPS = (0.9, 0.999), 1e-8
"""Adam's."""


def record_words(size: int) -> int:
    """W of an image with ``size`` parameters: these and their two moments."""
    return 3 * size


class ImageState:
    """The parameters of N images, float32 and of one shape [*shape], their Adam moments and step
    counts, outside the model and on the CPU.

    Images are numbered by their position in the data set's canonical order. The cost of a step does
    not depend on N: nothing is written for an image before its first update.
    """

    def __init__(
        self,
        num_images: int,
        initial: Tensor,
        *,
        lr: float,
        folder: Path,
        initial_std: float = 0.0,
        seed: int = 0,
        drawn_as: Tensor | None = None,
    ) -> None:
        """``lr`` is Adam's. Every image starts at ``initial`` [*shape], plus normal noise of
        ``initial_std`` that (``seed``, image id) alone determine.

        folder     keeps the records, in files that the first update makes
        drawn_as   [N]: the image ids that the noise is drawn for, where they are others
        """
        self.initial = initial.detach().to("cpu", torch.float32, copy=True).contiguous()
        self.lr = lr
        self.initial_std, self.seed, self.drawn_as = initial_std, seed, drawn_as
        self.steps = torch.zeros(num_images, dtype=torch.int32)
        self._records = Records(folder, num_images, record_words(self.initial.numel()))

    def __len__(self) -> int:
        return len(self.steps)

    def gather(self, image_ids: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """The parameters of ``image_ids`` [B] int64 as a leaf tensor [B, *shape] on ``device``
        that collects a gradient."""
        return self.read(image_ids).to(device).requires_grad_()

    def read(self, image_ids: Tensor) -> Tensor:
        """A copy of the parameters of ``image_ids`` [B] int64: [B, *shape], on the CPU."""
        parameters = self._read(image_ids, self.initial.numel())
        return parameters.view(-1, *self.initial.shape)

    @torch.no_grad()
    def update(self, image_ids: Tensor, gradient: Tensor) -> None:
        """One Adam step on the parameters of distinct ``image_ids`` [B] with their ``gradient`` [B,
        *shape], any device.

        Each image has its own step count for the bias correction, so its parameters behave as if
        they were alone in ``torch.optim.Adam``. An image whose gradient is not finite, as float16
        makes it now and then, is left as it was. Raises UserError where it cannot be written.
        """
        gradient = gradient.to("cpu", torch.float32).reshape(len(image_ids), -1)
        finite = torch.isfinite(gradient).all(1)
        image_ids, gradient = image_ids[finite], gradient[finite]
        records = self._read(image_ids, record_words(self.initial.numel()))
        parameters, first, second = records.tensor_split(3, dim=1)  # views, stepped in place
        beta1, beta2 = BETAS
        steps = self.steps[image_ids].add_(1)
        power = steps.double().unsqueeze(1)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = second.div((1 - beta2**power).float()).sqrt_().add_(EPS)
        denominator.mul_(((1 - beta1**power) / self.lr).float())
        parameters.addcdiv_(first, denominator, value=-1)
        self._records.write(image_ids, records.view(torch.int32))
        self.steps[image_ids] = steps

    def commit(self) -> None:
        """Commits all updates so far: they are safely stored when this returns. A checkpoint
        belongs after this and before the next update."""
        self._records.commit()

    def chunks(self) -> Iterator[Tensor]:
        """The parameters of all images in the order of their ids, a few at a time: tensors
        [n, *shape]."""
        size = max(1, CHUNK_BYTES // (4 * max(1, self.initial.numel())))
        for image_ids in torch.arange(len(self)).split(size):
            yield self.read(image_ids)

    def parameters(self) -> Tensor:
        """A copy of the parameters of all images [N, *shape]."""
        return torch.cat([*self.chunks()])

    def state_dict(self) -> dict[str, Any]:
        """The start of images, and nine bytes an image.

        Raises RuntimeError for updates that :meth:`commit` has not committed.
        """
        start = {"mean": self.initial, "std": self.initial_std, "seed": self.seed}
        return {"start": start, "steps": self.steps, "records": self._records.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to what :meth:`state_dict` returned. Updates since then are forgotten, also a
        killed process's.

        Raises UserError for a checkpoint whose files are missing or have moved on.
        """
        self.steps.copy_(state["steps"])
        self._records.load_state_dict(state["records"])
        self.initial.copy_(state["start"]["mean"])
        self.initial_std, self.seed = state["start"]["std"], state["start"]["seed"]

    def release(self) -> None:
        """Deletes superseded records once training is over: half of what the files take."""
        self._records.release(self.steps > 0)

    def _read(self, image_ids: Tensor, words: int) -> Tensor:
        """The first ``words`` of records, float32 [B, words]; of images that have never been
        updated their start."""
        used = self.steps[image_ids] > 0
        records = self._records.read(image_ids, used, words).view(torch.float32)
        if not used.all():
            records[~used, : self.initial.numel()] = self._initial(image_ids[~used])
        return records

    def _initial(self, image_ids: Tensor) -> Tensor:
        """The parameters [B, R] that images start with."""
        alike = self.initial.flatten().expand(len(image_ids), -1)
        if not self.initial_std:
            return alike
        if self.drawn_as is not None:
            image_ids = self.drawn_as[image_ids]
        noise = [
            np.random.Generator(
                np.random.Philox(key=self.seed, counter=[0, 0, 0, image_id])
            ).standard_normal(alike.shape[1], dtype=np.float32)
            for image_id in image_ids.tolist()
        ]
        return alike + self.initial_std * torch.from_numpy(np.stack(noise))


class Records:
    """N records of W int32 words in two files of equal layout, ``records.0`` and ``records.1``.

    Read and written by position, not mapped into memory: a first touch of a mapped page costs a
    page fault, and a write reads the page from disk before it overwrites it. ``files.json`` has the
    number of commits whose records are intact: by it a checkpoint that the files have left behind
    is recognised.
    """

    def __init__(self, folder: Path, num_images: int, words: int) -> None:
        self.folder, self.words = folder, words
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

    def read(self, image_ids: Tensor, used: Tensor, words: int) -> Tensor:
        """The first ``words`` of the newest records of ``image_ids`` [B]; zeros where not ``used``
        [B]. Raises UserError for a record that is not what was written."""
        records = torch.zeros(len(image_ids), words, dtype=torch.int32)
        if used.any():
            self._open()
            self._check(image_ids[used & self.doubtful[image_ids]])
            self._read_into(records, used.nonzero().squeeze(1), image_ids[used])
        return records

    def _read_into(self, records: Tensor, positions: Tensor, image_ids: Tensor) -> None:
        """Reads the newest records of ``image_ids`` [n] into ``records`` [B, words], at
        ``positions`` [n]."""
        size = records.shape[1] * 4
        data = records.numpy().data.cast("B")
        places = [*self._places(image_ids)]
        for descriptor, offset in places:  # the disk looks for all of them at once
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
        for position, (descriptor, offset) in zip(positions.tolist(), places, strict=True):
            start = position * size
            if os.preadv(descriptor, [data[start : start + size]], offset) != size:
                raise UserError(f"{self.folder}: damaged: it has no whole record at byte {offset}")

    def _check(self, image_ids: Tensor) -> None:
        """Compares committed records with their checksums."""
        if not len(image_ids):
            return
        records = torch.empty(len(image_ids), self.words, dtype=torch.int32)
        self._read_into(records, torch.arange(len(image_ids)), image_ids)
        expected = self.checksums[self.place[image_ids].numpy(), image_ids.numpy()]
        wrong = checksums(records) != expected
        if wrong.any():
            raise UserError(
                f"{self.folder}: the record of image {image_ids[wrong.argmax()].item()} is "
                "damaged: restore the run directory from a copy, or start afresh in another "
                "--run-dir"
            )
        self.doubtful[image_ids] = False

    def write(self, image_ids: Tensor, records: Tensor) -> None:
        """Stores records [B, W] beside the committed ones. Raises UserError where that cannot be
        done."""
        try:
            if not self.written.any():
                self._open()
                self._mark()
            self.written[image_ids] = True
            self.doubtful[image_ids] = False
            places = 1 - self.place[image_ids].numpy()
            self.checksums[places, image_ids.numpy()] = checksums(records)
            data, size = records.numpy().data.cast("B"), self.words * 4
            for position, (descriptor, offset) in enumerate(self._places(image_ids)):
                start = position * size
                if os.pwrite(descriptor, data[start : start + size], offset) != size:
                    raise OSError("No space left on device")
        except OSError as error:
            raise UserError(
                f"{self.folder}: per-image parameters cannot be written: "
                f"{error.strerror or error}; the last checkpoint is kept"
            ) from None

    def commit(self) -> None:
        if not self.written.any():
            return
        for descriptor in self._descriptors:
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

    def state_dict(self) -> dict[str, Any]:
        if self.written.any():
            raise RuntimeError("a checkpoint has committed records only: call commit() first")
        committed = np.where(self.place.bool(), self.checksums[1], self.checksums[0])
        checksums = torch.from_numpy(committed.view(np.int32))
        return {"place": self.place, "commits": self.commits, "checksums": checksums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        commits = state["commits"]
        if commits:
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

    def _places(self, image_ids: Tensor) -> Iterator[tuple[int, int]]:
        """(file descriptor, byte offset) of each image's newest record."""
        places = self.place[image_ids] ^ self.written[image_ids]
        for image_id, place in zip(image_ids.tolist(), places.tolist(), strict=True):
            yield self._descriptors[place], image_id * self.words * 4

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
        partial = self.folder / "files.json.partial"
        partial.write_text(json.dumps({"commits": self.commits}))
        flush(partial)
        partial.replace(self.folder / "files.json")
        flush(self.folder)


def checksums(records: Tensor) -> np.ndarray:
    """crc32c [B] uint32 of each record [B, W]; never 0."""
    return np.fromiter((crc32c(record) or 1 for record in records.numpy()), np.uint32, len(records))
