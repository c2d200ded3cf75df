"""Why no X satisfies all pairs: a small set of them that already contradict each other.

Gordan: there is no X with f_c . X > 0 for all c in a finite set if and only if some weights
y_c >= 0, not all 0, give sum_c y_c f_c = 0.  By Caratheodory at most D + 1 pairs need weights, D
the dimension of the features.  A vertex of { y >= 0, sum y = 1, sum y f = 0 } has linearly
independent columns (f_c, 1), so that the weights of its pairs are unique and all positive: without
any one of the pairs there is no conflict left.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np
from scipy import optimize

from newtention.svm.pairs import Pairs, Tokens
from newtention.svm.programs import short_rows
from newtention.svm.result import Conflict

RESIDUAL = 1e-10
"""||sum y f|| / sum y ||f|| up to which weights count as a conflict: every X with margins of at
least 1 would have some ||X|| ||f_c|| beyond 1e10."""
_EXACT_OPERATIONS = 40_000
"""Products of rational numbers worth a proof."""
_MEMBERS = 64
"""Equal queries that are compared with each other; a conflict of more is left to the program."""
_QUERIES = 100
"""Queries whose own wishes are checked for a conflict."""
_REWEIGHTED = 4


def obvious_conflict(tokens: Tokens) -> Conflict | None:
    """A conflict of one or two pairs, exact: equal keys, a query of zeros, equal queries."""
    keys, queries = _groups(tokens.A2), _groups(tokens.A1)
    zero = np.asarray(~tokens.A1.any(1))
    shared = np.bincount(keys)[keys[tokens.selected]] > 1
    for j in np.flatnonzero(zero | shared):
        others = tokens.rivals(int(j))
        if not zero[j]:
            others &= keys == keys[tokens.selected[j]]
        if others.any():
            pair = np.array([[j, int(others.argmax())]])
            return Conflict(pair, tokens.selected[pair[:, 0]], np.ones(1), 0.0, True, True)
    order = np.argsort(queries, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(queries[order])) + 1):
        pairs = _opposite(tokens, group[:_MEMBERS])
        if pairs is not None:
            half = np.full(2, 0.5)
            return Conflict(pairs, tokens.selected[pairs[:, 0]], half, 0.0, True, True)
    return None


def find_conflict(tokens: Tokens, pairs: Pairs, original: Tokens) -> Conflict | None:
    """An irreducible conflict, a small one if that is easy to find; None if none shows.

    The smallest is hard to find in general.  Tried first: pairs of a single query, whose selected
    key lies in the convex hull of its rivals.  Then the pairs given.

    Args:
        tokens: scaled and projected.
        pairs: that are found to be in conflict.
        original: the tokens as given, in which the conflict is measured.
    """
    conflict = _within_a_query(original)
    if conflict is not None:
        return conflict
    lengths = tokens.lengths(pairs)
    vertex = _vertex(short_rows(tokens, pairs, lengths))
    return None if vertex is None else _measured(original, pairs, vertex, lengths)


def _within_a_query(tokens: Tokens) -> Conflict | None:
    """The smallest conflict found among those of one query; equal wishes are looked at once."""
    seen: set[tuple[int, bytes]] = set()
    smallest: Conflict | None = None
    for j, t in enumerate(tokens.selected.tolist()):
        rivals = tokens.rivals(j)
        if (t, rivals.tobytes()) in seen or not rivals.any():
            continue
        if len(seen) == _QUERIES:
            break
        seen.add((t, rivals.tobytes()))
        k = np.flatnonzero(rivals)
        pairs = np.stack([np.full(len(k), j), k], 1)
        rows = tokens.A2[t] - tokens.A2[k]
        norms = np.maximum(np.linalg.norm(rows, axis=1), np.finfo(float).tiny)
        vertex = _vertex(rows / norms[:, None])
        found = None if vertex is None else _measured(tokens, pairs, vertex, norms)
        if found is not None and (smallest is None or len(found.pairs) < len(smallest.pairs)):
            smallest = found
    return smallest


class _Vertex(NamedTuple):
    """Positive weights of a few rows that sum to 0, and whether no fewer of them do."""

    chosen: np.ndarray
    weights: np.ndarray
    independent: bool


def _vertex(rows: np.ndarray) -> _Vertex | None:
    """A vertex of { y >= 0, sum y = 1, rows^T y = 0 } for rows of length 1; None without one.

    Repeated with costs 1 / (y + 0.001), which favour vertices of fewer weights (Candes, Wakin,
    Boyd 2008); refined by least squares.
    """
    system = np.vstack([rows.T, np.ones(len(rows))])
    right = np.zeros(len(system))
    right[-1] = 1.0
    cost, best = np.zeros(len(rows)), None
    for _ in range(_REWEIGHTED):
        found = optimize.linprog(
            cost,
            A_eq=system,
            b_eq=right,
            method="highs-ds",
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        )
        if found.x is None:
            break
        cost = 1.0 / (found.x + 1e-3)
        chosen = np.flatnonzero(found.x > 1e-9)
        weights, _, _, singular = np.linalg.lstsq(system[:, chosen], right, rcond=None)
        if not len(chosen) or weights.min() <= 0:
            continue
        if best is None or len(chosen) < len(best.chosen):
            independent = len(singular) == len(chosen) and singular[-1] > 1e-9
            best = _Vertex(chosen, weights, bool(independent))
        elif len(chosen) == len(best.chosen):
            break
    return best


def _measured(
    tokens: Tokens, pairs: Pairs, vertex: _Vertex, lengths: np.ndarray
) -> Conflict | None:
    """The conflict of a vertex of features over `lengths`, if it is one of the features given."""
    pairs, weights = pairs[vertex.chosen], vertex.weights / lengths[vertex.chosen]
    weights = weights / weights.sum()
    size = weights @ tokens.lengths(pairs)
    residual = float(np.linalg.norm(tokens.combine(pairs, weights)) / size)
    if not residual <= RESIDUAL:
        return None
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    pairs, weights = pairs[order], weights[order]
    exact = _rational(tokens, pairs, weights)
    if exact is not None:
        weights, residual = exact, 0.0
    proved = exact is not None or _stable(tokens, pairs, weights)
    return Conflict(
        pairs, tokens.selected[pairs[:, 0]], weights, residual, vertex.independent, proved
    )


def _rational(tokens: Tokens, pairs: Pairs, weights: np.ndarray) -> np.ndarray | None:
    """Weights with small denominators whose combination is 0 in exact arithmetic, if there are."""
    d1, d2 = tokens.shape
    if len(pairs) * d1 * d2 > _EXACT_OPERATIONS:
        return None
    ratios = [Fraction(w).limit_denominator(1000) for w in (weights / weights.max()).tolist()]
    if min(ratios) <= 0:
        return None
    rows = []
    for ratio, (j, k) in zip(ratios, pairs.tolist(), strict=True):
        left = [ratio * Fraction(x) for x in tokens.A1[j].tolist()]
        ends = zip(tokens.A2[tokens.selected[j]].tolist(), tokens.A2[k].tolist(), strict=True)
        rows.append((left, [Fraction(a) - Fraction(b) for a, b in ends]))
    for a in range(d1):
        for b in range(d2):
            if sum(left[a] * right[b] for left, right in rows):
                return None
    total = sum(ratios)
    return np.array([float(ratio / total) for ratio in ratios])


def _stable(tokens: Tokens, pairs: Pairs, weights: np.ndarray) -> bool:
    """Whether positive weights of an exact conflict provably lie near these, rounding counted.

    With one pair more than the features have dimensions, the exact weights solve a square system
    M w = e: the residual plus all rounding, over M's smallest singular value less all rounding,
    bounds how far they are.  Pairs of one query are a matter of the key differences alone; with two
    keys there is one difference, up to sign, and it is a matter of the queries.
    """
    left, right = tokens.sides(pairs)
    ends = np.abs(tokens.A2[tokens.selected[pairs[:, 0]]]) + np.abs(tokens.A2[pairs[:, 1]])
    if len(np.unique(pairs[:, 0])) == 1:
        left = np.ones((len(pairs), 1))
    elif len(np.unique(np.append(pairs[:, 1], tokens.selected[pairs[:, 0]]))) == 2:
        right = np.where(pairs[:, 1] == pairs[0, 1], 1.0, -1.0)[:, None]
        ends = np.abs(right)
    F = (left[:, :, None] * right[:, None, :]).reshape(len(pairs), -1)
    size = (np.abs(left)[:, :, None] * ends[:, None, :]).reshape(F.shape)
    lengths = np.linalg.norm(F, axis=1)
    count, D = F.shape
    if count != D + 1 or not (lengths.min() > 0 and lengths.max() < np.inf):
        return False
    w = weights * lengths
    w /= w.sum()
    one = np.ones(count)
    M, size = np.vstack([F.T / lengths, one]), np.vstack([size.T / lengths, one])
    eps, e = np.finfo(float).eps, np.eye(count)[-1]
    residual = np.linalg.norm(M @ w - e) + 4 * (count + 4) * eps * np.linalg.norm(size @ w + 1.0)
    smallest = np.linalg.svd(M, compute_uv=False)[-1] - 20 * count * eps * np.linalg.norm(size)
    return bool(smallest > 0 and residual < 0.5 * smallest * w.min())


def _opposite(tokens: Tokens, group: np.ndarray) -> Pairs | None:
    """Two pairs of equal queries that each prefer their own key to the other's."""
    if len(set(tokens.selected[group].tolist())) < 2:
        return None
    others = {int(j): tokens.rivals(int(j)) for j in group}
    for i in others:
        for j in others:
            if others[i][tokens.selected[j]] and others[j][tokens.selected[i]]:
                return np.array([[i, tokens.selected[j]], [j, tokens.selected[i]]])
    return None


def _groups(A: np.ndarray) -> np.ndarray:
    """For every row the number of its group of equal rows."""
    return np.unique(A + 0.0, axis=0, return_inverse=True)[1].reshape(-1)
