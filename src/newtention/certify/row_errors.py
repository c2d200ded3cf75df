"""Error analysis of loss, gradient and Hessian, from a few moments of every query row.

All bounds are norms per row, so they cost O(n m) numbers beside the O(n m d^2) of the Hessian.  The
errors of the attention weights are relative, so they act on covariances like a change of measure:
their effect is bounded by standard deviations under P_j, not by the size of the tokens; only the
rounding of sums and products sees that.  A magnitude here bounds the exact number and every
computed version of it, so the statements hold for every evaluation of the same formulas
(`newtention.derivatives.hessian`), whatever its tiles and its order of summation.  Derivation, with
the same names: docs/certificates/rounding.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from newtention.bounds.balls import norms_upper
from newtention.bounds.rounding import TINY, UNIT, gamma, softmax_error, squared, upward
from newtention.chunks import Chunk
from newtention.layers import Evaluation
from newtention.problem import AttentionProblem

LARGEST_SHARE = 2.0**-40
"""Share of the largest key added to every mean square: far above what weights lose to underflow,
far below what counts; it also covers products whose error is relative to the largest factors, as in
`newtention.certify.pairs`."""


class RowMoments(NamedTuple):
    """Proved bounds for every real row; heads on the second axis.

    query: norm of the scaled query.  residual, target: norms of the computed residual and of B_j.
    kappa: see `softmax_error`.  largest: the largest norm of a key.  keys, values, tokens, error:
    root mean squares under P_j of ||a2_k||, ||v_k||, ||a3_k|| and of the error of v_k.  *_mean and
    *_spread: norm of the computed mean under P_j and standard deviation.
    """

    query: Float[Tensor, " n"]
    weight: Float[Tensor, " n"]
    residual: Float[Tensor, " n"]
    target: Float[Tensor, " n"]
    largest: Float[Tensor, " n"]
    kappa: Float[Tensor, "n h"]
    keys: Float[Tensor, "n h"]
    values: Float[Tensor, "n h"]
    tokens: Float[Tensor, "n h"]
    error: Float[Tensor, "n h"]
    keys_mean: Float[Tensor, "n h"]
    values_mean: Float[Tensor, "n h"]
    tokens_mean: Float[Tensor, "n h"]
    keys_spread: Float[Tensor, "n h"]
    values_spread: Float[Tensor, "n h"]
    tokens_spread: Float[Tensor, "n h"]


class DataErrors(NamedTuple):
    """Bounds on the errors of the data part; see `PointEvaluation` for the norms.

    residual: per row.  jacobian: spectral norm of the error of J.  jacobian_size: Frobenius-like
    bound of ||J||.  sums: relative error of the sum over rows in J^T J.  curvature: spectral norm
    of the error of the residual's part of the Hessian.
    """

    residual: Float[Tensor, " n"]
    loss: float
    gradient: float
    jacobian: float
    jacobian_size: float
    sums: float
    curvature: float

    def gauss_newton(self, jacobian_norm: float = math.inf) -> float:
        """Error of J^T J, given an upper bound of ||J||_2."""
        size = min(jacobian_norm, self.jacobian_size)
        error = 2.0 * size * self.jacobian + squared(self.jacobian)
        error = error + self.sums * squared(self.jacobian_size)
        return upward(error, 8) if error == error else math.inf


def real_rows(tile: Chunk) -> Bool[Tensor, "o s n"]:
    """Which rows of a tile are not padding."""
    if tile.mask.picked is not None:  # from real rows only
        return torch.ones_like(tile.weight, dtype=torch.bool)
    places = tile.mask.places(tile.A1.shape[2], tile.A1.device)
    return places < tile.query_lengths[..., None]


def real_queries(data: AttentionProblem) -> Float[Tensor, "n d1"]:
    """Scaled queries of all real rows: chunk by chunk, sequence by sequence."""
    return torch.cat([chunk.queries[0][real_rows(chunk)[0]] for chunk in data.chunks])


def tile_moments(
    at: Evaluation, X: Float[Tensor, "h d1 d2"], Y: Float[Tensor, "h d3 p"]
) -> RowMoments:
    """Moments of a tile's real rows (one owner)."""
    tile, P = at.tile, at.P[0]
    (d1, d2), (d3, p), m = X.shape[1:], Y.shape[1:], tile.A2.shape[2]
    assert at.heads.v is not None
    A1, A2, A3, q, v = tile.queries[0], tile.A2[0], tile.A3[0], at.heads.q[0], at.heads.v[0]
    alpha, beta = norms_upper(A2), norms_upper(A3)
    # A share of the products of norms, as LARGEST_SHARE in the mean squares below.
    share = LARGEST_SHARE**0.5
    X_norm, Y_norm = (norms_upper(t.flatten(1))[:, None] for t in (X, Y))
    delta = norms_upper(A3.abs()[:, None] @ Y.abs()) + share * beta[:, None] * Y_norm
    delta = upward(gamma(d3) * delta, 2 * d3 * p + 9) + d3 * p * TINY
    nu = norms_upper(v) + 2.0 * delta
    q_error = norms_upper(A1.abs()[:, None] @ X.abs()) + share * norms_upper(A1)[:, None] * X_norm
    q_error = upward(gamma(d1 + 1) * q_error, 2 * d1 * d2 + 9) + (d1 + 1) * d2 * TINY
    q_size = norms_upper(q) + 2.0 * q_error
    largest = alpha.amax(-1)[:, None, None]
    logit = q_size * largest
    if tile.bias is not None:
        logit = logit + tile.bias[0].abs().amax(-1)
    logit_error = (gamma(d2) * q_size + q_error) * largest + UNIT * logit + d2 * TINY
    kappa = softmax_error(upward(logit_error, d1 + 12), upward(2.0 * logit, 8), m)

    shape = nu.shape
    squares = torch.stack([alpha[:, None].expand(shape), nu, beta[:, None].expand(shape), delta])
    squares = squares.square().movedim(0, -1)
    # exp(2 kappa): from one computed set of weights to the exact one and on to any other.
    change = torch.exp(2.0 * kappa)[..., None]
    mean = upward(P @ squares + LARGEST_SHARE * squares.amax(-2, keepdim=True), 2 * m + 8) * change
    w = at.attended[0]
    mu = w if tile.A3 is tile.A2 else P @ A2[:, None]
    means = torch.stack([norms_upper(t) for t in (mu, at.O[0], w)], -1)
    # E|x - Ex|^2 = E|x|^2 - |Ex|^2, where each term is off by a few gamma_m of the first.
    slack = 8.0 * gamma(m + max(d2, d3, p) + 8)
    variance = (mean[..., :3] - means**2).clamp(min=0.0) + slack * mean[..., :3]
    root, spread = mean.sqrt(), (variance * change).sqrt()
    spread[..., 1] += 2.0 * root[..., 3]  # the values' own error
    real = real_rows(tile)[0]

    def rows(t: Float[Tensor, "s h n *c"]) -> Float[Tensor, "r h *c"]:
        return t.transpose(1, 2)[real]

    return RowMoments(
        upward(norms_upper(A1), 4)[real],
        tile.weight[0][real],
        norms_upper(at.C[0])[real],
        norms_upper(tile.B[0])[real],
        alpha.amax(-1)[:, None].expand(real.shape)[real],
        rows(kappa),
        *upward(rows(root), 4).unbind(-1),
        *rows(means).unbind(-1),
        *upward(rows(spread), 20).unbind(-1),
    )


