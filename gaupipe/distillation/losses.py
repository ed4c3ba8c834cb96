"""The losses of phase B (*GauTransformer, eqs 9-11*), and the student's pass that compares
attention maps block by block.

Axis letters: B images, H heads, T tokens on a grid (h, w), Q of them as queries, d_m head
width, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gaupipe.attention.base import StudentAttention
from gaupipe.attention.standard import in_steps
from gaupipe.data.batches import Batch
from gaupipe.data.draws import QUERIES, uniforms
from gaupipe.data.mixing import Mix, mixed_map
from gaupipe.maps.gaussians import Geometry
from gaupipe.maps.stored import Seen, StoredAttention
from gaupipe.maps.views import FAINTEST
from gaupipe.system.errors import UserError
from gaupipe.vit.forward import run_blocks

SMALLEST = torch.finfo(torch.float32).tiny


def soft_loss(logits: Tensor, teacher_probabilities: Tensor, temperature: float = 1.0) -> Tensor:
    """Cross-entropy of the student's logits [B, C] with the teacher's probabilities [B, C] (*eq.
    10*), mean over the batch. With a ``temperature`` the probabilities are those of logits divided
    by it, the student's are divided here, and the loss is multiplied by its square."""
    return F.cross_entropy(logits / temperature, teacher_probabilities) * temperature**2


def feature_loss(
    student_log_map: Tensor,
    teacher_map: Tensor,
    temperature: float = 1.0,
    divergence: str = "teacher_student",
    hidden: Tensor | None = None,
) -> Tensor:
    """How far the student's attention map of one block is from the teacher's (*eq. 9*), mean over
    images, heads and queries.

    student_log_map  [B, H, Q, T] log-probabilities over keys
    teacher_map      [B or 1, H or 1, Q, T] probabilities over keys
    temperature      both maps become softmax(log p / temperature) before they are compared
    divergence       a name in ``DIVERGENCES``
    hidden           keys that the student cannot see, bool broadcastable to [B, H, Q, T]: the
                     teacher's map loses them too and is renormalised
    """
    if hidden is not None:
        teacher_map = without_keys(teacher_map, hidden)
    total = DIVERGENCES[divergence](student_log_map, teacher_map, temperature, hidden)

    # mean over images, heads and queries: all axes but the keys
    return total / student_log_map[..., 0].numel()


def teacher_student(
    student_log_map: Tensor, teacher_map: Tensor, temperature: float, hidden: Tensor | None
) -> Tensor:
    """KL(teacher || student), summed over all rows: the student covers the teacher's map. A key
    that the teacher gives nothing adds nothing."""
    if temperature != 1.0:
        teacher_map = (teacher_map.log() / temperature).softmax(-1)
        student_log_map = (student_log_map / temperature).log_softmax(-1)
    if hidden is not None:
        student_log_map = student_log_map.masked_fill(hidden, 0.0)
    # F.kl_div, whose logarithm of the teacher's map is not vectorised, takes half as long again
    cross_entropies = -(teacher_map * student_log_map).sum(-1)  # [B, H, Q]
    return (cross_entropies - entropy(teacher_map)).sum()


def student_teacher(
    student_log_map: Tensor, teacher_map: Tensor, temperature: float, hidden: Tensor | None
) -> Tensor:
    """KL(student || teacher), summed over all rows: eq. 9, if its T and G are scores. A key that
    the teacher gives less than ``FAINTEST`` counts as that, so a query's attention there costs at
    most 17 nats over the temperature, whatever kind of store, rounding or a view's padding made it
    0."""
    teacher_log_map = teacher_map.clamp_min(FAINTEST).log()
    teacher_log_map = log_softmax_of_visible(teacher_log_map / temperature, hidden)
    student_log_map = log_softmax_of_visible(student_log_map / temperature, hidden)
    return F.kl_div(teacher_log_map, student_log_map, log_target=True, reduction="sum")


