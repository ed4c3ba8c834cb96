"""The command line as a user meets it, with good and bad input."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
import zarr
from PIL import Image

from arguments import sets, tiny
from gaupipe import __version__
from gaupipe.system import progress
from gaupipe.teachers.notes import StoreNotes
from runs import in_new_processes, metrics, named_like_packages, run_main
from stages import begin
from stores import make_arrays, make_schema, write_store

TINY = [*tiny(200, 50, 2), "phase_b.alpha=0.2", "phase_b.beta=0.1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder in which 'gaupipe run' has finished in the run directory 'run', and what it printed
    on stdout and stderr."""
    folder, out, err = tmp_path_factory.mktemp("cli"), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert run_main("run", "--run-dir", "run", *sets(*TINY), cwd=folder) == 0
    return folder, out.getvalue(), err.getvalue()


def test_run_prints_one_line_per_epoch_and_the_table(finished):
    _, out, err = finished
    for label in ("teacher (phase A)", "standard, distilled", "standard, plain"):
        assert label in out
    lines = err.splitlines()
    for label in ("phase A epoch", "standard epoch", "standard (plain) epoch"):
        assert [line for line in lines if line.startswith(label)][1].startswith(f"{label} 2/")


def test_run_leaves_the_contracted_files(finished):
    run = finished[0] / "run"
    phase_a = metrics(run / "phase_a" / "metrics.jsonl")
    phase_b = metrics(run / "phase_b" / "standard" / "metrics.jsonl")
    assert [row["epoch"] for row in phase_a] == [row["epoch"] for row in phase_b] == [1, 2]
    assert phase_a[0].keys() == {"epoch", "train_loss", "train_acc", "val_acc"}
    losses = {"val_loss", "loss_soft", "loss_hard", "loss_feat", "gamma", "alpha"}
    assert phase_b[0].keys() == phase_a[0].keys() | losses
    row = phase_b[0]
    assert row["alpha"] == 0.2
    weighted = 0.2 * row["loss_soft"] + 0.1 * row["loss_hard"] + row["gamma"] * row["loss_feat"]
    assert row["train_loss"] == pytest.approx(weighted, rel=1e-4)
    checkpoints = (f"{phase}/checkpoint/state.pt" for phase in ("phase_a", "phase_b/standard"))
    for name in ("config.yaml", "split.json", "maps.zarr/zarr.json", *checkpoints):
        assert (run / name).exists()


def test_a_new_process_predicts_and_timm_loads_the_student_without_gaupipe(finished):
    run = finished[0] / "run"
    folder = run / "phase_b" / "standard"
    Image.new("L", (8, 8)).save(finished[0] / "picture.png")
    script = (
        "import sys, timm, torch;"
        f"m = timm.create_model('local-dir:{folder / 'student'}', pretrained=True);"
        "assert not any(n.startswith('gaupipe.') for n in sys.modules);"
        "print(m(torch.zeros(1, 1, 8, 8)).sum().item())"
    )
    predict = ["predict", "run", "picture.png"]  # where timm does not know the model yet
    said = in_new_processes((run.parent, predict), (run.parent, script)).splitlines()
    assert len(said) == 3 and said[0].startswith("path,") and said[1].startswith("picture.png,")
    state = torch.load(folder / "checkpoint" / "state.pt", weights_only=True)["modules"]
    loaded = timm.create_model(f"local-dir:{folder / 'student'}", pretrained=True)
    wrong = [name for name, one in loaded.state_dict().items() if not torch.equal(state[name], one)]
    assert wrong == []


def test_running_again_changes_nothing_and_prints_the_same_accuracies(finished, in_process):
    folder, first, _ = finished

    def times():
        return {path: path.stat().st_mtime_ns for path in (folder / "run/maps.zarr").rglob("*")}

    before = times()
    code, out, _ = in_process("run", "--run-dir", "run", *sets(*TINY), cwd=folder)
    assert code == 0 and times() == before
    again, accuracies = (
        re.sub(r" +[\d.,]+ *$", "", text, flags=re.MULTILINE) for text in (out, first)
    )
    assert again == accuracies  # the core seconds are fewer without an export


