"""What a student makes of the arrays that a store holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import store
import torch
from torch import Tensor

from gaupipe.gaussians import from_raw
from gaupipe.teacher import Decoder


def gaussians_reader(maps: store.Store, device: torch.device) -> Callable[[dict[str, np.ndarray]], Tensor]:
    """What turns gathered rows of a store, of any kind but ``dense``, into Gaussians [B, L, H, T, 4] on ``device``."""
    if maps.schema.kind == "gaussian":
        return lambda stored: torch.from_numpy(stored["gaussians"]).to(device).float()
    weights = {name: torch.from_numpy(array).to(device) for name, array in maps.decoder().items()}
    prior = weights.pop("prior")
    if maps.schema.kind == "prior":
        shared = from_raw(prior, maps.schema.parametrisation)
        return lambda stored: shared.expand(len(stored["labels"]), *shared.shape)
    layers, embedding, hidden = weights["weight1"].shape
    network = Decoder(layers, embedding, hidden, prior[0].numel()).to(device)
    network.load_state_dict(weights)

    @torch.no_grad()
    def decode(stored: dict[str, np.ndarray]) -> Tensor:
        raw = network(torch.from_numpy(stored["embeddings"]).to(device).float())
        return from_raw(raw.view(len(raw), *prior.shape) + prior, maps.schema.parametrisation)

    return decode
