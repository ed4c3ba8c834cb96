"""The kinds of attention-map stores: what a teacher puts into a store, and what is read from it.

One class a kind; :mod:`store` knows the arrays of each kind, this module what they mean. Axis
letters: B images, L blocks, H heads, T tokens, P raw numbers of a Gaussian, E embedding width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gaupipe.errors import UserError
from gaupipe.gaussians import RAW_SIZE, expected_map, from_raw
from gaupipe.teacher import Decoder, Teacher

if TYPE_CHECKING:
    import store

Stored = dict[str, np.ndarray]
"""Arrays [B, ...] by name, as ``store.Store.gather`` returns them."""


class GaussianKind:
    """Four numbers a query: Gaussians [B, L, H, T, 4]. The base of the other kinds."""

    name = "gaussian"
    are_maps = False
    """Whether what is read are maps [B, L, H, T, T]; else they are Gaussians, which follow flips
    and crops and fit any grid."""

    def refusal(self, teacher: Teacher, per_image: bool) -> str | None:
        """Why a store of this kind cannot hold what a teacher knows, with or without per-image
        parameters; None if it can."""
        return None

    def arrays(
        self, teacher: Teacher, gaussians: Tensor, parameters: Tensor | None
    ) -> dict[str, Tensor]:
        """What is stored of the Gaussians [B, L, H, T, 4] that come from per-image parameters."""
        return {"gaussians": gaussians}

    def decoder(self, teacher: Teacher) -> dict[str, Tensor]:
        """What is stored once for all images."""
        return {}

    def reader(self, maps: store.Store, device: torch.device) -> Callable[[Stored], Tensor]:
        """What turns arrays that were read into Gaussians [B, L, H, T, 4], or into maps."""
        return lambda stored: torch.from_numpy(stored["gaussians"]).to(device).float()


class DenseKind(GaussianKind):
    """The maps themselves, [B, L, H, T, T]."""

    name = "dense"
    are_maps = True

    def arrays(self, teacher, gaussians, parameters) -> dict[str, Tensor]:
        return {"maps": expected_map(gaussians, teacher.grid)}

    def reader(self, maps, device) -> Callable[[Stored], Tensor]:
        return lambda stored: torch.from_numpy(stored["maps"]).to(device)


class EmbeddingKind(GaussianKind):
    """An embedding an image and block, [B, L, E], and the compression network that decodes it."""

    name = "embedding"

    def refusal(self, teacher, per_image) -> str | None:
        if teacher.decoder is None or not per_image:
            return "this teacher keeps no embeddings (phase_a.compression is null); choose gaussian or dense"
        return None

    def arrays(self, teacher, gaussians, parameters) -> dict[str, Tensor]:
        return {"embeddings": parameters}

    def decoder(self, teacher) -> dict[str, Tensor]:
        return {**teacher.decoder.state_dict(), "prior": teacher.prior.detach()}

    def reader(self, maps, device) -> Callable[[Stored], Tensor]:
        weights, prior = shared_weights(maps, device)  # prior [L, H, T, P]
        with teachers_decoder(maps):
            layers, embedding, hidden = weights["weight1"].shape
            if embedding != maps.schema.embedding_dim:
                raise ValueError(
                    f"weight1 is for embeddings of {embedding} numbers, the store has "
                    f"{maps.schema.embedding_dim}"
                )
            network = Decoder(layers, embedding, hidden, prior[0].numel()).to(device)
            network.load_state_dict(weights)

        @torch.no_grad()
        def decode(stored: Stored) -> Tensor:
            raw = network(torch.from_numpy(stored["embeddings"]).to(device).float())
            raw = raw.view(len(raw), *prior.shape) + prior  # [B, L, H, T, P]
            return from_raw(raw, maps.schema.parametrisation)

        return decode


class PriorKind(GaussianKind):
    """Nothing an image: the Gaussians that all images share, stored once."""

    name = "prior"

    def refusal(self, teacher, per_image) -> str | None:
        if per_image:
            return (
                "this teacher has Gaussians of single images (phase_a.residual is true); choose "
                "gaussian or dense"
            )
        return None

    def arrays(self, teacher, gaussians, parameters) -> dict[str, Tensor]:
        return {}

    def decoder(self, teacher) -> dict[str, Tensor]:
        return {"prior": teacher.prior.detach()}

    def reader(self, maps, device) -> Callable[[Stored], Tensor]:
        _, prior = shared_weights(maps, device)
        shared = from_raw(prior, maps.schema.parametrisation)  # [L, H, T, 4]
        return lambda stored: shared.expand(len(stored["labels"]), *shared.shape)


def shared_weights(maps: store.Store, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """The weights of a store's decoder, and its prior [L, H, T, P]. Raises UserError for a
    decoder that is not a teacher's."""
    schema = maps.schema
    with teachers_decoder(maps):
        weights = {
            name: torch.from_numpy(array).to(device) for name, array in maps.decoder().items()
        }
        prior = weights.pop("prior")
        shape = (schema.layers, schema.heads, schema.tokens, RAW_SIZE[schema.parametrisation])
        if prior.shape != shape:
            raise ValueError(f"prior has the shape {tuple(prior.shape)}, {shape} is right")
    return weights, prior


@contextlib.contextmanager
def teachers_decoder(maps: store.Store) -> Iterator[None]:
    """Turns what a foreign decoder's arrays cause into one line."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError) or type(error).__module__.startswith("store."):
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"{maps.url}: its decoder is not that of a teacher of gaupipe: {reason}"
        ) from None


KINDS: dict[str, GaussianKind] = {
    kind.name: kind for kind in (GaussianKind(), EmbeddingKind(), DenseKind(), PriorKind())
}
