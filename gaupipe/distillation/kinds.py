"""The kinds of attention-map stores: what a teacher puts into a store, and what phase B reads.

One class a kind. ``store.KINDS`` has the arrays and encodings of each kind, this module what they
mean. Axis letters: B images, L blocks, H heads, T tokens, P raw numbers of a
Gaussian, E embedding width, K keys of a query.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import store
from gaupipe.maps.gaussians import RAW_SIZE, from_raw
from gaupipe.maps.stored import (
    StoredAttention,
    StoredGaussians,
    StoredRows,
    select_queries,
)
from gaupipe.maps.views import from_top_k, top_k
from gaupipe.system.errors import UserError, one_line
from gaupipe.teachers.gaussian_vit import Decoder

Arrays = dict[str, Tensor]
"""Arrays [B, ...] by name, before they are stored."""
Stored = dict[str, np.ndarray]
"""Arrays [B, ...] by name, as ``store.Store.gather`` returns them."""


class MapKind:
    """A kind of store: what a teacher writes, and how a student reads it."""

    name: str

    needs: str | None = None
    """Of a teacher's ``forms``, what is stored; None is nothing."""
    otherwise: str
    """What to say of a teacher that has no such form."""

    def refusal(self, forms: Collection[str]) -> str | None:
        """The reason why a store of this kind cannot hold what a teacher of these ``forms`` shows;
        None if it can."""
        if self.needs is None or self.needs in forms:
            return None
        if "maps" not in forms:
            return "the teacher shows no attention maps; choose predictions"
        if "gaussians" not in forms:
            return GaussianKind.otherwise
        return self.otherwise

    def arrays(self, attention: Any, k: int | None, dtype: torch.dtype) -> Arrays:
        """The arrays of a batch by name, of its :class:`~gaupipe.teachers.base.ShownMaps`, maps in
        ``dtype``."""
        raise NotImplementedError

    def decoder(self, network: Any) -> dict[str, Tensor]:
        """The tensors of a teacher's ``network`` that are stored once for all images."""
        return {}

    def shared(self, schema: store.Schema, decoder: dict[str, Tensor]) -> Any:
        """What the attention of every batch is made with, of a store's ``decoder``. Raises
        KeyError, RuntimeError or TypeError for the decoder of others."""

    def attention(self, schema: store.Schema, shared: Any, stored: Arrays) -> StoredAttention:
        """The attention of a batch, from what is ``stored`` of it and what all batches have
        :meth:`shared`."""
        raise NotImplementedError


class GaussianKind(MapKind):
    """Four numbers a query: Gaussians [B, L, H, T, 4]. The base of what stands for Gaussians."""

    name = "gaussian"
    needs = "gaussians"
    otherwise = "the teacher has no Gaussians; choose topk or dense"

    def arrays(self, attention: Any, k: int | None, dtype: torch.dtype) -> Arrays:
        return {"gaussians": attention.gaussians}

    def gaussians(self, schema: store.Schema, shared: Any, stored: Arrays) -> Tensor:
        """The Gaussians [B, L, H, T, 4] of a batch."""
        return stored["gaussians"].float()

    def attention(self, schema: store.Schema, shared: Any, stored: Arrays) -> StoredAttention:
        return StoredGaussians(self.gaussians(schema, shared, stored), schema.maps.grid)


class EmbeddingKind(GaussianKind):
    """An embedding an image and block, [B, L, E], and the compression network that decodes it."""

    name = "embedding"
    needs = "embeddings"
    otherwise = (
        "this teacher keeps no embeddings (phase_a.per_image is not embedding); choose gaussian or "
        "dense"
    )

    def arrays(self, attention: Any, k: int | None, dtype: torch.dtype) -> Arrays:
        return {"embeddings": attention.parameters}

    def decoder(self, network: Any) -> dict[str, Tensor]:
        return {**network.decoder.state_dict(), "prior": network.prior.detach()}

    def shared(self, schema: store.Schema, decoder: dict[str, Tensor]) -> tuple[Decoder, Tensor]:
        weights = dict(decoder)
        prior = prior_of(schema, decoder)
        del weights["prior"]
        hidden = weights["bias1"].shape[-1]
        assert schema.embedding_dim is not None
        network = Decoder(schema.maps.layers, schema.embedding_dim, hidden, prior[0].numel())
        network.to(prior.device).load_state_dict(weights)
        return network, prior

    @torch.no_grad()
    def gaussians(self, schema: store.Schema, shared: Any, stored: Arrays) -> Tensor:
        network, prior = shared
        raw = network(stored["embeddings"].float()).unflatten(-1, prior.shape[1:])
        return from_raw(raw + prior, schema.parametrisation)


