"""Evaluation beyond float64: arbitrary precision by mpmath, and a fast accurate gradient."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from newtention.certify import pairs as pr
from newtention.certify.penalty_errors import bilinear_form
from newtention.chunks import Chunk
from newtention.layers import AttentionMap, Bilinear
from newtention.problem import AttentionProblem
from newtention.regularizers import Proximity, Ridge, TokenWeights

EXACT_DIGITS = 60
"""Decimal digits of the exact evaluation behind `precise`."""
EXACT_SHARE = 2.0**-60
"""Bounds on float64 errors, times this, bound those of EXACT_DIGITS digits.  60 digits are 150 bits
more than float64 has; the bounds see every magnitude times at least 2^-40 (LARGEST_SHARE); 2^50 is
left for the number of operations and for the formulas, which differ."""
EXACT_WORK = 200_000
"""Multiplications that `small_enough` allows: about a second."""

Numbers = Any
"""A NumPy array of mpf numbers."""


class ExactDerivatives(NamedTuple):
    """Loss, gradient (N,) and Hessian (N, N) as mpf numbers in NumPy object arrays."""

    loss: Any
    gradient: Numbers
    hessian: Numbers
    data_loss: Any
    data_hessian: Numbers
    jacobian: Numbers


def exact_derivatives(
    problem: AttentionProblem,
    layer: Bilinear | AttentionMap,
    theta: Float[Tensor, "1 N"],
    digits: int = 50,
) -> ExactDerivatives:
    """Total loss and derivatives with so many decimal digits, by mpmath; for small problems.

    Sums over rows of J_j^T q_j J_j and of the residual's curvature, from the definitions of
    docs/mathematics.md; no use is made of the float64 code.

    Raises:
        ImportError: mpmath is not installed.
    """
    import mpmath

    layer = bilinear_form(layer)
    with mpmath.workdps(digits):
        x, y = (_numbers(t[0]) for t in layer.unpack(theta))
        n = layer.size
        zero = mpmath.mpf(0)
        loss, jacobian = zero, []
        gradient, hessian = np.full(n, zero), np.full((n, n), zero)
        for chunk in problem.chunks:
            for place in range(chunk.A1.shape[1]):
                loss += _add_sequence(
                    chunk.sequence(place), layer, x, y, gradient, hessian, jacobian, mpmath
                )
        data_loss, data_hessian = loss, hessian.copy()
        for left, right, offset, block in _penalty_terms(problem, layer, x, y, mpmath):
            k = offset.size
            K = np.kron(left, right)
            move = K.dot(offset.reshape(-1))
            loss += offset.reshape(-1).dot(move) / 2
            gradient[block : block + k] += move
            hessian[block : block + k, block : block + k] += K
        return ExactDerivatives(
            loss, gradient, hessian, data_loss, data_hessian, np.stack(jacobian)
        )


def small_enough(problem: AttentionProblem, layer: Bilinear | AttentionMap) -> bool:
    """Whether `exact_derivatives` is a matter of a second, and mpmath is there."""
    rows = sum(chunk.weight.numel() for chunk in problem.chunks)
    keys = max(chunk.A2.shape[2] for chunk in problem.chunks)
    outputs = layer.p or keys
    work = rows * layer.heads * (outputs + 2) * layer.size**2
    work += rows * layer.heads * keys * layer.d2 * (layer.d2 + layer.d3 + outputs)
    return work <= EXACT_WORK and importlib.util.find_spec("mpmath") is not None


def as_floats(exact: ExactDerivatives) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, data loss, gradient, Hessian and its data part, each entry rounded to float64."""

    def rounded(x: Any) -> Tensor:
        return torch.from_numpy(np.asarray(x).astype(np.float64))

    values = (exact.loss, exact.data_loss, exact.gradient, exact.hessian, exact.data_hessian)
    loss, data_loss, gradient, hessian, data_hessian = (rounded(x) for x in values)
    return loss, data_loss, gradient, hessian, data_hessian


def _numbers(t: Tensor) -> Numbers:
    import mpmath

    array = t.double().cpu().numpy()
    return np.vectorize(mpmath.mpf, otypes=[object])(array) if array.size else array.astype(object)


