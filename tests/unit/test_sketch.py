"""Sketches against dense matrices that are built here from the definitions, in float64."""

import math
import re
import warnings

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch

import newtention as nt
from newtention import sketch
from newtention.memory import LiveBytes
from newtention.sketch import hadamard, quality, rows, sizes
from newtention.sketch.leverage import orthonormal_basis
from tests.checks import require_close
from tests.pages import DOCS, block, run_example

KINDS = list(sketch.KINDS.values())
OBLIVIOUS = [kind for kind in KINDS if kind is not sketch.LeverageSampling]
SHAPES = [(6, 5), (8, 4), (1, 7), (9, 1), (1, 1), (3, 16)]
TOL = {torch.float64: 1e-13, torch.float32: 2e-5}

by_name = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
by_shape = pytest.mark.parametrize(("n1", "n2"), SHAPES)

pytestmark = pytest.mark.filterwarnings("ignore:A sketch of size")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(n1=6, n2=5, d1=3, d2=2):
    return normal(n1, d1, seed=1), normal(n2, d2, seed=2)


def padded(n):
    return 2 ** math.ceil(math.log2(n))


def dense(S):
    """S from its draws by the definition, one entry or row at a time."""
    n, m = S.n1 * S.n2, S.size
    D = np.zeros((m, n))
    name = type(S).__name__
    if name == "SampledTensorSRHT":
        H1, H2 = (scipy.linalg.hadamard(padded(k)) for k in (S.n1, S.n2))
        for r in range(m):
            row1 = H1[S.first[r], : S.n1] * S.signs1.numpy()
            row2 = H2[S.second[r], : S.n2] * S.signs2.numpy()
            D[r] = np.kron(row1, row2) / math.sqrt(m)
    elif name == "SampledSRHT":
        H = scipy.linalg.hadamard(padded(n))
        for r in range(m):
            D[r] = H[S.rows[r], :n] * S.signs.numpy() / math.sqrt(m)
    elif name == "SampledCountSketch":
        for i in range(n):
            D[S.bucket[i], i] = S.signs[i]
    elif name == "SampledTensorSketch":
        for j in range(S.n1):
            for k in range(S.n2):
                row = (int(S.bucket1[j]) + int(S.bucket2[k])) % m
                D[row, j * S.n2 + k] = S.signs1[j] * S.signs2[k]
    elif name == "SampledGaussian":
        g = torch.Generator().manual_seed(S.seed)
        for r in range(m):
            D[r] = torch.randn(n, generator=g, dtype=torch.float64).numpy() / math.sqrt(m)
    else:
        for r in range(m):
            D[r, S.first[r] * S.n2 + S.second[r]] = S.weight[r]
    return D


# Application


@by_name
@by_shape
@pytest.mark.parametrize("size", [1, 7])
def test_against_the_dense_matrix(kind, n1, n2, size):
    A1, A2 = pair(n1, n2)
    S = kind(n1, n2, size, seed=5).sample(A1, A2)
    D = dense(S)
    assert D.shape == (size, n1 * n2)
    require_close("dense", S.to_dense(), D, 1e-14)
    K = np.kron(A1, A2)
    require_close("apply", S.apply(A1, A2), D @ K, 1e-13, np.abs(D).max() * np.abs(K).sum())
    M, Z = normal(n1 * n2, 3, seed=3), normal(size, 4, seed=4)
    require_close("left", S.apply_left(M), D @ M.numpy(), 1e-13, 10)
    require_close("adjoint", S.adjoint(Z), D.T @ Z.numpy(), 1e-13, 10)


@by_name
def test_adjoint_identity(kind):
    A1, A2 = pair(13, 10)
    S = kind(13, 10, 40, seed=1).sample(A1, A2)
    M, Z = normal(130, 1, seed=3), normal(40, 1, seed=4)
    left, right = float(S.apply_left(M).T @ Z), float(M.T @ S.adjoint(Z))
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


def test_checks_see_a_wrong_sketch():
    A1, A2 = pair()
    S = sketch.TensorSRHT(6, 5, 7, seed=5).sample()
    K = np.kron(A1, A2)
    for name in ("signs1", "first"):
        wrong = type(S)(**(vars(S) | {name: getattr(S, name).flip(0)}))
        with pytest.raises(AssertionError):
            require_close("apply", S.apply(A1, A2), dense(wrong) @ K, 1e-13)


