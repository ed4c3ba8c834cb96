"""precision: auto, decided once."""

import numpy as np
import pytest
import torch

import store
from gaupipe.models import save_student
from gaupipe.settings.load import load
from gaupipe.system import device as devices
from gaupipe.system.device import choose_precision
from pictures import photos
from vits import small

CPU = torch.device("cpu")
WIDE = ["--set", "model.args={embed_dim: 192, depth: 1, num_heads: 3}"]
SHORT = ["--set", "train.epochs=1", "--set", "threads=1", "--set", "data.train_images=64"]


@pytest.fixture
def bfloat16(monkeypatch):
    """A processor that multiplies bfloat16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})


def test_a_wide_vit_on_a_processor_with_bfloat16_gets_it(bfloat16):
    assert choose_precision("auto", CPU, 192) == "bfloat16"
    assert choose_precision("auto", CPU, 128) == "float32"
    assert choose_precision("float32", CPU, 384) == "float32"


@pytest.mark.parametrize("known", [{}, {"avx512_bf16": False, "amx_bf16": False}])
def test_other_processors_keep_float32(known, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    assert choose_precision("auto", CPU, 384) == "float32"


def test_a_run_goes_on_as_it_began(bfloat16, tmp_path, in_process, monkeypatch):
    run = tmp_path / "run"
    command = ["train", *WIDE, *SHORT, "--run-dir", run, "--student", "standard"]
    assert in_process(*command)[0] == 0
    assert load(run / "config.yaml").precision == "bfloat16"
    assert load(run / "plain" / "standard" / "config.yaml").precision == "bfloat16"
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # it moves to another machine
    code, _, err = in_process(*command, "--resume")
    assert code == 0, err
    code, _, err = in_process("train", *WIDE, *SHORT, "--run-dir", run, "--student", "belief")
    assert code == 0, err
    assert load(run / "plain" / "belief" / "config.yaml").precision == "bfloat16"


def test_a_wide_teacher_exports_in_bfloat16_and_its_store_says_so(
    bfloat16, tmp_path, in_process, monkeypatch
):
    """Within one per cent of the maps and predictions in float32; made again as it was begun."""
    vit = small(size=32, patch_size=8, embed_dim=192, num_heads=4, depth=2, num_classes=7)
    save_student(vit, tmp_path / "vit")
    folder = tmp_path / "images"
    photos(folder, size=(32, 32), count=6)
    run = tmp_path / "run"
    start = ["phase-a", "--set", "data.name=folder", "--set", f"data.root={folder}"]
    start += ["--set", f"phase_a.teacher=local-dir:{tmp_path / 'vit'}", "--run-dir", run]
    code, _, err = in_process(*start, "--set", "data.image_size=32")
    assert code == 0, err
    gathered = {}
    for precision in (None, "float32"):
        out = str(tmp_path / f"{precision}.zarr")
        export = ["export-maps", "--run-dir", run, "--kind", "dense", "--out", out]
        if precision:
            monkeypatch.setattr(devices, "WIDE", 10_000)
        code, _, err = in_process(*export)
        assert code == 0, err
        opened = store.open(out)
        assert opened.schema.extra["precision"] == (precision or "bfloat16")
        gathered[precision] = opened.gather(np.arange(opened.schema.num_images))
    half, whole = gathered[None], gathered["float32"]
    moved = np.abs(half["maps"].astype(float) - whole["maps"]).sum(-1).mean() / 2
    assert 0 < moved < 0.01
    code, _, err = in_process("verify", tmp_path / "None.zarr", "--run-dir", run, "--teacher")
    assert code == 0, err
