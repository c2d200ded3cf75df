"""The paper's approximate Newton method, with its guarantee checked as it goes: `iterate`.

The unknowns are X and Y together, the step has the constant length 1:

    theta <- theta - H~^-1 gradient(theta),   H~ = blockdiag(R~_x, H_yy).

R~_x is the regulariser's curvature on X, the same at every point: sketched by TensorSRHT or by
leverage sampling and factored once, or inverted exactly (`token_metric`).  H_yy is the exact block,
with a factor of d3 x d3.  The data's curvature on X and between X and Y is left out: that is small
beside R_x where the token weights are large (Lemma 9.1, Parts 4 and 6), and nowhere else.

1. *Regime.*  At every point a bound epsilon of the error, (1 - epsilon) H <= H~ and so on, is
   computed from the data (`regime`).  Steps contract in the end if it is below 1/2.  A start where
   it is not is refused; a run that gets to such a point, or whose loss rises, ends there.
2. *Stopping.*  H >= H~ / upper is proved positive definite in the regime, so that the exact Newton
   decrement is at most upper^(1/2) times that of H~; it has to fall below the tolerance.

Source: Gao, Song, Wang, Yin, Sections 9, 13, 14, with the corrections of docs/errata.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.dominance import Accuracy
from newtention.derivatives.gradient import data_loss_and_gradient
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.penalty import penalty
from newtention.layers import Bilinear
from newtention.newton.globalise import loss_noise
from newtention.newton.iterates import Iterate, MemberState, Snapshot, one_by_one
from newtention.newton.regime import LIMIT, accuracy_at, regime_at
from newtention.newton.token_metric import SketchName, TokenMetric
from newtention.newton.varpro import OutputMap
from newtention.problem import AttentionProblem
from newtention.solution import Record, Status

IDLE = 10
"""Iterations without a smaller decrement after which rounding has stopped the run."""


@dataclass(frozen=True)
class Settings:
    """What the method needs to know; see `newtention.api.Options` for the meanings."""

    tol: float
    max_iter: int
    sketch: SketchName = "tensor-srht"
    sketch_size: int | None = None
    seed: int = 0


@dataclass(frozen=True, eq=False)
class State(MemberState):
    """A point of one start.

    fresh: its Y has not been solved for.
    least: smallest decrement so far.  idle: iterations since then.
    change, step: of the last step, for its record.
    """

    fresh: bool = True
    iteration: int = 0
    least: float = math.inf
    idle: int = 0
    change: float = 0.0
    step: float = 0.0


@dataclass(frozen=True, eq=False)
class _Point:
    """A point: loss with the size of its rounding error, gradient, and the direction of the step.

    decrement: relative, of H~.
    """

    theta: Float[Tensor, "1 N"]
    loss: float
    noise: float
    gradient: Float[Tensor, "1 N"]
    direction: Float[Tensor, "1 N"]
    output: OutputMap
    decrement: float

    @property
    def finite(self) -> bool:
        """Whether loss and step are numbers."""
        return math.isfinite(self.loss) and bool(torch.isfinite(self.direction).all())


def iterate(
    problem: AttentionProblem,
    layer: Bilinear,
    theta: Float[Tensor, "b N"],
    settings: Settings,
    snapshot: Snapshot | None = None,
) -> Generator[Iterate, str | None, None]:
    """Run every start to its end, one after another, yielding at every point.

    problem: one, under TokenWeights; the starts share it, and its sketch.

    Raises:
        ValueError: a start outside the regime.
    """
    method = _Method(problem, layer, settings)
    if snapshot is None:
        states = [State(row) for row in theta]
        for i, start in enumerate(states):
            method.require_inside(start, f"Start {i + 1}: " if len(states) > 1 else "")
    else:
        states, theta = State.of_snapshot(snapshot), snapshot["theta"]
    yield from one_by_one(states, theta, lambda _, state: _iterate_one(method, state, settings))


def _iterate_one(
    method: _Method, state: State, settings: Settings
) -> Iterator[tuple[State, Record, Status | None]]:
    """The points of one start."""
    began = time.perf_counter()
    point: _Point | None = None
    while True:
        point = point or method.at(state)
        bound = method.accuracy(point)
        decrement = point.decrement * math.sqrt(min(bound.upper, 1e300))
        smaller = decrement < state.least
        state = replace(
            state,
            theta=point.theta[0],
            fresh=False,
            least=min(state.least, decrement),
            idle=0 if smaller else state.idle + 1,
        )
        status, following = None, None
        if not point.finite:
            status = Status.OVERFLOW
        elif not bound.epsilon < LIMIT:
            status = Status.LEFT_REGIME
        elif decrement <= settings.tol or point.loss <= point.noise:
            status = Status.CONVERGED
        elif state.idle >= IDLE:
            status = Status.STALLED
        elif state.iteration >= settings.max_iter:
            status = Status.ITERATION_LIMIT
        else:
            following = method.point(point.theta - point.direction)
            if not (following.finite and following.loss <= point.loss + point.noise):
                status = Status.LEFT_REGIME
        yield state, _record(state, point, bound, decrement, began), status
        if status is not None or following is None:
            return
        state = _moved(state, point, following)
        point = following


def _record(state: State, point: _Point, bound: Accuracy, decrement: float, began: float) -> Record:
    return Record(
        iteration=state.iteration,
        loss=point.loss,
        gradient=float(point.gradient.norm()),
        decrement=decrement,
        change=state.change,
        step=state.step,
        ratio=None,
        damping=0.0,
        radius=math.inf,
        model="paper",
        trials=min(1, state.iteration),
        inner=1,
        seconds=time.perf_counter() - began,
        bound=bound.epsilon,
    )


def _moved(state: State, before: _Point, after: _Point) -> State:
    length, size = float((after.theta - before.theta).norm()), float(before.theta.norm())
    return replace(
        state,
        theta=after.theta[0],
        iteration=state.iteration + 1,
        change=before.loss - after.loss,
        step=length / size if size > 0 else length,
    )


class _Method:
    """What does not change from point to point, for one problem."""

    def __init__(self, problem: AttentionProblem, layer: Bilinear, settings: Settings) -> None:
        self.problem, self.layer = problem, layer
        self.regularizer = penalty(problem, layer)
        self.energy = problem.target_energy()
        self.metric = TokenMetric.of(problem, settings.sketch, settings.sketch_size, settings.seed)

    def require_inside(self, state: State, which: str) -> None:
        """Raise ValueError if a start is outside the regime."""
        point = self.at(state)
        if not point.finite or self.accuracy(point).epsilon < LIMIT:
            return
        found = regime_at(self.problem, self.layer, point.theta, self.metric)
        raise ValueError(
            f'method="paper" cannot start here.  {which}{found.sentence}  Use method="auto".'
        )

    def at(self, state: State) -> _Point:
        """The point of a state, a fresh one with Y solved for if that lowers the loss."""
        given = self.point(state.theta[None])
        if not state.fresh:
            return given
        solved = self.point(given.output.solved(given.theta))
        return solved if solved.loss <= given.loss else given

    def point(self, theta: Float[Tensor, "1 N"]) -> _Point:
        """Loss, gradient and step: two passes over the data."""
        at, layer = Linearised(self.problem, self.layer, theta), self.layer
        data, gradient = data_loss_and_gradient(at)
        gradient = gradient + self.regularizer.gradient(theta)
        output = OutputMap.at(at, self.regularizer)
        GX, _ = layer.unpack(gradient)
        direction = torch.cat(
            [
                self.metric.solve(GX[0]).flatten(),
                output.solve(output.gradient).flatten(),
            ]
        )[None]
        loss = data + self.regularizer.value(theta)
        decrease = 0.5 * float((gradient * direction).sum())
        return _Point(
            theta,
            float(loss),
            float(loss_noise(loss, data, self.energy)) + self._penalty_noise(theta),
            gradient,
            direction,
            output,
            math.sqrt(abs(decrease) / (float(self.energy) or 1.0)),
        )

    def _penalty_noise(self, theta: Float[Tensor, "1 N"]) -> float:
        """Size of the rounding error in the penalty, which cancels where few tokens show much."""
        q = self.problem.quadratic
        absolute = replace(q, left=q.left.abs(), right=q.right.abs(), gram=q.gram.abs())
        X, Y = self.layer.unpack(theta.abs())
        return 4 * torch.finfo(theta.dtype).eps * float(absolute.value(X, Y))

    def accuracy(self, point: _Point) -> Accuracy:
        """Bounds of H~ over the exact Hessian at the point."""
        if not point.finite:
            return Accuracy(0.0, math.inf)
        return accuracy_at(self.problem, self.layer, point.theta, self.metric, point.output)
