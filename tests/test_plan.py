"""What a run needs: the paper's counts, the store's own sizes, the files that phase A really
writes."""

import dataclasses
import json
import shutil
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import timm
import torch
import zarr
from gaupipe.data.splits import load_data
from typer.testing import CliRunner

import store
from gaupipe.cli import app
from gaupipe.settings.load import load, parse
from gaupipe.system import machine
from gaupipe.system.errors import UserError
from gaupipe.teachers.gaussian import Teacher
from gaupipe.teachers.image_state import ImageState
from stages import export_maps, plan_world
from stages.phase_a import gaussian as phase_a
from stages.plan import duration
from stages.runs import resources
from stages.runs.resources import Sizes, check_resources, make_plan, sizes_of

ATTO = Sizes(
    images=50_000,
    classes=10,
    layers=7,
    heads=12,
    grid=(8, 8),
    per_image_size=7 * 12 * 64 * 4,
    network_parameters=6_300_000,
    prior_parameters=7 * 12 * 64 * 4,
)


def settings(**phase_a):
    return parse({"phase_a": phase_a}, "test")


def imagenet(compression=None):
    """Sizes of one block for 1.3 M images in 196 tokens, as the paper counts them."""
    with torch.device("meta"):
        vit = timm.create_model(
            "gauvit_tiny_patch16_224",
            attention="gaussian",
            depth=1,
            embed_dim=192,
            num_heads=12,
        )
        teacher = Teacher(vit, "paper", compression=compression)
    train = MagicMock(source=None, **{"__len__.return_value": 1_300_000})
    data = SimpleNamespace(train=train, val=None, test=None, num_classes=1000)
    return sizes_of(teacher, data)


def test_the_papers_counts_for_imagenet():
    """GauTransformer, section 3.3.2: "25 billion" against "350 M" numbers a block."""
    gaussians = imagenet()
    assert make_plan(settings(), gaussians).per_image_parameters == 24_460_800_000
    compressed = imagenet(compression=(256, 768))
    plan = make_plan(settings(compression={"embedding": 256, "hidden": 768}), compressed)
    assert plan.per_image_parameters == 1_300_000 * 256
    network = compressed.decoder_parameters + compressed.prior_parameters
    assert network == 256 * 768 + 768 + 768 * 18_816 + 18_816  # 196 tokens, 12 heads, 8 numbers
    assert round((plan.per_image_parameters + network) / 1e6) == 347


def test_cifar10_atto_keeps_a_billion_numbers_in_files():
    plan = make_plan(settings(), ATTO)
    assert plan.per_image_parameters == 1_075_200_000
    assert plan.per_image_in == "files" and plan.per_image_disk_bytes == 2 * 3 * 4 * 1_075_200_000
    assert plan.memory_bytes < 2e9 and plan.checkpoint_bytes < 100e6
    in_memory = make_plan(settings(rows={"memory_budget_gb": 20}), ATTO)
    assert in_memory.per_image_in == "memory" and in_memory.per_image_disk_bytes == 0
    assert in_memory.memory_bytes - plan.memory_bytes == 12 * 1_075_200_000
    assert in_memory.checkpoint_bytes > 12 * 1_075_200_000


def test_the_prior_alone_needs_no_per_image_parameters():
    plan = make_plan(settings(per_image="none"), ATTO)
    assert plan.per_image_parameters == plan.per_image_disk_bytes == 0
    assert plan.per_image_in == "none"
    schema = store.Schema(
        kind="prior",
        num_images=50_000,
        grid=(8, 8),
        layers=7,
        heads=12,
        num_classes=10,
        dataset="d",
        dataset_sha256="",
        teacher_sha256="",
    )
    assert plan.store_bytes["prior"] == schema.total_bytes + 4 * ATTO.prior_parameters


