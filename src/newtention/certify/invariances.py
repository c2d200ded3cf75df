"""Directions of (X, Y) along which the outputs do not change, whatever the point.

*Softmax shift.*  Logits of a row may move together: X + w u^T leaves every attention weight as it
is where A2 u is constant over each row's allowed keys.  LayerNorm makes such a u: its outputs have
x . (1 / gamma) = const.
*Unused directions.*  Tokens that do not span their space leave parts of X or Y without effect.

A direction counts as flat when the tokens' root mean square along it is at most EXACT times the
largest (for float32 data ROUNDINGS of their own units): what may be the rounding that made the
tokens.  So it is flat but for rounding, and nothing is proved along it: the certificate is about
the loss on a plane without these directions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.certify.certificate import Flat
from newtention.certify.penalty_errors import kron
from newtention.certify.row_errors import real_rows
from newtention.chunks import Chunk
from newtention.layers import AttentionMap, Bilinear
from newtention.problem import AttentionProblem

FLAT = 1e-13
"""Eigenvalues of a scatter matrix below this share of the largest are not told from zero: the
tokens' components along their directions, in which nothing cancels, decide."""
EXACT = 1e-12
"""Share of the tokens' size that may be rounding."""
ROUNDINGS = 8
"""Units of rounding of the data's own dtype by which a LayerNorm's equation may be violated."""
KEYS = (16 * 2.0**-53) ** 2
"""Equal keys differ from their mean by so much of their square."""


class FlatSpace(NamedTuple):
    """An orthonormal basis (N, k) of the flat directions, and what they come from."""

    basis: Float[Tensor, "N k"]
    names: tuple[Flat, ...]


class _Directions(NamedTuple):
    """Directions of the three kinds of tokens, as columns."""

    queries: Float[Tensor, "d1 k1"]
    keys: Float[Tensor, "d2 k2"]
    values: Float[Tensor, "d3 k3"]


class _Scatter(NamedTuple):
    """Second moments of tokens along directions.

    queries, values; within: keys about each row's mean; keys: about zero.
    """

    queries: Float[Tensor, "k1 k1"]
    within: Float[Tensor, "k2 k2"]
    keys: Float[Tensor, "k2 k2"]
    values: Float[Tensor, "k3 k3"]


def flat_space(
    problem: AttentionProblem,
    data: AttentionProblem,
    layer: Bilinear | AttentionMap,
    penalty: Float[Tensor, "N N"],
) -> FlatSpace:
    """The flat directions of the total loss.

    Args:
        problem: as given; its dtype says how exact the tokens are.
        data: the same in float64.
        layer: shapes of the weights.
        penalty: Hessian of the regulariser.  What it curves is not flat.
    """
    exact = max(EXACT, ROUNDINGS * torch.finfo(problem.like.dtype).eps) ** 2

    def eye(d: int) -> Float[Tensor, "d d"]:
        return torch.eye(d, dtype=torch.float64, device=penalty.device)

    all_ = _Directions(eye(layer.d1), eye(layer.d2), eye(layer.d3))
    s = _scatter(data, all_)
    if not all(bool(torch.isfinite(t).all()) for t in s):
        return FlatSpace(penalty.new_zeros(layer.size, 0), ())  # beyond float64's range
    queries, within, keys, values = (_largest(t) for t in s)
    near = _Directions(
        _split(s.queries, max(FLAT, exact) * queries)[0],
        _split(s.within, max(FLAT, exact) * within + KEYS * keys)[0],
        _split(s.values, max(FLAT, exact) * values)[0],
    )
    t = _scatter(data, near)
    Q0 = near.queries @ _split(t.queries, exact * queries)[0]
    V0 = near.values @ _split(t.values, exact * values)[0]
    constant = _split(t.within, exact * within + KEYS * keys)[0]
    zero, other = _split(constant.mT @ t.keys @ constant, exact * keys)
    K0, K_shift = near.keys @ constant @ zero, near.keys @ constant @ other
    Q1, every, rest = complement(Q0), eye(layer.p), eye(layer.d2)
    families = [
        ("softmax shift along keys that are constant, as after LayerNorm", Q1, K_shift, True),
        ("keys that do not span their space", Q1, K0, True),
        ("queries that do not span their space", Q0, rest, True),
        ("values that do not span their space", V0, every, False),
    ]
    bases, names = [penalty.new_zeros(layer.size, 0)], []
    for name, left, right, of_x in families:
        block = _embedded(kron(left, right), layer, of_x)
        block = block @ _null(block.mT @ penalty @ block)
        if block.shape[1]:
            bases.append(block)
            names.append(Flat(name, block.shape[1]))
    return FlatSpace(torch.cat(bases, 1), tuple(names))


def complement(basis: Float[Tensor, "N k"]) -> Float[Tensor, "N r"]:
    """An orthonormal basis of the directions that are not flat."""
    return torch.linalg.qr(basis, mode="complete")[0][:, basis.shape[1] :]


def _embedded(
    part: Float[Tensor, "k j"], layer: Bilinear | AttentionMap, of_x: bool
) -> Float[Tensor, "N hj"]:
    """The same directions for every head, in the flat vector."""
    every = torch.block_diag(*[part] * layer.heads)
    zeros = every.new_zeros(layer.size_y if of_x else layer.size_x, every.shape[1])
    return torch.cat([every, zeros] if of_x else [zeros, every])


def _largest(scatter: Float[Tensor, "d d"]) -> float:
    return max(0.0, float(torch.linalg.eigvalsh(scatter)[-1])) if len(scatter) else 0.0


def _split(scatter: Float[Tensor, "d d"], limit: float) -> tuple[Tensor, Tensor]:
    """Orthonormal bases of the directions with scatter up to the limit, and of the others."""
    values, vectors = torch.linalg.eigh(scatter)
    return vectors[:, values <= limit], vectors[:, values > limit]


def _null(G: Float[Tensor, "k k"]) -> Float[Tensor, "k j"]:
    """Directions that a positive semidefinite matrix does not curve."""
    if G.numel() == 0 or not bool(G.any()):
        return torch.eye(len(G), dtype=G.dtype, device=G.device)
    values, vectors = torch.linalg.eigh(G)
    return vectors[:, values <= FLAT * values[-1]]


def _scatter(data: AttentionProblem, along: _Directions) -> _Scatter:
    k1, k2, k3 = (t.shape[1] for t in along)
    new = data.like.new_zeros
    s = _Scatter(new(k1, k1), new(k2, k2), new(k2, k2), new(k3, k3))
    for chunk in data.chunks:
        for tile in chunk.tiles(chunk.A2.shape[2]):
            _add_tile(s, tile, along)
    return s


def _add_tile(s: _Scatter, tile: Chunk, along: _Directions) -> None:
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
    shifted = (A2 - centre) @ along.keys
    sums = pairs @ shifted  # s n d2
    rows = pairs.sum(-1, keepdim=True).clamp(min=1)
    queries = (A1 @ along.queries) * counted[..., None]

    def gram(t: Tensor, weight: Tensor | None = None) -> Tensor:
        left = t if weight is None else t * weight[..., None]
        return left.flatten(0, 1).mT @ t.flatten(0, 1)

    s.queries.add_(gram(queries))
    s.within.add_(gram(shifted, count) - gram(sums / rows.sqrt()))
    s.keys.add_(gram(A2 @ along.keys, count))
    s.values.add_(gram(A3 @ along.values, count))
