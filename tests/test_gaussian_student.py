"""Students that look by Gaussians: attention 'gaussian', and standard attention whose scores have
log P of a Gaussian prior, as a start that is the teacher. Their equations are in test_attention."""

import pytest
import timm
import torch

import store
from exports import write_store
from gaupipe.attention.gaussian import GaussianAttention
from gaupipe.attention.options import count_parameters
from gaupipe.attention.standard import StandardAttention
from gaupipe.data.load import load_data
from gaupipe.distillation.warm_start import hand_over, warm_start
from gaupipe.maps.gaussians import expected_map
from gaupipe.models import convert, forward_with_maps
from gaupipe.settings import OptimSettings
from gaupipe.settings.load import load
from gaupipe.system.errors import UserError
from gaupipe.teachers.base import Wanted
from gaupipe.teachers.gaussian_vit import GaussianViT
from gaupipe.training.optimizer import build_optimizer
from gaupipe.vit.diagnostics import belief_geometry
from stages import phase_a, phase_b
from stages.runs.directory import RunDirectory
from stages.runs.trained import load_teacher

PRIOR = {"attention": "standard", "attention_options": {"prior": True}}


@pytest.mark.parametrize("kind", [GaussianAttention, StandardAttention])
def test_gaussians_that_are_points_or_leave_the_grid_give_finite_numbers(kind):
    torch.manual_seed(0)
    options = {"prior": True} if kind is StandardAttention else {}
    module, x = kind(8, 2, qkv_bias=True, grid=(3, 4), **options), torch.randn(2, 12, 8)
    for log_std in (-20.0, -3.0, 5.0, 12.0, 60.0):
        for mean in (0.0, 1.0, -40.0):
            with torch.no_grad():
                module.prior[..., :2], module.prior[..., 2:] = mean, log_std
            module.zero_grad()
            update, log_map = module.forward_with_map(x)
            torch.testing.assert_close(update, module(x), atol=1e-5, rtol=1e-4)
            (update.square().sum() + 1e-3 * log_map.sum()).backward()
            assert log_map.isfinite().all()
            assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


def vit(**options) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "gauvit_pico_patch2_8", depth=2, embed_dim=32, in_chans=1, **options
    ).eval()


def teacher_of(parametrisation: str = "loc_scale") -> GaussianViT:
    """One that has learned: nothing is at its start."""
    teacher = GaussianViT(vit(attention="gaussian"), parametrisation).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return teacher


@pytest.mark.parametrize("parametrisation", ["loc_scale", "paper"])
@pytest.mark.parametrize("norms", [{}, {"qk_norm": True}], ids=["plain", "qk_norm"])
def test_a_student_that_a_prior_is_handed_to_is_the_teacher(parametrisation, norms):
    teacher, student = teacher_of(parametrisation), vit(**PRIOR, **norms)
    images = torch.randn(5, 1, 8, 8)
    hand_over(student, teacher.weights())
    maps = teacher.gaussians(None)
    torch.testing.assert_close(student(images), teacher(images, maps), atol=2e-6, rtol=1e-5)
    for layer, log_map in enumerate(forward_with_maps(student, images)[1]):
        shown = expected_map(maps[:, layer], (4, 4)).expand_as(log_map)
        torch.testing.assert_close(log_map.exp(), shown, atol=2e-6, rtol=1e-4)
    student(images).square().sum().backward()
    for block in student.blocks:
        assert block.attn.qkv.weight.grad[:32].abs().max() > 1e-6  # of Q, which leaves 0
        assert block.attn.prior.grad.abs().max() > 1e-6


def test_a_student_gaussian_that_starts_from_the_teacher_is_the_teacher():
    teacher, student, images = teacher_of(), vit(attention="gaussian"), torch.randn(5, 1, 8, 8)
    warm_start(student, teacher.weights())
    expected = teacher(images, teacher.gaussians(None))
    torch.testing.assert_close(student(images), expected, atol=2e-6, rtol=1e-5)


