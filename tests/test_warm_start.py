"""Students that start from a teacher's weights."""

import pytest
import timm
import torch

import gaupipe.vit.models  # noqa: F401
from gaupipe.attention import STUDENTS
from gaupipe.distillation.warm_start import start_from_teacher, warm_start
from gaupipe.models import forward_with_maps
from gaupipe.settings.load import load
from gaupipe.system.errors import UserError
from gaupipe.vit.slicing import in_components, spread_of_stream
from stages import run
from vits import small

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
    torch.testing.assert_close(model.pos_embed[:, -16:], teacher["pos_embed"], rtol=0, atol=0)
    torch.testing.assert_close(
        model.pos_embed[:, :-16], start["pos_embed"][:, :-16], rtol=0, atol=0
    )
    assert not tokens or torch.equal(model.cls_token, start["cls_token"])


SIZES = dict(embed_dim=16, num_heads=2, depth=2, in_chans=1)


def random_vit(**sizes) -> torch.nn.Module:
    """Weights with which attention is far from uniform."""
    torch.manual_seed(1)
    model = timm.create_model("gauvit_pico_patch2_8", attention="standard", **{**SIZES, **sizes})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def grown(small: torch.nn.Module, heads: int) -> torch.nn.Module:
    """A ViT twice as wide that computes what ``small`` does: each channel of the residual stream is
    there twice, so that LayerNorm sees the same mean and variance, but only the first is read; all
    other heads, channels of heads and hidden units are zero. Three blocks, the middle one adds
    nothing."""
    large = random_vit(embed_dim=32, num_heads=heads, depth=3)
    old, width = small.state_dict(), large.blocks[0].attn.head_dim
    step = width // small.blocks[0].attn.head_dim
    attended = [head * 32 // 2 + channel * step for head in range(2) for channel in range(8)]
    rows = torch.tensor(attended)
    with torch.no_grad():
        for name, new in large.named_parameters():
            block = name.split(".")[1] if name.startswith("blocks.") else "0"
            new.zero_()
            if block == "1":
                continue
            part = old[name.replace("blocks.2.", "blocks.1.")]
            if ".qkv." in name:
                places = torch.cat([rows, rows + 32, rows + 64])
                new.view(96, -1)[places, : new[0].numel() : 2] = part.view(48, -1)
            elif name.endswith("attn.proj.weight"):
                new[::2, rows] = new[1::2, rows] = part
            elif name.endswith("fc1.weight"):
                new[::2, ::2] = part
            elif name.endswith("fc1.bias"):
                new[::2] = part
            elif name.endswith("fc2.weight"):
                new[::2, ::2] = new[1::2, ::2] = part
            elif name == "head.weight":
                new[:, ::2] = part
            elif name == "head.bias":
                new.copy_(part)
            else:
                doubled = 0 if new.ndim == part.ndim and new.shape[0] != part.shape[0] else 2
                new.copy_(part.repeat_interleave(2, dim=doubled))
    return large


@pytest.mark.parametrize("attention", ["standard", "belief2"])
@pytest.mark.parametrize("heads", [2, 4])
def test_a_slice_of_a_vit_whose_other_channels_are_zero_computes_what_the_vit_does(
    attention, heads
):
    small = random_vit()
    large = grown(small, heads)
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    student = timm.create_model(
        "gauvit_pico_patch2_8",
        attention=attention,
        attention_options={"zz": False, "activation": "identity"} if attention == "belief2" else {},
        **SIZES,
    ).eval()
    start_from_teacher(student, "slice", large.state_dict(), heads, (4, 4))
    torch.testing.assert_close(student(images), large(images), atol=1e-5, rtol=1e-4)
    maps = forward_with_maps(large, images)[1]
    assert maps[0].exp().std() > 0.005 and maps[2].exp().std() > 0.005  # not uniform
    values = [vit.get_submodule("blocks.0.attn.qkv").weight[32:] for vit in (student, small)]
    assert torch.equal(*values)


def test_scores_of_normalised_queries_and_keys_keep_their_size():
    """A head of half the channels sums half as many products, and divides by a smaller root."""
    large = random_vit(embed_dim=32, num_heads=2, qk_norm=True)
    student = random_vit(embed_dim=16, num_heads=2, qk_norm=True)
    start_from_teacher(student, "slice", large.state_dict(), 2, (4, 4))
    for name in ("q_norm", "k_norm"):
        gain = large.blocks[0].attn.get_submodule(name).weight[::2]
        ours = student.blocks[0].attn.get_submodule(name).weight
        torch.testing.assert_close(ours**2, gain**2 * 2**0.5)


def pictures(count: int = 20, **shape: int) -> torch.Tensor:
    sizes = [count, shape.get("channels", 1), *[shape.get("size", 8)] * 2]
    return torch.randn(sizes, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("heads", [2, 4])
def test_principal_components_compute_what_a_vit_does_whose_stream_has_no_more(heads):
    """Each channel of the large one is there twice: half as many components are all of it."""
    large = grown(random_vit(), heads)
    student = random_vit(depth=2)
    spread = spread_of_stream(large, [pictures()])
    assert spread.trace() == pytest.approx(1)
    assert torch.linalg.matrix_rank(spread, atol=1e-6) == 15  # 16, less the mean
    start_from_teacher(student, "slice", large.state_dict(), heads, (4, 4), spread)
    images = pictures(3)
    torch.testing.assert_close(student(images), large(images), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_small_patch14_dinov2", "deit_tiny_distilled_patch16_224"]
)
def test_all_components_of_a_vit_compute_what_it_does(name):
    """Gains and biases of its norms, and its LayerScale, are in the matrices beside them."""
    model = small(name, size=28, patch_size=14)
    spread = spread_of_stream(model, [pictures(channels=3, size=28)])
    turned = in_components(model.state_dict(), spread, 48)
    assert not torch.equal(turned["norm.weight"], model.state_dict()["norm.weight"])
    images = pictures(2, channels=3, size=28)
    with torch.inference_mode():
        expected = model(images)
        model.load_state_dict(turned)
        torch.testing.assert_close(model(images), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("changes", [{"qkv_bias": False}, {"norm_layer": "rmsnorm"}], ids=str)
def test_a_vit_without_the_biases_that_components_need_is_sliced_by_channels(changes):
    """The bias of a LayerNorm could go nowhere, and RMSNorm has none."""
    sizes = dict(size=28, patch_size=14, class_token=False, global_pool="avg")
    large = small("vit_tiny_patch16_224", **sizes, **changes)
    for parameter in large.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.5)
    images = pictures(2, channels=3, size=28)
    spread = spread_of_stream(large, [images])
    assert (spread is None) == ("norm_layer" in changes)
    student = small("vit_tiny_patch16_224", **sizes, **changes)
    start_from_teacher(student, "slice", large.state_dict(), 3, (2, 2), spread)
    torch.testing.assert_close(student(images), large(images), atol=1e-5, rtol=1e-4)


EQUAL = {
    "class token": {},
    "distilled": {"name": "deit_tiny_distilled_patch16_224"},
    "LayerScale": {"init_values": 0.5},
    "LayerScale, RMSNorm": {"init_values": 0.5, "norm_layer": "rmsnorm"},
    "registers, SwiGLU": {"name": "vit_giant_patch14_reg4_dinov2", "init_values": 0.5},
    "norms of Q and K": {"qk_norm": True, "scale_attn_norm": True, "scale_mlp_norm": True},
    "CLIP": {"name": "vit_base_patch16_clip_224"},
    "no last norm": {"final_norm": False},
    "pooled, fc_norm": {"class_token": False, "global_pool": "avg", "fc_norm": True},
}


@pytest.mark.parametrize("how", ["slice", "teacher"])
@pytest.mark.parametrize("family", EQUAL)
def test_a_start_from_a_vit_of_equal_size_computes_what_it_does(family, how):
    arguments = {"size": 28, "patch_size": 14, **EQUAL[family]}
    name = arguments.pop("name", "vit_tiny_patch16_224")
    large = small(name, **arguments)
    images = pictures(3, channels=3, size=28)
    spread = spread_of_stream(large, [images])
    torch.manual_seed(1)
    sizes = {"img_size": 28, "num_classes": 5, "depth": 2, "embed_dim": 48, "num_heads": 3}
    del arguments["size"]
    student = timm.create_model(name, **{**sizes, **arguments}).eval()
    start_from_teacher(student, how, large.state_dict(), 3, (2, 2), spread)
    with torch.no_grad():
        torch.testing.assert_close(student(images), large(images), atol=1e-3, rtol=1e-3)


def test_layer_scale_goes_into_the_matrices_of_a_student_without_it():
    large = small(size=28, patch_size=14, init_values=0.5, norm_layer="rmsnorm")
    student = small(size=28, patch_size=14, norm_layer="rmsnorm")
    start_from_teacher(student, "slice", large.state_dict(), 3, (2, 2))
    images = pictures(2, channels=3, size=28)
    torch.testing.assert_close(student(images), large(images), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "teacher, part",
    [
        ({"qk_norm": True}, "attn.q_norm.weight"),
        ({"scale_mlp_norm": True}, "mlp.norm.weight"),
        ({"mlp_layer": timm.layers.SwiGLU}, "mlp.fc1_g.weight"),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["slice", "teacher"])
def test_a_start_is_refused_where_the_student_lacks_a_part(how, teacher, part):
    large = small(size=28, patch_size=14, **teacher)
    with pytest.raises(UserError, match=f"the teacher has blocks.0.{part}, which the student"):
        start_from_teacher(small(size=28, patch_size=14), how, large.state_dict(), 3, (2, 2))


def test_a_start_needs_as_many_heads():
    """Whose number no shape of a matrix tells."""
    teacher = random_vit(num_heads=4)
    with pytest.raises(UserError, match="warm_start=teacher: the student has 2 heads, the teacher"):
        start_from_teacher(random_vit(), "teacher", teacher.state_dict(), 4, (4, 4))


def test_a_slice_leaves_what_the_student_has_not_and_resizes_position_and_patch_embedding():
    """A teacher with a class token, other patches and other classes; a convolutional stem."""
    teacher = random_vit(embed_dim=32, patch_size=1, num_classes=7, **CLASS).state_dict()
    teacher["pos_embed"] = torch.full((1, 64, 32), 0.5)  # of patches
    teacher["patch_embed.proj.weight"].fill_(1.0)
    student = random_vit()
    head = student.head.weight.detach().clone()
    start_from_teacher(student, "slice", teacher, 2, (8, 8))
    torch.testing.assert_close(student.pos_embed, torch.full((1, 16, 16), 0.5))
    # patches twice as large see the same in an image of one colour
    colour = torch.ones(1, 1, 8, 8)
    bias = teacher["patch_embed.proj.bias"][::2]
    torch.testing.assert_close(student.patch_embed(colour)[0, 0], 1.0 + bias)
    torch.testing.assert_close(student.head.weight, head, rtol=0, atol=0)
    for stem in ("conv", "residual"):
        vit = random_vit(stem=stem)
        before = {name: part.clone() for name, part in vit.patch_embed.state_dict().items()}
        start_from_teacher(vit, "slice", teacher, 2, (8, 8))
        for name, part in vit.patch_embed.state_dict().items():
            torch.testing.assert_close(part, before[name], rtol=0, atol=0)
        torch.testing.assert_close(vit.pos_embed, student.pos_embed, rtol=0, atol=0)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"embed_dim": 48}, "channels: 48, the trained ViT 32"),
        ({"depth": 3}, "blocks: 3, the trained ViT 2"),
        ({"num_heads": 4}, "heads: 4, the trained ViT 2"),
        ({"num_heads": 1, "embed_dim": 32}, "channels of head: 32, the trained ViT 16"),
        ({"mlp_ratio": 5}, "hidden units: 80, the trained ViT 64"),
    ],
)
def test_a_slice_is_at_most_as_large_as_the_teacher(sizes, message):
    teacher = random_vit(embed_dim=32).state_dict()
    with pytest.raises(UserError, match=f"phase_b.warm_start=slice: the student has {message}"):
        start_from_teacher(random_vit(**sizes), "slice", teacher, 2, (4, 4))


@pytest.mark.parametrize("gamma,made", [("0", "from the teacher"), ("0.1", "distilled")])
def test_the_summary_calls_distilled_what_more_than_started_from_the_teacher(tmp_path, gamma, made):
    epochs = ["phase_a.max_epochs=1", "train.epochs=1", "threads=1"]
    start = ["phase_b.alpha=0", f"phase_b.gamma={gamma}", "phase_b.warm_start=teacher"]
    size = ["data.train_images=100", "model.args={depth: 2, embed_dim: 16, num_heads: 2}"]
    settings = load("digits_expected", [*epochs, *start, *size])
    table = run.run_all(settings, tmp_path / "run", baseline=False)
    assert table[1].model == f"standard, {made}"
