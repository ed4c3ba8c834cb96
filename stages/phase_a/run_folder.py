"""The run directory while its teacher is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gaupipe.data.splits import ImageData
from gaupipe.distillation.teacher import TeacherJob
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.files import write_whole
from gaupipe.training.state import TrainingState
from stages.runs.directory import RunDirectory, say_if_afresh


@contextmanager
def started(
    run: RunDirectory, settings: Settings, data: ImageData, state: TrainingState, resume: bool
) -> Iterator[None]:
    """Holds a run directory while its teacher is trained: writes the settings and loads the last
    checkpoint."""

    def begin() -> None:
        if distributed.is_main():
            say_if_afresh(run.phase_a, resume)
            run.start(settings, data, resume)
        state.load(run.phase_a / "checkpoint")

    with run.locked():
        distributed.main_first(begin)
        yield


def write_digest(run: RunDirectory, job: TeacherJob) -> None:
    """Writes the digest of a finished teacher. Collective."""
    if not distributed.broadcast(run.teacher_sha256.is_file()):
        sha256 = job.sha256  # of all ranks' images
        distributed.on_main(lambda: write_whole(run.teacher_sha256, sha256 + "\n"))
