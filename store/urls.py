"""Where a store lives: a path, file://, s3://, gs:// or memory://, through tensorstore's key-value stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorstore as ts

from store.schema import StoreError


def kvstore_url(url: str) -> str:
    """The URL that tensorstore knows the store by, ending in a slash."""
    if "://" not in url:
        url = Path(url).absolute().as_uri()
    return url.rstrip("/") + "/"


def open_kvstore(url: str) -> ts.KvStore:
    """Raises StoreError for a URL tensorstore cannot open."""
    try:
        return ts.KvStore.open(kvstore_url(url)).result()
    except ValueError as error:
        raise StoreError(f"{url}: {first_line(error)}") from None


def read(kv: ts.KvStore, key: str, url: str) -> bytes | None:
    """The bytes under a key; None where there are none. Raises StoreError if the storage does not answer."""
    try:
        result = kv.read(key).result()
    except (ValueError, OSError) as error:
        raise StoreError(f"{url}: cannot be read: {first_line(error)}") from None
    return result.value if result.state == "value" else None


def first_line(error: Any) -> str:
    """The readable part of tensorstore's messages."""
    return str(error).splitlines()[0].split(" [source locations")[0].split(" [tensorstore_spec")[0]
