"""Trained ViTs as teachers: their maps against softmax written in numpy, and what is refused."""

import contextlib
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

import gaupipe.vit.models  # noqa: F401
from gaupipe.attention import STUDENTS
from gaupipe.models import forward_with_maps, save_student
from gaupipe.system.errors import UserError
from gaupipe.teachers.loading import load_network, readable
from gaupipe.teachers.readable_vit import ReadableViT
from vits import TINY, randomised, small

GAUVIT = "gauvit_pico_patch2_8"
PUBLISHED = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


def data(size=32, channels=3, classes=5, mean=0.5, std=0.25, names=()) -> SimpleNamespace:
    """What a teacher asks of a data set."""
    sizes = dict(image_size=size, channels=channels, num_classes=len(names) or classes)
    scaling = dict(mean=(mean,) * channels, std=(std,) * channels)
    return SimpleNamespace(name="blobs", class_names=[*names], **scaling, **sizes)


def images(count: int = 2, size: int = 32) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def empty_cache(monkeypatch):
    """Replaces the cache of published weights: calling it with a file puts that there."""

    def put(file: str | None) -> None:
        found = "gaupipe.vit.pretrained.try_to_load_from_cache"
        monkeypatch.setattr(found, lambda *_arguments, **_keywords: file)

    put(None)
    return put


def maps_by_numpy(model, tokens: torch.Tensor) -> list[np.ndarray]:
    """Softmax of Q K' / sqrt(d_m) of every block of a timm VisionTransformer, from its weights,
    float64; tokens [B, P + T, d] go into the first block."""
    x, maps = tokens, []
    for block in model.blocks:
        qkv, heads = block.attn.qkv, block.attn.num_heads
        weight, bias, normal = (t.double().numpy() for t in (qkv.weight, qkv.bias, block.norm1(x)))
        parts = (normal @ weight.T + bias).reshape(*x.shape[:2], 3, heads, -1)
        q, k, _ = parts.transpose(2, 0, 3, 1, 4)
        scores = np.exp(q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1]))
        maps.append(scores / scores.sum(-1, keepdims=True))
        x = block(x)
    return maps


@pytest.mark.parametrize(
    "name,size,prefix",
    [
        (TINY, 64, 1),
        ("deit_tiny_distilled_patch16_224", 64, 2),
        ("vit_small_patch14_reg4_dinov2", 56, 5),
    ],
)
def test_maps_are_the_softmax_between_patches_renormalised(name, size, prefix):
    model, pictures = small(name, size), images(size=size)
    teacher = ReadableViT(model, data(size, mean=0.485), name)
    with torch.inference_mode():
        logits, _, seen = teacher.forward_with_maps(pictures)
        x = model.patch_embed(pictures)
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(x)))
        whole = maps_by_numpy(model, tokens)
    assert (teacher.prefix, teacher.grid, teacher.layers, teacher.heads) == (prefix, (4, 4), 2, 3)
    for block, oracle in enumerate(whole):
        patches = oracle[..., prefix:, prefix:]
        expected = patches / patches.sum(-1, keepdims=True)
        np.testing.assert_allclose(seen.blocks[block], expected, atol=2e-6)
        dropped = oracle[..., prefix:, :prefix].sum(-1).mean((0, 2))
        np.testing.assert_allclose(seen.dropped[block], dropped, atol=2e-6)
    assert seen.dropped.min() > 0.01
    torch.testing.assert_close(logits, model(pictures).log_softmax(-1))


@pytest.mark.parametrize("attention", STUDENTS)
def test_maps_of_a_student_are_those_of_forward_with_maps(attention):
    sizes = dict(depth=2, num_classes=5, in_chans=3)
    model = randomised(timm.create_model(GAUVIT, attention=attention, **sizes), 0.1, vectors=True)
    same = data(8)
    same.mean, same.std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
    with torch.inference_mode():
        shown, _, seen = ReadableViT(model, same, "student").forward_with_maps(images(size=8))
        logits, log_maps = forward_with_maps(model, images(size=8))
    torch.testing.assert_close(shown, logits.log_softmax(-1), atol=1e-4, rtol=1e-4)
    maps = [log_map.exp() for log_map in log_maps]
    torch.testing.assert_close(seen.blocks, maps, atol=1e-5, rtol=1e-4)


