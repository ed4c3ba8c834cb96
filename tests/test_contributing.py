"""CONTRIBUTING.md's recipe for a new attention, followed in a copy of the packages."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLASSES = re.findall(
    r"```python\n(from torch.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A copy in which the attentions of CONTRIBUTING.md are known as "residual" and "mean"."""
    folder = tmp_path_factory.mktemp("packages")
    for package in ("gaupipe", "stages", "store", "configs"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pyc*"))
    residual, mean = CLASSES
    lines = ""
    for name, source in dict(residual=residual, mean=mean).items():
        (folder / f"gaupipe/attention/{name}.py").write_text(source)
        lines += f'        "{name}": "{name}.{name.title()}Attention",\n'
    registry = folder / "gaupipe/attention/__init__.py"
    source = registry.read_text()
    entry = '        "gaussian": "gaussian.GaussianAttention",\n'
    assert entry in source
    registry.write_text(source.replace(entry, entry + lines))
    return folder


def gaupipe(packages, *arguments) -> subprocess.CompletedProcess:
    small = ["--set", "data.train_images=100", "--set", "threads=1"]
    return subprocess.run(
        [sys.executable, "-c", "from stages.cli import main; main()", *arguments, *small],
        cwd=packages,
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
    )


def test_a_new_attention_is_a_file_and_a_line(packages):
    epoch = ("--set", "baseline.epochs=1")
    done = gaupipe(packages, "train", "digits", *epoch, "--student", "residual")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_an_attention_without_maps_learns_from_soft_labels_alone(packages):
    small = ("--set", "phase_a.max_epochs=1", "--set", "train.epochs=1")
    run = ("run", "digits", "--student", "mean", *small, "--run-dir")
    refused = gaupipe(packages, *run, "with_maps")
    assert refused.returncode == 2 and "set phase_b.gamma=0" in refused.stderr
    assert refused.stderr.count("\n") == 2 and not (packages / "with_maps").exists()
    done = gaupipe(packages, *run, "without_maps", "--set", "phase_b.gamma=0")
    assert done.returncode == 0, done.stderr
