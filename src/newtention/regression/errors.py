"""Gradient and Hessian of softmax regression at a point, with proved bounds of their errors.

Everything is a sum over rows of products whose factors carry known errors; a factor p computed as P
with |p - P| <= dP turns P Q into p q with |p q - P Q| <= dP (|Q| + dQ) + |P| dQ, and sums of n
terms add gamma_n of the sum of magnitudes.  `newtention.bounds.rounding` has the model.  Rows
are taken about a floating-point centre m: weights T that sum to zero see no difference, and

    sum w (a - mu)(a - mu)^T = sum w (a - m)(a - m)^T + O(||mu - m||)

with ||mu - m|| proved small.  Norms of matrices sum w a a^T are bounded by sum |w| ||a||^2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.balls import norms_upper
from newtention.bounds.rounding import (
    EXP_ERROR,
    TINY,
    UNIT,
    gamma,
    norm_upper,
    softmax_error,
    upward,
)
from newtention.regression.rescaled import Kind, values
from newtention.regression.rows import Rows, sum_of


class Point(NamedTuple):
    """Derivatives at x, in units of exp(2 shift), and what the Lipschitz constants need.

    The errors are bounds of norms (spectral for the Hessian).
    residual_norm, weights_norm: of r and f; exponents: of `rescaled_lipschitz`.
    log_unit: 2 shift.
    """

    x: Float[Tensor, " d"]
    hessian: Float[Tensor, "d d"]
    hessian_error: float
    gradient: Float[Tensor, " d"]
    gradient_error: float
    residual_norm: float
    relative_loss: float
    weights_norm: float
    exponents: Float[Tensor, " n"]
    log_unit: float


class _Sums(NamedTuple):
    """Magnitudes of a row: n counts its roundings."""

    n: int
    norms: Float[Tensor, " n"]

    def vector(self, w: Tensor, dw: Tensor) -> float:
        """Error of the computed sum_k w_k a_k."""
        return self._bound(dw + gamma(self.n + 64) * w.abs(), 1)

    def matrix(self, w: Tensor, dw: Tensor) -> float:
        """Error of the computed sum_k w_k a_k a_k^T, in the Frobenius norm."""
        return self._bound(dw + gamma(self.n + 64) * w.abs(), 2)

    def size(self, w: Tensor, power: int) -> float:
        """At least sum_k |w_k| ||a_k||^power."""
        return self._bound(w.abs(), power)

    def _bound(self, w: Tensor, power: int) -> float:
        return upward(float((w * self.norms**power).sum()), self.n + 16) + 2.0**12 * self.n * TINY


def softmax_point(rows: Rows, x: Float[Tensor, " d"]) -> Point:
    """Plain softmax regression of one problem, in float64.

    Computed about the attended mean: with the exact p, c, T and w = p^2 + T (`softmax`),
    |p - P| <= expm1(kappa) P + a few TINY (`softmax_error`); the errors of c, <p, c>, T and w
    follow term by term.
    """
    A, b, ridge = rows.A[0], rows.B[0], float(rows.ridge)
    n = len(A)
    norms = _norms(rows)
    z, dz = _logits(A, x, norms)
    spread = upward(z.max() - z.min() + 2.0 * dz.max(), 4)
    kappa = float(softmax_error(dz.max(), spread, n))
    shifted = (z - z.max()).exp()
    P = shifted / shifted.sum()
    dP = math.expm1(kappa) * P + 16.0 * TINY
    C = P - b
    dC = dP + 2.0 * UNIT * C.abs()
    inner, d_inner = _inner(P, dP, C, dC)
    D, dD = C - inner, dC + d_inner
    dD = dD + 2.0 * UNIT * D.abs()
    T, dT = _product(P, dP, D, dD)
    square, d_square = _product(P, dP, P, dP)
    w, dw = square + T, d_square + dT
    dw = dw + 2.0 * UNIT * w.abs()

    mean = P @ A
    centred = _Sums(n, _norms(rows, mean))
    both = sum_of(torch.stack([T, P])[:, t] @ (part[0] - mean) for t, part in rows.tiles())
    # mu - mean = sum_k p_k (a_k - mean).
    off = upward(norm_upper(both[1]) + centred.vector(P, dP), 4)

    H = rows.gram(w[None], mean[None])[0]
    H.diagonal().add_(ridge)
    magnitude = w.abs() + dw
    moved = 2.0 * off * centred.size(magnitude, 1) + off**2 * float(magnitude.sum()) * (1.0 + 1e-6)
    H_error = centred.matrix(w, dw) + moved + 4.0 * UNIT * (norm_upper(H) + ridge)
    g = both[0] + ridge * x
    g_error = centred.vector(T, dT) + 4.0 * UNIT * (norm_upper(g) + ridge * norm_upper(x))
    residual = upward(norm_upper(C) + norm_upper(dC), 4)
    size = norm_upper(b)
    return Point(
        x,
        H,
        upward(H_error, 16),
        g,
        upward(g_error, 16),
        residual,
        (residual / size) ** 2 if size > 0 else 0.5 * residual**2,
        upward(norm_upper(P) + norm_upper(dP), 4),
        z,
        0.0,
    )


def rescaled_point(kind: Kind, rows: Rows, x: Float[Tensor, " d"]) -> Point:
    """Rescaled softmax regression of one problem, in float64 and in units of exp(2 shift).

    u, u' and u'' are at most exp(|z| - shift) and change by at most that times expm1 of the change
    of the logits; 40 units of rounding cover their evaluation.
    """
    A, b = rows.A[0], rows.B[0]
    n = len(A)
    norms = _norms(rows)
    z, dz = _logits(A, x, norms)
    exponents = z if kind == "exp" else z.abs()
    shift = exponents.max()
    u, first, second = (t[0] for t in values(kind, z[None], shift[None]))
    size = (exponents - shift).exp()
    relative = torch.expm1(dz + UNIT * (exponents - shift).abs()) + 5.0 * EXP_ERROR
    du = upward(size * relative, 16) * (1.0 + 1e-9) + 2.0 * TINY
    total = u.sum()
    d_total = upward(float(du.sum()) + gamma(n) * float(u.abs().sum()), n + 4)
    r = u - total * b
    dr = upward(du + d_total * b.abs() + 4.0 * UNIT * (u.abs() + total.abs() * b.abs()), 8)
    inner, d_inner = _inner(b, torch.zeros_like(b), r, dr)
    q, dq = r - inner, dr + d_inner
    dq = dq + 2.0 * UNIT * q.abs()
    T, dT = _product(first, du, q, dq)
    square, d_square = _product(first, du, first, du)
    curved, d_curved = _product(second, du, q, dq)
    w, dw = square + curved, d_square + d_curved
    dw = dw + 2.0 * UNIT * w.abs()
    weighted, d_weighted = _product(first, du, b, torch.zeros_like(b))

    sums = _Sums(n, norms)
    ridge = float(rows.ridge) * math.exp(-2.0 * float(shift))
    d_ridge = ridge * 2.0 * EXP_ERROR + TINY
    v, y = first @ A, weighted @ A
    dv, dy = sums.vector(first, du), sums.vector(weighted, d_weighted)
    square_b = float(b.square().sum())
    H = rows.gram(w[None])[0]
    outer = torch.outer(y, v)
    H = H - outer - outer.mT + square_b * torch.outer(v, v)
    H.diagonal().add_(ridge)
    nv, ny = upward(norm_upper(v) + dv, 4), upward(norm_upper(y) + dy, 4)
    ranks = 2.0 * (ny * dv + nv * dy) + upward(square_b, n + 4) * 2.0 * nv * dv
    magnitude = sums.size(w, 2) + 2.0 * nv * ny + square_b * nv**2 + ridge
    H_error = sums.matrix(w, dw) + ranks + gamma(n + 16) * magnitude + d_ridge
    g = T @ A + ridge * x
    g_error = sums.vector(T, dT) + (d_ridge + 4.0 * UNIT * ridge) * norm_upper(x)
    g_error = g_error + 4.0 * UNIT * norm_upper(g)
    residual = upward(norm_upper(r) + norm_upper(dr), 4)
    return Point(
        x,
        H,
        upward(H_error, 32),
        g,
        upward(g_error, 32),
        residual,
        (residual / norm_upper(u)) ** 2 if norm_upper(u) > 0 else 0.0,
        0.0,
        exponents - shift + 2.0 * dz + 4.0 * UNIT * (exponents - shift).abs(),
        2.0 * float(shift),
    )


def _logits(
    A: Float[Tensor, "n d"], x: Float[Tensor, " d"], norms: Float[Tensor, " n"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """A x and bounds of its errors, gamma_d ||a_k|| ||x||."""
    return A @ x, upward(gamma(A.shape[1]) * norms * norm_upper(x), 4)


def _norms(rows: Rows, centre: Float[Tensor, " d"] | None = None) -> Float[Tensor, " n"]:
    """Upper bounds of ||a_k|| or ||a_k - centre||, rounding of the difference included."""
    if centre is None:
        return torch.cat([norms_upper(part[0]) for _, part in rows.tiles()])
    return upward(torch.cat([norms_upper(part[0] - centre) for _, part in rows.tiles()]), 4)


def _inner(P: Tensor, dP: Tensor, Q: Tensor, dQ: Tensor) -> tuple[Tensor, float]:
    """<P, Q> and a bound of its error."""
    product, error = _product(P, dP, Q, dQ)
    n = len(P)
    total = float(error.sum()) + gamma(n + 2) * float(product.abs().sum())
    return product.sum(), upward(total, n + 8) + n * TINY


def _product(P: Tensor, dP: Tensor, Q: Tensor, dQ: Tensor) -> tuple[Tensor, Tensor]:
    """P o Q and bounds of its errors."""
    value = P * Q
    return value, upward(dP * (Q.abs() + dQ) + P.abs() * dQ + UNIT * value.abs() + TINY, 8)
