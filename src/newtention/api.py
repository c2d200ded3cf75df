"""`solve` and `solve_many`: from a problem to a solution."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from newtention.checkpoint import (
    Checkpoint,
    Saved,
    problem_digest,
    run_identity,
)
from newtention.compression import keep_heads, truncate
from newtention.derivatives.products import Kind
from newtention.inputs import require_count, require_positive
from newtention.layers import (
    AttentionLayer,
    AttentionMap,
    Bilinear,
    Factored,
    FactoredAttention,
    Parametrisation,
)
from newtention.newton import loop, matrix_free, paper
from newtention.newton.iterates import Iterate
from newtention.newton.maps import MapLoss
from newtention.newton.metric import Preconditioner
from newtention.newton.projected import ProjectedLoss
from newtention.newton.starts import START_SCALE, random_layer, random_start
from newtention.newton.stopping import default_tol
from newtention.newton.token_metric import SketchName
from newtention.notation import ArrayLike
from newtention.planning import Plan, plan, plan_paper
from newtention.problem import AttentionProblem
from newtention.run import Callback, Limits, Members, Run
from newtention.solution import Solution
from newtention.weights import Weights, as_layer, start_weights

Method = Literal["auto", "newton", "newton-cg", "sketched", "paper"]
Start = None | tuple[ArrayLike, ArrayLike] | ArrayLike | AttentionLayer | Solution


@dataclass(frozen=True)
class Options:
    """Settings that few users need.

    The layer to fit:
    heads: number of heads; by default what the problem's bias, Proximity reference or the given
        start asks for, else 1.  Fewer than a layer given as start: the most useful are kept
        (`newtention.keep_heads`).
    ranks: width of every head's queries and keys, and of its values, or one number for both.  A
        layer given as start is truncated (`newtention.truncate`); without one a random factored
        layer with an output bias is the start.
    freeze: names of blocks that keep their values: X, Y, or W_Q, b_Q, W_K, b_K, W_V, b_V, W_O, b_O.
    start_scale: root mean square of the centred logits of a random start.

    "newton":
    gauss_newton_iterations: iterations with the Gauss-Newton matrix before the full Hessian.
    metric_floor: lengths are measured by the absolute diagonal of the Hessian, entries below this
        fraction of their mean raised to it; a huge value gives the plain Euclidean norm.

    "newton-cg":
    curvature: "gauss-newton", which the exact Hessian replaces once steps are too small for the
        loss to show, or "full" for the exact Hessian throughout; negative curvature is followed.
    preconditioner: "attended", "inputs" or "none"; see `newtention.newton.metric`.
    max_products: products with the curvature in one iteration at most.
    curvature_share: share of the sequences that the curvature is computed from; loss and gradient
        always see all.
    cache_bytes: evaluations (attention weights and the like) are kept between products if they take
        at most this; by default a quarter of the free memory.

    "sketched": conjugate gradients as in "newton-cg" on the exact system, Gauss-Newton iterations
        as in "newton".
    sample_rows: query rows that its preconditioner is made from; by default those that give 64
        equations for each entry of X.

    "paper":
    sketch: of the regulariser's curvature on X: "tensor-srht" as in the paper, "leverage", or
        "none", which is exact and, for one sequence, cheaper.
    sketch_size: rows of the sketch for each sequence; by default what `newtention.sketch` proves to
        keep the distortion below 0.25 but with probability 0.05, at most one for each pair.

    patience: with a validation problem, iterations without a better one before the run ends.

    docs/choices.md says how the defaults were chosen.

    Raises:
        ValueError: a setting out of range.
    """

    heads: int | None = None
    ranks: int | tuple[int, int] | None = None
    freeze: Sequence[str] = ()
    start_scale: float = START_SCALE
    gauss_newton_iterations: int = 10
    metric_floor: float = 1e-3
    curvature: Kind = "gauss-newton"
    preconditioner: Preconditioner = "attended"
    max_products: int = 100
    curvature_share: float = 1.0
    cache_bytes: int | None = None
    sample_rows: int | None = None
    sketch: SketchName = "tensor-srht"
    sketch_size: int | None = None
    patience: int = 5

    def __repr__(self) -> str:
        """The settings that are not the defaults."""
        values = [(f, getattr(self, f.name)) for f in fields(self)]
        chosen = [f"{f.name}={value!r}" for f, value in values if value != f.default]
        return f"Options({', '.join(chosen)})"

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.heads is not None:
            require_count("Options(heads=)", self.heads, 1)
        for rank in self._ranks():
            require_count("Options(ranks=)", rank, 1)
        if isinstance(self.freeze, str):
            raise ValueError(
                f"Options(freeze=) must be a list of block names; found {self.freeze!r}."
            )
        require_count("Options(gauss_newton_iterations=)", self.gauss_newton_iterations, 0)
        require_count("Options(max_products=)", self.max_products, 1)
        require_count("Options(patience=)", self.patience, 1)
        if self.cache_bytes is not None:
            require_count("Options(cache_bytes=)", self.cache_bytes, 0)
        if self.sample_rows is not None:
            require_count("Options(sample_rows=)", self.sample_rows, 1)
        if self.sketch_size is not None:
            require_count("Options(sketch_size=)", self.sketch_size, 1)
        _require_word("Options(sketch=)", self.sketch, ("tensor-srht", "leverage", "none"))
        for name in ("start_scale", "metric_floor", "curvature_share"):
            require_positive(f"Options({name}=)", getattr(self, name))
        if self.curvature_share > 1:
            raise ValueError(
                f"Options(curvature_share=) must be at most 1; found {self.curvature_share}."
            )
        _require_word("Options(curvature=)", self.curvature, ("gauss-newton", "full"))
        _require_word(
            "Options(preconditioner=)", self.preconditioner, ("attended", "inputs", "none")
        )

    def _ranks(self) -> tuple[int, ...]:
        if self.ranks is None:
            return ()
        return tuple(self.ranks) if isinstance(self.ranks, tuple | list) else (self.ranks,)


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
    validation: AttentionProblem | None = None,
    checkpoint: str | Path | None = None,
    options: Options | None = None,
) -> Solution:
    """Fit a layer to the problem.

    Args:
        problem: one problem.
        start: None for a random start (see `newtention.newton.starts`; of attention maps the first
            is X = 0, every key alike), (X, Y), X alone, a layer, or an earlier Solution.  A layer
            as the start fixes the parametrisation; otherwise it is the paper's bilinear form.  The
            output map (Y, or W_O and b_O) is re-solved in any case.
        method: "newton", dense Newton with the exact Hessian, for attention maps and the bilinear
            form of moderate width; "newton-cg", matrix-free, for any layer; "sketched", for the
            bilinear form: matrix-free, preconditioned by the factored matrix of a sample of the
            query rows; "paper", the paper's approximate Newton under TokenWeights, where those are
            large enough (docs/paper-method.md); "auto" chooses among the first three by predicted
            work and memory (docs/methods.md).
        tol: bound on the relative Newton decrement sqrt(predicted decrease / (1/2 ||B||^2));
            default 1e-10 in float64, 1e-4 in float32.
        max_iter: iteration limit.
        max_seconds: time limit of this call, checked after each iteration, and after each product
            by "newton-cg" and "sketched".
        n_init: number of starts, solved as one batch; the best is returned.  A given start is the
            first of them.
        seed: of the random starts.
        callback: called with a `Progress` after each iteration; raise StopIteration to stop.
        verbose: print the iteration table and the summary.
        validation: a problem of held-out data with the same widths.  Its relative loss is recorded
            at every iteration, the point where it is lowest is returned, and the run ends when it
            has not fallen for `Options(patience=)` iterations.
        checkpoint: a file to keep the state of the run in, replaced after every iteration.  If it
            exists, the run continues from it, and gives bit for bit what an uninterrupted run gives
            on the same machine with the same number of threads.
        options: see `Options`.

    Returns:
        The best point found, whatever ended the run, Ctrl-C included.

    Raises:
        ValueError: a setting out of range, a start of the wrong shape, a stack of problems, a
            checkpoint that is damaged or of another run.
        OSError: the checkpoint cannot be read or written.
        TypeError: a problem, options or callback of another kind.
        MemoryError: the dense matrices do not fit into free memory.

    Example:
        >>> from newtention import zoo
        >>> problem = zoo.planted(2, 40, noise=0.1, tokens="real").problem
        >>> solution = nt.solve(problem, n_init=4)
        >>> solution.status.value, solution.relative_loss < 0.02
        ('converged', True)
    """
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"problem must be an AttentionProblem; found {type(problem).__name__}.")
    if problem.parts:
        raise ValueError("solve takes one problem; use solve_many for a list of problems.")
    settings = _Settings(
        method, tol, max_iter, max_seconds, n_init, seed, callback, verbose, validation, checkpoint
    )
    return _solve(problem, [start], settings, options)[0]


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

    The answers are those of single solves, in less time when the problems are small.

    Args:
        problems: of equal widths d1, d2, d3 and p; lengths and masks may differ.
        starts: one for each problem, as for `solve`; None for random ones.
        method: as for `solve`, one for all.
        tol: as for `solve`.
        max_iter: limit of every problem's iterations.
        max_seconds: limit of the whole batch.
        n_init: starts of every problem.
        seed: of the random starts.
        callback: called with a `Progress` of the whole batch after each iteration.
        verbose: print the iteration table.
        options: see `Options`.

    Returns:
        One solution for each problem, in order.

    Raises:
        ValueError: as for `solve` and `AttentionProblem.stack`.
        MemoryError: the dense matrices of the batch do not fit into free memory.

    Example:
        >>> from newtention import zoo
        >>> problems = [zoo.planted(2, 40, noise=0.1, seed=i).problem for i in range(3)]
        >>> [solution.success for solution in nt.solve_many(problems)]
        [True, True, True]
    """
    if not isinstance(problems, list | tuple):
        raise TypeError(f"problems must be a list; found {type(problems).__name__}.")
    problem = AttentionProblem.stack(problems)
    given = [None] * problem.batch if starts is None else list(starts)
    if len(given) != problem.batch:
        raise ValueError(f"starts must hold {problem.batch} entries; found {len(given)}.")
    settings = _Settings(method, tol, max_iter, max_seconds, n_init, seed, callback, verbose)
    return _solve(problem, given, settings, options)


