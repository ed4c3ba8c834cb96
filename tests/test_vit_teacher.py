"""Trained ViTs as teachers: their maps against softmax written in numpy, and what is refused."""

import contextlib
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

import gaupipe.vit.models  # noqa: F401
from gaupipe.attention import STUDENTS
from gaupipe.models import forward_with_maps, save_student
from gaupipe.system.errors import UserError
from gaupipe.teachers.pretrained import check_fit, load_vit
from gaupipe.teachers.vit import VitTeacher

CACHE = "gaupipe.teachers.pretrained.try_to_load_from_cache"


def data(size=32, channels=3, classes=5, mean=0.5, std=0.25) -> SimpleNamespace:
    """What a teacher asks of a data set."""
    return SimpleNamespace(
        name="blobs",
        image_size=size,
        channels=channels,
        num_classes=classes,
        mean=(mean,) * channels,
        std=(std,) * channels,
    )


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Weights with which attention is far from uniform."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def small(name: str, size: int = 32, **arguments) -> torch.nn.Module:
    """A timm model of this name with two narrow blocks, random."""
    sizes = {"img_size": size, "num_classes": 5, "depth": 2, "embed_dim": 48, "num_heads": 3}
    return randomised(timm.create_model(name, **{**sizes, **arguments}))


def images(count: int = 2, size: int = 32) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def maps_by_numpy(model, tokens: torch.Tensor) -> list[np.ndarray]:
    """Softmax of Q K' / sqrt(d_m) of every block of a timm VisionTransformer, from its weights,
    float64; tokens [B, P + T, d] go into the first block."""
    x, maps = tokens, []
    for block in model.blocks:
        attention, normal = block.attn, block.norm1(x)
        weight = attention.qkv.weight.detach().double().numpy()
        bias = attention.qkv.bias.detach().double().numpy()
        qkv = normal.detach().double().numpy() @ weight.T + bias  # [B, P + T, 3 d]
        batch, count, _ = qkv.shape
        q, k, _ = qkv.reshape(batch, count, 3, attention.num_heads, -1).transpose(2, 0, 3, 1, 4)
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        maps.append(scores / scores.sum(-1, keepdims=True))
        x = block(x)
    return maps


@pytest.mark.parametrize(
    "name,prefix",
    [
        ("vit_tiny_patch16_224", 1),
        ("deit_tiny_distilled_patch16_224", 2),
        ("vit_small_patch14_reg4_dinov2", 5),
    ],
)
def test_maps_are_the_softmax_between_patches_renormalised(name, prefix):
    patch = 14 if "14" in name else 16
    model = small(name, 4 * patch)
    pictures = images(size=4 * patch)
    teacher = VitTeacher(model, data(4 * patch, mean=0.485), name)
    teacher.rescale = None  # the oracle sees the same numbers
    with torch.inference_mode():
        logits, seen = teacher.forward_with_maps(pictures)
        x = model.patch_embed(pictures)
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(x)))
        whole = maps_by_numpy(model, tokens)
    assert (teacher.prefix, teacher.grid, teacher.layers, teacher.heads) == (prefix, (4, 4), 2, 3)
    for block, oracle in enumerate(whole):
        patches = oracle[..., prefix:, prefix:]
        np.testing.assert_allclose(
            seen.blocks[block], patches / patches.sum(-1, keepdims=True), atol=2e-6
        )
        dropped = oracle[..., prefix:, :prefix].sum(-1).mean((0, 2))
        np.testing.assert_allclose(seen.dropped[block], dropped, atol=2e-6)
    assert seen.dropped.min() > 0.01
    torch.testing.assert_close(logits, model(pictures).log_softmax(-1))


