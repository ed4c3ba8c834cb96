"""The section ``export``: the attention-map store."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gaupipe.settings.sections import Count, Positive, Section


def _known_kind(kind: str) -> str:
    from store.kinds import KINDS  # here, as zarr takes long to import

    if kind not in KINDS:
        raise ValueError(f"should be one of {', '.join(KINDS)}")
    return kind


StoreKind = Annotated[str, AfterValidator(_known_kind)]


class ExportSettings(Section):
    """The attention-map store: what it holds of the maps, and in which format."""

    kind: StoreKind | None = None
    """What is stored for each query: one of the [kinds of a store](store.md#arrays). Null is the
    smallest kind that loses nothing: what a Gaussian teacher learned of an image (``gaussian`` for
    ``per_image: table``, ``embedding``, or ``prior`` for ``none``), ``topk`` for a trained ViT,
    and ``predictions`` for a teacher without attention maps. With ``encoding: uint8`` it is
    ``gaussian`` for each Gaussian teacher. ``predictions`` has no maps: it is for a student with
    ``phase_b.gamma: 0``."""
    encoding: Literal["float16", "uint8"] | None = None
    """``uint8`` stores numbers in 8 bits, in the kinds ``gaussian``, ``topk`` and ``dense``. Null
    is ``uint8`` for ``topk``, and ``float16`` for the other kinds."""
    k: Annotated[int, Field(gt=0, le=255)] | None = None
    """Number of keys that ``topk`` stores for each query. Null is a quarter of the keys, but
    8 to 255."""
    views: Annotated[int, Field(gt=1, le=10_000)] | None = None
    """Number of augmented views of each image whose maps are stored. The views are drawn as
    the section ``augment`` says, and phase B trains on the same views. Null stores the maps of the
    images themselves."""
    grid: tuple[Positive, Positive] | None = None
    """(height, width) in tokens of the stored maps of a trained ViT, at most its own: a map is then
    the mean over the queries and the sum over the keys that a larger token covers. Null is the
    student's grid where that is coarser, else the teacher's."""
    layers: Annotated[list[Count], Field(min_length=1)] | None = None
    """Blocks of a trained ViT whose maps are stored, counted from 0, such as those that phase B
    compares: ``[0, 4, 7, 11]``. Null stores the maps of the blocks that phase B compares, or with
    ``phase_b.layer_map`` all."""
    features: bool = False
    """Store the teacher's pooled features too, 2 bytes for each channel, so that another probe,
    or another number of labels, needs no second pass over the images."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Precision in which a trained ViT computes its maps and predictions; attention itself stays
    float32. Null is decided as ``precision: auto`` is."""
