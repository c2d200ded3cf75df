"""The sequences of a problem as one attention SVM: constraints do not care where a row comes from.

Rows of all sequences are joined, and a query's rivals are the other keys of its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from newtention.inputs import as_integers, require_shape
from newtention.layout import Layout
from newtention.masks import Mask
from newtention.notation import Array, ArrayLike
from newtention.problem import AttentionProblem
from newtention.svm.pairs import TILE, Block, Pairs, Tokens
from newtention.svm.result import AttentionSVM


class Part(NamedTuple):
    """One sequence, its padding cut off: queries with the scale folded in, keys, and the mask."""

    A1: Tensor
    A2: Tensor
    mask: Mask

    @property
    def allowed(self) -> Bool[Tensor, "#n m"] | None:
        """Allowed pairs; None for all of them."""
        found = self.mask.allowed(len(self.A1), len(self.A2), self.A1.device)
        return None if found is None else found[0, 0]


def parts_of(problem: AttentionProblem) -> list[Part]:
    """The sequences of a problem in their order; finite biases are left out."""
    layout = problem.layout
    parts: dict[int, Part] = {}
    for places, chunk in zip(layout.order, problem.chunks, strict=True):
        for place, i in enumerate(places):
            n, m = layout.queries[i], layout.keys[i]
            explicit = chunk.mask.explicit
            if explicit is not None:
                explicit = explicit[:, place : place + 1, :n, :m]
            mask = Mask(causal=chunk.mask.causal, explicit=explicit)
            parts[i] = Part(chunk.queries[0, place, :n], chunk.A2[0, place, :m], mask)
    return [parts[i] for i in range(len(parts))]


def as_selections(
    problem: AttentionProblem, parts: Sequence[Part], selected: ArrayLike
) -> list[Int[Tensor, " _"]]:
    """The selected keys of every sequence, given in the layout of the problem's rows.

    Keys are numbered within their sequence; entries of padded rows do not matter.

    Raises:
        ValueError, TypeError: as for `as_selection`.
    """
    layout = problem.layout
    if layout.kind == "single":
        return [as_selection(selected, len(parts[0].A1), len(parts[0].A2), parts[0].mask)]
    t = as_integers("selected", selected)
    padded = layout.kind == "padded"
    shape = (len(parts), layout.padded) if padded else (sum(layout.queries),)
    require_shape("selected", t, shape, "one key per query")
    return [
        as_selection(row, len(part.A1), len(part.A2), part.mask, f" of sequence {i}")
        for i, (row, part) in enumerate(zip(layout.split(t), parts, strict=True))
    ]


def as_selection(
    selected: ArrayLike,
    n: int,
    m: int,
    mask: Mask,
    where: str = "",
) -> Int[Tensor, " n"]:
    """One key per query of a sequence, checked against the keys that the query may attend to.

    where: which sequence, for messages.

    Raises:
        ValueError: another shape, a key out of range or forbidden.
        TypeError: no integers.
    """
    chosen = as_integers("selected", selected)
    require_shape("selected", chosen, (n,), "one key per query")
    out = (chosen < 0) | (chosen >= m)
    if bool(out.any()):
        j = int(out.nonzero()[0])
        raise ValueError(
            f"selected[{j}]{where} must be the index of a key, from 0 to {m - 1}; found "
            f"{int(chosen[j])}."
        )
    _require_allowed(chosen, m, mask, where)
    return chosen


def _require_allowed(chosen: Int[Tensor, " n"], m: int, mask: Mask, where: str) -> None:
    """Raise ValueError for a selected key that the mask forbids."""
    n, keys = len(chosen), chosen.numpy()
    block = Block(slice(0, n), slice(0, m), mask.to("cpu"))
    step = max(1, TILE // m)
    for start in range(0, n, step):  # a causal mask of many queries is never formed whole
        rows = slice(start, min(n, start + step))
        allowed = block.allowed(rows)
        if allowed is None:
            return
        own = allowed[np.arange(len(allowed)), keys[rows]]
        if own.all():
            continue
        at = int(own.argmin())
        j = start + at
        if not allowed[at].any():
            raise ValueError(
                f"Every query needs at least one allowed key; the mask leaves none to query {j}"
                f"{where}."
            )
        raise ValueError(
            f"selected[{j}]{where} must be a key that the query may attend to; the mask forbids "
            f"key {int(keys[j])}."
        )


def joined(parts: Sequence[Part], selections: Sequence[Int[Tensor, " _"]]) -> Tokens:
    """All sequences as the tokens of one SVM, in NumPy and float64."""
    blocks, n, m = [], 0, 0
    for part in parts:
        queries, keys = slice(n, n + len(part.A1)), slice(m, m + len(part.A2))
        blocks.append(Block(queries, keys, part.mask.to("cpu")))
        n, m = queries.stop, keys.stop
    keys = [t.cpu() + b.keys.start for t, b in zip(selections, blocks, strict=True)]
    A1, A2 = _plain([part.A1 for part in parts]), _plain([part.A2 for part in parts])
    return Tokens(A1, A2, torch.cat(keys).numpy(), tuple(blocks))


def in_layout(result: AttentionSVM, tokens: Tokens, layout: Layout) -> AttentionSVM:
    """The same with keys, pairs and slack as the user numbers them; X is one for all sequences."""

    def pairs(rows: Pairs) -> np.ndarray:
        if layout.kind == "single":
            return rows
        numbers = tokens.blocks_of(rows[:, 0])
        first = np.array([(b.queries.start, b.keys.start) for b in tokens.blocks], np.int64)
        return np.column_stack([numbers, rows - first[numbers]])

    conflict, slack = result.conflict, result.slack
    if conflict is not None:
        rows = np.asarray(conflict.pairs)
        own = np.array([tokens.blocks[i].keys.start for i in tokens.blocks_of(rows[:, 0])])
        selected = np.asarray(conflict.selected) - own
        conflict = replace(conflict, pairs=pairs(rows), selected=selected)
    if slack is not None:
        own = torch.from_numpy(np.asarray(slack)).split(layout.queries)
        slack = layout.join(own).numpy()
    return replace(
        result, support=pairs(np.asarray(result.support)), conflict=conflict, slack=slack
    )


def presented(result: AttentionSVM, present: Callable[[np.ndarray], Array]) -> AttentionSVM:
    """The same with the user's kind of arrays."""

    def shown(part: Any, names: tuple[str, ...]) -> dict[str, Any]:
        arrays = {name: getattr(part, name) for name in names}
        return {name: None if a is None else present(a) for name, a in arrays.items()}

    conflict = result.conflict
    if conflict is not None:
        conflict = replace(conflict, **shown(conflict, ("pairs", "selected", "weights")))
    arrays = shown(result, ("X", "support", "duals", "slack"))
    return replace(result, conflict=conflict, **arrays)


def _plain(rows: Sequence[Tensor]) -> np.ndarray:
    return np.ascontiguousarray(torch.cat([t.cpu().double() for t in rows]).numpy())
