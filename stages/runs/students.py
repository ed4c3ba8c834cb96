"""What a student of phase B is asked for, and what its folder says of that. torch is not imported
here, so that what the run does not allow is refused at once."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from gaupipe.attention import ATTENTION
from gaupipe.settings import Settings
from gaupipe.settings.load import (
    Overrides,
    changed,
    check_plain,
    parse,
    read_overrides,
    with_anytime,
    with_overrides,
)
from gaupipe.settings.sections import Scope
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from stages.runs.directory import RunDirectory, check_name


@dataclass(frozen=True)
class StudentRequest:
    """A student that is to be trained.

    folder           where it lies
    run              whose student it is; None for one outside of a run, as in a comparison
    teacher_run      the run whose phase A it learns from; None for the baseline
    maps_url         the attention-map store; None is the teacher's own
    predictions_url  a second store, of the predictions; None where the first one has them
    resume           continues from the last checkpoint
    begins_run       the run begins with this student, if it has not begun
    instead          what to do where the folder is taken
    """

    settings: Settings
    folder: Path
    run: RunDirectory | None = None
    teacher_run: RunDirectory | None = None
    maps_url: str | None = None
    predictions_url: str | None = None
    resume: bool = False
    begins_run: bool = False
    instead: str = "--name NAME trains another student beside it"

    @property
    def afresh(self) -> str:
        """Where another student may start."""
        return "in another --run-dir" if self.begins_run else "with another --name"

    @property
    def label(self) -> str:
        """The name of the training in lines and on the bar."""
        if self.teacher_run is None:
            return f"{self.folder.name} (plain)"
        return self.folder.name

    @property
    def store_url(self) -> str | None:
        """The store that it learns from; None for the baseline, and for a teacher without one."""
        if self.teacher_run is None:
            return None
        if self.maps_url is None and self.settings.phase_a.kind.stored:
            return str(self.teacher_run.maps)
        return self.maps_url

    def check_free(self) -> None:
        """Raises UserError, ending in what to do ``instead``, where the folder is taken."""
        if os.path.lexists(self.folder):
            raise UserError(f"{self.folder} already exists: --resume continues it, {self.instead}")


def resolve(
    run_dir: Path,
    student: str | None = None,
    *,
    name: str | None = None,
    overrides: Overrides = (),
    now: Settings | None = None,
    maps_url: str | None = None,
    predictions_url: str | None = None,
    resume: bool = False,
    distilled: bool = True,
) -> StudentRequest:
    """The request for a student of a run, new or to be continued. Writes nothing.

    student     its attention; None is the settings' ``model.attention``
    name        of its folder; None is its attention
    overrides   settings in which it differs from the run; only some may
                (:class:`gaupipe.settings.sections.Scope`)
    now         says on which device, and whatever else may change at any time; None is as the
                student, or else the run, began
    maps_url    the attention-map store; None is the run's own
    predictions_url  a second store whose predictions are learned; None is that of the maps
    resume      continues from the last checkpoint, or starts where there is none; without it an
                existing student is refused
    distilled   False trains the baseline, the same model on the labels alone

    Raises UserError for what the run does not allow.
    """
    run = RunDirectory(run_dir)
    for option, url in (("--maps", maps_url), ("--predictions", predictions_url)):
        if url is not None and not (url and distilled):
            raise UserError(
                f"{option} {url!r}: should be the path or URL of a store, and is not for a "
                "training on the labels alone (--no-distill)"
            )
    changes = read_overrides(overrides)
    if not distilled:
        check_plain(changes)
    if student:
        changes["model.attention"] = student
    named = name
    if named is None:
        named = str(changes.get("model.attention") or run.settings().model.attention)
    check_name(named)
    settings = _settings(run, named, changes, distilled)
    if now is not None:
        settings = with_anytime(settings, now)
    attention = settings.model.attention
    if named in ATTENTION and named != attention:
        raise UserError(
            f"--name {named}: is the name of an attention, and this student's is {attention}: "
            "choose another name"
        )
    folder = run.student(named, distilled)
    if resume:
        recorded = [url for url, _ in recorded_stores(folder)]
        if maps_url is None and recorded:
            maps_url = recorded[0]
        if predictions_url is None and len(recorded) == 2:
            predictions_url = recorded[1]
    has_store = settings.phase_a.kind.stored
    if has_store and maps_url is not None and run.is_store(maps_url):
        maps_url = None  # its teacher must be the run's, however the path is written
    request = StudentRequest(
        settings,
        folder,
        run=run,
        teacher_run=run if distilled else None,
        maps_url=maps_url,
        predictions_url=predictions_url,
        resume=resume,
    )
    if predictions_url is not None and request.store_url is None:
        raise UserError(
            f"--predictions {predictions_url}: comes beside a store of maps, and "
            f"{settings.phase_a.teacher} has none: name one by --maps"
        )
    if not resume:
        request.check_free()
    return request


def _settings(
    run: RunDirectory, named: str, changes: dict[str, object], distilled: bool
) -> Settings:
    """Settings of the student ``named``, as it began or, if it has not, as the run did, with
    ``changes``. Raises UserError for a change of what belongs to the run."""
    has_begun = (run.student(named, distilled) / "config.yaml").is_file()
    before = run.student_settings(named, distilled) if has_begun else run.settings()
    settings = parse(with_overrides(before.model_dump(mode="json"), changes))
    of_the_run = changed(before, settings, Scope.STUDENT, Scope.ANYTIME)
    if of_the_run:
        key = of_the_run[0]
        raise UserError(
            f"{key}: belongs to the run, not to one student: start another run "
            f"with it ('gaupipe phase-a {run.config} --set {key}=... --run-dir ...')"
        )
    if has_begun:
        return settings
    return settings.with_buckets(distributed.world_size())


def recorded_stores(folder: Path) -> list[tuple[str, str]]:
    """(url, sha256 of its teacher) of the stores that the student in ``folder`` learned from, by
    its maps.json: of the maps, and of the predictions where those were of a second one; none for a
    student without a store."""
    path = folder / "maps.json"
    if not path.is_file():
        return []
    try:
        stores = []
        for learned in json.loads(path.read_bytes()):
            url = str(learned["url"])
            if "://" not in url:
                url = os.path.normpath(folder / url)
            stores.append((url, str(learned["teacher_sha256"])))
        return stores
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(
            f"{path} is damaged: it should list the url and the teacher_sha256 of each store that "
            "the student learned from; remove it"
        ) from None
