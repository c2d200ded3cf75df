"""Joint cumulants of a query row, and sharp bounds of them.

Along a direction (U, Z), ||U||_F = u, ||Z||_F = z, let sigma_k = a_j^T U a2_k, w_k = Z^T a3_k,
v_k = Y^T a3_k.  With the joint cumulants k(...) under P_j the residual r of row j has derivatives

    r'    = k(v, sigma) + E[w]
    r''   = k(v, sigma, sigma) + 2 k(w, sigma)
    r'''  = k(v, sigma, sigma, sigma) + 3 k(w, sigma, sigma)
    r'''' = k(v, sigma, sigma, sigma, sigma) + 4 k(w, sigma, sigma, sigma)

because tilting P_j by exp(t sigma) turns d/dt of a cumulant into the cumulant with one more sigma,
and v moves by t w.  The loss 1/2 sum q_j ||r_j||^2 has third and fourth derivatives

    sum q (3 <r', r''> + <r, r'''>),    sum q (3 |r''|^2 + 4 <r', r'''> + <r, r''''>).

Bounds.  Let |sigma - c| <= 1 about some centre and v lie in a ball of radius 1; t = sigma - E sigma
and s = E t^2.  k(v, sigma, ..., sigma) is E[v (W - E W)] for the polynomial W below, whatever the
centre of the ball, so its norm is at most E|W - E W|, with

    W_1 = t          E|W_1 - E W_1| <= 1
    W_2 = t^2                       <= 4 / (3 sqrt 3)    SECOND
    W_3 = t^3 - 3 s t               <= 2                 THIRD
    W_4 = t^4 - 6 s t^2 - 4 E[t^3] t <= 8.6              FOURTH

The first three are attained, by sigma = v = +-1 with the right probabilities; the fourth is not
sharp (numerically 4.0859).  Full proofs: docs/certificates/lipschitz.md.  Source: derived here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from newtention.bounds.central import KeyMoments, higher_moments, largest_eigenvalue

SECOND = 4 / (3 * math.sqrt(3))
"""max E|W_2 - E W_2|, attained by P(1) = (3 - sqrt 3) / 6 on +-1.

With A = {W > E W}, P(A) = p, q = 1 - p, conditional means m, m0 of sigma, D = m - m0, it is
2 p q (s - s0 + (q - p) D^2) with conditional variances s <= 1 - m^2, s0 >= 0 and |D| <= 1 + |m|.
"""
THIRD = 2.0
"""max E|W_3 - E W_3|, attained by P(1) = 1/2 on +-1.

By the law of total cumulance it is 2 p q (k - k0 + 3 (q - p) D (s - s0) + (1 - 6 p q) D^3) with
conditional third cumulants k <= (1 - m) s - s^2 / (1 - m), -k0 <= (1 + m0) s0 - s0^2 / (1 + m0).
"""
FOURTH = 8.6
"""E|t^4 - E t^4| <= 2 e (1 - e / (1 + mu)^4), e = (1 - mu^2) (1 + 3 mu^2), and 6 SECOND (1 - mu^2)
for 6 s t^2 and 4 SECOND (1 - mu^2)^(1/2) for the last term, mu = |E sigma|; together below 8.55."""
THIRD_SPREAD = 2 + math.sqrt(13)
"""E|W_3 - E W_3| <= (2 (1 + mu) + 3 (1 - mu^2)^(1/2)) s; the true constant seems to be 4."""
FOURTH_SPREAD = 15.5
"""E|W_4 - E W_4| <= (2 (1 + mu)^2 + 6 SECOND + 4 (1 + mu) (1 - mu^2)^(1/2)) s; it seems to be 8."""


class RowBounds(NamedTuple):
    """|r'| <= r1u u + r1z z,  |r''| <= r2uu u^2 + r2uz u z,  and so on, one entry per row."""

    r1u: Float[Tensor, " n"]
    r1z: Float[Tensor, " n"]
    r2uu: Float[Tensor, " n"]
    r2uz: Float[Tensor, " n"]
    r3uuu: Float[Tensor, " n"]
    r3uuz: Float[Tensor, " n"]
    r4uuuu: Float[Tensor, " n"]
    r4uuuz: Float[Tensor, " n"]

    def e1(self, u: float, z: float) -> Float[Tensor, " n"]:
        """Bound of |r'|."""
        return self.r1u * u + self.r1z * z

    def e2(self, u: float, z: float) -> Float[Tensor, " n"]:
        """Bound of |r''|."""
        return self.r2uu * u**2 + self.r2uz * u * z

    def e3(self, u: float, z: float) -> Float[Tensor, " n"]:
        """Bound of |r'''|."""
        return self.r3uuu * u**3 + self.r3uuz * u**2 * z

    def e4(self, u: float, z: float) -> Float[Tensor, " n"]:
        """Bound of |r''''|."""
        return self.r4uuuu * u**4 + self.r4uuuz * u**3 * z