@by_name
def test_an_ordinary_sketch(kind):
    """n2 = 1: a matrix in the place of the product."""
    A = normal(12, 3)
    S = kind(12, size=5, seed=2)
    want = dense(S.sample(A)) @ A.numpy()
    require_close("apply", S.apply(A), want, 1e-13)
    require_close("left", S.apply_left(A), want, 1e-13)
    require_close("ones", S.apply(A, torch.ones(1, 1).double()), want, 1e-13)


@pytest.mark.parametrize("kind", OBLIVIOUS, ids=lambda kind: kind.name)
def test_distributions_apply_what_they_sample(kind):
    A1, A2 = pair()
    S = kind(6, 5, 4, seed=9)
    assert torch.equal(S.apply(A1, A2), S.sample().apply(A1, A2))
    assert torch.equal(S.apply_left(normal(30, 2)), S.sample().apply_left(normal(30, 2)))
    assert torch.equal(S.adjoint(normal(4, 2)), S.sample().adjoint(normal(4, 2)))
    assert torch.equal(S.to_dense(), S.sample().to_dense())


@by_name
@pytest.mark.parametrize("elements", [1, 20, 100])
def test_tiles_change_nothing(kind, elements, monkeypatch):
    A1, A2 = pair(9, 7)
    M, Z = normal(63, 5, seed=3), normal(11, 5, seed=4)

    def results():
        S = kind(9, 7, 11, seed=3).sample(A1, A2)
        return S.apply(A1, A2), S.apply_left(M), S.adjoint(Z)

    want = results()
    monkeypatch.setattr(rows, "TILE_ELEMENTS", elements)
    for got, expected in zip(results(), want, strict=True):
        require_close(kind.name, got, expected, 1e-14)


@by_name
def test_memory(kind):
    """The output is written once; what else is alive stays within half of it."""
    n, d, size = (4096, 64, 8192) if kind is sketch.TensorSRHT else (64, 32, 4096)
    A1, A2 = normal(n, d, seed=1), normal(n, d, seed=2)
    with LiveBytes() as live:
        out = kind(n, n, size).apply(A1, A2)
    assert out.shape == (size, d * d)
    assert live.peak <= 1.5 * out.numel() * out.element_size()


@pytest.mark.parametrize("size", [100_000])
def test_memory_of_narrow_factors(size):
    """The gathered rows of two single columns would be twice the output."""
    A1, A2 = normal(4096, 1, seed=1), normal(4096, 1, seed=2)
    with LiveBytes() as live:
        sketch.TensorSRHT(4096, 4096, 64 * size).apply(A1, A2)
    draws = 3 * 64 * size * 8  # pairs, and the two indices of each
    assert live.peak <= draws + 1.5 * 64 * size * 8


# Draws


def fields(S):
    return {name: v for name, v in vars(S).items() if isinstance(v, torch.Tensor)}


@by_name
def test_draws_depend_on_the_seed_alone(kind):
    A1, A2 = pair(30, 20)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    S = kind(30, 20, 10, seed=3)
    first = S.sample(A1, A2).to_dense()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(S.sample(A1, A2).to_dense(), first)
    assert not torch.equal(kind(30, 20, 10, seed=4).sample(A1, A2).to_dense(), first)


@by_name
def test_draws_are_those_of_any_dtype(kind):
    """float32 applies the very S of float64."""
    A1, A2 = (t.float() for t in pair(30, 20))
    S = kind(30, 20, 10, seed=3)
    single, double = S.sample(A1, A2), S.sample(A1.double(), A2.double())
    for name, value in fields(single).items():
        assert value.device.type == "cpu"
        assert value.dtype in (torch.float64, torch.int64)
        assert torch.equal(value, getattr(double, name)), name
    got, want = single.apply(A1, A2), double.apply(A1.double(), A2.double())
    assert got.dtype == torch.float32
    require_close(kind.name, got, want, TOL[torch.float32])


@by_name
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_draws_are_those_of_any_device(kind):
    A1, A2 = pair(30, 20)
    S = kind(30, 20, 10, seed=3)
    M, Z = normal(600, 2), normal(10, 2)
    cpu, gpu = S.sample(A1, A2), S.sample(A1.cuda(), A2.cuda())
    for name, value in fields(cpu).items():
        assert torch.equal(value, getattr(gpu, name)), name
    for got, want in (
        (gpu.apply(A1.cuda(), A2.cuda()), cpu.apply(A1, A2)),
        (gpu.apply_left(M.cuda()), cpu.apply_left(M)),
        (gpu.adjoint(Z.cuda()), cpu.adjoint(Z)),
    ):
        assert got.is_cuda
        require_close(kind.name, got.cpu(), want, 1e-12)


