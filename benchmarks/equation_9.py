"""What a query's attention map is pulled to by each reading of GauTransformer's eq. 9.

    python benchmarks/equation_9.py

The teacher's map G is a Gaussian of std 1 token on 8 x 8 keys, the student's map S starts uniform.
A line of JSON for each reading: the length of the gradient in the student's scores at the start,
the lowest value of the loss and, in total variation, how far the map there is from G and how far a
uniform map is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gaupipe.distillation.losses import feature_loss
from gaupipe.maps.gaussians import local_map

SIDE = 8
QUERY = 36  # in the middle of the grid


def with_temperature(temperature: float, log_map: Tensor, teacher: Tensor) -> Tensor:
    """Eq. 9 if softmax(x) / t is a misprint of softmax(x / t)."""
    student = log_map.exp()
    log_ratio = (student / temperature).log_softmax(-1) - (teacher / temperature).log_softmax(-1)
    return (student * log_ratio).sum()


READINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "printed": partial(feature_loss, divergence="printed"),
    "softmax(x / .1)": partial(with_temperature, 0.1),
    "student_teacher": partial(feature_loss, divergence="student_teacher"),
    "teacher_student": partial(feature_loss, divergence="teacher_student"),
}


def lowest(loss: Callable[[Tensor, Tensor], Tensor], teacher: Tensor) -> tuple[float, Tensor]:
    """The lowest value of a loss and the student's map there, found from the uniform map and from
    the teacher's."""
    found = []
    for start in (torch.zeros_like(teacher), teacher.log().clamp_min(-20)):
        scores = start.requires_grad_()
        optimizer = torch.optim.LBFGS([scores], max_iter=1000, line_search_fn="strong_wolfe")

        def closure(scores: Tensor = scores) -> Tensor:
            scores.grad = None
            value = loss(scores.log_softmax(-1), teacher)
            value.backward()
            return value

        optimizer.step(closure)
        found.append((closure().item(), scores.detach().softmax(-1)))
    return min(found, key=lambda pair: pair[0])


def total_variation(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().sum().item() / 2


def main() -> None:
    teacher = local_map((SIDE, SIDE), [1.0])[0, QUERY].double()  # [keys]
    teacher /= teacher.sum()
    uniform = torch.full_like(teacher, 1 / len(teacher))
    for name, loss in READINGS.items():
        scores = torch.zeros_like(teacher).requires_grad_()
        loss(scores.log_softmax(-1), teacher).backward()
        value, student = lowest(loss, teacher)
        row = {
            "reading": name,
            "gradient": round(scores.grad.norm().item(), 4),
            "lowest": round(value, 4),
            "to_teacher": round(total_variation(student, teacher), 3),
            "uniform_to_teacher": round(total_variation(uniform, teacher), 3),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
