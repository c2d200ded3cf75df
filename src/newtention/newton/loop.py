"""Newton's method for a batch of independent objectives (`objective.Objective`).

Attention regression is one of them (`projected.ProjectedLoss`): its loss is quadratic in Y, at
every point Y is the best one for its X, and the method minimises f(X) = min_Y L(X, Y).  One
iteration:

1. *Derivatives.*  Loss, gradient and Hessian in one pass over the data, the quadratic part of the
   unknowns eliminated.  Far from a solution the Hessian has many negative eigenvalues, and
   following them early leads to poor local minima: a member starts with the Gauss-Newton matrix
   and changes to the full Hessian after ten iterations, or earlier once a step gains little.
2. *Metric.*  The Hessian is scaled by the square root of its absolute diagonal, with a floor for
   directions without curvature (invariances of a layer).  All lengths are in this metric.
3. *Step.*  The trust-region subproblem on Cholesky factors, which uses negative curvature and
   handles the hard case (`linsolve.trust_region`).
4. *Acceptance.*  Solve for the quadratic part, compare the actual decrease with the model's, adapt
   the radius, and retry with a smaller one if need be: the loss never rises by more than its
   rounding error.
5. *Stopping.*  See `stopping`.  Members that are done leave the batch.

Every quantity below has the batch as its first axis, and no decision of one member depends on
another, so a batch gives the same answers as single solves.  Losses and derivatives are in the
units of `Objective.near` the point of their iteration; records are absolute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from newtention.linsolve.trust_region import TrustRegionStep, trust_region_step
from newtention.newton.globalise import LITTLE_GAIN, accepted, next_radius, ratio
from newtention.newton.iterates import Iterate, Snapshot
from newtention.newton.model import Model, Rows, model_at
from newtention.newton.objective import Objective
from newtention.newton.stopping import converged, relative_decrement
from newtention.solution import Record, Status

MAX_TRIALS = 30
FIRST_RADIUS = 0.5
"""First radius relative to the length of the start."""


@dataclass(frozen=True)
class Settings:
    """What the loop needs to know.

    gauss_newton_iterations: iterations with the Gauss-Newton matrix before the full Hessian.
    metric_floor: least metric entry relative to the mean absolute diagonal of the Hessian.
    """

    tol: float
    max_iter: int
    gauss_newton_iterations: int = 10
    metric_floor: float = 1e-3


@dataclass(frozen=True, eq=False)
class Members(Rows):
    """State of the members of a batch.

    radius: trust-region radius; 0 before the first iteration.
    lam: multiplier of the last subproblem, the first guess for the next.
    full: whether the full Hessian is used, rather than the Gauss-Newton matrix.
    invisible: least decrement since steps became too small for the loss to show; infinite before.
    stuck: no trial step was accepted.
    """

    theta: Float[Tensor, "b N"]
    radius: Float[Tensor, " b"]
    lam: Float[Tensor, " b"]
    full: Bool[Tensor, " b"]
    invisible: Float[Tensor, " b"]
    stuck: Bool[Tensor, " b"]


@dataclass(frozen=True, eq=False)
class Taken(Rows):
    """The last step of each member; see `Record` for the fields."""

    change: Float[Tensor, " b"]
    step: Float[Tensor, " b"]
    ratio: Float[Tensor, " b"]
    trials: Float[Tensor, " b"]


def iterate(
    objective: Objective,
    theta: Float[Tensor, "b N"],
    settings: Settings,
    snapshot: Snapshot | None = None,
) -> Generator[Iterate, str | None, None]:
    """Run Newton's method until every member has ended, yielding at every point, the start first.

    theta is used as given if solving for its quadratic part would raise the loss, as only rounding
    can.
    snapshot: the state to continue from; its point is yielded again.
    """
    began = time.perf_counter()
    zero = torch.zeros_like(objective.energy)
    first = factorisations = 0
    active = torch.arange(objective.batch, device=theta.device)
    if snapshot is None:
        members = _first_members(objective.near(theta), theta)
        taken = Taken(change=zero, step=zero, ratio=zero + torch.nan, trials=zero)
    else:
        members, taken = Members.of(snapshot), Taken.of(snapshot)
        first, factorisations = (int(n) for n in snapshot["counts"].tolist())
        if len(snapshot["active"]) < objective.batch:
            active = snapshot["active"]
            objective = objective.take(active)
    last = max(first, settings.max_iter)
    for iteration in range(first, last + 1):
        # Before the look: what it adds depends on max_iter, and would count twice.
        snapshot_of = _snapshots(members, taken, active, [iteration, factorisations])
        part = members.select(active)
        if iteration in (settings.gauss_newton_iterations, last):
            part = replace(part, full=torch.ones_like(part.full))
        objective = objective.near(part.theta)
        part, model, step = _look(objective, part, settings.metric_floor)
        factorisations += step.factorisations
        idle = (step.decrease <= model.noise) & ~part.full
        if bool(idle.any()):  # stationary for Gauss-Newton: the full Hessian must decide
            part = replace(part, full=part.full | idle)
            part, model, step = _look(objective, part, settings.metric_floor)
            factorisations += step.factorisations
        decrement = relative_decrement(step.decrease, objective.energy)
        part, ended = _tests(model, part, step, decrement, objective.energy, settings.tol)
        if iteration == last:
            ended = dict.fromkeys(range(objective.batch), Status.ITERATION_LIMIT) | ended
        members = members.merge(active, part)
        rows = _record_rows(objective, model, part, taken, step, decrement)
        who = active.tolist()
        now = time.perf_counter() - began
        records = {
            k: Record(iteration=iteration, seconds=now, inner=factorisations, **row)
            for k, row in zip(who, rows, strict=True)
        }
        yield Iterate(
            members.theta,
            records,
            {who[i]: status for i, status in ended.items()},
            snapshot_of,
        )

        staying = [i for i in range(len(who)) if i not in ended]
        if not staying:
            return
        if len(staying) < len(who):
            keep = torch.tensor(staying, device=theta.device)
            objective, active = objective.take(keep), active[keep]
            part, model, step = part.select(keep), model.select(keep), step.select(keep)
        part, taken, factorisations = _take_step(objective, part, model, step)
        del model, step  # or two Hessians would be alive while the next one is formed
        members = members.merge(active, part)


def _snapshots(
    members: Members, taken: Taken, active: Tensor, counts: list[int]
) -> Callable[[], Snapshot]:
    return lambda: {
        **members.tensors(),
        **taken.tensors(),
        "active": active,
        "counts": torch.tensor(counts),
    }


def _first_members(objective: Objective, theta: Tensor) -> Members:
    """The start, solved for its quadratic part."""
    solved, loss = objective.solved(theta)
    if solved is not theta:
        better = loss <= objective.loss(theta)
        theta = torch.where(better[:, None], solved, theta)
    zero = torch.zeros_like(objective.energy)
    no = torch.zeros_like(zero, dtype=torch.bool)
    return Members(theta, radius=zero, lam=zero, full=no, invisible=zero + torch.inf, stuck=no)


def _look(
    objective: Objective, at: Members, metric_floor: float
) -> tuple[Members, Model, TrustRegionStep]:
    """The model at the members' points and its step; sets the radius where there is none yet."""
    model = model_at(objective, at.theta, at.full, metric_floor)
    radius = torch.where(at.radius > 0, at.radius, FIRST_RADIUS * model.length)
    step = trust_region_step(model.H, model.g, radius, at.lam)
    return replace(at, radius=radius), model, step


