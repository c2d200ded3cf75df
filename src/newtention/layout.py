"""Where the user's rows went, so that results return in the shape the data came in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from newtention.segments import Segment

Rows = TypeVar("Rows", Tensor, np.ndarray)


class Layout(NamedTuple):
    """The arrangement of a problem's rows.

    kind: "single" (n, .), "padded" (s, n, .) or "ragged" (rows concatenated).
    order: for every chunk, the sequence at each of its places.
    queries, keys: real rows of every sequence.
    padded: rows per sequence of a padded batch.
    columns: keys per sequence of a padded batch; the most keys of any sequence otherwise.
    """

    kind: Literal["single", "padded", "ragged"]
    order: tuple[tuple[int, ...], ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    padded: int
    columns: int = 0

    def split(self, rows: Rows) -> list[Rows]:
        """The real rows of every sequence, from an array of the layout."""
        if self.kind == "padded":
            return [rows[i, :n] for i, n in enumerate(self.queries)]
        ends = accumulate(self.queries)
        return [rows[end - n : end] for end, n in zip(ends, self.queries, strict=True)]

    def join(self, rows: Sequence[Tensor], fill: float = 0) -> Tensor:
        """The array of the layout from the real rows of every sequence, `fill` in padded rows."""
        if self.kind == "single":
            return rows[0]
        if self.kind == "ragged":
            return torch.cat(list(rows))
        whole = rows[0].new_full((len(rows), self.padded, *rows[0].shape[1:]), fill)
        for place, row in zip(whole, rows, strict=True):
            place[: len(row)] = row
        return whole


def layout_of(
    segments: Sequence[Segment], order: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
) -> Layout:
    """The layout of sequences; shape is that of the targets, empty where rows are concatenated."""
    queries, keys = tuple(len(s.A1) for s in segments), tuple(len(s.A2) for s in segments)
    if len(shape) == 3:
        return Layout("padded", order, queries, keys, *shape[1:])
    return Layout("single" if shape else "ragged", order, queries, keys, 0, max(keys))
