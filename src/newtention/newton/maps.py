"""Attention maps for the dense loop: X is all there is to find."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from jaxtyping import Bool, Float, Int
from torch import Tensor

from newtention.derivatives.gradient import data_loss
from newtention.derivatives.maps import map_second_order
from newtention.derivatives.penalty import penalty
from newtention.layers import AttentionMap
from newtention.newton.globalise import loss_noise
from newtention.newton.objective import Derivatives, Objective
from newtention.newton.projected import curvature_unit
from newtention.problem import AttentionProblem


@dataclass(frozen=True, eq=False)
class MapLoss(Objective):
    """1/2 sum_j q_j ||P_j - B_j||^2 plus the regulariser; theta is vec X, and steps move it all."""

    problem: AttentionProblem
    layer: AttentionMap

    @classmethod
    def of(cls, problem: AttentionProblem, layer: AttentionMap) -> Self:
        """The objective of a problem's members."""
        energy = problem.target_energy()
        return cls(problem, layer, energy=energy, unit=curvature_unit(problem, energy))

    def take(self, index: Int[Tensor, " k"]) -> Self:
        """The members at `index`."""
        parts = {"energy": self.energy[index], "unit": self.unit[index]}
        return replace(self, problem=self.problem.take(index), **parts)

    def loss(self, theta: Float[Tensor, "b N"]) -> Float[Tensor, " b"]:
        """Data loss and regulariser."""
        return data_loss(self.problem, self.layer, theta) + self._penalty(theta)

    def derivatives(self, theta: Float[Tensor, "b N"], full: Bool[Tensor, " b"]) -> Derivatives:
        """The closed forms."""
        share = None if bool(full.all()) else full.to(self.energy.dtype)
        loss, gradient, H = map_second_order(self.problem, self.layer.unpack(theta), share)
        data = (loss - self._penalty(theta)).clamp(min=0)
        return Derivatives(loss, loss_noise(loss, data, self.energy), gradient, H)

    def _penalty(self, theta: Float[Tensor, "b N"]) -> Float[Tensor, " b"]:
        return penalty(self.problem, self.layer).value(theta)
