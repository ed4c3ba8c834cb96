"""Swapping the attention of a timm model, weights kept."""

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from gaupipe.attention import ATTENTION
from gaupipe.errors import UserError
from gaupipe.models import convert, save_student

torch.set_num_threads(1)

STUDENTS = [key for key in ATTENTION if key != "gaussian"]
SOURCES = {
    "class token": dict(model_name="vit_tiny_patch16_224", img_size=64),
    "DeiT, distilled": dict(model_name="deit_tiny_distilled_patch16_224", img_size=64),
    "DeiT III, layer scale": dict(model_name="deit3_small_patch16_224", img_size=64, init_values=0.5),
    "registers": dict(model_name="vit_small_patch14_reg4_dinov2", img_size=56, num_classes=10, init_values=0.5),
    "qk-norm": dict(model_name="vit_tiny_patch16_224", img_size=64, qk_norm=True, scale_attn_norm=True),
    "CLIP, no class token": dict(model_name="vit_base_patch16_clip_224", img_size=64, embed_dim=192, num_heads=3,
                                 class_token=False, global_pool="avg"),
    "no biases": dict(model_name="vit_tiny_patch16_224", img_size=64, qkv_bias=False, proj_bias=False),
}


def trained_like(**kwargs):
    """A model with weights large enough for attention to be far from uniform."""
    torch.manual_seed(0)
    model = timm.create_model(depth=3, **kwargs).eval()
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.15)
        torch.nn.init.normal_(block.attn.proj.weight, std=0.05)
    return model, torch.randn(2, 3, *model.patch_embed.img_size)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("options", [{}, {"zz": False}], ids=str)
def test_to_belief2_the_outputs_do_not_change(source, options):
    """*Belief2, proposition 1*."""
    model, x = trained_like(**SOURCES[source])
    converted = convert(model, "belief2", **options)
    assert type(converted.blocks[0].attn) is ATTENTION["belief2"]
    before = model(x)
    torch.testing.assert_close(converted(x), before, rtol=1e-5, atol=1e-5 * before.abs().max().item())


def test_belief2_can_learn_what_standard_attention_cannot_after_conversion():
    """Z must not start at 0, where the gradient of ZZ' is 0 and it would stay."""
    model, x = trained_like(**SOURCES["class token"])
    converted = convert(model, "belief2")
    converted(x).square().sum().backward()
    for block in converted.blocks:
        assert block.attn.z.weight.grad.abs().max() > 0 and block.attn.proj_parallel.weight.grad.abs().max() > 0


@pytest.mark.parametrize("key", STUDENTS)
@pytest.mark.parametrize("source", ["DeiT, distilled", "qk-norm"])
def test_every_weight_is_kept_and_the_source_left_alone(source, key):
    model, _ = trained_like(**SOURCES[source])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = convert(model, key)
    state = converted.state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    for parameter in converted.parameters():
        parameter.data.zero_()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert type(model.blocks[0].attn) is timm.layers.Attention


def test_belief_star_starts_as_belief_attention():
    model, x = trained_like(**SOURCES["class token"])
    torch.testing.assert_close(convert(model, "belief_star")(x), convert(model, "belief")(x))


@pytest.mark.parametrize("source", SOURCES)
def test_there_and_back_again(source):
    model, x = trained_like(**SOURCES[source])
    torch.testing.assert_close(convert(convert(model, "belief2"), "standard")(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("source", SOURCES)
def test_a_converted_model_is_saved_and_comes_back(source, tmp_path):
    model, x = trained_like(**SOURCES[source])
    converted = convert(model, "belief2", activation="silu")
    save_student(converted, tmp_path / "student")
    again = timm.create_model(f"local-dir:{tmp_path / 'student'}", pretrained=True).eval()
    torch.testing.assert_close(again(x), converted(x), rtol=0, atol=0)


def test_a_gauvit_with_a_shrunken_ffn_converts_and_is_saved(tmp_path):
    model = timm.create_model("gauvit_pico_patch2_8", attention="belief2", match_params=True).eval()
    converted = convert(model, "standard")
    save_student(converted, tmp_path / "student")
    again = timm.create_model(f"local-dir:{tmp_path / 'student'}", pretrained=True).eval()
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(again(x), converted(x), rtol=0, atol=0)


def test_dropout_precision_and_mode_are_taken_over():
    model = timm.create_model("vit_tiny_patch16_224", depth=1, attn_drop_rate=0.2, proj_drop_rate=0.3).double()
    attention = convert(model, "belief2").blocks[0].attn
    assert attention.attn_drop.p == 0.2 and attention.proj_drop.p == 0.3 and attention.training
    assert {parameter.dtype for parameter in attention.parameters()} == {torch.float64}
    assert not convert(model.eval(), "belief2").blocks[0].attn.training


def test_a_model_built_by_its_class_converts_but_has_no_name_to_be_saved_under(tmp_path):
    torch.manual_seed(0)
    model = VisionTransformer(img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=4).eval()
    x = torch.randn(2, 3, 16, 16)
    converted = convert(model, "belief2")
    torch.testing.assert_close(converted(x), model(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="timm.create_model"):
        save_student(converted, tmp_path / "student")


@pytest.mark.parametrize("source, key, options, message", [
    ("eva02_tiny_patch14_224", "belief", {}, "cannot convert a Eva"),
    ("vit_tiny_patch16_224", "gaussian", {}, "no queries and keys"),
    ("vit_tiny_patch16_224", "belif", {}, "did you mean 'belief'"),
    ("vit_tiny_patch16_224", "belief2", {"activatoin": "gelu"}, "did you mean 'activation'"),
    ("vit_small_patch16_18x2_224", "belief", {}, "cannot convert block 0: its attention is a ParallelThingsBlock"),
    ("vit_base_patch16_xp_224", "belief", {}, "cannot convert block 0: its attention is a ParallelScalingBlock"),
])
def test_it_says_what_it_cannot_convert(source, key, options, message):
    with torch.device("meta"):
        model = timm.create_model(source, depth=1, device="meta")
    with pytest.raises(UserError, match=message):
        convert(model, key, **options)


def test_it_does_not_convert_other_attentions():
    model = timm.create_model("vit_tiny_patch16_224", depth=1, attn_layer="diff")
    with pytest.raises(UserError, match="cannot convert block 0: its attention is a DiffAttention"):
        convert(model, "belief")
