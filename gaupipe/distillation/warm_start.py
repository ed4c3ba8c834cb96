"""A student that starts from the teacher's weights."""

from __future__ import annotations

import re
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from gaupipe.attention.gaussian import GaussianAttention
from gaupipe.attention.standard import in_steps
from gaupipe.system.errors import UserError
from gaupipe.vit.slicing import slice_weights, with_blocks
from gaupipe.vit.stem import ConvPatchEmbed

MAY_LACK = re.compile(
    r"^(cls_token|reg_token|dist_token|head|attn_pool)|\.attn\.(prior|predictor|trained_with)$"
)
"""Parameters of a teacher that a student may lack: of tokens that are no patches, of what
classifies, of Gaussians, and the note of another attention."""


def start_from_teacher(
    student: VisionTransformer,
    how: str,
    weights: dict[str, Tensor],
    heads: int,
    grid: tuple[int, int],
    spread: Tensor | None = None,
) -> None:
    """Starts a student as ``phase_b.warm_start``, which is not none, says ``how``: from the
    ``weights`` (state_dict) of a teacher's ViT with so many heads and patches (h, w). A slice has
    the principal components of a residual stream with this ``spread``. Raises UserError for a
    student that these weights do not fit."""
    first: Any = student.blocks[0]  # timm says Module
    if how != "slice" and first.attn.num_heads != heads:  # which no shape of a matrix tells
        raise UserError(
            f"phase_b.warm_start={how}: the student has {first.attn.num_heads} heads, the teacher "
            f"{heads}: give it as many, or take phase_b.warm_start=none"
        )
    if how == "exact":
        hand_over(student, weights)
    elif how == "slice":
        setting = "phase_b.warm_start=slice"
        sliced = slice_weights(weights, heads, grid, student, setting, spread)
        copy(sliced, student)
        refuse_lacking(student, sliced, setting)
    else:
        warm_start(student, weights)


def warm_start(student: VisionTransformer, teacher: dict[str, Tensor]) -> None:
    """Copies all that a teacher's ViT (its state_dict) has, but for :data:`MAY_LACK`. Raises
    UserError as :func:`copy`, and for a student that lacks a part, such as LayerScale, without
    which the other weights compute something else."""
    copy(teacher, student)
    refuse_lacking(student, teacher, "phase_b.warm_start")


def refuse_slice(student: VisionTransformer, teacher: dict[str, Tensor], setting: str) -> None:
    """:func:`refuse_lacking` for a slice of the teacher's weights, which has LayerScale in the
    matrices; before it is cut, so weights on the meta device do."""
    scales = (".ls1.gamma", ".ls2.gamma")
    parts = with_blocks(teacher, list(range(len(student.blocks))))
    sliced = {name: tensor for name, tensor in parts.items() if not name.endswith(scales)}
    refuse_lacking(student, sliced, setting)


def refuse_lacking(student: VisionTransformer, teacher: dict[str, Tensor], setting: str) -> None:
    """Raises UserError, naming the ``setting``, for a student that lacks a part of the teacher's
    weights, but for :data:`MAY_LACK`."""
    parts = parts_in_common(student)
    names = [name for name in with_norm_of(parts, teacher) if name not in parts]
    lacking = [name for name in names if not MAY_LACK.search(name)]
    if isinstance(student.patch_embed, ConvPatchEmbed):  # which makes its tokens otherwise
        lacking = [name for name in lacking if not name.startswith("patch_embed.")]
    if lacking:
        raise UserError(
            f"{setting}: the teacher has {lacking[0]}, which the student lacks: give the "
            "student the same, or set another phase_b.warm_start"
        )


