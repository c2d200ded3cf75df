"""Stochastic Lanczos quadrature as a random variable.

z^T A z for z of N random signs has mean tr A and variance 2 (||A||_F^2 - sum_i A_ii^2), so that
standard errors are known exactly.  Failure rates: every bound is five standard deviations of what
it tests (1 in 1.7 million for a normal variable), and the seeds are fixed, so that a test fails
only when the code changes.
"""

import numpy as np
import pytest
import torch

import newtention as nt
from newtention import spectra
from newtention.linsolve.lanczos import lanczos_quadrature

KINDS = ("full", "gauss-newton")


def sign_deviation(A):
    """Standard deviation of z^T A z / N."""
    return float((2 * (A.square().sum() - A.diagonal().square().sum())).sqrt()) / len(A)


def check_moments(H, nodes, weights, probes):
    """Raise unless mass, mean and second moment are those of H's eigenvalues, to 5 sigma."""
    n = len(H)
    if not abs(float(weights.sum()) - 1) < 1e-5:
        raise AssertionError(f"weights sum to {float(weights.sum())}")
    for power, A in ((1, H), (2, H @ H)):
        got = float(nodes.double() ** power @ weights.double())
        want = float(A.trace()) / n
        error = sign_deviation(A) / probes**0.5
        if not abs(got - want) < 5 * error + 1e-5 * abs(want):
            raise AssertionError(f"moment {power}: {got}, expected {want} with error {error}")


def dense_problem(seed=0, n=300):
    """A matrix with a bulk, a null space and outliers, and its eigenvalues."""
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0]
    bulk = torch.randn(n - 104, generator=g, dtype=torch.float64)
    outliers = torch.tensor([30.0, 30.0, 20.0, -10.0], dtype=torch.float64)
    values = torch.cat([outliers, torch.zeros(100).double(), bulk])
    return (Q * values) @ Q.T, values


def quadrature(H, probes, steps, seed=0, product=None):
    product = product or (lambda V: V @ H)
    return lanczos_quadrature(product, H[0], probes, steps, torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def layer():
    """A layer of 768 unknowns, with exact matrices."""
    g = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    problem = nt.AttentionProblem(normal(40, 12), normal(30, 16), normal(30, 8), normal(40, 24))
    X, Y = 0.2 * normal(2, 12, 16), 0.5 * normal(2, 8, 24)
    return problem, X, Y, {kind: nt.hessian(problem, X, Y, kind).to_dense() for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_moments_of_a_layer(layer, kind, seed):
    problem, X, Y, matrices = layer
    H = matrices[kind]
    s = spectra.spectrum(problem, X, Y, k=1, kind=kind, density=True, steps=24, seed=seed)
    assert s.method == "block Lanczos"
    check_moments(H, s.density.nodes, s.density.weights, 8)
    assert abs(s.trace - float(H.trace())) < 5 * len(H) * sign_deviation(H) / 8**0.5
    assert float(s.density.nodes @ s.density.weights) * len(H) == pytest.approx(s.trace)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("steps", [2, 10, 60])
def test_moments_at_any_number_of_steps(steps, dtype):
    """Two steps suffice for the second moment: the rule is exact to degree 2 steps - 1."""
    H, _ = dense_problem()
    nodes, weights, _ = quadrature(H.to(dtype), 16, steps)
    check_moments(H, nodes, weights, 16)


def test_wrong_quadratures_fail():
    H, _ = dense_problem()
    shift = 5 * sign_deviation(H)

    def shifted(V):
        return V @ H + shift * V

    nodes, weights, _ = quadrature(H, 64, 20)
    check_moments(H, nodes, weights, 64)
    planted = [
        quadrature(H, 64, 20, product=shifted)[:2],
        (nodes, weights * 1.01),
        (nodes, torch.full_like(weights, 1 / len(weights))),
        (nodes * 1.5, weights),
        (nodes.flip(0), weights),
    ]
    for wrong_nodes, wrong_weights in planted:
        with pytest.raises(AssertionError):
            check_moments(H, wrong_nodes, wrong_weights, 64)


def test_trace_is_unbiased_and_its_error_right():
    """Over 400 seeds: the mean within 5 sigma, the variance within 5 sigma of a sample variance."""
    H, _ = dense_problem()
    n, count, probes = len(H), 400, 8
    forms = torch.stack([quadrature(H, probes, 1, seed)[2] for seed in range(count)])
    exact = sign_deviation(H)
    assert abs(float(forms.mean()) - float(H.trace()) / n) < 5 * exact / (count * probes) ** 0.5
    # Sums of many signs are nearly normal: a sample variance of m terms has deviation (2 / m)^0.5.
    ratio = float(forms.var()) / exact**2
    assert abs(ratio - 1) < 5 * (2 / (count * probes)) ** 0.5
    # Within each run, as reported: mean of squared standard errors.
    within = float(forms.var(1).mean()) / exact**2
    assert abs(within - 1) < 5 * (2 / (count * (probes - 1))) ** 0.5


def test_runs_with_different_seeds_are_uncorrelated():
    H, _ = dense_problem()
    a, b = (
        np.array([float(quadrature(H, 2, 1, 2 * seed + i)[2].mean()) for seed in range(400)])
        for i in (0, 1)
    )
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / 400**0.5


def test_mass_of_outliers_counts_eigenvalues():
    """The measure above a gap is the count of eigenvalues there, to 5 sigma of its projector."""
    H, values = dense_problem()
    n, probes = len(H), 64
    nodes, weights, _ = quadrature(H, probes, 40)
    _, S = torch.linalg.eigh(H)
    for low, high in ((25, 35), (15, 25), (-12, -8), (-8, 15)):
        inside = (values > low) & (values < high)
        order = values.argsort()
        U = S[:, inside[order]]
        error = n * sign_deviation(U @ U.T) / probes**0.5
        got = n * float(weights[(nodes > low) & (nodes < high)].sum())
        assert abs(got - int(inside.sum())) < 5 * error + 1e-6


def l1_distance(nodes, weights, values, steps):
    grid, density, width = spectra.broadened(nodes, weights, steps)
    z = (grid[:, None] - values) / width
    want = (torch.exp(-0.5 * z.square()) / ((2 * np.pi) ** 0.5 * width)).mean(1)
    return float(torch.trapezoid((density - want).abs(), grid))


def test_density_is_the_broadened_spectrum():
    """Distance in L1 (2 for disjoint densities) to the exact eigenvalues, broadened alike.

    Measured 0.004 to 0.014 over ten seeds with 64 probes, 0.008 to 0.044 with 8.
    """
    H, values = dense_problem()
    distances = [l1_distance(*quadrature(H, 64, 40, seed)[:2], values, 40) for seed in range(3)]
    assert max(distances) < 0.03
    nodes, weights, _ = quadrature(H, 64, 40)
    assert l1_distance(nodes + 0.5, weights, values, 40) > 0.3


def test_more_probes_bring_the_density_closer():
    """The error falls like one over the square root of the probes: a factor 4 for 16 times."""
    H, values = dense_problem()
    few, many = (
        np.mean([l1_distance(*quadrature(H, p, 40, s)[:2], values, 40) for s in range(6)])
        for p in (4, 64)
    )
    assert 2.5 < few / many < 6