def data_errors(
    rows: RowMoments, radius: Float[Tensor, " n"], query_norm: float, keys: int, p: int
) -> DataErrors:
    """Bounds on the errors of the data part.

    radius: of each row's allowed keys.  query_norm: upper bound of the spectral norm of all scaled
    queries.  keys: largest number of keys of a sequence.
    """
    (n, h), u = rows.kappa.shape, UNIT
    size, W = rows.query[:, None], rows.weight[:, None]
    A, V, B, D = rows.keys, rows.values, rows.tokens, rows.error
    sA, sV, sB = rows.keys_spread, rows.values_spread, rows.tokens_spread
    eps = torch.expm1(rows.kappa)  # relative error of the weights
    # g: rounding of sums over keys, with sum(P) = 1 off by gamma_(keys + 2).
    g, tiny = gamma(2 * keys + 4), keys * TINY

    # Expectations and covariances: mu, O, w, Rho, Q.
    d_mu, d_w = eps * sA + g * A + tiny, eps * sB + g * B + tiny
    d_out = eps * sV + D + g * V + tiny
    cov = gamma(4 * keys + 16) * (1.0 + 2.0 * eps)
    d_rho = (eps + eps**2) * sA * sV + (1.0 + eps) ** 2 * sA * D + cov * A * V + tiny
    d_q = (eps + eps**2) * sA * sB + cov * A * B + tiny
    rho, q = sA * sV + d_rho, sA * sB + d_q
    mu, out, w = rows.keys_mean + 2 * d_mu, rows.values_mean + 2 * d_out, rows.tokens_mean + 2 * d_w

    # Residual, and R = q C.
    residual = (d_out + (gamma(h) + u) * out).sum(1) + u * rows.target + h * TINY
    residual = upward(residual, 4 * h + 40)
    c = rows.residual + 2.0 * residual
    R, d_R = W * c[:, None], W * (residual + 2.0 * u * c)[:, None] + TINY

    # T_k = P_k R.(v_k - O).  lever: sum_k |T'_k - T_k| |a2_k - mu|.  loose: |sum_k T'_k|.
    # R.O is a rounded sum of p terms and may be a term of a sum of p + 1.
    inner = gamma(2 * p + 4)
    lever = ((eps + 4.0 * u) * R + d_R) * sA * sV + R * sA * (D + d_out + inner * (V + out)) + tiny
    loose = R * (g + inner) * (V + out) + tiny
    sums = gamma(keys + 2) * R * (sV + D + d_out + inner * (V + out)) * A  # rounding of t = T A2
    d_t = lever + loose * mu + sums
    t = R * rho + d_t
    # N = A2^T diag(T) A2 - mu t^T - t mu^T = sum_k T_k (a2_k - mu)(a2_k - mu)^T.
    reach, far = 2.0 * radius[:, None], rows.largest[:, None]
    d_n = reach * lever + loose * mu**2 + 2.0 * d_mu * t + sums * (far + 2.0 * mu)
    d_n = d_n + 8.0 * u * (R * sV * A * far + 2.0 * mu * t)
    N = R * reach * rho + d_n

    # Sums over rows: `depth` roundings on the way of each term.
    depth = gamma(n + p + 24)
    jacobian = (W * (size**2 * rho**2 + w**2)).sum().sqrt()
    d_jacobian = (W * (size**2 * (d_rho + 4.0 * u * rho) ** 2 + d_w**2)).sum().sqrt()
    xx = (size**2 * (d_n + depth * N)).sum(0).amax()
    xy = (size * (R * d_q + d_R * q + depth * R * q)).sum(0).amax()

    total_R, total_t = R.square().sum(), t.square().sum(0)
    gx = query_norm * d_t.square().sum(0).sqrt()
    gx = gx + depth * (size.square().sum() * total_t).sqrt()
    total_w = w.square().sum(0)
    gy = (total_w * d_R.square().sum()).sqrt() + (d_w.square().sum(0) * total_R).sqrt()
    gy = gy + depth * (total_w * total_R).sqrt()
    energy = 0.5 * (rows.weight * c.square()).sum()
    loss = (rows.weight * (c * residual + residual.square())).sum() + gamma(n * p + 8) * energy

    count = 16 * (n + p) + 1000
    gradient = (gx.square() + gy.square()).sum().sqrt()

    def bound(x: Float[Tensor, ""]) -> float:
        result = upward(float(x), count) + n * keys * TINY
        return result if result == result else math.inf

    return DataErrors(
        residual=torch.where(torch.isnan(residual), torch.inf, residual),
        loss=bound(loss),
        gradient=bound(gradient),
        jacobian=bound(d_jacobian),
        jacobian_size=bound(jacobian),
        sums=depth,
        curvature=bound(xx + xy),
    )
