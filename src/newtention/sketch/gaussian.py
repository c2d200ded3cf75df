"""Gaussian sketch: independent entries N(0, 1/size), so that E[S^T S] = I.

The oracle of the others: its embedding constants are known sharply, but it costs size n1 n2 draws
and as many multiplications per column.  S is never stored: its rows are drawn anew, one by one,
each time that it is applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.notation import ArrayLike
from newtention.sketch.base import Distribution, Sketch
from newtention.sketch.rows import tiles


@dataclass(frozen=True, eq=False, repr=False)
class SampledGaussian(Sketch):
    """seed: where the generator starts that draws S row by row."""

    seed: int

    def _kronecker(self, A1: Tensor, A2: Tensor) -> Tensor:
        d1, d2 = A1.shape[1], A2.shape[1]
        out = A1.new_empty(self.size, d1 * d2)
        for part, G in self._rows(A1):
            block = A1.mT @ G.view(-1, self.n1, self.n2) @ A2
            out[part] = block.view(-1, d1 * d2)
        return out

    def _left(self, M: Tensor) -> Tensor:
        out = M.new_empty(self.size, M.shape[1])
        for part, G in self._rows(M):
            torch.mm(G, M, out=out[part])
        return out

    def _adjoint(self, Z: Tensor) -> Tensor:
        out = Z.new_zeros(self.n1 * self.n2, Z.shape[1])
        for part, G in self._rows(Z):
            out.addmm_(G.mT, Z[part])
        return out

    def _rows(self, like: Tensor) -> Iterator[tuple[slice, Float[Tensor, "rows n1n2"]]]:
        """S in tiles of rows.  One call of the generator per row, so that tiles do not matter."""
        g = torch.Generator().manual_seed(self.seed)
        n = self.n1 * self.n2
        for part in tiles(self.size, n):
            G = torch.empty(part.stop - part.start, n, dtype=torch.float64)
            for row in G:
                row.normal_(generator=g)
            yield part, G.mul_(self.size**-0.5).to(like)


@dataclass(frozen=True)
class Gaussian(Distribution):
    """The distribution of the Gaussian sketch; see `Distribution` for the arguments."""

    name = "gaussian"

    def sample(self, A1: ArrayLike | None = None, A2: ArrayLike | None = None) -> SampledGaussian:
        """Fix the seed of the draws."""
        return SampledGaussian(self.n1, self.n2, self.size, self.seed)
