"""The curvature of the paper's regulariser on X, inverted exactly or from a sketch.

R_x = sum_s (A1^T A1) (x) (A2^T W^2 A2) is the same for every head and at every point.  It is never
inverted as a Gram matrix where one sequence gives it: with A1 = U1 S1 V1^T and W A2 = U2 S2 V2^T,

    R_x^-1 G = root (root^T G),   root = (V1 S1^-1) (x) (V2 S2^-1),

two thin decompositions, O(n d^2), instead of a factor of the d^2 x d^2 matrix.  Several sequences
have no such form: R_x is summed and decomposed, O(d^6).

A sketch replaces the Gram matrix of A1 (x) W A2, sequence by sequence, by that of S (A1 (x) W A2).
In the coordinates of `root` the exact one is the identity, so that eigenvalues of the sketched one
are the distortion of the sketch on these data: computed, not trusted.

Directions that no token shows stay as they are.  All of it is in float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.chunks import Chunk
from newtention.problem import AttentionProblem
from newtention.sketch.kinds import find_kind
from newtention.sketch.sizes import size_after_transform, size_for

SketchName = Literal["tensor-srht", "leverage", "none"]
EPSILON, DELTA = 0.25, 0.05
"""Distortion that a sketch's default size is proved to keep, and the probability that it fails."""


class SequenceTokens(NamedTuple):
    """One sequence: its chunk, and whitened tokens with a zero column for each missing rank.

    queries: U1, without the scale.  keys: U2; the key token itself is U2 / w.
    left, right: V1 S1^-1 and V2 S2^-1.
    """

    chunk: Chunk
    queries: Float[Tensor, "n r1"]
    keys: Float[Tensor, "m r2"]
    left: Float[Tensor, "d1 r1"]
    right: Float[Tensor, "d2 r2"]


@dataclass(frozen=True, eq=False)
class TokenMetric:
    """R_x or a sketch of it.

    sequences: of the problem.
    root: dense (D, r) for several sequences, None for one, whose tokens hold it in factors.
    factor: lower Cholesky factor of the sketched Gram matrix in the coordinates of the root; None
        without a sketch, and for one of too few rows, which is singular.
    spectrum: its least and largest eigenvalue; (1, 1) without a sketch, from 0 if it is singular.
    rows: of the sketch, all sequences; 0 without one.
    """

    sequences: tuple[SequenceTokens, ...]
    root: Float[Tensor, "D r"] | None
    factor: Float[Tensor, "r r"] | None
    spectrum: tuple[float, float]
    rows: int

    @classmethod
    def of(
        cls,
        problem: AttentionProblem,
        sketch: SketchName = "none",
        size: int | None = None,
        seed: int = 0,
    ) -> TokenMetric:
        """Of one problem under TokenWeights.

        size: rows of the sketch for each sequence.  By default those that are proved to keep the
        distortion below EPSILON but with probability DELTA, and no more than there are pairs.
        """
        sequences = tuple(_sequences(problem))
        root = None if len(sequences) == 1 else _dense_root(sequences)
        if sketch == "none":
            return cls(sequences, root, None, (1.0, 1.0), 0)
        gram, rows = 0.0, 0
        for i, tokens in enumerate(sequences):
            sketched = _sketched(tokens, root, sketch, size, seed + i)
            gram, rows = gram + sketched.mT @ sketched, rows + len(sketched)
        assert isinstance(gram, Tensor)
        if not len(gram):
            return cls(sequences, root, None, (1.0, 1.0), rows)
        values = torch.linalg.eigvalsh(gram)
        least, most = float(values[0]), float(values[-1])
        if not least > len(gram) * torch.finfo(gram.dtype).eps * most:
            return cls(sequences, root, None, (0.0, most), rows)
        return cls(sequences, root, torch.linalg.cholesky(gram), (least, most), rows)

    def whitening(self) -> Float[Tensor, "D r"]:
        """W with W W^T the inverse of what `solve` inverts, dense."""
        W = self.root
        if W is None:
            only = self.sequences[0]
            W = torch.kron(_seen(only.left), _seen(only.right))
        if self.factor is None:
            return W
        return torch.linalg.solve_triangular(self.factor, W.mT, upper=False).mT

    def solve(self, G: Float[Tensor, "h d1 d2"]) -> Float[Tensor, "h d1 d2"]:
        """The inverse times a matrix for each head; on the complement of directions unseen."""
        g = G.double()
        if self.root is not None:
            W = self._inner(g.flatten(1) @ self.root) @ self.root.mT
            return W.view_as(G).to(G.dtype)
        left, right = _seen(self.sequences[0].left), _seen(self.sequences[0].right)
        W = self._inner((left.mT @ g @ right).flatten(1))
        return (left @ W.view(len(G), left.shape[1], -1) @ right.mT).to(G.dtype)

    def _inner(self, W: Float[Tensor, "h r"]) -> Float[Tensor, "h r"]:
        """The inverse in the coordinates of the root."""
        return W if self.factor is None else torch.cholesky_solve(W.mT, self.factor).mT