@pytest.mark.parametrize("attention", STUDENTS)
def test_maps_of_a_student_are_those_of_forward_with_maps(attention):
    model = timm.create_model(
        "gauvit_pico_patch2_8", attention=attention, depth=2, num_classes=5, in_chans=3
    )
    model, pictures = randomised(model), images(size=8)
    mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
    same = data(8)
    same.mean, same.std = mean, std
    with torch.inference_mode():
        shown, seen = VitTeacher(model, same, "student").forward_with_maps(pictures)
        logits, log_maps = forward_with_maps(model, pictures)
    torch.testing.assert_close(shown, logits.log_softmax(-1), atol=1e-4, rtol=1e-4)
    for ours, log_map in zip(seen.blocks, log_maps, strict=True):
        torch.testing.assert_close(ours, log_map.exp(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "name,size,arguments",
    [
        ("deit3_small_patch16_224", 32, {}),
        ("beit_base_patch16_224", 32, {}),
        ("eva02_tiny_patch14_224", 28, {}),
        ("vit_small_patch14_dinov2", 28, {}),
        ("vit_small_patch16_dinov3", 32, {"embed_dim": 48}),
        ("vit_base_patch16_siglip_224", 32, {}),
        ("vit_small_patch16_rope_224", 32, {}),
        ("vit_relpos_small_patch16_224", 32, {}),
    ],
)
def test_encoders_that_people_use_show_maps(name, size, arguments):
    model = small(name, size, **arguments)
    logits, seen = VitTeacher(model, data(size), name).forward_with_maps(images(size=size))
    assert len(seen.blocks) == 2 and logits.shape == (2, 5)
    for maps in seen.blocks:
        assert maps.shape == (2, 3, 4, 4)
        torch.testing.assert_close(maps.sum(-1), torch.ones(2, 3, 4))
        assert maps.std(-1).mean() > 1e-3  # not uniform: Q and K are in it


@pytest.mark.parametrize(
    "name,size,message",
    [
        ("swin_tiny_patch4_window7_224", 224, "does not attend over all patches in every block"),
        ("resnet18", 32, "shows no attention maps"),
        ("mixer_s16_224", 224, "shows no attention maps"),
        ("xcit_nano_12_p16_224", 224, "has no grid of patches"),
        ("cait_xxs24_224", 224, "has 2 attention maps in 24 blocks"),
        ("pit_ti_224", 224, "does not attend over all patches"),
    ],
)
def test_what_cannot_be_read_is_named(name, size, message):
    model = timm.create_model(name, num_classes=5)
    with pytest.raises(UserError, match=f"{name}.*{message}.*can be read"):
        VitTeacher(model, data(size), name)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"classes": 7}, r"predicts 5 classes, blobs has 7.*num_classes: 0.*phase_b.alpha=0"),
        ({"size": 48}, r"32 x 32 pixels, blobs has 48 x 48.*img_size: 48"),
        ({"channels": 1}, r"3 channels, blobs has 1.*in_chans: 1"),
    ],
)
def test_a_teacher_of_other_images_or_classes_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        VitTeacher(small("vit_tiny_patch16_224"), data(**changes), "vit")


@pytest.mark.parametrize(
    "std", [[0.0] * 3, [float("nan")] * 3, [-1.0] * 3, [1.0] * 2, 5, "x", [None]]
)
def test_a_normalisation_that_is_none_is_refused(std):
    model = small("vit_tiny_patch16_224")
    model.pretrained_cfg = {**model.pretrained_cfg, "std": std}
    with pytest.raises(UserError, match=r"vit: its pretrained_cfg has the std .* for each of 3"):
        VitTeacher(model, data(), "vit")


@pytest.mark.parametrize("classes", [0, 5])
def test_a_teacher_that_gives_no_numbers_is_refused_by_name(classes):
    """NaN among the weights, scores that overflow float32, and images of which either comes."""
    model = small("vit_tiny_patch16_224", num_classes=classes)
    teacher = VitTeacher(model, data(), "vit")
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight.mul_(1e30)
    with pytest.raises(UserError, match="vit: the attention of its block 1|vit: its predictions"):
        teacher.forward_with_maps(images())
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[3, 4] = torch.nan
    with pytest.raises(UserError, match=r"vit: the weights blocks.1.attn.qkv.weight are"):
        VitTeacher(model, data(), "vit")


