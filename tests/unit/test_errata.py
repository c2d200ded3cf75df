"""The errata page: printed forms fail, corrected ones hold, and the page's own check runs."""

import re

import pytest
import torch

from newtention import AttentionProblem, reference
from newtention.derivatives.hessian import second_order
from tests.pages import DOCS, block, run_example

PAGE = DOCS / "errata.md"
F64 = torch.float64


@pytest.fixture(scope="module")
def page():
    """The names that the page's check defines, and what it printed."""
    return run_example(PAGE)


def without_rounding(text):
    """The output with the rounding errors of the corrected forms blanked."""
    return re.sub(r"at most \S+", "at most", text)


def test_page_prints_what_it_shows(page):
    _, printed = page
    assert without_rounding(printed) == without_rounding(block(PAGE, "text"))


# Definitions 7.3 and 11.3, written here independently of the page.


def block_x(f, v, b, printed):
    gamma = f @ v
    c = gamma - b
    fv = f * v
    if printed:
        diagonal, cross = (1 - gamma) * c * fv, 2 * gamma + c
    else:
        diagonal, cross = c * (fv - gamma * f), gamma + c
    return (
        torch.diag(diagonal)
        - cross * (fv[:, None] * f + f[:, None] * fv)
        + (2 * gamma * c + gamma**2) * f[:, None] * f
        + fv[:, None] * fv
    )


def block_xy(f, v, b, printed):
    gamma = f @ v
    c = gamma - b
    covariance = torch.diag(f) - f[:, None] * f
    return (f * v - gamma * f)[:, None] * f + (-c if printed else c) * covariance


def half_square(s, v, b):
    return 0.5 * (s.softmax(0) @ v - b) ** 2


def random_case(seed):
    generator = torch.Generator().manual_seed(seed)
    m = int(torch.randint(2, 9, (), generator=generator))
    s, v, b = (torch.randn(k, generator=generator, dtype=F64) for k in (m, m, 1))
    return s, v, b[0]


def relative(computed, exact):
    return float((computed - exact).norm() / exact.norm())


@pytest.mark.parametrize("definition", ["7.3", "11.3"])
def test_printed_definitions_fail_and_corrected_ones_hold(definition):
    form, argnums = (block_x, (0, 0)) if definition == "7.3" else (block_xy, (0, 1))
    for seed in range(200):
        s, v, b = random_case(seed)
        gradient = torch.func.grad(half_square, argnums=argnums[0])
        exact = torch.func.jacfwd(gradient, argnums=argnums[1])(s, v, b)
        f = s.softmax(0)
        assert relative(form(f, v, b, printed=True), exact) > 1e-3, seed
        assert relative(form(f, v, b, printed=False), exact) < 1e-10, seed


def test_whole_hessians_of_the_page(page):
    errors = page[0]["errors"]
    for seed in range(50, 100):
        printed_xx, printed_xy, corrected_xx, corrected_xy = errors(seed)
        assert min(printed_xx, printed_xy) > 1e-3, seed
        assert max(corrected_xx, corrected_xy) < 1e-10, seed


def test_hand_tests_of_the_page():
    for seed in range(50):
        s, v, b = random_case(seed)
        f, ones = s.softmax(0), torch.ones_like(s)
        gamma = f @ v
        c = gamma - b
        expected = gamma * ((c - gamma) * f - (1 + c) * f * v)
        torch.testing.assert_close(block_x(f, v, b, printed=True) @ ones, expected)
        assert (block_x(f, v, b, printed=False) @ ones).abs().max() < 1e-12
        zero = torch.zeros_like(v)
        residual_term = -b * (torch.diag(f) - f[:, None] * f)
        torch.testing.assert_close(block_xy(f, zero, b, printed=False), residual_term)
        torch.testing.assert_close(block_xy(f, zero, b, printed=True), -residual_term)


def test_the_library_implements_the_corrected_forms(page):
    assembled = page[0]["assembled"]
    generator = torch.Generator().manual_seed(0)
    n, m, d1, d2, d3, p = 5, 4, 2, 3, 3, 2
    shapes = (d1, d2), (d3, p), (n, d1), (m, d2), (m, d3), (n, p)
    X, Y, A1, A2, A3, B = (torch.randn(*k, generator=generator, dtype=F64) for k in shapes)
    blocks = second_order(AttentionProblem(A1, A2, A3, B), X[None, None], Y[None, None])[3]
    data = X.flatten(), Y.flatten(), A1, A2, A3, B
    for printed in (True, False):
        Hxx, Hxy = assembled(*data, printed)
        for ours, theirs in ((blocks.xx[0], Hxx), (blocks.xy[0], Hxy)):
            assert (relative(theirs, ours) < 1e-12) is not printed
    sequence = {"A1": A1, "A2": A2, "A3": A3, "B": B}
    _, _, H = reference.derivatives(lambda X, Y: reference.data_loss([sequence], X, Y), X, Y)
    assert relative(blocks.to_dense()[0], H) < 1e-12