@dataclass(frozen=True)
class _Settings:
    """The arguments of a call, checked."""

    method: Method
    tol: float | None
    max_iter: int
    max_seconds: float | None
    n_init: int
    seed: int
    callback: Callback | None
    verbose: bool
    validation: AttentionProblem | None = None
    checkpoint: str | Path | None = None

    def __post_init__(self) -> None:
        if self.callback is not None and not callable(self.callback):
            raise TypeError(f"callback must be callable; found {type(self.callback).__name__}.")
        if not isinstance(self.checkpoint, str | Path | None):
            raise TypeError(f"checkpoint must be a path; found {type(self.checkpoint).__name__}.")
        require_count("max_iter", self.max_iter, 0)
        require_count("n_init", self.n_init, 1)
        require_count("seed", self.seed, 0)
        _require_word("method", self.method, get_args(Method))
        if self.max_seconds is not None and self.max_seconds != 0:
            require_positive("max_seconds", self.max_seconds, finite=False)
        if self.tol is not None:
            require_positive("tol", self.tol)
        if self.validation is not None and not isinstance(self.validation, AttentionProblem):
            raise TypeError(
                f"validation must be an AttentionProblem; found {type(self.validation).__name__}."
            )


def _solve(
    problem: AttentionProblem,
    starts: Sequence[Start],
    settings: _Settings,
    options: Options | None,
) -> list[Solution]:
    began = time.perf_counter()
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise TypeError(f"options must be Options(...); found {type(options).__name__}.")
    limits = Limits(began, int(settings.max_iter), settings.max_seconds, options.patience)
    _require_validation(problem, settings.validation)
    tol = default_tol(problem.like.dtype) if settings.tol is None else settings.tol
    n_init = settings.n_init

    start = _starts(problem, starts, n_init, settings.seed, options)
    layer, theta = start.layer, start.theta
    free = _free(layer, options.freeze, theta)
    checkpoint = _checkpoint(problem, start, settings, options, tol)
    state = None if checkpoint is None else checkpoint.load(theta.device)
    method, cache = settings.method, options.cache_bytes
    if state is not None:
        method, cache = state.choices["method"], state.choices["cache_bytes"]
    cg_settings = matrix_free.Settings(
        tol,
        limits.max_iter,
        options.curvature,
        options.max_products,
        options.preconditioner,
        options.curvature_share,
        seed=settings.seed,
        sample_rows=options.sample_rows,
    )
    frozen = bool(options.freeze)
    if method == "paper":
        sketch, rows = options.sketch, options.sketch_size
        chosen = plan_paper(problem, layer, frozen, sketch, rows, settings.seed)
    else:
        chosen = plan(problem, layer, n_init, method, cg_settings, cache, frozen)
    cg_settings = replace(
        cg_settings,
        cache_bytes=chosen.cache_bytes,
        sample_rows=chosen.sample_rows,
        overhead=chosen.overhead,
    )
    if chosen.method == "sketched":
        phase = options.gauss_newton_iterations
        cg_settings = replace(cg_settings, gauss_newton_iterations=phase)
    if settings.verbose:
        print(chosen.sentence)

    index = torch.arange(problem.batch, device=theta.device).repeat_interleave(n_init)
    batch = problem.take(index) if n_init > 1 or problem.parts else problem
    parts = problem.parts or (problem,)
    singles = [parts[i] for i in index.tolist()]
    members = Members(batch, singles, layer, start.one_head, settings.validation)
    run = Run(members, limits, settings.callback, settings.verbose, checkpoint, chosen.to_dict())
    if state is not None:
        run.resume(state)
    run.consume(_iterates(chosen, members, theta, free, cg_settings, options, limits, state))
    if settings.verbose:
        print()
    solutions = run.solutions(n_init, chosen.method, tol)
    if settings.verbose:
        for solution in solutions:
            print(solution.summary())
    return solutions


