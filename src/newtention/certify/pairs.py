"""Arithmetic beyond float64: numbers as unevaluated sums of two float64 numbers, in tensors.

Sums and products of pairs use error-free transformations (Dekker 1971; Knuth; Joldes, Muller,
Popescu 2017).  Matrix products use splitting: the factors are cut into slices of so few bits that
products of slices are exact in float64, whatever the order of summation (Ozaki, Ogita, Oishi, Rump,
Numerical Algorithms 59, 2012); so their speed is that of ordinary products.

Errors, relative to the magnitudes of the operands: at most 2^-100 for sums and products, 2^-90 for
exp; for a matrix product of inner length k at most k 2^-100 |A| |B| plus 16 k^2 2^(-53 - 3 bits)
times the largest entry of the row of A and of the column of B, see `slice_bits`.  Gradual underflow
is assumed.
"""

from __future__ import annotations

import decimal
import math
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

SPLITTER = 2.0**27 + 1.0
STEPS = 4096
"""exp is tabulated at multiples of 1 / STEPS; four steps beyond it a Taylor series takes over."""


class Pair(NamedTuple):
    """The number hi + lo, |lo| <= u |hi|."""

    hi: Tensor
    lo: Tensor

    @property
    def T(self) -> Pair:
        """Transposed."""
        return Pair(self.hi.mT, self.lo.mT)

    def __getitem__(self, index) -> Pair:  # noqa: ANN001 - anything a tensor can be indexed with
        return Pair(self.hi[index], self.lo[index])


def pair(hi: Tensor) -> Pair:
    """A float64 tensor as a pair."""
    return Pair(hi, torch.zeros_like(hi))


def two_sum(a: Tensor, b: Tensor) -> Pair:
    """a + b exactly (Knuth)."""
    s = a + b
    t = s - a
    return Pair(s, (a - (s - t)) + (b - t))


def quick_sum(a: Tensor, b: Tensor) -> Pair:
    """a + b exactly where |a| >= |b| (Dekker)."""
    s = a + b
    return Pair(s, b - (s - a))


def two_product(a: Tensor, b: Tensor) -> Pair:
    """a b exactly, unless it underflows (Dekker, Veltkamp)."""
    p = a * b
    s, t = SPLITTER * a, SPLITTER * b
    ah, bh = s - (s - a), t - (t - b)
    al, bl = a - ah, b - bh
    return Pair(p, ((ah * bh - p) + ah * bl + al * bh) + al * bl)


def add(x: Pair, y: Pair) -> Pair:
    """x + y."""
    s = two_sum(x.hi, y.hi)
    return quick_sum(s.hi, s.lo + (x.lo + y.lo))


def minus(x: Pair) -> Pair:
    """-x."""
    return Pair(-x.hi, -x.lo)


def multiply(x: Pair, y: Pair) -> Pair:
    """x y."""
    p = two_product(x.hi, y.hi)
    return quick_sum(p.hi, p.lo + (x.hi * y.lo + x.lo * y.hi))


def reciprocal(x: Pair) -> Pair:
    """1 / x, by one Newton step from float64."""
    r = 1.0 / x.hi
    p = two_product(r, x.hi)
    return quick_sum(r, r * (((1.0 - p.hi) - p.lo) - r * x.lo))


def slice_bits(length: int) -> int:
    """Bits of a slice, such that sums of `length` products of slices are exact."""
    return (53 - math.ceil(math.log2(max(length, 1)))) // 2


def matmul(A: Pair, B: Pair) -> Pair:
    """A B, for batches of matrices."""
    bits = slice_bits(A.hi.shape[-1])
    (A1, A2, A3), rest_A = _slices(A.hi, bits, -1)
    (B1, B2, B3), rest_B = _slices(B.hi, bits, -2)
    exact = [A1 @ B1, A1 @ B2, A2 @ B1, A1 @ B3, A2 @ B2, A3 @ B1]
    rest_B = rest_B + B.lo
    small = A1 @ rest_B + A2 @ (B3 + rest_B) + A3 @ (B2 + (B3 + rest_B)) + (rest_A + A.lo) @ B.hi
    hi, lo = exact[0], small
    for part in exact[1:]:
        hi, error = two_sum(hi, part)
        lo = lo + error
    return two_sum(hi, lo)


