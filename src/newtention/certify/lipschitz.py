"""The Hessian's Lipschitz constant about an evaluated point: levels added as they are needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.cumulants import (
    Statistics,
    Tile,
    cumulant_elements,
    row_statistics,
)
from newtention.bounds.lipschitz import Lipschitz, fourth_derivative, lipschitz_constant
from newtention.bounds.moments import Rows
from newtention.bounds.rounding import (
    UNIT,
    gamma,
    largest_eigenvalue_upper,
    norm_upper,
    upward,
)
from newtention.bounds.unfolding import (
    cumulants_of,
    unfolding_error,
    unfolding_gram,
    whitened_gram,
)
from newtention.certify.evaluation import PointEvaluation
from newtention.certify.row_errors import real_rows
from newtention.chunks import Chunk
from newtention.layers import Evaluation, evaluate
from newtention.problem import AttentionProblem

LEAST_ERROR = 16 * UNIT
SUMS = 4096
"""Roundings of the few sums and products that combine the rows' numbers, rows apart."""


@dataclass(frozen=True, eq=False)
class LipschitzBounds:
    """What bounds the third derivative near a point.

    statistics, unfolding: None until they are added.
    """

    data: AttentionProblem
    point: PointEvaluation
    statistics: Statistics | None = None
    unfolding: float | None = None

    @property
    def rows(self) -> Rows:
        """The rows' proved quantities."""
        r = self.point.rows
        return Rows(r.rho, r.rho3, r.m3, r.weight, r.residual)

    @property
    def error(self) -> float:
        """Relative errors of attention weights and residuals, and of sums over keys."""
        r = self.point.rows
        scale = r.residual + r.m3 * float(self.point.Y_norms.sum())
        relative = r.residual_error / scale.clamp(min=torch.finfo(scale.dtype).tiny)
        largest = float(torch.maximum(relative, r.weight_error).max())
        keys = max(chunk.A2.shape[2] for chunk in self.data.chunks)
        _, d2, d3, p = self.data.widths
        # Sums over d3 and p see ||Y||_F, at most sqrt(p) times the norm that bounds count.
        widths = 2 * d2 + math.ceil((d3 + p) * math.sqrt(p))
        return max(LEAST_ERROR, upward(largest, 4)) + gamma(keys + widths + 16)

    def at(self, delta: float) -> Lipschitz:
        """All levels at hand on the ball of radius delta, rounded upward."""
        point, count = self.point, len(self.point.rows.rho) + SUMS
        found = lipschitz_constant(
            self.rows,
            point.Y_norms,
            delta,
            point.jacobian_norm,
            self.statistics,
            self.unfolding,
            self.error,
        )
        levels = {name: upward(value, count) for name, value in found.levels.items()}
        return Lipschitz(levels[found.level], found.level, levels)

    def fourth(self, delta: float) -> float:
        """M4, a bound of the fourth derivative on the ball."""
        point = self.point
        value = fourth_derivative(
            self.rows, point.Y_norms, delta, point.jacobian_norm, self.statistics, self.error
        )
        return upward(value, len(point.rows.rho) + SUMS)

    def with_statistics(self) -> LipschitzBounds:
        """With the covariances of every row: about d / 2 Hessians' work."""
        if self.statistics is not None:
            return self
        Y = self.point.layer.unpack(self.point.theta[None])[1][0]
        parts = []
        for tile, real in self._tiles():
            parts.append(row_statistics(tile, Y).select(real.flatten()))
        return replace(self, statistics=Statistics.concatenate(parts))

    def with_unfolding(self) -> LipschitzBounds:
        """With the norm of the unfolded third derivative: N slices of N x N numbers."""
        full = self.with_statistics()
        return replace(full, unfolding=full.unfolded())

    def unfolded(self, whitening: Float[Tensor, "N r"] | None = None, norm: float = 1.0) -> float:
        """Proved bound of || unfold(T) ||_2, or of T in the variables x = x0 + whitening s.

        norm: proved bound of the whitening's spectral norm.
        """
        assert self.statistics is not None
        Y = self.point.layer.unpack(self.point.theta[None])[1][0]
        cumulants = cumulants_of([tile for tile, _ in self._tiles()], Y)
        layer = self.point.layer
        N, n = layer.size, len(self.point.rows.rho)
        sums = n + 2 * layer.heads * (layer.d1 + layer.d2 + layer.d3 + layer.p) + 64
        wrong = unfolding_error(
            self.rows, self.statistics, self.point.Y_norms, layer.p, self.error + gamma(sums)
        )
        wrong = upward(wrong, n + SUMS)
        if whitening is None:
            gram = unfolding_gram(cumulants)
        else:
            # Of W^T (T w_k) W, with the errors of the slices and the rounding of both products.
            gram, slices = whitened_gram(cumulants, whitening)
            columns = norm_upper(whitening)
            wrong = wrong * columns * norm**2
            wrong += gamma(2 * N + 4) * columns**2 * upward(slices, N**3 + 4)
        # G is a sum of N^2 products; the norm of |G| is at most its trace.
        rounding = upward(gamma(N * N + 4 * N) * float(gram.diagonal().sum()), N)
        square = largest_eigenvalue_upper(0.5 * (gram + gram.mT), rounding)
        return upward(math.sqrt(max(square, 0.0)) + wrong, 24)

    def _tiles(self) -> Iterator[tuple[Tile, Tensor]]:
        """Query rows with their attention weights, and which of them are real."""
        point = self.point
        layer, theta = point.layer, point.theta[None]
        for chunk in self.data.chunks:
            m = chunk.A2.shape[2]
            elements = cumulant_elements(layer.heads, m, layer.d2, layer.d3, layer.p)
            for tile in chunk.tiles(elements):
                yield _tile(tile, evaluate(tile, layer, theta)), real_rows(tile)[0]


def _tile(tile: Chunk, at: Evaluation) -> Tile:
    return Tile(tile.queries[0], tile.A2[0], tile.A3[0], at.P[0], at.C[0], tile.weight[0])
