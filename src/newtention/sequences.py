"""From the user's arrays to sequences: padded batches and concatenated rows, checked.

Without value tokens the targets are attention maps, and the values the identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

from torch import Tensor

from newtention.chunks import Chunk
from newtention.inputs import (
    as_batch_biases,
    as_batch_masks,
    as_bias,
    as_boolean,
    as_lengths,
    as_like,
    as_list,
    as_offsets,
    require_shape,
    shape_text,
)
from newtention.notation import ArrayLike
from newtention.segments import Segment

MATCHABLE = 1e-3
"""Row sums of a map that differ from 1 by more, and weights below minus it, are no rounding of an
attention map, not even in half precision."""


def padded_sequences(
    t: Mapping[str, Tensor],
    *,
    lengths: ArrayLike | None,
    key_lengths: ArrayLike | None,
    mask: ArrayLike | Literal["causal"] | None,
    bias: ArrayLike | None,
    query_weights: ArrayLike | None,
    token_weights: ArrayLike | None,
) -> list[Segment]:
    """The sequences of `AttentionProblem` (A1, A2, A3, B); without A3, B holds attention maps.

    Raises:
        ValueError, TypeError: as for `AttentionProblem`.
    """
    a1, a2, a3, b = t["A1"], t["A2"], t.get("A3"), t["B"]
    if a1.ndim not in (2, 3):
        raise ValueError(
            f"A1 must be 2-D (one sequence) or 3-D (a padded batch); found {shape_text(a1.shape)}."
        )
    lead = tuple(a1.shape[:-2])
    require_shape("A2", a2, (*lead, None, None), "as many axes and sequences as A1")
    n, m = a1.shape[-2], a2.shape[-2]
    if a3 is None:
        require_shape("B", b, (*lead, n, m), "queries x keys")
    else:
        require_shape("A3", a3, (*lead, m, None), "as many rows as A2")
        require_shape("B", b, (*lead, n, None), "as many rows as A1")
    _require_not_empty(t)
    if len(lead) == 0 and (lengths is not None or key_lengths is not None):
        raise ValueError("lengths= and key_lengths= are for 3-D (padded) data; A1 is 2-D.")

    count = lead[0] if lead else 1
    queries = [n] * count if lengths is None else as_lengths("lengths", lengths, count, n)
    if key_lengths is not None:
        keys = as_lengths("key_lengths", key_lengths, count, m)
    elif lengths is None:
        keys = [m] * count
    elif n == m:
        keys = queries
    else:
        raise ValueError(
            f"key_lengths= must be given beside lengths=: A1 has {n} rows, A2 has {m}."
        )
    weight = key_weight = None
    if query_weights is not None:
        weight = as_like("query_weights", query_weights, b)
        require_shape("query_weights", weight, (*lead, n), "one weight per row of B")
    if token_weights is not None:
        key_weight = as_like("TokenWeights(w)", token_weights, b)
        require_shape("TokenWeights(w)", key_weight, (*lead, m), "one weight per key token")

    def rows(x: Tensor, i: int, count: int) -> Tensor:
        return (x[i] if lead else x)[:count]

    allowed, _ = as_batch_masks(mask, lead, n, m, b.device)
    biases = as_batch_biases(bias, lead, n, m, b)
    segments = []
    for i, (own, cols) in enumerate(zip(queries, keys, strict=True)):
        key_tokens, targets = rows(a2, i, cols), rows(b, i, own)
        segments.append(
            Segment(
                key_tokens if a1 is a2 and own == cols else rows(a1, i, own),
                key_tokens,
                _values(key_tokens, a3 is a2, None if a3 is None else rows(a3, i, cols)),
                targets if a3 is not None else targets[:, :cols],
                None if weight is None else rows(weight, i, own),
                None if allowed is None else allowed[i][:own, :cols],
                None if biases is None else biases[i][:, :own, :cols],
                None if key_weight is None else rows(key_weight, i, cols),
            )
        )
    return segments


def ragged_sequences(
    t: Mapping[str, Tensor],
    *,
    maps: bool,
    offsets: ArrayLike,
    key_offsets: ArrayLike | None,
    mask: Sequence[ArrayLike] | Literal["causal"] | None,
    bias: Sequence[ArrayLike] | None,
    query_weights: ArrayLike | None,
    token_weights: ArrayLike | None,
) -> list[Segment]:
    """The sequences of `AttentionProblem.from_ragged`: queries, targets, and perhaps keys, values.

    maps: the targets are attention maps, and there are no values.

    Raises:
        ValueError, TypeError: as for `AttentionProblem`.
    """
    a1, b = t["queries"], t["targets"]
    a2 = t.get("keys", a1)
    a3 = None if maps else t.get("values", a2)
    for name, x in t.items():
        require_shape(name, x, (None, None), "rows of all sequences, concatenated")
    _require_not_empty(t)
    require_shape("targets", b, (a1.shape[0], None), "as many rows as queries")
    if "values" in t:
        require_shape("values", t["values"], (a2.shape[0], None), "as many rows as keys")
    q_off = as_offsets("offsets", offsets, a1.shape[0])
    if key_offsets is None and "keys" in t and a2.shape[0] != a1.shape[0]:
        raise ValueError(
            f"key_offsets= must be given: queries have {a1.shape[0]} rows, keys {a2.shape[0]}."
        )
    k_off = q_off if key_offsets is None else as_offsets("key_offsets", key_offsets, len(a2))
    if len(k_off) != len(q_off):
        raise ValueError(
            f"key_offsets must name as many sequences as offsets, {len(q_off) - 1}; "
            f"found {len(k_off) - 1}."
        )
    if maps:
        longest = max(stop - start for start, stop in pairwise(k_off))
        if b.shape[1] < longest:
            raise ValueError(
                "targets must have a column for every key of the longest sequence, at least "
                f"{longest}; found {shape_text(b.shape)}."
            )
    weight = key_weight = None
    if query_weights is not None:
        weight = as_like("query_weights", query_weights, b)
        require_shape("query_weights", weight, (len(b),), "one weight per row of targets")
    if token_weights is not None:
        key_weight = as_like("TokenWeights(w)", token_weights, b)
        require_shape("TokenWeights(w)", key_weight, (len(a2),), "one weight per key token")

    segments = []
    count = len(q_off) - 1
    masks = as_list("mask", None if isinstance(mask, str) else mask, count)
    biases = as_list("bias", bias, count)
    for i in range(count):
        rows, cols = slice(q_off[i], q_off[i + 1]), slice(k_off[i], k_off[i + 1])
        n, m = rows.stop - rows.start, cols.stop - cols.start
        allowed = None
        if masks is not None:
            allowed = as_boolean(f"mask[{i}]", masks[i], b.device)
            require_shape(f"mask[{i}]", allowed, (n, m), "queries x keys of the sequence")
        part = None
        if biases is not None:
            part = as_bias(f"bias[{i}]", biases[i], n, m, b)
        key_tokens = a2[cols]
        segments.append(
            Segment(
                key_tokens if a2 is a1 and rows == cols else a1[rows],
                key_tokens,
                _values(key_tokens, a3 is a2, None if a3 is None else a3[cols]),
                b[rows, :m] if maps else b[rows],
                None if weight is None else weight[rows],
                allowed,
                part,
                None if key_weight is None else key_weight[cols],
            )
        )
    return segments


def unmatchable(chunks: Sequence[Chunk]) -> str | None:
    """A sentence if no attention map equals the targets B, whatever the weights; else None."""
    sums = negative = forbidden = 0
    worst = 0.0
    for chunk in chunks:
        counts = chunk.weight > 0
        off = (chunk.B.sum(-1) - 1).abs() * counts
        worst = max(worst, float(off.max()))
        sums += int((off > MATCHABLE).sum())
        negative += int(((chunk.B.amin(-1) < -MATCHABLE) & counts).sum())
        if chunk.allowed is not None:
            outside = chunk.B.abs().masked_fill(chunk.allowed, 0).amax(-1)
            forbidden += int(((outside > MATCHABLE) & counts).sum())
    faults = (
        f"{sums} that do not sum to 1 (off by up to {worst:.3g})" if sums else "",
        f"{negative} with negative entries" if negative else "",
        f"{forbidden} with weight on pairs that are not allowed" if forbidden else "",
    )
    found = ", ".join(fault for fault in faults if fault)
    return f"B has rows that no attention map matches: {found}." if found else None


def _values(keys: Tensor, shared: bool, values: Tensor | None) -> Tensor:
    """Value tokens of a sequence; of width 0 where the values are the identity."""
    if shared:
        return keys
    return keys[:, :0] if values is None else values


def _require_not_empty(tensors: Mapping[str, Tensor]) -> None:
    for name, t in tensors.items():
        if t.numel() == 0:
            raise ValueError(f"{name} must not be empty; found {shape_text(t.shape)}.")