def _checkpoint(
    problem: AttentionProblem, start: Weights, settings: _Settings, options: Options, tol: float
) -> Checkpoint | None:
    """Where the run's state is kept, and what makes it this run's."""
    if settings.checkpoint is None:
        return None
    words: dict[str, object] = {
        "layer": repr(start.layer),
        "method": settings.method,
        "tolerance": tol,
        "n_init": settings.n_init,
        "seed": settings.seed,
        **{f"Options({f.name}=)": getattr(options, f.name) for f in fields(options)},
    }
    if settings.validation is not None:
        words["validation data"] = problem_digest(settings.validation)
    return Checkpoint(Path(settings.checkpoint), run_identity(problem, start.theta, words))


def _iterates(
    chosen: Plan,
    members: Members,
    theta: Tensor,
    free: Tensor,
    settings: matrix_free.Settings,
    options: Options,
    limits: Limits,
    state: Saved | None,
) -> Generator[Iterate, str | None, None]:
    """The method at work."""
    snapshot = None if state is None else state.tensors
    if chosen.method == "newton":
        dense = loop.Settings(
            settings.tol,
            settings.max_iter,
            options.gauss_newton_iterations,
            options.metric_floor,
        )
        if isinstance(members.layer, AttentionMap):
            objective = MapLoss.of(members.problem, members.layer)
        else:
            assert isinstance(members.layer, Bilinear)
            objective = ProjectedLoss.of(members.problem, members.layer)
        return loop.iterate(objective, theta, dense, snapshot)
    if chosen.method == "paper":
        assert isinstance(members.layer, Bilinear)
        sketched = paper.Settings(
            settings.tol, settings.max_iter, options.sketch, options.sketch_size, settings.seed
        )
        return paper.iterate(members.singles[0], members.layer, theta, sketched, snapshot)
    return matrix_free.iterate(
        members.singles, members.layer, theta, free, settings, limits.expired, snapshot
    )


