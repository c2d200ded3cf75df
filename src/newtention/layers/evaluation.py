"""A layer evaluated on a tile: everything the derivatives need at one point."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from newtention.attention import attention_weights
from newtention.chunks import Chunk
from newtention.layers.base import Heads, Parametrisation


@dataclass(frozen=True)
class Evaluation:
    """One tile at one point.

    layer: the parametrisation.
    heads: queries, keys and values.
    P: attention weights.
    O: attended values per head, P v; P itself where the values are the identity.
    C: residual, the layer's output minus B.
    """

    tile: Chunk
    layer: Parametrisation
    heads: Heads
    P: Float[Tensor, "o s h n m"]
    O: Float[Tensor, "o s h n f"]
    C: Float[Tensor, "o s n p"]

    @property
    def qC(self) -> Float[Tensor, "o s n p"]:
        """The residual times the query weights: the loss gradient in the output."""
        return self.C * self.tile.weight[..., None]

    @cached_property
    def features(self) -> Float[Tensor, "o s n k"]:
        """What the output map multiplies."""
        return self.layer.output_features(self.tile, self.P, self.O)

    @cached_property
    def attended(self) -> Float[Tensor, "o s h n d3"]:
        """w = P A3, the attended value tokens: in the bilinear form O is w Y."""
        return self.P @ self.tile.A3[:, :, None]

    def with_output(
        self, heads: Heads, O: Float[Tensor, "o s h n f"], C: Float[Tensor, "o s n p"]
    ) -> Evaluation:
        """The same under another output map, on which the features do not depend."""
        other = replace(self, heads=heads, O=O, C=C)
        if "features" in vars(self):
            vars(other)["features"] = self.features
        return other


def evaluate(tile: Chunk, layer: Parametrisation, theta: Float[Tensor, "b N"]) -> Evaluation:
    """The layer and its residual on a tile."""
    heads = layer.qkv(tile, theta)
    P = weights_of_heads(tile, heads)
    O = P if heads.v is None else P @ heads.v
    return Evaluation(tile, layer, heads, P, O, layer.mix(tile, theta, O) - tile.B)


def weights_of_heads(tile: Chunk, heads: Heads) -> Float[Tensor, "o s h n m"]:
    """Attention weights of a tile."""
    assert heads.k is not None
    return attention_weights(heads.q, heads.k, tile.bias, tile.allowed)
