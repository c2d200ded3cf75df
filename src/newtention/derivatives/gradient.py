"""Loss and closed-form gradient.

With G = C V^T and T = P o (G - rowsum(P o G)), per head:

    dL/dX = A1^T T A2,      dL/dY = A3^T P^T C:

the paper's promise of T_mat(n, n, d) + T_mat(n, d, d), in five products, without A1 (x) A2.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from newtention.attention import score_gradient
from newtention.chunks import Chunk, reduce
from newtention.layers import Evaluation, evaluate
from newtention.problem import AttentionProblem


def data_loss(
    problem: AttentionProblem, X: Float[Tensor, "b h d1 d2"], Y: Float[Tensor, "b h d3 p"]
) -> Float[Tensor, " b"]:
    """1/2 sum_j q_j ||(P A3 Y - B)_j||^2 of each independent problem."""
    loss = reduce(
        problem.chunks,
        problem.batch,
        lambda tile: (tile_loss(evaluate(tile, X, Y)),),
        forward_elements(problem, X.shape[1]),
    )
    return loss[0]


def loss_and_gradient(
    problem: AttentionProblem, X: Float[Tensor, "b h d1 d2"], Y: Float[Tensor, "b h d3 p"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b h d1 d2"], Float[Tensor, "b h d3 p"]]:
    """Total loss (data and regulariser) and its gradient."""

    def tile_sums(tile: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        at = evaluate(tile, X, Y)
        return (tile_loss(at), *tile_gradient(at))

    loss, GX, GY = reduce(
        problem.chunks, problem.batch, tile_sums, forward_elements(problem, X.shape[1])
    )
    RX, RY = problem.quadratic.gradient(X, Y)
    return loss + problem.quadratic.value(X, Y), GX + RX, GY + RY


def tile_loss(at: Evaluation) -> Float[Tensor, " o"]:
    """Data loss of the tile, by owner."""
    return 0.5 * (at.qC[:, :, 0] * at.C).flatten(1).sum(1)


def tile_gradient(
    at: Evaluation, dS: Float[Tensor, "o s h n m"] | None = None
) -> tuple[Float[Tensor, "o h d1 d2"], Float[Tensor, "o h d3 p"]]:
    """Gradient of the tile's data loss, by owner; dS is passed by callers that have it already."""
    if dS is None:
        dS = score_gradient(at.P, at.V, at.F, at.qC)
    dq = dS @ at.tile.A2[:, :, None]
    return contract(at.tile.queries[:, :, None], dq), contract(at.attended, at.qC)


def contract(
    left: Float[Tensor, "o s #h n a"], right: Float[Tensor, "o s #h n b"]
) -> Float[Tensor, "o h a b"]:
    """Sum over sequences and rows of left^T right."""
    return (left.mT @ right).sum(1)


def forward_elements(problem: AttentionProblem, heads: int) -> int:
    """Elements per query row of the largest array of a forward pass: the attention weights."""
    keys = max(chunk.A2.shape[2] for chunk in problem.chunks)
    return heads * max(keys, *problem.widths)
