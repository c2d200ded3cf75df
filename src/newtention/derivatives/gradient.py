"""Loss and closed-form gradient of any parametrisation.

With R = q C the loss gradient in the output, dO = mix^T R, and T = P o (dO v^T - rowsum(dO o O)):

    dq = T k,   dk = T^T q,   dv = P^T dO,   gradient = L^T (dq, dk, dv) + mix's own.

In the bilinear form that is A1^T T A2 and A3^T P^T C: the paper's promise of T_mat(n, n, d) +
T_mat(n, d, d), in five products, without A1 (x) A2.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from newtention.attention import score_gradient
from newtention.chunks import Chunk, reduce
from newtention.derivatives.penalty import penalty
from newtention.layers import Evaluation, Heads, Parametrisation, evaluate
from newtention.problem import AttentionProblem


def data_loss(
    problem: AttentionProblem, layer: Parametrisation, theta: Float[Tensor, "b N"]
) -> Float[Tensor, " b"]:
    """1/2 sum_j q_j ||(F - B)_j||^2 of each independent problem."""
    loss = reduce(
        problem.chunks,
        problem.batch,
        lambda tile: (tile_loss(evaluate(tile, layer, theta)),),
        forward_elements(problem, layer),
    )
    return loss[0]


def loss_and_gradient(
    problem: AttentionProblem, layer: Parametrisation, theta: Float[Tensor, "b N"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b N"]]:
    """Total loss (data and regulariser) and its gradient."""

    def tile_sums(tile: Chunk) -> tuple[Tensor, Tensor]:
        at = evaluate(tile, layer, theta)
        return tile_loss(at), backward(at, layer, theta, at.qC)

    loss, gradient = reduce(
        problem.chunks, problem.batch, tile_sums, forward_elements(problem, layer)
    )
    regularizer = penalty(problem, layer)
    return loss + regularizer.value(theta), gradient + regularizer.gradient(theta)


def backward(
    at: Evaluation, layer: Parametrisation, theta: Float[Tensor, "b N"], R: Float[Tensor, "o s n p"]
) -> Float[Tensor, "o N"]:
    """J^T R on a tile: the gradient of <F, R>."""
    q, k, v = at.heads
    dO = layer.mix_transposed(at.tile, theta, R)
    assert k is not None
    dS = score_gradient(at.P, v, at.O, dO)
    dk = None if layer.fixed_keys else dS.mT @ q
    gradient = layer.qkv_transposed(at.tile, Heads(dS @ k, dk, at.P.mT @ dO))
    own = layer.mix_gradient(at.tile, at.O, R)
    return gradient if own is None else gradient + own


def tile_loss(at: Evaluation) -> Float[Tensor, " o"]:
    """Data loss of the tile, by owner."""
    return 0.5 * (at.qC * at.C).flatten(1).sum(1)


def forward_elements(problem: AttentionProblem, layer: Parametrisation) -> int:
    """Elements per query row of the largest array of a pass: attention weights or projections."""
    keys = max(chunk.A2.shape[2] for chunk in problem.chunks)
    return layer.heads * max(keys, *problem.widths)
