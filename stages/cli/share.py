"""Commands that give a student to others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from gaupipe.system.files import check_file, check_new_folder
from stages.begin import begins, say
from stages.cli.app import command
from stages.cli.options import Plain, RunDir, StudentArgument, StudentName, option
from stages.request import find_run


@command("Share", "export-student")
def export_student(
    run_dir: RunDir = None,
    student: StudentName = None,
    out: Annotated[
        Path | None,
        option(
            "--out FILE",
            "Where the model goes: FILE.onnx or, as the program that torch.export makes, FILE.pt2.",
            "student.onnx beside the student",
        ),
    ] = None,
    plain: Plain = False,
) -> None:
    """Write a student as ONNX or by torch.export.

    The file is run, and its outputs are compared with the student's. ONNX needs
    `pip install -e '.[onnx]'` in the folder of gaupipe's clone.

    Example: `gaupipe export-student --student belief2 --out belief2.onnx`
    """
    run_dir = find_run(run_dir)
    if out is not None:
        check_file("--out", out, ".onnx", ".pt2")
    with begins(f"export: {student or 'the student trained last'} of {run_dir}"):
        from stages.publish import export_student as stage

    path, difference, use = stage.export_student(run_dir, student, out=out, plain=plain)
    say(f"its logits agree with the student's to {difference:.1e}")
    say("to run it:", ["python", "-c", use])
    print(path)


@command("Share")
def publish(
    out: Annotated[
        Path, option("--out FOLDER", "A new folder for model, settings and model card.")
    ],
    student: StudentArgument = None,
    run_dir: RunDir = None,
    plain: Plain = False,
) -> None:
    """Give a student to others: a folder that timm loads, and 'hf upload' uploads.

    The run fills in its model card; the licence is left to you.

    Example: `gaupipe publish belief2 --out my-student`
    """
    run_dir = find_run(run_dir)
    check_new_folder("--out", out)
    with begins(f"publish: {student or 'the student trained last'} of {run_dir}, into {out}"):
        from stages.publish import folder as stage

    print(stage.publish(run_dir, student, out=out, plain=plain))
