"""The regulariser at a point in float64, with proved bounds on the errors.

Ridge is exact as a quadratic; the matrices of TokenWeights and Proximity are sums over tokens and
carry the rounding of those sums.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.rounding import TINY, UNIT, gamma, norm_upper, squared, upward
from newtention.layers import AttentionMap, Bilinear
from newtention.problem import AttentionProblem
from newtention.regularizers import (
    Proximity,
    Quadratic,
    Ridge,
    TokenWeights,
    token_moments,
)


class BoundedQuadratic(NamedTuple):
    """A quadratic (b = 1) and bounds on the Frobenius norms of its matrices' errors."""

    quadratic: Quadratic
    left_error: Float[Tensor, " t"]
    right_error: Float[Tensor, " t"]
    gram_error: float


class PenaltyEvaluation(NamedTuple):
    """Value, gradient (N,) and Hessian (N, N), and bounds on their errors in the usual norms."""

    value: float
    value_error: float
    gradient: Float[Tensor, " N"]
    gradient_error: float
    hessian: Float[Tensor, "N N"]
    hessian_error: float


def exact_penalty(problem: AttentionProblem, data: AttentionProblem) -> BoundedQuadratic:
    """The stated regulariser on the data in float64.

    A computed Gram matrix of N tokens is off by at most gamma_N of the entrywise absolute one,
    whose Frobenius norm is at most its trace, the sum of squared norms.

    Raises:
        ValueError: Proximity around a factored layer.
    """
    regularizer, chunks = problem.regularizer, data.chunks
    keys = sum(chunk.A2.shape[1] * chunk.A2.shape[2] for chunk in chunks)
    queries = sum(chunk.A1.shape[1] * chunk.A1.shape[2] for chunk in chunks)
    if isinstance(regularizer, Ridge):
        q = regularizer.quadratic(chunks)
    elif isinstance(regularizer, TokenWeights):
        q = regularizer.quadratic(chunks)
        return _bounded(q, queries + 2, keys + 4, keys + 4)
    elif isinstance(regularizer, Proximity):
        if regularizer.around_layer:
            raise ValueError("Proximity around a factored layer goes with factored layers only.")
        S1, S2, S3, n, m = token_moments(chunks)
        s, given = regularizer.strength, problem.quadratic
        assert given.centre_x is not None
        assert given.centre_y is not None
        x, y = given.centre_x.double(), given.centre_y.double()
        q = Quadratic(s * S1[:, None], S2[:, None] / m, s * n * S3 / m, x, y)
        return _bounded(q, queries + 2, keys + 2, keys + 6)
    else:
        given = problem.quadratic
        centres = (None if t is None else t.double() for t in (given.centre_x, given.centre_y))
        q = Quadratic(given.left.double(), given.right.double(), given.gram.double(), *centres)
    none = q.left.new_zeros(q.left.shape[1])
    return BoundedQuadratic(q, none, none, 0.0)


def _bounded(q: Quadratic, left: int, right: int, gram: int) -> BoundedQuadratic:
    def error(t: Float[Tensor, "*t k k"], count: int) -> Float[Tensor, "*t"]:
        trace = t.diagonal(dim1=-2, dim2=-1).sum(-1)
        return upward(gamma(2 * count) * trace, 2 * count + 40) + t.shape[-1] * count * TINY

    gram_error = float(error(q.gram, gram)[0])
    return BoundedQuadratic(q, error(q.left, left)[0], error(q.right, right)[0], gram_error)


def bilinear_form(layer: Bilinear | AttentionMap) -> Bilinear:
    """The layer itself; of a map the layer with a Y of width 0, whose flat vector is the map's."""
    return Bilinear(1, layer.d1, layer.d2, 0, 0) if isinstance(layer, AttentionMap) else layer


def evaluate_penalty(
    bounded: BoundedQuadratic, layer: Bilinear, theta: Float[Tensor, "1 N"]
) -> PenaltyEvaluation:
    """Value, gradient and Hessian of R = 1/2 sum <dX, L dX R> + 1/2 <dY, G dY>."""
    X, Y = layer.unpack(theta)
    q = bounded.quadratic
    dX = (X if q.centre_x is None else X - q.centre_x)[0]
    dY = (Y if q.centre_y is None else Y - q.centre_y)[0]
    L, R, G = q.left[0], q.right[0], q.gram[0]
    t, h, d1, d2, d3 = len(L), *dX.shape[:3], dY.shape[1]
    GX = (L @ dX[:, None] @ R).sum(1) if t else torch.zeros_like(dX)
    GY = G @ dY
    gradient = layer.pack(GX[None], GY[None])[0]
    value = 0.5 * (float((dX * GX).sum()) + float((dY * GY).sum()))

    k, n, nx = d1 * d2, layer.size, layer.size_x
    hessian = dX.new_zeros(n, n)
    curvature = q.curvature_x()[0]
    Gp = kron(G, torch.eye(layer.p, dtype=G.dtype, device=G.device))
    for i in range(h):
        hessian[i * k : (i + 1) * k, i * k : (i + 1) * k] = curvature
        at = nx + i * len(Gp)
        hessian[at : at + len(Gp), at : at + len(Gp)] = Gp
    symmetric = 0.5 * (hessian + hessian.mT)

    # Norms of the matrices and of their errors; spectral norms are at most Frobenius norms.
    sizes_L = torch.tensor([norm_upper(x) for x in L], dtype=torch.float64)
    sizes_R = torch.tensor([norm_upper(x) for x in R], dtype=torch.float64)
    eL, eR = bounded.left_error.cpu(), bounded.right_error.cpu()
    size_x, size_y = norm_upper(dX), norm_upper(dY)
    size_G = norm_upper(G) + bounded.gram_error
    size_kron = float(((sizes_L + eL) * (sizes_R + eR)).sum())
    kron_error = float((eL * (sizes_R + eR) + sizes_L * eR).sum())
    depth = d1 + d2 + t + 8
    ex = (kron_error + gamma(depth) * size_kron) * size_x
    ey = (bounded.gram_error + gamma(d3 + 4) * size_G) * size_y
    gradient_error = (squared(ex) + squared(ey)) ** 0.5
    energy = squared(size_x) * size_kron + squared(size_y) * size_G
    value_error = size_x * ex + size_y * ey + gamma(n + 8) * energy
    hessian_error = max(kron_error + gamma(t + 4) * size_kron, bounded.gram_error + UNIT * size_G)
    count = 8 * (depth + d3 + n) + 200

    def bound(x: float) -> float:
        if x == 0.0:
            return 0.0
        return upward(x, count) + n * n * TINY if x == x else math.inf

    return PenaltyEvaluation(
        value,
        bound(value_error),
        gradient,
        bound(gradient_error),
        symmetric,
        bound(hessian_error),
    )


def kron(left: Float[Tensor, "a i"], right: Float[Tensor, "b j"]) -> Float[Tensor, "ab ij"]:
    """torch.kron, which fails for some matrices without columns."""
    product = left[:, None, :, None] * right[None, :, None, :]
    return product.reshape(len(left) * len(right), left.shape[1] * right.shape[1])
