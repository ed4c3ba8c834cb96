"""Per-image rows: numbers that belong to one training image each, kept on the CPU and stepped once per epoch.

A row never becomes part of a module. A batch gathers its rows as a leaf tensor, and after backward their gradient
updates the same rows at once. Every image occurs once per epoch, so that is the same as one optimizer step over all
rows at the end of the epoch, without holding the gradients of all images (*GauTransformer, section 3.3.1*).
"""

from __future__ import annotations

import torch
from torch import Tensor


class ImageState:
    """N rows of one shape, their Adam moments and step counts, all float32 on the CPU.

    Rows are keyed by image id, the image's position in the data set's canonical order.
    """

    def __init__(self, num_images: int, initial_row: Tensor, *, lr: float, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8) -> None:
        """``initial_row`` [*row] is copied to every image; ``lr``, ``betas`` and ``eps`` are Adam's."""
        self.rows = initial_row.float().expand(num_images, *initial_row.shape).clone()
        self.first_moment = torch.zeros_like(self.rows)
        self.second_moment = torch.zeros_like(self.rows)
        self.steps = torch.zeros(num_images, dtype=torch.int32)
        self.lr, self.betas, self.eps = lr, betas, eps

    def __len__(self) -> int:
        return len(self.rows)

    def gather(self, image_ids: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """The rows of ``image_ids`` [B] as a leaf tensor [B, *row] on ``device`` that collects a gradient."""
        return self.rows[image_ids].to(device).requires_grad_()

    @torch.no_grad()
    def update(self, image_ids: Tensor, gradient: Tensor) -> None:
        """One Adam step on the rows of distinct ``image_ids`` [B] with their ``gradient`` [B, *row].

        Each row has its own step count for the bias correction, so a row behaves as if it were alone in
        ``torch.optim.Adam``.
        """
        gradient = gradient.to("cpu", torch.float32)
        beta1, beta2 = self.betas
        self.steps[image_ids] += 1
        steps = self.steps[image_ids].view(-1, *[1] * (gradient.dim() - 1)).float()
        first = self.first_moment[image_ids].lerp_(gradient, 1 - beta1)
        second = self.second_moment[image_ids].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self.first_moment[image_ids] = first
        self.second_moment[image_ids] = second
        denominator = (second / (1 - beta2 ** steps)).sqrt_().add_(self.eps)
        self.rows[image_ids] -= self.lr * (first / (1 - beta1 ** steps)) / denominator

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors a checkpoint needs."""
        return {"rows": self.rows, "first_moment": self.first_moment, "second_moment": self.second_moment,
                "steps": self.steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copies the tensors of :meth:`state_dict` back; shapes must agree."""
        for name, own in self.state_dict().items():
            own.copy_(state[name])
