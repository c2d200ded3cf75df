"""The curvature of the projected loss, min over the output map of L, as products.

With the unknowns split into the output map o and the rest t, the projected loss has the curvature
H_tt - H_to H_oo^+ H_ot (Golub and Pereyra 1973), where H_oo = (features^T q features + its
regulariser) (x) I_p.  For the Gauss-Newton matrix that is J_t^T q (J_t v - features c) with the
least-squares map c of the tangent J_t v: two half passes over the data, no more work than one
product of the whole matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.derivatives.gradient import backward
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.products import (
    Kind,
    data_product,
    output_product,
    output_tangent,
)
from newtention.layers import Evaluation
from newtention.newton.varpro import OutputMap
from newtention.regularizers import FlatQuadratic


@dataclass(frozen=True, eq=False)
class Curvature:
    """H v for flat vectors of one problem, restricted to the free unknowns.

    point: where, and on which data.
    output: the output map's least squares on the same data if it is eliminated; None if not.
    free: 1 for unknowns to solve for, else 0; with `output`, 0 on the output map.
    """

    point: Linearised
    regularizer: FlatQuadratic
    kind: Kind
    free: Float[Tensor, " N"]
    output: OutputMap | None

    def product(self, v: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """H v, zero on what is not free."""
        v = (v * self.free)[None]
        if self.output is None:
            data = data_product(self.point, v[:, None], self.kind)[:, 0]
        elif self.kind == "gauss-newton":
            data = self._projected_gauss_newton(v, self.output)
        else:
            data = self._eliminated(v, self.output)
        return (data + self.regularizer.curvature(v))[0] * self.free

    def _projected_gauss_newton(
        self, v: Float[Tensor, "1 N"], output: OutputMap
    ) -> Float[Tensor, "1 N"]:
        layer, theta = self.point.layer, self.point.theta
        tangents: list[Tensor] = []

        def first(at: Evaluation) -> tuple[Tensor]:
            R = output_tangent(at, layer, theta, v)
            tangents.append(R)
            return (at.features.flatten(1, 2).mT @ R.flatten(1, 2),)

        c = output.solve(self.point.reduce(first)[0])
        remaining = iter(tangents)

        def second(at: Evaluation) -> tuple[Tensor]:
            fitted = at.features @ c[:, None]
            R = next(remaining) - fitted * at.tile.weight[..., None]
            return (backward(at, layer, theta, R),)

        return self.point.reduce(second)[0]

    def _eliminated(self, v: Float[Tensor, "1 N"], output: OutputMap) -> Float[Tensor, "1 N"]:
        start = self.point.layer.output_start
        direct = data_product(self.point, v[:, None], self.kind)[:, 0]
        change = output.solve(direct[:, start:].reshape(output.gradient.shape))
        w = torch.cat([torch.zeros_like(v[:, :start]), -change.flatten(1)], 1)
        return direct + output_product(self.point, w)
