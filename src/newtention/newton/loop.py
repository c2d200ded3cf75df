"""Newton's method for attention regression, for a batch of independent problems.

The unknowns are X and Y, but the loss is quadratic in Y: at every point Y is the best one for its X
(`varpro.project`), and the method minimises f(X) = min_Y L(X, Y).  Its gradient and Hessian come
from the exact blocks by eliminating Y (`varpro.eliminate_output`).  One iteration:

1. *Derivatives.*  Loss, gradient and Hessian blocks in one pass over the data.  Far from a solution
   the Hessian has many negative eigenvalues, and following them early leads to poor local minima:
   a member starts with the Gauss-Newton matrix and changes to the full Hessian after ten
   iterations, or earlier once a step gains little.
2. *Metric.*  The Hessian is scaled by the square root of its absolute diagonal, with a floor for
   directions without curvature (invariances of the layer).  All lengths are in this metric.
3. *Step.*  The trust-region subproblem on Cholesky factors, which uses negative curvature and
   handles the hard case (`linsolve.trust_region`).
4. *Acceptance.*  Project Y, compare the actual decrease with the model's, adapt the radius, and
   retry with a smaller one if need be: the loss never rises by more than its rounding error.
5. *Stopping.*  See `stopping`.  Members that are done leave the batch.

Every quantity below has the batch as its first axis, and no decision of one member depends on
another, so a batch gives the same answers as single solves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from newtention.derivatives.gradient import data_loss
from newtention.derivatives.hessian import second_order
from newtention.linsolve.trust_region import TrustRegionStep, trust_region_step
from newtention.newton.globalise import accepted, loss_noise, next_radius, ratio
from newtention.newton.stopping import converged, relative_decrement
from newtention.newton.varpro import eliminate_output, project
from newtention.problem import AttentionProblem
from newtention.solution import Record, Status

MAX_TRIALS = 30
FIRST_RADIUS = 0.5
"""First radius relative to the length of X0."""


LITTLE_GAIN = 1e-3
"""A Gauss-Newton step that lowers the loss by less than this fraction ends that phase."""


@dataclass(frozen=True)
class Settings:
    """What the loop needs to know.

    gauss_newton_iterations: iterations with the Gauss-Newton matrix before the full Hessian.
    metric_floor: least metric entry relative to the mean absolute diagonal of the reduced Hessian.
    """

    tol: float
    max_iter: int
    gauss_newton_iterations: int = 10
    metric_floor: float = 1e-3


@dataclass(frozen=True, eq=False)
class Members:
    """State of the members of a batch.

    radius: trust-region radius; 0 before the first iteration.
    lam: multiplier of the last subproblem, the first guess for the next.
    full: whether the full Hessian is used, rather than the Gauss-Newton matrix.
    invisible: least decrement since steps became too small for the loss to show; infinite before.
    """

    X: Float[Tensor, "b h d1 d2"]
    Y: Float[Tensor, "b h d3 p"]
    radius: Float[Tensor, " b"]
    lam: Float[Tensor, " b"]
    full: Bool[Tensor, " b"]
    invisible: Float[Tensor, " b"]

    def select(self, index: Tensor) -> Members:
        """The members at `index`."""
        return Members(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def merge(self, index: Tensor, part: Members) -> Members:
        """These members with those at `index` replaced."""
        merged = {}
        for f in fields(self):
            whole, new = getattr(self, f.name), getattr(part, f.name)
            merged[f.name] = new if len(index) == len(whole) else whole.index_copy(0, index, new)
        return Members(**merged)


@dataclass(frozen=True, eq=False)
class Iterate:
    """What `iterate` yields after each iteration.

    members: the state of the whole batch.
    records: this iteration's record of every member that took part.
    ended: why, for the members that ended in this iteration.
    """

    members: Members
    records: dict[int, Record]
    ended: dict[int, Status]


@dataclass(frozen=True, eq=False)
class Model:
    """Quadratic model of the projected loss in the scaled metric, s = root o dX."""

    H: Float[Tensor, "b Nx Nx"]
    g: Float[Tensor, "b Nx"]
    root: Float[Tensor, "b Nx"]
    loss: Float[Tensor, " b"]
    gradient_norm: Float[Tensor, " b"]
    noise: Float[Tensor, " b"]
    finite: Bool[Tensor, " b"]


def iterate(
    problem: AttentionProblem,
    X: Float[Tensor, "b h d1 d2"],
    Y: Float[Tensor, "b h d3 p"],
    settings: Settings,
) -> Iterator[Iterate]:
    """Run Newton's method until every member has ended, yielding at the start and each iteration.

    (X, Y) is used as given if projecting Y would raise the loss, as only rounding can.
    """
    began = time.perf_counter()
    energy = problem.target_energy()
    projected, projected_loss = project(problem, X, Y)
    better = projected_loss <= data_loss(problem, X, Y) + problem.quadratic.value(X, Y)
    zero = torch.zeros_like(energy)
    members = Members(
        X,
        torch.where(better[:, None, None, None], projected, Y),
        radius=zero,
        lam=zero,
        full=torch.zeros_like(better),
        invisible=zero + torch.inf,
    )
    yield Iterate(members, {}, {})
    active = torch.arange(problem.batch, device=X.device)
    sub = problem
    for iteration in range(settings.max_iter + 1):
        part, rows, ended = _iteration(
            sub, members.select(active), energy[active], iteration, settings
        )
        members = members.merge(active, part)
        who = active.tolist()
        seconds = time.perf_counter() - began
        records = {
            k: Record(iteration=iteration, seconds=seconds, **row)
            for k, row in zip(who, rows, strict=True)
        }
        yield Iterate(members, records, {who[i]: status for i, status in ended.items()})
        staying = [i for i in range(len(who)) if i not in ended]
        if not staying:
            return
        if len(staying) < len(who):
            keep = torch.tensor(staying, device=X.device)
            sub, active = sub.take(keep), active[keep]


def _iteration(
    problem: AttentionProblem,
    at: Members,
    energy: Float[Tensor, " b"],
    iteration: int,
    settings: Settings,
) -> tuple[Members, list[dict[str, Any]], dict[int, Status]]:
    """One iteration of the active members: new state, fields of their records, who ended."""
    last = iteration == settings.max_iter
    full = at.full | (last or iteration >= settings.gauss_newton_iterations)
    model = _model(problem, at, full, energy, settings.metric_floor)
    length = torch.linalg.vector_norm(at.X.flatten(1) * model.root, dim=-1)
    first = torch.where(length > 0, FIRST_RADIUS * length, torch.ones_like(length))
    at = replace(at, full=full, radius=torch.where(at.radius > 0, at.radius, first))

    step = trust_region_step(model.H, model.g, at.radius, at.lam)
    decrement = relative_decrement(step.decrease, energy)
    at, ended = _ended(model, at, step, decrement, energy, settings.tol)
    if last:
        ended |= {i: Status.ITERATION_LIMIT for i in range(problem.batch) if i not in ended}
    log = {
        "loss": model.loss,
        "gradient": model.gradient_norm,
        "decrement": decrement,
        "damping": step.lam.clone(),
        "radius": at.radius,
        "change": torch.zeros_like(decrement),
        "step": torch.zeros_like(decrement),
        "ratio": torch.full_like(decrement, torch.nan),
        "trials": torch.zeros_like(decrement),
    }
    factorisations = step.factorisations

    pending = torch.tensor(
        [i for i in range(problem.batch) if i not in ended], dtype=torch.int64
    ).to(at.X.device)
    step = step.select(pending)
    for trial in range(1, MAX_TRIALS + 1):
        if not len(pending):
            break
        everyone = len(pending) == problem.batch
        sub = problem if everyone else problem.take(pending)
        moved, taken, news = _try(sub, at.select(pending), model, step, pending)
        at = at.merge(pending, moved)
        for name, value in news.items():
            log[name][pending] = value
        log["step"][pending] /= length[pending].clamp(min=torch.finfo(length.dtype).tiny)
        log["damping"][pending] = step.lam
        log["trials"][pending] = float(trial)
        pending = pending[~taken]
        if len(pending):
            step = trust_region_step(
                model.H[pending], model.g[pending], at.radius[pending], at.lam[pending]
            )
            factorisations += step.factorisations
    ended |= {i: Status.STALLED for i in pending.tolist()}
    little = log["change"] <= LITTLE_GAIN * model.loss
    at = replace(at, full=at.full | little)

    columns = {name: value.tolist() for name, value in log.items()}
    columns["trials"] = [int(n) for n in columns["trials"]]
    columns["model"] = ["newton" if f else "gauss-newton" for f in full.tolist()]
    columns["factorisations"] = [factorisations] * problem.batch
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    return at, rows, ended


def _model(
    problem: AttentionProblem,
    at: Members,
    full: Bool[Tensor, " b"],
    energy: Float[Tensor, " b"],
    metric_floor: float,
) -> Model:
    """Derivatives at the members' points, Y eliminated, in the scaled metric."""
    share = None if bool(full.all()) else full.to(energy.dtype)
    loss, GX, GY, blocks = second_order(problem, at.X, at.Y, share)
    reduced = eliminate_output(blocks, GX, GY)
    H, g = reduced.hessian, reduced.gradient
    finite = torch.isfinite(H).flatten(1).all(1) & torch.isfinite(g).all(1) & torch.isfinite(loss)
    if not bool(finite.all()):
        H = torch.where(finite[:, None, None], H, torch.eye(H.shape[-1]).to(H))
        g = torch.where(finite[:, None], g, 0.0)
    diagonal = H.diagonal(dim1=1, dim2=2).abs()
    metric = torch.maximum(diagonal, metric_floor * diagonal.mean(1, keepdim=True))
    root = torch.where(metric > 0, metric, torch.ones_like(metric)).sqrt()
    data = loss - problem.quadratic.value(at.X, at.Y)
    return Model(
        H / (root[:, :, None] * root[:, None, :]),
        g / root,
        root,
        loss,
        torch.linalg.vector_norm(g, dim=-1),
        loss_noise(loss, data.clamp(min=0), energy),
        finite,
    )


