"""Looking for a better minimum: fits on few rows, from disturbed copies of the best so far.

The loss of attention regression has many local minima, and most of them explain all of the output
but its curvature in the tokens: to first order F = A1 (X Sigma Y), which X G and
Sigma^-1 G^-1 Sigma Y leave as it is for every invertible G.  The minima differ in G, and around a
good one lie others nearly as good, so that steps X -> X (I + e E), E Gaussian, lead from minimum to
minimum within that family (basin hopping: Wales and Doye 1997).  Where a minimum lies can be seen
on a few times as many equations as there are unknowns, so all but the last fits use a sample of the
query rows.  What it is worth: docs/global-quality.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.api import Options, solve_many
from newtention.display import Displayed, Table, aligned
from newtention.functions import sample_queries
from newtention.inputs import as_like, require_count, require_positive, shape_text
from newtention.newton.starts import START_SCALE, logit_spread, random_start
from newtention.notation import Array
from newtention.problem import AttentionProblem
from newtention.solution import Solution, Status

EQUATIONS = 6
"""Equations of the sampled problem for each unknown."""
FIT_ITERATIONS = 40
FIT_TOL = 1e-6
"""Limits of the fits on samples: minima need only be told apart."""
STEPS = (0.4, 1.2)
"""Least and largest size of a disturbance, relative to X; sizes between are equally likely on a
logarithmic scale.  A fit disturbed by 0.4 mostly comes back, one by 1.2 mostly does not."""
PARENTS = 0.5
"""Share of the pool, its best, that is disturbed."""
DISTINCT = 1e-3
"""Relative difference of the losses from which two minima count as different."""
POLISHED = 4
"""Minima that are fitted to all rows at the end."""
EXACT = 1e-4
"""A relative loss below this fraction of the machine epsilon is one of rounding: the square root is
the residual."""


@dataclass(frozen=True, eq=False)
class Round:
    """What a callback sees after each round.

    number: from 0, the round of random starts.
    losses: relative losses on the sample of the minima kept, increasing.
    fits: fits so far.
    seconds: since the start.
    """

    number: int
    losses: tuple[float, ...]
    fits: int
    seconds: float


@dataclass(frozen=True, eq=False)
class BasinHopping(Displayed):
    """The outcome of `basin_hopping`.

    X, Y, loss and relative_loss are those of `solution`.

    solution: the best fit to all rows.
    others: the other minima that were fitted to all rows, by their loss.
    rounds: what was found on the sample.
    sampled_rows: query rows of the sample.
    message: why it ended.
    """

    solution: Solution
    others: tuple[Solution, ...]
    rounds: tuple[Round, ...]
    sampled_rows: int
    message: str

    @property
    def X(self) -> Array:
        """The query/key map, (d1, d2) or (h, d1, d2)."""
        return self.solution.X

    @property
    def Y(self) -> Array:
        """The value map, (d3, p) or (h, d3, p)."""
        return self.solution.Y

    @property
    def loss(self) -> float:
        """The total loss of the best fit, on all rows."""
        return self.solution.loss

    @property
    def relative_loss(self) -> float:
        """The data loss of the best fit over 1/2 sum_j q_j ||B_j||^2, on all rows."""
        return self.solution.relative_loss

    def summary(self) -> str:
        """A few lines for people."""
        return "\n".join(aligned(self._rows()))

    def _rows(self) -> list[tuple[str, str]]:
        first, last = self.rounds[0].losses[0], self.rounds[-1].losses[0]
        others = ", ".join(f"{s.relative_loss:.3g}" for s in self.others) or "none"
        return [
            ("Loss", f"{self.loss:.6g}"),
            ("Relative loss", f"{self.relative_loss:.6g}"),
            ("Other minima", others),
            ("On the sample", f"{first:.3g} after random starts, {last:.3g} in the end"),
            ("Fits", f"{self.rounds[-1].fits} on {self.sampled_rows} rows"),
            ("Rounds", str(len(self.rounds) - 1)),
            (
                "Seconds",
                f"{self.rounds[-1].seconds:.3g} to find, {self.solution.seconds:.3g} to fit",
            ),
            ("Ended", self.message),
        ]

    def _table(self) -> Table:
        return Table("Basin hopping", self._rows())

    def __repr__(self) -> str:
        """One line."""
        return (
            f"BasinHopping(relative_loss {self.relative_loss:.6g}, loss {self.loss:.6g}, "
            f"{len(self.rounds) - 1} rounds, {self.rounds[-1].fits} fits)"
        )


def basin_hopping(
    problem: AttentionProblem,
    *,
    start: Solution | Sequence[Solution] | None = None,
    members: int = 16,
    rounds: int = 25,
    max_seconds: float | None = None,
    sample_rows: int | None = None,
    seed: int = 0,
    callback: Callable[[Round], object] | None = None,
    tol: float | None = None,
    options: Options | None = None,
) -> BasinHopping:
    """Fit the bilinear form, looking for a low minimum among many.

    A pool of minima on a sample of the query rows begins with fits from random starts.  In each
    round its better half is disturbed and fitted again, as one batch, and the lowest distinct
    minima stay.  At the end the four best are fitted to all rows.  Ctrl-C ends the search, and a
    second one those last fits; the best point so far comes back.

    Args:
        problem: one problem with values (not of attention maps).
        start: earlier fits of this problem to begin with, beside random starts.
        members: minima kept, and fits in a round.
        rounds: limit of the rounds after the first.
        max_seconds: time limit for the search, checked after each round; the last fits come on top.
        sample_rows: query rows of the sample; by default those that give six equations for each
            unknown.
        seed: of the sample, the starts and the disturbances.
        callback: called with a `Round` after each; raise StopIteration to stop.
        tol: of the last fits, as for `solve`.
        options: of all fits, as for `solve`, without ranks or frozen blocks; heads= is the layer's.

    Returns:
        The best fit, and what was found on the way.

    Raises:
        ValueError: a stack of problems, attention maps, a setting out of range.
        TypeError: a problem, start or callback of another kind.

    Example:
        >>> from newtention import zoo
        >>> problem = zoo.planted(3, 60, tokens="clustered", seed=1).problem
        >>> found = nt.basin_hopping(problem, members=8, rounds=10)
        >>> found.relative_loss < 1e-20
        True
    """
    began = time.perf_counter()
    _check(problem, members, rounds, max_seconds, sample_rows, callback)
    heads = problem.fixed_heads or (options and options.heads) or 1
    known = _known(problem, start, heads)
    generator = torch.Generator().manual_seed(require_count("seed", seed, 0))
    rows = _sample(problem, heads, sample_rows, seed)

    def fitted(starts: list[Tensor]) -> tuple[list[_Minimum], bool]:
        """Where they end, and whether Ctrl-C ended them."""
        limits = {"tol": FIT_TOL, "max_iter": FIT_ITERATIONS, "options": options}
        found = solve_many([rows] * len(starts), starts, "newton", **limits)
        stopped = any(s.status is Status.INTERRUPTED for s in found)
        return [_Minimum.of(s, heads) for s in found], stopped

    starts = known + _random_starts(problem, heads, max(0, members - len(known)), seed, generator)
    pool: list[_Minimum] = []
    history: list[Round] = []
    message = None
    while message is None:
        minima, stopped = fitted(starts)
        pool = _distinct(pool + minima)[:members]
        fits = len(starts) + (history[-1].fits if history else 0)
        losses = tuple(m.relative_loss for m in pool)
        history.append(Round(len(history), losses, fits, time.perf_counter() - began))
        message = _ended(history[-1], pool[0], stopped, rounds, max_seconds, callback)
        parents = pool[: math.ceil(PARENTS * len(pool))]
        starts = [_disturbed(parents[i % len(parents)].X, generator) for i in range(members)]
    # One head keeps its matrices, as in `solve`.
    last = [m.X if heads > 1 else m.X[0] for m in pool[:POLISHED]]
    polished = solve_many([problem] * len(last), last, "newton", tol, options=options)
    best, *others = sorted(polished, key=lambda s: s.loss)
    return BasinHopping(best, tuple(others), tuple(history), _query_count(rows), message)


@dataclass(frozen=True, eq=False)
class _Minimum:
    """Where a fit on the sample ended; exact if its loss is that of rounding."""

    X: Float[Tensor, "h d1 d2"]
    loss: float
    relative_loss: float

    @classmethod
    def of(cls, solution: Solution, heads: int) -> _Minimum:
        X = torch.as_tensor(solution.X)
        return cls(X.reshape(heads, *X.shape[-2:]), solution.loss, solution.relative_loss)

    @property
    def exact(self) -> bool:
        return self.loss == 0 or self.relative_loss < EXACT * torch.finfo(self.X.dtype).eps


def _check(
    problem: AttentionProblem,
    members: int,
    rounds: int,
    max_seconds: float | None,
    sample_rows: int | None,
    callback: Callable[[Round], object] | None,
) -> None:
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"problem must be an AttentionProblem; found {type(problem).__name__}.")
    if problem.parts:
        raise ValueError("basin_hopping takes one problem; found a stack of several.")
    if problem.of_maps:
        raise ValueError(
            "basin_hopping fits a value map with X; this is a problem of attention maps: "
            "use solve(..., n_init=)."
        )
    require_count("members", members, 1)
    require_count("rounds", rounds, 0)
    if sample_rows is not None:
        require_count("sample_rows", sample_rows, 1)
    if max_seconds is not None:
        require_positive("max_seconds", max_seconds, finite=False)
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be callable; found {type(callback).__name__}.")


def _known(
    problem: AttentionProblem, start: Solution | Sequence[Solution] | None, heads: int
) -> list[Float[Tensor, "h d1 d2"]]:
    """The X of the given fits."""
    given = [start] if isinstance(start, Solution) else list(start or ())
    d1, d2, _, _ = problem.widths
    known = []
    for i, solution in enumerate(given):
        if not isinstance(solution, Solution):
            raise TypeError(f"start[{i}] must be a Solution; found {type(solution).__name__}.")
        X = as_like(f"start[{i}].X", solution.X, problem.like)
        if X.numel() != heads * d1 * d2:
            raise ValueError(
                f"start[{i}].X must have {heads} x {d1} x {d2} entries; "
                f"found shape {shape_text(X.shape)}."
            )
        known.append(X.reshape(heads, d1, d2))
    return known


def _sample(problem: AttentionProblem, heads: int, rows: int | None, seed: int) -> AttentionProblem:
    """The rows on which minima are looked for."""
    d1, d2, d3, p = problem.widths
    if rows is None:
        rows = math.ceil(EQUATIONS * heads * (d1 * d2 + d3 * p) / p)
    X = problem.like.new_zeros(heads, d1, d2)
    return sample_queries(problem, rows, X, X.new_zeros(heads, d3, p), scores="uniform", seed=seed)


def _query_count(problem: AttentionProblem) -> int:
    return sum(int(chunk.query_count()) for chunk in problem.chunks)


def _random_starts(
    problem: AttentionProblem, heads: int, count: int, seed: int, generator: torch.Generator
) -> list[Float[Tensor, "h d1 d2"]]:
    """Half of them as `solve` makes them, half Gaussian, with logits of the same size."""
    starts = [random_start(problem, heads, seed, draw)[0] for draw in range(count)]
    for i in range(1, count, 2):
        X = _normal(starts[i], generator)
        spread = logit_spread(problem, X[None])[0, :, None, None]
        starts[i] = X * (START_SCALE / spread.clamp(min=torch.finfo(X.dtype).tiny))
    return starts


def _disturbed(X: Float[Tensor, "h d1 d2"], generator: torch.Generator) -> Float[Tensor, "h d1 d2"]:
    """X (I + e E): the keys of every head mixed."""
    least, largest = STEPS
    u = float(torch.rand((), generator=generator, dtype=torch.float64))
    d2 = X.shape[-1]
    E = _normal(X.new_empty(len(X), d2, d2), generator) / d2**0.5
    return X + least * (largest / least) ** u * X @ E


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


def _distinct(minima: list[_Minimum]) -> list[_Minimum]:
    """One of each loss, the lowest first."""
    kept: list[_Minimum] = []
    for m in sorted(minima, key=lambda m: m.loss):
        if not kept or m.loss > kept[-1].loss * (1 + DISTINCT):
            kept.append(m)
    return kept


def _ended(
    latest: Round,
    best: _Minimum,
    stopped: bool,
    rounds: int,
    max_seconds: float | None,
    callback: Callable[[Round], object] | None,
) -> str | None:
    """Why the search ends here, if it does; stopped: by Ctrl-C."""
    if callback is not None:
        try:
            callback(latest)
        except StopIteration:
            return "the callback stopped it."
    if stopped:
        return "it was interrupted."
    if best.exact:
        return "a fit is exact to rounding."
    if latest.number >= rounds:
        return f"the limit of {rounds} rounds was reached."
    if max_seconds is not None and latest.seconds >= max_seconds:
        return "the time limit was reached."
    return None
