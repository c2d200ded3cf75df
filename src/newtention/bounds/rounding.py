"""Bounds that hold in spite of rounding: dot products, softmax, eigenvalues, solves.

Model: every operation on float64 numbers satisfies fl(a op b) = (a op b)(1 + delta) + eta with
|delta| <= UNIT and |eta| <= TINY (underflow; TINY also covers hardware that flushes subnormal
numbers to zero).  Nothing is assumed about the order in which a sum or a matrix product is
evaluated, nor about fused multiply-adds, which only omit roundings.  Arguments called `error` are
proved bounds; infinite ones are allowed and give infinite results, never NaN.

Sources: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. 2002, chapter 3 (gamma_n)
and Theorem 10.3; Rump, Verification of positive definiteness, BIT 46 (2006).  Proofs:
docs/certificates/rounding.md.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

UNIT = 2.0**-53
"""Unit roundoff of float64."""
TINY = 2.0**-1022
"""Smallest normal float64 number."""
SMALL = 200
"""Rows up to which all eigenvalues are computed where one is wanted."""
BLOCK = 256
"""Columns of a block of L L^T."""
EXP_ERROR = 8 * UNIT
"""Allowed relative error of exp; measured at most 2 UNIT for torch's and the C library's."""


Number = TypeVar("Number", float, Tensor)


def gamma(count: int, unit: float = UNIT) -> float:
    """gamma_n = n u / (1 - n u), rounded upward; infinite where n u >= 1.

    A product of n factors (1 + delta_i)^(+-1), |delta_i| <= u, differs from 1 by at most gamma_n
    (Higham 2002, Lemma 3.1), so a dot product of length n in any order has an error of at most
    gamma_n |x|.|y|.
    """
    relative = count * unit
    return relative / (1.0 - relative) * (1.0 + 8.0 * UNIT) if relative < 1.0 else math.inf


def upward(value: Number, count: int) -> Number:
    """Upper bound of a number whose nonnegative terms were evaluated with `count` roundings.

    The computed value is the exact one times at least (1 - u)^count, less at most count TINY; and
    (1 - u)^-count <= 1 + gamma_count.
    """
    return value * (1.0 + gamma(count + 3)) + count * TINY


def downward(value: Number, count: int) -> Number:
    """Lower bound of a number whose nonnegative terms were evaluated with `count` roundings."""
    return value * (1.0 - gamma(count + 3)) - count * TINY


def softmax_error(
    logit_error: Float[Tensor, "*rows"], spread: Float[Tensor, "*rows"], keys: int
) -> Float[Tensor, "*rows"]:
    """kappa with |log(p_k / computed p_k)| <= kappa for each weight p_k of a row.

    logit_error: bound on the errors of the row's logits.  spread: bound on their distances from the
    row's maximum.  More exactly |computed p_k - p_k| <= p_k expm1(kappa) + 4 TINY exp(kappa), so
    weights lost to underflow are included.

    Proof: the computed exp(s_k - max) is the exact one times exp(theta_k) (1 + e_k), |theta_k| <=
    logit_error + u spread_k and |e_k| <= EXP_ERROR; a spread beyond 746 underflows.  The computed
    sum is off by the same factors, averaged, and by keys - 1 roundings; the division, or the
    product with the reciprocal, costs two more.
    """
    each = logit_error + UNIT * spread.clamp(max=746.0) + EXP_ERROR * (1.0 + 2.0 * EXP_ERROR)
    return upward(2.0 * each + gamma(keys + 3), 8)


def norm_upper(A: Tensor) -> float:
    """Upper bound of the Euclidean norm of all entries (Frobenius for a matrix)."""
    if A.numel() == 0:
        return 0.0
    norm = float(torch.linalg.vector_norm(A))
    if 1e-140 < norm < 1e140:
        return upward(norm, A.numel() + 4)  # squares below 1e-308 are lost: nothing beside 1e-280
    largest = float(A.abs().max())
    if largest == 0.0 or not math.isfinite(largest):
        return 0.0 if largest == 0.0 else math.inf
    # Scaled: squares neither overflow nor, where they count, underflow.
    return upward(float((A / largest).square().sum().sqrt()) * largest, A.numel() + 4)


def smallest_eigenvalue_lower(
    H: Float[Tensor, "n n"],
    error: float = 0.0,
    estimate: float | None = None,
    margin: float = 0.0,
) -> float:
    """Proved lower bound of lambda_min of every symmetric matrix within `error` of H.

    error: bound on the spectral norm of the difference.  estimate: of lambda_min; found when
    absent, to a few per cent for large positive definite matrices.  margin: what may be given away
    below a rough estimate, to save trials.  Minus infinity where nothing can be said.

    Proof: let B = fl(S - s I), S the symmetric part of H, and R any matrix.  As R^T R has no
    negative eigenvalue, lambda_min(S) >= s - ||B - R^T R|| - u max |B_ii|.  With R the computed
    Cholesky factor the norm is small: it is evaluated, with its rounding error, at most
    gamma_(n+1) || |R|^T |R| ||.  Rump (2006) bounds it a priori by gamma tr(S), which has to trust
    the factorisation's order of operations; here the shift alone decides, so it is found by trial.
    """
    symmetric = torch.equal(H, H.mT)
    S = H if symmetric else 0.5 * (H + H.mT)
    size = norm_upper(S)
    if not math.isfinite(size) or not math.isfinite(error):
        return -math.inf
    if not symmetric:
        error += upward(UNIT * size, 4)
    n = S.shape[0]
    if estimate is None:
        estimate, rough = smallest_eigenvalue_estimate(S)
        margin = max(margin, rough)
    below = max(margin, 4.0 * UNIT * n**0.5 * size + TINY)
    for _ in range(12):
        shift = estimate - below
        B = S.clone()
        B.diagonal().sub_(shift)
        L, info = torch.linalg.cholesky_ex(B)
        if int(info) == 0 and bool(torch.isfinite(L).all()):
            rounding = UNIT * float(B.diagonal().abs().max()) * (1.0 + 4.0 * UNIT)
            loss = upward(_defect(B, L) + rounding + error, 8)
            return shift - loss - UNIT * (abs(shift) + loss) * 4.0
        below *= 8.0
    return -math.inf


def _defect(B: Float[Tensor, "n n"], L: Float[Tensor, "n n"]) -> float:
    """Upper bound of ||B - L L^T||_2, B symmetric and L lower triangular.

    Only the lower triangle is formed, by blocks of columns: a sixth of the whole product.
    """
    n = B.shape[0]
    square = 0.0
    for i in range(0, n, BLOCK):
        j = min(n, i + BLOCK)
        rows = B[i:, i:j] - L[i:, :j] @ L[i:j, :j].mT
        square += squared(norm_upper(rows[: j - i])) + 2.0 * squared(norm_upper(rows[j - i :]))
    a = L.abs()
    # || |L| |L|^T || is at most its largest row sum and at most its trace.
    sums = upward(float((a @ a.sum(0)).max()), 2 * n + 2)
    trace = squared(norm_upper(L))
    difference = math.sqrt(square) * (1.0 + 2.0 * UNIT)
    return upward(difference + gamma(n + 1) * min(sums, trace) + n * n * TINY, 8 + n)


def largest_eigenvalue_upper(
    H: Float[Tensor, "n n"],
    error: float = 0.0,
    estimate: float | None = None,
    margin: float = 0.0,
) -> float:
    """Proved upper bound of lambda_max of every symmetric matrix within `error` of H."""
    if estimate is not None:
        estimate = -estimate
    return -smallest_eigenvalue_lower(-H, error, estimate, margin)


def smallest_eigenvalue_estimate(S: Float[Tensor, "n n"], steps: int = 30) -> tuple[float, float]:
    """An unproved estimate of lambda_min, and by how much it may be too large.

    Inverse iteration on a large positive definite matrix, which costs a Cholesky factor rather than
    an eigen-decomposition (ten times that); all eigenvalues of any other.
    """
    n = S.shape[0]
    L, failed = torch.linalg.cholesky_ex(S) if n > SMALL else (S, torch.ones(()))
    if int(failed) != 0:
        return float(torch.linalg.eigvalsh(S)[0]), 0.0
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(n, 1, generator=generator, dtype=S.dtype).to(S.device)
    for _ in range(steps):
        v = torch.cholesky_solve(v / v.norm(), L)
    if not bool(torch.isfinite(v).all()):
        return float(torch.linalg.eigvalsh(S)[0]), 0.0
    estimate = float((v * (S @ v)).sum() / v.square().sum())
    return estimate, 0.01 * abs(estimate)


def largest_eigenvalue_estimate(H: Float[Tensor, "n n"], steps: int = 16) -> float:
    """Power iteration on a positive semidefinite matrix: usually within a per cent, unproved."""
    v = H[:, int(H.diagonal().argmax())]
    for _ in range(steps):
        size = v.norm()
        if not bool(size > 0.0) or not bool(torch.isfinite(size)):
            return 0.0
        v = H @ (v / size)
    return float(v.norm())


def spectral_norm_upper(A: Float[Tensor, "n m"], error: float = 0.0) -> float:
    """Proved upper bound of the spectral norm of every matrix within `error` of A.

    The least of ||A||_F, (||A||_1 ||A||_inf)^(1/2) and lambda_max(A^T A)^(1/2), the last from the
    computed Gram matrix, whose error is at most gamma_n || |A|^T |A| || <= gamma_n ||A||_F^2.
    """
    if A.shape[0] < A.shape[1]:
        A = A.mT
    frobenius = norm_upper(A)
    if frobenius == 0.0 or not math.isfinite(frobenius):
        return frobenius + error
    # A power of two, so that scaling is exact and the Gram matrix neither over- nor underflows.
    power = 2.0 ** -math.frexp(frobenius)[1] if 1e-290 < frobenius < 1e290 else 1.0
    A = A * power
    n, m = A.shape
    a = A.abs()
    sums = upward(float((a.sum(0).max() * a.sum(1).max()).sqrt()), n + m + 2)
    size = norm_upper(A)
    gram = upward(gamma(n) * size * size + n * m * TINY, 4)
    product = A.mT @ A
    if m > SMALL:
        estimate = largest_eigenvalue_estimate(product)
        largest = largest_eigenvalue_upper(product, gram, estimate, 0.01 * estimate)
    else:
        largest = largest_eigenvalue_upper(product, gram)
    best = min(size, sums, upward(math.sqrt(max(largest, 0.0)), 2))
    return upward(best / power + error, 4)


def solve_norm_upper(
    H: Float[Tensor, "n n"],
    g: Float[Tensor, " n"],
    eigenvalue: float,
    hessian_error: float = 0.0,
    gradient_error: float = 0.0,
    x: Float[Tensor, " n"] | None = None,
) -> float:
    """Proved upper bound of ||H*^-1 g*||, H* and g* the exact ones within their errors.

    eigenvalue: proved lower bound of lambda_min(H*); not positive gives infinity.
    x: approximate solution of H x = g; by Cholesky when absent.

    Proof: H*^-1 g* = x + H*^-1 (g* - H* x), and ||H*^-1|| <= 1 / eigenvalue.
    """
    if not eigenvalue > 0.0:
        return math.inf
    x = _solution(H, g) if x is None else x
    correction = _residual_upper(H, g, x, hessian_error, gradient_error) / eigenvalue
    return _number(upward(norm_upper(x) + correction, 4))


def _solution(H: Float[Tensor, "n n"], g: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Approximate; zero where the factorisation fails, which is a valid if poor choice."""
    L, info = torch.linalg.cholesky_ex(H)
    if int(info) != 0:
        return torch.zeros_like(g)
    x = torch.cholesky_solve(g[:, None], L)[:, 0]
    return x if bool(torch.isfinite(x).all()) else torch.zeros_like(g)


def _residual_upper(
    H: Float[Tensor, "n n"], g: Float[Tensor, " n"], x: Float[Tensor, " n"], dH: float, dg: float
) -> float:
    """Upper bound of ||g* - H* x||."""
    rounding = gamma(len(g) + 1) * (H.abs() @ x.abs() + g.abs())
    rounding = norm_upper(upward(rounding, 2 * len(g)))
    size = norm_upper(x)
    moved = dH * size if size > 0.0 else 0.0
    return _number(upward(norm_upper(g - H @ x) + rounding + moved + dg, 6))


def squared(x: float) -> float:
    """x x; Python's x ** 2 raises an exception where it overflows."""
    return x * x


def _number(bound: float) -> float:
    """NaN, which arises only from infinite errors, as infinity."""
    return math.inf if math.isnan(bound) else bound


def _infinite_if_undefined(bound: Tensor) -> Tensor:
    return torch.where(torch.isnan(bound), torch.inf, bound)
