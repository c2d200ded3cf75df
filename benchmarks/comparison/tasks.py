"""What a method gets: data, a start common to all, and a judge that is ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import newtention as nt
from benchmarks.comparison.watch import Look
from benchmarks.minilm import CHUNK, Batch, Calibration, Tokens, batches, padded, problems


@dataclass(frozen=True, eq=False)
class Pile:
    """Self-attention on sequences of one padded length, as a user of autograd holds them.

    A: tokens (s, n, d).  B: targets (s, n, p), zero on padding.  real: (s, n, 1) or None if no row
    is padding.
    """

    A: Tensor
    B: Tensor
    real: Tensor | None

    def to(self, dtype: torch.dtype) -> Pile:
        """In another precision."""
        return Pile(self.A.to(dtype), self.B.to(dtype), self.real)

    def residual(self, X: Tensor, Y: Tensor) -> Tensor:
        """(s, n, p), zero on padding; written as a careful user would."""
        S = self.A @ X @ self.A.mT
        if self.real is not None:
            S = S.masked_fill(~self.real.mT, -torch.inf)
        R = torch.softmax(S, -1) @ (self.A @ Y) - self.B
        return R if self.real is None else R.where(self.real, 0)

    def loss(self, X: Tensor, Y: Tensor) -> Tensor:
        """Half the sum of squares."""
        return 0.5 * self.residual(X, Y).square().sum()


@dataclass(frozen=True, eq=False)
class RegressionTask:
    """X and Y of one head to find, in float64.

    start: flat vector (X, Y): what `solve` would start from, X given or random, Y solved for it.
    single: the problem in float32, where a method uses it.
    """

    problem: nt.AttentionProblem
    start: np.ndarray
    single: nt.AttentionProblem | None = None

    @classmethod
    def of(cls, problem: nt.AttentionProblem, seed: int, X: Tensor | None = None) -> RegressionTask:
        """From X, or from the random start of that seed."""
        first = nt.solve(problem, X, seed=seed, max_iter=0).start
        return cls(problem, nt.to_scipy(problem, first).x0)

    @property
    def scale(self) -> float:
        """Losses over this are relative."""
        return float(self.problem.target_energy())

    @cached_property
    def derivatives(self) -> Any:
        """Ours, as scipy takes them."""
        return nt.to_scipy(self.problem, self.weights(torch.from_numpy(self.start)))

    @cached_property
    def piles(self) -> list[Pile]:
        """The data by length."""
        return [_pile(c.A1[0], c.B[0], c.weight[0] > 0) for c in self.problem.chunks]

    def weights(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """X and Y of a flat vector."""
        d1, d2, d3, p = self.problem.widths
        return flat[: d1 * d2].reshape(d1, d2), flat[d1 * d2 :].reshape(d3, p)

    def loss(self, flat: Tensor) -> Tensor:
        """The loss for autograd."""
        X, Y = self.weights(flat)
        return torch.stack([pile.loss(X, Y) for pile in self.piles]).sum()

    def judge(self, flat: np.ndarray) -> Look:
        """Loss and gradient by our formulas; infinite where they overflow."""
        if not np.isfinite(flat).all():
            return Look(np.inf)
        slope = self.derivatives.jac(flat)
        return Look(self.derivatives.fun(flat), float(np.linalg.norm(slope)))

    final = judge


def _pile(A: Tensor, B: Tensor, real: Tensor) -> Pile:
    if bool(real.all()):
        return Pile(A, B, None)
    rows = real[..., None]
    return Pile(A, B.where(rows, 0), rows)


JUDGED = 350
"""Training sentences that a layer is judged on during a run."""
JITTER = 0.2
"""Relative noise of the lengths that sentences are sorted by, so that no two epochs have the same
batches while the sentences of one batch are of nearly equal length."""


@dataclass(frozen=True, eq=False)
class LayerTask:
    """A whole layer to refit in float32 from a truncated start."""

    data: Calibration
    start: nt.FactoredAttention

    @cached_property
    def problem(self) -> nt.AttentionProblem:
        """The training sentences."""
        return problems(self.data)[0]

    @property
    def scale(self) -> float:
        """Losses over this are relative: the total energy of the training targets."""
        return float(self.problem.target_energy())

    @cached_property
    def _judged(self) -> list[tuple[nt.AttentionProblem, float]]:
        part = replace(self.data, train=self.data.train.first(JUDGED))
        return [(problem, float(problem.target_energy())) for problem in problems(part)]

    def judge(self, layer: nt.FactoredAttention) -> Look:
        """Loss on a fixed part of the training sentences, times their share, and held out."""
        if not bool(torch.isfinite(layer.theta).all()):
            return Look(np.inf)
        train, held_out = (nt.loss(p, layer) / energy for p, energy in self._judged)
        return Look(train * self.scale, None, held_out)

    def final(self, layer: nt.FactoredAttention) -> Look:
        """Loss and gradient on all training sentences."""
        slopes = nt.gradient(self.problem, layer).values()
        norm = sum(float(g.double().square().sum()) for g in slopes) ** 0.5
        return Look(float(nt.loss(self.problem, layer)), norm, self.judge(layer).held_out)


def pieces(tokens: Tokens) -> list[Batch]:
    """All sentences, each once."""
    return [padded(tokens, group) for group in batches(tokens.offsets.diff().numpy(), CHUNK)]


def epochs(tokens: Tokens, size: int, seed: int) -> Iterator[Batch]:
    """Batches of `size` tokens without end, drawn anew in each epoch."""
    random = np.random.default_rng(seed)
    lengths = tokens.offsets.diff().numpy()
    while True:
        key = lengths * (1 + JITTER * random.random(len(lengths)))
        groups = batches(lengths, size, key)
        for i in random.permutation(len(groups)):
            yield padded(tokens, groups[i])