def _add_sequence(
    chunk: Chunk,
    layer: Bilinear,
    x: Numbers,
    y: Numbers,
    gradient: Numbers,
    hessian: Numbers,
    jacobian: list[Numbers],
    mpmath: Any,
) -> Any:
    """Add one sequence's terms in place; returns its loss."""
    n, m = int(chunk.query_lengths[0, 0]), chunk.A2.shape[2]
    if chunk.mask.key_lengths is not None:
        m = int(chunk.mask.key_lengths[0, 0])
    A1, A2, A3, B, q = (
        _numbers(t[0, 0]) for t in (chunk.A1, chunk.A2, chunk.A3, chunk.B, chunk.weight)
    )
    allowed = chunk.allowed
    if allowed is not None:
        allowed = allowed.expand(-1, -1, chunk.A1.shape[2], -1)
    scale, total = mpmath.mpf(chunk.scale), mpmath.mpf(0)
    nx, kx, ky = layer.size_x, layer.d1 * layer.d2, layer.d3 * layer.p
    of_maps = layer.p == 0  # the values are the identity
    if of_maps:
        A3, B = _numbers(torch.eye(m)), B[:, :m]
    p = B.shape[1]
    eye = _numbers(torch.eye(p))
    for j in range(n):
        keys = [k for k in range(m) if allowed is None or bool(allowed[0, 0, j, k])]
        a, r, u = A1[j] * scale, A2[keys], A3[keys]
        C, J, parts = -B[j], np.full((p, layer.size), mpmath.mpf(0)), []
        for h in range(layer.heads):
            s = r.dot(a.dot(x[h]))
            if chunk.bias is not None:
                s = s + _numbers(chunk.bias[0, 0, min(h, chunk.bias.shape[2] - 1), j])[keys]
            e = np.array([mpmath.exp(z) for z in s - max(s)], dtype=object)
            P = e / e.sum()
            v = u if of_maps else u.dot(y[h])
            F, mu, w = P.dot(v), P.dot(r), P.dot(u)
            C = C + F
            centred = r - mu
            rho = centred.T.dot(P[:, None] * (v - F))  # (d2, p)
            J[:, h * kx : (h + 1) * kx] = np.kron(a[:, None], rho).T
            if not of_maps:
                J[:, nx + h * ky : nx + (h + 1) * ky] = np.kron(w[:, None], eye).T
            parts.append((P, v - F, centred, centred.T.dot(P[:, None] * (u - w))))
        weight = q[j]
        total += weight * C.dot(C) / 2
        # Array first: mpf times array makes mpmath print the array before it gives up.
        gradient += C.dot(J) * weight
        hessian += J.T.dot(J * weight)
        jacobian.extend(J * mpmath.sqrt(weight))
        for h, (P, v, r_centred, Q) in enumerate(parts):
            N = r_centred.T.dot((P * v.dot(C))[:, None] * r_centred)
            bx, by = slice(h * kx, (h + 1) * kx), slice(nx + h * ky, nx + (h + 1) * ky)
            hessian[bx, bx] += np.kron(np.outer(a, a), N * weight)
            if of_maps:
                continue
            xy = np.kron(a[:, None], np.kron(Q, C[None, :] * weight))
            hessian[bx, by] += xy
            hessian[by, bx] += xy.T
    return total


