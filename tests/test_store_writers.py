"""Writers that are killed and continued, and several that write one store at once."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import store
from test_store import make_arrays, make_schema, write_store

SCRIPT = """
import json
import sys
import store
from test_store import make_arrays, make_schema

url, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
schema = make_schema(num_images=60, **json.loads(sys.argv[4]))
arrays = make_arrays(schema)
writer = store.create(url, schema, resume=True, shard_bytes=2 * schema.bytes_per_image)
print("started", flush=True)
for shard in writer.shards[rank::world]:
    if shard in writer.pending():
        part = slice(shard.start, shard.stop)
        writer.write(shard, {name: values[part] for name, values in arrays.items()})
if not writer.pending():
    writer.finish()
"""


KINDS = {"gaussian": {}, "topk": dict(kind="topk", k=3, encoding="uint8")}


def start(url: Path, kind: str, rank: int = 0, world: int = 1) -> subprocess.Popen:
    arguments = [str(url), str(rank), str(world), json.dumps(KINDS[kind])]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
    )


def contents(url: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(url)): path.read_bytes() for path in url.rglob("*") if path.is_file()
    }


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def whole(tmp_path_factory, kind):
    """The files of the same store written without interruption."""
    url = tmp_path_factory.mktemp("whole") / "s"
    schema = make_schema(num_images=60, **KINDS[kind])
    write_store(url, schema, make_arrays(schema), shard_bytes=2 * schema.bytes_per_image)
    return contents(url)


def test_killed_writers_are_continued_to_the_same_bytes(tmp_path, kind, whole):
    url, kills, draw = tmp_path / "s", 0, random.Random()
    while kills < 5:
        process = start(url, kind)
        process.stdout.readline()
        time.sleep(
            draw.uniform(0, 0.02 * (kills + 1))
        )  # the first kill comes early, on a fast machine too
        process.kill()
        kills += process.wait() < 0
        finished = {path: path.stat().st_mtime_ns for path in url.glob("shard_sha256/c/*/0/0")}
        if (
            process.returncode == 0 or contents(url) == whole
        ):  # it was done, or the kill came after its last byte
            break
        with pytest.raises(store.StoreError, match="incomplete"):
            store.open(url)
        assert {p.what for p in store.verify(url)} <= {
            f"{url}: the store is incomplete",
            "not written yet, or the record of it is damaged",
        }
    assert kills >= 1
    process = start(url, kind)
    assert process.wait() == 0
    assert all(
        path.stat().st_mtime_ns == written for path, written in finished.items()
    )  # kept, not written again
    assert contents(url) == whole and store.verify(url) == []


def test_four_processes_write_one_store(tmp_path, kind, whole):
    url = tmp_path / "s"
    processes = [start(url, kind, rank, 4) for rank in range(4)]
    assert [process.wait() for process in processes] == [0, 0, 0, 0]
    assert contents(url) == whole and store.verify(url) == []
    assert store.open(url).complete
