"""The user's arrays, checked, as problems of one batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from newtention.inputs import as_like, as_tensors, require_count, require_shape, shape_text
from newtention.newton.stopping import default_tol
from newtention.notation import ArrayLike
from newtention.regression.rescaled import KINDS, Kind
from newtention.regression.rows import Rows


@dataclass(frozen=True)
class Settings:
    """The arguments of a call that are no arrays, checked."""

    ridge: float
    rescaled: bool
    kind: Kind
    n_init: int = 1
    tol: float | None = None
    max_iter: int = 200
    max_seconds: float | None = None
    seed: int = 0
    verbose: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a setting out of range."""
        require_count("n_init", self.n_init, 1)
        require_count("max_iter", self.max_iter, 0)
        require_count("seed", self.seed, 0)
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; found {self.kind!r}.")
        if self.kind != "exp" and not self.rescaled:
            raise ValueError(f'kind="{self.kind}" goes with rescaled=True; softmax is of exp.')
        _require_number("ridge", self.ridge, 0.0)
        if self.rescaled and not self.ridge > 0:
            raise ValueError(
                f"ridge must be positive with rescaled=True; found {self.ridge!r}.  Without it the "
                "loss may fall to 0 as x goes to infinity, and there is no minimum."
            )
        if self.tol is not None and not _is_number(self.tol, positive=True):
            raise ValueError(f"tol must be a positive finite number; found {self.tol!r}.")
        if self.max_seconds is not None and self.max_seconds != math.inf:
            _require_number("max_seconds", self.max_seconds, 0.0)

    def tolerance(self, dtype: torch.dtype) -> float:
        """The given one, or the type's."""
        return default_tol(dtype) if self.tol is None else self.tol


def as_problem(
    A: ArrayLike, b: ArrayLike
) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"], bool]:
    """One problem's arrays, and whether they were NumPy."""
    tensors, numpy = as_tensors({"A": A, "b": b})
    design, target = tensors["A"], tensors["b"]
    _require_problem("A", "b", design, target)
    return design, target, numpy


def as_problems(
    As: Sequence[ArrayLike] | ArrayLike, bs: Sequence[ArrayLike] | ArrayLike
) -> tuple[list[Float[Tensor, "_ d"]], list[Float[Tensor, " _"]], bool]:
    """The arrays of several problems of one width d, given as lists or as stacks."""
    designs, targets = _entries("As", As), _entries("bs", bs)
    if len(designs) != len(targets):
        raise ValueError(
            f"As and bs must be equally many; found {len(designs)} and {len(targets)}."
        )
    named = {f"As[{i}]": a for i, a in enumerate(designs)}
    tensors, numpy = as_tensors(named | {f"bs[{i}]": b for i, b in enumerate(targets)})
    designs = [tensors[f"As[{i}]"] for i in range(len(designs))]
    targets = [tensors[f"bs[{i}]"] for i in range(len(targets))]
    for i, (design, target) in enumerate(zip(designs, targets, strict=True)):
        _require_problem(f"As[{i}]", f"bs[{i}]", design, target)
        if design.shape[1] != designs[0].shape[1]:
            raise ValueError(
                f"As must have one number of columns; found {designs[0].shape[1]} in As[0] and "
                f"{design.shape[1]} in As[{i}]."
            )
    return designs, targets, numpy


def as_starts(
    starts: Sequence[ArrayLike | None] | None, count: int, like: Tensor
) -> list[Float[Tensor, " d"] | None]:
    """A start (d,) or None for every problem."""
    if starts is None:
        return [None] * count
    if not isinstance(starts, list | tuple) or len(starts) != count:
        found = len(starts) if isinstance(starts, list | tuple) else type(starts).__name__
        raise ValueError(f"starts must be a list of {count} entries; found {found}.")
    d = like.shape[1]
    given = [None if s is None else as_like("start", s, like) for s in starts]
    for s in given:
        if s is not None:
            require_shape("start", s, (d,), "columns of A")
    return given


def stacked(
    designs: Sequence[Float[Tensor, "_ d"]],
    targets: Sequence[Float[Tensor, " _"]],
    ridge: float,
    n_init: int,
) -> Rows:
    """One batch, n_init members to a problem, shorter problems padded."""
    longest = max(len(b) for b in targets)
    first, count = targets[0], len(targets)
    owner = torch.arange(count, device=first.device).repeat_interleave(n_init)
    ridges = first.new_full((len(owner),), ridge)
    if count == 1:
        return Rows(designs[0][None], first[None], None, owner, ridges)
    A = first.new_zeros(count, longest, designs[0].shape[1])
    B = first.new_zeros(count, longest)
    for i, (design, target) in enumerate(zip(designs, targets, strict=True)):
        A[i, : len(target)], B[i, : len(target)] = design, target
    lengths = torch.tensor([len(b) for b in targets], device=first.device)
    real = torch.arange(longest, device=first.device) < lengths[:, None]
    return Rows(A, B, None if bool(real.all()) else real, owner, ridges)


def warn_unmatched(targets: Sequence[Float[Tensor, " _"]], settings: Settings) -> None:
    """One warning if a target is no value of the model."""
    signed = settings.rescaled and settings.kind == "sinh"
    for i, b in enumerate(targets):
        where = "b" if len(targets) == 1 else f"bs[{i}]"
        negative = int((b < 0).sum())
        total = float(b.sum(dtype=torch.float64))
        words = []
        if negative and not signed:
            words.append(f"has {negative} negative entries")
        if abs(total - 1.0) > 1e3 * torch.finfo(b.dtype).eps * max(1.0, float(b.abs().sum())):
            words.append(f"sums to {total:.6g}, not 1")
        if words:
            message = f"{where} {' and '.join(words)}: it cannot be matched exactly."
            warnings.warn(message, stacklevel=4)
            return


def _require_problem(A_name: str, b_name: str, A: Tensor, b: Tensor) -> None:
    require_shape(A_name, A, (None, None), "rows x columns")
    require_shape(b_name, b, (len(A),), f"one entry per row of {A_name}")
    if A.numel() == 0:
        raise ValueError(f"{A_name} must not be empty; found {shape_text(A.shape)}.")


def _entries(name: str, arrays: Sequence[ArrayLike] | ArrayLike) -> list[ArrayLike]:
    if not isinstance(arrays, list | tuple | np.ndarray | Tensor) or len(arrays) == 0:
        raise ValueError(f"{name} must be a stack or a list of at least one array.")
    return list(arrays)


def _is_number(value: object, positive: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return False
    number = float(value)
    return math.isfinite(number) and (number > 0 if positive else number >= 0)


def _require_number(name: str, value: object, least: float) -> None:
    if not _is_number(value):
        raise ValueError(f"{name} must be a finite number of at least {least:g}; found {value!r}.")
