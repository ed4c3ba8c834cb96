"""The device of a process."""

from __future__ import annotations

import torch

from gaupipe.system import distributed
from gaupipe.system.errors import UserError

WIDE = 192
"""From this width on bfloat16 saves more time in matrix products than its casts cost. A step of a
training in bfloat16 takes these shares of one in float32, on processors with AVX512-BF16 and with
AMX: width 64 1.5 and 1.6, 128 0.90 and 1.5, 192 0.72 and 0.79, 384 0.90 with AMX; a forward pass of
width 192 0.45 (benchmarks/precision.py)."""


def choose_precision(asked: str, device: torch.device, width: int) -> str:
    """The precision that is ``asked`` for; of ``auto`` bfloat16 for a ViT of a ``width`` that gains
    by it, on a processor or GPU that multiplies such numbers, else float32."""
    if asked != "auto":
        return asked
    if device.type == "cuda":
        multiplies = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        known = torch.cpu.get_capabilities()
        multiplies = known.get("avx512_bf16") or known.get("amx_bf16")
    else:
        multiplies = False
    return "bfloat16" if multiplies and width >= WIDE else "float32"


def prepare_device(name: str, threads: int | None = None) -> torch.device:
    """The device of this ``name``; ``auto`` is a GPU where there is one, and each rank of a machine
    has a GPU of its own. Sets the number of torch's processor ``threads``, if one is given.

    Raises UserError for a device that cannot be used.
    """
    if threads:
        torch.set_num_threads(threads)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if distributed.world_size() > 1 and name.startswith("cuda"):
        if name != "cuda":
            raise UserError(f"device: {name!r} is one GPU for all: cuda gives each process its own")
        name = f"cuda:{distributed.launch().local_rank}"
    try:
        device = torch.device(name)
        torch.ones(1, device=device).add_(1).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        why = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise UserError(f"device: {name!r} cannot be used: {why}") from None
    return device
