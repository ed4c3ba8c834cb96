"""The timm entrypoints, forward passes that show the maps, and student folders."""

import copy
import json
import os
import pickle

import pytest
import timm
import torch
from timm.layers import GatedMlp, GluMlp, Mlp, SwiGLU, SwiGLUPacked
from timm.models import create_feature_extractor, vision_transformer
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import gaupipe  # noqa: F401
from gaupipe.attention import ATTENTION, comparing
from gaupipe.attention.options import count_parameters
from gaupipe.models import convert, forward_with_maps, run_blocks, save_student
from gaupipe.system.errors import UserError
from gaupipe.vit.forward import embed
from gaupipe.vit.saving import load_folder

PICO = "gauvit_pico_patch2_8"
DEIT_S = dict(embed_dim=384, depth=12, num_heads=6, mlp_ratio=4, class_token=True)
DEIT_S |= dict(global_pool="token", fc_norm=False)


def parameters(name, **kwargs):
    with torch.device("meta"):
        return count_parameters(timm.create_model(name, device="meta", **kwargs))


def random_pico(**kwargs):
    torch.manual_seed(0)
    model = timm.create_model(PICO, **kwargs).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def images(model, count=3):
    return torch.randn(count, model.in_chans, *model.patch_embed.img_size)


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
    assert round(parameters(name, **kwargs) / 1e6, 1) == millions


@pytest.mark.parametrize(
    "attention, mlp_layer",
    [
        *(("belief2", layer) for layer in (Mlp, GluMlp, SwiGLUPacked, SwiGLU, GatedMlp)),
        ("belief_star", Mlp),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"proj_bias": False}, {"scale_mlp_norm": True, "qk_norm": True}], ids=str
)
def test_match_params_measures_the_ffn_that_the_model_has(mlp_layer, options, attention):
    """SwiGLU has three matrices, a normalisation adds to a hidden unit, and some have no biases."""
    sizes = dict(mlp_layer=mlp_layer, mlp_ratio=4, **options)
    matched = parameters(PICO, attention=attention, match_params=True, **sizes)
    # four blocks, two units of at most three weights' rows, biases and norms
    a_step = 4 * 2 * (3 * 64 + 4)
    assert abs(matched - parameters(PICO, **sizes)) <= a_step / 2


def test_match_params_and_options_reach_any_vit_of_timm():
    base = "deit_small_patch16_224"
    own = parameters(base, depth=2)
    options = {"attention": "belief2", "attention_options": {"zz": False}}
    converted = {"base": base, "depth": 2, **options}
    assert parameters("gauvit_converted", **converted) == own + 2 * 384**2  # W_p
    matched = parameters("gauvit_converted", match_params=True, **converted)
    assert abs(matched - own) <= 2 * (2 * 384 + 1) / 2  # half a hidden unit of each block
    with pytest.raises(UserError, match="match_params: trained weights keep their FFN"):
        timm.create_model("gauvit_converted", pretrained=True, match_params=True, **converted)
    swiglu = {"mlp_layer": SwiGLU, **converted}
    with pytest.raises(UserError, match="match_params: deit_small.* has an FFN without fc1"):
        timm.create_model("gauvit_converted", match_params=True, **swiglu)


def test_match_params_does_not_change_what_the_seed_draws():
    def drawn(**ffn):
        torch.manual_seed(0)
        model = timm.create_model(PICO, attention="belief2", depth=1, **ffn)
        return model.blocks[0].mlp.fc1.out_features, torch.rand(1)

    width, after = drawn(match_params=True)
    torch.testing.assert_close(drawn(mlp_ratio=(width + 0.5) / 64)[1], after, rtol=0, atol=0)


def test_without_ffn_the_blocks_are_attention_and_nothing_else():
    """*Belief2, table 3*."""
    model = timm.create_model(PICO, attention="belief2", mlp_ratio=0).eval()
    names = {name.split(".")[1] for name, _ in model.blocks.named_parameters()}
    assert names == {"norm1", "attn"}
    x = images(model)
    tokens = model.patch_embed(x) + model.pos_embed
    for block in model.blocks:
        tokens = tokens + block.attn(block.norm1(tokens))
    torch.testing.assert_close(model(x), model.head(model.fc_norm(tokens.mean(1))))


