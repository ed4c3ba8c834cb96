"""Bad inputs: a command, what its one line must say, and what is changed in the folder before.

The folder holds tiny.yaml with its finished run runs/tiny, the same with another seed in other/,
a teacher with a compression network in compressed/, a store in several shards (shards.zarr), and
pictures.yaml with the images of pictures/train/{cat,dog}.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stores import edit_root

Change = Callable[[Path], Any]


class Row(NamedTuple):
    command: str
    message: str
    change: Change | None = None
    code: int = 2


# What is done to the folder before the command


def put(path: Path, content: bytes) -> None:
    """Writes a new file. The old one may be linked to from elsewhere, and stays."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def write(name: str, content: str | bytes) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, content.encode() if isinstance(content, str) else content)

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
    """Keeps the first half of a file."""

    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        put(folder / name, content[: len(content) // 2])

    return change


def flip(name: str, at: float = 0.5) -> Change:
    """Flips a bit of a file, at a share of its length."""

    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(at * len(content))] ^= 4
        put(folder / name, content)

    return change


def edit(name: str, old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        put(folder / name, text.replace(old, new).encode())

    return change


def make(name: str, how: Callable[[Path], Any]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        how(folder / name)

    return change


def link(target: str) -> Callable[[Path], Any]:
    return lambda path: path.symlink_to(target)


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def attributes(name: str, **values: Any) -> Change:
    """Changes attributes of a store and names the change in its manifest; None takes one out."""
    return lambda folder: edit_root(folder / name, **values)


def options(command: str, *cases: tuple[str, str]) -> list[Row]:
    """Rows of one command: what follows it, and the message."""
    return [Row(f"{command} {more}", message) for more, message in cases]


def settings(*cases: tuple[str, str], command: str = "run tiny.yaml --run-dir new") -> list[Row]:
    """Rows of ``--set``: the settings, separated by `` & ``, and the message."""
    return [
        Row(f"{command} " + " ".join(f"--set '{one}'" for one in changed.split(" & ")), message)
        for changed, message in cases
    ]


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
PLAN = "plan tiny.yaml"
COMPARE = "compare tiny.yaml --run-dir new"

COMMAND_LINE = [
    Row("nonsense", "nonsense"),
    Row("--nonsense", "--nonsense"),
    *(
        Row(f"{command} --run-dir {folder}", f"{folder} is not a run directory")
        for command in ("export-maps", "phase-b", "evaluate", "inspect --student belief --image 3")
        for folder in ("absent", "pictures")
    ),
    Row("verify --run-dir absent", "absent"),
    Row("export-student --run-dir absent", "not a run directory"),
    Row("publish --out new --run-dir absent", "not a run directory"),
    *options(
        "run",
        ("--student beleif", "belief"),
        ("--run-dir", "--run-dir"),
        ("--set", "--set"),
        ("--resume", "--resume"),
        ("absent.yaml", "absent.yaml"),
        ("tiny.yaml --run-dir tiny.yaml", "not a run directory"),
        ("tiny.yaml --run-dir /dev/null", "/dev/null"),
        ("tiny.yaml --run-dir runs/tiny --set seed=1", "seed is 0, asked 1"),
        ("tiny.yaml --run-dir runs/tiny --set train.epochs=2", "train.epochs"),
        ("pictures.yaml --run-dir runs/tiny", "other settings"),
        (f"tiny.yaml --run-dir {'n' * 300}", "nnn"),
    ),
    *options(
        "phase-a tiny.yaml",
        ("", "--resume"),
        ("--run-dir runs/tiny --resume --set phase_a.mode=stochastic", "phase_a.mode"),
    ),
    *options(
        "train tiny.yaml",
        ("", "already exists"),
        ("--resume --set seed=1", "seed is 0, asked 1"),
        ("--student beleif", "belief"),
        ("--run-dir new --set 'model.student_args={num_heads: 3}'", "cannot be built"),
        ("--run-dir new --set data.train_images=99999", "data.train_images"),
    ),
    *options(
        "export-maps",
        ("--kind gauss", "--kind"),
        ("--kind embedding --overwrite", "--kind embedding"),
        ("--kind dense", "--overwrite"),
        ("--encoding int8", "--encoding"),
        ("--k 0", "--k"),
        ("--k 3 --overwrite", "--k 3: a store of the kind gaussian has no k"),
        ("--kind topk --k 99 --overwrite", "--k 99"),
        ("--views 0", "--views"),
        ("--teacher local-dir:absent", "--out"),
        ("--teacher local-dir:absent --out new.zarr", "there is no folder"),
        ("--teacher nonsense --out new.zarr", "timm has no weights"),
        ("--teacher vit --out new.zarr", "is trained by phase A"),
        ("--shard-mb inf --overwrite", "--shard-mb inf"),
        ("--shard-mb 1e300 --overwrite", "shard"),
        ("--overwrite --repair", "--repair"),
        ("", "--overwrite"),
        ("--out ''", "--out"),
        ("--out pictures/train/cat/0.png/maps.zarr", "0.png"),
        ("--out ftp://x/y", "ftp://x/y"),
        ("--out ~nosuchuser/x", "~nosuchuser/x: there is no such user"),
        ("--run-dir ~nosuchuser/x", "~nosuchuser/x is not a run directory"),
        ("--out s3://", "s3://"),
        ("--out absent.zarr --repair", "no attention-map store"),
        ("--out pictures --repair", "pictures: is not empty"),
        ("--out shards.zarr --kind dense --repair", "another export is there"),
    ),
    *options(
        "phase-b --run-dir runs/tiny",
        ("", "already exists"),
        ("--student beleif", "belief"),
        ("--no-distill", "already exists"),
        ("--no-distill --name x --maps shards.zarr", "--maps"),
        ("--name a/b", "--name"),
        ("--name é", "--name"),
        ("--name 'a\nb'", "--name"),
        ("--name '\x1b[31m'", "--name"),
        (f"--name {'n' * 200}", "--name"),
        ("--name belief", "is the name of an attention"),
        ("--name new --maps absent.zarr", "no attention-map store"),
        ("--name new --maps compressed/maps.zarr --set phase_b.warm_start=x", "warm_start"),
        ("--name new --maps ''", "--maps"),
        ("--name new --set phase_a.max_epochs=3", "belongs to the run"),
        ("--name new --set model.args.depth=2", "--set model.args.depth: belongs to the run"),
        ("--resume --set train.epochs=3", "train.epochs"),
        ("--name new --epochs 3 --set train.epochs=4", "--epochs 3: is train.epochs"),
        ("--name new --lr 1 --set train={epochs:1}", "--lr 1.0: is train.optim.lr"),
        ("--name new --seed -1", "--seed"),
        ("--name new --lr 0", "train.optim.lr"),
        ("--student belief2 --resume --name standard", "is the name of an attention"),
    ),
    *options(
        "evaluate",
        ("--student belief", "phase-b"),
        ("--test", "no test split"),
        ("--run-dir compressed", "no student"),
        ("extra", "extra"),
    ),
    *options(
        "export-student",
        ("--student belief", ""),
        ("--out pictures", ""),
        ("--out absent/x.onnx", ""),
        ("--format torch", "--format"),
    ),
    *options(
        "publish",
        ("", "--out"),
        ("absent --out new", "phase-b"),
        ("--out pictures", "is there already"),
    ),
    *options(
        INSPECT,
        ("--image 40", "0 to 39"),
        ("--image -1", "0 to 39"),
        (f"--image {'9' * 5000}", "--image"),
        ("--image 0 --layer 99", "--layer 99"),
        ("--image 0 --head ²", "--head"),
        ("--image 0 --head 2", "--head 2"),
        ("--image 0 --query 16", "--query 16"),
        ("--image 0 --png a.txt", "--png"),
        ("--image 0 --png absent/a.png", "absent"),
        ("--png a.png", "--image"),
        ("--head 0", "--image"),
        ("--student standard", "not both"),
    ),
    *options(
        "view --no-open",
        ("absent.zarr", "no attention-map store"),
        ("--student belief", "there are standard"),
        ("--port 0", "--port"),
        (f"{MAPS} --html a.html --image 40", "0 to 39"),
    ),
    *options(
        "inspect",
        ("absent.zarr", "no attention-map store"),
        ("''", "no attention-map store"),
        ("http://x/y", "http://x/y"),
        ("--student belief --image 3", "phase-b"),
        ("--student standard --image 40", "0 to 39"),
        ("--student standard --image 0 --layer 1", "--layer 1"),
    ),
    *options(
        "verify",
        ("absent.zarr", "no attention-map store"),
        ("pictures.yaml --teacher", "pictures.yaml"),
        (f"{MAPS} --sample 0 --teacher", "--sample"),
        (f"{MAPS} --teacher --run-dir absent", "not a run directory"),
        (f"{MAPS} --teacher --run-dir other", "another teacher"),
        ("shards.zarr --teacher", "not a run directory"),
    ),
    *options(
        PLAN,
        ("--steps -1", "--steps"),
        ("--images 10", "--classes"),
        ("--images 10 --classes 2 --set model.name=resnet18", "model.name"),
        ("--set data.workers=1000000", "data.workers"),
        ("--run-dir /dev/null/x --set seed=x", "seed"),
    ),
    *options(
        COMPARE,
        ("--students beleif", "--students"),
        ("--seeds 2147483648", "--seeds"),
        ("--seeds 0,x", "--seeds"),
        ("--targets nan", "--targets"),
        ("--targets 84", "less than or equal to 1"),
        ("--jobs 0", "--jobs"),
        ("--row prior", "prior alone"),
        ("--sweep none", "loss_weights"),
        ("--sweep tiny.yaml", "a sweep is a list"),
        ("--test", "no test split"),
    ),
    Row("compare tiny.yaml --run-dir runs/tiny", "holds no comparison"),
    Row("compare tiny.yaml --run-dir tiny.yaml", "tiny.yaml"),
]

MODEL_ARGS = (
    *("num_heads=3", "embed_dim=15", "patch_size=3", "patch_size=16", "patch_size=[2]"),
    *("patch_size=[2,3,4]", "patch_size=[]", "nonsense=1", "class_token=true", "reg_tokens=2"),
    *("pos_embed=x", "global_pool=x", "act_layer=x", "norm_layer=x", "block_fn=x", "mlp_layer=x"),
    *("embed_layer=x", "weight_init=x", "init_values=x"),
)

SETTINGS = [
    *settings(
        # what the loader refuses is in test_config
        ("device=meta", "device"),
        ("device=cuda:99", "device"),
        ("device=hpu", "device: 'hpu' cannot be used: No module named 'torch.hpu'"),
        ("data.name=digitz", "unknown data set 'digitz'"),
        ("data.name=torch/cifar10", "download=true"),
        ("data.name=folder", "data.root"),
        ("data.name=folder & data.root=~nosuchuser/x", "~nosuchuser/x"),
        ("data.name=fashion_mnist & data.root=absent", "apt-get install dataset-fashion-mnist"),
        ("data.train_images=9", "class by class"),
        ("data.train_images=100000", "has 1437 training images"),
        ("data.image_size=9", "8 or 10 would fit"),
        ("data.image_size=1000000000000", "data.image_size"),
        ("model.name=gauvit_atto", "did you mean 'gauvit_atto_patch4_32'"),
        ("model.name=vit_tiny_patch16_224", "has no choice of attentions"),
        ("model.name=hf-hub:nobody/nothing", "model.name"),
        ("model.name=gauvit_converted", "gauvit_converted cannot be built"),
        *((f"model.args.{argument}", argument.split("=")[0]) for argument in MODEL_ARGS),
        ("phase_a.teacher=local-dir:absent", "there is no folder"),
        ("phase_a.teacher=vit & phase_a.teacher_args={nonsense: 3}", "nonsense"),
        ("phase_a.optim.name=adamx", "optim.name"),
        ("phase_a.optim.name=lbfgs", "optim"),
        ("phase_a.optim.schedule=plateau", "optim.schedule"),
        ("phase_a.optim.min_lr=1", "optim.min_lr: 1 is above optim.lr, 0.004"),
        ("phase_b.optim.min_lr=1", "optim.min_lr: 1 is above optim.lr, 0.004"),
        ("baseline.optim.min_lr=1", "optim.min_lr: 1 is above optim.lr"),
        ("phase_a.optim.schedule_args={nonsense: 1}", "nonsense"),
        (
            "phase_a.optim.schedule_args={decay_epochs: 0} & phase_a.optim.schedule=step "
            "& phase_a.max_epochs=3",
            "schedule",
        ),
        ("phase_a.optim.schedule_args={step_on_epochs: true}", "schedule"),
        (
            "phase_a.teacher=vit & model.attention=gaussian & phase_b.warm_start=teacher",
            "a trained ViT has none",
        ),
        ("model.attention=gaussian & model.args={class_token: true}", "register token"),
        ("model.attention_options={prior: 1}", "prior"),
        ("model.attention_options={nonsense: 1}", "nonsense"),
        ("model.attention=attentionx & model.attention_options={gamma: null}", "gamma"),
        ("model.attention=attentionx & model.attention_options={gamma: .nan}", "finite number"),
        ("model.attention=attentionx & model.attention_options={mask_diagonal: 7}", "diagonal"),
        ("model.student_args={depth: 2} & phase_b.layer_map=[0]", "layer_map"),
        ("model.args={qkv_bias: maybe}", "qkv_bias"),
        ("model.args={a: &a [*a]}", "not a YAML value"),
        ("model.student_args={num_heads: 4}", "heads"),
        ("phase_b.layer_map=[1]", "layer_map"),
        ("phase_b.warm_start=teacher & model.student_args={mlp_ratio: 3}", "warm_start"),
        ("phase_b.warm_start=slice", "warm_start=slice is cut from a trained ViT"),
    ),
    *settings(
        ("phase_b.warm_start=teacher & model.student_args={mlp_ratio: 3}", "warm_start"),
        command=NEW_STUDENT,
    ),
]

YAML = [
    # what the file may hold is in test_config
    Row("run bad.yaml", "bad.yaml", make("bad.yaml", os.mkfifo)),
    Row("run bad.yaml", "bad.yaml", make("bad.yaml", link("bad.yaml"))),
    Row("run /dev/zero", "/dev/zero"),
    Row(f"run {'x' * 5000}", "xxx"),
    Row("compare bad.yaml --run-dir new", "seed", write("bad.yaml", "seed: x")),
]

RUNS = [
    *(
        Row(command, "nonsense", write("runs/tiny/config.yaml", "nonsense: 1"))
        for command in ("evaluate", "export-maps", "run tiny.yaml", RESUME_A)
    ),
    *(
        Row("phase-b", message, write("runs/tiny/config.yaml", content))
        for content, message in (("", "config.yaml"), ("seed: [", "YAML"), (b"\xff\0", "YAML"))
    ),
    *(
        Row(command, message, change)
        for command in (RESUME_A, "export-maps --overwrite", "verify --teacher")
        for change, message in (
            (replace("runs/tiny/config.yaml", "other/config.yaml"), "seed"),
            (edit("runs/tiny/config.yaml", "mode: expected", "mode: stochastic"), "phase_a.mode"),
        )
    ),
    Row("export-maps", "no run in runs/", remove("runs/tiny/config.yaml")),
    Row("evaluate", "no run in runs/", both(remove("runs"), write("runs", "a file"))),
    Row("phase-b", "not a run", replace("runs/tiny/config.yaml", "pictures")),
    *(
        Row(command, message, change)
        for command, checkpoint in ((RESUME_A, CHECKPOINT_A), (RESUME_B, CHECKPOINT_B))
        for change, message in (
            (flip(f"{checkpoint}/state.pt", at=0.1), "damaged"),  # no padding
            (replace(checkpoint, checkpoint.replace("runs/tiny", "other")), "was started"),
        )
    ),
    Row(RESUME_A, "damaged", write(STATE_A, pickle.dumps(os.system))),
    Row("export-maps --overwrite", "rows.0001.0000.pt is missing or damaged", cut(ROWS_A)),
    Row("export-maps --overwrite", "has not finished", remove(STATE_A)),
    Row(
        f"{NEW_STUDENT} --set phase_b.warm_start=teacher",
        "has not finished",
        remove("runs/tiny/phase_a/checkpoint"),
    ),
    Row(NEW_STUDENT, "teacher_sha256", write("runs/tiny/phase_a/teacher_sha256", b"\xff")),
    Row(EVALUATE, "teacher_sha256", write("runs/tiny/phase_a/teacher_sha256", "")),
    Row(
        NEW_STUDENT,
        "another teacher",
        replace("runs/tiny/phase_a/teacher_sha256", "other/phase_a/teacher_sha256"),
    ),
    Row(EVALUATE, "damaged", flip(f"{STUDENT}/student/model.safetensors")),
    Row(EVALUATE, "config.json is not there", remove(f"{STUDENT}/student/config.json")),
    Row(EVALUATE, "no student", remove(f"{STUDENT}/student")),
    Row(EVALUATE, "", both(remove(f"{STUDENT}/student"), write(f"{STUDENT}/student", ""))),
    Row(EVALUATE, "config.yaml", write(f"{STUDENT}/config.yaml", "seed: [")),
    Row("publish --out new", "metrics.jsonl", write(f"{STUDENT}/metrics.jsonl", "[1]\n")),
    Row(RESUME_B, "config.yaml", write(f"{STUDENT}/config.yaml", "seed: [")),
    Row("run tiny.yaml", "unknown setting", write(f"{STUDENT}/config.yaml", "x: 1")),
]

STORES = [
    # what the files of a store may hold is in test_store_metadata
    *(
        Row(f"inspect {MAPS}", message, attributes(MAPS, **values))
        for values, message in (
            ({"format": "other"}, "not a store"),
            ({"format_version": 99}, "format version 99"),
        )
    ),
    *(
        Row(command, message, change)
        for command in (INSPECT, NEW_STUDENT)
        for change, message in (
            (remove(MAPS), "no attention-map store"),
            (both(remove(MAPS), write(MAPS, "a file")), "maps.zarr"),
            (remove(f"{MAPS}/zarr.json"), "no attention-map store"),
            (flip(f"{MAPS}/zarr.json"), "damaged"),
            (remove(f"{MAPS}/labels"), "labels/zarr.json"),
        )
    ),
    Row(f"{INSPECT} --image 0", "gaussians", remove(f"{MAPS}/gaussians/c")),
    Row(
        f"verify {MAPS}",
        "shard 0, gaussians",
        replace(f"{MAPS}/gaussians/c/0/0/0/0/0", "other/maps.zarr/gaussians/c/0/0/0/0/0"),
        code=1,
    ),
    Row(f"{INSPECT} --image 0", "incomplete", attributes(MAPS, complete=False)),
    Row(NEW_STUDENT, "incomplete", attributes(MAPS, complete=False)),
    Row(f"{INSPECT} --image 0 --png a.png", "which images", attributes(MAPS, extra={"data": 1})),
    Row(
        f"{INSPECT} --image 0 --png a.png",
        "not those the maps were made from",
        attributes(MAPS, extra={"data": {"name": "digits", "train_images": 41}}),
    ),
    Row(NEW_STUDENT, "another teacher", replace(MAPS, "other/maps.zarr")),
    Row(NEW_STUDENT, "gaussians", cut(f"{MAPS}/gaussians/c/0/0/0/0/0")),
    Row(NEW_STUDENT, "logits", flip(f"{MAPS}/logits/c/0/0")),
    Row(
        "phase-b --run-dir runs/tiny --name new --maps shards.zarr",
        "another data set",
        attributes("shards.zarr", dataset_sha256="0" * 64),
    ),
    Row(
        "phase-b --run-dir compressed --student standard",
        "decoder",
        flip("compressed/maps.zarr/decoder/prior/c/0/0/0/0"),
    ),
    Row(
        "inspect compressed/maps.zarr --image 0",
        "decoder",
        remove("compressed/maps.zarr/decoder/weight1"),
    ),
    *(
        Row("verify shards.zarr", message, change, code=1)
        for change, message in (
            (flip("shards.zarr/gaussians/c/1/0/0/0/0"), "shard 1, gaussians"),
            (remove("shards.zarr/gaussians/c/1"), "missing"),
            (remove("shards.zarr/zarr.json"), "zarr.json is missing"),
            (attributes("shards.zarr", complete=False), "incomplete"),
            (remove("shards.zarr/manifest"), "manifest/zarr.json is missing"),
            (remove("shards.zarr/labels/zarr.json"), "labels/zarr.json is missing"),
        )
    ),
    Row("verify bad", "bad", make("bad", link("bad"))),
    Row("verify --teacher", "another teacher", replace(MAPS, "other/maps.zarr")),
    Row("export-maps --repair", "another export", replace(MAPS, "other/maps.zarr")),
    Row("export-maps --out bad.zarr --overwrite", "bad.zarr", write("bad.zarr", "a file")),
]

DATA = [
    Row(
        "phase-a pictures.yaml --run-dir new",
        "0.png",
        write("pictures/train/cat/0.png", "text"),
    ),
    *(
        Row("run pictures.yaml --run-dir new", message, change)
        for change, message in (
            (remove("pictures"), "pictures"),
            (write("pictures/val/horse/0.png", b"x"), "horse"),
        )
    ),
    *settings(
        ("data.train_images=19", "data.train_images"),
        ("data.val_fraction=0.001", "0.001"),
        command="run pictures.yaml --run-dir new",
    ),
]

SWEEPS = [
    Row(f"{COMPARE} --sweep bad.yaml", message, write("bad.yaml", content))
    for content, message in (
        ("", "a sweep is a list"),
        ("- [a]", "a sweep is a list"),
        ("- {phase_b.gama: 1}", "did you mean 'phase_b.gamma'"),
        ("- {phase_b.gamma: .nan}", "finite"),
        ("- {phase_b.gamma.x: 1}", "'gamma' is a value"),
        ("- {name: a, phase_b.gamma: 0.5}\n- {name: a, phase_b.gamma: 0.6}", "two rows"),
        ("- {name: distilled, phase_b.gamma: 0.5}", "two rows"),
        ("- {name: a, like: b}", "no such row"),
        ("- {name: a, plain: maybe}", "plain"),
        ("- {name: a, kind: x}", "kind"),
        ("- {name: a, seed: 1}", "seed"),
        ("- {name: 5}", "name"),
        ("- {export.kind: prior, export.encoding: uint8}", "export.kind prior"),
        ("- {phase_a.per_image: none, export: {kind: prior, encoding: uint8}}", "float16"),
        ("- {like: [a]}", "no such row"),
        ("- {name: [a], phase_b.gamma: 1}", "name"),
        ("- {name: a, phase_b.layer_map: [0, 0, 0]}", "layer_map"),
        ("- {name: a, model.name: resnet18}", "model.name"),
        ("- {name: a, name: b}", "twice"),
    )
]

ROWS = [*COMMAND_LINE, *SETTINGS, *YAML, *RUNS, *STORES, *DATA, *SWEEPS]
