"""CountSketch: every row of the data is added to one row of the sketch, with a random sign.

S[h(i), i] = s(i), all other entries 0, with h(i) uniform on the rows of S and s(i) = +-1, all
independent; so E[S^T S] = I: (S^T S)[i, i] = 1, and s(i) s(i') has mean 0 for i != i'.

Source: Charikar, Chen, Farach-Colton, ICALP 2002; as a subspace embedding Clarkson, Woodruff, STOC
2013, and Nelson, Nguyen, FOCS 2013.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.notation import ArrayLike
from newtention.sketch.base import Distribution, Sketch
from newtention.sketch.rows import random_signs, tiles


@dataclass(frozen=True, eq=False, repr=False)
class SampledCountSketch(Sketch):
    """bucket, signs: h and s of each row of the data."""

    bucket: Int[Tensor, " n1n2"]
    signs: Float[Tensor, " n1n2"]

    def _kronecker(self, A1: Tensor, A2: Tensor) -> Tensor:
        d1, d2 = A1.shape[1], A2.shape[1]
        bucket = self.bucket.to(A1.device).view(self.n1, self.n2)
        signs = self.signs.to(A1).view(self.n1, self.n2, 1)
        out = A1.new_zeros(self.size, d1 * d2)
        for rows in tiles(self.n1, d1 * d2):
            # A tile of one row of A1 may still be too large: tile the rows of A2 as well.
            for columns in tiles(self.n2, (rows.stop - rows.start) * d1 * d2):
                signed = A2[columns] * signs[rows, columns]
                block = A1[rows, None, :, None] * signed[:, :, None, :]
                out.index_add_(0, bucket[rows, columns].reshape(-1), block.reshape(-1, d1 * d2))
        return out

    def _left(self, M: Tensor) -> Tensor:
        bucket, signs = self.bucket.to(M.device), self.signs.to(M)[:, None]
        out = M.new_zeros(self.size, M.shape[1])
        for rows in tiles(len(M), M.shape[1]):
            out.index_add_(0, bucket[rows], M[rows] * signs[rows])
        return out

    def _adjoint(self, Z: Tensor) -> Tensor:
        return Z[self.bucket.to(Z.device)].mul_(self.signs.to(Z)[:, None])


@dataclass(frozen=True)
class CountSketch(Distribution):
    """The distribution of CountSketch; see the module and `Distribution` for the arguments."""

    name = "countsketch"

    def sample(
        self, A1: ArrayLike | None = None, A2: ArrayLike | None = None
    ) -> SampledCountSketch:
        """Draw signs, then buckets."""
        g, n = self.generator(), self.n1 * self.n2
        signs = random_signs(n, g)
        bucket = torch.randint(self.size, (n,), generator=g)
        return SampledCountSketch(self.n1, self.n2, self.size, bucket, signs)
