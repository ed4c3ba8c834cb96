"""The stems of convolutions, what the optimizer makes of them, and the commands with them."""

import json
from pathlib import Path
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
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.teachers.gaussian import build_network
from gaupipe.teachers.trained import TrainedVit
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.student import build_student, untrained_student
from gaupipe.vit.stem import STEMS, ConvPatchEmbed
from worlds import in_world

PICO = "gauvit_pico_patch2_8"
CONVOLUTIONAL = [stem for stem in STEMS if stem != "patch"]
both_stems = pytest.mark.parametrize("stem", CONVOLUTIONAL)
DIGITS = SimpleNamespace(image_size=8, channels=1, num_classes=10)


def student_of(settings: Settings) -> VisionTransformer:
    return build_student(settings, DIGITS, settings.student_training)


def random_vit(stem: str = "conv", **kwargs) -> VisionTransformer:
    torch.manual_seed(0)
    model = timm.create_model(PICO, stem=stem, depth=1, **kwargs)
    for name, buffer in model.patch_embed.named_buffers():
        if name.endswith("var"):
            buffer.uniform_(0.5, 2)
        elif name.endswith("mean"):
            buffer.normal_()
    for parameter in model.patch_embed.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


class Written:
    """The layers of a stem as functions of its weights, written by hand."""

    def __init__(self, model: VisionTransformer) -> None:
        self.weights = {name: x.clone() for name, x in model.patch_embed.state_dict().items()}
        self.training = model.training

    def convolution(self, name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        return F.conv2d(x, self.weights[f"proj.{name}.weight"], stride=stride, padding=1)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        parts = ("running_mean", "running_var", "weight", "bias")
        mean, variance, scale, shift = (self.weights[f"proj.{name}.{part}"] for part in parts)
        if self.training:
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        x = (x - mean[:, None, None]) / (variance + 1e-5).sqrt()[:, None, None]
        return x * scale[:, None, None] + shift[:, None, None]

    def projection(self, name: str, x: torch.Tensor) -> torch.Tensor:
        last = self.weights[f"proj.{name}.weight"].flatten(1)  # 1 x 1
        return x.flatten(2).mT @ last.T + self.weights[f"proj.{name}.bias"]


@pytest.mark.parametrize("training", [True, False])
def test_the_stem_is_convolutions_batch_norm_relu_and_a_projection(training):
    model = random_vit(img_size=(16, 24), patch_size=8).train(training)
    written = Written(model)
    x = torch.randn(3, 3, 16, 24)
    tokens = model.patch_embed(x)
    for layer in range(3):
        x = written.norm(f"{layer}.bn", written.convolution(f"{layer}.conv", x, 2)).relu()
    assert x.shape[1:] == (64, *model.patch_embed.grid_size) == (64, 2, 3)
    expected = written.projection("3.conv", x)
    torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-4)