def row_bounds(
    rho: Float[Tensor, " n"],
    rho3: Float[Tensor, " n"],
    m3: Float[Tensor, " n"],
    Y_norms: Float[Tensor, " h"],
    delta: float = 0.0,
) -> RowBounds:
    """e1 to e4 of every row along (U_h, Z_h), u^2 = sum ||U_h||^2, z^2 = sum ||Z_h||^2.

    They hold at every X and at every Y within delta of one whose heads have the norms Y_norms.

    One head: sigma lies within rho u of its centre, v within nu = rho3 ||Y||_2 and w within rho3 z,
    and ||E w|| <= m3 z; the constants of this module give the rest.  Heads add: sum_h nu_h u_h <=
    (sum nu_h^2)^(1/2) u and sum z_h <= h^(1/2) z in e1; sum nu_h u_h^k <= max nu_h u^k and
    sum u_h^k z_h <= u^k z in the others (k >= 1).

    Args:
        rho: |scale| times the radius of the row's allowed keys times ||a_j||.
        rho3: radius of the row's allowed value tokens.
        m3: largest norm of them.
        Y_norms: upper bounds of the spectral norms of the heads' Y.
        delta: Frobenius distance of Y, all heads together.
    """
    total = float(Y_norms.norm()) + delta
    largest = float(Y_norms.max()) + delta
    nu = rho3 * largest
    return RowBounds(
        r1u=rho3 * total * rho,
        r1z=m3 * math.sqrt(len(Y_norms)),
        r2uu=SECOND * nu * rho**2,
        r2uz=2 * rho3 * rho,
        r3uuu=THIRD * nu * rho**3,
        r3uuz=3 * SECOND * rho3 * rho**2,
        r4uuuu=FOURTH * nu * rho**4,
        r4uuuz=4 * THIRD * rho3 * rho**3,
    )


class Tile(NamedTuple):
    """Query rows at a point: s sequences of equal padded shape, h heads.

    A1 has the scale folded in.  P is 0 on masked pairs and padded keys, weight 0 on padded rows.
    """

    A1: Float[Tensor, "s n d1"]
    A2: Float[Tensor, "s m d2"]
    A3: Float[Tensor, "s m d3"]
    P: Float[Tensor, "s h n m"]
    C: Float[Tensor, "s n p"]
    weight: Float[Tensor, "s n"]


class RowCumulants(NamedTuple):
    """Joint cumulants of each row under P_j at the point; r rows, those of all sequences.

    a1: query token; weight: q; residual: r.  Per head h: w = E[a3]; Q = k(a2, a3);
    Rho = k(a2, v); S = k(a2, a2); K3 = k(a3, a2, a2); K = k(v, a2, a2);
    K4 = k(<r, v>, a2, a2, a2).
    """

    a1: Float[Tensor, "r d1"]
    weight: Float[Tensor, " r"]
    residual: Float[Tensor, "r p"]
    w: Float[Tensor, "h r d3"]
    Q: Float[Tensor, "h r d2 d3"]
    Rho: Float[Tensor, "h r d2 p"]
    S: Float[Tensor, "h r d2 d2"]
    K3: Float[Tensor, "h r d3 d2 d2"]
    K: Float[Tensor, "h r p d2 d2"]
    K4: Float[Tensor, "h r d2 d2 d2"]

    def select(self, keep: Bool[Tensor, " r"]) -> RowCumulants:
        """The rows to keep."""
        rows = (t[keep] for t in self[:3])
        return RowCumulants(*rows, *(t[:, keep] for t in self[3:]))


def cumulant_elements(h: int, m: int, d2: int, d3: int, p: int) -> int:
    """Elements per query row of `row_cumulants` and `row_statistics`, for the caller's tiles."""
    return h * (4 * d2 * d2 * max(d2, d3, p) + d2 * d2 * (d2 + d3 + p) + 4 * m)


