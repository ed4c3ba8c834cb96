"""Export, verify and repair as a user meets them: interrupted, damaged, and compared with the
teacher."""

import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import store
from arguments import sets
from damage import contents, differing, flip, times
from exports import SHARD_MB, exported, train, write_store
from gaupipe.data.load import load_data
from gaupipe.distillation.export import lost
from gaupipe.distillation.kinds import StoredAttentionReader
from gaupipe.distillation.store_choice import choose_store
from gaupipe.settings.load import dump, load
from gaupipe.teachers.base import outline
from killing import KILLED, InWrite, exit_code
from stages.export.writing import loss_line
from stages.runs.directory import RunDirectory
from stages.runs.trained import load_teacher
from stores import write_pending


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory whose phase A has finished, and its complete store."""
    return exported(tmp_path_factory.mktemp("export") / "run")


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def shard_files(folder: Path) -> list[str]:
    return sorted(
        name
        for name in contents(folder)
        if name.split("/")[0] in ("gaussians", "logits", "labels")
        and "/c/" in name
        and not name.endswith("__lock")
    )


def export_run(run: Path) -> None:
    write_store(run, shard_mb=SHARD_MB)


def export_run_and_die(run: Path) -> None:
    export_run(run)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def unexported(trained, tmp_path):
    """The run directory without its store."""
    no_store = shutil.ignore_patterns("maps.zarr")
    return Path(shutil.copytree(trained, tmp_path / "run", ignore=no_store))


@pytest.mark.parametrize("after", [0, 1], ids=["in", "after"])
def test_an_export_killed_in_or_after_its_last_write(trained, unexported, after):
    maps, whole = unexported / "maps.zarr", contents(trained / "maps.zarr")
    last = 3 + 2 * 19 + 2  # metadata, two writes a shard, card and manifest before the root
    assert exit_code(export_run_and_die, unexported, kill=InWrite(last + after)) in KILLED
    assert store.join(maps).pending() == []
    if contents(maps) != whole:  # killed before the last byte
        assert not after
        with pytest.raises(store.StoreError):
            store.open(maps)
        assert exit_code(export_run, unexported) == 0
    assert differing(contents(maps), whole) == []
    assert store.open(maps).complete


def test_an_export_says_its_size_first_and_its_speed_last(run, in_process):
    shutil.rmtree(run / "maps.zarr")
    code, out, err = in_process("export-maps", "--run-dir", run)
    first, last = err.splitlines()
    assert code == 0 and Path(out.strip()) == run / "maps.zarr"
    assert "200 images as gaussian, float16, at most 108.0 kB (540 bytes each)" in first
    assert "images/s" in last


def test_an_export_takes_what_may_change_at_any_time(run, tmp_path, in_process):
    """As after phase A on another machine, with more GPUs."""
    config = run / "config.yaml"
    config.write_text(dump(load(config, ["device=cuda:77"])))
    export = ["export-maps", "--run-dir", run, "--out", tmp_path / "new.zarr"]
    code, _, err = in_process(*export, *sets("threads=1"))
    assert code == 2 and "cuda:77" in err
    code, _, err = in_process(*export, *sets("device=cpu", "seed=1"))
    assert code == 2 and "gaupipe: seed: belongs to the run" in err
    code, _, err = in_process(*export, *sets("device=cpu", "threads=1"))
    assert code == 0, err
    maps, new = (store.open(path) for path in (run / "maps.zarr", tmp_path / "new.zarr"))
    assert maps.schema.teacher_sha256 == new.schema.teacher_sha256


def test_what_is_stored_is_the_teachers(trained):
    job = load_teacher(RunDirectory(trained))
    ids = np.array([199, 3, 3, 77])
    stored = store.open(trained / "maps.zarr", dataset_sha256=job.data.sha256).gather(ids)
    own = job.network.gaussians(job.parameters(torch.from_numpy(ids))).detach()
    np.testing.assert_array_equal(stored["gaussians"], own.numpy().astype(np.float16))
    np.testing.assert_array_equal(stored["labels"], job.data.train.labels[ids])


def test_a_teacher_with_averaged_weights_is_read_with_these(tmp_path):
    directory = RunDirectory(train(tmp_path / "run", "phase_a.optim.ema=0.9"))
    network = load_teacher(directory).network
    saved = torch.load(directory.phase_a / "checkpoint" / "state.pt", weights_only=True)
    for name, value in network.state_dict().items():
        torch.testing.assert_close(value, saved["ema"][f"module.{name}"], rtol=0, atol=0)
    assert not torch.equal(network.prior, saved["modules"]["prior"])
    assert load_teacher(directory).sha256 == directory.teacher_digest()  # of phase A's own end


def test_repair_rewrites_what_is_damaged_and_nothing_else(run, in_process):
    maps = run / "maps.zarr"
    before, written, files = contents(maps), times(maps), shard_files(maps)
    draw, shards = np.random.default_rng(), store.join(maps).shards
    gaussians = [name for name in files if name.startswith("gaussians")]
    flipped, cut, removed = draw.choice(gaussians, 3, replace=False)
    flip(maps / flipped, draw.random(), draw.integers(8).item())
    (maps / cut).write_bytes(before[cut][:-1])
    (maps / removed).unlink()
    (maps / "logits" / "zarr.json").write_bytes(
        before["logits/zarr.json"].replace(b"float16", b"float32")
    )

    code, out, _ = in_process("verify", maps)
    assert code == 1 and "logits/zarr.json" in out
    for name in (flipped, cut, removed):
        shard = shards[int(name.split("/")[2])]
        lines = re.findall(rf"shard {shard.index}, gaussians, images? (\d+)", out)
        assert any(shard.start <= int(image) < shard.stop for image in lines)
    assert in_process("export-maps", "--run-dir", run, "--repair")[0] == 0
    assert differing(contents(maps), before) == []
    rewritten, now = {name.split("/")[2] for name in (flipped, cut, removed)}, times(maps)
    sound = [name for name in files if name.split("/")[2] not in rewritten]
    assert [name for name in sound if now[name] != written[name]] == []
    assert in_process("verify", maps) == (0, f"{maps}: complete and intact\n", "")


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_damaged_or_lost_root_is_repaired(run, in_process, damage):
    maps = run / "maps.zarr"
    before = contents(maps)
    damage(maps / "zarr.json")
    code, out, _ = in_process("verify", maps)
    assert code == 1 and "--repair" in out
    code, _, err = in_process("phase-b", "--run-dir", run, "--student", "standard")
    assert (code, err.count("\n")) == (2, 1)
    assert in_process("export-maps", "--run-dir", run, "--repair", "--shard-mb", SHARD_MB)[0] == 0
    assert differing(contents(maps), before) == []


def test_an_interrupted_repair_leaves_a_store_that_no_reader_opens(run, in_process, monkeypatch):
    maps = run / "maps.zarr"
    before = contents(maps)
    (maps / shard_files(maps)[0]).unlink()

    def fail(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.Writer, "write", fail)
    assert in_process("export-maps", "--run-dir", run, "--repair")[0] == 130
    monkeypatch.undo()
    with pytest.raises(store.StoreError, match="incomplete"):
        store.open(maps)
    write_store(run)
    assert differing(contents(maps), before) == []


def test_file_urls_are_folders(run, tmp_path, in_process):
    plain = tmp_path / "of the run.zarr"
    for url in (f"file://{plain}", f"file://localhost{plain}", f"file:{plain}".replace(" ", "%20")):
        assert in_process("export-maps", "--run-dir", run, "--out", url, "--overwrite")[0] == 0
        assert in_process("inspect", url)[0] == 0
        assert store.verify(plain) == []
        shutil.rmtree(plain)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_verify_runs_the_teacher_again(run, in_process):
    maps = run / "maps.zarr"
    code, out, _ = in_process("verify", maps, "--teacher", "--sample", 200)
    assert code == 0 and "as the teacher says" in out
    maps.rename(run.parent / "elsewhere.zarr")
    elsewhere = ("verify", run.parent / "elsewhere.zarr", "--teacher")
    assert in_process(*elsewhere, "--run-dir", run, "--sample", 1)[0] == 0
    code, _, err = in_process(*elsewhere)
    assert code == 2 and "elsewhere.zarr: --teacher needs the --run-dir of the teacher" in err


@pytest.mark.parametrize("name", ["gaussians", "logits", "labels"])
def test_verify_finds_an_intact_store_that_is_not_what_the_teacher_says(run, in_process, name):
    maps = store.open(run / "maps.zarr")
    stored = maps.gather(np.arange(200))
    stored[name] = stored[name][::-1] * (10 if name == "logits" else 1)
    writer = store.create(run / "wrong.zarr", maps.schema)
    write_pending(writer, stored)
    assert in_process("verify", run / "wrong.zarr")[0] == 0
    code, out, _ = in_process("verify", run / "wrong.zarr", "--teacher", "--sample", 200)
    assert code == 1 and f"{name} " in out and "not the teacher's" in out


def test_an_8_bit_store_is_smaller_and_verified_to_a_code(run, in_process):
    other = run.parent / "small.zarr"
    command = ("export-maps", "--run-dir", run, "--encoding", "uint8", "--out", other)
    assert in_process(*command)[0] == 0
    whole, small = store.open(run / "maps.zarr"), store.open(other)
    assert small.schema.bytes_per_image < 0.6 * whole.schema.bytes_per_image
    assert in_process("verify", other, "--teacher", "--run-dir", run, "--sample", 200)[0] == 0
    stored = small.gather(np.arange(200))
    stored["gaussians"] = np.roll(stored["gaussians"], 1, axis=0)
    writer = store.create(other, small.schema, overwrite=True)
    write_pending(writer, stored)
    code, out, _ = in_process("verify", other, "--teacher", "--run-dir", run, "--sample", 200)
    assert code == 1 and "gaussians not the teacher's" in out


def test_clipped_means_are_reported(run, in_process):
    """Of Gaussians written by hand: of the first block's first head a quarter has a mean that the
    codes cannot say."""
    stored = store.open(run / "maps.zarr")
    gaussians = torch.zeros(8, 2, 2, 16, 4)
    gaussians[:4, 0, 0, :8, 1] = -2.1
    gaussians[..., 2:] = 1
    schema = dataclasses.replace(stored.schema, encoding="uint8")
    share = lost(schema, None, {"gaussians": gaussians})
    assert share.tolist() == [[0.25, 0], [0, 0]]
    assert lost(stored.schema, None, {"gaussians": gaussians}) is None
    codes = schema.encode("gaussians", gaussians.numpy(), 0)
    moved = np.abs(schema.decode("gaussians", codes)[..., 1] - gaussians[..., 1].numpy()) > 1 / 127
    assert moved.mean((0, 3)).tolist() == share.tolist()
    line = loss_line(schema, [share * 4, share * 4], 8)
    assert "means the 8-bit codes clip, per block (heads): 0.125 (0.000-0.250)" in line


def test_embeddings_and_their_decoder_give_the_teachers_gaussians(tmp_path, in_process):
    run = train(
        tmp_path / "run",
        "phase_a.per_image=embedding",
        "phase_a.compression={embedding: 8, hidden: 16}",
    )
    assert in_process("export-maps", "--run-dir", run)[0] == 0
    maps, job = store.open(run / "maps.zarr"), load_teacher(RunDirectory(run))
    ids = torch.tensor([7, 0, 199])
    read = StoredAttentionReader(maps, torch.device("cpu")).attention(maps.gather(ids.numpy()))
    torch.testing.assert_close(
        read.gaussians, job.network.gaussians(job.parameters(ids)).detach(), rtol=2e-3, atol=2e-3
    )
    assert in_process("verify", run / "maps.zarr", "--teacher")[0] == 0
    assert maps.schema.kind == "embedding"


@pytest.mark.parametrize(
    "changes, kind",
    [
        (["phase_a.per_image=table"], "gaussian"),
        (["phase_a.per_image=embedding"], "embedding"),
        (["phase_a.per_image=none"], "prior"),
        (["phase_a.teacher=vit", "export.encoding=uint8"], "topk"),
        (["phase_a.per_image=embedding", "export.encoding=uint8"], "gaussian"),  # it has no codes
        (["phase_a.per_image=none", "export.encoding=uint8"], "gaussian"),
        (["phase_a.per_image=embedding", "export.kind=dense"], "dense"),
    ],
)
def test_the_usual_kind_is_the_smallest_that_loses_nothing(changes, kind):
    settings = load("digits_expected", changes)
    assert choose_store(outline(settings, load_data(settings.data))).kind == kind


def test_a_teacher_without_gaussians_of_single_images_stores_them_once(tmp_path, in_process):
    run = train(tmp_path / "run", "phase_a.per_image=none", "phase_a.mode=expected")
    command = ("export-maps", "--run-dir", run)
    assert in_process(*command)[0] == 0
    assert in_process(*command, "--kind", "gaussian", "--out", run / "rows.zarr")[0] == 0
    small, large = store.open(run / "maps.zarr"), store.open(run / "rows.zarr")
    assert small.schema.kind == "prior" and list(small.schema.arrays) == ["logits", "labels"]
    ids = np.array([7, 0, 199])
    read, rows = (
        StoredAttentionReader(maps, torch.device("cpu")).attention(maps.gather(ids))
        for maps in (small, large)
    )
    torch.testing.assert_close(read.gaussians, rows.gaussians, rtol=2e-3, atol=2e-3)
    assert in_process("verify", run / "maps.zarr", "--teacher")[0] == 0
    seen = [
        json.loads(
            in_process("inspect", run / name, "--image", 7, "--query", 3, "--head", 1, "--json")[1]
        )
        for name in ("maps.zarr", "rows.zarr")
    ]
    np.testing.assert_allclose(seen[0]["map"], seen[1]["map"], atol=2e-3)
    assert in_process("verify", run / "rows.zarr", "--teacher", "--run-dir", run)[0] == 0
    # its kind, not the usual one
    assert in_process(*command, "--out", run / "rows.zarr", "--repair")[0] == 0
    assert in_process(*command, "--out", run / "codes.zarr", "--encoding", "uint8")[0] == 0
    assert store.open(run / "codes.zarr").schema.kind == "gaussian"
    wrong = store.create(
        run / "wrong.zarr", small.schema, decoder={"prior": small.decoder()["prior"] + 0.1}
    )
    rows = small.gather(np.arange(200))
    write_pending(wrong, rows)
    code, out, _ = in_process("verify", run / "wrong.zarr", "--teacher", "--run-dir", run)
    assert code == 1 and "decoder/prior is not the teacher's" in out
    files = (run / "maps.zarr" / "decoder" / "prior" / "c").rglob("*")
    damaged = next(path for path in files if path.is_file())
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert in_process("verify", run / "maps.zarr")[0] == 1
    assert in_process("export-maps", "--run-dir", run, "--repair")[0] == 0
    assert in_process("verify", run / "maps.zarr", "--teacher")[0] == 0
