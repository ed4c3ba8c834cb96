"""Export of a student to ONNX or by ``torch.export``, checked by running what was written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from gaupipe.system.errors import UserError
from gaupipe.system.files import alone_in
from stages.evaluate import load_student
from stages.runs.directory import RunDirectory

TOLERANCE = 1e-4
"""Largest difference of a logit between the student and its export."""

ANY_BATCH: Any = {"x": {0: torch.export.Dim("batch")}}
"""For torch's exporters: the first axis of the images may have any size."""


def write_onnx(student: VisionTransformer, images: Tensor, file: Path) -> Callable[..., Tensor]:
    """Writes ONNX, and returns the forward pass of the file in onnxruntime."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter needs it)
    except ImportError as error:
        raise UserError(f"export to ONNX needs {error.name}: pip install 'gaupipe[onnx]'") from None
    torch.onnx.export(
        student,
        (images,),
        str(file),
        dynamo=True,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=ANY_BATCH,
        verbose=False,
        external_data=False,
    )
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def write_pt2(student: VisionTransformer, images: Tensor, file: Path) -> Callable[..., Tensor]:
    """Writes the program of ``torch.export``, and returns the forward pass of the file."""
    program = torch.export.export(student, (images,), dynamic_shapes=ANY_BATCH)
    torch.export.save(program, file)
    return torch.export.load(file).module()


FORMATS = {"onnx": write_onnx, "pt2": write_pt2}
"""Writers by format, which is also how the file's name ends."""


def run(
    run_dir: Path,
    name: str | None = None,
    *,
    format: str = "onnx",
    out: Path | None = None,
    distilled: bool | None = None,
) -> tuple[Path, float]:
    """Writes a student in one of :data:`FORMATS`, for any number of images, and returns the file
    and the largest difference between its logits and the student's on random images. A model that
    differs by more than ``TOLERANCE`` is not left behind.

    A file that is there is replaced, through a link too. Raises UserError for a place that holds
    anything else.
    """
    run = RunDirectory(run_dir)
    distilled = run.is_distilled(name) if distilled is None else distilled
    settings, student, name = load_student(run_dir, name, distilled)
    out = Path(out or run.student(name, distilled) / f"student.{format}")
    target = check_place(out)
    generator = torch.Generator().manual_seed(settings.seed)
    images = torch.randn(5, student.in_chans, *student.patch_embed.img_size, generator=generator)
    # torch.export.save asks for a name that ends in .pt2
    partial = target.with_name(f".{target.name}.partial.{format}")
    with alone_in(target.parent):  # of two exports at once the second waits
        return out, _export(student, images, partial, out, format)


def _export(
    student: VisionTransformer, images: Tensor, partial: Path, out: Path, format: str
) -> float:
    """Writes ``out`` by way of ``partial``; returns the largest difference of the logits."""
    partial.unlink(missing_ok=True)  # what a killed export left
    try:
        forward = FORMATS[format](student, images[:2], partial)
        with torch.inference_mode():
            difference = (forward(images) - student(images)).abs().max().item()
        if not difference <= TOLERANCE:
            raise UserError(
                f"{out}: the logits of the exported model differ from the student's by "
                f"{difference:.2g}, more than {TOLERANCE}"
            )
        partial.replace(check_place(out))
    finally:
        partial.unlink(missing_ok=True)
    return difference


def check_place(out: Path) -> Path:
    """The file that ``--out`` names, links followed. Raises UserError unless a file can be
    written there: nothing but a regular file is replaced."""
    target = Path(os.path.realpath(out))
    if not target.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {target.parent}")
    if target.is_symlink() or (target.exists() and not target.is_file()):
        kind = "a folder" if target.is_dir() else "no regular file"
        raise UserError(f"--out {out}: {kind} is there; name a file, new or to be replaced")
    return target
