"""Proved errors of an evaluation: against 100 digits, on ordinary and extreme problems."""

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
import torch

import newtention as nt
from newtention import zoo
from newtention.bounds.rounding import UNIT, smallest_eigenvalue_lower, solve_norm_upper
from newtention.certify import pairs, row_errors
from newtention.certify.evaluation import evaluate_point
from newtention.certify.precise import (
    accurate_gradient,
    as_floats,
    exact_derivatives,
    small_enough,
)
from newtention.layers import Bilinear
from newtention.weights import as_weights
from tests.cases import CASES
from tests.checks import require_close

F64 = torch.float64
DIGITS = 100


@pytest.fixture(autouse=True)
def enough_digits():
    with mpmath.workdps(DIGITS):
        yield


def mpf(t):
    return np.vectorize(mpmath.mpf, otypes=[object])(torch.as_tensor(t).double().numpy())


def frobenius(a):
    return mpmath.sqrt(sum(x * x for x in np.asarray(a).reshape(-1)))


def spectral(a):
    """Spectral norm to float64's relative accuracy, whatever the size of the entries."""
    size = frobenius(a)
    return np.linalg.norm((a / size).astype(float), 2) * size if size else size


def require_within(what, error, bound):
    if not error <= bound:
        raise AssertionError(f"{what}: off by {mpmath.nstr(error, 3)}, proved {bound:.3g}")
    return float(error / mpmath.mpf(bound)) if error else 0.0


def check_errors(what, point, exact):
    """Every proved error holds; returns the largest ratio of an error to its bound."""
    H, D = (mpf(t) for t in (point.hessian, point.data_hessian))
    penalty = exact.hessian - exact.data_hessian
    ratios = [
        require_within(f"{what}: {name}", error, bound)
        for name, error, bound in (
            ("loss", abs(mpmath.mpf(point.loss) - exact.loss), point.loss_error),
            ("data loss", abs(point.data_loss - exact.data_loss), point.data_loss_error),
            ("gradient", frobenius(mpf(point.gradient) - exact.gradient), point.gradient_error),
            ("Hessian", spectral(H - exact.hessian), point.hessian_error),
            ("data Hessian", spectral(D - exact.data_hessian), point.data_hessian_error),
            (
                "penalty Hessian",
                spectral(mpf(point.penalty_hessian) - penalty),
                point.penalty_hessian_error,
            ),
        )
    ]
    # The reference norm itself has an error of a few u.
    require_within(f"{what}: Jacobian", spectral(exact.jacobian) * (1 - 1e-13), point.jacobian_norm)
    return max(ratios)


def evaluated(problem, X, Y, **options):
    w = as_weights(problem, X, Y)
    return evaluate_point(problem, w.layer, w.theta, **options), w


# The case table.


def test_case_table(full):
    chosen = [(c, d) for c in CASES for d in (F64, torch.float32)]
    for case, dtype in chosen if full else chosen[::9]:
        problem = case.problem(dtype)
        point, w = evaluated(problem, *case.point(dtype))
        exact = exact_derivatives(problem, w.layer, w.theta, DIGITS)
        check_errors(case.name, point, exact)
        size = float(spectral(exact.hessian))
        assert point.hessian_error < 2e-11 * size, case.name
        assert point.jacobian_norm < 1.02 * float(spectral(exact.jacobian)) + 1e-300, case.name


def test_many_digits_agree_with_autograd(full):
    for case in CASES if full else CASES[3::6]:
        w = as_weights(case.problem(), *case.point())
        exact = exact_derivatives(w.problem, w.layer, w.theta, DIGITS)
        loss, _, gradient, hessian, _ = as_floats(exact)
        for got, want in zip((loss, gradient, hessian), case.oracle, strict=True):
            require_close(case.name, got, want, 1e-10)


@pytest.mark.parametrize("name", ["ragged", "two heads", "token weights", "proximity, heads"])
def test_rounding_the_data_to_float32_is_caught(name):
    """The bounds are tight enough to see that the problem is another one."""
    (case,) = (c for c in CASES if c.name == name)
    problem = case.problem()
    point, w = evaluated(problem, *case.point())
    nudge = 1.0 + 2.0**-30
    moved = exact_derivatives(problem, w.layer, w.theta * nudge, DIGITS)
    with pytest.raises(AssertionError, match="proved"):
        check_errors(name, point, moved)


# Extreme problems.


