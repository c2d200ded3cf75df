"""The data part of a layer's loss at a point in float64, with proved bounds on the errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from newtention.bounds.balls import enclosing_ball, norms_upper, row_largest, row_radii
from newtention.bounds.rounding import (
    UNIT,
    gamma,
    largest_eigenvalue_estimate,
    largest_eigenvalue_upper,
    norm_upper,
    spectral_norm_upper,
    squared,
    upward,
)
from newtention.certify.row_errors import RowMoments, data_errors, real_rows, tile_moments
from newtention.chunks import Chunk
from newtention.derivatives.hessian import second_order_parts
from newtention.layers import Bilinear, evaluate
from newtention.problem import AttentionProblem

FEW_UNKNOWNS = 128
"""Up to here eigenvalues are computed; beyond, the power method finds the largest to 1%."""


@dataclass(frozen=True, eq=False)
class RowQuantities:
    """Proved upper bounds for every real query row: chunk by chunk, sequence by sequence.

    rho: |scale| ||a_j|| times the radius of the row's allowed keys.
    rho3: radius of the row's allowed value tokens.
    m3: the largest norm of them.
    weight: query weight q_j, exact.
    residual: ||r_j||, r = F - B.
    residual_error: bound on the distance of the computed residual from r_j.
    query_norms: |scale| ||a_j||.
    weight_error: relative error of the row's attention weights, the largest over heads.
    """

    rho: Float[Tensor, " n"]
    rho3: Float[Tensor, " n"]
    m3: Float[Tensor, " n"]
    weight: Float[Tensor, " n"]
    residual: Float[Tensor, " n"]
    residual_error: Float[Tensor, " n"]
    query_norms: Float[Tensor, " n"]
    weight_error: Float[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class DataEvaluation:
    """The data part of a `PointEvaluation`; see there for the fields and their errors."""

    rows: RowQuantities
    Y_norms: Float[Tensor, " h"]
    loss: float
    loss_error: float
    gradient: Float[Tensor, " N"]
    gradient_error: float
    hessian: Float[Tensor, "N N"]
    hessian_error: float
    jacobian_norm: float


def evaluate_layer(
    data: AttentionProblem, layer: Bilinear, theta: Float[Tensor, "1 N"]
) -> DataEvaluation:
    """The data part of the bilinear form."""
    X, Y = layer.unpack(theta)
    moments, radii = _rows(data, layer, theta)
    keys = max(chunk.A2.shape[2] for chunk in data.chunks)
    errors = data_errors(moments, radii[:, 0], query_norm(data), keys, layer.p)

    loss, GX, GY, blocks, gauss_newton = second_order_parts(data, X, Y)
    jacobian_norm = root_of_largest(gauss_newton.to_dense()[0], errors.gauss_newton())
    del gauss_newton
    computed = blocks.to_dense()[0]
    hessian = 0.5 * (computed + computed.mT)
    del blocks, computed
    rounding = UNIT * norm_upper(hessian)
    return DataEvaluation(
        rows=RowQuantities(
            rho=defined(upward(moments.query * radii[:, 0], 2)),
            rho3=radii[:, 1],
            m3=radii[:, 2],
            weight=moments.weight,
            residual=defined(upward(moments.residual + errors.residual, 2)),
            residual_error=errors.residual,
            query_norms=moments.query,
            weight_error=defined(upward(torch.expm1(moments.kappa.amax(1)), 2)),
        ),
        Y_norms=theta.new_tensor([spectral_norm_upper(y) for y in Y[0]]),
        loss=float(loss[0]),
        loss_error=errors.loss,
        gradient=layer.pack(GX, GY)[0],
        gradient_error=errors.gradient,
        hessian=hessian,
        hessian_error=total(errors.gauss_newton(jacobian_norm), errors.curvature, rounding),
        jacobian_norm=jacobian_norm,
    )


def total(*parts: float) -> float:
    """Upper bound of the sum; infinite where it is not defined."""
    bound = upward(sum(parts), len(parts) + 2)
    return bound if bound == bound else math.inf


def defined(bound: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Infinity for what is not defined."""
    return torch.where(torch.isnan(bound), torch.inf, bound)


