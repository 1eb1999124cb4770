"""Muon for matrices (Jordan, 2024): momentum whose singular values are all pushed towards one.

Matrices of one shape are updated together, in a few batched products. Independent of networks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
RMS_OF_ADAM = 0.2  # the size of an entry of an AdamW step at learning rate 1 (Liu et al., 2025)


class Muon(torch.optim.Optimizer):
    """Learning rate and weight decay have the same meaning as in AdamW."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        groups = [{"params": alike} for alike in by_shape.values()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            matrices = group["params"]
            moments = [self._moment(matrix) for matrix in matrices]
            gradients = [matrix.grad for matrix in matrices]
            torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, moments, group["momentum"])
            steps = orthogonal(torch.stack(ahead)).unbind(0)
            scale = RMS_OF_ADAM * max(matrices[0].shape) ** 0.5
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(
                matrices,
                [s.to(m.dtype) for s, m in zip(steps, matrices, strict=True)],
                alpha=-group["lr"] * scale,
            )

    def _moment(self, matrix: nn.Parameter) -> Tensor:
        state = self.state[matrix]
        if "moment" not in state:
            state["moment"] = torch.zeros_like(matrix)
        return state["moment"]


def orthogonal(matrices: Tensor) -> Tensor:
    """[count, rows, columns] with singular values near one, by Newton and Schulz's iteration."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else matrices.dtype)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x
