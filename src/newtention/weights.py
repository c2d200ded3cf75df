"""The user's weights (X, Y) for a problem, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.inputs import as_like, require_shape
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
    x, one_head = _with_axes("X", as_like("X", X, problem.like), (d1, d2), problem)
    if Y is None:
        y = x.new_zeros(*x.shape[:2], d3, p)
    else:
        y, _ = _with_axes("Y", as_like("Y", Y, problem.like), (d3, p), problem)
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
    name: str, t: Tensor, widths: tuple[int, int], problem: AttentionProblem
) -> tuple[Tensor, bool]:
    """t with batch and head axes, and whether the user left the head axis out."""
    lead = (problem.batch,) if problem.parts else ()
    one_head = t.ndim == len(lead) + 2
    heads = () if one_head else (None,)
    require_shape(name, t, (*lead, *heads, *widths), "one head, or several along an axis before")
    t = t if not one_head else t.unsqueeze(-3)
    return (t if problem.parts else t[None]).contiguous(), one_head


def flat_to_weights(problem: AttentionProblem, theta: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(X, Y) with batch and head axes from one flat vector of a single problem."""
    return Bilinear(heads, *problem.widths).unpack(torch.atleast_2d(theta))
