"""Settings that have another name now: files, runs and ``--set`` may still give the older one.

``phase_a.residual`` said whether images have parameters of their own, and ``phase_a.compression``
whether these are embeddings. ``phase_a.per_image`` says both, and ``compression`` is left to say
how large embeddings and their decoder are.
"""

from __future__ import annotations

from typing import Any

from gaupipe.system.errors import UserError


def settle(phase: dict[str, Any]) -> None:
    """Gives a section ``phase_a`` its ``per_image`` where it has ``residual`` or ``compression``,
    and takes ``residual`` out. Raises UserError where they contradict each other."""
    per_image, sizes = phase.get("per_image"), phase.get("compression")
    if "residual" in phase:
        older = "table" if check_residual(phase["residual"]) else "none"
        if phase["residual"] and (sizes is not None or per_image == "embedding"):
            older = "embedding"
        _agree(per_image, older, f"residual: {str(phase.pop('residual')).lower()} (an older name)")
        per_image = per_image or older
    if "compression" in phase:
        older = "table" if sizes is None else "embedding"
        if per_image is None:
            per_image = older
        elif "embedding" in (per_image, older) and per_image != "none":
            _agree(per_image, older, f"compression {'null' if sizes is None else 'with sizes'}")
    if per_image is not None:
        phase["per_image"] = per_image


def _agree(per_image: Any, older: str, said: str) -> None:
    if per_image not in (None, older):
        raise UserError(
            f"per_image is {per_image}, and {said} means {older}: leave one of the two out"
        )


def check_residual(residual: Any) -> bool:
    """``residual`` if it is true or false. Raises UserError otherwise."""
    if not isinstance(residual, bool):
        raise UserError(f"residual: should be true or false, got {residual!r}")
    return residual


def follow(phase: dict[str, Any], name: str) -> None:
    """Lets a settled section ``phase_a`` follow a change of ``name`` in it: the last word counts.

    ``residual: false`` takes per-image parameters away and ``true`` brings them; ``compression``
    with sizes makes embeddings of them, and null a table.
    """
    per_image, sizes = phase.get("per_image") or "table", phase.get("compression")
    if name == "per_image" and (sizes is None or per_image != "embedding"):
        phase.pop("compression", None)
    elif name == "compression" and per_image != "none":
        if sizes is not None:
            phase["per_image"] = "embedding"
        elif per_image == "embedding":
            phase["per_image"] = "table"
    elif name == "residual":
        if not check_residual(phase.pop("residual")):
            phase["per_image"] = "none"
        elif per_image in ("none", "predicted"):
            phase["per_image"] = "table" if sizes is None else "embedding"


def renamed(flat: dict[str, Any]) -> dict[str, Any]:
    """Flat settings {"a.b": value} of an earlier version, such as a checkpoint records, by the
    names of this one."""
    flat = dict(flat)
    if "phase_a.residual" in flat:
        kept = "table" if "phase_a.compression" in flat else "embedding"  # else sizes are there
        flat["phase_a.per_image"] = kept if flat.pop("phase_a.residual") else "none"
    for name in [name for name in flat if name.endswith("augment.resized_crop.scale")]:
        flat.setdefault(f"{name.removesuffix('scale')}full_size", False)
    return flat


def as_recorded(changed: dict[str, Any]) -> dict[str, Any]:
    """The settings in which a run differs from the defaults by the names of version 0.1, where it
    could say them: the folders of comparisons are named by these."""
    changed = {
        name: value
        for name, value in changed.items()
        if value or not name.endswith("augment.resized_crop.full_size")
    }
    older: dict[str, dict[str, Any]] = {"embedding": {}, "none": {"phase_a.residual": False}}
    per_image = changed.get("phase_a.per_image")
    if per_image not in older:
        return changed
    rest = {name: value for name, value in changed.items() if name != "phase_a.per_image"}
    return rest | older[per_image]
