"""Random starts as random variables.

Failure rates: every bound below is at least five standard deviations from the mean of what it
tests, and the seeds are fixed, so that a test fails only when the code changes.
"""

import numpy as np
import pytest
import torch

import newtention as nt
from newtention import zoo
from newtention.newton.starts import random_start
from tests.cases import BY_NAME

COUNT = 400


def draws(problem, count=COUNT, seed=0):
    """(count, d1, d2), scaled to unit length: the scale is fixed by the problem."""
    X = torch.cat([random_start(problem, 1, seed, draw=i)[:, 0] for i in range(count)])
    return X / torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True)


def test_rectangular_draws_are_isotropic():
    """Entries have mean 0 and second moments delta / N: 5 sigma of a mean of COUNT."""
    X = draws(BY_NAME["one sequence"].problem()).flatten(1)
    n = X.shape[1]
    assert float(X.mean(0).abs().max()) < 5 / (n * COUNT) ** 0.5
    second = X.T @ X / COUNT
    # The variance of a product of two entries on the sphere is at most 3 / n^2.
    error = float((second - torch.eye(n) / n).abs().max())
    assert error < 5 * (3 / COUNT) ** 0.5 / n


def test_square_draws_prefer_no_direction():
    """R R^T has the identity as its mean: off-diagonal entries average 0, the diagonal is equal."""
    X = draws(BY_NAME["self-attention"].problem())
    mean = X.mean(0)
    off = mean - torch.diag(mean.diagonal())
    deviation = float(X.std(0).max()) / COUNT**0.5
    assert float(off.abs().max()) < 5 * deviation
    assert float(mean.diagonal().std()) < 5 * deviation
    assert float(mean.diagonal().min()) > 0.2


@pytest.mark.parametrize(("a", "b"), [((0, 0), (0, 1)), ((0, 1), (1, 0)), ((0, 0), (1, 0))])
def test_streams_are_uncorrelated(a, b):
    """Start r of seed s shares nothing with start r' of seed s': 5 sigma of a correlation."""
    problem = BY_NAME["one sequence"].problem()
    pairs = [
        [random_start(problem, 4, 1000 * k + seed, draw).flatten().numpy() for seed, draw in (a, b)]
        for k in range(50)
    ]
    x, y = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    correlation = np.corrcoef(x, y)[0, 1]
    assert abs(correlation) < 5 / len(x) ** 0.5


def test_n_init_uses_different_streams():
    """Final losses of restarts differ on a problem with many minima, and seeds overlap nowhere."""
    problem = zoo.planted(4, 64, tokens="real", seed=3).problem
    first, second = (
        nt.solve(problem, n_init=6, seed=seed, max_iter=0).start_losses for seed in (0, 1)
    )
    assert len({round(x, 10) for x in first + second}) == 12


def test_more_starts_never_hurt():
    """Start 0 of n_init is the start of a single run."""
    problem = zoo.planted(4, 64, tokens="real", seed=3).problem
    one = nt.solve(problem, seed=5, max_iter=3)
    four = nt.solve(problem, seed=5, max_iter=3, n_init=4)
    assert four.start_losses[0] == pytest.approx(one.loss, rel=1e-10)
    assert four.loss == min(four.start_losses)


@pytest.mark.usefixtures("unchecked")
def test_planted_real_tokens_are_recovered_by_restarts():
    """Real tokens at d = 3: some of 8 starts reach the plant on at least 5 of 8 problems.

    Measured: 7 of 8, against 3 of 8 with a single start.
    """
    hits = 0
    for seed in range(8):
        made = zoo.planted(3, 96, tokens="real", seed=seed)
        solution = nt.solve(made.problem, n_init=8, seed=seed, max_iter=60)
        hits += solution.relative_loss < 1e-12
    assert hits >= 5
