"""Students that look by Gaussians: attention 'gaussian', and standard attention whose scores have
log P of a Gaussian prior. Against independent computations, and as a start that is the teacher."""

import math

import pytest
import timm
import torch
from torch.distributions import Normal

from arguments import sets
from gaupipe.attention.gaussian import GaussianAttention
from gaupipe.attention.standard import StandardAttention
from gaupipe.data.splits import load_data
from gaupipe.distillation.warm_start import hand_over, warm_start
from gaupipe.maps.gaussians import expected_map
from gaupipe.models import convert, forward_with_maps, save_student
from gaupipe.settings import OptimSettings
from gaupipe.settings import load as config
from gaupipe.system.errors import UserError
from gaupipe.teachers.gaussian import Teacher
from gaupipe.training.optimizer import build_optimizer
from gaupipe.vit.diagnostics import belief_geometry
from stages import export_maps, phase_b
from stages.phase_a import gaussian as phase_a
from stages.runs.directory import RunDirectory

PICO = "gauvit_pico_patch2_8"
PRIOR = {"attention": "standard", "attention_options": {"prior": True}}
GRID, HEADS, WIDTH = (3, 4), 2, 8


def factor(mean: torch.Tensor, log_std: torch.Tensor, n: int) -> torch.Tensor:
    """Expected weights [..., n] of linear interpolation at a normal point of an axis, in float64
    from the textbook: R(a) = E max(0, u - a), and second differences of R."""
    m, s = (mean + 1) / 2 * (n - 1), log_std.exp() / 2 * (n - 1)
    normal = Normal(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))
    z = (m.unsqueeze(-1) - torch.arange(n)) / s.unsqueeze(-1)
    r = s.unsqueeze(-1) * (normal.log_prob(z).exp() + z * normal.cdf(z))
    slopes = r[..., :-1] - r[..., 1:]
    ones, zeros = torch.ones_like(slopes[..., :1]), torch.zeros_like(slopes[..., :1])
    return torch.cat([ones, slopes], -1) - torch.cat([slopes, zeros], -1)


def map_of(raw: torch.Tensor) -> torch.Tensor:
    along_y, along_x = factor(raw[..., 1], raw[..., 3], 3), factor(raw[..., 0], raw[..., 2], 4)
    return (along_y.unsqueeze(-1) * along_x.unsqueeze(-2)).flatten(-2)


CASES = {
    "start": lambda prior: None,
    "random": lambda prior: prior.add_(torch.randn_like(prior)),
    "at the border": lambda prior: prior[..., :2].copy_(prior[..., :2].sign()),
    "beyond the border": lambda prior: prior[..., :2].mul_(2.5),
    "narrow": lambda prior: prior[..., 2:].fill_(math.log(0.3)),
    "wide": lambda prior: prior[..., 2:].fill_(5.0),
}


def attention(kind: type, case: str) -> torch.nn.Module:
    torch.manual_seed(0)
    options = {"prior": True} if kind is StandardAttention else {}
    module = kind(WIDTH, HEADS, qkv_bias=True, grid=GRID, **options)
    with torch.no_grad():
        CASES[case](module.prior)
        if kind is GaussianAttention and case != "start":
            module.predictor.normal_(std=0.1)
    return module


def by_hand(module: torch.nn.Module, x: torch.Tensor, parameters: dict) -> torch.Tensor:
    """The update in float64, with every map and score written out."""

    def heads(name: str, rows: slice) -> torch.Tensor:
        projected = x @ parameters[f"{name}.weight"][rows].mT + parameters[f"{name}.bias"][rows]
        return projected.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    if isinstance(module, StandardAttention):
        q, k, v = (heads("qkv", slice(part * WIDTH, (part + 1) * WIDTH)) for part in range(3))
        log_p = map_of(parameters["prior"]).clamp_min(1e-30).log()
        scores = q @ k.mT / math.sqrt(WIDTH / HEADS) + log_p
        shown = scores.exp() / scores.exp().sum(-1, keepdim=True)
    else:
        raw = (x @ parameters["predictor"].mT).unflatten(-1, (HEADS, 4)).transpose(1, 2)
        shown, v = map_of(parameters["prior"] + raw), heads("v", slice(None))
    mh = (shown @ v).transpose(1, 2).flatten(2)
    return mh @ parameters["proj.weight"].mT + parameters["proj.bias"]


