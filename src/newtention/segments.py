"""From checked sequences to chunks: masks folded, lengths bucketed, rows padded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from newtention.chunks import Chunk, length_buckets
from newtention.masks import Mask


class Segment(NamedTuple):
    """One sequence before it is placed in a chunk; its tensors are views of the user's arrays.

    A3 of width 0: the values are the identity, and B (n, m) holds attention maps.
    """

    A1: Float[Tensor, "n d1"]
    A2: Float[Tensor, "m d2"]
    A3: Float[Tensor, "m d3"]
    B: Float[Tensor, "n p"]
    weight: Float[Tensor, " n"] | None = None
    allowed: Bool[Tensor, "n m"] | None = None
    bias: Float[Tensor, "#h n m"] | None = None
    key_weight: Float[Tensor, " m"] | None = None


def as_chunks(
    segments: list[Segment], causal: bool, scale: float
) -> tuple[tuple[Chunk, ...], tuple[tuple[int, ...], ...]]:
    """Chunks of one problem, and for each chunk the indices of its sequences.

    Raises:
        ValueError: a query without an allowed key, a negative query weight or none above 0, biases
            for different numbers of heads.
    """
    _require_equal_heads(segments)
    segments = [_fold_forbidding_bias(s) for s in segments]
    for i, s in enumerate(segments):
        _require_valid_weight(i, s)
        _require_allowed_keys(i, s, causal)
    if all(s.weight is not None and not bool(s.weight.any()) for s in segments):
        raise ValueError("query_weights must not all be 0.")
    order = length_buckets([(len(s.A1), len(s.A2)) for s in segments])
    chunks = tuple(_chunk([segments[i] for i in places], causal, scale) for places in order)
    return chunks, tuple(tuple(places) for places in order)


def _chunk(segments: list[Segment], causal: bool, scale: float) -> Chunk:
    """Pad the sequences of one bucket to a chunk with one owner."""
    first = segments[0]
    n, m = max(len(s.A1) for s in segments), max(len(s.A2) for s in segments)

    def rows(name: str, length: int) -> Tensor:
        return _padded([getattr(s, name) for s in segments], (length,))

    A2 = rows("A2", m)
    A1 = A2 if all(s.A1 is s.A2 for s in segments) else rows("A1", n)
    A3 = A2 if all(s.A3 is s.A2 for s in segments) else rows("A3", m)
    weights = [s.B.new_ones(len(s.B)) if s.weight is None else s.weight for s in segments]
    ints = {"dtype": torch.int64, "device": first.A1.device}
    key_lengths = torch.tensor([[len(s.A2) for s in segments]], **ints)
    query_lengths = torch.tensor([[len(s.A1) for s in segments]], **ints)
    explicit = None
    if any(s.allowed is not None for s in segments):
        full = [
            torch.ones(len(s.A1), len(s.A2), dtype=torch.bool, device=first.A1.device)
            if s.allowed is None
            else s.allowed
            for s in segments
        ]
        # Padded queries may attend to every real key, so that their softmax stays finite.
        explicit = _padded(full, (n, m), fill=True)
    bias = None
    if first.bias is not None:
        bias = _padded([s.bias for s in segments if s.bias is not None], (n, m), skip=1)
    key_weight = None
    if first.key_weight is not None:
        key_weight = _padded([s.key_weight for s in segments if s.key_weight is not None], (m,))
    return Chunk(
        A1=A1,
        A2=A2,
        A3=A3,
        B=rows("B", n) if first.A3.shape[-1] else _padded([s.B for s in segments], (n, m)),
        weight=_padded(weights, (n,)),
        query_lengths=query_lengths,
        owner=torch.zeros(1, **ints),
        mask=Mask(
            causal=causal,
            key_lengths=None if bool((key_lengths == m).all()) else key_lengths,
            explicit=explicit,
        ),
        bias=bias,
        key_weight=key_weight,
        scale=scale,
    )


def _padded(
    parts: list[Tensor], lengths: tuple[int, ...], skip: int = 0, fill: float = 0
) -> Tensor:
    """Stack tensors to (1, s, ...), the axes from `skip` on padded at the end to `lengths`."""
    shape = (*parts[0].shape[:skip], *lengths, *parts[0].shape[skip + len(lengths) :])
    if len(parts) == 1 and tuple(parts[0].shape) == shape:
        # A copy: the problem must not change when the caller reuses the array.
        return parts[0][None, None].clone(memory_format=torch.contiguous_format)
    out = parts[0].new_full((len(parts), *shape), fill)
    for row, part in zip(out, parts, strict=True):
        row[tuple(slice(k) for k in part.shape)] = part
    return out[None]


def _fold_forbidding_bias(s: Segment) -> Segment:
    """Turn bias entries of minus infinity into mask entries."""
    if s.bias is None or not bool(torch.isinf(s.bias).any()):
        return s
    forbidden = torch.isinf(s.bias)
    if s.bias.shape[0] > 1 and not bool((forbidden == forbidden[:1]).all()):
        raise ValueError("bias must forbid (minus infinity) the same pairs in every head.")
    allowed = ~forbidden[0] if s.allowed is None else s.allowed & ~forbidden[0]
    return s._replace(bias=s.bias.masked_fill(forbidden, 0.0), allowed=allowed)


def _require_valid_weight(i: int, s: Segment) -> None:
    if s.weight is not None and bool((s.weight < 0).any()):
        j = int((s.weight < 0).nonzero()[0])
        raise ValueError(
            f"query_weights must be at least 0; found {float(s.weight[j]):g} at query {j} of "
            f"sequence {i}."
        )


def _require_equal_heads(segments: list[Segment]) -> None:
    heads = {s.bias.shape[0] for s in segments if s.bias is not None}
    if len(heads) > 1:
        raise ValueError(
            f"bias must have the same number of heads in every sequence; found {sorted(heads)}."
        )


def _require_allowed_keys(i: int, s: Segment, causal: bool) -> None:
    """Every query needs an allowed key.  A causal row without further mask has key 0."""
    if s.allowed is None:
        return
    allowed = s.allowed
    if causal:
        allowed = allowed.tril()
    empty = ~allowed.any(-1)
    if bool(empty.any()):
        j = int(empty.nonzero()[0])
        raise ValueError(
            f"Every query needs at least one allowed key; the mask leaves none to query {j} of "
            f"sequence {i}."
        )
