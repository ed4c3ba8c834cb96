"""The attentions in Hugging Face's transformers: against numpy, and with every cache."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BertModel,
    DebertaV2Config,
    DynamicCache,
    FalconConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MarianConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    StaticCache,
)
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.utils import logging

import gaupipe.transformers as ours
from gaupipe.system.errors import UserError
from gaupipe.transformers import attend, visible_and_own

torch.set_num_threads(1)
logging.set_verbosity_error()

GROUPED = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=48,
)
CONFIGS = {
    "gpt2": (GPT2Config, dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=48)),
    "llama": (LlamaConfig, GROUPED),
    "mistral": (MistralConfig, {**GROUPED, "sliding_window": 5}),
    "qwen2": (Qwen2Config, GROUPED),
    "qwen3": (Qwen3Config, {**GROUPED, "head_dim": 12}),
}
IMPLEMENTATIONS = ("gau_belief", "gau_xsa", "gau_attentionx")
NO_MASK = {"gamma": 3.0, "mask_diagonal": False}


def config_of(family, **changes):
    config_class, sizes = CONFIGS[family]
    tokens = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return config_class(**{**sizes, **tokens, "initializer_range": 0.2, **changes})


def model_of(family, attention, **changes):
    """A tiny model with weights large enough for attention to be far from uniform."""
    torch.manual_seed(0)
    config = config_of(family, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def numpy_signals(q, k, v, queries, keys, padding, window, kind, gamma=1.0, mask_diagonal=False):
    """What the output projection gets, by loops from the equations: q [B, H, T, m], k and v
    [B, H_kv, S, m] at the positions ``queries`` and ``keys``; ``padding`` [B, positions] is False
    where a token is padding."""
    B, H, T, m = q.shape
    mh, own = np.zeros((B, T, H, m)), np.zeros((B, T, H, m))
    for b, h, t in np.ndindex(B, H, T):
        group = h // (H // k.shape[1])
        seen = [
            s
            for s, position in enumerate(keys)
            if queries[t] - window < position <= queries[t] and padding[b, position]
            if not (mask_diagonal and position == queries[t])
        ]
        own[b, t, h] = v[b, group, list(keys).index(queries[t])]
        if seen:
            scores = np.exp(k[b, group, seen] @ q[b, h, t] / np.sqrt(m))
            mh[b, t, h] = scores / scores.sum() @ v[b, group, seen]

    def perpendicular(x, y):
        return x - (x * y).sum(-1, keepdims=True) / (y * y).sum(-1, keepdims=True) * y

    if kind == "gau_belief":
        flat = perpendicular(mh.reshape(B, T, H * m), own.reshape(B, T, H * m))
        return flat.reshape(B, T, H, m)
    return perpendicular(mh, own) if kind == "gau_xsa" else own - gamma * mh


LAYOUTS = {  # positions of queries and keys, and how many tokens a query sees at most
    "no cache": (range(7), range(7), 99),
    "dynamic cache, one query": (range(6, 7), range(7), 99),
    "dynamic cache, a chunk": (range(4, 7), range(7), 99),
    "static cache, one query": (range(4, 5), range(7), 99),
    "static cache, a chunk": (range(2, 5), range(7), 99),
    "static cache, the prompt": (range(3), range(7), 99),
    "sliding window": (range(7), range(7), 3),
    "sliding window, cache": (range(4, 7), range(2, 7), 3),
}


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_functions_are_their_equations(layout, padded, kind):
    """With grouped heads."""
    queries, keys, window = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, 4, len(queries), 6))
    k, v = rng.normal(size=(2, 2, 2, len(keys), 6))
    padding = np.ones((2, 7), dtype=bool)
    padding[0, :3] = not padded
    mask = visible_and_own(
        batch_size=2,
        q_length=len(queries),
        kv_length=len(keys),
        q_offset=queries[0],
        kv_offset=keys[0],
        mask_function=causal_mask_function
        if window == 99
        else sliding_window_causal_mask_function(window),
        local_size=None if window == 99 else window,
        attention_mask=torch.from_numpy(padding) if padded else None,
        # as transformers asks: a compiled step with a static cache has a mask
        allow_is_causal_skip=not (layout.startswith("static") and len(queries) == 1),
    )
    module = nn.Module()
    for options in [{}, NO_MASK] if kind == "gau_attentionx" else [None]:
        module.config = type("Config", (), {"gau_options": options})
        function = ours.AttentionInterface()[kind]
        signals, _ = function(module, *map(torch.from_numpy, (q, k, v)), mask)
        options = options if options is None or options else {"gamma": 1.0, "mask_diagonal": True}
        expected = numpy_signals(q, k, v, queries, keys, padding, window, kind, **(options or {}))
        np.testing.assert_allclose(signals, expected, atol=1e-12)
        if kind != "gau_attentionx":
            _, own = attend(module, *map(torch.from_numpy, (q, k, v)), mask)
            dots = signals * own
            dots = dots.sum((-1, -2)) if kind == "gau_belief" else dots.sum(-1)
            assert dots.abs().max() < 1e-12


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("hide_own", [False, True])
def test_a_mask_of_the_users_own(additive, hide_own):
    """A chunk after cached tokens, as trees of guesses need it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 6), torch.randn(2, 2, 7, 6), torch.randn(2, 2, 7, 6)
    made = visible_and_own(
        batch_size=2, q_length=3, kv_length=7, q_offset=4, mask_function=causal_mask_function
    )
    own = (made & 1).bool()
    if additive:
        own = torch.zeros(own.shape).masked_fill(~own, torch.finfo(torch.float32).min)
    for given, expected in zip(
        attend(nn.Module(), q, k, v, own, hide_own=hide_own),
        attend(nn.Module(), q, k, v, made, hide_own=hide_own),
        strict=True,
    ):
        torch.testing.assert_close(given, expected)


