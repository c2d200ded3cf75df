"""The hard margin's multipliers from those of a similar set of pairs, by an active-set method.

    min  1/2 y . K y - sum y   over  y >= 0,        K[c, c'] = f_c . f_c'

Rounds of constraint generation differ in a part of their pairs, and an active-set method starts
from where the last one ended; it also ends at an exact solution of its equations.  Lawson, Hanson,
"Solving Least Squares Problems" (1974), chapter 23, with blocks of exchanges.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float
from scipy import linalg

from newtention.svm.pairs import Pairs, Tokens

STEPS = 400
"""Systems of equations to solve at most, before the interior-point method is quicker."""
_PIVOT = 1e-7
"""Smallest pivot of a correlation matrix that counts as regular."""
_FACTORED = 1 << 22
"""Entries of features worth an orthogonal factorisation."""


def exchange(
    K: Float[np.ndarray, "c c"], y: Float[np.ndarray, " c"], rank: int
) -> Float[np.ndarray, " c"] | None:
    """Multipliers to rounding.

    Violated pairs enter, at most as many as can be independent; `_descend` solves for them.  The
    objective falls with every entry, so that no set of active pairs comes twice.

    Args:
        K: Gram matrix of features, none of them 0.
        y: multipliers >= 0 to begin from, 0 for new pairs.
        rank: dimension of the space that the features lie in.

    Returns:
        (c,) multipliers, or None where it does not settle: dependent features, or a conflict.
    """
    lengths = np.sqrt(np.diag(K))
    K, y, goal = K / np.outer(lengths, lengths), y * lengths, 1.0 / lengths
    value, most, left = _objective(K, goal, y), rank, STEPS
    while left > 0:
        slack = K @ y - goal
        wrong = np.flatnonzero((y == 0) & (slack < -1e-13 * (goal + np.abs(K) @ y)))
        if not len(wrong):
            return y / lengths
        inside = y > 0
        room = max(1, min(rank - int(inside.sum()), most))
        wrong = wrong[np.argsort(slack[wrong], kind="stable")[:room]]
        inside[wrong] = True
        before = value
        y, left, regular = _descend(K, goal, y, inside, left)
        value = _objective(K, goal, y)
        if regular and value < before - 1e-14 * abs(before):
            most = rank
        elif len(wrong) == 1:
            return None
        else:
            most = max(1, len(wrong) // 4)
    return None


def refine(
    tokens: Tokens, pairs: Pairs, y: Float[np.ndarray, " c"]
) -> tuple[Float[np.ndarray, " c"], Float[np.ndarray, "r1 r2"]] | None:
    """Multipliers and X of the same active pairs, by an orthogonal factorisation of their features.

    The Gram matrix squares the condition number, and a sum of large multipliers times features
    loses what cancels; F^T = Q R gives X = Q R^-T 1 and y = R^-1 R^-T 1 without either.  For
    margins that are small against the features.

    Returns:
        (c,) and (r1, r2), or None: features too many to factor or dependent, or other pairs active.
    """
    active = np.flatnonzero(y > 0)
    if not 0 < len(active) <= _FACTORED // int(np.prod(tokens.shape)):
        return None
    lengths = tokens.lengths(pairs[active])
    F = tokens.features(pairs[active]) / lengths[:, None]
    Q, R = np.linalg.qr(F.T)
    if R.shape[0] < R.shape[1] or np.abs(np.diag(R)).min() < 1e-12:
        return None
    v = np.asarray(linalg.solve_triangular(R, 1.0 / lengths, trans="T"))
    solved = np.asarray(linalg.solve_triangular(R, v))
    if solved.min() < 0:
        return None
    result = np.zeros_like(y)
    result[active] = solved / lengths
    return result, (Q @ v).reshape(tokens.shape)


def _descend(
    K: Float[np.ndarray, "c c"],
    goal: Float[np.ndarray, " c"],
    y: Float[np.ndarray, " c"],
    inside: Bool[np.ndarray, " c"],
    left: int,
) -> tuple[Float[np.ndarray, " c"], int, bool]:
    """Lower the objective with multipliers inside only, dropping those that become negative.

    Negative ones are cut off all at once where that lowers the objective, else at the first that
    reaches zero on the way.

    Returns:
        The multipliers, how many systems may still be solved, and whether all were regular.
    """
    value = _objective(K, goal, y)
    while left > 0:
        left -= 1
        at = np.flatnonzero(inside)
        s = _equations(K[np.ix_(at, at)], goal[at])
        if s is None:
            return y, left, False
        cut = np.zeros_like(y)
        cut[at] = np.maximum(s, 0.0)
        if (s > 0).all():
            return cut, left, True
        cut_value = _objective(K, goal, cut)
        if cut_value < value - 1e-12 * abs(value):
            y, value = cut, cut_value
            inside = y > 0
            continue
        held, falls = y[at], s <= 0
        ratio = np.full(len(at), np.inf)
        ratio[falls] = held[falls] / (held[falls] - s[falls] + np.finfo(float).tiny)
        part = ratio.min()
        held = np.maximum(held + part * (s - held), 0.0)
        held[falls & (ratio <= part * (1.0 + 1e-12))] = 0.0
        y = np.zeros_like(y)
        y[at] = held
        value = _objective(K, goal, y)
        inside = inside.copy()
        inside[at[falls & (held == 0)]] = False
    return y, left, True


def _objective(K: np.ndarray, goal: np.ndarray, y: np.ndarray) -> float:
    return float(0.5 * y @ (K @ y) - goal @ y)


def _equations(K: np.ndarray, right: np.ndarray) -> np.ndarray | None:
    """K y = right, refined once; None where K is singular or nearly so."""
    try:
        factor = linalg.cho_factor(K)
    except linalg.LinAlgError:
        return None
    if np.diag(factor[0]).min(initial=np.inf) <= _PIVOT:
        return None
    y = np.asarray(linalg.cho_solve(factor, right))
    return y + np.asarray(linalg.cho_solve(factor, right - K @ y))