def _tests(
    model: Model,
    at: Members,
    step: TrustRegionStep,
    decrement: Float[Tensor, " b"],
    energy: Float[Tensor, " b"],
    tol: float,
) -> tuple[Members, dict[int, Status]]:
    """Who ends here.  Steps that the loss cannot show must at least halve the decrement."""
    scaled_gradient = relative_decrement(0.5 * model.g.square().sum(-1), energy)
    done = converged(decrement, scaled_gradient, step.interior, at.full, tol)
    invisible = (step.decrease <= model.noise) & step.interior & at.full
    stalled = at.stuck | (invisible & (decrement > 0.5 * at.invisible))
    least = torch.where(invisible, torch.minimum(at.invisible, decrement), torch.inf)
    ended: dict[int, Status] = {}
    # A loss below its own rounding error cannot be lowered: the fit is exact.
    done |= model.loss <= model.noise
    tests = ((~model.finite, Status.OVERFLOW), (done, Status.CONVERGED), (stalled, Status.STALLED))
    for test, status in tests:
        for i in test.nonzero()[:, 0].tolist():
            ended.setdefault(i, status)
    return replace(at, invisible=least), ended


def _record_rows(
    objective: Objective,
    model: Model,
    at: Members,
    taken: Taken,
    step: TrustRegionStep,
    decrement: Float[Tensor, " b"],
) -> list[dict[str, Any]]:
    """Fields of the members' records."""
    columns: dict[str, list[Any]] = {
        "loss": objective.absolute(model.loss).tolist(),
        "gradient": objective.absolute(model.gradient).tolist(),
        "decrement": decrement.tolist(),
        "damping": step.lam.tolist(),
        "radius": at.radius.tolist(),
        "model": ["newton" if full else "gauss-newton" for full in at.full.tolist()],
        "change": taken.change.tolist(),
        "step": taken.step.tolist(),
        "ratio": [r if math.isfinite(r) else None for r in taken.ratio.tolist()],
        "trials": [int(n) for n in taken.trials.tolist()],
    }
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _take_step(
    objective: Objective, at: Members, model: Model, step: TrustRegionStep
) -> tuple[Members, Taken, int]:
    """Try steps, the radius shrinking, until each member has moved; also count factorisations."""
    zero = torch.zeros_like(model.loss)
    taken = Taken(change=zero, step=zero, ratio=zero, trials=zero)
    pending = torch.arange(objective.batch, device=zero.device)
    sub, factorisations = objective, 0
    for trial in range(1, MAX_TRIALS + 1):
        moved, news, success = _try(sub, at.select(pending), model.select(pending), step)
        news = replace(news, step=news.step / model.length[pending], trials=news.trials + trial)
        at, taken = at.merge(pending, moved), taken.merge(pending, news)
        if bool(success.all()):
            pending = pending[:0]
            break
        pending = pending[~success]
        sub = objective.take(pending)
        rest = model.select(pending)
        step = trust_region_step(rest.H, rest.g, at.radius[pending], at.lam[pending])
        factorisations += step.factorisations
    stuck = torch.zeros_like(at.stuck).index_fill(0, pending, True)
    little = taken.change <= LITTLE_GAIN * model.loss
    taken = replace(taken, change=objective.absolute(taken.change))
    return replace(at, full=at.full | little, stuck=stuck), taken, factorisations


def _try(
    objective: Objective, at: Members, model: Model, step: TrustRegionStep
) -> tuple[Members, Taken, Bool[Tensor, " b"]]:
    """Try one step: the members' new state, what to record, and who moved."""
    moves = step.step.shape[-1]
    moved_part = at.theta[:, :moves] + step.step / model.root
    theta, loss = objective.solved(torch.cat([moved_part, at.theta[:, moves:]], 1))
    change = model.loss - loss
    gain = ratio(change, step.decrease)
    success = accepted(change, step.decrease, model.noise)
    invisible = success & (step.decrease <= model.noise)
    norm = torch.linalg.vector_norm(step.step, dim=-1)
    moved = replace(
        at,
        theta=torch.where(success[:, None], theta, at.theta),
        radius=next_radius(at.radius, norm, gain, invisible),
        lam=step.lam,
    )
    zero = torch.zeros_like(change)
    news = Taken(
        change=torch.where(success, change, zero),
        step=torch.where(success, norm, zero),
        ratio=torch.where(invisible, torch.nan, gain),
        trials=zero,
    )
    return moved, news, success