@torch.no_grad()
def copy(teacher: dict[str, Tensor], student: VisionTransformer) -> None:
    """Copies the parameters that a teacher's ViT (its state_dict) and the student have in common.
    Q and K keep their start if the teacher has Gaussian attention.

    The output projection goes through the attention's ``start_from``. Position embeddings of class
    and register tokens are copied where there are as many. Raises UserError for a student of
    another size.
    """
    parts = parts_in_common(student)
    teacher = with_norm_of(parts, teacher)
    if student.pos_embed is not None and "pos_embed" in teacher:
        if teacher["pos_embed"].shape == student.pos_embed.shape:
            parts["pos_embed"] = student.pos_embed
        teacher = {**teacher, "pos_embed": positions_like(parts["pos_embed"], teacher)}
    values = (".attn.v.weight", ".attn.qkv.weight")  # one of which every student has
    differs = []
    for name, tensor in teacher.items():
        fits = not name.endswith(values)
        if name in parts:
            fits = parts[name].shape == tensor.shape
        if not fits:
            differs.append(name)
    projections = [f"blocks.{layer}.attn.proj.weight" for layer in range(len(student.blocks))]
    differs += [name for name in projections if name not in teacher]
    if any(name.endswith(".attn.qkv.weight") for name in teacher) and any(
        isinstance(block.attn, GaussianAttention) for block in student.blocks
    ):
        raise UserError(
            "phase_b.warm_start: the student gaussian starts from a teacher with Gaussians, and a "
            "trained ViT has none: take phase_b.warm_start=none, or phase_a.teacher=gaussian"
        )
    if differs:
        raise UserError(
            f"phase_b.warm_start: the student differs from the teacher in size ({differs[0]}): "
            "take model.student_args out, or set warm_start to slice or none"
        )
    for name in parts.keys() & teacher.keys():
        parts[name].copy_(teacher[name])
    block: Any  # timm says Module
    for layer, block in enumerate(student.blocks):
        trained = {"MH": teacher[f"blocks.{layer}.attn.proj.weight"]}
        for name, weight in in_steps(block.attn).start_from(trained).items():
            getattr(block.attn, name).weight.copy_(weight)


def positions_like(mine: Tensor, teacher: dict[str, Tensor]) -> Tensor:
    """The teacher's position embedding, without that of its tokens that are no patches where it
    has as many more than ``mine``."""
    positions = teacher["pos_embed"]
    names = ("cls_token", "dist_token", "reg_token")
    others = sum(teacher[name].shape[1] for name in names if name in teacher)
    if 0 < positions.shape[1] - mine.shape[1] <= others:
        return positions[:, -mine.shape[1] :]
    return positions


def with_norm_of(parts: dict[str, Tensor], teacher: dict[str, Tensor]) -> dict[str, Tensor]:
    """The teacher's weights, its last LayerNorm called as the student's is: timm's ViTs have it as
    ``norm`` before tokens are pooled or as ``fc_norm`` behind, and both scale the same channels."""
    for mine, other in (("fc_norm", "norm"), ("norm", "fc_norm")):
        if f"{mine}.weight" in parts and f"{mine}.weight" not in teacher:
            return {
                re.sub(rf"^{other}\.", f"{mine}.", name): tensor for name, tensor in teacher.items()
            }
    return teacher


@torch.no_grad()
def hand_over(student: VisionTransformer, teacher: dict[str, Tensor]) -> None:
    """Makes a student with log P of a prior in its scores equal to a teacher with the shared prior
    alone: :func:`warm_start` and Q = 0. K keeps its start, so that Q has a gradient. Raises
    UserError for a student that has more than its teacher and Q and K.
    """
    warm_start(student, teacher)
    teacher = with_norm_of(parts_in_common(student), teacher)
    extra = [name for name, _ in student.named_parameters() if name not in teacher]
    block: Any  # timm says Module
    for layer, block in enumerate(student.blocks):
        attention = block.attn
        queries = [p[: attention.attn_dim] for p in attention.qkv.parameters()]
        if not isinstance(attention.q_norm, nn.Identity):
            queries += [p for name, p in attention.q_norm.named_parameters() if name == "bias"]
        for part in queries:
            part.zero_()
        parts = tuple(f"blocks.{layer}.attn.{name}." for name in ("qkv", "q_norm", "k_norm"))
        extra = [name for name in extra if not name.startswith(parts)]
    if extra:
        raise UserError(
            f"phase_b.warm_start=exact: the student has {extra[0]}, and its teacher has none: take "
            "what adds it out of model.args, or take phase_b.warm_start=teacher"
        )


def parts_in_common(student: VisionTransformer) -> dict[str, Tensor]:
    """The student's parameters by the names that they have in a teacher: of Q, K and V also the
    last alone, of the position embedding what belongs to patches."""
    parts: dict[str, Tensor] = dict(student.named_parameters())
    statistics = student.patch_embed.named_buffers(prefix="patch_embed")  # of batch norm
    parts |= dict(statistics)
    for name in [name for name in parts if ".attn.qkv." in name]:
        parts[name.replace(".attn.qkv.", ".attn.v.")] = parts[name].chunk(3)[2]
    if "pos_embed" in parts:
        parts["pos_embed"] = parts["pos_embed"][:, -student.patch_embed.num_patches :]
    return parts
