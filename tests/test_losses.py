"""The three losses against numpy from the equations, and the schedule of gamma."""

import numpy as np
import pytest
import torch

from gaupipe.data.mixing import Mix
from gaupipe.distillation.losses import DIVERGENCES, feature_loss, soft_loss
from gaupipe.settings import PhaseBSettings
from gaupipe.training.job import hard_loss
from oracles import divergence, equation_9


def softmax(scores: np.ndarray) -> np.ndarray:
    power = np.exp(scores - scores.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True)


def steep_map() -> np.ndarray:
    """A teacher's map [1, 2, 8, 8] float64 whose rows fall to 1e-35, as those of narrow
    Gaussians do."""
    distance = np.abs(np.arange(8)[:, None] - np.arange(8)[None, :])
    maps = np.stack([np.exp(-1.6 * distance**2), np.exp(-0.02 * (distance + 1.3) ** 2)])[None]
    return maps / maps.sum(-1, keepdims=True)


def oracle(scores, teacher, temperature: float, name: str, hide_own: bool = False) -> float:
    if name == "printed":
        return equation_9(softmax(scores), teacher, hide_own)
    if name == "student_teacher":
        if hide_own:
            teacher = teacher * (1 - np.eye(teacher.shape[-1]))
        teacher = np.maximum(
            teacher / teacher.sum(-1, keepdims=True), 2.0**-25
        )  # float16 rounds to 0
    s, t = softmax(scores) ** (1 / temperature), teacher ** (1 / temperature)
    return divergence(t, s, hide_own) if name == "teacher_student" else divergence(s, t, hide_own)


@pytest.mark.parametrize("keys", ["all", "hidden", "zeros", "hidden zeros", "mixed"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_value_and_gradient_are_those_of_the_equation_in_float64(name, keys):
    """Of maps whose teacher gives nothing to some keys, whose student does not see its own token,
    and of two maps mixed, as the images of mixup are."""
    random = np.random.default_rng(0)
    scores, along = random.standard_normal((2, 3, 2, 8, 8))
    teacher = softmax(random.standard_normal((3, 1, 8, 8)) * 4)
    if keys == "mixed":
        teacher = 0.3 * steep_map() + 0.7 * teacher
    if "zeros" in keys:
        teacher[..., :3, 4:] = 0
        teacher /= teacher.sum(-1, keepdims=True)
    hide_own = "hidden" in keys
    hidden = torch.eye(8, dtype=torch.bool) if hide_own else None

    leaf = torch.tensor(scores)
    if hide_own:
        leaf = leaf.masked_fill(hidden, -torch.inf)
    leaf.requires_grad_()
    loss = feature_loss(leaf.log_softmax(-1), torch.tensor(teacher), 1.0, name, hidden)
    loss.backward()
    assert loss.item() == pytest.approx(oracle(scores, teacher, 1.0, name, hide_own), rel=1e-12)
    after, before = (
        oracle(scores + h * along, teacher, 1.0, name, hide_own) for h in (1e-6, -1e-6)
    )
    slope = (leaf.grad.numpy() * along).sum()
    assert slope == pytest.approx((after - before) / 2e-6, rel=1e-6, abs=1e-10)


def test_equation_9_as_printed_is_lowest_about_halfway_between_teacher_and_uniform():
    """So it is no divergence, and its gradient on a uniform student is small."""
    teacher = softmax(np.random.default_rng(2).standard_normal((1, 1, 64, 64)) * 2)
    halfway = (teacher + 1 / 64) / 2
    at_teacher, between = (
        feature_loss(torch.tensor(rows).log(), torch.tensor(teacher), divergence="printed").item()
        for rows in (teacher, halfway)
    )
    assert at_teacher == pytest.approx(0, abs=1e-12) and between < -0.01
    slopes = {}
    for name in DIVERGENCES:
        leaf = torch.zeros(1, 1, 64, 64, dtype=torch.float64, requires_grad=True)
        feature_loss(leaf.log_softmax(-1), torch.tensor(teacher), divergence=name).backward()
        slopes[name] = leaf.grad.norm().item()
    assert 30 * slopes["printed"] < min(slopes["teacher_student"], slopes["student_teacher"])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 8.0, 40.0])
