"""Certificates of attention maps: evaluation errors, truth of what is proved, usefulness."""

import itertools
import json
import math
import warnings

import mpmath
import numpy as np
import pytest
import torch

import newtention as nt
from newtention.certify import Certificate, map_evaluation
from newtention.certify.evaluation import data_in_double, evaluate_point
from newtention.certify.invariances import flat_space
from newtention.certify.precise import accurate_gradient, exact_derivatives
from newtention.weights import as_weights
from tests.checks import require_close
from tests.map_cases import MAP_CASES
from tests.unit.test_certify_evaluation import check_errors, frobenius, mpf, require_within

F64 = torch.float64
DIGITS = 60
BY_NAME = {case.name: case for case in MAP_CASES}

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore:.*attention map.*"),
]


@pytest.fixture(autouse=True)
def enough_digits():
    with mpmath.workdps(DIGITS):
        yield


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def planted(n, d, seed=0, scale=1.0, noise=0.0, **options):
    A1, A2, X = randn(seed, n, d), randn(seed + 100, n, d), scale * randn(seed + 200, d, d) / d
    B = (A1 @ X @ A2.T).softmax(1)
    B = (1 - noise) * B + noise * randn(seed + 300, n, n).softmax(1)
    return nt.AttentionProblem.from_maps(A1, A2, B, **options), X


# The evaluation


def check_evaluation(what, problem, X):
    w = as_weights(problem, X)
    point = evaluate_point(problem, w.layer, w.theta)
    exact = exact_derivatives(problem, w.layer, w.theta, DIGITS)
    ratio = check_errors(what, point, exact)
    head, tail, share = accurate_gradient(problem, w.layer, w.theta)
    error = frobenius(mpf(head) + mpf(tail) - exact.gradient)
    require_within(f"{what}: pairs", error, share * point.gradient_error)
    return ratio, point, exact


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_case_table(full, dtype):
    cases = MAP_CASES if full else MAP_CASES[(dtype == F64) :: 4]
    for case in cases:
        _, point, exact = check_evaluation(case.name, case.problem(dtype), case.X.to(dtype))
        if case.name != "rank-deficient tokens":
            size = float(np.linalg.norm(exact.hessian.astype(float), 2))
            assert point.hessian_error < 2e-10 * size + 1e-11, case.name


def test_many_digits_agree_with_autograd(full):
    # Where the softmax is saturated, automatic differentiation is not so accurate.
    cases = [case for case in MAP_CASES if case.name != "saturated"]
    for case in cases if full else cases[1::9]:
        w = as_weights(case.problem(), case.X)
        exact = exact_derivatives(w.problem, w.layer, w.theta, 30)
        found = (float(exact.loss), exact.gradient, exact.hessian)
        for got, want in zip(found, case.oracle, strict=True):
            got = torch.as_tensor(np.asarray(got).astype(float))
            require_close(case.name, got, want.reshape(got.shape), 1e-10)


def extreme(seed):
    """A small fit that is bad for rounding, and a point."""
    g = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=g))

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=F64)

    n, m, d1, d2 = integer(1, 6), integer(1, 7), integer(1, 4), integer(1, 4)
    A1, A2, X = normal(n, d1), normal(m, d2), normal(d1, d2)
    kind = integer(0, 6)
    if kind == 0:  # tiny or huge
        size = 10.0 ** integer(-8, 9)
        A1, A2 = A1 * size, A2 * size
    if kind == 1:  # tiny and huge side by side
        for A in (A1, A2):
            A *= 10.0 ** torch.randint(-8, 9, (len(A), 1), generator=g).double()
    if kind == 2:  # cancellation: large means
        A2 = A2 + 10.0 ** integer(0, 8)
    if kind == 3:  # nearly equal tokens
        A2 = A2[:1] + 1e-8 * A2
    largest = (0.0, 0.1, 3.0, 30.0, 500.0, 1e4)[integer(0, 6)]
    X = X * (largest / float((A1 @ X @ A2.T).abs().max()))
    options = {}
    if integer(0, 3) == 0:
        allowed = torch.rand(n, m, generator=g) < 0.6
        allowed[torch.arange(n), torch.randint(m, (n,), generator=g)] = True
        options["mask"] = allowed
    if integer(0, 3) == 0:
        options["bias"] = normal(n, m) * 10.0 ** integer(-1, 3)
    if integer(0, 3) == 0:
        options["scale"] = 10.0 ** integer(-2, 3)
    if integer(0, 3) == 0:
        options["query_weights"] = torch.rand(n, generator=g).double() + 0.01
    options["regularizer"] = (
        None,
        nt.Ridge(x=0.3),
        nt.TokenWeights(normal(m)),
        nt.Proximity(nt.MapAttention(normal(d1, d2)), 0.7),
    )[integer(0, 4)]
    B = normal(n, m).softmax(1) if integer(0, 2) else 3 * normal(n, m)
    return nt.AttentionProblem.from_maps(A1, A2, B, **options), X