def row_cumulants(tile: Tile, Y: Float[Tensor, "h d3 p"]) -> RowCumulants:
    """Exact cumulants from weighted moments: products with P, and with P o (y - E y), y = <r, v>.

    Cumulants do not change when tokens are shifted: they are taken about the attended mean of each
    sequence, which keeps the cancellation in raw moments small.  Multiply-adds per row and key:
    d2^2 (d3 + 1) / 2 + d2^3 / 2, about d/2 times those of a Hessian; memory per row and head:
    d2^2 (d3 + p + d2) elements and a few times that while it runs.
    """
    A2, A3 = (centred(t, tile) for t in (tile.A2, tile.A3))
    d2, P = A2.shape[-1], tile.P
    b, c = torch.triu_indices(d2, d2, device=A2.device)
    pairs = A2[..., b] * A2[..., c]
    mu, w = P @ A2[:, None], P @ A3[:, None]
    mm = mu[..., :, None] * mu[..., None, :]
    Q = _moment(P, A2, A3) - mu[..., :, None] * w[..., None, :]
    S = _unpacked(P @ pairs[:, None], d2) - mm

    # E[a3 a2 a2] = K3 + w S + (Q mu + mu Q) + w mu mu; the axes are (s, h, n, d3, d2, d2).
    K3 = _unpacked(_moment(P, A3, pairs), d2)
    K3 -= w[..., :, None, None] * (S + mm)[..., None, :, :]
    cross = Q.mT[..., :, :, None] * mu[..., None, None, :]
    K3 -= cross + cross.mT

    # D weighs keys by P (y - E y) and sums to zero over keys: t_k = E[(y - E y) a2^k].
    y = tile.C[:, None] @ (A3[:, None] @ Y).mT
    D = P * (y - (P * y).sum(-1, keepdim=True))
    t1, t2 = D @ A2[:, None], _unpacked(D @ pairs[:, None], d2)
    K4 = _unpacked(_moment(D, A2, pairs), d2)
    K4 -= _three(mu, t2)
    K4 += _three(t1, mm - S)

    def rows(t: Tensor) -> Tensor:  # (s, n, ...) -> (r, ...)
        return t.flatten(0, 1)

    def heads(t: Tensor) -> Tensor:  # (s, h, n, ...) -> (h, r, ...)
        return t.transpose(0, 1).flatten(1, 2)

    w = P @ tile.A3[:, None]
    K = torch.einsum("shnebc,hei->shnibc", K3, Y)
    per_head = (heads(t) for t in (w, Q, Q @ Y[:, None], S, K3, K, K4))
    return RowCumulants(rows(tile.A1), rows(tile.weight), rows(tile.C), *per_head)


def row_cubes(
    V: Float[Tensor, "s n m"],
    W: Float[Tensor, "s n m"],
    P: Float[Tensor, "s n m"],
    A2: Float[Tensor, "s m d2"],
) -> Float[Tensor, "s n d2 d2 d2"]:
    """sum_k V_k t_k t_k t_k - (S g + two more) of every row: t_k = a2_k - E a2, S = Cov(a2) under
    P, g = sum_k W_k t_k.

    From raw moments, as in `row_cumulants`; d2^3 / 2 multiply-adds per row and key.
    """
    d2 = A2.shape[-1]
    b, c = torch.triu_indices(d2, d2, device=A2.device)
    pairs = A2[..., b] * A2[..., c]
    mu = P @ A2
    mm = mu[..., :, None] * mu[..., None, :]
    S = _unpacked(P @ pairs, d2) - mm
    g = W @ A2 - W.sum(-1, keepdim=True) * mu
    K = _unpacked(_moment(V[:, None], A2, pairs)[:, 0], d2)
    K -= _three(mu, _unpacked(V @ pairs, d2)) + _three(g, S) - _three(V @ A2, mm)
    return K - V.sum(-1)[..., None, None, None] * mu[..., :, None, None] * mm[..., None, :, :]


class Statistics(NamedTuple):
    """Norms of each row's moments at the point: the largest over heads, in the order of the rows.

    With t = a2 - E a2 and K_i = k(v_i, a2, a2):

    a1: query token, scale folded in.  spread: lambda_max of Cov(a2); value_spread: of Cov(a3);
    output_spread: of Cov(v).  moment4, 6, 8: lambda_max of E[|t|^2 t t^T], E[|t|^4 t t^T],
    E[|t|^6 t t^T], bounds of E (e . t)^4, ^6, ^8 over unit e.  cross: ||Cov(a2, a3)||_2.
    second: lambda_max(sum_i K_i^2)^(1/2), a bound of |k(v, e . a2, e . a2)|.  value: the same with
    a3 for v.  fourth: lambda_max(sum_b K4_b^2)^(1/2), a bound of |k(<r, v>, e.a2, e.a2, e.a2)|.
    size2, size3: largest norms of the shifted tokens that these were computed from, plus 1/16 of
    those before the shift: the scale of rounding errors.
    """

    a1: Float[Tensor, "n d1"]
    spread: Float[Tensor, " n"]
    value_spread: Float[Tensor, " n"]
    output_spread: Float[Tensor, " n"]
    moment4: Float[Tensor, " n"]
    moment6: Float[Tensor, " n"]
    moment8: Float[Tensor, " n"]
    cross: Float[Tensor, " n"]
    second: Float[Tensor, " n"]
    value: Float[Tensor, " n"]
    fourth: Float[Tensor, " n"]
    size2: Float[Tensor, " n"]
    size3: Float[Tensor, " n"]

    @property
    def keys(self) -> KeyMoments:
        """Of the keys."""
        return KeyMoments(self.spread, self.moment4, self.moment6, self.moment8, self.size2)

    def select(self, keep: Bool[Tensor, " n"]) -> Statistics:
        """The rows to keep: the real ones of a padded tile."""
        return Statistics(*(t[keep] for t in self))

    @classmethod
    def concatenate(cls, parts: Sequence[Statistics]) -> Statistics:
        """The rows of several tiles, in order."""
        return cls(*(torch.cat(t) for t in zip(*parts, strict=True)))