def _rows(
    data: AttentionProblem, layer: Bilinear, theta: Float[Tensor, "1 N"]
) -> tuple[RowMoments, Float[Tensor, "n 3"]]:
    """Moments of all real rows, and the radii of their keys and values and their largest value."""
    X, Y = (t[0] for t in layer.unpack(theta))
    moments, radii = [], []
    for chunk in data.chunks:
        m = chunk.A2.shape[2]
        for tile in chunk.tiles(layer.heads * (m + layer.d2 + layer.d3) + 2 * m):
            moments.append(tile_moments(evaluate(tile, layer, theta), X, Y))
            radii.append(_radii(tile)[real_rows(tile)[0]])
    return RowMoments(*(torch.cat(parts) for parts in zip(*moments, strict=True))), torch.cat(radii)


def _radii(tile: Chunk) -> Float[Tensor, "s n 3"]:
    """rho_2, rho_3 and m_3 of every row."""
    A2, A3 = tile.A2[0], tile.A3[0]
    keys = token_radii(A2, tile)
    values = keys if tile.A3 is tile.A2 else token_radii(A3, tile)
    sizes, own = norms_upper(A3), _own_keys(tile)
    if own is None:
        largest = sizes.masked_fill(~_shared_keys(tile), 0.0).amax(1)[:, None].expand_as(keys)
    else:
        largest = row_largest(sizes, own)
    return torch.stack((keys, values, largest), -1)


def token_radii(tokens: Float[Tensor, "s m d"], tile: Chunk) -> Float[Tensor, "s n"]:
    """Radius of every row's allowed tokens; one ball per sequence where all rows share them."""
    own = _own_keys(tile)
    if own is not None:
        return row_radii(tokens, own)
    radius = enclosing_ball(tokens, _shared_keys(tile))[1]
    return radius[:, None].expand(len(tokens), tile.A1.shape[2])


def _own_keys(tile: Chunk) -> Bool[Tensor, "s n m"] | None:
    """Each row's allowed keys, or None where those of a sequence share theirs."""
    if not tile.mask.causal and tile.mask.explicit is None:
        return None
    assert tile.allowed is not None
    return tile.allowed[0]


def _shared_keys(tile: Chunk) -> Bool[Tensor, "s m"]:
    """Which keys of a sequence are real."""
    s, m = tile.A2.shape[1:3]
    if tile.mask.key_lengths is None:
        return torch.ones(s, m, dtype=torch.bool, device=tile.A2.device)
    return torch.arange(m, device=tile.A2.device) < tile.mask.key_lengths[0][:, None]


def query_norm(data: AttentionProblem) -> float:
    """Upper bound of the spectral norm of all scaled queries, from their Gram matrix."""
    d1 = data.widths[0]
    gram, count, squares = data.like.new_zeros(d1, d1), 0, 0.0
    for chunk in data.chunks:
        A1 = chunk.queries.flatten(0, 2)
        gram += A1.mT @ A1
        count += len(A1)
        squares += squared(norm_upper(A1))
    # Scaling is off by u in each factor, the sum by gamma_count.
    error = upward(gamma(count + 6) * squares, count)
    return upward(max(largest_eigenvalue_upper(gram, error), 0.0) ** 0.5, 2)


def root_of_largest(gauss_newton: Float[Tensor, "N N"], error: float) -> float:
    """Upper bound of the norm of J, from J^T J and the error of that."""
    if len(gauss_newton) <= FEW_UNKNOWNS:
        largest = largest_eigenvalue_upper(gauss_newton, error)
    else:
        estimate = largest_eigenvalue_estimate(gauss_newton)
        largest = largest_eigenvalue_upper(gauss_newton, error, estimate, 0.01 * estimate)
    return upward(max(largest, 0.0) ** 0.5, 2)
