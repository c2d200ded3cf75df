"""`attention_svm`: from the user's arrays, or a problem, to a result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from newtention.inputs import as_tensors, require_count
from newtention.notation import Array, ArrayLike
from newtention.problem import AttentionProblem
from newtention.svm.certified import certified, infeasible, without_constraints
from newtention.svm.conflicts import obvious_conflict
from newtention.svm.generation import Objective, generate
from newtention.svm.pairs import Tokens, reduce
from newtention.svm.result import AttentionSVM, Norm
from newtention.svm.sequences import as_selections, in_layout, joined, parts_of, presented

NUCLEAR_MOST = 64
"""Largest d1 + d2, after the reduction to the tokens' ranks, for the semidefinite program."""
DEFAULT_TOL = {"frobenius": 1e-9, "soft": 1e-8, "nuclear": 1e-7}


def attention_svm(
    A1: ArrayLike,
    A2: ArrayLike,
    selected: ArrayLike,
    norm: Norm = "frobenius",
    mask: ArrayLike | str | None = None,
    soft: float | None = None,
    *,
    offsets: ArrayLike | None = None,
    key_offsets: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    tol: float | None = None,
    max_rounds: int = 500,
) -> AttentionSVM:
    """The smallest X under which every query's selected key wins by a margin.

    Hard margin:  min ||X||  s.t.  (a2_t(j) - a2_k)^T X^T a1_j >= 1  for every query j and every key
    k != t(j) that it may attend to.  X / ||X|| is then the direction with the largest margin, which
    is 1 / ||X||.  Soft margin, with one slack per query, as for structured SVMs (Crammer, Singer
    2001; Tsochantaridis et al. 2005):

        min  1/2 ||X||_F^2 + C sum_j xi_j   (nuclear norm: ||X||_* + C sum_j xi_j)
        s.t. (a2_t(j) - a2_k)^T X^T a1_j >= 1 - xi_j,  xi_j >= 0.

    Several sequences share X: each brings its own constraints, between keys of its own.

    Constraints are generated as they are violated; logits are evaluated in tiles.  Computed in
    float64 on the CPU.  For float32 input X is rounded to float32 such that the constraints hold
    for the rounded X, as far as float32 resolves them.

    Args:
        A1: (n, d1) query tokens, of one sequence or of several with offsets; or (s, n, d1).
        A2: (m, d2) or (s, m, d2) key tokens.
        selected: (n,) or (s, n) integers, t(j): the key that query j is to select, numbered within
            its sequence.
        norm: "frobenius" or "nuclear", the sum of singular values.  The nuclear norm is solved as a
            semidefinite program and needs d1 + d2 of at most 64 after reduction to the ranks of the
            tokens.
        mask: (n, m) booleans, True where attention is allowed, or "causal", or None; of several
            sequences as for `AttentionProblem` and `AttentionProblem.from_ragged`.
        soft: C > 0 for the soft margin, None for the hard one.  A C that is larger by many orders
            than 1 / ||a1||^2 ||a2||^2 is hard on the solver; `gap` says what was reached.
        offsets: of 2-D arrays: first row of each sequence in A1, and the number of rows.
        key_offsets: the same for A2, if it differs.
        lengths: (s,) of 3-D arrays: real queries of each sequence; what follows is padding.
        key_lengths: the same for keys, if it differs.
        tol: relative duality gap to reach; default 1e-9, with slack 1e-8, for the nuclear norm
            1e-7.
        max_rounds: programs to solve at most.

    Returns:
        The solution with its certificate, or the pairs that contradict each other: see
        `AttentionSVM`.  Arrays are of the kind, type and device of the input.

    Raises:
        ValueError: shapes that do not fit, NaN or infinity, selected keys out of range or masked,
            a setting out of range, tokens too large or small to multiply, widths too large for the
            nuclear norm.
        TypeError: arrays of the wrong kind or of mixed kinds.

    Reference:
        Tarzanagh, Li, Thrampoulidis, Oymak, "Transformers as Support Vector Machines",
        arXiv 2308.16898.

    Example:
        >>> svm = nt.attention_svm(np.eye(2), np.eye(2), [1, 0])
        >>> svm.X.round(6)
        array([[-0.5,  0.5],
               [ 0.5, -0.5]])
    """
    tensors, numpy = as_tensors({"A1": A1, "A2": A2})
    several = {
        "offsets": offsets,
        "key_offsets": key_offsets,
        "lengths": lengths,
        "key_lengths": key_lengths,
    }
    given = {name: value for name, value in several.items() if value is not None}
    tol = _checked_settings(norm, soft, tol, max_rounds)
    problem = _as_problem(tensors["A1"], tensors["A2"], numpy, mask, given)
    return svm_of(problem, selected, norm, soft, tol, max_rounds)


