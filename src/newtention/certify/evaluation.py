"""A problem evaluated at a point in float64, every number with a proved bound on its error.

The exact problem is the one whose data are the given floating-point numbers (float32 data are
float64 numbers) and whose regulariser is the stated one; the exact point is (X, Y) as given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.rounding import TINY, UNIT, norm_upper
from newtention.certify.data_evaluation import RowQuantities, total
from newtention.certify.layer_evaluation import evaluate_layer
from newtention.certify.map_evaluation import evaluate_map
from newtention.certify.penalty_errors import bilinear_form, evaluate_penalty, exact_penalty
from newtention.certify.precise import (
    EXACT_DIGITS,
    EXACT_SHARE,
    accurate_gradient,
    as_floats,
    exact_derivatives,
    small_enough,
)
from newtention.chunks import Chunk
from newtention.layers import AttentionMap, Bilinear
from newtention.problem import AttentionProblem
from newtention.regularizers import zero_quadratic


@dataclass(frozen=True, eq=False)
class PointEvaluation:
    """Everything the certificates need of one point, in float64.

    Names ending in _error are proved bounds on |computed - exact|: absolute values for numbers, the
    Euclidean norm for the gradient, the spectral norm for matrices.  Infinity means that nothing is
    proved.  loss, gradient and hessian are of the total loss; data_hessian + penalty_hessian is
    hessian up to rounding.
    """

    layer: Bilinear | AttentionMap
    theta: Float[Tensor, " N"]
    rows: RowQuantities
    Y_norms: Float[Tensor, " h"]
    """Upper bounds of the spectral norms of Y_h; of a map, whose A3 Y is the identity, 1."""
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
    layer: Bilinear | AttentionMap,
    theta: Float[Tensor, "1 N"],
    precise: bool = False,
) -> PointEvaluation:
    """Evaluate one problem at theta, the flat vector of the weights.

    precise: evaluate the gradient beyond float64, and for small problems loss and Hessian as well
        (see `newtention.certify.precise`), so that little more than their rounding is left.

    Raises:
        ValueError: a stack of problems, or Proximity around a factored layer.
    """
    if problem.batch != 1:
        raise ValueError(f"A certificate is of one problem; found a stack of {problem.batch}.")
    theta = theta.double()
    data = data_in_double(problem)
    penalty = evaluate_penalty(exact_penalty(problem, data), bilinear_form(layer), theta)
    if isinstance(layer, AttentionMap):
        part = evaluate_map(data, layer, theta)
    else:
        part = evaluate_layer(data, layer, theta)
    gradient = part.gradient + penalty.gradient
    hessian = part.hessian + penalty.hessian
    loss = part.loss + penalty.value
    point = PointEvaluation(
        layer=layer,
        theta=theta[0],
        rows=part.rows,
        Y_norms=part.Y_norms,
        loss=loss,
        loss_error=total(part.loss_error, penalty.value_error, UNIT * abs(loss)),
        data_loss=part.loss,
        data_loss_error=part.loss_error,
        gradient=gradient,
        gradient_error=total(
            part.gradient_error, penalty.gradient_error, UNIT * norm_upper(gradient)
        ),
        hessian=hessian,
        hessian_error=total(part.hessian_error, penalty.hessian_error, UNIT * norm_upper(hessian)),
        data_hessian=part.hessian,
        data_hessian_error=part.hessian_error,
        penalty_hessian=penalty.hessian,
        penalty_hessian_error=penalty.hessian_error,
        jacobian_norm=part.jacobian_norm,
    )
    return _without_nan(sharpened(point, problem) if precise else point)


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
                error = total(before, UNIT * norm_upper(t), t.numel() * TINY)
                value = t.to(theta.device) if t.ndim else float(t)
                fields.update({name: value, f"{name}_error": error})
            return replace(point, **fields)
    head, tail, share = accurate_gradient(problem, layer, theta)
    if not bool(torch.isfinite(head).all()):
        return point
    error = total(share * point.gradient_error, norm_upper(tail))
    return replace(point, gradient=head, gradient_error=error)


def data_in_double(problem: AttentionProblem) -> AttentionProblem:
    """The same data in float64, without the regulariser."""
    d1, d2, d3, _ = problem.widths
    chunks = tuple(_double(chunk) for chunk in problem.chunks)
    quadratic = zero_quadratic(1, d1, d2, d3, chunks[0].A1)
    return problem._changed(chunks=chunks, regularizer=None, quadratic=quadratic, parts=())


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
