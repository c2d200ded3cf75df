"""The data part of a loss at a point in float64: what layers and attention maps have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from newtention.bounds.balls import enclosing_ball, row_radii
from newtention.bounds.rounding import (
    gamma,
    largest_eigenvalue_estimate,
    largest_eigenvalue_upper,
    norm_upper,
    squared,
    upward,
)
from newtention.chunks import Chunk
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


def total(*parts: float) -> float:
    """Upper bound of the sum; infinite where it is not defined."""
    bound = upward(sum(parts), len(parts) + 2)
    return bound if bound == bound else math.inf


def defined(bound: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Infinity for what is not defined."""
    return torch.where(torch.isnan(bound), torch.inf, bound)


def token_radii(tokens: Float[Tensor, "s m d"], tile: Chunk) -> Float[Tensor, "s n"]:
    """Radius of every row's allowed tokens; one ball per sequence where all rows share them."""
    own = own_keys(tile)
    if own is not None:
        return row_radii(tokens, own)
    radius = enclosing_ball(tokens, shared_keys(tile))[1]
    return radius[:, None].expand(len(tokens), tile.A1.shape[2])


def own_keys(tile: Chunk) -> Bool[Tensor, "s n m"] | None:
    """Each row's allowed keys, or None where those of a sequence share theirs."""
    if not tile.mask.causal and tile.mask.explicit is None:
        return None
    assert tile.allowed is not None
    return tile.allowed[0]


def shared_keys(tile: Chunk) -> Bool[Tensor, "s m"]:
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
