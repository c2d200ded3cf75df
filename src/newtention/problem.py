"""Attention problems: the data, validated once, laid out in chunks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.chunks import Chunk, reduce
from newtention.display import Displayed, Table
from newtention.inputs import as_tensors, is_causal, require_shape
from newtention.notation import Array, ArrayLike
from newtention.regularizers import (
    Proximity,
    Quadratic,
    Regularizer,
    Ridge,
    TokenWeights,
    stack_quadratics,
    zero_quadratic,
)
from newtention.segments import Segment, as_chunks
from newtention.sequences import padded_sequences, ragged_sequences, unmatchable

Rows = TypeVar("Rows", Tensor, np.ndarray)


class Layout(NamedTuple):
    """Where the user's rows went, so that results return in the shape the data came in.

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


@dataclass(frozen=True, eq=False, repr=False, init=False)
class AttentionProblem(Displayed):
    """Fit softmax(scale A1 X A2^T + bias) A3 Y to B over X and Y.

    minimise 1/2 sum_j q_j ||(P A3 Y - B)_j||^2 + regulariser, summed over sequences that share X
    and Y.  The paper's problem is one sequence, no mask, scale 1 (Definition 1.3 of Gao, Song,
    Wang, Yin).

    Args:
        A1: query-side tokens, (n, d1), or (s, n, d1) for s sequences of one padded length.
        A2: key-side tokens, (m, d2) or (s, m, d2).
        A3: value-side tokens, (m, d3) or (s, m, d3).
        B: targets, (n, p) or (s, n, p).
        lengths: (s,) real queries per sequence of a padded batch; the rest counts
            for nothing, but must be finite.
        key_lengths: (s,) real keys per sequence; defaults to `lengths` where A1 and A2 have the
            same number of rows.
        mask: None, "causal" (key k allowed for query j when k <= j), or booleans, True where
            attention is allowed: (n, m) or (s, n, m).
        bias: added to the logits, (n, m) or (h, n, m) with h heads; for 3-D data (n, m),
            (s, n, m) or (s, h, n, m).  Minus infinity forbids a pair.
        scale: multiplies A1 X A2^T.
        query_weights: weight q_j >= 0 of each row of B, shape of B without its last axis.
        regularizer: `Ridge`, `TokenWeights` or `Proximity`.

    float32 and float64 are computed in as given; float16, bfloat16 and integers are promoted with
    a warning.  NumPy in, NumPy out.

    Raises:
        ValueError: shapes that do not fit, NaN or infinity, an empty axis, a query without an
            allowed key.
        TypeError: torch and NumPy or float32 and float64 mixed, complex numbers, a mask that is
            not boolean.

    Example:
        >>> A = np.arange(6.0).reshape(3, 2)
        >>> nt.AttentionProblem(A, A, A, np.ones((3, 1)), mask="causal")
        AttentionProblem(1 sequence(s), 3 queries, 3 keys; d1 2, d2 2, d3 2, p 1; scale 1,
        mask causal; float64 on cpu)
    """

    chunks: tuple[Chunk, ...]
    batch: int
    """Number of independent problems; 1 unless made by `stack`."""
    quadratic: Quadratic
    regularizer: Regularizer | None
    layout: Layout
    scale: float
    mask: str
    """"none", "causal" or "explicit"."""
    numpy: bool
    """True when the data came as NumPy arrays."""
    parts: tuple[AttentionProblem, ...]
    """The stacked problems; empty for a single one."""

    def __init__(
        self,
        A1: ArrayLike,
        A2: ArrayLike,
        A3: ArrayLike,
        B: ArrayLike,
        *,
        lengths: ArrayLike | None = None,
        key_lengths: ArrayLike | None = None,
        mask: ArrayLike | Literal["causal"] | None = None,
        bias: ArrayLike | None = None,
        scale: float = 1.0,
        query_weights: ArrayLike | None = None,
        regularizer: Regularizer | None = None,
    ) -> None:
        t, numpy = as_tensors({"A1": A1, "A2": A2, "A3": A3, "B": B})
        segments = padded_sequences(
            t,
            lengths=lengths,
            key_lengths=key_lengths,
            mask=mask,
            bias=bias,
            query_weights=query_weights,
            token_weights=_token_weights(regularizer),
        )
        self._build(segments, tuple(t["B"].shape), is_causal(mask), scale, regularizer, numpy)

    @classmethod
    def from_maps(
        cls,
        A1: ArrayLike,
        A2: ArrayLike,
        B: ArrayLike,
        *,
        lengths: ArrayLike | None = None,
        key_lengths: ArrayLike | None = None,
        mask: ArrayLike | Literal["causal"] | None = None,
        bias: ArrayLike | None = None,
        scale: float = 1.0,
        query_weights: ArrayLike | None = None,
        regularizer: Regularizer | None = None,
    ) -> AttentionProblem:
        """Fit softmax(scale A1 X A2^T + bias) itself to attention maps B, over X alone.

        The paper's multiple softmax regression (Definition 1.4): the problem with A3 Y = I, which
        is never stored.  Weights are X (d1, d2) or a `MapAttention`; there is no Y.

        Args:
            A1: query-side tokens, (n, d1) or (s, n, d1).
            A2: key-side tokens, (m, d2) or (s, m, d2).
            B: maps, (n, m) or (s, n, m); entries beyond the lengths count for nothing.  A warning
                says where no attention map can equal them: sums other than 1, negative entries,
                weight on pairs that are not allowed.
            lengths: as for `AttentionProblem`, like all that follow.
            key_lengths: real keys per sequence.
            mask: None, "causal" or booleans.
            bias: added to the logits, for one head.
            scale: multiplies A1 X A2^T.
            query_weights: weight of each row of B.
            regularizer: `Ridge(x=)`, `TokenWeights` or `Proximity` around a `MapAttention`.

        Raises:
            ValueError, TypeError: as for `AttentionProblem`; also a bias or a regulariser that
                asks for several heads or for Y.
        """
        t, numpy = as_tensors({"A1": A1, "A2": A2, "B": B})
        segments = padded_sequences(
            t,
            lengths=lengths,
            key_lengths=key_lengths,
            mask=mask,
            bias=bias,
            query_weights=query_weights,
            token_weights=_token_weights(regularizer),
        )
        problem = cls.__new__(cls)
        problem._build(segments, tuple(t["B"].shape), is_causal(mask), scale, regularizer, numpy)
        problem._require_maps()
        return problem

    @classmethod
    def from_ragged_maps(
        cls,
        queries: ArrayLike,
        targets: ArrayLike,
        *,
        offsets: ArrayLike,
        keys: ArrayLike | None = None,
        key_offsets: ArrayLike | None = None,
        mask: Sequence[ArrayLike] | Literal["causal"] | None = None,
        bias: Sequence[ArrayLike] | None = None,
        scale: float = 1.0,
        query_weights: ArrayLike | None = None,
        regularizer: Regularizer | None = None,
    ) -> AttentionProblem:
        """Attention maps of sequences of different lengths, rows concatenated; see `from_maps`.

        Args:
            queries: (N, d1) tokens of all sequences.
            targets: (N, longest number of keys, or more); a row's entries beyond the keys of its
                sequence count for nothing.
            offsets: as for `from_ragged`, like all that follow.
            keys: (M, d2); the queries by default.
            key_offsets: of the keys.
            mask: None, "causal", or one boolean array per sequence.
            bias: one array per sequence.
            scale: multiplies the logits.
            query_weights: (N,) weight of each row of targets.
            regularizer: as for `from_maps`.

        Raises:
            ValueError, TypeError: as for `from_maps`.
        """
        given = {"queries": queries, "keys": keys, "targets": targets}
        t, numpy = as_tensors({name: a for name, a in given.items() if a is not None})
        segments = ragged_sequences(
            t,
            maps=True,
            offsets=offsets,
            key_offsets=key_offsets,
            mask=mask,
            bias=bias,
            query_weights=query_weights,
            token_weights=_token_weights(regularizer),
        )
        problem = cls.__new__(cls)
        problem._build(segments, (), is_causal(mask), scale, regularizer, numpy)
        problem._require_maps()
        return problem

    @classmethod
    def from_ragged(
        cls,
        queries: ArrayLike,
        targets: ArrayLike,
        *,
        offsets: ArrayLike,
        keys: ArrayLike | None = None,
        values: ArrayLike | None = None,
        key_offsets: ArrayLike | None = None,
        mask: Sequence[ArrayLike] | Literal["causal"] | None = None,
        bias: Sequence[ArrayLike] | None = None,
        scale: float = 1.0,
        query_weights: ArrayLike | None = None,
        regularizer: Regularizer | None = None,
    ) -> AttentionProblem:
        """Sequences of different lengths, concatenated; self-attention unless keys are given.

        Args:
            queries: (N, d1) tokens of all sequences.
            targets: (N, p).
            offsets: (s + 1,) integers; sequence i holds the rows offsets[i] to offsets[i + 1].
            keys: (M, d2); the queries by default.
            values: (M, d3); the keys by default.
            key_offsets: (s + 1,) integers for keys and values; `offsets` by default.
            mask: None, "causal", or a list with one (n_i, m_i) boolean array per sequence.
            bias: a list with one (n_i, m_i) or (h, n_i, m_i) array per sequence.
            scale: multiplies the logits.
            query_weights: (N,) weight of each row of targets.
            regularizer: `Ridge`, `TokenWeights` (one weight per row of keys) or `Proximity`.

        Raises:
            ValueError, TypeError: as for `AttentionProblem`.
        """
        given = {"queries": queries, "keys": keys, "values": values, "targets": targets}
        t, numpy = as_tensors({name: a for name, a in given.items() if a is not None})
        segments = ragged_sequences(
            t,
            maps=False,
            offsets=offsets,
            key_offsets=key_offsets,
            mask=mask,
            bias=bias,
            query_weights=query_weights,
            token_weights=_token_weights(regularizer),
        )
        problem = cls.__new__(cls)
        problem._build(segments, (), is_causal(mask), scale, regularizer, numpy)
        return problem

    @classmethod
    def stack(cls, problems: Sequence[AttentionProblem]) -> AttentionProblem:
        """Several independent problems of equal widths, solved as one batch.

        Each keeps its own unknowns; sequences may differ in number and length.  `solve` returns one
        `Solution` per problem, the same as it would return for each alone.

        Raises:
            ValueError: no problems, problems that differ in d1, d2, d3, p, dtype or device, or one
                with Proximity around a factored layer.
        """
        problems = [part for problem in problems for part in problem.parts or (problem,)]
        if not problems:
            raise ValueError("stack needs at least one problem; found none.")
        first = problems[0]
        for i, other in enumerate(problems):
            if other.kind != first.kind:
                raise ValueError(
                    "Stacked problems must have equal widths (d1, d2, d3, p), dtype, device and "
                    "kind of array; "
                    f"problem 0 has {first.kind}, problem {i} has {other.kind}."
                )
        regularizers = (p.regularizer for p in problems)
        if any(isinstance(r, Proximity) and r.around_layer for r in regularizers):
            raise ValueError(
                "Proximity around a factored layer goes with one problem, not with a stack."
            )
        heads = {problem.fixed_heads for problem in problems}
        if len(heads) > 1 and heads != {None, 1}:
            raise ValueError(
                "Stacked problems must ask for the same number of heads by their biases and "
                f"Proximity references; found {sorted(h or 1 for h in heads)}."
            )
        merged: dict[tuple, list[Chunk]] = {}
        for i, problem in enumerate(problems):
            for chunk in problem.chunks:
                owned = replace(chunk, owner=torch.full_like(chunk.owner, i))
                merged.setdefault(owned.signature, []).append(owned)
        stacked = cls.__new__(cls)
        stacked._set(
            chunks=tuple(Chunk.concatenate(group) for group in merged.values()),
            batch=len(problems),
            quadratic=stack_quadratics([p.quadratic for p in problems]),
            regularizer=None,
            layout=first.layout,
            scale=first.scale,
            mask=first.mask,
            numpy=first.numpy,
            parts=tuple(problems),
        )
        return stacked

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """(d1, d2, d3, p); d3 and p are 0 where the targets are attention maps."""
        return _widths(self.chunks[0])

    @property
    def of_maps(self) -> bool:
        """Whether the targets are attention maps: the values are the identity, there is no Y."""
        return self.widths[2] == 0

    @property
    def kind(self) -> tuple[object, ...]:
        """What stacked problems must have in common."""
        array = "NumPy" if self.numpy else "torch"
        return *self.widths, str(self.like.dtype)[6:], str(self.like.device), array

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the data."""
        return self.chunks[0].A1

    @property
    def bias_heads(self) -> int | None:
        """Number of heads the bias was given for, or None if it suits any number."""
        heads = {c.bias.shape[2] for c in self.chunks if c.bias is not None} - {1}
        return heads.pop() if heads else None

    @property
    def fixed_heads(self) -> int | None:
        """The number of heads that the bias or a Proximity reference asks for, if any."""
        centre = self.quadratic.centre_x
        return self.bias_heads or (None if centre is None else centre.shape[1])

    def target_energy(self) -> Float[Tensor, " b"]:
        """1/2 sum_j q_j ||B_j||^2 of each independent problem."""

        def energy(c: Chunk) -> tuple[Tensor]:
            return (0.5 * (c.weight * c.B.square().sum(-1)).sum((1, 2)),)

        return reduce(self.chunks, self.batch, energy)[0]

    def take(self, index: Int[Tensor, " k"]) -> AttentionProblem:
        """The independent problems at `index`, repeats allowed, as one batch without `parts`."""
        chunks = []
        for chunk in self.chunks:
            # Places (i, j): the new problem i draws on the chunk's owner j.
            new, old = (index[:, None] == chunk.owner[None, :]).nonzero(as_tuple=True)
            if len(new):
                chunks.append(chunk.take(old, new))
        taken = AttentionProblem.__new__(AttentionProblem)
        taken._set(
            **{
                **self.__dict__,
                "chunks": tuple(chunks),
                "batch": len(index),
                "quadratic": self.quadratic.take(index),
                "parts": (),
            }
        )
        return taken

    def with_regularizer(self, regularizer: Regularizer | None) -> AttentionProblem:
        """The same data under another regulariser, shared, not copied.

        Raises:
            ValueError: a stack of problems, `TokenWeights`, whose weights belong to the data, or a
                Proximity reference that does not fit the data.
            TypeError: not a regulariser.
        """
        if self.parts:
            raise ValueError("with_regularizer takes one problem, not a stack.")
        _require_regularizer(regularizer)
        if isinstance(regularizer, TokenWeights):
            raise ValueError("TokenWeights must be given where the problem is made.")
        quadratic = self._compiled(regularizer, self.chunks)
        fields = {**self.__dict__, "regularizer": regularizer, "quadratic": quadratic}
        other = AttentionProblem.__new__(AttentionProblem)
        other._set(**fields)
        other._require_heads()
        return other

    def sample(self, share: float) -> AttentionProblem:
        """One problem's every (1/share)th sequence, its weights raised to those of all.

        Sequences are taken evenly over the lengths; at least one stays.  The regulariser is not
        part of the sample.  For curvature, not for results: rows have no place in the user's order.
        """
        wanted = max(1, round(share * len(self.layout.queries)))
        count = len(self.layout.queries)
        if wanted >= count:
            return self
        places = {int((i + 0.5) * count / wanted) for i in range(wanted)}
        chunks, first = [], 0
        for chunk in self.chunks:
            size = chunk.weight.shape[1]
            own = [p - first for p in sorted(places) if first <= p < first + size]
            if own:
                chunks.append(chunk.sequences(torch.tensor(own, device=chunk.owner.device)))
            first += size
        total, part = (sum(float(c.weight.sum()) for c in cs) for cs in (self.chunks, chunks))
        if part <= 0:
            return self
        return self.with_chunks(tuple(replace(c, weight=c.weight * (total / part)) for c in chunks))

    def with_chunks(
        self, chunks: tuple[Chunk, ...], layout: Layout | None = None
    ) -> AttentionProblem:
        """The same with other data; without their layout, rows lose the user's order."""
        other = AttentionProblem.__new__(AttentionProblem)
        layout = self.layout if layout is None else layout
        other._set(**{**self.__dict__, "chunks": chunks, "layout": layout})
        return other

    def cast(self, dtype: torch.dtype) -> AttentionProblem:
        """The same data in another floating type, for curvature: targets may overflow."""
        chunks = tuple(chunk.cast(dtype) for chunk in self.chunks)
        other = AttentionProblem.__new__(AttentionProblem)
        quadratic = self.quadratic.cast(dtype)
        other._set(**{**self.__dict__, "chunks": chunks, "quadratic": quadratic})
        return other

    def rows_from_chunks(
        self, values: Sequence[Float[Tensor, "1 _ _ _"]], width: int = 0
    ) -> Tensor:
        """Arrange per-query results of every chunk in the layout of the user's arrays.

        Padded rows of a padded batch are zero.  Narrower results (attention maps of shorter
        sequences) are filled up with zeros to the widest, and to `width`.
        """
        rows: list[Tensor] = [torch.empty(0)] * len(self.layout.queries)
        width = max(width, *(value.shape[-1] for value in values))
        for places, value in zip(self.layout.order, values, strict=True):
            missing = width - value.shape[-1]
            whole = torch.nn.functional.pad(value, (0, missing)) if missing else value
            for place, i in enumerate(places):
                rows[i] = whole[0, place, : self.layout.queries[i]]
        return self.layout.join(rows)

    def present(self, t: Tensor) -> Array:
        """A result as the user's kind of array."""
        return t.detach().cpu().numpy() if self.numpy else t

    def __repr__(self) -> str:
        """Shapes at a glance."""
        facts = self._facts()
        if self.parts:
            widths, numbers = facts["Widths"], facts["Numbers"]
            return f"AttentionProblem(stack of {self.batch}; {widths}, {numbers})"
        extra = "" if self.regularizer is None else f", {self.regularizer.describe()['name']}"
        return (
            f"AttentionProblem({facts['Sequences']} sequence(s), {facts['Queries']} queries, "
            f"{facts['Keys']} keys; {facts['Widths']}; scale {facts['Scale']}, "
            f"mask {facts['Mask']}{extra}; {facts['Numbers']})"
        )

    def _facts(self) -> dict[str, str]:
        names = ("d1", "d2") if self.of_maps else ("d1", "d2", "d3", "p")
        sizes = [f"{name} {width}" for name, width in zip(names, self.widths, strict=False)]
        shared = {
            "Widths": ", ".join(sizes + ["attention maps"] * self.of_maps),
            "Numbers": f"{str(self.like.dtype)[6:]} on {self.like.device}",
        }
        if self.parts:
            return {"Problems": str(self.batch), **shared}
        described = {"name": "none"} if self.regularizer is None else self.regularizer.describe()
        settings = [f"{name} {value}" for name, value in described.items() if name != "name"]
        return {
            "Sequences": str(len(self.layout.queries)),
            "Queries": str(sum(self.layout.queries)),
            "Keys": str(sum(self.layout.keys)),
            **shared,
            "Scale": f"{self.scale:g}",
            "Mask": self.mask,
            "Regulariser": ", ".join([str(described["name"]), *settings]),
        }

    def _table(self) -> Table:
        title = "AttentionProblem, a stack" if self.parts else "AttentionProblem"
        return Table(title, [*self._facts().items()])

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def _compiled(regularizer: Regularizer | None, chunks: tuple[Chunk, ...]) -> Quadratic:
        d1, d2, d3, p = _widths(chunks[0])
        if regularizer is None:
            return zero_quadratic(1, d1, d2, d3, chunks[0].A1)
        quadratic = regularizer.quadratic(chunks)
        _require_centre(quadratic, d1, d2, d3, p)
        return quadratic

    def _build(
        self,
        segments: list[Segment],
        shape: tuple[int, ...],
        causal: bool,
        scale: float,
        regularizer: Regularizer | None,
        numpy: bool,
    ) -> None:
        """Shape is that of the targets, empty where rows are concatenated."""
        scale = float(scale)
        if not math.isfinite(scale) or scale <= 0:
            raise ValueError(f"scale must be a positive finite number; found {scale}.")
        _require_regularizer(regularizer)
        chunks, order = as_chunks(segments, causal, scale)
        like = chunks[0].A1
        if not all(bool(torch.isfinite(c.B.square().sum())) for c in chunks):
            raise ValueError(
                f"B (the targets) must have a sum of squares within {str(like.dtype)[6:]}; it "
                "overflows.  Rescale the targets."
            )
        quadratic = self._compiled(regularizer, chunks)
        explicit = any(c.mask.explicit is not None for c in chunks)
        self._set(
            chunks=chunks,
            batch=1,
            quadratic=quadratic,
            regularizer=regularizer,
            layout=_layout(segments, order, shape),
            scale=scale,
            mask="causal" if causal else "explicit" if explicit else "none",
            numpy=numpy,
            parts=(),
        )
        self._require_heads()

    def _require_maps(self) -> None:
        """Raise ValueError for what attention maps do not have; warn of targets that are none."""
        if self.bias_heads is not None:
            raise ValueError(
                f"bias must be for one head, since a map has one; found {self.bias_heads} heads."
            )
        if isinstance(self.regularizer, Ridge) and self.regularizer.y:
            raise ValueError("Ridge(y=) must be 0: a fit of attention maps has no Y.")
        fault = unmatchable(self.chunks)
        if fault is not None:
            warnings.warn(fault, stacklevel=3)

    def _require_heads(self) -> None:
        centre = self.quadratic.centre_x
        if centre is not None and self.bias_heads not in (None, centre.shape[1]):
            raise ValueError(
                f"bias is for {self.bias_heads} heads, Proximity(reference=) for {centre.shape[1]}."
            )