@pytest.mark.parametrize(
    "attention, kwargs, message",
    [
        ("beleif", {}, "unknown attention 'beleif'; did you mean 'belief'"),
        ("belief2", {"activaton": "gelu"}, "did you mean 'activation'"),
        ("belief2", {"activation": "gelo"}, "did you mean 'gelu'"),
        ("standard", {"gamma": 1}, "unknown option 'gamma' of StandardAttention"),
        ("belief2", dict(match_params=True, mlp_ratio=0.5), "use a larger mlp_ratio"),
        ("belief2", dict(match_params=True, mlp_ratio=0), "use a larger mlp_ratio"),
    ],
)
def test_mistakes_are_named(attention, kwargs, message):
    kwargs = kwargs if "match_params" in kwargs else {"attention_options": kwargs}
    with pytest.raises(UserError, match=message):
        timm.create_model(PICO, attention=attention, **kwargs)


def test_timm_keeps_its_own_table_of_attentions():
    """Other code in the process reads the table too, and expects a dictionary."""
    assert type(vision_transformer.ATTN_LAYERS) is dict
    assert vision_transformer.ATTN_LAYERS.get("gau_beleif", 7) == 7
    assert vision_transformer.ATTN_LAYERS["gau_belief"] is ATTENTION["belief"]


GRAPHS = [dict(attention=key) for key in ATTENTION] + [
    dict(attention_options={"prior": True}),
    dict(attention="attentionx", attention_options={"mask_diagonal": False}),
    dict(attention="belief_star", attention_options={"signal": "projected"}, rezero=True),
    dict(attention="belief2", class_token=True, reg_tokens=2, qk_norm=True, mlp_ratio=0),
    dict(stem="conv", embed_norm_layer=torch.nn.LayerNorm),
    dict(stem="residual"),
]


@pytest.mark.parametrize("kwargs", GRAPHS, ids=str)
def test_models_are_traced_by_timms_feature_extractor_copied_and_pickled(kwargs):
    model = random_pico(depth=2, **kwargs)
    x = images(model)
    extractor = create_feature_extractor(model, ["blocks.0", "head"])
    features, logits = extractor(x).values()
    torch.testing.assert_close(logits, model(x))
    torch.testing.assert_close(features, model.blocks[0](embed(model, x)))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x), model(x))
        assert str(twin) == str(model)


def test_standard_attention_without_a_prior_is_timms_own_and_becomes_torchscript():
    model = timm.create_model(PICO, depth=2).eval()
    assert {type(block.attn) for block in model.blocks} == {timm.layers.Attention}
    x = images(model)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


@pytest.mark.parametrize("way", ["state_dict", "traced", "onnx"])
@pytest.mark.parametrize("key", comparing())
def test_a_swapped_model_goes_through_torchs_tools(key, way, tmp_path):
    model = random_pico(attention=key, depth=1)
    twin = timm.create_model(PICO, attention=key, depth=1).eval()
    x = images(model)
    if way == "state_dict":
        set_model_state_dict(twin, get_model_state_dict(model))
        output = twin(x)
    elif way == "traced":
        output = torch.jit.trace(model, (x,))(x)
    else:
        onnxruntime = pytest.importorskip("onnxruntime")
        file = tmp_path / "model.onnx"
        torch.onnx.export(model, (x,), file, dynamo=False, input_names=["x"])
        output = torch.from_numpy(onnxruntime.InferenceSession(file).run(None, {"x": x.numpy()})[0])
    torch.testing.assert_close(output, model(x))