@pytest.mark.parametrize("kind", [GaussianAttention, StandardAttention])
@pytest.mark.parametrize("case", CASES)
def test_updates_and_gradients_are_those_written_out(kind, case):
    module = attention(kind, case)
    x, wanted = torch.randn(2, 12, WIDTH), torch.randn(2, 12, WIDTH)
    given = x.clone().requires_grad_()
    update = module(given)
    (update * wanted).sum().backward()

    parameters = {
        name: parameter.detach().double().requires_grad_()
        for name, parameter in module.named_parameters()
    }
    own_x = x.double().requires_grad_()
    own = by_hand(module, own_x, parameters)
    (own * wanted).sum().backward()
    torch.testing.assert_close(update.double(), own, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(given.grad.double(), own_x.grad, atol=1e-4, rtol=1e-3)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), parameters[name].grad, atol=3e-4, rtol=2e-3, msg=name
        )


@pytest.mark.parametrize("kind", [GaussianAttention, StandardAttention])
def test_gaussians_that_are_points_or_leave_the_grid_give_finite_numbers(kind):
    module, x = attention(kind, "start"), torch.randn(2, 12, WIDTH)
    for log_std in (-20.0, -3.0, 12.0, 60.0):
        for mean in (0.0, 1.0, -40.0):
            with torch.no_grad():
                module.prior[..., :2], module.prior[..., 2:] = mean, log_std
            module.zero_grad()
            update, log_map = module.forward_with_map(x)
            torch.testing.assert_close(update, module(x), atol=1e-5, rtol=1e-4)
            (update.square().sum() + 1e-3 * log_map.sum()).backward()
            assert log_map.isfinite().all()
            assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("kind", [GaussianAttention, StandardAttention])
def test_hidden_keys_leave_the_rest_of_the_map(kind):
    module, x = attention(kind, "random"), torch.randn(2, 12, WIDTH)
    hidden = torch.rand(12, 12) < 0.4
    hidden.fill_diagonal_(False)
    whole, shown = (module.forward_with_map(x, attn_mask=m)[1].exp() for m in (None, ~hidden))
    rest = whole.masked_fill(hidden, 0)
    torch.testing.assert_close(shown, rest / rest.sum(-1, keepdim=True))
    additive = torch.zeros(12, 12).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(module(x, attn_mask=~hidden), module(x, attn_mask=additive))
    causal = module.forward_with_map(x, is_causal=True)[1].exp()
    assert not causal.triu(1).any()
    torch.testing.assert_close(causal.sum(-1), torch.ones(2, HEADS, 12))


def vit(**options) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(PICO, depth=2, embed_dim=32, in_chans=1, **options).eval()


def teacher_of(parametrisation: str = "loc_scale", predicts: bool = False) -> Teacher:
    """One that has learned: nothing is at its start."""
    teacher = Teacher(vit(attention="gaussian"), parametrisation, predicts=predicts).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return teacher


@pytest.mark.parametrize("parametrisation", ["loc_scale", "paper"])
@pytest.mark.parametrize("tokens", [{}, {"qk_norm": True}], ids=["plain", "qk_norm"])
def test_a_student_that_a_prior_is_handed_to_is_the_teacher(parametrisation, tokens):
    teacher, student, images = (
        teacher_of(parametrisation),
        vit(**PRIOR, **tokens),
        torch.randn(5, 1, 8, 8),
    )
    hand_over(student, teacher.weights())
    expected = teacher(images, teacher.gaussians(None))
    torch.testing.assert_close(student(images), expected, atol=2e-6, rtol=1e-5)
    log_maps = forward_with_maps(student, images)[1]
    maps = teacher.gaussians(None)
    for layer, log_map in enumerate(log_maps):
        shown = expected_map(maps[:, layer], (4, 4)).expand_as(log_map)
        torch.testing.assert_close(log_map.exp(), shown, atol=2e-6, rtol=1e-4)
    student(images).square().sum().backward()
    for block in student.blocks:
        gradient = block.attn.qkv.weight.grad
        assert gradient[:32].abs().max() > 1e-6  # of Q, which leaves 0
        assert block.attn.prior.grad.abs().max() > 1e-6


@pytest.mark.parametrize("predicts", [False, True])
def test_a_student_gaussian_that_starts_from_the_teacher_is_the_teacher(predicts):
    teacher, student, images = (
        teacher_of(predicts=predicts),
        vit(attention="gaussian"),
        torch.randn(5, 1, 8, 8),
    )
    warm_start(student, teacher.weights())
    expected = teacher(images, None if predicts else teacher.gaussians(None))
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
    "phase_b.epochs=1",
    "threads=1",
]
EXACT = ["phase_b.warm_start=exact", "phase_b.attention_options={prior: true}"]


