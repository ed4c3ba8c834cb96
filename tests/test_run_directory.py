"""A run directory: found again without being named, several students of one teacher, one process
at a time."""

import contextlib
import dataclasses
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from arguments import sets, tiny
from exports import write_store
from gaupipe.settings.load import check_as_begun, load
from gaupipe.system.errors import UserError
from killing import FORKS
from stages import phase_a, phase_b
from stages.runs import opening, students
from stages.runs.directory import RunDirectory, last_used
from stages.runs.locks import locked

TINY = tiny(60, 30, 1, depth=1)
SETS = sets(*TINY)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    phase_a.run(load("digits", TINY), folder / "run")
    write_store(folder / "run")
    return folder / "run"


def test_the_commands_follow_each_other_without_naming_the_run(tmp_path, in_process):
    assert in_process("phase-a", *SETS, cwd=tmp_path)[0] == 0
    for command in (
        ["export-maps"],
        ["phase-b", "--student", "belief2"],
        ["inspect"],
        ["verify"],
        ["inspect", "--image", 3],
        ["evaluate", "--student", "belief2"],
        ["evaluate"],
    ):
        code, out, err = in_process(*command, cwd=tmp_path)
        said = "gaupipe: runs/digits (the run used last; --run-dir names another)"
        assert (code, err.splitlines()[0]) == (0, said)
    assert "belief2" in out


def test_the_run_that_was_used_last_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run in runs/"):
        last_used()
    for number, name in enumerate(("first", "second", "third")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("{}")
        os.utime(tmp_path / "runs" / name / "config.yaml", ns=(number, number))
    assert last_used().path.name == "third"
    with locked(tmp_path / "runs" / "first", "run"):
        pass
    assert last_used().path.name == "first"


def test_two_students_with_one_attention_live_side_by_side(made, in_process):
    train = "phase-b", "--run-dir", made
    assert in_process(*train, "--student", "belief2")[0] == 0
    files = sorted(path for path in (made / "phase_b/belief2").rglob("*") if path.is_file())
    before = [path.read_bytes() for path in files]
    changes = "--student", "belief2", *sets("phase_b.gamma=0.3", "seed=5")
    code, out, _ = in_process(*train, *changes, "--name", "gamma03")
    assert (code, out.strip()) == (0, str(made / "phase_b/gamma03/student"))
    assert before == [path.read_bytes() for path in files]
    settings = load(made / "phase_b/gamma03/config.yaml")
    assert (settings.phase_b.gamma, settings.seed, settings.model.attention) == (0.3, 5, "belief2")
    assert load(made / "config.yaml").phase_b.gamma == 0.1
    for command in (["evaluate"], ["inspect", "--image", 5, "--query", 2]):
        code, out, _ = in_process(*command, "--run-dir", made, "--student", "gamma03", "--json")
        assert code == 0
    assert json.loads(out)["by"] == "gamma03"
    assert sum(map(sum, json.loads(out)["map"])) == pytest.approx(1, abs=1e-5)
    # continued with its own settings; with others the difference is named
    resume = *train, "--name", "gamma03", "--resume"
    assert in_process(*resume)[0] == 0
    code, _, err = in_process(*resume, "--set", "phase_b.gamma=0.5")
    assert code == 2 and "phase_b.gamma 0.3, now it is 0.5" in err


def lock_until(end, folder: Path, shared: bool) -> None:
    """Locks a folder until something comes through the connection."""
    with locked(folder, "run", shared=shared):
        end.send("held")
        end.recv()


@contextlib.contextmanager
def hold(folder: Path, shared: bool = False):
    """A process that holds the lock of a folder, killed at the end."""
    here, there = FORKS.Pipe()
    process = FORKS.Process(target=lock_until, args=(there, folder, shared))
    process.start()
    assert here.recv() == "held"
    try:
        yield process
    finally:
        process.kill()
        process.join()


def test_a_run_that_another_process_uses_is_left_alone(made, in_process):
    with hold(made) as other:
        for command in (
            ["run", *SETS],
            ["phase-a", "--resume", *SETS],
            ["export-maps", "--overwrite"],
            ["phase-b", "--student", "xsa", "--name", "late"],
        ):
            code, _, err = in_process(*command, "--run-dir", made)
            assert code == 2 and re.fullmatch(
                rf"gaupipe: .*another process \(pid {other.pid}\) is using this run.*\n", err
            )
    assert not (made / "phase_b" / "late").exists()
    with locked(made, "run"):  # the killed process has let go
        pass


def test_students_may_be_trained_at_once_but_not_the_same_one(made, in_process):
    phase_b.run(made, "belief", resume=True)
    with hold(made, shared=True), hold(made / "phase_b" / "belief") as student:
        train = "phase-b", "--run-dir", made
        assert in_process(*train, "--student", "standard", "--name", "beside")[0] == 0
        code, _, err = in_process(*train, "--student", "belief", "--resume")
        assert code == 2 and f"(pid {student.pid}) is using this student" in err
        assert in_process("export-maps", "--run-dir", made, "--overwrite")[0] == 2


def test_two_first_commands_at_once(made, tmp_path, in_process):
    """The one that comes second ends in a line, and what is refused leaves the first one's folder
    alone."""
    with hold(tmp_path / "new") as other:
        code, _, err = in_process("train", "--run-dir", tmp_path / "new", *SETS)
        assert (code, err.count("\n")) == (2, 1) and f"(pid {other.pid})" in err
    student = made / "phase_b" / "both"
    student.mkdir()
    code, _, err = in_process("phase-b", "--run-dir", made, "--name", "both")
    assert code == 2 and "both already exists" in err
    assert student.is_dir() and not any(student.iterdir())


def test_a_new_student_has_its_settings_or_is_not_there(made, monkeypatch):
    """Also for another command that makes the same folder between look and write."""
    folder = made / "phase_b" / "new"
    settings = RunDirectory(made).settings()
    request = students.StudentRequest(settings, folder)
    job = SimpleNamespace(settings=settings, sources=[])

    def write(other, *_):
        assert other != folder and not folder.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(opening, "write_request", write)
    with pytest.raises(KeyboardInterrupt):
        opening.make_folder(request, job)
    assert not list(folder.parent.glob("*new*"))
    monkeypatch.setattr(opening, "write_request", lambda *_: (folder / "full").mkdir(parents=True))
    with pytest.raises(UserError, match="new already exists"):
        opening.make_folder(request, job)
    assert [path.name for path in folder.parent.glob("*new*")] == ["new"]


def test_a_new_student_follows_the_umask_and_no_link(made):
    folder = made / "phase_b" / "private"
    settings = RunDirectory(made).settings()
    request = students.StudentRequest(settings, folder)
    job = SimpleNamespace(settings=settings, sources=[])
    before = os.umask(0o027)
    try:
        opening.make_folder(request, job)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o750 and (folder / "config.yaml").is_file()
    folder.with_name("link").symlink_to("nowhere")
    with pytest.raises(UserError, match="link already exists"):
        opening.make_folder(dataclasses.replace(request, folder=folder.with_name("link")), job)


def test_the_value_that_others_follow_from_is_named():
    """data.scaling has no fields with one teacher, and some with another."""
    before = {"data.scaling": {}, "phase_a.teacher": "vit"}
    now = {"data.scaling.mean": 0.5, "phase_a.teacher": "gaussian"}
    with pytest.raises(UserError, match="phase_a.teacher vit, now .* afresh with another --name"):
        check_as_begun("run", before, now, "with another --name")
