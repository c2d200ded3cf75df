"""Attention problems: the data, validated once, laid out in chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.chunks import Chunk, reduce
from newtention.inputs import (
    as_batch_biases,
    as_batch_masks,
    as_bias,
    as_boolean,
    as_lengths,
    as_like,
    as_list,
    as_offsets,
    as_tensors,
    is_causal,
    require_shape,
    shape_text,
)
from newtention.notation import Array, ArrayLike
from newtention.regularizers import (
    Proximity,
    Quadratic,
    Regularizer,
    TokenWeights,
    stack_quadratics,
    zero_quadratic,
)
from newtention.segments import Segment, as_chunks


class Layout(NamedTuple):
    """Where the user's rows went, so that results return in the shape the data came in.

    kind: "single" (n, .), "padded" (s, n, .) or "ragged" (rows concatenated).
    order: for every chunk, the sequence at each of its places.
    queries, keys: real rows of every sequence.
    padded: rows per sequence of a padded batch.
    """

    kind: Literal["single", "padded", "ragged"]
    order: tuple[tuple[int, ...], ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    padded: int


@dataclass(frozen=True, eq=False, repr=False, init=False)
class AttentionProblem:
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
        a1, a2, a3, b = t["A1"], t["A2"], t["A3"], t["B"]
        if a1.ndim not in (2, 3):
            raise ValueError(
                "A1 must be 2-D (one sequence) or 3-D (a padded batch); "
                f"found {shape_text(a1.shape)}."
            )
        lead = tuple(a1.shape[:-2])
        require_shape("A2", a2, (*lead, None, None), "as many axes and sequences as A1")
        n, m = a1.shape[-2], a2.shape[-2]
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

        weight = None
        if query_weights is not None:
            weight = as_like("query_weights", query_weights, b)
            require_shape("query_weights", weight, (*lead, n), "one weight per row of B")
        key_weight = None
        if isinstance(regularizer, TokenWeights):
            key_weight = as_like("TokenWeights(w)", regularizer.w, b)
            require_shape("TokenWeights(w)", key_weight, (*lead, m), "one weight per key token")

        def split(x: Tensor | None, i: int, rows: int) -> Any:
            if x is None:
                return None
            return (x if not lead else x[i])[:rows]

        allowed, causal = as_batch_masks(mask, lead, n, m, b.device)
        biases = as_batch_biases(bias, lead, n, m, b)
        segments = []
        for i, (rows, cols) in enumerate(zip(queries, keys, strict=True)):
            key_tokens = split(a2, i, cols)
            segments.append(
                Segment(
                    key_tokens if a1 is a2 and rows == cols else split(a1, i, rows),
                    key_tokens,
                    key_tokens if a3 is a2 else split(a3, i, cols),
                    split(b, i, rows),
                    split(weight, i, rows),
                    None if allowed is None else allowed[i][:rows, :cols],
                    None if biases is None else biases[i][:, :rows, :cols],
                    split(key_weight, i, cols),
                )
            )
        kind: Literal["single", "padded"] = "padded" if lead else "single"
        self._build(segments, kind, n, causal, scale, regularizer, numpy)

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
        a1, b = t["queries"], t["targets"]
        a2 = t.get("keys", a1)
        a3 = t.get("values", a2)
        for name, x in t.items():
            require_shape(name, x, (None, None), "rows of all sequences, concatenated")
        _require_not_empty(t)
        require_shape("targets", b, (a1.shape[0], None), "as many rows as queries")
        if values is not None:
            require_shape("values", a3, (a2.shape[0], None), "as many rows as keys")
        q_off = as_offsets("offsets", offsets, a1.shape[0])
        if key_offsets is None and keys is not None and a2.shape[0] != a1.shape[0]:
            raise ValueError(
                f"key_offsets= must be given: queries have {a1.shape[0]} rows, keys {a2.shape[0]}."
            )
        k_off = q_off if key_offsets is None else as_offsets("key_offsets", key_offsets, len(a2))
        if len(k_off) != len(q_off):
            raise ValueError(
                f"key_offsets must name as many sequences as offsets, {len(q_off) - 1}; "
                f"found {len(k_off) - 1}."
            )
        weight = None
        if query_weights is not None:
            weight = as_like("query_weights", query_weights, b)
            require_shape("query_weights", weight, (len(b),), "one weight per row of targets")
        key_weight = None
        if isinstance(regularizer, TokenWeights):
            key_weight = as_like("TokenWeights(w)", regularizer.w, b)
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
                    key_tokens if a3 is a2 else a3[cols],
                    b[rows],
                    None if weight is None else weight[rows],
                    allowed,
                    part,
                    None if key_weight is None else key_weight[cols],
                )
            )
        problem = cls.__new__(cls)
        problem._build(segments, "ragged", 0, is_causal(mask), scale, regularizer, numpy)
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
        """(d1, d2, d3, p)."""
        c = self.chunks[0]
        return c.A1.shape[-1], c.A2.shape[-1], c.A3.shape[-1], c.B.shape[-1]

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

    def with_chunks(self, chunks: tuple[Chunk, ...]) -> AttentionProblem:
        """The same with other data, for curvature and sizes: rows lose the user's order."""
        other = AttentionProblem.__new__(AttentionProblem)
        other._set(**{**self.__dict__, "chunks": chunks})
        return other

    def rows_from_chunks(self, values: Sequence[Float[Tensor, "1 _ _ k"]]) -> Tensor:
        """Arrange per-query results of every chunk in the layout of the user's arrays.

        Padded rows of a padded batch are zero.
        """
        rows: list[Tensor] = [torch.empty(0)] * len(self.layout.queries)
        for places, value in zip(self.layout.order, values, strict=True):
            for place, i in enumerate(places):
                rows[i] = value[0, place, : self.layout.queries[i]]
        if self.layout.kind == "single":
            return rows[0]
        if self.layout.kind == "ragged":
            return torch.cat(rows)
        out = rows[0].new_zeros(len(rows), self.layout.padded, rows[0].shape[-1])
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return out

    def present(self, t: Tensor) -> Array:
        """A result as the user's kind of array."""
        return t.detach().cpu().numpy() if self.numpy else t

    def __repr__(self) -> str:
        """Shapes at a glance."""
        d1, d2, d3, p = self.widths
        if self.parts:
            return (
                f"AttentionProblem(stack of {self.batch}; d1 {d1}, d2 {d2}, d3 {d3}, p {p}, "
                f"{str(self.like.dtype)[6:]} on {self.like.device})"
            )
        lay = self.layout
        extra = "" if self.regularizer is None else f", {self.regularizer.describe()['name']}"
        return (
            f"AttentionProblem({len(lay.queries)} sequence(s), {sum(lay.queries)} queries, "
            f"{sum(lay.keys)} keys; d1 {d1}, d2 {d2}, d3 {d3}, p {p}; scale {self.scale:g}, "
            f"mask {self.mask}{extra}; {str(self.like.dtype)[6:]} on {self.like.device})"
        )

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def _compiled(regularizer: Regularizer | None, chunks: tuple[Chunk, ...]) -> Quadratic:
        c = chunks[0]
        d1, d2, d3, p = (t.shape[-1] for t in (c.A1, c.A2, c.A3, c.B))
        if regularizer is None:
            return zero_quadratic(1, d1, d2, d3, c.A1)
        quadratic = regularizer.quadratic(chunks)
        _require_centre(quadratic, d1, d2, d3, p)
        return quadratic

    def _build(
        self,
        segments: list[Segment],
        kind: Literal["single", "padded", "ragged"],
        padded: int,
        causal: bool,
        scale: float,
        regularizer: Regularizer | None,
        numpy: bool,
    ) -> None:
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
            layout=Layout(
                kind,
                order,
                tuple(len(s.A1) for s in segments),
                tuple(len(s.A2) for s in segments),
                padded,
            ),
            scale=scale,
            mask="causal" if causal else "explicit" if explicit else "none",
            numpy=numpy,
            parts=(),
        )
        self._require_heads()

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


def _require_not_empty(tensors: dict[str, Tensor]) -> None:
    for name, t in tensors.items():
        if t.numel() == 0:
            raise ValueError(f"{name} must not be empty; found {shape_text(t.shape)}.")


def _require_centre(quadratic: Quadratic, d1: int, d2: int, d3: int, p: int) -> None:
    X, Y = quadratic.centre_x, quadratic.centre_y
    if X is None or Y is None:
        return
    require_shape("Proximity(reference[0])", X[0], (None, d1, d2), "the shape of X")
    require_shape("Proximity(reference[1])", Y[0], (X.shape[1], d3, p), "the shape of Y")
