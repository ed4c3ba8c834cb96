"""Students that start from a teacher: what is copied, and Q and K fitted to the shared prior."""

import pytest
import timm
import torch

import gaupipe.vit.models  # noqa: F401
from gaupipe.attention import STUDENTS, comparing
from gaupipe.data.batches import Batches
from gaupipe.data.splits import load_data
from gaupipe.distillation.losses import feature_loss
from gaupipe.distillation.warm_start import fit_queries_and_keys, warm_start
from gaupipe.maps.gaussians import expected_map
from gaupipe.models import forward_with_maps
from gaupipe.settings import load as config
from gaupipe.system.errors import UserError
from gaupipe.training.scores import score_model
from stages import export_maps, phase_b, run
from stages.phase_a import gaussian as phase_a
from stages.runs.directory import RunDirectory

L, GRID = 2, (4, 4)


def vit(attention: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "gauvit_pico_patch2_8", attention=attention, depth=L, embed_dim=32, in_chans=1, **options
    ).eval()


@pytest.mark.parametrize("attention", STUDENTS)
def test_warm_start_copies_all_but_q_and_k(attention):
    """AttentionX's update is (V - MH) W: there W is minus the teacher's. Belief2's W_p is W."""
    model, teacher = vit(attention), vit("gaussian")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    warm_start(model, teacher.state_dict())
    for name, parameter in model.named_parameters():
        if "qkv" in name:
            qk, v = parameter[:64], parameter[64:]
            assert torch.equal(qk, before[name][:64])
            assert torch.equal(v, teacher.state_dict()[name.replace("qkv", "v")])
        elif ".z." in name:
            assert torch.equal(parameter, before[name])
        elif "proj_parallel" in name:
            assert torch.equal(
                parameter, teacher.state_dict()[name.replace("proj_parallel", "proj")]
            )
        elif "proj_local" in name:
            assert not parameter.any()
        elif name.endswith("attn.proj.weight") and attention == "attentionx":
            assert torch.equal(parameter, -teacher.state_dict()[name])
        else:
            assert torch.equal(parameter, teacher.state_dict()[name])


def prior() -> list[torch.Tensor]:
    """A map for each of two blocks, [1, 4, 16, 16]: heads that look up, left, around and
    everywhere."""
    torch.manual_seed(1)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4), indexing="ij")
    here = torch.stack([x, y], dim=-1).view(1, 16, 2)
    means = here + torch.tensor([[0.0, -0.7], [-0.7, 0.0], [0.0, 0.0], [0.0, 0.0]]).view(4, 1, 2)
    stds = torch.tensor([0.3, 0.3, 0.4, 2.0]).view(4, 1, 1).expand(4, 16, 2)
    return [expected_map(torch.cat([means, stds], dim=-1).unsqueeze(0), GRID)] * L


