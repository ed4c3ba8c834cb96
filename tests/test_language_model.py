"""examples/language_model.py, on a text of a few words and with models of one block, and the table
of its page."""

import json
import re
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import gaupipe.transformers  # noqa: F401  (transformers learns the attentions)

ROOT = Path(__file__).parent.parent
SMALL = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--context", "8"),
    *("--batch", "2", "--steps", "3"),
]
SIZES = dict(vocabulary=11, context=8, layers=2, heads=2, width=16)


@pytest.fixture
def language_model(tmp_path, example):
    """Runs the script in this process; the text is in ``tmp_path``."""
    text = tmp_path / "foxes.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 12)
    module, run = example("language_model")

    def train(*more):
        run(*SMALL, text, "--out", tmp_path / "runs", *more)
        return json.loads((tmp_path / "runs" / "trainings.json").read_text())

    train.module = module
    return train


def test_a_llama_is_trained_at_equal_parameters(language_model):
    trainings = language_model("--model", "llama")
    sizes = [training["parameters"] for training in trainings]
    assert max(sizes) - min(sizes) <= 3 * 16  # a unit of the only FFN
    assert {training["model"] for training in trainings} == {"llama"}
    assert " --model llama" in trainings[0]["command"]


def test_every_attention_is_trained_at_equal_parameters_and_not_again(language_model, capsys):
    trainings = language_model("--seeds", "0", "1")
    names = list(language_model.module.ATTENTIONS)
    assert [training["name"] for training in trainings] == 2 * names
    assert [training["seed"] for training in trainings] == [0] * len(names) + [1] * len(names)
    sizes = [training["parameters"] for training in trainings]
    assert max(sizes) - min(sizes) <= 2 * 16 + 1  # a unit of the only FFN
    assert len({training["val"] for training in trainings}) == len(trainings)  # options arrive
    assert trainings[0]["command"].startswith(
        "python examples/language_model.py foxes.txt --layers"
    )
    assert trainings[0]["epochs"] == 3 * 2 * 8 / 486 and trainings[0]["images"] == 486

    assert language_model("--seeds", "1") == trainings[len(names) :]  # also their times
    with pytest.raises(SystemExit, match="2"):
        language_model("--seeds", "1", "--lr", "1")
    message = capsys.readouterr().err
    assert re.fullmatch(
        "language_model.py: .*other settings .lr was 0.003, now .* 1.0.*\n", message
    )


def test_the_same_seed_gives_the_same_training(language_model, tmp_path):
    before = [training["val"] for training in language_model()]
    (tmp_path / "runs" / "0.json").unlink()
    assert [training["val"] for training in language_model()] == before


def test_a_text_that_is_too_short_is_said_in_one_line(language_model, tmp_path, capsys):
    (tmp_path / "foxes.txt").write_text("a fox " * 10)
    with pytest.raises(SystemExit, match="2"):
        language_model()
    assert re.fullmatch(
        "language_model.py: .*foxes.txt: the last tenth has to be longer than --context 8\n",
        capsys.readouterr().err,
    )


def built(module, name, model="gpt"):
    torch.manual_seed(0)
    attention, options = module.ATTENTIONS[name]
    model = module.MODELS[model](attention, options, **SIZES).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@torch.no_grad()
def test_no_attention_sees_a_later_character(example, kind):
    module, _run = example("language_model")
    text = torch.arange(8)[None] % 11
    later = text.clone()
    later[:, 5:] = 9
    for name in module.ATTENTIONS:
        model = built(module, name, kind)
        same, other = model(text), model(later)
        torch.testing.assert_close(same[:, :5], other[:, :5])
        assert not torch.allclose(same[:, 5:], other[:, 5:])


def of_transformers(model, config, implementation):
    config._attn_implementation = implementation
    theirs = model(config).eval()
    theirs.set_attn_implementation(implementation)
    return theirs


AS_IN_TRANSFORMERS = pytest.mark.parametrize(
    "name, implementation, options",
    [
        ("standard", "sdpa", None),
        ("belief", "gau_belief", None),
        ("xsa", "gau_xsa", None),
        ("attentionx, gamma 3", "gau_attentionx", {"gamma": 3.0, "mask_diagonal": False}),
        ("attentionx, masked diagonal", "gau_attentionx", {"gamma": 1.0, "mask_diagonal": True}),
    ],
)


@AS_IN_TRANSFORMERS
@torch.no_grad()
def test_llama_of_transformers_has_the_same_outputs_with_the_same_weights(
    example, name, implementation, options
):
    module, _run = example("language_model")
    ours = built(module, name, "llama")
    config = LlamaConfig(
        vocab_size=11,
        max_position_embeddings=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=ours.blocks[0].mlp.fc2.in_features,
        tie_word_embeddings=True,
        gau_options=options,
    )
    theirs = of_transformers(LlamaForCausalLM, config, implementation)
    body = theirs.model
    pairs = [(body.embed_tokens, ours.tokens.weight), (body.norm, ours.norm.weight)]
    for block, mine in zip(body.layers, ours.blocks, strict=True):
        attention, mlp = block.self_attn, block.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        pairs += zip(projections, mine.attn.qkv.weight.chunk(3), strict=True)
        pairs += [
            (attention.o_proj, mine.attn.proj.weight),
            (mlp.gate_proj, mine.mlp.fc1_g.weight),
            (mlp.up_proj, mine.mlp.fc1_x.weight),
            (mlp.down_proj, mine.mlp.fc2.weight),
            (block.input_layernorm, mine.norm1.weight),
            (block.post_attention_layernorm, mine.norm2.weight),
        ]
    for other, weight in pairs:
        other.weight.copy_(weight)
    text = torch.randint(11, (3, 8))
    torch.testing.assert_close(theirs(text).logits, ours(text), rtol=1e-4, atol=1e-4)


@AS_IN_TRANSFORMERS
@torch.no_grad()
def test_gpt2_of_transformers_has_the_same_outputs_with_the_same_weights(
    example, name, implementation, options
):
    module, _run = example("language_model")
    ours = built(module, name)
    config = GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_layer=2,
        n_head=2,
        n_embd=16,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-6,  # timm's
        gau_options=options,
    )
    theirs = of_transformers(GPT2LMHeadModel, config, implementation)
    body = theirs.transformer
    body.wte.weight.copy_(ours.tokens.weight)
    body.wpe.weight.copy_(ours.positions.weight)
    pairs = [(body.ln_f, ours.norm)]
    for block, mine in zip(body.h, ours.blocks, strict=True):
        pairs += [(block.ln_1, mine.norm1), (block.ln_2, mine.norm2)]
        pairs += [(block.attn.c_attn, mine.attn.qkv), (block.attn.c_proj, mine.attn.proj)]
        pairs += [(block.mlp.c_fc, mine.mlp.fc1), (block.mlp.c_proj, mine.mlp.fc2)]
    for other, mine in pairs:
        other.weight.copy_(mine.weight.mT if mine.weight.dim() == 2 else mine.weight)
        other.bias.copy_(mine.bias)
    text = torch.randint(11, (3, 8))
    torch.testing.assert_close(theirs(text).logits, ours(text), rtol=1e-4, atol=1e-4)


def test_kept_memory_is_what_autograd_holds(example):
    """A linear layer keeps its input, the square its result; weights do not count."""
    module, _run = example("language_model")
    layer = nn.Linear(3, 5)
    model = types.SimpleNamespace(
        parameters=layer.parameters, loss=lambda x, y: (layer(x) ** 2).sum()
    )
    assert module.kept_for_backward(model, torch.randn(7, 3), None) == 4 * (7 * 3 + 7 * 5)
