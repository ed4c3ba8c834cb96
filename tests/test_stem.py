"""``stem: conv``: its convolutions, what the optimizer makes of them, and the commands with it."""

from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from timm.utils import ModelEmaV3

import gaupipe.models
from gaupipe.distillation.warm_start import warm_start
from gaupipe.settings import OptimSettings, Settings
from gaupipe.settings.load import load
from gaupipe.system.errors import UserError
from gaupipe.teachers.gaussian import build_network
from gaupipe.teachers.vit import build_model
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.student import build_student, untrained_student
from gaupipe.vit.stem import ConvPatchEmbed

PICO = "gauvit_pico_patch2_8"
DIGITS = SimpleNamespace(image_size=8, channels=1, num_classes=10)


def student_of(settings: Settings) -> VisionTransformer:
    return build_student(settings, DIGITS, settings.student_training)


def random_vit(**kwargs) -> VisionTransformer:
    torch.manual_seed(0)
    model = timm.create_model(PICO, stem="conv", depth=1, **kwargs)
    for name, buffer in model.patch_embed.named_buffers():
        if name.endswith("var"):
            buffer.uniform_(0.5, 2)
        elif name.endswith("mean"):
            buffer.normal_()
    for parameter in model.patch_embed.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("training", [True, False])
def test_the_stem_is_convolutions_batch_norm_relu_and_a_projection(training):
    model = random_vit(img_size=(16, 24), patch_size=8).train(training)
    weights = {name: value.clone() for name, value in model.patch_embed.state_dict().items()}
    x = torch.randn(3, 3, 16, 24)
    tokens = model.patch_embed(x)
    for layer in range(3):
        part = f"proj.{layer}."
        x = F.conv2d(x, weights[f"{part}conv.weight"], stride=2, padding=1)
        mean, variance = weights[f"{part}bn.running_mean"], weights[f"{part}bn.running_var"]
        if training:
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        x = (x - mean[:, None, None]) / (variance + 1e-5).sqrt()[:, None, None]
        scale, shift = weights[f"{part}bn.weight"], weights[f"{part}bn.bias"]
        x = (x * scale[:, None, None] + shift[:, None, None]).relu()
    last = weights["proj.3.conv.weight"].flatten(1)  # 1 x 1
    expected = x.flatten(2).mT @ last.T + weights["proj.3.conv.bias"]
    assert x.shape[1:] == (64, *model.patch_embed.grid_size) == (64, 2, 3)
    torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("patch", [2, 4, 16])
def test_grid_and_sizes_are_those_of_patches(patch):
    sizes = dict(img_size=32, patch_size=patch, embed_dim=32)
    ours, timms = ConvPatchEmbed(**sizes), timm.layers.PatchEmbed(**sizes)
    images = torch.randn(2, 3, 32, 32)
    assert ours(images).shape == timms(images).shape
    for name in ("grid_size", "patch_size", "num_patches", "img_size"):
        assert getattr(ours, name) == getattr(timms, name)


@pytest.mark.parametrize("patch", [1, 3, 6, (2, 4)])
def test_a_patch_that_is_no_power_of_two_is_refused(patch):
    with pytest.raises(UserError, match="power of two, got"):
        timm.create_model(PICO, stem="conv", img_size=12, patch_size=patch)


