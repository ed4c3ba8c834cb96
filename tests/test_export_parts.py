"""``export-maps --part I/N``: processes that know nothing of each other write one store."""

import shutil

import numpy as np
import pytest

import store
from damage import contents
from exports import SHARD_MB, exported, write_store
from killing import FORKS, KILLED, InWrite, exit_code
from stages.export import writing
from store.files import Files


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory whose phase A has finished, and its complete store."""
    return exported(tmp_path_factory.mktemp("export") / "run")


@pytest.fixture
def run(trained, tmp_path):
    """A run whose phase A has finished, without a store."""
    without_store = shutil.ignore_patterns("maps.zarr")
    return shutil.copytree(trained, tmp_path / "run", ignore=without_store)


def files(folder):
    """All files but the empty ones that a killed write leaves."""
    found = contents(folder)
    return {name: data for name, data in found.items() if not name.endswith("__lock")}


def write_part(run, number, parts, **options):
    write_store(run, shard_mb=SHARD_MB, part=(number, parts), **options)


def test_parts_in_any_order_give_the_bytes_of_one_process(trained, run, capfd):
    whole = files(trained / "maps.zarr")
    for number in (3, 1, 3):  # a part once more does nothing
        write_part(run, number, 4)
    with pytest.raises(store.UnfinishedStore):
        store.open(run / "maps.zarr")
    assert "are other parts'" in capfd.readouterr().err
    for number in (4, 2):
        write_part(run, number, 4)
    assert files(run / "maps.zarr") == whole
    assert store.verify(run / "maps.zarr") == []
    write_part(run, 1, 4)  # of a complete store
    assert files(run / "maps.zarr") == whole


def test_a_part_without_shards_and_parts_at_once(trained, run):
    """25 parts of 19 shards, all at once; the export without a part completes what is left."""
    parts = [FORKS.Process(target=write_part, args=(run, number, 25)) for number in (1, 2, 20, 25)]
    for process in parts:
        process.start()
    for process in parts:
        process.join()
    assert [process.exitcode for process in parts] == [0] * 4
    assert len(store.join(run / "maps.zarr").pending()) == 17
    write_store(run, shard_mb=SHARD_MB)
    assert files(run / "maps.zarr") == files(trained / "maps.zarr")


def test_the_export_without_a_part_verifies_what_others_wrote(trained, run, monkeypatch):
    """All shards are there, and one is not what was written: it is written again."""
    url = run / "maps.zarr"
    monkeypatch.setattr(writing, "finish", lambda *_: 1)  # as of parts that are killed before it
    write_part(run, 1, 2)
    write_part(run, 2, 2)
    monkeypatch.undo()
    assert store.join(url).pending() == [] and not store.join(url).complete
    damaged = url / "labels" / "c" / "3"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1])
    with pytest.raises(store.StoreError, match="the files of 1 shards are not what"):
        write_store(run, shard_mb=SHARD_MB)
    assert [shard.index for shard in store.join(url).pending()] == [3]
    write_store(run, shard_mb=SHARD_MB)
    assert files(url) == files(trained / "maps.zarr")


def test_entries_of_a_shard_that_is_written_once_more_go(trained, run):
    """By a process that began before others completed the store."""
    write_store(run, shard_mb=SHARD_MB)
    url = run / "maps.zarr"
    Files(url).write("manifest/finished/earlier-3", b"{}")
    write_part(run, 4, 19)
    assert files(url) == files(trained / "maps.zarr")


def test_a_process_that_creates_late_overwrites_nothing(tmp_path):
    Files(tmp_path / "s").create("a", b"first")
    Files(tmp_path / "s").create("a", b"second")
    assert Files(tmp_path / "s").read("a") == b"first"


@pytest.mark.parametrize(
    "options,message",
    [
        (("--part", "17/16"), "--part 17/16: should be from 1/16 to 16/16"),
        (("--part", "0/16"), "--part 0/16: should be from 1/16 to 16/16"),
        (("--part", "3"), "'3' should be a part and the number of parts: 3/16"),
        (("--part", "1/2", "--overwrite"), "--part with --overwrite: each part would do away"),
        (("--part", "1/2", "--repair"), "--part with --repair"),
        (("--license", "mine\nyours"), "--license mine yours: should be a name such as cc-by-4.0"),
    ],
)
def test_bad_parts_give_one_line_and_write_nothing(run, in_process, options, message):
    before = contents(run)
    code, out, err = in_process("export-maps", "--run-dir", run, *options)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1, err
    assert {**contents(run), "lock": b""} == {**before, "lock": b""}


def test_an_export_keeps_out_parts_and_parts_keep_out_it(run):
    from gaupipe.system.files import alone_in

    (run / "maps.zarr").mkdir()
    with alone_in(run / "maps.zarr", "busy"), pytest.raises(ValueError, match="another process"):
        write_part(run, 1, 2)
    with alone_in(run / "maps.zarr", "busy", shared=True):
        write_part(run, 1, 2)
        with pytest.raises(ValueError, match="another process"):
            write_store(run, shard_mb=SHARD_MB)


def test_parts_on_object_storage(trained, run, s3, tmp_path):
    url = f"{s3}/parts.zarr"
    Files(url).create("zarr.json", b"first")
    Files(url).create("zarr.json", b"second")
    assert Files(url).read("zarr.json") == b"first"
    Files(url).delete_all(["zarr.json"])
    for number in (2, 1):
        write_part(run, number, 2, out=url)
    assert store.verify(url) == []
    whole = files(trained / "maps.zarr")
    assert Files(url).read_all(whole) == whole
    assert set(Files(url).list()) == set(whole)


def test_an_export_to_a_bucket_reads_back_what_is_there(run, s3, monkeypatch):
    url = f"{s3}/back.zarr"
    finish = writing.finish

    def after_another_process(*arguments):
        Files(url).write("labels/c/3", b"of another process")
        return finish(*arguments)

    with monkeypatch.context() as late:
        late.setattr(writing, "finish", after_another_process)
        with pytest.raises(store.StoreError, match="the files of 1 shards are not what"):
            write_store(run, shard_mb=SHARD_MB, out=url)
    with pytest.raises(store.UnfinishedStore):
        store.open(url)
    write_store(run, shard_mb=SHARD_MB, out=url)
    assert store.verify(url) == []


def test_parts_that_are_killed_lose_nothing(trained, run):
    draw = np.random.default_rng()
    for number in (1, 2, 3, 1, 2, 3):  # of some six shards each, of two writes
        kill = InWrite(draw.integers(0, 6).item())
        assert exit_code(write_part, run, number, 3, kill=kill) in KILLED
    for number in (1, 2, 3):
        write_part(run, number, 3)
    assert files(run / "maps.zarr") == files(trained / "maps.zarr")
