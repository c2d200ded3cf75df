"""Sketches as random variables: unbiased, and embeddings as often as promised.

Failure rates of the tests: a check of a rate of failure raises for a correct sketch with
probability 1e-6 per side (exact binomial tails).  At a calibrated size the true rate is DELTA only
to the error of the calibration, 0.7 points (2.1 in the quick tier), which raises this to 4e-5
(2e-4).  A check of a mean raises beyond six standard errors, 2e-9 for each of at most 465 normal
entries.  Seeds are fixed, so that a test fails only when the code changes.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file

from newtention import sketch
from newtention.examples import EXAMPLES, KEYPOINTS
from newtention.sketch import quality, sizes
from newtention.sketch.leverage import orthonormal_basis

KINDS = list(sketch.KINDS.values())
EPSILON, DELTA, TAIL = 0.5, 0.1, 1e-6

by_name = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)

pytestmark = pytest.mark.filterwarnings("ignore:A sketch of size")


def normal(n, d, seed):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leading(A, d):
    """The leading d left singular directions, times their singular values."""
    U, s, _ = torch.linalg.svd(A.double(), full_matrices=False)
    return U[:, :d] * s[:d]


def data(name, n1=48, n2=40):
    """Factors of rank 3 each, of n1 and n2 rows at most."""
    if name == "random":
        return normal(n1, 3, 1), normal(n2, 3, 2)
    if name == "coherent":
        return quality.huge_row(n1, 3, 1), quality.identical_rows(n2, 3, 2)
    if name == "deficient":
        return normal(n1, 3, 1) @ normal(3, 5, 3), torch.cat([normal(n2, 3, 2)] * 2, 1)
    if name == "minilm":
        tokens = load_file(EXAMPLES["minilm-head"].path)["tokens"].double()
        return tokens[:n1, :3], tokens[-n2:, [0, 1, -1]]
    points = load_file(KEYPOINTS)
    return leading(points["queries"], 3)[:n1], leading(points["keys"], 3)[:n2]


DATA = ("random", "coherent", "deficient", "minilm", "keypoints")


def factors(name, kind):
    """Small ones for the Gaussian sketch, whose cost is that of n1 n2 draws a row."""
    return data(name, 12, 10) if kind is sketch.Gaussian else data(name)


# Planted errors: functions of a correct sketch


def correct(S):
    return S


def without_signs(S):
    return replace(S, **{name: v.abs() for name, v in vars(S).items() if name.startswith("signs")})


def scaled(factor):
    """The sketch times a number, by way of a sampled sketch of its own."""

    def plant(S):
        class Scaled(type(S)):
            def _kronecker(self, A1, A2):
                return factor * super()._kronecker(A1, A2)

            def _left(self, M):
                return factor * super()._left(M)

        return Scaled(**vars(S))

    return plant


# Checks, which raise


def check_unbiased(kind, plant=correct, draws=1200, size=4):
    """Raise unless the mean of (S W)^T S W is W^T W, entry by entry, to six standard errors.

    W is the identity for a kind that does not look at the data, else their orthonormal basis.
    """
    A1, A2 = normal(6, 2, 1), normal(5, 2, 2)
    W = torch.eye(30, dtype=torch.float64)
    if kind is sketch.LeverageSampling:
        W = torch.kron(orthonormal_basis(A1), orthonormal_basis(A2))
    total = square = torch.zeros(W.shape[1], W.shape[1], dtype=torch.float64)
    for seed in range(draws):
        SW = plant(kind(6, 5, size, seed).sample(A1, A2)).apply_left(W)
        gram = SW.T @ SW
        total, square = total + gram, square + gram.square()
    mean = total / draws
    error = ((square / draws - mean.square()).clamp_min(0) / (draws - 1)).sqrt()
    excess = (mean - W.T @ W).abs() - 6 * error
    if not float(excess.max()) < 1e-9:
        raise AssertionError(f"{kind.name}: biased by {float((mean - W.T @ W).abs().max()):.3g}")


def count(kind, A1, A2, size, seeds, plant=correct):
    """Draws that are no embedding of the column space."""
    U1, U2 = orthonormal_basis(A1), orthonormal_basis(A2)
    failures = 0
    for seed in seeds:
        SU = plant(kind(len(A1), len(A2), size, seed).sample(U1, U2)).apply(U1, U2).numpy()
        failures += np.abs(np.linalg.eigvalsh(SU.T @ SU) - 1).max() > EPSILON
    return failures


def check_at_most(failures, draws):
    """Raise if so many failures are incredible at the rate DELTA."""
    if scipy.stats.binom.sf(failures - 1, draws, DELTA) < TAIL:
        raise AssertionError(f"{failures} of {draws} draws fail, promised at most {DELTA}")


def check_near(failures, draws):
    """Raise if so many or so few failures are incredible at the rate DELTA."""
    check_at_most(failures, draws)
    if scipy.stats.binom.cdf(failures, draws, DELTA) < TAIL:
        raise AssertionError(f"only {failures} of {draws} draws fail, expected a share of {DELTA}")


# Means


@by_name
def test_unbiased(kind):
    check_unbiased(kind)


@by_name
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_wrong_scale_is_seen(kind, factor):
    with pytest.raises(AssertionError, match="biased"):
        check_unbiased(kind, scaled(factor), draws=400)


@pytest.mark.parametrize("kind", [sketch.CountSketch, sketch.TensorSketch])
def test_missing_signs_are_seen_in_the_mean(kind):
    with pytest.raises(AssertionError, match="biased"):
        check_unbiased(kind, without_signs, draws=500)


@pytest.mark.parametrize(("kind", "c"), [("countsketch", 90), ("tensor-sketch", 162)])
def test_second_moments(kind, c):
    """E ||(S U)^T S U - I||_F^2 is c / size, nearly so when no row of U stands out.

    c = D^2 + D, and D^2 + D (d1 + d2) + 3 D, is what `size_for` builds on; D = 9.
    """
    A1, A2 = data("random", 100, 80)
    U1, U2 = orthonormal_basis(A1), orthonormal_basis(A2)
    size, draws = 64, 1500
    values = []
    for seed in range(draws):
        SU = sketch.KINDS[kind](100, 80, size, seed).sample()._kronecker(U1, U2)
        values.append(float((SU.T @ SU - torch.eye(9)).square().sum()))
    mean, error = np.mean(values), np.std(values) / math.sqrt(draws)
    want = c / size
    if kind == "tensor-sketch":
        want += 2 * 9 * 6 / size**2
    assert mean < want + 5 * error
    assert mean > 0.9 * want - 5 * error
    assert error < 0.05 * want  # so that 11 D^2 = 891 or a missing term would be seen
    formula = sizes._FORMULAS[kind](EPSILON, DELTA, 3, 3, 1, 1)
    assert formula == pytest.approx(c / (EPSILON**2 * DELTA), rel=1e-2)


# Rates of failure


def check_formula(kind, name, draws=200, plant=correct):
    A1, A2 = factors(name, kind)
    size = sketch.size_for(kind, EPSILON, DELTA, d1=3, d2=3, n1=len(A1), n2=len(A2))
    check_at_most(count(kind, A1, A2, size, range(draws), plant), draws)


@by_name
@pytest.mark.parametrize("name", ["coherent"])
def test_formula_sizes(kind, name):
    check_formula(kind, name)


@pytest.mark.full
@by_name
@pytest.mark.parametrize("name", [name for name in DATA if name != "coherent"])
def test_formula_sizes_everywhere(kind, name):
    check_formula(kind, name)


@by_name
def test_a_wrong_scale_is_seen_at_the_formula_size(kind):
    with pytest.raises(AssertionError, match="draws fail"):
        check_formula(kind, "random", 50, scaled(1.3))


@pytest.mark.parametrize("name", ["coherent", "keypoints"])
def test_sizes_after_the_transform(name):
    """Each draw of signs has a size of its own."""
    A1, A2 = data(name)
    failures = 0
    for seed in range(200):
        size = sketch.size_after_transform(A1, A2, EPSILON, DELTA, seed)
        failures += count(sketch.TensorSRHT, A1, A2, size, [seed])
    check_at_most(failures, 200)


def check_calibrated(kind, name, draws, fresh, plant=correct, grow=1):
    """New seeds at the calibrated size (times `grow`) fail as often as DELTA, no less."""
    A1, A2 = factors(name, kind)
    c = sketch.calibrate(kind, A1, A2, EPSILON, DELTA, draws=draws)
    seeds = range(draws, draws + fresh)
    check_near(count(kind, A1, A2, grow * c.size, seeds, plant), fresh)


QUICK = [
    *((kind, "coherent") for kind in KINDS),
    (sketch.LeverageSampling, "deficient"),
    (sketch.LeverageSampling, "minilm"),
    (sketch.TensorSRHT, "keypoints"),
]


@pytest.mark.parametrize(("kind", "name"), QUICK, ids=lambda v: getattr(v, "name", v))
def test_calibrated_sizes(kind, name):
    check_calibrated(kind, name, 200, 200)


@pytest.mark.full
@by_name
@pytest.mark.parametrize("name", DATA)
def test_calibrated_sizes_everywhere(kind, name):
    check_calibrated(kind, name, 2000, 1000)


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.name)
def test_a_wrong_scale_is_seen_at_the_calibrated_size(kind):
    with pytest.raises(AssertionError, match="draws fail"):
        check_calibrated(kind, "random", 100, 100, scaled(1.2))


@pytest.mark.parametrize(
    "kind",
    [sketch.TensorSRHT, sketch.SRHT, sketch.TensorSketch, sketch.CountSketch],
    ids=lambda kind: kind.name,
)
def test_missing_signs_are_seen_at_the_calibrated_size(kind):
    """Identical rows are a column of the Hadamard matrix: without signs one row takes it all."""
    with pytest.raises(AssertionError, match="draws fail"):
        check_calibrated(kind, "coherent", 100, 100, without_signs)


def test_a_sketch_that_is_too_good_is_seen():
    """The lower side: at four times the size nearly no draw fails."""
    with pytest.raises(AssertionError, match="only"):
        check_calibrated(sketch.LeverageSampling, "random", 200, 200, grow=4)


def test_plain_qr_would_not_do():
    """Scores of a thin QR of a rank-deficient factor follow directions that do not exist."""
    A1, A2 = data("deficient")
    scores = [torch.linalg.qr(A)[0].square().sum(1) for A in (A1, A2)]
    c = sketch.calibrate("leverage", A1, A2, EPSILON, DELTA, draws=200)
    failures = 0
    for seed in range(200):
        S = sketch.LeverageSampling(len(A1), len(A2), c.size, seed).sample_scores(*scores)
        failures += sketch.distortion(S, A1, A2) > EPSILON
    with pytest.raises(AssertionError, match="draws fail"):
        check_near(failures, 200)
