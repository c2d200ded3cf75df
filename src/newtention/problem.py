"""Attention problems: the data, validated once, laid out in chunks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from newtention.chunks import Chunk
from newtention.inputs import as_tensors, is_causal
from newtention.layout import layout_of
from newtention.notation import ArrayLike
from newtention.problem_data import ProblemData, compiled
from newtention.regularizers import Proximity, Regularizer, Ridge, TokenWeights, stack_quadratics
from newtention.segments import Segment, as_chunks
from newtention.sequences import padded_sequences, ragged_sequences, unmatchable


@dataclass(frozen=True, eq=False, repr=False, init=False)
class AttentionProblem(ProblemData):
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
        return first._changed(
            chunks=tuple(Chunk.concatenate(group) for group in merged.values()),
            batch=len(problems),
            quadratic=stack_quadratics([p.quadratic for p in problems]),
            regularizer=None,
            parts=tuple(problems),
        )

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
        chunks, order = as_chunks(segments, causal, scale)
        like = chunks[0].A1
        if not all(bool(torch.isfinite(c.B.square().sum())) for c in chunks):
            raise ValueError(
                f"B (the targets) must have a sum of squares within {str(like.dtype)[6:]}; it "
                "overflows.  Rescale the targets."
            )
        quadratic = compiled(regularizer, chunks)
        explicit = any(c.mask.explicit is not None for c in chunks)
        super().__init__(
            chunks=chunks,
            batch=1,
            quadratic=quadratic,
            regularizer=regularizer,
            layout=layout_of(segments, order, shape),
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


def _token_weights(regularizer: Regularizer | None) -> ArrayLike | None:
    return regularizer.w if isinstance(regularizer, TokenWeights) else None