def row_statistics(tile: Tile, Y: Float[Tensor, "h d3 p"]) -> Statistics:
    """The statistics of every row of a tile, padded ones included: sequence by sequence."""
    c = row_cumulants(tile, Y)
    A2, A3 = centred(tile.A2, tile), centred(tile.A3, tile)
    w = tile.P @ A3[:, None]

    def norm(K: Float[Tensor, "h r k d d"]) -> Float[Tensor, " r"]:
        return largest_eigenvalue((K @ K.mT).sum(2)).amax(0).sqrt()

    def over_heads(M: Float[Tensor, "s h n d d"]) -> Float[Tensor, " r"]:
        return largest_eigenvalue(M).amax(1).flatten()

    covariance3 = _moment(tile.P, A3, A3) - w[..., :, None] * w[..., None, :]
    return Statistics(
        c.a1,
        largest_eigenvalue(c.S).amax(0),
        over_heads(covariance3),
        over_heads(Y[:, None].mT @ covariance3 @ Y[:, None]),
        *higher_moments(tile.P, A2),
        torch.linalg.matrix_norm(c.Q, 2).amax(0),
        norm(c.K),
        norm(c.K3),
        norm(c.K4),
        token_sizes(A2, tile.A2, tile),
        token_sizes(A3, tile.A3, tile),
    )


def token_sizes(
    shifted: Float[Tensor, "s m d"], tokens: Float[Tensor, "s m d"], tile: Tile
) -> Float[Tensor, " r"]:
    """The scale of rounding errors: the largest norm of the shifted tokens and 1/16 of the others'.

    The shift itself rounds.
    """
    norms = shifted.norm(dim=-1).amax(1) + tokens.norm(dim=-1).amax(1) / 16
    return norms[:, None].expand(-1, tile.A1.shape[1]).flatten()


def centred(tokens: Float[Tensor, "s m d"], tile: Tile) -> Float[Tensor, "s m d"]:
    """Tokens minus their mean under all rows and heads of the sequence."""
    keep = (tile.weight != 0)[:, None, :, None]
    attended = tile.P.where(keep, 0.0).sum((1, 2))
    share = attended / attended.sum(-1, keepdim=True).clamp_min(1.0)
    return tokens - share[:, None] @ tokens


def _moment(P: Tensor, U: Float[Tensor, "s m a"], V: Float[Tensor, "s m b"]) -> Tensor:
    """E[u v^T] of every row: (s, h, n, a, b)."""
    kr = (U[..., :, None] * V[..., None, :]).flatten(-2)
    return (P @ kr[:, None]).unflatten(-1, (U.shape[-1], V.shape[-1]))


def _unpacked(packed: Float[Tensor, "*lead t"], d: int) -> Float[Tensor, "*lead d d"]:
    """Symmetric matrices from their upper triangles."""
    b, c = torch.triu_indices(d, d, device=packed.device)
    at = torch.empty(d, d, dtype=torch.int64, device=packed.device)
    at[b, c] = at[c, b] = torch.arange(len(b), device=packed.device)
    return packed.index_select(-1, at.flatten()).unflatten(-1, (d, d))


def _three(x: Float[Tensor, "*lead d"], M: Float[Tensor, "*lead d d"]) -> Tensor:
    """x_a M_bc + x_b M_ac + x_c M_ab for symmetric M."""
    one = x[..., :, None, None] * M[..., None, :, :]
    two = x[..., None, :, None] * M[..., :, None, :]
    return one + two + x[..., None, None, :] * M[..., :, :, None]
