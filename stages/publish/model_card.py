"""The model card of a student that is published: what its run says of it, in Markdown with the
head that the Hugging Face Hub reads."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

from gaupipe.data.splits import ImageData
from huggingface_hub import EvalResult, ModelCardData
from timm.models.vision_transformer import VisionTransformer

import store
from gaupipe import __version__
from gaupipe.attention import ATTENTION
from gaupipe.settings import Settings
from gaupipe.system.progress import epochs_in, read_metrics, total_seconds
from gaupipe.teachers.pretrained import LOCAL
from gaupipe.vit.saving import STOCK_ARCHITECTURE
from stages.evaluate import read_json, stores_of
from stages.runs import kept_epochs
from stages.runs.directory import RunDirectory

SETTINGS = "settings.yaml"
"""The file of a published folder with the student's settings."""


def without_paths(settings: Settings) -> Settings:
    """The settings for another machine: of each path its last part alone, no device, no
    loggers."""
    data, phase = settings.data, settings.phase_a
    if data.root is not None:
        data = data.model_copy(update={"root": Path(data.root.name)})
    phase = phase.model_copy(update={"teacher": without_folders(phase.teacher)})
    own = {"device": Settings().device, "log": Settings().log}
    return settings.model_copy(update={"data": data, "phase_a": phase, **own})


def published(run: RunDirectory, settings: Settings, distilled: bool) -> Settings:
    """The settings that are published: a student's differ from those of its run, with which the
    teacher is trained, by what the commands set."""
    return without_paths(run.settings() if distilled else settings)


def stored(run: RunDirectory, name: str, distilled: bool) -> store.Schema | None:
    """What the store holds that a student learned from; None where it has read none, or where the
    store is gone."""
    if not distilled:
        return None
    for url, teacher_sha256 in stores_of(run, run.student(name)):
        with contextlib.suppress(store.StoreError):
            return store.open(url, teacher_sha256=teacher_sha256).schema
    return None


def other_teacher(run: RunDirectory, name: str) -> bool:
    """Whether a student learned from another teacher than its run's."""
    learned = read_json(run.student(name) / "maps.json")
    return learned is not None and learned["teacher_sha256"] != run.teacher_digest()


def write(
    run_dir: Path,
    name: str,
    title: str,
    settings: Settings,
    student: VisionTransformer,
    data: ImageData,
    scores: dict[str, dict],
    distilled: bool,
) -> str:
    """The text of README.md. What a run cannot know is left to its reader, in marked places."""
    run, attention = RunDirectory(run_dir), settings.phase_b.student
    last = scores.get("test", scores["validation"])
    result = EvalResult(
        task_type="image-classification",
        dataset_type=data.name,
        dataset_name=data.name,
        dataset_split="test" if "test" in scores else "validation",
        metric_type="accuracy",
        metric_value=round(last["top1"], 4),
    )
    head = ModelCardData(
        library_name="timm",
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "gaupipe"],
        model_name=title.split("/")[-1],
        eval_results=[result],
    )
    parts = [
        f"---\n{head.to_yaml()}\n---\n",
        f"# {title.split('/')[-1]}\n",
        f"A vision transformer with {attention} attention, trained with gaupipe {__version__}.\n",
        "*To be filled in by those who publish the model:* what the model is for, its licence "
        "(`license:` in the head of this file), and where its images are from, with their "
        "licence.\n",
        f"## Use\n\n{usage(title, run, name, student, distilled)}",
        f"## Accuracy\n\n{table_of(scores)}",
        f"## Data\n\n{data_of(data, settings)}",
        f"## Training\n\n{training_of(run, name, settings, student, distilled)}",
        f"## Commands\n\n{commands_of(run, name, settings, distilled, 'test' in scores)}",
    ]
    return "\n".join(parts)


def usage(
    title: str, run: RunDirectory, name: str, student: VisionTransformer, distilled: bool
) -> str:
    """Code that loads the model and classifies an image file, prepared as in training."""
    described = json.loads((run.student(name, distilled) / "student/config.json").read_bytes())
    stock = described["architecture"] == STOCK_ARCHITECTURE
    grey = "L" if student.in_chans == 1 else "RGB"
    repo = title if "/" in title else f"OWNER/{title}"
    needed = "" if stock else "import gaupipe  # for its attention\n"
    return f"""```python
{needed}import timm
import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2

# hf-hub:OWNER/NAME, or local-dir:FOLDER where this folder is on the disk
model = timm.create_model("hf-hub:{repo}", pretrained=True).eval()
cfg = model.pretrained_cfg
size = cfg["input_size"][-1]
prepare = v2.Compose(
    [
        v2.ToImage(),
        v2.Resize(size, antialias=True),
        v2.CenterCrop(size),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(cfg["mean"], cfg["std"]),
    ]
)
with torch.inference_mode():
    image = ImageOps.exif_transpose(Image.open("image.png")).convert("{grey}")
    probabilities = model(prepare(image)[None]).softmax(-1)[0]
best = int(probabilities.argmax())
print((cfg.get("label_names") or range({student.num_classes}))[best], float(probabilities[best]))
```
"""


def table_of(scores: dict[str, dict]) -> str:
    lines = [
        f"| {split} | {one['images']:,} | {100 * one['top1']:.2f} % | {100 * one['top5']:.2f} % "
        f"| {one['loss']:.4f} | {one['calibration_error']:.4f} |\n"
        for split, one in scores.items()
    ]
    without = (
        ""
        if "test" in scores
        else "\nThe data set has no test images. Settings may have been "
        "chosen on the validation images.\n"
    )
    return (
        "| images | number | top-1 | top-5 | cross-entropy | calibration error |\n"
        "|---|---|---|---|---|---|\n" + "".join(lines) + without
    )