def extreme(seed):
    """A small problem that is bad for rounding, and a point: see the kinds below."""
    g = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=g))

    def randn(*shape):
        return torch.randn(shape, generator=g, dtype=F64)

    n, m, h = integer(1, 6), integer(1, 7), integer(1, 3)
    d1, d2, d3, p = (integer(1, 4) for _ in range(4))
    A1, A2, A3 = randn(n, d1), randn(m, d2), randn(m, d3)
    kind = integer(0, 7)
    if kind == 0:  # tiny or huge
        size = 10.0 ** integer(-8, 9)
        A1, A2, A3 = A1 * size, A2 * size, A3 * size
    if kind == 1:  # tiny and huge side by side
        for A in (A1, A2, A3):
            A *= 10.0 ** torch.randint(-8, 9, (len(A), 1), generator=g).double()
    if kind == 2:  # cancellation: large means
        A2, A3 = A2 + 10.0 ** integer(0, 8), A3 + 10.0 ** integer(0, 8)
    if kind == 3:  # nearly equal tokens
        A2, A3 = A2[:1] + 1e-8 * A2, A3[:1] + 1e-8 * A3
    if kind == 4:  # equal keys
        A2 = A2[torch.randint(m, (m,), generator=g)]
    X, Y = randn(h, d1, d2), randn(h, d3, p)
    if integer(0, 4) == 0:
        Y = Y * 10.0 ** integer(-8, 9)
    largest = (0.0, 0.1, 3.0, 30.0, 500.0, 1e4)[integer(0, 6)]
    X = X * (largest / max(float((A1 @ x @ A2.T).abs().max()) for x in X))
    options = {}
    mask = integer(0, 4)
    if mask == 1:
        options["mask"] = "causal"
    if mask == 2:
        allowed = torch.rand(n, m, generator=g) < 0.6
        allowed[torch.arange(n), torch.randint(m, (n,), generator=g)] = True
        options["mask"] = allowed
    if integer(0, 3) == 0:
        options["bias"] = randn(n, m) * 10.0 ** integer(-1, 3)
    if integer(0, 3) == 0:
        options["scale"] = 10.0 ** integer(-2, 3)
    if integer(0, 3) == 0:
        options["query_weights"] = torch.rand(n, generator=g).double() + 0.01
    regularizer = (
        None,
        nt.Ridge(x=0.3, y=1e-9),
        nt.TokenWeights(randn(m)),
        nt.Proximity((randn(h, d1, d2), randn(h, d3, p)), 0.7),
    )[integer(0, 4)]
    F = nt.predict(nt.AttentionProblem(A1, A2, A3, torch.zeros(n, p).double(), **options), X, Y)
    noise = 0.0 if integer(0, 3) == 0 else float(F.abs().max()) * 10.0 ** integer(-12, 2)
    problem = nt.AttentionProblem(
        A1, A2, A3, F + noise * randn(n, p), regularizer=regularizer, **options
    )
    layer = Bilinear(h, d1, d2, d3, p)
    return problem, layer, layer.pack(X[None], Y[None])


def test_extreme_problems(full):
    largest = 0.0
    for seed in range(3000) if full else (*range(25), 191, 3049):
        problem, layer, theta = extreme(seed)
        point = evaluate_point(problem, layer, theta)
        exact = exact_derivatives(problem, layer, theta, DIGITS)
        largest = max(largest, check_errors(f"seed {seed}", point, exact))
        head, tail, share = accurate_gradient(problem, layer, theta)
        error = frobenius(mpf(head) + mpf(tail) - exact.gradient)
        require_within(f"seed {seed}: pairs", error, share * point.gradient_error)
    assert largest > 0.2  # in some of them, bounds a fifth as large would not hold


