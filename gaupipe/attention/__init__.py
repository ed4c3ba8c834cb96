"""The attentions by key. A new attention is a new file and one line of :data:`ATTENTION`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

__all__ = ["ATTENTION", "STUDENTS", "comparing"]


class _Attentions(Mapping[str, Any]):
    """Classes by key. A class is imported when it is asked for: the command line knows the keys at
    once, without torch."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def __getitem__(self, key: str) -> Any:
        module, _, name = self._places[key].partition(".")
        return getattr(import_module(f"gaupipe.attention.{module}"), name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places


ATTENTION: Mapping[str, Any] = _Attentions(
    {
        "standard": "standard.StandardAttention",
        "belief": "belief.BeliefAttention",
        "belief_star": "belief_star.BeliefStarAttention",
        "xsa": "xsa.ExclusiveAttention",
        "belief2": "belief2.Belief2Attention",
        "attentionx": "attentionx.AttentionX",
        "gaussian": "gaussian.GaussianAttention",
    }
)

STUDENTS = tuple(ATTENTION)
"""Keys of the attentions that a student can have."""


def comparing() -> tuple[str, ...]:
    """Keys of the attentions that compare queries with keys: trained ones can be converted to
    them."""
    return tuple(key for key, attention in ATTENTION.items() if attention.compares)