def test_inspect(finished, in_process):
    folder = finished[0]
    summary = json.loads(in_process("inspect", "run/maps.zarr", "--json", cwd=folder)[1])
    assert (summary["kind"], summary["images"], summary["complete"]) == ("embedding", 200, True)
    lines = in_process("inspect", "run/maps.zarr", cwd=folder)[1].splitlines()
    assert "{" not in "".join(lines) and "dataset digits" in map(" ".join, map(str.split, lines))
    one = ["inspect", "run/maps.zarr", "--image", 7, "--layer", 1, "--head", 0, "--query", 5]
    seen = json.loads(in_process(*one, "--json", cwd=folder)[1])
    assert np.sum(seen["map"]) == pytest.approx(1, abs=1e-4) and np.shape(seen["map"]) == (4, 4)
    # the teacher itself decodes for a store of Gaussians
    other = ["--kind", "gaussian", "--out", "gaussians.zarr"]
    assert in_process("export-maps", "--run-dir", "run", *other, cwd=folder)[0] == 0
    stored = zarr.open_group(str(folder / "gaussians.zarr"), mode="r")["gaussians"][7, 1, 0, 5]
    assert seen["gaussian"] == pytest.approx(stored.tolist(), abs=5e-3, rel=5e-3)
    text = in_process(*one, cwd=folder)[1]
    assert "image 7" in text and "[]" in text and f"{np.max(seen['map']):.4f}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_command_there_is_help(tmp_path, in_process):
    code, out, _ = in_process(cwd=tmp_path)
    assert code == 0 and "phase-b" in out and list(tmp_path.iterdir()) == []


def test_a_mistake_ends_the_process_with_code_2_and_no_traceback(tmp_path):
    command = [sys.executable, "-m", "gaupipe", "run", *sets("phase_b.epoch=1")]
    result = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    assert (result.returncode, result.stdout) == (2, "")
    meant = "'phase_b.epochs' or 'train.epochs'"
    said = f"gaupipe: unknown setting 'phase_b.epoch'; did you mean {meant}?\n"
    assert result.stderr == said


def modules_imported(command: list[str], **options) -> tuple[str, set[str]]:
    """Stdout of a Python command line, and the modules that Python itself reports as imported."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *command], text=True, capture_output=True, **options
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "|" in line
    }


ENDS = """
import os, shlex, sys
from stages.cli import main
from stages import begin  # after the command line, which leaves torch for later

def say(line):
    sys.exit(f"{line} {os.environ['OMP_WAIT_POLICY']}")

begin.say = say
for line in sys.argv[1:]:
    sys.argv = ["gaupipe", *shlex.split(line)]
    try:
        main()
    except SystemExit as end:
        print(end.code, "torch" in sys.modules, flush=True)
"""


def ends_without_torch(commands, cwd) -> tuple[list[str], list[str]]:
    """How commands end that are refused, or that say what begins: with which code or words, and
    what is on stderr. All in one process: the first that imported torch would show."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, *commands], text=True, capture_output=True, cwd=cwd
    )
    ends = [line.rpartition(" ") for line in done.stdout.splitlines()]
    assert [torch for _, _, torch in ends] == ["False"] * len(commands), done.stderr
    return [end for end, _, _ in ends], done.stderr.splitlines()


def test_a_command_says_what_begins_before_it_imports_torch(run):
    commands = [
        *("run", "phase-a", "export-maps", "phase-b --name x", "train", "compare", "plan"),
        *("evaluate", "export-student", "publish --out new", "inspect", "view"),
        "verify --teacher",
    ]
    commands = [f"{command} --run-dir {run}" for command in commands]
    commands.append(f"predict {run} {run / 'config.yaml'}")
    ends, err = ends_without_torch(commands, run.parent)
    assert all(end.endswith(" ... PASSIVE") for end in ends) and err == []


