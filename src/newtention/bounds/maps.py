"""Bounds for fits of attention maps, 1/2 sum_j q_j ||P_j - B_j||^2 in X alone.

The values of a row are the unit vectors, v_k = e_k, and do not move: along U, with e = U^T a_j and
sigma_k = e . a2_k, the residual r of the row has the derivatives r^(i) = k(v, sigma, .., sigma) of
`newtention.bounds.cumulants`, p o (W_i - E W_i) entry by entry.  Unit vectors lie within
nu = sqrt((m - 1) / m) of their mean, m the number of allowed keys, and their covariance
diag(p) - p p^T has no eigenvalue above min(max p, 1/2).  So ||r^(i)|| <= v_i |e|^i where v_i is the
less of

    nu E|W_i - E W_i|   and   min(max p, 1/2)^(1/2) dev W_i,

and for |sigma - c| <= 1 the deviations of W_1 to W_4 are at most DEVIATION.  On the ball of radius
delta a weight grows by a factor of at most exp(2 rho_j delta).

At the point the third derivative is sum_j q_j K_j[e, e, e] with the tensors of `map_cumulants`.
Rows add up as in `newtention.bounds.moments`, point 4.  Arguments are upper bounds; results are
sums and products of nonnegative terms, which the caller raises by their rounding.
Source: derived here; proofs in docs/certificates/maps.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from newtention.bounds.central import KeyMoments, key_moments, largest_eigenvalue
from newtention.bounds.convexity import weighted_norm_squared
from newtention.bounds.cumulants import (
    FOURTH,
    SECOND,
    THIRD,
    Tile,
    centred,
    row_cubes,
    token_sizes,
)
from newtention.bounds.lipschitz import Lipschitz, least, least_level
from newtention.bounds.moments import Shift, aligned, key_norms, key_radius

DEVIATION = (1.0, 3 * math.sqrt(3) / 4, 9 / 4, 13.5)
"""Bounds of dev W_i for |sigma - c| <= 1.  With mu = |E sigma - c|, |t| <= 1 + mu and
s <= 1 - mu^2 they are at most the roots of s, (1 + mu)^2 s and (1 + mu)^4 s + 3 s^3, and
(1 + mu)^3 s^(1/2) + 10 (1 + mu) s^(3/2)."""
CUBE = 1024
"""Relative errors that `map_cumulants` adds up to, in units of size s2^3."""
CUBE_SIZE = 80
"""The sum of the magnitudes that it adds, in the same units."""


class MapRows(NamedTuple):
    """What is known of every real row: upper bounds, over all sequences.

    a1: query token, scale folded in.  rho: ||a_j|| times the radius of the row's allowed keys.
    nu: radius of their unit vectors.  peak: the largest attention weight at the point.
    weight: q_j.  residual: ||r_j|| at the point.
    """

    a1: Float[Tensor, "n d1"]
    rho: Float[Tensor, " n"]
    nu: Float[Tensor, " n"]
    peak: Float[Tensor, " n"]
    weight: Float[Tensor, " n"]
    residual: Float[Tensor, " n"]


class MapCumulants(NamedTuple):
    """K_j of the rows: sum_j q_j K_j[e_j, e_j, e_j] is the third derivative along U."""

    a1: Float[Tensor, "r d1"]
    weight: Float[Tensor, " r"]
    K: Float[Tensor, "r d2 d2 d2"]

    def select(self, keep: Bool[Tensor, " r"]) -> MapCumulants:
        """The rows to keep."""
        return MapCumulants(*(t[keep] for t in self))

    @classmethod
    def concatenate(cls, parts: Sequence[MapCumulants]) -> MapCumulants:
        """The rows of several tiles, in order."""
        return cls(*(torch.cat(t) for t in zip(*parts, strict=True)))


class MapStatistics(NamedTuple):
    """Numbers of every row at the point.

    keys: moments of the keys.  third: lambda_max(sum_b K_b^2)^(1/2), a bound of |K[e, e, e]|.
    """

    keys: KeyMoments
    third: Float[Tensor, " n"]

    def select(self, keep: Bool[Tensor, " n"]) -> MapStatistics:
        """The rows to keep."""
        return MapStatistics(KeyMoments(*(t[keep] for t in self.keys)), self.third[keep])

    @classmethod
    def concatenate(cls, parts: Sequence[MapStatistics]) -> MapStatistics:
        """The rows of several tiles, in order."""
        keys = zip(*(part.keys for part in parts), strict=True)
        third = torch.cat([part.third for part in parts])
        return cls(KeyMoments(*(torch.cat(t) for t in keys)), third)


def map_cumulants(tile: Tile) -> MapCumulants:
    """K_j = sum_k V_k t_k t_k t_k - (S g + two more), symmetric, of every row of a tile.

    With T = p o (r - <p, r>), V = 3 p^2 + T, t_k = a2_k - E a2, S = Cov(a2) and
    g = sum_k (p^2 + T)_k t_k: from L''' = 3 <r', r''> + <r, r'''> with r' = p o t,
    r'' = p o (t^2 - s), r''' = p o (t^3 - 3 s t - E t^3) in t = e . t_k.
    """
    P = tile.P[:, 0]
    T = P * (tile.C - (P * tile.C).sum(-1, keepdim=True))
    K = row_cubes(3 * P * P + T, P * P + T, P, centred(tile.A2, tile))
    return MapCumulants(*(t.flatten(0, 1) for t in (tile.A1, tile.weight, K)))


def map_statistics(tile: Tile, cumulants: MapCumulants) -> MapStatistics:
    """Of every row of a tile, padded ones included, with its cumulants."""
    A2 = centred(tile.A2, tile)
    keys = key_moments(tile.P, A2, token_sizes(A2, tile.A2, tile))
    K = cumulants.K
    return MapStatistics(keys, largest_eigenvalue((K @ K.mT).sum(1)).sqrt())


def map_hessian_derivative(
    rows: MapCumulants, directions: Float[Tensor, "k N"]
) -> Float[Tensor, "k N N"]:
    """T d = sum_j q_j a_j a_j^T (x) K_j e_j of k directions d = vec U."""
    d1, d2 = rows.a1.shape[1], rows.K.shape[-1]
    U = directions.unflatten(1, (d1, d2))
    e = torch.einsum("ra,kab->krb", rows.a1, U)
    turned = torch.einsum("rbcd,krd->krbc", rows.K, e)
    pairs = (rows.weight[:, None] * rows.a1)[:, :, None] * rows.a1[:, None]
    slices = pairs.flatten(1).mT @ turned.flatten(2)
    blocks = slices.view(-1, d1, d1, d2, d2).transpose(2, 3)
    return blocks.reshape(-1, d1 * d2, d1 * d2)


def map_unfolding_error(rows: MapRows, at: MapStatistics, error: float) -> float:
    """A bound of || unfold(T computed) - unfold(T) ||_F for relative errors of the data.

    error: see `map_lipschitz`, with gamma of the number of rows and widths for sums over them.
    Infinite beyond 1/128, where products of errors would no longer be small.
    """
    if not error <= 1 / 128:
        return math.inf
    cube = rows.a1.norm(dim=1) ** 3 * (rows.residual + 1) * at.keys.size**3
    return (CUBE + CUBE_SIZE) * error * float((rows.weight * cube).sum())


class RowNorms(NamedTuple):
    """||r^(i)|| <= v_i |U^T a_j|^i everywhere on the ball, one entry per row."""

    v1: Float[Tensor, " n"]
    v2: Float[Tensor, " n"]
    v3: Float[Tensor, " n"]
    v4: Float[Tensor, " n"]


def row_norms(
    rows: MapRows, delta: float, at: MapStatistics | None = None, error: float = 0.0
) -> RowNorms:
    """From radii and the largest weights; with statistics from the moments as well."""
    rho2, shift = key_radius(rows.rho, rows.a1), Shift.of(rows.rho, delta)
    half = torch.full_like(rows.peak, 0.5)
    deviation = shift.least(half, shift.growth * rows.peak).sqrt()
    constants = zip((1.0, SECOND, THIRD, FOURTH), DEVIATION, strict=True)
    v = [
        torch.minimum(mean * rows.nu, root * deviation) * rho2**i
        for i, (mean, root) in enumerate(constants, start=1)
    ]
    if at is not None:
        k = key_norms(rho2, shift, at.keys, error)
        v[0] = torch.minimum(v[0], deviation * k.variance.sqrt())
        means, roots = (k.mean2, k.mean3, k.mean4), (k.root2, k.root3, k.root4)
        for i, (mean, root) in enumerate(zip(means, roots, strict=True), start=1):
            v[i] = torch.minimum(v[i], shift.least(rows.nu * mean, deviation * root))
    return RowNorms(*v)


class MapBall(NamedTuple):
    """The rows added up: bounds that hold on the ball of radius delta, along unit U.

    first, residual: norms of the Jacobian of sqrt(q) r and of sqrt(q) r.  second, third, fourth: of
    the derivatives of sqrt(q) r.  rows3, rows4: of the third and fourth derivatives of the loss,
    each row bounded by itself.
    """

    first: float
    residual: float
    second: float
    third: float
    fourth: float
    rows3: float
    rows4: float

    @property
    def cauchy_schwarz(self) -> float:
        """|L'''|, which is |3 <r', r''> + <r, r'''>|, by Cauchy-Schwarz over rows."""
        return 3 * self.first * self.second + self.residual * self.third

    @property
    def M4(self) -> float:
        """|L''''|, which is |3 |r''|^2 + 4 <r', r'''> + <r, r''''>|, either way."""
        squares = 3 * self.second**2 + 4 * self.first * self.third
        return least([self.rows4, squares + self.residual * self.fourth])


def map_ball(
    rows: MapRows,
    delta: float,
    jacobian_norm: float,
    at: MapStatistics | None = None,
    error: float = 0.0,
) -> MapBall:
    """Of the ball of radius delta; arguments as in `map_lipschitz`."""
    v, q, length = row_norms(rows, delta, at, error), rows.weight, rows.a1.norm(dim=1)

    def root(c: Float[Tensor, " n"], power: int) -> float:
        """sup of (sum_j q_j (c_j |U^T a_j|^power)^2)^(1/2)."""
        return math.sqrt(aligned(rows.a1, q * (c * length ** (power - 1)) ** 2))

    def total(c: Float[Tensor, " n"], power: int) -> float:
        """sup of sum_j q_j c_j |U^T a_j|^power."""
        return aligned(rows.a1, q * c * length ** (power - 2))

    second = root(v.v2, 2)
    first = least([jacobian_norm + delta * second, root(v.v1, 1)])
    residual = rows.residual + delta * v.v1 * length
    return MapBall(
        first=first,
        residual=float((q * rows.residual**2).sum().sqrt()) + delta * first,
        second=second,
        third=root(v.v3, 3),
        fourth=root(v.v4, 4),
        rows3=total(3 * v.v1 * v.v2 + residual * v.v3, 3),
        rows4=total(3 * v.v2**2 + 4 * v.v1 * v.v3 + residual * v.v4, 4),
    )


def map_lipschitz(
    rows: MapRows,
    delta: float,
    jacobian_norm: float,
    at: MapStatistics | None = None,
    unfolding: float | None = None,
    error: float = 0.0,
) -> Lipschitz:
    """The levels of the Hessian's Lipschitz constant that the given quantities allow.

    Args:
        rows: of all sequences.
        delta: radius of the ball.
        jacobian_norm: at least the spectral norm of the Jacobian of sqrt(q) r at the point.
        at: statistics of the same rows in the same order.
        unfolding: at least the norm of the unfolded third derivative at the point.
        error: what the computed attention weights may be wrong by, relatively, and the computed
            residuals relative to ||r_j|| + 1, plus gamma_k of a sum over the keys; at least 16
            units of rounding.
    """
    ball = map_ball(rows, delta, jacobian_norm)
    levels = {"radii": ball.rows3, "cauchy-schwarz": ball.cauchy_schwarz}
    if at is not None:
        ball = map_ball(rows, delta, jacobian_norm, at, error)
        third = at.third + CUBE * error * (rows.residual + 1) * at.keys.size**3
        at_point = aligned(rows.a1, rows.weight * third * rows.a1.norm(dim=1))
        on_ball = least([at_point + delta * ball.M4, ball.rows3, ball.cauchy_schwarz])
        levels["covariances"] = on_ball
    if unfolding is not None:
        levels["unfolding"] = unfolding + delta * ball.M4
    return least_level(levels)


def map_concavity(
    rows: Float[Tensor, "n d1"],
    weight: Float[Tensor, " n"],
    span: Float[Tensor, " n"],
) -> float:
    """a with L'' >= (lambda_x - a) ||U||^2 at every X, lambda_x the regulariser's curvature.

    L'' is at least sum_j q_j <r, r''> and <r, r''> = Cov(r, t^2), where the numbers r_k = p_k - b_k
    of the row's allowed keys lie in an interval of length at most 1 + max b - min b, whatever p:
    at least -K (1 + max b - min b) / 2 |U^T r_j|^2, K = SECOND.  So lambda_x > a leaves exactly one
    stationary point in the whole space, the global minimum: within ||gradient|| / (lambda_x - a).

    Args:
        rows: r_j, the scaled queries times the radius of the row's allowed keys.
        weight: query weights.
        span: max b - min b over the row's allowed keys.
    """
    factor = (weight * (SECOND / 2) * (1 + span)).sqrt()
    return weighted_norm_squared(factor, rows)
