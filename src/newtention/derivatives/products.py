"""Hessian-vector products without a Hessian (Pearlmutter 1994), by one second-order pass.

Primes are tangents along the direction (dX, dY); a trailing _t in the code.  Per head:

    q' = A1 dX, S' = q' A2^T, P' = P o S' - P rowsum(P o S'), V' = A3 dY, F' = P' V + P V'
    C' = sum over heads of F',  dS as in the gradient,  dS' its tangent
    H (dX, dY) = (A1^T dS' A2,  A3^T (P'^T C + P^T C'))

The Gauss-Newton product is the gradient's backward pass with the residual replaced by C'.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from newtention.attention import score_gradient, score_gradient_tangent, weights_tangent
from newtention.chunks import Chunk, reduce
from newtention.derivatives.gradient import contract, forward_elements
from newtention.layers import evaluate
from newtention.problem import AttentionProblem

Kind = Literal["full", "gauss-newton"]


def hessian_product(
    problem: AttentionProblem,
    X: Float[Tensor, "b h d1 d2"],
    Y: Float[Tensor, "b h d3 p"],
    dX: Float[Tensor, "b h d1 d2"],
    dY: Float[Tensor, "b h d3 p"],
    kind: Kind = "full",
) -> tuple[Float[Tensor, "b h d1 d2"], Float[Tensor, "b h d3 p"]]:
    """Hessian (or Gauss-Newton matrix) of the total loss at (X, Y) times the direction (dX, dY)."""

    def tile_sums(tile: Chunk) -> tuple[Tensor, Tensor]:
        at = evaluate(tile, X, Y)
        A1, A2, A3 = tile.queries[:, :, None], tile.A2[:, :, None], tile.A3[:, :, None]
        P_t = weights_tangent(at.P, (A1 @ tile.of(dX)[:, None]) @ A2.mT)
        V_t = A3 @ tile.of(dY)[:, None]
        F_t = P_t @ at.V + at.P @ V_t
        qC_t = F_t.sum(2, keepdim=True) * tile.weight[:, :, None, :, None]
        if kind == "gauss-newton":
            dS_t = score_gradient(at.P, at.V, at.F, qC_t)
            return contract(A1, dS_t @ A2), contract(at.attended, qC_t)
        dS_t = score_gradient_tangent(at.P, P_t, at.V, V_t, at.F, F_t, at.qC, qC_t)
        HY = contract(P_t @ A3, at.qC) + contract(at.attended, qC_t)
        return contract(A1, dS_t @ A2), HY

    HX, HY = reduce(problem.chunks, problem.batch, tile_sums, forward_elements(problem, X.shape[1]))
    KX, KY = problem.quadratic.apply(dX, dY)
    return HX + KX, HY + KY