def _require_regularizer(regularizer: object) -> None:
    if regularizer is not None and not isinstance(regularizer, Regularizer):
        raise TypeError(
            "regularizer must be Ridge, TokenWeights or Proximity; "
            f"found {type(regularizer).__name__}."
        )


def _token_weights(regularizer: Regularizer | None) -> ArrayLike | None:
    return regularizer.w if isinstance(regularizer, TokenWeights) else None


def _widths(c: Chunk) -> tuple[int, int, int, int]:
    d1, d2, d3, p = (t.shape[-1] for t in (c.A1, c.A2, c.A3, c.B))
    return d1, d2, d3, p if d3 else 0  # no values: the columns of B are the keys


def _layout(
    segments: Sequence[Segment], order: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
) -> Layout:
    queries, keys = tuple(len(s.A1) for s in segments), tuple(len(s.A2) for s in segments)
    if len(shape) == 3:
        return Layout("padded", order, queries, keys, *shape[1:])
    return Layout("single" if shape else "ragged", order, queries, keys, 0, max(keys))


def _require_centre(quadratic: Quadratic, d1: int, d2: int, d3: int, p: int) -> None:
    X, Y = quadratic.centre_x, quadratic.centre_y
    if X is None or Y is None:
        return
    require_shape("Proximity(reference[0])", X[0], (None, d1, d2), "the shape of X")
    require_shape("Proximity(reference[1])", Y[0], (X.shape[1], d3, p), "the shape of Y")
