"""Lipschitz constants of the data loss's Hessian on a ball about a point (X, Y).

M bounds |L'''(x)[d, d, d]| for every x within delta of the point and every unit direction d, where
L''' is the symmetric trilinear form of third derivatives.  A symmetric form attains its norm on the
diagonal, so || H(x) - H(x') ||_2 <= M ||x - x'|| on the ball.  A direction has ||U||_F = u and
||Z||_F = z, all heads together, u^2 + z^2 = 1.  Quadratic regularisers add nothing.

    L'''  = sum_j q_j (3 <r', r''> + <r, r'''>)
    L'''' = sum_j q_j (3 |r''|^2 + 4 <r', r'''> + <r, r''''>)

Levels, from loose to tight: radii of the tokens, row by row; radii with Cauchy-Schwarz over rows
and the norm of the Jacobian; cumulants of each row at the point and the variances of the ball; the
unfolding of the third derivative at the point (`newtention.bounds.unfolding`).  The last two are a
value at the point plus delta times M4, a bound of |L''''| on the ball.

Arguments are upper bounds, results are sums and products of nonnegative terms: the caller
multiplies by 1 + slack for the rounding of these few operations.
Proofs: docs/certificates/lipschitz.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.circle import add, circle_maximum, times
from newtention.bounds.cumulants import RowBounds, Statistics, row_bounds
from newtention.bounds.moments import Rows, ball_norms


class _Radii(NamedTuple):
    """Forms of the radii, summed over rows: the ingredients of levels 1 and 2."""

    b: RowBounds
    q: Float[Tensor, " n"]
    residual: Float[Tensor, " n"]  # anywhere on the ball

    @classmethod
    def of(cls, rows: Rows, Y_norms: Float[Tensor, " h"], delta: float) -> _Radii:
        b = row_bounds(rows.rho, rows.rho3, rows.m3, Y_norms, delta)
        return cls(b, rows.weight, rows.residual + delta * torch.hypot(b.r1u, b.r1z))

    def sum(self, *factors: Tensor) -> float:
        total = self.q
        for f in factors:
            total = total * f
        return float(total.sum())

    def norm(self, order: int) -> float:
        """E_i: the largest weighted root sum of squares of e_i over the circle."""
        b = self.b
        first, second, power = (
            (b.r1u, b.r1z, 1),
            (b.r2uu, b.r2uz, 2),
            (b.r3uuu, b.r3uuz, 3),
            (b.r4uuuu, b.r4uuuz, 4),
        )[order - 1]
        square = {
            (2 * power, 0): self.sum(first, first),
            (2 * power - 1, 1): 2 * self.sum(first, second),
            (2 * power - 2, 2): self.sum(second, second),
        }
        return math.sqrt(circle_maximum(square))


def lipschitz_radii(rows: Rows, Y_norms: Float[Tensor, " h"], delta: float) -> float:
    """Level 1: max over the circle of sum_j q_j (3 e1 e2 + (||r_j|| + delta e1max) e3)."""
    r = _Radii.of(rows, Y_norms, delta)
    b = r.b
    return circle_maximum(
        {
            (3, 0): 3 * r.sum(b.r1u, b.r2uu) + r.sum(r.residual, b.r3uuu),
            (2, 1): 3 * (r.sum(b.r1u, b.r2uz) + r.sum(b.r1z, b.r2uu)) + r.sum(r.residual, b.r3uuz),
            (1, 2): 3 * r.sum(b.r1z, b.r2uz),
        }
    )


def lipschitz_cauchy_schwarz(
    rows: Rows, Y_norms: Float[Tensor, " h"], delta: float, jacobian_norm: float
) -> float:
    """Level 2: 3 J E2 + R E3 with J = ||J|| + delta E2 and R = ||r|| + delta J.

    E_i is the maximum over the circle of (sum_j q_j e_i^2)^(1/2).

    Args:
        rows: of all sequences.
        Y_norms: spectral norms of Y_h at the point.
        delta: radius of the ball.
        jacobian_norm: at least the spectral norm of the Jacobian of sqrt(q) r at the point.
    """
    r = _Radii.of(rows, Y_norms, delta)
    E2, E3 = r.norm(2), r.norm(3)
    J = jacobian_norm + delta * E2
    return 3 * J * E2 + (rows.residual_norm + delta * J) * E3


def lipschitz_covariances(
    rows: Rows,
    Y_norms: Float[Tensor, " h"],
    delta: float,
    jacobian_norm: float,
    statistics: Statistics,
    error: float = 0.0,
) -> float:
    """Level 3: cumulants at the point, variances on the ball.  The less of two bounds.

    With s(x) = lambda_max(sum q_j x_j a_j a_j^T), at the point |L'''| <= 3 J |r''| + |<r, r'''>|,

        |r''| <= s(k^2 |a|^2)^(1/2) u^2 + 2 s(c^2)^(1/2) u z
        |<r, r'''>| <= s(f |a|) u^3 + 3 s(|r| g) u^2 z

    k, c, f, g the rows' `second`, `cross`, `fourth`, `value`; to that add delta M4.  Or directly on
    the ball, with the forms that make M4.

    On the ball P_j' <= exp(2 rho_j delta) P_j entry by entry, because the row's logits move by at
    most rho_j delta about a common value; so the covariance of a2 is at most exp(2 rho_j delta)
    times that at the point, and never more than rho_2^2.

    Args:
        rows: of all sequences.
        Y_norms: spectral norms of Y_h at the point.
        delta: radius of the ball.
        jacobian_norm: at least the spectral norm of the Jacobian of sqrt(q) r at the point.
        statistics: of the same rows in the same order.
        error: what the computed attention weights may be wrong by, relatively, and the computed
            residuals relative to ||r_j|| + m3 sum ||Y_h||, plus gamma_k of a sum over the keys; at
            least 16 units of rounding.
    """
    ball = ball_norms(rows, Y_norms, delta, jacobian_norm, statistics, error)
    at_point = add(times(3 * jacobian_norm, ball.point2), ball.residual_part)
    on_ball = add(times(3 * ball.first, ball.r2), times(ball.residual, ball.r3))
    return least([circle_maximum(at_point) + delta * ball.fourth, circle_maximum(on_ball)])


def fourth_derivative(
    rows: Rows,
    Y_norms: Float[Tensor, " h"],
    delta: float,
    jacobian_norm: float | None = None,
    statistics: Statistics | None = None,
    error: float = 0.0,
) -> float:
    """M4 >= |L''''| along unit directions on the ball: the least of the levels' forms.

    Radii: max of sum_j q_j (3 e2^2 + 4 e1 e3 + (||r_j|| + delta e1max) e4).  With the Jacobian:
    3 E2^2 + 4 (J + delta E2) E3 + (||r|| + delta (J + delta E2)) E4.  With statistics: the same
    with the variances on the ball.  Arguments as in `lipschitz_covariances`.
    """
    r = _Radii.of(rows, Y_norms, delta)
    b, R = r.b, r.residual
    form = {
        (4, 0): 3 * r.sum(b.r2uu, b.r2uu) + 4 * r.sum(b.r1u, b.r3uuu) + r.sum(R, b.r4uuuu),
        (3, 1): 6 * r.sum(b.r2uu, b.r2uz)
        + 4 * (r.sum(b.r1u, b.r3uuz) + r.sum(b.r1z, b.r3uuu))
        + r.sum(R, b.r4uuuz),
        (2, 2): 3 * r.sum(b.r2uz, b.r2uz) + 4 * r.sum(b.r1z, b.r3uuz),
    }
    bounds = [circle_maximum(form)]
    if jacobian_norm is not None:
        E2, E3, E4 = r.norm(2), r.norm(3), r.norm(4)
        J = jacobian_norm + delta * E2
        bounds.append(3 * E2**2 + 4 * J * E3 + (rows.residual_norm + delta * J) * E4)
        if statistics is not None:
            ball = ball_norms(rows, Y_norms, delta, jacobian_norm, statistics, error)
            bounds.append(ball.fourth)
    return least(bounds)


def lipschitz_unfolding(norm: float, fourth: float, delta: float) -> float:
    """Level 4: M <= || unfold(T(x0)) ||_2 + delta M4.

    T(x)[d, d, d] - T(x0)[d, d, d] is an integral of L''''[d, d, d, x - x0] over the segment.

    Args:
        norm: at least the norm of the unfolding.
        fourth: `fourth_derivative` for this delta.  In whitened
            variables: M4 / lambda^2, M4 for the Euclidean ball that holds the whitened one.
        delta: radius of the ball, in the variables of norm.
    """
    return norm + delta * fourth


class Lipschitz(NamedTuple):
    """The least bound, the name of its level, and every level that was computed, by name.

    Levels: "radii", "cauchy-schwarz", "covariances", "unfolding".
    """

    value: float
    level: str
    levels: dict[str, float]


def lipschitz_constant(
    rows: Rows,
    Y_norms: Float[Tensor, " h"],
    delta: float,
    jacobian_norm: float | None = None,
    statistics: Statistics | None = None,
    unfolding: float | None = None,
    error: float = 0.0,
) -> Lipschitz:
    """The least of the levels that the given quantities allow.

    Args:
        rows: of all sequences.
        Y_norms: spectral norms of Y_h at the point.
        delta: radius of the ball.
        jacobian_norm: at least the spectral norm of the Jacobian of sqrt(q) r at the point; without
            it only the radii are used.
        statistics: of the same rows.
        unfolding: at least the norm of the unfolded third derivative at the point.
        error: see `lipschitz_covariances`.
    """
    levels = {"radii": lipschitz_radii(rows, Y_norms, delta)}
    if jacobian_norm is not None:
        levels["cauchy-schwarz"] = lipschitz_cauchy_schwarz(rows, Y_norms, delta, jacobian_norm)
        if statistics is not None:
            levels["covariances"] = lipschitz_covariances(
                rows, Y_norms, delta, jacobian_norm, statistics, error
            )
    if unfolding is not None:
        M4 = fourth_derivative(rows, Y_norms, delta, jacobian_norm, statistics, error)
        levels["unfolding"] = lipschitz_unfolding(unfolding, M4, delta)
    return least_level(levels)


def least_level(levels: dict[str, float]) -> Lipschitz:
    """The least of the levels."""
    levels = {name: least([value]) for name, value in levels.items()}
    level = min(levels, key=lambda name: levels[name])
    return Lipschitz(levels[level], level, levels)


def least(values: Sequence[float]) -> float:
    """The least, where NaN, the outcome of an overflow, stands for infinity."""
    return min(math.inf if math.isnan(value) else value for value in values)
