"""A problem evaluated at a point in float64, every number with a proved bound on its error.

The exact problem is the one whose data are the given floating-point numbers (float32 data are
float64 numbers) and whose regulariser is the stated one; the exact point is (X, Y) as given.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.balls import enclosing_ball, norms_upper, row_largest, row_radii
from newtention.bounds.rounding import (
    TINY,
    UNIT,
    gamma,
    largest_eigenvalue_estimate,
    largest_eigenvalue_upper,
    norm_upper,
    spectral_norm_upper,
    squared,
    upward,
)
from newtention.certify.penalty_errors import evaluate_penalty, exact_penalty
from newtention.certify.precise import (
    EXACT_DIGITS,
    EXACT_SHARE,
    accurate_gradient,
    as_floats,
    exact_derivatives,
    small_enough,
)
from newtention.certify.row_errors import RowMoments, data_errors, real_rows, tile_moments
from newtention.chunks import Chunk
from newtention.derivatives.hessian import second_order_parts
from newtention.layers import Bilinear, evaluate
from newtention.problem import AttentionProblem
from newtention.regularizers import zero_quadratic

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
class PointEvaluation:
    """Everything the certificates need of one point, in float64.

    Names ending in _error are proved bounds on |computed - exact|: absolute values for numbers, the
    Euclidean norm for the gradient, the spectral norm for matrices.  Infinity means that nothing is
    proved.  loss, gradient and hessian are of the total loss; data_hessian + penalty_hessian is
    hessian up to rounding.
    """

    layer: Bilinear
    theta: Float[Tensor, " N"]
    rows: RowQuantities
    Y_norms: Float[Tensor, " h"]
    """Upper bounds of the spectral norms of Y_h."""
    loss: float
    loss_error: float
    data_loss: float
    data_loss_error: float
    gradient: Float[Tensor, " N"]
    gradient_error: float
    hessian: Float[Tensor, "N N"]
    hessian_error: float
    data_hessian: Float[Tensor, "N N"]
    data_hessian_error: float
    penalty_hessian: Float[Tensor, "N N"]
    penalty_hessian_error: float
    jacobian_norm: float
    """Upper bound of sigma_max(J), J the Jacobian of the residuals sqrt(q_j) r_j."""
    precise: bool = False
    """Whether the gradient was evaluated beyond float64."""


def evaluate_point(
    problem: AttentionProblem,
    layer: Bilinear,
    theta: Float[Tensor, "1 N"],
    precise: bool = False,
) -> PointEvaluation:
    """Evaluate one problem at theta = layer.pack(X, Y).

    precise: evaluate the gradient beyond float64, and for small problems loss and Hessian as well
        (see `newtention.certify.precise`), so that little more than their rounding is left.

    Raises:
        ValueError: a stack of problems, or Proximity around a factored layer.
    """
    if problem.batch != 1:
        raise ValueError(f"A certificate is of one problem; found a stack of {problem.batch}.")
    theta = theta.double()
    X, Y = layer.unpack(theta)
    data = data_in_double(problem)
    penalty = evaluate_penalty(exact_penalty(problem, data), layer, X, Y)
    moments, radii = _rows(data, layer, theta)
    keys = max(chunk.A2.shape[2] for chunk in data.chunks)
    errors = data_errors(moments, radii[:, 0], _query_norm(data), keys, layer.p)

    data_loss, GX, GY, blocks, gauss_newton = second_order_parts(data, X, Y)
    jacobian_norm = _jacobian_norm(gauss_newton.to_dense()[0], errors.gauss_newton())
    del gauss_newton
    computed = blocks.to_dense()[0]
    data_hessian = 0.5 * (computed + computed.mT)
    del blocks, computed
    gradient = layer.pack(GX, GY)[0] + penalty.gradient
    hessian = data_hessian + penalty.hessian
    loss = float(data_loss[0]) + penalty.value

    rounding = UNIT * norm_upper(data_hessian)
    hessian_error = _total(errors.gauss_newton(jacobian_norm), errors.curvature, rounding)
    point = PointEvaluation(
        layer=layer,
        theta=theta[0],
        rows=RowQuantities(
            rho=_defined(upward(moments.query * radii[:, 0], 2)),
            rho3=radii[:, 1],
            m3=radii[:, 2],
            weight=moments.weight,
            residual=_defined(upward(moments.residual + errors.residual, 2)),
            residual_error=errors.residual,
            query_norms=moments.query,
            weight_error=_defined(upward(torch.expm1(moments.kappa.amax(1)), 2)),
        ),
        Y_norms=theta.new_tensor([spectral_norm_upper(y) for y in Y[0]]),
        loss=loss,
        loss_error=_total(errors.loss, penalty.value_error, UNIT * abs(loss)),
        data_loss=float(data_loss[0]),
        data_loss_error=errors.loss,
        gradient=gradient,
        gradient_error=_total(errors.gradient, penalty.gradient_error, UNIT * norm_upper(gradient)),
        hessian=hessian,
        hessian_error=_total(hessian_error, penalty.hessian_error, UNIT * norm_upper(hessian)),
        data_hessian=data_hessian,
        data_hessian_error=hessian_error,
        penalty_hessian=penalty.hessian,
        penalty_hessian_error=penalty.hessian_error,
        jacobian_norm=jacobian_norm,
    )
    return _without_nan(sharpened(point, problem) if precise else point)


def _total(*parts: float) -> float:
    bound = upward(sum(parts), len(parts) + 2)
    return bound if bound == bound else math.inf


def _defined(bound: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    return torch.where(torch.isnan(bound), torch.inf, bound)


def _without_nan(point: PointEvaluation) -> PointEvaluation:
    """Values beyond float64's range become 0, their errors infinite."""
    fields: dict[str, Any] = {}
    for name in ("loss", "data_loss", "gradient", "hessian", "data_hessian", "penalty_hessian"):
        value = getattr(point, name)
        if not bool(torch.isfinite(torch.as_tensor(value)).all()):
            zero = torch.zeros_like(value) if isinstance(value, Tensor) else 0.0
            fields.update({name: zero, f"{name}_error": math.inf})
    return replace(point, **fields)


