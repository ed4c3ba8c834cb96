"""The section ``model``: the ViT that is trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gaupipe.attention import ATTENTION
from gaupipe.settings.sections import (
    Fraction,
    Keywords,
    ModelName,
    Rate,
    Scope,
    Section,
    Size,
    validate,
)


def _attention_key(name: str) -> str:
    """An attention's key, for a name in any case: papers write Belief2 and AttentionX."""
    key = name.lower()
    if key not in ATTENTION:
        raise ValueError(f"should be one of {', '.join(ATTENTION)}")
    return key


StudentKey = Annotated[str, AfterValidator(_attention_key)]

MODEL_ARGS_ELSEWHERE = {
    **dict.fromkeys(
        ("img_size", "in_chans", "num_classes"), "the data set says it (see data.image_size)"
    ),
    **dict.fromkeys(("attention", "attn_layer"), "see model.attention"),
    **{name: f"see model.{name}" for name in ("attention_options", "match_params")},
    "patch_drop_rate": "see train.patch_drop_rate",
    **dict.fromkeys(("stem", "embed_layer"), "see model.stem"),
    **dict.fromkeys(("device", "dtype"), "see the settings device and precision"),
    **dict.fromkeys(("pretrained", "checkpoint_path"), "name the weights in model.name"),
    **dict.fromkeys(
        ("features_only", "dynamic_img_size", "dynamic_img_pad"),
        "every token needs its place on the grid",
    ),
}
"""Keywords of timm.create_model that are not for ``model.args``, and what to do instead."""


class KnownModelArgs(BaseModel):
    """Sizes, rates and switches of timm's VisionTransformer, which takes other values silently or
    after minutes."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    depth: Annotated[Size, Field(le=1000)] = 1
    num_heads: Annotated[Size, Field(le=1000)] = 1
    embed_dim: Annotated[int, Field(gt=0, le=100_000)] = 1
    patch_size: Size | list[Size] | tuple[Size, ...] = 1
    mlp_ratio: Annotated[float, Field(ge=0, le=1000)] = 1
    drop_rate: Fraction = 0
    pos_drop_rate: Fraction = 0
    proj_drop_rate: Fraction = 0
    attn_drop_rate: Fraction = 0
    drop_path_rate: Fraction = 0
    qkv_bias: bool | None = None
    qk_norm: bool | None = None
    class_token: bool | None = None
    pre_norm: bool | None = None
    fc_norm: bool | None = None
    rezero: bool = False


def usable_model_args(args: dict[str, Any]) -> dict[str, Any]:
    """Keywords for a ViT as they are. Raises ValueError for one that timm could not use here."""
    for name in args.keys() & MODEL_ARGS_ELSEWHERE.keys():
        raise ValueError(f"{name!r} cannot be given here: {MODEL_ARGS_ELSEWHERE[name]}")
    return validate(args, KnownModelArgs)


ModelArgs = Annotated[Keywords, AfterValidator(usable_model_args)]


class ModelSettings(Section):
    """The ViT that is trained: the student with or without distillation, and the teacher that
    phase A trains. ``attention``, ``attention_options``, ``match_params`` and ``student_args``
    concern the student alone, because a teacher has an attention of its own: GauAttention with
    ``phase_a.teacher: gaussian``, standard attention with ``phase_a.teacher: vit``."""

    name: ModelName = "gauvit_pico_patch2_8"
    """Name of the ViT in timm. The ViTs whose names begin with ``gauvit_``, such as
    ``gauvit_pico_patch2_8``, are trained from the start. Any other ViT's name, such as
    ``vit_tiny_patch16_224.augreg_in21k``, or ``local-dir:FOLDER`` means that the student is
    fine-tuned from these weights, with a new head."""
    args: ModelArgs = {}
    """Keywords for timm's VisionTransformer that change the preset, e.g. ``{embed_dim: 96,
    depth: 6}``. ``{rezero: true}`` builds blocks without normalisation, each branch multiplied by
    a learned scalar whose initial value is 0."""
    attention: Annotated[StudentKey, Scope.STUDENT] = "standard"
    """The student's attention. Trained weights that ``model.name`` names keep theirs by default."""
    attention_options: Annotated[Keywords, Scope.STUDENT] = {}
    """Keywords of the student's attention class, e.g. ``{zz: false}`` for belief2."""
    match_params: Annotated[bool, Scope.STUDENT] = False
    """Make the FFN smaller, so that the student has as many parameters as with standard
    attention."""
    student_args: Annotated[ModelArgs, Scope.STUDENT] = {}
    """Keywords in which the student differs from ``model.args``, and so from a teacher that phase A
    trains, e.g. ``{depth: 6}``."""
    stem: Annotated[Literal["patch", "conv", "residual"], Scope.STUDENT] = "patch"
    """What makes tokens of an image. ``patch`` projects each patch by itself. ``conv`` puts 3 x 3
    convolutions of stride 2 in its place, each with batch norm and ReLU, and a 1 x 1 projection
    (arXiv 2106.14881). ``residual`` also has a residual block at each of the two resolutions before
    the tokens; for patches of 2 and 4 pixels it begins at full resolution. With width 64, 4 blocks
    and patches of 4 pixels it has 190,000 parameters where ``conv`` has 162,000, and one training
    took 761 core seconds where ``conv`` took 430. The tokens are as many with every stem, so the
    patch size of ``conv`` and ``residual`` must be a power of two. A ViT that is fine-tuned keeps
    the stem of its weights."""
    init_std: Annotated[Rate | None, Scope.STUDENT] = None
    """Standard deviation of the initialisation of every linear layer; null keeps timm's 0.02."""
    init: Annotated[Literal["normal", "mimetic"], Scope.STUDENT] = "normal"
    """``mimetic`` gives the attention initial weights that look like trained ones (arXiv
    2305.09828). It also makes the position embedding sinusoidal, unless ``pos_embed_std`` is
    set."""
    pos_embed_std: Annotated[Rate | None, Scope.STUDENT] = None
    """Standard deviation of the initialisation of the position embedding; null keeps timm's
    0.02."""
