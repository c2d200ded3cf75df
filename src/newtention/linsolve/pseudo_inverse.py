"""Pseudo-inverses of Gram matrices, which are singular on rank-deficient data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class GramInverse:
    """G^+ = root root^T, eigenvalues below the rounding of the largest one left out."""

    root: Float[Tensor, "b k k"]

    def solve(self, right: Float[Tensor, "b k p"]) -> Float[Tensor, "b k p"]:
        """G^+ right: the minimum-norm solution."""
        return self.root @ (self.root.mT @ right)


def gram_inverse(gram: Float[Tensor, "b k k"], data_eps: float = 0.0) -> GramInverse:
    """Eigen-decompose positive semidefinite matrices, cutting off at k eps lambda_max.

    data_eps: rounding of the features behind the matrix, where it is coarser than the matrix's own;
        it enters squared.

    The inverse of a matrix with NaN or infinity is NaN.
    """
    finite = torch.isfinite(gram).all(2, keepdim=True).all(1, keepdim=True)
    values, vectors = torch.linalg.eigh(gram.where(finite, torch.zeros_like(gram)))
    k = gram.shape[-1]
    eps = max(torch.finfo(gram.dtype).eps, data_eps**2)
    cutoff = k * eps * values[:, -1:].clamp(min=0)
    kept = values > cutoff
    scale = torch.where(kept, values.where(kept, torch.ones_like(values)).rsqrt(), 0.0)
    return GramInverse((vectors * scale[:, None, :]).where(finite, torch.nan))
