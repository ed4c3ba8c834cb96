"""What earlier versions wrote is still opened, checked and continued; tests/old/README.md says
what is there."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

import store
from gaupipe import settings as config
from stages import evaluate, export_maps, phase_b
from stages.phase_a import gaussian as phase_a

OLD = Path(__file__).parent / "old"
EXPECTED = json.loads((OLD / "expected.json").read_text())
GATHERED = np.load(OLD / "gathered.npz")
KINDS = ["gaussian", "uint8", "dense", "embedding", "prior"]


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD / name, tmp_path / Path(name).name))


def stored_of(prefix: str) -> dict[str, np.ndarray]:
    return {
        name.partition("/")[2]: GATHERED[name]
        for name in GATHERED.files
        if name.startswith(f"{prefix}/") and "decoder" not in name
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preload_bytes", [0, 10**6])
def test_a_store_of_format_1_is_read_and_verified(kind, preload_bytes):
    url = OLD / "stores" / f"{kind}.zarr"
    assert zarr.open_group(url, mode="r").attrs["format_version"] == 1
    maps = store.open(url, preload_bytes=preload_bytes)
    read, expected = maps.gather(np.arange(7)), stored_of(kind)
    assert read.keys() == expected.keys()
    for name, values in expected.items():
        assert read[name].dtype == values.dtype and np.array_equal(read[name], values), name
    for name, values in maps.decoder().items():
        assert np.array_equal(values, GATHERED[f"{kind}/decoder/{name}"])
    assert store.verify(url) == []
    assert maps.size_on_disk() == sum(map(len, contents(url).values()))


@pytest.mark.parametrize("kind", KINDS)
def test_damage_in_a_store_of_format_1_is_found_as_before(kind, tmp_path):
    url = copied(f"stores/{kind}.zarr", tmp_path)
    name, spec = next(iter(store.open(url).schema.arrays().items()))
    first, second = (
        url / name / "c" / "/".join([index] + ["0"] * (len(spec.shape) - 1)) for index in "01"
    )
    sound = second.read_bytes()
    for damaged in (sound[:-1], bytes([sound[0] ^ 1]) + sound[1:], first.read_bytes()):
        second.write_bytes(damaged)
        assert {(problem.shard, problem.array) for problem in store.verify(url)} == {(1, name)}
    second.write_bytes(sound)
    assert store.verify(url) == []


def test_an_unfinished_store_of_format_1_is_continued_in_format_1(tmp_path):
    url = copied("stores/unfinished.zarr", tmp_path)
    before = contents(url)
    with pytest.raises(store.UnfinishedStore):
        store.open(url)
    writer = store.join(url)
    assert [shard.index for shard in writer.pending()] == [2]
    arrays = stored_of("unfinished")
    for shard in writer.pending():
        writer.write(
            shard, {name: values[shard.start : shard.stop] for name, values in arrays.items()}
        )
    writer.finish()
    assert all(contents(url)[name] == data for name, data in before.items() if name != "zarr.json")
    assert store.verify(url) == [] and zarr.open_group(url, mode="r").attrs["format_version"] == 1
    assert np.array_equal(
        store.open(url).gather([6, 0])["logits"], arrays["logits"][[6, 0]].astype(np.float16)
    )


@pytest.mark.parametrize("damaged", ["zarr.json", "logits/zarr.json", "gaussians/c/1/0/0/0/0"])
def test_a_store_of_format_1_is_repaired_to_the_same_bytes(damaged, tmp_path):
    url = copied("stores/gaussian.zarr", tmp_path)
    before, maps = contents(url), store.open(url)
    (url / damaged).write_bytes(before[damaged][:-3])
    writer = store.repair(url, maps.schema, shard_bytes=3 * maps.schema.bytes_per_image)
    arrays = stored_of("gaussian")
    for shard in writer.pending():
        writer.write(
            shard, {name: values[shard.start : shard.stop] for name, values in arrays.items()}
        )
    writer.finish()
    assert contents(url) == before


def test_an_old_run_is_evaluated_and_its_students_go_on(tmp_path, in_process):
    run = copied("run", tmp_path)
    scores = evaluate.run(run, "standard")
    for name, value in EXPECTED["evaluate"].items():
        assert scores[name] == (
            pytest.approx(value, rel=1e-2) if name in ("loss", "map_kl") else value
        ), name
    assert in_process("verify", run / "maps.zarr", "--teacher")[0] == 0
    assert (
        in_process("phase-b", "--run-dir", run, "--student", "standard", "--resume")[0] == 0
    )  # it was finished
    assert (run / "phase_b/standard/student/SHA256SUMS").is_file()
    assert evaluate.run(run, "standard") == {**scores, "epoch": 1}
    rows = phase_b.run(run, "belief2")
    assert rows[-1]["train_loss"] == pytest.approx(EXPECTED["belief2"][-1]["train_loss"], abs=0.05)
    stored = stored_of("run")
    export_maps.run(run, overwrite=True)
    maps = store.open(run / "maps.zarr")
    assert np.array_equal(maps.gather(np.arange(40))["labels"], stored["labels"])
    np.testing.assert_allclose(
        maps.gather(np.arange(40))["gaussians"], stored["gaussians"], rtol=2e-3, atol=2e-3
    )


def test_an_old_phase_a_with_rows_in_files_is_continued(tmp_path):
    run = copied("rows_in_files", tmp_path)
    before = torch.load(run / "phase_a/checkpoint/state.pt", weights_only=True)["rows"]
    assert "checksums" not in before
    rows = phase_a.run(config.load(run / "config.yaml"), run, resume=True)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert rows[0]["train_loss"] == EXPECTED["rows_in_files"][0]["train_loss"]
    for row, expected in zip(rows, EXPECTED["rows_in_files"], strict=True):
        assert row["train_loss"] == pytest.approx(expected["train_loss"], abs=0.05)
    assert (
        torch.load(run / "phase_a/checkpoint/state.pt", weights_only=True)["rows"][
            "checksums"
        ].count_nonzero()
        == 40
    )
    assert (run / "phase_a/checkpoint/SHA256SUMS").is_file()
