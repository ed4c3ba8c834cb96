"""Reading a store by image id, in any order, at training speed."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorstore as ts

from store.schema import CorruptChunk, Schema, StoreError
from store.urls import first_line, open_kvstore, read


def open(url: str, *, dataset_sha256: str | None = None, teacher_sha256: str | None = None,  # noqa: A001
         allow_incomplete: bool = False) -> Store:
    """Opens a store at a path or URL.

    Raises StoreError, in one line, if there is none, if it is incomplete (unless ``allow_incomplete``), or if it
    belongs to another data set or teacher than the digests given.
    """
    kv = open_kvstore(url)
    contents = read(kv, "zarr.json", url)
    if contents is None:
        raise StoreError(f"{url}: no attention-map store there; 'gaupipe export-maps' writes one")
    try:
        attributes = json.loads(contents).get("attributes", {})
    except ValueError:
        raise StoreError(f"{url}: zarr.json is damaged") from None
    schema = Schema.from_attributes(attributes, url)
    complete = attributes.get("complete") is True
    if not complete and not allow_incomplete:
        raise StoreError(f"{url}: the store is incomplete; run 'gaupipe export-maps' again to finish it")
    for what, asked, stored in (("data set", dataset_sha256, schema.dataset_sha256),
                                ("teacher", teacher_sha256, schema.teacher_sha256)):
        if asked is not None and asked != stored:
            raise StoreError(f"{url}: the store belongs to another {what} (sha256 {stored[:12]}, asked {asked[:12]}): "
                             "export the maps of this run")
    return Store(url, kv, schema, complete)


class Store:
    """A store that :func:`open` found. tensorstore runs threads: do not fork after opening one."""

    def __init__(self, url: str, kv: ts.KvStore, schema: Schema, complete: bool) -> None:
        self.url, self.schema, self.complete = url, schema, complete
        self._kv = kv
        self._arrays: dict[str, ts.TensorStore] = {}

    def gather(self, image_ids: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """{name: array} with the rows of ``image_ids`` in the order asked, duplicates included.

        Raises StoreError for an id that is out of range and CorruptChunk for one whose data cannot be read back.
        """
        return self._collect(*self._request(image_ids))

    def prefetch(self, batches: Iterable[Sequence[int] | np.ndarray], depth: int = 2) -> Iterator[dict[str, np.ndarray]]:
        """:meth:`gather` for each batch of image ids, read while the ``depth`` batches before it are in use."""
        requests: deque = deque()
        for image_ids in batches:
            requests.append(self._request(image_ids))
            if len(requests) > depth:
                yield self._collect(*requests.popleft())
        while requests:
            yield self._collect(*requests.popleft())

    def size_on_disk(self) -> int:
        """Bytes of all files of the store."""
        return sum(len(self._kv.read(key).result().value) for key in self._kv.list().result())

    def _array(self, name: str) -> ts.TensorStore:
        if name not in self._arrays:
            try:
                self._arrays[name] = ts.open({"driver": "zarr3", "kvstore": self._kv.spec().to_json(), "path": name},
                                             read=True).result()
            except (ValueError, OSError) as error:
                raise StoreError(f"{self.url}: array {name} cannot be opened: {first_line(error)}") from None
        return self._arrays[name]

    def _request(self, image_ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, dict[str, ts.Future]]:
        ids = np.asarray(image_ids, dtype=np.int64)
        outside = (ids < 0) | (ids >= self.schema.num_images)
        if outside.any():
            raise StoreError(f"{self.url}: image id {ids[outside][0]} is outside 0 to {self.schema.num_images - 1}")
        return ids, {name: self._array(name)[ids].read() for name in self.schema.arrays()}

    def _collect(self, ids: np.ndarray, futures: dict[str, ts.Future]) -> dict[str, np.ndarray]:
        arrays = {}
        for name, future in futures.items():
            try:
                arrays[name] = future.result()
            except (ValueError, OSError) as error:
                raise self._corrupt(name, ids, error) from None
        return arrays

    def _corrupt(self, name: str, ids: np.ndarray, error: Exception) -> CorruptChunk:
        damaged = []
        for image_id in dict.fromkeys(ids.tolist()):
            try:
                self._array(name)[image_id].read().result()
            except (ValueError, OSError):
                damaged.append(image_id)
        return CorruptChunk(f"{self.url}: {name} of image{'s' if len(damaged) > 1 else ''} "
                            f"{', '.join(map(str, damaged[:5]))} cannot be read back ({first_line(error)}); "
                            "'gaupipe verify' shows all damage", damaged)