def _penalty_terms(
    problem: AttentionProblem, layer: Bilinear, x: Numbers, y: Numbers, mpmath: Any
) -> list[tuple[Numbers, Numbers, Numbers, int]]:
    """(left, right, offset, start) of every term 1/2 <offset, (left (x) right) offset>."""
    h, nx = layer.heads, layer.size_x
    kx, ky = layer.d1 * layer.d2, layer.d3 * layer.p
    regularizer, given = problem.regularizer, problem.quadratic

    def identity(d: int, value: float = 1.0) -> Numbers:
        return _numbers(torch.eye(d)) * mpmath.mpf(value)

    lefts, rights, gram = [], [], identity(layer.d3, 0.0)
    x0, y0 = 0 * x, 0 * y
    if isinstance(regularizer, Ridge):
        lefts, rights = [identity(layer.d1, regularizer.x)], [identity(layer.d2)]
        gram = identity(layer.d3, regularizer.y)
    elif isinstance(regularizer, TokenWeights):
        for chunk in problem.chunks:
            assert chunk.key_weight is not None
            for place in range(chunk.A1.shape[1]):
                tensors = chunk.A1, chunk.A2, chunk.A3, chunk.key_weight
                A1, A2, A3, w = (_numbers(t[0, place]) for t in tensors)
                W = (w * w)[:, None]
                lefts.append(A1.T.dot(A1))
                rights.append(A2.T.dot(W * A2))
                gram = gram + A3.T.dot(W * A3)
    elif isinstance(regularizer, Proximity):
        sums = [identity(d, 0.0) for d in (layer.d1, layer.d2, layer.d3)]
        n = m = 0
        for chunk in problem.chunks:
            n, m = n + int(chunk.query_count()[0]), m + int(chunk.key_count()[0])
            for i, t in enumerate((chunk.A1, chunk.A2, chunk.A3)):
                A = _numbers(t[0].flatten(0, 1))
                sums[i] = sums[i] + A.T.dot(A)
        strength = mpmath.mpf(regularizer.strength)
        lefts, rights, gram = [sums[0] * strength], [sums[1] / m], sums[2] * (strength * n) / m
        assert given.centre_x is not None
        assert given.centre_y is not None
        x0, y0 = _numbers(given.centre_x[0]), _numbers(given.centre_y[0])
    else:
        lefts, rights = list(_numbers(given.left[0])), list(_numbers(given.right[0]))
        gram = _numbers(given.gram[0])
    terms = []
    for i in range(h):
        for left, right in zip(lefts, rights, strict=True):
            terms.append((left, right, x[i] - x0[i], i * kx))
        if ky:
            terms.append((gram, identity(layer.p), y[i] - y0[i], nx + i * ky))
    return terms


