"""What a run needs: the paper's counts, the store's own sizes, the files that phase A really
writes."""

import json
import shutil
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import timm
import torch
import zarr
from PIL import Image

import store
from arguments import sets
from gaupipe.attention import ATTENTION
from gaupipe.data.load import load_data
from gaupipe.distillation.export import decoder, make_schema
from gaupipe.distillation.store_choice import choose_store
from gaupipe.settings.load import load, parse
from gaupipe.system import machine
from gaupipe.system.errors import UserError, mistake_of
from gaupipe.system.progress import duration
from gaupipe.teachers.base import outline
from gaupipe.teachers.gaussian import GaussianTeacher
from gaupipe.teachers.gaussian_vit import GaussianViT
from gaupipe.training.job import drop_patches
from gaupipe.training.student import build_student
from gaupipe.vit.saving import save_student
from pictures import photos
from stages import plan
from stages.runs import resources, timing
from stages.runs.resources import check_resources, make_plan


def settings(**phase_a):
    return parse({"phase_a": {"per_image": "table"} | phase_a, "device": "cpu"}, "test")


def planned(name, images, compression=None, phase_a=None, **model):
    """The plan of so many images, from a teacher that takes no memory."""
    with torch.device("meta"):
        vit = timm.create_model(name, attention="gaussian", **model)
        network = GaussianViT(
            vit, "paper" if "tiny" in name else "loc_scale", compression=compression
        )
    train = MagicMock(source=None, **{"__len__.return_value": images})
    size = vit.patch_embed.img_size[0]
    data = SimpleNamespace(
        train=train, val=None, test=None, num_classes=10, channels=3, image_size=size
    )
    teacher = GaussianTeacher(settings(**(phase_a or {})), data, torch.device("cpu"), network)
    return make_plan(teacher)


def atto(images=50_000, **phase_a):
    return planned("gauvit_atto_patch4_32", images, phase_a=phase_a)


def test_the_papers_counts_for_imagenet():
    """GauTransformer, section 3.3.2: "25 billion" against "350 M" numbers a block."""
    block = {"name": "gauvit_tiny_patch16_224", "depth": 1, "embed_dim": 192, "num_heads": 12}
    gaussians = planned(images=1_300_000, **block)
    assert gaussians.per_image_parameters == 24_460_800_000
    compression = {"per_image": "embedding"}
    compressed = planned(images=1_300_000, compression=(256, 768), phase_a=compression, **block)
    assert compressed.per_image_parameters == 1_300_000 * 256
    network = compressed.parameters - gaussians.parameters
    assert network == 256 * 768 + 768 + 768 * 18_816  # 196 tokens, 12 heads, 8 numbers
    assert round((compressed.per_image_parameters + network + 18_816) / 1e6) == 347


def test_cifar10_atto_keeps_a_billion_numbers_in_files():
    plan = atto()
    assert plan.per_image_parameters == 1_075_200_000
    assert plan.memory_bytes < 3e9  # and not 4.3 more
    assert 0 < plan.disk_bytes - 2 * 3 * 4 * 1_075_200_000 < 2 * 100e6  # beside two checkpoints
    alone = atto(per_image="none")  # the prior
    assert alone.per_image_parameters == 0 and alone.disk_bytes < 2 * 100e6


@pytest.mark.parametrize(
    "kind, phase_a_settings",
    [
        ("gaussian", {}),
        ("dense", {}),
        ("topk", {}),
        ("embedding", {"per_image": "embedding", "compression": {"embedding": 24, "hidden": 32}}),
        ("prior", {"per_image": "none"}),
    ],
)
def test_store_sizes_are_those_of_the_arrays_that_are_written(kind, phase_a_settings, tmp_path):
    """What a real store holds of the images, read by zarr, and what its images share."""
    changes = {"data": {"train_images": 50}, "export": {"kind": kind}}
    config = parse({**changes, "phase_a": phase_a_settings}, "test")
    job = GaussianTeacher.build(config, load_data(config.data), tmp_path)
    schema = make_schema(job, choose_store(job))
    store.create(str(tmp_path / "maps.zarr"), schema, decoder=decoder(job, kind))
    group = zarr.open_group(tmp_path / "maps.zarr", mode="r")
    names = ("gaussians", "maps", "keys", "weights", "embeddings", "logits", "labels")
    arrays = [array for name, array in group.arrays() if name in names]
    if "decoder" in group:
        arrays += [array for _, array in group["decoder"].arrays()]
    stages, _ = plan.plan_phases(config, job.data, 50, world_size=1)
    assert stages["export"]["disk_bytes"] == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("name", ["digits", "digits_expected"])  # with a decoder, and without
