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
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.penalty import penalty
from newtention.layers import Evaluation, Heads, Parametrisation
from newtention.problem import AttentionProblem


def data_loss(
    problem: AttentionProblem, layer: Parametrisation, theta: Float[Tensor, "b N"]
) -> Float[Tensor, " b"]:
    """1/2 sum_j q_j ||(F - B)_j||^2 of each independent problem."""
    return data_loss_at(Linearised(problem, layer, theta))


def data_loss_at(point: Linearised) -> Float[Tensor, " b"]:
    """The same at a point, whose evaluations may be there already."""
    return point.reduce(lambda at: (tile_loss(at),))[0]


def loss_and_gradient(
    problem: AttentionProblem, layer: Parametrisation, theta: Float[Tensor, "b N"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b N"]]:
    """Total loss (data and regulariser) and its gradient."""
    data, gradient = data_loss_and_gradient(Linearised(problem, layer, theta))
    regularizer = penalty(problem, layer)
    return data + regularizer.value(theta), gradient + regularizer.gradient(theta)


def data_loss_and_gradient(
    point: Linearised,
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b N"]]:
    """Data loss and its gradient, without the regulariser."""

    def tile_sums(at: Evaluation) -> tuple[Tensor, Tensor]:
        return tile_loss(at), backward(at, point.layer, point.theta, at.qC)

    loss, gradient = point.reduce(tile_sums)
    return loss, gradient


def backward(
    at: Evaluation, layer: Parametrisation, theta: Float[Tensor, "b N"], R: Float[Tensor, "o s n p"]
) -> Float[Tensor, "o N"]:
    """J^T R on a tile: the gradient of <F, R>."""
    q, k, v = at.heads
    dO = layer.mix_transposed(at.tile, theta, R)
    assert k is not None
    dS = score_gradient(at.P, v, at.O, dO)
    dk = None if layer.fixed_keys else dS.mT @ q
    dv = None if v is None else at.P.mT @ dO
    gradient = layer.qkv_transposed(at.tile, Heads(dS @ k, dk, dv))
    own = layer.mix_gradient(at.tile, at.O, R)
    return gradient if own is None else gradient + own


def tile_loss(at: Evaluation) -> Float[Tensor, " o"]:
    """Data loss of the tile, by owner."""
    return 0.5 * (at.qC * at.C).flatten(1).sum(1)
