"""Rounding bounds: against exact and 60-digit arithmetic, on attained worst cases."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch

from newtention.bounds import balls, rounding
from newtention.bounds.rounding import (
    EXP_ERROR,
    UNIT,
    gamma,
    largest_eigenvalue_upper,
    norm_upper,
    smallest_eigenvalue_lower,
    softmax_error,
    solve_norm_upper,
    spectral_norm_upper,
    upward,
)

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(g, *shape):
    return torch.randn(shape, generator=g, dtype=F64)


def exactly(t):
    """A tensor as a NumPy array of fractions."""
    return np.vectorize(Fraction, otypes=[object])(t.numpy())


def mpf(t):
    return np.vectorize(mpmath.mpf, otypes=[object])(t.numpy())


def mp_norm(a):
    return mpmath.sqrt(sum(x * x for x in a.reshape(-1)))


@pytest.fixture(autouse=True)
def sixty_digits():
    with mpmath.workdps(60):
        yield


# Sums and products.


def sequential(x, y):
    total = 0.0
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        total += a * b
    return total


def worst_dot(n):
    """1 + u + ... + u, left to right: each addition rounds down to 1, n - 1 times u is lost."""
    x = torch.full((n,), UNIT, dtype=F64)
    x[0] = 1.0
    return x, torch.ones(n, dtype=F64)


def dot_error(x, y):
    return abs(Fraction(sequential(x, y)) - sum(exactly(x) * exactly(y)))


@pytest.mark.parametrize("n", [2, 10, 1000])
def test_the_worst_dot_product_nearly_attains_gamma(n):
    x, y = worst_dot(n)
    error, size = dot_error(x, y), Fraction(float(x @ y))
    assert error == (n - 1) * Fraction(UNIT)
    assert error <= gamma(n) * size
    assert error > (0.99 * (n - 1) / n) * gamma(n) * size


def test_a_smaller_gamma_is_caught():
    x, y = worst_dot(1000)
    assert dot_error(x, y) > Fraction(0.9 * gamma(1000))


def test_gamma_is_infinite_where_it_has_no_meaning():
    assert gamma(2**53) == math.inf
    assert gamma(2**52) >= 1.0
    assert gamma(0) == 0.0


def test_upward_covers_a_chain_of_roundings():
    x, exact = 1.0, Fraction(1)
    step = 1.0 + 3 * 2.0**-52
    for count in range(1, 200):
        x, exact = x * step, exact * Fraction(step)
        assert Fraction(upward(x, count)) >= exact
        assert Fraction(rounding.downward(x, count)) <= exact


def test_norms_at_every_scale():
    g = generator()
    for power in (-300, -160, -80, 0, 80, 150):
        A = randn(g, 5, 7) * 10.0**power
        A[0, 0] *= 1e-30
        exact = mp_norm(mpf(A))
        assert exact <= norm_upper(A) <= exact * (1 + mpmath.mpf(10) ** -13) + 1e-305
        rows = balls.norms_upper(A)
        for row, bound in zip(mpf(A), rows.tolist(), strict=True):
            assert mp_norm(row) <= bound <= mp_norm(row) * (1 + mpmath.mpf(10) ** -13) + 1e-305
    assert norm_upper(torch.zeros(3)) == 0.0
    assert norm_upper(torch.tensor([1.0, math.nan])) == math.inf
    assert balls.norms_upper(torch.tensor([[math.nan, 1.0], [0.0, 0.0]])).tolist() == [math.inf, 0]


# Softmax.


def test_exp_keeps_its_allowance(full):
    g = generator()
    count = 50_000 if full else 1500
    x = -746.0 * torch.rand(count, generator=g, dtype=F64) ** 3
    x[:50] = torch.linspace(0, 1e-3, 50, dtype=F64)
    worst = 0
    for size in (count, 7, 1):  # vectorised, remainder and scalar code
        for part in x.split(size)[:200]:
            for a, e in zip(part.tolist(), part.exp().tolist(), strict=True):
                exact = mpmath.exp(a)
                assert abs(e - exact) <= EXP_ERROR * exact + rounding.TINY
                worst = max(worst, abs(e - exact) / exact if exact > 1e-290 else 0)
    for a in x.tolist():
        assert abs(math.exp(a) - mpmath.exp(a)) <= EXP_ERROR * mpmath.exp(a) + rounding.TINY
    assert worst > 0.5 * UNIT  # the test can see errors
    assert worst < 2.5 * UNIT  # what the constant's docstring says, and a margin of 4


def mp_softmax(s):
    e = [mpmath.exp(x) for x in s]
    return [x / sum(e) for x in e]


@pytest.mark.parametrize("size", [1.0, 30.0, 500.0])
def test_softmax_error_holds_and_is_nearly_attained(size, full):
    g = generator(int(size))
    closest = 0
    for i in range(400 if full else 30):
        m = int(torch.randint(2, 40, (), generator=g))
        s = size * randn(g, m) / 3
        if i % 2:  # two equal large keys: the error of one acts on the other in full
            s[0] = s[1] = s.max()
        error = 10.0 ** float(torch.randint(-12, -1, (), generator=g)) * torch.ones((), dtype=F64)
        signs = torch.where(torch.arange(m) == 0, 1.0, -1.0).double()
        exact = mp_softmax((mpf(s) + mpf(signs) * mpmath.mpf(float(error))).tolist())
        spread = s.max() - s.min()
        kappa = float(softmax_error(error, spread, m))
        for p, q in zip(s.softmax(0).tolist(), exact, strict=True):
            assert abs(p - q) <= q * mpmath.expm1(kappa) + 4 * rounding.TINY * mpmath.exp(kappa)
            if p > 1e-250:
                closest = max(closest, abs(mpmath.log(q / p)) / kappa)
    assert closest > 0.85  # so that 15 % less would be caught


# Eigenvalues.


def singular_integers(g, n, rank):
    """A symmetric integer matrix, positive semidefinite of the given rank, exact in float64."""
    F = torch.randint(-9, 10, (n, rank), generator=g).double()
    return F @ F.T


def test_eigenvalue_bounds_of_exactly_singular_matrices(full):
    g = generator(3)
    naive = 0
    for i in range(300 if full else 40):
        n = int(torch.randint(2, 30, (), generator=g))
        H = singular_integers(g, n, max(1, n - 1 - i % 3))
        bound = smallest_eigenvalue_lower(H)
        assert bound <= 0.0
        assert bound >= -1e-11 * float(H.trace()) - 1e-300
        naive += float(torch.linalg.eigvalsh(H)[0]) > 0.0
        # The shifted matrix is exact, too, and so is its smallest eigenvalue.
        assert smallest_eigenvalue_lower(H + 64.0 * torch.eye(n, dtype=F64)) <= 64.0
        assert largest_eigenvalue_upper(-H) >= 0.0
    assert naive > 0  # eigvalsh is no bound


def test_eigenvalue_bounds_against_sixty_digits(full):
    g = generator(4)
    for i in range(100 if full else 12):
        n = 2 + i % 5
        scale = 10.0 ** (6 * torch.rand(n, generator=g, dtype=F64) - 3)
        H = randn(g, n, n) * scale[:, None]
        H = (H @ H.T) * (-1) ** i
        H = 0.5 * (H + H.T)
        error = 1e-3 if i % 3 == 0 else 0.0
        values = mpmath.eigsy(mpmath.matrix(H.tolist()), eigvals_only=True)
        low, high = min(values) - error, max(values) + error
        size = float(H.norm())
        assert low - 1e-12 * size <= smallest_eigenvalue_lower(H, error) <= low
        assert high <= largest_eigenvalue_upper(H, error) <= high + 1e-12 * size


def test_eigenvalue_bounds_count_the_given_error():
    H = torch.diag(torch.tensor([1.0, 2.0], dtype=F64))
    assert smallest_eigenvalue_lower(H, 0.25) <= 0.75
    assert smallest_eigenvalue_lower(H, 0.25) > 0.75 - 1e-14
    assert smallest_eigenvalue_lower(H, math.inf) == -math.inf
    assert smallest_eigenvalue_lower(H * math.nan) == -math.inf
    # A useless estimate costs trials and, where it is too low, sharpness; never the truth.
    for estimate in (-1e9, 0.5, 1.0, 1.5, 1e9, math.nan):
        assert smallest_eigenvalue_lower(H, estimate=estimate) <= 1.0
    skew = torch.tensor([[1.0, 1e-3], [-1e-3, 2.0]], dtype=F64)
    assert smallest_eigenvalue_lower(skew) <= 1.0


def test_rough_estimates_with_a_margin():
    H = singular_integers(generator(5), 40, 60)
    top = float(torch.linalg.eigvalsh(H)[-1])
    estimate = rounding.largest_eigenvalue_estimate(H)
    assert 0.9 * top <= estimate <= top * (1 + 1e-12)
    assert top <= largest_eigenvalue_upper(H, 0.0, estimate, 0.01 * estimate) <= 1.15 * top


def test_spectral_norms():
    g = generator(6)
    hadamard = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=F64)
    H16 = torch.kron(torch.kron(hadamard, hadamard), torch.kron(hadamard, hadamard))
    for scale in (1.0, 1e-200, 1e150):
        assert 4.0 * scale <= spectral_norm_upper(H16 * scale) <= 4.0 * scale * (1 + 1e-12)
    outer = torch.outer(torch.tensor([3.0, 4.0]), torch.tensor([5.0, 12.0, 0.0])).double()
    assert 65.0 <= spectral_norm_upper(outer) <= 65.0 * (1 + 1e-14)
    for shape in ((1, 1), (3, 8), (40, 7)):
        A = randn(g, *shape)
        bound = spectral_norm_upper(A, 1e-3)
        norm = float(torch.linalg.matrix_norm(A, 2)) + 1e-3
        assert norm * (1 - 1e-13) <= bound <= norm * (1 + 1e-11)
    assert spectral_norm_upper(torch.zeros(2, 3, dtype=F64)) == 0.0
    assert spectral_norm_upper(torch.full((2, 3), math.nan, dtype=F64)) == math.inf


# Solves.


def hilbert(n):
    return 1.0 / (torch.arange(n)[:, None] + torch.arange(n) + 1).double()


def mp_solve(H, g):
    return mpmath.lu_solve(mpmath.matrix(H.tolist()), mpmath.matrix(g.tolist()))


def test_solve_norms_against_sixty_digits():
    g = generator(7)
    for i in range(20):
        n = 2 + i % 7
        if i % 2:
            H = hilbert(n)
        else:
            A = randn(g, n, n)
            H = A @ A.T + 1e-6 * torch.eye(n, dtype=F64)
            H = 0.5 * (H + H.T)
        vector = randn(g, n)
        low = smallest_eigenvalue_lower(H)
        assert low > 0
        exact = mp_solve(H, vector)
        size = mpmath.norm(exact)
        assert size <= solve_norm_upper(H, vector, low) <= size * 1.01
        # Any approximate solution gives a bound.
        for x in (torch.zeros(n, dtype=F64), randn(g, n)):
            assert size <= solve_norm_upper(H, vector, low, x=x)


def test_solve_norms_cover_the_worst_of_the_allowed_errors():
    g = generator(8)
    for _ in range(20):
        n = int(torch.randint(2, 6, (), generator=g))
        A = randn(g, n, n)
        H = A @ A.T + 0.1 * torch.eye(n, dtype=F64)
        H = 0.5 * (H + H.T)
        vector = randn(g, n)
        values, vectors = torch.linalg.eigh(H)
        dH, dg = 0.3 * float(values[0]), 0.2 * float(vector.norm())
        low = smallest_eigenvalue_lower(H, dH)
        bound = solve_norm_upper(H, vector, low, dH, dg)
        v = vectors[:, 0] * (vectors[:, 0] @ vector).sign()
        near = H - 0.999 * dH * torch.outer(v, v)
        x = torch.linalg.solve(near, vector + dg * v)
        assert float(x.norm()) <= bound
        assert float(x.norm()) > solve_norm_upper(H, vector, low)  # leaving errors out is caught


def test_solve_norms_without_a_positive_eigenvalue():
    H, vector = torch.eye(2, dtype=F64), torch.ones(2, dtype=F64)
    for low in (0.0, -1.0, -math.inf, math.nan):
        assert solve_norm_upper(H, vector, low) == math.inf
    assert solve_norm_upper(H, vector, 1.0, math.inf) == math.inf
    assert solve_norm_upper(H, vector * math.nan, 1.0) == math.inf


# Balls.


def dual_radius(points, passes=500):
    """A lower bound of the least enclosing radius: the variance under any weights (duality)."""
    centre, counts = points.mean(0), torch.zeros(len(points), dtype=F64)
    for i in range(1, passes):
        at = int((points - centre).square().sum(1).argmax())
        counts[at] += 1.0
        centre = centre + (points[at] - centre) / (i + 1)
    w = counts / counts.sum()
    return float((w @ (points - w @ points).square().sum(1)).sqrt())


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_balls_contain_their_points_and_are_nearly_minimal(d, offset):
    g = generator(d)
    points = randn(g, 3, 12, d) + offset
    real = torch.arange(12) < torch.tensor([12, 7, 1])[:, None]
    centre, radius = balls.enclosing_ball(points, real, 200)
    for i in range(3):
        exact = mpf(points[i, real[i]]) - mpf(centre[i])
        assert max(mp_norm(row) for row in exact) <= float(radius[i])
    allowed = real[:, None] & (torch.rand(3, 4, 12, generator=g) < 0.5)
    allowed[:, :, 0] = True
    rows = balls.row_radii(points, allowed, 30)
    for i in range(3):
        least = dual_radius(points[i, real[i]])
        assert least * (1 - 1e-9) <= radius[i] <= 1.1 * least + 1e-9 * offset + 1e-300
        for j in range(4):
            chosen = points[i, allowed[i, j]]
            least = dual_radius(chosen, 100)
            assert least * (1 - 1e-9) <= rows[i, j] <= 1.25 * least + 1e-6 * offset
            if len(chosen) == 1:
                assert rows[i, j] == 0.0


def test_row_radii_of_equal_and_of_extreme_points():
    equal = torch.ones(1, 4, 3, dtype=F64)
    allowed = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    assert (balls.row_radii(equal, allowed) < 1e-300).all()
    for scale in (1e-200, 1e200):
        points = scale * randn(generator(9), 1, 4, 3)
        rows = balls.row_radii(points, allowed)[0]
        pairs = torch.cdist(points[0] / scale, points[0] / scale) * (scale / 2)
        for j in range(4):
            assert rows[j] >= float(pairs[: j + 1, : j + 1].max()) * (1 - 1e-12)
    assert balls.row_largest(torch.tensor([[1.0, 3.0, 2.0, 5.0]]), allowed).tolist() == [
        [1.0, 3.0, 3.0, 5.0]
    ]


def test_half_the_radius_is_caught():
    points = randn(generator(10), 1, 30, 3)
    radius = float(balls.enclosing_ball(points, torch.ones(1, 30, dtype=torch.bool))[1])
    assert dual_radius(points[0]) > 0.9 * radius
