"""`attention_svm`: from the user's arrays to a result, and what is checked on the way back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from newtention.inputs import (
    as_batch_masks,
    as_integers,
    as_tensors,
    require_count,
    require_shape,
    shape_text,
)
from newtention.masks import Mask
from newtention.notation import ArrayLike
from newtention.svm.conflicts import obvious_conflict
from newtention.svm.generation import Generated, Objective, generate
from newtention.svm.pairs import TILE, Tokens, reduce
from newtention.svm.result import AttentionSVM, Conflict, Norm, SvmStatus

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

    Constraints are generated as they are violated; logits are evaluated in tiles.  Computed in
    float64 on the CPU.  For float32 input X is rounded to float32 such that the constraints hold
    for the rounded X, as far as float32 resolves them.

    Args:
        A1: (n, d1) query tokens.
        A2: (m, d2) key tokens.
        selected: (n,) integers, t(j): the key that query j is to select.
        norm: "frobenius" or "nuclear", the sum of singular values.  The nuclear norm is solved as a
            semidefinite program and needs d1 + d2 of at most 64 after reduction to the ranks of the
            tokens.
        mask: (n, m) booleans, True where attention is allowed, or "causal", or None.
        soft: C > 0 for the soft margin, None for the hard one.  A C that is larger by many orders
            than 1 / ||a1||^2 ||a2||^2 is hard on the solver; `gap` says what was reached.
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
    like = tensors["A1"]
    tol = _checked_settings(norm, soft, tol, max_rounds)
    tokens = _checked_tokens(tensors["A1"], tensors["A2"], selected, mask)

    def present(a: np.ndarray | None) -> Any:
        if a is None:
            return None
        t = torch.from_numpy(np.ascontiguousarray(a))
        t = t.to(like.device, like.dtype if t.is_floating_point() else t.dtype)
        return t.cpu().numpy() if numpy else t

    _, margin = tokens.scan(np.zeros(tokens.shape))
    if not np.isfinite(margin).any():
        return _presented(_without_constraints(tokens, norm, soft), present)
    conflict = obvious_conflict(tokens) if soft is None else None
    if conflict is not None:
        return _presented(_infeasible(tokens, norm, conflict, 0, 0), present)
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
        result = _infeasible(tokens, norm, found.conflict, found.active, found.rounds)
        return _presented(result, present)
    X = None if found.X is None else reduced.back(found.X)
    return _presented(_certified(tokens, X, found, norm, soft, scale, tol, like.dtype), present)


def _certified(
    tokens: Tokens,
    X: np.ndarray | None,
    found: Generated,
    norm: Norm,
    soft: float | None,
    scale: float,
    tol: float,
    dtype: torch.dtype,
) -> AttentionSVM:
    """All numbers of the result, from X, the multipliers and the tokens as given."""
    objective = Objective(norm, soft)
    y = found.y / scale ** (2 if norm == "frobenius" else 1)
    lower = objective.lower(tokens, found.pairs, y)
    slack, upper, size, violation = None, math.inf, math.inf, math.inf
    if X is not None:
        X = _rounded(X, dtype)
        margin = tokens.scan(X)[1]
        nothing = np.where(np.isinf(margin), np.inf, 0.0)  # the margins of X = 0
        if soft is not None and objective.upper(0.0 * X, nothing) <= objective.upper(X, margin):
            X, margin = 0.0 * X, nothing
        for _ in range(4):
            least = float(margin.min())
            if soft is not None or least >= 1.0 or least <= 0.0:
                break
            X = _rounded(X * ((1.0 + torch.finfo(dtype).eps) / least), dtype)
            margin = tokens.scan(X)[1]
        violation = max(0.0, 1.0 - float(margin.min()))
        size = float(np.linalg.norm(X, "nuc" if norm == "nuclear" else "fro"))
        upper = size
        if soft is not None:
            slack, violation = np.maximum(1.0 - margin, 0.0), 0.0
            upper = objective.upper(X, margin)
    gap = upper / lower - 1.0 if lower > 0 else (0.0 if upper == 0 else math.inf)
    status = found.status
    if status is SvmStatus.SOLVED and gap > 10 * tol + 10 * torch.finfo(dtype).eps:
        status = SvmStatus.INACCURATE
    return AttentionSVM(
        X=X,
        norm=norm,
        soft=soft,
        margin=1.0 / size if size > 0 else math.inf,
        objective=upper,
        lower_bound=lower,
        gap=gap,
        violation=violation,
        support=found.pairs,
        duals=y,
        slack=slack,
        active=found.active,
        rounds=found.rounds,
        status=status,
    )


def _infeasible(
    tokens: Tokens, norm: Norm, conflict: Conflict, active: int, rounds: int
) -> AttentionSVM:
    weights = np.asarray(conflict.weights)
    bound = Objective(norm, None).lower(tokens, np.asarray(conflict.pairs), weights)
    return AttentionSVM(
        X=None,
        norm=norm,
        soft=None,
        margin=0.0,
        objective=math.inf,
        lower_bound=math.inf if conflict.proved else bound,
        gap=math.inf,
        violation=math.inf,
        support=np.zeros((0, 2), np.int64),
        duals=np.zeros(0),
        slack=None,
        active=active,
        rounds=rounds,
        status=SvmStatus.INFEASIBLE,
        conflict=conflict,
    )


def _without_constraints(tokens: Tokens, norm: Norm, soft: float | None) -> AttentionSVM:
    return AttentionSVM(
        X=np.zeros(tokens.shape),
        norm=norm,
        soft=soft,
        margin=math.inf,
        objective=0.0,
        lower_bound=0.0,
        gap=0.0,
        violation=0.0,
        support=np.zeros((0, 2), np.int64),
        duals=np.zeros(0),
        slack=None if soft is None else np.zeros(len(tokens.A1)),
        active=0,
        rounds=0,
        status=SvmStatus.NO_CONSTRAINTS,
    )


def _presented(result: AttentionSVM, present: Any) -> AttentionSVM:
    """The same with the user's kind of arrays."""
    conflict = result.conflict
    if conflict is not None:
        arrays = {
            name: present(getattr(conflict, name)) for name in ("pairs", "selected", "weights")
        }
        conflict = replace(conflict, **arrays)
    names = ("X", "support", "duals", "slack")
    arrays = {name: present(getattr(result, name)) for name in names}
    return replace(result, conflict=conflict, **arrays)


