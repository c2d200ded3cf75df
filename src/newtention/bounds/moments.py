"""Norms of the residual's derivatives on a ball, from moments of each row at its centre.

The ingredients of level 3 in `newtention.bounds.lipschitz`.  For row j let t = a2 - E a2 under P_j
at the point, and sigma = e . a2 with e = U^T a_j (all heads side by side), so |e| <= u ||a_j||.

1. On the ball the row's logits move by at most theta = rho_j delta about a common value.  Hence
   P_j' <= exp(2 theta) P_j entry by entry, and Var' sigma <= exp(2 theta) Var sigma.
2. The mean of e . t moves by at most theta exp(theta) Var(e . t)^(1/2): its rate is a covariance of
   e . t with the logits' rate, whose deviation is at most theta.  By Minkowski the k-th central
   moment is at most shift^k times that at the point, shift = exp(2 theta / k) + theta exp(theta).
3. |k(v, sigma, .., sigma)| is at most the radius of v times E|W_k - E W_k|, and at most the
   deviation of v times that of W_k (Cauchy-Schwarz), W_k as in `newtention.bounds.cumulants`:
   Var W_2 <= E t^4;  Var W_3 <= E t^6 + 3 s^3;  dev W_4 <= (E t^8)^(1/2) + 10 s (E t^4)^(1/2).
4. sup over ||U||_F = 1 of sum_j c_j |U^T a_j|^2 is lambda_max(sum_j c_j a_j a_j^T): rows add up as
   their queries are aligned, not as if they all were.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from newtention.bounds.central import KeyMoments
from newtention.bounds.circle import Form, add, circle_maximum, times
from newtention.bounds.cumulants import (
    FOURTH,
    FOURTH_SPREAD,
    SECOND,
    THIRD,
    THIRD_SPREAD,
    Statistics,
)

MAX_SHIFT = 50.0
"""Beyond this shift of a row's logits on the ball only radii are used: weights may have underflowed
at the point, and exponentials of a few shifts must not overflow."""


class Rows(NamedTuple):
    """What radii tell of each real query row: upper bounds, over all sequences.

    rho: |scale| rho_2 ||a_j||, rho_2 the radius of the row's allowed keys.  rho3: the radius of its
    allowed value tokens.  m3: the largest norm of them.  weight: q_j.  residual: ||r_j|| at the
    point.
    """

    rho: Float[Tensor, " n"]
    rho3: Float[Tensor, " n"]
    m3: Float[Tensor, " n"]
    weight: Float[Tensor, " n"]
    residual: Float[Tensor, " n"]

    @property
    def residual_norm(self) -> float:
        """||r||, weighted."""
        return float((self.weight * self.residual**2).sum().sqrt())


class BallNorms(NamedTuple):
    """Norms over rows of the derivatives of sqrt(q) r along (U, Z): what level 3 is made of.

    r2, r3, r4 hold everywhere on the ball, point2 at the point, as forms in u and z.  first and
    residual bound the Jacobian and the residual on the ball.  residual_part: |<r, r'''>| at the
    point.
    """

    r2: Form
    r3: Form
    r4: Form
    first: float
    residual: float
    point2: Form
    residual_part: Form

    @property
    def fourth(self) -> float:
        """M4: |3 |r''|^2 + 4 <r', r'''> + <r, r''''>| on the ball."""
        squares = times(3.0, times(self.r2, self.r2))
        mixed = times(4 * self.first, self.r3)
        return circle_maximum(add(squares, mixed, times(self.residual, self.r4)))


class RowNorms(NamedTuple):
    """Bounds for each row, everywhere on the ball: e stands for |U^T a_j|, z for ||Z||.

    |k(v, sigma)| <= v1 e, with more sigma v2 e^2, v3 e^3, v4 e^4; |k(w, sigma)| <= w1 z e, with
    more sigma w2 z e^2, w3 z e^3.  Heads are added already.
    """

    v1: Float[Tensor, " n"]
    v2: Float[Tensor, " n"]
    v3: Float[Tensor, " n"]
    v4: Float[Tensor, " n"]
    w1: Float[Tensor, " n"]
    w2: Float[Tensor, " n"]
    w3: Float[Tensor, " n"]


class KeyNorms(NamedTuple):
    """Of sigma = e . a2 for |e| = 1, everywhere on the ball.

    variance: Var sigma.  mean_k: E|W_k - E W_k|.  root_k: the deviation of W_k, only where the
    ball is `near`.
    """

    variance: Float[Tensor, " n"]
    mean2: Float[Tensor, " n"]
    mean3: Float[Tensor, " n"]
    mean4: Float[Tensor, " n"]
    root2: Float[Tensor, " n"]
    root3: Float[Tensor, " n"]
    root4: Float[Tensor, " n"]


class Shift(NamedTuple):
    """What the ball does to the rows, point 1 of this module.

    near: whether the logits' shift theta is at most MAX_SHIFT.  growth: exp(2 theta).
    """

    near: Bool[Tensor, " n"]
    theta: Float[Tensor, " n"]
    growth: Float[Tensor, " n"]

    @classmethod
    def of(cls, rho: Float[Tensor, " n"], delta: float) -> Shift:
        """Of the ball of radius delta."""
        theta = (rho * delta).clamp_max(MAX_SHIFT)
        return cls(rho * delta <= MAX_SHIFT, theta, (2 * theta).exp())

    def least(
        self, radius: Float[Tensor, " n"], moment: Float[Tensor, " n"]
    ) -> Float[Tensor, " n"]:
        """The less of two bounds, the second for near rows only."""
        return torch.where(self.near, torch.minimum(radius, moment), radius)


def key_norms(rho2: Float[Tensor, " n"], shift: Shift, at: KeyMoments, error: float) -> KeyNorms:
    """Points 1 and 2 of this module, from radii of the keys and their moments at the point."""
    spread = at.spread + 4 * error * at.size**2
    moment4 = at.moment4 + 128 * error * at.size**4
    moment6 = at.moment6 + 1024 * error * at.size**6
    moment8 = at.moment8 + 8192 * error * at.size**8
    moved = shift.theta * shift.theta.exp()
    shift4, shift6, shift8 = ((2 * shift.theta / k).exp() + moved for k in (4, 6, 8))
    variance = shift.least(rho2**2, shift.growth * spread)
    root2 = shift4**2 * moment4.sqrt()
    return KeyNorms(
        variance,
        torch.minimum(SECOND * rho2**2, 2 * variance),
        torch.minimum(THIRD * rho2**3, THIRD_SPREAD * variance * rho2),
        torch.minimum(FOURTH * rho2**4, FOURTH_SPREAD * variance * rho2**2),
        root2,
        (shift6**6 * moment6 + 3 * variance**3).sqrt(),
        shift8**4 * moment8.sqrt() + 10 * variance * root2,
    )


def row_norms(
    rows: Rows, Y_norms: Float[Tensor, " h"], delta: float, at: Statistics, error: float = 0.0
) -> RowNorms:
    """Points 1 to 3 of this module for every row; arguments as in `lipschitz_covariances`."""
    rho3, y, s3 = rows.rho3, float(Y_norms.max()), at.size3
    value_spread = at.value_spread + 4 * error * s3**2
    output_spread = at.output_spread + 4 * error * (y * s3) ** 2
    shift = Shift.of(rows.rho, delta)
    k = key_norms(key_radius(rows.rho, at.a1), shift, at.keys, error)
    value = shift.least(rho3, (shift.growth * value_spread).sqrt())
    nu = (y + delta) * rho3
    output = shift.least(nu, (shift.growth * output_spread).sqrt() + delta * rho3)
    return RowNorms(
        v1=output * k.variance.sqrt() * math.sqrt(len(Y_norms)),
        v2=shift.least(nu * k.mean2, output * k.root2),
        v3=shift.least(nu * k.mean3, output * k.root3),
        v4=shift.least(nu * k.mean4, output * k.root4),
        w1=value * k.variance.sqrt(),
        w2=shift.least(rho3 * k.mean2, value * k.root2),
        w3=shift.least(rho3 * k.mean3, value * k.root3),
    )


def key_radius(rho: Float[Tensor, " n"], a1: Float[Tensor, "n d1"]) -> Float[Tensor, " n"]:
    """rho_2: 0 for a query token of 0, which no logit depends on."""
    norm = a1.norm(dim=1)
    return torch.where(norm > 0, rho / norm, 0.0)


def aligned(a1: Float[Tensor, "n d1"], c: Float[Tensor, " n"]) -> float:
    """sup of sum_j c_j |U^T a_j|^2 over ||U||_F = 1: point 4 of this module."""
    G = a1.T @ (c[:, None] * a1)
    if not bool(torch.isfinite(G).all()):
        return math.inf
    return max(0.0, float(torch.linalg.eigvalsh(G)[-1]))


def ball_norms(
    rows: Rows,
    Y_norms: Float[Tensor, " h"],
    delta: float,
    jacobian_norm: float,
    at: Statistics,
    error: float = 0.0,
) -> BallNorms:
    """Rows added up, point 4 of this module; arguments as in `lipschitz_covariances`."""
    q, s, norm = rows.weight, rows.weight.sqrt(), at.a1.norm(dim=1)

    def root(c: Float[Tensor, " n"], power: int) -> float:
        """sup of (sum_j q_j (c_j |U^T a_j|^power)^2)^(1/2) over ||U||_F = 1."""
        return math.sqrt(aligned(at.a1, (s * c * norm ** (power - 1)) ** 2))

    # At the point: the statistics and the error of their evaluation.
    s2, s3, y = at.size2, at.size3, float(Y_norms.max())
    cross = at.cross + 4 * error * s2 * s3
    second = at.second + 32 * error * y * s3 * s2**2
    value = at.value + 32 * error * s3 * s2**2
    size = rows.residual + rows.m3 * float(Y_norms.sum())
    fourth = at.fourth + 256 * error * size * y * s3 * s2**3
    point2 = {(2, 0): root(second, 2), (1, 1): 2 * root(cross, 1)}
    residual_part = {
        (3, 0): aligned(at.a1, q * fourth * norm),
        (2, 1): 3 * aligned(at.a1, q * rows.residual * value),
    }

    b = row_norms(rows, Y_norms, delta, at, error)
    v3, w2 = root(b.v3, 3), root(b.w2, 2)
    r3 = {(3, 0): v3, (2, 1): 3 * w2}
    r4 = {(4, 0): root(b.v4, 4), (3, 1): 4 * root(b.w3, 3)}
    # Either from the moments on the ball, or from the point and the slope r3: along a step (u', z')
    # k(v, sigma, sigma) changes by at most v3 u^2 u' + w2 u^2 z', k(w, sigma) by w2 u z u'.
    r2 = {
        (2, 0): min(root(b.v2, 2), point2[2, 0] + delta * math.hypot(v3, w2)),
        (1, 1): min(2 * root(b.w1, 1), point2[1, 1] + delta * 2 * w2),
    }
    tokens = math.sqrt(len(Y_norms) * float((q * rows.m3**2).sum()))
    first = min(
        jacobian_norm + delta * circle_maximum(r2),
        circle_maximum({(1, 0): root(b.v1, 1), (0, 1): tokens}),
    )
    return BallNorms(r2, r3, r4, first, rows.residual_norm + delta * first, point2, residual_part)