class PriorKind(GaussianKind):
    """Nothing an image: the Gaussians that all images share, stored once."""

    name = "prior"
    needs = "prior"
    otherwise = (
        "this teacher has Gaussians of single images (phase_a.per_image is not none); choose "
        "gaussian or dense"
    )

    def arrays(self, attention: Any, k: int | None, dtype: torch.dtype) -> Arrays:
        return {}

    def decoder(self, network: Any) -> dict[str, Tensor]:
        return {"prior": network.prior.detach()}

    def shared(self, schema: store.Schema, decoder: dict[str, Tensor]) -> Tensor:
        return from_raw(prior_of(schema, decoder), schema.parametrisation)  # [L, H, T, 4]

    def gaussians(self, schema: store.Schema, shared: Tensor, stored: Arrays) -> Tensor:
        return shared.expand(len(stored["logits"]), *shared.shape)


class DenseKind(MapKind):
    """The maps themselves, [B, L, H, T, T]."""

    name = "dense"
    needs = "maps"

    def arrays(self, attention: Any, k: int | None, dtype: torch.dtype) -> Arrays:
        return {"maps": attention.maps(dtype)}

    def rows(
        self, schema: store.Schema, stored: Arrays, layer: int, tokens: Tensor | None
    ) -> Tensor:
        """The map [B, H, P + T, P + T] of a block, from the arrays of a batch; or of it the rows of
        some ``tokens`` int64 [Q]."""
        rows = select_queries(stored["maps"][:, layer], tokens).float()
        return rows / rows.sum(-1, keepdim=True) if schema.encoding == "uint8" else rows

    def attention(self, schema: store.Schema, shared: Any, stored: Arrays) -> StoredAttention:
        rows = partial(self.rows, schema, stored)
        return StoredRows(rows, schema.maps.grid, schema.prefix_tokens)


class TopKKind(DenseKind):
    """The largest keys of each query with their weights, [B, L, H, T, K] each. What is left of a
    row is spread evenly over the other keys."""

    name = "topk"

    def arrays(self, attention: Any, k: int | None, dtype: torch.dtype) -> Arrays:
        assert k is not None
        blocks = [top_k(block, k) for block in attention.blocks]  # a copy of all would be large
        keys = torch.stack([keys for keys, _ in blocks], dim=1)
        weights = torch.stack([weights for _, weights in blocks], dim=1)
        return {"keys": keys, "weights": weights}

    def rows(
        self, schema: store.Schema, stored: Arrays, layer: int, tokens: Tensor | None
    ) -> Tensor:
        keys = select_queries(stored["keys"][:, layer], tokens).long()
        weights = select_queries(stored["weights"][:, layer], tokens).float()
        return from_top_k(keys, weights, schema.tokens)


class PredictionsKind(MapKind):
    """No maps: the teacher's predictions alone, which every store has."""

    name = "predictions"

    def arrays(self, attention: Any, k: int | None, dtype: torch.dtype) -> Arrays:
        return {}


def to_device(arrays: Stored, device: torch.device) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def prior_of(schema: store.Schema, decoder: dict[str, Tensor]) -> Tensor:
    """The prior [L, H, T, P] of a store's decoder."""
    size = RAW_SIZE[schema.parametrisation]
    _, layers, heads = schema.maps
    return decoder["prior"].expand(layers, heads, schema.tokens, size)


MAP_KINDS: dict[str, MapKind] = {
    kind.name: kind
    for kind in (
        GaussianKind(),
        EmbeddingKind(),
        DenseKind(),
        PriorKind(),
        TopKKind(),
        PredictionsKind(),
    )
}


class StoredAttentionReader:
    """Makes attention of what is read from a store of ``maps``, on a device. Raises UserError for a
    store without maps, and for a decoder that is not a teacher's."""

    def __init__(self, maps: store.Store, device: torch.device) -> None:
        self.schema = schema = maps.schema
        self.device = device
        self.kind = MAP_KINDS[schema.kind]
        if not schema.has_maps:
            raise UserError(
                f"{maps.url}: holds a teacher's predictions and no attention maps: take a store of "
                "another kind, such as one of 'gaupipe export-maps --kind topk'"
            )
        decoder = to_device(maps.decoder(), device)
        try:
            self.shared = self.kind.shared(schema, decoder)
        except (KeyError, RuntimeError, TypeError) as error:
            raise UserError(
                f"{maps.url}: its decoder is not that of a teacher of gaupipe: {one_line(error)}"
            ) from None

    def attention(self, stored: Stored) -> StoredAttention:
        """The attention of a batch, from its arrays."""
        return self.kind.attention(self.schema, self.shared, to_device(stored, self.device))