@pytest.mark.parametrize("key", comparing())
def test_an_attention_with_a_mask_is_traced(key):
    attention = ATTENTION[key](8, 2)
    arguments = (torch.randn(1, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril())
    traced = torch.jit.trace(attention, arguments)
    torch.testing.assert_close(traced(*arguments), attention(*arguments))


def test_rezero_starts_as_the_identity_and_every_branch_can_grow():
    torch.manual_seed(0)
    model = timm.create_model(PICO, rezero=True)
    x = images(model)
    tokens = model.patch_embed(x) + model.pos_embed
    torch.testing.assert_close(model(x), model.head(model.fc_norm(tokens.mean(1))))
    model(x).square().sum().backward()
    scalars = [scale.scale for block in model.blocks for scale in (block.ls1, block.ls2)]
    assert all(scalar.grad.abs() > 0 for scalar in scalars)
    assert not any(isinstance(module, torch.nn.LayerNorm) for module in model.blocks.modules())


SMALL = dict(img_size=32, depth=2)


@pytest.mark.parametrize(
    "name, kwargs",
    [
        *((PICO, dict(attention=key)) for key in ATTENTION),
        (PICO, dict(attention_options={"prior": True})),
        (PICO, dict(rezero=True)),
        (PICO, dict(mlp_ratio=0)),
        *(
            (PICO, dict(attention="belief2", stem=stem, patch_size=4))
            for stem in ("conv", "residual")
        ),
        ("vit_tiny_patch16_224", SMALL),
        ("deit_tiny_distilled_patch16_224", SMALL),
        ("deit3_small_patch16_224", SMALL),
        ("vit_small_patch14_reg4_dinov2", dict(img_size=28, depth=2, num_classes=5)),
        ("vit_base_patch16_clip_224", SMALL),
        *(("deit_tiny_patch16_224", dict(attn_layer=f"gau_{key}", **SMALL)) for key in comparing()),
    ],
    ids=str,
)
def test_forward_with_maps_is_the_models_own_forward_pass(name, kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **kwargs).eval()
    x = images(model)
    logits, rows = forward_with_maps(model, x)
    plain = run_blocks(model, x, lambda layer, attention, tokens: attention(tokens))
    torch.testing.assert_close((logits, plain), (model(x), model(x)))
    tokens = model.patch_embed.num_patches + model.num_prefix_tokens
    for block, row in zip(model.blocks, rows, strict=True):
        assert row.shape == (3, block.attn.num_heads, tokens, tokens) and row.dtype == torch.float32
        torch.testing.assert_close(row.exp().sum(-1), torch.ones(row.shape[:-1]))


@pytest.mark.long
@pytest.mark.parametrize("key", comparing())
def test_attentions_train_as_timms_train_script_runs_them(key):
    """With --torchcompile, --amp and --grad-checkpointing the gradients are those without."""
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 3}
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=f"gau_{key}", **sizes).train()
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])

    def gradients(forward):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
        loss.backward()
        return torch.cat([one.grad.flatten() for one in model.parameters()])

    plain = gradients(model)
    model.set_grad_checkpointing()
    compiled = gradients(torch.compile(model))
    assert torch.nn.functional.cosine_similarity(plain, compiled, dim=0) > 0.99
    torch.testing.assert_close(compiled.norm(), plain.norm(), rtol=0.05, atol=0)


def test_maps_stay_as_many_while_gradients_are_computed():
    """Gradient checkpointing runs the blocks again, the last one first."""
    model = timm.create_model(PICO, depth=3).train()
    model.set_grad_checkpointing()
    logits, rows = forward_with_maps(model, images(model))
    first = [row.detach().clone() for row in rows]
    logits.sum().backward()
    assert len(rows) == 3
    assert all(torch.equal(row, before) for row, before in zip(rows, first, strict=True))


SAVED = [dict(attention=key) for key in ATTENTION] + [
    dict(attention_options={"prior": True}),
    dict(attention="belief2", attention_options={"activation": "silu", "zz": False}),
    dict(attention="attentionx", attention_options={"gamma": 3.0, "mask_diagonal": False}),
    dict(attention="belief2", match_params=True, mlp_ratio=4),
    dict(rezero=True),
    dict(mlp_ratio=0, attention="belief2"),
    dict(in_chans=1, img_size=12, num_classes=7, qk_norm=True, init_values=0.1, depth=1),
    dict(stem="conv", attention="xsa", in_chans=1, img_size=16, patch_size=8),
    dict(stem="conv"),
    dict(stem="residual", attention="belief2", img_size=16, patch_size=4),
]


@pytest.mark.parametrize("kwargs", SAVED, ids=str)
def test_a_saved_student_comes_back_through_timm(kwargs, tmp_path):
    model, folder = random_pico(**kwargs), tmp_path / "student"
    names = list("abcdefghij")[: model.num_classes]
    before = os.umask(0o027)
    try:
        save_student(model, folder, label_names=names, mean=(0.5,), std=(0.2,))
    finally:
        os.umask(before)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    x = images(model)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)
    described = again.pretrained_cfg
    assert described["input_size"] == x.shape[1:] and described["label_names"] == names
    assert ({*described["mean"]}, {*described["std"]}) == ({0.5}, {0.2})
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o640)