# Section 14.


def test_counterexample_exceeds_the_printed_bound(page):
    eps = 0.01
    H = torch.tensor([[1.0, 0.0], [0.0, 1e6]], dtype=F64)
    tilde = torch.tensor([[1.0, 10.0], [10.0, 1e6]], dtype=F64)
    for sign in (-1, 1):  # (1 - eps) H <= tilde <= (1 + eps) H, up to rounding
        slack = torch.linalg.eigvalsh((1 + sign * eps) * H - tilde) * sign
        assert slack.min() > -1e-9
    error = torch.tensor([0.0, 1.0], dtype=F64)
    after = error - torch.linalg.solve(tilde, H @ error)
    exact = torch.tensor([1e3 * eps, -(eps**2)], dtype=F64) / (1 - eps**2)
    torch.testing.assert_close(after, exact, rtol=1e-9, atol=1e-12)
    factor = float(after.norm() / error.norm())
    assert factor > 500 * 2 * eps  # the printed bound with M = 0 is 2 eps
    assert factor == pytest.approx(10.0010001, abs=1e-6)
    assert page[0]["contraction"]()[0] == pytest.approx(factor, rel=1e-9)


def approximate_newton_step(cubic, eps, count=4000, dimension=4, seed=0):
    """One step from random points of random losses 1/2 x.Hx + M/6 (u.x)^3 with solution 0.

    The Hessian is H + M (u.x) u u^T, ||u|| = 1: M is its exact Lipschitz constant; l is the lowest
    eigenvalue of H.  Half of the approximations are eps-extreme in every direction.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(count, *shape, generator=generator, dtype=F64)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(count, *shape, generator=generator, dtype=F64)

    basis = torch.linalg.qr(randn(dimension, dimension)).Q
    H_star = (basis * 10 ** uniform(0, 5, dimension)[:, None, :]) @ basis.mT
    lowest = torch.linalg.eigvalsh(H_star)[:, 0]
    u = torch.nn.functional.normalize(randn(dimension), dim=1)
    x = randn(dimension) * 10 ** uniform(-1, 1, 1)
    r = x.norm(dim=1)
    a = uniform(0, 0.9) if cubic else torch.zeros(count, dtype=F64)
    M = a * lowest / r
    ux = (u * x).sum(1)
    gradient = (H_star @ x[..., None])[..., 0] + (0.5 * M * ux**2)[:, None] * u
    H = H_star + (M * ux)[:, None, None] * u[:, :, None] * u[:, None, :]
    values, vectors = torch.linalg.eigh(H)
    root = (vectors * values.sqrt()[:, None]) @ vectors.mT
    E = uniform(-1, 1, dimension)
    E[: count // 2] = E[: count // 2].sign()
    frame = torch.linalg.qr(randn(dimension, dimension)).Q
    tilde = root @ (torch.eye(dimension, dtype=F64) + (frame * eps * E[:, None]) @ frame.mT) @ root
    after = x - torch.linalg.solve(tilde, gradient)

    def energy(e):
        return (e * (H_star @ e[..., None])[..., 0]).sum(1).sqrt()

    condition = values[:, -1] / values[:, 0]
    return after.norm(dim=1) / r, energy(after) / energy(x), a, condition


@pytest.mark.parametrize("cubic", [False, True], ids=["quadratic", "cubic"])
@pytest.mark.parametrize("eps", [0.0, 0.01, 0.1, 0.5])
def test_true_contraction_bounds_hold(cubic, eps):
    euclidean, energy, a, condition = approximate_newton_step(cubic, eps)
    bound = (eps * (1 + a) + a / 2) / ((1 - eps) * (1 - a))
    assert (energy <= bound * (1 + 1e-9) + 1e-9).all()
    bound = condition.sqrt() * eps / (1 - eps) + a / (2 * (1 - eps) * (1 - a))
    assert (euclidean <= bound * (1 + 1e-9) + 1e-9).all()
    printed = 2 * (eps + a / (1 - a))
    if eps == 0:
        assert (euclidean <= printed + 1e-9).all()
    elif not cubic:
        assert (euclidean > printed).any()


def test_true_bound_is_attained_and_its_figure():
    H = torch.diag(torch.tensor([1.0, 1e6], dtype=F64))
    x = torch.tensor([1.0, 1.0], dtype=F64)
    after = x - torch.linalg.solve(0.99 * H, H @ x)
    torch.testing.assert_close(after, x * (-0.01 / 0.99))
    factor = (0.01 * 1.1 + 0.05) / (0.99 * 0.9)
    assert factor == pytest.approx(0.0685, abs=5e-5)
