"""TensorSketch: count sketches of the two factors, convolved.

The row of pair (j, k) is added, with sign s1(j) s2(k), to row (h1(j) + h2(k)) mod size of the
sketch: a count sketch of A1 (x) A2 that is the circular convolution of count sketches of A1 and A2,
and so a product of their Fourier transforms.  h_i is uniform, s_i = +-1, all independent.
E[S^T S] = I: for pairs that differ, the product of their signs has mean 0, whatever the hashes.

Source: Pham, Pagh, KDD 2013; as a subspace embedding Avron, Nguyen, Woodruff, "Subspace embeddings
for the polynomial kernel", NeurIPS 2014.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.notation import ArrayLike
from newtention.sketch.base import Distribution, Sketch
from newtention.sketch.countsketch import SampledCountSketch
from newtention.sketch.rows import random_signs, tiles


@dataclass(frozen=True, eq=False, repr=False)
class SampledTensorSketch(Sketch):
    """bucket1, signs1: h1 and s1 of each row of A1; bucket2, signs2: of A2."""

    bucket1: Int[Tensor, " n1"]
    signs1: Float[Tensor, " n1"]
    bucket2: Int[Tensor, " n2"]
    signs2: Float[Tensor, " n2"]

    def _kronecker(self, A1: Tensor, A2: Tensor) -> Tensor:
        m, d1, d2 = self.size, A1.shape[1], A2.shape[1]
        count1 = SampledCountSketch(self.n1, 1, m, self.bucket1, self.signs1)
        count2 = SampledCountSketch(self.n2, 1, m, self.bucket2, self.signs2)
        F1 = torch.fft.rfft(count1._left(A1), dim=0)
        F2 = torch.fft.rfft(count2._left(A2), dim=0)[:, None]
        out = A1.new_empty(m, d1, d2)
        for part in tiles(d1, m * d2):
            out[:, part] = torch.fft.irfft(F1[:, part, None] * F2, n=m, dim=0)
        return out.view(m, d1 * d2)

    def _left(self, M: Tensor) -> Tensor:
        return self.flat()._left(M)

    def _adjoint(self, Z: Tensor) -> Tensor:
        return self.flat()._adjoint(Z)

    def flat(self) -> SampledCountSketch:
        """The same matrix as a count sketch of n1 n2 rows."""
        bucket = (self.bucket1[:, None] + self.bucket2) % self.size
        signs = self.signs1[:, None] * self.signs2
        return SampledCountSketch(
            self.n1, self.n2, self.size, bucket.reshape(-1), signs.reshape(-1)
        )


@dataclass(frozen=True)
class TensorSketch(Distribution):
    """The distribution of TensorSketch; see the module and `Distribution` for the arguments."""

    name = "tensor-sketch"

    def sample(
        self, A1: ArrayLike | None = None, A2: ArrayLike | None = None
    ) -> SampledTensorSketch:
        """Draw the signs of both factors, then their buckets."""
        g = self.generator()
        signs1, signs2 = random_signs(self.n1, g), random_signs(self.n2, g)
        bucket1 = torch.randint(self.size, (self.n1,), generator=g)
        bucket2 = torch.randint(self.size, (self.n2,), generator=g)
        return SampledTensorSketch(self.n1, self.n2, self.size, bucket1, signs1, bucket2, signs2)
