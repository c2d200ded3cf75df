"""The attention SVM beside scikit-learn's linear SVM on the explicit features."""

import numpy as np
import pytest
from sklearn.svm import SVC, LinearSVC

import newtention as nt
from tests.selections import planted


def features(A1, A2, selected):
    """a1_j (x) (a2_t(j) - a2_k) for all pairs."""
    n, m = len(A1), len(A2)
    pairs = [(j, k) for j in range(n) for k in range(m) if k != selected[j]]
    return np.array([np.kron(A1[j], A2[selected[j]] - A2[k]) for j, k in pairs])


def mirrored(F):
    """The same problem with two classes: every other feature reversed and labelled -1."""
    labels = np.where(np.arange(len(F)) % 2, -1.0, 1.0)
    return F * labels[:, None], labels


def liblinear(F, C, size):
    """X of sum C hinge + 1/2 ||X||^2 without intercept, by LIBLINEAR's dual descent.

    size: about ||X||, by which features are scaled so that the tolerance means the same in all
    problems.  Much smaller tolerances are never met, and then LIBLINEAR does not look again at the
    constraints that it left out on the way.
    """
    svc = LinearSVC(
        loss="hinge",
        dual=True,
        fit_intercept=False,
        C=C / size**2,
        tol=1e-10,
        max_iter=100_000,
        random_state=0,
    )
    return svc.fit(*mirrored(F * size)).coef_[0] * size


def relative(X, other):
    return np.linalg.norm(X.ravel() - other) / np.linalg.norm(other)


@pytest.mark.parametrize(("n", "m", "d"), [(6, 5, 2), (12, 9, 3), (20, 12, 4)])
def test_the_hard_margin_is_sklearns(n, m, d):
    for seed in range(10):
        A1, A2, selected = planted(n, m, d, seed)
        svm = nt.attention_svm(A1, A2, selected)
        C = 10 * svm.objective**2
        assert svm.duals.max() < C  # so that no slack is worth its price
        theirs = liblinear(features(A1, A2, selected), C, svm.objective)
        assert relative(svm.X, theirs) < 1e-8


def test_the_soft_margin_of_two_keys_is_sklearns():
    """With one rival there is one slack per pair, as in an ordinary SVM."""
    rng = np.random.default_rng(0)
    for C in (0.1, 1.0, 10.0):
        A1, A2 = rng.normal(size=(30, 3)), rng.normal(size=(2, 3))
        selected = rng.integers(0, 2, 30)
        svm = nt.attention_svm(A1, A2, selected, soft=C)
        theirs = liblinear(features(A1, A2, selected), C, float(np.linalg.norm(svm.X)))
        assert (svm.slack > 0.1).any()
        assert relative(svm.X, theirs) < 1e-7


def test_libsvm_comes_as_near_as_its_arithmetic_lets_it():
    """LIBSVM keeps kernels in float32.  Its X violates constraints where ours satisfies all."""
    gaps = []
    for seed in range(6):
        A1, A2, selected = planted(12, 9, 3, seed)
        svm = nt.attention_svm(A1, A2, selected)
        F = features(A1, A2, selected)
        scaled = F * svm.objective
        svc = SVC(kernel="linear", C=1e8, tol=1e-10)
        svc.fit(np.vstack([scaled, -scaled]), np.repeat([1.0, -1.0], len(F)))
        theirs = svc.coef_[0] * svm.objective
        assert abs(svc.intercept_[0]) < 1e-8
        assert relative(svm.X, theirs) < 1e-5
        assert svm.violation < 1e-14
        gaps.append(np.linalg.norm(theirs) / (F @ theirs).min() / svm.lower_bound - 1)
        assert svm.gap < gaps[-1]
    assert max(gaps) > 1e-8
