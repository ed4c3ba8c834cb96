"""Errors of the store: every message is one line that says what is wrong, where, and what would
be right."""


class StoreError(ValueError):
    """A user's mistake, a damaged store, or storage that does not answer."""


class UnfinishedStore(StoreError):
    """There is no store, or not all of it has been written yet."""


class DamagedStore(StoreError):
    """Metadata files of the store are not what was written."""


def damaged(url: str, what: str) -> DamagedStore:
    remedy = "repair it with gaupipe export-maps --repair, or store.repair"
    return DamagedStore(f"{url}: {what}; {remedy}")


class OtherVersion(StoreError):
    """The store is of another format version."""


class CorruptChunk(StoreError):
    """The stored numbers of an image are damaged or missing; in an array with few bytes an image
    those of a whole shard.

    Attributes: `image_id` (int), of one such image, and `array`, the name of the zarr array.
    """

    def __init__(self, message: str, image_id: int, array: str):
        super().__init__(message)
        self.image_id = image_id
        self.array = array

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (str(self), self.image_id, self.array)