def _starts(
    problem: AttentionProblem, starts: Sequence[Start], n_init: int, seed: int, options: Options
) -> Weights:
    """First weights of every member, (b n_init, N), and whether the user left heads out."""
    singles = problem.parts or (problem,)
    given = [
        None if s is None else _reduced(p, start_weights(p, s), options)
        for p, s in zip(singles, starts, strict=True)
    ]
    known = [w for w in given if w is not None]
    shapes = {w.layer for w in known}
    if len(shapes) > 1 and not all(isinstance(shape, Bilinear) for shape in shapes):
        raise ValueError("starts must all be layers of one shape, or all (X, Y) or None.")
    shape = shapes.pop() if shapes else None
    heads = _heads(problem, known, options)
    if problem.of_maps:
        return _map_starts(problem, given, n_init, seed, options)
    if isinstance(shape, Factored):
        return _factored_starts(problem, given, shape, n_init, seed, options)
    if shape is None and options.ranks is not None:
        e, f = (*options._ranks(), options._ranks()[-1])[:2]
        d1, d2, d3, p = problem.widths
        shape = Factored(heads, heads, d1, d2, d3, p, e, f, out_bias=True, scale=e**-0.5)
        return _factored_starts(problem, given, shape, n_init, seed, options)
    if options.ranks is not None:
        raise ValueError("Options(ranks=) goes with a factored layer as the start, or none.")
    one_head = all(w.one_head for w in known) if known else heads == 1
    layer = Bilinear(heads, *problem.widths)
    rows = []
    for single, w in zip(singles, given, strict=True):
        for r in range(n_init):
            if w is not None and r == 0:
                rows.append(w.theta)
            else:
                X = random_start(single, heads, seed, r, options.start_scale)
                rows.append(layer.pack(X, X.new_zeros(1, heads, *problem.widths[2:])))
    return Weights(layer, torch.cat(rows), one_head, problem)


