"""Preconditioners of the Gauss-Newton matrix: one Kronecker product per linear map of the layer.

For a map tokens W the block of the Gauss-Newton matrix is sum_j x_j x_j^T (x) E[g_j g_j^T], with
g_j the gradients in its result when the residual is white noise (K-FAC: Martens and Grosse 2015).

"inputs": the product of the two means, (sum x x^T) (x) (mean g g^T): the usual baseline.
"attended": each head weights its tokens by the energy of their gradients, sum_j |g_j|^2 x_j x_j^T;
    for the values, whose block is exactly that of the attended tokens w = P A3, the factors are
    w^T q w and W_O W_O^T.

docs/choices.md compares their numbers of products.  The tokens of a map with a bias get a constant
1 beside them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.attention import score_gradient
from newtention.derivatives.linearised import Linearised
from newtention.layers import Block, Evaluation, Heads, Projection
from newtention.linsolve.kronecker import KroneckerInverse
from newtention.regularizers import FlatQuadratic

Preconditioner = Literal["attended", "inputs", "none"]

FLOOR = 1e-2
"""Added to either factor, relative to its mean eigenvalue.  Between 1e-3 and 1e-1 the number of
products hardly changes (docs/choices.md); without it float32 loses the small directions."""


@dataclass(frozen=True, eq=False)
class Metric:
    """An approximate inverse of the curvature on the free unknowns.

    inverses: per linear map, the flat entries of its (h, d [+ 1], e) weights, and the inverse.
    free: 1 for unknowns to solve for, else 0.
    """

    inverses: tuple[tuple[Tensor, KroneckerInverse], ...]
    free: Float[Tensor, " N"]

    def solve(self, v: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The approximate inverse times a vector; symmetric, and zero on what is not free."""
        v = v * self.free
        out = v.clone()
        for entries, inverse in self.inverses:
            out[entries.flatten()] = inverse.apply(v[entries]).flatten()
        return out * self.free

    @classmethod
    def at(
        cls,
        point: Linearised,
        free: Float[Tensor, " N"],
        kind: Preconditioner,
        regularizer: FlatQuadratic,
        seed: int,
        names: Collection[str] | None = None,
    ) -> Metric:
        """Build it at a point of one problem, usually a sample of the data.

        names: blocks with free unknowns, the others need no factors; by default found in `free`.
        The regulariser enters by its mean curvature in each map.
        """
        if kind == "none":
            return cls((), free)
        generator = torch.Generator().manual_seed(seed)
        blocks = {block.name: block for block in point.layer.blocks}
        if names is None:
            names = {name for name, b in blocks.items() if free[b.start : b.stop].any()}
        maps: list[tuple[str, str | None]] = []

        def tile_sums(at: Evaluation) -> tuple[Tensor, ...]:
            pairs = [p for p in _pairs(at, point, kind, generator) if p.weight in names]
            maps[:] = [(p.weight, p.bias) for p in pairs]
            return tuple(t for p in pairs for t in _moments(p, kind, blocks[p.weight].shape[0]))

        sums = [t[0] for t in point.reduce(tile_sums)]
        probe = torch.randint(0, 2, free.shape, generator=generator, dtype=torch.int8) * 2 - 1
        probe = probe.to(free)
        own = probe * regularizer.curvature(probe[None])[0]  # its mean is that of the diagonal
        inverses = []
        for weight, bias in maps:
            left, right, total = sums[:3]
            del sums[:3]  # the factors of wide layers are large
            right = right / total.clamp(min=torch.finfo(total.dtype).tiny)[:, None, None]
            entries = _entries(blocks[weight], None if bias is None else blocks[bias], free.device)
            mean = (_mean_eigenvalue(left) * _mean_eigenvalue(right)).mean()
            share = torch.where(mean > 0, own[entries].double().mean().clamp(min=0) / mean, 0.0)
            floor = FLOOR + share.sqrt()
            inverses.append((entries, KroneckerInverse.of(left, right, floor, free.dtype)))
        return cls(tuple(inverses), free)


def _pairs(
    at: Evaluation, point: Linearised, kind: Preconditioner, generator: torch.Generator
) -> list[Projection]:
    """Tokens and gradients of every map on a tile, for a white residual.

    The values' are the attended tokens and the gradients in O, one for each query head.
    """
    tile, layer = at.tile, point.layer
    q, k, v = at.heads
    assert k is not None
    noise = torch.randn(at.C.shape, generator=generator, dtype=torch.float64).to(at.C)
    dO = layer.mix_transposed(tile, point.theta, noise * tile.weight.sqrt()[..., None])
    dO = dO.expand_as(at.O)
    dS = score_gradient(at.P, v, at.O, dO)
    dk = None if layer.fixed_keys else dS.mT @ q
    dv = None if v is None else at.P.mT @ dO
    maps = list(layer.projections(tile, Heads(dS @ k, dk, dv)))
    if kind == "attended" and v is not None:
        values = maps.pop()
        maps.append(Projection(values.weight, values.bias, at.attended, dO))
    return maps


def _moments(pair: Projection, kind: Preconditioner, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """sum_j e_j x_j x_j^T, sum_j g_j g_j^T and sum_j e_j by head, with the owners' axis first."""
    g = _rows_by_head(pair.gradient, groups)
    shared = pair.tokens.ndim == 4  # the same tokens for every head
    width = pair.tokens.shape[-1] + (pair.bias is not None)
    left = g.new_empty(g.shape[0], groups, width, width, dtype=torch.float64)
    total = g.new_empty(g.shape[:2], dtype=torch.float64)
    heads = (pair.tokens,) * groups if shared else pair.tokens.tensor_split(groups, 2)
    x, real = _with_constant(heads[0], pair.bias)
    for i, tokens in enumerate(heads):
        if i > 0 and not shared:
            x, real = _with_constant(tokens, pair.bias)
        elif i > 0 and kind == "inputs":
            left[:, i], total[:, i] = left[:, 0], total[:, 0]
            continue
        energy = g[:, i].square().mean(-1, keepdim=True) if kind == "attended" else real
        left[:, i] = (x * energy).mT @ x
        total[:, i] = energy.sum((1, 2))
    return left, (g.mT @ g).double(), total


def _with_constant(
    tokens: Float[Tensor, "o *s n d"], bias: str | None
) -> tuple[Float[Tensor, "o r k"], Float[Tensor, "o r 1"]]:
    """Rows of all sequences, the constant of a bias beside them, and which are not padding."""
    x = tokens.flatten(1, -2)
    real = (x != 0).any(-1, keepdim=True).to(x)  # padding is zero, also in the constant
    return x if bias is None else torch.cat([x, real], -1), real


def _rows_by_head(t: Float[Tensor, "o s h n k"], groups: int) -> Float[Tensor, "o g r k"]:
    """Rows of all sequences, and of the query heads that share a map, by map."""
    o, _, h, _, k = t.shape
    return t.unflatten(2, (groups, h // groups)).transpose(1, 2).reshape(o, groups, -1, k)


def _mean_eigenvalue(factor: Float[Tensor, "h d d"]) -> Float[Tensor, " h"]:
    return factor.diagonal(dim1=1, dim2=2).mean(1)


def _entries(weight: Block, bias: Block | None, device: torch.device) -> Tensor:
    """Places of a map's weights in the flat vector, (h, d, e), the bias a last row."""
    places = torch.arange(weight.start, weight.stop, device=device).view(weight.shape)
    if bias is None:
        return places
    row = torch.arange(bias.start, bias.stop, device=device).view(bias.shape)
    return torch.cat([places, row[:, None]], 1)
