"""The Hessian's Lipschitz constant about an evaluated fit of attention maps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.lipschitz import Lipschitz
from newtention.bounds.maps import (
    MapCumulants,
    MapRows,
    MapStatistics,
    map_ball,
    map_cumulants,
    map_hessian_derivative,
    map_lipschitz,
    map_statistics,
    map_unfolding_error,
)
from newtention.bounds.rounding import gamma
from newtention.bounds.unfolding import batches, squared_slices
from newtention.certify.evaluation import PointEvaluation
from newtention.certify.lipschitz import LipschitzBounds, PointBounds
from newtention.certify.map_evaluation import MapRowQuantities
from newtention.certify.row_errors import real_queries
from newtention.layers import AttentionMap
from newtention.problem import AttentionProblem


@dataclass(frozen=True, eq=False)
class MapBounds(PointBounds[MapStatistics]):
    """What bounds the third derivative of a fit of attention maps near a point."""

    @cached_property
    def rows(self) -> MapRows:
        """The rows' proved quantities."""
        r = self.point.rows
        assert isinstance(r, MapRowQuantities)
        return MapRows(real_queries(self.data), r.rho, r.rho3, r.peak, r.weight, r.residual)

    def _constant(self, delta: float) -> Lipschitz:
        J = self.point.jacobian_norm
        return map_lipschitz(self.rows, delta, J, self.statistics, self.unfolding, self.error)

    def _fourth(self, delta: float) -> float:
        J = self.point.jacobian_norm
        return map_ball(self.rows, delta, J, self.statistics, self.error).M4

    def _measured(self) -> MapStatistics:
        parts = []
        for tile, real in self._tiles():
            keep = real.flatten()
            parts.append(map_statistics(tile, map_cumulants(tile)).select(keep))
        return MapStatistics.concatenate(parts)

    def _gram(self, whitening: Float[Tensor, "N r"] | None) -> tuple[Float[Tensor, "r r"], float]:
        layer = self.point.layer
        rows = [map_cumulants(tile) for tile, _ in self._tiles()]
        rows = MapCumulants.concatenate([part.select(part.weight != 0) for part in rows])
        every = torch.eye(layer.size, dtype=rows.K.dtype, device=rows.K.device)
        directions = every if whitening is None else whitening.mT
        parts = batches(directions, len(rows.a1) * layer.d2**2)
        slices = (map_hessian_derivative(rows, part) for _, part in parts)
        return squared_slices(slices, whitening)

    def _unfolding_error(self) -> float:
        assert self.statistics is not None
        layer = self.point.layer
        sums = len(self.point.rows.rho) + 2 * (layer.d1 + layer.d2) + 64
        return map_unfolding_error(self.rows, self.statistics, self.error + gamma(sums))

    def _elements(self, keys: int) -> int:
        return 4 * self.point.layer.d2**3 + 6 * keys


def bounds_about(data: AttentionProblem, point: PointEvaluation) -> PointBounds:
    """The bounds for the kind of problem that it is."""
    of_map = isinstance(point.layer, AttentionMap)
    return MapBounds(data, point) if of_map else LipschitzBounds(data, point)
