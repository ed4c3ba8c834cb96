"""A GPU gives what the CPU gives: attentions with their gradients, and the stages on the digits.
``python -m pytest -m gpu`` runs these tests, which need a GPU; they are skipped without one."""

import json
import os
import subprocess
import sys

import pytest
import timm
import torch

from gaupipe.attention import STUDENTS
from runs import run_main

DEVICE = os.environ.get("GAUPIPE_TEST_DEVICE", "cuda")
"""``cpu`` runs the tests themselves without a GPU, which then compare the CPU with the CPU."""

if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "compiled": 1e-4}
"""Of the largest number of a tensor."""


@pytest.fixture(autouse=True)
def exact():
    """float32 products that are not rounded to TensorFloat-32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def check_close(here, there, tolerance) -> None:
    here, there = here.detach().float().cpu(), there.detach().float().cpu()
    assert here.isfinite().all()
    torch.testing.assert_close(
        here, there, rtol=0, atol=tolerance * float(there.abs().max()) + 1e-7
    )


@pytest.mark.parametrize("how", TOLERANCE)
@pytest.mark.parametrize("key", STUDENTS)
def test_values_and_gradients_of_an_attention(key, how):
    torch.manual_seed(0)
    on_cpu = timm.create_model("gauvit_pico_patch2_8", attention=key, depth=1)
    on_gpu = timm.create_model("gauvit_pico_patch2_8", attention=key, depth=1)
    on_gpu.load_state_dict(on_cpu.state_dict())
    on_gpu.to(DEVICE)
    images = torch.randn(8, 3, 8, 8)
    forward = torch.compile(on_gpu) if how == "compiled" else on_gpu
    with torch.autocast(DEVICE, torch.bfloat16, enabled=how == "bfloat16"):
        there = forward(images.to(DEVICE))
    here = on_cpu(images)
    check_close(there, here, TOLERANCE[how])
    for logits in (here, there):
        logits.float().square().mean().backward()
    gradients = dict(on_gpu.named_parameters())
    for name, parameter in on_cpu.named_parameters():
        if parameter.grad is not None:
            check_close(gradients[name].grad, parameter.grad, 2 * TOLERANCE[how])


def test_the_stages_on_the_digits(tmp_path):
    """With the metrics of the CPU: the order of a sum may change a few of 360 images."""
    for device in ("cpu", DEVICE):
        epochs = ("phase_a.max_epochs=2", "train.epochs=3", "threads=1")
        sets = [word for value in (*epochs, f"device={device}") for word in ("--set", value)]
        assert run_main("run", "digits", "--run-dir", f"{device}-run", *sets, cwd=tmp_path) == 0
    for part in ("phase_a", "phase_b/standard", "plain/standard"):
        here, there = (
            [
                json.loads(line)
                for line in (tmp_path / f"{device}-run" / part / "metrics.jsonl").open()
            ]
            for device in ("cpu", DEVICE)
        )
        assert there[-1]["train_loss"] == pytest.approx(here[-1]["train_loss"], rel=0.1)
        assert there[-1]["val_acc"] == pytest.approx(here[-1]["val_acc"], abs=0.05)


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="the machine has not one GPU")
def test_two_processes_on_one_gpu_are_refused(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    train = ["gaupipe", "train", "digits", "--set", "device=cuda"]
    done = subprocess.run([*launch, *train], cwd=tmp_path, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("gaupipe: ")]
    assert done.returncode and len(said) == 1 and "start 1 processes a machine" in said[0]
