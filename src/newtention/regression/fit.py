"""`softmax_regression` and `softmax_regression_many`: from the user's arrays to results."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.chunks import TILE_ELEMENTS
from newtention.memory import DENSE_MATRICES, WORKSPACE, require_memory
from newtention.newton import loop
from newtention.newton.objective import Objective
from newtention.notation import ArrayLike
from newtention.regression.arguments import (
    Settings,
    as_problem,
    as_problems,
    as_starts,
    stacked,
    warn_unmatched,
)
from newtention.regression.rescaled import Kind, RescaledLoss
from newtention.regression.result import Form, SoftmaxRegression
from newtention.regression.rows import Rows
from newtention.regression.softmax import SoftmaxLoss
from newtention.regression.starts import starting_points
from newtention.solution import TABLE_HEADER, History, Record, Status, table_row

_TILES = 4
_VECTORS = 12
"""Intermediates of a tile, and vectors of n numbers."""


def softmax_regression(
    A: ArrayLike,
    b: ArrayLike,
    *,
    ridge: float = 0.0,
    rescaled: bool = False,
    kind: Kind = "exp",
    start: ArrayLike | None = None,
    n_init: int = 1,
    tol: float | None = None,
    max_iter: int = 200,
    max_seconds: float | None = None,
    seed: int = 0,
    verbose: bool = False,
) -> SoftmaxRegression:
    """Fit softmax(A x) to b, by Newton's method with the exact Hessian.

    minimise over x   1/2 ||softmax(A x) - b||^2 + ridge/2 ||x||^2,   or, rescaled,
                      1/2 ||u(A x) - <u(A x), 1> b||^2 + ridge/2 ||x||^2.

    Args:
        A: (n, d) design; n may be a million, d up to about 2000.
        b: (n,) target, of sum 1 and nonnegative if it is to be matched.
        ridge: strength, at least 0; positive if rescaled, since the rescaled loss may have no
            minimum without it.
        rescaled: which of the two.
        kind: u of the rescaled form, "exp", "sinh" or "cosh".  For "sinh" x = 0 is the global
            minimum, of loss 0: only local ones near a start are of interest.
        start: (d,), the first of the starts.  By default x = 0; rescaled, a fit of A x to ln b for
            "exp", else a random one.  A rescaled start with logits beyond 16 that fits poorly is
            halved until its loss rises.
        n_init: number of starts, solved as one batch; the best is returned.  Random ones have
            centred logits of root mean square 1.
        tol: bound on the Newton decrement relative to the size of the loss, as for
            `newtention.solve`; default 1e-10 in float64, 1e-4 in float32.
        max_iter: iteration limit.
        max_seconds: time limit, checked after each iteration.
        seed: of the random starts.
        verbose: print the iteration table and the summary.

    Returns:
        The best point found, whatever ended the run, Ctrl-C included; arrays of A's kind and type.

    Raises:
        ValueError: shapes that do not fit, NaN or infinity, a setting out of range.
        TypeError: arrays of the wrong kind or of mixed kinds.
        MemoryError: the d x d matrices do not fit into free memory.

    Definition and derivatives: docs/softmax-regression.md.

    Example:
        >>> fit = nt.softmax_regression(np.array([[0.0], [1.0]]), np.array([0.25, 0.75]))
        >>> bool(np.isclose(fit.x[0], np.log(3)))
        True
    """
    began = time.perf_counter()
    settings = Settings(
        ridge, rescaled, kind, n_init, tol, max_iter, max_seconds, seed, verbose
    )  # fmt: skip
    design, target, numpy = as_problem(A, b)
    given = as_starts([start], 1, design)
    return _fit([design], [target], given, settings, numpy, began)[0]


def softmax_regression_many(
    As: Sequence[ArrayLike] | ArrayLike,
    bs: Sequence[ArrayLike] | ArrayLike,
    *,
    ridge: float = 0.0,
    rescaled: bool = False,
    kind: Kind = "exp",
    starts: Sequence[ArrayLike | None] | None = None,
    n_init: int = 1,
    tol: float | None = None,
    max_iter: int = 200,
    max_seconds: float | None = None,
    seed: int = 0,
    verbose: bool = False,
) -> list[SoftmaxRegression]:
    """Fit several independent problems of one width as one batch.

    Args:
        As: (b, n, d), or a list of arrays (n_i, d).
        bs: (b, n), or a list of arrays (n_i,).
        ridge: as for `softmax_regression`, the same for all problems; so are the others.
        rescaled: which of the two losses.
        kind: u of the rescaled form.
        starts: an entry (d,) or None for every problem.
        n_init: number of starts of each problem.
        tol: bound on the relative Newton decrement.
        max_iter: iteration limit.
        max_seconds: time limit of the whole call.
        seed: of the random starts.
        verbose: print the iteration table and the summaries.

    Returns:
        What single fits give, in the order of the problems, in less time where these are small.

    Raises:
        ValueError, TypeError, MemoryError: as for `softmax_regression`.
    """
    began = time.perf_counter()
    settings = Settings(
        ridge, rescaled, kind, n_init, tol, max_iter, max_seconds, seed, verbose
    )  # fmt: skip
    designs, targets, numpy = as_problems(As, bs)
    given = as_starts(starts, len(designs), designs[0])
    return _fit(designs, targets, given, settings, numpy, began)


def regression_bytes(problems: int, members: int, n: int, d: int, itemsize: int) -> int:
    """Peak bytes of a fit, beyond the user's arrays."""
    copies = 0 if problems == 1 else problems * n * d
    tile = max(members * d, min(TILE_ELEMENTS, members * n * d))
    matrices = DENSE_MATRICES * members * d * d
    count = copies + matrices + _TILES * tile + _VECTORS * members * n
    return int(itemsize * count) + WORKSPACE


