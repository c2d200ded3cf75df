"""Fits under a ridge on X that falls towards 0, and the attention SVM that they tend to.

Each fit starts from the line through the last two, which in ln(1 / ridge) is where X tends to go.
Computed in float64: the attention that goes astray at small ridges is below the rounding of
float32.  What is true of such paths: docs/regularisation-path.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from newtention.chunks import Chunk
from newtention.notation import Array, ArrayLike
from newtention.problem import AttentionProblem
from newtention.regularisation.fits import Fits, look_at
from newtention.regularisation.result import RegularisationPath
from newtention.selection import angle_between, selected_tokens
from newtention.solution import Solution, Status
from newtention.svm import AttentionSVM
from newtention.svm.sequences import Part, as_selection, as_selections, parts_of
from newtention.svm.solve import svm_of

DECADES = 13
"""Ridges of the default path: a power of ten and the twelve below it."""
SAME_VALUE = 100.0
"""Distance of a target from its value, in units of the rounding of the values."""


def regularisation_path(
    problem: AttentionProblem,
    ridges: ArrayLike | None = None,
    *,
    selected: ArrayLike | None = None,
    Y: ArrayLike | None = None,
    start: ArrayLike | Solution | None = None,
    tol: float | None = None,
    max_iter: int = 200,
    svm: AttentionSVM | None = None,
) -> RegularisationPath:
    """Fit X under a ridge that falls, each fit started from the ones before.

    Args:
        problem: one or several sequences for one head, of attention maps or with values.  Its own
            regulariser is left out of account.
        ridges: decreasing positive numbers, ridge / 2 ||X||_F^2 each; by default the power of ten
            nearest to scale^2 times the mean squares of the entries of the queries and of the
            centred keys (1 for standard normal tokens), and the twelve powers below it.
        selected: wanted keys, one for every query, numbered within its sequence; by default the
            largest entry of every row of the maps, or the key whose value is the target.
        Y: (d3, p), the value map, which is kept fixed; for a problem with values only.
        start: X or a Solution to begin from at the first ridge; 0 by default.
        tol: as for `solve`; by default a fit's is lowered with the ridge, so that an error of
            1e-6 ||X|| in X would show.
        max_iter: iteration limit of each fit.
        svm: the attention SVM of the wanted keys, if it is known already.

    Returns:
        Fits, losses, norms and angles to the SVM, by ridge; `print` gives a table.

    Raises:
        ValueError: several heads, a stack, ridges that do not decrease, query weights of 0, wanted
            keys that are not given and not unique, shapes that do not fit.
        TypeError: arrays or a problem of the wrong kind.
    """
    _require_problem(problem)
    fits = Fits.of(problem, Y, tol, max_iter)
    steps = _as_ridges(ridges, fits.problem)
    wanted = _wanted(problem, fits, selected)
    if svm is None:
        svm = svm_of(problem, wanted)
    _require_svm(svm)
    found = [] if start is None else [fits.as_X(getattr(start, "X", start))]
    solutions: list[Solution] = []
    for i, ridge in enumerate(steps):
        guesses = found[-1:]
        if i > 1:
            share = math.log(ridge / steps[i - 1]) / math.log(steps[i - 1] / steps[i - 2])
            guesses.append(found[-1] + share * (found[-1] - found[-2]))
        solutions.append(fits.solve(ridge, guesses))
        found.append(fits.as_X(solutions[-1].X))
        if solutions[-1].status is Status.INTERRUPTED:
            break
    count = len(solutions)
    return _collected(problem, fits, steps[:count], found[-count:], solutions, wanted, svm)


def _require_problem(problem: object) -> None:
    """Raise ValueError or TypeError unless it is one problem that one head can be fitted to."""
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"problem must be an AttentionProblem; found {type(problem).__name__}.")
    if problem.parts:
        raise ValueError("regularisation_path takes one problem, not a stack.")
    if problem.bias_heads is not None:
        raise ValueError(
            f"bias must be for one head; found {problem.bias_heads} heads.  Heads act through the "
            "sum of their outputs, and no theorem says where each of them goes."
        )


def _require_svm(svm: object) -> None:
    if not isinstance(svm, AttentionSVM):
        raise TypeError(f"svm must be an AttentionSVM or None; found {type(svm).__name__}.")
    if svm.norm != "frobenius" or svm.soft is not None:
        raise ValueError("svm must be of the Frobenius norm without slack.")


def _collected(
    problem: AttentionProblem,
    fits: Fits,
    ridges: list[float],
    found: list[Tensor],
    solutions: list[Solution],
    wanted: Int[Tensor, "*rows"],
    svm: AttentionSVM,
) -> RegularisationPath:
    """The result, with the user's kind of arrays."""
    looks = [look_at(fits, X, wanted) for X in found]
    norms = [float(X.norm()) for X in found]
    angles = None
    if svm.X is not None and svm.objective > 0:
        each = [angle_between(X, svm.X) for X in found]
        angles = [90.0 if angle is None else angle for angle in each]

    def column(values: Sequence[float]) -> Array:
        return problem.present(torch.tensor(values, dtype=torch.float64, device=device))

    device = problem.like.device
    margins = [
        look.lead / norm if norm > 0 else (math.inf if look.lead == math.inf else 0.0)
        for look, norm in zip(looks, norms, strict=True)
    ]
    return RegularisationPath(
        ridges=column(ridges),
        X=problem.present(torch.stack(found).to(problem.like.dtype)),
        losses=column([s.data_loss for s in solutions]),
        norms=column(norms),
        angles=None if angles is None else column(angles),
        entropies=column([look.entropy for look in looks]),
        margins=column(margins),
        shares=column([look.share for look in looks]),
        statuses=tuple(s.status for s in solutions),
        selected=problem.present(wanted.to(device)),
        svm=svm,
        last=selected_tokens(fits.problem, found[-1], fits.Y),
    )


