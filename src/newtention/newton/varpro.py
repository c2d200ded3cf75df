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

from newtention.derivatives.hessian import HessianBlocks
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.penalty import penalty
from newtention.layers import Bilinear, Evaluation
from newtention.linsolve.pseudo_inverse import GramInverse, gram_inverse
from newtention.problem import AttentionProblem
from newtention.regularizers import FlatQuadratic


@dataclass(frozen=True, eq=False)
class Reduced:
    """Gradient and Hessian of the projected loss f(X) = min_Y L(X, Y)."""

    gradient: Float[Tensor, "b Nx"]
    hessian: Float[Tensor, "b Nx Nx"]


def project(
    problem: AttentionProblem, X: Float[Tensor, "b h d1 d2"], Y: Float[Tensor, "b h d3 p"]
) -> Float[Tensor, "b h d3 p"]:
    """The minimiser over Y at fixed X that is nearest to the given Y."""
    layer = Bilinear(Y.shape[1], *problem.widths)
    theta = layer.pack(X, Y)
    output = OutputMap.at(Linearised(problem, layer, theta), penalty(problem, layer))
    return layer.unpack(output.solved(theta))[1]


@dataclass(frozen=True, eq=False)
class OutputMap:
    """The linear least-squares problem of the output map at a point.

    Solved as a Newton correction, which is exact for a quadratic and keeps the accuracy of the
    gradient rather than that of the normal equations' right-hand side.

    inverse: of its curvature, features^T q features plus the regulariser's.
    gradient: of the total loss in the map.
    """

    inverse: GramInverse
    gradient: Float[Tensor, "b k p"]

    @classmethod
    def at(cls, point: Linearised, regularizer: FlatQuadratic) -> OutputMap:
        """One pass over the data; the Gram matrix is summed in float64."""

        def tile_sums(at: Evaluation) -> tuple[Tensor, Tensor]:
            rows = at.features.flatten(1, 2)
            gradient = rows.mT @ at.qC.flatten(1, 2)
            exact = rows.double()
            weighted = exact * at.tile.weight.flatten(1)[..., None]
            return gradient, weighted.mT @ exact

        gradient, gram = point.reduce(tile_sums)
        own = regularizer.gradient(point.theta)[:, point.layer.output_start :]
        gram = gram + regularizer.output_gram.double()
        # Features are sums over the keys; their rounding adds up like a random walk.
        keys = max(chunk.A2.shape[2] for chunk in point.problem.chunks)
        inverse = gram_inverse(gram, torch.finfo(point.theta.dtype).eps * keys**0.5)
        return cls(inverse, gradient + own.reshape(gradient.shape))

    def solve(self, right: Float[Tensor, "b k p"]) -> Float[Tensor, "b k p"]:
        """The pseudo-inverse of the map's curvature times a matrix."""
        return self.inverse.solve(right.double()).to(right.dtype)

    def solved(self, theta: Float[Tensor, "b N"]) -> Float[Tensor, "b N"]:
        """theta with the best output map, the nearest to the given one of several."""
        size = self.gradient[0].numel()
        rest, output = theta[:, :-size], theta[:, -size:]
        return torch.cat([rest, output - self.solve(self.gradient).flatten(1)], 1)


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