@pytest.mark.parametrize("name", ["teacher_student", "student_teacher"])
def test_small_attention_counts_for_what_it_is_at_every_temperature(name, temperature):
    """Down to what float16 holds, in KL(student || teacher); and a key that the teacher gives
    nothing gets nothing in the other."""
    teacher = steep_map()
    scores = np.random.default_rng(0).standard_normal((1, 2, 8, 8)) * 3
    if name == "teacher_student":
        teacher[..., :2, 5:] = 0
        teacher /= teacher.sum(-1, keepdims=True)
    else:  # away from where a float32 divergence is a difference of huge numbers
        scores = np.log(teacher) * 0.8 + scores / 3
    leaf = torch.tensor(scores, dtype=torch.float32, requires_grad=True)
    loss = feature_loss(leaf.log_softmax(-1), torch.tensor(teacher).float(), temperature, name)
    expected = oracle(scores, teacher, temperature, name)
    assert loss.item() == pytest.approx(expected, rel=2e-5, abs=2e-7)
    loss.backward()
    along = np.random.default_rng(1).standard_normal(scores.shape)
    after, before = (
        oracle(scores + step * along, teacher, temperature, name) for step in (1e-6, -1e-6)
    )
    slope = (after - before) / 2e-6
    assert (leaf.grad.double().numpy() * along).sum() == pytest.approx(slope, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_feature_loss_is_zero_on_the_teacher_and_finite_where_the_teacher_has_zeros(name):
    rows = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    assert feature_loss(rows, rows.exp(), 1.0, name).item() == pytest.approx(0, abs=1e-5)
    assert feature_loss(rows, torch.eye(5).expand(2, 3, 5, 5), 1.0, name).isfinite()


def test_soft_and_hard_loss():
    torch.manual_seed(0)
    logits, teacher = torch.randn(2, 2, 4)
    log_q, p = np.log(softmax(logits.double().numpy())), softmax(teacher.double().numpy())
    soft = soft_loss(logits, teacher.softmax(-1)).item()
    assert soft == pytest.approx(-(p * log_q).sum(-1).mean(), rel=1e-5)
    hard = hard_loss(logits, torch.tensor([1, 3])).item()
    assert hard == pytest.approx(-(log_q[0, 1] + log_q[1, 3]) / 2, rel=1e-5)
    blend = torch.tensor([0.7, 0.4], dtype=torch.float64)
    mixed = Mix(torch.tensor([1, 0]), blend, torch.zeros(2, 4, dtype=torch.float64))
    hard = hard_loss(logits, torch.tensor([1, 3]), 0.1, mixed).item()
    targets = 0.9 * np.array([[0, 0.7, 0, 0.3], [0, 0.6, 0, 0.4]]) + 0.1 / 4
    assert hard == pytest.approx(-(targets * log_q).sum(-1).mean(), rel=1e-5)


@pytest.mark.parametrize(
    "schedule,values",
    [
        ("constant", [0.8, 0.8, 0.8, 0.8, 0.8, 0.8]),
        ("linear", [0.8, 0.6, 0.4, 0.2, 0.0, 0.0]),
        ("cosine", [0.8, 0.4 * (1 + 0.5**0.5), 0.4, 0.4 * (1 - 0.5**0.5), 0.0, 0.0]),
        ("stop_after", [0.8, 0.8, 0.8, 0.8, 0.0, 0.0]),
    ],
)
def test_gamma_schedules(schedule, values):
    epochs = None if schedule == "constant" else 4
    phase = PhaseBSettings(gamma=0.8, gamma_schedule=schedule, gamma_epochs=epochs)
    assert phase.gammas(6) == pytest.approx(values, abs=1e-12)
