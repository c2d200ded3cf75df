"""torch's optimisers on X and Y, all derivatives by autograd."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.comparison.tasks import RegressionTask
from benchmarks.comparison.watch import Watch
from benchmarks.peers import descent

MEMORY = 100
"""Pairs that L-BFGS keeps."""


def lbfgs(task: RegressionTask, watch: Watch, choice: None) -> None:
    """L-BFGS in float64."""
    x = torch.from_numpy(task.start.copy()).requires_grad_()

    def backward() -> Tensor:
        value = task.loss(x)
        value.backward()
        assert x.grad is not None
        watch.see(x.detach().numpy(), float(value.detach()), float(x.grad.norm()))
        return value

    descent.lbfgs([x], MEMORY, backward)


def first_order(
    task: RegressionTask, watch: Watch, rate: float, optimizer: str, dtype: str = "float64"
) -> None:
    """Adam and others on all data: batches of 4 or 8 sentences of the head did worse.

    Two seconds of a core left Adam at a relative loss of 0.089 with all 40, 0.098 with 8.
    """
    precision = getattr(torch, dtype)
    piles = [pile.to(precision) for pile in task.piles]
    start = task.weights(torch.from_numpy(task.start))
    W = [w.to(precision).clone().requires_grad_() for w in start]

    def backward() -> None:
        torch.stack([pile.loss(*W) for pile in piles]).sum().backward()

    def point() -> np.ndarray:
        return torch.cat([w.detach().flatten() for w in W]).double().numpy()

    descent.descend(W, optimizer, rate, backward, watch, point)
