"""Trains a small GPT on the characters of a text, or a small Llama, once with each of gaupipe's
attentions.

    python examples/language_model.py tinyshakespeare.txt --seeds 0 1 2 --out runs/language
    python examples/language_model.py tinyshakespeare.txt --model llama --out runs/llama

The attentions take turns, step by step, on the same batches: so their times compare although the
machine does other things as well. All models have as many parameters as the one with standard
attention, because the FFN shrinks by what an attention adds. The last tenth of the text is for
validation. A seed that ``--out`` has is not trained again. ``trainings.json`` there is the file
docs/results/data/language.json, from which ``docs/results/collect.py`` draws a table.

B sequences, T characters, d width.
"""

import argparse
import hashlib
import math
import statistics
import subprocess
import time
from pathlib import Path

import torch
from timm.layers import RmsNorm, SwiGLU
from timm.layers.pos_embed_sincos import apply_rot_embed
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from cells import in_one_line, kept, write_json
from gaupipe.attention.options import attention_class, bind_options, count_parameters
from gaupipe.system.errors import UserError

ATTENTIONS = {
    "standard": ("standard", {}),
    "belief": ("belief", {}),
    "belief_star": ("belief_star", {}),
    "xsa": ("xsa", {}),
    "belief2": ("belief2", {}),
    "belief2, zz=False": ("belief2", {"zz": False}),
    "attentionx, gamma 3": ("attentionx", {"gamma": 3.0, "mask_diagonal": False}),
    "attentionx, masked diagonal": ("attentionx", {"gamma": 1.0, "mask_diagonal": True}),
    "[MH, V]": ("belief_star", {"signal": "concat"}),
    "V alone": ("belief", {"signal": "value"}),
    "MH - D alone": ("belief", {"signal": "projected"}),
}


class Decoder(nn.Module):
    """What GPT and Llama have in common, made of timm's blocks."""

    def __init__(self, attention, options, vocabulary, context, layers, heads, width):
        super().__init__()
        attn_layer = bind_options(attention_class(attention), options)
        standard = attention_class("standard")(width, heads)
        extra = count_parameters(attn_layer(width, heads)) - count_parameters(standard)
        hidden = self.hidden_units(width, extra)
        block = dict(mlp_ratio=(hidden + 0.5) / width)  # timm takes int(d * mlp_ratio)
        block |= dict(attn_layer=attn_layer, norm_layer=self.norm_layer, **self.block)
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, **block) for _layer in range(layers))
        self.norm = self.norm_layer(width)
        self.add_positions(context, width, width // heads)
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                last = "proj" in name or "fc2" in name  # what it gives is added to the tokens
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers if last else 1))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of the character after each of x, int64 [B, T]."""
        x = self.embed(x)  # [B, T, d]
        for block in self.blocks:
            x = block(x, is_causal=True)
        return self.norm(x) @ self.tokens.weight.mT

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self(x).flatten(0, 1), y.flatten())


class GPT(Decoder):
    """GPT-2 as nanoGPT has it."""

    norm_layer = nn.LayerNorm
    block = dict(qkv_bias=True, act_layer=lambda: nn.GELU(approximate="tanh"))

    def hidden_units(self, width, extra):
        return 4 * width - round(extra / (2 * width + 1))  # a unit has 2 d weights and a bias

    def add_positions(self, context, width, head_width):
        self.positions = nn.Embedding(context, width)

    def embed(self, x):
        return self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))


class Llama(Decoder):
    """Llama: root mean squares, SwiGLU, positions that rotate queries and keys, no biases; the
    output matrix is that of the characters, as in its small models."""

    norm_layer = RmsNorm
    block = dict(proj_bias=False, mlp_layer=SwiGLU, act_layer=nn.SiLU)

    def hidden_units(self, width, extra):
        return round(8 * width / 3) - round(extra / (3 * width))  # a unit has 3 d weights

    def add_positions(self, context, width, head_width):
        rotary = Rotary(context, head_width)
        for block in self.blocks:  # every attention has these steps, and no norm there
            block.attn.q_norm = rotary
            block.attn.k_norm = rotary

    def embed(self, x):
        return self.tokens(x)


class Rotary(nn.Module):
    """Rotates queries or keys [B, H, T, d_m] by their places."""

    def __init__(self, context, head_width):
        super().__init__()
        rates = 10_000 ** -(torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(context), rates).repeat(1, 2)  # [context, d_m]
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, x):
        angles = self.angles[: x.shape[2]]
        return apply_rot_embed(x, angles.sin(), angles.cos(), half=True)


MODELS = {"gpt": GPT, "llama": Llama}


def read(path):
    """The text as int64 numbers, nine tenths for training and one for validation, and the size of
    its alphabet."""
    text = path.read_text()
    alphabet = sorted(set(text))
    number = {character: i for i, character in enumerate(alphabet)}
    data = torch.tensor([number[character] for character in text])
    cut = int(0.9 * len(data))
    return data[:cut], data[cut:], len(alphabet)


def batch_of(data, starts, context):
    index = starts.unsqueeze(1) + torch.arange(context)
    return data[index], data[index + 1]  # each [B, T]


@torch.no_grad()
def validation_loss(model, data, context):
    """Nats per character, over the whole validation text in pieces of the context."""
    starts = torch.arange(0, len(data) - context, context)
    losses = [model.loss(*batch_of(data, part, context)) * len(part) for part in starts.split(64)]
    return (sum(losses) / len(starts)).item()


def kept_for_backward(model, x, y):
    """Bytes that a training step keeps from the forward pass for the backward pass."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    sizes = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model.loss(x, y)  # holds the tensors, or two of them could have one address
    del loss
    return sum(sizes.values())


