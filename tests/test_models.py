"""The timm entrypoints, forward passes that show the maps, and student folders."""

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest
import timm
import torch
from timm.layers import GatedMlp, GluMlp, Mlp, SwiGLU, SwiGLUPacked
from timm.models import create_feature_extractor
from timm.models.vision_transformer import ATTN_LAYERS, VisionTransformer

import gaupipe  # noqa: F401
from gaupipe.attention import ATTENTION, comparing
from gaupipe.models import forward_with_maps, run_blocks, save_student
from gaupipe.system.errors import UserError
from gaupipe.vit.forward import embed

torch.set_num_threads(1)

STUDENTS = comparing()
PICO = "gauvit_pico_patch2_8"
DEIT_S = dict(
    embed_dim=384,
    depth=12,
    num_heads=6,
    mlp_ratio=4,
    class_token=True,
    global_pool="token",
    fc_norm=False,
)


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(name, **kwargs):
    with torch.device("meta"):
        return timm.create_model(name, device="meta", **kwargs)


def images(model, count=3):
    return torch.randn(count, model.in_chans, *model.patch_embed.img_size)


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, kwargs, millions",
    [
        ("gauvit_atto_patch4_32", {}, 6.3),
        ("gauvit_tiny_patch16_224", {}, 29.9),
        ("deit_small_patch16_224", {"attn_layer": "gau_standard"}, 22.1),
        ("deit_small_patch16_224", {"attn_layer": "gau_belief"}, 22.1),
        ("deit_small_patch16_224", {"attn_layer": "gau_belief_star"}, 23.8),
        ("gauvit_tiny_patch16_224", {**DEIT_S, "attention": "belief_star"}, 23.8),
    ],
)
def test_models_have_the_published_number_of_parameters(name, kwargs, millions):
    assert round(parameters(on_meta(name, **kwargs)) / 1e6, 1) == millions


def test_the_model_for_the_digits_is_small():
    assert all(parameters(timm.create_model(PICO, attention=key)) < 300_000 for key in STUDENTS)


@pytest.mark.parametrize(
    "name, sizes",
    [
        (PICO, {}),
        ("gauvit_atto_patch4_32", {}),
        ("gauvit_tiny_patch16_224", {}),
        ("gauvit_tiny_patch16_224", DEIT_S),
    ],
)
@pytest.mark.parametrize(
    "attention, options",
    [
        *[(key, {}) for key in STUDENTS],
        ("belief2", {"zz": False}),
        ("belief_star", {"signal": "concat"}),
    ],
)
def test_match_params_keeps_the_total_of_the_standard_model(name, sizes, attention, options):
    standard = parameters(on_meta(name, **sizes))
    matched = on_meta(
        name, attention=attention, attention_options=options, match_params=True, **sizes
    )
    assert abs(parameters(matched) / standard - 1) < 0.005


@pytest.mark.parametrize("mlp_layer", [Mlp, GluMlp, SwiGLUPacked, SwiGLU, GatedMlp])
@pytest.mark.parametrize(
    "options", [{}, {"proj_bias": False}, {"scale_mlp_norm": True, "qk_norm": True}], ids=str
)
@pytest.mark.parametrize("attention", ["belief_star", "belief2"])
def test_match_params_measures_the_ffn_that_the_model_has(mlp_layer, options, attention):
    """SwiGLU has three matrices, a normalisation adds to a hidden unit, and some have no biases."""
    sizes = dict(mlp_layer=mlp_layer, mlp_ratio=4, **options)
    standard = on_meta(PICO, **sizes)
    matched = on_meta(PICO, attention=attention, match_params=True, **sizes)
    a_step = (
        4 * 2 * (3 * 64 + 4)
    )  # in four blocks two units of at most three weights' rows, biases and norms
    assert abs(parameters(matched) - parameters(standard)) <= a_step / 2


def test_match_params_does_not_change_what_the_seed_draws():
    torch.manual_seed(0)
    timm.create_model(PICO, attention="belief2", match_params=True, depth=1)
    after = torch.rand(1)
    width = (
        timm.create_model(PICO, attention="belief2", match_params=True, depth=1)
        .blocks[0]
        .mlp.fc1.out_features
    )
    torch.manual_seed(0)
    timm.create_model(PICO, attention="belief2", mlp_ratio=(width + 0.5) / 64, depth=1)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("mlp_ratio", [0.5, 0])
def test_match_params_says_when_the_ffn_is_too_small(mlp_ratio):
    with pytest.raises(UserError, match="use a larger mlp_ratio"):
        timm.create_model(PICO, attention="belief2", match_params=True, mlp_ratio=mlp_ratio)


