"""Evaluate beside every state of the run's store, and where an exported student may go."""

import dataclasses
import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

import store
from gaupipe.system.errors import UserError
from gaupipe.vit.saving import load_folder
from test_store import write_store


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
    store.join(run / "maps.zarr").reopen([1])


@pytest.mark.parametrize("change", [remove, reopen])
def test_without_a_complete_store_there_are_only_scores(run, in_process, change):
    whole = json.loads(evaluate(run, in_process)[1])
    change(run)
    code, out, _ = evaluate(run, in_process)
    scores = json.loads(out)
    assert code == 0 and scores == {name: whole[name] for name in scores}
    assert whole.keys() - scores.keys() == {"teacher_images", "teacher_agreement", "map_kl"}


@pytest.mark.parametrize(
    "name",
    [
        "maps.zarr/gaussians/zarr.json",
        "maps.zarr/logits/c/1/0",
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


@pytest.mark.parametrize("value", [5, "x", [None], [float("nan")]])
@pytest.mark.parametrize("key", ["mean", "std"])
def test_a_foreign_normalisation_is_refused(small_run, tmp_path, key, value):
    """In every reader of such a folder: a student's, and a teacher's."""
    folder = Path(shutil.copytree(small_run / "phase_b/standard/student", tmp_path / "model"))
    (folder / "SHA256SUMS").unlink()
    described = json.loads((folder / "config.json").read_text())
    described["pretrained_cfg"][key] = value
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=f"{key} is .* should be a list of numbers.*: mend it"):
        load_folder(folder, "mend it")


def test_a_teacher_that_is_not_known_is_not_compared(run, in_process):
    (run / "phase_a/teacher_sha256").unlink()
    assert "teacher_agreement" in json.loads(evaluate(run, in_process)[1])


# ---- export-student ------------------------------------------------------------------------------


def export(run: Path, out: Path, in_process) -> tuple[int, str, str]:
    return in_process("export-student", "--run-dir", run, "--format", "pt2", "--out", out)


PLACES = {
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "link to a folder": lambda path: path.symlink_to("."),
    "link to itself": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/null"),
    "link to nowhere": lambda path: path.symlink_to("absent/file"),
}


@pytest.mark.parametrize("place", PLACES)
def test_only_a_file_is_replaced_by_an_exported_student(run, tmp_path, in_process, place):
    out = tmp_path / "student.pt2"
    PLACES[place](out)
    before = sorted(tmp_path.iterdir()), out.lstat().st_ino, out.lstat().st_mtime_ns
    code, stdout, err = export(run, out, in_process)
    assert (code, stdout, err.count("\n")) == (2, "", 1) and f"--out {out}" in err
    assert (sorted(tmp_path.iterdir()), out.lstat().st_ino, out.lstat().st_mtime_ns) == before


def test_an_exported_student_replaces_a_file_through_a_link(run, tmp_path, in_process):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "student.pt2").write_text("old")
    (folder / "link").symlink_to("student.pt2")
    assert export(run, folder / "link", in_process)[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == ["link", "student.pt2"]
    assert (folder / "link").is_symlink() and (folder / "student.pt2").stat().st_size > 1000


def test_an_export_that_the_disk_cannot_hold_leaves_the_file_that_is_there(
    run, tmp_path, in_process
):
    """torch aborts the process where it cannot write a program."""
    out = tmp_path / "student"
    out.write_text("old")
    before, limits = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))  # bytes of a file
    try:
        code, stdout, err = export(run, out, in_process)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, stdout) == (2, "") and err.splitlines()[-1].endswith("File too large")
    assert out.read_text() == "old" and sorted(tmp_path.iterdir()) == before