RESIDUAL = [
    (2, [(1, True), (2, False)]),
    (4, [(1, True), (2, True), (2, False)]),
    (8, [(2, True), (2, True), (2, False)]),
    (16, [(2, False), (2, True), (2, True), (2, False)]),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("patch, stages", RESIDUAL, ids=str)
def test_the_residual_stem_has_blocks_at_the_two_resolutions_before_the_tokens(
    patch, stages, training
):
    model = random_vit("residual", img_size=(16, 32), patch_size=patch).train(training)
    written = Written(model)
    x = torch.randn(3, 3, 16, 32)
    tokens = model.patch_embed(x)
    for stage, (stride, block) in enumerate(stages):
        convolved = written.convolution(f"{stage}.0.conv", x, stride)
        x = written.norm(f"{stage}.0.bn", convolved).relu()
        assert x.shape[1] == 64 // 2 ** (len(stages) - 1 - stage)
        if block:
            inside = written.norm(f"{stage}.1.bn1", written.convolution(f"{stage}.1.conv1", x))
            inside = written.convolution(f"{stage}.1.conv2", inside.relu())
            x = (x + written.norm(f"{stage}.1.bn2", inside)).relu()
    assert x.shape[2:] == model.patch_embed.grid_size == (16 // patch, 32 // patch)
    expected = written.projection(str(len(stages)), x)
    torch.testing.assert_close(tokens, expected, rtol=1e-3, atol=1e-3)
    convolutions = [
        name for name, part in model.patch_embed.named_modules() if type(part) is torch.nn.Conv2d
    ]
    blocks = sum(block for _, block in stages)
    assert len(convolutions) == len(stages) + 2 * blocks + 1


@both_stems
@pytest.mark.parametrize("patch", [2, 4, 16])
def test_grid_and_sizes_are_those_of_patches(patch, stem):
    sizes = dict(img_size=32, patch_size=patch, embed_dim=32)
    ours, timms = STEMS[stem](**sizes), timm.layers.PatchEmbed(**sizes)
    images = torch.randn(2, 3, 32, 32)
    assert ours(images).shape == timms(images).shape
    for name in ("grid_size", "patch_size", "num_patches", "img_size"):
        assert getattr(ours, name) == getattr(timms, name)


@both_stems
@pytest.mark.parametrize("patch", [1, 3, 6, (2, 4)])
def test_a_patch_that_is_no_power_of_two_is_refused(patch, stem):
    with pytest.raises(UserError, match=f"stem {stem}: .* power of two, got"):
        timm.create_model(PICO, stem=stem, img_size=12, patch_size=patch)


@both_stems
def test_a_first_convolution_of_three_channels_is_summed_up_for_one(stem, tmp_path):
    model = random_vit(stem).eval()
    gaupipe.models.save_student(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert f"{config['pretrained_cfg']['first_conv']}.weight" in model.state_dict()
    grey = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, in_chans=1).eval()
    image = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(grey(image), model(image.expand(2, 3, 8, 8)), rtol=1e-4, atol=1e-4)


@both_stems
def test_a_saved_stem_comes_back_bit_for_bit(stem, tmp_path):
    model = random_vit(stem, img_size=16, patch_size=4).eval()
    gaupipe.models.save_student(model, tmp_path)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(2, 3, 16, 16)
    assert type(loaded.patch_embed) is STEMS[stem]
    torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)


def test_an_unknown_stem_is_refused():
    with pytest.raises(UserError, match="unknown stem 'cnov'; did you mean 'conv'"):
        timm.create_model(PICO, stem="cnov")


@both_stems
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_norms_and_biases_have_no_weight_decay(optimizer, stem):
    model = random_vit(stem)
    built, _ = build_optimizer(model, OptimSettings(name=optimizer, lr=1e-3), 2, 5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay = {
        names[id(parameter)].removeprefix("patch_embed.proj."): group["weight_decay"]
        for group in built.param_groups
        for parameter in group["params"]
        if names[id(parameter)].startswith("patch_embed")
    }
    assert len(decay) == len(list(model.patch_embed.parameters()))
    for name, value in decay.items():
        part = model.patch_embed.proj.get_parameter(name)
        assert value == (0.03 if part.ndim == 4 else 0.0), name


def test_the_average_of_weights_has_an_average_of_the_statistics():
    model = random_vit().train()
    ema, before = ModelEmaV3(model, decay=0.9), model.patch_embed.proj[0].bn.running_mean.clone()
    model(torch.randn(4, 3, 8, 8))
    after = model.patch_embed.proj[0].bn.running_mean
    ema.update(model)
    averaged = ema.module.patch_embed.proj[0].bn.running_mean
    assert not torch.equal(before, after)
    torch.testing.assert_close(averaged, 0.9 * before + 0.1 * after)


def gradients_of_ranks(stem: str, folder: Path) -> None:
    """Writes what a rank's share of six images gives the stem: gradients, summed over ranks, and
    statistics."""
    with distributed.process_group():
        stem_of_vit = random_vit(stem, patch_size=4).train().patch_embed
        images = torch.randn(6, 3, 8, 8)  # the same on all ranks
        weights = torch.randn(6, 4, 64)
        share = slice(None)
        if distributed.world_size() == 2:
            share = (slice(4), slice(4, None))[distributed.rank()]
        (stem_of_vit(images[share]) * weights[share]).sum().backward()
        for part in stem_of_vit.parameters():
            part.grad = distributed.all_reduce_sum(part.grad)
        found = {name: part.grad for name, part in stem_of_vit.named_parameters()}
        found.update(stem_of_vit.named_buffers())
        torch.save(found, folder / f"{distributed.world_size()}.{distributed.rank()}")


def test_two_ranks_share_the_statistics_of_unequal_shares(tmp_path):
    gradients_of_ranks("residual", tmp_path)
    assert in_world(2, tmp_path / "words", gradients_of_ranks, "residual", tmp_path) == [0, 0]
    alone = torch.load(tmp_path / "1.0")
    for rank in range(2):
        together = torch.load(tmp_path / f"2.{rank}")
        torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-3)


@both_stems
def test_student_baseline_and_trained_teachers_have_the_stem(stem):
    settings = load("digits_expected", [f"model.stem={stem}"])
    teacher = build_network(settings, DIGITS)
    for vit in (
        student_of(settings),
        untrained_student(settings, DIGITS),
        TrainedVit.model(settings, DIGITS),
        teacher.vit,
    ):
        assert type(vit.patch_embed) is STEMS[stem]
    assert isinstance(student_of(load("digits_expected")).patch_embed, timm.layers.PatchEmbed)


@both_stems
def test_a_warm_start_copies_the_statistics_too(stem):
    teacher = random_vit(stem)
    student = timm.create_model(PICO, stem=stem, depth=1)
    warm_start(student, teacher.state_dict())
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(
        student.eval().patch_embed(images), teacher.eval().patch_embed(images), rtol=0, atol=0
    )


@pytest.mark.parametrize("patch", [2, 8])
@pytest.mark.parametrize(
    "of_teacher, stem",
    [(other, stem) for stem in CONVOLUTIONAL for other in STEMS if other != stem],
)
def test_a_warm_start_leaves_another_stem_as_it_is(of_teacher, stem, patch):
    """With patches of 8 pixels both first convolutions have one shape."""
    teacher = timm.create_model(PICO, stem=of_teacher, depth=1, patch_size=patch)
    student = timm.create_model(PICO, stem=stem, depth=1, patch_size=patch)
    before = [part.detach().clone() for part in student.patch_embed.parameters()]
    warm_start(student, teacher.state_dict())
    assert torch.equal(student.blocks[0].mlp.fc1.weight, teacher.blocks[0].mlp.fc1.weight)
    for part, unchanged in zip(student.patch_embed.parameters(), before, strict=True):
        assert torch.equal(part, unchanged)


SMALL = [
    "data.train_images=60",
    "train.epochs=2",
    "model.args={embed_dim: 16, depth: 1, num_heads: 2}",
    "augment.flip=true",
    "augment.crop_padding=1",
    "train.optim.ema=0.9",
    "threads=1",
]
SETS = [part for setting in SMALL for part in ("--set", setting)]


def test_a_trained_student_is_evaluated_exported_and_shown(tmp_path, in_process):
    run = tmp_path / "run"
    chosen = ["--student", "belief", "--set", "model.stem=residual"]
    code, _, err = in_process("train", "--run-dir", run, *chosen, *SETS)
    assert code == 0, err
    code, _, err = in_process("evaluate", "--run-dir", run, "--json")
    assert code == 0, err
    saved = run / "plain/belief/student"
    model = timm.create_model(f"local-dir:{saved}", pretrained=True)
    assert type(model.patch_embed) is STEMS["residual"]
    statistics = next(model.patch_embed.buffers())  # the running mean of the first batch norm
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
