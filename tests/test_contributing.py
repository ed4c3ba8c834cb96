"""CONTRIBUTING.md's attentions: a file and a line in a copy of the packages; one without maps."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from arguments import sets, tiny
from gaupipe.attention import ATTENTION
from gaupipe.vit.models import register

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
CLASSES = re.findall(r"```python\n(from torch.*?)```", PAGE, re.DOTALL)


def test_a_new_attention_is_a_file_and_a_line(tmp_path):
    for package in ("gaupipe", "stages", "store", "configs"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pyc*"))
    (tmp_path / "gaupipe/attention/residual.py").write_text(CLASSES[0])
    line = '        "residual": "residual.ResidualAttention",\n'
    assert line in PAGE
    registry = tmp_path / "gaupipe/attention/__init__.py"
    source = registry.read_text()
    entry = '        "gaussian": "gaussian.GaussianAttention",\n'
    assert entry in source
    registry.write_text(source.replace(entry, entry + line))
    command = ["train", "digits", "--student", "residual", *sets(*tiny(100, 50, 1, depth=1))]
    done = subprocess.run(
        [sys.executable, "-c", "from stages.cli import main; main()", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


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