ABSENT = {
    "run --data absent": "--data absent: no such folder; it should hold",
    "train --data photo": "--data photo: no such folder; did you mean photos?",
    "train --data absent": "--data absent: no such folder",
    "plan --data absent": "--data absent: no such folder",
    "compare --data absent": "--data absent: no such folder",
    "compare --sweep absent.yaml": "no file 'absent.yaml'",
    "evaluate --run-dir RUN --data absent": "--data absent: no such folder",
    "run absent.yaml": "no file 'absent.yaml'",
    "train digist": "no file 'digist': give the path of a YAML file; did you mean digits?",
    "train photos": "photos: is a folder; for your own images type --data photos",
    "run --run-dir photos": "photos exists and is not a run directory",
    "train --run-dir photos": "photos exists and is not a run directory",
    "run --teacher local-dir:absent": "there is no folder absent",
    "train --model local-dir:absent": "there is no folder absent",
    "phase-b --run-dir RUN --name x --maps absent.zarr": "absent.zarr: no attention-map store",
    "phase-b --run-dir begun": "begun/maps.zarr: no attention-map store",
    "phase-b --run-dir absent": "absent is not a run directory",
    "export-maps --run-dir absent": "absent is not a run directory",
    "export-maps --model vit_tiny_patch16_224 --images absent --out m": "absent: no such file",
    "evaluate --run-dir absent": "absent is not a run directory",
    "evaluate --run-dir RUN --out absent/p.csv": "--out absent/p.csv: there is no folder",
    "predict RUN absent.png": "absent.png: no such file or folder",
    "predict local-dir:absent photos": "there is no folder absent",
    "inspect absent.zarr": "absent.zarr: no attention-map store",
    "inspect --run-dir RUN --image 1 --png absent/m.png": "--png absent/m.png: there is no folder",
    "view --run-dir RUN --image 1 --html absent/m.html": "--html absent/m.html: there is no folder",
    "view absent.zarr": "absent.zarr: no attention-map store",
    "view --run-dir RUN --image 1 --html m.txt": "--html m.txt: should be a file whose name ends",
    "view --model local-dir:absent --images photos": "there is no folder absent",
    "view --model vit_tiny_patch16_224 --images absent": "absent: no such file or folder",
    "verify absent.zarr": "absent.zarr: no attention-map store",
    "export-student --run-dir absent": "absent is not a run directory",
    "publish --run-dir absent --out new": "absent is not a run directory",
    "publish --run-dir RUN --out photos": "--out photos: is there already",
}
"""Commands with a path that they cannot use, and what they say."""


def test_a_path_that_is_not_there_is_refused_before_torch_is_imported(small_run, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").touch()
    (tmp_path / "begun").mkdir()
    shutil.copy(small_run / "config.yaml", tmp_path / "begun")
    commands = [command.replace("RUN", str(small_run)) for command in ABSENT]
    ends, said = ends_without_torch(commands, tmp_path)
    assert ends == ["2"] * len(ABSENT), said
    for line, message in zip(said, ABSENT.values(), strict=True):
        assert line.startswith("gaupipe: ") and message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "photos"]
    assert [path.name for path in (tmp_path / "begun").iterdir()] == ["config.yaml"]
    assert not (small_run / "phase_b" / "x").exists()


