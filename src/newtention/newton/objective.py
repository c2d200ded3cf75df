"""What the dense Newton loop minimises: one objective for a batch of independent members."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Derivatives(NamedTuple):
    """A loss, its rounding error, and its gradient and Hessian in the entries that steps move.

    The Hessian belongs to whoever asked for it, who may overwrite it.
    """

    loss: Float[Tensor, " b"]
    noise: Float[Tensor, " b"]
    gradient: Float[Tensor, "b k"]
    hessian: Float[Tensor, "b k k"]


@dataclass(frozen=True, eq=False)
class Objective(ABC):
    """A twice differentiable loss of a flat vector theta (b, N), for every member of a batch.

    A step moves the leading k of the N entries.  The loss may be quadratic in the rest, which is
    then always the best for the leading ones (variable projection; `solved`).

    energy: size of the loss that tolerances are relative to, such as 1/2 ||B||^2.
    unit: size of curvature in one entry that is more than rounding; NaN if it under- or overflows.
    """

    energy: Float[Tensor, " b"] = field(kw_only=True)
    unit: Float[Tensor, " b"] = field(kw_only=True)

    @property
    def batch(self) -> int:
        """Number of members."""
        return len(self.energy)

    @abstractmethod
    def take(self, index: Int[Tensor, " k"]) -> Self:
        """The members at `index`."""

    @abstractmethod
    def loss(self, theta: Float[Tensor, "b N"]) -> Float[Tensor, " b"]:
        """Total loss; infinite or NaN where it overflows."""

    @abstractmethod
    def derivatives(self, theta: Float[Tensor, "b N"], full: Bool[Tensor, " b"]) -> Derivatives:
        """Loss and derivatives at a point, the trailing entries eliminated.

        full: who gets the full Hessian rather than the Gauss-Newton matrix.
        """

    def solved(
        self, theta: Float[Tensor, "b N"]
    ) -> tuple[Float[Tensor, "b N"], Float[Tensor, " b"]]:
        """theta with the best trailing entries (theta itself where there are none), its loss."""
        return theta, self.loss(theta)

    def near(self, theta: Float[Tensor, "b N"]) -> Self:
        """The same objective in units that suit the neighbourhood of a point; see `log_unit`."""
        return self

    @property
    def log_unit(self) -> Float[Tensor, " b"]:
        """Logarithm of the unit that losses, energy and derivatives are given in."""
        return torch.zeros_like(self.energy)

    def absolute(self, value: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """A loss, gradient or energy without the unit; infinite where that overflows."""
        root = (0.5 * self.log_unit).exp()
        return torch.where(value == 0, value, value * root * root)
