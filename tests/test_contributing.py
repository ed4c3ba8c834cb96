"""CONTRIBUTING.md's attentions and teachers: a file and a line in a copy of the packages; an
attention without maps."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gaupipe
import store
from arguments import sets, tiny
from gaupipe.attention import ATTENTION
from gaupipe.settings.load import load
from gaupipe.vit.models import register

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
TEACHERS = dict(re.findall(r"`(gaupipe/teachers/\w+.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
ENTRIES = re.search(r"```python\n(    \"frequencies.*?)```", PAGE, re.DOTALL)[1]
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


RUN_TEACHERS = """
import sys
from pathlib import Path
from gaupipe.data.load import load_data
from gaupipe.settings.load import load
from gaupipe.system.errors import UserError
from gaupipe.teachers import base
from stages import evaluate, verify
from stages.plan import plan_run
from stages.run import run_all
for teacher, change in ("frequencies", "phase_b.gamma=0"), ("bright", "export.kind=dense"):
    settings = load("digits", [f"phase_a.teacher={teacher}", change, *sys.argv[1:]])
    assert plan_run(settings, Path(teacher))["stages"]["export"]["disk_bytes"] > 0
    run_all(settings, Path(teacher))
    assert verify.against_teacher(f"{teacher}/maps.zarr") == []
    scores = evaluate.run(Path(teacher))
    assert ("teacher_loss" in scores) == (teacher == "frequencies")
    assert ("map_kl" in scores) == (teacher == "bright")
base.MOST_NUMBERS = 3 * 2 * 16**2  # of three images, of a block with two heads
assert base.outline(settings, load_data(settings.data)).images_at_once(50) == 3
try:
    plan_run(settings.with_section("export", kind="predictions"), Path("other"))
except UserError as error:
    assert "export.kind predictions: the teacher predicts no classes" in str(error)
else:
    raise AssertionError
"""


def test_a_new_teacher_is_a_file_and_an_entry(tmp_path):
    """Its student learns from what numpy computes, and every command knows the teacher."""
    copy_packages(tmp_path)
    assert len(TEACHERS) == 2  # on the page
    for path, source in TEACHERS.items():
        (tmp_path / path).write_text(source)
    registry = tmp_path / "gaupipe/settings/teachers.py"
    source = registry.read_text()
    before = '    "local": TeacherKind('
    assert before in source
    registry.write_text(source.replace(before, ENTRIES + before))
    in_copy(tmp_path, RUN_TEACHERS, *tiny(100, 50, 1, depth=1))

    stored = store.open(tmp_path / "frequencies/maps.zarr").gather(range(100), ["labels", "logits"])
    counts = np.bincount(stored["labels"], minlength=10) + 1
    np.testing.assert_allclose(np.exp(stored["logits"]), [counts / counts.sum()] * 100, rtol=2e-3)

    run = gaupipe.open_run(tmp_path / "bright")
    images = run.images(range(3)).double().numpy()
    patches = images.reshape(3, 4, 2, 4, 2).mean((2, 4)).reshape(3, 16)  # 8 x 8 pixels
    rows = np.exp(patches) / np.exp(patches).sum(1, keepdims=True)
    for block in run.maps(range(3)):
        expected = np.broadcast_to(rows[:, None, None], block.shape)
        np.testing.assert_allclose(block, expected, rtol=2e-3)
    student = load(tmp_path / "bright/phase_b/standard/config.yaml")
    assert student.phase_b.alpha == 0


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
