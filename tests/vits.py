"""Small random ViTs, and their attention maps as timm computes them."""

import timm
import torch

TINY = "vit_tiny_patch16_224"


def randomised(model: torch.nn.Module, std: float = 0.3, vectors: bool = False) -> torch.nn.Module:
    """Weights with which attention is far from uniform, and those of norms and biases too with
    ``vectors``."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1 or vectors:
            torch.nn.init.normal_(parameter, std=std)
    return model.eval()


def eager_maps(model: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """The inputs of the dropout after the softmax, which timm's eager attention calls."""
    maps, hooks, fused = [], [], []
    for part in model.modules():
        if hasattr(part, "fused_attn") and hasattr(part, "attn_drop"):
            fused.append(part)
            part.fused_attn = False
            hooks.append(
                part.attn_drop.register_forward_hook(lambda _m, args, _out: maps.append(args[0]))
            )
    with torch.no_grad():
        model(images)
    for part in fused:
        part.fused_attn = True
    for hook in hooks:
        hook.remove()
    return maps


def small(name: str = TINY, size: int = 32, **arguments) -> torch.nn.Module:
    """A timm model of this name with two narrow blocks, random."""
    sizes = {"img_size": size, "num_classes": 5, "depth": 2, "embed_dim": 48, "num_heads": 3}
    return randomised(timm.create_model(name, **{**sizes, **arguments}), std=0.1, vectors=True)


def pico(attention: str = "standard", **options) -> torch.nn.Module:
    """A ViT of ours for grey images, with two blocks of four heads; ``prior`` is standard attention
    with Gaussians."""
    torch.manual_seed(0)
    if attention == "prior":
        attention, options = "standard", {**options, "attention_options": {"prior": True}}
    sizes = dict(depth=2, embed_dim=32, in_chans=1)
    model = timm.create_model("gauvit_pico_patch2_8", attention=attention, **sizes | options)
    for parameter in model.parameters():  # away from a start at which all rows are uniform
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