def test_a_store_has_as_many_files_as_planned(name, tmp_path, in_process):
    small = sets("data.train_images=40", "phase_a.max_epochs=1", "threads=1")
    assert in_process("phase-a", name, *small, cwd=tmp_path)[0] == 0
    assert in_process("export-maps", "--out", "maps.zarr", cwd=tmp_path)[0] == 0
    _, out, _ = in_process("plan", name, *small, "--json", cwd=tmp_path)
    written = [path for path in (tmp_path / "maps.zarr").rglob("*") if path.is_file()]
    assert json.loads(out)["stages"]["export"]["files"] == len(written)


def free(monkeypatch, disk, memory):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(disk)))
    monkeypatch.setattr(resources, "available_memory", lambda: memory and int(memory))


def test_a_plan_of_a_models_maps_says_what_its_export_takes(monkeypatch):
    free(monkeypatch, disk=1e15, memory=1)
    problem = plan.plan_model("vit_tiny_patch16_224", 10)["problem"]
    assert "take a smaller --image-size or --model" in problem


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"memory.max": "max", "memory.current": "900"}, 7 * 1024),
        ({}, 7 * 1024),  # no cgroup v2, or its root
        ({"memory.max": "5000", "memory.current": "900"}, 5000 - 900 + 30),
        ({"memory.max": "50000", "memory.current": "900"}, 7 * 1024),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_available_memory_is_the_machines_within_a_containers_limit(
    tmp_path, monkeypatch, files, expected, world_size
):
    """What the processes hold already is counted in what a training needs, so it counts here."""
    for name, value in zip(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        (0, world_size, 0, world_size),
        strict=True,
    ):
        monkeypatch.setenv(name, str(value))
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    7 kB\n")
    (tmp_path / "status").write_text("Name:\ta: b\nVmRSS:\t 5 kB\nRssAnon:\t 2 kB\n")
    (tmp_path / "memory.stat").write_text("anon 800\nactive_file 10\ninactive_file 20\n")
    for name, content in files.items():
        (tmp_path / name).write_text(content + "\n")
    places = tmp_path, tmp_path / "status"
    held = 2 * 1024 * world_size
    assert machine.available_memory(tmp_path / "meminfo", *places) == expected + held
    assert machine.available_memory(tmp_path / "none", *places) is None


def test_a_job_that_does_not_fit_is_refused_in_one_line(tmp_path, monkeypatch):
    plan = atto()
    free(monkeypatch, disk=100e9, memory=10e9)
    check_resources(plan, tmp_path / "not" / "there")
    free(monkeypatch, disk=10e9, memory=10e9)
    with pytest.raises(
        UserError, match=r"phase A needs 25.9 GB of disk, 10.0 GB are free.*--force"
    ) as refusal:
        check_resources(plan, tmp_path)
    assert "\n" not in str(refusal.value)
    free(monkeypatch, disk=100e9, memory=0.5e9)
    with pytest.raises(UserError, match=r"of memory, 0.5 GB are available"):
        check_resources(plan, tmp_path)
    free(monkeypatch, disk=100e9, memory=None)  # unknown
    check_resources(plan, tmp_path)


def test_what_a_run_has_written_already_is_not_asked_for_again(tmp_path, monkeypatch):
    plan = atto(images=100)
    free(monkeypatch, disk=plan.disk_bytes - 2e6, memory=None)
    with pytest.raises(UserError, match="of disk"):
        check_resources(plan, tmp_path)
    (tmp_path / "phase_a" / "rows").mkdir(parents=True)
    (tmp_path / "phase_a" / "rows" / "records.0").write_bytes(bytes(4_000_000))
    check_resources(plan, tmp_path)