def svm_of(
    problem: AttentionProblem,
    selected: ArrayLike,
    norm: Norm = "frobenius",
    soft: float | None = None,
    tol: float = DEFAULT_TOL["frobenius"],
    max_rounds: int = 500,
) -> AttentionSVM:
    """The attention SVM of a problem's sequences; scale and forbidden pairs count, values do not.

    selected: in the layout of the problem's rows, keys numbered within their sequence.

    Raises:
        ValueError, TypeError: as for `attention_svm`.
    """
    parts, like = parts_of(problem), problem.like
    tokens = joined(parts, as_selections(problem, parts, selected))
    result = _solved(tokens, like.dtype, norm, soft, tol, max_rounds)

    def present(a: np.ndarray) -> Array:
        """On the device of the tokens; numbers that are no indices in their type."""
        t = torch.from_numpy(np.ascontiguousarray(a))
        return problem.present(t.to(like.device, like.dtype if t.is_floating_point() else t.dtype))

    return presented(in_layout(result, tokens, problem.layout), present)


def _solved(
    tokens: Tokens,
    dtype: torch.dtype,
    norm: Norm,
    soft: float | None,
    tol: float,
    max_rounds: int,
) -> AttentionSVM:
    """The result with NumPy arrays, pairs being rows of all queries and of all keys."""
    _, margin = tokens.scan(np.zeros(tokens.shape))
    if not np.isfinite(margin).any():
        return without_constraints(tokens, norm, soft)
    conflict = obvious_conflict(tokens) if soft is None else None
    if conflict is not None:
        return infeasible(tokens, norm, conflict, 0, 0)
    reduced = reduce(tokens)
    scale = reduced.scale
    if not 1e-140 < scale < 1e140:
        raise ValueError(
            "A1 and A2 must have entries whose products lie between 1e-140 and 1e140; found "
            f"{scale:.1e} for the largest.  Rescale the tokens."
        )
    if norm == "nuclear" and sum(reduced.tokens.shape) > NUCLEAR_MOST:
        raise ValueError(
            f'norm="nuclear" needs d1 + d2 of at most {NUCLEAR_MOST} (after reduction to the ranks '
            f"of the tokens); found {' + '.join(map(str, reduced.tokens.shape))}.  Project the "
            'tokens, or use norm="frobenius".'
        )
    power = 2 if norm == "frobenius" else 1
    cap = None if soft is None else soft * scale**power
    found = generate(reduced.tokens, tokens, Objective(norm, cap), tol, max_rounds)
    if found.X is None and found.conflict is not None:
        return infeasible(tokens, norm, found.conflict, found.active, found.rounds)
    X = None if found.X is None else reduced.back(found.X)
    return certified(tokens, X, found, norm, soft, scale, tol, dtype)


def _checked_settings(norm: object, soft: object, tol: object, max_rounds: object) -> float:
    """The tolerance; the others are as they should be."""
    if norm not in ("frobenius", "nuclear"):
        raise ValueError(f'norm must be "frobenius" or "nuclear"; found {norm!r}.')
    for name, value, most in (("soft", soft, math.inf), ("tol", tol, 1.0)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise TypeError(f"{name} must be a number or None; found {type(value).__name__}.")
        if not 0 < float(value) < most:
            bound = "positive and finite" if most == math.inf else f"between 0 and {most:g}"
            raise ValueError(f"{name} must be {bound}; found {value}.")
    require_count("max_rounds", max_rounds, 1)
    if isinstance(tol, int | float | np.number):
        return float(tol)
    return DEFAULT_TOL["soft" if soft is not None and norm == "frobenius" else str(norm)]


def _as_problem(
    A1: Tensor, A2: Tensor, numpy: bool, mask: Any, given: Mapping[str, Any]
) -> AttentionProblem:
    """The sequences as a problem; what they are to attend to does not matter here."""
    ragged = {"offsets", "key_offsets"} & given.keys()
    if ragged and {"lengths", "key_lengths"} & given.keys():
        raise ValueError("offsets= are for 2-D arrays, lengths= for 3-D ones; found both.")
    if "key_offsets" in given and "offsets" not in given:
        raise ValueError("offsets= must be given beside key_offsets=.")
    tensors = (A1, A2, A2.new_zeros(*A2.shape[:-1], 1), A1.new_zeros(*A1.shape[:-1], 1))
    a1, a2, values, targets = (t.numpy() if numpy else t for t in tensors)
    if ragged:
        return AttentionProblem.from_ragged(a1, targets, keys=a2, values=values, mask=mask, **given)
    return AttentionProblem(a1, a2, values, targets, mask=mask, **given)