def test_images_are_normalised_as_the_teacher_learned_them():
    model = small("vit_tiny_patch16_224")
    raw = images().abs()
    ours = data(mean=0.3, std=0.2)
    logits = VitTeacher(model, ours, "vit")((raw - 0.3) / 0.2)
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(logits, model((raw - mean) / std), atol=1e-4, rtol=1e-4)


def test_without_a_head_there_are_maps_and_no_predictions():
    teacher = VitTeacher(small("vit_tiny_patch16_224", num_classes=0), data(), "vit")
    logits, seen = teacher.forward_with_maps(images())
    assert not teacher.predicts and logits.shape == (2, 5) and not logits.any()
    assert len(seen.blocks) == 2


def test_the_digest_follows_all_that_shows_other_maps():
    """Weights and normalisation; the same weights in other heads, or with another activation."""

    def digest(model, name="vit", **changes) -> str:
        return VitTeacher(model, data(**changes), name).sha256()

    model = small("vit_tiny_patch16_224")
    digests = [digest(model), digest(model, mean=0.4)]
    assert digest(model, "another name") == digests[0]
    for changes in ({"num_heads": 4}, {"act_layer": "relu"}):
        other = small("vit_tiny_patch16_224", **changes)
        other.load_state_dict(model.state_dict())
        digests.append(digest(other))
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[0, 0] += 1e-6
    assert len({*digests, digest(model)}) == 5


