"""The global minimum, where the regulariser is strong enough; and the paper's own thresholds."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.convexity import (
    certifying_ridge,
    convexity,
    distance_from_best_response,
    distance_in_ball,
    global_sizes,
)
from newtention.bounds.maps import map_concavity
from newtention.bounds.paper import Assumptions, assumptions, hessian_bounds, lemma_9_1
from newtention.bounds.rounding import (
    downward,
    gamma,
    largest_eigenvalue_upper,
    norm_upper,
    smallest_eigenvalue_lower,
    spectral_norm_upper,
    upward,
)
from newtention.certify.evaluation import PointEvaluation
from newtention.certify.penalty_errors import exact_penalty
from newtention.certify.row_errors import real_queries, real_rows
from newtention.chunks import Chunk
from newtention.layers import AttentionMap, Bilinear
from newtention.problem import AttentionProblem

LARGEST_R = 1e100
"""Beyond it even the logarithms of the paper's constants are of no use."""


class GlobalProof(NamedTuple):
    """Whether one stationary point is left, how near it is, and the ridge that would leave one."""

    proved: bool
    distance: float
    certifying_ridge: float


class PaperConstants(NamedTuple):
    """Decimal logarithms, or None where the paper's setting (one head, no bias) is left."""

    lipschitz: float | None
    threshold: float | None


def prove_global(
    problem: AttentionProblem, data: AttentionProblem, point: PointEvaluation
) -> GlobalProof:
    """The condition of `newtention.bounds.convexity`, or of `bounds.maps`, for this regulariser."""
    if isinstance(point.layer, AttentionMap):
        return _prove_map(data, point)
    layer, r = point.layer, point.rows
    rows = _radius_rows(data, point)
    B = torch.cat([chunk.B[0][real_rows(chunk)[0]] for chunk in data.chunks])
    sizes = global_sizes(rows, r.rho3, r.m3, r.weight, B, layer.heads)
    ridge = min(certifying_ridge(sizes, where=where) for where in ("ball", "best response"))
    lambda_x, lambda_y = _curvatures(point)
    if not (lambda_x > 0 and lambda_y > 0):
        return GlobalProof(False, math.inf, ridge)
    centre = _centre(problem, data)
    g, error = point.gradient, point.gradient_error
    nx = layer.size_x
    gx, gy, whole = (upward(norm_upper(t) + error, 2) for t in (g[:nx], g[nx:], g))
    Y = layer.unpack(point.theta[None])[1][0]
    size = spectral_norm_upper(Y.flatten(0, 1))
    ball = convexity(sizes, lambda_x, lambda_y, centre, "ball", size)
    best = convexity(sizes, lambda_x, lambda_y, centre, "best response")
    dX, dY = distance_from_best_response(sizes, best, gx, gy, size)
    distances = [distance_in_ball(ball, whole), math.hypot(dX, dY)]
    proved = ball.mu > 0 or best.schur > 0
    return GlobalProof(proved, upward(min(distances), 64) if proved else math.inf, ridge)


def _prove_map(data: AttentionProblem, point: PointEvaluation) -> GlobalProof:
    """The condition of `map_concavity`; every X counts, as there is no Y."""
    rows = _radius_rows(data, point)
    ridge = upward(map_concavity(rows, point.rows.weight, _spans(data)), 64)
    H, error = point.penalty_hessian, point.penalty_hessian_error
    curvature = smallest_eigenvalue_lower(H, error) if bool(H.any()) else 0.0
    least = downward(curvature - ridge, 4)
    if not least > 0:
        return GlobalProof(False, math.inf, math.nextafter(ridge, math.inf))
    size = upward(norm_upper(point.gradient) + point.gradient_error, 2)
    return GlobalProof(True, upward(size / least, 4), math.nextafter(ridge, math.inf))


def _spans(data: AttentionProblem) -> Float[Tensor, " n"]:
    """max b - min b over every real row's allowed keys."""
    spans = []
    for chunk in data.chunks:
        B, allowed = chunk.B[0], chunk.allowed
        high, low = B, B
        if allowed is not None:
            high, low = (B.masked_fill(~allowed[0], t) for t in (-torch.inf, torch.inf))
        spans.append((high.amax(-1) - low.amin(-1))[real_rows(chunk)[0]])
    return upward(torch.cat(spans), 2)


