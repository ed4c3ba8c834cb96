"""Maps that are captured beside fused attention, against the eager attention of the same model."""

import pytest
import timm
import torch

import gaupipe

SIZES = {"depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Weights with which attention is far from uniform."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def pictures(size: int) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def eager_maps(model: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """The inputs of the dropout after the softmax, which timm's eager attention calls."""
    maps, hooks, fused = [], [], []
    for part in model.modules():
        if hasattr(part, "fused_attn") and hasattr(part, "attn_drop"):
            fused.append(part)
            part.fused_attn = False
            hooks.append(
                part.attn_drop.register_forward_hook(lambda _m, args, _out: maps.append(args[0]))
            )
    with torch.no_grad():
        model(images)
    for part in fused:
        part.fused_attn = True
    for hook in hooks:
        hook.remove()
    return maps


TIMM = {
    "vit_tiny_patch16_224": 64,
    "deit3_small_patch16_224": 64,
    "eva02_tiny_patch14_224": 56,
    "vit_small_patch14_reg4_dinov2": 56,
    "vit_small_patch16_dinov3": 64,
    "vit_base_patch16_siglip_224": 64,
}


@pytest.mark.parametrize("name,size", TIMM.items())
def test_maps_of_timm_are_those_of_eager_attention(name, size):
    model = randomised(timm.create_model(name, img_size=size, **SIZES))
    images = pictures(size)
    expected = eager_maps(model, images)
    with torch.no_grad():
        plain = model(images)
        with gaupipe.capture(model) as maps:
            output = model(images)
    assert torch.equal(output, plain)
    pooling = "siglip" in name  # attends once more, in its head
    assert list(maps) == list(range(len(expected) + pooling))
    for block, other in enumerate(expected):
        assert maps[block].shape == other.shape
        torch.testing.assert_close(maps[block], other, atol=1e-5, rtol=0)
        assert maps[block].max() > 3 / maps[block].shape[-1], "far from uniform"


def transformers_model(name: str, implementation: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
    )
    config = getattr(transformers, f"{name}Config")(**sizes)
    model_class = getattr(transformers, f"{name}Model")
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return randomised(model_class(config))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["ViT", "Dinov2", "CLIPVision"])
def test_maps_of_transformers_are_its_own(name, implementation):
    images = pictures(32)
    eager = transformers_model(name, "eager")
    with torch.no_grad():
        expected = eager(pixel_values=images, output_attentions=True).attentions
    model = transformers_model(name, implementation)
    with torch.no_grad():
        plain = model(pixel_values=images).last_hidden_state
        with gaupipe.capture(model) as maps:
            output = model(pixel_values=images).last_hidden_state
    assert torch.equal(output, plain)
    assert list(maps) == [0, 1]
    for block in maps:
        torch.testing.assert_close(maps[block], expected[block], atol=1e-5, rtol=0)


def test_chosen_blocks_and_queries_are_rows_of_the_whole_maps():
    model = randomised(timm.create_model("vit_tiny_patch16_224", img_size=64, **SIZES))
    images = pictures(64)
    with gaupipe.capture(model) as whole:
        model(images)
    with gaupipe.capture(model, blocks=[-1], queries=[0, -1]) as maps:
        model(images)
    assert list(maps) == [1]
    torch.testing.assert_close(maps[1], whole[1][:, :, [0, 16]], atol=1e-6, rtol=0)
    assert not maps[1].requires_grad


def test_the_maps_are_those_of_the_latest_pass():
    model = randomised(timm.create_model("vit_tiny_patch16_224", img_size=64, **SIZES))
    with gaupipe.capture(model) as maps:
        model(pictures(64))
        first = maps[0]
        model(-pictures(64))
    assert sorted(maps) == [0, 1]
    assert not torch.equal(maps[0], first)


def test_causal_masks_keyless_queries_and_grouped_keys():
    from gaupipe.vit.capture import attention_map

    query, key = torch.randn(2, 1, 4, 5, 8)
    key = key[:, :2]
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    assert attention_map(query, key, attn_mask=hidden, enable_gqa=True).eq(0).all()
    maps = attention_map(query, key, is_causal=True, enable_gqa=True)
    assert maps.triu(1).eq(0).all()
    torch.testing.assert_close(maps.sum(-1), torch.ones(1, 4, 5))
    rows = attention_map(query, key, is_causal=True, enable_gqa=True, queries=torch.tensor([3]))
    torch.testing.assert_close(rows, maps[:, :, [3]])


def test_refusals_say_why():
    model = randomised(timm.create_model("vit_tiny_patch16_224", img_size=64, **SIZES))
    with pytest.raises(ValueError, match="block 7: the model has 2"), gaupipe.capture(model, [7]):
        model(pictures(64))
    with pytest.raises(ValueError, match="queries"), gaupipe.capture(model, queries=[99]):
        model(pictures(64))
    with pytest.raises(ValueError, match="was the model called"), gaupipe.capture(model):
        pass
    model.blocks[0].attn.fused_attn = False
    with pytest.raises(ValueError, match=r"blocks\.0\.attn"), gaupipe.capture(model):
        model(pictures(64))
    assert not model._forward_pre_hooks
