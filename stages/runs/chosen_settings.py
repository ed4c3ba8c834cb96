"""The settings of a run on a folder of images for which nobody has written any: chosen when the
run begins, and those of its ``config.yaml`` from then on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from gaupipe.data.folder import place_of
from gaupipe.data.load import load_data
from gaupipe.data.sources import facts_of
from gaupipe.data.unlabelled import folder_beside
from gaupipe.distillation.student import check_unlabelled
from gaupipe.settings import DataSettings, Settings
from gaupipe.settings.load import Overrides, load_merged, parse, read_overrides, with_overrides
from gaupipe.system.errors import UserError
from stages.runs.choices import Choices, choose, fine_tuning, has_gpu
from stages.runs.directory import RunDirectory
from stages.runs.presets import FEW_IMAGES


def settings_for(
    folder: Path,
    overrides: Overrides,
    run_dir: Path,
    *,
    plain: bool = False,
    paper: bool = False,
) -> tuple[Settings, list[str]]:
    """The settings for the images in ``folder``, and lines that say what was chosen and why: all of
    it, or, ``plain``, for a training without a teacher.

    ``overrides`` are the user's, which win. ``paper`` is as in :func:`~stages.runs.choices.choose`.
    Raises UserError for a folder that cannot be meant, for unusable overrides and for a ``run_dir``
    with a run on other images. Where the folder of a run has gone, ``folder`` may be where it was
    moved to: the digests in the run's split.json tell.
    """
    place = place_of(str(folder))
    changes = read_overrides(overrides)
    given = with_overrides({}, changes)
    for name in ("name", "root"):
        if isinstance(given.get("data"), dict) and name in given["data"]:
            raise UserError(f"data.{name}: --data {folder} says where the images are")
    run = RunDirectory(run_dir)
    if run.config.is_file():
        line = f"{run_dir}: goes on with the settings with which it began"
        return _run_settings(run, place, changes), [line]
    valid = with_overrides({"phase_a": {"teacher": "local"}}, changes)
    asked = parse(valid)  # before anything is chosen by it
    images = DataSettings.model_validate(asked.data.model_dump() | place)
    if asked.data.unlabelled and not plain and Choices(given).given("phase_a.teacher"):
        check_unlabelled(asked)
    facts = facts_of(images, bool(given.get("download")), unlabelled=not plain)
    choices = choose(facts, place, has_gpu(given), given, paper=paper)
    settings = parse(choices.tree)
    lines = [f"{folder}: {facts}"]
    if settings.model.name.startswith("gauvit_") and facts.images < FEW_IMAGES:
        lines.append("these are few images for a ViT from the start; first try a pretrained one:")
        lines.append(f"  {shlex.join(fine_tuning(folder))}")
    lines += [f"  {line}" for line in choices.lines(plain)]
    if not plain and settings.phase_a.kind.trained:
        lines.append(
            f"'gaupipe train --data {folder}' does without a teacher, in half the time or less"
        )
    return settings, lines


def takes_the_papers(folder: Path, overrides: Overrides) -> bool:
    """True where phase A by itself trains the GauTransformer paper's teacher: where the user names
    no other, and all images have labels, without which it predicts nothing."""
    given = Choices(with_overrides({}, overrides))
    for key in ("phase_a.teacher", "data.unlabelled"):
        if given.given(key) is not None:
            return False
    images = DataSettings.model_validate(place_of(str(folder)))
    return folder_beside(images) is None


def _run_settings(
    run: RunDirectory, place: Mapping[str, str | None], overrides: Overrides
) -> Settings:
    """The settings of a run that has begun, with its images in ``place``. Keywords of the user,
    such as ``model.args``, join those that were chosen, as when the run began."""
    before = run.settings().data
    root = place["root"] and Path(place["root"])
    gone = before.root is not None and run.split.is_file() and not before.root.exists()
    same = before.root == root
    if before.root and root:
        same = before.root.resolve() == root.resolve()
    if before.name != place["name"] or not (gone or same):
        raise UserError(
            f"{run.path} holds a run on other images ({before.name}, data.root {before.root}); "
            "choose another --run-dir or remove it"
        )
    settings = load_merged(run.config, overrides).with_section("data", root=root)
    if gone:
        load_data(settings.data).check_split(run.split)
    return settings
