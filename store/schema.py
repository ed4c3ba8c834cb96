"""What a store holds: its kind, its sizes, and whose maps they are.

Axis letters: N images, L layers, H heads, T tokens on a grid of h x w, C classes, E embedding
width.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NamedTuple

import numpy as np

from store.errors import StoreError

KINDS = ("gaussian", "embedding", "dense", "prior")
WITH_DECODER = ("embedding", "prior")
"""Kinds in which arrays that all images share lie beside theirs."""
ENCODINGS = ("float16", "uint8")
LARGEST = 2**31 - 1
"""The largest size, of images, tokens or anything else, that a store may have."""
LARGEST_IMAGE = 2**32
"""Bytes of one image's numbers before compression that anybody is asked to hold in memory."""


class ArraySpec(NamedTuple):
    """One array as a reader sees it: axis 0 is the image id."""

    shape: tuple[int, ...]
    dtype: np.dtype
    dimension_names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    """Everything that must be equal for two exports to be the same store.

    `dataset_sha256` and `teacher_sha256` identify the data set and the teacher; `open` compares
    them with what its caller expects. `encoding` is how the Gaussians are stored: float16, or uint8
    codes (see `store.encoding`). `extra` holds free notes, any JSON. Raises StoreError when a field
    makes no sense.
    """

    kind: str
    num_images: int
    grid: tuple[int, int]
    layers: int
    heads: int
    num_classes: int
    dataset: str
    dataset_sha256: str
    teacher_sha256: str
    parametrisation: str = "loc_scale"
    embedding_dim: int | None = None
    encoding: str = "float16"
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name in (
            "kind",
            "encoding",
            "dataset",
            "dataset_sha256",
            "teacher_sha256",
            "parametrisation",
        ):
            if not isinstance(value := getattr(self, name), str):
                raise StoreError(
                    f"{name} is {_short(value)} in the store's schema; it must be text"
                )
        if self.kind not in KINDS:
            raise StoreError(
                f"store kind {self.kind!r} is unknown; choose one of {', '.join(KINDS)}"
            )
        if self.encoding not in ENCODINGS:
            raise StoreError(
                f"encoding {self.encoding!r} is unknown; choose one of {', '.join(ENCODINGS)}"
            )
        if self.encoding == "uint8" and self.kind != "gaussian":
            raise StoreError(
                "encoding 'uint8' is for the kind 'gaussian'; "
                f"a store of kind {self.kind!r} takes 'float16'"
            )
        if (self.kind == "embedding") != (self.embedding_dim is not None):
            raise StoreError(
                f"embedding_dim is {_short(self.embedding_dim)} in a store of kind {self.kind!r}; "
                "it is needed for 'embedding' and None otherwise"
            )
        if not isinstance(self.grid, (tuple, list)) or len(self.grid) != 2:
            raise StoreError(
                f"grid is {_short(self.grid)} in the store's schema; "
                "it must be (height, width) in tokens"
            )
        object.__setattr__(self, "grid", tuple(self.grid))
        self._check_sizes()
        if not isinstance(self.extra, dict):
            raise StoreError(
                f"extra is {_short(self.extra)} in the store's schema; it must be a dict"
            )
        try:
            as_json = json.loads(json.dumps(self.extra, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(
                f"the extra attributes of a store must be plain JSON: {error}"
            ) from None
        object.__setattr__(self, "extra", as_json)

    def _check_sizes(self) -> None:
        sizes = {
            "num_images": self.num_images,
            "layers": self.layers,
            "heads": self.heads,
            "num_classes": self.num_classes,
        }
        if self.embedding_dim is not None:
            sizes["embedding_dim"] = self.embedding_dim
        sizes.update({f"grid[{axis}]": size for axis, size in enumerate(self.grid)})
        for name, size in sizes.items():
            if type(size) is not int or not 1 <= size <= LARGEST:
                raise StoreError(
                    f"{name} is {_short(size)} in the store's schema; "
                    f"it must be a whole number from 1 to {LARGEST}"
                )
        if self.bytes_per_image > LARGEST_IMAGE:
            raise StoreError(
                f"an image takes {self.bytes_per_image} bytes by the store's schema; "
                f"at most {LARGEST_IMAGE} are possible: check grid, layers, heads and num_classes"
            )

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays `gather` returns, by name, with the whole store's shapes."""
        n, layers, h, t = self.num_images, self.layers, self.heads, self.tokens
        half = np.dtype("float16")
        main = {
            "gaussian": (
                "gaussians",
                ArraySpec(
                    (n, layers, h, t, 4), half, ("image", "layer", "head", "query", "parameter")
                ),
            ),
            "embedding": (
                "embeddings",
                ArraySpec((n, layers, self.embedding_dim), half, ("image", "layer", "feature")),
            ),
            "dense": (
                "maps",
                ArraySpec((n, layers, h, t, t), half, ("image", "layer", "head", "query", "key")),
            ),
        }
        own = dict([main[self.kind]] if self.kind in main else [])
        return {
            **own,
            "logits": ArraySpec((n, self.num_classes), half, ("image", "class")),
            "labels": ArraySpec((n,), np.dtype("int64"), ("image",)),
        }

    def stored_dtype(self, name: str) -> np.dtype:
        """The dtype on disk of array `name`."""
        return (
            np.dtype("uint8")
            if name == "gaussians" and self.encoding == "uint8"
            else self.arrays()[name].dtype
        )

    @property
    def bytes_per_image(self) -> int:
        """Bytes of one image's numbers before compression."""
        return sum(
            math.prod(spec.shape[1:]) * self.stored_dtype(name).itemsize
            for name, spec in self.arrays().items()
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole store before compression, without the decoder."""
        return self.num_images * self.bytes_per_image

    def to_attributes(self) -> dict[str, Any]:
        """The schema as JSON: these are the attributes of the store's zarr group."""
        return {**dataclasses.asdict(self), "grid": list(self.grid)}

    @classmethod
    def from_attributes(cls, attributes: dict[str, Any]) -> Schema:
        """The inverse of `to_attributes`; further keys are ignored. Raises StoreError when one
        is missing."""
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in attributes]
        if missing:
            raise StoreError(f"the store's attributes lack {', '.join(missing)}")
        return cls(**{name: attributes[name] for name in names})

    def difference(self, other: Schema) -> str:
        """Where `other` differs, as one line; empty when they are equal."""
        mine, theirs = self.to_attributes(), other.to_attributes()
        return ", ".join(
            f"{name} {mine[name]!r} against {theirs[name]!r}"
            for name in mine
            if mine[name] != theirs[name]
        )


def _short(value: Any) -> str:
    """A value for a message, whatever it is and however long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested too deeply
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."
