"""A real layer: W_Q, W_K, W_V, W_O per head, biases, grouped keys/values, rotary positions.

    q_h = scale rot(A1 W_Q,h + b_Q,h),   k_g = rot(A2 W_K,g + b_K,g),   v_g = A3 W_V,g + b_V,g
    F = sum_h O_h W_O,h + b_O

Query head h uses key/value head g = h // (heads / kv_heads).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.chunks import Chunk
from newtention.layers.base import Block, Heads, Parametrisation, Projection
from newtention.layers.rotary import Rotary


@dataclass(frozen=True)
class Factored(Parametrisation):
    """Shapes of a factored layer, and its blocks in the flat vector.

    heads: query heads h.  kv_heads: key/value heads, a divisor of h.
    d1, d2, d3, p: widths of query, key and value tokens and of the output.
    e: width of queries and keys per head.  f: width of values per head.
    qk_bias, v_bias, out_bias: whether b_Q and b_K, b_V, b_O exist.
    scale: of the logits, beside the problem's own.
    """

    kv_heads: int
    d1: int
    d2: int
    d3: int
    p: int
    e: int
    f: int
    qk_bias: bool = False
    v_bias: bool = False
    out_bias: bool = False
    scale: float = 1.0
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        """Check that the rotary positions are for these heads."""
        if self.rotary is not None:
            self.rotary.require_fits(self.kv_heads, self.e)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """W_Q, b_Q, W_K, b_K, W_V, b_V, W_O, b_O, without the biases that do not exist."""
        h, g, e, f = self.heads, self.kv_heads, self.e, self.f
        shapes = {
            "W_Q": (h, self.d1, e),
            "b_Q": (h, e) if self.qk_bias else None,
            "W_K": (g, self.d2, e),
            "b_K": (g, e) if self.qk_bias else None,
            "W_V": (g, self.d3, f),
            "b_V": (g, f) if self.v_bias else None,
            "W_O": (h, f, self.p),
            "b_O": (self.p,) if self.out_bias else None,
        }
        result, start = [], 0
        for name, shape in shapes.items():
            if shape is not None:
                result.append(Block(name, start, start + math.prod(shape), shape))
                start = result[-1].stop
        return tuple(result)

    def unpack(self, theta: Float[Tensor, "b N"]) -> dict[str, Tensor]:
        """Every block by name, (b, *shape), as views of the flat vector."""
        return {
            block.name: theta[:, block.start : block.stop].view(theta.shape[0], *block.shape)
            for block in self.blocks
        }

    def pack(self, parts: dict[str, Tensor], like: Float[Tensor, "b ..."]) -> Float[Tensor, "b N"]:
        """The flat vector of the given blocks; blocks left out are zero."""
        out = like.new_zeros(like.shape[0], self.size)
        for block in self.blocks:
            if block.name in parts:
                out[:, block.start : block.stop] = parts[block.name].flatten(1)
        return out

    def qkv(self, tile: Chunk, theta: Float[Tensor, "b N"]) -> Heads:
        """Queries, keys and values; keys and values repeated for the query heads of their group."""
        w = {name: tile.of(t) for name, t in self.unpack(theta).items()}
        q = self._turn(self._affine(tile.A1, w, "Q"), _places(tile)) * self._scale(tile)
        k = self._turn(self._affine(tile.A2, w, "K"))
        return Heads(q, self._repeat(k), self._repeat(self._affine(tile.A3, w, "V")))

    def qkv_tangent(self, tile: Chunk, direction: Float[Tensor, "b N"]) -> Heads:
        """The same linear map: there is no constant."""
        return self.qkv(tile, direction)

    def qkv_transposed(self, tile: Chunk, gradients: Heads) -> Float[Tensor, "o N"]:
        """Contracted with the tokens; biases are column sums."""
        parts = {}
        for weight, bias, tokens, gradient in self.projections(tile, gradients):
            parts[weight] = _contract(tokens, gradient)
            if bias is not None:
                parts[bias] = gradient.sum((1, 3))
        return self.pack(parts, gradients.q)

    def projections(self, tile: Chunk, gradients: Heads) -> tuple[Projection, ...]:
        """Gradients scaled, rotated back and summed over the query heads of a group."""
        assert gradients.k is not None
        assert gradients.v is not None
        dq = self._turn(gradients.q * self._scale(tile), _places(tile), back=True)
        dk = self._turn(self._sum_groups(gradients.k), back=True)
        dv = self._sum_groups(gradients.v)
        b_Q, b_K = ("b_Q", "b_K") if self.qk_bias else (None, None)
        return (
            Projection("W_Q", b_Q, tile.A1, dq),
            Projection("W_K", b_K, tile.A2, dk),
            Projection("W_V", "b_V" if self.v_bias else None, tile.A3, dv),
        )

    def evaluation_elements(self, n: int, m: int) -> int:
        """Keys and values count for every query head; the features may be a view of O."""
        e, f = self.e, self.f
        features = 0 if self.output_rows == f else n * self.output_rows
        return self.heads * (n * (e + f + m) + m * (e + f)) + n * self.p + features

    @property
    def output_start(self) -> int:
        """W_O and b_O are the output map."""
        return next(block.start for block in self.blocks if block.name == "W_O")

    @property
    def output_rows(self) -> int:
        """W_O of all heads, and b_O."""
        return self.heads * self.f + self.out_bias

    def output_features(
        self, tile: Chunk, P: Float[Tensor, "o s h n m"], O: Float[Tensor, "o s h n f"]
    ) -> Float[Tensor, "o s n k"]:
        """O of all heads side by side, and the constant 1 if there is b_O."""
        rows = _concatenated(O)
        return torch.cat([rows, torch.ones_like(rows[..., :1])], 3) if self.out_bias else rows

    def mix(
        self, tile: Chunk, theta: Float[Tensor, "b N"], O: Float[Tensor, "o s h n f"]
    ) -> Float[Tensor, "o s n p"]:
        """concat(O) W_O + b_O."""
        w = {name: tile.of(t) for name, t in self.unpack(theta).items()}
        F = _concatenated(O) @ w["W_O"].flatten(1, 2)[:, None]
        return F + w["b_O"][:, None, None] if self.out_bias else F

    def mix_tangent(
        self,
        tile: Chunk,
        theta: Float[Tensor, "b N"],
        direction: Float[Tensor, "b N"],
        O: Float[Tensor, "o s h n f"],
        O_t: Float[Tensor, "o s h n f"],
    ) -> Float[Tensor, "o s n p"]:
        """concat(O') W_O + concat(O) W_O' + b_O'."""
        W = tile.of(self.unpack(theta)["W_O"]).flatten(1, 2)[:, None]
        return _concatenated(O_t) @ W + self.mix(tile, direction, O)

    def mix_transposed(
        self, tile: Chunk, theta: Float[Tensor, "b N"], R: Float[Tensor, "o s n p"]
    ) -> Float[Tensor, "o s h n f"]:
        """R W_O^T per head."""
        W = tile.of(self.unpack(theta)["W_O"]).flatten(1, 2)
        return _per_head(_rows(R) @ W.mT, R, self.heads)

    def mix_cross(
        self, tile: Chunk, direction: Float[Tensor, "b N"], R: Float[Tensor, "o s n p"]
    ) -> Float[Tensor, "o s h n f"]:
        """R W_O'^T per head."""
        return self.mix_transposed(tile, direction, R)

    def mix_gradient(
        self, tile: Chunk, O: Float[Tensor, "o s h n f"], R: Float[Tensor, "o s n p"]
    ) -> Float[Tensor, "o N"]:
        """(O_h^T R, column sums of R)."""
        parts = {"W_O": _rows(_concatenated(O)).mT @ _rows(R), "b_O": R.sum((1, 2))}
        return self.pack(parts, R)

    def mix_gradient_tangent(
        self,
        tile: Chunk,
        O: Float[Tensor, "o s h n f"],
        O_t: Float[Tensor, "o s h n f"],
        R: Float[Tensor, "o s n p"],
        R_t: Float[Tensor, "o s n p"],
    ) -> Float[Tensor, "o N"]:
        """(O_t^T R + O^T R_t per head, column sums of R_t)."""
        both = torch.cat([_concatenated(O_t), _concatenated(O)], 2)
        W_O = _rows(both).mT @ _rows(torch.cat([R, R_t], 2))
        return self.pack({"W_O": W_O, "b_O": R_t.sum((1, 2))}, R)

    def _scale(self, tile: Chunk) -> float:
        return tile.scale * self.scale

    def _affine(self, tokens: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
        W = w["W_" + name]
        out = _rows(tokens) @ W.transpose(1, 2).flatten(2)  # one product for all heads
        bias = w.get("b_" + name)
        if bias is not None:
            out = out + bias.flatten(1)[:, None]
        return _per_head(out, tokens, W.shape[1])

    def _turn(self, t: Tensor, first: int | Tensor = 0, back: bool = False) -> Tensor:
        return t if self.rotary is None else self.rotary.rotate(t, first, back)

    def _repeat(self, t: Float[Tensor, "o s g m e"]) -> Float[Tensor, "o s h m e"]:
        group = self.heads // self.kv_heads
        return t if group == 1 else t.repeat_interleave(group, 2)

    def _sum_groups(self, t: Float[Tensor, "o s h m e"]) -> Float[Tensor, "o s g m e"]:
        group = self.heads // self.kv_heads
        return t if group == 1 else t.unflatten(2, (self.kv_heads, group)).sum(3)


def _places(tile: Chunk) -> Tensor:
    return tile.mask.places(tile.A1.shape[2], tile.A1.device)


def _concatenated(O: Float[Tensor, "o s h n f"]) -> Float[Tensor, "o s n hf"]:
    return O.transpose(2, 3).flatten(3)


def _rows(t: Float[Tensor, "o s n d"]) -> Float[Tensor, "o sn d"]:
    return t.flatten(1, 2)


def _per_head(
    rows: Float[Tensor, "o sn he"], like: Float[Tensor, "o s n _"], heads: int
) -> Float[Tensor, "o s h n e"]:
    """The inverse of `_concatenated`, for rows of all sequences."""
    return rows.view(*like.shape[:3], heads, -1).transpose(2, 3)


def _contract(
    tokens: Float[Tensor, "o s n d"], gradient: Float[Tensor, "o s h n e"]
) -> Float[Tensor, "o h d e"]:
    """sum over sequences and rows of tokens^T gradient, one product for all heads."""
    product = _rows(tokens).mT @ _rows(_concatenated(gradient))
    return product.unflatten(2, gradient.shape[2::2]).transpose(1, 2)
