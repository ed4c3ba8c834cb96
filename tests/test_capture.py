"""Maps that are captured beside fused attention, against the eager attention of the same model."""

import copy
import threading
from functools import partial

import pytest
import timm
import torch
from torch.nn.functional import scaled_dot_product_attention
from torchvision.models.feature_extraction import create_feature_extractor

import gaupipe
from gaupipe.attention import comparing
from gaupipe.system.errors import UserError
from gaupipe.vit.capture import gradient_rollout
from vits import eager_maps, randomised

SIZES = {"depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}


def pictures(size: int) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


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
    torch.testing.assert_close(output, plain, rtol=0, atol=0)
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
    torch.testing.assert_close(output, plain, rtol=0, atol=0)
    assert list(maps) == [0, 1]
    for block in maps:
        torch.testing.assert_close(maps[block], expected[block], atol=1e-5, rtol=0)


IDS = torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[0, :3] = 0  # on the left of the first sequence


def language_model(name: str, implementation: str, **changes) -> torch.nn.Module:
    """A tiny decoder with grouped keys."""
    transformers = pytest.importorskip("transformers")
    import gaupipe.transformers  # noqa: F401  (transformers learns the names)

    sizes = dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        initializer_range=0.4,
    )
    config = getattr(transformers, f"{name}Config")(**sizes, **changes)
    torch.manual_seed(0)
    load = transformers.AutoModelForCausalLM.from_config
    return load(config, attn_implementation=implementation).eval()


def captured_text(model: torch.nn.Module, **how) -> dict[int, torch.Tensor]:
    """The maps of a pass over ``IDS``, which changes nothing of its logits."""
    with torch.no_grad():
        plain = model(IDS, attention_mask=PADDED).logits
        with gaupipe.capture(model, **how) as maps:
            logits = model(IDS, attention_mask=PADDED).logits
    torch.testing.assert_close(logits, plain, rtol=0, atol=0)
    return maps