def _rounded(X: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """X as it will be returned, in float64."""
    return torch.from_numpy(X).to(dtype).double().numpy()


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


def _checked_tokens(
    A1: Tensor, A2: Tensor, selected: ArrayLike, mask: ArrayLike | str | None
) -> Tokens:
    """The problem in NumPy and float64."""
    for name, t in (("A1", A1), ("A2", A2)):
        require_shape(name, t, (None, None), "tokens x width")
        if t.numel() == 0:
            raise ValueError(f"{name} must not be empty; found {shape_text(t.shape)}.")
    n, m = len(A1), len(A2)
    t = as_integers("selected", selected)
    require_shape("selected", t, (n,), "one key per query")
    out = (t < 0) | (t >= m)
    if bool(out.any()):
        j = int(out.nonzero()[0])
        raise ValueError(
            f"selected[{j}] must be the index of a key, from 0 to {m - 1}; found {int(t[j])}."
        )
    explicit, causal = as_batch_masks(mask, (), n, m, torch.device("cpu"))
    rule = Mask(causal=causal, explicit=None if explicit is None else explicit[None])
    tokens = Tokens(_plain(A1), _plain(A2), t.numpy(), rule)
    _require_allowed(tokens)
    return tokens


def _require_allowed(tokens: Tokens) -> None:
    n, m = len(tokens.A1), len(tokens.A2)
    step = max(1, TILE // m)
    for start in range(0, n, step):
        rows = slice(start, min(n, start + step))
        allowed = tokens.allowed(rows)
        if allowed is None:
            continue
        own = allowed[np.arange(len(allowed)), tokens.selected[rows]]
        if own.all():
            continue
        at = int(own.argmin())
        if not allowed[at].any():
            raise ValueError(
                "Every query needs at least one allowed key; the mask leaves none to query "
                f"{start + at}."
            )
        raise ValueError(
            f"selected[{start + at}] must be a key that the query may attend to; the mask forbids "
            f"key {int(tokens.selected[start + at])}."
        )


def _plain(t: Tensor) -> np.ndarray:
    return np.ascontiguousarray(t.cpu().double().numpy())
