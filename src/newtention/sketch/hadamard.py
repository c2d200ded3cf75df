"""The fast Walsh-Hadamard transform.

H_1 = [1], H_2N = [[H_N, H_N], [H_N, -H_N]]: H_N has entries +-1, is symmetric, H_N H_N = N I, and
H_N1 (x) H_N2 = H_N1N2.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.notation import Array, ArrayLike
from newtention.sketch.arguments import factors

_CACHED = 1 << 18
"""Elements up to which an array stays in cache.  There passes cost arithmetic, so that radix 8 wins
(4096 x 64, float64, one core: 0.54 ms against 0.68 with radix 16 and 1.0 with radix 2); beyond,
they cost memory traffic, and radix 16 wins (2^20 x 8: 72 ms against 81)."""


def padded(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def hadamard(N: int, like: Tensor) -> Float[Tensor, "N N"]:
    """H_N as a matrix; N is a power of two."""
    H = like.new_ones(1, 1)
    while len(H) < N:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H


def walsh_hadamard(X: ArrayLike) -> Array:
    """H_N X for X padded by rows of zeros to N = 2^k, in O(N log N) per column.

    H_N is a Kronecker product of small Hadamard matrices: one batched matrix product for each.

    Args:
        X: (n, c).

    Returns:
        An array (N, c).

    Raises:
        TypeError, ValueError: X is not a finite real matrix.
    """
    (t,), numpy = factors({"X": (X, None)})
    out = transform(t)
    return out.numpy() if numpy else out


def transform(
    X: Float[Tensor, "n c"], signs: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "N c"]:
    """H_N diag(signs) X with X padded to N = 2^k rows; X is only read."""
    n, N = len(X), padded(len(X))
    if signs is None and n == N:
        return transform_(X.contiguous(), own=False)
    wide = X.new_empty(N, X.shape[1])
    wide[n:] = 0
    if signs is None:
        wide[:n] = X
    else:
        torch.mul(signs.to(X)[:, None], X, out=wide[:n])
    return transform_(wide)


def transform_(X: Float[Tensor, "N c"], own: bool = True) -> Float[Tensor, "N c"]:
    """H_N X for N = 2^k rows, contiguous.  An own X is scratch, and the result may lie in it."""
    N, c = X.shape
    spare, left = None, 1
    for radix in _radices(N, N * c):
        shape = (left, radix, N // (left * radix) * c)
        target = torch.empty_like(X) if spare is None else spare
        torch.matmul(hadamard(radix, X), X.view(shape), out=target.view(shape))
        X, spare, own = target, X if own else None, True
        left *= radix
    return X if own else X.clone()


def _radices(N: int, elements: int) -> list[int]:
    """Powers of two whose product is N, as equal as possible."""
    bits = N.bit_length() - 1
    passes = math.ceil(bits / (3 if elements <= _CACHED else 4))
    return [1 << (bits // passes + (i < bits % passes)) for i in range(passes)]