def test_without_ffn_the_blocks_are_attention_and_nothing_else():
    """*Belief2, table 3*: 3.38 M parameters become 2.04 M without FFN layers, in their model."""
    model = timm.create_model(PICO, attention="belief2", mlp_ratio=0).eval()
    assert {name.split(".")[2] for name, _ in model.blocks.named_parameters(prefix="blocks")} == {
        "norm1",
        "attn",
    }
    x = images(model)
    tokens = model.patch_embed(x) + model.pos_embed
    for block in model.blocks:
        tokens = tokens + block.attn(block.norm1(tokens))
    torch.testing.assert_close(model(x), model.head(model.fc_norm(tokens.mean(1))))


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"attention": "beleif"}, "unknown attention 'beleif'; did you mean 'belief'"),
        (
            {"attention": "belief2", "attention_options": {"activaton": "gelu"}},
            "did you mean 'activation'",
        ),
        (
            {"attention": "standard", "attention_options": {"gamma": 1}},
            "unknown option 'gamma' of StandardAttention",
        ),
        ({"attn_layer": "gau_belief"}, "attn_layer: a gauvit model takes attention="),
    ],
)
def test_mistakes_are_named(kwargs, message):
    with pytest.raises(UserError, match=message):
        timm.create_model(PICO, **kwargs)


@pytest.mark.parametrize("key", STUDENTS)
def test_stock_timm_models_take_the_attention_by_key(key):
    model = timm.create_model(
        "deit_tiny_patch16_224", attn_layer=f"gau_{key}", img_size=32, depth=2
    ).eval()
    assert (
        type(model) is VisionTransformer
        and type(model.blocks[0].attn) is ATTENTION[key] is ATTN_LAYERS[f"gau_{key}"]
    )
    assert model(torch.randn(2, 3, 32, 32)).isfinite().all()
    with pytest.raises(UserError, match=f"attn_layer 'gau_{key}x'; did you mean 'gau_{key}'"):
        timm.create_model("deit_tiny_patch16_224", attn_layer=f"gau_{key}x")


@pytest.mark.parametrize("key", STUDENTS)
def test_models_can_be_copied_and_pickled(key):
    torch.manual_seed(0)
    model = timm.create_model(PICO, attention=key, depth=1).eval()
    x = images(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x), model(x))


GRAPHS = [dict(attention=key) for key in ATTENTION] + [
    dict(attention_options={"prior": True}),
    dict(attention="attentionx", attention_options={"mask_diagonal": False}),
    dict(attention="belief_star", attention_options={"signal": "projected"}, rezero=True),
    dict(attention="belief2", class_token=True, reg_tokens=2, qk_norm=True, mlp_ratio=0),
]


@pytest.mark.parametrize("kwargs", GRAPHS, ids=str)
def test_timms_feature_extractor_works_with_every_attention(kwargs):
    torch.manual_seed(0)
    model = timm.create_model(PICO, depth=2, **kwargs).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = images(model)
    extractor = create_feature_extractor(model, ["blocks.0", "head"])
    features, logits = extractor(x).values()
    torch.testing.assert_close(logits, model(x))
    torch.testing.assert_close(features, model.blocks[0](embed(model, x)))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


def test_standard_attention_without_a_prior_is_timms_own_and_becomes_torchscript():
    model = timm.create_model(PICO, depth=2).eval()
    assert {type(block.attn) for block in model.blocks} == {timm.layers.Attention}
    x = images(model)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


# ---- ReZero --------------------------------------------------------------------------------------


def test_rezero_starts_as_the_identity_and_every_branch_can_grow():
    torch.manual_seed(0)
    model = timm.create_model(PICO, rezero=True)
    x = images(model)
    tokens = model.patch_embed(x) + model.pos_embed
    torch.testing.assert_close(model(x), model.head(model.fc_norm(tokens.mean(1))))
    model(x).square().sum().backward()
    scalars = [(block.ls1.scale, block.ls2.scale) for block in model.blocks]
    assert all(scale.grad.abs() > 0 for pair in scalars for scale in pair)
    assert not any(isinstance(module, torch.nn.LayerNorm) for module in model.blocks.modules())


