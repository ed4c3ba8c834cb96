"""What can be watched of a training: steps.jsonl, TensorBoard, and the interface of Weights &
Biases and trackio, with a module in their place."""

import contextlib
import itertools
import json
import sys
import types

import numpy as np
import pytest
import torch

from arguments import sets, tiny
from exports import write_store
from gaupipe.data.batches import Batches
from gaupipe.data.load import load_data
from gaupipe.settings import DataSettings
from gaupipe.settings.load import load
from gaupipe.system.imports import pip_install
from gaupipe.training.update import Update
from pictures import UNCHANGED, NumberedMaps
from stages import phase_a, phase_b

TINY = [*tiny(100, 20, 2), "phase_b.gamma=0.1", "log.every=2"]


def lines(folder):
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupted(monkeypatch):
    """Phase A that fails at counted batches, and goes on each time."""
    update = Update.backward

    def run(settings, run_dir, *batches):
        for number in (*batches, None):
            calls = itertools.count(1)

            def counted(self, *arguments, number=number, calls=calls):
                if next(calls) == number:
                    raise Interrupted
                return update(self, *arguments)

            monkeypatch.setattr(Update, "backward", counted)
            with pytest.raises(Interrupted) if number else contextlib.nullcontext():
                phase_a.run(settings, run_dir, resume=run_dir.exists())

    return run


@pytest.fixture
def service(monkeypatch):
    """Stands in for wandb and trackio, and remembers what it was told."""
    told = types.SimpleNamespace(opened=[], logged=[], finished=0)

    class Run:
        def log(self, values, step):
            told.logged.append((step, values))

        def finish(self):
            told.finished += 1

    def init(**options):
        told.opened.append(options)
        return Run()

    for name in ("wandb", "trackio"):
        module = types.ModuleType(name)
        module.init = init
        monkeypatch.setitem(sys.modules, name, module)
    return told


def test_steps_are_written_with_what_the_settings_ask_for(tmp_path):
    settings = load("digits_expected", [*TINY, "phase_a.optim.clip_grad=null"])
    phase_a.run(settings, tmp_path / "run")
    write_store(tmp_path / "run")
    phase_b.run(tmp_path / "run", "standard")
    phase_a_lines, phase_b_lines = (
        lines(tmp_path / "run" / name) for name in ("phase_a", "phase_b/standard")
    )
    assert [(line["epoch"], line["step"]) for line in phase_a_lines] == [
        *((1, 2), (1, 4), (2, 6), (2, 8), (2, 10))
    ]
    measured = {"lr", "grad_norm", "images_per_s", "waits_data", "waits_maps"}
    assert phase_a_lines[0].keys() == {"epoch", "step", "loss"} | measured
    losses = {"loss", "loss_soft", "loss_hard", "loss_feat", "acc"}
    assert phase_b_lines[0].keys() == {"epoch", "step"} | losses | measured
    for line in [*phase_a_lines, *phase_b_lines]:
        assert line["grad_norm"] > 0 and line["images_per_s"] > 0 and line["lr"] > 0
        assert 0 <= line["waits_data"] + line["waits_maps"] <= 1.001
    # of the epoch's five batches of 20 images the lines of the second cover all
    [_, second] = [json.loads(line) for line in (tmp_path / "run/phase_a/metrics.jsonl").open()]
    assert np.average(
        [line["loss"] for line in phase_a_lines[2:]], weights=[1, 2, 2]
    ) == pytest.approx(second["train_loss"], rel=1e-6)


def test_no_lines_where_none_are_asked_for(tmp_path):
    phase_a.run(load("digits_expected", [*TINY, "log.every=0"]), tmp_path / "run")
    assert not (tmp_path / "run/phase_a/steps.jsonl").exists()


@pytest.mark.parametrize("logger", ["wandb", "trackio"])
def test_a_training_that_goes_on_is_told_of_under_the_same_name(
    tmp_path, service, interrupted, logger
):
    sets = [*TINY, f"log.to=[{logger}]", "log.every=1", "checkpoint_minutes=0"]
    settings = load("digits_expected", sets)
    phase_a.run(settings, tmp_path / "unbroken")
    unbroken, service.logged[:] = list(service.logged), []
    interrupted(settings, tmp_path / "run", 3, 8)

    losses, expected = (
        {step: values["step/loss"] for step, values in logged if "step/loss" in values}
        for logged in (service.logged, unbroken)
    )
    assert losses == expected and len(losses) == 10
    epochs = [values for _, values in service.logged if "epoch/train_acc" in values]
    assert len(epochs) == 2 and "epoch/epoch" not in epochs[0]
    first, *others = service.opened[1:]
    key = "id" if logger == "wandb" else "name"
    assert first["resume"] == "allow" and first["project"] == "gaupipe"
    assert {one[key] for one in others} == {first[key]} and len(others) == 2
    assert first[key] != service.opened[0][key]
    assert first["config"]["phase_a.max_epochs"] == 2
    assert service.finished == 4


def test_tensorboard_reads_what_was_written(tmp_path, interrupted):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sets = [*TINY, "log.to=[tensorboard]", "phase_a.teacher=vit", "checkpoint_minutes=0"]
    interrupted(load("digits_expected", sets), tmp_path / "run", 8)
    folder = tmp_path / "run/phase_a"
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    losses = events.Scalars("step/loss")
    assert {event.step: event.value for event in losses} == {
        line["step"]: pytest.approx(line["loss"], rel=1e-6) for line in lines(folder)
    }
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    accuracies = [event.value for event in events.Scalars("epoch/val_acc")]
    assert accuracies == pytest.approx([entry["val_acc"] for entry in metrics])


@pytest.mark.parametrize("command", ["phase-a", "run", "train", "compare"])
def test_a_logger_that_is_not_installed_is_said_before_work_starts(
    tmp_path, in_process, monkeypatch, command
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = sets(*TINY, "log.to=[wandb]")
    code, _, err = in_process(command, "digits", "--run-dir", tmp_path / "run", *settings)
    assert code == 2 and err.count("\n") == 1
    assert "log.to: wandb is not installed" in err and pip_install("wandb") in err
    assert not (tmp_path / "run").exists()


def test_waiting_is_counted_for_images_and_for_maps():
    data = load_data(DataSettings(train_images=50))
    batches = Batches(data.train, data, torch.device("cpu"), 10)
    assert len(list(batches.epoch(0, UNCHANGED))) == 5
    assert batches.waited["data"] > 0
    list(batches.epoch(1, UNCHANGED, NumberedMaps()))
    assert batches.waited["maps"] > 0