def test_a_compiled_model_is_read_and_saved_as_the_model_in_it(tmp_path):
    model = random_pico(depth=1)
    compiled = torch.compile(model, backend="eager")
    save_student(compiled, tmp_path / "student")
    x = images(model)
    again = timm.create_model(f"local-dir:{tmp_path / 'student'}", pretrained=True).eval()
    torch.testing.assert_close(again(x), model(x))
    torch.testing.assert_close(forward_with_maps(compiled, x)[0], model(x))
    torch.testing.assert_close(convert(compiled, "belief2")(x), model(x))


@pytest.mark.parametrize("kind", ["xp", "rpn", "18x2"])
def test_blocks_that_are_not_timms_ordinary_ones_are_not_run_in_steps(kind):
    model = timm.create_model(f"vit_base_patch16_{kind}_224", embed_dim=48, depth=1, num_heads=4)
    with pytest.raises(UserError, match="cannot run a .*Block in steps: only timm's Block"):
        forward_with_maps(model, torch.zeros(1, 3, 224, 224))


def test_a_block_that_keeps_its_own_attention_gets_no_other():
    arguments = dict(base="vit_base_patch16_xp_224", attention="belief", depth=1)
    with pytest.raises(UserError, match="xp_224: a ParallelScalingBlock keeps its own attention"):
        parameters("gauvit_converted", **arguments)


def test_a_model_changed_after_construction_is_saved_as_it_is_now(tmp_path):
    model = timm.create_model(PICO, attention="belief", num_classes=4).eval()
    model.reset_classifier(6)
    model.set_input_size((16, 16))
    save_student(model, tmp_path / "student")
    again = timm.create_model(f"local-dir:{tmp_path / 'student'}", pretrained=True).eval()
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("prune_norm", [False, True])
def test_a_pruned_model_is_saved_as_it_is_now(pool, prune_norm, tmp_path):
    model = timm.create_model(PICO, class_token=True, global_pool=pool).eval()
    model.prune_intermediate_layers(1, prune_norm=prune_norm)
    save_student(model, tmp_path / "student")
    again = timm.create_model(f"local-dir:{tmp_path / 'student'}", pretrained=True).eval()
    x = images(model)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


def test_a_model_that_could_not_be_loaded_is_not_saved(tmp_path):
    sizes = dict(img_size=28, embed_dim=48, depth=2, num_heads=3)
    model = timm.create_model("eva02_tiny_patch14_224", **sizes)
    save_student(model, tmp_path / "student")
    model.prune_intermediate_layers([0])
    with pytest.raises(UserError, match="Eva is not what timm.*blocks.1"):
        save_student(model, tmp_path / "student")
    assert len(load_folder(tmp_path / "student", "").blocks) == 2  # the earlier one


def test_a_model_with_a_depth_for_each_stage_is_saved(tmp_path):
    model = timm.create_model("pit_ti_224", depth=[1, 2, 1]).eval()
    save_student(model, tmp_path / "student")
    images = torch.randn(1, 3, 224, 224)
    assert torch.equal(load_folder(tmp_path / "student", "")(images), model(images))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"label_names": 7}, "label_names is 7: should be a list with a name"),
        ({"mean": [float("nan")] * 3}, "mean is .*: should be a list with a number"),
        ({"std": [0]}, "std is .*: should be a list with a number above 0"),
        ({"std": "grey"}, "std is 'grey': should be a list"),
        ({"crop_pct": -1}, "crop_pct is -1: should be above 0"),
        ({"crop_pct": 0}, "crop_pct is 0: should be above 0"),
        ({"interpolation": "cubic"}, "interpolation is 'cubic': should be one of bicubic"),
    ],
    ids=str,
)
def test_a_foreign_config_with_senseless_values_is_refused(wrong, message, tmp_path):
    save_student(timm.create_model(PICO, depth=1), tmp_path / "student")
    path = tmp_path / "student" / "config.json"
    config = json.loads(path.read_text())
    del config["sha256"]
    names = {name: wrong.pop(name) for name in [*wrong] if name == "label_names"}
    config |= names
    config["pretrained_cfg"] |= wrong
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"config.json: {message}"):
        load_folder(tmp_path / "student", "")