def objective_at(rows: Rows, x: Float[Tensor, "b d"], form: Form) -> SoftmaxLoss | RescaledLoss:
    """The loss of all members, in units that suit the neighbourhood of x."""
    return SoftmaxLoss.of(rows) if form == "softmax" else RescaledLoss.at(form, rows, x)


def hessian_at(
    A: Float[Tensor, "n d"],
    b: Float[Tensor, " n"],
    x: Float[Tensor, " d"],
    ridge: float,
    form: Form,
) -> Float[Tensor, "d d"]:
    """The Hessian of one problem's loss, ridge included; infinite where it overflows.

    Raises:
        MemoryError: it does not fit into free memory.
    """
    n, d = A.shape
    needed = regression_bytes(1, 1, n, d, A.element_size())
    require_memory(f"the Hessian of {d} unknowns", needed, A.device, "there is no smaller form.")
    objective = objective_at(stacked([A], [b], ridge, 1), x[None], form)
    full = torch.ones(1, dtype=torch.bool, device=A.device)
    return objective.derivatives(x[None], full).hessian[0] * objective.log_unit.exp()


def predict_softmax(
    A: Float[Tensor, "n d"],
    b: Float[Tensor, " n"],
    x: Float[Tensor, " d"],
    ridge: float,
    form: Form,
) -> tuple[Float[Tensor, " n"], float]:
    """The fitted values at x and their relative loss, as in `SoftmaxRegression`."""
    objective = objective_at(stacked([A], [b], ridge, 1), x[None], form)
    size = float(objective.sizes(x[None]))
    return objective.fitted(x[None])[0], float(objective.data_loss(x[None])) / (size or 1.0)


class _Ended(NamedTuple):
    """Where every member of a batch stopped, why, and its records."""

    x: Float[Tensor, "b d"]
    statuses: list[Status]
    records: list[list[Record]]


