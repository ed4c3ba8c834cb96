"""Attentions by key. A new attention is a new file and one line of :data:`ATTENTION`."""

from __future__ import annotations

from collections import UserDict
from collections.abc import MutableMapping
from importlib import import_module
from typing import Any

__all__ = ["ATTENTION", "STUDENTS", "comparing"]


class _Attentions(UserDict[str, Any]):
    """Classes by key, those of gaupipe imported at their first use: the command line lists keys
    without torch."""

    def __getitem__(self, key: str) -> Any:
        known = self.data[key]
        if not isinstance(known, str):
            return known
        module, _, name = known.partition(".")
        return getattr(import_module(f"gaupipe.attention.{module}"), name)


ATTENTION: MutableMapping[str, Any] = _Attentions(
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
"""Keys of the attentions of gaupipe; ``gaupipe.register`` adds others to :data:`ATTENTION`."""


def comparing() -> tuple[str, ...]:
    """Keys of the attentions with queries and keys: trained ones can be converted to them."""
    return tuple(key for key, attention in ATTENTION.items() if attention.compares)
