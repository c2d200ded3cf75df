"""The constraints of the attention SVM, never all at once: tokens, a scan, and chosen pairs.

A pair c = (j, k) of a query j and a key k != t(j) that it may attend to stands for the constraint
f_c . X >= 1 with the feature f_c = a1_j (x) (a2_t(j) - a2_k), d1 x d2.  There are up to n (m - 1)
of them; the scan below finds the most violated one of every query from tiles of the logits
A1 X A2^T, and only chosen pairs become rows of a matrix.  Everything is NumPy in float64, as the
solvers want it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int

from newtention.masks import Mask

TILE = 1 << 22
"""Logits computed at once: 32 MiB."""
_SMALLEST = 1e-140

Pairs = Int[np.ndarray, "c 2"]
"""Rows (query, key)."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Queries, keys, one selected key per query, and which pairs are allowed.

    A1: (n, d1).  A2: (m, d2).  selected: (n,), t(j).  mask: of one sequence.
    """

    A1: Float[np.ndarray, "n d1"]
    A2: Float[np.ndarray, "m d2"]
    selected: Int[np.ndarray, " n"]
    mask: Mask

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
        n, m = len(self.A1), len(self.A2)
        rival, margin = np.zeros(n, np.int64), np.full(n, np.inf)
        projected = self.A1 @ X
        step = max(1, TILE // m)
        for start in range(0, n, step):
            rows = slice(start, min(n, start + step))
            logits = projected[rows] @ self.A2.T
            at, t = np.arange(len(logits)), self.selected[rows]
            own = logits[at, t]
            allowed = self.allowed(rows)
            if allowed is not None:
                logits[~allowed] = -np.inf
            logits[at, t] = -np.inf
            rival[rows] = logits.argmax(1)
            margin[rows] = own - logits[at, rival[rows]]
        return rival, margin

    def allowed(self, rows: slice) -> np.ndarray | None:
        """(rows, m) booleans, or None where every pair is allowed."""
        count = rows.stop - rows.start
        rule = self.mask.rows(rows.start, rows.stop)
        found = rule.allowed(count, len(self.A2), torch.device("cpu"))
        return None if found is None else found[0, 0].expand(count, -1).numpy()

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

    Features lie in (row space of A1) x (span of the differences of A2's rows).  The part of X
    outside changes no constraint and only adds to either norm, so an optimum has none: with
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
    centred = tokens.A2 - tokens.A2.mean(0)  # differences stay, and lose less to cancellation
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