def test_extreme_problems(full):
    largest = 0.0
    for seed in range(3000) if full else range(40):
        problem, X = extreme(seed)
        largest = max(largest, check_evaluation(f"seed {seed}", problem, X)[0])
    assert largest > 0.05  # bounds a twentieth as large would not hold


def test_the_rounding_terms_are_needed(monkeypatch):
    monkeypatch.setattr(map_evaluation, "gamma", lambda count: 0.0)
    monkeypatch.setattr(map_evaluation, "UNIT", 0.0)
    monkeypatch.setattr(map_evaluation, "softmax_error", lambda e, spread, keys: 0.01 * e)
    caught = 0
    for seed in range(20):
        try:
            check_evaluation(f"seed {seed}", *extreme(seed))
        except AssertionError:
            caught += 1
    assert caught > 0


@pytest.mark.parametrize(("tokens", "x"), [(1.0, 1e200), (1e160, 1.0), (1e-200, 1.0)])
def test_beyond_the_range_of_float64_nothing_is_claimed(tokens, x):
    A, B = tokens * randn(0, 5, 3), randn(1, 5, 5).softmax(1)
    problem = nt.AttentionProblem.from_maps(A, A, B, regularizer=nt.Ridge(x=0.1))
    w = as_weights(problem, x * randn(2, 3, 3))
    point = evaluate_point(problem, w.layer, w.theta)
    for part in (point, point.rows):
        for name, value in vars(part).items():
            if isinstance(value, float | torch.Tensor):
                assert not bool(torch.isnan(torch.as_tensor(value)).any()), name
    found = nt.certify(problem, w.theta[0].view(3, 3))
    assert not any(math.isnan(v) for v in vars(found).values() if isinstance(v, float))
    if tokens >= 1.0:
        assert math.isinf(point.hessian_error)
        assert found.local_minimum == "not certified"


# Truth


def exact_minimum(problem, X, steps=9):
    """Newton in 60 digits."""
    w = as_weights(problem, X)
    theta = mpf(w.theta[0])
    for _ in range(steps):
        # In pairs of the point's leading part and the rest, as the point itself has more digits.
        exact = _derivatives_at(problem, w.layer, theta)
        step = mpmath.lu_solve(mpmath.matrix(exact[1].tolist()), mpmath.matrix(list(exact[0])))
        theta = theta - np.array(list(step), dtype=object)
        if max(abs(s) for s in step) < mpmath.mpf(10) ** -40:
            break
    return theta, _derivatives_at(problem, w.layer, theta)


def _derivatives_at(problem, layer, theta):
    """Gradient and Hessian of a plain single problem at a point of many digits."""
    c = problem.chunks[0]
    A1, A2, B = mpf(c.A1[0, 0]) * mpmath.mpf(c.scale), mpf(c.A2[0, 0]), mpf(c.B[0, 0])
    q, X = mpf(c.weight[0, 0]), theta.reshape(layer.d1, layer.d2)
    N = len(theta)
    g, H = np.full(N, mpmath.mpf(0)), np.full((N, N), mpmath.mpf(0))
    for a, b, weight in zip(A1, B, q, strict=True):
        s = A2.dot(a.dot(X))
        e = np.array([mpmath.exp(z - max(s)) for z in s], dtype=object)
        p = e / e.sum()
        t = A2 - p.dot(A2)
        T = p * (p - b - p.dot(p - b))
        J = np.kron(a[None], t)  # of the centred logits
        g += weight * J.T.dot(T)
        H += weight * J.T.dot((p * p + T)[:, None] * J)
    ridge = mpmath.mpf(getattr(problem.regularizer, "x", 0.0))
    return g + ridge * theta, H + ridge * np.eye(N)


