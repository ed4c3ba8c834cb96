"""Trains GPT-2 and Llama of transformers with gaupipe's attentions on the characters of a text.

    python examples/language_model.py input.txt                        # standard attention
    python examples/language_model.py input.txt --attention belief --seeds 0 1 2
    python examples/language_model.py input.txt --sweep --seeds 0 1 2 --out runs/gpt2
    python examples/language_model.py novels.txt --validation another_novel.txt

The last tenth of the text is for validation, if no other text is given for it. Every finished
training is a file in ``--out`` and is not repeated. Needs gaupipe[transformers].
"""

import argparse
import hashlib
import math
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from transformers.utils import logging

import gaupipe.transformers  # noqa: F401  (transformers learns the attentions)
from cells import in_one_line, kept, mean_and_spread

ATTENTIONS = {
    "standard": ("sdpa", {}),
    "belief": ("gau_belief", {}),
    "xsa": ("gau_xsa", {}),
    "attentionx_3": ("gau_attentionx", {"gamma": 3.0, "mask_diagonal": False}),
    "attentionx_1": ("gau_attentionx", {"gamma": 1.0, "mask_diagonal": False}),
    "attentionx_masked": ("gau_attentionx", {"gamma": 1.0, "mask_diagonal": True}),
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--validation", type=Path, help="a text (default: the text's last tenth)")
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--attention", choices=ATTENTIONS, nargs="+", default=["standard"])
    parser.add_argument("--sweep", action="store_true", help="all attentions")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/language_model"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--min-lr", type=float, default=3e-4)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timed-steps", type=int, default=40, help="of each, in turns")
    parser.add_argument("--sample", type=int, default=0, help="characters to write at the end")
    return parser.parse_args()


def build(name, args, vocabulary):
    implementation, options = ATTENTIONS[name]
    common = dict(
        vocab_size=vocabulary,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        gau_options=options,
    )
    if args.model == "gpt2":
        config = GPT2Config(
            n_layer=args.layers,
            n_head=args.heads,
            n_embd=args.width,
            n_positions=args.context,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own, as one operation
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
    else:
        config = LlamaConfig(
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            hidden_size=args.width,
            max_position_embeddings=args.context,
            intermediate_size=args.width * 8 // 3,
            tie_word_embeddings=True,
            **common,
        )
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def read(path, validation=None):
    """(training characters, validation characters, alphabet): the first two as int64 numbers."""
    text = path.read_text()
    cut = len(text) if validation else int(0.9 * len(text))
    held_out = validation.read_text() if validation else text[cut:]
    alphabet = sorted({*text, *held_out})
    number = {character: i for i, character in enumerate(alphabet)}
    data, held_out = (
        torch.tensor([number[character] for character in part]) for part in (text[:cut], held_out)
    )
    return data, held_out, alphabet


def batch_of(data, starts, context):
    index = starts.unsqueeze(1) + torch.arange(context)
    return data[index], data[index + 1]  # each [B, T]


def loss_of(model, x, y):
    return cross_entropy(model(x, use_cache=False).logits.flatten(0, 1), y.flatten())


@torch.no_grad()
def validation_loss(model, data, context):
    """Cross-entropy per character, over the whole validation text in pieces of the context."""
    model.eval()
    starts = torch.arange(0, len(data) - context - 1, context)
    losses = [
        loss_of(model, *batch_of(data, part, context)) * len(part) for part in starts.split(64)
    ]
    model.train()
    return (sum(losses) / len(starts)).item()


def learning_rate(step, args):
    """Linear warm-up, then a cosine down to the smallest."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (args.lr - args.min_lr)


def optimizer_of(model, args):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=args.weight_decay), dict(params=vectors)]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)


def train(name, seed, args, texts):
    training, validation, alphabet = texts
    torch.manual_seed(seed)
    model = build(name, args, len(alphabet)).train()
    optimizer = optimizer_of(model, args)
    draw = torch.Generator().manual_seed(seed)  # the same batches for every attention
    losses = []

    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        starts = torch.randint(len(training) - args.context, (args.batch,), generator=draw)
        loss = loss_of(model, *batch_of(training, starts, args.context))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % args.log_every == 0:
            mean = statistics.mean(losses[-args.log_every :])
            print(f"{name}, seed {seed}, step {step + 1}: training loss {mean:.4f}")

    result = dict(
        attention=name,
        seed=seed,
        parameters=sum(p.numel() for p in model.parameters()),
        validation_loss=validation_loss(model, validation, args.context),
        training_loss=losses,  # of every step
    )
    print(f"{name}, seed {seed}: validation loss {result['validation_loss']:.4f}")
    return model.eval(), result


def generate(model, characters, prompt=0):
    """``characters`` more after one, greedily, with the model's cache."""
    start = torch.full((1, 1), prompt)
    return model.generate(start, attention_mask=torch.ones_like(start), do_sample=False,
                          max_new_tokens=characters)  # fmt: skip


def speeds(names, args, texts):
    """Processor time of steps and of generations of all attentions, which take turns: medians, and
    median and quartiles of the ratios to the first attention."""
    training, _validation, alphabet = texts
    models = {name: build(name, args, len(alphabet)) for name in names}
    optimizers = {name: optimizer_of(model, args) for name, model in models.items()}
    steps: dict = {name: [] for name in names}
    writing: dict = {name: [] for name in names}
    for turn in range(args.timed_steps + 2):
        starts = torch.randint(len(training) - args.context, (args.batch,))
        for name, model in models.items():
            model.train()
            started = time.process_time()
            loss_of(model, *batch_of(training, starts, args.context)).backward()
            optimizers[name].step()
            optimizers[name].zero_grad(set_to_none=True)
            if turn >= 2:  # the first two are warm-up
                steps[name].append(time.process_time() - started)
            if turn % 2 == 0 and turn >= 2:
                model.eval()
                started = time.process_time()
                generate(model, args.context - 1)
                writing[name].append(time.process_time() - started)

    def ratios(times, name):
        pairs = zip(times[names[0]], times[name], strict=True)
        found = torch.tensor([mine / first for first, mine in pairs])
        return found.quantile(torch.tensor([0.5, 0.25, 0.75])).tolist()

    return {
        name: dict(
            seconds_per_step=statistics.median(steps[name]),
            step_ratio=ratios(steps, name),
            characters_per_second=(args.context - 1) / statistics.median(writing[name]),
            generation_ratio=ratios(writing, name),
        )
        for name in names
    }


def table(results, speed):
    """Markdown. The training loss is that of the last 200 steps. The difference is to standard
    attention with the same seed; a ratio of times has its quartiles in brackets."""
    print("| attention | parameters | training loss | validation loss | difference | ms / step "
          "| ratio | characters / s | ratio of times |")  # fmt: skip
    print("|---" * 9 + "|")
    standard = {run["seed"]: run["validation_loss"] for run in results.get("standard", [])}
    for name, runs in results.items():
        losses = [run["validation_loss"] for run in runs]
        training = [statistics.mean(run["training_loss"][-200:]) for run in runs]
        paired = [run for run in runs if run["seed"] in standard and name != "standard"]
        differences = [run["validation_loss"] - standard[run["seed"]] for run in paired]
        steps, writing = ("{:.2f} [{:.2f}, {:.2f}]".format(*speed[name][key])
                          for key in ("step_ratio", "generation_ratio"))  # fmt: skip
        print(
            f"| {name} | {runs[0]['parameters']:,} | {statistics.mean(training):.3f} "
            f"| {mean_and_spread(losses)} | {mean_and_spread(differences)} "
            f"| {1000 * speed[name]['seconds_per_step']:.0f} | {steps} "
            f"| {speed[name]['characters_per_second']:.0f} | {writing} |"
        )


@in_one_line()
def main():
    args = arguments()
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    texts = read(args.text, args.validation)
    names = list(ATTENTIONS) if args.sweep else args.attention
    other = {"attention", "sweep", "seeds", "sample", "threads", "timed_steps"}
    other |= {"text", "validation", "out"}
    settings = {key: value for key, value in vars(args).items() if key not in other}
    settings["texts"] = [hashlib.sha256(part.numpy()).hexdigest() for part in texts[:2]]

    results: dict = {name: [] for name in names}
    for seed in args.seeds:
        for name in names:

            def work(name=name, seed=seed):
                model, result = train(name, seed, args, texts)
                if args.sample:
                    written = generate(model, min(args.sample, args.context - 1))[0]
                    print("".join(texts[2][i] for i in written))
                return result

            path = args.out / f"{name}-{seed}.json"
            results[name].append(kept(path, settings, work))
    speed = kept(
        args.out / f"speed-{'-'.join(names)}.json", settings, lambda: speeds(names, args, texts)
    )
    table(results, speed)


if __name__ == "__main__":
    main()
