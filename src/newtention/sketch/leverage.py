"""Leverage sampling: rows of A1 (x) A2 with probabilities that follow their leverage scores.

With orthonormal bases U1, U2 of the column spaces, U1 (x) U2 is one of A1 (x) A2, so that the score
of pair (j, k) is the product ||U1[j]||^2 ||U2[k]||^2: j and k are drawn independently, with
p_j = ||U1[j]||^2 / rank(A1), q_k alike, and S has the entry 1 / sqrt(size p_j q_k) in the column of
the pair.  E[S^T S] is the identity on the rows with a positive score; the others are zero rows.

The bases are rank-revealing: those of a plain thin QR would span more than the column space of a
rank-deficient factor, and spend draws on directions that do not exist.

Source: Drineas, Mahoney, Muthukrishnan, SIAM J. Matrix Anal. Appl. 30 (2008); scores of a Kronecker
product: Diao, Jayaram, Song, Sun, Woodruff, NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.notation import Array, ArrayLike
from newtention.sketch.arguments import factors
from newtention.sketch.base import Distribution, Sketch
from newtention.sketch.rows import kronecker_rows


def orthonormal_basis(A: Float[Tensor, "n d"]) -> Float[Tensor, "n rank"]:
    """Orthonormal basis of the column space, in float64 on the CPU, whatever A's dtype and device.

    Singular values up to max(n, d) eps times the largest count as zero, eps that of A's dtype.
    """
    cut = max(A.shape) * torch.finfo(A.dtype).eps
    A = A.to("cpu", torch.float64)
    largest = A.abs().max()
    if not largest > 0:
        return A.new_zeros(len(A), 0)
    Q, R = torch.linalg.qr(A / largest)  # scaled, so that squares neither overflow nor vanish
    U, sigma, _ = torch.linalg.svd(R, full_matrices=False)
    return Q @ U[:, : int((sigma > cut * sigma[0]).sum())]


def orthonormal_bases(arrays: Mapping[str, tuple[ArrayLike, int | None]]) -> list[Tensor]:
    """One of each factor given as in `factors`.

    Raises:
        TypeError, ValueError: a factor is not a finite real matrix, or zero.
    """
    bases = [orthonormal_basis(t) for t in factors(arrays)[0]]
    for name, U in zip(arrays, bases, strict=True):
        if not U.shape[1]:
            raise ValueError(f"{name} is zero: there is nothing to embed.")
    return bases


def leverage_scores(A: ArrayLike) -> Array:
    """Leverage score of each row, between 0 and 1; they sum to the rank.

    Args:
        A: (n, d), of any rank.

    Returns:
        An array (n,).

    Raises:
        TypeError, ValueError: A is not a finite real matrix.
    """
    (t,), numpy = factors({"A": (A, None)})
    scores = _scores(t).to(t)
    return scores.numpy() if numpy else scores


def _scores(A: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """In float64 on the CPU, so that draws depend on the values alone."""
    scores = orthonormal_basis(A).square().sum(1)
    return torch.where((A != 0).any(1).cpu(), scores, 0.0)  # a zero row's is rounding


@dataclass(frozen=True, eq=False, repr=False)
class SampledLeverage(Sketch):
    """first, second: the pairs that were drawn.  weight: 1 / sqrt(size p_j q_k), float64."""

    first: Int[Tensor, " size"]
    second: Int[Tensor, " size"]
    weight: Float[Tensor, " size"]

    def _kronecker(self, A1: Tensor, A2: Tensor) -> Tensor:
        first, second = self.first.to(A1.device), self.second.to(A1.device)
        return kronecker_rows(A1, A2, first, second, self.weight.to(A1))

    def _left(self, M: Tensor) -> Tensor:
        return M[self._pair(M)].mul_(self.weight.to(M)[:, None])

    def _adjoint(self, Z: Tensor) -> Tensor:
        out = Z.new_zeros(self.n1 * self.n2, Z.shape[1])
        return out.index_add_(0, self._pair(Z), Z * self.weight.to(Z)[:, None])

    def _pair(self, like: Tensor) -> Int[Tensor, " size"]:
        return (self.first * self.n2 + self.second).to(like.device)


@dataclass(frozen=True)
class LeverageSampling(Distribution):
    """The distribution of leverage sampling; see the module and `Distribution` for the arguments.

    It depends on the data: `apply(A1, A2)` draws for these factors; `sample(A1, A2)` keeps the
    draw.
    """

    name = "leverage"

    def sample(self, A1: ArrayLike | None = None, A2: ArrayLike | None = None) -> SampledLeverage:
        """Draw pairs of rows by the scores of A1 (n1, d1) and A2 (n2, d2).

        A2 may be omitted where n2 = 1.

        Raises:
            ValueError: a factor is missing, of the wrong shape, or zero.
        """
        if A1 is None or (A2 is None and self.n2 != 1):
            raise ValueError(
                f"LeverageSampling depends on the data: sample(A1, A2) with {self.n1} and "
                f"{self.n2} rows first, or apply(A1, A2)."
            )
        given = {"A1": (A1, self.n1)} | ({} if A2 is None else {"A2": (A2, self.n2)})
        tensors, _ = factors(given)
        scores = [_scores(t) for t in tensors]
        for name, s in zip(given, scores, strict=True):
            if not s.sum() > 0:
                raise ValueError(f"{name} is zero: none of its rows has a leverage score.")
        if A2 is None:
            scores.append(torch.ones(1, dtype=torch.float64))
        return self.sample_scores(*scores)

    def sample_scores(
        self, scores1: Float[Tensor, " n1"], scores2: Float[Tensor, " n2"]
    ) -> SampledLeverage:
        """Draw pairs of rows by given scores, float64 on the CPU, not all zero."""
        u = torch.rand(self.size, 2, dtype=torch.float64, generator=self.generator())
        first, p = _draw(scores1, u[:, 0].contiguous())
        second, q = _draw(scores2, u[:, 1].contiguous())
        weight = (p * q * self.size).rsqrt()
        return SampledLeverage(self.n1, self.n2, self.size, first, second, weight)

    def apply_left(self, M: ArrayLike) -> Array:
        """S M for an ordinary matrix (n2 = 1), by the scores of its rows."""
        return self.sample(M).apply_left(M)


def _draw(
    scores: Float[Tensor, " n"], u: Float[Tensor, " size"]
) -> tuple[Int[Tensor, " size"], Float[Tensor, " size"]]:
    """Indices by inverting the distribution function at u in [0, 1), and their probabilities.

    Index i is drawn for sums up to i - 1 <= u total < sums up to i, never where the score is 0.
    """
    sums = scores.cumsum(0)
    index = torch.searchsorted(sums, u * sums[-1], right=True)
    return index, scores[index] / sums[-1]
