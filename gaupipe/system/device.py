"""The device of a process."""

from __future__ import annotations

import torch

from gaupipe.system import distributed
from gaupipe.system.errors import UserError


def select_device(name: str, threads: int | None = None) -> torch.device:
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
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"device: {name!r} cannot be used: {reason}") from None
    return device
