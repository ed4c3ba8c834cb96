"""The contents of a store: its kind, its sizes, and whose maps they are.

Axis letters: N images, L layers, H heads, T tokens on a grid of h x w, C classes, E embedding
width, k kept keys of a query, D width of a teacher's features.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
from typing import Any

import numpy as np

from store.encoding import BadNumbers, Labels, Names, Numbers
from store.errors import StoreError
from store.kinds import KINDS, ArraySizes, ArraySpec, Kind

ENCODINGS = ("float16", "uint8")
LARGEST = 2**31 - 1
"""The largest size, of images, tokens or anything else, that a store may have."""
TEXTS = ("kind", "encoding", "dataset", "dataset_sha256", "teacher_sha256", "parametrisation")
SIZES = ("num_images", "num_classes", "views")
SIZES_OF_MAPS = ("layers", "heads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema(ArraySizes):
    """Everything that must be equal for two exports to be the same store.

    `dataset_sha256` and `teacher_sha256` identify the data set and the teacher; `open` compares
    them with what its caller expects. `encoding` is how the numbers are stored: float16, or uint8
    codes (see `store.encoding`). `k` is the number of kept keys a query in a store of kind 'topk',
    and None in the others. `extra` holds free notes, any JSON. Raises StoreError when a field makes
    no sense.

    `grid`, `layers` and `heads` are those of the maps, and None in a store of kind 'predictions',
    which has no maps. `features_dim` numbers of an image are what the teacher makes its predictions
    from: another probe, or one for other classes, can be fitted to them without the teacher. None
    is a store without them. An image of a store that is not `labelled` has no label. `name_bytes`
    are those of the longest name of an image in UTF-8, None in a store without names.

    `prefix_tokens` class and register tokens come before the grid's in the rows and columns of the
    kinds 'dense' and 'topk'.

    `views` augmented views of each image may be stored: axis 0 then has `num_images` = images *
    views entries, and view v of image i is entry i * views + v. Everything else of the store takes
    an entry for an image. With 1 view, the entries are the images themselves.
    """

    kind: str
    num_classes: int
    dataset: str
    dataset_sha256: str
    teacher_sha256: str
    parametrisation: str = "loc_scale"
    views: int = 1
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in TEXTS:
            self._check(name, isinstance(getattr(self, name), str), "it must be text")
        for name, choices in (("kind", KINDS), ("encoding", ENCODINGS)):
            value = getattr(self, name)
            self._check(name, value in choices, f"choose one of {', '.join(choices)}")
        self._check("labelled", type(self.labelled) is bool, "it must be true or false")
        self._check_sizes()
        self._check("extra", isinstance(self.extra, dict), "it must be a dict")
        try:
            as_json = json.loads(json.dumps(self.extra, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(f"a store's extra attributes must be plain JSON: {error}") from None
        object.__setattr__(self, "extra", as_json)

    def _check(self, name: str, sound: bool, right: str, *value: Any) -> None:
        if not sound:
            text = reprlib.repr(*value or [getattr(self, name)])
            raise StoreError(f"{name} is {text} in the store's schema; {right}")

    def _check_sizes(self) -> None:
        sizes = {name: getattr(self, name) for name in SIZES}
        if self.has_maps:
            grid: Any = self.grid
            pair = isinstance(grid, (tuple, list)) and len(grid) == 2
            self._check("grid", pair, "it must be (height, width) in tokens")
            object.__setattr__(self, "grid", tuple(grid))
            sizes |= {name: getattr(self, name) for name in SIZES_OF_MAPS}
            sizes |= {f"grid[{axis}]": size for axis, size in enumerate(grid)}
        else:
            right = f"it must be None in the kind {self.kind!r}, which has no maps"
            for name in ("grid", *SIZES_OF_MAPS):
                self._check(name, getattr(self, name) is None, right)
        for name in ("embedding_dim", "features_dim", "name_bytes"):
            if getattr(self, name) is not None:
                sizes[name] = getattr(self, name)
        for name, size in sizes.items():
            sound = type(size) is int and 1 <= size <= LARGEST
            self._check(name, sound, f"it must be a whole number from 1 to {LARGEST}", size)
        fits = (self.kind == "embedding") == (self.embedding_dim is not None)
        self._check("embedding_dim", fits, "it is for the kind 'embedding', which needs it")
        prefix = self.prefix_tokens
        most = LARGEST if self.store_kind.has_prefix else 0
        sound = type(prefix) is int and 0 <= prefix <= most
        self._check("prefix_tokens", sound, "it is for the kinds 'dense' and 'topk', 0 or more")
        refused_k = self.store_kind.refused_k(self)
        self._check("k", refused_k is None, f"in the kind {self.kind!r} {refused_k}")
        multiple = self.num_images % self.views == 0
        self._check("num_images", multiple, f"it must be a multiple of the {self.views} views")
        if self.encoding == "uint8" and not any(map(self.has_codes, self.arrays)):
            raise StoreError(f"a store of kind {self.kind!r} takes the encoding 'float16' alone")

    @property
    def store_kind(self) -> Kind:
        return KINDS[self.kind]

    @property
    def has_maps(self) -> bool:
        """False for a store of predictions alone."""
        return self.store_kind.has_maps

    @property
    def images(self) -> int:
        """Images whose views are stored: `num_images` / `views`."""
        return self.num_images // self.views

    @functools.cached_property
    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays `gather` returns, by name, with the whole store's shapes."""
        numbers = Numbers()
        labels = Labels(self.num_classes)
        n = self.num_images
        arrays = dict(self.store_kind.arrays(self))
        if self.features_dim is not None:
            shape = (n, self.features_dim)
            arrays["features"] = ArraySpec(shape, numbers.dtype, ("image", "channel"), numbers)
        shape = (n, self.num_classes)
        arrays["logits"] = ArraySpec(shape, numbers.dtype, ("image", "class"), numbers)
        if self.labelled:
            arrays["labels"] = ArraySpec((n,), labels.dtype, ("image",), labels)
        if self.name_bytes is not None:
            names = Names()
            shape = (n, self.name_bytes)
            arrays["names"] = ArraySpec(shape, names.dtype, ("image", "byte"), names)
        return arrays

    def has_codes(self, name: str) -> bool:
        """True for an array that is stored as 8-bit codes of its numbers."""
        return self.encoding == "uint8" and bool(self.arrays[name].numbers.codes)

    def stored_dtype(self, name: str) -> np.dtype:
        """The dtype on disk of array `name`."""
        if self.has_codes(name):
            return np.dtype("uint8")
        return self.arrays[name].dtype

    def fill_value(self, name: str) -> float:
        """The number on disk where nothing was written to array `name`."""
        if self.has_codes(name):
            return 0
        return self.arrays[name].numbers.fill

    def encode(self, name: str, values: np.ndarray, first_image: int) -> np.ndarray:
        """The stored form of `values` [n, ...] of the images from `first_image` on. Raises
        StoreError, with the image id, for numbers that make no sense in this array."""
        try:
            return self.arrays[name].numbers.encode(values, self.has_codes(name))
        except BadNumbers as bad:
            image, what = bad.args
            raise StoreError(f"image {first_image + image}: {name} {what}") from None

    def decode(self, name: str, stored: np.ndarray) -> np.ndarray:
        """The numbers a reader gets."""
        if not self.has_codes(name):
            return stored
        return self.arrays[name].numbers.decode(stored)

    @property
    def bytes_per_image(self) -> int:
        """Bytes of one image's numbers before compression."""
        return sum(
            math.prod(spec.shape[1:]) * self.stored_dtype(name).itemsize
            for name, spec in self.arrays.items()
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole store before compression, without the decoder."""
        return self.num_images * self.bytes_per_image

    def to_attributes(self) -> dict[str, object]:
        """The schema as JSON: these are the attributes of the store's zarr group."""
        attributes = dataclasses.asdict(self)
        if self.grid is not None:
            attributes["grid"] = list(self.grid)
        return attributes

    @classmethod
    def from_attributes(cls, attributes: dict[str, Any]) -> Schema:
        """The inverse of `to_attributes`; further keys are ignored. Raises StoreError when one is
        missing."""
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in attributes]
        if missing:
            raise StoreError(f"the store's attributes lack {', '.join(missing)}")
        return cls(**{name: attributes[name] for name in names})

    def difference(self, other: Schema) -> str:
        """The fields and notes in which `other` differs, as one line; empty when they are equal.
        The data set's name is left out: its digest says which images these are."""
        ours, theirs = (
            one.to_attributes() | {f"extra.{name}": note for name, note in one.extra.items()}
            for one in (self, other)
        )
        for name in ("extra", "dataset"):
            del ours[name], theirs[name]
        return ", ".join(
            f"{name} {ours.get(name)!r} against {theirs.get(name)!r}"
            for name in ours | theirs
            if ours.get(name) != theirs.get(name)
        )
