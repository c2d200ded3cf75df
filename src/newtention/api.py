"""`solve` and `solve_many`: from a problem to a solution."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from newtention.derivatives.hessian import second_order_tile
from newtention.layers import Bilinear
from newtention.memory import available_bytes, newton_bytes, readable, require_memory
from newtention.newton.loop import Settings, iterate
from newtention.newton.starts import START_SCALE, random_start
from newtention.newton.stopping import default_tol
from newtention.notation import ArrayLike
from newtention.problem import AttentionProblem
from newtention.run import Callback, Run
from newtention.solution import Solution
from newtention.weights import start_weights

Method = Literal["auto", "newton"]
Start = None | tuple[ArrayLike, ArrayLike] | ArrayLike | Solution


@dataclass(frozen=True)
class Options:
    """Settings that few users need.

    heads: number of heads of a random start; by default what the problem's bias, Proximity
        reference or the given start asks for, else 1.
    start_scale: root mean square of the centred logits of a random start.
    gauss_newton_iterations: iterations with the Gauss-Newton matrix before the full Hessian.
    metric_floor: lengths are measured by the absolute diagonal of the Hessian, entries below this
        fraction of their mean raised to it; a huge value gives the plain Euclidean norm.

    docs/choices.md says how the defaults were chosen.

    Raises:
        ValueError: a setting out of range.
    """

    heads: int | None = None
    start_scale: float = START_SCALE
    gauss_newton_iterations: int = 10
    metric_floor: float = 1e-3

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.heads is not None:
            _require_count("Options(heads=)", self.heads, 1)
        _require_count("Options(gauss_newton_iterations=)", self.gauss_newton_iterations, 0)
        for name in ("start_scale", "metric_floor"):
            _require_positive(f"Options({name}=)", getattr(self, name))


def solve(
    problem: AttentionProblem,
    start: Start = None,
    method: Method = "auto",
    tol: float | None = None,
    max_iter: int = 200,
    max_seconds: float | None = None,
    n_init: int = 1,
    seed: int = 0,
    callback: Callback | None = None,
    verbose: bool = False,
    options: Options | None = None,
) -> Solution:
    """Fit X and Y to the problem.

    Args:
        problem: one problem.
        start: None for a random start (see `newtention.newton.starts`), (X, Y), X alone, or an
            earlier Solution.  Y is re-solved for X in any case.
        method: "newton", dense Newton on the loss with Y eliminated; "auto" is the same today.
        tol: bound on the relative Newton decrement sqrt(predicted decrease / (1/2 ||B||^2));
            default 1e-10 in float64, 1e-4 in float32.
        max_iter: iteration limit.
        max_seconds: time limit, checked after each iteration.
        n_init: number of starts, solved as one batch; the best is returned.  A given start is the
            first of them.
        seed: of the random starts.
        callback: called with a `Progress` after each iteration; raise StopIteration to stop.
        verbose: print the iteration table and the summary.
        options: see `Options`.

    Returns:
        The best point found, whatever ended the run, Ctrl-C included.

    Raises:
        ValueError: a setting out of range, a start of the wrong shape, a stack of problems.
        TypeError: a problem, options or callback of another kind.
        MemoryError: the dense matrices do not fit into free memory.
    """
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"problem must be an AttentionProblem; found {type(problem).__name__}.")
    if problem.parts:
        raise ValueError("solve takes one problem; use solve_many for a list of problems.")
    return _solve(
        problem,
        [start],
        method,
        tol,
        max_iter,
        max_seconds,
        n_init,
        seed,
        callback,
        verbose,
        options,
    )[0]


def solve_many(
    problems: Sequence[AttentionProblem],
    starts: Sequence[Start] | None = None,
    method: Method = "auto",
    tol: float | None = None,
    max_iter: int = 200,
    max_seconds: float | None = None,
    n_init: int = 1,
    seed: int = 0,
    callback: Callback | None = None,
    verbose: bool = False,
    options: Options | None = None,
) -> list[Solution]:
    """Fit several independent problems of equal widths as one batch.

    Arguments as for `solve`; starts holds one entry per problem.  The answers are those of single
    solves, in less time when the problems are small.

    Raises:
        ValueError: as for `solve` and `AttentionProblem.stack`.
        MemoryError: the dense matrices of the batch do not fit into free memory.
    """
    if not isinstance(problems, list | tuple):
        raise TypeError(f"problems must be a list; found {type(problems).__name__}.")
    problem = AttentionProblem.stack(problems)
    given = [None] * problem.batch if starts is None else list(starts)
    if len(given) != problem.batch:
        raise ValueError(f"starts must hold {problem.batch} entries; found {len(given)}.")
    return _solve(
        problem, given, method, tol, max_iter, max_seconds, n_init, seed, callback, verbose, options
    )


def _solve(
    problem: AttentionProblem,
    starts: Sequence[Start],
    method: Method,
    tol: float | None,
    max_iter: int,
    max_seconds: float | None,
    n_init: int,
    seed: int,
    callback: Callback | None,
    verbose: bool,
    options: Options | None,
) -> list[Solution]:
    began = time.perf_counter()
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise TypeError(f"options must be Options(...); found {type(options).__name__}.")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be callable; found {type(callback).__name__}.")
    _require_count("max_iter", max_iter, 0)
    _require_count("n_init", n_init, 1)
    _require_count("seed", seed, 0)
    if method not in ("auto", "newton"):
        raise ValueError(f'method must be "auto" or "newton"; found {method!r}.')
    if max_seconds is not None and max_seconds != 0:
        _require_positive("max_seconds", max_seconds, finite=False)
    if tol is None:
        tol = default_tol(problem.like.dtype)
    _require_positive("tol", tol)

    X, Y, one_head = _starts(problem, starts, n_init, seed, options)
    _require_room(problem, X.shape[1], n_init)
    index = torch.arange(problem.batch, device=X.device).repeat_interleave(n_init)
    members = problem.take(index) if n_init > 1 or problem.parts else problem
    settings = Settings(tol, int(max_iter), options.gauss_newton_iterations, options.metric_floor)
    run = Run(members, one_head, began, max_seconds, callback, verbose)
    run.consume(iterate(members, X, Y, settings))
    if verbose:
        print()
    solutions = run.solutions(n_init, tol)
    if verbose:
        for solution in solutions:
            print(solution.summary())
    return solutions


def _starts(
    problem: AttentionProblem, starts: Sequence[Start], n_init: int, seed: int, options: Options
) -> tuple[Tensor, Tensor, bool]:
    """First X and Y of every member, (b n_init, h, ...), and whether the user left heads out."""
    singles = problem.parts or (problem,)
    given = [
        None if s is None else start_weights(p, s) for p, s in zip(singles, starts, strict=True)
    ]
    known = [w for w in given if w is not None]
    asked = {w.layer.heads for w in known} | {problem.fixed_heads, options.heads}
    heads = {h for h in asked if h is not None} or {1}
    if len(heads) > 1:
        raise ValueError(
            "starts, Options(heads=), bias and Proximity reference must agree on the number of "
            f"heads; found {sorted(heads)}."
        )
    h = heads.pop()
    one_head = all(w.one_head for w in known) if known else h == 1
    X = []
    Y = []
    for single, w in zip(singles, given, strict=True):
        for r in range(n_init):
            if w is not None and r == 0:
                _, x, y = w.bilinear
                X.append(x)
                Y.append(y)
            else:
                X.append(random_start(single, h, seed, r, options.start_scale))
                Y.append(X[-1].new_zeros(1, h, *problem.widths[2:]))
    return torch.cat(X), torch.cat(Y), one_head


def _require_room(problem: AttentionProblem, heads: int, n_init: int) -> None:
    layer = Bilinear(heads, *problem.widths)
    itemsize = problem.like.element_size()

    def bytes_for(starts: int) -> int:
        tile = second_order_tile(problem, heads, starts)
        return newton_bytes(layer, problem.batch * starts, itemsize, tile)

    needed = bytes_for(n_init)
    free = available_bytes(problem.like.device)
    fitting = next((starts for starts in range(n_init, 0, -1) if bytes_for(starts) <= free), 0)
    if fitting:
        alternative = f"n_init up to {fitting} would fit."
    else:
        one = readable(bytes_for(1))
        half = "" if itemsize == 4 else "; float32 would halve it"
        several = f" of {problem.batch} problems" if problem.batch > 1 else ""
        fewer = "solve fewer at a time, or " if problem.batch > 1 else ""
        alternative = (
            f"a single start{several} of these widths needs {one}{half}: {fewer}narrow the tokens, "
            "for example to their leading singular directions."
        )
    require_memory(
        f"A dense solve of {layer.size} unknowns", needed, problem.like.device, alternative
    )


def _require_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}; found {value!r}.")


def _require_positive(name: str, value: float, finite: bool = True) -> None:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not value > 0 or (finite and not math.isfinite(value)):
        raise ValueError(
            f"{name} must be a positive{' finite' if finite else ''} number; found {value!r}."
        )