ENCODERS = {
    "deit3_small_patch16_224": 32,
    "beit_base_patch16_224": 32,
    "eva02_tiny_patch14_224": 28,
    "vit_small_patch14_dinov2": 28,
    "vit_small_patch16_dinov3": 32,
    "vit_base_patch16_siglip_224": 32,
    "vit_small_patch16_rope_224": 32,
    "vit_relpos_small_patch16_224": 32,
}


@pytest.mark.parametrize("name,size", ENCODERS.items())
def test_encoders_that_people_use_show_maps(name, size):
    teacher = ReadableViT(small(name, size), data(size), name)
    logits, _, seen = teacher.forward_with_maps(images(size=size))
    assert len(seen.blocks) == 2 and logits.shape == (2, 5)
    for maps in seen.blocks:
        torch.testing.assert_close(maps.sum(-1), torch.ones(2, 3, 4))
        assert maps.std(-1).mean() > 1e-3  # not uniform: Q and K are in it


def test_classes_are_matched_by_name():
    """A teacher's logits come in the order of the data set's classes, without further ones."""
    teachers = small()
    names = ["ant", "bee", "cat", "dog", "eel"]
    teachers.pretrained_cfg["label_names"] = names
    expected = teachers(images())
    for asked in (names, ["eel", "ant", "dog", "bee", "cat"], ["dog", "bee"]):
        teacher = ReadableViT(teachers, data(names=asked, std=0.5), "vit")
        columns = [names.index(name) for name in asked]
        torch.testing.assert_close(teacher(images()), expected[:, columns])
        logits, _, _ = teacher.forward_with_maps(images())
        torch.testing.assert_close(logits, expected[:, columns].log_softmax(-1))


def test_a_name_of_two_classes_is_refused_where_the_data_has_it():
    """As "crane" in ImageNet's names, which is a bird and a machine."""
    model = small()
    model.pretrained_cfg["label_names"] = ["ant", "crane", "cat", "dog", "crane"]
    with pytest.raises(UserError, match="vit: 2 of its classes are named 'crane', as one of blobs"):
        ReadableViT(model, data(names=["crane", "ant"]), "vit")
    assert ReadableViT(model, data(names=["cat", "ant"]), "vit").classes == [2, 0]
    assert not ReadableViT(model, data(names=["crane", "fox"]), "vit").predicts


@pytest.mark.parametrize("asked", [["ant", "bee", "cat", "dog", "fox"], ["ant", "fox"]])
def test_a_teacher_of_other_classes_predicts_nothing(asked):
    model = small()
    model.pretrained_cfg["label_names"] = ["ant", "bee", "cat", "dog", "eel"]
    teacher = ReadableViT(model, data(names=asked), "vit")
    logits, _, seen = teacher.forward_with_maps(images())
    assert not teacher.predicts and logits is None
    assert len(seen.blocks) == 2


def test_without_names_the_number_of_classes_decides():
    names = ["ant", "bee", "cat", "dog", "eel"]
    assert ReadableViT(small(), data(names=names), "vit").matched_by == "number"
    assert not ReadableViT(small(), data(classes=7), "vit").predicts
    named = small()
    named.pretrained_cfg["label_names"] = names
    assert ReadableViT(named, data(), "vit").matched_by == "number"
    assert ReadableViT(named, data(names=names), "vit").matched_by == "name"
    named.pretrained_cfg["label_names"] = [f"class {number}" for number in range(1000)]
    assert ReadableViT(named, data(), "vit").matched_by == "number"  # of a head that was replaced


@pytest.mark.parametrize(
    "changes,message",
    [
        ({}, r"images of blobs, of 1 channels .* 32 x 32 .*in_chans: 1"),
        ({"img_size": (32, 48)}, r"vit: takes images of 32 x 48: squares of one size .*img_size"),
    ],
)
def test_a_teacher_whose_images_cannot_be_made_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        ReadableViT(small(**changes), data(channels=1), "vit")