def test_the_rounding_terms_are_needed(monkeypatch):
    """With roundings forgotten, some extreme problem shows it."""
    monkeypatch.setattr(row_errors, "gamma", lambda count: 0.02 * UNIT)
    monkeypatch.setattr(row_errors, "softmax_error", lambda error, spread, keys: 0.02 * error)
    caught = 0
    for seed in (*range(30), 191):
        problem, layer, theta = extreme(seed)
        point = evaluate_point(problem, layer, theta)
        exact = exact_derivatives(problem, layer, theta, DIGITS)
        try:
            check_errors(f"seed {seed}", point, exact)
        except AssertionError:
            caught += 1
    assert caught > 0


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize(
    ("tokens", "x", "y"),
    [
        (1.0, 1e200, 1.0),
        (1.0, 1e18, 1.0),
        (1.0, 1.0, 1e200),
        (1e160, 1.0, 1.0),
        (1e100, 1e-200, 1e-100),
        (1e-200, 1.0, 1.0),
        (1e-300, 1e-300, 1e-300),
    ],
)
def test_beyond_the_range_of_float64_bounds_are_infinite(tokens, x, y, precise):
    g = torch.Generator().manual_seed(0)
    A = tokens * torch.randn(5, 3, generator=g, dtype=F64)
    B = torch.randn(5, 2, generator=g, dtype=F64)
    X = x * torch.randn(3, 3, generator=g, dtype=F64)
    Y = y * torch.randn(3, 2, generator=g, dtype=F64)
    problem = nt.AttentionProblem(A, A, A, B, mask="causal", regularizer=nt.Ridge(x=0.1, y=0.1))
    point, w = evaluated(problem, X, Y, precise=precise)
    for part in (point, point.rows):
        for name, value in vars(part).items():
            if isinstance(value, float | torch.Tensor):
                assert not bool(torch.isnan(torch.as_tensor(value)).any()), name
    low = smallest_eigenvalue_lower(point.hessian, point.hessian_error)
    eta = solve_norm_upper(
        point.hessian, point.gradient, low, point.hessian_error, point.gradient_error
    )
    assert not math.isnan(low)
    assert not math.isnan(eta)
    if x <= 1.0 and tokens <= 1.0 and y <= 1.0:
        check_errors("range", point, exact_derivatives(problem, w.layer, w.theta, 400))
    else:
        assert math.isinf(point.hessian_error)


# Rows.


def rows_of(problem):
    """(sequence chunk, row, allowed keys) of every real row, in the order of the quantities."""
    for chunk in problem.chunks:
        for place in range(chunk.A1.shape[1]):
            c = chunk.sequence(place)
            n, m = c.A1.shape[2], c.A2.shape[2]
            allowed = c.mask.allowed(n, m, c.A1.device)
            if allowed is None:
                allowed = torch.ones(1, 1, n, m, dtype=torch.bool)
            for j in range(int(c.query_lengths[0, 0])):
                yield c, j, allowed.expand(1, 1, n, m)[0, 0, j]


def check_rows(problem, point, X, Y):
    heads_X, heads_Y = (t if t.ndim == 3 else t[None] for t in (X.double(), Y.double()))
    rows = point.rows
    count = 0
    for i, (c, j, allowed) in enumerate(rows_of(problem)):
        count += 1
        a1, keys, values = c.A1[0, 0, j].double(), c.A2[0, 0, allowed], c.A3[0, 0, allowed]
        keys, values = keys.double(), values.double()
        norm = float(c.scale * a1.norm())
        assert norm <= rows.query_norms[i] * (1 + 1e-15)
        assert rows.query_norms[i] <= norm * (1 + 1e-12) + 1e-300
        for radius, points in ((rows.rho[i] / norm if norm else 0.0, keys), (rows.rho3[i], values)):
            # Half the diameter from below; the distance from the mean from above.
            spread = float(torch.cdist(points, points).max())
            mean = float((points - points.mean(0)).norm(dim=1).max())
            assert spread / 2 * (1 - 1e-6) <= radius <= mean * (1 + 1e-6) + 1e-6
        assert rows.m3[i] >= float(values.norm(dim=1).max()) * (1 - 1e-15)
        assert rows.m3[i] <= float(values.norm(dim=1).max()) * (1 + 1e-12) + 1e-300
        assert rows.weight[i] == c.weight[0, 0, j]
        r = -c.B[0, 0, j].double()
        for h in range(len(heads_X)):
            s = c.scale * (a1 @ heads_X[h]) @ keys.T
            if c.bias is not None:
                s = s + c.bias[0, 0, min(h, c.bias.shape[2] - 1), j, allowed].double()
            r = r + s.softmax(0) @ values @ heads_Y[h]
        size = float(r.norm())
        assert size * (1 - 1e-12) <= rows.residual[i] <= size * (1 + 1e-9) + 1e-12
        assert 0 < rows.residual_error[i] < 1e-10
    assert count == len(rows.rho)


def test_row_quantities(full):
    for case in CASES if full else CASES[::4]:
        for dtype in (F64, torch.float32) if full else (F64,):
            problem = case.problem(dtype)
            X, Y = case.point(dtype)
            check_rows(problem, evaluated(problem, X, Y)[0], X, Y)