def test_phase_b_begins_where_the_teacher_ended(tmp_path, in_process):
    """The student's predictions before its first step are the teacher's."""
    run_dir = tmp_path / "run"
    phase_a.run(config.load("digits", [*TEACHER, *EXACT]), run_dir)
    export_maps.run(run_dir)
    run, data = RunDirectory(run_dir), load_data(config.load("digits").data)
    job = phase_b.build(run.settings(), data, run)
    loaded = phase_a.load(run, data)
    phase_b.start_from_teacher(job, loaded.teacher)
    job.student.eval()
    batch = next(loaded.batches(data.val).in_order())
    expected, _maps = loaded.forward_with_maps(batch, torch.Generator())
    predictions = job.student(batch.images).log_softmax(-1)
    torch.testing.assert_close(predictions, expected, atol=1e-5, rtol=1e-4)
    stored = loaded.batches(data.train).in_order()
    batch = next(stored)
    batch.stored = job.maps.gather(batch.ids.numpy())
    losses = phase_b.StudentLosses(job)(batch, gamma=0.5)
    assert losses["loss_feat"].item() == pytest.approx(0, abs=1e-5)

    metrics = phase_b.run(run_dir)
    assert metrics[-1]["val_acc"] > 0.5
    assert in_process("evaluate", "--run-dir", run_dir)[0] == 0
    saved = timm.create_model(f"local-dir:{run_dir}/phase_b/standard/student", pretrained=True)
    assert saved.blocks[0].attn.prior.shape == (2, 16, 4)
    code, _, err = in_process("phase-b", "--run-dir", run_dir, "--student", "belief2")
    assert code == 2 and "phase_b.student=standard" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "changes, needs",
    [
        (["phase_a.teacher=vit"], "phase_a.teacher=gaussian"),
        (["phase_a.per_image=table"], "phase_a.per_image=none"),
        (["phase_a.per_image=predicted"], "phase_a.per_image=none"),
        (["phase_a.mode=stochastic"], "phase_a.mode=expected"),
        (["phase_b.student=belief2"], "phase_b.student=standard"),
        (["phase_b.attention_options={}"], "prior: true"),
        (["phase_b.match_params=true"], "phase_b.match_params=false"),
        (["phase_b.model_args={depth: 3}"], "phase_b.model_args"),
        (["model.args={class_token: true}"], "class or register token"),
        (
            [
                "phase_b.warm_start=prior",
                "phase_b.student=gaussian",
                "phase_b.attention_options={}",
            ],
            "fits Q and K",
        ),
        (["phase_b.attention_options={prior: 1}"], "prior"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_before_work_starts(
    changes, needs, tmp_path, in_process
):
    settings = sets(*TEACHER, *EXACT, *changes)
    code, _, err = in_process("phase-a", "digits", "--run-dir", tmp_path / "run", *settings)
    assert code == 2 and needs in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [PRIOR, {"attention": "gaussian"}], ids=["prior", "gaussian"])
def test_models_with_gaussians(options, tmp_path):
    """Saved and loaded, with equal parameters, measured, and trained without decay of the prior."""
    model, images = vit(**options), torch.randn(3, 1, 8, 8)
    logits, log_maps = forward_with_maps(model, images)
    torch.testing.assert_close(logits, model(images))
    torch.testing.assert_close(log_maps[1].exp().sum(-1), torch.ones(3, 4, 16))
    save_student(model, tmp_path / "student")
    saved = timm.create_model(f"local-dir:{tmp_path}/student", pretrained=True).eval()
    assert torch.equal(saved(images), model(images))
    sizes = [
        sum(p.numel() for p in timm.create_model(PICO, match_params=True, **of).parameters())
        for of in (options, {})
    ]
    assert abs(sizes[0] - sizes[1]) <= 4 * (2 * 64 + 1) / 2  # half a channel of each FFN
    assert all(block.mh_norm.isfinite().all() for block in belief_geometry(model, images))
    optimizer, _ = build_optimizer(model, OptimSettings(weight_decay=0.1), 1, 1)
    groups = [group for group in optimizer.param_groups if not group["weight_decay"]]
    undecayed = {id(parameter) for group in groups for parameter in group["params"]}
    assert all(id(block.attn.prior) in undecayed for block in model.blocks)
    with pytest.raises(UserError, match="class or register token"):
        vit(**options, class_token=True)
    with pytest.raises(UserError, match="unknown option 'grid'"):
        vit(**{**options, "attention_options": {"grid": [4, 4]}})
    with pytest.raises(UserError, match="cannot convert block 0"):
        convert(model, "belief")


def test_gaussians_need_a_grid():
    with pytest.raises(UserError, match="lies on a grid"):
        StandardAttention(8, 2, prior=True)
    with pytest.raises(UserError, match="gauvit_ model"):
        GaussianAttention(8, 2)(torch.randn(1, 4, 8))