def test_signs_do_not_depend_on_the_size():
    """`size_after_transform` relies on it; rows drawn for a size begin those of a larger one."""
    small, large = (sketch.TensorSRHT(30, 20, size, seed=3).sample() for size in (10, 100))
    assert torch.equal(small.signs1, large.signs1)
    assert torch.equal(small.signs2, large.signs2)
    assert torch.equal(small.first, large.first[:10])


def test_pairs_come_from_the_padded_sizes():
    S = sketch.TensorSRHT(5, 3, 1000).sample()
    assert (int(S.first.max()), int(S.second.max())) == (7, 3)
    assert int(sketch.SRHT(5, 3, 1000).sample().rows.max()) == 15


# Arguments


@by_name
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be an integer of at least 1; found 0"),
        ({}, "size must be an integer of at least 1; found 0"),
        ({"size": -3}, "size must be an integer of at least 1; found -3"),
        ({"n1": 0}, "n1 must be an integer of at least 1; found 0"),
        ({"n2": 0}, "n2 must be an integer of at least 1; found 0"),
        ({"seed": -1, "size": 2}, "seed must be an integer of at least 0; found -1"),
        ({"seed": 1 << 32, "size": 2}, "seed must be below"),
    ],
)
def test_wrong_sizes(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**({"n1": 4, "n2": 3} | arguments))


@pytest.mark.parametrize("value", [2.0, "2", True, None])
@pytest.mark.parametrize("name", ["n1", "n2", "size", "seed"])
def test_sizes_are_integers(name, value, unchecked):
    with pytest.raises(ValueError, match=f"{name} must be an integer of .*; found {value!r}"):
        sketch.TensorSRHT(**({"n1": 4, "n2": 3, "size": 2} | {name: value}))


def test_numpy_integers_are_sizes(unchecked):
    S = sketch.TensorSRHT(np.int64(4), np.int32(3), np.uint8(2))
    assert [type(v) for v in vars(S).values()] == [int] * 4
    assert (S.n1, S.n2, S.size) == (4, 3, 2)


@by_name
def test_a_size_that_does_not_compress(kind):
    """It warns and works."""
    A1, A2 = pair(3, 2)
    with pytest.warns(UserWarning, match="size=7 does not compress the 6 rows"):
        S = kind(3, 2, 7)
    assert S.apply(A1, A2).shape == (7, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(3, 2, 6)


@by_name
@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("A1", normal(5, 3), ValueError, "A1 must be 6 x any .* found 5 x 3"),
        ("A2", normal(6, 2), ValueError, "A2 must be 5 x any .* found 6 x 2"),
        ("A1", normal(6), ValueError, "A1 must be 6 x any .* found 6"),
        ("A1", normal(6, 0), ValueError, "A1 must have rows and columns"),
        ("A1", normal(6, 3).to(torch.complex128), TypeError, "A1 must hold real numbers"),
        ("A2", normal(5, 2).float(), TypeError, "one floating type; found .*A2 float32"),
        ("A2", normal(5, 2).numpy(), TypeError, "A1 is a torch tensor but A2 is ndarray"),
        ("A1", normal(6, 3).log(), ValueError, "A1 must hold finite numbers; found nan"),
        ("A2", normal(5, 2) * math.inf, ValueError, "A2 must hold finite numbers"),
        ("A1", normal(6, 3) > 0, TypeError, "A1 must hold numbers; found booleans"),
        ("A1", [["a"]], TypeError, "A2 is a torch tensor but A1 is list"),
    ],
)
def test_wrong_factors(kind, name, value, error, message, unchecked):
    A1, A2 = pair()
    given = {"A1": A1, "A2": A2} | {name: value}
    with pytest.raises(error, match=message):
        kind(6, 5, 4).apply(**given)


@by_name
def test_wrong_matrices(kind):
    S = kind(6, 5, 4).sample(*pair())
    with pytest.raises(ValueError, match=r"M must be 30 x any .* found 31 x 2"):
        S.apply_left(normal(31, 2))
    with pytest.raises(ValueError, match=r"Z must be 4 x any .* found 5 x 2"):
        S.adjoint(normal(5, 2))
    with pytest.raises(ValueError, match="A2 is missing: it must have 5 rows"):
        S.apply(normal(6, 3))