def _as_ridges(ridges: ArrayLike | None, problem: AttentionProblem) -> list[float]:
    """The user's, checked, or the default ones."""
    if ridges is None:
        parts = parts_of(problem)
        queries = torch.cat([part.A1 for part in parts])
        keys = torch.cat([part.A2 - part.A2.mean(0) for part in parts])
        unit = float(queries.square().mean() * keys.square().mean())
        top = round(math.log10(unit)) if 0 < unit < math.inf else 0
        return [10.0 ** (top - i) for i in range(DECADES)]
    values = np.asarray(ridges.cpu() if isinstance(ridges, Tensor) else ridges, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"ridges must be a list of at least one number; found {ridges!r}.")
    falling = bool((np.diff(values) < 0).all())
    if not (np.isfinite(values).all() and values.min() > 0 and falling):
        raise ValueError(
            f"ridges must be positive, finite and decreasing; found {values.tolist()}."
        )
    return values.tolist()


def _wanted(
    problem: AttentionProblem, fits: Fits, selected: ArrayLike | None
) -> Int[Tensor, "*rows"]:
    """The selection asked for, or the one that the targets show; -1 in padded rows."""
    parts, layout = parts_of(problem), problem.layout
    if selected is not None:
        rows = as_selections(problem, parts, selected)
    else:
        rows = [torch.empty(0)] * len(parts)
        for places, chunk in zip(layout.order, problem.chunks, strict=True):
            for place, i in enumerate(places):
                matches = _matches(chunk.sequence(place), parts[i], fits.Y)
                where = "" if layout.kind == "single" else f" of sequence {i}"
                rows[i] = _unique(matches, problem.of_maps, where)
                n, m = matches.shape
                as_selection(rows[i], n, m, parts[i].mask, where)
    return layout.join(rows, fill=-1)


def _matches(chunk: Chunk, part: Part, Y: Float[Tensor, "d3 p"] | None) -> Bool[Tensor, "n m"]:
    """Keys that the targets of a sequence show to be wanted.

    The largest entries of a map, or the keys whose value is the target.
    """
    n, m = len(part.A1), len(part.A2)
    B = chunk.B[0, 0, :n]
    if Y is None:
        return B[:, :m].amax(-1, keepdim=True) == B[:, :m]
    values = chunk.A3[0, 0, :m] @ Y.to(B)
    rounding = SAME_VALUE * torch.finfo(B.dtype).eps * torch.linalg.vector_norm(values, dim=-1)
    exact = "donot_use_mm_for_euclid_dist"  # products would cancel
    matches = torch.cdist(B, values, compute_mode=exact) <= rounding
    return matches if part.allowed is None else matches & part.allowed


def _unique(matches: Bool[Tensor, "n m"], maps: bool, where: str) -> Int[Tensor, " n"]:
    """The only match of every row."""
    counts = matches.sum(-1)
    if bool((counts != 1).any()):
        j = int((counts != 1).nonzero()[0])
        what = "largest entry of its map" if maps else "value equal to its target"
        raise ValueError(
            f"selected must be given: query {j}{where} has {int(counts[j])} keys with the {what}."
        )
    return matches.to(torch.int64).argmax(-1).cpu()
