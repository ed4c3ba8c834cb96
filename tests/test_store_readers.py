"""A store is read by zarr-python, tensorstore and zarrita with no code of ours, and all see the
same numbers."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr

import store
from test_store import VARIANTS, decoder_for, make_arrays, make_schema, options_of, write_store

HERE = Path(__file__).parent / "zarrita"
LAYOUTS = [*VARIANTS.values(), dict(kind="topk", k=2, grid=(16, 17), layers=1, heads=1)]


def write(url: Path, changes: dict) -> dict[str, np.ndarray]:
    schema = make_schema(num_classes=200, **changes)
    write_store(url, schema, make_arrays(schema), **options_of(schema, 5))
    return store.open(url).gather(np.arange(schema.num_images))


def by_zarr(url: Path) -> dict[str, np.ndarray]:
    return {name: array[...] for name, array in zarr.open_group(url, mode="r").arrays()}


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
@pytest.mark.filterwarnings("error")
def test_zarr_and_tensorstore_agree(tmp_path, changes):
    ours, theirs = write(tmp_path / "s", changes), by_zarr(tmp_path / "s")
    for name, values in theirs.items():
        opened = tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/s/{name}/"}}
        ).result()
        read = opened.read().result()
        assert read.dtype == values.dtype and np.array_equal(read, values)
        if name in ours and "encoding" not in changes:
            assert ours[name].dtype == values.dtype and np.array_equal(ours[name], values)
    for name, values in (decoder_for(make_schema(**changes)) or {}).items():
        assert np.array_equal(
            zarr.open_group(tmp_path / "s", mode="r")["decoder"][name][...], values
        )


@pytest.fixture(scope="module")
def zarrita(tmp_path_factory):
    """A folder with the script and zarrita installed beside it."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node and npm are not installed: zarrita cannot be tried")
    folder = Path(shutil.copytree(HERE, tmp_path_factory.mktemp("zarrita") / "js"))
    if not (folder / "node_modules").exists():
        install = subprocess.run(
            ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if install.returncode:
            pytest.skip(f"npm install failed: {install.stderr.strip().splitlines()[-1:]}")
    return folder


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_zarrita_agrees(tmp_path, zarrita, changes):
    write(tmp_path / "s", changes)
    read = json.loads(
        subprocess.run(
            ["node", "read.js", str(tmp_path / "s")],
            cwd=zarrita,
            check=True,
            timeout=60,
            capture_output=True,
            text=True,
        ).stdout
    )
    expected = {
        name: {
            "shape": list(values.shape),
            "dtype": str(values.dtype),
            "sha256": hashlib.sha256(values.tobytes()).hexdigest(),
        }
        for name, values in by_zarr(tmp_path / "s").items()
    }
    assert read == expected