def sharpened(point: PointEvaluation, problem: AttentionProblem) -> PointEvaluation:
    """The same with what can be had beyond float64; where its range is exceeded, nothing.

    The gradient, and for small problems loss and Hessian as well.
    """
    if point.precise:
        return point
    point = replace(point, precise=True)
    layer, theta = point.layer, point.theta[None]
    if small_enough(problem, layer):
        values = as_floats(exact_derivatives(problem, layer, theta, EXACT_DIGITS))
        if all(bool(torch.isfinite(t).all()) for t in values):
            names = ("loss", "data_loss", "gradient", "hessian", "data_hessian")
            fields: dict[str, Any] = {}
            for name, t in zip(names, values, strict=True):
                before = EXACT_SHARE * getattr(point, f"{name}_error")
                error = _total(before, UNIT * norm_upper(t), t.numel() * TINY)
                value = t.to(theta.device) if t.ndim else float(t)
                fields.update({name: value, f"{name}_error": error})
            return replace(point, **fields)
    head, tail, share = accurate_gradient(problem, layer, theta)
    if not bool(torch.isfinite(head).all()):
        return point
    error = _total(share * point.gradient_error, norm_upper(tail))
    return replace(point, gradient=head, gradient_error=error)


def data_in_double(problem: AttentionProblem) -> AttentionProblem:
    """The same data in float64, without the regulariser."""
    d1, d2, d3, _ = problem.widths
    chunks = tuple(_double(chunk) for chunk in problem.chunks)
    data = copy(problem)
    data._set(
        chunks=chunks,
        regularizer=None,
        quadratic=zero_quadratic(1, d1, d2, d3, chunks[0].A1),
        parts=(),
    )
    return data


def _double(chunk: Chunk) -> Chunk:
    if chunk.A1.dtype == torch.float64:
        return chunk
    A2 = chunk.A2.double()
    return replace(
        chunk,
        A2=A2,
        A1=A2 if chunk.A1 is chunk.A2 else chunk.A1.double(),
        A3=A2 if chunk.A3 is chunk.A2 else chunk.A3.double(),
        B=chunk.B.double(),
        weight=chunk.weight.double(),
        bias=None if chunk.bias is None else chunk.bias.double(),
        key_weight=None if chunk.key_weight is None else chunk.key_weight.double(),
    )


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
    """rho_2, rho_3 and m_3 of every row; one ball per sequence where all rows share their keys."""
    A2, A3 = tile.A2[0], tile.A3[0]
    s, n, m = A2.shape[0], tile.A1.shape[2], A2.shape[1]
    mask, sizes = tile.mask, norms_upper(A3)
    if not mask.causal and mask.explicit is None:
        real = torch.ones(s, m, dtype=torch.bool, device=A2.device)
        if mask.key_lengths is not None:
            real = torch.arange(m, device=A2.device) < mask.key_lengths[0][:, None]
        keys = enclosing_ball(A2, real)[1]
        values = keys if tile.A3 is tile.A2 else enclosing_ball(A3, real)[1]
        largest = sizes.masked_fill(~real, 0.0).amax(1)
        return torch.stack((keys, values, largest), -1)[:, None].expand(s, n, 3)
    allowed = tile.allowed
    assert allowed is not None
    keys = row_radii(A2, allowed[0])
    values = keys if tile.A3 is tile.A2 else row_radii(A3, allowed[0])
    return torch.stack((keys, values, row_largest(sizes, allowed[0])), -1)


def _query_norm(data: AttentionProblem) -> float:
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


def _jacobian_norm(gauss_newton: Float[Tensor, "N N"], error: float) -> float:
    if len(gauss_newton) <= FEW_UNKNOWNS:
        largest = largest_eigenvalue_upper(gauss_newton, error)
    else:
        estimate = largest_eigenvalue_estimate(gauss_newton)
        largest = largest_eigenvalue_upper(gauss_newton, error, estimate, 0.01 * estimate)
    return upward(max(largest, 0.0) ** 0.5, 2)
