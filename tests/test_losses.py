"""The three losses against numpy loops from the equations, and the schedule of gamma."""

import numpy as np
import pytest
import torch

from gaupipe.distillation.losses import feature_loss, gamma_at, hard_loss, soft_loss

B, H, T, C = 2, 3, 5, 4


def rows(seed: int) -> torch.Tensor:
    return torch.randn(B, H, T, T, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


@pytest.mark.parametrize("direction", ["teacher_student", "student_teacher"])
def test_feature_loss_is_zero_on_the_teacher_and_finite_where_the_teacher_has_zeros(direction):
    assert feature_loss(rows(0), rows(0).exp(), 1.0, direction).item() == pytest.approx(0, abs=1e-5)
    one_hot = torch.eye(T).expand(B, H, T, T)
    assert torch.isfinite(feature_loss(rows(0), one_hot, 1.0, direction))


def steep_map() -> np.ndarray:
    """A teacher's map [1, 2, 8, 8] float64 whose rows fall to 1e-35, as those of narrow
    Gaussians do."""
    distance = np.abs(np.arange(8)[:, None] - np.arange(8)[None, :])
    maps = np.stack([np.exp(-1.6 * distance**2), np.exp(-0.02 * (distance + 1.3) ** 2)])[None]
    return maps / maps.sum(-1, keepdims=True)


def divergence(
    student: np.ndarray, teacher: np.ndarray, temperature: float, direction: str
) -> float:
    """Mean over rows of the KL between tempered rows, float64, 0 log 0 = 0."""

    def tempered(p: np.ndarray) -> np.ndarray:
        power = p ** (1 / temperature)
        return power / power.sum(-1, keepdims=True)

    s, t = tempered(student), tempered(teacher)
    p, other = (t, s) if direction == "teacher_student" else (s, t)
    seen = p > 0
    return (p[seen] * np.log(p[seen] / other[seen])).sum() / p[..., 0].size


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 8.0, 40.0])
@pytest.mark.parametrize("direction", ["teacher_student", "student_teacher"])
def test_small_attention_counts_for_what_it_is_at_every_temperature(direction, temperature):
    teacher = steep_map()
    scores = np.random.default_rng(0).standard_normal((1, 2, 8, 8)) * 3
    if (
        direction == "student_teacher"
    ):  # away from where a float32 divergence is a difference of huge numbers
        scores = np.log(teacher) * 0.8 + scores / 3

    def softmax(scores: np.ndarray) -> np.ndarray:
        power = np.exp(scores - scores.max(-1, keepdims=True))
        return power / power.sum(-1, keepdims=True)

    leaf = torch.tensor(scores, dtype=torch.float32, requires_grad=True)
    loss = feature_loss(
        leaf.log_softmax(-1), torch.tensor(teacher, dtype=torch.float32), temperature, direction
    )
    assert loss.item() == pytest.approx(
        divergence(softmax(scores), teacher, temperature, direction), rel=2e-5, abs=2e-7
    )
    loss.backward()
    along, eps = np.random.default_rng(1).standard_normal(scores.shape), 1e-6
    slope = (
        divergence(softmax(scores + eps * along), teacher, temperature, direction)
        - divergence(softmax(scores - eps * along), teacher, temperature, direction)
    ) / (2 * eps)
    assert (leaf.grad.double().numpy() * along).sum() == pytest.approx(slope, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 8.0])
def test_a_key_the_teacher_gives_nothing_gets_nothing_at_any_temperature(temperature):
    teacher = np.zeros((1, 1, 2, 4))
    teacher[..., 0, :2], teacher[..., 1, 3] = (0.9, 0.1), 1
    student = rows(2)[:1, :1, :2, :4].exp().double()
    student = (student / student.sum(-1, keepdim=True)).numpy()
    loss = feature_loss(
        torch.tensor(student).log().float(), torch.tensor(teacher).float(), temperature
    )
    assert loss.item() == pytest.approx(
        divergence(student, teacher, temperature, "teacher_student"), rel=1e-5
    )


def test_soft_and_hard_loss():
    torch.manual_seed(0)
    logits, teacher, labels = torch.randn(B, C), torch.randn(B, C), torch.tensor([1, 3])
    log_q = logits.double().numpy() - np.log(np.exp(logits.double().numpy()).sum(-1, keepdims=True))
    p = np.exp(teacher.double().numpy())
    p /= p.sum(-1, keepdims=True)
    assert soft_loss(logits, teacher.softmax(-1)).item() == pytest.approx(
        -(p * log_q).sum(-1).mean(), rel=1e-5
    )
    assert hard_loss(logits, labels).item() == pytest.approx(
        -(log_q[0, 1] + log_q[1, 3]) / 2, rel=1e-5
    )


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
    assert [gamma_at(epoch, 0.8, schedule, 4) for epoch in range(6)] == pytest.approx(
        values, abs=1e-12
    )
