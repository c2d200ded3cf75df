"""The attention SVM at sizes at which its constraints cannot be held all at once."""

import numpy as np
import pytest

import newtention as nt


def planted(n, m, d, seed=0):
    rng = np.random.default_rng(seed)
    A1, A2 = rng.normal(size=(n, d)), rng.normal(size=(m, d))
    return A1, A2, (A1 @ rng.normal(size=(d, d)) @ A2.T).argmax(1)


def leads(A1, A2, X, selected):
    logits = A1 @ X @ A2.T
    own = np.take_along_axis(logits, selected[:, None], 1)
    lead = own - logits
    np.put_along_axis(lead, selected[:, None], np.inf, 1)
    return lead


def test_quarter_of_a_million_constraints():
    A1, A2, selected = planted(512, 512, 16)
    result = nt.attention_svm(A1, A2, selected)
    assert result.success
    assert result.gap < 1e-9
    assert result.active < 1000
    lead = leads(A1, A2, result.X, selected)
    assert lead.min() >= 1 - 1e-9
    j, k = result.support.T
    assert lead[j, k] == pytest.approx(1, abs=1e-8)
    M = np.einsum("ca,cb->ab", A1[j] * result.duals[:, None], A2[selected[j]] - A2[k])
    assert np.abs(M - result.X).max() < 1e-8 * np.abs(result.X).max()
    assert result.duals.sum() / np.linalg.norm(M) == pytest.approx(np.linalg.norm(result.X))


def test_fewer_pairs_than_unknowns():
    """Widths of 40: programs work in the span of the pairs' features, not with 1600 unknowns."""
    A1, A2, selected = planted(60, 50, 40)
    result = nt.attention_svm(A1, A2, selected)
    assert result.success
    assert leads(A1, A2, result.X, selected).min() >= 1 - 1e-9
    assert result.distance < 1e-5 * result.objective


def test_many_queries_that_cannot_be_served():
    rng = np.random.default_rng(1)
    A1, A2 = rng.normal(size=(2000, 4)), rng.normal(size=(300, 4))
    selected = np.minimum(rng.integers(0, 300, 2000), np.arange(2000))
    result = nt.attention_svm(A1, A2, selected, mask="causal")
    assert result.infeasible
    assert len(result.conflict.pairs) <= 5
    assert result.active < 3000


@pytest.mark.full
def test_sixteen_million_constraints():
    A1, A2, selected = planted(4096, 4096, 16)
    result = nt.attention_svm(A1, A2, selected)
    assert result.success
    assert result.active < 2000
    assert leads(A1, A2, result.X, selected).min() >= 1 - 1e-9


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200))
def test_verdicts_on_random_problems(seed):
    """Small random problems of every kind: a certified answer always."""
    rng = np.random.default_rng(seed)
    n, m = rng.integers(2, 14, 2)
    d1, d2 = rng.integers(1, 6, 2)
    A1, A2 = rng.normal(size=(n, d1)), rng.normal(size=(m, d2))
    if seed % 4 == 1:
        A1, A2 = np.round(2 * A1), np.round(2 * A2)
    if seed % 4 == 2:
        A1, A2 = A1 * np.exp(3 * rng.normal(size=(n, 1))), 1e-3 * A2
    selected = (A1 @ rng.normal(size=(d1, d2)) @ A2.T).argmax(1)
    if seed % 3 == 0:
        selected = rng.integers(0, m, n)
    hard = nt.attention_svm(A1, A2, selected)
    assert hard.success or hard.infeasible
    assert seed % 3 == 0 or seed % 4 == 1 or hard.success
    for norm in ("frobenius", "nuclear"):
        assert nt.attention_svm(A1, A2, selected, norm, soft=3.0).success
        assert nt.attention_svm(A1, A2, selected, norm).infeasible == hard.infeasible