@pytest.mark.parametrize("mask", [None, "causal"])
def test_row_quantities_do_not_depend_on_tiles(mask):
    """1200 rows make several tiles; the rows of a shorter problem are the same."""
    specimen = zoo.planted(2, 1200, noise=0.1, tokens="clustered")
    A, B = specimen.problem.chunks[0].A1[0, 0], specimen.problem.chunks[0].B[0, 0]
    problem = nt.AttentionProblem(A, A, A, B, mask=mask)
    assert len(list(problem.chunks[0].tiles(3 * 1200 + 4))) > 1
    point, _ = evaluated(problem, specimen.X, specimen.Y)
    some = torch.tensor([0, 1, 599, 700, 1199])
    keep = torch.ones(1200, 1200, dtype=torch.bool)
    keep = keep.tril() if mask else keep
    part = nt.AttentionProblem(A[some], A, A, B[some], mask=keep[some])
    other, _ = evaluated(part, specimen.X, specimen.Y)
    for name in ("rho", "rho3", "m3", "residual"):
        a, b = getattr(point.rows, name)[some], getattr(other.rows, name)
        tolerance = 0.15 if name.startswith("rho") else 1e-9  # other centres
        assert torch.allclose(a, b, rtol=tolerance, atol=1e-12), name


def test_spectral_norms_of_Y():
    (case,) = (c for c in CASES if c.name == "three heads, padded")
    point, _ = evaluated(case.problem(), *case.point())
    exact = torch.linalg.matrix_norm(case.Y, 2)
    assert (point.Y_norms >= exact * (1 - 1e-14)).all()
    assert (point.Y_norms <= exact * (1 + 1e-10)).all()


# Precision on demand.


def test_precise_evaluation_of_a_small_problem_has_only_rounding_left():
    (case,) = (c for c in CASES if c.name == "one query")
    problem = case.problem()
    point, w = evaluated(problem, *case.point(), precise=True)
    assert small_enough(problem, w.layer)
    check_errors(case.name, point, exact_derivatives(problem, w.layer, w.theta, DIGITS))
    assert point.gradient_error <= 1.01 * UNIT * float(point.gradient.norm())
    assert point.hessian_error <= 1.01 * UNIT * float(point.hessian.norm())
    assert point.loss_error <= 1.01 * UNIT * abs(point.loss)


def test_precise_gradient_of_larger_problems():
    """At a minimum the gradient is a sum that cancels; its error no longer shows."""
    specimen = zoo.planted(4, 100, noise=0.1, tokens="clustered")
    problem = specimen.problem.with_regularizer(nt.Ridge(x=1e-2, y=1e-2))
    solution = nt.solve(problem, start=(specimen.X, specimen.Y))
    ordinary, w = evaluated(problem, solution.X, solution.Y)
    precise, _ = evaluated(problem, solution.X, solution.Y, precise=True)
    assert not small_enough(problem, w.layer)
    assert precise.gradient_error < 1e-6 * ordinary.gradient_error
    difference = float((ordinary.gradient - precise.gradient).norm())
    assert difference <= ordinary.gradient_error + precise.gradient_error
    # The error that is left is that of rounding theta, not of evaluating the gradient.
    assert precise.gradient_error < 1e-3 * float(precise.gradient.norm()) + 1e-25


@pytest.mark.parametrize("name", [*[c.name for c in CASES][::9], "saturated heads"])
def test_pairs_carry_thirty_digits(name):
    (case,) = (c for c in CASES if c.name == name)
    w = as_weights(case.problem(), *case.point())
    head, tail, share = accurate_gradient(w.problem, w.layer, w.theta)
    exact = exact_derivatives(w.problem, w.layer, w.theta, DIGITS).gradient
    assert frobenius(mpf(head) + mpf(tail) - exact) < 1e-27 * frobenius(exact)
    assert share < 1e-9


