"""The folder a run lives in: where each stage keeps its files, and what guards the run against
being mixed with another one or used by two processes at once."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gaupipe.settings import Settings
from gaupipe.settings.load import (
    ByName,
    Overrides,
    changed,
    check_as_begun,
    dump,
    flatten,
    load,
    with_overrides,
)
from gaupipe.settings.sections import Scope
from gaupipe.system.errors import UserError
from gaupipe.system.files import partial_prefix, utf8, write_whole
from gaupipe.system.messages import LOG

if TYPE_CHECKING:
    from gaupipe.data.splits import ImageData

RUNS = Path("runs")
"""Where runs go that were not given a folder."""

STUDENT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")


@dataclass(frozen=True)
class RunDirectory:
    """A run's folder, and where its files are."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def split(self) -> Path:
        return self.path / "split.json"

    @property
    def weights_sha256(self) -> Path:
        """Names the weights of a folder that every student of the run starts from."""
        return self.path / "weights_sha256"

    @property
    def phase_a(self) -> Path:
        return self.path / "phase_a"

    @property
    def teacher_sha256(self) -> Path:
        """Is written last: phase A has finished."""
        return self.phase_a / "teacher_sha256"

    @property
    def maps(self) -> Path:
        return self.path / "maps.zarr"

    def is_store(self, url: str) -> bool:
        """True for a path of the run's own store, however it is written; a URL is taken for another
        one."""
        return "://" not in url and os.path.realpath(url) == os.path.realpath(self.maps)

    def stored(self) -> str:
        """The path of the run's own store. Raises UserError where the run's teacher has none."""
        may_be = self.maps.exists() or not self.config.is_file()
        if not (may_be or self.settings().phase_a.kind.stored):
            raise UserError(
                f"{self.path} has no store: all images have the same maps, and phase B makes "
                "them; 'gaupipe view' shows the maps of its students"
            )
        return str(self.maps)

    def teacher_digest(self) -> str | None:
        """The content of ``teacher_sha256``; None before phase A has finished. Raises UserError for
        a damaged file."""
        if not self.teacher_sha256.is_file():
            return None
        text = self.teacher_sha256.read_bytes().decode(errors="replace").strip()
        if not re.fullmatch("[0-9a-f]{64}", text):
            raise UserError(
                f"{self.teacher_sha256} is damaged: it should hold the 64 digits of the teacher's "
                "sha256; remove it, and 'gaupipe phase-a --resume' writes it again"
            )
        return text

    def student(self, name: str, distilled: bool = True) -> Path:
        """Folder of one student; the baseline's learned from the labels alone."""
        stage = "phase_b" if distilled else "plain"
        return self.path / stage / name

    def students(self, distilled: bool = True) -> list[str]:
        """Names of the students that have been trained, the last one last."""
        stage = "phase_b" if distilled else "plain"
        folders = self.path.glob(f"{stage}/*/student")
        return [
            folder.parent.name
            for folder in sorted(folders, key=lambda path: path.stat().st_mtime_ns)
        ]

    def is_distilled(self, name: str | None = None) -> bool:
        """True if the student of this name, or with None the one trained last, is one of phase B.

        One of :mod:`stages.train` is not: one with this name that no student of phase B stands
        beside, and with None that of a run without a student of phase B. Raises UserError for what
        is no name.
        """
        if name is None:
            return bool(self.students()) or not self.students(distilled=False)
        check_name(name)
        return self.student(name).exists() or not self.student(name, distilled=False).exists()

    def settings(self) -> Settings:
        """The settings that the run was started with. Raises UserError where there is no run."""
        if not self.config.is_file():
            raise UserError(
                f"{self.path} is not a run directory (it has no config.yaml): "
                f"'gaupipe phase-a CONFIG --run-dir {self.path}' starts one"
            )
        if not self.config.read_bytes().strip():  # not a run with all defaults
            raise UserError(f"{self.config} is empty: restore it from a copy, or start another run")
        return load(self.config)

    def begun(self) -> Settings | None:
        """As :meth:`settings`; None for a run that has not begun."""
        return self.settings() if self.config.is_file() else None

    def differences(self, name: str, distilled: bool = True) -> ByName:
        """The settings in which a student differs from the run."""
        student = self.student_settings(name, distilled)
        values = flatten(student)
        names = changed(self.settings(), student, Scope.ANYTIME)
        return {name: values[name] for name in names if name in values}

    def student_settings(self, name: str, distilled: bool = True) -> Settings:
        """The settings that a student was trained with; with the folder of the images that the run
        has, where the student's has gone."""
        recorded = self.student(name, distilled) / "config.yaml"
        if not recorded.is_file():
            return self.settings()
        settings = load(recorded)
        moved = gone(settings)
        if not moved:
            return settings
        now = self.settings().data
        return settings.with_section("data", **{name: getattr(now, name) for name in moved})

    def check(self, settings: Settings, before: Settings | None) -> None:
        """Raises UserError if the folder holds something else than a run with these settings. Those
        ``before`` are what it has :meth:`begun` with."""
        if before is None:
            self.check_place()
            return
        # each command names its student, and each export its store
        settings = settings.with_section("model", attention=before.model.attention)
        settings = settings.model_copy(update={"export": before.export})
        check_as_begun(self.path, flatten(before, Scope.ANYTIME), flatten(settings, Scope.ANYTIME))

    def check_place(self) -> None:
        """Raises UserError for a folder or file that is there and is no run, and for a name that
        safetensors cannot open."""
        if self.config.is_file():
            return
        if utf8(str(self.path)) != str(self.path):
            raise UserError(
                f"{self.path}: is not UTF-8, and students there could not be read again: choose "
                "another --run-dir"
            )
        there = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        begun = partial_prefix(self.config)  # by a run that had no time for more
        others = [name for name in there - {"lock"} if not name.startswith(begun)]
        if self.path.is_file() or others:
            raise UserError(
                f"{self.path} exists and is not a run directory: choose another --run-dir"
            )

    def check_free(self, resume: bool) -> None:
        """Raises UserError if the folder holds a phase A that is not to be continued."""
        if not resume and self.phase_a.exists():
            raise UserError(
                f"{self.path} already holds a phase A: --resume continues it, another --run-dir "
                "starts afresh"
            )

    def start(self, settings: Settings, data: ImageData, resume: bool) -> None:
        """Makes the folder and writes the resolved settings, in one step, and which images are in
        each split. Raises UserError as :meth:`check` and :meth:`check_free`, and for other images
        than those that the run began with."""
        # again, now that the run is locked: another process may have begun it meanwhile
        before = self.begun()
        self.check(settings, before)
        self.check_free(resume)
        data.check_split(self.split)
        weights = self.check_weights(settings)
        self.path.mkdir(parents=True, exist_ok=True)
        if before is None:
            write_whole(self.config, dump(settings))
        else:
            self.follow(settings, before)
        if weights is not None and not self.weights_sha256.is_file():
            write_whole(self.weights_sha256, weights + "\n")
        data.write_split(self.split)

    def check_weights(self, settings: Settings) -> str | None:
        """The sha256 of the weights in a folder from which a fine-tuning starts, if it does. Raises
        UserError where they are not those that the run began with: its students would have
        different starts."""
        from gaupipe.vit.fine_tuning import weights_sha256  # with timm

        sha256 = next(iter(weights_sha256(settings.model.name).values()), None)
        if sha256 is None or not self.weights_sha256.is_file():
            return sha256
        before = self.weights_sha256.read_bytes().decode(errors="replace").strip()
        if sha256 != before:
            raise UserError(
                f"{self.weights_sha256}: the weights in {settings.model.name} were others "
                "when the run began: put them back, or start another run with --run-dir"
            )
        return sha256

    def follow(self, settings: Settings, before: Settings) -> None:
        """Writes down where the images of the settings are, if a folder that the run knew
        ``before`` has gone. What they are has been checked."""
        now = {name: getattr(settings.data, name) for name in gone(before)}
        moved = before.with_section("data", **now)
        if moved != before:
            write_whole(self.config, dump(moved))

    def load_data(
        self, settings: Settings, test: bool = False, unlabelled: bool = False
    ) -> ImageData:
        """The data set of the run's settings, or of one of its students', ``unlabelled`` with its
        images without labels. Raises UserError for other images or classes than those that the run
        began with; for other test images with ``test`` alone."""
        from gaupipe.data.load import load_data  # with torch

        data = load_data(settings.data, settings.download, unlabelled)
        data.check_split(self.split, test)
        return data