def metric_bytes(
    problem: AttentionProblem, sketch: SketchName, size: int | None, seed: int = 0
) -> int:
    """Predicted peak bytes while a TokenMetric is made; arguments as in `TokenMetric.of`.

    The default size depends on the tokens, so they are decomposed here as well.
    """
    d1, d2, _, _ = problem.widths
    D, several = d1 * d2, len(problem.layout.queries) > 1
    pairs = zip(problem.layout.queries, problem.layout.keys, strict=True)
    elements = 4 * sum(n * d1 + m * d2 for n, m in pairs) + 4 * D * D * several
    if sketch != "none":
        rows = size
        if rows is None:
            found = enumerate(_sequences(problem))
            rows = max(_size(tokens, sketch, None, seed + i) for i, tokens in found)
        elements += 4 * D * D + (1 + 2 * several) * D * rows
    return 8 * elements


def _sequences(problem: AttentionProblem) -> Iterator[SequenceTokens]:
    for chunk in problem.chunks:
        assert chunk.key_weight is not None
        for place in range(chunk.weight.shape[1]):
            one = chunk.sequence(place)
            assert one.key_weight is not None
            queries, left = _whitened(one.A1[0, 0])
            keys, right = _whitened(one.key_weight[0, 0, :, None] * one.A2[0, 0])
            yield SequenceTokens(one, queries, keys, left, right)


def _whitened(A: Float[Tensor, "n d"]) -> tuple[Float[Tensor, "n r"], Float[Tensor, "d r"]]:
    """U and V S^-1 of A = U S V^T, zero for singular values that are rounding."""
    cut = max(A.shape) * torch.finfo(A.dtype).eps
    U, sigma, Vh = torch.linalg.svd(A.double(), full_matrices=False)
    known = sigma > cut * sigma[0]
    inverse = torch.where(known, 1 / sigma.where(known, torch.ones_like(sigma)), 0.0)
    return U * known, Vh.mT * inverse


def _seen(root: Float[Tensor, "d r"]) -> Float[Tensor, "d k"]:
    """Without its zero columns, which come last."""
    return root[:, : int((root != 0).any(0).sum())]


def _dense_root(sequences: Sequence[SequenceTokens]) -> Float[Tensor, "D r"]:
    """R_x^(-1/2) on the range of R_x."""
    R = sum(torch.kron(*_grams(tokens)) for tokens in sequences)
    assert isinstance(R, Tensor)
    values, vectors = torch.linalg.eigh(R)
    known = values > len(R) * torch.finfo(R.dtype).eps * values[-1]
    return vectors[:, known] * values[known].rsqrt()


def _grams(tokens: SequenceTokens) -> tuple[Tensor, Tensor]:
    """A1^T A1 and A2^T W^2 A2."""
    chunk = tokens.chunk
    assert chunk.key_weight is not None
    A1 = chunk.A1[0, 0].double()
    A2 = (chunk.key_weight[0, 0, :, None] * chunk.A2[0, 0]).double()
    return A1.mT @ A1, A2.mT @ A2


def _sketched(
    tokens: SequenceTokens, root: Tensor | None, kind: str, size: int | None, seed: int
) -> Float[Tensor, "rows r"]:
    """S (A1 (x) W A2) in the coordinates of the root."""
    U1, U2 = _bases(tokens)
    if not (U1.shape[1] and U2.shape[1]):
        return U1.new_zeros(0, 0 if root is None else root.shape[1])
    n, m = len(U1), len(U2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a size beyond all pairs was asked for
        distribution = find_kind(kind)(n, m, _size(tokens, kind, size, seed), seed % (1 << 32))
    if root is None:
        return torch.as_tensor(distribution.apply(U1, U2))
    chunk = tokens.chunk
    assert chunk.key_weight is not None
    A1, A2 = chunk.A1[0, 0, :n].double(), chunk.A2[0, 0, :m].double()
    weighted = chunk.key_weight[0, 0, :m, None].double() * A2
    return torch.as_tensor(distribution.apply(A1, weighted)) @ root


def _bases(tokens: SequenceTokens) -> tuple[Float[Tensor, "n r1"], Float[Tensor, "m r2"]]:
    """Orthonormal bases of A1's and W A2's columns, without padding."""
    n, m = int(tokens.chunk.query_lengths[0, 0]), int(tokens.chunk.key_count()[0])
    return _seen(tokens.queries)[:n], _seen(tokens.keys)[:m]


def _size(tokens: SequenceTokens, kind: str, size: int | None, seed: int) -> int:
    """Rows: those asked for, or those that are proved to do, at most one for each pair."""
    if size is not None:
        return size
    U1, U2 = _bases(tokens)
    if not (U1.shape[1] and U2.shape[1]):
        return 0
    if kind == "tensor-srht":
        rows = size_after_transform(U1, U2, EPSILON, DELTA, seed % (1 << 32))
    else:
        rows = size_for(kind, EPSILON, DELTA, d1=U1.shape[1], d2=U2.shape[1])
    return min(rows, len(U1) * len(U2))
