"""What a ViT's head reads and says, and how its other tokens are called."""

import pytest
import timm
import torch

import gaupipe.vit.models  # noqa: F401
from gaupipe.models import save_student
from gaupipe.vit.heads import classifies, names_of_tokens, reads_class_token


def made(name: str, **arguments):
    with torch.device("meta"):
        return timm.create_model(name, **arguments)


@pytest.mark.parametrize(
    "name, arguments, names, reads",
    [
        ("vit_tiny_patch16_224", {}, ["class"], True),
        ("vit_tiny_patch16_224", {"global_pool": "avg"}, ["class"], False),
        ("vit_tiny_patch16_224", {"reg_tokens": 2}, ["class", "register 1", "register 2"], True),
        ("deit_tiny_distilled_patch16_224", {}, ["class", "distillation"], True),
        ("vit_medium_patch16_reg4_gap_256", {}, [f"register {i}" for i in (1, 2, 3, 4)], False),
        ("beitv2_base_patch16_224", {}, ["class"], False),
        ("gauvit_pico_patch2_8", {}, [], False),
    ],
)
def test_tokens_have_their_names_and_heads_read_what_they_read(name, arguments, names, reads):
    model = made(name, **arguments)
    assert names_of_tokens(model) == names and len(names) == model.num_prefix_tokens
    assert reads_class_token(model) == reads


@pytest.mark.parametrize(
    "name, arguments, classes",
    [
        ("vit_base_patch32_clip_224.openai", {}, False),
        ("vit_base_patch32_clip_224.openai", {"num_classes": 10}, True),
        ("vit_base_patch32_clip_224.openai_ft_in1k", {}, True),
        ("vit_tiny_patch16_224.augreg_in21k", {}, True),
        ("vit_small_patch14_dinov2.lvd142m", {}, False),
        ("gauvit_pico_patch2_8", {"num_classes": 512}, True),
    ],
)
def test_the_projection_of_an_image_tower_predicts_no_classes(name, arguments, classes):
    assert classifies(made(name, **arguments)) == classes


def test_a_tower_that_was_fine_tuned_predicts_classes_when_it_is_loaded_again(tmp_path):
    """timm keeps the tag of the published weights, and notes the new number of classes."""
    sizes = dict(embed_dim=16, depth=1, num_heads=2, img_size=32, num_classes=7)
    model = timm.create_model("vit_xsmall_patch16_clip_224.tinyclip_yfcc15m", **sizes)
    assert classifies(model)
    timm.models.save_for_hf(model, tmp_path / "saved", model_args=sizes)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True)
    assert loaded.pretrained_cfg["num_classes"] == 7 and classifies(loaded)
    save_student(model, tmp_path / "ours")
    assert classifies(timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True))