def test_a_folder_is_loaded_and_checked(tmp_path):
    model = randomised(timm.create_model("gauvit_pico_patch2_8", num_classes=5, in_chans=3))
    save_student(model, tmp_path / "vit", mean=(0.5,) * 3, std=(0.25,) * 3)
    name = f"local-dir:{tmp_path / 'vit'}"
    teacher = load_vit(name, data(8), {})
    torch.testing.assert_close(teacher(images(size=8)), model(images(size=8)))
    assert load_vit(name, data(8, classes=9), {"num_classes": 0}).predicts is False
    assert load_vit(name, data(16), {"img_size": 16}).grid == (8, 8)
    with pytest.raises(UserError, match="there is no folder"):
        load_vit(f"local-dir:{tmp_path / 'none'}", data(8), {})
    with pytest.raises(UserError, match="config.json is not there"):
        load_vit(f"local-dir:{tmp_path}", data(8), {})
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "vit", damaged)
    weights = bytearray((damaged / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (damaged / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match="is damaged"):
        load_vit(f"local-dir:{damaged}", data(8), {})
    (damaged / "SHA256SUMS").unlink()
    (damaged / "config.json").write_text(json.dumps({"architecture": "resnet18"}))
    with pytest.raises(UserError, match="damaged, or no model that timm reads"):
        load_vit(f"local-dir:{damaged}", data(8), {})


class Touches:
    """Unpickled it would make a file."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return type(self.path).touch, (self.path,)


def test_a_folder_as_timm_saves_it_is_loaded(tmp_path):
    """timm.models.save_for_hf writes pytorch_model.bin unless it is told otherwise."""
    model = small("vit_tiny_patch16_224")
    folder = tmp_path / "vit"
    with contextlib.suppress(FileNotFoundError):  # timm removes a file that it has not written
        timm.models.save_for_hf(model, folder, safe_serialization=False)
    assert (folder / "pytorch_model.bin").is_file() and not (folder / "model.safetensors").exists()
    described = json.loads((folder / "config.json").read_text())
    described["model_args"] = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}
    (folder / "config.json").write_text(json.dumps(described | {"num_classes": 5}))
    teacher = load_vit(f"local-dir:{folder}", data(), {})
    assert torch.equal(teacher.model.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight)
    tensors = model.state_dict()
    for weights in (
        {**tensors, "pos_embed": tensors["pos_embed"][:, :4]},
        {**tensors, "called": Touches(tmp_path / "touched")},
    ):
        torch.save(weights, folder / "pytorch_model.bin")
        with pytest.raises(UserError, match="damaged, or no model that timm reads"):
            load_vit(f"local-dir:{folder}", data(), {})
    assert not (tmp_path / "touched").exists()


def test_what_cannot_be_read_is_refused_before_weights_are_fetched(monkeypatch, tmp_path):
    monkeypatch.setattr(CACHE, lambda *a, **k: None)
    for name, size, message in (
        ("swin_tiny_patch4_window7_224.ms_in1k", 224, "SwinTransformer.* does not attend over all"),
        ("resnet18.a1_in1k", 224, "ResNet.* shows no attention maps"),
        ("deit_tiny_patch16_224.fb_in1k", 32, "takes images of 224 x 224 pixels"),
        ("deit_tiny_patch16_224.fb_in1k", 224, "not on this machine: download=true"),
    ):
        with pytest.raises(UserError, match=message):
            load_vit(name, data(size), {"num_classes": 0})
    with pytest.raises(UserError, match="predicts 1000 classes"):
        load_vit("deit_tiny_patch16_224.fb_in1k", data(224), {})
    built = []

    class Built(VitTeacher):
        def __init__(self, model, *rest) -> None:
            super().__init__(model, *rest)
            built.append(next(model.parameters()).device.type)

    monkeypatch.setattr("gaupipe.teachers.pretrained.VitTeacher", Built)
    for name in ("deit_tiny_patch16_224.fb_in1k", "vit_small_patch16_dinov3.lvd1689m"):
        arguments = {"num_classes": 0, "img_size": 224}
        check_fit(name, arguments, data(224))
    assert built == ["meta", "meta"]  # without memory for weights that are not there
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="for the folder write local-dir:mine;"):
        load_vit("mine", data(), {})
    with pytest.raises(UserError, match="timm has no weights ''") as caught:
        load_vit("", data(), {})
    assert "for the folder" not in str(caught.value)


@pytest.mark.parametrize(
    "name,message",
    [
        ("vit_tiny_patch16_22", "timm has no weights 'vit_tiny_patch16_22'"),
        ("vit_tiny_patch16_224.nobody", "timm has no weights 'vit_tiny_patch16_224.nobody'"),
        ("gauvit_atto_patch4_32", "no trained weights for gauvit_atto_patch4_32"),
        ("vit", "timm has no weights 'vit'"),
    ],
)
def test_names_without_weights_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        load_vit(name, data(), {})


def test_nothing_is_fetched_without_leave(monkeypatch, tmp_path):
    monkeypatch.setattr(CACHE, lambda *a, **k: None)
    asked = []

    def fetch(repository, file, revision=None):
        asked.append((repository, file))
        raise errors.pop(0)

    missing = EntryNotFoundError("no such file")
    offline = LocalEntryNotFoundError("cannot find the requested files, and so on")
    errors = [missing, PermissionError("no leave"), offline, missing, missing]
    monkeypatch.setattr("gaupipe.teachers.pretrained.hf_hub_download", fetch)
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    with pytest.raises(UserError, match=r"not on this machine: download=true"):
        load_vit(name, data(224), {"num_classes": 0})
    assert not asked
    both = [(f"timm/{name}", file) for file in ("model.safetensors", "pytorch_model.bin")]
    for message, files in (
        ("could not be fetched from timm/.*no leave", both),
        ("could not be fetched: no connection to https://", both[:1]),
        ("could not be fetched from timm/.*no such file", both),
    ):
        with pytest.raises(UserError, match=message):
            load_vit(name, data(224), {"num_classes": 0}, download=True)
        assert asked == files
        asked.clear()


def test_published_weights_are_read_from_the_cache(monkeypatch, tmp_path):
    """A file stands in for the hub's cache; the classes of the weights need not be the data's."""
    from safetensors.torch import save_file

    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    published = randomised(timm.create_model("vit_tiny_patch16_224"))
    file = tmp_path / "model.safetensors"
    save_file(published.state_dict(), file)
    monkeypatch.setattr(CACHE, lambda *a, **k: str(file))
    with pytest.raises(UserError, match="predicts 1000 classes, blobs has 5"):
        load_vit(name, data(224), {})
    teacher = load_vit(name, data(224), {"num_classes": 0})
    assert torch.equal(teacher.model.blocks[3].attn.qkv.weight, published.blocks[3].attn.qkv.weight)