def _slices(A: Tensor, bits: int, dim: int) -> tuple[list[Tensor], Tensor]:
    """Three slices and the rest, with one power of two for each row (dim -1) or column (-2)."""
    parts = []
    for _ in range(3):
        exponent = torch.frexp(A.abs().amax(dim, keepdim=True)).exponent
        # torch.ldexp overflows beyond float32's exponents.
        grid = 1.5 * torch.exp2((exponent + (52 - bits)).to(A.dtype))
        part = (A + grid) - grid
        parts.append(part)
        A = A - part
    return parts, A


@cache
def _table(count: int, steps: int) -> tuple[Tensor, Tensor]:
    """exp(-i / steps) for i < count as a pair, from decimal arithmetic."""
    with decimal.localcontext() as context:
        context.prec, context.Emin = 60, -(10**6)
        exact = [(decimal.Decimal(-i) / steps).exp() for i in range(count)]
        hi = [float(x) for x in exact]
        lo = [float(x - decimal.Decimal(h)) for x, h in zip(exact, hi, strict=True)]
    return torch.tensor(hi, dtype=torch.float64), torch.tensor(lo, dtype=torch.float64)


def exp(x: Pair) -> Pair:
    """The exponential of numbers up to 2^-14, zero below -745."""
    tiny = x.hi < -745.0
    x = Pair(x.hi.masked_fill(tiny, 0.0), x.lo.masked_fill(tiny, 0.0))
    place = torch.round(x.hi * -STEPS).nan_to_num(0.0).clamp(min=0.0)
    # Exact: place / STEPS is within a factor of two of -x, or x is below half a step.
    r, low = quick_sum(x.hi + place / STEPS, x.lo)
    # exp(r) - 1 for |r| <= 2^-13: the square is needed beyond float64, the cube is not.
    square = two_product(r, 0.5 * r)
    cubic = r * r * r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720 + r / 5040))))
    z = two_sum(r, square.hi)
    z = quick_sum(z.hi, z.lo + (square.lo + (low + r * low) + cubic))
    place = place.long()
    whole, part = place // STEPS, place % STEPS
    device = x.hi.device
    fine = Pair(*(t.to(device)[part] for t in _table(STEPS, STEPS)))
    coarse = Pair(*(t.to(device)[whole] for t in _table(747, 1)))
    result = multiply(coarse, add(fine, multiply(fine, z)))
    return Pair(result.hi.masked_fill(tiny, 0.0), result.lo.masked_fill(tiny, 0.0))


def softmax(logits: Pair, allowed: Bool[Tensor, "*shape"] | None) -> Pair:
    """Softmax along the last axis; zero where not allowed."""
    hi = logits.hi if allowed is None else logits.hi.masked_fill(~allowed, -torch.inf)
    largest = hi.amax(-1, keepdim=True)
    # The leading part of the largest, so a shifted logit may be positive, by its tail.
    shifted = add(logits, pair(-largest))
    if allowed is not None:
        shifted = Pair(*(t.masked_fill(~allowed, -torch.inf) for t in shifted))
    e = exp(shifted)
    total = matmul(e, pair(torch.ones_like(e.hi[..., :1, :]).mT))
    return multiply(e, reciprocal(total))


def roundoff_share(keys: int, rows: int, width: int) -> float:
    """t such that a bound on float64 errors, times t, bounds those of the same formulas in pairs.

    The bound must see each product A B through |A| |B| plus 2^-20 / sqrt(width) times the largest
    entries of row and column, and sums over rows through Frobenius norms; then t u is the unit
    roundoff of pair arithmetic: products of length k are within k t u of such magnitudes, and exp
    within 8 t u.
    """

    def log2(number: float) -> int:
        return math.ceil(math.log2(number))

    inner, root = max(keys, width), log2(width**0.5)
    over_keys = 24 + log2(inner) + root - 3 * slice_bits(inner)
    over_rows = 4 + log2(rows) + root - 3 * slice_bits(rows)
    return 2.0 ** max(over_keys, over_rows, -38)