@by_name
def test_numpy_and_awkward_arrays(kind):
    A1, A2 = pair()
    S = kind(6, 5, 4, seed=1)
    want = S.apply(A1, A2)
    for change in (
        np.asfortranarray,
        lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        lambda a: a[::-1].copy()[::-1],
        lambda a: a.astype(a.dtype.newbyteorder(">")),
        np.ndarray.tolist,
    ):
        got = S.apply(change(A1.numpy()), change(A2.numpy()))
        assert isinstance(got, np.ndarray)
        require_close("numpy", got, want, 1e-14)
    frozen = A1.numpy().copy(), A2.numpy().copy()
    for a in frozen:
        a.setflags(write=False)
    require_close("read-only", S.apply(*frozen), want, 1e-14)
    wide = torch.stack([A1, A1], 2)[:, :, 0], A2.T.contiguous().T
    assert not wide[0].is_contiguous()
    require_close("strided", S.apply(*wide), want, 1e-14)
    for array, other in zip(frozen, (A1, A2), strict=True):
        assert np.array_equal(array, other.numpy())  # nothing is written to


def test_half_and_integers_are_promoted():
    A1, A2 = pair()
    S = sketch.TensorSRHT(6, 5, 4)
    with (
        pytest.warns(UserWarning, match="A1 is float16; computing in float32"),
        pytest.warns(UserWarning, match="A2 is float16; computing in float32"),
    ):
        assert S.apply(A1.half(), A2.half()).dtype == torch.float32
    with pytest.warns(UserWarning, match="A1 holds integers; computing in float64"):
        got = S.apply((9 * A1).long(), A2)
    require_close("integers", got, S.apply((9 * A1).long().double(), A2), 1e-14)


def test_gradients_are_not_recorded():
    A1, A2 = (t.requires_grad_() for t in pair())
    assert not sketch.TensorSRHT(6, 5, 4).apply(A1, A2).requires_grad


# The Walsh-Hadamard transform


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 9, 16, 31, 64, 100, 128, 500, 1024])
@pytest.mark.parametrize("c", [1, 3])
def test_hadamard(n, c):
    X = normal(n, c)
    H = scipy.linalg.hadamard(padded(n)).astype(float)
    want = H[:, :n] @ X.numpy()
    kept = X.clone()
    require_close("transform", sketch.walsh_hadamard(X), want, 1e-13)
    assert torch.equal(X, kept)
    got = sketch.walsh_hadamard(X.numpy())
    assert isinstance(got, np.ndarray)
    require_close("transform", got, want, 1e-13)
    require_close("float32", sketch.walsh_hadamard(X.float()), want, 1e-5)


@pytest.mark.parametrize("cached", [0, 1 << 30])
def test_hadamard_radices(cached, monkeypatch):
    monkeypatch.setattr(hadamard, "_CACHED", cached)
    for bits in range(12):
        radices = hadamard._radices(1 << bits, 1 << bits)
        assert math.prod(radices) == 1 << bits
        X = normal(1 << bits, 2)
        want = scipy.linalg.hadamard(1 << bits) @ X.numpy()
        require_close("transform", sketch.walsh_hadamard(X), want, 1e-13)


def test_hadamard_twice_is_n():
    X = normal(1 << 14, 3)
    require_close("twice", sketch.walsh_hadamard(sketch.walsh_hadamard(X)) / len(X), X, 1e-13)


# Leverage


def deficient(n=40, d=5, rank=2, seed=0):
    return normal(n, rank, seed=seed) @ normal(rank, d, seed=seed + 1)


def test_scores():
    A = normal(40, 4)
    want = np.square(np.linalg.qr(A.numpy())[0]).sum(1)
    require_close("scores", sketch.leverage_scores(A), want, 1e-12)
    got = sketch.leverage_scores(A.float().numpy())
    assert got.dtype == np.float32
    require_close("scores", got, want, 1e-5)