def test_exact_points_lie_within_the_stated_distance(full):
    """Newton in 60 digits from points at several distances of a minimum."""
    proved = attempts = 0
    for seed in range(60 if full else 2):
        ridge = nt.Ridge(x=(0.0, 1e-3, 0.3)[seed % 3])
        problem, _ = planted(6, 2, seed, 1 + seed % 4, 0.2, regularizer=ridge)
        solution = nt.solve(problem, tol=1e-13)
        for size in (0.0, 1e-9, 1e-5, 1e-2):
            X = solution.X + size * randn(seed, 2, 2)
            found = nt.certify(problem, X)
            attempts += 1
            if found.local_minimum != "proved":
                continue
            proved += 1
            nearest, (g, H) = exact_minimum(problem, X)
            assert max(abs(t) for t in g) < mpmath.mpf(10) ** -35
            distance = mpmath.sqrt(sum((nearest - mpf(X.flatten())) ** 2))
            assert distance <= found.distance
            assert found.distance <= 2 * distance + mpmath.mpf(10) ** -8
            lowest = mpmath.eigsy(mpmath.matrix(H.tolist()), eigvals_only=True)[0]
            assert found.basin is None or lowest >= found.basin.curvature > 0
    assert proved >= 0.6 * attempts


def test_a_wrong_distance_would_be_caught(monkeypatch):
    from newtention.certify import local

    monkeypatch.setattr(local, "norm_upper", lambda t: 0.0)
    with pytest.raises(AssertionError):
        test_exact_points_lie_within_the_stated_distance(False)


def test_certificates_of_many_points_do_not_contradict_each_other(full):
    """Hard targets have many stationary points; two proved ones are the same or far apart."""
    pairs = minima = 0
    for seed in range(40) if full else (0, 3):
        A1, A2 = randn(seed, 6, 2), randn(seed + 1, 7, 2)
        B = torch.eye(7, dtype=F64)[torch.arange(6)]
        problem = nt.AttentionProblem.from_maps(A1, A2, B, regularizer=nt.Ridge(x=1e-3))
        starts = [4 * randn(s, 2, 2) for s in (range(6) if full else (0, 1, 5))]
        ends = [nt.solve(problem, start=start, max_iter=60).X for start in starts]
        found = [nt.certify(problem, X) for X in ends]
        proved = [(X, c) for X, c in zip(ends, found, strict=True) if c.local_minimum == "proved"]
        minima += len(proved)
        for (X, c), (Z, e) in itertools.combinations(proved, 2):
            apart = float((X - Z).norm())
            same = apart <= (c.distance + e.distance) * (1 + 1e-9)
            assert same or apart + e.distance >= c.uniqueness_radius
            pairs += not same
    assert minima >= 4
    assert pairs > 0  # there was something to contradict


# Usefulness


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(("n", "d", "scale"), [(60, 3, 1.0), (64, 5, 6.0), (100, 4, 3.0)])
def test_planted_maps_are_proved(n, d, scale, noise):
    problem, X = planted(n, d, 0, scale, noise)
    solution = nt.solve(problem)
    found = nt.certify(problem, solution.X)
    assert found.local_minimum == "proved", found.summary()
    assert found.distance < 1e-6
    assert set(found.lipschitz_levels) == {"radii", "cauchy-schwarz", "covariances", "unfolding"}
    least = float(torch.linalg.eigvalsh(nt.hessian(problem, solution.X).to_dense())[0])
    assert 0.99 * least < found.smallest_eigenvalue <= least * (1 + 1e-9)
    if not noise:
        assert float((solution.X - X).norm()) <= found.distance
    text = found.summary()
    assert text.startswith("Local minimum: proved.\nGlobal minimum: not certified.\n")
    assert "on X would do" in text
    assert "paper" not in text
    assert Certificate.from_dict(json.loads(found.to_json())) == found


def test_every_kind_of_problem_with_a_ridge(full):
    some = [c for c in MAP_CASES if c.name not in ("saturated", "one key")]
    for case in some if full else some[::6]:
        problem = case.problem()
        if problem.regularizer is None:
            problem = problem.with_regularizer(nt.Ridge(x=0.1))
        solution = nt.solve(problem, start=case.X)
        found = nt.certify(problem, solution.X)
        H = nt.hessian(problem, solution.X).to_dense()
        least = float(torch.linalg.eigvalsh(H)[0])
        assert found.local_minimum == "proved" or least < 1e-4, (case.name, found.summary())
        assert found.smallest_eigenvalue <= least * (1 + 1e-9) + 1e-12


