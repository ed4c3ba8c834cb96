"""The base of the student attentions: timm's ``Attention`` taken apart into steps.

Axis letters: B images, H heads, T tokens, d model width, d_m = d / H head width.
"""

from __future__ import annotations

import copy
import difflib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from gaupipe.attention.kernels import at_least_float32, pad_to, perpendicular
from gaupipe.system.errors import UserError

NOTE = "trained_with"
"""Name of the entry of a state_dict that says which attention weights belong to."""
USUAL_MODULES = ("qkv", "q_norm", "k_norm", "norm", "gate", "proj")
"""Modules of timm's ``Attention`` that have parameters."""


class StudentAttention(Attention):
    """Base of the student attentions: project, attend, combine. Arguments and parameters are those
    of timm's ``Attention``, so that its weights load.

    A variant overrides :meth:`combine`, and :meth:`project` if it compares other things than Q and
    K. One that compares nothing sets :attr:`compares` to False and overrides :meth:`attend`. To
    take over trained weights it overrides :meth:`matrices` and :meth:`start_from`.
    """

    compares = True
    """True with trained matrices for queries and keys; otherwise ``v`` takes the place of
    ``qkv``."""

    @property
    def has_map(self) -> bool:
        """True if :meth:`log_map` gives attention maps."""
        return self.compares

    marks_weights = True
    """True for an attention that notes its class in its state_dict, whose other names may be those
    of standard attention: the note tells its weights from published ones."""

    starts_as_standard = False
    """True if the outputs stay the same where weights of standard attention are loaded."""

    conversion_options: dict[str, Any] = {}
    """Options that stand in for the defaults where trained weights are taken over."""

    def __init__(self, dim: int, num_heads: int = 8, **arguments: Any) -> None:
        super().__init__(dim, num_heads, **arguments)
        if not self.compares:
            weight = self.qkv.weight
            bias = self.qkv.bias is not None
            self.v = nn.Linear(dim, self.attn_dim, bias, device=weight.device, dtype=weight.dtype)
            del self.qkv, self.q_norm, self.k_norm

    def linear(self) -> nn.Linear:
        """A further matrix beside ``proj``, as large."""
        width = self.proj.out_features
        weight = self.proj.weight
        return nn.Linear(
            self.proj.in_features, width, bias=False, device=weight.device, dtype=weight.dtype
        )

    @classmethod
    def in_models(cls, options: dict[str, Any]) -> type[nn.Module]:
        """The class that ``gauvit`` models with these options have."""
        return cls

    def matrices(self) -> dict[str, Tensor]:
        """The matrices of the update by what each of them multiplies: "MH", "D" (its part
        perpendicular to V), "D_s" (the same in each head), "MH - D", "MH - D_s" or "V"."""
        return {"MH": self.proj.weight}

    def start_from(self, matrices: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weight of each of this attention's output matrices, by the name of its module, at
        which it changes least of a trained attention with these :meth:`matrices`."""
        return {"proj": matrix_of_mh(matrices)}

    @torch.no_grad()
    def take_over(self, old: Attention) -> None:
        """Starts from a trained attention: shares every module and parameter with ``old`` but the
        output matrices that change. ``old`` does not change."""
        matrices = {"MH": old.proj.weight}
        if isinstance(old, StudentAttention):
            matrices = old.matrices()
        start = self.start_from(matrices)
        for name, module in old.named_children():
            if name == "activation" and not [*module.parameters()]:
                continue  # an option, which may be another now
            if name in start and start[name] is not module.weight:
                module = copy.deepcopy(module)  # its weight changes, and old must not
            if name in self._modules or name == "gate":  # which timm leaves None without one
                setattr(self, name, module)
        for name, parameter in old.named_parameters(recurse=False):
            mine = self._parameters.get(name)
            if mine is not None and mine.shape == parameter.shape:
                setattr(self, name, parameter)
        for name, weight in start.items():
            present = getattr(self, name).weight
            if present is not weight:
                present.data.copy_(weight)
        self.scale = old.scale

    def note(self) -> str:
        """What the state_dict says of this attention: its class."""
        return type(self).__name__

    @property
    def trained_with(self) -> Tensor:
        """:meth:`note` as bytes: torch.distributed.checkpoint looks for what the state_dict has."""
        return torch.tensor([*self.note().encode()], dtype=torch.uint8)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.marks_weights:
            destination[prefix + NOTE] = self.trained_with

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *more: Any, **named: Any
    ) -> None:
        """As torch's, for every way into a model. Weights of standard attention are converted, and
        a warning says so unless the outputs stay. Raises UserError for those of a third attention,
        and where this one has no queries and keys."""
        note = state_dict.pop(prefix + NOTE, None)
        if not self.compares and prefix + "qkv.weight" in state_dict:
            raise UserError(
                f"{type(self).__name__} has no queries and keys that could take over trained "
                "weights: build the model without pretrained=True"
            )
        if note is not None:
            self.check_note(bytes(note.byte().tolist()).decode())  # averaged weights are floats
        elif self.marks_weights and self.of_standard(state_dict, prefix):
            self.load_standard(state_dict, prefix)
            if not self.starts_as_standard:
                warnings.warn(
                    f"weights of standard attention are loaded into {type(self).__name__}, as "
                    "gaupipe.models.convert(model, ...) converts them: the outputs are others now; "
                    "fine-tune the model before you use it",
                    stacklevel=2,
                )
        super()._load_from_state_dict(state_dict, prefix, *more, **named)

    def check_note(self, note: str) -> None:
        """Raises UserError for a ``note`` of another attention."""
        if note != self.note():
            raise UserError(
                f"the weights were trained with {note}, the model has {self.note()}: build it with "
                "the attention of the weights, load them, then gaupipe.models.convert(model, ...)"
            )

    def of_standard(self, state_dict: dict[str, Any], prefix: str) -> bool:
        """Whether weights without a note are those of standard attention: none of this one's
        further parameters is there."""
        mine = {prefix + name for name, _ in self.named_parameters()}
        usual = tuple(f"{prefix}{name}." for name in USUAL_MODULES)
        further = {name for name in mine if not name.startswith(usual)}
        return prefix + "proj.weight" in state_dict and further.isdisjoint(state_dict)

    @torch.no_grad()
    def load_standard(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Makes weights of standard attention those at which this one changes least, within
        ``state_dict``."""
        for name, weight in self.start_from({"MH": state_dict[prefix + "proj.weight"]}).items():
            state_dict[f"{prefix}{name}.weight"] = weight

    def project(self, x: Tensor) -> tuple[Any, Any, Tensor]:
        """Queries, keys and values [B, H, T, d_m] of tokens x [B, T, d]; the first two are None for
        an attention that does not compare them."""
        if not self.compares:
            return None, None, self.values(x)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))  # [B, T, 3, H, d_m]
        q, k, v = qkv.unbind(2)  # before it is transposed: the gradient is put together in place
        return self.q_norm(q.transpose(1, 2)), self.k_norm(k.transpose(1, 2)), v.transpose(1, 2)

    def values(self, x: Tensor) -> Tensor:
        """V [B, H, T, d_m] of tokens x [B, T, d], for an attention with ``v`` alone."""
        return self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """softmax(q k' / sqrt(d_m)) v [B, H, T, d_m] by a fused kernel, for queries and keys at
        least as wide as v. A query without a key gets zeros."""
        dropout = 0.0
        if self.attn_drop.training:
            dropout = self.attn_drop.p
        return fused_attention(q, k, v, attn_mask, dropout, is_causal, self.scale)

    def log_map(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """The attention map that :meth:`attend` uses, as log-probabilities [B, H, T, T], float32.
        A masked key has log-probability -inf, also for a query without any key. Raises UserError
        for an attention without queries and keys."""
        if q is None:
            raise UserError(f"{type(self).__name__} compares no queries with keys: it has no map")
        with torch.autocast(q.device.type, enabled=False):
            scores = (at_least_float32(q) * self.scale) @ at_least_float32(k).mT  # [B, H, T, T]
        if is_causal:
            attn_mask = causal_mask(attn_mask, q.shape[-2], q.device)
        if attn_mask is None:
            return scores.log_softmax(-1)
        if attn_mask.dtype != torch.bool:
            scores = scores + attn_mask
        scores = scores.masked_fill(hidden_by(attn_mask), -torch.inf)
        # of -inf alone log_softmax makes NaN, and so does its gradient
        keyless = (scores == -torch.inf).all(-1, keepdim=True)
        return scores.masked_fill(keyless, 0).log_softmax(-1).masked_fill(keyless, -torch.inf)

    def hidden_keys(self, tokens: int, device: torch.device) -> Tensor | None:
        """The keys that the attention hides from each query, bool [T, T]; None for none."""
        return None

    def merge(self, heads: Tensor, x: Tensor) -> Tensor:
        """MH [B, T, d]: heads [B, H, T, d_m] concatenated, with timm's optional normalisation
        and gate (from x)."""
        mh = self.norm(merge_heads(heads))
        gate = getattr(self, "gate", None)
        if gate is None:
            return mh
        return mh * gate(x).sigmoid()

    def perpendicular(self, mh: Tensor, v: Tensor) -> Tensor:
        """D [B, T, d], the part of MH perpendicular to V, over all heads together."""
        return perpendicular(mh, v)

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        """The update [B, T, d] from MH and V, both [B, T, d] with the heads concatenated; here MH
        W, standard attention's."""
        return self.proj(mh)

    def output(self, heads: Tensor, v: Tensor, x: Tensor) -> Tensor:
        """The update [B, T, d] of tokens x [B, T, d] from the heads' sums and V, [B, H, T, d_m]."""
        return self.proj_drop(self.combine(self.merge(heads, x), merge_heads(v)))

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """The update [B, T, d] that a block adds to its tokens x [B, T, d].

        ``attn_mask``, broadcastable to [B, H, T, T], is boolean (True: may be seen) or added to the
        scores; ``is_causal`` hides the future. Given both, both hold.
        """
        q, k, v = self.project(x)
        return self.output(self.attend(q, k, v, attn_mask, is_causal), v, x)

    def forward_with_map(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`forward`, by the whole map: (update [B, T, d], log-probabilities [B, H, T, T]
        float32, -inf for a masked key)."""
        q, k, v = self.project(x)
        log_map = self.log_map(q, k, attn_mask, is_causal)
        heads = self.attn_drop(log_map.exp()).to(v.dtype) @ v
        return self.output(heads, v, x), log_map


def matrix_of_mh(matrices: dict[str, Tensor]) -> Tensor:
    """The matrix that multiplies MH, or its part perpendicular to V, of
    :meth:`StudentAttention.matrices`; for an ablation without both, its W."""
    factors = [matrices[name] for name in ("MH", "D", "D_s") if name in matrices]
    if not factors:
        return next(iter(matrices.values()))
    return sum(factors[1:], factors[0])  # one alone is the module's own weight, not a copy


def merge_heads(heads: Tensor) -> Tensor:
    """[B, H, T, d_m] to [B, T, H * d_m]."""
    return heads.transpose(1, 2).flatten(2)


@torch.fx.wrap
def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """softmax(scale q k' + mask) v [B, H, T, d_m] by torch's fused kernels, for queries [B, H, T,
    .] and keys [B, H, S, .] at least as wide as v. The mask is boolean or additive, on top of
    ``is_causal``. A query without a key gets zeros.

    Like torch's own functions it can be seen by a ``TorchFunctionMode``, as gaupipe.capture does.
    """
    if has_torch_function((q, k, v)):
        return handle_torch_function(
            fused_attention, (q, k, v), q, k, v, attn_mask, dropout, is_causal, scale
        )
    width = v.shape[-1]
    keyless = None
    if attn_mask is not None and is_causal:  # torch takes one of the two
        attn_mask = causal_mask(attn_mask, q.shape[-2])
        is_causal = False
    if attn_mask is not None:
        # not every kernel defines a query without keys: it reads all of them, and then nothing
        keyless = hidden_by(attn_mask).all(-1, keepdim=True)
        # by a number, because torch.jit.trace fills a float mask with no bool
        attn_mask = attn_mask.masked_fill(keyless, int(attn_mask.dtype == torch.bool))
    plain = attn_mask is None and not is_causal and not dropout and v.dtype.itemsize >= 4
    if plain and v.device.type == "cpu" and width < q.shape[-1] >= k.shape[-2] / 4:
        # a map no larger than q, k, v and heads of that width is faster than padding v
        return (q * (scale or q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(-1) @ v
    heads = F.scaled_dot_product_attention(
        q,
        k,
        pad_to(v, q.shape[-1]),  # some kernels need one width for queries, keys and values
        attn_mask=attn_mask,
        is_causal=is_causal,
        scale=scale,
        dropout_p=dropout,
    )
    if keyless is not None:
        heads = heads.masked_fill(keyless, 0)
    if heads.shape[-1] > width:
        heads = heads[..., :width]
    return heads


def hidden_by(mask: Tensor) -> Tensor:
    """The keys that a mask hides: False in a boolean one; in an additive one numbers up to half
    the lowest of its type, or of float32, which stand for -inf in many programs."""
    if mask.dtype == torch.bool:
        return ~mask
    return mask <= max(torch.finfo(mask.dtype).min, torch.finfo(torch.float32).min) / 2


def causal_mask(
    attn_mask: Tensor | None, tokens: int, device: torch.device | None = None
) -> Tensor:
    """``attn_mask`` (boolean or additive, or None) with the future hidden as well."""
    if attn_mask is not None:
        device = attn_mask.device
    past = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    if attn_mask is None:
        return past
    if attn_mask.dtype == torch.bool:
        return attn_mask & past
    return attn_mask.masked_fill(~past, -torch.inf)


def choice(option: str, value: str, known: Iterable[str]) -> str:
    """``value`` if it is one of ``known``; else raises UserError naming the nearest."""
    if value not in known:
        raise UserError(f"unknown {option} {value!r}{nearest(value, known)}")
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the right one."""
    close = difflib.get_close_matches(str(name), known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    if not known:
        return "; it has none"
    return f"; known: {', '.join(known)}"


def per_head(
    combine: Callable[[Tensor, Tensor], Tensor], mh: Tensor, v: Tensor, heads: int
) -> Tensor:
    """``combine`` of MH and V [B, T, d] head by head: [B, T, d]."""
    mh = mh.unflatten(-1, (heads, -1))  # [B, T, H, d_m]
    v = v.unflatten(-1, (heads, -1))
    return combine(mh, v).flatten(-2)
