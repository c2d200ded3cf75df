"""Exact Hessian blocks in two matrix products each.

For query row j let mu = P A2, w = P A3, F = P V, and let Cov be the covariance under P_j:

    Rho_j = Cov(a2, v)   = A2^T diag(P_j) V  - mu_j F_j^T          from P KR(A2, V)
    Q_j   = Cov(a2, a3)  = A2^T diag(P_j) A3 - mu_j w_j^T          from P KR(A2, A3)
    M_j   = Rho_j Rho_j^T + A2^T diag(T_j) A2 - mu_j t_j^T - t_j mu_j^T,   t = T A2

    H_xx = sum_j a1_j a1_j^T (x) M_j                               KR(A1, A1)^T M
    H_xy = sum_j a1_j (x) (Rho_j (x) w_j + Q_j (x) C_j)            KR(A1, w)^T Rho, KR(A1, C)^T Q
    H_yy = sum_j w_j w_j^T (x) I_p

KR is the row-wise Kronecker product.  Without T and Q this is the Gauss-Newton matrix; between two
different heads it is exactly that.  Terms symmetric in a pair of indices are formed for the upper
triangle only, which halves both sides of the dominant product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.attention import score_gradient
from newtention.chunks import TILE_ELEMENTS, Chunk, contract, reduce
from newtention.derivatives.gradient import tile_loss
from newtention.derivatives.linearised import forward_elements
from newtention.layers import Bilinear, Evaluation, evaluate
from newtention.problem import AttentionProblem


@dataclass(frozen=True, eq=False)
class HessianBlocks:
    """The Hessian at one point; Nx = h d1 d2, the Y block is gram (x) I_p."""

    xx: Float[Tensor, "b Nx Nx"]
    xy: Float[Tensor, "b Nx Ny"]
    gram: Float[Tensor, "b hd3 hd3"]
    layer: Bilinear

    @property
    def yy(self) -> Float[Tensor, "b Ny Ny"]:
        """The Y block as a dense matrix."""
        b, k, _ = self.gram.shape
        p = self.layer.p
        out = self.gram.new_zeros(b, k, p, k, p)
        out.diagonal(dim1=2, dim2=4).copy_(self.gram[..., None].expand(b, k, k, p))
        return out.view(b, k * p, k * p)

    def to_dense(self) -> Float[Tensor, "b N N"]:
        """The whole matrix in the order of the flat vector: X head by head, then Y."""
        nx, n = self.layer.size_x, self.layer.size
        b, k, _ = self.gram.shape
        p = self.layer.p
        H = self.xx.new_empty(b, n, n)
        H[:, :nx, :nx] = self.xx
        H[:, :nx, nx:] = self.xy
        H[:, nx:, :nx] = self.xy.mT
        H[:, nx:, nx:] = 0
        yy = H[:, nx:, nx:].unflatten(1, (k, p)).unflatten(3, (k, p))
        yy.diagonal(dim1=2, dim2=4).copy_(self.gram[..., None].expand(b, k, k, p))
        return H


def second_order(
    problem: AttentionProblem,
    X: Float[Tensor, "b h d1 d2"],
    Y: Float[Tensor, "b h d3 p"],
    residual_share: Float[Tensor, " b"] | None = None,
) -> tuple[
    Float[Tensor, " b"], Float[Tensor, "b h d1 d2"], Float[Tensor, "b h d3 p"], HessianBlocks
]:
    """Total loss, gradient and Hessian in one pass over the data.

    residual_share multiplies the terms that the Gauss-Newton matrix lacks: None or 1 is the full
    Hessian, 0 is Gauss-Newton, for each independent problem.
    """
    layer = Bilinear(X.shape[1], *problem.widths)
    theta = layer.pack(X, Y)
    upper = UpperTriangles(layer.d1, layer.d2, X.device)
    full = residual_share is None or bool((residual_share != 0).any())

    def tile_sums(tile: Chunk) -> _Sums:
        share = None if residual_share is None else tile.of(residual_share)
        return _tile_sums(evaluate(tile, layer, theta), share, full, False, upper)

    sums = _summed(problem, layer, tile_sums)
    blocks = _blocks(sums, sums.xx, layer, upper, full)
    _add_quadratic(blocks, problem)
    quadratic = problem.quadratic
    RX, RY = quadratic.gradient(X, Y)
    return sums.loss + quadratic.value(X, Y), sums.GX + RX, sums.GY + RY, blocks


def second_order_parts(
    problem: AttentionProblem, X: Float[Tensor, "b h d1 d2"], Y: Float[Tensor, "b h d3 p"]
) -> tuple[
    Float[Tensor, " b"],
    Float[Tensor, "b h d1 d2"],
    Float[Tensor, "b h d3 p"],
    HessianBlocks,
    HessianBlocks,
]:
    """Loss, gradient, Hessian and Gauss-Newton matrix of the data, without the regulariser.

    One pass: the two matrices share all but the smallest of their products.
    """
    layer = Bilinear(X.shape[1], *problem.widths)
    theta = layer.pack(X, Y)
    upper = UpperTriangles(layer.d1, layer.d2, X.device)
    sums = _summed(
        problem,
        layer,
        lambda tile: _tile_sums(evaluate(tile, layer, theta), None, True, True, upper),
    )
    blocks = _blocks(sums, sums.xx + sums.xx_residual, layer, upper, True)
    gauss_newton = _blocks(sums, sums.xx, layer, upper, False)
    return sums.loss, sums.GX, sums.GY, blocks, gauss_newton


class _Sums(NamedTuple):
    """Sums over all rows; matrices packed as the products leave them.

    xx_residual and xy_residual: what the Gauss-Newton matrix lacks; xx holds the former unless the
    two are kept apart.
    """

    loss: Tensor
    GX: Tensor
    GY: Tensor
    xx: Tensor
    xx_residual: Tensor
    cross: Tensor
    xy: Tensor
    xy_residual: Tensor
    gram: Tensor


def _summed(
    problem: AttentionProblem, layer: Bilinear, tile_sums: Callable[[Chunk], _Sums]
) -> _Sums:
    elements = second_order_elements(problem, layer.heads)
    return _Sums(*reduce(problem.chunks, problem.batch, tile_sums, elements))


def _blocks(
    sums: _Sums, xx: Tensor, layer: Bilinear, upper: UpperTriangles, full: bool
) -> HessianBlocks:
    return HessianBlocks(
        _assemble_xx(xx, sums.cross, layer, upper),
        _assemble_xy(sums.xy, sums.xy_residual if full else None, layer),
        sums.gram,
        layer,
    )


class UpperTriangles:
    """Index pairs of the upper triangles of d1 x d1 and d2 x d2 matrices."""

    def __init__(self, d1: int, d2: int, device: torch.device) -> None:
        self.a, self.a2 = torch.triu_indices(d1, d1, device=device)
        self.b, self.b2 = torch.triu_indices(d2, d2, device=device)
        self.unpack1 = _packed_positions(self.a, self.a2, d1)
        self.unpack2 = _packed_positions(self.b, self.b2, d2)


def _packed_positions(i: Tensor, j: Tensor, d: int) -> Int[Tensor, " dd"]:
    """For every entry of a flattened symmetric d x d matrix, its place in the packed triangle."""
    at = torch.empty(d, d, dtype=torch.int64, device=i.device)
    at[i, j] = at[j, i] = torch.arange(len(i), device=i.device)
    return at.flatten()


def _tile_sums(
    at: Evaluation,
    share: Float[Tensor, " o"] | None,
    full: bool,
    apart: bool,
    upper: UpperTriangles,
) -> _Sums:
    tile = at.tile
    A1, A2, A3 = tile.queries, tile.A2, tile.A3
    assert at.heads.v is not None
    o, h = at.P.shape[0], at.P.shape[2]
    d2, p = A2.shape[-1], at.O.shape[-1]
    V, R = at.heads.v, at.qC[:, :, None]
    T = score_gradient(at.P, V, at.O, R)
    GX = contract(A1[:, :, None], T @ A2[:, :, None])
    GY = contract(at.attended, R)

    weight = tile.weight[:, :, None, :, None]
    mu = at.P @ A2[:, :, None]
    w = at.attended if A3 is not A2 else mu
    Rho = at.P @ row_kronecker(A2[:, :, None], V) - row_kronecker(mu, at.O)
    Rho_j = Rho.unflatten(-1, (d2, p))

    # H_xx within a head, packed; rows of the data are the contracted index throughout.
    M = (weight[..., None] * Rho_j @ Rho_j.mT)[..., upper.b, upper.b2]
    A2A2 = A2[..., upper.b] * A2[..., upper.b2]
    A1A1 = A1[..., upper.a] * A1[..., upper.a2]
    xx_residual = M.new_zeros(o, 0, 0)
    if full:
        Tr = T if share is None else T * share.view(o, 1, 1, 1, 1)
        t = Tr @ A2[:, :, None]
        N = Tr @ A2A2[:, :, None]
        N -= mu[..., upper.b] * t[..., upper.b2] + t[..., upper.b] * mu[..., upper.b2]
        if apart:
            xx_residual = flat_rows(A1A1).mT @ flat_heads(N)
        else:
            M += N
    xx = flat_rows(A1A1).mT @ flat_heads(M)

    # H_xx between heads: Gauss-Newton only, symmetric in A1 but not in A2.
    pairs = torch.combinations(torch.arange(h, device=A1.device))
    between = (weight[..., None] * Rho_j)[:, :, pairs[:, 0]] @ Rho_j[:, :, pairs[:, 1]].mT
    cross = flat_rows(A1A1).mT @ flat_heads(between.flatten(-2))

    # H_xy
    A1w = row_kronecker(A1[:, :, None], weight * w)
    xy = flat_heads(A1w).mT @ flat_heads(Rho)
    xy_residual = xy.new_zeros(o, 0, 0)
    if full:
        if A3 is A2:
            second = (at.P @ A2A2[:, :, None]).index_select(-1, upper.unpack2)
        else:
            second = at.P @ row_kronecker(A2, A3)[:, :, None]
        Q = second - row_kronecker(mu, w)
        qC = at.qC if share is None else at.qC * share.view(o, 1, 1, 1)
        xy_residual = flat_rows(row_kronecker(A1, qC)).mT @ flat_heads(Q)

    wf = flat_heads(w)
    gram = flat_heads(weight * w).mT @ wf
    return _Sums(tile_loss(at), GX, GY, xx, xx_residual, cross, xy, xy_residual, gram)


def row_kronecker(
    U: Float[Tensor, "*#rows a"], V: Float[Tensor, "*#rows b"]
) -> Float[Tensor, "*#rows ab"]:
    """KR(U, V): the Kronecker product of each row of U with the same row of V."""
    return (U[..., :, None] * V[..., None, :]).flatten(-2)


def flat_rows(t: Float[Tensor, "o s n k"]) -> Float[Tensor, "o sn k"]:
    """Sequences and rows as one axis, to be contracted in a single product."""
    return t.flatten(1, 2)


def flat_heads(t: Float[Tensor, "o s h n k"]) -> Float[Tensor, "o sn hk"]:
    """Sequences and rows as one axis, heads and features as the other."""
    return t.transpose(2, 3).flatten(3).flatten(1, 2)


def _assemble_xx(
    packed: Float[Tensor, "b t1 ht2"],
    cross: Float[Tensor, "b t1 pd2d2"],
    layer: Bilinear,
    upper: UpperTriangles,
) -> Float[Tensor, "b Nx Nx"]:
    b, h, d1, d2 = packed.shape[0], layer.heads, layer.d1, layer.d2
    out = packed.new_empty(b, h, d1, d2, h, d1, d2)
    rows = packed.index_select(1, upper.unpack1).view(b, d1, d1, h, -1)
    for i in range(h):
        same = rows[:, :, :, i].index_select(3, upper.unpack2).view(b, d1, d1, d2, d2)
        out[:, i, :, :, i] = same.permute(0, 1, 3, 2, 4)
    pairs = torch.combinations(torch.arange(h)).tolist()
    blocks = cross.index_select(1, upper.unpack1).view(b, d1, d1, len(pairs), d2, d2)
    for k, (i, j) in enumerate(pairs):
        block = blocks[:, :, :, k].permute(0, 1, 3, 2, 4)
        out[:, i, :, :, j] = block
        out[:, j, :, :, i] = block.permute(0, 3, 4, 1, 2)
    return out.view(b, layer.size_x, layer.size_x)


def _assemble_xy(
    xy: Float[Tensor, "b hd1d3 hd2p"],
    residual: Float[Tensor, "b d1p hd2d3"] | None,
    layer: Bilinear,
) -> Float[Tensor, "b Nx Ny"]:
    b, h, d1, d2, d3, p = xy.shape[0], layer.heads, layer.d1, layer.d2, layer.d3, layer.p
    # axes of xy: (value head, a, e, query head, b, i) -> (query head, a, b, value head, e, i)
    permuted = xy.view(b, h, d1, d3, h, d2, p).permute(0, 4, 2, 5, 1, 3, 6)
    # Never a view of xy, which the Gauss-Newton matrix shares: `contiguous` may return one.
    out = permuted.clone(memory_format=torch.contiguous_format)
    if residual is not None:
        same = residual.view(b, d1, p, h, d2, d3).permute(0, 3, 1, 4, 5, 2)
        for i in range(h):
            out[:, i, :, :, i] += same[:, i]
    return out.view(b, layer.size_x, layer.size_y)


def _add_quadratic(blocks: HessianBlocks, problem: AttentionProblem) -> None:
    """Add the regulariser's curvature to freshly built blocks, in place."""
    quadratic, layer = problem.quadratic, blocks.layer
    k = layer.d1 * layer.d2
    if quadratic.left.shape[1]:
        curvature = quadratic.curvature_x()
        for i in range(layer.heads):
            blocks.xx[:, i * k : (i + 1) * k, i * k : (i + 1) * k] += curvature
    d3 = layer.d3
    for i in range(layer.heads):
        blocks.gram[:, i * d3 : (i + 1) * d3, i * d3 : (i + 1) * d3] += quadratic.gram


def second_order_elements(problem: AttentionProblem, heads: int) -> int:
    """Elements per query row of the widest intermediate of `second_order`."""
    d1, d2, d3, p = problem.widths
    h = heads
    products = (
        h * d2 * p,
        h * d1 * d3,
        h * d2 * d3,
        d1 * p,
        h * d2 * d2,
        h * (h - 1) // 2 * d2 * d2,
    )
    return max(*products, forward_elements(problem, Bilinear(h, *problem.widths)))


def second_order_tile(problem: AttentionProblem, heads: int, copies: int = 1) -> int:
    """Elements of the widest intermediate of `second_order`, for so many copies of the problem."""
    per_row = second_order_elements(problem, heads)
    rows = copies * max(chunk.weight.numel() for chunk in problem.chunks)
    return max(per_row, min(TILE_ELEMENTS, rows * per_row))