def _fit(
    designs: Sequence[Float[Tensor, "_ d"]],
    targets: Sequence[Float[Tensor, " _"]],
    starts: Sequence[Float[Tensor, " d"] | None],
    settings: Settings,
    numpy: bool,
    began: float,
) -> list[SoftmaxRegression]:
    warn_unmatched(targets, settings)
    like, n_init = designs[0], settings.n_init
    n, d = max(len(b) for b in targets), like.shape[1]
    require_memory(
        f"softmax regression with {d} unknowns",
        regression_bytes(len(designs), len(designs) * n_init, n, d, like.element_size()),
        like.device,
        "fewer starts or problems at a time would need less, and "
        'multiple_softmax_regression(..., method="newton-cg") of one query forms no matrix.',
    )
    rows = stacked(designs, targets, settings.ridge, n_init)
    x = starting_points(rows, starts, settings)
    objective = objective_at(rows, x, settings.kind if settings.rescaled else "softmax")
    ended = _run(objective, x, settings, began)
    results = _results(objective.near(ended.x), ended, settings, began)
    results = [_presented(r, len(b), numpy) for r, b in zip(results, targets, strict=True)]
    if settings.verbose:
        for result in results:
            print(f"\n{result.summary()}")
    return results


def _run(objective: Objective, x: Tensor, settings: Settings, began: float) -> _Ended:
    """Newton's method until all have converged, or to a limit or Ctrl-C."""
    batch = objective.batch
    statuses: dict[int, Status] = {}
    records: list[list[Record]] = [[] for _ in range(batch)]
    limit = math.inf if settings.max_seconds is None else settings.max_seconds
    dense = loop.Settings(settings.tolerance(x.dtype), settings.max_iter)
    reason = Status.INTERRUPTED
    if settings.verbose:
        print(TABLE_HEADER)
    try:
        for it in loop.iterate(objective, x, dense):
            x = it.theta
            statuses |= it.ended
            for i, record in it.records.items():
                records[i].append(record)
            if settings.verbose:
                print(table_row(min(it.records.values(), key=lambda r: r.loss)), flush=True)
            if time.perf_counter() - began >= limit:
                reason = Status.TIME_LIMIT
                break
    except KeyboardInterrupt:
        if not records[0]:
            raise
    return _Ended(x, [statuses.get(i, reason) for i in range(batch)], records)


def _results(
    objective: SoftmaxLoss | RescaledLoss, ended: _Ended, settings: Settings, began: float
) -> list[SoftmaxRegression]:
    """The best start of every problem."""
    x = ended.x
    data, total = objective.data_loss(x), objective.loss(x)
    size = objective.sizes(x)
    relative = data / size.where(size > 0, torch.ones_like(size))
    log10 = ((total.double().log() + objective.log_unit.double()) / math.log(10)).tolist()
    losses = objective.absolute(total).tolist()
    absolute = objective.absolute(data).tolist()
    penalties = objective.rows.penalty(x).tolist()
    fitted = objective.fitted(x)
    results = []
    for first in range(0, len(x), settings.n_init):
        group = range(first, first + settings.n_init)
        best = min(group, key=lambda i: log10[i])
        results.append(
            SoftmaxRegression(
                x=x[best],
                fitted=fitted[best],
                form=settings.kind if settings.rescaled else "softmax",
                loss=losses[best],
                log10_loss=log10[best],
                data_loss=absolute[best],
                penalty=penalties[best],
                relative_loss=float(relative[best]),
                status=ended.statuses[best],
                iterations=max(0, len(ended.records[best]) - 1),
                seconds=time.perf_counter() - began,
                tol=settings.tolerance(x.dtype),
                history=History(ended.records[best]),
                start_losses=tuple(losses[i] for i in group),
            )
        )
    return results


def _presented(result: SoftmaxRegression, n: int, numpy: bool) -> SoftmaxRegression:
    """Arrays of the user's kind, padding cut off."""
    x, fitted = torch.as_tensor(result.x), torch.as_tensor(result.fitted)[:n]
    if numpy:
        return replace(result, x=x.cpu().numpy(), fitted=fitted.cpu().numpy())
    return replace(result, x=x, fitted=fitted)
