"""TensorSRHT: a subsampled randomised Hadamard transform of Kronecker structure.

    S = size^-1/2 P (H D1 (x) H D2)

D_i holds n_i random signs, H is the Walsh-Hadamard matrix of N_i rows, n_i padded to a power of
two, and P takes `size` of the N1 N2 pairs of rows, uniformly and with replacement.  Since
H^T H = N_i I and a pair is taken with probability 1 / (N1 N2), E[S^T S | D1, D2] = I exactly.

Sources: Gao, Song, Wang, Yin, arXiv 2309.07418, Section 13; Ahle, Kapralov, Knudsen, Pagh,
Velingker, Woodruff, Zandieh, "Oblivious sketching of high-degree polynomial kernels", SODA 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.notation import ArrayLike
from newtention.sketch.base import Distribution, Sketch
from newtention.sketch.hadamard import padded, transform, transform_
from newtention.sketch.rows import kronecker_rows, random_signs, tiles


@dataclass(frozen=True, eq=False, repr=False)
class SampledTensorSRHT(Sketch):
    """signs1, signs2: diagonals of D1, D2.  first, second: the rows of H that P takes."""

    signs1: Float[Tensor, " n1"]
    signs2: Float[Tensor, " n2"]
    first: Int[Tensor, " size"]
    second: Int[Tensor, " size"]

    def transformed(
        self, A1: Float[Tensor, "n1 d1"], A2: Float[Tensor, "n2 d2"]
    ) -> tuple[Float[Tensor, "N1 d1"], Float[Tensor, "N2 d2"]]:
        """H D1 A1 and H D2 A2, of which S takes rows."""
        return transform(A1, self.signs1), transform(A2, self.signs2)

    def _kronecker(self, A1: Tensor, A2: Tensor) -> Tensor:
        Z1, Z2 = self.transformed(A1, A2)
        first, second = self.first.to(A1.device), self.second.to(A1.device)
        return kronecker_rows(Z1, Z2, first, second, self.size**-0.5)

    def _left(self, M: Tensor) -> Tensor:
        N1, N2 = padded(self.n1), padded(self.n2)
        index = (self.first * N2 + self.second).to(M.device)
        s1, s2 = self._signs(M)
        out = M.new_empty(self.size, M.shape[1])
        for part in tiles(M.shape[1], N1 * N2):
            wide = M.new_zeros(N1, N2, part.stop - part.start)
            block = M[:, part].reshape(self.n1, self.n2, -1)
            torch.mul(s1 * s2, block, out=wide[: self.n1, : self.n2])
            out[:, part] = transform_(wide.view(N1 * N2, -1))[index]
        return out.mul_(self.size**-0.5)

    def _adjoint(self, Z: Tensor) -> Tensor:
        N1, N2 = padded(self.n1), padded(self.n2)
        index = (self.first * N2 + self.second).to(Z.device)
        s1, s2 = self._signs(Z)
        out = Z.new_empty(self.n1, self.n2, Z.shape[1])
        for part in tiles(Z.shape[1], N1 * N2):
            wide = Z.new_zeros(N1 * N2, part.stop - part.start)
            wide = transform_(wide.index_add_(0, index, Z[:, part])).view(N1, N2, -1)
            out[:, :, part] = wide[: self.n1, : self.n2] * (s1 * s2)
        return out.view(self.n1 * self.n2, -1).mul_(self.size**-0.5)

    def _signs(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return self.signs1.to(like)[:, None, None], self.signs2.to(like)[:, None]


@dataclass(frozen=True)
class TensorSRHT(Distribution):
    """The distribution of TensorSRHT; see the module and `Distribution` for the arguments."""

    name = "tensor-srht"

    def sample(self, A1: ArrayLike | None = None, A2: ArrayLike | None = None) -> SampledTensorSRHT:
        """Draw signs, then pairs of rows: with one seed the signs are the same at every size."""
        g = self.generator()
        signs1, signs2 = random_signs(self.n1, g), random_signs(self.n2, g)
        N2 = padded(self.n2)
        pair = torch.randint(padded(self.n1) * N2, (self.size,), generator=g)
        return SampledTensorSRHT(self.n1, self.n2, self.size, signs1, signs2, pair // N2, pair % N2)