@pytest.mark.parametrize(
    "kind, phase_a_settings",
    [
        ("gaussian", {}),
        ("dense", {}),
        ("embedding", {"per_image": "embedding", "compression": {"embedding": 24, "hidden": 32}}),
        ("prior", {"per_image": "none"}),
    ],
)
def test_store_sizes_are_those_of_the_arrays_that_are_written(kind, phase_a_settings, tmp_path):
    """What a real store holds of the images, read by zarr, and what its images share."""
    config = parse({"data": {"train_images": 50}, "phase_a": phase_a_settings}, "test")
    job = phase_a.build(config, tmp_path, load_data(config.data))
    schema = export_maps.make_schema(job, export_maps.chosen(config, given={"kind": kind}))
    store.create(str(tmp_path / "maps.zarr"), schema, decoder=export_maps.decoder(job, kind))
    group = zarr.open_group(tmp_path / "maps.zarr", mode="r")
    names = ("gaussians", "maps", "embeddings", "logits", "labels")
    arrays = [array for name, array in group.arrays() if name in names]
    if "decoder" in group:
        arrays += [array for _, array in group["decoder"].arrays()]
    plan = make_plan(config, sizes_of(job.teacher, job.data))
    assert plan.store_bytes[kind] == sum(array.nbytes for array in arrays)


def test_the_planned_bytes_are_what_the_files_take(tmp_path):
    sizes = Sizes(
        images=40,
        classes=3,
        layers=2,
        heads=2,
        grid=(2, 2),
        per_image_size=64,
        network_parameters=10,
        prior_parameters=64,
    )
    plan = make_plan(settings(rows={"memory_budget_gb": 0}), sizes)
    state = ImageState(40, torch.zeros(64), lr=0.1, folder=tmp_path / "phase_a" / "rows")
    for _ in range(2):
        state.update(torch.arange(40), torch.ones(40, 64))
        state.commit()
    files = list((tmp_path / "phase_a" / "rows").glob("records.*"))
    assert sum(file.stat().st_size for file in files) == plan.per_image_disk_bytes


def free(monkeypatch, disk, memory):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(disk)))
    monkeypatch.setattr(resources, "available_memory", lambda: memory and int(memory))


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"memory.max": "max", "memory.current": "900"}, 7 * 1024),
        ({}, 7 * 1024),  # no cgroup v2, or its root
        ({"memory.max": "5000", "memory.current": "900"}, 5000 - 900 + 30),
        ({"memory.max": "50000", "memory.current": "900"}, 7 * 1024),
    ],
)
def test_available_memory_is_the_machines_within_a_containers_limit(tmp_path, files, expected):
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:    7 kB\n")
    (tmp_path / "memory.stat").write_text("anon 800\nactive_file 10\ninactive_file 20\n")
    for name, content in files.items():
        (tmp_path / name).write_text(content + "\n")
    assert machine.available_memory(tmp_path / "meminfo", tmp_path) == expected
    assert machine.available_memory(tmp_path / "none", tmp_path) is None


def test_a_job_that_does_not_fit_is_refused_in_one_line(tmp_path, monkeypatch):
    plan = make_plan(settings(), ATTO)
    free(monkeypatch, disk=100e9, memory=10e9)
    check_resources(plan, tmp_path / "not" / "there")
    check_resources(plan, tmp_path, store_kind="gaussian")
    free(monkeypatch, disk=10e9, memory=10e9)
    with pytest.raises(
        UserError, match=r"phase A needs 26.0 GB of disk, 10.0 GB are free.*--force"
    ) as refusal:
        check_resources(plan, tmp_path)
    assert "\n" not in str(refusal.value)
    check_resources(plan, tmp_path, store_kind="gaussian")
    with pytest.raises(UserError, match=r"export needs 34.4 GB of disk, 10.0 GB are free"):
        check_resources(plan, tmp_path, store_kind="dense")
    free(monkeypatch, disk=100e9, memory=0.5e9)
    with pytest.raises(UserError, match=r"of memory, 0.5 GB are available"):
        check_resources(plan, tmp_path)
    free(monkeypatch, disk=100e9, memory=None)  # unknown
    check_resources(plan, tmp_path)


def test_what_a_run_has_written_already_is_not_asked_for_again(tmp_path, monkeypatch):
    sizes = dataclasses.replace(ATTO, images=100)
    plan = make_plan(settings(rows={"memory_budget_gb": 0}), sizes)
    free(monkeypatch, disk=plan.phase_a_disk_bytes - 2e6, memory=None)
    with pytest.raises(UserError, match="of disk"):
        check_resources(plan, tmp_path)
    (tmp_path / "phase_a" / "rows").mkdir(parents=True)
    (tmp_path / "phase_a" / "rows" / "records.0").write_bytes(bytes(4_000_000))
    check_resources(plan, tmp_path)


