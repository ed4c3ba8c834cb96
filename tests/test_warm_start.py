"""Students that start from a teacher's weights."""

import pytest
import timm
import torch

import gaupipe.vit.models  # noqa: F401
from gaupipe.attention import STUDENTS
from gaupipe.distillation.warm_start import warm_start
from gaupipe.settings import load as config
from stages import run

CLASS = dict(class_token=True, global_pool="token")
REGISTERS = dict(class_token=True, reg_tokens=2, no_embed_class=True)


def vit(attention: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "gauvit_pico_patch2_8", attention=attention, depth=2, embed_dim=32, in_chans=1, **options
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


@pytest.mark.parametrize("tokens", [{}, CLASS, REGISTERS], ids=str)
def test_class_and_register_tokens_keep_their_start(tokens):
    model, teacher = vit("standard", **tokens), vit("gaussian").state_dict()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    warm_start(model, teacher)
    assert torch.equal(model.pos_embed[:, -16:], teacher["pos_embed"])
    assert torch.equal(model.pos_embed[:, :-16], start["pos_embed"][:, :-16])
    assert not tokens or torch.equal(model.cls_token, start["cls_token"])


@pytest.mark.parametrize("gamma,made", [("0", "from the teacher"), ("0.1", "distilled")])
def test_the_summary_calls_distilled_what_more_than_started_from_the_teacher(tmp_path, gamma, made):
    epochs = ["phase_a.max_epochs=1", "train.epochs=1", "baseline.epochs=0", "threads=1"]
    start = ["phase_b.alpha=0", f"phase_b.gamma={gamma}", "phase_b.warm_start=teacher"]
    size = ["data.train_images=100", "model.args={depth: 2, embed_dim: 16, num_heads: 2}"]
    table = run.run(config.load("digits_expected", [*epochs, *start, *size]), tmp_path / "run")
    assert table[1].model == f"standard, {made}"
