"""Constraint generation: programs over few pairs, until no pair outside them matters.

Each round solves the program over the pairs held, scans the logits for the most violated pair of
every query, and adds those.  Two numbers say how far it is:

    upper    the objective of X with all pairs counted: ||X|| / (smallest margin), or, with slack,
             the norm's term plus C sum_j max(0, 1 - margin_j)
    lower    the dual objective of the multipliers, pairs outside having multiplier 0

Any multipliers admissible for the program are so for the whole problem, so lower <= optimum <=
upper whatever the solver did.  With F the features as rows and dual norm || . ||* (the Frobenius
norm's own, the spectral norm for the nuclear one) the lower bound of the hard margin is
sum y / ||F^T y||*: y >= 0 may be scaled freely.  Pairs whose constraint is slack leave; this cannot
cycle, since the optimum over the pairs held rises strictly until it is the optimum over all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from newtention.svm.conflicts import find_conflict
from newtention.svm.exchange import exchange, refine
from newtention.svm.pairs import Pairs, Tokens
from newtention.svm.programs import (
    Answer,
    capped,
    polish_soft,
    solve_frobenius,
    solve_nuclear,
)
from newtention.svm.result import Conflict, Norm, SvmStatus

MOST_NEW = 1000
"""Pairs added in a round at most."""
NEGLIGIBLE = 1e-9
"""Share of the largest multiplier below which a multiplier is taken for 0."""
_EXACT = 1e-11
"""Relative gap of a program from which on no better answer is sought."""
_LEFT_OUT = 5
"""Pairs that are tried to be done without in the search for a better answer."""
_SHORTEST = 1e-100
"""Features shorter than this, tokens scaled to 1, cannot be told from none."""


@dataclass(frozen=True)
class Objective:
    """What is minimised: the norm and C (`cap`; None for the hard margin)."""

    norm: Norm
    cap: float | None

    def upper(self, X: Float[np.ndarray, "d1 d2"], margin: Float[np.ndarray, " n"]) -> float:
        """Objective of X, for the hard margin of X made admissible; infinite if it cannot be."""
        if self.cap is not None:
            energy = self._size(X) if self.norm == "nuclear" else 0.5 * self._size(X) ** 2
            return energy + self.cap * float(np.maximum(1.0 - margin, 0.0).sum())
        least = float(margin.min())
        return self._size(X) / least if least > 0 else np.inf

    def lower(self, tokens: Tokens, pairs: Pairs, y: Float[np.ndarray, " c"]) -> float:
        """Dual objective of multipliers, scaled as is best."""
        total = float(y.sum())
        if total <= 0:
            return 0.0
        M = tokens.combine(pairs, y)
        size = float(np.linalg.norm(M, 2 if self.norm == "nuclear" else "fro"))
        if self.cap is None:
            return total / size if size > 0 else np.inf
        room = self.cap / float(np.bincount(pairs[:, 0], y).max())
        if self.norm == "nuclear":
            return total * (min(room, 1.0 / size) if size > 0 else room)
        factor = min(room, total / size**2) if size > 0 else room
        return factor * total - 0.5 * (factor * size) ** 2

    def _size(self, X: np.ndarray) -> float:
        return float(np.linalg.norm(X, "nuc" if self.norm == "nuclear" else "fro"))


@dataclass(frozen=True, eq=False)
class Generated:
    """Where generation ended, in the scaled coordinates.

    X: (r1, r2) or None.  pairs, y: those with a multiplier.  active: pairs held last.
    """

    X: Float[np.ndarray, "r1 r2"] | None
    pairs: Pairs
    y: Float[np.ndarray, " c"]
    active: int
    rounds: int
    status: SvmStatus
    conflict: Conflict | None = None


def generate(
    tokens: Tokens, original: Tokens, objective: Objective, tol: float, max_rounds: int
) -> Generated:
    """Solve; a hard margin in the nuclear norm begins from the pairs of the Frobenius norm's.

    Args:
        tokens: scaled and projected; at least one query has a rival.
        original: as given, for conflicts.
        objective: in the scaled coordinates.
        tol: relative duality gap to reach.
        max_rounds: of both together.
    """
    pairs, y = np.zeros((0, 2), np.int64), np.zeros(0)
    X = tokens.A1.T @ tokens.A2[tokens.selected]
    if objective.norm == "frobenius" or objective.cap is not None:
        return _rounds(tokens, original, objective, tol, max_rounds, X, pairs, y, 0)
    first = _rounds(
        tokens, original, replace(objective, norm="frobenius"), 1e-6, max_rounds, X, pairs, y, 0
    )
    if first.X is None:
        return first
    if first.rounds >= max_rounds:
        return replace(first, status=SvmStatus.ROUND_LIMIT)
    return _rounds(
        tokens, original, objective, tol, max_rounds, None, first.pairs, first.y, first.rounds
    )


def _rounds(
    tokens: Tokens,
    original: Tokens,
    objective: Objective,
    tol: float,
    max_rounds: int,
    X: Float[np.ndarray, "r1 r2"] | None,
    pairs: Pairs,
    y: Float[np.ndarray, " c"],
    rounds: int,
) -> Generated:
    best, upper, lower = X, np.inf, 0.0
    held: tuple[Pairs, np.ndarray] = (pairs, y)
    active = len(pairs)
    if X is not None:
        pairs, y = _added(pairs, y, _most_violated(tokens.scan(X), None, pairs))
    while rounds < max_rounds:
        rounds += 1
        active = len(pairs)
        if objective.cap is None and tokens.lengths(pairs).min() < _SHORTEST:
            return Generated(None, *held, active, rounds, SvmStatus.UNRESOLVED)
        answer = _program(tokens, pairs, y, objective)
        if answer.conflict or answer.X is None:
            conflict = find_conflict(tokens, pairs, original)
            status = SvmStatus.UNRESOLVED if conflict is None else SvmStatus.INFEASIBLE
            return Generated(None, *held, active, rounds, status, conflict)
        y = _without_noise(tokens, pairs, answer.y, objective.cap)
        scan = tokens.scan(answer.X)
        reached = objective.upper(answer.X, scan[1])
        if reached < upper:
            upper, best = reached, answer.X
        found = objective.lower(tokens, pairs, y)
        if found > lower:
            lower, held = found, (pairs[y > 0], y[y > 0])
        new = _most_violated(scan, _own_slack(tokens, pairs, answer.X, objective), pairs)
        enough = upper <= lower * (1.0 + tol)
        # X of the Frobenius norm is worth more accuracy: its error is the square root of the gap.
        done = enough if objective.norm == "nuclear" else upper <= lower * (1.0 + 1e-3 * tol)
        if done or not len(new):
            status = SvmStatus.SOLVED if enough else SvmStatus.INACCURATE
            if upper == np.inf:
                conflict = find_conflict(tokens, pairs, original)
                status = SvmStatus.UNRESOLVED if conflict is None else SvmStatus.INFEASIBLE
                return Generated(None, *held, active, rounds, status, conflict)
            return Generated(best, *held, active, rounds, status)
        if objective.norm == "frobenius":  # whose optimum is unique
            near = tokens.margins(pairs, answer.X) < 1.5
            pairs, y = pairs[near | (y > 0)], y[near | (y > 0)]
        pairs, y = _added(pairs, y, new)
    enough = upper <= lower * (1.0 + tol)
    status = SvmStatus.SOLVED if enough else SvmStatus.ROUND_LIMIT
    return Generated(best if upper < np.inf else None, *held, active, rounds, status)


def _program(tokens: Tokens, pairs: Pairs, y: np.ndarray, objective: Objective) -> Answer:
    """The optimum over the pairs, by the cheapest method that gets there."""
    if objective.norm == "nuclear":
        return solve_nuclear(tokens, pairs, objective.cap)

    def gap(answer: Answer) -> float:
        """Of the program alone, relative."""
        if answer.X is None:
            return np.inf
        margin = np.full(len(tokens.A1), np.inf)
        np.minimum.at(margin, pairs[:, 0], tokens.margins(pairs, answer.X))
        lower = objective.lower(tokens, pairs, answer.y)
        return objective.upper(answer.X, margin) / lower - 1.0 if lower > 0 else np.inf

    if objective.cap is not None:
        answer = solve_frobenius(tokens, pairs, objective.cap)
        found = [answer.y, polish_soft(tokens, pairs, answer.y, objective.cap)]
        found = [capped(pairs, v, objective.cap) for v in found]
        return min((Answer(v, tokens.combine(pairs, v)) for v in found), key=gap)
    K, rank = tokens.gram(pairs), int(np.prod(tokens.shape))
    exact = exchange(K, y, rank)
    if exact is not None:
        best = _refined(tokens, pairs, exact, gap)
        if gap(best) < _EXACT:
            return best
    answer = solve_frobenius(tokens, pairs, None)
    if answer.conflict:
        return answer
    likely = _without_noise(tokens, pairs, answer.y, None)
    likely[likely * np.diag(K) <= K @ answer.y - 1.0] = 0.0  # of the two, which is the 0
    exact = exchange(K, likely, rank)
    known = [answer, _refined(tokens, pairs, likely, gap)]
    if exact is not None:
        known.append(_refined(tokens, pairs, exact, gap))
    return min(known, key=gap)


def _refined(tokens: Tokens, pairs: Pairs, y: np.ndarray, gap: Callable[[Answer], float]) -> Answer:
    """The answer of these multipliers, refined where that is needed and works.

    Some of the pairs may be active by inaccuracy only: the least are left out one by one.
    """
    best = Answer(y, tokens.combine(pairs, y))
    weight = y * tokens.lengths(pairs)
    for c in np.argsort(weight, kind="stable")[np.count_nonzero(weight == 0) :][:_LEFT_OUT]:
        if gap(best) < _EXACT:
            break
        refined = refine(tokens, pairs, y)
        if refined is not None:
            best = min(best, Answer(*refined), key=gap)
        y = np.where(np.arange(len(y)) == c, 0.0, y)
    return best


def _without_noise(
    tokens: Tokens, pairs: Pairs, y: np.ndarray, cap: float | None
) -> Float[np.ndarray, " c"]:
    """Multipliers, those that are small for the length of their feature set to 0."""
    weight = y * tokens.lengths(pairs)
    if cap is not None:  # features of next to no length count by their slack
        weight = np.maximum(weight, y * cap**-0.5)
    return np.where(weight > NEGLIGIBLE * weight.max(initial=0.0), y, 0.0)


def _own_slack(
    tokens: Tokens, pairs: Pairs, X: np.ndarray, objective: Objective
) -> Float[np.ndarray, " n"] | None:
    """xi_j as the pairs held demand it; None for the hard margin."""
    if objective.cap is None:
        return None
    slack = np.zeros(len(tokens.A1))
    np.maximum.at(slack, pairs[:, 0], 1.0 - tokens.margins(pairs, X))
    return slack


def _most_violated(
    scan: tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]],
    slack: Float[np.ndarray, " n"] | None,
    pairs: Pairs,
) -> Int[np.ndarray, "new 2"]:
    """New pairs, the worst of each query's if it is violated, the most violated queries' first."""
    rival, margin = scan
    excess = margin - 1.0 if slack is None else margin - 1.0 + slack
    if len(pairs):
        order = np.flatnonzero(excess < -1e-10)
        known = set(map(tuple, pairs.tolist()))
        order = np.array([j for j in order if (j, rival[j]) not in known], np.int64)
    else:
        order = np.flatnonzero(np.isfinite(excess))
    order = order[np.argsort(excess[order], kind="stable")[:MOST_NEW]]
    return np.stack([order, rival[order]], 1)


def _added(
    pairs: Pairs, y: Float[np.ndarray, " c"], new: Int[np.ndarray, "new 2"]
) -> tuple[Int[np.ndarray, "all 2"], Float[np.ndarray, " all"]]:
    """The pairs with new ones, whose multipliers are 0."""
    return np.concatenate([pairs, new]), np.concatenate([y, np.zeros(len(new))])
