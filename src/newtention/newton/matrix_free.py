"""Matrix-free Newton for layers of any width: `iterate`.

The loss is linear least squares in the output map (W_O and b_O, or Y), so that map is solved for at
every point and the method minimises the projected loss over the other weights.  One iteration:

1. *Derivatives.*  One pass over the data gives loss and gradient; evaluations are kept for the
   products if they fit a budget.
2. *Preconditioner.*  Kronecker factors of the Gauss-Newton matrix on a sample of the sequences
   (`metric`).  Its inverse is also the norm of the steps: every block then has a curvature near 1,
   and one radius damps the tiny query/key curvature and the large value curvature alike.
3. *Step.*  Truncated conjugate gradients on the Gauss-Newton matrix, or on the full Hessian (if
   asked for, and once steps are too small for the loss to show), with the output map eliminated
   exactly (`reduced`), inside a trust region (`linsolve.cg`); negative curvature is followed to the
   boundary.  They end when the residual meets the forcing sequence, or when another product gains
   less than a fresh step would.
4. *Acceptance.*  The output map is solved for at the trial point and the actual decrease compared
   with the model's.  A rejected step is cut at a smaller radius of the same path, which costs no
   product.
5. *Stopping.*  As in `loop`.

A state holds all that the next iteration depends on, so that a run continued from one repeats an
uninterrupted run bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.derivatives.gradient import backward, tile_loss
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.penalty import penalty
from newtention.derivatives.products import Kind
from newtention.layers import Parametrisation
from newtention.linsolve.cg import Ending, Path, Rule, truncated_cg
from newtention.newton.globalise import ACCEPT, GROW, LITTLE_GAIN, SHRINK, loss_noise
from newtention.newton.iterates import Iterate, MemberState, Snapshot, one_by_one
from newtention.newton.metric import Metric, Preconditioner
from newtention.newton.reduced import Curvature
from newtention.newton.sampled import SampledInverse
from newtention.newton.varpro import OutputMap
from newtention.problem import AttentionProblem
from newtention.solution import Record, Status

MAX_TRIALS = 30
OVERHEAD = 5.0
"""Default of `Settings.overhead`."""
METRIC_ROWS = 4096
"""Query rows that the preconditioner is built from, at least; all if there are fewer."""
LOOSEST, TIGHTEST = 0.5, 1e-6
"""Range of the forcing term."""
LOCAL = 0.03
"""Forcing terms below this mean fast convergence, where accuracy pays more than a fresh step."""
SHARP = 0.1
"""Loosest forcing term of the exact Hessian with a sampled preconditioner."""
IDLE = 3
"""Steps too small for the loss to show in which the decrement must halve once."""
LARGEST_OUTPUT_MAP = 2048
"""Rows up to which the output map is solved for: its Gram matrix is decomposed at every point."""


@dataclass(frozen=True)
class Settings:
    """What the loop needs to know; see `newtention.api.Options` for the meanings.

    sample_rows: the preconditioner is the factored matrix of so many query rows (`sampled`) instead
        of `preconditioner`.
    gauss_newton_iterations: the exact Hessian is used from this iteration on, or earlier once a
        step gains little, as in `loop`; None: once steps are too small for the loss to show.
    overhead: cost of a new step (evaluations, gradient, preconditioner) in products.
    """

    tol: float
    max_iter: int
    kind: Kind = "gauss-newton"
    max_products: int = 100
    preconditioner: Preconditioner = "attended"
    curvature_share: float = 1.0
    cache_bytes: int = 0
    seed: int = 0
    sample_rows: int | None = None
    gauss_newton_iterations: int | None = None
    overhead: float = OVERHEAD


@dataclass(frozen=True, eq=False)
class State(MemberState):
    """A point of one problem, and what the method has learnt on the way.

    fresh: the point is a start whose output map has not been solved for.
    slope: least norm of the gradient so far, measured by the preconditioner; 0 at the start.
    invisible: decrement when steps became too small for the loss to show, renewed whenever it has
        halved; infinite before.  idle: iterations since then.
    stuck: no trial step was accepted.
    full: whether the exact Hessian is used, rather than the Gauss-Newton matrix: if asked for, and
        since steps were first too small for the loss to show.  From there the gradient counts,
        which the Gauss-Newton matrix lowers slowly where the residual is not zero.
    change, step, ratio, trials: of the last step, for its record.
    """

    fresh: bool = True
    iteration: int = 0
    radius: float = math.inf
    slope: float = 0.0
    invisible: float = math.inf
    idle: int = 0
    stuck: bool = False
    full: bool = False
    change: float = 0.0
    step: float = 0.0
    ratio: float = math.nan
    trials: int = 0


@dataclass(frozen=True, eq=False)
class _Point:
    """A point whose output map is the best one, if that is solved for."""

    data: Linearised
    output: OutputMap | None
    data_loss: float
    loss: float


@dataclass(frozen=True, eq=False)
class _Look:
    """What the model says at a point.

    path: of the step.  slope: norm of the gradient, measured by the preconditioner.  gradient: its
    Euclidean norm.  noise: rounding error in the loss.  status: why the run ends here, if it does.
    """

    loss: float
    noise: float
    gradient: float
    slope: float
    decrement: float
    path: Path
    invisible: float
    idle: int
    status: Status | None


def iterate(
    problems: Sequence[AttentionProblem],
    layer: Parametrisation,
    theta: Float[Tensor, "b N"],
    free: Float[Tensor, " N"],
    settings: Settings,
    expired: Callable[[], bool] = lambda: False,
    snapshot: Snapshot | None = None,
) -> Generator[Iterate, str | None, None]:
    """Run every member of a batch to its end, one after another, yielding at every point.

    problems: one for each member, none a stack.
    free: 1 for unknowns to solve for, 0 for those to leave.
    expired: whether the time limit has passed; asked after every product.
    snapshot: the state to continue from; its point is yielded again.
    """
    if snapshot is None:
        states = [State(row, full=settings.kind == "full") for row in theta]
    else:
        states, theta = State.of_snapshot(snapshot), snapshot["theta"]
    yield from one_by_one(
        states,
        theta,
        lambda i, state: _iterate_one(problems[i], layer, state, free, settings, expired),
        expired,
    )


def _iterate_one(
    problem: AttentionProblem,
    layer: Parametrisation,
    state: State,
    free: Float[Tensor, " N"],
    settings: Settings,
    expired: Callable[[], bool],
) -> Iterator[tuple[State, Record, Status | None]]:
    """The points of one member; ends without a status if the time runs out between two."""
    began = time.perf_counter()
    method = _Method(problem, layer, free, settings, expired)
    point: _Point | None = None
    while True:
        point = point or method.at(state)
        state = replace(state, theta=point.data.theta[0], fresh=False)
        look = method.look(point, state)
        record = Record(
            iteration=state.iteration,
            loss=point.loss,
            gradient=look.gradient,
            decrement=look.decrement,
            change=state.change,
            step=state.step,
            ratio=state.ratio if math.isfinite(state.ratio) else None,
            damping=0.0,
            radius=state.radius,
            model="newton" if state.full else "gauss-newton",
            trials=state.trials,
            inner=look.path.products,
            seconds=time.perf_counter() - began,
        )
        yield state, record, look.status
        if look.status is not None:
            return
        point = None  # or its evaluations would be alive beside those of the trial points
        full = state.full or math.isfinite(look.invisible) or _late(state, look, settings)
        state = replace(state, full=full, invisible=look.invisible, idle=look.idle)
        moved = method.advance(state, look)
        if moved is None:
            return
        state, point = moved
        del moved  # it holds the point, too


class _Method:
    """The steps of an iteration, for one problem."""

    def __init__(
        self,
        problem: AttentionProblem,
        layer: Parametrisation,
        free: Float[Tensor, " N"],
        settings: Settings,
        expired: Callable[[], bool],
    ) -> None:
        self.problem, self.layer, self.settings, self.expired = problem, layer, settings, expired
        self.energy = float(problem.target_energy())
        self.regularizer = penalty(problem, layer)
        start = layer.output_start
        self.eliminate = eliminates(layer) and bool((free[start:] > 0).all())
        self.free = torch.cat([free[:start], 0 * free[start:]]) if self.eliminate else free
        rows = sum(problem.layout.queries)
        self.sample = problem.sample(METRIC_ROWS / rows)
        self.curvature_data = problem.sample(settings.curvature_share)

    def at(self, state: State) -> _Point:
        """The point of a state; a fresh one with its output map solved for."""
        data, output = self._evaluate(state.theta[None])
        given = self._point(data, output)
        if not state.fresh or output is None:
            return given
        solved = self._point(data.with_output(output.solved(data.theta)), output)
        return solved if solved.loss <= given.loss else given

    def point(self, theta: Float[Tensor, "1 N"]) -> _Point:
        """Evaluate, the output map solved for."""
        data, output = self._evaluate(theta)
        if output is not None:
            data = data.with_output(output.solved(theta))
        return self._point(data, output)

    def _evaluate(self, theta: Float[Tensor, "1 N"]) -> tuple[Linearised, OutputMap | None]:
        data = Linearised.at(self.problem, self.layer, theta, self.settings.cache_bytes)
        return data, OutputMap.at(data, self.regularizer) if self.eliminate else None

    def _point(self, data: Linearised, output: OutputMap | None) -> _Point:
        loss = float(data.reduce(lambda at: (tile_loss(at),))[0])
        return _Point(data, output, loss, loss + float(self.regularizer.value(data.theta)))

    def look(self, point: _Point, state: State) -> _Look:
        """The gradient, the path of the next step, and whether the run ends here."""
        theta = point.data.theta
        g = point.data.reduce(lambda at: (backward(at, self.layer, theta, at.qC),))[0]
        g = (g + self.regularizer.gradient(theta))[0] * self.free
        gradient = _norm(g)
        noise = float(
            loss_noise(
                *(
                    torch.tensor([x], dtype=theta.dtype)
                    for x in (point.loss, point.data_loss, self.energy)
                )
            )
        )
        look = _Look(point.loss, noise, gradient, 0.0, math.inf, Path(), state.invisible, 0, None)
        solvable = point.output is None or bool(torch.isfinite(point.output.inverse.root).all())
        if not (math.isfinite(gradient) and math.isfinite(point.loss) and solvable):
            return replace(look, gradient=math.inf, status=Status.OVERFLOW)
        metric = self._metric(point.data)
        square = float(g @ metric.solve(g))
        if not math.isfinite(square) or (square <= 0 < gradient):
            return replace(look, status=Status.OVERFLOW)
        slope = math.sqrt(max(0.0, square))
        look = replace(look, slope=slope, decrement=self._relative(0.5 * square))
        if self.expired():
            return replace(look, status=Status.TIME_LIMIT)
        accuracy = LOOSEST
        if state.slope > 0:
            # Eisenstat and Walker 1996, choice 2.
            accuracy = min(LOOSEST, max(TIGHTEST, 0.9 * (slope / state.slope) ** 2))
        worth = min(1.0, accuracy / LOCAL)
        if math.isfinite(state.invisible):  # the loss shows no gain: solve for the gradient
            accuracy, worth = LOCAL, 0.0
        elif state.full and self.settings.sample_rows is not None:
            # Products are few beside the work of a new sample: steps that are worth it.
            accuracy, worth = min(accuracy, SHARP), 0.0
        rule = Rule(accuracy, self.settings.overhead, self.settings.max_products, worth)
        product = self._curvature(point, state.full).product
        path = truncated_cg(product, g, metric.solve, state.radius, rule, self.expired)
        if path.products and not path.points:
            return replace(look, path=path, status=Status.OVERFLOW)
        decrease = path.decreases[-1] if path.points else 0.0
        look = replace(look, path=path, decrement=self._relative(decrease))
        if path.ending is Ending.DEADLINE:
            return replace(look, status=Status.TIME_LIMIT)
        return self._tests(look, state)

    def _tests(self, look: _Look, state: State) -> _Look:
        """Whether the run ends here; see `loop`."""
        path, tol = look.path, self.settings.tol
        decrease = path.decreases[-1] if path.points else 0.0
        interior = path.ending in (Ending.ACCURATE, Ending.POOR_GAIN)
        scaled = self._relative(0.5 * look.slope**2)
        converged = interior and look.decrement <= tol and scaled <= tol
        converged = converged or look.loss <= look.noise
        least, idle = state.invisible, state.idle
        if decrease > look.noise:
            least, idle = math.inf, 0
        elif not (state.full and path.ending in (Ending.BOUNDARY, Ending.NEGATIVE)):
            # The exact Hessian's steps to the boundary do not count: the next one is longer.
            halved = look.decrement <= 0.5 * least
            least, idle = (look.decrement, 0) if halved else (least, idle + 1)
        status = None
        if converged:
            status = Status.CONVERGED
        elif state.stuck or not path.points or idle >= IDLE:
            status = Status.STALLED
        elif state.iteration >= self.settings.max_iter:
            status = Status.ITERATION_LIMIT
        return replace(look, invisible=least, idle=idle, status=status)

    def advance(self, state: State, look: _Look) -> tuple[State, _Point | None] | None:
        """Try the step, cut shorter until it is accepted; the point is None if none was.

        None if the time ran out before.
        """
        path, radius = look.path, state.radius
        # The least so far: a gradient that rose and fell again is no sign of fast convergence.
        least = look.slope if state.slope == 0 else min(state.slope, look.slope)
        state = replace(state, iteration=state.iteration + 1, slope=least)
        for trial in range(1, MAX_TRIALS + 1):
            if trial > 1 and self.expired():
                return None
            x, length, decrease = path.within(radius)
            point = self.point((state.theta + x)[None])
            change = look.loss - point.loss
            gain = change / decrease if decrease > 0 and math.isfinite(change) else -math.inf
            invisible = decrease <= look.noise and change >= -look.noise
            if invisible or gain > 0.75:
                radius = max(radius, GROW * length)
            elif gain < 0.25:
                # Faster the longer it takes: the scale of a flat start is unknown.
                radius = SHRINK ** (1 + trial // 10) * length
            if gain > ACCEPT or invisible:
                scale, moved = _norm(state.theta), _norm(point.data.theta[0] - state.theta)
                return replace(
                    state,
                    radius=radius,
                    change=change,
                    step=moved / scale if scale > 0 else moved,
                    ratio=math.nan if invisible else gain,
                    trials=trial,
                ), point
            del point
        return replace(
            state, radius=radius, change=0.0, step=0.0, ratio=0.0, trials=trial, stuck=True
        ), None

    def _metric(self, data: Linearised) -> Metric | SampledInverse:
        if self.settings.sample_rows is not None:
            return SampledInverse.at(data, self.settings.sample_rows, self.settings.seed)
        sample = Linearised(self.sample, self.layer, data.theta)
        kind = self.settings.preconditioner
        return Metric.at(sample, self.free, kind, self.regularizer, self.settings.seed)

    def _curvature(self, point: _Point, full: bool) -> Curvature:
        data, output = point.data, point.output
        if self.curvature_data is not self.problem:
            theta, cache = data.theta, self.settings.cache_bytes
            data = Linearised.at(self.curvature_data, self.layer, theta, cache)
            output = OutputMap.at(data, self.regularizer) if self.eliminate else None
        kind: Kind = "full" if full else "gauss-newton"
        return Curvature(data, self.regularizer, kind, self.free, output)

    def _relative(self, decrease: float) -> float:
        return math.sqrt(max(0.0, decrease) / (self.energy or 1.0))


def _late(state: State, look: _Look, settings: Settings) -> bool:
    """Whether the Gauss-Newton phase ends after this iteration."""
    if settings.gauss_newton_iterations is None:
        return False
    little = state.iteration > 0 and state.change <= LITTLE_GAIN * look.loss
    return little or state.iteration + 1 >= settings.gauss_newton_iterations


def _norm(t: Float[Tensor, " N"]) -> float:
    """Euclidean norm, also of numbers whose squares overflow or underflow."""
    largest = float(t.abs().max())
    if not 0 < largest < math.inf:
        return largest
    return largest * float(torch.linalg.vector_norm(t / largest))


def eliminates(layer: Parametrisation) -> bool:
    """Whether there is an output map, small enough to be solved for at every point."""
    return 0 < layer.output_rows <= LARGEST_OUTPUT_MAP