def test_plan_counts_the_digits_and_leaves_nothing_behind(tmp_path, in_process):
    code, out, err = in_process("plan", "--json", cwd=tmp_path)
    assert code == 0, err
    plan = json.loads(out)
    assert plan["images"] == 1437 and plan["per_image_parameters"] == 1437 * 128
    assert plan["problem"] is None
    assert not list(tmp_path.iterdir())
    stages, total = plan["stages"], plan["total"]
    assert [*stages] == ["phase_a", "export", "phase_b", "plain"]
    for name, combine in (("disk_bytes", sum), ("memory_bytes", max), ("seconds", sum)):
        assert total[name] == pytest.approx(combine(stage[name] for stage in stages.values()))


def test_plan_has_a_line_for_each_training_of_a_run(tmp_path, in_process):
    """With a folder of images too, whose store has views; without a baseline there is none."""
    photos(tmp_path / "photos", count=20, size=(16, 16))
    code, out, err = in_process(
        "plan", "--data", "photos", *sets("phase_a.teacher=vit"), cwd=tmp_path
    )
    assert code == 0, err
    first, second, third, fourth, fifth = out.splitlines()[1:6]
    assert "teacher" in first and "store (topk)" in second and "standard, distilled" in third
    assert "standard, plain" in fourth and fifth.startswith("total")
    assert max(map(len, out.splitlines())) <= 80
    options = sets("export.kind=prior", "phase_a.per_image=none")
    options += sets("phase_a.prior=true")
    _, out, _ = in_process("plan", *options, "--json", cwd=tmp_path)
    assert [*json.loads(out)["stages"]] == ["phase_a", "export", "phase_b", "plain"]


def test_plan_of_a_data_set_that_is_not_here(tmp_path, in_process):
    arguments = ["plan", "--json", "--images", 1_281_167, "--classes", 1000]
    arguments += sets("data.name=folder", "data.image_size=32", "model.name=gauvit_atto_patch4_32")
    arguments += sets("phase_a.per_image=table", "phase_a.prior=true")
    code, out, err = in_process(*arguments, cwd=tmp_path)
    assert code == 0, err
    plan = json.loads(out)
    assert plan["per_image_parameters"] == 1_281_167 * 7 * 12 * 64 * 8
    assert "of disk" in plan["problem"]


def test_the_export_of_a_model_takes_what_its_store_holds(tmp_path, in_process):
    """The arrays of a written store of three images, read by zarr, but for the files' names."""
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2)
    save_student(vit, tmp_path / "vit")
    (tmp_path / "photos").mkdir()
    for number in range(3):
        Image.new("RGB", (32, 32)).save(tmp_path / "photos" / f"{number}.png")
    export = ["export-maps", "--model", "vit", "--images", "photos", "--out", "maps.zarr"]
    code, _, err = in_process(*export, cwd=tmp_path)
    assert code == 0, err
    code, out, err = in_process("plan", "--model", "vit", "--images", 3, "--json", cwd=tmp_path)
    assert code == 0, err
    planned = json.loads(out)
    arrays = dict(zarr.open_group(tmp_path / "maps.zarr", mode="r").arrays())
    del arrays["names"]
    written = sum(array.nbytes for array in arrays.values())
    assert planned["stages"]["export"]["disk_bytes"] == written
    assert planned["total"]["seconds"] > 0 and planned["images"] == 3


def test_steps_with_maps_with_fewer_patches_and_with_all_are_measured_apart(monkeypatch):
    settings = load("digits_expected", ["train.patch_drop_rate=0.5", "device=cpu"])
    data = load_data(settings.data)
    dropped = []

    def measured(step, images):
        step(2)
        return 1.0

    def drop(student, share):
        dropped.append(share)
        drop_patches(student, share)

    monkeypatch.setattr(timing, "seconds_per_image", measured)
    monkeypatch.setattr(timing, "mean_seconds", lambda update: 5.0)
    monkeypatch.setattr(timing, "drop_patches", drop)
    gammas = [1, 1, 0, 0, 0, 0]
    train = settings.student_training
    # six epochs of 200 images in 7 batches
    assert timing.student_seconds(settings, data, train, 200, gammas) == 6 * (200 + 7 * 5)
    assert dropped == [0, 0.5, 0]


