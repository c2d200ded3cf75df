"""The exact Hessian of a fit of attention maps, 1/2 sum_j q_j ||P_j - B_j||^2, in X.

Row j with p = P_j, c = P_j - B_j has the Jacobian diag(p) - p p^T in its logits, and with
T_j = q_j p o (c - <p, c>), W_j = q_j p o p + T_j and n_j = q_j <p, p> the Hessian there is

    diag(W_j) - W_j p^T - p W_j^T + n_j p p^T

The keys enter as M_j = A2^T (that) A2, so with mu = P A2 and E = W A2 - (n / 2) mu

    M_j = A2^T diag(W_j) A2 - E_j mu_j^T - mu_j E_j^T,    H = sum_j a1_j a1_j^T (x) M_j

Without T this is the Gauss-Newton matrix.  The first term of all rows is one product
W KR(A2, A2), which pays where many rows share their keys; few rows take a product of their own
each, and never form the m x d2^2 numbers of KR(A2, A2).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.attention import score_gradient
from newtention.chunks import TILE_ELEMENTS, Chunk, contract, reduce
from newtention.derivatives.gradient import tile_loss
from newtention.derivatives.hessian import UpperTriangles, flat_rows
from newtention.derivatives.linearised import forward_elements
from newtention.layers import AttentionMap, Evaluation, evaluate
from newtention.problem import AttentionProblem

FEW_ROWS = 8
"""Rows of a sequence up to which each takes its own product A2^T diag(W_j) A2.

