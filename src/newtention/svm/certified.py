"""What is said of an attention SVM, computed from the tokens as given and not by the solver."""

from __future__ import annotations

import math

import numpy as np
import torch

from newtention.svm.generation import Generated, Objective
from newtention.svm.pairs import Tokens
from newtention.svm.result import AttentionSVM, Conflict, Norm, SvmStatus


def certified(
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


def infeasible(
    tokens: Tokens, norm: Norm, conflict: Conflict, active: int, rounds: int
) -> AttentionSVM:
    """The result that says why there is no X."""
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


def without_constraints(tokens: Tokens, norm: Norm, soft: float | None) -> AttentionSVM:
    """The result where no query has a second key."""
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


def _rounded(X: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """X as it will be returned, in float64."""
    return torch.from_numpy(X).to(dtype).double().numpy()
