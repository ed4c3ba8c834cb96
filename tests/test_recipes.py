"""The shipped configurations and sweeps: each can be built and trained, with as many parameters as
its paper says."""

import dataclasses
from itertools import islice

import pytest
import torch

from gaupipe.attention.options import count_parameters
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.settings.load import load, read_yaml, shipped
from gaupipe.training.job import training_state
from gaupipe.training.student import untrained_student
from gaupipe.training.update import Update
from stages import phase_b
from stages.compare.rows import Row, default_rows, resolve, sweep_rows
from stages.compare.run import check_row
from stages.compare.trainings import digest
from stages.plan import random_data

PLAIN = ("attentions", "attentionx_gamma", "baselines", "belief2_signals", "belief2_tables")
PLAIN += ("beliefformer_concat", "labels", "mimetic")
"""Sweeps that train no teacher."""


def data_of(name: str, settings: Settings) -> ImageData:
    """Random images of the size and the classes that a configuration is for."""
    size = 8 if name == "digits" else 28 if "fashion" in name else 224 if "imagenet" in name else 32
    channels = 1 if size in (8, 28) else 3
    classes = 1000 if size == 224 else 100 if "cifar100" in name else 10
    sized = settings.data.model_copy(update={"image_size": size, "batch_size": 2})
    data = random_data(settings.model_copy(update={"data": sized}), 4, classes)
    data.train.source.images = data.train.source.images[:, :channels]
    statistics = (0.5,) * channels
    return dataclasses.replace(data, channels=channels, mean=statistics, std=statistics)


@pytest.mark.parametrize("name", shipped())
def test_a_step_of_every_shipped_configuration(name):
    """Trained on the labels alone, on two images."""
    settings = load(name, ["data.batch_size=2", "threads=1", "precision=float32"])
    data = data_of(name, settings)
    job = phase_b.build_training(resolve(Row(name="", plain=True), settings), data, None)
    student, losses = job.student, job.losses.train()
    before = {key: value.clone() for key, value in student.state_dict().items()}
    update = Update(training_state(job), 2)
    batches = Batches(data.train, data, job.device, 2, 0, settings.data.num_buckets)
    augment = Augment(settings.augment, 0)
    for batch in islice(batches.epoch(0, augment), 2):  # a warm-up may start at rate 0
        with update.forward():
            loss = losses(batch, 0.0).loss
        update.backward(loss, batch.weight)
        update.step_if_due()
    after = student.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert "head.weight" in changed and "blocks.0.attn.qkv.weight" in changed


def resolved(base: Settings, sweep: str) -> list[tuple[Row, Settings]]:
    """Every row of a sweep over a configuration."""
    rows = sweep_rows(read_yaml(sweep, "sweeps"), sweep, default_rows(base, ["standard"]))
    return [(row, resolve(row, base)) for row in rows]


def counts(name: str, sweep: str) -> dict[str, int]:
    """Parameters of every row of a sweep over a configuration."""
    base = load(name)
    data = data_of(name, base)
    return {
        row.name: count_parameters(untrained_student(settings, data))
        for row, settings in resolved(base, sweep)
    }


def test_the_parameters_of_belief2s_tables():
    """*Belief2, tables 2 and 3*, in millions."""
    sizes = counts("belief2_cifar100", "belief2_tables")
    millions = {row: count / 1e6 for row, count in sizes.items()}
    for row in ("plain ViT", "belief_star", "belief2", "belief2, no ZZ', equal parameters"):
        assert millions[row] == pytest.approx(3.38, abs=0.005), row
    assert millions["belief2, no ZZ'"] == pytest.approx(3.04, abs=0.01)
    assert millions["belief2, no FFN"] == pytest.approx(2.04, abs=0.005)


@pytest.mark.parametrize("name", ["fashion_mnist_plain", "cifar10_small"])
def test_small_recipes_have_equal_parameters_too(name):
    sizes = counts(name, "belief2_tables")
    for row in ("belief_star", "belief2", "belief2, SiLU", "belief2, no ZZ', equal parameters"):
        assert sizes[row] == pytest.approx(sizes["plain ViT"], rel=0.005), row
    assert sizes["belief2, no ZZ'"] == sizes["belief2"] - 4 * 64 * 64  # the FFN stays
    for row, size in counts(name, "attentions").items():
        if row != "gaussian":  # has neither Q nor K, and no FFN is made wider for it
            assert size == pytest.approx(sizes["plain ViT"], rel=0.005), row


def test_the_experiments_are_the_papers():
    """*Belief2, section 4.3*, and *AttentionX, section 4.1*; gamma 1 and a masked diagonal are the
    defaults of its class."""
    settings = load("belief2_cifar100")
    args, train = settings.model.args, settings.train
    assert (args["embed_dim"], args["depth"], args["num_heads"]) == (192, 9, 12)
    assert (train.epochs, train.optim.name, settings.data.name) == (100, "adamw", "torch/cifar100")
    settings = load("attentionx_vit_small")
    assert (settings.train.optim.lr, settings.train.optim.args) == (1e-4, {})
    data = data_of("attentionx_vit_small", settings)
    model = untrained_student(settings, data)
    assert (model.embed_dim, len(model.blocks), model.num_prefix_tokens) == (512, 6, 1)


MEANT_FOR = {
    "labels": "cifar10_few",
    "teachers": "fashion_mnist_vit",
    "baselines": "cifar10_small",
    "views": "cifar10_vit",
}
SMALL = ["data.name=digits", "data.train_images=null", "model.name=gauvit_pico_patch2_8"]


# "given" needs the weights of a teacher: test_given_teacher trains its kinds of rows
@pytest.mark.parametrize("sweep", sorted(set(shipped("sweeps")) - {"given"}))
def test_every_shipped_sweep_can_be_run_and_is_as_many_runs_as_cells(sweep):
    """With the digits' 16 tokens, for eight keys."""
    base = load(MEANT_FOR.get(sweep, "fashion_mnist"), [*SMALL, "model.args={}"])
    rows, data = resolved(base, sweep), load_data(base.data)
    assert (sweep in PLAIN) == all(row.plain for row, _ in rows)
    runs = {digest(settings, row.plain) for row, settings in rows}
    assert rows[0][0].name == "plain ViT" and (len(runs) == len(rows) or sweep not in PLAIN)
    for row, settings in rows:
        check_row(row, settings, data)
