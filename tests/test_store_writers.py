"""Writers that are killed and continued, and several that write one store at once."""

import itertools
import os
import random
import signal
from pathlib import Path

import pytest

import store
from damage import contents, differing
from killing import FORKS, KILLED, InWrite, exit_code
from store.files import Files
from stores import NO_MAPS, make_arrays, make_schema, write_store

SIZES = {
    "maps": dict(num_images=60, kind="topk", k=3, encoding="uint8"),
    "predictions": NO_MAPS | dict(num_images=60, features_dim=4, labelled=False, name_bytes=9),
}


def write(url: Path, what: str = "maps", rank: int = 0, world: int = 1) -> None:
    """Writes the shards of a rank."""
    schema = make_schema(**SIZES[what])
    arrays = make_arrays(schema)
    writer = store.create(url, schema, resume=True, shard_bytes=2 * schema.bytes_per_image)
    pending = [shard for shard in writer.shards[rank::world] if shard in writer.pending()]
    for shard in pending:
        part = slice(shard.start, shard.stop)
        writer.write(shard, {name: values[part] for name, values in arrays.items()})
    if not writer.pending():
        writer.finish()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of the same stores written without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    for what, sizes in SIZES.items():
        schema = make_schema(**sizes)
        shard_bytes = 2 * schema.bytes_per_image
        write_store(folder / what, schema, make_arrays(schema), shard_bytes=shard_bytes)
    return {what: contents(folder / what) for what in SIZES}


@pytest.mark.parametrize("what", SIZES)
def test_killed_writers_are_continued_to_the_same_bytes(tmp_path, whole, what):
    url, draw = tmp_path / "s", random.Random()
    for number in (3, 4, *draw.choices(range(5, 18), k=2)):  # there are two for each of 30 shards
        assert exit_code(write, url, what, kill=InWrite(number)) in KILLED
        pending = {shard.index for shard in store.join(url).pending()}
        finished = {
            path: path.stat().st_mtime_ns
            for path in url.glob("*/c/**/*")
            if path.is_file()
            and not path.name.endswith("__lock")  # what a killed write leaves
            and int(path.relative_to(url).parts[2]) not in pending
        }
        with pytest.raises(store.StoreError, match="incomplete"):
            store.open(url)
        assert [str(problem) for problem in store.verify(url)] == [
            f"{url}: the store is incomplete",
            f"{url}: {len(pending)} of {len(store.join(url).shards)} shards are not written yet",
        ]
    assert finished
    assert exit_code(write, url, what) == 0
    for path, written in finished.items():  # kept, not written again
        assert path.stat().st_mtime_ns == written
    assert differing(contents(url), whole[what]) == []
    assert store.verify(url) == []


@pytest.mark.parametrize("alone", [True, False])
def test_a_finished_store_keeps_no_leavings_of_killed_writes(tmp_path, alone):
    """But what another process may be writing stays."""
    url = tmp_path / "s"
    schema = make_schema(**SIZES["maps"])
    arrays = make_arrays(schema)
    writer = store.create(url, schema)
    for shard in writer.pending():
        part = slice(shard.start, shard.stop)
        writer.write(shard, {name: values[part] for name, values in arrays.items()})
    old, fresh = (url / "labels" / f"{name}.__lock" for name in ("old", "fresh"))
    for path in (old, fresh):
        path.write_bytes(b"half of a shard")
    os.utime(old, (0, 0))
    writer.finish(alone)
    assert not old.exists()
    assert fresh.exists() == (not alone)


@pytest.mark.parametrize("what", SIZES)
def test_four_processes_write_one_store(tmp_path, whole, what):
    url = tmp_path / "s"
    processes = [FORKS.Process(target=write, args=(url, what, rank, 4)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert differing(contents(url), whole[what]) == []
    assert store.verify(url) == []
    assert store.open(url).complete


def overwrite(url: Path) -> None:
    """A writer that is killed when it has deleted some files of the store that it replaces."""
    delete_all = Files.delete_all

    def delete_some_and_die(files: Files, keys) -> None:
        delete_all(files, itertools.islice(keys, 4))
        os.kill(os.getpid(), signal.SIGKILL)

    Files.delete_all = delete_some_and_die
    schema = make_schema(**SIZES["maps"])
    store.create(url, schema, overwrite=True, shard_bytes=2 * schema.bytes_per_image)


def test_a_store_that_was_partly_deleted_names_no_shard_that_is_gone(tmp_path, whole):
    url = tmp_path / "s"
    assert exit_code(write, url) == 0
    assert exit_code(overwrite, url) in KILLED
    with pytest.raises(store.UnfinishedStore):
        store.open(url)
    assert exit_code(write, url) == 0
    assert differing(contents(url), whole["maps"]) == []
    assert store.verify(url) == []