def test_a_terminal_shows_that_torch_is_being_imported(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    with begin.importing():
        assert terminal.getvalue() == ""  # torch is there already
    monkeypatch.delitem(sys.modules, "torch")
    with begin.importing():
        assert "imports torch" in terminal.getvalue()
    *_, line, rest = terminal.getvalue().split("\r")
    assert line.strip() == rest == ""


@pytest.mark.parametrize(
    "command",
    [
        "export-maps --out maps.zarr",
        "view --image 0 --image 1 --html page.html",
        "predict STUDENT photo.png",
    ],
)
def test_a_long_job_in_a_pipe_says_how_far_it_is(
    copied_run, tmp_path, in_process, monkeypatch, command
):
    """A line a minute; here after every part."""
    run = copied_run()
    monkeypatch.setattr(progress, "SILENCE", 0)
    Image.new("L", (8, 8)).save(tmp_path / "photo.png")
    where = [] if "STUDENT" in command else ["--run-dir", run]
    command = command.replace("STUDENT", str(run / "phase_b" / "standard"))
    code, _, err = in_process(*command.split(), *where, cwd=tmp_path)
    assert code == 0, err
    assert re.search(r"^[\w.]+: 100%, [\d.e+]+ images/s, 0 s left$", err, re.MULTILINE), err


def test_help_does_not_import_torch():
    """The command answers at once."""
    stdout, imported = modules_imported(["-m", "gaupipe", "run", "--help"])
    assert "--student" in stdout and "default" in stdout
    assert "stages.cli.program" in imported and not imported & {"torch", "timm"}


@pytest.mark.parametrize(
    "line, offered",
    [
        ("gaupipe exp", ["export-maps", "export-student"]),
        ("gaupipe run fashion_mnist_v", ["fashion_mnist_vit"]),
        ("gaupipe phase-b --student belief", ["belief", "belief_star", "belief2"]),
    ],
)
def test_the_shell_completes_without_torch(tmp_path, line, offered):
    """bash sends the line and gets what could stand in place of its last word."""
    (tmp_path / "gaupipe").write_text("from stages.cli import main\n\nmain()\n")
    asked = {
        "_GAUPIPE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    stdout, imported = modules_imported(["gaupipe"], cwd=tmp_path, env={**os.environ, **asked})
    assert stdout.split() == offered
    assert "stages.cli.program" in imported and not imported & {"torch", "timm", "numpy"}


def test_the_package_runs_as_a_module_beside_files_of_the_same_names(tmp_path):
    """The users' own store.py and stages/ are not taken for those of gaupipe."""
    named_like_packages(tmp_path)
    command = [sys.executable, "-m", "gaupipe", "evaluate", "--run-dir", "absent"]
    answer = subprocess.run(command, text=True, capture_output=True, cwd=tmp_path)
    said = [line for line in answer.stderr.splitlines() if line.startswith("gaupipe: ")]
    mistakes = [line for line in said if not line.endswith(" ...")]
    assert len(mistakes) == 1 and "absent is not a run directory" in mistakes[0], answer.stderr
    assert "a module of the user" not in answer.stderr


def test_version():
    answer = subprocess.run([sys.executable, "-m", "gaupipe", "--version"], capture_output=True)
    assert (answer.returncode, answer.stdout) == (0, f"gaupipe {__version__}\n".encode())


@pytest.mark.parametrize(
    "extra", [{"data": "my photos"}, {"views": 3}, {"files": ["a.png"]}, {"layers": "all"}], ids=str
)
def test_notes_of_another_shape_are_ignored(tmp_path, extra, in_process):
    schema = make_schema(extra=extra)
    write_store(tmp_path / "s", schema, make_arrays(schema))
    assert StoreNotes.of(schema) == StoreNotes()
    for options in ([], ["--image", 3]):
        code, _, err = in_process("inspect", tmp_path / "s", *options)
        assert code == 0, err


def test_inspect_shows_the_digest_of_a_teacher_where_there_is_one(tmp_path, in_process):
    for digest in ("a" * 64, ""):
        schema = make_schema(teacher_sha256=digest)
        write_store(tmp_path / "s", schema, make_arrays(schema), overwrite=True)
        lines = in_process("inspect", tmp_path / "s")[1].splitlines()
        shown = [line.split() for line in lines if "teacher" in line]
        assert shown == ([["teacher_sha256", "a" * 16, "..."]] if digest else [])
