"""Extreme eigenvalues and spectral measures of a symmetric H, from products with blocks of vectors.

Extremes: the block Lanczos method with thick restarts (Zhou, Saad, "Block Krylov-Schur method for
large symmetric eigenvalue problems", Numer. Algorithms 47, 2008), the basis kept orthogonal in
full.  A block of k vectors is what finds multiple eigenvalues, which layers have by symmetry: the
Krylov space of one vector holds each eigenvalue once, that of k random vectors up to k times.

Density: stochastic Lanczos quadrature (Lin, Saad, Yang, "Approximating spectral densities of large
matrices", SIAM Review 58, 2016; Ghorbani, Krishnan, Xiao, "An investigation into neural net
optimization via Hessian eigenvalue density", ICML 2019).  Every probe z of random signs gives the
Gauss quadrature of its own spectral measure, whose mean over z is the density of the eigenvalues:
z^T f(H) z / N is exact for polynomials f of degree below twice the number of steps.

Vectors are rows; all small matrices are float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

Product: TypeAlias = Callable[[Tensor], Tensor]
"""H times every row, (r, N) to (r, N)."""

RESTARTS = 30
GROUP_BYTES = 1 << 26
"""Memory for the bases of probes that run side by side, if more than one."""
SUM_BLOCK = 4096
"""Terms summed in the vectors' own precision: longer sums in float32 lose orthogonality (1e-5 at
600,000 unknowns against 1e-8)."""


def lanczos_extremes(
    product: Product,
    like: Float[Tensor, " N"],
    k: int,
    width: int,
    tol: float,
    generator: torch.Generator,
) -> Float[Tensor, "{2*k} N"]:
    """Ritz vectors of the k largest and k smallest eigenvalues, as rows, extreme ones first.

    width: rows of the basis, at least 6 k.
    tol: ends when all residuals are within tol times the largest |Ritz value|; at the latest after
        `RESTARTS`, or when the basis is invariant.
    """
    n, eps = len(like), torch.finfo(like.dtype).eps
    V = like.new_empty(width, n)
    T = torch.zeros(width, width, dtype=torch.float64)
    start = torch.randn(k, n, generator=generator, dtype=torch.float64).to(like)
    block, _ = _next_block(V[:0], start, 0.0)
    size = 0
    for _ in range(RESTARTS + 1):
        while True:
            rows = slice(size, size + len(block))
            size = rows.stop
            V[rows] = block
            W, C = _orthogonalise(V[:size], product(block))
            T[rows, :size] = C.mT  # eigh reads the lower triangle
            values, S = torch.linalg.eigh(T[:size, :size])
            scale = float(values.abs().max())
            block, coupling = _next_block(V[:size], W, 10 * eps * scale)
            wanted = S[:, _ends(size, k)]
            residuals = torch.linalg.vector_norm(coupling @ wanted[rows], dim=0)
            # A tenth is left for rounding, so that the residuals computed afterwards meet tol too.
            if len(block) == 0 or float(residuals.max()) <= 0.9 * tol * scale:
                return wanted.mT.to(like) @ V[:size]
            if size + len(block) > width:
                break
        # Thick restart: twice the wanted Ritz vectors stay; the next block is their residuals'.
        kept = _ends(size, 2 * k)
        V[: 4 * k] = S[:, kept].mT.to(like) @ V[:size]
        T.zero_().diagonal()[: 4 * k] = values[kept]
        size = 4 * k
    return torch.cat([V[:k], V[2 * k : 3 * k]])


def lanczos_quadrature(
    product: Product,
    like: Float[Tensor, " N"],
    probes: int,
    steps: int,
    generator: torch.Generator,
) -> tuple[Float[Tensor, " q"], Float[Tensor, " q"], Float[Tensor, " probes"]]:
    """Gauss quadrature of the spectral measure, averaged over random probes.

    Returns:
        Nodes, weights (they sum to 1), and z^T H z / N of every probe z of random signs, whose
        mean is the trace over N (Hutchinson 1990).
    """
    n = len(like)
    group = min(probes, max(1, GROUP_BYTES // (steps * n * like.element_size())))
    nodes, weights, forms = [], [], []
    for first in range(0, probes, group):
        shape = (min(group, probes - first), n)
        signs = 2.0 * torch.randint(0, 2, shape, generator=generator) - 1.0
        for T in _tridiagonals(product, signs.to(like) / n**0.5, steps):
            values, S = torch.linalg.eigh(T)
            nodes.append(values)
            weights.append(S[0].square() / probes)
            forms.append(T[0, 0])
    return torch.cat(nodes), torch.cat(weights), torch.stack(forms)


def _tridiagonals(
    product: Product, start: Float[Tensor, "r N"], steps: int
) -> list[Float[Tensor, "j j"]]:
    """The Lanczos matrix of every start (unit rows), smaller than steps where it broke down."""
    r, n = start.shape
    eps = torch.finfo(start.dtype).eps
    V = start.new_empty(r, steps, n)
    V[:, 0] = start
    T = torch.zeros(r, steps, steps, dtype=torch.float64)
    sizes = [0] * r
    running = list(range(r))
    for j in range(steps):
        for i, w in zip(list(running), product(V[running, j]), strict=True):
            W, C = _orthogonalise(V[i, : j + 1], w[None])
            T[i, j, : j + 1] = C[:, 0]
            sizes[i] = j + 1
            if j + 1 == steps:
                continue
            block, _ = _next_block(V[i, : j + 1], W, 10 * eps * float(T[i].abs().max()))
            if len(block) == 0:
                running.remove(i)
            else:
                V[i, j + 1] = block[0]
        if not running:
            break
    return [T[i, :j, :j] for i, j in enumerate(sizes)]


def _next_block(
    V: Float[Tensor, "s N"], W: Float[Tensor, "r N"], threshold: float
) -> tuple[Float[Tensor, "c N"], Float[Tensor, "c r"]]:
    """Orthonormal rows orthogonal to V, and their products with W.

    Directions in which W is no longer than the threshold are left out, and those that N dimensions
    have no room for: c <= min(r, N - s).
    """
    Q, R = _orthonormal(W)
    U, s, Vh = torch.linalg.svd(R)
    long = s > threshold
    long[V.shape[1] - len(V) :] = False
    coupling = s[long, None] * Vh[long]
    if not bool(long.any()):
        return W[:0], coupling
    # Normalising a short W magnifies what was left of V in it: take that out as well.
    block, _ = _orthogonalise(V, U[:, long].mT.to(W) @ Q)
    Q, R = _orthonormal(block)
    return Q, R @ coupling


def _orthonormal(W: Float[Tensor, "r N"]) -> tuple[Float[Tensor, "r N"], Float[Tensor, "r r"]]:
    """Orthonormal rows Q and upper triangular R with W = R^T Q, by QR of blocks of columns and
    then of their triangles (Demmel, Grigori, Hoemmen, Langou 2012), which keeps sums short.
    """
    r, n = W.shape
    size = max(r, min(n, SUM_BLOCK))
    padded = torch.nn.functional.pad(W, (0, -n % size))
    local, triangles = torch.linalg.qr(padded.unflatten(1, (-1, size)).permute(1, 2, 0))
    common, R = torch.linalg.qr(triangles.cpu().double().flatten(0, 1))
    Q = local @ common.unflatten(0, (-1, r)).to(W)
    return Q.permute(2, 0, 1).flatten(1)[:, :n], R


def _orthogonalise(
    V: Float[Tensor, "s N"], W: Float[Tensor, "r N"]
) -> tuple[Float[Tensor, "r N"], Float[Tensor, "s r"]]:
    """W without its part along the rows of V, and V W^T; done twice, which is enough (Parlett,
    "The Symmetric Eigenvalue Problem", section 6.9).
    """
    first = _inner(V, W)
    W = W - first.mT.to(W) @ V
    second = _inner(V, W)
    return W - second.mT.to(W) @ V, first + second


def _inner(A: Float[Tensor, "r N"], B: Float[Tensor, "s N"]) -> Float[Tensor, "r s"]:
    """A B^T, blocks of columns summed in float64, on the CPU."""
    count = A.shape[1] // SUM_BLOCK
    bulk = count * SUM_BLOCK
    tail = (A[:, bulk:] @ B[:, bulk:].mT).cpu().double()
    if count == 0:
        return tail
    a, b = (t[:, :bulk].unflatten(1, (count, SUM_BLOCK)).transpose(0, 1) for t in (A, B))
    return (a @ b.mT).cpu().double().sum(0) + tail


def _ends(size: int, k: int) -> Int[Tensor, "{2*k}"]:
    """Positions of the k largest, the largest first, and the k smallest of ascending values."""
    order = torch.arange(size)
    return torch.cat([order.flip(0)[:k], order[:k]])
