"""Variable projection: given X, the best Y is a linear least-squares problem.

Golub and Pereyra 1973.  It is applied after each accepted step in X, and the same elimination turns
the Newton system into one in X alone: the Schur complement of the Y block is the Hessian of the
projected loss f(X) = min_Y L(X, Y) wherever the rank of that block is locally constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.chunks import Chunk, contract, reduce
from newtention.derivatives.hessian import HessianBlocks, flat_heads
from newtention.derivatives.linearised import forward_elements
from newtention.layers import Bilinear, evaluate
from newtention.linsolve.pseudo_inverse import gram_inverse
from newtention.problem import AttentionProblem


@dataclass(frozen=True, eq=False)
class Reduced:
    """Gradient and Hessian of the projected loss f(X) = min_Y L(X, Y)."""

    gradient: Float[Tensor, "b Nx"]
    hessian: Float[Tensor, "b Nx Nx"]


def project(
    problem: AttentionProblem, X: Float[Tensor, "b h d1 d2"], Y: Float[Tensor, "b h d3 p"]
) -> Float[Tensor, "b h d3 p"]:
    """The minimiser over Y at fixed X that is nearest to the given Y.

    Solved as a Newton correction dY of Y, which is exact for a quadratic and keeps the accuracy of
    the gradient rather than that of the normal equations' right-hand side.
    """
    b, h, d3, p = Y.shape
    layer = Bilinear(h, *problem.widths)
    theta = layer.pack(X, Y)

    def tile_sums(tile: Chunk) -> tuple[Tensor, Tensor]:
        at = evaluate(tile, layer, theta)
        w = flat_heads(at.attended)
        weighted = flat_heads(at.attended * tile.weight[:, :, None, :, None])
        return contract(at.attended, at.qC[:, :, None]), weighted.mT @ w

    GY, gram = reduce(problem.chunks, problem.batch, tile_sums, forward_elements(problem, layer))
    quadratic = problem.quadratic
    GY = (GY + quadratic.gradient(X, Y)[1]).reshape(b, h * d3, p)
    for i in range(h):
        gram[:, i * d3 : (i + 1) * d3, i * d3 : (i + 1) * d3] += quadratic.gram
    return Y - gram_inverse(gram).solve(GY).view(b, h, d3, p)


def eliminate_output(blocks: HessianBlocks, GX: Tensor, GY: Tensor) -> Reduced:
    """Schur complement: H_xx - H_xy H_yy^+ H_yx, and the gradient to match."""
    b, nx, _ = blocks.xx.shape
    k, p = blocks.gram.shape[-1], blocks.layer.p
    root = gram_inverse(blocks.gram).root
    # H_yy^+ = (root root^T) (x) I_p; Z = H_xy (root (x) I_p).
    Z = (blocks.xy.view(b, nx, k, p).mT.reshape(b, nx * p, k) @ root).view(b, nx, p * k)
    y = (GY.reshape(b, k, p).mT @ root).reshape(b, p * k, 1)
    gradient = GX.flatten(1) - (Z @ y)[..., 0]
    return Reduced(gradient, torch.baddbmm(blocks.xx, Z, Z.mT, alpha=-1))
