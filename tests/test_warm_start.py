"""Students that start from a teacher: what is copied, and Q and K fitted to the shared prior."""

import pytest
import timm
import torch

import gaupipe.vit.models  # noqa: F401
from gaupipe.attention import STUDENTS, comparing
from gaupipe.distillation.warm_start import fit_queries_and_keys, warm_start
from gaupipe.maps.gaussians import expected_map
from gaupipe.models import forward_with_maps
from gaupipe.settings import load as config
from oracles import divergence
from stages import run

L, GRID = 2, (4, 4)


def vit(attention: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "gauvit_pico_patch2_8", attention=attention, depth=L, embed_dim=32, in_chans=1, **options
    ).eval()


@pytest.mark.parametrize("attention", STUDENTS)
def test_warm_start_copies_all_but_q_and_k(attention):
    """AttentionX's update is (V - MH) W: there W is minus the teacher's. Belief2's W_p is W."""
    model, teacher = vit(attention), vit("gaussian").state_dict()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    warm_start(model, teacher)
    for name, parameter in model.named_parameters():
        expected = teacher.get(name.replace("proj_parallel", "proj"), before[name])
        if "qkv" in name:
            expected = torch.cat([before[name][:64], teacher[name.replace("qkv", "v")]])
        elif "proj_local" in name:
            expected = torch.zeros_like(parameter)
        elif name.endswith("attn.proj.weight") and attention == "attentionx":
            expected = -teacher[name]
        assert torch.equal(parameter, expected), name


def prior() -> list[torch.Tensor]:
    """A map for each of two blocks, [1, 4, 16, 16]: heads that look up, left, around and
    everywhere."""
    torch.manual_seed(1)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4), indexing="ij")
    here = torch.stack([x, y], dim=-1).view(1, 16, 2)
    means = here + torch.tensor([[0.0, -0.7], [-0.7, 0.0], [0.0, 0.0], [0.0, 0.0]]).view(4, 1, 2)
    stds = torch.tensor([0.3, 0.3, 0.4, 2.0]).view(4, 1, 1).expand(4, 16, 2)
    return [expected_map(torch.cat([means, stds], dim=-1).unsqueeze(0), GRID)] * L


CLASS = dict(class_token=True, global_pool="token")
REGISTERS = dict(class_token=True, reg_tokens=2, no_embed_class=True)


@pytest.mark.parametrize(
    "attention, tokens",
    [
        *((attention, {}) for attention in comparing()),
        *(
            (attention, more)
            for attention in ("standard", "attentionx")
            for more in (CLASS, REGISTERS)
        ),
    ],
    ids=str,
)
def test_q_and_k_fitted_to_a_map_give_rows_like_it_and_change_nothing_else(attention, tokens):
    model, teacher = vit(attention, **tokens), vit("gaussian").state_dict()
    images, unseen = torch.randn(64, 1, 8, 8), torch.randn(32, 1, 8, 8)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    warm_start(model, teacher)
    assert torch.equal(model.pos_embed[:, -16:], teacher["pos_embed"])
    assert torch.equal(model.pos_embed[:, :-16], start["pos_embed"][:, :-16])
    assert not tokens or torch.equal(model.cls_token, start["cls_token"])
    torch.nn.init.trunc_normal_(model.pos_embed, std=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    prefix = model.num_prefix_tokens

    def distance() -> float:
        rows = (row.exp()[..., prefix:, prefix:] for row in forward_with_maps(model, unseen)[1])
        pairs = zip(prior(), rows, strict=True)
        return sum(divergence(w, row.detach(), attention == "attentionx") for w, row in pairs)

    at_start = distance()
    fitted = fit_queries_and_keys(model, prior(), images)
    assert distance() < 0.25 * at_start and sum(fitted) == pytest.approx(distance(), rel=0.2)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        if ".attn.qkv." in name:
            assert torch.equal(parameter[64:], before[name][64:])
            assert not torch.equal(parameter[:64], before[name][:64])
        elif ".attn.z." not in name:
            assert torch.equal(parameter, before[name]), name


def test_a_block_without_a_map_is_left_alone_and_the_fit_repeats():
    images, fitted = torch.randn(8, 1, 8, 8), []
    for _ in range(2):
        model = vit("standard")
        before = {name: value.clone() for name, value in model.blocks[0].state_dict().items()}
        divergences = fit_queries_and_keys(model, [None, prior()[1]], images)
        assert divergences[0] is None and divergences[1] > 0
        torch.testing.assert_close(dict(model.blocks[0].state_dict()), before, rtol=0, atol=0)
        fitted.append(model.blocks[1].attn.qkv.weight.detach().clone())
    assert torch.equal(*fitted)


@pytest.mark.parametrize("gamma,made", [("0", "from the teacher"), ("0.1", "distilled")])
def test_the_summary_calls_distilled_what_more_than_started_from_the_teacher(tmp_path, gamma, made):
    epochs = ["phase_a.max_epochs=1", "phase_b.epochs=1", "baseline.epochs=0", "threads=1"]
    start = ["phase_b.alpha=0", f"phase_b.gamma={gamma}", "phase_b.warm_start=prior"]
    size = ["data.train_images=100", "model.args={depth: 2, embed_dim: 16, num_heads: 2}"]
    table = run.run(config.load("digits", [*epochs, *start, *size]), tmp_path / "run")
    assert table[1]["model"] == f"standard, {made}"
