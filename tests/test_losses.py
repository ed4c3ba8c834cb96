"""The three losses against numpy loops from the equations, and the schedule of gamma."""

import numpy as np
import pytest
import torch

from gaupipe.losses import feature_loss, feature_losses, gamma_at, hard_loss, soft_loss

B, H, T, C = 2, 3, 5, 4


def rows(seed: int) -> torch.Tensor:
    return torch.randn(B, H, T, T, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def sharpened(log_row: np.ndarray, temperature: float) -> np.ndarray:
    scaled = np.exp(log_row / temperature)
    return scaled / scaled.sum()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("direction", ["teacher_student", "student_teacher"])
def test_feature_loss_is_the_kl_of_every_row(direction, temperature):
    student, teacher = rows(0), rows(1)
    total = 0.0
    for b in range(B):
        for h in range(H):
            for q in range(T):
                s = sharpened(student[b, h, q].double().numpy(), temperature)
                t = sharpened(teacher[b, h, q].double().numpy(), temperature)
                p, other = (t, s) if direction == "teacher_student" else (s, t)
                total += sum(p[k] * np.log(p[k] / other[k]) for k in range(T))
    loss = feature_loss(student, teacher.exp(), temperature, direction)
    assert loss.item() == pytest.approx(total / (B * H * T), rel=1e-5)


@pytest.mark.parametrize("direction", ["teacher_student", "student_teacher"])
def test_feature_loss_gradient(direction):
    scores = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    teacher = rows(3)[:1, :2, :3, :3].double().softmax(-1)
    assert torch.autograd.gradcheck(
        lambda s: feature_loss(s.log_softmax(-1), teacher, 1.7, direction), scores
    )


@pytest.mark.parametrize("direction", ["teacher_student", "student_teacher"])
def test_feature_loss_is_zero_on_the_teacher_and_finite_where_the_teacher_has_zeros(direction):
    assert feature_loss(rows(0), rows(0).exp(), 1.0, direction).item() == pytest.approx(0, abs=1e-5)
    one_hot = torch.eye(T).expand(B, H, T, T)
    assert torch.isfinite(feature_loss(rows(0), one_hot, 1.0, direction))


def test_feature_losses_sum_over_blocks():
    students, teachers = [rows(0), rows(1)], [rows(2).exp(), rows(3).exp()]
    parts = [feature_loss(s, t) for s, t in zip(students, teachers, strict=True)]
    assert feature_losses(students, teachers).item() == pytest.approx(sum(parts).item())
    with pytest.raises(ValueError, match="shorter"):
        feature_losses(students, teachers[:1])


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
