"""Functions of a problem at given weights: loss, derivatives, predictions, checks.

Weights are X (d1, d2) and Y (d3, p) for one head, with a leading head axis for several.  Every
array returned is NumPy if the problem's data were, a torch tensor otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from newtention.derivatives.gradient import data_loss, loss_and_gradient
from newtention.derivatives.hessian import HessianBlocks, second_order, second_order_tile
from newtention.derivatives.products import Kind, hessian_product
from newtention.layers import evaluate, weights_of_tile
from newtention.memory import hessian_bytes, require_memory
from newtention.newton.starts import random_start
from newtention.newton.varpro import project
from newtention.notation import Array, ArrayLike
from newtention.problem import AttentionProblem
from newtention.weights import Weights, as_weights, fixed_heads, flat_to_weights


def loss(problem: AttentionProblem, X: ArrayLike, Y: ArrayLike) -> float | Array:
    """Total loss: 1/2 sum_j q_j ||(P A3 Y - B)_j||^2 plus the regulariser.

    Returns:
        A float; for a stack of problems an array (b,).

    Raises:
        ValueError: weights of the wrong shape, NaN or infinity.
    """
    w = as_weights(problem, X, Y)
    total = data_loss(problem, w.X, w.Y) + problem.quadratic.value(w.X, w.Y)
    return problem.present(total) if problem.parts else float(total[0])


def gradient(problem: AttentionProblem, X: ArrayLike, Y: ArrayLike) -> tuple[Array, Array]:
    """Gradient of the total loss, (GX, GY), shaped like X and Y.

    Raises:
        ValueError: weights of the wrong shape, NaN or infinity.
    """
    w = as_weights(problem, X, Y)
    _, GX, GY = loss_and_gradient(problem, w.X, w.Y)
    return w.present(GX), w.present(GY)


@dataclass(frozen=True, eq=False)
class Hessian:
    """Exact Hessian (or Gauss-Newton matrix) of the total loss at one point.

    Nx = h d1 d2 and Ny = h d3 p; rows and columns in the order of the flat vector.
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


def hessian(problem: AttentionProblem, X: ArrayLike, Y: ArrayLike, kind: Kind = "full") -> Hessian:
    """Exact Hessian of the total loss, in closed form.

    Args:
        problem: the data.
        X: query/key map at which to evaluate.
        Y: value map at which to evaluate.
        kind: "full", or "gauss-newton" for the positive semidefinite part J^T J plus the
            regulariser.

    Raises:
        ValueError: weights of the wrong shape, NaN, infinity, or an unknown kind.
        MemoryError: the matrices do not fit into free memory.

    Source: the two-product form of docs/mathematics.md; the blocks as printed in the paper's
    Definitions 7.3 and 11.3 are wrong, see docs/errata.md.
    """
    w = as_weights(problem, X, Y)
    _require_kind(kind)
    tile = second_order_tile(problem, w.layer.heads)
    needed = hessian_bytes(w.layer, problem.batch, problem.like.element_size(), tile)
    require_memory(
        f"The Hessian of {w.layer.size} unknowns",
        needed,
        problem.like.device,
        "use to_scipy(problem).hessp, which never forms it.",
    )
    share = None if kind == "full" else w.X.new_zeros(problem.batch)
    return Hessian(second_order(problem, w.X, w.Y, share)[3], w)


def predict(problem: AttentionProblem, X: ArrayLike, Y: ArrayLike) -> Array:
    """The layer's outputs P A3 Y, shaped like the targets (padded rows are zero).

    Raises:
        ValueError: weights of the wrong shape, NaN or infinity, or a stack of problems.
    """
    _require_single(problem)
    w = as_weights(problem, X, Y)
    outputs = [evaluate(chunk, w.X, w.Y).F.sum(2) for chunk in problem.chunks]
    return problem.present(problem.rows_from_chunks(outputs))


def attention_weights(
    problem: AttentionProblem, X: ArrayLike, Y: ArrayLike | None = None, sequence: int = 0
) -> Array:
    """Attention weights P of one sequence: (n, m), with a leading head axis for several heads.

    Args:
        problem: the data.
        X: query/key map.
        Y: not used; accepted so that ``attention_weights(problem, *weights)`` works.
        sequence: index of the sequence.

    Raises:
        ValueError: weights of the wrong shape, or a stack of problems.
        IndexError: no such sequence.
    """
    _require_single(problem)
    count = len(problem.layout.queries)
    if not 0 <= sequence < count:
        raise IndexError(f"sequence must lie between 0 and {count - 1}; found {sequence}.")
    w = as_weights(problem, X, Y)
    places = next(
        (c, places.index(sequence))
        for c, places in zip(problem.chunks, problem.layout.order, strict=True)
        if sequence in places
    )
    chunk, place = places
    P = weights_of_tile(chunk.sequence(place), w.X)[:, 0]
    return w.present(P[..., : problem.layout.queries[sequence], : problem.layout.keys[sequence]])


class DerivativeReport(NamedTuple):
    """Relative errors of the closed forms against central finite differences.

    gradient: of directional derivatives; hessian: of Hessian products.
    tolerance: what rounding and truncation of the differences allow.
    """

    gradient: float
    hessian: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """True when both errors are within the tolerance."""
        return max(self.gradient, self.hessian) <= self.tolerance

    def __str__(self) -> str:
        """One line."""
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"gradient {self.gradient:.1e}, Hessian product {self.hessian:.1e} "
            f"(tolerance {self.tolerance:.0e}): {verdict}"
        )