def test_scores_of_a_deficient_factor():
    """They sum to the rank, and those of a plain QR to the width."""
    A = deficient()
    B = A[:, :2]
    want = np.square(np.linalg.qr(B.numpy())[0]).sum(1)
    require_close("scores", sketch.leverage_scores(A), want, 1e-11)
    plain = np.square(np.linalg.qr(A.numpy())[0]).sum(1)
    with pytest.raises(AssertionError):
        require_close("scores", plain, want, 1e-2)
    zeros = torch.cat([A, torch.zeros(40, 2).double()], 1)
    require_close("scores", sketch.leverage_scores(zeros), want, 1e-11)
    assert float(sketch.leverage_scores(A.float()).sum()) == pytest.approx(2, abs=1e-5)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1.0, 1e160, 1e300])
def test_scores_at_any_scale(scale):
    A = normal(20, 3)
    require_close("scores", sketch.leverage_scores(A * scale), sketch.leverage_scores(A), 1e-12)


def test_scores_of_wide_and_zero_matrices():
    require_close("wide", sketch.leverage_scores(normal(3, 8)), np.ones(3), 1e-12)
    assert not sketch.leverage_scores(torch.zeros(4, 2).double()).any()


def test_rows_without_score_are_never_drawn():
    A1, A2 = deficient(), normal(30, 2)
    A1[::2] = 0
    A2[:29] = 0
    S = sketch.LeverageSampling(40, 30, 1000, seed=1).sample(A1, A2)
    assert (S.first % 2 == 1).all()
    assert (S.second == 29).all()
    assert torch.isfinite(S.weight).all()


def test_probabilities_and_weights():
    A1, A2 = pair(6, 5)
    size = 20_000
    S = sketch.LeverageSampling(6, 5, size, seed=1).sample(A1, A2)
    p = np.outer(sketch.leverage_scores(A1) / 3, sketch.leverage_scores(A2) / 2).ravel()
    index = (S.first * 5 + S.second).numpy()
    require_close("weights", S.weight, 1 / np.sqrt(size * p[index]), 1e-12)
    counts = np.bincount(index, minlength=30)
    assert scipy.stats.chisquare(counts, p * size).pvalue > 1e-6


def test_one_column_is_embedded_exactly():
    A1, A2 = normal(20, 1), normal(30, 1, seed=1)
    S = sketch.LeverageSampling(20, 30, 3).sample(A1, A2)
    assert sketch.distortion(S, A1, A2) < 1e-12


def test_leverage_needs_data():
    S = sketch.LeverageSampling(6, 5, 4)
    A1, A2 = pair()
    for call in (
        S.sample,
        lambda: S.sample(A1),
        S.to_dense,
        lambda: S.adjoint(normal(4, 2)),
        lambda: S.apply_left(normal(6, 2)),
    ):
        with pytest.raises(ValueError, match="LeverageSampling depends on the data"):
            call()
    for name, factors in (("A1", (0 * A1, A2)), ("A2", (A1, 0 * A2))):
        with pytest.raises(ValueError, match=f"{name} is zero: none of its rows"):
            S.apply(*factors)


# Distortion and sizes


@by_name
def test_distortion(kind):
    A1, A2 = deficient(20, 3), normal(10, 2, seed=7)
    S = kind(20, 10, 30, seed=2).sample(A1, A2)
    K = np.kron(A1, A2)
    U = scipy.linalg.orth(K, rcond=1e-10)
    assert U.shape[1] == 4
    SU = dense(S) @ U
    want = np.abs(np.linalg.eigvalsh(SU.T @ SU) - 1).max()
    assert sketch.distortion(S, A1, A2) == pytest.approx(want, rel=1e-10)
    assert sketch.distortion(S, A1.numpy(), A2.numpy()) == pytest.approx(want, rel=1e-10)
    if kind is not sketch.LeverageSampling:
        assert sketch.distortion(kind(20, 10, 30, seed=2), A1, A2) == pytest.approx(want, rel=1e-10)


def test_distortion_of_a_distribution_that_depends_on_the_data():
    A1, A2 = pair(20, 10)
    S = sketch.LeverageSampling(20, 10, 30, seed=2)
    want = sketch.distortion(S.sample(A1, A2), A1, A2)
    assert sketch.distortion(S, A1, A2) == pytest.approx(want, rel=1e-9)


def test_distortion_of_one_factor():
    A = normal(50, 3)
    S = sketch.CountSketch(50, size=20).sample()
    SU = dense(S) @ np.linalg.qr(A.numpy())[0]
    want = np.abs(np.linalg.eigvalsh(SU.T @ SU) - 1).max()
    assert sketch.distortion(S, A) == pytest.approx(want, rel=1e-10)
    with pytest.raises(ValueError, match="A1 is zero"):
        sketch.distortion(S, 0 * A)
    with pytest.raises(ValueError, match="A2 is missing"):
        sketch.distortion(sketch.CountSketch(50, 2, 20), A)


