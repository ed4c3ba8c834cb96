"""Swapping the attention of a timm model, weights kept."""

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from gaupipe.attention import ATTENTION, comparing
from gaupipe.models import convert, forward_with_maps, save_student
from gaupipe.system.errors import UserError

torch.set_num_threads(1)

STUDENTS = comparing()
SOURCES = {
    "class token": dict(model_name="vit_tiny_patch16_224", img_size=64),
    "DeiT, distilled": dict(model_name="deit_tiny_distilled_patch16_224", img_size=64),
    "DeiT III, layer scale": dict(
        model_name="deit3_small_patch16_224", img_size=64, init_values=0.5
    ),
    "registers": dict(
        model_name="vit_small_patch14_reg4_dinov2", img_size=56, num_classes=10, init_values=0.5
    ),
    "qk-norm": dict(
        model_name="vit_tiny_patch16_224", img_size=64, qk_norm=True, scale_attn_norm=True
    ),
    "CLIP, no class token": dict(
        model_name="vit_base_patch16_clip_224",
        img_size=64,
        embed_dim=192,
        num_heads=3,
        class_token=False,
        global_pool="avg",
    ),
    "DINOv2, SwiGLU": dict(
        model_name="vit_giant_patch14_reg4_dinov2",
        img_size=56,
        num_classes=10,
        init_values=0.5,
        embed_dim=48,
        num_heads=3,
    ),
    "no biases": dict(
        model_name="vit_tiny_patch16_224", img_size=64, qkv_bias=False, proj_bias=False
    ),
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
def test_to_belief2_the_outputs_do_not_change_and_it_is_saved(source, options, tmp_path):
    """*Belief2, proposition 1*."""
    model, x = trained_like(**SOURCES[source])
    converted = convert(model, "belief2", **options)
    assert type(converted.blocks[0].attn) is ATTENTION["belief2"]
    before = model(x)
    torch.testing.assert_close(
        converted(x), before, rtol=1e-5, atol=1e-5 * before.abs().max().item()
    )
    save_student(converted, tmp_path / "student")
    again = timm.create_model(f"local-dir:{tmp_path / 'student'}", pretrained=True).eval()
    torch.testing.assert_close(again(x), converted(x), rtol=0, atol=0)


def test_belief2_can_learn_what_standard_attention_cannot_after_conversion():
    """Z must not start at 0, where the gradient of ZZ' is 0 and it would stay."""
    model, x = trained_like(**SOURCES["class token"])
    converted = convert(model, "belief2")
    converted(x).square().sum().backward()
    for block in converted.blocks:
        assert (
            block.attn.z.weight.grad.abs().max() > 0
            and block.attn.proj_parallel.weight.grad.abs().max() > 0
        )


@pytest.mark.parametrize("key", STUDENTS)
@pytest.mark.parametrize("source", ["DeiT, distilled", "qk-norm"])
def test_weights_are_kept_and_the_source_left_alone(source, key):
    """All of them, but for the sign of AttentionX's W: its update is (V - gamma MH) W."""
    model, _x = trained_like(**SOURCES[source])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = convert(model, key)
    state = converted.state_dict()
    for name, value in before.items():
        turned = key == "attentionx" and name.endswith("attn.proj.weight")
        assert torch.equal(state[name], -value if turned else value), name
    for parameter in converted.parameters():
        parameter.data.zero_()
    after = model.state_dict()
    assert [name for name, value in before.items() if not torch.equal(after[name], value)] == []
    assert type(model.blocks[0].attn) is timm.layers.Attention


def student_like(key, **options):
    """A model of another attention, every weight of it random."""
    torch.manual_seed(0)
    model = timm.create_model(
        "gauvit_pico_patch2_8", attention=key, attention_options=options, depth=2
    ).eval()
    for _name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model, torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize(
    "old, old_options, new, new_options",
    [
        ("standard", {}, "belief2", {}),  # Belief2, proposition 1
        ("standard", {}, "belief_star", {"signal": "concat"}),
        ("belief", {}, "belief_star", {}),
        ("belief", {}, "belief2", {}),
        ("belief", {}, "belief2", {"activation": "gelu", "zz": False}),
        ("belief", {"signal": "projected"}, "belief_star", {"signal": "projected"}),
        ("belief", {"signal": "projected"}, "belief2", {}),
        ("belief", {"signal": "value"}, "belief_star", {"signal": "concat"}),
        ("xsa", {}, "belief_star", {}),
        ("attentionx", {"mask_diagonal": False}, "belief_star", {"signal": "concat"}),
        ("attentionx", {}, "attentionx", {}),
        ("belief_star", {}, "belief_star", {}),
        ("belief2", {"activation": "silu"}, "belief2", {"activation": "silu"}),
    ],
)
def test_conversions_that_do_not_change_the_outputs(old, old_options, new, new_options):
    model, x = student_like(old, **old_options)
    converted = convert(model, new, **new_options)
    before = model(x)
    torch.testing.assert_close(
        converted(x), before, rtol=1e-5, atol=1e-5 * before.abs().max().item()
    )
    if "signal" not in old_options:  # an ablation is no place to come back to
        again = convert(converted, old, **old_options)
        torch.testing.assert_close(
            again(x), before, rtol=1e-5, atol=1e-5 * before.abs().max().item()
        )


@pytest.mark.parametrize("activation", ["identity", "silu"])
def test_another_activation_is_what_the_model_computes_and_is_saved_as(activation, tmp_path):
    model, images = student_like("belief2")  # GELU
    same = convert(model, "belief2")
    torch.testing.assert_close(same(images), model(images))
    converted = convert(model, "belief2", activation=activation)
    assert not torch.allclose(converted(images), model(images), atol=1e-3)
    save_student(converted, tmp_path)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(loaded(images), converted(images))


@pytest.mark.parametrize("key", STUDENTS)
def test_there_and_back_again_from_standard(key):
    model, x = student_like("standard")
    converted = convert(model, key)
    torch.testing.assert_close(convert(converted, "standard")(x), model(x), rtol=0, atol=0)


def test_belief_stars_two_matrices_are_added_up_where_only_one_is():
    """D W + D_s W_s: MH is multiplied by W + W_s."""
    model, _ = student_like("belief_star")
    for key, sign in (("standard", 1), ("xsa", 1), ("belief2", 1), ("attentionx", -1)):
        for old, new in zip(model.blocks, convert(model, key).blocks, strict=True):
            expected = sign * (old.attn.proj.weight + old.attn.proj_local.weight)
            torch.testing.assert_close(new.attn.proj.weight, expected)


def test_a_gate_is_taken_over():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
    for block in model.blocks:
        block.attn = timm.layers.Attention(192, 3, qkv_bias=True, gated=True).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(convert(model, "belief2")(x), model(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(forward_with_maps(model, x)[0], model(x), rtol=1e-5, atol=1e-5)


def test_parameters_of_an_attention_itself_are_taken_over():
    """As the gates of each head are, which start closed."""
    model = timm.create_model(
        "gauvit_pico_patch2_8", attention="belief", attention_options={"gated": True}
    ).eval()
    for block in model.blocks:
        torch.nn.init.constant_(block.attn.head_gate, 0.5)
    x = torch.randn(2, model.patch_embed.proj.in_channels, 8, 8)
    torch.testing.assert_close(convert(model, "belief")(x), model(x), rtol=0, atol=0)


def test_reading_the_maps_of_a_timm_model_leaves_its_weights_where_gradients_find_them():
    model, x = trained_like(**SOURCES["class token"])
    model, x = model.double(), x.double()
    forward_with_maps(model, x)[0].square().sum().backward()
    found = [block.attn.proj.weight.grad.clone() for block in model.blocks]
    model.zero_grad()
    model(x).square().sum().backward()
    for block, gradient in zip(model.blocks, found, strict=True):
        torch.testing.assert_close(gradient, block.attn.proj.weight.grad)


def test_frozen_weights_stay_frozen():
    model, _ = trained_like(**SOURCES["class token"])
    model.blocks[0].attn.proj.weight.requires_grad_(False)
    proj = convert(model, "attentionx").blocks[0].attn.proj
    assert not proj.weight.requires_grad and proj.bias.requires_grad


def test_a_gauvit_with_a_shrunken_ffn_converts_and_is_saved(tmp_path):
    model = timm.create_model("gauvit_pico_patch2_8", attention="belief2", match_params=True).eval()
    converted = convert(model, "standard")
    save_student(converted, tmp_path / "student")
    again = timm.create_model(f"local-dir:{tmp_path / 'student'}", pretrained=True).eval()
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(again(x), converted(x), rtol=0, atol=0)


def test_dropout_precision_and_mode_are_taken_over():
    model = timm.create_model(
        "vit_tiny_patch16_224", depth=1, attn_drop_rate=0.2, proj_drop_rate=0.3
    ).double()
    attention = convert(model, "belief2").blocks[0].attn
    assert attention.attn_drop.p == 0.2 and attention.proj_drop.p == 0.3 and attention.training
    assert {parameter.dtype for parameter in attention.parameters()} == {torch.float64}
    assert not convert(model.eval(), "belief2").blocks[0].attn.training


def test_a_model_built_by_its_class_converts_but_has_no_name_to_be_saved_under(tmp_path):
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=4
    ).eval()
    x = torch.randn(2, 3, 16, 16)
    converted = convert(model, "belief2")
    torch.testing.assert_close(converted(x), model(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="timm.create_model"):
        save_student(converted, tmp_path / "student")


@pytest.mark.parametrize(
    "source, key, options, message",
    [
        ("beit_base_patch16_224", "belief", {}, "cannot convert a Beit: only timm's VisionTr"),
        ("vit_small_patch16_dinov3", "belief", {}, "cannot convert a Eva: only timm's VisionTr"),
        ("vit_tiny_patch16_224", "gaussian", {}, "no queries and keys"),
        ("vit_tiny_patch16_224", "belif", {}, "did you mean 'belief'"),
        ("vit_tiny_patch16_224", "belief2", {"activatoin": "gelu"}, "did you mean 'activation'"),
        (
            "vit_small_patch16_18x2_224",
            "belief",
            {},
            "cannot convert block 0: its attention is a ParallelThingsBlock",
        ),
        (
            "vit_base_patch16_xp_224",
            "belief",
            {},
            "cannot convert block 0: its attention is a ParallelScalingBlock",
        ),
    ],
)
def test_it_says_what_it_cannot_convert(source, key, options, message):
    with torch.device("meta"):
        model = timm.create_model(source, depth=1, device="meta")
    with pytest.raises(UserError, match=message):
        convert(model, key, **options)


def test_a_block_whose_queries_are_no_matrix_is_refused():
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    model.blocks[0].attn.qkv = torch.nn.Identity()
    with pytest.raises(UserError, match="cannot convert block 0: its qkv, a Identity, is no"):
        convert(model, "xsa")


def test_it_does_not_convert_other_attentions():
    model = timm.create_model("vit_tiny_patch16_224", depth=1, attn_layer="diff")
    with pytest.raises(UserError, match="cannot convert block 0: its attention is a DiffAttention"):
        convert(model, "belief")
