"""Numbers behind the figures and the report: errors per query, numerical zeros and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from newtention.derivatives.gradient import data_loss
from newtention.functions import predict
from newtention.layers import (
    AttentionLayer,
    BilinearAttention,
    FactoredAttention,
    MapAttention,
)
from newtention.notation import ArrayLike
from newtention.problem import AttentionProblem
from newtention.regression import SoftmaxRegression
from newtention.solution import Solution
from newtention.weights import as_weights

Run = Solution | SoftmaxRegression
"""What has a course: losses, records, a status."""


def as_array(values: ArrayLike | Sequence[float]) -> np.ndarray:
    """float64 NumPy from anything, on any device."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def epsilon(values: ArrayLike | Sequence[float]) -> float:
    """Spacing of floating-point numbers at 1 in the precision of an array."""
    return 2.0**-23 if str(getattr(values, "dtype", "")).endswith("float32") else 2.0**-52


def run_epsilon(run: Run) -> float:
    """Spacing of numbers at 1 in the precision of a run's weights."""
    weights = run.x if isinstance(run, SoftmaxRegression) else next(iter(vars(run.layer).values()))
    return epsilon(weights)


def zero_level(eigenvalues: ArrayLike, eps: float | None = None) -> float:
    """Eigenvalues of this size or less are rounding: N eps max |eigenvalue|."""
    sizes = np.abs(as_array(eigenvalues))
    eps = epsilon(eigenvalues) if eps is None else eps
    return float(len(sizes) * eps * sizes.max()) if len(sizes) else 0.0


def singular_values(weights: ArrayLike, eps: float | None = None) -> list[np.ndarray]:
    """Singular values of every head, those that are zero to rounding set to 0.

    eps: of the arithmetic behind the weights, by default that of their type.
    """
    eps = epsilon(weights) if eps is None else eps
    w = as_array(weights)
    found = []
    for head in w if w.ndim == 3 else w[None]:
        sizes = np.linalg.svd(head, compute_uv=False)
        sizes[sizes <= max(head.shape) * eps * sizes.max()] = 0
        found.append(sizes)
    return found


def query_key_and_value_maps(layer: AttentionLayer) -> tuple[np.ndarray, np.ndarray]:
    """X and Y per head, (h, d1, d2) and (h, d3, p); W_Q W_K^T and W_V W_O of a factored layer.

    Biases and rotary positions are left out.  An attention map has no Y, (0, 1, 1).
    """
    if isinstance(layer, MapAttention):
        return as_array(layer.X)[None], np.zeros((0, 1, 1))
    if isinstance(layer, BilinearAttention):
        maps = [as_array(layer.X), as_array(layer.Y)]
        X, Y = (w if w.ndim == 3 else w[None] for w in maps)
        return X, Y
    assert isinstance(layer, FactoredAttention)
    Q, K, V, O = (as_array(w) for w in (layer.W_Q, layer.W_K, layer.W_V, layer.W_O))
    group = len(Q) // len(K)
    return Q @ np.repeat(K, group, 0).swapaxes(1, 2), np.repeat(V, group, 0) @ O


def unexplained(problem: AttentionProblem, solution: Solution) -> float:
    """Data loss as a share of the trivial one; 0 where that is 0.

    Trivial are outputs of zero, and for attention maps equal weights, X = 0.
    """
    energy = float(problem.target_energy())
    if energy == 0:
        return 0.0
    if not isinstance(solution.layer, MapAttention):
        return solution.relative_loss
    w = as_weights(problem, solution.layer)
    trivial = float(data_loss(problem, w.layer, 0 * w.theta))
    return solution.data_loss / trivial if trivial > epsilon(problem.like) ** 2 * energy else 0.0


def unexplained_softmax(fitted: ArrayLike, b: ArrayLike) -> float:
    """||fitted - b||^2 as a share of that of equal values, 1/n each; 0 where that is 0."""
    target = as_array(b)
    trivial = ((1 / len(target) - target) ** 2).sum()
    error = ((as_array(fitted) - target) ** 2).sum()
    return float(error / trivial) if trivial > epsilon(b) ** 2 * (target**2).sum() else 0.0


class QueryErrors:
    """Every query of a problem, sequence by sequence without padding, with its error.

    sequence, position: where the query stands, from 0.
    weight: its weight in the loss.
    residual, target: ||F_j - B_j|| and ||B_j||.
    relative: their ratio; NaN where the target is zero or the weight is.
    """

    def __init__(self, problem: AttentionProblem, solution: Solution) -> None:
        columns = [
            predict(problem, solution.layer),
            problem.rows_from_chunks([c.B for c in problem.chunks]),
            problem.rows_from_chunks([c.weight[..., None] for c in problem.chunks]),
        ]
        F, B, weight = (np.concatenate(problem.layout.split(as_array(c))) for c in columns)
        counts = problem.layout.queries
        self.sequence = np.repeat(np.arange(len(counts)), counts)
        self.position = np.concatenate([np.arange(n) for n in counts])
        self.weight = weight[:, 0]
        self.residual = np.linalg.norm(F - B, axis=1)
        self.target = np.linalg.norm(B, axis=1)
        known = (self.target > 0) & (self.weight > 0)
        self.relative = np.full(len(known), np.nan)
        self.relative[known] = self.residual[known] / self.target[known]

    @property
    def known(self) -> np.ndarray:
        """Which queries have a relative error."""
        return np.isfinite(self.relative)

    @property
    def share(self) -> np.ndarray:
        """Each query's share of the data loss."""
        squares = self.weight * self.residual**2
        return squares / (squares.sum() or 1.0)

    def of_sequence(self, i: int) -> float:
        """Relative error of one sequence as a whole; 0 where it has no target."""
        return math.sqrt(self.relative_loss(self.sequence == i) or 0.0)

    def relative_loss(self, rows: np.ndarray) -> float | None:
        """Relative loss of some queries alone; None where they have no target.

        rows: a boolean for every query.
        """
        energy = (self.weight[rows] * self.target[rows] ** 2).sum()
        error = (self.weight[rows] * self.residual[rows] ** 2).sum()
        return float(error / energy) if energy > 0 else None