def check_derivatives(
    problem: AttentionProblem, X: ArrayLike, Y: ArrayLike, directions: int = 5, seed: int = 0
) -> DerivativeReport:
    """Compare gradient and Hessian products with central differences along random directions.

    The step is eps^(1/3) relative to the weights, which balances truncation and rounding.

    Raises:
        ValueError: weights of the wrong shape, NaN or infinity.
    """
    w = as_weights(problem, X, Y)
    eps = torch.finfo(w.X.dtype).eps
    generator = torch.Generator().manual_seed(seed)
    size = torch.sqrt(w.X.square().mean() + w.Y.square().mean()).clamp(min=eps)
    step = eps ** (1 / 3) * float(size)
    worst_g = worst_h = 0.0
    _, GX, GY = loss_and_gradient(problem, w.X, w.Y)
    for _ in range(directions):
        dX = torch.randn(w.X.shape, generator=generator, dtype=torch.float64).to(w.X)
        dY = torch.randn(w.Y.shape, generator=generator, dtype=torch.float64).to(w.Y)
        ahead, behind = (
            loss_and_gradient(problem, w.X + t * dX, w.Y + t * dY) for t in (step, -step)
        )
        slope = (GX * dX).sum() + (GY * dY).sum()
        size_g = (GX * dX).abs().sum() + (GY * dY).abs().sum() + ahead[0].sum()
        difference = (ahead[0] - behind[0]).sum() / (2 * step)
        worst_g = max(worst_g, float((slope - difference).abs() / size_g.clamp(min=eps)))
        HX, HY = hessian_product(problem, w.X, w.Y, dX, dY)
        error = size_h = 0.0
        for H, plus, minus in ((HX, ahead[1], behind[1]), (HY, ahead[2], behind[2])):
            error += float((H - (plus - minus) / (2 * step)).square().sum())
            size_h += float(H.square().sum()) + float(plus.square().sum())
        worst_h = max(worst_h, (error / max(size_h, eps)) ** 0.5)
    return DerivativeReport(worst_g, worst_h, 100 * eps ** (1 / 2))


class ScipyProblem(NamedTuple):
    """A problem for ``scipy.optimize.minimize``: functions of the flat vector, in float64.

    Pass as ``minimize(s.fun, s.x0, jac=s.jac, hess=s.hess, method="trust-exact")`` or with
    ``hessp=s.hessp`` for matrix-free methods.
    """

    fun: Callable[[np.ndarray], float]
    jac: Callable[[np.ndarray], np.ndarray]
    hess: Callable[[np.ndarray], np.ndarray]
    hessp: Callable[[np.ndarray, np.ndarray], np.ndarray]
    x0: np.ndarray


def to_scipy(
    problem: AttentionProblem, start: tuple[ArrayLike, ArrayLike] | None = None, seed: int = 0
) -> ScipyProblem:
    """Our loss and derivatives as scipy expects them.

    Args:
        problem: a single problem.
        start: (X, Y) for x0; otherwise the start that `solve` would use with this seed.
        seed: of the random start.

    Raises:
        ValueError: a stack of problems, or a start of the wrong shape.
    """
    _require_single(problem)
    if start is None:
        h = fixed_heads(problem) or 1
        X = random_start(problem, h, seed)
        Y, _ = project(problem, X, X.new_zeros(1, h, *problem.widths[2:]))
        w = Weights(X, Y, h == 1, problem)
    else:
        w = as_weights(problem, *start)
    heads = w.layer.heads
    known: dict[str, tuple[np.ndarray, float, np.ndarray]] = {}

    def unflat(x: np.ndarray) -> tuple[Tensor, Tensor]:
        return flat_to_weights(problem, torch.from_numpy(np.array(x)).to(problem.like), heads)

    def flat(X: Tensor, Y: Tensor) -> np.ndarray:
        return w.layer.pack(X, Y)[0].cpu().double().numpy()

    def first_order(x: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
        """Scipy asks for value and gradient at the same point in separate calls."""
        if "last" not in known or not np.array_equal(known["last"][0], x):
            value, GX, GY = loss_and_gradient(problem, *unflat(x))
            known["last"] = (np.array(x), float(value[0]), flat(GX, GY))
        return known["last"]

    def hess(x: np.ndarray) -> np.ndarray:
        return second_order(problem, *unflat(x))[3].to_dense()[0].cpu().double().numpy()

    return ScipyProblem(
        fun=lambda x: first_order(x)[1],
        jac=lambda x: first_order(x)[2],
        hess=hess,
        hessp=lambda x, d: flat(*hessian_product(problem, *unflat(x), *unflat(d))),
        x0=flat(w.X, w.Y),
    )


def _require_kind(kind: str) -> None:
    if kind not in ("full", "gauss-newton"):
        raise ValueError(f'kind must be "full" or "gauss-newton"; found {kind!r}.')


def _require_single(problem: AttentionProblem) -> None:
    if problem.parts:
        raise ValueError("This takes one problem; use it on each member of the stack's `parts`.")
