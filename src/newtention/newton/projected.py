"""Attention regression for the dense loop: the loss of X alone, every Y the best for its X."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from newtention.chunks import Chunk, reduce
from newtention.derivatives.gradient import data_loss, data_loss_at
from newtention.derivatives.hessian import second_order
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.penalty import penalty
from newtention.layers import AttentionMap, Bilinear
from newtention.newton.globalise import loss_noise
from newtention.newton.objective import Derivatives, Objective
from newtention.newton.varpro import OutputMap, eliminate_output
from newtention.problem import AttentionProblem

KEPT = 1 << 25
"""Bytes of attention weights kept between a projection and the loss at its result: less than the
tiles of a Hessian, none of which is alive then, so that the predicted peak stands."""

L = TypeVar("L", Bilinear, AttentionMap)


@dataclass(frozen=True, eq=False)
class ProblemLoss(Objective, Generic[L]):
    """The loss of a problem's members, for one parametrisation."""

    problem: AttentionProblem
    layer: L

    @classmethod
    def of(cls, problem: AttentionProblem, layer: L) -> Self:
        """The objective of a problem's members."""
        energy = problem.target_energy()
        return cls(problem, layer, energy=energy, unit=curvature_unit(problem, energy))

    def take(self, index: Int[Tensor, " k"]) -> Self:
        """The members at `index`."""
        parts = {"energy": self.energy[index], "unit": self.unit[index]}
        return replace(self, problem=self.problem.take(index), **parts)


@dataclass(frozen=True, eq=False)
class ProjectedLoss(ProblemLoss[Bilinear]):
    """f(X) = min_Y L(X, Y); theta is the flat vector of (X, Y), and steps move X."""

    def solved(
        self, theta: Float[Tensor, "b N"]
    ) -> tuple[Float[Tensor, "b N"], Float[Tensor, " b"]]:
        """theta with the best Y for its X, the nearest to the given one of several; its loss."""
        point = Linearised.at(self.problem, self.layer, theta, KEPT)
        output = OutputMap.at(point, penalty(self.problem, self.layer))
        solved = point.with_output(output.solved(theta))
        return solved.theta, data_loss_at(solved) + self._penalty(solved.theta)

    def loss(self, theta: Float[Tensor, "b N"]) -> Float[Tensor, " b"]:
        """Data loss and regulariser."""
        return data_loss(self.problem, self.layer, theta) + self._penalty(theta)

    def derivatives(self, theta: Float[Tensor, "b N"], full: Bool[Tensor, " b"]) -> Derivatives:
        """Gradient and Hessian from the exact blocks, Y eliminated."""
        X, Y = self.layer.unpack(theta)
        share = None if bool(full.all()) else full.to(self.energy.dtype)
        loss, GX, GY, blocks = second_order(self.problem, X, Y, share)
        reduced = eliminate_output(blocks, GX, GY)
        data = (loss - self._penalty(theta)).clamp(min=0)
        noise = loss_noise(loss, data, self.energy)
        return Derivatives(loss, noise, reduced.gradient, reduced.hessian)

    def _penalty(self, theta: Float[Tensor, "b N"]) -> Float[Tensor, " b"]:
        return self.problem.quadratic.value(*self.layer.unpack(theta))


def curvature_unit(problem: AttentionProblem, energy: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Size of curvature in one entry of X: 1/2 ||B||^2 per mean square change of the logits.

    NaN if it underflows.
    """

    def tile_sums(tile: Chunk) -> tuple[Tensor, ...]:
        a1, a2 = tile.queries.square().sum((1, 2, 3)), tile.A2.square().sum((1, 2, 3))
        return a1, a2, tile.query_count(), tile.key_count()

    a1, a2, n, m = reduce(problem.chunks, problem.batch, tile_sums)
    d1, d2, _, _ = problem.widths
    mean1, mean2 = a1 / (n * d1), a2 / (m * d2)
    unit = energy * mean1 * mean2
    lost = (unit == 0) & (energy > 0) & (mean1 > 0) & (mean2 > 0)
    return torch.where(lost, torch.nan, unit)
