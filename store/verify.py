"""Verifying a store: every file is there and is, bit for bit, what was written."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from store.schema import Schema, StoreError
from store.urls import open_kvstore, read
from store.writer import record_key, sealed


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. ``images`` is the range (start, stop) that it affects, None for all."""

    what: str
    images: tuple[int, int] | None = None
    shard: int | None = None

    def __str__(self) -> str:
        where = f"shard {self.shard}, images {self.images[0]} to {self.images[1] - 1}: " if self.images else ""
        return where + self.what


def verify(url: str) -> list[Problem]:
    """Every problem of a store; empty only if it is complete and intact."""
    kv = open_kvstore(url)
    group = read(kv, "zarr.json", url)
    if group is None:
        raise StoreError(f"{url}: no attention-map store there")
    try:
        attributes = json.loads(group)["attributes"]
        schema = Schema.from_attributes(attributes, url)
        complete = attributes["complete"]
        expected = schema.metadata(complete=True)
    except Exception as error:  # damaged bytes can fail in any way
        return [Problem(f"zarr.json is damaged: {error}")]
    problems = [] if complete is True else [Problem("the store is incomplete")]
    for key, contents in expected.items():
        found = read(kv, key, url)
        if found != contents and not (key == "zarr.json" and complete is not True):
            problems.append(Problem(f"{key} is {'missing' if found is None else 'damaged'}"))
    for shard in schema.shards():
        images, key = (shard.start, shard.stop), record_key(shard)
        record = read(kv, key, url)
        if record is None:
            problems.append(Problem(f"{key} is missing", images, shard.index))
            continue
        try:
            parsed = json.loads(record)["record"]
            if sealed(parsed) != record or (parsed["start"], parsed["stop"]) != images:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            problems.append(Problem(f"{key} is damaged", images, shard.index))
            continue
        for name, facts in parsed["files"].items():
            contents = read(kv, name, url)
            if contents is None:
                problems.append(Problem(f"{name} is missing", images, shard.index))
            elif hashlib.sha256(contents).hexdigest() != facts["sha256"]:
                problems.append(Problem(f"{name} is damaged ({len(contents)} bytes, {facts['bytes']} written)", images,
                                        shard.index))
    return problems
