"""The paper's form: per head h, q = scale A1 X_h, k = A2, v = A3 Y_h; the heads add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.chunks import Chunk, contract
from newtention.layers.base import Block, Heads, Parametrisation, Projection


@dataclass(frozen=True)
class Bilinear(Parametrisation):
    """Shapes of X (h, d1, d2) and Y (h, d3, p), and their place in the flat vector."""

    fixed_keys: ClassVar[bool] = True

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

    def evaluation_elements(self, n: int, m: int) -> int:
        """The keys are the tokens."""
        h = self.heads
        return h * (n * (self.d2 + self.p + self.d3 + m) + m * self.p) + n * self.p

    @property
    def output_start(self) -> int:
        """Y is the output map."""
        return self.size_x

    @property
    def output_rows(self) -> int:
        """Y of all heads."""
        return self.heads * self.d3

    def output_features(
        self, tile: Chunk, P: Float[Tensor, "o s h n m"], O: Float[Tensor, "o s h n f"]
    ) -> Float[Tensor, "o s n k"]:
        """w = P A3 of all heads, side by side: F = w Y."""
        return (P @ tile.A3[:, :, None]).transpose(2, 3).flatten(3)

    def projections(self, tile: Chunk, gradients: Heads) -> tuple[Projection, Projection]:
        """A1 X (the scale with the tokens) and A3 Y."""
        assert gradients.v is not None
        return (
            Projection("X", None, tile.queries, gradients.q),
            Projection("Y", None, tile.A3, gradients.v),
        )

    def qkv(self, tile: Chunk, theta: Float[Tensor, "b N"]) -> Heads:
        """q = scale A1 X, k = A2, v = A3 Y."""
        return self.qkv_tangent(tile, theta)._replace(k=tile.A2[:, :, None])

    def qkv_tangent(self, tile: Chunk, direction: Float[Tensor, "b N"]) -> Heads:
        """q' = scale A1 X', v' = A3 Y'; the keys are fixed."""
        X, Y = self.unpack(direction)
        q = tile.queries[:, :, None] @ tile.of(X)[:, None]
        return Heads(q, None, tile.A3[:, :, None] @ tile.of(Y)[:, None])

    def qkv_transposed(self, tile: Chunk, gradients: Heads) -> Float[Tensor, "o N"]:
        """(scale A1^T dq, A3^T dv)."""
        assert gradients.v is not None
        GX = contract(tile.queries[:, :, None], gradients.q)
        return self.pack(GX, contract(tile.A3[:, :, None], gradients.v))

    def mix(
        self, tile: Chunk, theta: Float[Tensor, "b N"], O: Float[Tensor, "o s h n f"]
    ) -> Float[Tensor, "o s n p"]:
        """The sum over heads."""
        return O.sum(2)

    def mix_tangent(
        self,
        tile: Chunk,
        theta: Float[Tensor, "b N"],
        direction: Float[Tensor, "b N"],
        O: Float[Tensor, "o s h n f"],
        O_t: Float[Tensor, "o s h n f"],
    ) -> Float[Tensor, "o s n p"]:
        """The sum over heads of the tangents."""
        return O_t.sum(2)

    def mix_transposed(
        self, tile: Chunk, theta: Float[Tensor, "b N"], R: Float[Tensor, "o s n p"]
    ) -> Float[Tensor, "o s 1 n p"]:
        """R, the same for every head."""
        return R[:, :, None]

    def mix_cross(
        self, tile: Chunk, direction: Float[Tensor, "b N"], R: Float[Tensor, "o s n p"]
    ) -> None:
        """No cross term: the mix has no weights."""
        return None

    def mix_gradient(
        self, tile: Chunk, O: Float[Tensor, "o s h n f"], R: Float[Tensor, "o s n p"]
    ) -> None:
        """No gradient: the mix has no weights."""
        return None

    def mix_gradient_tangent(
        self,
        tile: Chunk,
        O: Float[Tensor, "o s h n f"],
        O_t: Float[Tensor, "o s h n f"],
        R: Float[Tensor, "o s n p"],
        R_t: Float[Tensor, "o s n p"],
    ) -> None:
        """No gradient: the mix has no weights."""
        return None

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
