"""Functions of a problem at given weights: loss, derivatives, predictions, checks.

Weights are X (d1, d2) and Y (d3, p) for one head, with a leading head axis for several, a layer, or
a Solution; attention maps have X alone.  Every array returned is NumPy if the problem's data were,
a torch tensor otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from newtention.chunks import Chunk, map_rows
from newtention.derivatives.gradient import data_loss, loss_and_gradient
from newtention.derivatives.hessian import HessianBlocks, second_order, second_order_tile
from newtention.derivatives.linearised import Linearised, forward_elements
from newtention.derivatives.maps import map_second_order, map_tile
from newtention.derivatives.penalty import penalty
from newtention.derivatives.products import Kind, hessian_product
from newtention.inputs import require_count
from newtention.layers import AttentionMap, Bilinear, evaluate, weights_of_heads
from newtention.memory import hessian_bytes, require_memory
from newtention.notation import Array, ArrayLike
from newtention.operators.curvature import CurvatureOperator
from newtention.problem import AttentionProblem
from newtention.sampling import Scores, sampled
from newtention.weights import Point, Weights, as_weights


def loss(problem: AttentionProblem, X: Point, Y: ArrayLike | None = None) -> float | Array:
    """Total loss: 1/2 sum_j q_j ||(P A3 Y - B)_j||^2 plus the regulariser.

    Args:
        problem: the data and the regulariser; one problem or a stack.
        X: query/key map (d1, d2) or (h, d1, d2), a layer, or a Solution.
        Y: value map (d3, p) or (h, d3, p); left out beside a layer and for attention maps.

    Returns:
        A float; for a stack of problems an array (b,).

    Raises:
        ValueError: weights of the wrong shape, NaN or infinity.

    Example:
        >>> A = np.eye(2)
        >>> problem = nt.AttentionProblem(A, A, A, A)
        >>> nt.loss(problem, np.zeros((2, 2)), np.eye(2))
        0.5
    """
    w = as_weights(problem, X, Y)
    total = data_loss(problem, w.layer, w.theta) + penalty(problem, w.layer).value(w.theta)
    _require_finite("The loss", total)
    return problem.present(total) if problem.parts else float(total[0])


def gradient(
    problem: AttentionProblem, X: Point, Y: ArrayLike | None = None
) -> tuple[Array, Array] | Array | dict[str, Array]:
    """Gradient of the total loss.

    Args:
        problem: the data and the regulariser; one problem or a stack.
        X: query/key map (d1, d2) or (h, d1, d2), a layer, or a Solution.
        Y: value map (d3, p) or (h, d3, p); left out beside a layer and for attention maps.

    Returns:
        (GX, GY), shaped like X and Y; GX alone where the targets are attention maps; for a layer,
        a dict by block name.

    Raises:
        ValueError: weights of the wrong shape, NaN or infinity.

    Example:
        >>> A = np.eye(2)
        >>> problem = nt.AttentionProblem(A, A, A, A)
        >>> GX, GY = nt.gradient(problem, np.zeros((2, 2)), np.eye(2))
        >>> GX
        array([[-0.25,  0.25],
               [ 0.25, -0.25]])
    """
    w = as_weights(problem, X, Y)
    flat = loss_and_gradient(problem, w.layer, w.theta)[1]
    _require_finite("The gradient", flat)
    return w.present(flat)


@dataclass(frozen=True, eq=False)
class Hessian:
    """Exact Hessian (or Gauss-Newton matrix) of the total loss at one point.

    Nx = h d1 d2 and Ny = h d3 p, 0 for attention maps; rows and columns in the order of the flat
    vector.

    blocks: as tensors with an axis of independent problems; `xx`, `xy`, `yy` are what to read.
    weights: the point.
    """

    blocks: HessianBlocks
    weights: Weights

    @property
    def xx(self) -> Array:
        """(Nx, Nx)."""
        return self.weights.present_batch(self.blocks.xx)

    @property
    def xy(self) -> Array:
        """(Nx, Ny)."""
        return self.weights.present_batch(self.blocks.xy)

    @property
    def yy(self) -> Array:
        """(Ny, Ny): w^T w (x) I_p plus the regulariser, w the attended value tokens."""
        return self.weights.present_batch(self.blocks.yy)

    def to_dense(self) -> Array:
        """The whole symmetric matrix, (Nx + Ny, Nx + Ny)."""
        return self.weights.present_batch(self.blocks.to_dense())

    def __repr__(self) -> str:
        """Sizes."""
        layer = self.blocks.layer
        return f"Hessian({layer.size} x {layer.size}: X {layer.size_x}, Y {layer.size_y})"


def hessian(
    problem: AttentionProblem, X: Point, Y: ArrayLike | None = None, kind: Kind = "full"
) -> Hessian:
    """Exact Hessian of the total loss, in closed form.

    Args:
        problem: the data.
        X: query/key map (d1, d2) or (h, d1, d2), a layer that is not factored, or a Solution.
        Y: value map; left out beside a layer and for attention maps.
        kind: "full", or "gauss-newton" for the positive semidefinite part J^T J plus the
            regulariser.

    Returns:
        The blocks `xx`, `xy` and `yy` and, by `to_dense`, the (N, N) matrix.

    Raises:
        ValueError: weights of the wrong shape, NaN, infinity, a factored layer (which
            `hessian_operator` takes), or an unknown kind.
        MemoryError: the matrices do not fit into free memory.

    Source: the two-product form of docs/mathematics.md; the blocks as printed in the paper's
    Definitions 7.3 and 11.3 are wrong, see docs/errata.md.

    Example:
        >>> A = np.eye(2)
        >>> problem = nt.AttentionProblem(A, A, A, A)
        >>> H = nt.hessian(problem, np.zeros((2, 2)), np.eye(2))
        >>> H
        Hessian(8 x 8: X 4, Y 4)
        >>> H.xx[0]
        array([ 0.125, -0.125,  0.   ,  0.   ])
    """
    w = as_weights(problem, X, Y)
    _require_kind(kind)
    if isinstance(w.layer, AttentionMap):
        layer, tile = w.layer, map_tile(problem)
    else:
        layer, _, _ = w.bilinear
        tile = second_order_tile(problem, layer.heads)
    needed = hessian_bytes(layer, problem.batch, problem.like.element_size(), tile)
    require_memory(
        f"The Hessian of {layer.size} unknowns",
        needed,
        problem.like.device,
        "use hessian_operator, which never forms it.",
    )
    share = None if kind == "full" else w.theta.new_zeros(problem.batch)
    if isinstance(layer, AttentionMap):
        H = map_second_order(problem, layer.unpack(w.theta), share)[2]
        empty, alone = H[:, :, :0], Bilinear(1, layer.d1, layer.d2, 0, 0)
        return Hessian(HessianBlocks(H, empty, empty[:, :0], alone), w)
    return Hessian(second_order(problem, *layer.unpack(w.theta), share)[3], w)


def hessian_operator(
    problem: AttentionProblem, X: Point, Y: ArrayLike | None = None, kind: Kind = "full"
) -> CurvatureOperator:
    """The Hessian at a point as an operator that never forms it.

    Args:
        problem: one problem.
        X: query/key map, a layer, or a Solution.
        Y: value map; left out beside a layer.
        kind: "full" or "gauss-newton".

    Returns:
        An operator of shape (N, N), to be multiplied with vectors (N,) or (N, k) by `@`.

    Raises:
        ValueError: weights of the wrong shape, NaN, infinity, an unknown kind, or a stack.

    Example:
        >>> A = np.eye(2)
        >>> problem = nt.AttentionProblem(A, A, A, A)
        >>> operator = nt.hessian_operator(problem, np.zeros((2, 2)), np.eye(2))
        >>> operator.shape
        (8, 8)
        >>> operator @ np.ones(8)
        array([0., 0., 0., 0., 1., 1., 1., 1.])
    """
    _require_single(problem)
    _require_kind(kind)
    return CurvatureOperator(as_weights(problem, X, Y), kind)


def predict(problem: AttentionProblem, X: Point, Y: ArrayLike | None = None) -> Array:
    """The layer's outputs (P A3 Y in the bilinear form, P for maps), shaped like the targets.

    Padded rows are zero, and so are the entries of maps beyond the keys of their sequence.

    Args:
        problem: the data; one problem.
        X: query/key map (d1, d2) or (h, d1, d2), a layer, or a Solution.
        Y: value map (d3, p) or (h, d3, p); left out beside a layer and for attention maps.

    Returns:
        An array (n, p), (s, n, p) for padded sequences, or (rows, p) for ragged ones; (n, m) and
        so on for maps.

    Raises:
        ValueError: weights of the wrong shape, NaN or infinity, or a stack of problems.

    Example:
        >>> A = np.eye(2)
        >>> problem = nt.AttentionProblem(A, A, A, A)
        >>> nt.predict(problem, np.zeros((2, 2)), np.eye(2))
        array([[0.5, 0.5],
               [0.5, 0.5]])
    """
    _require_single(problem)
    w = as_weights(problem, X, Y)
    elements = forward_elements(problem, w.layer)

    def output(tile: Chunk) -> Tensor:
        if isinstance(w.layer, AttentionMap):  # C + B would round small weights away
            return weights_of_heads(tile, w.layer.qkv(tile, w.theta))[:, :, 0]
        return evaluate(tile, w.layer, w.theta).C + tile.B

    outputs = [map_rows(chunk, output, elements) for chunk in problem.chunks]
    rows = problem.rows_from_chunks(outputs, problem.layout.columns if problem.of_maps else 0)
    _require_finite("The output", rows)
    return problem.present(rows)


def attention_weights(
    problem: AttentionProblem, X: Point, Y: ArrayLike | None = None, sequence: int = 0
) -> Array:
    """Attention weights P of one sequence.

    Args:
        problem: the data.
        X: query/key map, a layer, or a Solution.
        Y: not used; accepted so that ``attention_weights(problem, *weights)`` works.
        sequence: index of the sequence.

    Returns:
        An array (n, m), (h, n, m) for several heads; rows sum to 1.

    Raises:
        ValueError: weights of the wrong shape, or a stack of problems.
        IndexError: no such sequence.

    Example:
        >>> A = np.eye(2)
        >>> problem = nt.AttentionProblem(A, A, A, A, mask="causal")
        >>> nt.attention_weights(problem, np.zeros((2, 2)))
        array([[1. , 0. ],
               [0.5, 0.5]])
    """
    _require_single(problem)
    count = len(problem.layout.queries)
    if not 0 <= sequence < count:
        raise IndexError(f"sequence must lie between 0 and {count - 1}; found {sequence}.")
    w = as_weights(problem, X, Y, needs_Y=False)
    chunk, place = next(
        (c, places.index(sequence))
        for c, places in zip(problem.chunks, problem.layout.order, strict=True)
        if sequence in places
    )
    tile = chunk.sequence(place)
    P = weights_of_heads(tile, w.layer.qkv(tile, w.theta))[0, 0]
    P = P[:, : problem.layout.queries[sequence], : problem.layout.keys[sequence]]
    return problem.present(P[0] if w.one_head else P)


def sample_queries(
    problem: AttentionProblem,
    rows: int,
    X: Point,
    Y: ArrayLike | None = None,
    *,
    scores: Scores = "leverage",
    seed: int = 0,
) -> AttentionProblem:
    """A problem of about `rows` query rows whose sums over rows are right on average.

    Its data loss, gradient, Hessian and Gauss-Newton matrix, at any weights, have those of the
    whole problem as their means over seeds; the regulariser stays as it is.  Rows have an order of
    their own.  See `newtention.sampling`.

    Args:
        problem: one problem.
        rows: wanted; the problem itself is returned where that is 70 % of them or more.
        X: query/key map where the scores are taken, a layer, or a Solution.
        Y: value map.
        scores: "leverage", or "uniform", which ignores X and Y.
        seed: of the draws.

    Returns:
        A problem with the rows drawn, their weights raised to make up for the others.

    Raises:
        ValueError: a stack of problems, rows below 1, unknown scores, weights that do not fit.
    """
    _require_single(problem)
    require_count("rows", rows, 1)
    if scores not in get_args(Scores):
        raise ValueError(f'scores must be "leverage" or "uniform"; found {scores!r}.')
    w = as_weights(problem, X, Y)
    return sampled(Linearised(problem, w.layer, w.theta), rows, scores, seed)


class DerivativeReport(NamedTuple):
    """Relative errors of the closed forms against central finite differences.

    gradient: of directional derivatives.
    hessian: of Hessian products.
    tolerance: what rounding and truncation of the differences allow.
    """

    gradient: float
    hessian: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """True when both errors are within the tolerance."""
        return max(self.gradient, self.hessian) <= self.tolerance

    def __repr__(self) -> str:
        """One line."""
        return f"DerivativeReport({self})"

    def __str__(self) -> str:
        """One line."""
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"gradient {self.gradient:.1e}, Hessian product {self.hessian:.1e} "
            f"(tolerance {self.tolerance:.0e}): {verdict}"
        )


def check_derivatives(
    problem: AttentionProblem,
    X: Point,
    Y: ArrayLike | None = None,
    directions: int = 5,
    seed: int = 0,
) -> DerivativeReport:
    """Compare gradient and Hessian products with central differences along random directions.

    The step is eps^(1/3) relative to the weights, or to weights whose logits are about 1 where
    those are larger; that balances truncation and rounding.

    Args:
        problem: the data and the regulariser; one problem.
        X: query/key map (d1, d2) or (h, d1, d2), a layer, or a Solution.
        Y: value map (d3, p) or (h, d3, p); left out beside a layer and for attention maps.
        directions: how many are drawn.
        seed: of the directions.

    Returns:
        The largest relative differences of both, and whether they are within tolerance.

    Raises:
        ValueError: weights of the wrong shape, NaN or infinity.
    """
    w = as_weights(problem, X, Y)
    theta = w.theta
    eps = torch.finfo(theta.dtype).eps
    generator = torch.Generator().manual_seed(seed)
    step = eps ** (1 / 3) * max(float(theta.square().mean().sqrt()), _typical_weight(problem))
    worst_g = worst_h = 0.0
    slope = loss_and_gradient(problem, w.layer, theta)[1]
    for _ in range(directions):
        d = torch.randn(theta.shape, generator=generator, dtype=torch.float64).to(theta)
        ahead, behind = (loss_and_gradient(problem, w.layer, theta + t * d) for t in (step, -step))
        product = hessian_product(problem, w.layer, theta, d[:, None])[:, 0]
        error = (slope * d).sum() - (ahead[0] - behind[0]).sum() / (2 * step)
        # At a minimum the slope vanishes; the curvature then sets the scale.
        size = (slope * d).abs().sum() + (product * d).sum().abs() + ahead[0].sum()
        worst_g = _worse(worst_g, error.abs() / size.clamp(min=eps))
        error = product - (ahead[1] - behind[1]) / (2 * step)
        size = product.square().sum() + ahead[1].square().sum()
        worst_h = _worse(worst_h, (error.square().sum() / size.clamp(min=eps)).sqrt())
    return DerivativeReport(worst_g, worst_h, 100 * eps ** (1 / 2))


def _worse(worst: float, error: Tensor) -> float:
    """The larger error; infinite if it is not a number."""
    return max(worst, float(error)) if bool(torch.isfinite(error)) else math.inf


def _typical_weight(problem: AttentionProblem) -> float:
    """Size of an entry of X at which logits are about 1."""
    sizes = [
        c.queries.square().sum(-1).mean() * c.A2.square().sum(-1).mean() for c in problem.chunks
    ]
    largest = float(torch.stack(sizes).max())
    return largest**-0.5 if largest > 0 else 1.0


def _require_finite(what: str, values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{what} is not finite at these weights: logits or outputs overflow.")


def _require_kind(kind: str) -> None:
    if kind not in ("full", "gauss-newton"):
        raise ValueError(f'kind must be "full" or "gauss-newton"; found {kind!r}.')


def _require_single(problem: AttentionProblem) -> None:
    if problem.parts:
        raise ValueError("This takes one problem; use it on each member of the stack's `parts`.")
