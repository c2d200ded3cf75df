"""Inverses of Kronecker products with several heads, factored once and applied many times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class KroneckerInverse:
    """(left (x) right)^-1 per head, on matrices W (h, d, e): left^-1 W right^-1."""

    left: Float[Tensor, "#h d d"]
    right: Float[Tensor, "#h e e"]

    @classmethod
    def of(
        cls,
        left: Float[Tensor, "#h d d"],
        right: Float[Tensor, "#h e e"],
        floor: float | Float[Tensor, ""],
        dtype: torch.dtype,
    ) -> KroneckerInverse:
        """Of positive semidefinite factors in float64, `floor` times the mean eigenvalue added.

        A factor that cannot be inverted even so, because it vanishes, nearly underflows or is not
        finite, is replaced by the identity.  With floor sqrt(r) in either factor, r times the
        product's mean eigenvalue is added to it, besides mixed terms (factored Tikhonov damping:
        Martens and Grosse 2015, section 6.3).
        """
        return cls(_inverse(left, floor, dtype), _inverse(right, floor, dtype))

    def apply(self, W: Float[Tensor, "h d e"]) -> Float[Tensor, "h d e"]:
        """The product with W."""
        return self.left @ W @ self.right


def _inverse(
    factor: Float[Tensor, "h d d"], floor: float | Float[Tensor, ""], dtype: torch.dtype
) -> Float[Tensor, "h d d"]:
    """Head by head: all of them at once would make the peak of a solver's memory."""
    out = factor.new_empty(factor.shape, dtype=dtype)
    for one, inverse in zip(factor, out, strict=True):
        lift = floor * one.diagonal().mean()
        lifted = one.clone()
        lifted.diagonal().add_(lift)
        root, failed = torch.linalg.cholesky_ex(lifted)
        usable = (failed == 0) & (lift > torch.finfo(one.dtype).tiny) & torch.isfinite(root).all()
        root = torch.where(usable, root, 0.0)
        root.diagonal().add_(torch.where(usable, 0.0, 1.0))
        inverse.copy_(torch.cholesky_inverse(root))
    return out
