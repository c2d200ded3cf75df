"""Parametrisations: how the unknowns become queries, keys and values.

`Bilinear` is the paper's: per head h, q = scale A1 X_h, k = A2, v = A3 Y_h, and the heads add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.attention import attention_weights
from newtention.chunks import Chunk


@dataclass(frozen=True)
class Block:
    """One named block of the flat vector of unknowns."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Evaluation:
    """Everything the derivatives need of a tile at one point."""

    tile: Chunk
    P: Float[Tensor, "o s h n m"]
    V: Float[Tensor, "o s h m p"]
    F: Float[Tensor, "o s h n p"]
    """Attended values per head; their sum over heads is the layer's output."""
    C: Float[Tensor, "o s n p"]
    """Residual: sum over heads of F, minus B."""

    @cached_property
    def qC(self) -> Float[Tensor, "o s 1 n p"]:
        """The residual times the query weights, with a head axis: the loss gradient in F."""
        return (self.C * self.tile.weight[..., None])[:, :, None]

    @cached_property
    def attended(self) -> Float[Tensor, "o s h n d3"]:
        """w = P A3, the attended value tokens: F is w Y."""
        return self.P @ self.tile.A3[:, :, None]


@dataclass(frozen=True)
class Bilinear:
    """Shapes of X (h, d1, d2) and Y (h, d3, p), and their place in the flat vector."""

    heads: int
    d1: int
    d2: int
    d3: int
    p: int

    @property
    def size_x(self) -> int:
        """Number of unknowns in X, all heads."""
        return self.heads * self.d1 * self.d2

    @property
    def size_y(self) -> int:
        """Number of unknowns in Y, all heads."""
        return self.heads * self.d3 * self.p

    @property
    def size(self) -> int:
        """Number of unknowns N."""
        return self.size_x + self.size_y

    @property
    def blocks(self) -> tuple[Block, Block]:
        """X, then Y."""
        h, nx = self.heads, self.size_x
        return (
            Block("X", 0, nx, (h, self.d1, self.d2)),
            Block("Y", nx, self.size, (h, self.d3, self.p)),
        )

    def pack(
        self, X: Float[Tensor, "b h d1 d2"], Y: Float[Tensor, "b h d3 p"]
    ) -> Float[Tensor, "b N"]:
        """The flat vector of (X, Y)."""
        return torch.cat([X.flatten(1), Y.flatten(1)], 1)

    def unpack(
        self, theta: Float[Tensor, "b N"]
    ) -> tuple[Float[Tensor, "b h d1 d2"], Float[Tensor, "b h d3 p"]]:
        """(X, Y) as views of the flat vector."""
        b, nx = theta.shape[0], self.size_x
        return (
            theta[:, :nx].view(b, self.heads, self.d1, self.d2),
            theta[:, nx:].view(b, self.heads, self.d3, self.p),
        )


def weights_of_tile(tile: Chunk, X: Float[Tensor, "b h d1 d2"]) -> Float[Tensor, "o s h n m"]:
    """Attention weights P of the tile's queries."""
    q = tile.queries[:, :, None] @ tile.of(X)[:, None]
    return attention_weights(q, tile.A2[:, :, None], tile.bias, tile.allowed)


def evaluate(
    tile: Chunk, X: Float[Tensor, "b h d1 d2"], Y: Float[Tensor, "b h d3 p"]
) -> Evaluation:
    """The layer and its residual on a tile."""
    P = weights_of_tile(tile, X)
    V = tile.A3[:, :, None] @ tile.of(Y)[:, None]
    F = P @ V
    return Evaluation(tile, P, V, F, F.sum(2) - tile.B)
