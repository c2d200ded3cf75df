"""SRHT: the subsampled randomised Hadamard transform, S = size^-1/2 P H D.

D holds n1 n2 random signs, H is the Walsh-Hadamard matrix of N rows, n1 n2 padded to a power of
two, and P takes `size` rows uniformly and with replacement; E[S^T S | D] = I.  It has no Kronecker
structure: A1 (x) A2 is formed and transformed a few columns at a time, N log N operations each.

Source: Ailon, Chazelle, STOC 2006; Tropp, "Improved analysis of the subsampled randomized Hadamard
transform", Adv. Adapt. Data Anal. 3 (2011), who samples without replacement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.notation import ArrayLike
from newtention.sketch.base import Distribution, Sketch
from newtention.sketch.hadamard import padded, transform, transform_
from newtention.sketch.rows import random_signs, tiles


@dataclass(frozen=True, eq=False, repr=False)
class SampledSRHT(Sketch):
    """signs: the diagonal of D.  rows: those of H that P takes."""

    signs: Float[Tensor, " n1n2"]
    rows: Int[Tensor, " size"]

    def _kronecker(self, A1: Tensor, A2: Tensor) -> Tensor:
        n, (d1, d2) = self.n1 * self.n2, (A1.shape[1], A2.shape[1])
        N, rows, signs = padded(n), self.rows.to(A1.device), self.signs.to(A1)[:, None]
        out = A1.new_empty(self.size, d1 * d2)
        for part in tiles(d1 * d2, N):
            column = torch.arange(part.start, part.stop, device=A1.device)
            wide = A1.new_zeros(N, len(column))
            block = wide[:n].view(self.n1, self.n2, -1)
            torch.mul(A1[:, None, column // d2], A2[None, :, column % d2], out=block)
            wide[:n] *= signs
            out[:, part] = transform_(wide)[rows]
        return out.mul_(self.size**-0.5)

    def _left(self, M: Tensor) -> Tensor:
        rows, signs = self.rows.to(M.device), self.signs.to(M)
        out = M.new_empty(self.size, M.shape[1])
        for part in tiles(M.shape[1], padded(len(M))):
            out[:, part] = transform(M[:, part], signs)[rows]
        return out.mul_(self.size**-0.5)

    def _adjoint(self, Z: Tensor) -> Tensor:
        n, rows = self.n1 * self.n2, self.rows.to(Z.device)
        signs = self.signs.to(Z)[:, None] * self.size**-0.5
        out = Z.new_empty(n, Z.shape[1])
        for part in tiles(Z.shape[1], padded(n)):
            wide = Z.new_zeros(padded(n), part.stop - part.start)
            wide = transform_(wide.index_add_(0, rows, Z[:, part]))
            torch.mul(signs, wide[:n], out=out[:, part])
        return out


@dataclass(frozen=True)
class SRHT(Distribution):
    """The distribution of the SRHT; see the module and `Distribution` for the arguments."""

    name = "srht"

    def sample(self, A1: ArrayLike | None = None, A2: ArrayLike | None = None) -> SampledSRHT:
        """Draw signs, then rows."""
        g, n = self.generator(), self.n1 * self.n2
        signs = random_signs(n, g)
        rows = torch.randint(padded(n), (self.size,), generator=g)
        return SampledSRHT(self.n1, self.n2, self.size, signs, rows)
