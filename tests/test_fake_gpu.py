"""The forward pass of every attention, and of every stage's step, on a GPU that torch's
FakeTensorMode pretends: no tensor stays on the CPU. The backward pass and the numbers need a real
GPU: tests/test_gpu.py."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

import store
from gaupipe.attention import STUDENTS
from gaupipe.attention.standard import in_steps
from gaupipe.data.augment import Augment
from gaupipe.data.batches import train_and_val
from gaupipe.data.load import load_data
from gaupipe.data.loader import Loader, fetch
from gaupipe.distillation.job import MapReader, StudentLosses
from gaupipe.distillation.kinds import MAP_KINDS
from gaupipe.settings.load import load
from gaupipe.teachers.base import Wanted
from gaupipe.teachers.gaussian import GaussianTeacher, TeacherLoss
from gaupipe.teachers.gaussian_vit import GaussianViT
from gaupipe.teachers.image_state import ImageState
from gaupipe.training.job import LabelLosses
from stages import phase_b
from stages.runs.directory import RunDirectory

CUDA = torch.device("cuda")
AUGMENT = "augment={flip: true, crop_padding: 1, mixup: 0.8, erasing: 0.5, randaugment: {ops: 2}}"


@pytest.fixture
def gpu(monkeypatch):
    """A fake GPU. Images and per-image parameters are read on the real CPU."""

    def really(function):
        def call(*arguments):
            with unset_fake_temporarily():
                return function(*arguments)

        return call

    def noise(teacher, images, generator):  # a generator needs a real GPU
        return torch.randn(len(images), *teacher.raw_shape[:3], 2, device=images.device)

    one_batch = really(lambda self, requests: [fetch(self.source, requests[0])])
    monkeypatch.setattr(Loader, "__call__", one_batch)
    monkeypatch.setattr(ImageState, "read", really(ImageState.read))
    monkeypatch.setattr(GaussianViT, "noise", noise)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def check_device(*values) -> None:
    assert {value.device.type for value in values} == {"cuda"}


@pytest.fixture(params=STUDENTS)
def model(request):
    return timm.create_model("gauvit_pico_patch2_8", attention=request.param, depth=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_attention(model, dtype, gpu):
    images = torch.randn(4, 3, 8, 8, device=CUDA, dtype=dtype)
    tokens = model.to(CUDA, dtype).patch_embed(images)
    check_device(model(images), *in_steps(model.blocks[0].attn).forward_with_map(tokens))


@pytest.fixture
def student_job(run, request):
    """A student that learns from the maps of ``run``, or without a teacher from the labels."""
    stage, student = request.param
    teacher = RunDirectory(run)
    changes = [AUGMENT, "phase_b.alpha=0.5", f"model.attention={student}"]
    settings = load(str(teacher.config), changes)
    data = load_data(settings.data, False)
    return phase_b.build_training(settings, data, teacher if stage == "phase-b" else None)


CASES = [("train", "standard"), *(("phase-b", key) for key in STUDENTS)]


@pytest.mark.parametrize("student_job", CASES, indirect=True, ids="-".join)
def test_a_step_of_a_student(student_job, gpu):
    job, settings = student_job, student_job.settings
    student = job.student.to(CUDA)
    losses, read = LabelLosses(student, job.train), None
    if job.sources:
        with unset_fake_temporarily():
            maps = store.open(job.sources[0][0])
            stored = maps.gather(np.arange(settings.data.batch_size))
        read = SimpleNamespace(view=None, prefetch=lambda _: iter([stored]))
        teacher_maps = MapReader(maps, student, settings.phase_b, CUDA)
        losses = StudentLosses(student, settings, job.train, teacher_maps)
    training, _ = train_and_val(job.data, settings.data, CUDA)
    batch = next(training.epoch(0, Augment(job.augment, 0), read))
    check_device(batch.images, batch.labels, *losses(batch, 0.1, 0.5).by_name().values())


@pytest.fixture
def teacher_job(request, tmp_path):
    small = ["model.args={embed_dim: 16, depth: 2, num_heads: 2}", "data.batch_size=20", AUGMENT]
    settings = load("digits_expected", [*small, f"phase_a.{request.param}"])
    return GaussianTeacher.build(settings, load_data(settings.data, False), tmp_path)


TEACHERS = ["mode=expected", "mode=stochastic", "per_image=table", "per_image=embedding"]


@pytest.mark.parametrize("teacher_job", TEACHERS, indirect=True)
def test_a_step_of_a_teacher_and_its_export(teacher_job, gpu):
    job = replace(teacher_job, device=CUDA, network=teacher_job.network.to(CUDA))
    batch = next(job.batches(job.data.train, 20).epoch(0, Augment(job.settings.augment, 0)))
    parameters = job.per_image and job.per_image.gather(batch.ids, CUDA)
    sampled = job.settings.phase_a.mode == "stochastic"
    noise = job.network.noise(batch.images, None) if sampled else None
    made = job.outputs(batch, Wanted(None, image_ids=batch.ids))
    check_device(TeacherLoss(job)(batch, parameters, noise), made.logits)
    for name, kind in MAP_KINDS.items():
        if kind.refusal(job.forms) is None:
            k = 4 if name == "topk" else None
            arrays = kind.arrays(made.attention, k, torch.float32)
            check_device(made.logits, *arrays.values())