def test_a_teacher_without_a_size_is_refused():
    model = small()
    model.patch_embed.img_size = None
    model.pretrained_cfg = {"mean": (0.5,) * 3}
    with pytest.raises(UserError, match="vit: takes images of no fixed size"):
        ReadableViT(model, data(), "vit")


@pytest.mark.parametrize("classes", [0, 5])
def test_a_teacher_that_gives_no_numbers_is_refused_by_name(classes):
    """NaN among the weights, scores that overflow float32, and images of which either comes."""
    model = small(num_classes=classes)
    named = "vit: (the attention of its block 1|its predictions|its features)"
    teacher, weight = ReadableViT(model, data(), "vit"), model.blocks[1].attn.qkv.weight
    weight.data.mul_(1e30)
    with pytest.raises(UserError, match=named):
        teacher.forward_with_maps(images())
    weight.data[3, 4] = torch.nan
    with pytest.raises(UserError, match=named):
        teacher.forward_with_maps(images())


def test_images_are_taken_as_the_teacher_learned_them():
    model = small()
    model.pretrained_cfg = dict(mean=(0.1, 0.2, 0.3), std=(0.4,) * 3, interpolation="bicubic")
    takes = ReadableViT(model, data(8, mean=0.3, std=0.2), "vit").takes
    assert (takes.size, takes.interpolation) == (32, "bicubic")
    assert (takes.mean, takes.std) == ((0.1, 0.2, 0.3), (0.4,) * 3)
    model.pretrained_cfg = {}
    takes = ReadableViT(model, data(8, mean=0.3, std=0.2), "vit").takes
    assert (takes.mean, takes.std) == ((0.3,) * 3, (0.2,) * 3)


@pytest.mark.parametrize(
    "name, values",
    [("std", [0, 0, 0]), ("std", 0), ("std", 0.5), ("mean", "abc"), ("mean", [math.nan] * 3)],
)
def test_a_normalisation_that_is_none_is_refused(name, values):
    model = small()
    model.pretrained_cfg = {**model.pretrained_cfg, name: values}
    with pytest.raises(UserError, match=f"phase_a.teacher: vit: {name} is .*: should be a list"):
        ReadableViT(model, data(), "vit")


def test_a_normalisation_of_other_channels_is_refused():
    model = small()
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": [0.5, 0.5]}
    with pytest.raises(UserError, match="vit: mean: .* should have a number for each channel"):
        ReadableViT(model, data(), "vit")


def test_the_digest_follows_all_that_shows_other_maps():
    """Weights and normalisation; the same weights in other heads, or with another activation."""

    def digest(model, name="vit", **changes) -> str:
        return ReadableViT(model, data(**changes), name).sha256()

    model = small()
    digests = [digest(model)]
    assert digest(model, "another name", mean=0.4, size=8) == digests[0]
    scaled = small()
    scaled.load_state_dict(model.state_dict())
    scaled.pretrained_cfg = {**scaled.pretrained_cfg, "mean": (0.4,) * 3}
    digests.append(digest(scaled))
    for changes in ({"num_heads": 4}, {"act_layer": "relu"}):
        other = small(**changes)
        other.load_state_dict(model.state_dict())
        digests.append(digest(other))
    model.blocks[1].attn.qkv.weight.data[0, 0] += 1e-6
    assert len({*digests, digest(model)}) == 5


def test_a_folder_is_loaded_with_keywords(tmp_path):
    model = randomised(timm.create_model(GAUVIT, num_classes=5, in_chans=3), 0.1, vectors=True)
    save_student(model, tmp_path / "vit", mean=(0.5,) * 3, std=(0.25,) * 3)
    name = f"local-dir:{tmp_path / 'vit'}"
    teacher = load_network(name, data(8), {})
    torch.testing.assert_close(teacher(images(size=8)), model(images(size=8)))
    assert load_network(name, data(8, classes=9), {"num_classes": 0}).predicts is False
    assert load_network(name, data(16), {"img_size": 16}).grid == (8, 8)