def data_of(data: ImageData, settings: Settings) -> str:
    name = data.name
    if settings.data.root is not None:
        name += f", `{settings.data.root.name}/`"
    tested = "" if data.test is None else f", {len(data.test):,} test images"
    names = getattr(data.train.source, "class_names", ())
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return "".join(
        f"* {line}\n"
        for line in (
            f"data set: {name}",
            f"{len(data.train):,} training images, {len(data.val):,} validation images{tested}",
            f"{data.num_classes} classes" + (f": {shown}" if names else ""),
            f"images of {data.image_size} x {data.image_size} pixels, "
            + ("grey" if data.channels == 1 else "RGB"),
            f"sha256 of the training images, their order and labels: `{data.sha256}`",
        )
    )


def training_of(
    run: RunDirectory, name: str, settings: Settings, student: VisionTransformer, distilled: bool
) -> str:
    phase = settings.phase_b
    optim = phase.optim if distilled else settings.baseline_optim
    epochs = metrics_in(run.student(name, distilled))
    parameters = sum(parameter.numel() for parameter in student.parameters())
    equation = (ATTENTION[phase.student].__doc__ or "").split("\n\n")[0]
    lines = [
        f"model: {parameters:,} parameters, width {student.embed_dim}, blocks: "
        f"{len(student.blocks)}",
        f"attention: `{phase.student}`. {' '.join(equation.split()).replace('``', '`')}",
        f"epochs: {len(epochs)}, in {total_seconds(epochs):.0f} s; {optim.name}, learning rate "
        f"{optim.lr:g}, batches of {settings.data.batch_size}, seed {settings.seed}",
        *best_epoch(run.student(name, distilled), settings),
        *teacher_of(run, name, settings, distilled),
        f"all settings: [{SETTINGS}]({SETTINGS})",
    ]
    return "".join(f"* {line}\n" for line in lines)


def best_epoch(folder: Path, settings: Settings) -> list[str]:
    """What is to be said of a student that is not of its last epoch."""
    if settings.phase_b.keep != "best":
        return []
    return [
        f"weights: of epoch {kept_epochs.of_student(folder)}, the best by val_acc, so they were "
        "chosen on the validation images"
    ]


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    """The epochs of a stage; none where it had no training to do."""
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.is_file() else []


def teacher_of(run: RunDirectory, name: str, settings: Settings, distilled: bool) -> list[str]:
    if not distilled:
        return ["teacher: none; the model learned from the labels alone"]
    phase, schema, other = settings.phase_b, stored(run, name, distilled), other_teacher(run, name)
    own = "another one than the run's" if other else settings.phase_a.teacher
    named = without_folders((schema and schema.extra.get("teacher")) or own)
    what = {
        "gaussian": "a ViT with GauAttention, trained in phase A",
        "vit": "a ViT, trained in phase A",
    }
    lines = [f"teacher: {what.get(named, named if named == own else f'`{named}`')}"]
    if not other and (epochs := metrics_in(run.phase_a)):
        last = [epochs[-1].get(key) for key in ("train_acc", "val_acc")]
        reached = " / ".join("-" if one is None else f"{100 * one:.2f} %" for one in last)
        lines[0] += f"; epochs: {epochs_in(epochs)}; training / validation accuracy: {reached}"
    if schema is not None:
        lines.append(f"stored attention: {schema.kind}, {schema.encoding}")
    lines.append(
        f"loss: {phase.alpha:g} x teacher's predictions + {phase.beta:g} x labels + "
        f"{phase.gamma:g} x attention maps (gamma {phase.gamma_schedule}); "
        f"warm start: {phase.warm_start}"
    )
    return lines


def without_folders(teacher: str) -> str:
    """The name of a teacher, without the folders above that of a ``local-dir:`` teacher."""
    return LOCAL + Path(teacher).name if teacher.startswith(LOCAL) else teacher


def commands_of(
    run: RunDirectory, name: str, settings: Settings, distilled: bool, tested: bool
) -> str:
    """The commands that train and score the model again from the published settings."""
    if distilled:
        schema = stored(run, name, distilled)
        kind = f" --kind {schema.kind} --encoding {schema.encoding}" if schema else ""
        kind += f" --k {schema.k}" if schema and schema.k else ""
        kind += f" --views {schema.views}" if schema and schema.views > 1 else ""
        maps = ""
        if other_teacher(run, name):
            teacher = without_folders((schema and schema.extra.get("teacher")) or "TEACHER")
            if arguments := schema and schema.extra.get("teacher_args"):
                given = shlex.quote(f"phase_a.teacher_args={json.dumps(arguments)}")
                kind = f" --set {given}{kind}"
            kind, maps = f" --teacher {teacher} --out maps.zarr{kind}", " --maps maps.zarr"
        attention = settings.phase_b.student
        student = "" if attention == run.settings().phase_b.student else f" --student {attention}"
        student += "" if name == attention else f" --name {name}"
        for override in run.overrides(name):
            if not override.startswith("phase_b.student="):
                student += f" --set {shlex.quote(override)}"
        lines = [
            f"gaupipe phase-a {SETTINGS} --run-dir run",
            f"gaupipe export-maps --run-dir run{kind}",
            f"gaupipe phase-b --run-dir run{maps}{student}",
        ]
    else:
        lines = [f"gaupipe train {SETTINGS} --run-dir run"]
    lines.append(f"gaupipe evaluate --run-dir run{' --test' if tested else ''}")
    commands = "\n".join(lines)
    return (
        "These commands train the model again, with the data set in place. A path in "
        f"`{SETTINGS}` is to be adapted.\n\n```sh\n{commands}\n```\n"
    )
