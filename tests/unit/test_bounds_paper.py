"""The paper's constants: logarithms against mpmath, bounds against measured values."""

import math

import pytest
import torch
from mpmath import mp, mpf

import newtention as nt
from newtention.bounds.convexity import certifying_ridge, global_sizes
from newtention.bounds.paper import (
    Magnitude,
    Term,
    assumptions,
    basic_functions,
    composed_ridge,
    hessian_bounds,
    lemma_6_1,
    lemma_9_1,
    lemma_9_1_dominance,
    lemma_10_1,
    logit_blocks,
)

F64 = torch.float64


# Logarithms.


def test_arithmetic_equals_mpmath():
    g = torch.Generator().manual_seed(0)
    with mp.workdps(50):
        for _ in range(500):
            x, y = (600 * float(t) for t in torch.rand(2, generator=g, dtype=F64) - 0.5)
            if abs(x - y) > 3 and _ % 2:
                y = x + float(torch.randn(1, generator=g))
            X, Y = mpf(10) ** mpf(x), mpf(10) ** mpf(y)
            a, b = Magnitude(x), Magnitude(y)
            for got, want in (
                (a + b, X + Y),
                (a * b, X * Y),
                (a**3.0, X**3),
                (a**-0.5, X ** mpf(-0.5)),
                (Magnitude.exp(x), mp.exp(mpf(x))),
            ):
                assert abs(got.log10 - mp.log10(want)) <= 1e-12 * (1 + abs(got.log10))
            assert (a < b) == (X < Y)


def test_zero_infinity_and_printing():
    zero, one, inf = Magnitude.of(0.0), Magnitude.of(1.0), Magnitude(math.inf)
    assert zero + one == one + zero == one
    assert zero * one == zero * inf == zero
    assert zero + zero == zero
    assert one + inf == inf + inf == inf
    assert [str(t) for t in (zero, inf, Magnitude(400.5))] == ["0", "inf", "3.2e+400"]
    with pytest.raises(ValueError, match="value must be at least 0"):
        Magnitude.of(-1.0)
    with pytest.raises(ValueError, match="value must be at least 0"):
        Magnitude.of(math.nan)


def test_terms_compose_by_the_product_rule():
    a, b = Term(Magnitude.of(2.0), Magnitude.of(3.0)), Term(Magnitude.of(5.0), Magnitude.of(7.0))
    product, total, multiple = a * b, a + b, a.times(10.0)
    assert 10**product.bound.log10 == pytest.approx(10)
    assert 10**product.lipschitz.log10 == pytest.approx(2 * 7 + 3 * 5)
    assert 10**total.lipschitz.log10 == pytest.approx(10)
    assert 10**multiple.lipschitz.log10 == pytest.approx(30)


def test_composed_constants_equal_mpmath():
    """The whole composition once more, in numbers of 50 digits and by hand."""
    for R, n, m, p in ((4.0, 3.0, 5, 2), (9.5, 64.0, 64, 4), (33.0, 1024.0, 300, 64)):
        given = assumptions(R, R, R, R, R * R, n, m, p)
        with mp.workdps(50):
            r, E, rows, keys, channels = mpf(R), mp.exp(mpf(R) ** 2), mpf(n), mpf(m), mpf(p)
            beta = keys / E
            lf = r * E / beta + keys * r * E**2 / beta**2
            lg = lf * r**2 + r  # gamma, c and f o h
            bound = 16 * r**4
            lip = (
                (lg * r**2 + 2 * r**2 * lg)  # c (f o h)
                + (lg * r**2 + 2 * r**2 * lg + 2 * r**4 * lf)  # c gamma f
                + 2 * (2 * lg * r**2 + 3 * r**2 * lg + 3 * r**4 * lf)  # 2 (gamma + c)(f o h) f
                + 2 * (3 * r**2 * lg + 4 * r**4 * lf)  # 2 gamma c f f
                + (2 * r**2 * lg + 2 * r**4 * lf)  # gamma^2 f f
                + 2 * r**2 * lg  # (f o h)(f o h)
            )
            xy = ((lg + lg + r**2 * lf) + 2 * r**2 * lf) + (2 * lg + 2 * r**2 * (lf + 2 * lf))
            expected = {
                "xx": (rows * channels * r**2 * bound, rows * channels * r**2 * lip),
                "xy": (
                    rows * mp.sqrt(channels) * r**2 * 6 * r**2,
                    rows * mp.sqrt(channels) * r**2 * xy,
                ),
                "yy": (rows * r**2, rows * r**2 * 2 * lf),
            }
            bounds = hessian_bounds(given)
            for name, (norm, lipschitz) in expected.items():
                term = getattr(bounds, name)
                assert abs(term.bound.log10 - mp.log10(norm)) < 1e-10, name
                assert abs(term.lipschitz.log10 - mp.log10(lipschitz)) < 1e-10, name
            whole = expected["xx"][1] + expected["xy"][1]
            assert abs(bounds.whole.lipschitz.log10 - mp.log10(whole)) < 1e-10