def test_pair_arithmetic():
    g = torch.Generator().manual_seed(1)

    def draw(*shape):
        hi = torch.randn(shape, generator=g, dtype=F64)
        hi = hi * 10.0 ** torch.randint(-5, 5, shape, generator=g).double()
        return pairs.Pair(hi, hi * 2.0**-54 * torch.rand(shape, generator=g, dtype=F64))

    def value(x):
        return mpf(x.hi) + mpf(x.lo)

    for k in (1, 7, 600):
        a, b, c = draw(4, k), draw(4, k), draw(k, 3)
        A, B, C = (value(x) for x in (a, b, c))
        bits = mpmath.mpf(2) ** -100
        assert (abs(value(pairs.add(a, b)) - A - B) <= (abs(A) + abs(B)) * bits).all()
        assert (abs(value(pairs.multiply(a, b)) - A * B) <= abs(A * B) * bits).all()
        assert (abs(value(pairs.reciprocal(a)) * A - 1) <= bits).all()
        size = np.max(abs(A), 1)[:, None] * np.max(abs(C), 0)
        limit = abs(A).dot(abs(C)) * (k * bits)
        limit = limit + size * (16 * k**2 * mpmath.mpf(2) ** (-53 - 3 * pairs.slice_bits(k)))
        assert (abs(value(pairs.matmul(a, c)) - A.dot(C)) <= limit).all()


def test_pair_exponentials_and_softmax():
    g = torch.Generator().manual_seed(2)
    x = -600.0 * torch.rand(400, generator=g, dtype=F64) ** 3
    x[:3] = torch.tensor([0.0, -(2.0**-13), 2.0**-14], dtype=F64)
    lo = x * 2.0**-54
    result = pairs.exp(pairs.Pair(x, lo))
    for a, b, hi, low in zip(*(t.tolist() for t in (x, lo, *result)), strict=True):
        exact = mpmath.exp(mpmath.mpf(a) + mpmath.mpf(b))
        assert abs(mpmath.mpf(hi) + mpmath.mpf(low) - exact) <= mpmath.mpf(2) ** -90 * exact
    assert pairs.exp(pairs.pair(torch.tensor([-1e6], dtype=F64))).hi == 0.0
    assert pairs.exp(pairs.pair(torch.tensor([math.nan], dtype=F64))).hi.isnan()
    # A tail above the maximum's leading part, and a forbidden pair above all others.
    logits = pairs.Pair(
        torch.tensor([[700.0, 3.0, 3.0]], dtype=F64), torch.tensor([[0.0, 2e-16, 1e-16]], dtype=F64)
    )
    P = pairs.softmax(logits, torch.tensor([[False, True, True]]))
    ratio = mpmath.exp(mpmath.mpf(2e-16) - mpmath.mpf(1e-16))
    for got, want in zip(
        (mpf(P.hi) + mpf(P.lo))[0], (0, ratio / (1 + ratio), 1 / (1 + ratio)), strict=True
    ):
        assert abs(got - want) < mpmath.mpf(2) ** -88


def test_slices_hold_what_their_bits_allow():
    for length in (1, 2, 512, 513, 40_000, 10**6):
        bits = pairs.slice_bits(length)
        assert length * 2 ** (2 * bits) <= 2**53
        assert length * 2 ** (2 * bits + 2) > 2**51


# Errors.


def test_errors_are_named(unchecked):
    specimen = zoo.planted(2, 6)
    w = as_weights(specimen.problem, specimen.X, specimen.Y)
    stack = nt.AttentionProblem.stack([specimen.problem, specimen.problem])
    with pytest.raises(ValueError, match="stack of 2"):
        evaluate_point(stack, w.layer, w.theta)
    module = torch.nn.MultiheadAttention(4, 2, batch_first=True, dtype=F64)
    around = nt.Proximity(nt.FactoredAttention.from_torch(module))
    case = zoo.planted(4, 6)
    w = as_weights(case.problem, case.X, case.Y)
    with pytest.raises(ValueError, match="factored"):
        evaluate_point(case.problem.with_regularizer(around), w.layer, w.theta)


def test_a_problem_taken_from_a_stack_keeps_its_quadratic():
    (case,) = (c for c in CASES if c.name == "ridge, heads")
    problem = case.problem()
    w = as_weights(problem, *case.point())
    taken = nt.AttentionProblem.stack([problem, problem]).take(torch.tensor([1]))
    for other in (taken, replace_regularizer(taken)):
        point = evaluate_point(other, w.layer, w.theta)
        check_errors("taken", point, exact_derivatives(problem, w.layer, w.theta, DIGITS))


def replace_regularizer(problem):
    """The same, its chunks given afresh: nothing is kept by identity."""
    chunks = tuple(replace(c, A1=c.A1.clone()) for c in problem.chunks)
    return problem.with_chunks(chunks)
