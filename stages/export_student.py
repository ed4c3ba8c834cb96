"""Export of a student to ONNX, checked in onnxruntime."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from timm.models.vision_transformer import VisionTransformer

from gaupipe.errors import UserError
from stages.evaluate import load_student
from stages.run_directory import RunDirectory

TOLERANCE = 1e-4
"""Largest difference of a logit between torch and onnxruntime."""


def run(
    run_dir: Path,
    name: str | None = None,
    *,
    out: Path | None = None,
    distilled: bool | None = None,
) -> tuple[Path, float]:
    """Writes a student as ONNX, for any number of images, and returns the file and the largest
    difference between its logits and torch's on random images. A model that differs by more than
    ``TOLERANCE`` is not left behind.

    A file that is there is replaced, through a link too. Raises UserError for a place that holds
    anything else.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter needs it)
    except ImportError as error:
        raise UserError(f"export to ONNX needs {error.name}: pip install 'gaupipe[onnx]'") from None
    run = RunDirectory(run_dir)
    distilled = run.is_distilled(name) if distilled is None else distilled
    settings, student, name = load_student(run_dir, name, distilled)
    assert isinstance(student, VisionTransformer)  # load_student refuses others
    out = Path(out or run.student(name, distilled) / "student.onnx")
    target = check_place(out)
    generator = torch.Generator().manual_seed(settings.seed)
    images = torch.randn(5, student.in_chans, *student.patch_embed.img_size, generator=generator)
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)  # what a killed export left
    try:
        torch.onnx.export(
            student,
            (images[:2],),
            str(partial),
            dynamo=True,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
            verbose=False,
            external_data=False,
        )
        session = onnxruntime.InferenceSession(str(partial), providers=["CPUExecutionProvider"])
        with torch.inference_mode():
            expected = student(images)
        difference = (
            (torch.from_numpy(session.run(None, {"images": images.numpy()})[0]) - expected)
            .abs()
            .max()
            .item()
        )
        if not difference <= TOLERANCE:
            raise UserError(
                f"{out}: onnxruntime's logits differ from torch's by {difference:.2g}, "
                f"more than {TOLERANCE}"
            )
        partial.replace(check_place(out))
    finally:
        partial.unlink(missing_ok=True)
    return out, difference


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