def optimizer_of(model, args):
    """AdamW with its schedule: a tenth of the steps up to the learning rate, a cosine down."""
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)
    return optimizer, OneCycleLR(
        optimizer, args.lr, args.steps, pct_start=0.1, cycle_momentum=False
    )


def train(seed, args):
    """A training of every attention: list of dicts, the numbers of a row of docs/results/data."""
    training, validation, vocabulary = read(args.text)
    if len(validation) <= args.context:
        raise UserError(
            f"{args.text}: the last tenth has to be longer than --context {args.context}"
        )
    sizes = (vocabulary, args.context, args.layers, args.heads, args.width)
    models = {}
    for name, (attention, options) in ATTENTIONS.items():
        torch.manual_seed(seed)
        models[name] = MODELS[args.model](attention, options, *sizes)
    optimizers = {name: optimizer_of(model, args) for name, model in models.items()}
    seconds = {name: [] for name in models}
    losses = {name: [] for name in models}
    draw = torch.Generator().manual_seed(seed)
    for step in range(args.steps):
        starts = torch.randint(len(training) - args.context, (args.batch,), generator=draw)
        x, y = batch_of(training, starts, args.context)
        for name, model in models.items():
            started = time.process_time()
            optimizer, schedule = optimizers[name]
            loss = model.loss(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
            seconds[name].append(time.process_time() - started)
        if (step + 1) % 100 == 0:
            means = [f"{name} {statistics.mean(losses[name][-100:]):.3f}" for name in models]
            print(f"seed {seed}, step {step + 1}: {'; '.join(means)}", flush=True)
    characters = args.steps * args.batch * args.context
    return [
        dict(
            name=name,
            command=f"{args.command} --seeds {seed}",
            commit=args.commit,
            data=args.text.stem,
            model=args.model,
            images=len(training),  # characters
            epochs=characters / len(training),
            seed=seed,
            val=validation_loss(model.eval(), validation, args.context),
            core_seconds=sum(seconds[name]),
            train=statistics.mean(losses[name][-100:]),
            parameters=count_parameters(model),
            step_seconds=statistics.median(seconds[name]),
            step_bytes=kept_for_backward(model.train(), x, y),
        )
        for name, model in models.items()
    ]


@in_one_line()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/language"))
    numbers = dict(layers=4, heads=4, width=64, context=64, batch=16, steps=800)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: getattr(args, name) for name in ("model", *numbers, "lr")}
    changed = [
        f" --{name} {settings[name]}"
        for name in settings
        if settings[name] != parser.get_default(name)
    ]
    args.command = f"python examples/language_model.py {args.text.name}{''.join(changed)}"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    args.commit = commit[:7]  # of the code that runs, whatever is committed meanwhile
    settings["sha256"] = hashlib.sha256(args.text.read_bytes()).hexdigest()
    trainings = []
    for seed in args.seeds:
        trainings += kept(args.out / f"{seed}.json", settings, lambda seed=seed: train(seed, args))
    write_json(args.out / "trainings.json", trainings)
    print(f"{args.out / 'trainings.json'}: {len(trainings)} trainings")


if __name__ == "__main__":
    main()
