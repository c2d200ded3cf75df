"""What a parametrisation must say of itself.

A layer maps its flat vector theta, with a tile's tokens, linearly to queries, keys and values, runs
the attention core on them, and mixes the heads' outputs O into F, bilinearly in theta and O:

    (q, k, v) = L theta + constant,    O_h = softmax(q_h k_h^T) v_h,    F = mix(theta, O)

Everything first- and second-order follows from these maps and their transposes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from jaxtyping import Float
from torch import Tensor

from newtention.chunks import Chunk


@dataclass(frozen=True)
class Block:
    """One named block of the flat vector: entries start to stop, in row-major order of shape."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


class Heads(NamedTuple):
    """Queries (the logit scale folded in), keys and values per head, or their tangents.

    A head axis of 1 on keys is shared by all heads; k is None for tangents and gradients of keys
    that do not depend on the weights.  v is None where the values are the identity, and for their
    tangents and gradients.
    """

    q: Float[Tensor, "o s h n e"]
    k: Float[Tensor, "o s #h m e"] | None
    v: Float[Tensor, "o s h m f"] | None


class Projection(NamedTuple):
    """One linear map of the layer, tokens W + b per head, and a gradient in its result.

    weight, bias: names of its blocks; bias is None if it does not exist.  tokens may have a head
    axis.  The gradient in W is
    tokens^T gradient, the one in b the column sums of gradient.
    """

    weight: str
    bias: str | None
    tokens: Float[Tensor, "o s *h n d"]
    gradient: Float[Tensor, "o s g n e"]


@dataclass(frozen=True)
class Parametrisation(ABC):
    """Shapes of a layer; holds no weights.

    Final subclasses: `Bilinear`, `Factored`, `AttentionMap`.

    heads: query heads h.
    fixed_keys: whether the keys do not depend on the weights.
    """

    heads: int
    fixed_keys: ClassVar[bool] = False

    @property
    @abstractmethod
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the flat vector, in order; the output map, if any, is the last of them."""

    @abstractmethod
    def evaluation_elements(self, n: int, m: int) -> int:
        """Numbers in q, k, v, P, O, C and the features of one sequence of n queries and m keys."""

    @property
    @abstractmethod
    def output_start(self) -> int:
        """Where the output map begins in the flat vector; `size` where there is none.

        Behind it theta is a matrix (k, p), row-major, and F = output_features @ matrix.
        """

    @property
    @abstractmethod
    def output_rows(self) -> int:
        """Rows k of the output map; 0 where there is none."""

    @abstractmethod
    def output_features(
        self, tile: Chunk, P: Float[Tensor, "o s h n m"], O: Float[Tensor, "o s h n f"]
    ) -> Float[Tensor, "o s n k"]:
        """What the output map multiplies; it does not depend on that map."""

    @abstractmethod
    def projections(self, tile: Chunk, gradients: Heads) -> tuple[Projection, ...]:
        """The linear maps behind q, k and v (unless fixed), with the gradients in their results."""

    @property
    def size(self) -> int:
        """Number of unknowns N."""
        return self.blocks[-1].stop

    @abstractmethod
    def qkv(self, tile: Chunk, theta: Float[Tensor, "b N"]) -> Heads:
        """Queries, keys and values of a tile."""

    @abstractmethod
    def qkv_tangent(self, tile: Chunk, direction: Float[Tensor, "b N"]) -> Heads:
        """L applied to a direction."""

    @abstractmethod
    def qkv_transposed(self, tile: Chunk, gradients: Heads) -> Float[Tensor, "o N"]:
        """L^T applied to gradients in q, k and v, summed over the tile's sequences."""

    @abstractmethod
    def mix(
        self, tile: Chunk, theta: Float[Tensor, "b N"], O: Float[Tensor, "o s h n f"]
    ) -> Float[Tensor, "o s n p"]:
        """The layer's output from the heads' outputs, constants included."""

    @abstractmethod
    def mix_tangent(
        self,
        tile: Chunk,
        theta: Float[Tensor, "b N"],
        direction: Float[Tensor, "b N"],
        O: Float[Tensor, "o s h n f"],
        O_t: Float[Tensor, "o s h n f"],
    ) -> Float[Tensor, "o s n p"]:
        """Tangent of the output when theta moves along the direction and O along O_t."""

    @abstractmethod
    def mix_transposed(
        self, tile: Chunk, theta: Float[Tensor, "b N"], R: Float[Tensor, "o s n p"]
    ) -> Float[Tensor, "o s #h n f"]:
        """Gradient in O of <mix(theta, O), R>."""

    @abstractmethod
    def mix_cross(
        self, tile: Chunk, direction: Float[Tensor, "b N"], R: Float[Tensor, "o s n p"]
    ) -> Float[Tensor, "o s h n f"] | None:
        """Derivative of `mix_transposed` along a direction of theta; None if the mix has no
        weights.
        """

    @abstractmethod
    def mix_gradient(
        self, tile: Chunk, O: Float[Tensor, "o s h n f"], R: Float[Tensor, "o s n p"]
    ) -> Float[Tensor, "o N"] | None:
        """Gradient in theta of <mix(theta, O), R> at fixed O, summed over the tile's sequences;
        None if the mix has no weights.
        """

    @abstractmethod
    def mix_gradient_tangent(
        self,
        tile: Chunk,
        O: Float[Tensor, "o s h n f"],
        O_t: Float[Tensor, "o s h n f"],
        R: Float[Tensor, "o s n p"],
        R_t: Float[Tensor, "o s n p"],
    ) -> Float[Tensor, "o N"] | None:
        """Tangent of `mix_gradient` when O and R move along O_t and R_t."""
