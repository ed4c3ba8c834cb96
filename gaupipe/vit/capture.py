"""Attention maps of any vision transformer, taken while its fused attention runs.

Maps are computed beside the model, from the queries, keys and masks of its calls: of torch's
``scaled_dot_product_attention``, of gaupipe's own, and of the functions of transformers'
``AttentionInterface``. The model's own computation stays as it is, to the bit.

Axis letters: B images, H heads, T tokens (class and register tokens, then patches), Q queries.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.swin_transformer import WindowAttention
from timm.models.xcit import XCA
from timm.utils import unwrap_model
from torch import Tensor, nn

from gaupipe.attention.base import StudentAttention
from gaupipe.system.errors import UserError
from gaupipe.vit.attention_maps import AttentionReader, CapturedMaps, attention_map
from gaupipe.vit.transformers_maps import interface_of_transformers


@contextlib.contextmanager
def capture(
    model: nn.Module,
    blocks: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> Iterator[dict[int, Tensor]]:
    """Collects the attention maps of a vision transformer's forward passes.

    .. code-block:: python

        with gaupipe.capture(model, blocks=[-1], queries=[0]) as maps:
            logits = model(images)
        maps[11]  # [B, H, 1, T] float32: the class token's attention in the last block

    model    a ViT of timm, or a model of transformers with the ``attn_implementation`` ``eager``,
             ``sdpa`` or one of gaupipe's. Compiled, it runs uncompiled while its maps are captured
    blocks   numbers of the attention layers to keep, in the order of their calls; negative ones
             count from the end, where each block has one. None keeps all
    queries  numbers of the tokens whose rows are kept; the class token is 0. None keeps all

    Yields the dictionary {block: float32 [B, H, Q, T]} of the latest ``model(...)``, detached, on
    the model's device. Other models called meanwhile add nothing. Rows sum to 1, but for a model
    with attention sinks, which take a part, and for queries without a key, whose rows are 0.

    Raises UserError for a model whose attention is not fused (``fused_attn = False``), for one in
    which no attention was seen or fewer than it has blocks (CaiT), for one that attends within
    windows (DaViT) or over channels (XCiT), for one whose weights cannot be told from the arguments
    of its attention, and for a block or a query that the model has not.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"capture takes a model, as timm.create_model gives it, not {model!r}")
    model = unwrap_model(model)  # of a compiled or parallel one
    for name, part in model.named_modules():
        _refuse_unreadable(name, part)
    blocks = _whole_numbers("blocks", blocks)
    queries = _whole_numbers("queries", queries)
    timm_blocks = _blocks(model)
    config = getattr(model, "config", None)  # of transformers
    count = len(timm_blocks) or getattr(config, "num_hidden_layers", None)
    from_the_end = blocks is not None and min(blocks, default=0) < 0
    if from_the_end and count is None:
        raise UserError("the model does not tell its number of blocks: count them from 0")
    given = {}  # blocks as they were given, by their numbers from 0
    if blocks is not None:
        given = {block + count if block < 0 and count else block: block for block in blocks}
    captured = CapturedMaps(None if blocks is None else given, queries)
    hooks = [
        model.register_forward_pre_hook(captured.start, with_kwargs=True),
        model.register_forward_hook(captured.stop, always_call=True),
    ]
    if timm_blocks:
        hooks.append(timm_blocks[-1].register_forward_hook(captured.end_blocks))
    try:
        with (
            torch.compiler.set_stance("force_eager"),  # a graph runs without what is to be seen
            AttentionReader(captured.see),
            interface_of_transformers(captured),
        ):
            yield captured.maps
    finally:
        for hook in hooks:
            hook.remove()
    name = type(model).__name__
    if not captured.calls:
        raise UserError(
            f"no attention of {name} was seen: either the model was not called, as model(...) and "
            "not by another method, or it computes its attention by a way of its own, as Hiera does"
        )
    seen = f"{name}: {captured.calls} attentions were seen in {count} blocks"
    if captured.calls < len(timm_blocks):
        raise UserError(
            f"{seen}: the others compute theirs by a way of their own, which capture cannot read"
        )
    if from_the_end and (captured.calls_in_blocks or captured.calls) != count:
        raise UserError(f"{seen}: count blocks from 0 there")
    missing = sorted(given.keys() - captured.maps.keys())
    if missing:
        raise UserError(
            f"block {given[missing[0]]}: the model has {captured.calls} attention layers"
        )


