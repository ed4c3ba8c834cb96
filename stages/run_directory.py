"""The folder a run lives in: where each stage keeps its files, and what guards it against being mixed with another run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gaupipe import config
from gaupipe.config import Settings
from gaupipe.errors import UserError


FREE = {"phase_b.student", *config.IRRELEVANT}
"""Settings that may differ between the commands of a run."""


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def phase_a(self) -> Path:
        return self.path / "phase_a"

    @property
    def teacher_sha256(self) -> Path:
        return self.phase_a / "teacher_sha256"

    @property
    def maps(self) -> Path:
        return self.path / "maps.zarr"

    def teacher_digest(self) -> str | None:
        """What ``teacher_sha256`` says; None before phase A has finished. Raises UserError for a
        damaged file."""
        if not self.teacher_sha256.is_file():
            return None
        text = self.teacher_sha256.read_bytes().decode(errors="replace").strip()
        if not re.fullmatch("[0-9a-f]{64}", text):
            raise UserError(
                f"{self.teacher_sha256} is damaged: it should hold the 64 digits of the teacher's "
                "sha256; remove it, and 'gaupipe phase-a --resume' writes it again"
            )
        return text

    def student(self, student: str, distilled: bool = True) -> Path:
        """Folder of one student; a plain one learned from the labels alone."""
        return self.path / ("phase_b" if distilled else "plain") / student

    def settings(self) -> Settings:
        """The settings that the run was started with. Raises UserError where there is no run."""
        if not self.config.is_file():
            raise UserError(f"{self.path} is not a run directory (it has no config.yaml): "
                            f"'gaupipe phase-a CONFIG --run-dir {self.path}' starts one")
        return config.load(self.config)

    def check(self, settings: Settings) -> None:
        """Raises UserError if the folder holds something else than a run with these settings."""
        if self.config.is_file():
            difference = first_difference(self.settings(), settings)
            if difference:
                raise UserError(f"{self.path} holds a run with other settings ({difference}); "
                                "choose another --run-dir or remove it")
        elif self.path.is_file() or (self.path.is_dir() and any(path.name != "config.partial" for path in self.path.iterdir())):
            raise UserError(f"{self.path} exists and is not a run directory: choose another --run-dir")

    def start(self, settings: Settings) -> None:
        """Makes the folder and writes the resolved settings, in one step."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.config.is_file():
            write_whole(self.config, config.dump(settings))


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there with all of its text or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def first_difference(old: Settings, new: Settings) -> str | None:
    """The first setting on which two settings differ, as 'a.b is 1, asked 2'; the student's key does not count, nor does
    what makes no other run of it."""
    flat_old, flat_new = config.flatten(old), config.flatten(new)
    for key in flat_old | flat_new:
        if key not in FREE and flat_old.get(key) != flat_new.get(key):
            return f"{key} is {flat_old.get(key)}, asked {flat_new.get(key)}"
    return None