# ---- the explicit loop and the maps --------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(model_name=PICO, rezero=True),
        dict(model_name=PICO, mlp_ratio=0),
        dict(model_name="vit_tiny_patch16_224", img_size=32, depth=2),
        dict(model_name="deit_tiny_distilled_patch16_224", img_size=32, depth=2),
        dict(model_name="deit3_small_patch16_224", img_size=32, depth=2),
        dict(model_name="vit_small_patch14_reg4_dinov2", img_size=28, depth=2, num_classes=5),
        dict(model_name="vit_base_patch16_clip_224", img_size=32, depth=2),
    ],
    ids=lambda kwargs: " ".join(map(str, kwargs.values())),
)
def test_run_blocks_is_the_models_own_forward_pass(kwargs):
    torch.manual_seed(0)
    model = timm.create_model(**kwargs).eval()
    x = images(model)
    torch.testing.assert_close(
        run_blocks(model, x, lambda layer, attention, tokens: attention(tokens)), model(x)
    )


@pytest.mark.parametrize("key", [*STUDENTS, "timm"])
def test_forward_with_maps_gives_the_models_logits_and_the_maps_behind_them(key):
    torch.manual_seed(0)
    if key == "timm":
        model = timm.create_model("vit_tiny_patch16_224", img_size=48, depth=3).eval()
    else:
        model = timm.create_model(PICO, attention=key).eval()
    x = images(model)
    logits, rows = forward_with_maps(model, x)
    torch.testing.assert_close(logits, model(x))
    assert len(rows) == len(model.blocks)
    for block, row in zip(model.blocks, rows, strict=True):
        tokens = model.pos_embed.shape[1]
        assert row.shape == (3, block.attn.num_heads, tokens, tokens) and row.dtype == torch.float32
        torch.testing.assert_close(row.exp().sum(-1), torch.ones(row.shape[:-1]))


FILES = ["SHA256SUMS", "config.json", "model.safetensors"]


# ---- student folders -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [
        *[dict(attention=key) for key in STUDENTS],
        dict(
            attention="belief2",
            attention_options={"activation": "silu", "zz": False},
            match_params=True,
        ),
        dict(attention="attentionx", attention_options={"gamma": 3.0, "mask_diagonal": False}),
        dict(attention="belief2", match_params=True, mlp_ratio=4),
        dict(rezero=True),
        dict(mlp_ratio=0, attention="belief2"),
        dict(
            in_chans=1,
            img_size=12,
            embed_dim=32,
            depth=1,
            num_heads=2,
            num_classes=7,
            qk_norm=True,
            init_values=0.1,
        ),
    ],
    ids=str,
)
def test_a_saved_student_comes_back_through_timm(kwargs, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(PICO, **kwargs).eval()
    save_student(
        model,
        tmp_path / "student",
        label_names=list("abcdefghij")[: model.num_classes],
        mean=(0.5,),
        std=(0.2,),
    )
    again = timm.create_model(f"local-dir:{tmp_path / 'student'}", pretrained=True).eval()
    x = images(model)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    assert sorted(path.name for path in (tmp_path / "student").iterdir()) == FILES


def test_the_files_of_a_saved_student_have_the_mode_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        save_student(timm.create_model(PICO), tmp_path / "student")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "student").iterdir()}
    assert modes == dict.fromkeys(FILES, 0o640)


def test_a_standard_student_needs_timm_only(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(
        "gauvit_atto_patch4_32", depth=2, in_chans=1, img_size=28, num_classes=3
    ).eval()
    x = images(model)
    save_student(
        model, tmp_path / "student", label_names=["cat", "dog", "bird"], mean=(0.3,), std=(0.4,)
    )
    torch.save((x, model(x)), tmp_path / "expected.pt")
    script = """
import sys, timm, torch
x, expected = torch.load(sys.argv[1] + "/expected.pt")
model = timm.create_model("local-dir:" + sys.argv[1] + "/student", pretrained=True).eval()
assert "gaupipe" not in sys.modules
torch.testing.assert_close(model(x), expected)
cfg = model.pretrained_cfg
assert tuple(cfg["input_size"]) == (1, 28, 28) and cfg["num_classes"] == 3, cfg
assert tuple(cfg["mean"]) == (0.3,) and tuple(cfg["std"]) == (0.4,), cfg
assert cfg["label_names"] == ["cat", "dog", "bird"], cfg
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def test_saving_again_replaces_the_folder_as_a_whole(tmp_path):
    folder = tmp_path / "student"
    save_student(timm.create_model(PICO, num_classes=4), folder)
    (folder / "left over").touch()
    save_student(timm.create_model(PICO, num_classes=5), folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["student"]
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert json.loads((folder / "config.json").read_text())["num_classes"] == 5


def test_a_model_changed_after_construction_is_saved_as_it_is_now(tmp_path):
    model = timm.create_model(PICO, attention="belief", num_classes=4).eval()
    model.reset_classifier(6)
    model.set_input_size((16, 16))
    save_student(model, tmp_path / "student")
    again = timm.create_model(f"local-dir:{tmp_path / 'student'}", pretrained=True).eval()
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
