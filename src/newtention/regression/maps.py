"""Multiple softmax regression: the X whose attention map is nearest to a given one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from newtention.api import Method, Options, solve
from newtention.layers import MapAttention
from newtention.notation import ArrayLike
from newtention.problem import AttentionProblem
from newtention.regularizers import Ridge
from newtention.run import Callback
from newtention.solution import Solution


def multiple_softmax_regression(
    A1: ArrayLike,
    A2: ArrayLike,
    B: ArrayLike,
    *,
    start: ArrayLike | MapAttention | Solution | None = None,
    method: Method = "auto",
    ridge: float = 0.0,
    mask: ArrayLike | Literal["causal"] | None = None,
    bias: ArrayLike | None = None,
    scale: float = 1.0,
    lengths: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    query_weights: ArrayLike | None = None,
    tol: float | None = None,
    max_iter: int = 200,
    max_seconds: float | None = None,
    n_init: int = 1,
    seed: int = 0,
    callback: Callback | None = None,
    verbose: bool = False,
    checkpoint: str | Path | None = None,
    options: Options | None = None,
) -> Solution:
    """Minimise 1/2 ||softmax(scale A1 X A2^T + bias) - B||_F^2 + ridge/2 ||X||_F^2 over X.

    The same as `solve` on `AttentionProblem.from_maps`, which has other regularisers and, stacked,
    many problems at once.

    Args:
        A1: query-side tokens, (n, d1), or (s, n, d1) for s sequences of one padded length.
        A2: key-side tokens, (m, d2) or (s, m, d2).
        B: maps to match, (n, m) or (s, n, m).
        start: X (d1, d2), a `MapAttention` or an earlier solution; None for X = 0.
        method: "newton" with the exact Hessian, "newton-cg" without a matrix, or "auto".
        ridge: strength of the ridge on X.
        mask: None, "causal" or booleans, True where attention is allowed.
        bias: added to the logits, shaped like B; minus infinity forbids a pair.
        scale: multiplies A1 X A2^T.
        lengths: (s,) real queries per sequence of a padded batch.
        key_lengths: (s,) real keys per sequence.
        query_weights: weight of each row of B.
        tol: as for `solve`, like all that follow.
        max_iter: iteration limit.
        max_seconds: time limit.
        n_init: number of starts, solved as one batch; those behind the first are random.
        seed: of the random starts.
        callback: called with a `Progress` after each iteration.
        verbose: print the iteration table and the summary.
        checkpoint: a file to keep the state of the run in.
        options: see `Options`.

    Returns:
        The best point found; `solution.X` is (d1, d2), and there is no Y.

    Raises:
        ValueError, TypeError: as for `AttentionProblem.from_maps` and `solve`.
        MemoryError: the dense matrices do not fit into free memory.

    Source: Gao, Song, Wang, Yin, Definition 1.4, Part 2.
    """
    problem = AttentionProblem.from_maps(
        A1,
        A2,
        B,
        lengths=lengths,
        key_lengths=key_lengths,
        mask=mask,
        bias=bias,
        scale=scale,
        query_weights=query_weights,
        regularizer=None if ridge == 0 else Ridge(x=ridge),
    )
    return solve(
        problem,
        start=start,
        method=method,
        tol=tol,
        max_iter=max_iter,
        max_seconds=max_seconds,
        n_init=n_init,
        seed=seed,
        callback=callback,
        verbose=verbose,
        checkpoint=checkpoint,
        options=options,
    )