def accurate_gradient(
    problem: AttentionProblem, layer: Bilinear | AttentionMap, theta: Float[Tensor, "1 N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], float]:
    """Gradient of the total loss in pairs of float64: (head, tail, share).

    The formulas are those of `newtention.derivatives`, in an arithmetic whose unit roundoff is
    share times that of float64.  A bound on the float64 gradient's error that vanishes with the
    unit roundoff and is convex in it, times share, therefore bounds the error of head + tail.
    NaN where float64's range is exceeded.
    """
    X, Y = (pr.pair(t[0]) for t in bilinear_form(layer).unpack(theta.double()))
    GX, GY = _penalty_gradient(problem, X, Y)
    for chunk in problem.chunks:
        for tile in chunk.tiles(4 * layer.heads * (chunk.A2.shape[2] + layer.d2 + layer.d3)):
            GX_tile, GY_tile = _tile_gradient(tile, X, Y)
            for place in range(tile.A1.shape[1]):
                GX = pr.add(GX, GX_tile[place])
                if GY_tile is not None:
                    GY = pr.add(GY, GY_tile[place])
    hi, lo = (torch.cat([a.flatten(), b.flatten()]) for a, b in zip(GX, GY, strict=True))
    head, tail = pr.two_sum(hi, lo)
    keys = max(chunk.A2.shape[2] for chunk in problem.chunks)
    # The longest sums over tokens: of a tile's rows, and in the regulariser's Gram matrices.
    tokens = max(c.A1.shape[1] * max(c.A1.shape[2], c.A2.shape[2]) for c in problem.chunks)
    return head, tail, pr.roundoff_share(keys, tokens, max(problem.widths))


def _tile_gradient(tile: Chunk, X: pr.Pair, Y: pr.Pair) -> tuple[pr.Pair, pr.Pair | None]:
    """A1^T T A2 and (P A3)^T R of every sequence and head of a tile, with one owner.

    Of maps the first alone: their values are the identity.
    """
    tensors = (tile.A1, tile.A2, tile.A3, tile.B, tile.weight)
    A1, A2, A3, B, q = (pr.pair(t[0].double()) for t in tensors)
    A1 = pr.multiply(A1, pr.pair(torch.full_like(A1.hi, tile.scale)))
    A1, A2, A3 = (t[:, None] for t in (A1, A2, A3))
    S = pr.matmul(pr.matmul(A1, X), A2.T)
    if tile.bias is not None:
        S = pr.add(S, pr.pair(tile.bias[0].double()))
    allowed = tile.allowed
    P = pr.softmax(S, None if allowed is None else allowed[0][:, None])
    V = pr.matmul(A3, Y) if A3.hi.shape[-1] else None
    O = P if V is None else pr.matmul(P, V)
    C = pr.minus(B)
    for h in range(O.hi.shape[1]):
        C = pr.add(C, O[:, h])
    R = pr.multiply(C, q[..., None])[:, None]
    total = pr.matmul(pr.multiply(O, R), pr.pair(torch.ones_like(O.hi[..., :1, :]).mT))
    G = R if V is None else pr.matmul(R, V.T)
    T = pr.multiply(P, pr.add(G, pr.minus(total)))
    GX = pr.matmul(A1.T, pr.matmul(T, A2))
    return GX, None if V is None else pr.matmul(pr.matmul(P, A3).T, R)


def _penalty_gradient(problem: AttentionProblem, X: pr.Pair, Y: pr.Pair) -> tuple[pr.Pair, pr.Pair]:
    """Gradient of the stated regulariser."""
    given, regularizer = problem.quadratic, problem.regularizer
    if given.centre_x is not None and given.centre_y is not None:
        X = pr.add(X, pr.minus(pr.pair(given.centre_x[0].double())))
        Y = pr.add(Y, pr.minus(pr.pair(given.centre_y[0].double())))

    def times(t: pr.Pair, factor: float | pr.Pair) -> pr.Pair:
        if isinstance(factor, float):
            factor = pr.pair(torch.full_like(t.hi, factor))
        return pr.multiply(t, factor)

    def gram(A: pr.Pair) -> pr.Pair:
        return pr.matmul(A.T, A)

    if isinstance(regularizer, Ridge):
        return times(X, float(regularizer.x)), times(Y, float(regularizer.y))
    terms: list[tuple[pr.Pair, pr.Pair]] = []
    grams: list[pr.Pair] = []
    if isinstance(regularizer, TokenWeights):
        for chunk in problem.chunks:
            assert chunk.key_weight is not None
            for place in range(chunk.A1.shape[1]):
                A1, A2, A3 = (pr.pair(t[0, place].double()) for t in (chunk.A1, chunk.A2, chunk.A3))
                w = pr.pair(chunk.key_weight[0, place].double()[:, None])
                terms.append((gram(A1), gram(pr.multiply(A2, w))))
                grams.append(gram(pr.multiply(A3, w)))
    elif isinstance(regularizer, Proximity):
        sums: list[pr.Pair | None] = [None, None, None]
        for chunk in problem.chunks:
            for i, t in enumerate((chunk.A1, chunk.A2, chunk.A3)):
                part, so_far = gram(pr.pair(t[0].flatten(0, 1).double())), sums[i]
                sums[i] = part if so_far is None else pr.add(so_far, part)
        n, m = (float(sum(x)) for x in zip(*_counts(problem), strict=True))
        S1, S2, S3 = sums
        assert S1 is not None
        assert S2 is not None
        assert S3 is not None
        inverse = pr.reciprocal(pr.pair(torch.full_like(S2.hi[:1, :1], m)))
        strength = float(regularizer.strength)
        terms = [(times(S1, strength), times(S2, inverse))]
        grams = [times(times(times(S3, strength), n), inverse)]
    else:
        lefts, rights = given.left[0].double(), given.right[0].double()
        terms = [(pr.pair(a), pr.pair(b)) for a, b in zip(lefts, rights, strict=True)]
        grams = [pr.pair(given.gram[0].double())]
    GX, GY = pr.pair(torch.zeros_like(X.hi)), pr.pair(torch.zeros_like(Y.hi))
    for left, right in terms:
        GX = pr.add(GX, pr.matmul(pr.matmul(left, X), right))
    for G in grams if GY.hi.numel() else ():
        GY = pr.add(GY, pr.matmul(G, Y))
    return GX, GY


def _counts(problem: AttentionProblem) -> list[tuple[float, float]]:
    """Real query and key tokens of every chunk."""
    return [(float(c.query_count()[0]), float(c.key_count()[0])) for c in problem.chunks]
