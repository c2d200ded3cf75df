"""Plain softmax regression: 1/2 ||softmax(A x) - b||^2 + ridge/2 ||x||^2.

With f = softmax(A x), c = f - b and T = f o (c - <f, c>), and rows of A taken about the attended
mean A^T f (tilde),

    gradient  A~^T T + ridge x,     Hessian  A~^T diag(f^2 + T) A~ + ridge I,

because along u, with sigma = A~ u, f' = f o sigma and <c, f''> = sum T sigma^2.  Without T it is
the Gauss-Newton matrix.  docs/softmax-regression.md has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from newtention.newton.globalise import loss_noise
from newtention.newton.objective import Derivatives, Objective
from newtention.regression.rows import Rows, mean_square


@dataclass(frozen=True, eq=False)
class SoftmaxLoss(Objective):
    """The loss of x (b, d) for every member."""

    rows: Rows

    @classmethod
    def of(cls, rows: Rows) -> Self:
        """The objective of all members."""
        energy = 0.5 * rows.target.square().sum(1)
        scale = torch.where(energy > 0, energy, torch.ones_like(energy))
        return cls(rows, energy=energy, unit=scale * mean_square(rows, centred=True))

    def take(self, index: Int[Tensor, " m"]) -> Self:
        """The members at `index`."""
        parts = {"energy": self.energy[index], "unit": self.unit[index]}
        return replace(self, rows=self.rows.take(index), **parts)

    def fitted(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "b n"]:
        """f = softmax(A x)."""
        return self._weights(self.rows.logits(x))

    def loss(self, theta: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """Data loss and ridge."""
        return self.data_loss(theta) + self.rows.penalty(theta)

    def data_loss(self, x: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """1/2 ||f - b||^2."""
        return 0.5 * (self.fitted(x) - self.rows.target).square().sum(1)

    def sizes(self, x: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """1/2 ||b||^2, what the data loss is compared with."""
        return self.energy

    def derivatives(self, theta: Float[Tensor, "b d"], full: Bool[Tensor, " b"]) -> Derivatives:
        """Loss, gradient and Hessian in three readings of A."""
        rows = self.rows
        logits = rows.logits(theta)
        f = self._weights(logits)
        c = f - rows.target
        T = f * (c - (f * c).sum(1, keepdim=True))
        mean = rows.transposed(f)
        weights = f.square() + torch.where(full[:, None], T, 0.0)
        H = rows.gram(weights, mean)
        H.diagonal(dim1=1, dim2=2).add_(rows.ridge[:, None])
        # T sums to zero but for rounding, which the mean must not amplify.
        gradient = rows.transposed(T) - T.sum(1, keepdim=True) * mean + rows.ridge[:, None] * theta
        data = 0.5 * c.square().sum(1)
        loss = data + rows.penalty(theta)
        # Rounding of the logits is a relative error of f.
        blur = 1.0 + logits.abs().amax(1)
        return Derivatives(loss, loss_noise(loss, data, self.energy * blur**2), gradient, H)

    def _weights(self, logits: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        if self.rows.real is not None:
            logits = logits.masked_fill(~self.rows.of(self.rows.real), -torch.inf)
        return torch.softmax(logits, 1)