def test_the_seconds_of_a_run_are_those_of_its_stages(monkeypatch):
    """An image of a step takes a second, and an update nothing."""
    monkeypatch.setattr(timing, "seconds_per_image", lambda step, images: 1.0)
    monkeypatch.setattr(timing, "mean_seconds", lambda update: 0.0)
    changes = ["phase_a.max_epochs=5", "train.epochs=7", "phase_b.epochs=3", "device=cpu"]
    settings = load("digits_expected", changes)
    data = load_data(settings.data)
    stages = dict.fromkeys(["phase_a", "export", "export_unlabelled", "phase_b", "plain"])
    assert plan.seconds_of(settings, data, 60, 30, stages) == {
        "phase_a": 5 * 60,
        "export": 60 / 3,  # a forward pass
        "export_unlabelled": 30 / 3,
        "phase_b": 3 * (60 + 30),
        "plain": 7 * 60,
    }


def test_seconds_are_those_of_steps_without_the_first(monkeypatch):
    """A step of 10 ms for each image, and a first one that takes longer."""
    clock = [0.0]
    seen = []

    def step(images):
        clock[0] += 0.01 * images + (0 if seen else 5.0)
        seen.append(images)

    monkeypatch.setattr(timing, "MEASURED", 1.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    assert timing.seconds_per_image(step, 32) == pytest.approx(0.01)
    assert max(seen) == 32
    assert timing.seconds_per_image(step, 10_000) == pytest.approx(0.01)
    assert max(seen) == 100  # of a second
    assert [duration(seconds) for seconds in (7.4, 150, 7200)] == ["7 s", "2.5 min", "2.0 h"]


LARGE = ["model.args={embed_dim: 65536, num_heads: 4}", "device=cpu"]


@pytest.mark.parametrize("options", [[], ["--train"]])
def test_a_model_that_no_memory_holds_is_planned_without_being_made(tmp_path, in_process, options):
    code, out, err = in_process("plan", *options, "--json", *sets(*LARGE), cwd=tmp_path)
    assert code == 0, err
    plan = json.loads(out)
    for name, stage in plan["stages"].items():
        assert stage.get("parameters", 1e12) > 1e11
        # an export has the weights alone
        assert stage["memory_bytes"] > (4e11 if name == "export" else 1e12)
    assert "needs" in plan["problem"]
    assert "does not fit: " in in_process("plan", *options, *sets(*LARGE), cwd=tmp_path)[1]
    code, out, err = in_process("phase-a", *sets(*LARGE), cwd=tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1) and "phase A needs" in err
    assert not list(tmp_path.iterdir())


def test_an_allocation_that_fails_is_one_line():
    for allocate in (lambda: torch.empty(2**62, dtype=torch.uint8), lambda: np.empty(2**62, "u1")):
        with pytest.raises((RuntimeError, MemoryError)) as failure:
            allocate()
        said = mistake_of(failure.value)
        assert "out of memory (" in said and "\n" not in said
    assert "out of memory: lower" in mistake_of(MemoryError())  # Python's own says nothing
    assert mistake_of(RuntimeError("shapes do not fit")) is None


def test_an_export_holds_the_maps_of_a_batch(tmp_path):
    """Those of a trained ViT, and as many again where whole maps are stored; beside shards, whose
    numbers take four bytes, and four more while they become codes of one."""
    config = ["phase_a.teacher=vit", "data.batch_size=50", "device=cpu", "export.layers=[0, 3]"]
    maps = 4 * 200 * 2 * 4 * 16**2  # batch of evaluation, blocks, heads, tokens

    def needs(kind: str, encoding: str, wider: float) -> int:
        chosen = [f"export.kind={kind}", f"export.encoding={encoding}"]
        planned = plan.plan_run(load("digits_expected", [*config, *chosen]), tmp_path)
        export = planned["stages"]["export"]
        shards = min((resources.WRITERS + 2) * 32 * 10**6, 2 * export["disk_bytes"])
        return export["memory_bytes"] - resources.PROCESS_BYTES - round(wider * shards)

    topk = needs("topk", "float16", 1)
    assert needs("dense", "float16", 1) - topk == maps
    assert topk > maps + 4 * 200 * 16 * 64 * 10  # at least ten numbers a token and channel
    # of each image 8 heads of blocks, 16 queries with 8 keys and weights; 10 logits and a label
    weights, others = 8 * 16 * 8, 8 * 16 * 8 + 2 * 10 + 8
    assert needs("topk", "uint8", (8 * weights + others) / (weights + others)) == topk


def kept(forward, network, images=100, size=8, channels=1):
    """Bytes of what autograd saves in a step of a network with numbers."""
    weights = {tensor.data_ptr() for tensor in (*network.parameters(), *network.buffers())}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(torch.randn(images, channels, size, size))
    return sum(size for _, size in saved.values())


@pytest.mark.parametrize(
    "name, options",
    [
        *[("gauvit_pico_patch2_8", {"attention": name}) for name in ATTENTION],
        ("gauvit_pico_patch2_8", {"stem": "conv"}),
        ("gauvit_pico_patch2_8", {"stem": "residual", "img_size": 16}),
        ("resnet18", {}),
    ],
)
def test_a_step_keeps_what_autograd_saves(name, options):
    size = options.get("img_size", 8)
    with torch.device("meta"):
        unmade = timm.create_model(name, in_chans=3, **options)
    shape = SimpleNamespace(channels=3, image_size=size)
    planned = resources.kept_bytes(unmade, unmade.forward, 4, shape)
    network = timm.create_model(name, in_chans=3, **options)
    real = kept(network, network, 4, size, 3)
    assert planned == pytest.approx(real, rel=0.02)


def test_an_export_of_large_maps_takes_fewer_images_at_once(monkeypatch, tmp_path):
    config = ["phase_a.teacher=vit", "data.batch_size=50", "device=cpu", "export.layers=[0, 3]"]
    digits = load("digits_expected", [*config, "export.kind=dense"])
    of_batch = plan.plan_run(digits, tmp_path)["stages"]["export"]["memory_bytes"]
    monkeypatch.setattr(
        "gaupipe.teachers.base.MOST_NUMBERS", 50 * 4 * 4 * 16**2
    )  # 50 images, all blocks
    fewer = plan.plan_run(digits, tmp_path)["stages"]["export"]["memory_bytes"]
    maps = 4 * 150 * 2 * 4 * 16**2  # 150 images less, stored blocks, heads, tokens
    assert of_batch - fewer > 2 * maps + 4 * 150 * 16 * 64 * 10


def test_plan_of_a_world_divides_the_memory(tmp_path):
    digits = load("digits_expected", ["data.batch_size=100", "device=cpu"])
    plans = [plan.plan_run(digits, tmp_path, world_size=size) for size in (1, 4)]
    alone, each = (planned["stages"] for planned in plans)
    data = load_data(digits.data)
    teacher = outline(digits, data).begin(tmp_path)
    activations = resources.BACKWARD * kept(teacher.training_forward, teacher.network)
    saved = alone["phase_a"]["memory_bytes"] - each["phase_a"]["memory_bytes"]
    assert saved == pytest.approx(activations * 3 / 4, rel=0.01)
    recomputed = plan.plan_run(digits.model_copy(update={"grad_checkpointing": True}), tmp_path)
    saved = alone["plain"]["memory_bytes"] - recomputed["stages"]["plain"]["memory_bytes"]
    student = build_student(digits, data, digits.train)
    whole = kept(student, student)
    inputs = 4 * 4 * 100 * 16 * 64  # blocks, images, tokens, width
    assert saved == pytest.approx(resources.BACKWARD * (whole * 3 / 4 - inputs), rel=0.01)
    assert each["phase_a"]["disk_bytes"] == alone["phase_a"]["disk_bytes"]
