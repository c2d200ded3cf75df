"""The Hessian's Lipschitz constant about an evaluated point: levels added as they are needed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

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
from newtention.layers import Bilinear, Evaluation, evaluate
from newtention.problem import AttentionProblem

LEAST_ERROR = 16 * UNIT
SUMS = 4096
"""Roundings of the few sums and products that combine the rows' numbers, rows apart."""

Stats = TypeVar("Stats")


@dataclass(frozen=True, eq=False)
class PointBounds(ABC, Generic[Stats]):
    """What bounds the third derivative near a point.

    statistics, unfolding: None until they are added.
    """

    data: AttentionProblem
    point: PointEvaluation
    statistics: Stats | None = None
    unfolding: float | None = None

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
        found, count = self._constant(delta), len(self.point.rows.rho) + SUMS
        levels = {name: upward(value, count) for name, value in found.levels.items()}
        return Lipschitz(levels[found.level], found.level, levels)

    def fourth(self, delta: float) -> float:
        """M4, a bound of the fourth derivative on the ball."""
        return upward(self._fourth(delta), len(self.point.rows.rho) + SUMS)

    def with_statistics(self) -> Self:
        """With the cumulants of every row: about d / 2 Hessians' work, d for maps."""
        return self if self.statistics is not None else replace(self, statistics=self._measured())

    def with_unfolding(self) -> Self:
        """With the norm of the unfolded third derivative: N slices of N x N numbers."""
        full = self.with_statistics()
        return replace(full, unfolding=full.unfolded())

    def unfolded(self, whitening: Float[Tensor, "N r"] | None = None, norm: float = 1.0) -> float:
        """Proved bound of || unfold(T) ||_2, or of T in the variables x = x0 + whitening s.

        norm: proved bound of the whitening's spectral norm.
        """
        assert self.statistics is not None
        N, n = self.point.layer.size, len(self.point.rows.rho)
        wrong = upward(self._unfolding_error(), n + SUMS)
        gram, slices = self._gram(whitening)
        if whitening is not None:
            # Of W^T (T w_k) W, with the errors of the slices and the rounding of both products.
            columns = norm_upper(whitening)
            wrong = wrong * columns * norm**2
            wrong += gamma(2 * N + 4) * columns**2 * upward(slices, N**3 + 4)
        # G is a sum of N^2 products; the norm of |G| is at most its trace.
        rounding = upward(gamma(N * N + 4 * N) * float(gram.diagonal().sum()), N)
        square = largest_eigenvalue_upper(0.5 * (gram + gram.mT), rounding)
        return upward(math.sqrt(max(square, 0.0)) + wrong, 24)

    @abstractmethod
    def _constant(self, delta: float) -> Lipschitz:
        """The levels at hand, not yet rounded upward, as all that follows."""

    @abstractmethod
    def _fourth(self, delta: float) -> float:
        """M4."""

    @abstractmethod
    def _measured(self) -> Stats:
        """The statistics."""

    @abstractmethod
    def _gram(self, whitening: Float[Tensor, "N r"] | None) -> tuple[Float[Tensor, "r r"], float]:
        """The unfolding times its transpose; with a whitening, the norm of the slices as well."""

    @abstractmethod
    def _unfolding_error(self) -> float:
        """Of the unfolding as computed, in the Frobenius norm."""

    @abstractmethod
    def _elements(self, keys: int) -> int:
        """Elements per query row of the cumulants and what they are made of."""

    def _tiles(self) -> Iterator[tuple[Tile, Tensor]]:
        """Query rows with their attention weights, and which of them are real."""
        layer, theta = self.point.layer, self.point.theta[None]
        for chunk in self.data.chunks:
            for tile in chunk.tiles(self._elements(chunk.A2.shape[2])):
                yield _tile(tile, evaluate(tile, layer, theta)), real_rows(tile)[0]


@dataclass(frozen=True, eq=False)
class LipschitzBounds(PointBounds[Statistics]):
    """Of the bilinear form."""

    @property
    def rows(self) -> Rows:
        """The rows' proved quantities."""
        r = self.point.rows
        return Rows(r.rho, r.rho3, r.m3, r.weight, r.residual)

    def _constant(self, delta: float) -> Lipschitz:
        point = self.point
        return lipschitz_constant(
            self.rows,
            point.Y_norms,
            delta,
            point.jacobian_norm,
            self.statistics,
            self.unfolding,
            self.error,
        )

    def _fourth(self, delta: float) -> float:
        point = self.point
        return fourth_derivative(
            self.rows, point.Y_norms, delta, point.jacobian_norm, self.statistics, self.error
        )

    def _measured(self) -> Statistics:
        parts = []
        for tile, real in self._tiles():
            parts.append(row_statistics(tile, self._Y).select(real.flatten()))
        return Statistics.concatenate(parts)

    def _gram(self, whitening: Float[Tensor, "N r"] | None) -> tuple[Float[Tensor, "r r"], float]:
        cumulants = cumulants_of([tile for tile, _ in self._tiles()], self._Y)
        if whitening is None:
            return unfolding_gram(cumulants), 0.0
        return whitened_gram(cumulants, whitening)

    def _unfolding_error(self) -> float:
        assert self.statistics is not None
        layer, n = self.point.layer, len(self.point.rows.rho)
        sums = n + 2 * layer.heads * (layer.d1 + layer.d2 + layer.d3 + layer.p) + 64
        return unfolding_error(
            self.rows, self.statistics, self.point.Y_norms, layer.p, self.error + gamma(sums)
        )

    @property
    def _Y(self) -> Float[Tensor, "h d3 p"]:
        layer = self.point.layer
        assert isinstance(layer, Bilinear)
        return layer.unpack(self.point.theta[None])[1][0]

    def _elements(self, keys: int) -> int:
        layer = self.point.layer
        return cumulant_elements(layer.heads, keys, layer.d2, layer.d3, layer.p)


def _tile(tile: Chunk, at: Evaluation) -> Tile:
    return Tile(tile.queries[0], tile.A2[0], tile.A3[0], at.P[0], at.C[0], tile.weight[0])
