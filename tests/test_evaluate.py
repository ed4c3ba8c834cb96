"""Evaluate beside every state of the run's store, and where an exported student may go."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import store
from test_store import write_store


@pytest.fixture
def run(copied_run) -> Path:
    return copied_run()


def evaluate(run: Path, in_process, *arguments) -> tuple[int, str, str]:
    return in_process("evaluate", "--run-dir", run, "--student", "standard", "--json", *arguments)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(teacher_sha256="b" * 64), "another teacher"),
        (dict(dataset_sha256="b" * 64), "another data set"),
    ],
)
@pytest.mark.parametrize("plain", [[], ["--plain"]])
def test_the_store_of_another_teacher_is_refused(run, in_process, changes, message, plain):
    if plain:
        (run / "phase_b").rename(run / "plain")
    maps = store.open(run / "maps.zarr")
    rows = maps.gather(np.arange(40))
    write_store(
        run / "maps.zarr", dataclasses.replace(maps.schema, **changes), rows, overwrite=True
    )
    code, out, err = evaluate(run, in_process, *plain)
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err


def remove(run: Path) -> None:
    shutil.rmtree(run / "maps.zarr")


def reopen(run: Path) -> None:
    store.join(run / "maps.zarr").reopen([0])


@pytest.mark.parametrize("change", [remove, reopen])
def test_without_a_complete_store_there_are_only_scores(run, in_process, change):
    (run / "phase_b/standard/maps.json").unlink()  # else the student's own record is read
    whole = json.loads(evaluate(run, in_process)[1])
    change(run)
    code, out, _ = evaluate(run, in_process)
    scores = json.loads(out)
    assert code == 0 and scores == {name: whole[name] for name in scores}
    assert whole.keys() - scores.keys() == {"teacher_images", "teacher_agreement", "map_kl"}


@pytest.mark.parametrize(
    "name",
    [
        "maps.zarr/zarr.json",
        "maps.zarr/gaussians/zarr.json",
        "maps.zarr/logits/c/0/0",
        "phase_a/teacher_sha256",
    ],
)
def test_what_is_damaged_is_refused(run, in_process, name):
    data = bytearray((run / name).read_bytes())
    data[len(data) // 2] ^= 128
    (run / name).write_bytes(data)
    code, out, err = evaluate(run, in_process)
    assert (code, out, err.count("\n")) == (2, "", 1) and (
        "maps.zarr" in err or "teacher_sha256" in err
    )


def test_a_teacher_that_is_not_known_is_not_compared(run, in_process):
    (run / "phase_a/teacher_sha256").unlink()
    assert "teacher_agreement" in json.loads(evaluate(run, in_process)[1])


# ---- export-student ------------------------------------------------------------------------------


def export(run: Path, out: Path, in_process) -> tuple[int, str, str]:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    return in_process("export-student", "--run-dir", run, "--student", "standard", "--out", out)


PLACES = {
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "link to a folder": lambda path: path.symlink_to("."),
    "link to itself": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/null"),
    "link to nowhere": lambda path: path.symlink_to("absent/file"),
}


@pytest.mark.parametrize("place", PLACES)
def test_only_a_file_is_replaced_by_an_exported_student(
    run, tmp_path, in_process, monkeypatch, place
):
    out = tmp_path / "student.onnx"
    PLACES[place](out)
    before = sorted(tmp_path.iterdir()), out.lstat().st_ino, out.lstat().st_mtime_ns
    monkeypatch.setattr(
        "torch.onnx.export", None
    )  # so that nothing is written, whatever the check says
    code, stdout, err = export(run, out, in_process)
    assert (code, stdout, err.count("\n")) == (2, "", 1) and f"--out {out}" in err
    assert (sorted(tmp_path.iterdir()), out.lstat().st_ino, out.lstat().st_mtime_ns) == before


def test_an_exported_student_replaces_a_file_through_a_link(run, tmp_path, in_process):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "student.onnx").write_text("old")
    (folder / "link").symlink_to("student.onnx")
    (folder / "student.onnx.partial").write_text("precious")
    assert export(run, folder / "link", in_process)[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "link",
        "student.onnx",
        "student.onnx.partial",
    ]
    assert (folder / "link").is_symlink() and (folder / "student.onnx").stat().st_size > 1000
    assert (folder / "student.onnx.partial").read_text() == "precious"