@pytest.mark.parametrize(
    "family, attention",
    [
        *((family, key) for family in CONFIGS for key in ("gau_belief", "gau_attentionx")),
        ("llama", "gau_xsa"),
    ],
)
def test_generated_text_and_logits_do_not_depend_on_the_cache(family, attention):
    model = model_of(family, attention)
    ids = torch.randint(1, 61, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ways = [
        dict(use_cache=False),
        dict(),
        dict(cache_implementation="static"),
        dict(prefill_chunk_size=4),
    ]
    texts = [
        model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, **way)
        for way in ways
    ]
    assert all(torch.equal(text, texts[0]) for text in texts)

    whole = model(texts[0], use_cache=False).logits
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=20)):
        parts = [
            model(part, past_key_values=cache, use_cache=True).logits
            for part in texts[0].split([6, 1, 5, 2], dim=1)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=3e-5)


def test_packed_sequences_do_not_see_each_other():
    model = model_of("llama", "gau_attentionx")
    first, second = torch.randint(1, 61, (1, 4)), torch.randint(1, 61, (1, 5))
    positions = torch.tensor([[*range(4), *range(5)]])
    packed = torch.cat([first, second], 1)
    logits = model(packed, position_ids=positions, use_cache=False).logits
    apart = torch.cat([model(first).logits, model(second).logits], 1)
    torch.testing.assert_close(logits, apart, rtol=0, atol=3e-5)


def test_a_model_remembers_the_attention_it_was_trained_with(tmp_path):
    model_of("llama", "gau_belief").save_pretrained(tmp_path)
    load = AutoModelForCausalLM.from_pretrained
    with pytest.warns(UserWarning, match="had attn_implementation='gau_belief', which") as told:
        load(tmp_path)
    assert len({str(warning.message) for warning in told}) == 1
    with warnings.catch_warnings(action="error"):
        load(tmp_path, attn_implementation="gau_belief")
    with pytest.raises(UserError, match="'gau_belief2': this attention is for vision transformers"):
        load(tmp_path, attn_implementation="gau_belief2")
    with pytest.raises(UserError, match="'gau_beleif'; did you mean 'gau_belief'"):
        load(tmp_path, attn_implementation="gau_beleif")


def test_a_model_that_is_set_to_another_attention_forgets_the_one_before(tmp_path):
    model = model_of("llama", "gau_xsa")
    with warnings.catch_warnings(action="error"):
        model.set_attn_implementation("gau_belief")
        assert model.config.gau_implementation == "gau_belief"
        model.set_attn_implementation("sdpa")
        model.save_pretrained(tmp_path)
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_the_functions_cannot_do_is_refused():
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    with pytest.raises(UserError, match="attends with softcap"):
        attend(nn.Linear(1, 1), q, q, q, None, softcap=50.0)
    with pytest.raises(UserError, match="cross-attention"):
        attend(nn.Linear(1, 1), q, k, k, None, is_causal=False)
    with pytest.raises(UserError, match="did you mean 'gamma'"):
        model_of("gpt2", "gau_attentionx", gau_options={"gama": 3.0})(torch.ones(1, 2).long())
    with pytest.raises(UserError, match="a finite number fits"):
        model_of("gpt2", "gau_attentionx", gau_options={"gamma": np.nan})(torch.ones(1, 2).long())
    quoted = model_of("gpt2", "gau_attentionx", gau_options={"mask_diagonal": "false"})
    with pytest.raises(UserError, match="is 'false'; true or false fits"):
        quoted(torch.ones(1, 2).long())


SMALL = dict(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
SEQ2SEQ = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2)
SEQ2SEQ |= dict(decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16)
SEQ2SEQ |= dict(vocab_size=9, pad_token_id=0, eos_token_id=0, decoder_start_token_id=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_to_a_source_of_the_same_length_is_refused(implementation):
    """However many tokens it has. A decoder without a source is not refused."""
    ids, source = torch.ones(1, 4, dtype=torch.int64), torch.randn(1, 4, 16)
    gpt2 = GPT2Config(vocab_size=9, n_embd=16, n_layer=1, n_head=2, add_cross_attention=True)
    bert = BertConfig(**SMALL, intermediate_size=16, is_decoder=True, add_cross_attention=True)
    for config, given in (
        (BartConfig(**SEQ2SEQ, forced_eos_token_id=None), dict(decoder_input_ids=ids)),
        (MarianConfig(**SEQ2SEQ, forced_eos_token_id=None), dict(decoder_input_ids=ids)),
        (gpt2, dict(encoder_hidden_states=source)),
        (bert, dict(encoder_hidden_states=source)),
    ):
        model = AutoModel.from_config(config, attn_implementation=implementation)
        with pytest.raises(UserError, match="cross-attention"):
            model(ids, **given)
    bert.add_cross_attention = False
    assert BertModel._from_config(bert, attn_implementation=implementation)(ids)[0].isfinite().all()


@pytest.mark.parametrize(
    "config",
    [
        DebertaV2Config(**SMALL, intermediate_size=16),
        FalconConfig(**SMALL),
        GPTNeoConfig(hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_do_not_look_their_attention_up_are_refused(config):
    """They would compute standard attention, or end in a KeyError."""
    with pytest.raises(UserError, match="has its own attention") as error:
        AutoModel.from_config(config, attn_implementation="gau_belief")
    assert "\n" not in str(error.value)
