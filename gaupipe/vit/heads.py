"""What a ViT's head reads and says, and what its other tokens are."""

from __future__ import annotations

from typing import Any

from timm.data import infer_imagenet_subset
from timm.models import get_pretrained_cfg
from torch import Tensor

from gaupipe.system.errors import UserError


def names_of_tokens(model: Any) -> list[str]:
    """Names of the tokens of a timm ViT that come before the patches, in order."""
    names = []
    for name, attribute in (("class", "cls_token"), ("distillation", "dist_token")):
        if getattr(model, attribute, None) is not None:
            names.append(name)
    registers = getattr(model, "num_prefix_tokens", 0) - len(names)
    return [*names, *(f"register {number}" for number in range(1, registers + 1))]


def reads_class_token(model: Any) -> bool:
    """Whether the head of a timm ViT reads the class token; others average or pool the patches."""
    return getattr(model, "global_pool", None) == "token" and "class" in names_of_tokens(model)


def length_of_features(model: Any, tokens: Tensor) -> Tensor:
    """Half the squared length of the features that the head of a timm ViT would read if tokens
    [B, P + T, d] of a block were the last block's; the sum over images."""
    return model.forward_head(model.norm(tokens), pre_logits=True).square().sum() / 2


def probabilities(logits: Tensor) -> Tensor:
    """softmax of logits [..., C], float32. Raises UserError for logits that are no numbers, which
    would be sorted somehow, and which JSON has no word for."""
    shares = logits.float().softmax(-1)
    if shares.isnan().any():
        raise UserError(
            "the model's outputs are not all numbers (NaN): its weights may be damaged, or its "
            "mean and std are not those of its images"
        )
    return shares


def classifies(model: Any) -> bool:
    """Whether the head of a timm ViT predicts classes. That of CLIP's published image towers
    projects to the space in which texts lie too, and one of as many outputs is taken for it."""
    count = getattr(model, "num_classes", 0)
    config = getattr(model, "pretrained_cfg", None) or {}
    name = f"{config.get('architecture')}.{config.get('tag')}"
    if not ("clip" in name or name.startswith("vit_pe_core")):
        return bool(count)
    published = get_pretrained_cfg(name, allow_unregistered=True)
    is_projection = published is not None and count == published.num_classes
    return not is_projection or infer_imagenet_subset({"num_classes": count}) is not None