def test_plan_measures_the_digits_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plan", "--json", "--steps", "1"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["images"] == 1437 and plan["row_parameters"] == 1437 * 4 * 4 * 16 * 4
    assert plan["rows_in"] == "memory" and plan["problem"] is None
    assert set(plan["store_bytes"]) == {"gaussian", "dense", "topk"}
    assert all(seconds > 0 for seconds in plan["seconds"].values())
    assert not list(tmp_path.iterdir())


def test_plan_of_a_data_set_that_is_not_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "plan",
        "--steps",
        "0",
        "--images",
        "1281167",
        "--classes",
        "1000",
        "--set",
        "data.name=folder",
        "--set",
        "data.image_size=32",
        "--set",
        "model.name=gauvit_atto_patch4_32",
    ]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["row_parameters"] == 1_281_167 * 7 * 12 * 64 * 4 and plan["seconds"] is None
    assert "of disk" in plan["problem"]
    table = CliRunner().invoke(app, arguments).stdout
    assert "1,281,167" in table and "does not fit: " in table


def test_plan_of_a_world_divides_time_and_adds_the_exchange(tmp_path):
    digits = load("digits", ["data.batch_size=100", "phase_a.max_epochs=3"])
    seconds = {"phase_a_epoch": 8.0, "phase_a": 24.0, "export": 4.0}
    seconds |= {"phase_b_epoch": 6.0, "phase_b": 120.0}
    data, world = load_data(digits.data), 4
    teacher = phase_a.build_teacher(digits, data)
    sizes = sizes_of(teacher, data)
    made = make_plan(digits, sizes)
    shared = plan_world.share(digits, data, sizes, made, seconds, world, bandwidth=0.001)
    gradient = 4 * sum(p.numel() for p in teacher.parameters())
    sent = shared["exchanged_bytes"]["phase_a"]
    assert sent == round(2 * 3 / 4 * gradient)
    steps = 15  # 1,437 images
    epoch = seconds["phase_a_epoch"] / world + steps * sent * 8 / 1e6
    assert shared["seconds"]["phase_a_epoch"] == pytest.approx(epoch)
    assert shared["seconds"]["phase_a"] == pytest.approx(3 * epoch)
    assert shared["seconds"]["export"] == pytest.approx(seconds["export"] / world)
    assert shared["memory_bytes"] == 4 * shared["memory_bytes_per_rank"]
    assert shared["exchanged_bytes_in_all"]["phase_a"] == pytest.approx(2 * 3 * gradient)
    records = made.per_image_parameters * 3 * 4
    each, all_ranks = shared["disk_bytes_per_rank"], shared["disk_bytes"]
    assert all_ranks["phase_a"] == made.phase_a_disk_bytes
    others = all_ranks["phase_a"] - each["phase_a"]  # rank 0 alone writes the network
    assert others == pytest.approx(2 * (records + 4 * 1437) * 3 / 4, abs=4)
    assert each["store"] == pytest.approx(made.store_bytes["gaussian"] / 4, abs=1)
    shown = {name: value for name, value, *_ in plan_world.lines(shared, duration)}
    assert shown["disk, all"] == resources.gigabytes(sum(all_ranks.values()))
    assert shown["disk, each"] == resources.gigabytes(sum(each.values()))
    saved = made.memory_bytes - shared["memory_bytes_per_rank"]
    assert saved == pytest.approx(records * 3 / 4, abs=4)


@pytest.mark.parametrize(
    "options,words",
    [
        (["--world-size", 3, "--set", "data.buckets=4"], "should divide data.buckets, which is 4"),
        (["--bandwidth", 10], "beside --world-size"),
        (["--world-size", 2, "--bandwidth", "nan"], "positive number of Gbit/s"),
    ],
)
def test_worlds_that_cannot_be_planned_are_refused(tmp_path, in_process, options, words):
    code, out, err = in_process("plan", "digits", "--steps", 0, *options, cwd=tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1) and words in err
