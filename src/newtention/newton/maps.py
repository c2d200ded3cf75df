"""Attention maps for the dense loop: X is all there is to find."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from newtention.derivatives.gradient import data_loss
from newtention.derivatives.maps import map_second_order
from newtention.derivatives.penalty import penalty
from newtention.layers import AttentionMap
from newtention.newton.globalise import loss_noise
from newtention.newton.objective import Derivatives
from newtention.newton.projected import ProblemLoss


@dataclass(frozen=True, eq=False)
class MapLoss(ProblemLoss[AttentionMap]):
    """1/2 sum_j q_j ||P_j - B_j||^2 plus the regulariser; theta is vec X, and steps move it all."""

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
