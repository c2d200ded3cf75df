"""The attention map itself: q = scale A1 X, k = A2, the values are the identity, F = P.

One head, one unknown, no output map.  The softmax regressions of Gao, Song, Wang and Yin
(Definition 1.4) have this form: B holds the map of a sequence, or one row of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from newtention.chunks import Chunk, contract
from newtention.layers.base import Block, Heads, Parametrisation, Projection


@dataclass(frozen=True)
class AttentionMap(Parametrisation):
    """The shape of X (1, d1, d2).

    d3 and p are 0: there are no value tokens, and the columns of B are the keys of each sequence.
    """

    fixed_keys: ClassVar[bool] = True
    d3: ClassVar[int] = 0
    p: ClassVar[int] = 0

    heads: int = field(default=1, init=False)
    d1: int
    d2: int

    @property
    def size_x(self) -> int:
        """Number of unknowns in X."""
        return self.d1 * self.d2

    @property
    def size_y(self) -> int:
        """There is no Y."""
        return 0

    @property
    def blocks(self) -> tuple[Block]:
        """X alone."""
        return (Block("X", 0, self.size_x, (1, self.d1, self.d2)),)

    def evaluation_elements(self, n: int, m: int) -> int:
        """Queries, weights and residual: the keys are the tokens, the outputs are the weights."""
        return n * self.d2 + 2 * n * m

    @property
    def output_start(self) -> int:
        """There is no output map."""
        return self.size

    @property
    def output_rows(self) -> int:
        """There is no output map."""
        return 0

    def output_features(
        self, tile: Chunk, P: Float[Tensor, "o s 1 n m"], O: Float[Tensor, "o s 1 n m"]
    ) -> Float[Tensor, "o s n 0"]:
        """None at all."""
        return P[:, :, 0, :, :0]

    def projections(self, tile: Chunk, gradients: Heads) -> tuple[Projection]:
        """A1 X, the scale with the tokens."""
        return (Projection("X", None, tile.queries, gradients.q),)

    def qkv(self, tile: Chunk, theta: Float[Tensor, "b N"]) -> Heads:
        """q = scale A1 X, k = A2."""
        return self.qkv_tangent(tile, theta)._replace(k=tile.A2[:, :, None])

    def qkv_tangent(self, tile: Chunk, direction: Float[Tensor, "b N"]) -> Heads:
        """q' = scale A1 X'; keys and values are fixed."""
        X = tile.of(self.unpack(direction))
        return Heads(tile.queries[:, :, None] @ X[:, None], None, None)

    def qkv_transposed(self, tile: Chunk, gradients: Heads) -> Float[Tensor, "o N"]:
        """scale A1^T dq."""
        return self.pack(contract(tile.queries[:, :, None], gradients.q))

    def mix(
        self, tile: Chunk, theta: Float[Tensor, "b N"], O: Float[Tensor, "o s 1 n m"]
    ) -> Float[Tensor, "o s n m"]:
        """The map of the one head."""
        return O[:, :, 0]

    def mix_tangent(
        self,
        tile: Chunk,
        theta: Float[Tensor, "b N"],
        direction: Float[Tensor, "b N"],
        O: Float[Tensor, "o s 1 n m"],
        O_t: Float[Tensor, "o s 1 n m"],
    ) -> Float[Tensor, "o s n m"]:
        """Its tangent."""
        return O_t[:, :, 0]

    def mix_transposed(
        self, tile: Chunk, theta: Float[Tensor, "b N"], R: Float[Tensor, "o s n m"]
    ) -> Float[Tensor, "o s 1 n m"]:
        """R."""
        return R[:, :, None]

    def mix_cross(
        self, tile: Chunk, direction: Float[Tensor, "b N"], R: Float[Tensor, "o s n m"]
    ) -> None:
        """No cross term: the mix has no weights."""
        return None

    def mix_gradient(
        self, tile: Chunk, O: Float[Tensor, "o s 1 n m"], R: Float[Tensor, "o s n m"]
    ) -> None:
        """No gradient: the mix has no weights."""
        return None

    def mix_gradient_tangent(
        self,
        tile: Chunk,
        O: Float[Tensor, "o s 1 n m"],
        O_t: Float[Tensor, "o s 1 n m"],
        R: Float[Tensor, "o s n m"],
        R_t: Float[Tensor, "o s n m"],
    ) -> None:
        """No gradient: the mix has no weights."""
        return None

    def pack(self, X: Float[Tensor, "b 1 d1 d2"]) -> Float[Tensor, "b N"]:
        """The flat vector of X."""
        return X.flatten(1)

    def unpack(self, theta: Float[Tensor, "b N"]) -> Float[Tensor, "b 1 d1 d2"]:
        """X as a view of the flat vector."""
        return theta.view(theta.shape[0], 1, self.d1, self.d2)
