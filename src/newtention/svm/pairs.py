"""The constraints of the attention SVM, never all at once: tokens, a scan, and chosen pairs.

A pair c = (j, k) of a query j and a key k != t(j) that it may attend to stands for the constraint
f_c . X >= 1 with the feature f_c = a1_j (x) (a2_t(j) - a2_k), d1 x d2.  There are up to n (m - 1)
of them; the scan below finds the most violated one of every query from tiles of the logits
A1 X A2^T, and only chosen pairs become rows of a matrix.  Everything is NumPy in float64, as the
solvers want it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from newtention.masks import Mask

TILE = 1 << 22
"""Logits computed at once: 32 MiB."""
_SMALLEST = 1e-140

Pairs = Int[np.ndarray, "c 2"]
"""Rows (query, key)."""


class Block(NamedTuple):
    """One sequence's rows among all queries and among all keys, and its mask."""

    queries: slice
    keys: slice
    mask: Mask

    def allowed(self, rows: slice) -> np.ndarray | None:
        """(rows, keys) booleans for rows of the block, or None where every pair is allowed."""
        count = rows.stop - rows.start
        rule = self.mask.rows(rows.start, rows.stop)
        found = rule.allowed(count, self.keys.stop - self.keys.start, torch.device("cpu"))
        return None if found is None else found[0, 0].expand(count, -1).numpy()


