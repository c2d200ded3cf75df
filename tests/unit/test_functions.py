"""predict, attention_weights, shapes and array kinds of every public function."""

import numpy as np
import pytest
import torch

import newtention as nt
from tests import checks
from tests.cases import BY_NAME, CASES, STACK

TABLE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@TABLE
def test_predictions(case):
    checks.check_predictions(case)


@TABLE
def test_attention_weights(case):
    checks.check_attention_weights(case)


@pytest.mark.parametrize("name", ["two heads", "padded", "saturated"])
def test_float32(name):
    checks.check_predictions(BY_NAME[name], torch.float32)
    checks.check_attention_weights(BY_NAME[name], torch.float32)


def test_attention_rows_sum_to_one():
    for case in CASES:
        for i in range(len(case.sequences)):
            P = nt.attention_weights(case.problem(), *case.point(), sequence=i)
            checks.require_close("row sums", P.sum(-1), torch.ones(P.shape[:-1]), 1e-14)


@pytest.mark.parametrize("sequence", [-1, 5])
def test_no_such_sequence(sequence):
    case = BY_NAME["padded"]
    with pytest.raises(IndexError, match="between 0 and 4"):
        nt.attention_weights(case.problem(), case.X, sequence=sequence)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("heads", [(), (1,), (2,)])
def test_numpy_in_numpy_out(dtype, heads):
    rng = np.random.default_rng(0)
    A1, A2, A3, B = (rng.standard_normal(s).astype(dtype) for s in ((6, 3), (7, 4), (7, 2), (6, 5)))
    X, Y = (rng.standard_normal((*heads, *s)).astype(dtype) for s in ((3, 4), (2, 5)))
    problem = nt.AttentionProblem(A1, A2, A3, B)
    GX, GY = nt.gradient(problem, X, Y)
    H = nt.hessian(problem, X, Y)
    solution = nt.solve(problem, start=X, max_iter=2)
    n = X.size + Y.size
    for got, shape in (
        (GX, X.shape),
        (GY, Y.shape),
        (H.xx, (X.size, X.size)),
        (H.xy, (X.size, Y.size)),
        (H.yy, (Y.size, Y.size)),
        (H.to_dense(), (n, n)),
        (nt.predict(problem, X, Y), B.shape),
        (nt.attention_weights(problem, X), (*heads, 6, 7)),
        (solution.X, X.shape),
        (solution.Y, Y.shape),
        (solution.start.X, X.shape),
        (solution.start.Y, Y.shape),
    ):
        assert isinstance(got, np.ndarray)
        assert got.shape == shape
        assert got.dtype == dtype
    assert isinstance(nt.loss(problem, X, Y), float)


def test_torch_in_torch_out():
    case = BY_NAME["two heads"]
    problem = case.problem()
    results = [*nt.gradient(problem, *case.point()), nt.predict(problem, *case.point())]
    results += [nt.hessian(problem, *case.point()).xx]
    assert all(isinstance(t, torch.Tensor) for t in results)


def test_results_share_no_memory_with_inputs():
    """Writing into a result must not change the problem or the start."""
    case = BY_NAME["one key"]
    problem, (X, Y) = case.problem(), case.point()
    before = nt.loss(problem, X, Y)
    solution = nt.solve(problem, start=(X, Y), max_iter=0)
    solution.X.zero_()
    solution.Y.zero_()
    nt.predict(problem, X, Y).zero_()
    assert nt.loss(problem, X, Y) == before
    assert bool(X.any())


def test_gradient_tracking_is_left_alone():
    """Weights that require a gradient are taken as numbers; no graph is kept."""
    case = BY_NAME["one sequence"]
    X = case.X.clone().requires_grad_()
    GX, _ = nt.gradient(case.problem(), X, case.Y)
    assert not GX.requires_grad


@pytest.mark.parametrize(
    "call",
    [
        lambda p, X, Y: nt.predict(p, X, Y),
        lambda p, X, Y: nt.attention_weights(p, X, Y),
        lambda p, X, Y: nt.to_scipy(p),
        lambda p, X, Y: nt.solve(p),
    ],
)
def test_functions_of_one_problem_refuse_a_stack(call):
    problem = nt.AttentionProblem.stack([case.problem() for case in STACK[:2]])
    X, Y = (torch.stack([getattr(c, w) for c in STACK[:2]]) for w in "XY")
    with pytest.raises(ValueError, match="one problem"):
        call(problem, X, Y)


def test_scipy_start_is_the_start_of_solve():
    problem = BY_NAME["ridge"].problem()
    s = nt.to_scipy(problem, seed=3)
    solution = nt.solve(problem, seed=3, max_iter=0)
    want = torch.cat([solution.start.X.flatten(), solution.start.Y.flatten()])
    checks.require_close("x0", s.x0, want, 1e-12)


def test_scipy_minimises():
    from scipy.optimize import minimize

    problem = BY_NAME["ridge"].problem()
    solution = nt.solve(problem, seed=0)
    s = nt.to_scipy(problem, start=(solution.X + 0.01, solution.Y))
    for options in ({"hess": s.hess}, {"hessp": s.hessp}):
        result = minimize(s.fun, s.x0, jac=s.jac, method="trust-ncg", **options)
        assert result.fun == pytest.approx(solution.loss, rel=1e-8)


def test_scipy_keeps_no_reference_to_a_reused_buffer():
    """Optimisers overwrite their iterate in place; the cached value must not follow it."""
    case = BY_NAME["one sequence"]
    s = nt.to_scipy(case.problem(), start=case.point())
    x = s.x0.copy()
    first = s.fun(x)
    x += 1.0
    assert s.fun(x) != first
    x -= 1.0
    assert s.fun(x) == pytest.approx(first, rel=1e-12)


def test_scipy_start_has_the_heads_of_the_problem():
    for name in ("bias per head", "proximity, heads"):
        case = BY_NAME[name]
        s = nt.to_scipy(case.problem())
        assert len(s.x0) == case.X.numel() + case.Y.numel()
        assert s.fun(s.x0) > 0


def test_X_alone_is_an_error_where_Y_counts():
    A = np.eye(3)
    problem = nt.AttentionProblem(A, A, A, A)
    X = np.zeros((3, 3))
    for f in (nt.loss, nt.gradient, nt.hessian, nt.predict, nt.certify, nt.check_derivatives):
        with pytest.raises(ValueError, match="Y is missing"):
            f(problem, X)
    assert nt.attention_weights(problem, X).shape == (3, 3)


def test_a_solution_stands_for_its_weights():
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((2, 12, 2))
    problem = nt.AttentionProblem(A, A, A, B, regularizer=nt.Ridge(0.1, 0.1))
    solution = nt.solve(problem)
    assert nt.loss(problem, solution) == nt.loss(problem, solution.X, solution.Y)
    assert np.array_equal(nt.predict(problem, solution), nt.predict(problem, solution.layer))
    assert nt.certify(problem, solution).distance == nt.certify(problem, solution.layer).distance