DECODERS = {
    "Llama": {},
    "Mistral": {"sliding_window": 3},
    "Gemma2": {"sliding_window": 3, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0},
    "GptOss": {"sliding_window": 3, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("name", DECODERS)
def test_maps_of_a_padded_decoder_are_its_eager_attention(name):
    """With sliding windows, scores that are capped (Gemma2), and sinks (GptOss)."""
    model = language_model(name, "eager", **DECODERS[name])
    maps = captured_text(model)
    with torch.no_grad():
        own = model(IDS, attention_mask=PADDED, output_attentions=True).attentions
    assert list(maps) == [0, 1] and len(own) == 2
    for block, weights in enumerate(own):
        torch.testing.assert_close(maps[block], weights, atol=1e-6, rtol=0)
        assert maps[block][:, :, 3:].triu(4).eq(0).all() and maps[block][0, :, 3:, :3].eq(0).all()
    sums = maps[0][1].sum(-1)
    if name == "GptOss":
        assert sums.min() < 0.9, "a sink takes its part"
    else:
        torch.testing.assert_close(sums, torch.ones(4, 7))
    rows = captured_text(model, blocks=[-1], queries=[0, -1])
    torch.testing.assert_close(rows[1], maps[1][:, :, [0, 6]], rtol=0, atol=0)


def test_a_mask_of_four_axes_is_no_batch_of_images():
    model = language_model("Llama", "sdpa")
    causal = torch.full((1, 1, 7, 7), -torch.inf).triu(1)
    with torch.no_grad(), gaupipe.capture(model) as maps:
        model(input_ids=IDS, attention_mask=causal)
    assert maps[0].shape == (2, 4, 7, 7)


@pytest.mark.parametrize(
    "name, implementation",
    [
        *(("Llama", name) for name in ("sdpa", "gau_belief", "gau_xsa")),
        *(("Mistral", name) for name in ("sdpa", "gau_belief", "gau_xsa")),
    ],
)
def test_maps_of_every_implementation_are_those_of_eager_attention(name, implementation):
    """The first block's, whose queries and keys do not depend on the attention; a padded query has
    no key and a row of zeros."""
    maps = captured_text(language_model(name, implementation, **DECODERS[name]))
    eager = captured_text(language_model(name, "eager", **DECODERS[name]))
    assert list(maps) == [0, 1]
    torch.testing.assert_close(maps[0][1], eager[0][1], atol=1e-6, rtol=0)
    torch.testing.assert_close(maps[0][0, :, 3:], eager[0][0, :, 3:], atol=1e-6, rtol=0)
    for block in maps.values():
        assert block[0, :, :3].eq(0).all() and block[0, :, :, :3].eq(0).all()
        assert torch.allclose(block[1].sum(-1), torch.ones(4, 7))


def test_maps_of_attentionx_are_without_the_diagonal_that_it_hides():
    """Each row of a softmax over the other keys is that over all keys, divided by what the others
    have of it."""
    maps = captured_text(language_model("Llama", "gau_attentionx"))
    eager = captured_text(language_model("Llama", "eager"))[0].double()
    others = eager - eager.diagonal(dim1=-2, dim2=-1).diag_embed()
    expected = others / others.sum(-1, keepdim=True)
    for sequence, first in ((0, 4), (1, 1)):  # with another token before it
        got = maps[0][sequence, :, first:].double()
        torch.testing.assert_close(got, expected[sequence, :, first:], atol=1e-4, rtol=0)
        assert maps[0][sequence, :, :first].eq(0).all()
    assert maps[1].diagonal(dim1=-2, dim2=-1).eq(0).all()
    open_diagonal = language_model("Llama", "gau_attentionx", gau_options={"mask_diagonal": False})
    torch.testing.assert_close(
        captured_text(open_diagonal)[0][1].double(), eager[1], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "gau_belief"])
def test_maps_of_a_decoding_step_are_the_last_rows(implementation):
    """A pass for one token whose keys are in a cache, with grouped heads."""
    model = language_model("Llama", implementation)
    whole = captured_text(model)
    with torch.no_grad():
        cache = model(IDS[:, :-1], attention_mask=PADDED[:, :-1]).past_key_values
        for queries in (None, [-1]):
            past = copy.deepcopy(cache)
            with gaupipe.capture(model, queries=queries) as maps:
                model(IDS[:, -1:], attention_mask=PADDED, past_key_values=past)
            for block in maps:
                torch.testing.assert_close(maps[block], whole[block][:, :, -1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("bias_of", ["encoder", "decoder"])
def test_maps_with_a_position_bias_are_those_of_eager_attention(bias_of):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=61, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4)
    maps = {}
    for implementation in ("eager", "sdpa"):
        torch.manual_seed(0)
        config = transformers.T5Config(**sizes)
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation)
        ids = dict(input_ids=IDS, attention_mask=PADDED, decoder_input_ids=IDS)
        part = getattr(model.eval(), bias_of)
        with torch.no_grad(), gaupipe.capture(part) as maps[implementation]:
            own = model(**ids, output_attentions=implementation == "eager")
        if implementation == "eager" and bias_of == "encoder":
            torch.testing.assert_close(maps["eager"][1], own.encoder_attentions[1], rtol=0, atol=0)
    assert list(maps["sdpa"]) == list(range(2 if bias_of == "encoder" else 4))
    for block, weights in maps["eager"].items():
        torch.testing.assert_close(maps["sdpa"][block], weights, atol=1e-5, rtol=0)


def test_maps_that_cannot_be_told_are_refused():
    transformers = pytest.importorskip("transformers")

    def hidden(module, query, key, value, mask, **_kwargs):
        """As a kernel of flash attention: nothing is seen of its weights."""
        return value.repeat_interleave(2, 1).transpose(1, 2), None

    def fused(module, query, key, value, mask, **_kwargs):
        heads = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return heads.transpose(1, 2), None

    transformers.AttentionInterface.register("hidden", hidden)
    transformers.AttentionInterface.register("fused", fused)
    for name in ("hidden", "flex_attention"):
        with pytest.raises(UserError, match=f"does not show the weights of its attention '{name}'"):
            captured_text(language_model("Llama", name))
    maps = captured_text(language_model("Llama", "fused"))
    eager = captured_text(language_model("Llama", "eager"))
    torch.testing.assert_close(maps[0][1], eager[0][1], atol=1e-6, rtol=0)

    model = language_model("Llama", "eager", attention_dropout=0.5).train()
    refusal = pytest.raises(UserError, match=r"after dropout: call model.eval\(\)")
    with refusal, gaupipe.capture(model):
        model(IDS)


def test_other_models_called_meanwhile_add_nothing():
    torch.manual_seed(0)
    model, other = (
        randomised(timm.create_model("vit_tiny_patch16_224", img_size=64, **SIZES))
        for _ in range(2)
    )
    images = pictures(64)
    expected = eager_maps(model, images)
    decoder = language_model("Llama", "eager")
    with torch.no_grad(), gaupipe.capture(model) as maps:
        other(-images)
        decoder(IDS)
        model(images)
        other(-images)
        decoder(IDS)
    assert list(maps) == [0, 1]
    for block, weights in enumerate(expected):
        torch.testing.assert_close(maps[block], weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", ["torch.compile", "captured inside", "compile()", "a function"])
def test_blocks_of_a_compiled_model_are_numbered_in_their_order(way):
    torch._dynamo.reset()
    model = randomised(timm.create_model("vit_tiny_patch16_224", img_size=64, **SIZES))
    images = pictures(64)
    expected = eager_maps(model, images)
    run = captured = torch.compile(model, backend="eager")
    if way == "captured inside":
        captured = model
    if way == "compile()":
        model.compile(backend="eager")
        run = captured = model
    if way == "a function":
        run, captured = torch.compile(lambda x: model(x), backend="eager"), model
    with torch.no_grad():
        run(images)
        for _ in range(2):
            with gaupipe.capture(captured) as maps:
                run(images)
            assert list(maps) == [0, 1]
            for block, weights in enumerate(expected):
                torch.testing.assert_close(maps[block], weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", comparing())
def test_maps_of_gaupipes_attentions_are_those_that_the_logits_come_from(attention):
    """Also with the diagonal that attentionx hides, and queries wider than values (belief2)."""
    from gaupipe.models import forward_with_maps

    torch.manual_seed(0)
    name, sizes = "gauvit_pico_patch2_8", dict(depth=2, embed_dim=32, num_heads=2)
    model = randomised(timm.create_model(name, attention=attention, **sizes))
    with torch.no_grad():
        plain = model(pictures(8))
        with gaupipe.capture(model) as maps:
            logits = model(pictures(8))
        expected = forward_with_maps(model, pictures(8))[1]
    torch.testing.assert_close(logits, plain)
    assert list(maps) == [0, 1]
    for block, log_map in enumerate(expected):
        torch.testing.assert_close(maps[block], log_map.exp(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("number", [-torch.inf, torch.finfo(torch.float32).min])
def test_the_map_of_a_row_that_a_mask_hides_is_zero(number):
    torch.manual_seed(0)
    attention = gaupipe.attention.ATTENTION["belief"](8, 2)
    mask = torch.zeros(4, 4)
    mask[2] = number
    with gaupipe.capture(attention) as maps:
        attention(torch.randn(1, 4, 8), attn_mask=mask)
    assert maps[0][:, :, 2].eq(0).all()
    torch.testing.assert_close(maps[0][:, :, [0, 1, 3]].sum(-1), torch.ones(1, 2, 3))


def test_chosen_blocks_and_queries_are_rows_of_the_whole_maps():
    model = randomised(timm.create_model("vit_tiny_patch16_224", img_size=64, **SIZES))
    images = pictures(64)
    with gaupipe.capture(model) as whole:
        model(images)
    for numbers in (list, tuple, torch.tensor):
        with gaupipe.capture(model, blocks=numbers([-1]), queries=numbers([0, -1])) as maps:
            model(images)
        assert list(maps) == [1]
        torch.testing.assert_close(maps[1], whole[1][:, :, [0, 16]], atol=1e-6, rtol=0)
        assert not maps[1].requires_grad


@pytest.mark.parametrize("number", [1, torch.tensor(1), torch.tensor([True]), [True], [0.0]])
def test_blocks_and_queries_are_lists_of_whole_numbers(number):
    for name in ("blocks", "queries"):
        refusal = pytest.raises(UserError, match=f"{name} .*: should be a list of whole numbers")
        with refusal, gaupipe.capture(torch.nn.Identity(), **{name: number}):
            pass


def test_maps_of_a_graph_and_of_a_parallel_model_are_those_of_the_model():
    model = randomised(timm.create_model("vit_tiny_patch16_224", img_size=32, **SIZES))
    images = pictures(32)
    expected = eager_maps(model, images)
    graph = create_feature_extractor(model, ["blocks.1"])
    for other in (graph, torch.nn.DataParallel(model)):
        with torch.no_grad(), gaupipe.capture(other, blocks=[0, -1]) as maps:
            other(images)
        assert list(maps) == [0, 1]
        for block, weights in enumerate(expected):
            torch.testing.assert_close(maps[block], weights, atol=1e-5, rtol=0)
    exported = torch.export.export(model, (images,)).module()
    refusal = pytest.raises(UserError, match="by a way of its own")
    with refusal, gaupipe.capture(exported):
        exported(images)


def test_the_maps_are_those_of_the_latest_pass():
    model = randomised(timm.create_model("vit_tiny_patch16_224", img_size=64, **SIZES))
    with gaupipe.capture(model) as maps:
        model(pictures(64))
        first = maps[0]
        model(-pictures(64))
    assert sorted(maps) == [0, 1]
    assert not torch.equal(maps[0], first)


def test_causal_masks_keyless_queries_and_grouped_keys():
    from gaupipe.vit.attention_maps import attention_map

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
    with pytest.raises(ValueError, match="the model was not called"), gaupipe.capture(model):
        model.forward_features(pictures(64))
    with pytest.raises(UserError, match="takes a model, .* not 'vit'"), gaupipe.capture("vit"):
        pass
    with pytest.raises(UserError, match="block -7: the model has 2"), gaupipe.capture(model, [-7]):
        model(pictures(64))
    model.blocks[0].attn.fused_attn = False
    with pytest.raises(ValueError, match=r"blocks\.0\.attn"), gaupipe.capture(model):
        model(pictures(64))
    assert not model._forward_pre_hooks


def test_a_model_of_which_only_some_attentions_are_seen_is_refused():
    """CaiT's blocks mix their heads' maps; those of its class token alone are fused."""
    model = timm.create_model("cait_xxs24_224", img_size=32, depth=3, num_classes=2).eval()
    message = "Cait: 2 attentions were seen in 3 blocks"
    with pytest.raises(UserError, match=message), gaupipe.capture(model):
        model(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize("name", ["vit_base_patch16_18x2_224", "vit_dwee_patch16_reg1_gap_256"])
def test_blocks_with_two_attentions_are_not_counted_from_the_end(name):
    model = randomised(timm.create_model(name, img_size=32, patch_size=8, **SIZES))
    images = pictures(32)
    message = "4 attentions were seen in 2 blocks: count blocks from 0"
    with pytest.raises(UserError, match=message), gaupipe.capture(model, [-1]):
        model(images)
    with gaupipe.capture(model, [3]) as maps:
        model(images)
    assert list(maps) == [3]
    with pytest.raises(ValueError, match="2 blocks should have one fused attention each"):
        gradient_rollout(model, images, torch.tensor([0, 1]), 2)


def test_an_attention_in_the_head_is_not_counted_from_the_end():
    model = timm.create_model("vit_base_patch16_siglip_224", img_size=32, **SIZES).eval()
    with gaupipe.capture(model, [-1]) as maps:
        model(pictures(32))
    assert list(maps) == [1]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_maps_of_parts_of_an_image_are_refused(by_keyword):
    model = timm.create_model("davit_tiny", num_classes=2).eval()
    refusal = pytest.raises(UserError, match="maps of shape .* parts of an image")
    with torch.no_grad(), refusal, gaupipe.capture(model):
        if by_keyword:
            model(x=pictures(224))
        else:
            model(pictures(224))


def test_the_advice_to_fuse_an_attention_stands_where_it_leads_to_maps():
    """XCiT attends over channels and Swin within windows, fused or not."""
    channels = timm.create_model("xcit_nano_12_p16_224", img_size=32, depth=1)
    windows = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1))
    for fused in (False, True):
        for part in channels.modules():
            if hasattr(part, "fused_attn"):
                part.fused_attn = fused
        refusal = pytest.raises(UserError, match=r"blocks\.0\.attn attends over channels")
        with refusal, gaupipe.capture(channels):
            channels(pictures(32))
    refusal = pytest.raises(UserError, match=r"layers\.0\S* sees parts of an image")
    with refusal, gaupipe.capture(windows):
        windows(pictures(56))


def test_gaupipes_attention_is_fused_whatever_timm_does():
    attention = gaupipe.attention.ATTENTION["belief"](8, 2)
    attention.fused_attn = False
    with gaupipe.capture(attention) as maps:
        attention(torch.randn(1, 4, 8))
    assert maps[0].shape == (1, 2, 4, 4)


def test_a_pass_of_another_thread_is_not_seen():
    """As of the page's gallery, which predicts the classes of its images meanwhile."""
    model = randomised(timm.create_model("vit_tiny_patch16_224", img_size=32, **SIZES))
    explained = partial(gradient_rollout, model, pictures(32), torch.tensor([0, 1]), 2)
    expected = explained()
    mine = threading.get_ident()

    def beside(*_hook):
        if threading.get_ident() == mine:
            other = threading.Thread(target=model, args=(pictures(32),))
            other.start()
            other.join()

    model.blocks[0].register_forward_hook(beside)
    torch.testing.assert_close(explained(), expected)


@pytest.mark.parametrize("way", ["compiled", "inference_mode"])
def test_gradient_rollout_is_the_same(way):
    model = randomised(timm.create_model("vit_tiny_patch16_224", img_size=32, **SIZES))
    expected = gradient_rollout(model, pictures(32), torch.tensor([0, 1]), 2)
    if way == "compiled":
        model = torch.compile(model, backend="eager")
    with torch.inference_mode(way == "inference_mode"):
        classes = torch.tensor([0, 1])
        relevance = gradient_rollout(model, pictures(32), classes, 2)
    torch.testing.assert_close(relevance, expected)