@dataclass(frozen=True, eq=False)
class Tokens:
    """Queries and keys of all sequences, one selected key per query, and which pairs are allowed.

    A1: (n, d1).  A2: (m, d2).  selected: (n,), t(j), a row of A2.
    blocks: the sequences, in order; a query's rivals are keys of its own.
    """

    A1: Float[np.ndarray, "n d1"]
    A2: Float[np.ndarray, "m d2"]
    selected: Int[np.ndarray, " n"]
    blocks: tuple[Block, ...]

    @cached_property
    def _starts(self) -> Int[np.ndarray, " s"]:
        return np.array([block.queries.start for block in self.blocks], np.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """(d1, d2), the shape of X."""
        return self.A1.shape[1], self.A2.shape[1]

    def scan(
        self, X: Float[np.ndarray, "d1 d2"]
    ) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """For every query the key that comes nearest to the selected one, and by which margin.

        Returns:
            rival: (n,), the allowed key k != t(j) of the largest logit.
            margin: (n,), the selected key's logit minus the rival's; infinite without a rival.
        """
        n = len(self.A1)
        rival, margin = np.zeros(n, np.int64), np.full(n, np.inf)
        projected = self.A1 @ X
        for block in self.blocks:
            first, keys = block.queries.start, self.A2[block.keys]
            step = max(1, TILE // len(keys))
            for start in range(first, block.queries.stop, step):
                rows = slice(start, min(block.queries.stop, start + step))
                logits = projected[rows] @ keys.T
                at, t = np.arange(len(logits)), self.selected[rows] - block.keys.start
                own = logits[at, t]
                allowed = block.allowed(slice(rows.start - first, rows.stop - first))
                if allowed is not None:
                    logits[~allowed] = -np.inf
                logits[at, t] = -np.inf
                best = logits.argmax(1)
                rival[rows] = block.keys.start + best
                margin[rows] = own - logits[at, best]
        return rival, margin

    def blocks_of(self, queries: Sequence[int] | Int[np.ndarray, " q"]) -> Int[np.ndarray, " q"]:
        """The number of every query's sequence."""
        return np.searchsorted(self._starts, queries, side="right") - 1

    def rivals(self, j: int) -> Bool[np.ndarray, " m"]:
        """The other keys that query j may attend to, among all keys."""
        block = self.blocks[self.blocks_of([j])[0]]
        row = j - block.queries.start
        allowed = block.allowed(slice(row, row + 1))
        found = np.zeros(len(self.A2), bool)
        found[block.keys] = True if allowed is None else allowed[0]
        found[self.selected[j]] = False
        return found

    def sides(self, pairs: Pairs) -> tuple[Float[np.ndarray, "c d1"], Float[np.ndarray, "c d2"]]:
        """The two factors of the features: a1_j and a2_t(j) - a2_k."""
        j, k = pairs[:, 0], pairs[:, 1]
        return self.A1[j], self.A2[self.selected[j]] - self.A2[k]

    def lengths(self, pairs: Pairs) -> Float[np.ndarray, " c"]:
        """||f_c||_F, or the smallest number worth dividing by."""
        left, right = self.sides(pairs)
        product = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
        return np.maximum(product, _SMALLEST)

    def features(self, pairs: Pairs) -> Float[np.ndarray, "c _"]:
        """The rows vec(f_c), d1 d2 wide."""
        left, right = self.sides(pairs)
        return (left[:, :, None] * right[:, None, :]).reshape(len(pairs), -1)

    def margins(self, pairs: Pairs, X: Float[np.ndarray, "d1 d2"]) -> Float[np.ndarray, " c"]:
        """The margins f_c . X of the pairs."""
        left, right = self.sides(pairs)
        return ((left @ X) * right).sum(1)

    def gram(self, pairs: Pairs) -> Float[np.ndarray, "c c"]:
        """K[c, c'] = f_c . f_c', without the features."""
        left, right = self.sides(pairs)
        return (left @ left.T) * (right @ right.T)

    def combine(self, pairs: Pairs, y: Float[np.ndarray, " c"]) -> Float[np.ndarray, "d1 d2"]:
        """sum_c y_c f_c, as a matrix."""
        left, right = self.sides(pairs)
        return left.T @ (y[:, None] * right)


@dataclass(frozen=True, eq=False)
class Reduced:
    """The same problem in the coordinates that matter.

    Features lie in (row space of A1) x (span of the differences of keys of one sequence).  The part
    of X outside changes no constraint and only adds to either norm, so an optimum has none: with
    orthonormal bases U1, U2 of the two spaces, X = U1 Z U2^T / scale and ||X|| = ||Z|| / scale.

    tokens: scaled by powers of two to entries of at most 1, then projected.
    U1: (d1, r1), or None for the identity.  U2: (d2, r2) likewise.
    scale: f_c of the problem given is `scale` times that of `tokens`.
    """

    tokens: Tokens
    U1: Float[np.ndarray, "d1 r1"] | None
    U2: Float[np.ndarray, "d2 r2"] | None
    scale: float

    def back(self, Z: Float[np.ndarray, "r1 r2"]) -> Float[np.ndarray, "d1 d2"]:
        """The X of a Z."""
        left = Z if self.U1 is None else self.U1 @ Z
        return (left if self.U2 is None else left @ self.U2.T) / self.scale

    def forth(self, X: Float[np.ndarray, "d1 d2"]) -> Float[np.ndarray, "r1 r2"]:
        """The Z of an X, its part outside the spaces left out."""
        left = X if self.U1 is None else self.U1.T @ X
        return (left if self.U2 is None else left @ self.U2) * self.scale


def reduce(tokens: Tokens) -> Reduced:
    """Scale and project; directions with no more than rounding in them are dropped."""
    a = _power_of_two(tokens.A1)
    # Differences stay, and lose less to cancellation.
    centred = np.concatenate([tokens.A2[b.keys] - tokens.A2[b.keys].mean(0) for b in tokens.blocks])
    b = _power_of_two(centred)
    A1, U1 = _project(tokens.A1 / a)
    A2, U2 = _project(centred / b)
    return Reduced(replace(tokens, A1=A1, A2=A2), U1, U2, a * b)


def _power_of_two(A: np.ndarray) -> float:
    """The one just above the largest entry: to divide by it is exact."""
    largest = float(np.abs(A).max(initial=0.0))
    return float(np.ldexp(1.0, np.frexp(largest)[1])) if largest else 1.0


def _project(A: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Coordinates in an orthonormal basis of the row space, and the basis; None if it is all."""
    _, s, Vt = np.linalg.svd(A, full_matrices=False)
    keep = max(1, int((s > max(A.shape) * np.finfo(float).eps * s.max(initial=0.0)).sum()))
    if keep == A.shape[1]:
        return A, None
    basis = np.ascontiguousarray(Vt[:keep].T)
    return A @ basis, basis
