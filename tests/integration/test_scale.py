"""Runs end the same way whatever the units of tokens and targets, or say why they cannot."""

import numpy as np
import pytest
import torch

import newtention as nt
from newtention import Status


def problem(tokens=1.0, targets=1.0, dtype=torch.float64, **settings):
    draw = torch.Generator().manual_seed(0)
    A = torch.randn(60, 3, generator=draw, dtype=torch.float64)
    B = torch.randn(60, 3, generator=draw, dtype=torch.float64)
    A, B = (tokens * A).to(dtype), (targets * B).to(dtype)
    return nt.AttentionProblem(A, A, A, B, **settings)


@pytest.mark.parametrize(
    ("tokens", "targets"), [(1e6, 1.0), (1e-6, 1.0), (1.0, 1e9), (1e30, 1e-30)]
)
def test_units_do_not_matter(tokens, targets):
    usual = nt.solve(problem())
    other = nt.solve(problem(tokens, targets))
    assert other.status is usual.status is Status.CONVERGED
    assert other.relative_loss == pytest.approx(usual.relative_loss, rel=1e-6)


@pytest.mark.parametrize(("tokens", "targets"), [(1.0, 1e9), (3e5, 3e5), (1e-3, 1.0)])
def test_units_in_float32(tokens, targets):
    usual = nt.solve(problem())
    other = nt.solve(problem(tokens, targets, torch.float32))
    assert other.relative_loss == pytest.approx(usual.relative_loss, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1e76, torch.float64), (1e-100, torch.float64), (1e-12, torch.float32)]
)
def test_extreme_units_are_never_called_converged(tokens, dtype):
    solution = nt.solve(problem(tokens, 1.0, dtype))
    assert np.isfinite(solution.loss)
    assert solution.status is not Status.CONVERGED or solution.relative_loss < 0.9


def test_derivative_check_is_not_fooled():
    p = problem()
    X, Y = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert not nt.check_derivatives(p, X, 1e200 * Y).passed
    assert nt.check_derivatives(p, 0 * X, 0 * Y).passed
    assert nt.check_derivatives(p, 1e-8 * X, 1e-8 * Y).passed


def test_overflowing_weights_are_refused():
    p = problem()
    X = torch.eye(3, dtype=torch.float64)
    for function in (nt.loss, nt.gradient, nt.predict):
        with pytest.raises(ValueError, match="overflow"):
            function(p, 1e308 * X, X)


def test_a_list_of_two_arrays_is_a_pair():
    p = problem()
    X, Y = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(nt.solve(p, [X, Y]).X, nt.solve(p, (X, Y)).X)
    assert np.array_equal(nt.to_scipy(p, [X, Y]).x0, nt.to_scipy(p, (X, Y)).x0)
    assert nt.to_scipy(p, nt.solve(p, X)).x0.shape == (18,)


def test_a_problem_keeps_its_data():
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((2, 20, 3))
    p = nt.AttentionProblem(A, A, A, B)
    before = nt.loss(p, np.eye(3), np.eye(3))
    A *= 2
    assert nt.loss(p, np.eye(3), np.eye(3)) == before


def test_heads_must_agree(unchecked):
    two = problem(bias=torch.zeros(2, 60, 60, dtype=torch.float64))
    three = problem(bias=torch.zeros(3, 60, 60, dtype=torch.float64))
    X = torch.eye(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="same number of heads"):
        nt.solve_many([two, three])
    with pytest.raises(ValueError, match="same number of heads"):
        nt.solve_many([two, problem()])
    with pytest.raises(ValueError, match="agree on the number"):
        nt.solve(two, options=nt.Options(heads=3))
    with pytest.raises(ValueError, match="agree on the number"):
        nt.solve(problem(), X, options=nt.Options(heads=2))
    with pytest.raises(ValueError, match="bias is for 2 heads"):
        problem(
            bias=torch.zeros(2, 60, 60, dtype=torch.float64),
            regularizer=nt.Proximity((torch.zeros(3, 3, 3), torch.zeros(3, 3, 3))),
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: nt.solve([p]), "problem must be"),
        (lambda p: nt.solve_many(p), "problems must be a list"),
        (lambda p: nt.solve(p, options={"heads": 2}), "options must be"),
        (lambda p: nt.solve(p, callback=5), "callback must be callable"),
        (lambda p: nt.solve(p, tol="a"), "tol must be"),
        (lambda p: nt.solve(p, max_seconds="a"), "max_seconds must be"),
        (lambda p: nt.Options(start_scale="a"), "start_scale"),
    ],
)
def test_wrong_types_get_a_sentence(call, message, unchecked):
    with pytest.raises((TypeError, ValueError), match=message):
        call(problem())
