"""What a store holds: its kind, its sizes, and whose maps they are.

Axis letters: N images, L layers, H heads, T tokens on a grid of h x w, C classes, E embedding
width, k kept keys or Gaussians of a query.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NamedTuple

import numpy as np

from store.errors import StoreError

KINDS = ("gaussian", "embedding", "dense", "prior", "topk", "mixture")
WITH_DECODER = ("embedding", "prior")
"""Kinds in which arrays that all images share lie beside theirs."""
WITH_CODES = {"gaussian": "gaussians", "dense": "maps", "topk": "weights"}
"""Kinds that have 8-bit codes, and the array that is coded."""
ENCODINGS = ("float16", "uint8")
NEWER = {"k": None, "views": 1}
"""Fields since format version 3. They are written only where they are not as here, so that stores
without them stay what they were."""
LARGEST = 2**31 - 1
"""The largest size, of images, tokens or anything else, that a store may have."""
MOST_GAUSSIANS = 255
"""Gaussians of a query."""
MOST_KEYED_TOKENS = 2**16 - 1
"""Tokens whose keys fit into 16 bits, one number left for what is missing."""
LARGEST_IMAGE = 2**32
"""Bytes of one image's numbers before compression that anybody is asked to hold in memory."""


class ArraySpec(NamedTuple):
    """One array as a reader sees it: axis 0 is the image id, or the view of an image (see
    `Schema`)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    dimension_names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    """Everything that must be equal for two exports to be the same store.

    `dataset_sha256` and `teacher_sha256` identify the data set and the teacher; `open` compares
    them with what its caller expects. `encoding` is how the numbers are stored: float16, or uint8
    codes (see `store.encoding`). `k` is the number of kept keys a query in a store of kind 'topk',
    of Gaussians a query in one of kind 'mixture', and None in the others. `extra` holds free notes,
    any JSON. Raises StoreError when a field makes no sense.

    `views` augmented views of each image may be stored: axis 0 then has `num_images` = images *
    views entries, and view v of image i is entry i * views + v. Everything else of the store takes
    an entry for an image. With 1 view, the entries are the images themselves.
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
    k: int | None = None
    views: int = 1
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
        if self.encoding == "uint8" and self.kind not in WITH_CODES:
            raise StoreError(
                f"encoding 'uint8' is for the kinds {', '.join(map(repr, WITH_CODES))}; "
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
            "views": self.views,
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
        self._check_k()
        if self.num_images % self.views:
            raise StoreError(
                f"num_images is {self.num_images} in the store's schema; with {self.views} views "
                f"of each image it must be a multiple of {self.views}"
            )
        if self.bytes_per_image > LARGEST_IMAGE:
            raise StoreError(
                f"an image takes {self.bytes_per_image} bytes by the store's schema; "
                f"at most {LARGEST_IMAGE} are possible: check grid, layers, heads and num_classes"
            )

    def _check_k(self) -> None:
        if self.kind not in ("topk", "mixture"):
            if self.k is not None:
                raise StoreError(
                    f"k is {_short(self.k)} in a store of kind {self.kind!r}; "
                    "it is for 'topk' and 'mixture'"
                )
            return
        if self.kind == "topk" and self.tokens > MOST_KEYED_TOKENS:
            raise StoreError(
                f"a map of {self.tokens} tokens cannot be stored as 'topk'; "
                f"at most {MOST_KEYED_TOKENS} are possible"
            )
        most = self.tokens if self.kind == "topk" else MOST_GAUSSIANS
        if type(self.k) is not int or not 1 <= self.k <= most:
            raise StoreError(
                f"k is {_short(self.k)} in a store of kind {self.kind!r}; "
                f"it must be a whole number from 1 to {most}"
            )

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def images(self) -> int:
        """Images whose views are stored: `num_images` / `views`."""
        return self.num_images // self.views

    @property
    def format_version(self) -> int:
        """The first format version that can hold such a store, which is the one it is written
        in; stores of version 2 may be of version 1 too."""
        dense_codes = self.kind == "dense" and self.encoding == "uint8"
        return 3 if self.kind in ("topk", "mixture") or dense_codes or self.views > 1 else 2

    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays `gather` returns, by name, with the whole store's shapes."""
        query = (self.num_images, self.layers, self.heads, self.tokens)
        names = ("image", "layer", "head", "query")
        half = np.dtype("float16")
        k, width = self.k or 0, self.embedding_dim or 0  # 0 where the kind has none

        def of_queries(dtype: np.dtype, **axes: int) -> ArraySpec:
            return ArraySpec((*query, *axes.values()), dtype, (*names, *axes))

        main: dict[str, ArraySpec] = {}  # of a prior: nothing an image
        match self.kind:
            case "gaussian":
                main = {"gaussians": of_queries(half, parameter=4)}
            case "embedding":
                shape = (self.num_images, self.layers, width)
                main = {"embeddings": ArraySpec(shape, half, ("image", "layer", "feature"))}
            case "dense":
                main = {"maps": of_queries(half, key=self.tokens)}
            case "topk":
                key = np.dtype("uint8" if self.tokens <= 255 else "uint16")
                main = {
                    "keys": of_queries(key, rank=k),
                    "weights": of_queries(half, rank=k),
                }
            case "mixture":
                main = {"mixtures": of_queries(half, component=k, parameter=5)}
        return {
            **main,
            "logits": ArraySpec((self.num_images, self.num_classes), half, ("image", "class")),
            "labels": ArraySpec((self.num_images,), np.dtype("int64"), ("image",)),
        }

    def stored_dtype(self, name: str) -> np.dtype:
        """The dtype on disk of array `name`."""
        return np.dtype("uint8") if self.has_codes(name) else self.arrays()[name].dtype

    def has_codes(self, name: str) -> bool:
        """Whether array `name` is stored as 8-bit codes of its numbers."""
        return self.encoding == "uint8" and name == WITH_CODES[self.kind]

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
        attributes = {**dataclasses.asdict(self), "grid": list(self.grid)}
        return {
            name: value
            for name, value in attributes.items()
            if name not in NEWER or value != NEWER[name]
        }

    @classmethod
    def from_attributes(cls, attributes: dict[str, Any]) -> Schema:
        """The inverse of `to_attributes`; further keys are ignored. Raises StoreError when one
        is missing that stores always had."""
        attributes = NEWER | attributes
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in attributes]
        if missing:
            raise StoreError(f"the store's attributes lack {', '.join(missing)}")
        return cls(**{name: attributes[name] for name in names})

    def difference(self, other: Schema) -> str:
        """Where `other` differs, as one line; empty when they are equal."""
        mine, theirs = (NEWER | schema.to_attributes() for schema in (self, other))
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
