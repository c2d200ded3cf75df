"""Rows of Kronecker products, gathered in tiles."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

TILE_ELEMENTS = 1 << 19
"""Elements that one intermediate array may hold (4 MiB in float64), but for a single row or column
that is longer."""


def tiles(count: int, elements: int) -> Iterator[slice]:
    """Consecutive slices of range(count), of at most TILE_ELEMENTS at so many elements each."""
    step = max(1, TILE_ELEMENTS // max(1, elements))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


def kronecker_rows(
    A1: Float[Tensor, "n1 d1"],
    A2: Float[Tensor, "n2 d2"],
    first: Int[Tensor, " size"],
    second: Int[Tensor, " size"],
    weight: Float[Tensor, " size"] | float,
) -> Float[Tensor, "size d1d2"]:
    """weight_r kron(A1[first_r], A2[second_r]) as rows, written in place: no second copy."""
    d1, d2 = A1.shape[1], A2.shape[1]
    out = A1.new_empty(len(first), d1, d2)
    for tile in tiles(len(first), d1 + d2):
        U, V = A1[first[tile]], A2[second[tile]]
        U *= weight[tile, None] if isinstance(weight, Tensor) else weight
        torch.mul(U[:, :, None], V[:, None, :], out=out[tile])
    return out.view(len(first), d1 * d2)


def random_signs(count: int, generator: torch.Generator) -> Float[Tensor, " count"]:
    """Independent signs, +1 or -1, as float64 on the CPU."""
    return torch.randint(2, (count,), generator=generator).double().mul_(2).sub_(1)
