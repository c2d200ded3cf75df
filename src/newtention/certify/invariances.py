"""Directions of (X, Y) along which the outputs do not change, whatever the point.

*Softmax shift.*  Logits of a row may move together: X + w u^T leaves every attention weight as it
is where A2 u is constant over each row's allowed keys.  LayerNorm makes such a u: its outputs have
x . (1 / gamma) = const.
*Unused directions.*  Tokens that do not span their space leave parts of X or Y without effect.

A direction counts as flat when the tokens' scatter along it is at most FLAT times the largest (for
float32 data, whose tokens satisfy such equations to rounding only, the square of that rounding).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.certify.certificate import Flat
from newtention.certify.row_errors import real_rows
from newtention.chunks import Chunk
from newtention.layers import Bilinear
from newtention.problem import AttentionProblem

FLAT = 1e-13
"""Eigenvalues of a scatter matrix below this share of the largest are not told from zero."""
ROUNDINGS = 64
"""Units of rounding of the data's own dtype by which a LayerNorm's equation may be violated."""


class FlatSpace(NamedTuple):
    """An orthonormal basis (N, k) of the flat directions, and what they come from."""

    basis: Float[Tensor, "N k"]
    names: tuple[Flat, ...]


class _Scatter(NamedTuple):
    """Second moments of a problem's tokens: queries, keys about each row's mean, keys, values."""

    queries: Float[Tensor, "d1 d1"]
    within: Float[Tensor, "d2 d2"]
    keys: Float[Tensor, "d2 d2"]
    values: Float[Tensor, "d3 d3"]


def flat_space(
    problem: AttentionProblem,
    data: AttentionProblem,
    layer: Bilinear,
    penalty: Float[Tensor, "N N"],
) -> FlatSpace:
    """The flat directions of the total loss.

    Args:
        problem: as given; its dtype says how exact the tokens are.
        data: the same in float64.
        layer: shapes of the weights.
        penalty: Hessian of the regulariser.  What it curves is not flat.
    """
    exact = ROUNDINGS * torch.finfo(problem.like.dtype).eps
    share = max(FLAT, exact**2)
    s = _scatter(data)
    Q0, Q1 = _split(s.queries, share)
    K0, K1 = _split(s.keys, share)
    shift = _split(K1.mT @ s.within @ K1, share)[0]
    K_shift = K1 @ shift
    V0 = _split(s.values, share)[0]
    every = torch.eye(layer.p, dtype=V0.dtype, device=V0.device)
    rest = torch.eye(layer.d2, dtype=V0.dtype, device=V0.device)
    families = [
        ("softmax shift along keys that are constant, as after LayerNorm", Q1, K_shift, True),
        ("keys that do not span their space", Q1, K0, True),
        ("queries that do not span their space", Q0, rest, True),
        ("values that do not span their space", V0, every, False),
    ]
    bases, names = [penalty.new_zeros(layer.size, 0)], []
    for name, left, right, of_x in families:
        block = _embedded(torch.kron(left, right), layer, of_x)
        block = block @ _null(block.mT @ penalty @ block)
        if block.shape[1]:
            bases.append(block)
            names.append(Flat(name, block.shape[1]))
    return FlatSpace(torch.cat(bases, 1), tuple(names))


def complement(basis: Float[Tensor, "N k"]) -> Float[Tensor, "N r"]:
    """An orthonormal basis of the directions that are not flat."""
    return torch.linalg.qr(basis, mode="complete")[0][:, basis.shape[1] :]


def _embedded(part: Float[Tensor, "k j"], layer: Bilinear, of_x: bool) -> Float[Tensor, "N hj"]:
    """The same directions for every head, in the flat vector."""
    every = torch.block_diag(*[part] * layer.heads)
    zeros = every.new_zeros(layer.size_y if of_x else layer.size_x, every.shape[1])
    return torch.cat([every, zeros] if of_x else [zeros, every])


def _split(scatter: Float[Tensor, "d d"], share: float) -> tuple[Tensor, Tensor]:
    """Orthonormal bases of the directions without scatter, and of the others."""
    values, vectors = torch.linalg.eigh(scatter)
    largest = values[-1].clamp(min=0) if len(values) else values.sum()
    flat = values <= share * largest
    return vectors[:, flat], vectors[:, ~flat]


def _null(G: Float[Tensor, "k k"]) -> Float[Tensor, "k j"]:
    """Directions that a positive semidefinite matrix does not curve."""
    if G.numel() == 0 or not bool(G.any()):
        return torch.eye(len(G), dtype=G.dtype, device=G.device)
    values, vectors = torch.linalg.eigh(G)
    return vectors[:, values <= FLAT * values[-1]]


def _scatter(data: AttentionProblem) -> _Scatter:
    d1, d2, d3, _ = data.widths
    new = data.like.new_zeros
    s = _Scatter(new(d1, d1), new(d2, d2), new(d2, d2), new(d3, d3))
    for chunk in data.chunks:
        for tile in chunk.tiles(chunk.A2.shape[2]):
            _add_tile(s, tile)
    return s


def _add_tile(s: _Scatter, tile: Chunk) -> None:
    """Rows of weight 0 count for nothing; a key counts for each row that may attend to it."""
    counted = real_rows(tile)[0] & (tile.weight[0] != 0)
    A1, A2, A3 = tile.queries[0], tile.A2[0], tile.A3[0]
    allowed = tile.allowed
    pairs = A1.new_ones(*counted.shape, A2.shape[1], dtype=torch.bool)
    if allowed is not None:
        pairs = pairs & allowed[0]
    if tile.bias is not None:
        pairs = pairs & (tile.bias[0] > -torch.inf).any(1)
    pairs = (pairs & counted[..., None]).double()
    count = pairs.sum(1)  # s m
    # About the mean of all keys, so that little cancels below.
    centre = (count[..., None] * A2).sum(1, keepdim=True) / count.sum(1).clamp(min=1)[:, None, None]
    shifted = A2 - centre
    sums = pairs @ shifted  # s n d2
    rows = pairs.sum(-1, keepdim=True).clamp(min=1)
    queries = A1 * counted[..., None]

    def gram(t: Tensor, weight: Tensor | None = None) -> Tensor:
        left = t if weight is None else t * weight[..., None]
        return left.flatten(0, 1).mT @ t.flatten(0, 1)

    s.queries.add_(gram(queries))
    s.within.add_(gram(shifted, count) - gram(sums / rows.sqrt()))
    s.keys.add_(gram(A2, count))
    s.values.add_(gram(A3, count))
