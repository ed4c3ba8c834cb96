"""Bad inputs: a command, the error's kind, and what its one line must name: settings, options,
paths and values, each as a word of its own. What the line says beside them is nobody's contract.

The folder holds tiny.yaml with its finished run runs/tiny, the same with another seed in other/,
a teacher with a compression network in compressed/, a store in several shards (shards.zarr), other
teachers in vit/ and local/, a trained ViT in weights/, images in elsewhere/, and pictures.yaml with
those of pictures/train/{cat,dog}, on which plain/ was trained.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import damage
from pictures import photos
from stores import edit_root

Change = Callable[[Path], Any]


STORE, CHUNK = "StoreError", "CorruptChunk"
PROBLEM = "problem"
"""Not an error: what ``verify`` finds, on stdout and with exit code 1."""


class Row(NamedTuple):
    command: str
    names: str
    change: Change | None = None
    kind: str = "UserError"


# What is done to the folder before the command


def write(name: str, content: str | bytes) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        damage.put(path, content.encode() if isinstance(content, str) else content)

    return change


def remove(name: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def replace(name: str, source: str) -> Change:
    """Puts a copy of another file or folder in the place of one."""

    def change(folder: Path) -> None:
        remove(name)(folder)
        copy = shutil.copytree if (folder / source).is_dir() else shutil.copyfile
        copy(folder / source, folder / name)

    return change


def cut(name: str) -> Change:
    return lambda folder: damage.cut(folder / name)


def flip(name: str, share: float = 0.5, bit: int = 2) -> Change:
    return lambda folder: damage.flip(folder / name, share, bit)


def edit(name: str, old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        damage.put(folder / name, text.replace(old, new).encode())

    return change


def make(name: str, how: Callable[[Path], Any]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        how(folder / name)

    return change


def link(target: str) -> Callable[[Path], Any]:
    return lambda path: path.symlink_to(target)


def only_class(name: str) -> Change:
    """A folder 'new' of images of one class."""
    return both(make("new", Path.mkdir), copy(f"pictures/train/{name}", f"new/{name}"))


def copy(source: str, name: str) -> Change:
    return lambda folder: shutil.copytree(folder / source, folder / name)


def student_config(**changes: Any) -> Change:
    """Changes config.json of the student, some of ``model_args`` too, and takes its digest out: so
    another program may have written it."""

    def change(folder: Path) -> None:
        path = folder / STUDENT / "student" / "config.json"
        config = json.loads(path.read_text())
        del config["sha256"]
        if isinstance(changes.get("model_args"), dict):
            changes["model_args"] = config["model_args"] | changes["model_args"]
        damage.put(path, json.dumps(config | changes).encode())

    return change


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def attributes(name: str, **values: Any) -> Change:
    """Changes attributes of a store and names the change in its manifest; None takes one out."""
    return lambda folder: edit_root(folder / name, **values)


def options(command: str, *cases: tuple[str, ...]) -> list[Row]:
    """Rows of one command: what follows it, what is named, and the kind."""
    return [Row(f"{command} {more}", names, None, *kind) for more, names, *kind in cases]


def settings(*cases: tuple[str, str], command: str = "run tiny.yaml --run-dir new") -> list[Row]:
    """Rows of ``--set``: the settings, separated by `` & ``, and what is named."""
    return [
        Row(f"{command} " + " ".join(f"--set {quote(one)}" for one in changed.split(" & ")), names)
        for changed, names in cases
    ]


SECTIONS = ("phase_a", "phase_b", "train")
CHECKPOINT_A = "runs/tiny/phase_a/checkpoint"
STATE_A = f"{CHECKPOINT_A}/state.pt"
ROWS_A = f"{CHECKPOINT_A}/rows.0001.0000.pt"
STUDENT = "runs/tiny/phase_b/standard"
CHECKPOINT_B = f"{STUDENT}/checkpoint"
MAPS = "runs/tiny/maps.zarr"
EVALUATE = "evaluate --run-dir runs/tiny"
RESUME_A = "phase-a tiny.yaml --run-dir runs/tiny --resume"
RESUME_B = "phase-b --run-dir runs/tiny --resume"
NEW_STUDENT = "phase-b --run-dir runs/tiny --name new"
INSPECT = f"inspect {MAPS}"
COMPARE = "compare tiny.yaml --run-dir new"
MODEL = f"local-dir:{STUDENT}/student"
OF_MODEL = f"--model {MODEL} --images pictures"
ATTENTIONS = "standard belief belief_star xsa belief2 attentionx gaussian"
STORE_KINDS = "gaussian embedding prior dense topk"

COMMAND_LINE = [
    Row("nonsense", "nonsense", kind="UsageError"),
    Row("--import absent.py train", "absent.py"),
    Row("--import wrong.py train", "wrong.py ZeroDivisionError", write("wrong.py", "1 / 0")),
    Row("settings phase", "phase digits"),
    # what is not there: tests/test_cli.py has a list, too
    Row("phase-b --run-dir pictures", "pictures config.yaml"),
    *(
        Row(f"{command} --run-dir absent", "absent config.yaml")
        for command in ("inspect --student belief --image 3", "verify", f"view {MAPS}")
    ),
    *options(
        "run",
        ("--student beleif", f"--student beleif {ATTENTIONS}", "BadParameter"),
        ("tiny.yaml --run-dir tiny.yaml", "tiny.yaml --run-dir"),
        ("tiny.yaml --run-dir /dev/null", "/dev/null", "FileExistsError"),
        ("tiny.yaml --run-dir runs/tiny --set seed=1", "runs/tiny seed 0 1"),
        ("pictures.yaml --run-dir runs/tiny", "runs/tiny data.name digits folder"),
        (f"tiny.yaml --run-dir {'n' * 300}", f"{'n' * 300}/config.yaml", "OSError"),
        ("digits --data pictures", "digits --data"),
        ("--data pictures --run-dir new --set data.root=x", "data.root --data"),
        ("--data elsewhere --run-dir plain", "plain --run-dir"),
    ),
    *options(
        "phase-a tiny.yaml",
        ("", "runs/tiny --resume --run-dir"),
        (
            "--run-dir runs/tiny --resume --set phase_a.mode=stochastic",
            "runs/tiny phase_a.mode expected stochastic",
        ),
    ),
    *options(
        "train tiny.yaml",
        ("", "runs/tiny/plain/standard --resume --run-dir"),
        ("--student Belief3", f"--student Belief3 {ATTENTIONS}", "BadParameter"),
        ("--run-dir new --set 'model.student_args={num_heads: 3}'", "model.student_args num_heads"),
        ("--run-dir new --set data.train_images=99999", "data.train_images 1437"),
        ("--run-dir caf\udce9", "UTF-8 --run-dir"),
        (
            "--student xsa --set 'model.attention_options={zz: true}'",
            "runs/tiny model.attention_options",
        ),
    ),
    *options(
        "export-maps",
        ("--kind gauss", f"--kind gauss {STORE_KINDS}"),
        ("--kind embedding --overwrite", "--kind embedding phase_a.per_image gaussian dense"),
        ("--kind prior --out new.zarr", "--kind prior phase_a.per_image gaussian dense"),
        ("--kind dense", f"{MAPS} --overwrite --repair"),
        ("--kind dense --repair", f"{MAPS} kind dense gaussian --overwrite", "StoreError"),
        ("--encoding int8", "--encoding float16 uint8", "BadParameter"),
        ("--k 0", "--k 1", "BadParameter"),
        ("--k 3 --overwrite", "--k 3 gaussian"),
        ("--kind topk --k 99 --overwrite", "--k 99 16"),
        ("--kind predictions --k 3 --overwrite", "--k 3 predictions"),
        ("--kind predictions --encoding uint8 --out new.zarr", "predictions float16", "StoreError"),
        ("--teacher local-dir:absent", f"--teacher local-dir:absent {MAPS} --out"),
        ("--teacher local-dir:absent --out new.zarr", "local-dir:absent absent"),
        ("--teacher nonsense --out new.zarr", "phase_a.teacher nonsense vit local-dir:FOLDER"),
        ("--teacher vit --out new.zarr", "--teacher vit phase_a.teacher"),
        ("--shard-mb inf --overwrite", "--shard-mb inf 4000"),
        ("--overwrite --repair", "--overwrite --repair"),
        ("", f"{MAPS} --overwrite --repair"),
        ("--out ''", "--out"),
        ("--out pictures/train/cat/0.png/maps.zarr", "0.png/maps.zarr", "StoreError"),
        *((f"--out {url}", url, "StoreError") for url in ("ftp://x/y", "s3:", "file://")),
        ("--out file://elsewhere/maps", "file://elsewhere/maps", "StoreError"),
        ("--out /", "/", "StoreError"),
        ("--out ~nosuchuser/x", "~nosuchuser/x ./~nosuchuser/x", "StoreError"),
        ("--run-dir ~nosuchuser/x", "~nosuchuser/x config.yaml"),
        ("--out absent.zarr --repair", "absent.zarr", "StoreError"),
        ("--run-dir vit --kind prior", "--kind prior topk dense"),
        ("--run-dir vit --set phase_a.teacher_args.depth=3", "phase_a.teacher_args --teacher"),
        ("--run-dir vit --set export.k=4", "phase_a.teacher_args"),
        ("--run-dir local --out new.zarr", "--out"),
    ),
    *options(
        "export-maps",
        ("--images x", "--model --images"),
        (OF_MODEL, "--out"),
        (f"{OF_MODEL} --out new --views 2", "--views"),
        (f"{OF_MODEL} --out new --kind prior", "--kind prior topk dense"),
        ("--image-size 32", "--image-size --model"),
        (f"--model {MODEL} --images none --out new", "none"),
        ("--model resnet18.a1_in1k --images pictures --out new", "resnet18.a1_in1k --download"),
    ),
    *options(
        "phase-b --run-dir runs/tiny",
        ("", f"{STUDENT} --resume --name"),
        ("--no-distill", "runs/tiny/plain/standard --resume --name"),
        ("--no-distill --name x --maps shards.zarr", "--maps shards.zarr --no-distill"),
        ("--name a/b", "a/b name of a student"),
        ("--name é", "é name of a student"),
        ("--name '\x1b[31m'", r"\x1b[31m name of a student"),
        (f"--name {'n' * 200}", f"{'n' * 200} name of a student 100"),
        ("--name belief", "--name belief standard"),
        (
            "--name new --maps compressed/maps.zarr --set phase_b.warm_start=x",
            "phase_b.warm_start none teacher slice exact x",
        ),
        ("--name new --maps ''", "--maps"),
        ("--name new --set phase_a.max_epochs=3", "phase_a.max_epochs --run-dir"),
        ("--name new --set model.args.depth=2", "model.args.depth --run-dir"),
        ("--resume --set train.epochs=3", f"{CHECKPOINT_B} train.epochs 1 3"),
        ("--name new --epochs 3 --set train.epochs=4", "--epochs 3 train.epochs"),
        ("--name new --lr 1 --set train={epochs:1}", "--lr train.optim.lr train"),
        ("--student belief2 --resume --name standard", "--name standard belief2"),
    ),
    *options(
        "evaluate",
        ("--student belief", "runs/tiny/phase_b/belief/student phase-b standard"),
        ("--test", "digits test val"),
        ("--run-dir compressed", "compressed phase-b"),
        ("--data pictures", "--data pictures train 0 9"),
        ("--run-dir plain --data x", "x"),
    ),
    *options(
        "export-student",
        ("--student belief", "runs/tiny/phase_b/belief/student phase-b standard"),
        ("--out pictures", "--out pictures"),
        ("--out absent/x.onnx", "--out absent/x.onnx absent"),
    ),
    *options(
        "publish",
        ("absent --out new", "runs/tiny/phase_b/absent/student phase-b standard"),
        ("--out pictures", "--out pictures"),
    ),
    *options(
        INSPECT,
        ("--image 40", "--image 40 0 39"),
        ("--image -1", "--image -1 0 39"),
        (f"--image {'9' * 5000}", "--image", "BadParameter"),
        (f"--image 0 --head {'9' * 5000}", "--head"),
        ("--image 0 --layer 99", "--layer 99 0"),
        ("--image 0 --head ²", "--head ² 0 1 mean"),
        ("--image 0 --head 2", "--head 2 0 1"),
        ("--image 0 --query 16", "--query 16 0 15"),
        ("--image 0 --png a.txt", "--png a.txt .png"),
        ("--image 0 --png pictures", "--png pictures .png"),
        ("--png a.png", "--png a.png --image"),
        ("--head 0", "--head 0 --image"),
        ("--student standard", "STORE --student"),
    ),
    *options(
        "inspect",
        ("''", "zarr.json", "UnfinishedStore"),
        ("http://x/y", "http://x/y", "StoreError"),
        ("--student belief --image 3", "runs/tiny/phase_b/belief/student phase-b standard"),
        ("--student standard --image 40", "--image 40 0 39"),
        ("--student standard --image 0 --layer 1", "--layer 1 0"),
    ),
    *options(
        "view --no-open",
        ("--student belief", "--student belief runs/tiny standard"),
        (f"{MAPS} --html a.html --image 40", "40 0 39"),
        ("shards.zarr --image 40", "40 0 39"),
        ("shards.zarr --split val", "split val train"),
        ("shards.zarr --student standard", "--student --run-dir"),
        ("shards.zarr --download", "--download --model"),
        (f"shards.zarr --model {MODEL} --images pictures", "STORE --model"),
        (f"--run-dir plain --model {MODEL} --images pictures", "--run-dir --model"),
        (f"--student x --model {MODEL} --images pictures", "--student --model"),
    ),
    *options(
        "view --no-open --images pictures --image-size 33 --model",
        ("swin_tiny_patch4_window7_224 --random-weights", "swin_tiny_patch4_window7_224"),
        ("no_such_model", "no_such_model"),
        ("hf-hub:a/b/c", "hf-hub:a/b/c"),
        ("vit_tiny_patch16_224 --random-weights", "--image-size 33"),
        (f"{MODEL} --random-weights", "--random-weights"),
        ("vit_tiny_patch16_224 --random-weights --download", "--random-weights --download"),
        ("vit_tiny_patch16 --random-weights", "vit_tiny_patch16"),
    ),
    *options(
        "predict",
        (f"{STUDENT}/student ''", "PATHS .", "BadParameter"),
        (f"{STUDENT}/student /dev/null", "/dev/null"),
        (f"{STUDENT}/student pictures --out absent/p.csv", "absent/p.csv absent"),
        ("local-dir:pictures pictures/train/cat/0.png", "pictures/config.json"),
        ("no_such_model pictures", "no_such_model"),
        ("runs/absent pictures", "runs/absent no run"),
        ("runs/absent.jpg pictures", "runs/absent.jpg file"),
        ("~nosuchuser/x pictures", "~nosuchuser/x"),
        (
            "vit_tiny_patch16_224.augreg_in21k pictures",
            "vit_tiny_patch16_224.augreg_in21k --download",
        ),
    ),
    Row(f"predict {STUDENT}/student new", "new", make("new", Path.mkdir)),
    Row("predict pictures", "runs/ phase-a --run-dir", remove("runs")),
    *options(
        "verify",
        ("pictures.yaml --teacher", "pictures.yaml zarr.json", "UnfinishedStore"),
        (f"{MAPS} --teacher --run-dir absent", "absent config.yaml"),
        (f"{MAPS} --teacher --run-dir other", f"{MAPS} teacher", "StoreError"),
        ("shards.zarr --teacher", "shards.zarr --run-dir"),
        ("--sample 9", "--sample 9 --teacher"),
        ("--run-dir local", "local"),
    ),
    Row("inspect --run-dir local", "local"),
    Row("view --no-open --run-dir local --html x.html --image 0", "local"),
    *options(
        "plan tiny.yaml",
        ("--images 10", "--images --classes"),
        ("--images 10 --classes 2 --set model.name=resnet18", "model.name resnet18"),
        ("--set data.workers=1000000", "data.workers 1024 1000000"),
        ("--run-dir /dev/null/x --set seed=x", "seed x"),
        ("--train --world-size 2", "--world-size"),
        ("--world-size 3 --set data.buckets=4", "4 3"),
    ),
    *options(
        COMPARE,
        ("--students beleif", f"--students beleif {ATTENTIONS}"),
        ("--seeds 2147483648", "--seeds 2147483648"),
        ("--seeds 0,x", "--seeds 0,x x"),
        ("--row prior", "--row prior distilled"),
        ("--sweep none", "none loss_weights"),
        ("--sweep tiny.yaml", "tiny.yaml"),
        ("--test", "--test digits"),
    ),
    Row("compare tiny.yaml --run-dir runs/tiny", "runs/tiny --run-dir"),
    Row("compare tiny.yaml --run-dir tiny.yaml", "tiny.yaml --run-dir"),
]

MODEL_ARGS = (
    *("num_heads=3", "embed_dim=15", "patch_size=[2]", "nonsense=1", "reg_tokens=2"),
    *("global_pool=x", "act_layer=x", "embed_layer=x", "init_values=x"),
)
SAID_ELSEWHERE = ("img_size", "in_chans", "num_classes", "pretrained", "device", "attention")

SYNTAX = settings(
    ("sed=1", "sed seed"),
    ("epochs=3", "epochs train.epochs"),
    ("phase_b.epohcs=3", "phase_b.epohcs phase_b.epochs train.epochs"),
    ("phase_a.epochs=3", "phase_a.epochs phase_a.max_epochs train.epochs"),
    ("phase_b.attention_options={}", "phase_b.attention_options model.attention_options"),
    ("lr=0.1", "lr train.optim.lr"),
    ("phase_bb.epochs=3", "phase_bb phase_b"),
    ("train.optim.ema=1", "train.optim.ema 1"),
    ("phase_a.mode=random", "phase_a.mode stochastic expected random"),
    ("train.epochs", "train.epochs"),
    ("=1", "setting"),
    (".=1", "setting"),
    ("data.name.x=1", "data.name"),
    ("seed=2147483648", "seed 2147483648"),
    ("threads=3000000000", "threads 3000000000"),
    ("seed=[1", "seed=[1"),
    ("seed=\x01", "setting"),
    ("model.args={depth: 1, depth: 2}", "depth"),
    ("model.args={depth:1}", "model.args depth:1"),
    ("model.args={num_heads: [2]}", "model.args num_heads"),
    ("model.args={depth: 1001}", "model.args depth 1000"),
    ("model.args={embed_dim: 1e9}", "model.args embed_dim"),
    ("model.args={patch_size: x}", "model.args patch_size"),
    ("model.args={mlp_ratio: null}", "model.args mlp_ratio"),
    ("model.args={drop_rate: 2}", "model.args drop_rate 2"),
    ("model.args={pos_drop_rate: true}", "model.args pos_drop_rate"),
    ("model.args={patch_drop_rate: 0.5}", "model.args patch_drop_rate train.patch_drop_rate"),
    *((f"model.args={{{name}: 1}}", f"model.args {name}") for name in SAID_ELSEWHERE),
    ("model.args={stem: conv} & model.stem=patch", "model.args stem model.stem"),
    ("model.stem=cnn", "model.stem patch conv residual cnn"),
    ("model.args={qkv_bias: maybe}", "model.args qkv_bias maybe"),
    ("model.args={a: &a [*a]}", "model.args={a:"),
    ("data.scaling={std: [1.e-320]}", "data.scaling std.0"),
    ("data.scaling={mean: []}", "data.scaling mean 1"),
    ("data.scaling={mean: [true]}", "data.scaling mean.0"),
    ("phase_a.local.std=[0.7, 0]", "phase_a.local.std.1 0"),
    ("phase_a.local.std=[]", "phase_a.local.std 1"),
    ("phase_a.prior=false & phase_a.per_image=none", "phase_a prior false per_image none"),
    ("phase_a.teacher_args={depth: 2}", "phase_a teacher_args gaussian"),
    (
        "phase_a.teacher=vit & phase_a.teacher_args={img_size: 3}",
        "phase_a img_size data.image_size",
    ),
    (
        "phase_a.teacher=deit_tiny_patch16_224 & phase_a.teacher_args={patch_drop_rate: 0.5}",
        "phase_a teacher_args patch_drop_rate",
    ),
    ("phase_a.teacher=vit & phase_a.teacher_args={depth:3}", "phase_a.teacher_args depth:3"),
    ("phase_b.warm_start=exact", "phase_b.warm_start=exact phase_a.per_image=none"),
    ("phase_b.alpha=0 & phase_b.beta=0 & phase_b.gamma=0", "phase_b alpha beta gamma 0"),
    ("phase_b.divergence=printed & phase_b.temperature=2", "phase_b temperature printed 1"),
    (
        "phase_b.gamma_schedule=constant & phase_b.gamma_epochs=3",
        "phase_b gamma_epochs 3 phase_b.gamma_epochs=null phase_b.gamma_schedule",
    ),
    ("phase_b.warm_start=slice", "phase_b.warm_start=slice phase_a.teacher=vit"),
    command="plan tiny.yaml --run-dir new",
)

EXACT = (
    "phase_a.per_image=none & phase_b.warm_start=exact & model.attention_options={prior: true} & "
)

SETTINGS = [
    *settings(
        ("device=meta", "device meta"),
        ("device=cuda:99", "device cuda:99"),
        ("device=hpu", "device hpu torch.hpu"),
        ("data.name=digitz", "data.name digitz digits fashion_mnist folder torch/NAME"),
        ("data.name=torch/cifar10", "torch/cifar10 data.root download=true"),
        ("data.name=folder", "data.root data/train"),
        ("data.name=folder & data.root=~nosuchuser/x", "data.root ~nosuchuser/x/train"),
        (
            "data.name=fashion_mnist & data.root=absent",
            "fashion_mnist absent/train-images-idx3-ubyte.gz dataset-fashion-mnist",
        ),
        ("data.train_images=9", "data.train_images 9 1437 10"),
        ("data.train_images=100000", "data.train_images 100000 1437"),
        ("data.image_size=9", "data.image_size 9 8 10 model.args.patch_size"),
        *(
            (f"model.args.patch_size={size}", "data.image_size 8 model.args.patch_size")
            for size in ("3", "16", "[2,3,4]")
        ),
        ("data.image_size=1000000000000", "data.image_size 1000000000000"),
        ("data.image_size=12 & model.args.patch_size=6 & model.stem=conv", "6"),
        ("data.image_size=12 & model.args.patch_size=6 & model.stem=residual", "residual 6"),
        ("model.name=gauvit_atto", "model.name gauvit_atto gauvit_atto_patch4_32"),
        ("model.name=vit_tiny_patch16_224", "model.name vit_tiny_patch16_224 gauvit_pico_patch2_8"),
        ("model.name=hf-hub:nobody/nothing", "model.name hf-hub:nobody/nothing"),
        ("model.name=gauvit_converted", "data.image_size model.args.patch_size"),
        *((f"model.args.{argument}", argument.split("=")[0]) for argument in MODEL_ARGS),
        ("model.student_args={patch_size: 3}", "model.student_args.patch_size"),
        ("phase_a.teacher=local-dir:absent", "phase_a.teacher gaussian vit local-dir:FOLDER"),
        (
            "phase_a.teacher=vit & phase_a.teacher_args={nonsense: 3}",
            "phase_a.teacher_args nonsense",
        ),
        (
            "phase_a.teacher=vit & phase_a.teacher_args={num_heads: 5}",
            "phase_a.teacher_args num_heads",
        ),
        (
            "phase_a.teacher=vit & phase_a.teacher_args={depth: 3, embed_dim: 48} "
            "& phase_b.head_map=[5, 5]",
            "phase_b.head_map",
        ),
        ("phase_a.optim.name=adamx", "optim.name adamx"),
        ("phase_a.optim.name=lbfgs", "optim.name lbfgs"),
        ("phase_a.optim.schedule=plateau", "optim.schedule plateau"),
        *((f"{section}.optim.min_lr=1", "optim.min_lr 1 optim.lr 0.004") for section in SECTIONS),
        ("phase_a.optim.schedule_args={nonsense: 1}", "optim.schedule nonsense"),
        (
            "phase_a.optim.schedule_args={decay_epochs: 0} & phase_a.optim.schedule=step "
            "& phase_a.max_epochs=3",
            "optim.schedule step decay_epochs",
        ),
        ("phase_a.optim.schedule_args={step_on_epochs: true}", "optim.schedule step_on_epochs"),
        (
            "phase_a.teacher=vit & model.attention=gaussian & phase_b.warm_start=teacher",
            "phase_b.warm_start=none phase_a.teacher=gaussian",
        ),
        ("model.attention=gaussian & model.args={class_token: true}", "gaussian class_token"),
        ("model.attention_options={prior: 1}", "prior 1 true false"),
        ("model.attention_options={nonsense: 1}", "nonsense prior"),
        ("model.attention=attentionx & model.attention_options={gamma: null}", "gamma None"),
        ("model.attention=attentionx & model.attention_options={gamma: .nan}", "gamma nan"),
        (
            "model.attention=attentionx & model.attention_options={mask_diagonal: 7}",
            "mask_diagonal 7 true false",
        ),
        ("model.student_args={depth: 2} & phase_b.layer_map=[0]", "phase_b.layer_map 2 0"),
        ("model.student_args={num_heads: 4}", "phase_b.head_map=mean 2 4"),
        ("phase_b.layer_map=[1]", "phase_b.layer_map 1 0"),
        (
            "phase_b.warm_start=teacher & model.student_args={mlp_ratio: 3}",
            "phase_b.warm_start model.student_args",
        ),
        *(
            (f"train.patch_drop_rate=0.5 & {student}", "train.patch_drop_rate 0")
            for student in ("model.attention=gaussian", "model.attention_options={prior: true}")
        ),
        ("phase_a.teacher=vit & export.kind=embedding", "export.kind embedding topk dense"),
        ("phase_a.teacher=vit & export.k=17", "export.k 17 16"),
        ("phase_a.teacher=vit & export.views=2", "export.views 2 augment"),
        ("phase_a.teacher=vit & export.kind=dense & export.k=4", "export.k 4 dense"),
        ("export.views=3", "export.views 3"),
    ),
    *(
        Row(
            f"{command} tiny.yaml --run-dir new --set train.patch_drop_rate=0.5 --set '{student}'",
            "train.patch_drop_rate 0",
        )
        for command in ("train", "plan")
        for student in ("model.attention=gaussian", "model.attention_options={prior: true}")
    ),
    *settings(
        (f"{EXACT}phase_a.teacher=vit", "phase_a.teacher=gaussian"),
        (f"{EXACT}phase_a.per_image=table", "phase_a.per_image=none"),
        (f"{EXACT}phase_a.mode=stochastic", "phase_a.mode=expected"),
        (f"{EXACT}model.attention=belief2", "model.attention=standard"),
        (f"{EXACT}model.attention_options={{}}", "prior:"),
        (f"{EXACT}model.match_params=true", "model.match_params=false"),
        (f"{EXACT}model.student_args={{depth: 3}}", "model.student_args"),
        command="phase-a tiny.yaml --run-dir new",
    ),
    *settings(
        ("phase_a.local.std=[1, 2, 3]", "phase_a.local.std 3 2"),
        ("phase_b.layer_map=[0, 7]", "phase_b.layer_map 1"),
        ("phase_b.warm_start=teacher", "phase_b.warm_start"),
        ("phase_b.shuffle_maps=true", "phase_b.shuffle_maps phase_a.local.permuted"),
        ("phase_b.beta=0 & phase_b.gamma=0 & phase_b.alpha=1", "phase_b.alpha"),
        ("phase_a.teacher_args={img_size: 8}", "phase_a teacher_args local"),
        command="phase-a tiny.yaml --run-dir new --set phase_a.teacher=local "
        "--set phase_a.local.std=[0.8]",
    ),
    *settings(
        ("device=nosuch", "device nosuch"),
        ("train.optim.name=adamv", "optim.name adamv"),
        ("train.optim.name=adahessian", "adahessian"),
        ("phase_b.optim.lr=0.1", "phase_b.optim.lr train.optim.lr"),
        ("phase_b.epochs=3", "phase_b.epochs train.epochs"),
        ("model.attention_options={zz: true}", "zz"),
        ("data.buckets=200", "data.buckets 200"),
        command="train tiny.yaml --run-dir new",
    ),
    *settings(
        ("phase_b.warm_start=teacher & model.student_args={mlp_ratio: 3}", "phase_b.warm_start"),
        command=NEW_STUDENT,
    ),
    *(
        Row(f"train --data pictures --run-dir new {more}", names)
        for more, names in (
            (
                "--model vit_tiny_patch16_224.augreg_in21k",
                "vit_tiny_patch16_224.augreg_in21k --download",
            ),
            ("--model vit_tiny_patch16_224.nosuch", "vit_tiny_patch16_224.nosuch"),
            ("--model resnet18.a1_in1k", "model.name resnet18.a1_in1k"),
            ("--model local-dir:nosuch", "nosuch local-dir:FOLDER"),
            ("--model local-dir:pictures", "pictures/config.json"),
        )
    ),
    *settings(
        ("model.match_params=true", "model.match_params"),
        ("train.optim.args={betas: 3}", "betas 3 0.9"),
        ("train.optim.args={betas: [0.9, x]}", "betas 0.999"),
        ("train.optim.args={fallback_list: head.*}", "fallback_list head.*"),
        ("model.attention=gaussian", "gaussian"),
        ("model.args={qkv_bias: false}", "model.args"),
        ("model.args={depth: 4}", "4 3"),
        ("model.args={embed_dim: 26}", "26 24"),
        ("data.scaling={mean: [1, 2]}", "data.scaling"),
        ("data.scaling={std: [0]}", "data.scaling std.0"),
        ("train.optim.args={layer_decay: x}", "adamw"),
        command="train --data pictures --run-dir new --model local-dir:weights",
    ),
]

PLACES = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to a folder": link("."),
    "a link to itself": link("new.pt2"),
    "a device": link("/dev/null"),
    "a link to nowhere": link("absent/file"),
}

FILES = [
    *(
        Row("export-student --out new.pt2", "--out new.pt2", make("new.pt2", place))
        for place in PLACES.values()
    ),
    Row("export-student --out new.bin", "--out new.bin .onnx .pt2"),
    Row("run bad.yaml", "bad.yaml", make("bad.yaml", os.mkfifo)),
    Row("run bad.yaml", "bad.yaml", make("bad.yaml", link("bad.yaml"))),
    Row("run /dev/zero", "/dev/zero"),
    Row(f"run {'x' * 5000}", f"{'x' * 5000}", kind="OSError"),
    Row("compare bad.yaml --run-dir new", "bad.yaml seed x", write("bad.yaml", "seed: x")),
    *(
        Row("run bad.yaml", f"bad.yaml {names}", write("bad.yaml", content))
        for content, names in (
            ("- seed: 1\n", ""),
            ("null: 1\n", "None"),
            ("seed: 2026-02-28\n", "seed"),
            ("data: &a {name: *a}\n", ""),
            ("data: {name: digits, name: folder}\n", "name 1"),
            ("data: " + "[" * 100_000, ""),
            ("seed: " + "9" * 5000, ""),
            ("seed: -.INF\n", "seed"),
            ("data:\n", "data"),
        )
    ),
    *(
        Row("run bad.yaml", "bad.yaml YAML", write("bad.yaml", content))
        for content in (
            *("[1]: 2\n", "<<: {seed: 1}\nseed: 1\nseed: 2\n", "seed: !!binary x\n"),
            *("seed: !!python/name:os.system\n", "seed: {\n", "seed: 1\n---\nseed: 2\n"),
            *("seed: 1 # \x1b[31m\n", b"seed: \xff\xfe\n"),
        )
    ),
]

WRONG_SIZES = {"embed_dim": 10**9, "depth": 2, "in_chans": 3, "num_heads": 5}
CONFIG = "runs/tiny/config.yaml"
DIGEST = "runs/tiny/phase_a/teacher_sha256"

RUNS = [
    *(
        Row(command, f"{CONFIG} nonsense", write(CONFIG, "nonsense: 1"))
        for command in ("evaluate", "run tiny.yaml")
    ),
    *(
        Row("phase-b", f"{CONFIG} {names}", write(CONFIG, content))
        for content, names in (("", ""), ("seed: [", "YAML"))
    ),
    *(
        Row(command, "seed 0 1", replace(CONFIG, "other/config.yaml"))
        for command in (RESUME_A, "export-maps --overwrite", "verify --teacher")
    ),
    Row("train --run-dir runs/tiny", f"{CONFIG} empty", write(CONFIG, "")),
    *(
        Row("plan dotted.yaml", f"dotted.yaml {name} nests", write("dotted.yaml", content))
        for content, name in (
            ("train.epochs: 1", "train.epochs"),
            ("data: {name.x: 1}", "data.name.x"),
        )
    ),
    Row("export-maps", "runs/ phase-a --run-dir", remove(CONFIG)),
    Row("evaluate", "runs/ phase-a --run-dir", both(remove("runs"), write("runs", "a file"))),
    Row("phase-b", "runs/tiny config.yaml", replace(CONFIG, "pictures")),
    *(
        Row(command, names, change)
        for command, checkpoint in ((RESUME_A, CHECKPOINT_A), (RESUME_B, CHECKPOINT_B))
        for change, names in (
            (flip(f"{checkpoint}/state.pt", share=0.1), f"{checkpoint}/state.pt"),  # no padding
            (replace(checkpoint, checkpoint.replace("runs/tiny", "other")), f"{checkpoint} seed 1"),
        )
    ),
    Row(RESUME_A, STATE_A, write(STATE_A, pickle.dumps(os.system))),
    Row("export-maps --overwrite", ROWS_A, cut(ROWS_A)),
    Row("export-maps --overwrite", "runs/tiny phase-a --resume", remove(STATE_A)),
    Row(
        f"{NEW_STUDENT} --set phase_b.warm_start=teacher",
        "runs/tiny phase-a --resume",
        remove(CHECKPOINT_A),
    ),
    Row(NEW_STUDENT, f"{DIGEST} 64", write(DIGEST, b"\xff")),
    Row(NEW_STUDENT, f"{DIGEST} 64", write(DIGEST, "")),
    Row(NEW_STUDENT, f"{DIGEST} 64", flip(DIGEST, bit=7)),
    Row(NEW_STUDENT, f"{MAPS} teacher", replace(DIGEST, "other/phase_a/teacher_sha256"), STORE),
    Row(EVALUATE, f"{STUDENT}/student --resume", flip(f"{STUDENT}/student/model.safetensors")),
    Row(EVALUATE, f"{STUDENT}/student --resume", flip(f"{STUDENT}/student/config.json")),
    Row(
        EVALUATE,
        f"{STUDENT}/student/config.json --resume",
        remove(f"{STUDENT}/student/config.json"),
    ),
    *(
        Row(
            EVALUATE,
            f"{STUDENT}/student --resume",
            both(student_config(), write(f"{STUDENT}/student/{name}", content)),
        )
        for name, contents in (
            ("config.json", (b"", b"{}", b"[" * 10**5, b"\xff" * 100)),
            ("model.safetensors", (b"", b"\0" * 7 + b"@{}")),
        )
        for content in contents
    ),
    *(
        Row(EVALUATE, f"{STUDENT}/student --resume", student_config(**changes))
        for changes in (
            *({"architecture": name} for name in ("resnet18", "no_such_model", 3)),
            {"model_args": None},
            {"num_classes": 7, "model_args": {"num_classes": 7}},
            *({"model_args": {name: value}} for name, value in WRONG_SIZES.items()),
            {"model_args": {"depth": 10**8}},
        )
    ),
    Row(
        EVALUATE,
        f"{STUDENT}/student phase-b",
        both(remove(f"{STUDENT}/student"), write(f"{STUDENT}/student", "")),
    ),
    Row(EVALUATE, f"{STUDENT}/config.yaml YAML", write(f"{STUDENT}/config.yaml", "seed: [")),
    Row(
        "publish --out new",
        f"{STUDENT}/metrics.jsonl JSON --resume",
        write(f"{STUDENT}/metrics.jsonl", "[1]\n"),
    ),
    Row(RESUME_B, f"{STUDENT}/config.yaml YAML", write(f"{STUDENT}/config.yaml", "seed: [")),
    Row("run tiny.yaml", f"{STUDENT}/config.yaml x seed", write(f"{STUDENT}/config.yaml", "x: 1")),
]

STORES = [
    # what the files of a store may hold is in test_store_metadata
    Row(INSPECT, f"{MAPS} format", attributes(MAPS, format="other"), STORE),
    Row(INSPECT, f"{MAPS} 99 7 --overwrite", attributes(MAPS, format_version=99), "OtherVersion"),
    Row(NEW_STUDENT, f"{MAPS} zarr.json --repair", flip(f"{MAPS}/zarr.json"), "DamagedStore"),
    *(
        Row(INSPECT, f"{MAPS} {names}", change, kind)
        for change, names, kind in (
            (remove(MAPS), "zarr.json export-maps", "UnfinishedStore"),
            (both(remove(MAPS), write(MAPS, "a file")), "zarr.json", "UnfinishedStore"),
            (remove(f"{MAPS}/zarr.json"), "zarr.json export-maps", "UnfinishedStore"),
            (flip(f"{MAPS}/zarr.json"), "zarr.json --repair", "DamagedStore"),
            (remove(f"{MAPS}/labels"), "labels/zarr.json --repair", "DamagedStore"),
        )
    ),
    Row(f"{INSPECT} --image 0", "gaussians 0 39 --repair", remove(f"{MAPS}/gaussians/c"), CHUNK),
    *(
        Row(command, f"{MAPS} export-maps", attributes(MAPS, complete=False), "UnfinishedStore")
        for command in (f"{INSPECT} --image 0", NEW_STUDENT)
    ),
    Row(f"view {MAPS} --html a.html", MAPS, attributes(MAPS, extra={"data": 1})),
    Row(
        f"view {MAPS} --html a.html",
        f"{MAPS} digits",
        attributes(MAPS, extra={"data": {"name": "digits", "train_images": 41}}),
    ),
    Row(NEW_STUDENT, f"{MAPS} teacher", replace(MAPS, "other/maps.zarr"), STORE),
    Row(NEW_STUDENT, "gaussians 0 39 --repair", cut(f"{MAPS}/gaussians/c/0/0/0/0/0"), CHUNK),
    Row(NEW_STUDENT, "logits 0 39 --repair", flip(f"{MAPS}/logits/c/0/0"), CHUNK),
    Row(EVALUATE, f"{MAPS} logits --repair", flip(f"{MAPS}/logits/c/0/0", bit=7), CHUNK),
    Row(
        EVALUATE,
        f"{MAPS} gaussians/zarr.json --repair",
        flip(f"{MAPS}/gaussians/zarr.json", bit=7),
        "DamagedStore",
    ),
    *(
        Row(f"{EVALUATE} {more}", f"{MAPS} {names} ({'b' * 16})", attributes(MAPS, **values), STORE)
        for more in ("", "--plain")
        for names, values in (
            ("teacher", {"teacher_sha256": "b" * 64}),
            ("data set", {"dataset_sha256": "b" * 64}),
        )
    ),
    Row(
        "phase-b --run-dir runs/tiny --name new --maps shards.zarr",
        f"shards.zarr data set ({'0' * 16})",
        attributes("shards.zarr", dataset_sha256="0" * 64),
        STORE,
    ),
    Row(
        "phase-b --run-dir compressed --student standard",
        "compressed/maps.zarr decoder/prior/c/0/0/0/0 --repair",
        flip("compressed/maps.zarr/decoder/prior/c/0/0/0/0"),
        "DamagedStore",
    ),
    Row(
        "inspect compressed/maps.zarr --image 0",
        "compressed/maps.zarr decoder/weight1/zarr.json --repair",
        remove("compressed/maps.zarr/decoder/weight1"),
        "DamagedStore",
    ),
    Row(
        f"verify {MAPS}",
        "0 gaussians 39",
        replace(f"{MAPS}/gaussians/c/0/0/0/0/0", "other/maps.zarr/gaussians/c/0/0/0/0/0"),
        PROBLEM,
    ),
    *(
        Row("verify shards.zarr", names, change, PROBLEM)
        for change, names in (
            (flip("shards.zarr/gaussians/c/1/0/0/0/0"), "1 gaussians 17 33"),
            (remove("shards.zarr/gaussians/c/1"), "1 gaussians 17 33 missing"),
            (remove("shards.zarr/zarr.json"), "shards.zarr zarr.json missing"),
            (attributes("shards.zarr", complete=False), "shards.zarr incomplete"),
            (remove("shards.zarr/manifest"), "manifest/zarr.json missing --repair"),
            (remove("shards.zarr/labels/zarr.json"), "labels/zarr.json missing --repair"),
        )
    ),
    Row("verify bad", "bad zarr.json", make("bad", link("bad")), "UnfinishedStore"),
    Row("verify --teacher", f"{MAPS} teacher", replace(MAPS, "other/maps.zarr"), STORE),
    Row(
        "export-maps --repair",
        f"{MAPS} teacher_sha256 --overwrite",
        replace(MAPS, "other/maps.zarr"),
        STORE,
    ),
    Row("export-maps --out bad.zarr --overwrite", "bad.zarr", write("bad.zarr", "a file"), STORE),
]

DATA = [
    Row(
        "phase-a pictures.yaml --run-dir new",
        "pictures/train/cat/0.png",
        write("pictures/train/cat/0.png", "text"),
    ),
    *(
        Row("run pictures.yaml --run-dir new", names, change)
        for change, names in (
            (remove("pictures"), "data.root pictures/train --data"),
            (write("pictures/val/horse/0.png", b"x"), "data.root pictures/val horse"),
        )
    ),
    *settings(
        ("data.train_images=19", "data.train_images 19 18"),
        ("data.val_fraction=0.001", "data.val_fraction 0.001 20"),
        command="run pictures.yaml --run-dir new",
    ),
    Row(
        "train --data pictures --run-dir new --set data.leave_out_copies=true",
        "data.leave_out_copies cat",
        copy("pictures/train", "pictures/test"),
    ),
    Row("run --data new", "new/train", make("new", Path.mkdir)),
    Row("plan --data new", "cat", only_class("cat")),
    *(
        Row(command, "pictures/train/cat/9.png", cut("pictures/train/cat/9.png"))
        for command in (
            "run --data pictures",
            "train pictures.yaml --run-dir new --set data.cache=none",
        )
    ),
    Row("run --data pictures --unlabelled new", "--unlabelled new"),
    Row("run --data pictures --set phase_a=3", "phase_a 3"),
    Row("phase-a --data pictures --set phase_a=3", "phase_a 3"),
    Row("run tiny.yaml --unlabelled pictures", "data.unlabelled pictures digits"),
    *(
        Row(f"{command} --run-dir new --set data.unlabelled=text", "data.unlabelled text", change)
        for command, change in (
            ("run pictures.yaml", None),
            ("phase-a pictures.yaml", make("text", Path.mkdir)),
            ("plan pictures.yaml", write("text/1.txt", "text")),
        )
    ),
    *(
        Row(f"run pictures.yaml --unlabelled {inside}", f"data.unlabelled {inside} pictures/train")
        for inside in ("pictures/train", "pictures/train/cat")
    ),
    Row(
        "run --data pictures",
        "data.unlabelled pictures/unlabelled",
        make("pictures/unlabelled", Path.mkdir),
    ),
    Row(
        "phase-a pictures.yaml --run-dir new",
        "data.unlabelled 20",
        copy("elsewhere", "pictures/unlabelled"),
    ),
    *(
        Row(
            f"phase-a --data pictures --run-dir new {more}",
            names,
            lambda folder: photos(folder / "pictures/unlabelled", ("a",), size=(5, 5)),
        )
        for more, names in (
            ("--teacher local", "data.unlabelled local resnet pictures/unlabelled"),
            ("--teacher gaussian", "data.unlabelled gaussian resnet"),
            ("--set phase_b.alpha=0", "phase_b.alpha pictures/unlabelled"),
            ("--set phase_b.gamma=0.1", "phase_b.gamma resnet phase_b.gamma=0"),
            ("--teacher resnet --set phase_b.warm_start=teacher", "phase_b.warm_start resnet"),
        )
    ),
    Row(
        "plan --data pictures/train",
        "pictures/train/unlabelled",
        copy("elsewhere", "pictures/train/unlabelled"),
    ),
    Row("plan --unlabelled pictures --images 9 --classes 2", "--unlabelled pictures --images"),
    Row("plan --model vit_tiny_patch16_224", "--model vit_tiny_patch16_224 --data --images"),
    Row("plan digits --model vit_tiny_patch16_224 --images 9", "CONFIG --model"),
    *(
        Row(f"plan --model vit_tiny_patch16_224 --images 9 {more}", f"{more.split()[0]} --model")
        for more in ("--train", "--world-size 2", "--set seed=1", "--download", "--classes 3")
    ),
    Row("plan --data pictures --model vit_tiny_patch16_224 --train", "--train --model"),
    Row("plan --model absent --images 9", "absent"),
    Row(
        "plan --data pictures --model vit_tiny_patch16_224 --set data.image_size=16",
        "--model vit_tiny_patch16_224 --download",
    ),
    Row("plan --model resnet18 --images 9", "resnet18"),
    Row("plan --data pictures --model vit_tiny_patch16_224", "data.image_size 16 8"),
    Row("plan --model local-dir:absent --images 9", "no folder absent"),
    Row("curves pictures", "pictures nothing metrics.jsonl"),
    Row("curves runs/tiny absent", "absent"),
    *(
        Row(f"{command} ''", option, kind="BadParameter")
        for command, option in (
            ("run --unlabelled", "--unlabelled"),
            ("run --teacher", "--teacher"),
            ("train --model", "--model"),
            ("plan --images 9 --model", "--model"),
        )
    ),
    Row("curves runs/tiny --out a.txt", "--out a.txt .png"),
    Row("plan --unlabelled pictures --train", "--unlabelled pictures --train"),
    Row("plan --teacher vit --train", "--teacher vit --train"),
    Row(
        "plan --data pictures --model local-dir:vit --teacher vit --set threads=1",
        "--teacher local-dir:vit",
    ),
    *(
        Row(f"{command} tiny.yaml {option} --set {setting}=xsa", f"{option} {setting}")
        for command, option, setting in (
            ("run", "--teacher vit", "phase_a.teacher"),
            ("phase-a", "--teacher vit", "phase_a.teacher"),
            ("plan", "--teacher vit", "phase_a.teacher"),
            ("train", "--model vit", "model.name"),
            ("train", "--student belief", "model.attention"),
        )
    ),
    Row(
        "run tiny.yaml --unlabelled pictures --set data.unlabelled=pictures",
        "--unlabelled pictures data.unlabelled",
    ),
    Row("evaluate --run-dir plain", "data.root --data --run-dir", remove("pictures")),
    Row(
        "evaluate --run-dir plain --data new",
        "wasp cat dog",
        both(make("new", Path.mkdir), copy("pictures/train/cat", "new/wasp")),
    ),
    Row(
        "evaluate --run-dir plain",
        "pictures",
        remove("pictures/train/cat/3.png"),
    ),
]

SWEEPS = [
    Row(f"{COMPARE} --sweep bad.yaml", names, write("bad.yaml", content))
    for content, names in (
        ("", "bad.yaml"),
        ("- [a]", "bad.yaml"),
        ("- {phase_b.gama: 1}", "phase_b.gama phase_b.gamma"),
        ("- {phase_b.gamma: .nan}", "phase_b.gamma nan"),
        ("- {phase_b.gamma.x: 1}", "gamma"),
        ("- {name: a, phase_b.gamma: 0.5}\n- {name: a, phase_b.gamma: 0.6}", "bad.yaml a"),
        ("- {name: distilled, phase_b.gamma: 0.5}", "bad.yaml distilled"),
        ("- {name: a, like: b}", "bad.yaml a like b distilled"),
        ("- {name: a, plain: maybe}", "bad.yaml a plain maybe"),
        ("- {name: a, kind: x}", "a kind export.kind"),
        ("- {name: a, seed: 1}", "bad.yaml a seed --seeds"),
        ("- {name: 5}", "bad.yaml 5 name"),
        ("- {export.kind: prior, export.encoding: uint8}", "export.kind prior phase_a.per_image"),
        (
            "- {phase_a.per_image: none, export: {kind: prior, encoding: uint8}}",
            "encoding prior float16",
        ),
        ("- {like: [a]}", "bad.yaml like distilled"),
        ("- {name: a, plain: true, phase_b.gamma: 5}", "bad.yaml a phase_b.gamma"),
        ("- {name: a, plain: true, phase_a.max_epochs: 5}", "bad.yaml a phase_a.max_epochs"),
        ("- {name: a, plain: true, phase_b: {gamma: 5}}", "bad.yaml a phase_b"),
        ("- {name: [a], phase_b.gamma: 1}", "bad.yaml name"),
        ("- {name: a, phase_b.layer_map: [0, 0, 0]}", "a phase_b.layer_map 1"),
        ("- {name: a, model.name: resnet18}", "model.name resnet18"),
        ("- {name: a, name: b}", "bad.yaml name"),
    )
]

ROWS = [
    *COMMAND_LINE,
    *SYNTAX,
    *SETTINGS,
    *FILES,
    *RUNS,
    *STORES,
    *DATA,
    *SWEEPS,
]
