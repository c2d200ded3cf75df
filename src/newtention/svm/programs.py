"""The convex programs over a chosen set of pairs, by the interior-point solver Clarabel.

With the features f_c as rows of F (see `pairs`), one multiplier y_c >= 0 per pair:

    hard, Frobenius    min 1/2 ||X||_F^2  s.t. F x >= 1          X = sum_c y_c f_c
    soft, Frobenius    min 1/2 ||X||_F^2 + C sum_j xi_j          likewise, sum_k y_jk <= C
    either, nuclear    max sum_c y_c  s.t. [[I, M], [M^T, I]] psd, M = sum_c y_c f_c
                       (||M||_2 <= 1; soft: sum_k y_jk <= C as well); X is minus twice the
                       off-diagonal block of the multiplier of the constraint.

Reference: Goulart, Chen, "Clarabel: an interior-point solver for conic programs with quadratic
objectives", arXiv 2405.12762.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import clarabel
import numpy as np
from jaxtyping import Float
from scipy import linalg, sparse

from newtention.svm.pairs import Pairs, Tokens

_ACCURACY = {
    "tol_gap_abs": 1e-11,
    "tol_gap_rel": 1e-11,
    "tol_feas": 1e-11,
    "tol_infeas_abs": 1e-11,
    "tol_infeas_rel": 1e-11,
}
_clarabel: Any = clarabel  # its names come from a compiled module
_INFEASIBLE = (
    _clarabel.SolverStatus.PrimalInfeasible,
    _clarabel.SolverStatus.AlmostPrimalInfeasible,
)
_ROOT2 = float(np.sqrt(2.0))


class Answer(NamedTuple):
    """What a program found.

    y: (c,) multipliers >= 0; those of a conflict if there is one.
    X: (r1, r2); None with a conflict.
    conflict: no X satisfies the constraints, as far as the solver can tell.
    """

    y: Float[np.ndarray, " c"]
    X: Float[np.ndarray, "r1 r2"] | None
    conflict: bool = False


def solve_frobenius(tokens: Tokens, pairs: Pairs, cap: float | None) -> Answer:
    """The quadratic program; `cap` is C, None for the hard margin.

    Its variable is X, or, where the pairs are fewer than the entries of X, the coordinates in the
    span of the pairs' features, known from their Gram matrix alone: G G^T = K.  Rows are scaled to
    length 1 and X to the size that is expected, since lengths may differ by many orders.
    """
    lengths = tokens.lengths(pairs)
    unit = max(lengths.min(), 0.0 if cap is None else cap**-0.5)
    lengths = np.maximum(lengths, unit)
    G = short_rows(tokens, pairs, lengths)
    count, r = G.shape
    bound, quadratic, cost = -unit / lengths, sparse.eye(r), np.zeros(r)
    A: Any = sparse.csc_matrix(-G)
    if cap is not None:
        owner, queries = _owners(pairs)
        slack = sparse.csc_matrix((bound, (np.arange(count), owner)))
        A = sparse.bmat([[A, slack], [None, -sparse.eye(queries)]])
        bound = np.concatenate([bound, np.zeros(queries)])
        cost = np.concatenate([cost, np.full(queries, cap * unit**2)])
        quadratic = sparse.block_diag([quadratic, sparse.csc_matrix((queries, queries))])
    found = _solve(quadratic, cost, A, bound, [_clarabel.NonnegativeConeT(len(bound))])
    y = np.maximum(np.array(found.z)[:count], 0.0) / (lengths * unit)
    if cap is None and found.status in _INFEASIBLE:
        return Answer(y, None, conflict=True)
    return Answer(y, tokens.combine(pairs, y))


def solve_nuclear(tokens: Tokens, pairs: Pairs, cap: float | None) -> Answer:
    """The semidefinite program, in the multipliers; `cap` is C, None for the hard margin.

    The hard one is taken only where the pairs have been found to be without a conflict.
    """
    r1, r2 = tokens.shape
    count, size = len(pairs), r1 + r2
    place, diagonal = _triangle(size)
    block = place[:r1, r1:].reshape(-1)
    lengths = tokens.lengths(pairs)
    unit = max(lengths.min(), 0.0 if cap is None else 1.0 / cap)
    lengths = np.maximum(lengths, unit)
    F = tokens.features(pairs) / lengths[:, None]
    entries = (np.tile(block, count), np.repeat(np.arange(count), r1 * r2))
    cone = sparse.csc_matrix(
        (-_ROOT2 * F.reshape(-1), entries), shape=(size * (size + 1) // 2, count)
    )
    rows, bound = [-sparse.eye(count)], [np.zeros(count)]
    if cap is not None:
        owner, queries = _owners(pairs)
        rows.append(sparse.csc_matrix((unit / lengths, (owner, np.arange(count)))))
        bound.append(np.full(queries, cap * unit))
    linear = sum(len(b) for b in bound)
    found = _solve(
        sparse.csc_matrix((count, count)),
        -unit / lengths,
        sparse.vstack([*rows, cone]),
        np.concatenate([*bound, diagonal]),
        [_clarabel.NonnegativeConeT(linear), _clarabel.PSDTriangleConeT(size)],
    )
    y = np.maximum(np.array(found.x), 0.0) / lengths
    X = -_ROOT2 * np.array(found.z)[linear:][block].reshape(r1, r2)
    return Answer(y, X / unit)


def short_rows(
    tokens: Tokens, pairs: Pairs, lengths: Float[np.ndarray, " c"]
) -> Float[np.ndarray, "c r"]:
    """Rows with the scalar products of the pairs' features over `lengths`, as short as can be.

    They are the features, or coordinates from an eigendecomposition of the Gram matrix.
    """
    r1, r2 = tokens.shape
    if r1 * r2 <= len(pairs):
        return tokens.features(pairs) / lengths[:, None]
    values, vectors = np.linalg.eigh(tokens.gram(pairs) / np.outer(lengths, lengths))
    keep = values > len(pairs) * np.finfo(float).eps * values[-1]
    return vectors[:, keep] * np.sqrt(values[keep])


def polish_soft(
    tokens: Tokens, pairs: Pairs, y: Float[np.ndarray, " c"], cap: float
) -> Float[np.ndarray, " c"]:
    """The soft margin's multipliers from the interior-point answer, to rounding if all goes well.

    Active pairs and queries with slack are read off it; then f_c . X + xi_j = 1 for the active
    pairs and sum_k y_jk = C for those queries are linear equations.  The caller compares.
    """
    owner, queries = _owners(pairs)
    lengths = np.maximum(tokens.lengths(pairs), cap**-0.5)
    margin = tokens.margins(pairs, tokens.combine(pairs, y))
    xi = np.zeros(queries)
    np.maximum.at(xi, owner, 1.0 - margin)
    sums = np.bincount(owner, y, queries)
    # Of a multiplier and its complement the smaller one is the 0.
    active = y * lengths**2 > margin + xi[owner] - 1.0
    short = np.flatnonzero(xi / (1.0 + xi) > 1.0 - sums / cap)
    E = (owner[active, None] == short[None, :]) / lengths[active, None]
    a, s = E.shape
    solved = np.zeros(len(y))
    if a:
        K = tokens.gram(pairs[active]) / np.outer(lengths[active], lengths[active])
        system = np.block([[K, E], [E.T, np.zeros((s, s))]])
        right = np.concatenate([1.0 / lengths[active], np.full(s, cap)])
        solved[active] = linalg.lstsq(system, right)[0][:a] / lengths[active]
    return np.maximum(solved, 0.0)


def capped(pairs: Pairs, y: Float[np.ndarray, " c"], cap: float) -> Float[np.ndarray, " c"]:
    """Multipliers made feasible for the soft margin: each query's scaled down to a sum of C."""
    owner, queries = _owners(pairs)
    sums = np.bincount(owner, y, queries)
    factor = np.divide(cap, sums, out=np.ones(queries), where=sums > cap)
    return y * factor[owner]


def _owners(pairs: Pairs) -> tuple[np.ndarray, int]:
    """Each pair's query, numbered without gaps, and how many there are."""
    found, owner = np.unique(pairs[:, 0], return_inverse=True)
    return owner, len(found)


def _solve(P: Any, q: np.ndarray, A: Any, b: np.ndarray, cones: list[Any]) -> Any:
    settings = _clarabel.DefaultSettings()
    settings.verbose = False
    settings.max_threads = 1
    settings.chordal_decomposition_enable = False
    for name, value in _ACCURACY.items():
        setattr(settings, name, value)
    return _clarabel.DefaultSolver(P.tocsc(), q, A.tocsc(), b, cones, settings).solve()


def _triangle(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of a symmetric matrix's entries in Clarabel's triangle, and the identity in it."""
    i, j = np.triu_indices(size)
    order = np.lexsort((i, j))  # column by column
    i, j = i[order], j[order]
    place = np.zeros((size, size), np.int64)
    place[i, j] = place[j, i] = np.arange(len(i))
    return place, (i == j).astype(float)