def test_weights_in_float32_are_certified_with_their_rounding():
    problem, X = planted(64, 4)
    found = nt.certify(problem, X.float().double())
    assert found.local_minimum == "proved"
    assert 1e-9 < float((X.float().double() - X).norm()) <= found.distance < 1e-5


def test_one_row_agrees_with_softmax_regression():
    A, x = randn(0, 40, 3), randn(1, 3)
    b = (A @ x).softmax(0) * (0.2 * randn(2, 40)).exp()
    b = b / b.sum()
    fit = nt.softmax_regression(A, b, ridge=1e-3)
    one = torch.ones(1, 1, dtype=F64)
    problem = nt.AttentionProblem.from_maps(one, A, b[None], regularizer=nt.Ridge(x=1e-3))
    for moved in (0.0, 1e-6):
        ours = nt.certify(problem, (fit.x + moved)[None])
        other = nt.certify_softmax(A, b, fit.x + moved, ridge=1e-3)
        assert ours.local_minimum == other.local_minimum == "proved"
        assert ours.smallest_eigenvalue == pytest.approx(other.smallest_eigenvalue, rel=1e-6)
        assert ours.lipschitz <= other.lipschitz
        if moved:
            assert ours.distance == pytest.approx(other.distance, rel=1e-2)


# The global minimum


def test_above_the_ridge_all_starts_end_in_one_point_and_below_nothing_is_claimed():
    A1, A2 = randn(0, 8, 2), randn(1, 8, 2)
    base = nt.AttentionProblem.from_maps(A1, A2, torch.eye(8, dtype=F64).flip(1))
    ridge = nt.certify(base, torch.zeros(2, 2, dtype=F64)).certifying_ridge
    above, below = (base.with_regularizer(nt.Ridge(x=r * ridge)) for r in (1.0001, 0.9999))
    ends = [nt.solve(above, start=10 * randn(s, 2, 2), tol=1e-13).X for s in range(10)]
    assert max(float((X - ends[0]).norm()) for X in ends) < 1e-9
    found = nt.certify(above, ends[0])
    assert found.global_minimum == found.local_minimum == "proved"
    assert found.uniqueness_radius == math.inf
    far = nt.certify(above, ends[0] + 5)
    assert far.global_minimum == "proved"
    assert 10 - 1e-6 <= far.distance < 1e7
    assert nt.certify(below, ends[0]).global_minimum == "not certified"


@pytest.mark.parametrize("kind", ["token weights", "proximity"])
def test_other_regularisers_can_be_strong_enough(kind):
    X = planted(20, 2, noise=0.3)[1]
    strong = nt.TokenWeights(10 * torch.ones(20, dtype=F64))
    if kind == "proximity":
        strong = nt.Proximity(nt.MapAttention(0.1 * X), 20.0)
    problem = planted(20, 2, noise=0.3, regularizer=strong)[0]
    found = nt.certify(problem, nt.solve(problem).X)
    assert found.global_minimum == "proved", found.summary()
    weak = nt.certify(problem.with_regularizer(None), X)
    assert weak.global_minimum == "not certified"


# Flat directions and what is not certified


def test_constant_and_missing_directions_are_set_aside():
    A1, A2 = randn(0, 30, 3), randn(1, 30, 3)
    A2[:, 2] = 1.0
    A1[:, 1] = 2 * A1[:, 0]
    B = (A1 @ randn(2, 3, 3) @ A2.T).softmax(1) * 0.9 + 0.1 / 30
    problem = nt.AttentionProblem.from_maps(A1, A2, B)
    solution = nt.solve(problem)
    found = nt.certify(problem, solution.X)
    assert found.local_minimum == "proved", found.summary()
    # Two directions of the queries times the shift, and one that they lack times all keys.
    assert found.flat_directions == 2 + 3
    assert "flat directions" in found.summary()
    w = as_weights(problem, solution.X)
    point = evaluate_point(problem, w.layer, w.theta)
    basis = flat_space(problem, data_in_double(problem), w.layer, point.penalty_hessian).basis
    move = (basis @ randn(3, basis.shape[1])).view(3, 3)
    require_close(
        "map",
        nt.predict(problem, w.theta.view(3, 3) + move),
        nt.predict(problem, w.theta.view(3, 3)),
        1e-9,
    )
    ridged = problem.with_regularizer(nt.Ridge(x=1e-3))
    again = nt.certify(ridged, nt.solve(ridged).X)
    assert again.flat_directions == 0
    assert again.local_minimum == "proved"