Seconds on one core, own products against W KR(A2, A2), at 1, 8 and 16 rows: 0.034 against 0.80,
0.20 against 0.96 and 0.39 against 1.5 for m 100,000 and d2 50; 0.002 against 0.19, 0.026 against
0.22 and 0.051 against 0.26 for m 1000 and d2 200; for 200 sequences of m 50 and d2 16, at 1 and 8
rows, 0.0005 against 0.017 and 0.015 against 0.018.
"""


def map_second_order(
    problem: AttentionProblem,
    X: Float[Tensor, "b 1 d1 d2"],
    residual_share: Float[Tensor, " b"] | None = None,
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b N"], Float[Tensor, "b N N"]]:
    """Total loss, gradient and Hessian in vec X, in one pass over the data.

    residual_share multiplies T in W, which the Gauss-Newton matrix lacks: None or 1 is the full
    Hessian, 0 is Gauss-Newton, for each independent problem.
    """
    layer = AttentionMap(*X.shape[2:])
    theta = layer.pack(X)
    upper = UpperTriangles(layer.d1, layer.d2, X.device)

    def tile_sums(tile: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        at = evaluate(tile, layer, theta)
        loss, GX, T = _first_order(at)
        if residual_share is not None:
            T = T * tile.of(residual_share).view(-1, 1, 1, 1)
        return loss, GX, _packed(at, T, upper)

    elements = map_elements(problem)
    loss, GX, packed = reduce(problem.chunks, problem.batch, tile_sums, elements)
    H = _unpacked(packed, layer, upper)
    quadratic = problem.quadratic
    if quadratic.left.shape[1]:
        H += quadratic.curvature_x()
    Y = X[..., :0, :0]
    gradient = (GX + quadratic.gradient(X, Y)[0]).flatten(1)
    return loss + quadratic.value(X, Y), gradient, H


def map_second_order_parts(
    problem: AttentionProblem, X: Float[Tensor, "b 1 d1 d2"]
) -> tuple[
    Float[Tensor, " b"], Float[Tensor, "b N"], Float[Tensor, "b N N"], Float[Tensor, "b N N"]
]:
    """Loss, gradient, Hessian and Gauss-Newton matrix of the data, without the regulariser.

    The attention weights of both matrices are evaluated once.
    """
    layer = AttentionMap(*X.shape[2:])
    theta = layer.pack(X)
    upper = UpperTriangles(layer.d1, layer.d2, X.device)

    def tile_sums(tile: Chunk) -> tuple[Tensor, ...]:
        at = evaluate(tile, layer, theta)
        loss, GX, T = _first_order(at)
        return loss, GX, _packed(at, T, upper), _packed(at, None, upper)

    loss, GX, *packed = reduce(problem.chunks, problem.batch, tile_sums, map_elements(problem))
    H, gauss_newton = (_unpacked(matrix, layer, upper) for matrix in packed)
    return loss, GX.flatten(1), H, gauss_newton


def map_elements(problem: AttentionProblem) -> int:
    """Elements per query row of the widest intermediate of `map_second_order`."""
    d1, d2, _, _ = problem.widths
    layer = AttentionMap(d1, d2)
    own = max(c.A2.shape[2] * d2 if _few(c) else 0 for c in problem.chunks)
    return max(forward_elements(problem, layer), d1 * d1, d2 * d2, own)


def map_tile(problem: AttentionProblem, copies: int = 1) -> int:
    """Elements of the widest intermediate of `map_second_order`, for so many copies."""
    per_row = map_elements(problem)
    rows = copies * max(chunk.weight.numel() for chunk in problem.chunks)
    return max(per_row, min(TILE_ELEMENTS, rows * per_row))


def _few(chunk: Chunk) -> bool:
    return chunk.weight.shape[2] <= FEW_ROWS


def _first_order(at: Evaluation) -> tuple[Tensor, Tensor, Float[Tensor, "o s n m"]]:
    """Loss and gradient of a tile, by owner, and T."""
    T = score_gradient(at.P, None, at.O, at.qC[:, :, None])[:, :, 0]
    GX = contract(at.tile.queries[:, :, None], (T @ at.tile.A2)[:, :, None])
    return tile_loss(at), GX, T


def _packed(
    at: Evaluation, T: Float[Tensor, "o s n m"] | None, upper: UpperTriangles
) -> Float[Tensor, "o t1 t2"]:
    """The packed Hessian of a tile, by owner; without T, the Gauss-Newton matrix."""
    A1, A2, P = at.tile.queries, at.tile.A2, at.P[:, :, 0]
    weight = at.tile.weight[..., None]
    W = P * weight * P if T is None else torch.addcmul(T, P * weight, P)
    mu = P @ A2
    n = weight * P.square().sum(-1, keepdim=True)
    E = torch.addcmul(W @ A2, n, mu, value=-0.5)
    M = weighted_moments(W, A2, upper)
    M -= E[..., upper.b] * mu[..., upper.b2] + mu[..., upper.b] * E[..., upper.b2]
    A1A1 = A1[..., upper.a] * A1[..., upper.a2]
    return flat_rows(A1A1).mT @ flat_rows(M)


def weighted_moments(
    W: Float[Tensor, "o s n m"], A2: Float[Tensor, "o s m d2"], upper: UpperTriangles
) -> Float[Tensor, "o s n t"]:
    """A2^T diag(W_j) A2 of every row, upper triangles; keys are taken in blocks of bounded size."""
    o, s, n, m = W.shape
    few = n <= FEW_ROWS
    per_key = o * s * (n * A2.shape[-1] if few else len(upper.b))
    step = max(1, TILE_ELEMENTS // per_key)
    total = None
    for start in range(0, m, step):
        w, keys = W[..., start : start + step], A2[:, :, start : start + step]
        if few:
            part = keys.mT[:, :, None] @ (w[..., None] * keys[:, :, None])
        else:
            part = w @ (keys[..., upper.b] * keys[..., upper.b2])
        total = part if total is None else total.add_(part)
    assert total is not None
    return total[..., upper.b, upper.b2] if few else total


def _unpacked(
    packed: Float[Tensor, "b t1 t2"], layer: AttentionMap, upper: UpperTriangles
) -> Float[Tensor, "b N N"]:
    b, d1, d2 = packed.shape[0], layer.d1, layer.d2
    rows = packed.index_select(1, upper.unpack1).index_select(2, upper.unpack2)
    return rows.view(b, d1, d1, d2, d2).transpose(2, 3).reshape(b, layer.size, layer.size)