TABLE = {  # D = 16, epsilon 0.5, delta 0.05; 64 rows in each factor
    "leverage": 905,
    "gaussian": 894,
    "srht": 4479,
    "tensor-srht": 71018,
    "tensor-sketch": 34561,
    "countsketch": 21760,
}


@by_name
def test_sizes(kind):
    arguments = {"d1": 4, "d2": 4, "n1": 64, "n2": 64}
    got = sketch.size_for(kind, 0.5, 0.05, **arguments)
    assert got == sketch.size_for(kind.name, 0.5, 0.05, **arguments) == TABLE[kind.name]
    assert sketch.size_for(kind, 0.25, 0.05, **arguments) > got
    assert sketch.size_for(kind, 0.5, 0.01, **arguments) > got
    assert sketch.size_for(kind, 0.5, 0.05, **arguments | {"d1": 5}) > got
    more = sketch.size_for(kind, 0.5, 0.05, **arguments | {"n1": 65})
    assert (more > got) == (kind in (sketch.SRHT, sketch.TensorSRHT))


def test_sizes_are_below_the_published_ones():
    """Tropp's row norms (2011), and 11 D^2 of Avron, Nguyen and Woodruff (2014)."""
    e, delta = 0.5, 0.05
    psi = 1.5 * math.log(1.5) - 0.5
    for d1, d2, n in ((1, 1, 2), (4, 4, 64), (2, 9, 1000), (16, 16, 4096)):
        D, N = d1 * d2, padded(n)
        given = {"d1": d1, "d2": d2, "n1": n, "n2": n}

        def norm(d, t):
            return (math.sqrt(d) + math.sqrt(8 * t)) ** 2

        tail = math.log(4 * D / delta) / psi
        flat = norm(D, math.log(2 * padded(n * n) / delta)) * tail
        product = norm(d1, math.log(4 * N / delta)) * norm(d2, math.log(4 * N / delta)) * tail
        assert sketch.size_for("srht", e, delta, **given) <= flat
        assert sketch.size_for("tensor-srht", e, delta, **given) <= product
        assert sketch.size_for("tensor-sketch", e, delta, **given) <= 11 * D * D / e**2 / delta


def test_row_norms_hold_on_the_worst_vectors():
    """Random signs against the tail of ||M s||^2, M of orthonormal rows: Hsu, Kakade, Zhang."""
    draws, D = 20_000, 3
    g = torch.Generator().manual_seed(0)
    s = torch.randint(2, (60, draws), generator=g).double() * 2 - 1
    for M in (torch.eye(60)[:D].double(), orthonormal_basis(normal(60, D)).T):
        squares = (M @ s).square().sum(0)
        for t in (0.5, 1.0, 2.0, 4.0):
            count = int((squares > sizes._row_norm(D, t)).sum())
            assert scipy.stats.binom.sf(count - 1, draws, math.exp(-t)) > 1e-6


def test_one_column_needs_one_row_of_leverage():
    assert sketch.size_for("leverage", 0.1, 0.01, d1=1) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kind": "uniform"}, ValueError, "kind must be one of leverage, .* found 'uniform'"),
        ({"epsilon": 0.0}, ValueError, "epsilon must lie between 0 and 1; found 0"),
        ({"epsilon": 1.5}, ValueError, "epsilon must lie between 0 and 1"),
        ({"delta": 1.0}, ValueError, "delta must lie between 0 and 1"),
        ({"delta": math.nan}, ValueError, "delta must lie between 0 and 1"),
        ({"d1": 0}, ValueError, "d1 must be an integer of at least 1"),
        ({"kind": "tensor-srht"}, TypeError, "n1 is missing: .* tensor-srht depends on it"),
    ],
)
def test_wrong_size_arguments(arguments, error, message):
    given = {"kind": "leverage", "epsilon": 0.5, "delta": 0.05, "d1": 4} | arguments
    with pytest.raises(error, match=message):
        sketch.size_for(**given)