def test_a_student_with_more_than_its_teacher_is_refused():
    with pytest.raises(UserError, match="has blocks.0.attn.norm"):
        hand_over(vit(**PRIOR, scale_attn_norm=True), teacher_of().weights())
    with pytest.raises(UserError, match=r"differs from the teacher in size"):
        hand_over(vit(**PRIOR, num_heads=2), teacher_of().weights())


TEACHER = [
    "phase_a.per_image=none",
    "phase_a.max_epochs=2",
    "phase_a.optim.lr=4e-3",
    "data.batch_size=64",
    "model.args={depth: 2, embed_dim: 32, num_heads: 2}",
    "train.epochs=1",
    "threads=1",
]
EXACT = ["phase_b.warm_start=exact", "model.attention_options={prior: true}"]


def test_phase_b_begins_where_the_teacher_ended(tmp_path):
    """The student's predictions before its first step are the teacher's."""
    run_dir = tmp_path / "run"
    phase_a.run(load("digits_expected", [*TEACHER, *EXACT]), run_dir)
    write_store(run_dir)
    run, data = RunDirectory(run_dir), load_data(load("digits_expected").data)
    job = phase_b.build_training(run.settings(), data, run)
    loaded = load_teacher(run, data)
    hand_over(job.student, loaded.weights())
    batch = next(loaded.batches(data.val).in_order())
    expected = loaded.outputs(batch, Wanted(torch.Generator())).logits
    predictions = job.student.eval()(batch.images).log_softmax(-1)
    torch.testing.assert_close(predictions, expected, atol=1e-5, rtol=1e-4)
    batch = next(loaded.batches(data.train).in_order())
    batch.stored = store.open(run.maps).gather(batch.ids.numpy())
    losses = job.losses(batch, gamma=0.5)
    assert losses.loss_feat.item() == pytest.approx(0, abs=1e-5)
    assert phase_b.run(run_dir)[-1]["val_acc"] > 0.5


@pytest.mark.parametrize("options", [PRIOR, {"attention": "gaussian"}], ids=["prior", "gaussian"])
def test_models_with_gaussians(options):
    """With equal parameters, measured, and trained without decay of the prior."""
    model = vit(**options)
    matched, standard = (vit(match_params=True, **of) for of in (options, {}))
    difference = count_parameters(matched) - count_parameters(standard)
    assert abs(difference) <= 2 * (2 * 32 + 1) / 2  # half a channel of each FFN
    geometry = belief_geometry(model, torch.randn(3, 1, 8, 8))
    assert all(block.mh_norm.isfinite().all() for block in geometry)
    optimizer, _ = build_optimizer(model, OptimSettings(weight_decay=0.1), 1, 1)
    groups = [group for group in optimizer.param_groups if not group["weight_decay"]]
    undecayed = {id(parameter) for group in groups for parameter in group["params"]}
    assert all(id(block.attn.prior) in undecayed for block in model.blocks)
    with pytest.raises(UserError, match="unknown option 'grid'"):
        vit(**{**options, "attention_options": {"grid": [4, 4]}})
    with pytest.raises(UserError, match="cannot convert block 0"):
        convert(model, "belief")


@pytest.mark.parametrize("options", [PRIOR, {"attention": "gaussian"}], ids=["prior", "gaussian"])
def test_gaussians_stay_on_their_grid(options):
    placeless = dict(class_token=True, reg_tokens=1, patch_drop_rate=0.5, dynamic_img_size=True)
    for name, value in placeless.items():
        with pytest.raises(UserError, match=f"with {name} a token has no place on the grid"):
            vit(**options, **{name: value})
    with pytest.raises(UserError, match="set_input_size: this attention has a fixed grid"):
        vit(**options).set_input_size(16)


def test_gaussians_need_a_grid():
    with pytest.raises(UserError, match="lies on a grid"):
        StandardAttention(8, 2, prior=True)
    with pytest.raises(UserError, match="gauvit_ model"):
        GaussianAttention(8, 2)(torch.randn(1, 4, 8))