# Measured values.  One query j and channel i: s = A_j x, f, h = A3 y_i, ...


def functions(x, y, a, A2, A3, b):
    s = A2 @ (x.view(len(a), -1).T @ a)
    u = s.exp()
    alpha = u.sum()
    f, h = u / alpha, A3 @ y
    gamma = f @ h
    return {
        "u": u,
        "alpha": alpha,
        "1/alpha": 1 / alpha,
        "f": f,
        "h": h,
        "gamma": gamma,
        "c": gamma - b,
        "f o h": f * h,
    }


def logit_matrices(x, y, a, A2, A3, b):
    """The corrected blocks, from their definition: derivatives in the logits and the channel."""
    at = functions(x, y, a, A2, A3, b)
    f, h, gamma, c = (at[name] for name in ("f", "h", "gamma", "c"))
    slope = f * (h - gamma)
    mean = torch.outer(f, slope)
    xx = torch.outer(slope, slope) + c * (torch.diag(slope) - mean - mean.T)
    return xx, torch.outer(slope, f) + c * (torch.diag(f) - torch.outer(f, f))


def instance(seed, R, m=4, d=2):
    """Data and a point within the assumptions; even seeds at their extremes."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=F64)

    share = 1.0 if seed % 2 == 0 else float(torch.rand(1, generator=g)) * 0.999
    a, A2, A3, x, y = randn(d), randn(m, d), randn(m, d), randn(d * d), randn(d)
    if seed % 4 == 0:  # rank one, aligned: logits of R^2 and channels of R^2
        key, value = randn(d), randn(d)
        A2 = torch.outer(torch.eye(m, dtype=F64)[0], key)
        A3 = torch.outer(torch.eye(m, dtype=F64)[seed // 4 % m], value)
        x, y = torch.outer(a, key).flatten() * (-1 if seed % 16 == 8 else 1), value
    A2 = A2 / (a.norm() * torch.linalg.matrix_norm(A2, 2)) * R
    A3 = A3 / torch.linalg.matrix_norm(A3, 2) * R
    # c and gamma - b add up at the extremes.
    b = (-R * R if seed % 4 == 0 else R * R) * share
    return x / x.norm() * R * share, y / y.norm() * R * share, a, A2, A3, torch.tensor(b, dtype=F64)


def log10(value):
    return math.log10(value) if value > 0 else -math.inf


def norm(value):
    return float(torch.linalg.matrix_norm(value, 2)) if value.ndim == 2 else float(value.norm())


@pytest.mark.parametrize("R", [4.0, 6.0, 15.0])
def test_basic_bounds_dominate_and_are_nearly_attained(R, full):
    m = 4
    terms = basic_functions(assumptions(R, R, R, R, R * R, 1.0, m, 1))
    closest = dict.fromkeys(terms, -math.inf)
    steepest = dict.fromkeys(terms, -math.inf)
    for seed in range(2000 if full else 120):
        x, y, *data = instance(seed, R, m)
        values = functions(x, y, *data)
        jacobians = torch.func.jacrev(lambda x, y, d=data: functions(x, y, *d), argnums=(0, 1))(
            x, y
        )
        for name, term in terms.items():
            size = log10(norm(values[name])) - term.bound.log10
            J = torch.cat([t.reshape(values[name].numel(), -1) for t in jacobians[name]], 1)
            slope = log10(norm(J)) - term.lipschitz.log10
            assert size <= 1e-10, (name, seed)
            assert slope <= 1e-10, (name, seed)
            closest[name], steepest[name] = max(closest[name], size), max(steepest[name], slope)
    # Attained up to what the choice of norms costs: u's sqrt(m), the m of alpha and 1/alpha.
    attained = {
        "f": 0.01,
        "h": 0.01,
        "gamma": 0.01,
        "c": 0.01,
        "f o h": 0.01,
        "u": 0.4,
        "alpha": 0.7,
    }
    for name, gap in attained.items():
        assert closest[name] >= -gap, name
    assert steepest["u"] >= -0.01
    assert steepest["h"] >= -0.01
    assert steepest["alpha"] >= -0.4


def test_a_smaller_bound_is_caught():
    """What the check above would say of constants 10 % too small, where attained."""
    R, worst = 4.0, {"c": 0.0, "gamma": 0.0, "h": 0.0}
    for seed in range(0, 40, 4):
        values = functions(*instance(seed, R))
        worst = {name: max(worst[name], norm(values[name])) for name in worst}
    assert worst["c"] > 0.9 * 2 * R**2
    assert worst["gamma"] > 0.9 * R**2
    assert worst["h"] > 0.9 * R**2


def test_logit_blocks_dominate(full):
    R, m = 4.0, 4
    xx, xy = logit_blocks(assumptions(R, R, R, R, R * R, 1.0, m, 1))
    assert 10**xx.bound.log10 == pytest.approx(16 * R**4)
    assert xx.bound < lemma_9_1(R)  # 16 R^4 <= 30 R^8 / 480
    largest = 0.0
    for seed in range(500 if full else 60):
        x, y, *data = instance(seed, R, m)
        at = logit_matrices(x, y, *data)
        jacobians = torch.func.jacrev(lambda x, y, d=data: logit_matrices(x, y, *d), (0, 1))(x, y)
        for value, parts, term in zip(at, jacobians, (xx, xy), strict=True):
            assert log10(norm(value)) <= term.bound.log10
            # The spectral norm of a derivative is at most the Frobenius norm's.
            J = torch.cat([t.reshape(m * m, -1) for t in parts], 1)
            assert log10(norm(J)) <= term.lipschitz.log10
        largest = max(largest, norm(at[0]) / (16 * R**4))
    assert largest > 0.01


def draw(seed, R, n, m, p, d):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=F64)

    A1, A2, A3, B = randn(n, d), randn(m, d), randn(m, d), randn(n, p)
    size = R / (A1.norm(dim=1).max() * torch.linalg.matrix_norm(A2, 2))
    A2, A3 = size * A2, R * A3 / torch.linalg.matrix_norm(A3, 2)
    B = (R * R) * B / B.abs().max()

    def point():
        X, Y = randn(d, d), randn(d, p)
        shares = torch.rand(2, generator=g, dtype=F64)
        return R * shares[0] * X / X.norm(), R * shares[1] * Y / Y.norm()

    return nt.AttentionProblem(A1, A2, A3, B), point


def test_hessian_bounds_dominate_measured_ones(full):
    R, n, m, p, d = 4.0, 3, 5, 2, 2
    bounds = hessian_bounds(assumptions(R, R, R, R, R * R, float(n), m, p))
    for seed in range(300 if full else 20):
        problem, point = draw(seed, R, n, m, p, d)
        first = point()
        second = point()
        if seed % 2:  # a short way: the local slope
            second = tuple(x + 1e-4 * (y - x) for x, y in zip(first, second, strict=True))
        H, K = (nt.hessian(problem, *at) for at in (first, second))
        away = math.hypot(*(float((x - y).norm()) for x, y in zip(first, second, strict=True)))
        for at, other, term in (
            (H.xx, K.xx, bounds.xx),
            (H.xy, K.xy, bounds.xy),
            (H.yy, K.yy, bounds.yy),
            (H.to_dense(), K.to_dense(), bounds.whole),
        ):
            assert log10(norm(at)) <= term.bound.log10
            assert log10(norm(at - other) / away) <= term.lipschitz.log10


def test_assumptions_choose_the_smallest_radius():
    assert assumptions(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3, 1).R == 4.0
    for i, size in enumerate((9.0, 9.0, 9.0, 9.0, 81.0)):
        norms = [1.0] * 5
        norms[i] = size
        given = assumptions(*norms, n=2.5, m=7, p=1)
        assert given.R == 9.0
        assert given.beta.log10 == pytest.approx(math.log10(7) - 81 / math.log(10))
    assert assumptions(*norms, n=2.5, m=7, p=1, fewest=1).beta < given.beta
    better = Magnitude.of(3.0)
    assert assumptions(*norms, n=2.5, m=7, p=1, beta=better).beta == better
    tighter = hessian_bounds(given._replace(beta=better)).xx.lipschitz
    assert tighter < hessian_bounds(given).xx.lipschitz


# Thresholds.


def test_printed_figures():
    assert 10 ** lemma_9_1(4.0).log10 == pytest.approx(30 * 4**8)
    assert 10 ** lemma_9_1_dominance(4.0).log10 == pytest.approx(3000 * 4**8)
    assert 10 ** lemma_10_1(2.0, 0.5).log10 == pytest.approx(8)
    assert lemma_10_1(2.0, 0.0).log10 == math.inf


def test_lemma_10_1_gives_the_curvature():
    problem, point = draw(1, 4.0, 3, 5, 2, 2)
    A3 = problem.chunks[0].A3[0, 0]
    sigma = float(torch.linalg.svdvals(A3)[-1])
    w = math.sqrt(10 ** lemma_10_1(3.0, sigma).log10)
    (A1, A2), B = (
        (problem.chunks[0].A1[0, 0], problem.chunks[0].A2[0, 0]),
        problem.chunks[0].B[0, 0],
    )
    weighted = nt.AttentionProblem(
        A1, A2, A3, B, regularizer=nt.TokenWeights(torch.full((5,), w, dtype=F64))
    )
    yy = nt.hessian(weighted, *point()).yy
    assert float(torch.linalg.eigvalsh(yy)[0]) >= 3.0 * (1 - 1e-9)


def test_lemma_6_1_bounds_block_matrices_and_is_attained():
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        k = int(torch.randint(2, 8, (1,), generator=g))
        M = torch.randn(k, k, generator=g, dtype=F64)
        H = M + M.T + 3 * torch.eye(k, dtype=F64)
        i = int(torch.randint(1, k, (1,), generator=g))
        alpha_1, alpha_2 = (float(torch.linalg.eigvalsh(b)[0]) for b in (H[:i, :i], H[i:, i:]))
        bound = lemma_6_1(alpha_1, alpha_2, norm(H[:i, i:]))
        assert bound <= float(torch.linalg.eigvalsh(H)[0]) + 1e-12
        assert (lemma_6_1(alpha_1, alpha_2, 0.9) > 0) == (
            alpha_1 > 0 and alpha_1 * alpha_2 > 0.81 + 1e-9
        )
    exact = float(torch.linalg.eigvalsh(torch.tensor([[2.0, -1], [-1, 5.0]], dtype=F64))[0])
    assert lemma_6_1(2.0, 5.0, 1.0) == pytest.approx(exact)


def test_composed_ridge_makes_the_hessian_positive():
    R, n, m, p, d = 4.0, 3, 5, 2, 2
    ridge = 10 ** composed_ridge(assumptions(R, R, R, R, R * R, float(n), m, p)).log10
    for seed in range(5):
        problem, point = draw(seed, R, n, m, p, d)
        H = nt.hessian(problem, *point()).to_dense()
        assert float(torch.linalg.eigvalsh(H)[0]) + ridge > 0


def test_against_ours_at_the_design_size():
    """n 64, d 4: more than 10^400 against a ridge of thousands."""
    g = torch.Generator().manual_seed(1)
    A, B = (torch.randn(64, 4, generator=g, dtype=F64) for _ in range(2))
    longest = float(A.norm(dim=1).max())
    given = assumptions(
        longest * norm(A), norm(A), 4.0, 4.0, float(B.abs().max()), n=64.0, m=64, p=4
    )
    bounds = hessian_bounds(given)
    assert bounds.whole.lipschitz.log10 > 400
    radius = (A - A.mean(0)).norm(dim=1).max().expand(64)
    ones = torch.ones(64, dtype=F64)
    sizes = global_sizes(radius[:, None] * A, radius, longest * ones, ones, B)
    ours = certifying_ridge(sizes)
    assert ours < 4000
    assert composed_ridge(given).log10 > math.log10(ours) + 5
    assert lemma_9_1(given.R).log10 > math.log10(ours) + 5