def printed(
    student_log_map: Tensor, teacher_map: Tensor, temperature: float, hidden: Tensor | None
) -> Tensor:
    """Eq. 9 as printed, summed over all rows: S log(softmax(S) / softmax(G)) of the student's map S
    and the teacher's G, which are softmaxed already. No divergence: it is negative between G and
    uniform. Its temperature cancels."""
    student_map = student_log_map.exp()
    log_ratio = log_softmax_of_visible(student_map, hidden)
    log_ratio = log_ratio - log_softmax_of_visible(teacher_map, hidden)
    return (student_map * log_ratio).sum()


DIVERGENCES = {
    "teacher_student": teacher_student,
    "student_teacher": student_teacher,
    "printed": printed,
}


def log_softmax_of_visible(scores: Tensor, hidden: Tensor | None) -> Tensor:
    """The log of the softmax over the keys that are not ``hidden``; hidden ones get a 0, so that
    they add nothing to a divergence."""
    if hidden is None:
        return scores.log_softmax(-1)
    return scores.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0)


def without_keys(maps: Tensor, hidden: Tensor) -> Tensor:
    """Attention maps [..., Q, T] without their ``hidden`` keys, summing to 1 again over the keys. A
    query that looks only at hidden keys looks at all the others alike."""
    maps = maps.masked_fill(hidden, 0.0)
    left = maps.sum(-1, keepdim=True)
    maps = torch.where(left == 0, (~hidden).to(maps.dtype), maps)
    return maps / maps.sum(-1, keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)


@dataclass
class TeacherMaps:
    """The stored attention of a batch, made into maps one block at a time.

    stored      the attention of the batch, as a kind of store gives it
    layers      for each block of the student the stored block it is compared with, or None
    grid        (h, w) of the student
    heads       for each head of the student the stored head it is compared with; None is all, and
                "mean" compares every head with the mean over the teacher's heads
    geometry    where the views of the batch lie in the images that the maps are of
    mixed       the images of the batch that were mixed
    queries     int64 [Q]: the student's patches whose rows are compared; None is all
    """

    stored: StoredAttention
    layers: list[int | None]
    grid: tuple[int, int]
    heads: Sequence[int] | Literal["mean"] | None = None
    geometry: Geometry | None = None
    mixed: Mix | None = None
    queries: Tensor | None = None

    def map(self, layer: int) -> Tensor:
        """The rows [B or 1, H or 1, Q, T] float32 of the map for a block of the student; they sum
        to 1."""
        stored = self.layers[layer]
        assert stored is not None  # nobody asks for the map of a block that is not compared
        maps = self.stored.map(stored, self.seen)
        maps = mixed_map(maps, self.mixed, self.grid, self.queries)
        return maps.mean(1, keepdim=True) if self.heads == "mean" else maps

    @property
    def seen(self) -> Seen:
        """What the student sees of each stored block."""
        grid = self.grid if self.grid != tuple(self.stored.grid) else None
        heads = None if self.heads == "mean" else self.heads
        return Seen(heads, self.geometry, grid, self.queries)


@dataclass
class ConstantMaps(TeacherMaps):
    """Maps that are the same for all images and blocks, whatever the batch."""

    def of(self, batch: Batch) -> TeacherMaps:
        """The maps of a batch: these, of any."""
        return self


def drawn_queries(
    count: int | None,
    place: tuple[int, int, int],
    tokens: int,
    device: torch.device | str = "cpu",
) -> Tensor | None:
    """The queries whose rows a batch of training compares: ``count`` of so many ``tokens``, every
    set as likely as any other, int64 [count] in ascending order, on the ``device``; None for all.

    ``place`` is the batch's (seed, epoch, number): one draw for all of its images and all ranks,
    because rows of one place lie together in memory."""
    if count is None or count >= tokens:
        return None
    seed, epoch, number = place
    draws = uniforms(seed, epoch, np.array([number]), tokens, QUERIES)[0]
    return torch.from_numpy(np.sort(draws.argsort()[:count])).to(device, non_blocking=True)


