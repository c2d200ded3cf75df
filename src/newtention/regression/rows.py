"""The data of softmax regression: stacked problems, and members of a batch that refer to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from newtention.chunks import TILE_ELEMENTS


@dataclass(frozen=True, eq=False)
class Rows:
    """Problems k with design A[k] and target B[k], and members i that solve problem owner[i].

    Members share their problem's design: several starts cost no second copy of it.  Designs are
    read in tiles of rows, so that n may be large.

    real: False on padded rows, whose A and B are zero; None where there are none.
    ridge: of each member.
    """

    A: Float[Tensor, "k n d"]
    B: Float[Tensor, "k n"]
    real: Bool[Tensor, "k n"] | None
    owner: Int[Tensor, " b"]
    ridge: Float[Tensor, " b"]

    def take(self, index: Int[Tensor, " m"]) -> Self:
        """The members at `index`."""
        return replace(self, owner=self.owner[index], ridge=self.ridge[index])

    def of(self, t: Tensor) -> Tensor:
        """Every member's share of a tensor with one entry per problem."""
        if len(t) == 1:
            return t.expand(len(self.owner), *t.shape[1:])
        return t if len(self.owner) == len(t) and self._everyone else t[self.owner]

    @property
    def target(self) -> Float[Tensor, "b n"]:
        """B of every member."""
        return self.of(self.B)

    def penalty(self, x: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """ridge/2 ||x||^2."""
        return 0.5 * self.ridge * x.square().sum(1)

    def tiles(self) -> Iterator[tuple[slice, Float[Tensor, "b t d"]]]:
        """Ranges of rows, and every member's rows there."""
        _, n, d = self.A.shape
        step = max(1, TILE_ELEMENTS // (len(self.owner) * d))
        for i in range(0, n, step):
            rows = slice(i, i + step)
            yield rows, self.of(self.A[:, rows])

    def logits(self, x: Float[Tensor, "b d"]) -> Float[Tensor, "b n"]:
        """A x; 0 on padded rows."""
        if len(self.A) == 1:
            return x @ self.A[0].mT
        return torch.cat([(A @ x[..., None])[..., 0] for _, A in self.tiles()], 1)

    def transposed(self, weights: Float[Tensor, "b n"]) -> Float[Tensor, "b d"]:
        """A^T weights."""
        if len(self.A) == 1:
            return weights @ self.A[0]
        return sum_of((weights[:, None, rows] @ A)[:, 0] for rows, A in self.tiles())

    def gram(
        self, weights: Float[Tensor, "b n"], centre: Float[Tensor, "b d"] | None = None
    ) -> Float[Tensor, "b d d"]:
        """sum_k weights_k (a_k - centre) (a_k - centre)^T, one product of n d^2 per member."""
        b, d = len(self.owner), self.A.shape[2]
        total = weights.new_zeros(b, d, d)
        for rows, A in self.tiles():
            A = A if centre is None else A - centre[:, None]
            total.baddbmm_((A * weights[:, rows, None]).mT, A)
        return total

    @property
    def _everyone(self) -> bool:
        """Whether member i solves problem i."""
        return bool((self.owner == torch.arange(len(self.owner), device=self.owner.device)).all())


def sum_of(parts: Iterator[Tensor]) -> Tensor:
    """Their sum, added in place."""
    total = next(parts).clone()
    for part in parts:
        total += part
    return total


def mean_square(rows: Rows, centred: bool) -> Float[Tensor, " b"]:
    """Mean square of an entry of A, or of its distance from its column's mean, per member."""
    values = []
    for k, A in enumerate(rows.A):
        real = A if rows.real is None else A[rows.real[k]]
        values.append(real.var(0, correction=0).mean() if centred else real.square().mean())
    return torch.stack(values)[rows.owner]
