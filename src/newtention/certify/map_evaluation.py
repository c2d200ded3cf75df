"""The data part of a fit of attention maps at a point in float64, with proved bounds on the errors.

Every factor of `newtention.derivatives.maps` is followed entry by entry: p off by dP from its
computed value and at most Pm in size, and so on, where a magnitude bounds the exact number and
every computed version of it (docs/certificates/rounding.md).  So the statements hold for every
evaluation of the same formulas, whatever its tiles and its order of summation.
Derivation, with the same names: docs/certificates/maps.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.balls import norms_upper
from newtention.bounds.rounding import TINY, UNIT, gamma, norm_upper, softmax_error, upward
from newtention.certify.data_evaluation import (
    DataEvaluation,
    RowQuantities,
    defined,
    query_norm,
    root_of_largest,
    token_radii,
)
from newtention.certify.row_errors import LARGEST_SHARE, real_rows
from newtention.chunks import Chunk
from newtention.derivatives.maps import map_second_order_parts
from newtention.layers import AttentionMap, Evaluation, evaluate
from newtention.problem import AttentionProblem

SHARE = LARGEST_SHARE**0.5
"""Of the product of two factors' largest entries, added to every sum of products, so that the
bounds cover products whose error is relative to those, as in `newtention.certify.pairs`."""
ARRAYS = 20
"""Arrays of the size of P that a tile takes."""


@dataclass(frozen=True, eq=False)
class MapRowQuantities(RowQuantities):
    """Those of an attention map's rows: rho3 is the radius of the unit vectors, m3 is 1.

    peak: the row's largest attention weight.
    """

    peak: Float[Tensor, " n"]


class MapMoments(NamedTuple):
    """Proved bounds for every real row.

    query, key_radius, keys: norm of the scaled query, radius and number of the allowed keys.
    weight: q_j, exact.  kappa: see `softmax_error`.  peak: the largest weight.
    residual, residual_error: norms of the computed residual and of its error.
    t, t_error: norms of t_j = A2^T T_j and of its error.  Likewise for M_j, in the Frobenius norm,
    and for its Gauss-Newton part.
    """

    query: Float[Tensor, " n"]
    key_radius: Float[Tensor, " n"]
    keys: Float[Tensor, " n"]
    weight: Float[Tensor, " n"]
    kappa: Float[Tensor, " n"]
    peak: Float[Tensor, " n"]
    residual: Float[Tensor, " n"]
    residual_error: Float[Tensor, " n"]
    t: Float[Tensor, " n"]
    t_error: Float[Tensor, " n"]
    M: Float[Tensor, " n"]
    M_error: Float[Tensor, " n"]
    gauss_newton: Float[Tensor, " n"]
    gauss_newton_error: Float[Tensor, " n"]


def evaluate_map(
    data: AttentionProblem, layer: AttentionMap, theta: Float[Tensor, "1 N"]
) -> DataEvaluation:
    """The data part of a fit of attention maps."""
    r = _rows(data, layer, theta)
    n, keys = len(r.query), max(chunk.A2.shape[2] for chunk in data.chunks)
    loss, gradient, H, gauss_newton = map_second_order_parts(data, layer.unpack(theta))
    # Roundings on the way of each row's term in a sum over rows, the scale's included.
    depth, count = gamma(n + 24), 16 * n + 1000
    size = r.query

    def summed(value: Tensor, error: Tensor) -> float:
        """Error of sum_j a_j a_j^T (x) M_j."""
        return bound((size**2 * (error + depth * (value + error))).sum())

    def bound(value: Tensor) -> float:
        result = upward(float(value), count) + n * keys * TINY
        return result if result == result else torch.inf

    c = r.residual + 2.0 * r.residual_error
    energy = 0.5 * (r.weight * c.square()).sum()
    loss_error = (r.weight * (c * r.residual_error + r.residual_error.square())).sum()
    jacobian_norm = root_of_largest(gauss_newton[0], summed(r.gauss_newton, r.gauss_newton_error))
    t = r.t + 2.0 * r.t_error
    gradient_error = query_norm(data) * r.t_error.square().sum().sqrt()
    gradient_error = gradient_error + depth * (size.square().sum() * t.square().sum()).sqrt()
    return DataEvaluation(
        rows=MapRowQuantities(
            rho=defined(upward(r.query * r.key_radius, 2)),
            rho3=upward(((r.keys - 1) / r.keys).sqrt(), 4),
            m3=torch.ones_like(r.query),
            weight=r.weight,
            residual=defined(upward(r.residual + r.residual_error, 2)),
            residual_error=defined(r.residual_error),
            query_norms=r.query,
            weight_error=defined(upward(torch.expm1(r.kappa), 2)),
            peak=torch.where(torch.isnan(r.peak), 1.0, r.peak.clamp(max=1.0)),
        ),
        Y_norms=theta.new_ones(1),
        loss=float(loss[0]),
        loss_error=bound(loss_error + gamma(n * keys + 8) * energy),
        gradient=gradient[0],
        gradient_error=bound(gradient_error),
        hessian=H[0],
        hessian_error=summed(r.M, r.M_error) + UNIT * norm_upper(H[0]),
        jacobian_norm=jacobian_norm,
    )


def _rows(data: AttentionProblem, layer: AttentionMap, theta: Float[Tensor, "1 N"]) -> MapMoments:
    X = layer.unpack(theta)[0, 0]
    parts = []
    for chunk in data.chunks:
        for tile in chunk.tiles(ARRAYS * chunk.A2.shape[2] + layer.d2):
            parts.append(map_moments(evaluate(tile, layer, theta), X))
    return MapMoments(*(torch.cat(part) for part in zip(*parts, strict=True)))


def map_moments(at: Evaluation, X: Float[Tensor, "d1 d2"]) -> MapMoments:
    """Moments of a tile's real rows (one owner)."""
    tile, P, C = at.tile, at.P[0, :, 0], at.C[0]
    s, n, m = P.shape
    q, u = tile.weight[0][..., None], UNIT
    alpha = norms_upper(tile.A2[0])[:, None]  # ||a2_k||, s 1 m
    kappa = _kappa(at, X)
    change, lost = torch.exp(kappa)[..., None], 16.0 * TINY
    Pm = upward((P + lost) * change**2, 8)
    dP = upward(torch.expm1(kappa)[..., None] * Pm + lost * change, 8)
    g = gamma(m + 2)

    # c = p - b, R = q c, D = R - <p, R>, T = p D.
    B = tile.B[0].abs()
    dC = dP + u * (Pm + B)
    Cm = C.abs() + 2.0 * dC
    Rm, dR = q * Cm * (1.0 + 2.0 * u) + TINY, q * (dC + 2.0 * u * Cm) + TINY
    inner = Pm * Rm
    total = inner.sum(-1, keepdim=True) + SHARE * inner.amax(-1, keepdim=True)
    d_inner = (dP * Rm + Pm * dR).sum(-1, keepdim=True) + g * total + m * TINY
    computed = q * C
    D = computed - (P * computed).sum(-1, keepdim=True)
    dD = upward(dR + d_inner + u * (Rm + total), m + 32)
    Dm = D.abs() + 2.0 * dD
    Tm, dT = Pm * Dm, upward(dP * Dm + Pm * dD + u * Pm * Dm, 8) + TINY
    Tm = upward(Tm, 8) + 2.0 * dT
    square = q * Pm * Pm
    dW2 = upward(2.0 * q * Pm * dP + 3.0 * u * square, 8) + TINY
    Wm = upward(Tm + square, 8)
    dW = upward(dT + dW2 + u * Wm, 8)

    def over_keys(weights: Tensor) -> Float[Tensor, "s n"]:
        """sum_k w_k ||a2_k||."""
        product = weights * alpha
        return upward(product.sum(-1) + SHARE * weights.amax(-1) * alpha.amax(-1), m + 8)

    # mu: the computed one is off by d_mu; distances ||a2_k - mu|| of the exact one.
    mu = P @ tile.A2[0]
    far, mean = _distances(tile.A2[0], mu, alpha), norms_upper(mu)
    # The weights add up to 1 but for g; the third term is the rounding of the sum.
    d_mu = upward((dP * far).sum(-1) + g * mean + gamma(m) * over_keys(Pm), m + 12)
    far = far + d_mu[..., None]
    mean = mean + 2.0 * d_mu
    # The computed T do not quite add up to 0.
    loose = upward(2.0 * gamma(2 * m + 16) * total[..., 0], 4)
    t_error = (dT * far).sum(-1) + loose * mean + g * over_keys(Tm) + m * TINY
    t = (Tm * far).sum(-1) + t_error

    def second(W: Tensor, error: Tensor, lost: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of sum_k w_k (a2_k - mu)(a2_k - mu)^T and of its error; lost: of sum w - n."""
        total, linear, squares = W.sum(-1), (W * far).sum(-1), (W * far.square()).sum(-1)
        lost = lost + gamma(m + 12) * total
        terms = (W * alpha.square()).sum(-1) + 4.0 * over_keys(W) * mean + 2.0 * total * mean**2
        moved = 2.0 * d_mu * linear + d_mu**2 * total + lost * mean**2
        wrong = (error * far.square()).sum(-1) + moved + gamma(2 * m + 16) * terms + m * TINY
        wrong = upward(wrong, 2 * m + 40)
        return upward(squares, m + 8) + wrong, wrong

    M, M_error = second(Wm, dW, loose)
    gauss_newton, gauss_newton_error = second(square, dW2, torch.zeros_like(loose))
    real = real_rows(tile)[0]
    values = (
        upward(norms_upper(tile.queries[0]), 4),
        token_radii(tile.A2[0], tile),
        _key_counts(tile, s, n, m),
        tile.weight[0],
        kappa,
        upward(Pm.amax(-1), 4),
        norms_upper(C),
        upward(norms_upper(dC), 4),
        t,
        upward(t_error, 2 * m + 40),
        M,
        M_error,
        gauss_newton,
        gauss_newton_error,
    )
    return MapMoments(*(t.expand(s, n)[real] for t in values))


def _kappa(at: Evaluation, X: Float[Tensor, "d1 d2"]) -> Float[Tensor, "s n"]:
    """See `softmax_error`: from the errors of q = scale A1 X, of q . a2_k and of the bias."""
    tile, (d1, d2), m = at.tile, X.shape, at.tile.A2.shape[2]
    A1, q = tile.queries[0], at.heads.q[0, :, 0]
    q_error = norms_upper(A1.abs() @ X.abs()) + SHARE * norms_upper(A1) * norm_upper(X)
    q_error = upward(gamma(d1 + 1) * q_error, 2 * d1 * d2 + 9) + (d1 + 1) * d2 * TINY
    q_size = norms_upper(q) + 2.0 * q_error
    largest = norms_upper(tile.A2[0]).amax(-1)[:, None]
    logit = q_size * largest
    if tile.bias is not None:
        logit = logit + tile.bias[0, :, 0].abs().amax(-1)
    error = (gamma(d2) * q_size + q_error) * largest + UNIT * logit + d2 * TINY
    return softmax_error(upward(error, d1 + 12), upward(2.0 * logit, 8), m)


def _distances(
    A2: Float[Tensor, "s m d2"], mu: Float[Tensor, "s n d2"], alpha: Float[Tensor, "s 1 m"]
) -> Float[Tensor, "s n m"]:
    """Upper bounds of ||a2_k - mu_j||, from inner products."""
    d2 = A2.shape[-1]
    size = norms_upper(mu)[..., None]
    square = A2.square().sum(-1)[:, None] - 2.0 * (mu @ A2.mT)
    square = square + mu.square().sum(-1, keepdim=True)
    error = gamma(d2 + 4) * (alpha + size) ** 2 + (d2 + 2) * TINY
    return upward((square.clamp(min=0.0) + error).sqrt(), d2 + 12)


def _key_counts(tile: Chunk, s: int, n: int, m: int) -> Float[Tensor, "s n"]:
    """Allowed keys of every row, as floats."""
    if tile.allowed is None:
        return tile.A1.new_full((s, n), m)
    return tile.allowed[0].sum(-1).to(tile.A1.dtype).clamp(min=1)