def test_size_after_the_transform():
    """Against its formula, with the transform done densely."""
    A1, A2 = deficient(40, 5), normal(20, 3, seed=5)
    S = sketch.TensorSRHT(40, 20, 1, seed=6).sample()
    L, v = 1.0, 1.0
    for A, signs in ((A1, S.signs1), (A2, S.signs2)):
        U = scipy.linalg.orth(A.numpy(), rcond=1e-10)
        Z = scipy.linalg.hadamard(padded(len(A)))[:, : len(A)] @ (signs.numpy()[:, None] * U)
        norms = np.square(Z).sum(1)
        L *= norms.max()
        v *= np.linalg.eigvalsh(np.einsum("i,ia,ib->ab", norms, Z, Z) / len(Z)).max()
    log = math.log(2 * 6 / 0.05)
    bernstein = (2 * (v - 1) + (2 / 3) * 0.5 * max(L - 1, 1)) * log / 0.25
    chernoff = L * log / (1.5 * math.log(1.5) - 0.5)
    got = sketch.size_after_transform(A1, A2, 0.5, 0.05, seed=6)
    assert got == math.ceil(min(bernstein, chernoff))
    assert got < sketch.size_for("tensor-srht", 0.5, 0.05, d1=2, d2=3, n1=40, n2=20)
    with pytest.raises(ValueError, match="A2 is zero"):
        sketch.size_after_transform(A1, 0 * A2, 0.5, 0.05)


def test_calibrate():
    A1, A2 = pair(20, 10)
    c = nt.sketch.calibrate("leverage", A1, A2, 0.5, 0.1, draws=50, seed=3)
    assert c == nt.sketch.calibrate(sketch.LeverageSampling, A1, A2, 0.5, 0.1, draws=50, seed=3)
    failed = [
        sketch.distortion(sketch.LeverageSampling(20, 10, c.size, seed).sample(A1, A2), A1, A2)
        > 0.5
        for seed in range(3, 53)
    ]
    assert c.rate == np.mean(failed) <= 0.1
    want = scipy.stats.binomtest(sum(failed), 50).proportion_ci(0.95, "exact")
    assert c.interval == (want.low, want.high)
    assert quality.count_failures("leverage", A1, A2, c.size - 2, 0.5, range(3, 53)) > 5
    assert (c.kind, c.epsilon, c.delta, c.draws) == ("leverage", 0.5, 0.1, 50)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be positive"),
        ({"delta": 0.0}, "delta must lie between 0 and 1"),
        ({"draws": 0}, "draws must be an integer of at least 1"),
        ({"A2": torch.zeros(5, 2).double()}, "A2 is zero"),
        ({"kind": "none"}, "kind must be one of"),
    ],
)
def test_wrong_calibrations(arguments, message):
    A1, A2 = pair()
    given = {"kind": "leverage", "A1": A1, "A2": A2, "epsilon": 0.5, "delta": 0.1} | arguments
    with pytest.raises(ValueError, match=message):
        sketch.calibrate(**given)


@by_name
def test_measure(kind):
    A1, A2 = pair(20, 10)
    got = quality.measure(kind, A1, A2, 100, range(6))
    assert (got.kind, got.size) == (kind.name, 100)
    assert 0 < got.distortion <= got.high
    assert got.seconds > 0
    if kind is not sketch.Gaussian:
        values = [sketch.distortion(kind(20, 10, 100, i).sample(A1, A2), A1, A2) for i in range(6)]
        assert got.distortion == pytest.approx(np.median(values), rel=1e-9)
        assert got.high == pytest.approx(np.quantile(values, 0.9), rel=1e-9)


def test_worst_cases():
    """One row carries a direction, in float64 as well: its score is 1."""
    scores = sketch.leverage_scores(quality.huge_row(100, 3))
    assert float(scores[0]) == pytest.approx(1, abs=1e-6)
    scores = sketch.leverage_scores(quality.identical_rows(100, 3))
    assert float(scores[:2].min()) > 0.9
    assert float(scores[2:].max()) < 0.02


# The page


def test_the_example_of_the_page():
    """It prints what it shows, measured numbers to 20 percent (draws change with torch)."""
    page = DOCS / "sketches.md"
    number = re.compile(r"\d+\.\d+|\d+")
    printed, shown = run_example(page)[1], block(page, "text")
    assert number.sub("#", printed) == number.sub("#", shown)
    found, expected = ([float(x) for x in number.findall(t)] for t in (printed, shown))
    assert found == pytest.approx(expected, rel=0.2)


@by_name
def test_the_sizes_of_the_page(kind):
    assert f"| {TABLE[kind.name]:,} |" in (DOCS / "sketches.md").read_text()
