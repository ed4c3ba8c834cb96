"""What the student attentions share: timm's ``Attention`` taken apart into steps, and the orthogonal projection.

Axis letters: B images, H heads, T tokens, d model width, d_m = d / H head width.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor

from gaupipe.errors import UserError


class StudentAttention(Attention):
    """Base of the student attentions: project, attend, combine. Arguments and parameters are those of timm's
    ``Attention``, so that its weights load.

    A variant overrides :meth:`combine`, which turns what standard attention would hand to its
    output projection into the update that the block adds to its tokens; if it compares other things
    than Q and K also :meth:`project`. For trained weights to be taken over it says in
    :meth:`matrices` what its output matrices multiply, and in :meth:`start_from` how they start.
    """

    conversion_options: dict = {}
    """Options that stand in for the defaults where trained weights are taken over."""

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
        """Starts from the weights of a trained attention: shares every module that ``old`` has too,
        but for output matrices that do not stay as they are. ``old`` does not change."""
        shared = dict(old.named_children())
        matrices = old.matrices() if isinstance(old, StudentAttention) else {"MH": old.proj.weight}
        start = self.start_from(matrices)
        for name, module in shared.items():
            if name in start and start[name] is not module.weight:
                module = copy.deepcopy(module)
            if name in self._modules or name == "gate":  # which timm leaves None where there is none
                setattr(self, name, module)
        for name, weight in start.items():
            own = getattr(self, name).weight
            if own is not weight:
                own.data.copy_(weight)
        self.scale = old.scale

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, H, T, d_m] of tokens x [B, T, d]."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))        # [B, T, 3, H, d_m]
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        return self.q_norm(q), self.k_norm(k), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """softmax(q k' / sqrt(d_m)) v [B, H, T, d_m] by a fused kernel. A query without a key gets zeros."""
        if attn_mask is not None and is_causal:
            attn_mask, is_causal = causal_mask(attn_mask, q.shape[-2]), False
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=self.scale,
            dropout_p=self.attn_drop.p if self.training else 0.0)

    def log_rows(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """The rows of the map that :meth:`attend` uses, [B, H, T, T] log-probabilities, float32. A masked key has
        log-probability -inf, also in the row of a query without any key."""
        with torch.autocast(q.device.type, enabled=False):
            scores = (at_least_float32(q) * self.scale) @ at_least_float32(k).mT   # [B, H, T, T]
        if is_causal:
            attn_mask = causal_mask(attn_mask, q.shape[-2], q.device)
        return masked_log_softmax(scores, attn_mask)

    def merge(self, heads: Tensor, x: Tensor) -> Tensor:
        """MH [B, T, d]: heads [B, H, T, d_m] concatenated, with timm's optional normalisation and gate (from x)."""
        mh = self.norm(merge_heads(heads))
        gate = getattr(self, "gate", None)
        return mh if gate is None else mh * gate(x).sigmoid()

    def perpendicular(self, mh: Tensor, v: Tensor) -> Tensor:
        """D [B, T, d], the part of MH perpendicular to V; over all heads together unless a variant says otherwise."""
        return perpendicular(mh, v)

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        """The update [B, T, d] from MH and V, both [B, T, d] with the heads concatenated."""
        raise NotImplementedError

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """The update [B, T, d] that a block adds to its tokens x [B, T, d].

        ``attn_mask``, broadcastable to [B, H, T, T], is boolean (True: may be seen) or added to the scores;
        ``is_causal`` hides the future. Given both, both hold.
        """
        q, k, v = self.project(x)
        heads = self.attend(q, k, v, attn_mask, is_causal)
        return self.proj_drop(self.combine(self.merge(heads, x), merge_heads(v)))

    def forward_with_rows(
            self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> tuple[Tensor, Tensor]:
        """As :meth:`forward`, with the attention map in memory: (update [B, T, d], rows [B, H, T, T]), rows being
        log-probabilities in float32, -inf where a key is masked. The update is computed from these rows."""
        q, k, v = self.project(x)
        rows = self.log_rows(q, k, attn_mask, is_causal)
        heads = self.attn_drop(rows.exp()).to(v.dtype) @ v
        return self.proj_drop(self.combine(self.merge(heads, x), merge_heads(v))), rows


def matrix_of_mh(matrices: dict[str, Tensor]) -> Tensor:
    """What MH, or its part perpendicular to V, is multiplied by in :meth:`StudentAttention.matrices`;
    for an ablation that does without both, its W."""
    found = [matrices[name] for name in ("MH", "D", "D_s") if name in matrices]
    return sum(found[1:], found[0]) if found else next(iter(matrices.values()))


def merge_heads(heads: Tensor) -> Tensor:
    """[B, H, T, d_m] to [B, T, H * d_m]; a view for what a fused kernel returns and for Q, K and V."""
    return heads.transpose(1, 2).flatten(2)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def causal_mask(attn_mask: Tensor | None, tokens: int, device: torch.device | None = None) -> Tensor:
    """``attn_mask`` (boolean or additive, or None) with the future hidden as well."""
    if attn_mask is None:
        return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    past = torch.ones(tokens, tokens, dtype=torch.bool, device=attn_mask.device).tril()
    return attn_mask & past if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~past, -torch.inf)


def masked_log_softmax(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Log-softmax of scores [B, H, T, T] over the keys, under a boolean or additive mask. A query without a key has
    a row of -inf, whose exponential is what a fused kernel uses: zeros."""
    if attn_mask is None:
        return scores.log_softmax(-1)
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    else:
        scores = scores + attn_mask
    keyless = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(keyless, 0).log_softmax(-1).masked_fill(keyless, -torch.inf)


def choice(option: str, given: str, known: Iterable[str]) -> str:
    """``given`` if it is one of ``known``; else raises UserError naming the nearest."""
    if given not in known:
        raise UserError(f"unknown {option} {given!r}{nearest(given, known)}")
    return given


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: what would have been right."""
    close = difflib.get_close_matches(str(name), known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else "; it has none"


def per_head(combine: Callable[[Tensor, Tensor], Tensor], mh: Tensor, v: Tensor, heads: int) -> Tensor:
    """``combine`` on each head by itself: MH and V [B, T, d] go in as [B, T, H, d_m], and come back as [B, T, d]."""
    return combine(mh.unflatten(-1, (heads, -1)), v.unflatten(-1, (heads, -1))).flatten(-2)


def perpendicular(m: Tensor, v: Tensor) -> Tensor:
    """The part of m perpendicular to v over the last axis: m - a v, a = <m, v> / <v, v>, and a = 0
    where v = 0 (*BeliefFormer, eqs. 10-12*).

    Shapes [..., d] alike; computed in float32 or wider, returned in the type of m. m and v may have
    any length that the type can hold. Where |v| is below 1e-30 (in float64 1e-270) v gets no
    gradient: it grows with 1 / |v|, and the type could not hold it much longer.

    Has derivatives of any order and works under torch.func's transforms.
    """
    if takes_operations_apart():
        return project_out(m, v)
    return _Perpendicular.apply(m, v)


def takes_operations_apart() -> bool:
    """Whether torch.compile, an export or one of torch.func's transforms is at work: they know
    every plain operation, and have no use for a gradient written by hand."""
    return torch.compiler.is_compiling() or _transforms_active()


_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def project_out(m: Tensor, v: Tensor) -> Tensor:
    """:func:`perpendicular` by operations that can be differentiated any number of times."""
    wide_m, wide_v = at_least_float32(m), at_least_float32(v)
    short = wide_v.detach().abs().amax(-1, keepdim=True) < SHORTEST_WITH_GRADIENT[wide_v.dtype]
    u = torch.where(short, wide_v.detach(), wide_v) * scale_to_unit_length(wide_v)
    squared = torch.linalg.vecdot(u, u).unsqueeze(-1)
    squared = squared.masked_fill(squared == 0, torch.inf)  # a and all its derivatives are 0
    a = torch.linalg.vecdot(wide_m, u).unsqueeze(-1) / squared
    return torch.addcmul(wide_m, a, u, value=-1).to(m.dtype)


LARGEST_SCALE = {torch.float32: 2.0**90, torch.float64: 2.0**700}
"""Brings the shortest v there is to a length that can be squared; 1 / this does so for the longest."""

SHORTEST_WITH_GRADIENT = {torch.float32: 1e-30, torch.float64: 1e-270}


def scale_to_unit_length(v: Tensor) -> Tensor:
    """What to multiply v [..., d] by so that <v, v> neither vanishes nor overflows: [..., 1], a
    constant to autograd. A projection does not depend on it, only its rounding."""
    largest = LARGEST_SCALE[v.dtype]
    length = torch.linalg.vector_norm(v.detach(), dim=-1, keepdim=True)
    return length.reciprocal().clamp(1 / largest, largest)


def bounded(scale: Tensor, squared: Tensor) -> Tensor:
    """``scale``, and 0 where v = u / scale with |u|^2 = ``squared`` is too short for a gradient."""
    limit = SHORTEST_WITH_GRADIENT[scale.dtype]
    return scale.masked_fill(squared < (scale * limit).square(), 0)


class _Perpendicular(torch.autograd.Function):
    """:func:`project_out` with its gradient by hand: half the passes over memory that autograd
    would make.

    With G the gradient of D = m - a u and c = <G, u> / <u, u>: dm = G - c u (the projection is
    self-adjoint) and dv = -scale (a dm + c D).
    """

    @staticmethod
    def forward(ctx, m: Tensor, v: Tensor) -> Tensor:
        wide_m, wide_v = at_least_float32(m), at_least_float32(v)
        scale = scale_to_unit_length(wide_v)
        u = wide_v * scale
        squared = torch.linalg.vector_norm(u, dim=-1, keepdim=True).square()
        squared = squared.clamp_min(torch.finfo(u.dtype).tiny)  # 0 where v is, and so is <m, u>
        a = torch.linalg.vecdot(wide_m, u).unsqueeze(-1) / squared
        d = torch.addcmul(wide_m, a, u, value=-1, out=u).to(m.dtype)
        ctx.save_for_backward(m, v, d, a, squared, scale)
        return d

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        m, v, d, a, squared, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative will be asked for
            return torch.func.vjp(perpendicular, m, v)[1](grad)
        wide_grad, u = at_least_float32(grad), at_least_float32(v) * scale
        c = torch.linalg.vecdot(wide_grad, u).unsqueeze(-1) / squared
        grad_m = torch.addcmul(wide_grad, c, u, value=-1)
        scale = bounded(scale, squared)
        grad_v = (grad_m * (-a * scale)).addcmul_(c * scale, at_least_float32(d), value=-1)
        return grad_m.to(grad.dtype), grad_v.to(v.dtype)
