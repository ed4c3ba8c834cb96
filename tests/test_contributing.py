"""CONTRIBUTING.md's attentions and teacher: a file and a line in a copy of the packages; an
attention without maps."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import store
from arguments import sets, tiny
from gaupipe.attention import ATTENTION
from gaupipe.vit.models import register

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
TEACHER, ENTRY = re.findall(
    r"```python\n(\"{3}The teacher.*?|    \"frequencies.*?)```", PAGE, re.DOTALL
)
CLASSES = re.findall(r"```python\n(from torch.*?)```", PAGE, re.DOTALL)


def copy_packages(folder: Path) -> None:
    for package in ("gaupipe", "stages", "store", "configs"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pyc*"))


def in_copy(folder: Path, source: str, *arguments: str) -> None:
    """Runs Python source in a copy of the packages."""
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_new_attention_is_a_file_and_a_line(tmp_path):
    copy_packages(tmp_path)
    (tmp_path / "gaupipe/attention/residual.py").write_text(CLASSES[0])
    line = '        "residual": "residual.ResidualAttention",\n'
    assert line in PAGE
    registry = tmp_path / "gaupipe/attention/__init__.py"
    source = registry.read_text()
    entry = '        "gaussian": "gaussian.GaussianAttention",\n'
    assert entry in source
    registry.write_text(source.replace(entry, entry + line))
    command = ["train", "digits", "--student", "residual", *sets(*tiny(100, 50, 1, depth=1))]
    in_copy(tmp_path, "from stages.cli import main; main()", *command)


RUN_TEACHER = """
import sys
from pathlib import Path
from gaupipe.settings.load import load
from stages import evaluate, verify
from stages.run import run_all
settings = load("digits", sys.argv[1:])
run_all(settings, Path("run"))
assert verify.against_teacher("run/maps.zarr") == []
assert evaluate.run(Path("run"))["teacher_loss"] > 0
"""


def test_a_new_teacher_is_a_file_and_an_entry(tmp_path):
    """Its student learns from what numpy counts, and every command knows the teacher."""
    copy_packages(tmp_path)
    (tmp_path / "gaupipe/teachers/frequencies.py").write_text(TEACHER)
    registry = tmp_path / "gaupipe/settings/teachers.py"
    source = registry.read_text()
    before = '    "local": TeacherKind('
    assert before in source
    registry.write_text(source.replace(before, ENTRY + before))
    settings = ["phase_a.teacher=frequencies", "phase_b.gamma=0", *tiny(100, 50, 1, depth=1)]
    in_copy(tmp_path, RUN_TEACHER, *settings)
    stored = store.open(tmp_path / "run" / "maps.zarr").gather(np.arange(100), ["labels", "logits"])
    counts = np.bincount(stored["labels"], minlength=10) + 1
    np.testing.assert_allclose(np.exp(stored["logits"]), [counts / counts.sum()] * 100, rtol=2e-3)


def test_an_attention_without_maps_learns_from_soft_labels_alone(monkeypatch, in_process, tmp_path):
    monkeypatch.setattr(ATTENTION, "data", {**ATTENTION.data})
    exec(CLASSES[1], names := {})
    register("mean", names["MeanAttention"])
    run = ("run", "digits", "--student", "mean", *sets(*tiny(100, 50, 1, depth=1)), "--run-dir")
    code, _, err = in_process(*run, tmp_path / "with_maps")
    assert code == 2 and "set phase_b.gamma=0" in err
    assert err.count("\n") == 1 and not (tmp_path / "with_maps").exists()
    code, _, err = in_process(*run, tmp_path / "without_maps", *sets("phase_b.gamma=0"))
    assert code == 0, err