def _ended(
    model: Model,
    at: Members,
    step: TrustRegionStep,
    decrement: Float[Tensor, " b"],
    energy: Float[Tensor, " b"],
    tol: float,
) -> tuple[Members, dict[int, Status]]:
    """Tests before the step; steps that the loss cannot show must at least halve the decrement."""
    scaled_gradient = relative_decrement(0.5 * model.g.square().sum(-1), energy)
    done = converged(decrement, scaled_gradient, step.interior, at.full, tol)
    invisible = (step.decrease <= model.noise) & step.interior & at.full
    stalled = invisible & (decrement > 0.5 * at.invisible) & ~done
    least = torch.where(invisible, torch.minimum(at.invisible, decrement), torch.inf)
    ended = {i: Status.OVERFLOW for i in (~model.finite).nonzero()[:, 0].tolist()}
    for test, status in ((done, Status.CONVERGED), (stalled, Status.STALLED)):
        for i in test.nonzero()[:, 0].tolist():
            ended.setdefault(i, status)
    return replace(at, invisible=least), ended


def _try(
    problem: AttentionProblem,
    at: Members,
    model: Model,
    step: TrustRegionStep,
    pending: Tensor,
) -> tuple[Members, Bool[Tensor, " b"], dict[str, Tensor]]:
    """Try one step of the pending members: their new state, who moved, and what to log."""
    loss, noise = model.loss[pending], model.noise[pending]
    X = at.X + (step.step / model.root[pending]).view_as(at.X)
    Y, new_loss = project(problem, X, at.Y)
    change = loss - new_loss
    gain = ratio(change, step.decrease)
    taken = accepted(change, step.decrease, noise)
    norm = torch.linalg.vector_norm(step.step, dim=-1)
    invisible = taken & (step.decrease <= noise)
    moved = replace(
        at,
        X=torch.where(taken[:, None, None, None], X, at.X),
        Y=torch.where(taken[:, None, None, None], Y, at.Y),
        radius=next_radius(at.radius, norm, gain, invisible),
        lam=step.lam,
    )
    zero = torch.zeros_like(change)
    news = {
        "change": torch.where(taken, change, zero),
        "step": torch.where(taken, norm, zero),
        "ratio": torch.where(invisible, torch.nan, gain),
    }
    return moved, taken, news