class FeatureLoss:
    """The pass of ``student(images)`` with L_feat: (logits [B, C], the sum over blocks of the
    divergence of their rows from the teacher's).

    Updates come from the fused attention of plain training; beside it the rows that are compared
    are made, a block at a time. Where the attention hides the diagonal, the teacher's rows are
    renormalised without it. Of a student with class and register tokens the rows of patches over
    patches are compared, renormalised.
    Raises UserError for a student without attention maps.
    """

    def __init__(
        self,
        student: VisionTransformer,
        temperature: float = 1.0,
        divergence: str = "teacher_student",
    ) -> None:
        check_has_maps(student)
        blocks: Any = student.blocks  # torch knows their parts as "Tensor | Module"
        self.student = student
        self.temperature = temperature
        self.divergence = divergence
        self.attentions = [in_steps(block.attn) for block in blocks]
        self.prefix = student.num_prefix_tokens
        self.patches: int = student.patch_embed.num_patches

    def __call__(self, images: Tensor, teacher_maps: TeacherMaps) -> tuple[Tensor, Tensor]:
        divergences: dict[int, Tensor] = {}

        def attend(layer: int, attention: Any, tokens: Tensor) -> Tensor:
            if teacher_maps.layers[layer] is None:
                return attention(tokens)
            steps = self.attentions[layer]
            q, k, v = steps.project(tokens)  # [B, H, prefix + T, d_m] each
            divergence = self.of_block(layer, q, k, teacher_maps)
            divergences.setdefault(layer, divergence)  # one that is computed again is not kept
            heads = steps.attend(q, k, v, None, False)
            return steps.output(heads, v, tokens)  # [B, prefix + T, d]

        logits = run_blocks(self.student, images, attend)
        return logits, sum(divergences.values(), logits.new_zeros((), dtype=torch.float32))

    def of_block(self, layer: int, q: Tensor, k: Tensor, teacher_maps: TeacherMaps) -> Tensor:
        """The divergence of one block, from its queries and keys [B, H, prefix + T, d_m]."""
        attention = self.attentions[layer]
        hidden = attention.hidden_keys(self.patches, q.device)  # [T, T]
        patch_q = q[..., self.prefix :, :]
        patch_k = k[..., self.prefix :, :]
        if teacher_maps.queries is not None:
            patch_q = patch_q.index_select(-2, teacher_maps.queries)  # [B, H, Q, d_m]
            hidden = None if hidden is None else hidden[teacher_maps.queries]

        def compare(q: Tensor, k: Tensor) -> Tensor:
            # Softmax over the scores of patches is the whole row's, renormalised over patches. The
            # method of the base, because an attention's own hides the keys of all its queries.
            visible = None if hidden is None else ~hidden
            log_map = StudentAttention.log_map(attention, q, k, visible, False)  # [B, H, Q, T]
            teacher_map = teacher_maps.map(layer)
            return feature_loss(log_map, teacher_map, self.temperature, self.divergence, hidden)

        keys, width = patch_k.shape[-2:]
        if keys <= width:
            return compare(patch_q, patch_k)
        # a row is longer than its query: it is not kept for the gradient, but made again
        return checkpoint(compare, patch_q, patch_k, use_reentrant=False, preserve_rng_state=False)


def check_has_maps(student: VisionTransformer) -> None:
    """Raises UserError for a student whose attention has no maps."""
    first: Any = student.blocks[0]
    if not in_steps(first.attn).has_map:
        raise UserError(
            f"{type(first.attn).__name__} compares no queries with keys, so it has no attention "
            "map to compare with a teacher's: set phase_b.gamma=0"
        )


def entropy(maps: Tensor) -> Tensor:
    """The entropy of each row, from [..., T] to [...]. A key without attention adds nothing.

    torch.special.entr, whose logarithm is not vectorised, takes three times as long."""
    return -maps.clamp_min(SMALLEST).log_().mul_(maps).sum(-1)


def patch_map(rows: Tensor, prefix: int) -> Tensor:
    """The rows of a student's patches over the keys of patches, renormalised: log-probabilities
    [B, H, T, T] of rows [B, H, prefix + T, prefix + T] with class and register tokens in front."""
    return rows[..., prefix:, prefix:].log_softmax(-1) if prefix else rows
