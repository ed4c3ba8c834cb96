"""Stores on object storage, against a real S3 server on loopback."""

import contextlib
import http.server
import json
import socket
import socketserver
import threading

import numpy as np
import pytest
import zarr

import store
from object_server import CREDENTIALS
from stages.view.serve import open_viewer
from store.files import Files
from stores import (
    assert_stored,
    damaged_images,
    make_arrays,
    make_schema,
    write_pending,
    write_store,
)


def test_a_store_is_written_read_repaired_and_replaced(s3):
    schema = make_schema()
    arrays, url = make_arrays(schema), f"{s3}/folder/maps.zarr"
    shards = dict(shard_bytes=4 * schema.bytes_per_image)
    write_store(url, schema, arrays, **shards)
    assert_stored(store.open(url).gather([22, 3, 3]), arrays, [22, 3, 3])
    with pytest.raises(store.StoreError, match="--overwrite"):
        store.create(url, schema)
    files = Files(url)
    files.write("gaussians/c/1/0/0/0/0", files.read("gaussians/c/1/0/0/0/0")[:-20])
    files.delete_all(["logits/c/2/0"])
    assert set(damaged_images(url)) == {(1, "gaussians", 4, 8), (2, "logits", 8, 12)}
    with pytest.raises(store.CorruptChunk, match="image 5"):
        store.open(url).gather(np.array([0, 5]))
    write_pending(store.repair(url, schema, **shards), arrays)
    assert store.verify(url) == []
    write_store(url, schema, arrays, overwrite=True)
    assert_stored(store.open(url).gather([0, 5]), arrays, [0, 5])


class Empty(http.server.BaseHTTPRequestHandler):
    """Google's storage without an object."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)


def test_gs_urls_are_asked_of_google(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        with pytest.raises(store.StoreError, match=r"^gs://maps/a/b.zarr: .*$"):
            store.open("gs://maps/a/b.zarr")
        server.shutdown()
    assert Empty.asked[0].startswith("/storage/v1/b/maps/o/a%2Fb.zarr%2Fzarr.json")


def test_zarr_reads_what_was_written(s3):
    obstore = pytest.importorskip(
        "obstore.store", reason="obstore, zarr's access to object storage, is not installed"
    )
    schema = make_schema()
    arrays = make_arrays(schema)
    write_store(f"{s3}/a/maps.zarr", schema, arrays)
    options = {"prefix": "a/maps.zarr", "client_options": {"allow_http": True}}
    there = zarr.storage.ObjectStore(obstore.S3Store("maps", **options))
    group = zarr.open_group(there, mode="r")
    assert_stored({name: group[name][...] for name in arrays}, arrays, slice(None))


def test_every_command_takes_an_s3_url(copied_run, s3, in_process):
    run, url = copied_run(), f"{s3}/folder/digits.zarr"
    export = "export-maps", "--run-dir", run, "--out", url, "--shard-mb", 0.006
    code, out, err = in_process(*export)
    assert (code, out) == (0, url + "\n"), err
    local = str(run / "maps.zarr")
    summary = json.loads(in_process("inspect", url, "--json")[1])
    assert summary["bytes_on_disk"] == store.open(local).size_on_disk()
    assert json.loads(in_process("inspect", url, "--image", 3, "--json")[1])["image"] == 3
    assert open_viewer(url, run).image(3) == open_viewer(local, run).image(3)
    assert in_process("verify", url, "--teacher", "--run-dir", run)[0] == 0
    code, _, err = in_process("export-maps", "--run-dir", run, "--out", url)
    assert (code, err.count("\n")) == (2, 1) and "--overwrite" in err
    code, _, err = in_process("phase-b", "--run-dir", run, "--name", "new", "--maps", url)
    assert code == 0, err


@pytest.mark.parametrize(
    "command,words",
    [
        ("inspect s3://maps/absent.zarr", "s3://maps/absent.zarr"),
        ("verify s3://maps/absent.zarr", "s3://maps/absent.zarr"),
        ("export-maps --run-dir RUN --out s3://absent/maps.zarr", "bucket"),
    ],
)
def test_a_store_or_a_bucket_that_is_not_there_gives_one_line(
    copied_run, s3, in_process, command, words
):
    code, _, err = in_process(*command.replace("RUN", str(copied_run())).split())
    assert (code, err.count("\n")) == (2, 1) and words in err


@pytest.mark.parametrize("name", CREDENTIALS)
def test_a_refused_key_gives_one_line_and_writes_nothing(
    copied_run, s3, in_process, monkeypatch, name
):
    url = f"{s3}/refused.zarr"
    with monkeypatch.context() as wrong:
        wrong.setenv(name, "wrong")
        code, _, err = in_process("export-maps", "--run-dir", copied_run(), "--out", url)
    assert (code, err.count("\n")) == (2, 1) and "credentials" in err
    with pytest.raises(store.StoreError):
        store.open(url)


class Proxy(socketserver.ThreadingTCPServer):
    """Passes bytes to ``port`` until ``limit`` of them went there; then every connection is cut
    and none accepted."""

    daemon_threads = True

    def __init__(self, port: int, limit: int) -> None:
        super().__init__(("127.0.0.1", 0), None)
        self.port, self.limit = port, limit
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def finish_request(self, request, client_address) -> None:
        if self.limit <= 0:
            return
        with socket.create_connection(("127.0.0.1", self.port)) as upstream:
            back = threading.Thread(target=self.copy, args=(upstream, request, 0), daemon=True)
            back.start()
            self.copy(request, upstream, 1)
            back.join()

    def copy(self, source, target, counted: int) -> None:
        with contextlib.suppress(OSError):
            while self.limit > 0 and (data := source.recv(4096)):
                target.sendall(data)
                self.limit -= counted * len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_drops_leaves_no_store_that_looks_whole(
    copied_run, server, s3, in_process, monkeypatch
):
    url = f"{s3}/dropped.zarr"
    export = "export-maps", "--run-dir", copied_run(), "--out", url, "--shard-mb", 0.01
    with Proxy(int(server.rpartition(":")[2]), 10_000) as proxy, monkeypatch.context() as through:
        through.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
        code, _, err = in_process(*export)
        proxy.shutdown()
    said = [line for line in err.splitlines() if not line.startswith("export: ")]
    assert code == 2 and len(said) == 1 and "does not answer" in said[0] and url in said[0]
    with pytest.raises(store.StoreError):
        store.open(url)
    code, _, err = in_process(*export)
    assert code == 0, err
    assert in_process("verify", url)[0] == 0