def test_a_folder_as_timm_saves_it_is_loaded_and_runs_no_code(tmp_path, monkeypatch):
    """timm.models.save_for_hf writes pytorch_model.bin unless it is told otherwise."""
    model, folder = small(), tmp_path / "vit"
    with contextlib.suppress(FileNotFoundError):  # timm removes a file that it has not written
        timm.models.save_for_hf(model, folder, safe_serialization=False)
    assert (folder / "pytorch_model.bin").is_file() and not (folder / "model.safetensors").exists()
    described = json.loads((folder / "config.json").read_text())
    described["model_args"] = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}
    (folder / "config.json").write_text(json.dumps(described | {"num_classes": 5}))
    teacher = load_network(f"local-dir:{folder}", data(), {})
    torch.testing.assert_close(
        teacher.model.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight, rtol=0, atol=0
    )
    monkeypatch.chdir(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch touched'\ntR.")
    with pytest.raises(UserError, match="damaged, or no model that timm reads"):
        load_network(f"local-dir:{folder}", data(), {})
    assert not (tmp_path / "touched").exists()
    tensors = {**model.state_dict(), "pos_embed": model.pos_embed[:, :4]}
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pos_embed is .* in pytorch_model.bin"):
        load_network(f"local-dir:{folder}", data(), {})


@pytest.mark.parametrize(
    "name,message",
    [
        ("deit_tiny_patch16_224.fb_in1k", "not on this machine: download=True"),
        ("vit_tiny_patch16_22", "timm has no weights 'vit_tiny_patch16_22'"),
        ("vit_tiny_patch16_224.nobody", "timm has no weights 'vit_tiny_patch16_224.nobody'"),
        ("gauvit_atto_patch4_32", "timm has no weights 'gauvit_atto_patch4_32'"),
        ("deit_tini_patch16_224", "deit_tiny_patch16_224.fb_in1k, .*local-dir:FOLDER"),
    ],
)
def test_what_is_no_teacher_is_refused_before_weights_are_fetched(name, message, empty_cache):
    with pytest.raises(UserError, match=message):
        load_network(name, data(224), {"num_classes": 0})


@pytest.mark.parametrize(
    "name", ["swin_tiny_patch4_window7_224", "cait_xxs24_224", "resnet18", "convnext_atto"]
)
def test_a_model_whose_attention_cannot_be_read_gives_predictions_and_features(name):
    model = timm.create_model(name, num_classes=5).eval()
    teacher = readable(model, data(224), name)
    assert not isinstance(teacher, ReadableViT)
    pictures = images(size=224)
    logits, features = teacher.predict(pictures)
    with torch.inference_mode():
        expected = model(pictures).log_softmax(-1)
        pooled = model.reset_classifier(0) or model(pictures)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(features, pooled, atol=1e-5, rtol=1e-4)
    assert teacher.features == features.shape[1] == model.num_features


def test_nothing_is_fetched_without_leave(monkeypatch, empty_cache):
    asked = []

    def fetch(repo_id, **_keywords):
        asked.append(repo_id)
        raise LocalEntryNotFoundError("cannot find the requested files,\nand so on")

    monkeypatch.setattr("timm.models._hub.hf_hub_download", fetch)
    with pytest.raises(UserError, match="not on this machine: download=True"):
        load_network(PUBLISHED, data(224), {"num_classes": 0})
    assert not asked
    with pytest.raises(UserError, match=f"{PUBLISHED}: the hub .* cannot be reached"):
        load_network(PUBLISHED, data(224), {"num_classes": 0}, download=True)
    assert set(asked) == {f"timm/{PUBLISHED}"}


def test_published_weights_are_read_from_the_cache(empty_cache, tmp_path):
    """A file stands in for the hub's cache; the classes of the weights need not be the data's."""
    published = randomised(timm.create_model(TINY), 0.1, vectors=True)
    save_file(published.state_dict(), tmp_path / "model.safetensors")
    empty_cache(str(tmp_path / "model.safetensors"))
    for arguments, classes in (({}, 1000), ({"num_classes": 0}, 0)):
        teacher = load_network(PUBLISHED, data(224), arguments)
        assert teacher.model.num_classes == classes and not teacher.predicts
    torch.testing.assert_close(
        teacher.model.blocks[3].attn.qkv.weight, published.blocks[3].attn.qkv.weight, rtol=0, atol=0
    )