def store_of_unlabelled(url: str) -> str:
    """The store of the images without labels, beside that of the training images: unlabelled.zarr
    beside maps.zarr, and NAME-unlabelled.zarr beside NAME.zarr."""
    start = url.rstrip("/").removesuffix(".zarr")
    if start.endswith("/maps") or start == "maps":
        return f"{start.removesuffix('maps')}unlabelled.zarr"
    return f"{start}-unlabelled.zarr"


def folder_for(data: Path, overrides: Overrides, teacher: str | None = None) -> Path:
    """The folder of a run on the images in ``data`` that was given none: it names the weights that
    a ViT starts from, and the teacher, if the ``overrides`` of a command do, as a run without them
    is another. ``teacher`` is the one that the command takes where these name none."""
    names = [os.path.basename(os.path.abspath(data)).removesuffix(".tar") or "images"]
    given = with_overrides({}, overrides)
    for section, name, otherwise in (("model", "name", None), ("phase_a", "teacher", teacher)):
        value = otherwise
        if isinstance(given.get(section), dict):  # what else is there is refused later
            value = given[section].get(name, otherwise)
        if isinstance(value, str):
            names.append(re.split("[/:]", value.rstrip("/"))[-1])
    return RUNS / "-".join(names)


def last_used() -> RunDirectory:
    """The run in :data:`RUNS` that a command worked on last. Raises UserError where there is
    none."""
    runs = [RunDirectory(path.parent) for path in RUNS.glob("*/config.yaml")]
    if not runs:
        raise UserError(
            f"no run in {RUNS}/: 'gaupipe phase-a' starts one; --run-dir names one that is "
            "elsewhere"
        )
    files = {run: (run.config, *run.path.glob("lock")) for run in runs}
    return max(runs, key=lambda run: max(path.stat().st_mtime_ns for path in files[run]))


def gone(settings: Settings) -> list[str]:
    """Which of the settings ``data.root`` and ``data.unlabelled`` name a place that is not there,
    or a data set of the Hub, which has none."""
    places = {"root": settings.data.root, "unlabelled": settings.data.unlabelled}
    return [name for name, place in places.items() if place and not os.path.exists(place)]


def has_checkpoint(folder: Path) -> bool:
    """True if the training in a folder has saved something that it can be continued from."""
    return (folder / "checkpoint" / "state.pt").is_file()


def say_if_afresh(folder: Path) -> None:
    """Says where ``--resume`` has no checkpoint in ``folder`` to continue from."""
    if has_checkpoint(folder):
        return
    settings = "it was begun with" if folder.exists() else "of this command"
    LOG.warning(
        f"gaupipe: {folder}: nothing was saved to resume: "
        f"starts afresh with the settings {settings}"
    )


def check_name(name: str) -> None:
    """Raises UserError for a student's name that cannot be a folder's."""
    if not STUDENT_NAME.fullmatch(name):
        raise UserError(
            f"{name!r} as the name of a student: should be up to 100 letters, digits and _ . + = "
            "-, such as gamma03"
        )