def _map_starts(
    problem: AttentionProblem,
    given: Sequence[Weights | None],
    n_init: int,
    seed: int,
    options: Options,
) -> Weights:
    if options.ranks is not None or options.heads not in (None, 1):
        raise ValueError("Options(ranks=) and Options(heads=) do not go with attention maps.")
    layer = AttentionMap(*problem.widths[:2])
    rows = []
    for single, w in zip(problem.parts or (problem,), given, strict=True):
        for r in range(n_init):
            if r > 0:
                rows.append(layer.pack(random_start(single, 1, seed, r, options.start_scale)))
            elif w is not None:
                rows.append(w.theta)
            else:  # every key alike: as good as any in trials, and the same for every seed
                rows.append(single.like.new_zeros(1, layer.size))
    return Weights(layer, torch.cat(rows), True, problem)


def _heads(problem: AttentionProblem, known: Sequence[Weights], options: Options) -> int:
    asked = {w.layer.heads for w in known} | {problem.fixed_heads, options.heads}
    heads = {h for h in asked if h is not None} or {1}
    if len(heads) > 1:
        raise ValueError(
            "starts, Options(heads=), bias and Proximity reference must agree on the number of "
            f"heads; found {sorted(heads)}."
        )
    return heads.pop()


def _factored_starts(
    problem: AttentionProblem,
    given: Sequence[Weights | None],
    shape: Factored,
    n_init: int,
    seed: int,
    options: Options,
) -> Weights:
    rows = []
    for single, w in zip(problem.parts or (problem,), given, strict=True):
        for r in range(n_init):
            if w is not None and r == 0:
                rows.append(w.theta)
            else:
                rows.append(random_layer(single, shape, seed, r, options.start_scale))
    return Weights(shape, torch.cat(rows), False, problem)


def _reduced(problem: AttentionProblem, w: Weights, options: Options) -> Weights:
    """A factored start with the heads and ranks that the options ask for."""
    if not isinstance(w.layer, Factored):
        return w
    layer = as_layer(w.layer, w.theta[0], False, problem)
    assert isinstance(layer, FactoredAttention)
    if options.heads is not None and options.heads != w.layer.heads:
        layer = keep_heads(problem, layer, options.heads)
    if options.ranks is not None:
        ranks = options.ranks if isinstance(options.ranks, int) else tuple(options.ranks)
        layer = truncate(problem, layer, ranks)
    return start_weights(problem, layer)


def _free(layer: Parametrisation, freeze: Sequence[str], theta: Tensor) -> Tensor:
    """1 for unknowns to solve for, 0 for frozen ones."""
    free = theta.new_ones(layer.size)
    blocks = {block.name: block for block in layer.blocks}
    for name in freeze:
        if name not in blocks:
            raise ValueError(
                f"Options(freeze=) must name blocks of the layer, {', '.join(blocks)}; "
                f"found {name!r}."
            )
        free[blocks[name].start : blocks[name].stop] = 0
    return free


def _require_validation(problem: AttentionProblem, validation: AttentionProblem | None) -> None:
    if validation is None:
        return
    if validation.parts:
        raise ValueError("validation must be one problem, not a stack.")
    if validation.kind != problem.kind:
        raise ValueError(
            "validation must have the problem's widths (d1, d2, d3, p), dtype, device and kind of "
            f"array, {problem.kind}; found {validation.kind}."
        )


def _require_word(name: str, value: object, words: Sequence[str]) -> None:
    if value not in words:
        listed = " or ".join(f'"{word}"' for word in words)
        raise ValueError(f"{name} must be {listed}; found {value!r}.")