def test_an_unknown_stem_is_refused():
    with pytest.raises(UserError, match="unknown stem 'cnov'; did you mean 'conv'"):
        timm.create_model(PICO, stem="cnov")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_norms_and_biases_have_no_weight_decay(optimizer):
    model = random_vit()
    built, _ = build_optimizer(model, OptimSettings(name=optimizer, lr=1e-3), 2, 5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay = {
        names[id(parameter)].removeprefix("patch_embed.proj."): group["weight_decay"]
        for group in built.param_groups
        for parameter in group["params"]
        if names[id(parameter)].startswith("patch_embed")
    }
    assert decay == {
        "0.conv.weight": 0.03,
        "0.bn.weight": 0.0,
        "0.bn.bias": 0.0,
        "1.conv.weight": 0.03,
        "1.conv.bias": 0.0,
    }


def test_the_average_of_weights_has_an_average_of_the_statistics():
    model = random_vit().train()
    ema, before = ModelEmaV3(model, decay=0.9), model.patch_embed.proj[0].bn.running_mean.clone()
    model(torch.randn(4, 3, 8, 8))
    after = model.patch_embed.proj[0].bn.running_mean
    ema.update(model)
    averaged = ema.module.patch_embed.proj[0].bn.running_mean
    assert not torch.equal(before, after)
    torch.testing.assert_close(averaged, 0.9 * before + 0.1 * after)


def test_student_baseline_and_trained_teachers_have_the_stem():
    settings = load("digits_expected", ["model.stem=conv"])
    teacher = build_network(settings, DIGITS)
    for vit in (
        student_of(settings),
        untrained_student(settings, DIGITS),
        build_model(settings, DIGITS),
        teacher.vit,
    ):
        assert isinstance(vit.patch_embed, ConvPatchEmbed)
    assert isinstance(student_of(load("digits_expected")).patch_embed, timm.layers.PatchEmbed)


def test_a_warm_start_copies_the_statistics_too():
    teacher = random_vit()
    student = timm.create_model(PICO, stem="conv", depth=1)
    warm_start(student, teacher.state_dict())
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(
        student.eval().patch_embed(images), teacher.eval().patch_embed(images), rtol=0, atol=0
    )


def test_a_warm_start_leaves_another_stem_as_it_is():
    teacher = timm.create_model(PICO, depth=1)
    student = timm.create_model(PICO, stem="conv", depth=1)
    before = [part.detach().clone() for part in student.patch_embed.parameters()]
    warm_start(student, teacher.state_dict())
    assert torch.equal(student.blocks[0].mlp.fc1.weight, teacher.blocks[0].mlp.fc1.weight)
    for part, unchanged in zip(student.patch_embed.parameters(), before, strict=True):
        assert torch.equal(part, unchanged)


SMALL = [
    "data.train_images=60",
    "train.epochs=2",
    "model.stem=conv",
    "model.args={embed_dim: 16, depth: 1, num_heads: 2}",
    "augment.flip=true",
    "augment.crop_padding=1",
    "train.optim.ema=0.9",
    "threads=1",
]
SETS = [part for setting in SMALL for part in ("--set", setting)]


def test_a_trained_student_is_evaluated_exported_and_shown(tmp_path, in_process):
    run = tmp_path / "run"
    code, _, err = in_process("train", "--run-dir", run, "--student", "belief", *SETS)
    assert code == 0, err
    code, _, err = in_process("evaluate", "--run-dir", run, "--json")
    assert code == 0, err
    saved = run / "plain/belief/student"
    model = timm.create_model(f"local-dir:{saved}", pretrained=True)
    assert isinstance(model.patch_embed, ConvPatchEmbed)
    statistics = model.patch_embed.proj[0].bn.running_mean
    assert statistics.abs().max() > 0
    page = tmp_path / "maps.html"
    code, _, err = in_process("view", "--run-dir", run, "--html", page, "--image", 1)
    assert code == 0 and page.exists(), err
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    assert in_process("export-student", "--run-dir", run, "--out", tmp_path / "s.onnx")[0] == 0
    images = torch.randn(3, 1, 8, 8)
    session = onnxruntime.InferenceSession(str(tmp_path / "s.onnx"))
    (logits,) = session.run(None, {"images": images.numpy()})
    np.testing.assert_allclose(logits, model.eval()(images).detach().numpy(), atol=1e-5)


def test_trained_weights_keep_their_stem(tmp_path):
    conv, patch = tmp_path / "conv", tmp_path / "patch"
    gaupipe.models.save_student(random_vit(in_chans=1).eval(), conv)
    gaupipe.models.save_student(timm.create_model(PICO, depth=1, in_chans=1).eval(), patch)
    for asked in ("patch", "conv"):
        settings = load("digits_expected", [f"model={{name: 'local-dir:{conv}', stem: {asked}}}"])
        assert isinstance(student_of(settings).patch_embed, ConvPatchEmbed)
    settings = load("digits_expected", [f"model={{name: 'local-dir:{patch}', stem: conv}}"])
    with pytest.raises(UserError, match="keeps the stem that its weights have"):
        student_of(settings)
