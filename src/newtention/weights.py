"""The user's weights (X, Y) for a problem, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.inputs import as_like, shape_text
from newtention.layers import Bilinear
from newtention.notation import Array, ArrayLike
from newtention.problem import AttentionProblem


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights with batch and head axes, and how the user shaped them.

    one_head: the user gave (d1, d2) rather than (h, d1, d2).
    """

    X: Float[Tensor, "b h d1 d2"]
    Y: Float[Tensor, "b h d3 p"]
    one_head: bool
    problem: AttentionProblem

    @property
    def layer(self) -> Bilinear:
        """Shapes and flat order."""
        return Bilinear(self.X.shape[1], *self.problem.widths)

    def present(self, t: Float[Tensor, "b h ..."]) -> Array:
        """A result with batch and head axes, in the shape and array kind the user uses."""
        if self.one_head:
            t = t[:, 0]
        return self.present_batch(t)

    def present_batch(self, t: Float[Tensor, "b ..."]) -> Array:
        """A result with a batch axis."""
        return self.problem.present(t if self.problem.parts else t[0])


def as_weights(problem: AttentionProblem, X: ArrayLike, Y: ArrayLike | None = None) -> Weights:
    """Check X (and Y, zero if absent) against the problem.

    Shapes: X (d1, d2) and Y (d3, p) for one head, (h, d1, d2) and (h, d3, p) for several; a stack
    of problems adds a leading axis.

    Raises:
        ValueError: shapes that do not fit, NaN or infinity.
    """
    d1, d2, d3, p = problem.widths
    x = as_like("X", X, problem.like)
    lead = 1 if problem.parts else 0
    one_head = x.ndim == 2 + lead
    x = _with_axes("X", x, (d1, d2), problem, one_head)
    if Y is None:
        y = x.new_zeros(x.shape[0], x.shape[1], d3, p)
    else:
        y = as_like("Y", Y, problem.like)
        y = _with_axes("Y", y, (d3, p), problem, y.ndim == 2 + lead)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"X has {x.shape[1]} head(s) but Y has {y.shape[1]}.")
    heads = fixed_heads(problem)
    if heads is not None and heads != x.shape[1]:
        raise ValueError(
            f"The problem's bias or Proximity reference is for {heads} head(s); X has {x.shape[1]}."
        )
    return Weights(x, y, one_head, problem)


def fixed_heads(problem: AttentionProblem) -> int | None:
    """The number of heads that the problem's bias or Proximity reference asks for, if any."""
    centre = problem.quadratic.centre_x
    return problem.bias_heads or (None if centre is None else centre.shape[1])


def _with_axes(
    name: str, t: Tensor, widths: tuple[int, int], problem: AttentionProblem, one_head: bool
) -> Tensor:
    if not problem.parts:
        t = t[None]
    if one_head:
        t = t[:, None] if t.ndim >= 3 else t
    want = f"{widths[0]} x {widths[1]}"
    if t.ndim != 4 or t.shape[0] != problem.batch or tuple(t.shape[2:]) != widths:
        stack = f"{problem.batch} x " if problem.parts else ""
        found = t if problem.parts else t[0]
        if one_head and found.ndim > (3 if problem.parts else 2):
            found = found.squeeze(1 if problem.parts else 0)
        raise ValueError(
            f"{name} must be {stack}{want} (one head) or {stack}heads x {want}; "
            f"found {shape_text(found.shape)}."
        )
    return t.contiguous()


def flat_to_weights(problem: AttentionProblem, theta: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(X, Y) with batch and head axes from one flat vector of a single problem."""
    return Bilinear(heads, *problem.widths).unpack(torch.atleast_2d(theta))
