"""Rescaled softmax regression: 1/2 ||u(A x) - <u(A x), 1> b||^2 + ridge/2 ||x||^2.

u is exp, sinh or cosh, entry by entry.  With s = <u, 1>, r = u - s b and q = r - <b, r> 1,

    gradient  A^T (u' o q) + ridge x
    Hessian   A^T diag(u' o u' + u'' o q) A - y v^T - v y^T + ||b||^2 v v^T + ridge I

with v = A^T u' and y = A^T (u' o b).  Without u'' o q it is the Gauss-Newton matrix.

Nothing is computed without the factor exp(-shift), shift about max |A x| at the current point: loss
and derivatives are in units of exp(2 shift), so that logits of thousands neither overflow nor
vanish.  A trial step to where u exceeds exp(shift) by more than float64 holds has an infinite loss
and is rejected.  docs/softmax-regression.md has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from newtention.newton.globalise import loss_noise
from newtention.newton.objective import Derivatives, Objective
from newtention.regression.rows import Rows, mean_square

Kind = Literal["exp", "sinh", "cosh"]
KINDS: tuple[Kind, ...] = ("exp", "sinh", "cosh")


class Values(NamedTuple):
    """u, u' and u'' at logits z, times exp(-shift)."""

    u: Float[Tensor, "b n"]
    first: Float[Tensor, "b n"]
    second: Float[Tensor, "b n"]


def values(kind: Kind, z: Float[Tensor, "b n"], shift: Float[Tensor, " b"]) -> Values:
    """Accurate where z is near 0, finite where exp(|z| - shift) is."""
    if kind == "exp":
        u = (z - shift[:, None]).exp()
        return Values(u, u, u)
    size = z.abs()
    half = 0.5 * (size - shift[:, None]).exp()
    sinh = torch.copysign(-half * torch.expm1(-2.0 * size), z)
    cosh = half * (1.0 + (-2.0 * size).exp())
    return Values(sinh, cosh, sinh) if kind == "sinh" else Values(cosh, sinh, cosh)


@dataclass(frozen=True, eq=False)
class RescaledLoss(Objective):
    """The loss of x (b, d) for every member, in units of exp(2 shift)."""

    kind: Kind
    rows: Rows
    spread: Float[Tensor, " b"]
    shift: Float[Tensor, " b"]

    @classmethod
    def at(cls, kind: Kind, rows: Rows, x: Float[Tensor, "b d"]) -> Self:
        """The objective of all members, in the units of a point."""
        zero = torch.zeros_like(rows.ridge)
        spread = mean_square(rows, centred=False)
        return cls(kind, rows, spread, zero, energy=zero, unit=zero).near(x)

    @property
    def log_unit(self) -> Float[Tensor, " b"]:
        """2 shift."""
        return 2.0 * self.shift

    def take(self, index: Int[Tensor, " m"]) -> Self:
        """The members at `index`."""
        names = ("spread", "shift", "energy", "unit")
        parts = {name: getattr(self, name)[index] for name in names}
        return replace(self, rows=self.rows.take(index), **parts)

    def near(self, theta: Float[Tensor, "b d"]) -> Self:
        """In units of the largest of u^2 and the ridge's share at theta."""
        z = self.rows.logits(theta)
        largest = self._masked(z if self.kind == "exp" else z.abs(), -torch.inf).amax(1)
        norm = torch.linalg.vector_norm(theta, dim=1)
        shift = torch.maximum(largest, 0.5 * self.rows.ridge.log() + norm.log())
        moved = replace(self, shift=shift)
        u, first, _ = moved._values(z)
        total, b = u.sum(1), self.rows.target
        # With u', since sinh vanishes at 0.
        size = u.square().sum(1) + first.square().sum(1) + total.square() * b.square().sum(1)
        energy = 0.5 * size + moved._penalty(theta)
        return replace(moved, energy=energy, unit=energy * self.spread)

    def sizes(self, x: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """1/2 ||u||^2, what the data loss is compared with."""
        return 0.5 * self._values(self.rows.logits(x)).u.square().sum(1)

    def fitted(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "b n"]:
        """u / <u, 1>, which b is to equal; u itself where that sum is 0."""
        u = self._values(self.rows.logits(x)).u
        total = u.sum(1, keepdim=True)
        return u / total.where(total != 0, torch.ones_like(total))

    def data_loss(self, x: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """1/2 ||r||^2."""
        u = self._values(self.rows.logits(x)).u
        return 0.5 * (u - u.sum(1, keepdim=True) * self.rows.target).square().sum(1)

    def loss(self, theta: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """Data loss and ridge."""
        return self.data_loss(theta) + self._penalty(theta)

    def derivatives(self, theta: Float[Tensor, "b d"], full: Bool[Tensor, " b"]) -> Derivatives:
        """Loss, gradient and Hessian in three readings of A."""
        rows, b = self.rows, self.rows.target
        z = rows.logits(theta)
        u, first, second = self._values(z)
        r = u - u.sum(1, keepdim=True) * b
        q = r - (b * r).sum(1, keepdim=True)
        ridge = self._ridge[:, None]
        curved = torch.where(full[:, None], second * q, 0.0)
        H = rows.gram(first.square() + curved)
        v, y = rows.transposed(first), rows.transposed(first * b)
        mixed = y - 0.5 * b.square().sum(1, keepdim=True) * v
        H.baddbmm_(mixed[:, :, None], v[:, None, :], alpha=-1)
        H.baddbmm_(v[:, :, None], mixed[:, None, :], alpha=-1)
        H.diagonal(dim1=1, dim2=2).add_(ridge)
        data = 0.5 * r.square().sum(1)
        loss = data + self._penalty(theta)
        # Rounding of the logits is a relative error of u.
        blur = 1.0 + z.abs().amax(1)
        noise = loss_noise(loss, data, self.energy * blur**2)
        return Derivatives(loss, noise, rows.transposed(first * q) + ridge * theta, H)

    @property
    def _ridge(self) -> Float[Tensor, " b"]:
        return self.rows.ridge * (-2.0 * self.shift).exp()

    def _penalty(self, x: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        return 0.5 * self._ridge * x.square().sum(1)

    def _values(self, z: Float[Tensor, "b n"]) -> Values:
        return Values(*(self._masked(t, 0.0) for t in values(self.kind, z, self.shift)))

    def _masked(self, t: Float[Tensor, "b n"], value: float) -> Float[Tensor, "b n"]:
        real = self.rows.real
        return t if real is None else t.masked_fill(~self.rows.of(real), value)
