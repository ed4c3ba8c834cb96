"""Export of a student to ONNX or by ``torch.export``, checked by running what is written."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_model_data_config
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from gaupipe.system.errors import UserError
from gaupipe.system.files import check_file, write_whole
from gaupipe.system.imports import pip_install
from gaupipe.vit.saving import class_names
from stages.runs.trained import load_student

TOLERANCE = 1e-4
"""Largest difference of a logit between the student and its export."""

ANY_BATCH: Any = {"x": {0: torch.export.Dim("batch")}}
"""For torch's exporters: the first axis of the images may have any size."""

Exported = tuple[bytes, Callable[..., Tensor]]
"""The content of the file, and its forward pass."""


def to_onnx(student: VisionTransformer, images: Tensor) -> Exported:
    """ONNX, run by onnxruntime."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter needs it)
    except ImportError as error:
        raise UserError(f"export to ONNX needs {error.name}: {pip_install('onnx')}") from None
    program = torch.onnx.export(
        student,
        (images,),
        dynamo=True,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=ANY_BATCH,
        verbose=False,
    )
    assert program is not None
    model = program.model_proto
    for key, value in describe(student).items():
        model.metadata_props.add(key=key, value=value)
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return content, lambda images: torch.from_numpy(
        session.run(None, {"images": images.numpy()})[0]
    )


def describe(student: VisionTransformer) -> dict[str, str]:
    """How an image becomes the student's input, and the names of its classes: JSON by timm's names,
    and in words what timm does beside."""
    config = resolve_model_data_config(student)
    names = ("input_size", "mean", "std", "interpolation", "crop_pct")
    facts = {name: json.dumps(config[name]) for name in names}
    facts["label_names"] = json.dumps(class_names(student, student.num_classes))
    facts["preparation"] = (
        "turned by EXIF; in sRGB by its colour profile, on white where it is transparent; resized "
        "with antialiasing so that the shorter side is floor(input_size / crop_pct) and the longer "
        "in proportion, rounded down; cropped to the middle, half an offset to the even side; "
        "divided by 255; minus mean, divided by std"
    )
    return facts


def to_pt2(student: VisionTransformer, images: Tensor) -> Exported:
    """The program of ``torch.export``. torch writes to memory, because it aborts the process where
    it cannot write a file."""
    program = torch.export.export(student, (images,), dynamic_shapes=ANY_BATCH)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return file.getvalue(), torch.export.load(file).module()


FORMATS = {"onnx": to_onnx, "pt2": to_pt2}
"""Exporters by format, which is also how the file's name ends."""

USES = {
    "onnx": "import numpy, onnxruntime; print(onnxruntime.InferenceSession({path})"
    '.run(None, {{"images": numpy.zeros({shape}, "float32")}})[0])',
    "pt2": "import torch; print(torch.export.load({path}).module()(torch.zeros({shape})))",
}
"""By format Python that prints the logits of an image, here of zeros, without single quotes, which
stand around it in a shell."""


def export_student(
    run_dir: Path,
    name: str | None = None,
    *,
    out: Path | None = None,
    plain: bool = False,
) -> tuple[Path, float, str]:
    """Writes a student, for any number of images, in that of the :data:`FORMATS` in which ``out``
    ends. Returns the file, the largest difference between its logits and the student's on random
    images, and Python that runs it.

    A file that is there is replaced, through a link too. Raises UserError, and writes nothing, for
    a place that holds anything else and for a model that differs by more than ``TOLERANCE``.
    """
    student = load_student(run_dir, name, plain)
    model = student.model
    out = Path(out or student.folder / "student.onnx")
    target = check_file("--out", out, *(f".{name}" for name in FORMATS))
    format = out.suffix.lower().removeprefix(".")
    generator = torch.Generator().manual_seed(student.settings.seed)
    images = torch.randn(5, model.in_chans, *model.patch_embed.img_size, generator=generator)
    content, forward = FORMATS[format](model, images[:2])
    with torch.inference_mode():
        difference = (forward(images) - model(images)).abs().max().item()
    if not difference <= TOLERANCE:
        raise UserError(
            f"{out}: the logits of the exported model differ from the student's by "
            f"{difference:.2g}, more than {TOLERANCE}"
        )
    write_whole(target, content)
    use = USES[format].format(path=json.dumps(str(out)), shape=(1, *images.shape[1:]))
    return out, difference, use
