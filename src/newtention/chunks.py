"""Chunks, the only unit of work, and `reduce`, the only loop over them.

Ragged groups, padded batches, independent problems and tiles of query rows are all chunks: equal
shapes inside, padding with weight 0.  Every sum over the data in this library is one call of
`reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.masks import Mask

TILE_ELEMENTS = 1 << 21
"""Elements that one intermediate array of a tile may hold (16 MiB in float64).

Medians of interleaved runs on one core, Hessian products with 2^20, 2^21, 3 2^20 and 2^22 elements:
2.28, 2.55, 2.76 and 3.44 s for one sequence (n 4096, d 64, float64), 0.94, 0.97, 1.16 and 1.12 s
for the same in float32, 0.21, 0.19, 0.19 and 0.19 s for MiniLM's layer 3 (float32); dense Hessians
differ by less than the noise.  Arrays of 32 MiB are slower, and the memory they leave behind is
hard to predict: that is the size from which glibc returns every freed array to the system.
"""


@dataclass(frozen=True)
class Chunk:
    """Sequences of equal padded shape, of one or several independent problems.

    Axes: o owners, s sequences of each owner, n queries, m keys.  Padded rows of A1, A2, A3 and B
    are zero; padded queries have weight 0; padded keys are masked.  A3 of width 0 says that the
    values are the identity: B then holds attention maps, its columns the keys.
    """

    A1: Float[Tensor, "o s n d1"]
    A2: Float[Tensor, "o s m d2"]
    A3: Float[Tensor, "o s m d3"]
    B: Float[Tensor, "o s n p"]
    weight: Float[Tensor, "o s n"]
    query_lengths: Int[Tensor, "o s"]
    owner: Int[Tensor, " o"]
    mask: Mask = field(default_factory=Mask)
    bias: Float[Tensor, "o s #h n m"] | None = None
    key_weight: Float[Tensor, "o s m"] | None = None
    scale: float = 1.0

    @property
    def signature(self) -> tuple:
        """Chunks with equal signatures can be concatenated along their owners."""
        rule = (self.mask.key_lengths, self.mask.explicit, self.mask.picked)
        optional = (*rule, self.bias, self.key_weight)
        shared = (self.A1 is self.A2, self.A3 is self.A2)
        shapes = tuple(None if t is None else tuple(t.shape[1:]) for t in optional)
        return (self.A1.shape[1:3], self.A2.shape[2], self.mask.causal, self.scale, shapes, shared)

    @classmethod
    def concatenate(cls, chunks: Sequence[Chunk]) -> Chunk:
        """One chunk that holds the owners of all; their signatures must agree."""
        first = chunks[0]
        if len(chunks) == 1:
            return first

        def cat(get: Callable[[Chunk], Tensor | None]) -> Tensor | None:
            parts = [t for t in map(get, chunks) if t is not None]
            return torch.cat(parts) if parts else None

        mask = replace(
            first.mask,
            key_lengths=cat(lambda c: c.mask.key_lengths),
            explicit=cat(lambda c: c.mask.explicit),
            picked=cat(lambda c: c.mask.picked),
        )
        names = ("A1", "A2", "A3", "B", "weight", "query_lengths", "owner", "bias", "key_weight")
        fields = {name: cat(lambda c, name=name: getattr(c, name)) for name in names}
        return replace(first, mask=mask, **_share(first, fields))

    @property
    def queries(self) -> Float[Tensor, "o s n d1"]:
        """A1 with the logit scale folded in."""
        return self.A1 if self.scale == 1.0 else self.A1 * self.scale

    def of(self, weights: Float[Tensor, "b ..."]) -> Float[Tensor, "o ..."]:
        """Each owner's share of a tensor with one entry per independent problem."""
        same = weights.shape[0] == self.owner.shape[0]
        return weights if same else weights[self.owner]

    def query_count(self) -> Float[Tensor, " o"]:
        """Real query tokens of each owner."""
        return self.query_lengths.sum(1).to(self.A1.dtype)

    def key_count(self) -> Float[Tensor, " o"]:
        """Real key tokens of each owner."""
        o, s, m = self.A2.shape[:3]
        if self.mask.key_lengths is None:
            return self.A1.new_full((o,), s * m)
        return self.mask.key_lengths.sum(1).to(self.A1.dtype)

    @property
    def allowed(self) -> Tensor | None:
        """(o, s, n, m) boolean or None; see `Mask.allowed`."""
        return self.mask.allowed(self.A1.shape[2], self.A2.shape[2], self.A1.device)

    def take(self, index: Int[Tensor, " k"], owner: Int[Tensor, " k"]) -> Chunk:
        """The owners at `index` (repeats allowed), renumbered to `owner`."""
        return replace(self._owners(index), owner=owner)

    def sequence(self, place: int) -> Chunk:
        """One sequence of every owner."""
        return self.sequences(slice(place, place + 1))

    def tiles(self, elements_per_row: int, budget: int = TILE_ELEMENTS) -> Iterator[Chunk]:
        """Split so that rows times elements_per_row stays within the budget.

        Rows of one sequence are kept together as long as possible, because the products over keys
        are shared by them.
        """
        o, s, n = self.weight.shape
        rows = max(1, budget // max(1, elements_per_row))
        if o * s * n <= rows:
            yield self
            return
        step_n = min(n, rows)
        step_s = min(s, max(1, rows // n))
        step_o = min(o, max(1, rows // (n * s)))
        # Equal tiles: 3 rows + 3 rows rather than 5 + 1.
        step_n = math.ceil(n / math.ceil(n / step_n))
        step_s = math.ceil(s / math.ceil(s / step_s))
        step_o = math.ceil(o / math.ceil(o / step_o))
        for i in range(0, o, step_o):
            owners = self._owners(slice(i, i + step_o))
            for j in range(0, s, step_s):
                sequences = owners.sequences(slice(j, j + step_s))
                for k in range(0, n, step_n):
                    yield sequences._rows(k, min(n, k + step_n))

    def to(self, device: torch.device | str) -> Chunk:
        """The same on another device."""
        mask = self.mask.to(device)
        return self._mapped(lambda t: t.to(device), mask, self.owner.to(device))

    def cast(self, dtype: torch.dtype) -> Chunk:
        """The same in another floating type."""
        return self._mapped(
            lambda t: t.to(dtype) if t.is_floating_point() else t, self.mask, self.owner
        )

    def _owners(self, index: slice | Tensor) -> Chunk:
        return self._mapped(lambda t: t[index], self.mask.owners(index), self.owner[index])

    def sequences(self, index: slice | Int[Tensor, " k"]) -> Chunk:
        """The sequences at these places of every owner."""
        return self._mapped(lambda t: t[:, index], self.mask.sequences(index), self.owner)

    def pick(self, index: Int[Tensor, "o s k"], weight: Float[Tensor, "o s k"]) -> Chunk:
        """k real query rows of every sequence, repeats allowed, under other weights."""
        bias = self.bias
        if bias is not None:
            bias = bias.take_along_dim(index[:, :, None, :, None], 3)
        return replace(
            self,
            A1=self.A1.take_along_dim(index[..., None], 2),
            B=self.B.take_along_dim(index[..., None], 2),
            weight=weight,
            query_lengths=torch.full_like(self.query_lengths, index.shape[2]),
            mask=self.mask.pick(index, self.weight.shape[2]),
            bias=bias,
        )

    def _mapped(self, f: Callable[[Tensor], Tensor], mask: Mask, owner: Tensor) -> Chunk:
        names = ("A1", "A2", "A3", "B", "weight", "query_lengths", "bias", "key_weight")
        values = {name: getattr(self, name) for name in names}
        fields = {name: None if t is None else f(t) for name, t in values.items()}
        return replace(self, mask=mask, owner=owner, **_share(self, fields))

    def _rows(self, start: int, stop: int) -> Chunk:
        if start == 0 and stop == self.A1.shape[2]:
            return self
        return replace(
            self,
            A1=self.A1[:, :, start:stop],
            B=self.B[:, :, start:stop],
            weight=self.weight[:, :, start:stop],
            mask=self.mask.rows(start, stop),
            bias=None if self.bias is None else self.bias[:, :, :, start:stop],
        )


def reduce(
    chunks: Sequence[Chunk],
    batch: int,
    fn: Callable[[Chunk], tuple[Tensor, ...]],
    elements_per_row: int = 0,
) -> tuple[Tensor, ...]:
    """Sum fn over all tiles of all chunks, by owner, in a fixed order.

    fn maps a tile to tensors whose leading axis is the tile's owner axis; the result's leading axis
    is the batch of independent problems.  elements_per_row is the size of fn's largest intermediate
    per query row; it sets the tiles (0: whole chunks).
    """

    def parts() -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        # Nothing of a tile is bound to a name here, so that it is gone when the next one begins.
        for chunk in chunks:
            for tile in chunk.tiles(elements_per_row) if elements_per_row else (chunk,):
                yield tile, fn(tile)

    return sum_by_owner(parts(), batch)


def sum_by_owner(
    parts: Iterable[tuple[Chunk, tuple[Tensor, ...]]], batch: int
) -> tuple[Tensor, ...]:
    """Sum tensors computed on tiles, by owner, in the order given; see `reduce`."""
    totals: list[Tensor] = []
    first: list[Tensor] = []
    for tile, values in parts:
        if not totals:
            # A single tile that holds every owner needs no sum.
            if not first and _is_identity(tile, batch):
                first = list(values)
                del values
                continue
            while first:  # one by one: they can be large
                totals.append(first.pop(0).clone())
            totals = totals or [v.new_zeros(batch, *v.shape[1:]) for v in values]
        _add(totals, values, None if batch == 1 else tile.owner)
        del values  # before the next tile allocates its own
    return tuple(totals or first)


def _add(totals: Sequence[Tensor], values: Sequence[Tensor], owner: Tensor | None) -> None:
    """Add in place; with `owner`, entry i of a value goes to entry owner[i] of its total."""
    for total, v in zip(totals, values, strict=True):
        if owner is None:
            total.add_(v)
        else:
            total.index_add_(0, owner, v)


def map_rows(
    chunk: Chunk, fn: Callable[[Chunk], Float[Tensor, "o s n k"]], elements_per_row: int
) -> Float[Tensor, "o s n k"]:
    """fn's results for every query row of a chunk, computed in tiles where the chunk is large."""
    if chunk.weight.numel() * elements_per_row <= TILE_ELEMENTS:
        return fn(chunk)
    sequences = []
    for place in range(chunk.weight.shape[1]):
        tiles = chunk.sequence(place).tiles(elements_per_row)
        sequences.append(torch.cat([fn(tile) for tile in tiles], 2))
    return torch.cat(sequences, 1)


def _share(source: Chunk, fields: dict[str, Tensor | None]) -> dict[str, Any]:
    """Keep A1 and A3 the same object as A2 where they were, which halves memory and products."""
    if source.A1 is source.A2:
        fields["A1"] = fields["A2"]
    if source.A3 is source.A2:
        fields["A3"] = fields["A2"]
    return fields


def _is_identity(chunk: Chunk, batch: int) -> bool:
    """Owners are 0 .. batch-1 in order: chunks are always built sorted, so the count decides."""
    return chunk.owner.shape[0] == batch


def contract(
    left: Float[Tensor, "o s #h n a"], right: Float[Tensor, "o s #h n b"]
) -> Float[Tensor, "o h a b"]:
    """Sum of left^T right over sequences and rows."""
    return (left.mT @ right).sum(1)


def length_buckets(lengths: Sequence[tuple[int, int]], waste: float = 0.15) -> list[list[int]]:
    """Group sequences so that padding adds at most the fraction `waste` of the pairs.

    lengths holds (queries, keys) of each sequence.  Sequences are sorted by length and a bucket is
    closed when one more would push padded pairs beyond (1 + waste) times the real ones.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i][0], -lengths[i][1], i))
    buckets: list[list[int]] = []
    real = longest_n = longest_m = 0
    for i in order:
        n, m = lengths[i]
        padded_n, padded_m = max(longest_n, n), max(longest_m, m)
        count = len(buckets[-1]) + 1 if buckets else 1
        if not buckets or count * padded_n * padded_m > (1 + waste) * (real + n * m):
            buckets.append([])
            real, padded_n, padded_m = 0, n, m
        buckets[-1].append(i)
        real, longest_n, longest_m = real + n * m, padded_n, padded_m
    return buckets