@dataclass(frozen=True)
class Traced:
    """A forward pass of a ViT from which the relevance for any score can be computed.

    logits  [B, C] of the images, or features of a model without classes
    maps    of the model's first attentions [B, H, T, T] float32, those of its blocks
    values  of the same attentions [B, H, T, d_m], what their maps weigh
    tokens  that each block puts out [B, T, d]
    """

    logits: Tensor
    maps: list[Tensor]
    values: list[Tensor]
    tokens: list[Tensor]

    def rollout(self, score: Tensor) -> Tensor:
        """:func:`gradient_rollout` for a score: a number that was computed from the pass, the sum
        over images."""
        gradients = torch.autograd.grad(score, self.maps, retain_graph=True)  # for other scores
        identity = torch.eye(self.maps[0].shape[-1], device=score.device)
        relevance = identity
        steps = []
        for map, gradient in zip(self.maps, gradients, strict=True):
            weighted = (map.detach() * gradient).clamp_min(0).mean(1)  # [B, T, T]
            relevance = relevance + weighted @ relevance
            steps.append(relevance - identity)
        return torch.stack(steps, 1)

    def legrad(self, score: Callable[[Tensor], Tensor]) -> Tensor:
        """The relevance of each token for a score of what a block puts out.

        score  makes one number, the sum over images, of the tokens [B, T, d] of any block, as if it
               were the last

        Returns float32 [B, L, T]: the sums up to each block of *Bousselham et al. 2024, LeGrad
        (arXiv 2404.03214)*: of the positive gradient of the block's score by its own map, mean over
        heads and queries.
        """
        steps = []
        for tokens, map in zip(self.tokens, self.maps, strict=True):
            [gradient] = torch.autograd.grad(score(tokens), map, retain_graph=True)
            steps.append(gradient.clamp_min(0).mean((1, 2)))
        return torch.stack(steps, 1).cumsum(1)


def trace(model: nn.Module, images: Tensor, blocks: int) -> Traced:
    """The forward pass of a timm ViT on images [B, channels, height, width], as the model takes
    them, with the maps and values of its first ``blocks`` attentions. Raises ValueError unless each
    block has one, which is fused."""
    maps: list[Tensor] = []
    values: list[Tensor] = []
    tokens: list[Tensor] = []
    seen: list[int] = []  # attentions until the end of each block

    thread = threading.get_ident()  # another may run the model meanwhile

    def end_block(_block: nn.Module, _args: Any, output: Tensor) -> None:
        if threading.get_ident() == thread:
            tokens.append(output)
            seen.append(len(maps))

    def see(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        maps.append(attention_map(query, key, value, *args, **kwargs))
        values.append(value)
        return maps[-1].to(value.dtype) @ value

    layers: Any = model.blocks
    hooks = [layer.register_forward_hook(end_block) for layer in layers]
    try:
        with (
            torch.inference_mode(False),  # and with gradients
            torch.compiler.set_stance("force_eager"),
            AttentionReader(see),
        ):
            logits = model(images.detach().clone().requires_grad_())  # so that maps have gradients
    finally:
        for hook in hooks:
            hook.remove()
    if seen[:blocks] != [*range(1, blocks + 1)]:
        raise ValueError(f"{blocks} blocks should have one fused attention each")
    return Traced(logits, maps[:blocks], values[:blocks], tokens)


@torch.inference_mode(False)
def gradient_rollout(model: nn.Module, images: Tensor, classes: Tensor, blocks: int) -> Tensor:
    """The relevance of each token for each token of a timm ViT, for one class of each image.

    images   [B, channels, height, width], as the model takes them
    classes  int64 [B]: the classes whose logits are explained
    blocks   the number of the model's first attentions that count: those of its blocks

    Returns float32 [B, L, T, T]: block by block R - I of *Chefer, Gur and Wolf 2021, Generic
    Attention-model Explainability (arXiv 2103.15679), eqs 5 and 6*: from R = I on, R += mean over
    heads of (dlogit/dA * A)+ times R, with the attention map A of the block. Raises ValueError as
    :func:`trace`.
    """
    traced = trace(model, images, blocks)
    index = classes[:, None].clone()  # autograd takes none that inference_mode made
    return traced.rollout(traced.logits.gather(1, index).sum())


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a ViT of timm, or of a graph made from it; none of another model."""
    blocks = getattr(model, "blocks", None)
    return [*blocks.children()] if isinstance(blocks, nn.Module) else []


def _refuse_unreadable(name: str, part: nn.Module) -> None:
    """Raises UserError for an attention of timm that is not over tokens, or is not fused."""
    if isinstance(part, XCA):
        raise UserError(f"{name} attends over channels, not over tokens: capture cannot read it")
    if getattr(part, "fused_attn", True) is not False or isinstance(part, StudentAttention):
        return
    if isinstance(part, WindowAttention):
        raise UserError(f"{name} sees parts of an image, which capture cannot read")
    raise UserError(f"{name} does not use fused attention: set its fused_attn to True")


def _whole_numbers(name: str, given: Iterable[int] | None) -> list[int] | None:
    """``blocks`` or ``queries`` as a list. Raises UserError for one number and for a mask."""
    if given is None:
        return None
    try:
        numbers = given.tolist() if isinstance(given, Tensor) else [*given]
        if bool in map(type, numbers):
            raise TypeError("a mask")
        return [operator.index(number) for number in numbers]
    except TypeError:
        right = "should be a list of whole numbers, such as [0, -1]"
        raise UserError(f"{name} {given!r:.50}: {right}") from None
