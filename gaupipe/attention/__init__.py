"""Attentions by key. A new attention is a new file and one line of :data:`ATTENTION`."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any

__all__ = ["ATTENTION", "STUDENTS", "comparing"]


class _Attentions(UserDict[str, Any]):
    """Classes by key, imported at their first use: the command line lists keys without torch."""

    def __getitem__(self, key: str) -> Any:
        module, _, name = self.data[key].partition(".")
        return getattr(import_module(f"gaupipe.attention.{module}"), name)


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
    """Keys of the attentions with queries and keys: trained ones can be converted to them."""
    return tuple(key for key, attention in ATTENTION.items() if attention.compares)
