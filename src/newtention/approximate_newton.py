"""The paper's approximate Newton examined: where its regime begins, and whether errors contract.

`paper_regime` bounds the error of the approximate Hessian at a point.  `contraction` compares the
errors of a run with the corrected theorem of Section 14 (`newtention.bounds.contraction`), with a
Lipschitz constant of the Hessian that is proved on the ball about the solution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.contraction import euclidean_factor, iterations, sharp_energy_factor
from newtention.bounds.rounding import (
    norm_upper,
    smallest_eigenvalue_lower,
    spectral_norm_upper,
)
from newtention.certify.compose import proof_bytes
from newtention.certify.evaluation import PointEvaluation, data_in_double, evaluate_point
from newtention.certify.lipschitz import LipschitzBounds
from newtention.certify.local import UNFOLD_ALWAYS
from newtention.derivatives.hessian import second_order
from newtention.display import Displayed, Row, Table, columns
from newtention.inputs import require_count
from newtention.layers import Bilinear
from newtention.memory import require_memory
from newtention.newton.regime import Regime, accuracy_at, output_map, regime_at, require_paper
from newtention.newton.token_metric import SketchName, TokenMetric
from newtention.notation import ArrayLike
from newtention.problem import AttentionProblem
from newtention.solution import Solution
from newtention.weights import Point, Weights, as_weights

REFINEMENTS = 20
"""Newton steps at most from the given solution to one exact to rounding."""


def paper_regime(
    problem: AttentionProblem,
    X: Point,
    Y: ArrayLike | None = None,
    *,
    sketch: SketchName = "none",
    sketch_size: int | None = None,
    seed: int = 0,
) -> Regime:
    """Whether the token weights dominate the data at a point, so that method "paper" works there.

    Args:
        problem: one problem under TokenWeights.
        X: query/key map (d1, d2) or (h, d1, d2), or a `BilinearAttention`.
        Y: value map (d3, p) or (h, d3, p); left out beside a layer.
        sketch: of the regulariser's curvature, as `Options(sketch=)`; by default none.
        sketch_size: its rows for each sequence, as `Options(sketch_size=)`.
        seed: of the sketch.

    Returns:
        The bound with its parts, the multiple of the weights that suffices, and the paper's
        threshold beside the weights at hand.

    Raises:
        ValueError: a problem that the method is not for, weights of the wrong shape, NaN or
            infinity.
    """
    w, metric = _prepared(problem, X, Y, sketch, sketch_size, seed)
    assert isinstance(w.layer, Bilinear)
    return regime_at(problem, w.layer, w.theta, metric)


@dataclass(frozen=True)
class ContractionStep:
    """One iterate x_k, and the step from it.

    energy, euclidean: ||x_k - x*|| in the norm of H*, the Hessian at the solution, and Euclidean.
    epsilon: of the approximate Hessian at x_k.
    a: proved relative change of the Hessian between x* and x_k, in the norm of H*; infinite if
        nothing is proved.
    condition: of the Hessian at x_k.
    energy_ratio, euclidean_ratio: measured; None after the last iterate and where the error is
        below its own rounding.
    energy_bound, euclidean_bound: by the corrected theorem; infinite where it is silent.
    holds: whether both bounds held, up to rounding.
    """

    energy: float
    euclidean: float
    epsilon: float
    a: float
    condition: float
    energy_ratio: float | None
    euclidean_ratio: float | None
    energy_bound: float
    euclidean_bound: float
    holds: bool

    def __repr__(self) -> str:
        """One line."""
        ratio = "-" if self.energy_ratio is None else f"{self.energy_ratio:.4f}"
        return (
            f"ContractionStep(energy {self.energy:.2e}, ratio {ratio}, bound "
            f"{self.energy_bound:.3g}, epsilon {self.epsilon:.3g}, "
            f"{'holds' if self.holds else 'does not hold'})"
        )


@dataclass(frozen=True)
class Contraction(Displayed):
    """A run against the corrected contraction theorem.

    steps: one for each iterate.
    curvature: proved lower bound of the smallest eigenvalue of H*.
    rounding: error in the norm of H* below which ratios mean nothing.
    """

    steps: tuple[ContractionStep, ...]
    curvature: float
    rounding: float

    @property
    def holds(self) -> bool:
        """Whether the bounds held at every step."""
        return all(step.holds for step in self.steps)

    @property
    def first_bounded(self) -> int | None:
        """The first iterate from which the theorem promises contraction; None if there is none."""
        return next((k for k, s in enumerate(self.steps) if s.energy_bound < 1), None)

    def iterations(self, accuracy: float) -> tuple[int | None, int | None]:
        """Steps from `first_bounded` until the error there has shrunk to `accuracy` times it.

        Returns:
            Those that were taken, None if the run ended before, and those that the theorem allows,
            with the largest epsilon from there on; None where it promises nothing.

        Raises:
            ValueError: accuracy outside (0, 1).
        """
        if not 0 < accuracy < 1:
            raise ValueError(f"accuracy must be in (0, 1); found {accuracy}.")
        first = self.first_bounded
        if first is None:
            return None, None
        steps = self.steps[first:]
        wanted = accuracy * steps[0].energy
        taken = next((k for k, s in enumerate(steps) if s.energy <= wanted), None)
        epsilon = max(s.epsilon for s in steps)
        if not sharp_energy_factor(epsilon, steps[0].a) < 1:
            return taken, None
        return taken, iterations(epsilon, steps[0].a, accuracy)

    def __str__(self) -> str:
        """A table."""
        return "\n".join(columns([_HEADER, *self._rows()], _WIDTHS))

    def _rows(self) -> list[Row]:
        rows: list[Row] = []
        for k, s in enumerate(self.steps):
            ratios = ["-" if r is None else f"{r:.4f}" for r in (s.energy_ratio, s.euclidean_ratio)]
            energy = (f"{s.energy:.2e}", ratios[0], f"{s.energy_bound:.3g}")
            euclidean = (f"{s.euclidean:.2e}", ratios[1], f"{s.euclidean_bound:.3g}")
            matrix = (f"{s.epsilon:.3g}", f"{s.a:.2e}", f"{s.condition:.2e}")
            rows.append((str(k), *energy, *euclidean, *matrix, "yes" if s.holds else "NO"))
        return rows

    def _verdict(self) -> str:
        bounds = "hold" if self.holds else "DO NOT hold"
        first = self.first_bounded
        promise = "promised nowhere" if first is None else f"promised from iterate {first}"
        return f"{len(self.steps)} iterates, bounds {bounds}, contraction {promise}"

    def _table(self) -> Table:
        return Table(f"Contraction: {self._verdict()}", self._rows(), header=_HEADER)

    def __repr__(self) -> str:
        """One line."""
        return f"Contraction({self._verdict()})"


_HEADER = (
    *("k", "energy", "ratio", "bound", "Euclidean", "ratio", "bound"),
    *("epsilon", "a", "cond H", "holds"),
)
_WIDTHS = (4, 9, 8, 8, 9, 8, 8, 8, 8, 8)


def contraction(
    problem: AttentionProblem,
    points: Sequence[tuple[ArrayLike, ArrayLike]],
    solution: Solution | tuple[ArrayLike, ArrayLike],
    *,
    sketch: SketchName = "tensor-srht",
    sketch_size: int | None = None,
    seed: int = 0,
) -> Contraction:
    """How the errors of a run of method "paper" shrink, beside what is proved.

    Args:
        problem: one problem in float64 under TokenWeights.
        points: (X, Y) of the iterates in order, as a callback collects them.
        solution: what the run returned, or a point near it; exact Newton steps make it exact to
            rounding.
        sketch: that of the run, `Options(sketch=)`.
        sketch_size: that of the run, `Options(sketch_size=)`.
        seed: that of the run.

    Returns:
        Errors, ratios and bounds of every step; `print` gives a table.

    Raises:
        ValueError: no points, weights of the wrong shape, a problem that the method is not for or
            in float32, or a Hessian that is not proved positive definite at the solution.
        MemoryError: the dense Hessians do not fit into free memory.
    """
    if not len(points):
        raise ValueError("points must hold at least one (X, Y); found none.")
    X, Y = (solution.X, solution.Y) if isinstance(solution, Solution) else solution
    w, metric = _prepared(problem, X, Y, sketch, sketch_size, seed)
    if problem.like.dtype != torch.float64:
        raise ValueError("contraction needs a problem in float64; found float32.")
    layer = w.layer
    assert isinstance(layer, Bilinear)
    require_memory(
        f"The Hessians of {layer.size} unknowns",
        proof_bytes(layer),
        problem.like.device,
        "a narrower problem would do.",
    )
    iterates = torch.cat([as_weights(problem, *point).theta for point in points])
    target = _refined(problem, layer, w.theta)
    near = _Neighbourhood.of(problem, layer, target)
    errors = [near.errors(theta) for theta in iterates]
    following: list[tuple[float, float] | None] = [*errors[1:], None]
    steps = [
        _step(problem, layer, metric, near, theta[None], before, after)
        for theta, before, after in zip(iterates, errors, following, strict=True)
    ]
    return Contraction(tuple(steps), near.curvature, near.rounding)


@dataclass(frozen=True, eq=False)
class _Neighbourhood:
    """The solution and how much the Hessian changes about it.

    factor: L of H* = L L^T.  bounds: of the third derivative.
    whitened: norm of the unfolded third derivative where H* is I; None where it costs too much.
    stretch: upper bound of the norm of L^-T.
    """

    point: PointEvaluation
    curvature: float
    rounding: float
    factor: Float[Tensor, "N N"]
    bounds: LipschitzBounds
    whitened: float | None
    stretch: float

    @classmethod
    def of(
        cls, problem: AttentionProblem, layer: Bilinear, theta: Float[Tensor, "1 N"]
    ) -> _Neighbourhood:
        data = data_in_double(problem)
        point = evaluate_point(problem, layer, theta)
        H = point.hessian
        curvature = smallest_eigenvalue_lower(H, point.hessian_error)
        factor, failed = torch.linalg.cholesky_ex(H)
        if int(failed) or not curvature > 0:
            raise ValueError(
                "solution must have a positive definite Hessian; found a smallest eigenvalue of "
                f"{float(torch.linalg.eigvalsh(H)[0]):.3g}, not proved positive."
            )
        W = torch.linalg.solve_triangular(factor, torch.eye(len(H)).to(H), upper=False).mT
        stretch = spectral_norm_upper(W)
        bounds, whitened = LipschitzBounds(data, point).with_statistics(), None
        if layer.size <= UNFOLD_ALWAYS:
            whitened = bounds.unfolded(W, stretch)
        # The solution is as near to the exact one as its gradient tells.
        gradient = norm_upper(point.gradient) + point.gradient_error
        rounding = gradient / math.sqrt(curvature)
        return cls(point, curvature, rounding, factor, bounds, whitened, stretch)

    def errors(self, theta: Float[Tensor, " N"]) -> tuple[float, float]:
        """Distance from the solution in the norm of H*, and Euclidean."""
        e = theta - self.point.theta
        return float((self.factor.mT @ e).norm()), float(e.norm())

    def changes(self, energy: float, euclidean: float) -> tuple[float, float]:
        """a for the norm of H*, and M r / l for the Euclidean one."""
        plain = self.bounds.at(euclidean).value * euclidean / self.curvature
        if self.whitened is None:
            return plain, plain
        fourth = self.bounds.fourth(self.stretch * energy) * self.stretch**4
        return min(plain, (self.whitened + fourth * energy) * energy), plain


def _step(
    problem: AttentionProblem,
    layer: Bilinear,
    metric: TokenMetric,
    near: _Neighbourhood,
    theta: Float[Tensor, "1 N"],
    before: tuple[float, float],
    after: tuple[float, float] | None,
) -> ContractionStep:
    a, plain = near.changes(*before)
    epsilon = accuracy_at(problem, layer, theta, metric, output_map(problem, layer, theta)).epsilon
    values = torch.linalg.eigvalsh(second_order(problem, *layer.unpack(theta))[3].to_dense()[0])
    condition = float(values[-1] / values[0]) if values[0] > 0 else math.inf
    bounds = sharp_energy_factor(epsilon, a), math.inf
    if math.isfinite(condition):
        bounds = bounds[0], euclidean_factor(epsilon, plain, condition)
    ratios: tuple[float | None, float | None] = (None, None)
    holds = True
    if after is not None:
        slack = near.rounding, near.rounding / math.sqrt(near.curvature)
        if before[0] > near.rounding:
            ratios = after[0] / before[0], after[1] / before[1]
        holds = all(
            y <= bound * (x + extra) + extra
            for x, y, bound, extra in zip(before, after, bounds, slack, strict=True)
        )
    return ContractionStep(*before, epsilon, a, condition, *ratios, *bounds, holds)


def _prepared(
    problem: AttentionProblem,
    X: Point,
    Y: ArrayLike | None,
    sketch: SketchName,
    sketch_size: int | None,
    seed: int,
) -> tuple[Weights, TokenMetric]:
    if sketch not in ("tensor-srht", "leverage", "none"):
        raise ValueError(f'sketch must be "tensor-srht", "leverage" or "none"; found {sketch!r}.')
    if sketch_size is not None:
        require_count("sketch_size", sketch_size, 1)
    seed = require_count("seed", seed, 0)
    w = as_weights(problem, X, Y)
    require_paper(problem, w.layer, False)
    return w, TokenMetric.of(problem, sketch, sketch_size, seed)


def _refined(
    problem: AttentionProblem, layer: Bilinear, theta: Float[Tensor, "1 N"]
) -> Float[Tensor, "1 N"]:
    """Where exact Newton steps lead, until they stop getting shorter."""
    shortest = math.inf
    for _ in range(REFINEMENTS):
        _, GX, GY, blocks = second_order(problem, *layer.unpack(theta))
        factor, failed = torch.linalg.cholesky_ex(blocks.to_dense()[0])
        if int(failed):
            break
        step = torch.cholesky_solve(layer.pack(GX, GY).mT, factor).mT
        length = float(step.norm())
        if not length < 0.5 * shortest:
            break
        theta, shortest = theta - step, length
    return theta
