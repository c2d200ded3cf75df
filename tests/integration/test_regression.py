"""Softmax regression at size: planted weights, success over starts, agreement with attention."""

import numpy as np
import pytest

import newtention as nt


def planted(n, d, scale, seed, noise=0.0):
    rng = np.random.default_rng(seed)
    A, x = rng.normal(size=(n, d)), scale * rng.normal(size=d) / d**0.5
    z = A @ x + noise * rng.normal(size=n)
    b = np.exp(z - z.max())
    return A, b / b.sum(), x


def test_planted_at_n_1000():
    """Fifty starts, all of which found the planted weights when this was written."""
    A, b, x = planted(1000, 20, 2.0, 0)
    result = nt.softmax_regression(A, b, n_init=50)
    assert np.abs(result.x - x).max() < 1e-10
    found = np.array(result.start_losses) < 1e-12 * 0.5 * b @ b
    assert found.sum() >= 45
    assert nt.certify_softmax(A, b, result.x).distance < 1e-9


def test_many_rows():
    A, b, _ = planted(50_000, 12, 1.0, 1, noise=0.3)
    result = nt.softmax_regression(A, b)
    assert result.success
    proof = nt.certify_softmax(A, b, result.x)
    assert proof.local_minimum == "proved"
    assert proof.distance < 1e-8


@pytest.mark.parametrize("ridge", [0.0, 0.01])
def test_one_row_of_an_attention_map(ridge):
    A, b, _ = planted(80, 5, 1.0, 2, noise=0.3)
    ours = nt.softmax_regression(A, b, ridge=ridge)
    maps = nt.multiple_softmax_regression(np.ones((1, 1)), A, b[None], ridge=ridge)
    assert maps.loss == pytest.approx(ours.loss, rel=1e-10)
    assert np.abs(maps.X[0] - ours.x).max() < 1e-7
    free = nt.multiple_softmax_regression(
        np.ones((1, 1)), A, b[None], ridge=ridge, method="newton-cg"
    )
    assert free.loss == pytest.approx(ours.loss, rel=1e-8)


def test_small_problems_as_one_batch():
    cases = [planted(40, 3, 1.0, seed) for seed in range(200)]
    results = nt.softmax_regression_many([c[0] for c in cases], [c[1] for c in cases])
    assert sum(np.abs(r.x - c[2]).max() < 1e-8 for r, c in zip(results, cases, strict=True)) >= 195
