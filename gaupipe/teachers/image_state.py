"""Per-image parameters: numbers that belong to one training image each, kept on the CPU and stepped
once per epoch.

As one big ``nn.Parameter`` they would need values, gradients and moments of every image of the data
set in memory at once; torch's optimizers would step all images at every batch, and Adam's moments
would move images that the batch does not hold. So they never become part of a
module: a batch gathers those of its images as a leaf tensor, and after backward their gradient
updates them at once. Every image occurs once per epoch, so that is the same as one optimizer step
over all images at the end of the epoch (*GauTransformer, section 3.3.1*).

An image's parameters and their two Adam moments form one *record* in a file of
:mod:`gaupipe.teachers.records`, which the page cache keeps in memory as far as there is room. Each
bucket of image ids has files of its own, so that ranks never write to the same file. One process
alone has a single bucket.

Axis letters: B images of a batch, R parameters of an image, W numbers of a record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.buckets import Buckets
from gaupipe.system import digests, distributed
from gaupipe.system.errors import UserError
from gaupipe.system.files import flush
from gaupipe.teachers.records import Records

CHUNK_BYTES = 64 * 2**20
"""Bytes that a digest reads at a time."""

BETAS = (0.9, 0.999)
EPS = 1e-8  # both Adam's


def record_size(size: int) -> int:
    """W of an image with ``size`` parameters: these and their two moments."""
    return 3 * size


class ImageState:
    """The parameters of the images of some buckets, float32 and of one shape [*shape], their Adam
    moments and step counts, outside the model and on the CPU.

    Images are numbered by their position in the data set's canonical order; the id of an image in
    another bucket raises KeyError. The cost of a step does not depend on the number of images:
    nothing is written for an image before its first update.
    """

    def __init__(
        self,
        buckets: Buckets,
        initial: Tensor,
        *,
        lr: float,
        folder: Path,
        initial_std: float = 0.0,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """``lr`` is Adam's. Every image starts at ``initial`` [*shape], plus normal noise of
        ``initial_std`` that (``seed``, image id) alone determine.

        folder    keeps the records, in files that the first update makes
        numbers   the buckets of this state; None: those of the rank
        """
        self.buckets = buckets
        self.lr = lr
        # on the CPU whatever the model's device: all images together may not fit a GPU
        self.initial = initial.detach().to("cpu", torch.float32, copy=True).contiguous()
        self.initial_std = initial_std
        self.seed = seed
        self.steps = torch.zeros(buckets.images, dtype=torch.int32)
        size = record_size(self.initial.numel())
        if numbers is None:
            numbers = buckets.rank_buckets()
        self.members = {number: buckets.members(number) for number in numbers}
        self.records = {
            number: Records(folder / f"bucket-{number:04d}", len(image_ids), size)
            for number, image_ids in self.members.items()
        }
        self.files: dict[str, str] = {}
        """The files of all buckets in the last checkpoint, with their sha256."""

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
        gradient = gradient.to("cpu", torch.float32).reshape(len(image_ids), -1)  # [B, R]
        finite = torch.isfinite(gradient).all(1)
        image_ids = image_ids[finite]
        gradient = gradient[finite]
        values = self._read(image_ids, record_size(self.initial.numel()))
        parameters, first, second = values.tensor_split(3, dim=1)  # views, stepped in place
        beta1, beta2 = BETAS
        steps = self.steps[image_ids].add_(1)  # a copy
        power = steps.double().unsqueeze(1)  # torch's Adam corrects the bias in double, too
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = second.div((1 - beta2**power).float()).sqrt_().add_(EPS)
        denominator.mul_(((1 - beta1**power) / self.lr).float())
        parameters.addcdiv_(first, denominator, value=-1)
        for records, rows, positions in self._parts(image_ids):
            records.write(values, rows, positions)
        self.steps[image_ids] = steps  # last: a write may fail, and then no step was made

    def commit(self) -> None:
        """Commits all updates so far: they are safely stored when this returns. A checkpoint
        belongs after this and before the next update."""
        for records in self.records.values():
            records.commit()

    def release(self) -> None:
        """Deletes superseded records once training is over: half of what the files take."""
        for number, records in self.records.items():
            records.release(self.steps[self.members[number]] > 0)

    def sha256s(self) -> list[str]:
        """A digest of the parameters of each bucket, in the order of buckets. Every rank digests
        its own buckets."""
        size = max(1, CHUNK_BYTES // (4 * self.initial.numel()))
        sha256s = {}
        for number in self.buckets.rank_buckets():
            digest = hashlib.sha256()
            for image_ids in torch.from_numpy(self.members[number]).split(size):
                digest.update(np.ascontiguousarray(self.read(image_ids).numpy()).data)
            sha256s[number] = digest.hexdigest()
        return [sha256 for _, sha256 in sorted(distributed.all_gather_dict(sha256s).items())]

    def save(self, folder: Path, moment: str) -> dict[str, dict[str, str]]:
        """Writes the committed parameters of every bucket to a file in ``folder``, beside those of
        earlier moments. Returns the sha256 of every file, of all ranks, by name, as :meth:`load`
        takes it. Raises RuntimeError for updates that :meth:`commit` has not committed."""
        folder.mkdir(parents=True, exist_ok=True)
        written = {}
        for number, records in self.records.items():
            path = folder / f"rows.{moment}.{number:04d}.pt"
            state = {"steps": self.steps[self.members[number]], "records": records.state_dict()}
            digests.save(state, path)
            written[path.name] = digests.sha256(path)
        flush(folder)
        self.files = distributed.all_gather_dict(written)
        return {"buckets": self.files}

    def load(self, folder: Path, saved: dict[str, dict[str, str]]) -> None:
        """Goes back to what :meth:`save` returned. Updates since then are forgotten, also a killed
        process's. Raises UserError for a file that is missing or damaged, and for records that have
        moved on; a rank compares the digests of its own buckets."""
        files = saved["buckets"]
        by_bucket = {int(name.split(".")[2]): name for name in files}
        for number, records in self.records.items():
            path = folder / by_bucket[number]
            # a teacher that is only read has all buckets, and digests of all on all ranks take long
            mine = number in self.buckets.rank_buckets()
            if not path.is_file() or (mine and digests.sha256(path) != files[path.name]):
                raise UserError(
                    f"{path} is missing or damaged: restore it from a copy, or start afresh in "
                    "another --run-dir"
                )
            state = torch.load(path, weights_only=True, mmap=True)
            records.load_state_dict(state["records"])
            self.steps[self.members[number]] = state["steps"]
        self.files = files

    def remove_superseded(self, folder: Path) -> None:
        """Deletes the files in ``folder`` that the last checkpoint does not name. No rank may be in
        :meth:`save` meanwhile."""
        for path in folder.glob("rows.*.pt"):
            if self.files and path.name not in self.files:
                path.unlink()

    def _parts(self, image_ids: Tensor) -> Iterator[tuple[Records, Tensor, Tensor]]:
        """(records, rows of the batch, positions in the records) of each bucket of the images."""
        ids = image_ids.numpy()
        buckets = self.buckets.of(ids)
        positions = self.buckets.positions(ids)
        for number in np.unique(buckets).tolist():
            rows = np.flatnonzero(buckets == number)
            yield self.records[number], torch.from_numpy(rows), torch.from_numpy(positions[rows])

    def _read(self, image_ids: Tensor, size: int) -> Tensor:
        """The first ``size`` numbers of records, float32 [B, size]; of images that have never been
        updated their start."""
        values = torch.zeros(len(image_ids), size)
        used = self.steps[image_ids] > 0
        for records, rows, positions in self._parts(image_ids):
            seen = used[rows]
            records.read(values, rows[seen], positions[seen])
        if not used.all():
            values[~used, : self.initial.numel()] = self._initial(image_ids[~used])
        return values

    def _initial(self, image_ids: Tensor) -> Tensor:
        """The parameters [B, R] that images start with."""
        mean = self.initial.flatten().expand(len(image_ids), -1)
        if not self.initial_std:
            return mean
        noise = []
        for image_id in image_ids.tolist():  # a counter each: a start depends on no other image
            counter = [0, 0, 0, image_id]
            generator = np.random.Generator(np.random.Philox(key=self.seed, counter=counter))
            noise.append(generator.standard_normal(mean.shape[1], dtype=np.float32))
        return mean + self.initial_std * torch.from_numpy(np.stack(noise))