def test_a_saddle_and_a_far_point_are_not_certified():
    # Keys in pairs +-a and even targets: X = 0 is stationary, and not a minimum if the longest win.
    A1, half = randn(0, 12, 2), randn(1, 4, 2)
    half[0] *= 5
    A2 = torch.cat([half, -half])
    B = torch.zeros(12, 8, dtype=F64)
    B[:, [0, 4]] = 0.5
    problem = nt.AttentionProblem.from_maps(A1, A2, B)
    saddle = torch.zeros(2, 2, dtype=F64)
    assert float(nt.gradient(problem, saddle).norm()) < 1e-12
    found = nt.certify(problem, saddle)
    assert found.local_minimum == found.global_minimum == "not certified"
    assert found.smallest_eigenvalue < 0
    assert not found.eigenvalue_proved
    assert found.distance == math.inf
    assert any("not proved positive" in reason for reason in found.reasons)
    problem, X = planted(40, 3, scale=3.0)
    assert nt.certify(problem, X + randn(5, 3, 3)).local_minimum == "not certified"


def test_logits_of_500_and_hard_targets_claim_nothing_false():
    A1, A2 = randn(0, 10, 2), randn(1, 10, 2)
    X = 500 * randn(2, 2, 2)
    B = torch.eye(10, dtype=F64)[(A1 @ X @ A2.T).argmax(1)]
    found = nt.certify(nt.AttentionProblem.from_maps(A1, A2, B), X)
    assert found.local_minimum == "not certified"  # the infimum lies at infinity
    assert not any(math.isnan(v) for v in vars(found).values() if isinstance(v, float))


# Kinds of input


def test_kinds_of_input():
    problem, X = planted(20, 3)
    c = problem.chunks[0]
    A1, A2, B = (t[0, 0].numpy() for t in (c.A1, c.A2, c.B))
    want = nt.certify(problem, X)
    assert nt.certify(nt.AttentionProblem.from_maps(A1, A2, B), X.numpy()) == want
    assert nt.certify(problem, nt.MapAttention(X)) == want
    strided = [np.asfortranarray(t) for t in (A1, A2, B)]
    for t in strided:
        t.flags.writeable = False
    again = nt.certify(nt.AttentionProblem.from_maps(*strided), X.numpy())
    assert again.local_minimum == "proved"
    duplicated = nt.AttentionProblem.from_maps(
        np.repeat(A1, 2, 0), A2, np.repeat(B, 2, 0), query_weights=np.full(40, 0.5)
    )
    same = nt.certify(duplicated, X.numpy())
    assert same.smallest_eigenvalue == pytest.approx(want.smallest_eigenvalue, rel=1e-9)
    assert same.lipschitz == pytest.approx(want.lipschitz, rel=1e-6)
    with pytest.warns(UserWarning, match="float16"):
        half = nt.AttentionProblem.from_maps(*(t.astype(np.float16) for t in (A1, A2, B)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution = nt.solve(half.with_regularizer(nt.Ridge(x=1e-3)))
    assert nt.certify(half.with_regularizer(nt.Ridge(x=1e-3)), solution.X).local_minimum == "proved"


def test_bad_input_is_refused():
    problem, X = planted(10, 3)
    with pytest.raises(ValueError, match="X"):
        nt.certify(problem, X[:2])
    with pytest.raises(ValueError, match="X"):
        nt.certify(problem, X * math.nan)
    with pytest.raises((TypeError, ValueError), match="Y"):
        nt.certify(problem, X, X)
    stack = nt.AttentionProblem.stack([problem, problem])
    with pytest.raises(ValueError, match="one problem; found a stack of 2"):
        nt.certify(stack, torch.stack([X, X]))
    with pytest.raises(ValueError, match="epsilon"):
        nt.certify(problem, X, epsilon=1.0)
