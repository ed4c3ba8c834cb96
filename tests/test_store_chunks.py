"""Embeddings lie uncompressed and are read straight from their files."""

import os
from pathlib import Path

import numpy as np
import pytest
from google_crc32c import value as crc32c

import store
from store import chunks
from test_store import (
    contents,
    decoder_for,
    make_arrays,
    make_schema,
    shard_file,
    write_pending,
    write_store,
)

SCHEMA = make_schema(kind="embedding", embedding_dim=150)
ARRAYS = make_arrays(SCHEMA)
STORED = ARRAYS["embeddings"].astype(np.float16)
IDS = np.array([22, 0, 7, 7, 13, 4])
OPTIONS = dict(shard_bytes=4 * SCHEMA.bytes_per_image, decoder=decoder_for(SCHEMA))


@pytest.fixture
def url(tmp_path) -> Path:
    write_store(tmp_path / "s", SCHEMA, ARRAYS, **OPTIONS)
    return tmp_path / "s"


@pytest.mark.parametrize("cache", ["asked", "never there", "cannot be asked"])
@pytest.mark.parametrize("most_open", [128, 2])
def test_embeddings_need_no_tensorstore(url, monkeypatch, cache, most_open):
    if cache == "never there":
        monkeypatch.setattr(chunks, "_read_cached", lambda *_: False)
    if cache == "cannot be asked":
        monkeypatch.setattr(chunks, "_NO_WAIT", None)
    monkeypatch.setattr(chunks, "MOST_OPEN", most_open)
    maps = store.open(url)
    del maps._arrays["embeddings"]
    for ids in (IDS, np.arange(23), np.zeros(0, int), IDS):
        assert np.array_equal(maps.gather(ids)["embeddings"], STORED[ids])
    assert len(maps._open_chunks["embeddings"]._files) == min(most_open, 6)


def test_no_file_stays_open_after_its_store(url):
    before = len(os.listdir("/proc/self/fd"))
    maps = store.open(url)
    maps.gather(np.arange(23))
    opened = len(os.listdir("/proc/self/fd")) - before
    del maps
    assert len(os.listdir("/proc/self/fd")) <= before + opened - 6


def test_damage_is_told_as_for_any_array(url):
    path = shard_file(url, "embeddings", 1)
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[700] ^= 1  # of the second of four images
    cut = sound[:-20] + bytes(16) + sound[-4:]
    index = sound[-68:-52] + b"\xff" * 16 + sound[-36:-4]  # of four images and its checksum
    emptied = sound[:-68] + index + crc32c(index).to_bytes(4, "little")
    for data, image, what in (
        (emptied, 5, "it is not there"),
        (bytes(damaged), 5, "the stored bytes are damaged"),
        (cut, 4, "the shard's index is damaged"),
        (None, 4, "it is not there"),
    ):
        path.unlink() if data is None else path.write_bytes(data)
        maps = store.open(url)
        with pytest.raises(store.CorruptChunk, match=what) as error:
            maps.gather([0, 4, 5])
        assert (error.value.image_id, error.value.array) == (image, "embeddings")
        assert np.array_equal(maps.gather([3, 22])["embeddings"], STORED[[3, 22]])
        path.write_bytes(sound)


@pytest.mark.parametrize("damaged", ["embeddings/zarr.json", "zarr.json", "labels/c/1", None])
def test_a_repair_leaves_embeddings_as_they_are(url, damaged):
    before = contents(url)
    path = shard_file(url, "embeddings", 2) if damaged is None else url / damaged
    path.write_bytes(path.read_bytes()[:-3])
    writer = store.repair(url, SCHEMA, **OPTIONS)
    assert len(writer.pending()) == (damaged in (None, "labels/c/1"))
    write_pending(writer, ARRAYS)
    assert contents(url) == before


def test_an_export_that_was_killed_as_it_began_goes_on_as_it_was(url):
    before = contents(url)
    (url / "embeddings" / "zarr.json").unlink()
    store.create(url, SCHEMA, resume=True, **OPTIONS).finish()
    assert contents(url) == before