@pytest.mark.parametrize("attention", comparing())
def test_q_and_k_fitted_to_a_map_give_rows_like_it_and_change_nothing_else(attention):
    model, images = vit(attention), torch.randn(64, 1, 8, 8)
    torch.nn.init.trunc_normal_(model.pos_embed, std=0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    hidden = torch.eye(16, dtype=torch.bool) if attention == "attentionx" else None
    unseen = torch.randn(16, 1, 8, 8)

    def divergence() -> list[float]:
        return [
            feature_loss(row, wanted.expand_as(row), hidden=hidden).item()
            for row, wanted in zip(forward_with_maps(model, unseen)[1], prior(), strict=True)
        ]

    at_start = divergence()
    fit_queries_and_keys(model, prior(), images)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(now < 0.25 * then for now, then in zip(divergence(), at_start, strict=True))
    for name, parameter in model.named_parameters():
        if ".attn.qkv." in name:
            assert torch.equal(parameter[64:], before[name][64:]) and not torch.equal(
                parameter[:64], before[name][:64]
            )
        elif ".attn.z." not in name:
            assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(
    "tokens",
    [
        dict(class_token=True, global_pool="token"),
        dict(class_token=True, reg_tokens=2, no_embed_class=True),
    ],
    ids=["class", "registers"],
)
@pytest.mark.parametrize("attention", ["standard", "attentionx"])
def test_a_student_with_class_and_register_tokens_starts_from_the_teacher_too(attention, tokens):
    model, teacher, images = (
        vit(attention, **tokens),
        vit("gaussian").state_dict(),
        torch.randn(32, 1, 8, 8),
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    prefix = model.num_prefix_tokens
    warm_start(model, teacher)
    assert torch.equal(model.pos_embed[:, -16:], teacher["pos_embed"])
    assert torch.equal(model.pos_embed[:, :-16], before["pos_embed"][:, :-16])
    assert torch.equal(model.cls_token, before["cls_token"])
    torch.nn.init.trunc_normal_(model.pos_embed, std=0.5)

    def divergence() -> float:
        total = 0.0
        for row, wanted in zip(forward_with_maps(model, images)[1], prior(), strict=True):
            row, wanted = (
                row.exp()[..., prefix:, prefix:].double(),
                wanted.double().expand(32, 4, 16, 16),
            )
            if attention == "attentionx":
                wanted = wanted * (1 - torch.eye(16))
            row, wanted = row / row.sum(-1, keepdim=True), wanted / wanted.sum(-1, keepdim=True)
            seen = wanted > 0
            total += (wanted[seen] * (wanted[seen] / row[seen]).log()).sum().item() / (32 * 4 * 16)
        return total

    at_start = divergence()
    fitted = fit_queries_and_keys(model, prior(), images)
    assert divergence() < 0.25 * at_start and sum(fitted) == pytest.approx(divergence(), rel=0.2)


def test_a_block_without_a_map_is_left_alone_and_the_fit_repeats():
    fitted = []
    for _ in range(2):
        model = vit("standard")
        before = {
            name: parameter.detach().clone()
            for name, parameter in model.blocks[0].named_parameters()
        }
        divergences = fit_queries_and_keys(
            model,
            [None, prior()[1]],
            torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(3)),
        )
        assert divergences[0] is None and divergences[1] > 0
        assert all(
            torch.equal(parameter, before[name])
            for name, parameter in model.blocks[0].named_parameters()
        )
        fitted.append(model.blocks[1].attn.qkv.weight.detach().clone())
    assert torch.equal(*fitted)


def test_a_student_that_starts_from_the_prior_knows_the_digits_before_its_first_step(tmp_path):
    settings = ["phase_a.max_epochs=2", "threads=1", "phase_a.optim.lr=2e-3"]
    phase_a.run(config.load("digits", settings), tmp_path / "run")
    export_maps.run(tmp_path / "run")
    accuracy = {}
    for start in ("teacher", "prior"):
        teacher = RunDirectory(tmp_path / "run")
        chosen = config.load("digits", [*settings, f"phase_b.warm_start={start}"])
        job = phase_b.build(chosen, load_data(chosen.data), teacher)
        phase_b.start_from_teacher(job, phase_a.load(teacher).teacher)
        validation = Batches(job.data.val, job.data, job.device, batch_size=512)
        accuracy[start] = score_model(job.student, validation)["acc"]
    assert accuracy["prior"] > 0.5 and accuracy["prior"] > accuracy["teacher"]


def test_the_summary_does_not_call_distilled_what_only_started_from_the_teacher(tmp_path):
    settings = [
        "data.train_images=100",
        "phase_a.max_epochs=1",
        "phase_b.epochs=1",
        "phase_b.alpha=0",
        "phase_b.warm_start=prior",
        "model.args={depth: 2, embed_dim: 16, num_heads: 2}",
        "baseline.epochs=0",
        "threads=1",
    ]
    models = [
        run.run(config.load("digits", [*settings, f"phase_b.gamma={gamma}"]), tmp_path / gamma)[1][
            "model"
        ]
        for gamma in ("0", "0.1")
    ]
    assert models == ["standard, from the teacher", "standard, distilled"]


def test_the_prior_as_a_start_needs_a_prior():
    with pytest.raises(UserError, match="phase_a.prior=true"):
        config.load("digits", ["phase_b.warm_start=prior", "phase_a.prior=false"])