def _radius_rows(data: AttentionProblem, point: PointEvaluation) -> Float[Tensor, "n d1"]:
    """r_j: the direction of a row's query at the length |scale| rho_2 ||a_j||."""
    r = point.rows
    return real_queries(data) * (upward(r.rho, 8) / r.query_norms.clamp(min=1e-300))[:, None]


def _curvatures(point: PointEvaluation) -> tuple[float, float]:
    """Lower bounds of the regulariser's smallest eigenvalues on X and Y, the same for all heads."""
    layer, R, error = point.layer, point.penalty_hessian, point.penalty_hessian_error
    assert isinstance(layer, Bilinear)
    if not bool(R.any()):
        return 0.0, 0.0
    nx, one = layer.size_x, layer.d1 * layer.d2
    column = slice(nx, nx + layer.d3 * layer.p, layer.p)
    return (
        smallest_eigenvalue_lower(R[:one, :one].contiguous(), error),
        smallest_eigenvalue_lower(R[column, column].contiguous(), error),
    )


def _centre(problem: AttentionProblem, data: AttentionProblem) -> float:
    """Upper bound of ||G^(1/2) Y0||_2, Y0 of all heads stacked."""
    bounded = exact_penalty(problem, data)
    Y0 = bounded.quadratic.centre_y
    if Y0 is None or not bool(Y0.any()):
        return 0.0
    G, Y0 = bounded.quadratic.gram[0], Y0[0]
    square = (Y0.mT @ (G @ Y0)).sum(0)
    count = 2 * Y0.shape[0] * Y0.shape[1] + 8
    size = norm_upper(Y0) ** 2
    error = upward((gamma(count) * norm_upper(G) + bounded.gram_error) * size, 8)
    return upward(math.sqrt(max(0.0, largest_eigenvalue_upper(square, error))), 4)


def paper_constants(data: AttentionProblem, point: PointEvaluation, delta: float) -> PaperConstants:
    """The Lipschitz constant composed as in the paper on the ball, and Lemma 9.1's 30 R^8."""
    given = _assumptions(data, point, delta)
    if given is None:
        return PaperConstants(None, None)
    if not given.R < LARGEST_R:
        return PaperConstants(math.inf, math.inf)
    return PaperConstants(hessian_bounds(given).whole.lipschitz.log10, lemma_9_1(given.R).log10)


def _assumptions(
    data: AttentionProblem, point: PointEvaluation, delta: float
) -> Assumptions | None:
    layer = point.layer
    if isinstance(layer, AttentionMap):
        return None
    if layer.heads > 1 or any(chunk.bias is not None for chunk in data.chunks):
        return None
    sizes = [_sequence_norms(chunk) for chunk in data.chunks]
    block, A3, b = (max(part) for part in zip(*sizes, strict=True))
    keys = [count for chunk in data.chunks for count in _key_counts(chunk)]
    X, Y = layer.unpack(point.theta[None])
    n = float(point.rows.weight.sum())
    return assumptions(
        block,
        A3,
        norm_upper(X) + delta,
        norm_upper(Y) + delta,
        b,
        n,
        max(keys),
        layer.p,
        fewest=max(1, min(keys)),
    )


def _sequence_norms(chunk: Chunk) -> tuple[float, float, float]:
    """max |scale| ||a_j|| ||A2||_2, ||A3||_2 and |b| over the chunk's sequences."""
    A2, A3 = (torch.linalg.matrix_norm(t[0], 2) * (1 + 1e-12) for t in (chunk.A2, chunk.A3))
    longest = chunk.queries[0].norm(dim=-1).amax(-1)
    return float((longest * A2).max()), float(A3.max()), float(chunk.B.abs().max())


def _key_counts(chunk: Chunk) -> tuple[int, int]:
    """The fewest and the most allowed keys of a real row."""
    real, m = real_rows(chunk)[0], chunk.A2.shape[2]
    allowed = chunk.allowed
    if allowed is None:
        return m, m
    counts = allowed[0].sum(-1).expand(real.shape)[real]
    return int(counts.min()), int(counts.max())
