"""Verify: every file of a store is what was written, and what was written is what the teacher
says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import store
from gaupipe.data.batches import Batches
from gaupipe.distillation.export import Exported, decoder, outputs
from gaupipe.distillation.kinds import StoredAttentionReader
from gaupipe.settings.teachers import TEACHERS
from gaupipe.system.errors import UserError
from gaupipe.system.progress import EpochProgress
from gaupipe.teachers.base import Teacher
from gaupipe.teachers.files import open_model
from gaupipe.teachers.notes import StoreNotes
from gaupipe.teachers.vit import other_teacher
from stages.runs.directory import RunDirectory
from stages.runs.trained import load_teacher
from store.encoding import LOG_STD_STEP, MEAN_STEP

FURTHEST = 0.01
"""Mean total variation, of maps or predictions, that another device's arithmetic explains."""


def find_problems(url: str) -> list[store.Problem]:
    """Everything that is wrong in a store. Raises StoreError where there is none."""
    try:
        images = store.open(url, allow_incomplete=True).schema.num_images
    except store.StoreError:
        images = 1  # what is wrong with it comes next
    with EpochProgress("verify", images, 1) as progress:

        def advance(done: int, total: int) -> None:
            progress.advance(images * done // total - images * (done - 1) // total)

        return store.verify(url, progress=advance)


def against_teacher(url: str, run_dir: Path | None = None, sample: int = 256) -> list[str]:
    """Runs the teacher of a run again on at least ``sample`` images and says where the store
    differs from it.

    ``run_dir`` is by default the folder that the store lies in. Whole batches of the export are
    compared, chosen at random, so that predictions that are the mean of sampled passes are made of
    the same draws. Raises UserError if the run is not there and StoreError if the store is another
    teacher's.
    """
    teacher = teacher_of_store(url, run_dir)
    images = Exported.of(store.open(url).schema, teacher.data)
    maps = store.open(url, dataset_sha256=images.sha256, teacher_sha256=teacher.sha256)
    differences = list(differing_decoder(maps, teacher))
    batches = teacher.batches(images.split, with_maps=maps.schema.has_maps)
    size = batches.batch_size
    spans = [
        (start, min(start + size, shard.stop))
        for shard in maps.shards
        for start in range(shard.start, shard.stop, size)
    ]
    distances = np.zeros(0)
    for index in np.random.default_rng().permutation(len(spans)):  # others at each call
        if len(distances) >= sample:
            break
        entries = np.arange(*spans[index])
        for made in outputs(teacher, maps.schema, batches, entries):
            schema = maps.schema
            stored = maps.gather(made.ids)
            teachers = {  # rounded as the stored numbers were
                name: schema.decode(name, schema.encode(name, values, int(made.ids[0])))
                for name, values in made.arrays.items()
            }
            differences += differing_images(maps, teacher, made.ids, stored, teachers)
            further = total_variation(stored["logits"], teachers["logits"])
            distances = np.concatenate([distances, further])
    distance = float(distances.mean())
    furthest = FURTHEST
    if not distance <= furthest:  # "not", so that NaN comes here as well
        furthest += noise(teacher, maps.schema, batches, spans[index])
    if not distance <= furthest:
        differences.append(
            f"logits are not the teacher's: mean total variation {distance:.4f} of the predicted "
            "classes"
        )
    return differences


def teacher_of_store(url: str, run_dir: Path | None) -> Teacher:
    """Loads the teacher whose maps a store holds: the run's, or a trained ViT that the export was
    given in its place."""
    schema = store.open(url).schema
    notes = StoreNotes.of(schema)
    if notes.files is not None and notes.transform is not None:
        files = [Path(path) for path in notes.files]
        size = notes.transform["input_size"][-1]
        return open_model(str(notes.teacher), files, image_size=size)[0]
    if run_dir is None:
        folder = store.local_folder(url)
        if folder is None or not RunDirectory(folder.parent).config.is_file():
            raise UserError(f"{url}: --teacher needs the --run-dir of the teacher")
        run_dir = folder.parent
    directory = RunDirectory(run_dir)
    own = directory.teacher_digest() == schema.teacher_sha256
    if own or notes.teacher is None or notes.teacher in TEACHERS:
        teacher = load_teacher(
            directory, directory.load_data(directory.settings(), unlabelled=True)
        )
    else:
        settings = directory.settings()
        data = directory.load_data(settings, unlabelled=True)
        teacher = other_teacher(settings, data, notes.teacher, notes.teacher_args)
    if notes.probe:
        teacher.prepare_export()
    return teacher


def differing_decoder(maps: store.Store, teacher: Teacher) -> Iterator[str]:
    """Names the arrays of a store's decoder that are not the teacher's."""
    stored = maps.decoder()
    teachers = decoder(teacher, maps.schema.kind) or {}
    for name in sorted(stored.keys() | teachers.keys()):
        close = False
        if name in stored and name in teachers and stored[name].shape == teachers[name].shape:
            close = np.allclose(stored[name], teachers[name], rtol=1e-5, atol=1e-6)
        if not close:
            yield f"decoder/{name} is not the teacher's"


def differing_images(
    maps: store.Store,
    teacher: Teacher,
    ids: np.ndarray,
    stored: dict[str, np.ndarray],
    teachers: dict[str, np.ndarray],
) -> Iterator[str]:
    """The first of these images with other numbers than the teacher's, for each array, in words.
    Predictions are left out."""
    schema = maps.schema
    names = [name for name in stored if name != "logits"]
    if schema.has_maps and not teacher.is_exact:
        # whole maps, as the choice of keys may turn out otherwise on another machine
        names = [name for name in names if name not in schema.store_kind.arrays(schema)]
        reader = StoredAttentionReader(maps, torch.device("cpu"))
        stored_maps = reader.attention(stored)
        teacher_maps = reader.attention(teachers)
        distances = [  # total variation [B] of each block, mean over heads and queries
            (stored_maps.map(layer) - teacher_maps.map(layer)).abs().sum(-1).mean((1, 2)) / 2
            for layer in range(schema.maps.layers)
        ]
        distant = torch.stack(distances).mean(0).numpy() > FURTHEST
        yield from _in_words("its maps are", ids, distant)
    for name in names:
        encoding = None
        if name == "gaussians":
            encoding = schema.encoding
        close = are_close(stored[name], teachers[name], encoding)
        yield from _in_words(name, ids, ~close.reshape(len(ids), -1).all(1))


def _in_words(what: str, ids: np.ndarray, wrong: Any) -> Iterator[str]:
    if wrong.any():
        yield (
            f"image {ids[wrong.argmax()]}: {what} not the teacher's "
            f"({wrong.sum()} of {len(ids)} images of its batch)"
        )


def are_close(stored: np.ndarray, teachers: np.ndarray, encoding: str | None) -> np.ndarray:
    """True for numbers that differ by no more than the ``encoding`` of Gaussians, None for other
    numbers, and another device's arithmetic explain. With 8 bits that is one code. Whole numbers
    are equal or not."""
    if stored.dtype.kind in "iu":
        return stored == teachers
    stored = stored.astype(np.float32)
    teachers = teachers.astype(np.float32)
    if encoding != "uint8":
        return np.isclose(stored, teachers, rtol=2**-8, atol=2**-10)
    mean = np.isclose(stored[..., :2], teachers[..., :2], rtol=2**-8, atol=MEAN_STEP)
    one_code = np.expm1(LOG_STD_STEP) + 2**-8
    std = np.isclose(stored[..., 2:], teachers[..., 2:], rtol=one_code, atol=0)
    return np.concatenate([mean, std], -1)


def total_variation(*logits: np.ndarray) -> np.ndarray:
    """Total variation [B] between the class probabilities of two arrays of logits [B, C]."""
    first, second = (torch.from_numpy(each.astype(np.float64)).softmax(1) for each in logits)
    return ((first - second).abs().sum(1) / 2).numpy()


def noise(teacher: Teacher, schema: store.Schema, batches: Batches, span: tuple[int, int]) -> float:
    """Twice the mean total variation between predictions of a batch from different draws: a kind of
    device other than the export's draws other random numbers."""

    def logits(seed: int) -> np.ndarray:
        [made] = outputs(teacher, schema, batches, np.arange(*span), seed=seed)
        return made.arrays["logits"]

    return 2 * float(total_variation(logits(-1), logits(-2)).mean())
