"""The pieces of a training loop: updates against plain torch, and the means of an epoch."""

import time
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from torch import nn

import gaupipe.vit.models  # noqa: F401  (timm learns gaupipe's names)
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batch
from gaupipe.data.buckets import Buckets
from gaupipe.data.images import ArrayImages
from gaupipe.data.splits import Split
from gaupipe.settings import LogSettings, OptimSettings, Settings
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.teachers.image_state import ImageState
from gaupipe.training.epochs import loop
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.state import TrainingState
from gaupipe.training.sums import Sums
from gaupipe.training.update import Update, per_image_gradient


def make(accumulate=1, clip_grad=None, ema=None, metrics=()) -> TrainingState:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optim = OptimSettings(accumulate=accumulate, clip_grad=clip_grad, ema=ema)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingState(model, optimizer, mock.Mock(), optim, metrics=list(metrics))


def asked(state) -> list[int]:
    """The updates for which a schedule was asked."""
    return [call.args[0] for call in state.schedule.step_update.call_args_list]


def loss_of(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize("clip_grad", [None, 0.01])
def test_accumulated_updates_are_those_of_plain_torch(clip_grad):
    """Five batches, two at a time: the last of an epoch steps alone, with its full weight."""
    batches = torch.randn(5, 4, 3)
    state, plain = make(accumulate=2, clip_grad=clip_grad), make().network
    update = Update(state, steps=5)
    for batch in batches:
        update.backward(loss_of(state.network, batch))
        update.step_if_due()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for group in (batches[0:2], batches[2:4], batches[4:5]):
        optimizer.zero_grad()
        torch.stack([loss_of(plain, batch) for batch in group]).mean().backward()
        if clip_grad:
            nn.utils.clip_grad_norm_(plain.parameters(), clip_grad)
        optimizer.step()
    torch.testing.assert_close(state.network.state_dict(), plain.state_dict())
    assert asked(state) == [0, 1, 2, 3, 4]


def test_a_continued_training_counts_its_updates_on():
    state = make(metrics=[{}, {}])
    Update(state, steps=3).backward(loss_of(state.network, torch.ones(1, 3)))
    assert asked(state) == [6]


@pytest.mark.parametrize("decay", [0.5, 0.9999])
@pytest.mark.parametrize("accumulate,steps", [(1, [1, 2, 3, 4, 5, 6]), (2, [1, 2, 3, 4])])
def test_an_average_of_few_steps_holds_nothing_of_the_untrained_weights(decay, accumulate, steps):
    """Two epochs of three batches, continued between them; as in timm's warm-up, by hand."""
    state = make(accumulate=accumulate, ema=decay)
    weights = []
    for epoch in range(2):
        state.metrics = [{}] * epoch
        update = Update(state, steps=3)
        for batch in torch.randn(3, 4, 3):
            update.backward(loss_of(state.network, batch))
            update.step_if_due()
            if update.stepped:
                weights.append(state.network.weight.detach().clone())
    average = torch.zeros(2, 3)
    for step, weight in zip(steps, weights, strict=True):
        share = max(1 - decay, step ** (-2 / 3))  # of the latest weights
        average += share * (weight - average)
    torch.testing.assert_close(state.kept.weight, average)


@pytest.mark.parametrize("size,accumulate", [(1, 1), (4, 1), (4, 2)])
def test_a_per_image_gradient_is_that_of_the_images_own_loss(size, accumulate):
    state = make(accumulate=accumulate)
    parameters = torch.randn(size, 3, requires_grad=True)
    update = Update(state, steps=4)
    scale = update.backward(state.network(parameters).square().mean(1).mean())
    alone, model = parameters.detach().clone().requires_grad_(), make().network
    model(alone).square().mean(1).sum().backward()
    torch.testing.assert_close(per_image_gradient(parameters, scale), alone.grad)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_loss_that_is_not_finite_is_said_with_its_step_before_a_checkpoint(step):
    state = make()
    update = Update(state, steps=2)
    epoch, within = divmod(step - 1, 2)
    where = f"the loss is nan in epoch {epoch + 1}, step {within + 1} of 2"
    for number in range(1, step + 3):
        value = torch.nan if number == step else 1.0
        update.backward(loss_of(state.network, torch.full((1, 3), value)))
        update.step_if_due()
    with pytest.raises(UserError, match=f"{where}.*lower optim.lr.*model.init_std"):
        update.check()


def test_a_loss_that_is_not_finite_ends_a_long_epoch_within_fifty_batches():
    state = make()
    update = Update(state, steps=1000)

    def train(steps: int, value: float) -> None:
        for _ in range(steps):
            update.backward(loss_of(state.network, torch.full((1, 3), value)))
            update.step_if_due()

    train(60, 1.0)
    with pytest.raises(UserError, match="the loss is nan in epoch 1, step 61 of 1000"):
        train(50, torch.nan)


@pytest.mark.parametrize("attention", ["belief2", "gaussian", "standard"])
@pytest.mark.parametrize(
    "args", [{}, {"layer_decay": 0.75}, {"fallback_list": ["head.*", "patch_embed.proj.*"]}]
)
def test_muon_orthogonalises_matrices_and_no_gaussians(attention, args):
    """The first step of Adam moves every number by the same amount. That of Muon has singular
    values which are nearly alike."""
    torch.manual_seed(0)
    options = {"prior": True} if attention == "standard" else {}
    sizes = dict(depth=2, embed_dim=16, num_heads=2)
    model = timm.create_model(
        "gauvit_pico_patch2_8", attention=attention, attention_options=options, **sizes
    )
    optim = OptimSettings(name="muon", weight_decay=0, warmup_epochs=0, args=args)
    optimizer, _ = build_optimizer(model, optim, 1, 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    by_muon = set()
    for name, parameter in model.named_parameters():
        step = parameter.detach() - before[name]
        if step.abs().min() > 0.99 * step.abs().max():
            continue
        singular = torch.linalg.svdvals(step.flatten(1))
        assert singular.max() < 3 * singular.min(), name
        by_muon.add(name)
    matrices = {
        name for name, p in model.named_parameters() if name.endswith(".weight") and p.ndim > 1
    }
    outer = {"head.weight", "patch_embed.proj.weight"}
    assert by_muon == (matrices - outer if "fallback_list" in args else matrices)
    assert outer < matrices and "blocks.1.mlp.fc1.weight" in by_muon
    gaussians = {name for name in before if name.endswith((".prior", ".predictor"))}
    assert len(gaussians) == {"belief2": 0, "gaussian": 4, "standard": 2}[attention]


@pytest.mark.parametrize(
    "name,refusal",
    [
        *((name, None) for name in ("adan", "adanw", "cadan", "cadanw", "sgd", "muon")),
        ("adahessian", "second derivatives"),
        *((name, "compiles its first step") for name in ("kron", "kronw", "kronc")),
    ],
)
def test_an_optimizer_of_timm_trains_or_is_refused_by_name(name, refusal):
    model = timm.create_model("gauvit_pico_patch2_8", depth=1, embed_dim=16, num_heads=2)
    with pytest.raises(UserError, match=refusal) if refusal else nullcontext():
        optimizer, _ = build_optimizer(model, OptimSettings(name=name, lr=0.1), 2, 3)
        before = model.head.weight.detach().clone()
        model(torch.randn(2, 3, 8, 8)).square().sum().backward()
        optimizer.step()
        assert not torch.equal(before, model.head.weight)


def test_per_image_parameters_without_a_finite_gradient_stay(tmp_path):
    state = ImageState(Buckets(3), torch.zeros(2), lr=0.1, folder=tmp_path)
    gradient = torch.tensor([[1.0, 1.0], [torch.inf, 1.0], [1.0, torch.nan]])
    state.update(torch.arange(3), gradient)
    assert state.steps.tolist() == [1, 0, 0]
    expected = torch.tensor([[-0.1, -0.1], [0, 0], [0, 0]])
    torch.testing.assert_close(state.read(torch.arange(3)), expected)


def test_means_weigh_batches_by_their_images(tmp_path):
    state, settings = make(), Settings(log=LogSettings(every=0))
    augment = Augment(settings.augment, settings.seed)
    split = Split(ArrayImages(np.zeros((6, 1, 8, 8), np.uint8), np.zeros(6)), np.arange(6))
    batches = mock.Mock(steps=3, split=split, waited={}, **{"data.num_classes": 2})

    def batch(images: int, labelled: int | None) -> Batch:
        return Batch(
            torch.zeros(images),
            torch.zeros(images),
            torch.arange(images),
            whole_labelled=labelled,
            labelled_here=labelled,
        )

    decoded = []
    batches.keep.side_effect = lambda *_: decoded.append(time.process_time())
    with loop(settings, state, batches, augment, tmp_path, "test", 1) as training:
        for epoch in training.epochs():
            assert decoded[-1] <= epoch.processor_started  # decoding does not count
            epoch.end_batch(batch(2, None), loss=torch.tensor(1.0), acc=torch.tensor(0.5))
            epoch.end_batch(batch(1, 0), loss=torch.tensor(4.0), acc=torch.tensor(0.0))
            epoch.end_batch(batch(3, 1), loss=torch.tensor(3.0), acc=torch.tensor(1.0))
            state.finished = True
            training.save(epoch, epoch.metrics(**epoch.end()))
    entry = state.metrics[0]
    assert entry.pop("loss") == pytest.approx(15 / 6)
    assert entry.pop("acc") == pytest.approx(2 / 3)  # of the three with a label
    assert entry.keys() == {"epoch", "seconds", "processor_seconds", "images_per_s"}


def test_an_epoch_counts_the_processor_seconds_of_all_ranks(tmp_path, monkeypatch):
    state, settings = make(), Settings(log=LogSettings(every=0))
    augment = Augment(settings.augment, settings.seed)
    split = Split(ArrayImages(np.zeros((2, 1, 8, 8), np.uint8), np.zeros(2)), np.arange(2))
    batches = mock.Mock(steps=1, split=split, waited={}, **{"data.num_classes": 2})
    with loop(settings, state, batches, augment, tmp_path, "test", 1) as training:
        for epoch in training.epochs():
            epoch.end_batch(Batch(*torch.zeros(2, 2), torch.arange(2)), loss=torch.tensor(1.0))
            ended = epoch.processor_started + 5
            with monkeypatch.context() as patch:
                patch.setattr(distributed, "world_size", lambda: 2)
                patch.setattr(distributed, "all_reduce_sum", lambda values: 2 * values)
                patch.setattr("time.process_time", lambda ended=ended: ended)
                means = epoch.end()
            state.finished = True
            training.save(epoch, epoch.metrics(**means))
    assert state.metrics[0]["processor_seconds"] == 10
    assert state.metrics[0]["loss"] == 1


def test_a_rank_with_more_than_its_share_of_labels_shows_the_accuracy_of_its_images():
    batch = Batch(
        torch.zeros(4),
        torch.zeros(4),
        torch.arange(4),
        whole_size=8,
        whole_labelled=2,
        labelled_here=2,  # both on this rank, where one is its share
    )
    sums = Sums()
    sums.add(batch, {"acc": torch.tensor(2.0)})  # both right, over its share
    assert batch.labelled == 1 and sums.means() == {"acc": 1.0}
