"""Publish: a student as a folder for others, with a model card that the run fills in, and its
upload to the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
from huggingface_hub import HfApi

import store
from gaupipe import __version__
from gaupipe.data.splits import load_data
from gaupipe.settings import PhaseASettings, Settings
from gaupipe.settings import load as config
from gaupipe.system import digests
from gaupipe.system.errors import UserError
from gaupipe.system.files import replaced
from gaupipe.teachers.pretrained import LOCAL
from gaupipe.vit.saving import STUDENT_FILES
from stages import export_maps
from stages.evaluate import metrics, predictions
from stages.publish import model_card
from stages.runs.directory import STUDENT_NAME
from stages.students import TrainedStudent, check_data, load_student, stores_of

CARD = "README.md"


def run(
    run_dir: Path,
    name: str | None = None,
    *,
    out: Path | None = None,
    repo: str | None = None,
    private: bool = False,
    distilled: bool | None = None,
) -> Path | str:
    """Writes a student, its settings and a model card to the folder ``out``, or uploads them to
    ``repo`` (NAME or OWNER/NAME) of the Hugging Face Hub, or both. Returns the folder or the
    repository's address.

    The card gives accuracy and loss on the validation images and, where the data set has some, on
    the test images. A card that the repository has already is left as it is. Paths of this machine
    are in none of the files. The folder and the upload are there as a whole or not at all.

    Raises UserError for an ``out`` that is there, and where there is no network, no token, or a
    repository that the Hub refuses.
    """
    if out is None and repo is None:
        raise UserError(
            "publish: give --out FOLDER to write the model and its card, --repo NAME to upload "
            "them to the Hugging Face Hub, or both"
        )
    if out is not None and (out.exists() or out.is_symlink()):
        raise UserError(f"--out {out}: is there already; name a new folder, or remove it")
    hub, repo = (None, None) if repo is None else check_hub(repo)
    student = load_student(run_dir, name, distilled)
    data = load_data(student.settings.data, student.settings.download)
    check_data(student, data)
    splits = {"validation": data.val, "test": data.test}
    scores = {
        split: {
            "images": len(images),
            **metrics(*predictions(student.model, images, data, student.settings)),
        }
        for split, images in splits.items()
        if images is not None
    }
    model_name = out.name if out is not None and STUDENT_NAME.fullmatch(out.name) else student.name
    settings = published_settings(student)
    card = model_card.write(student, data, scores, settings, title=repo or model_name)
    with tempfile.TemporaryDirectory() if out is None else replaced(out) as place:
        folder = Path(place)
        for file in STUDENT_FILES:
            shutil.copy(student.folder / "student" / file, folder)
        (folder / "settings.yaml").write_text(config.dump(settings))
        digests.write(folder)
        (folder / CARD).write_text(card, "utf-8")  # which is for editing, so without a digest
        if out is None:
            return upload(hub, folder, repo, private)
    return out if repo is None else upload(hub, out, repo, private)


def published_settings(student: TrainedStudent) -> Settings:
    """The settings of a student and of the store it learned from, for another machine: of each path
    its last part alone, no device, no loggers."""
    settings = student.settings
    data, phase, export = settings.data, settings.phase_a, settings.export
    if data.root is not None:
        data = data.model_copy(update={"root": Path(data.root.name)})
    for url, teacher_sha256 in stores_of(student) if student.distilled else ():
        with contextlib.suppress(store.StoreError):  # it may be gone
            schema = store.open(url, teacher_sha256=teacher_sha256).schema
            export = export_maps.stored_export(url) or export
            if student.has_other_teacher and "teacher" in schema.extra:
                named = {key: schema.extra.get(key) or {} for key in ("teacher", "teacher_args")}
                phase = PhaseASettings.model_validate(named)
            break
    teacher, model = map(without_folders, (phase.teacher, settings.model.name))
    changes = {
        "model": settings.model.model_copy(update={"name": model}),
        "data": data,
        "phase_a": phase.model_copy(update={"teacher": teacher}),
        "export": export,
        "device": Settings().device,
        "log": Settings().log,
    }
    return settings.model_copy(update=changes)


def without_folders(model: str) -> str:
    """The name of a model, without the folders above that of a ``local-dir:`` one."""
    return LOCAL + Path(model).name if model.startswith(LOCAL) else model


# ---- the Hub -------------------------------------------------------------------------------------


@contextlib.contextmanager
def in_one_line(action: str) -> Iterator[None]:
    """Turns any error of the Hub, or on the way to it, into a UserError. The classes of the errors
    depend on the versions of huggingface_hub and of its HTTP library."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{action}: {reason}") from None


def check_hub(repo: str) -> tuple[HfApi, str]:
    """The Hub, for somebody who may write there, and OWNER/NAME of the repository.

    Raises UserError for a name that no repository can have, without a token, with one that the Hub
    does not know, and without a network.
    """
    with in_one_line(f"--repo {repo}"):
        huggingface_hub.utils.validate_repo_id(repo)
    if huggingface_hub.get_token() is None:
        raise UserError(
            "--repo: no token of the Hugging Face Hub: 'hf auth login' keeps one, or set HF_TOKEN; "
            "--out FOLDER alone needs none"
        )
    hub = HfApi(library_name="gaupipe", library_version=__version__)
    with in_one_line(f"--repo {repo}: {hub.endpoint} does not answer, or refuses the token"):
        user = hub.whoami()["name"]
    return hub, repo if "/" in repo else f"{user}/{repo}"


def upload(hub: HfApi | None, folder: Path, repo: str | None, private: bool) -> str:
    """Uploads a folder in one commit and returns the repository's address."""
    assert hub is not None and repo is not None
    with in_one_line(f"--repo {repo}: not uploaded"):
        address = hub.create_repo(repo, private=private, exist_ok=True)
        hub.upload_folder(
            folder_path=folder,
            repo_id=address.repo_id,
            ignore_patterns=CARD if hub.file_exists(address.repo_id, CARD) else None,
            commit_message=f"A student of gaupipe {__version__}",
        )
    return str(address)
