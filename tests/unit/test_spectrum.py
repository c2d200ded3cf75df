"""Extreme eigenvalues against dense eigendecompositions, on both paths of `nt.spectrum`."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh

import newtention as nt
from newtention import memory, spectra
from newtention.derivatives.products import hessian_product
from newtention.linsolve import lanczos
from newtention.linsolve.lanczos import lanczos_extremes, lanczos_quadrature
from newtention.weights import as_weights
from tests.cases import BY_NAME, CASES, STACK, make
from tests.tolerances import EXACT

KINDS = ("full", "gauss-newton")
DTYPES = (torch.float64, torch.float32)
FIRST_DTYPE = (torch.float64, pytest.param(torch.float32, marks=pytest.mark.full))
TOL = 1e-9
"""`tol` of Lanczos runs in float64: eigenvalues are then exact to about its square."""


def require_extremes(what, values, residuals, H, tol):
    """Raise unless values (k largest, then k smallest) are those of H, and the residuals bound.

    tol allows for rounding, relative to the largest |eigenvalue|; the values may also be off by
    their residuals.
    """
    values, residuals = (torch.as_tensor(np.asarray(t)).double() for t in (values, residuals))
    exact = torch.from_numpy(np.linalg.eigvalsh(np.asarray(H, dtype=np.float64)))
    k = len(values) // 2
    want = torch.cat([exact.flip(0)[:k], exact[:k]])
    noise = tol * float(exact.abs().max())
    error = (values - want).abs()
    if not bool((error <= residuals + noise).all()):
        raise AssertionError(f"{what}: found {values}, expected {want}, residuals {residuals}")
    require_bound(what, values, residuals, exact, noise)


def require_bound(what, values, residuals, exact, noise):
    """Raise unless an eigenvalue lies within the residual of each value."""
    nearest = (values[:, None] - exact).abs().amin(1)
    if not bool((nearest <= residuals + noise).all()):
        raise AssertionError(f"{what}: eigenvalues at {nearest}, residuals {residuals}")


def check_case(case, kind, dtype=torch.float64, compute=spectra.spectrum, k=3, **settings):
    """`spectrum` against the oracle's matrix."""
    H = case.oracle[2] if kind == "full" else case.oracle_gauss_newton
    s = compute(case.problem(dtype), *case.point(dtype), k=k, kind=kind, **settings)
    tol = EXACT[dtype]
    if case.name.startswith("saturated"):
        tol = 1e-3 if dtype == torch.float32 else 1e-9
    values = torch.cat([s.largest, s.smallest])
    residuals = torch.cat([s.largest_residuals, s.smallest_residuals])
    require_extremes(f"{case.name}, {kind}", values, residuals, H, tol)
    if s.trace_error == 0:
        size = float(torch.linalg.eigvalsh(H).abs().sum())
        if not abs(s.trace - float(H.trace())) <= tol * size:
            raise AssertionError(f"{case.name}: trace {s.trace}, expected {float(H.trace())}")
    return s


def diagonal(d):
    """Products with diag(d) in a basis that is not the vectors' own, and the dense matrix."""
    g = torch.Generator().manual_seed(5)
    u = torch.randn(len(d), generator=g, dtype=torch.float64)
    u = (u / torch.linalg.vector_norm(u)).to(d)

    def reflect(V):
        return V - 2 * (V @ u)[:, None] * u

    def product(V):
        return reflect(reflect(V) * d)

    return product, product(torch.eye(len(d), dtype=d.dtype))


def run(product, d, k=3, width=None, tol=TOL, seed=0):
    """Values and residuals by `lanczos_extremes`."""
    generator = torch.Generator().manual_seed(seed)
    V = lanczos_extremes(product, d, k, width or 16 * k, tol, generator)
    gram = (V @ V.mT).double()
    overlap = gram[:k, :k] - torch.eye(k)
    assert float(overlap.abs().max()) < 100 * torch.finfo(d.dtype).eps
    W = product(V)
    values = (V * W).sum(1)
    return values, torch.linalg.vector_norm(W - values[:, None] * V, dim=1)


def factored_problem(dtype=torch.float64):
    """A layer with biases, two heads and a gauge: many zero eigenvalues of its own."""
    g = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    layer = nt.FactoredAttention(
        *(normal(2, 3, 2), normal(2, 4, 2), normal(2, 2, 3), normal(2, 3, 5)),
        *(normal(2, 2), normal(2, 2), normal(2, 3), normal(5)),
    )
    return nt.AttentionProblem(normal(7, 3), normal(9, 4), normal(9, 2), normal(7, 5)), layer


@pytest.fixture(scope="module")
def large():
    """1600 unknowns, beyond the dense path, and both exact matrices."""
    g = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    problem = nt.AttentionProblem(normal(48, 20), normal(40, 20), normal(40, 20), normal(48, 20))
    X, Y = 0.1 * normal(2, 20, 20), 0.3 * normal(2, 20, 20)
    return problem, X, Y, {kind: nt.hessian(problem, X, Y, kind).to_dense() for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dense(case, kind):
    k = min(3, as_weights(case.problem(), *case.point()).layer.size)
    s = check_case(case, kind, k=k)
    assert s.method == "dense eigendecomposition"
    assert s.converged


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FIRST_DTYPE)
@pytest.mark.parametrize(
    "name", ["two heads", "three heads, padded", "proximity", "token weights, heads", "saturated"]
)
def test_lanczos_on_cases(name, dtype, kind, monkeypatch):
    """The iterative path, its basis smaller than the matrix, so that it restarts."""
    monkeypatch.setattr(spectra, "DENSE_UNKNOWNS", 0)
    monkeypatch.setattr(spectra, "BASIS_BLOCKS", 6)
    tol = TOL if dtype == torch.float64 else 1e-5
    k = 1 if name in ("proximity", "saturated") else 2
    s = check_case(BY_NAME[name], kind, dtype, k=k, steps=2, tol=tol)
    assert s.method == "block Lanczos"
    assert s.largest.dtype == dtype


def test_a_shifted_spectrum_fails():
    def shifted(*args, **settings):
        s = spectra.spectrum(*args, **settings)
        return replace(s, largest=s.largest + 1e-6 * s.largest.abs().max())

    def interior(problem, X, Y, k, kind):
        """Drops the extreme pair: every value is an eigenvalue, but not the right one."""
        s = spectra.spectrum(problem, X, Y, k=k + 1, kind=kind)
        return replace(
            s,
            largest=s.largest[1:],
            smallest=s.smallest[1:],
            largest_residuals=s.largest_residuals[1:],
            smallest_residuals=s.smallest_residuals[1:],
        )

    def traceless(*args, **settings):
        return replace(spectra.spectrum(*args, **settings), trace=1.0)

    for wrong in (shifted, interior, traceless):
        with pytest.raises(AssertionError):
            check_case(BY_NAME["two heads"], "full", compute=wrong)
    with pytest.raises(AssertionError):
        check_case(BY_NAME["two heads"], "full", kind_of_product="full", compute=_other_kind)


def _other_kind(problem, X, Y, k, kind, kind_of_product):
    return spectra.spectrum(problem, X, Y, k=k, kind="gauss-newton")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FIRST_DTYPE)
def test_factored(dtype, kind, monkeypatch):
    problem, layer = factored_problem()
    H = nt.hessian_operator(problem, layer, kind=kind).to_dense()
    problem, layer = factored_problem(dtype)
    dense = spectra.spectrum(problem, layer, k=4, kind=kind)
    monkeypatch.setattr(spectra, "DENSE_UNKNOWNS", 0)
    monkeypatch.setattr(spectra, "BASIS_BLOCKS", 6)
    tol = TOL if dtype == torch.float64 else 1e-5
    iterative = spectra.spectrum(problem, layer, k=4, kind=kind, steps=2, tol=tol)
    assert (dense.method, iterative.method) == ("dense eigendecomposition", "block Lanczos")
    for s in (dense, iterative):
        assert layer.theta.numel() == s.N
        values = torch.cat([s.largest, s.smallest])
        residuals = torch.cat([s.largest_residuals, s.smallest_residuals])
        require_extremes(s.method, values, residuals, H, EXACT[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_large_against_dense_and_scipy(large, kind):
    problem, X, Y, matrices = large
    # Beside its zeros the Gauss-Newton matrix has many that are nearly zero: slow residuals.
    tol = 1e-8 if kind == "full" else 1e-4
    s = spectra.spectrum(problem, X, Y, k=4, kind=kind, tol=tol)
    assert s.method == "block Lanczos"
    assert s.converged
    values = torch.cat([s.largest, s.smallest])
    residuals = torch.cat([s.largest_residuals, s.smallest_residuals])
    require_extremes("large", values, residuals, matrices[kind], 1e-12)
    scale = float(s.largest[0])
    operator = nt.hessian_operator(problem, X, Y, kind).to_scipy()
    for which, got in (("LA", s.largest), ("SA", s.smallest)):
        if kind == "gauss-newton" and which == "SA":
            continue  # zero, more than 4 times over: eigsh need not find every copy
        want = np.sort(eigsh(operator, k=4, which=which, tol=1e-10)[0])
        assert np.abs(np.sort(got.numpy()) - want).max() < 1e-9 * scale
    generator = torch.Generator().manual_seed(0)
    forms = lanczos_quadrature(lambda V: V @ matrices[kind], X.new_zeros(1600), 8, 1, generator)[2]
    assert s.trace_error == pytest.approx(1600 * float(forms.std()) / 8**0.5, rel=1e-6)
    # 5 standard errors: the seed is fixed.
    assert abs(s.trace - float(matrices[kind].trace())) < 5 * s.trace_error


def test_default_tolerance_gives_far_better_eigenvalues(large):
    problem, X, Y, matrices = large
    s = spectra.spectrum(problem, X, Y, k=4)
    exact = torch.linalg.eigvalsh(matrices["full"])
    scale = float(exact.abs().max())
    assert s.converged
    assert float(s.largest_residuals.max()) <= s.tol * scale
    assert float((s.largest - exact.flip(0)[:4]).abs().max()) < 1e-6 * scale
    assert float((s.smallest - exact[:4]).abs().max()) < 1e-6 * scale
    # Products of the trace, the iteration and the final residuals.
    assert 8 + 4 + 8 < s.products < 1600


SPECTRA = {
    "zero": torch.zeros(70),
    "identity": torch.full((70,), 2.5),
    "rank one": torch.cat([torch.tensor([7.0]), torch.zeros(69)]),
    "rank one, negative": torch.cat([torch.tensor([-7.0]), torch.zeros(69)]),
    "multiple ends": torch.cat([torch.tensor([9.0, 9, 9, 4, -2, -2, -2]), torch.zeros(193)]),
    "multiple in a continuum": torch.cat(
        [torch.tensor([3.0, 3, 3, -3, -3, -3]), torch.linspace(-2, 2, 250)]
    ),
    "triple zero at the end": torch.cat([torch.zeros(3), torch.linspace(0.5, 2, 250)]),
    "tight cluster": torch.cat([1 + 1e-6 * torch.arange(5.0), torch.linspace(-0.5, 0.5, 200)]),
    "uniform": torch.linspace(-1, 1, 300),
    "one": torch.tensor([3.0]),
    "two": torch.tensor([3.0, -1.0]),
    "five": torch.arange(5.0),
    "decay": torch.logspace(3, -3, 300),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECTRA)
def test_degenerate_and_clustered(name, dtype):
    """Every copy of a multiple eigenvalue is found, and bases that fill the space end."""
    d = SPECTRA[name].to(torch.float64).to(dtype)
    product, H = diagonal(d)
    k = min(3, len(d))
    tol = TOL if dtype == torch.float64 else 1e-5
    values, residuals = run(product, d, k, 64, tol)
    require_extremes(name, values, residuals, (H + H.mT) / 2, 20 * torch.finfo(dtype).eps)
    if name == "decay":
        assert float(residuals[k:].max()) > 1e-7  # hard: the restarts end first
        return
    want = d.sort().values.double()
    want = torch.cat([want.flip(0)[:k], want[:k]])
    error = float((values.double() - want).abs().max())
    assert error <= tol * float(d.abs().max())


def test_orthogonalisation_of_nearly_dependent_rows():
    """One pass would leave 1e-6 of V in what remains."""
    g = torch.Generator().manual_seed(0)
    V = torch.linalg.qr(torch.randn(500, 20, generator=g, dtype=torch.float64))[0].mT
    rest = torch.randn(3, 500, generator=g, dtype=torch.float64)
    W = torch.randn(3, 20, generator=g, dtype=torch.float64) @ V + 1e-10 * rest
    left, C = lanczos._orthogonalise(V, W)
    length = torch.linalg.vector_norm(left, dim=1)
    assert float((V @ left.mT).abs().max()) < 1e-14 * float(length.min())
    assert torch.allclose(C, V @ W.mT, rtol=1e-12)


def test_blocks_of_long_float32_rows():
    """Orthonormal to rounding where sums of 500,000 terms are not, and W = coupling^T block."""
    g = torch.Generator().manual_seed(0)
    W = torch.randn(3, 500_001, generator=g)
    W[1] = W[0] + 1e-2 * W[1]
    block, coupling = lanczos._next_block(W[:0], W, 0.0)
    Q = block.double()
    assert float((Q @ Q.mT - torch.eye(3)).abs().max()) < 5e-7
    error = coupling.mT @ Q - W.double()
    assert float(error.norm()) < 1e-6 * float(W.double().norm())
    exact = W.double() @ W.double().mT
    assert float((lanczos._inner(W, W) - exact).abs().max()) < 1e-7 * float(exact.max())


def test_no_more_rows_than_dimensions():
    V, W = torch.eye(5).double()[:4], torch.ones(3, 5).double() + torch.eye(5).double()[:3]
    block, _ = lanczos._next_block(V, W, 0.0)
    assert block.shape == (1, 5)


def test_one_vector_misses_copies():
    """Why the block has k vectors."""
    d = SPECTRA["multiple ends"].double()
    product, _ = diagonal(d)
    basis = lanczos._tridiagonals(product, torch.ones(1, 200).double() / 200**0.5, 64)[0]
    values = torch.linalg.eigvalsh(basis)
    assert int((values > 8).sum()) == 1
    assert int((run(product, d)[0] > 8).sum()) == 3


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_free(size, dtype):
    d = SPECTRA["uniform"].to(dtype)
    plain, _ = run(diagonal(d)[0], d, tol=1e-5)
    scaled, _ = run(diagonal(d * size)[0], d * size, tol=1e-5)
    assert float((scaled / size - plain).abs().max()) < 1e-5


@pytest.mark.parametrize("seed", range(10))
def test_residuals_bound_before_convergence(seed, monkeypatch):
    """The bound holds for any vectors, converged or not."""
    monkeypatch.setattr(lanczos, "RESTARTS", seed % 3)
    g = torch.Generator().manual_seed(seed)
    d = torch.randn(300, generator=g, dtype=torch.float64)
    product, _ = diagonal(d)
    values, residuals = run(product, d, 3, 18, 1e-14, seed)
    assert float(residuals.max()) > 1e-6
    require_bound("unconverged", values, residuals, d, 1e-14)
    with pytest.raises(AssertionError):
        require_bound("planted", values, residuals * 1e-3, d, 1e-14)


def test_not_converged_is_said(large, monkeypatch):
    problem, X, Y, _ = large
    monkeypatch.setattr(lanczos, "RESTARTS", 0)
    s = spectra.spectrum(problem, X, Y, k=1, steps=16, tol=1e-12)
    assert not s.converged
    assert "Not converged" in s.summary()
    assert "not converged" in repr(s)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_in_numpy_out(dtype):
    rng = np.random.default_rng(0)
    A1, A2, A3, B = (rng.standard_normal(s).astype(dtype) for s in ((6, 3), (7, 4), (7, 2), (6, 5)))
    problem = nt.AttentionProblem(A1, A2, A3, B)
    s = spectra.spectrum(problem, np.ones((3, 4), dtype), np.ones((2, 5), dtype), density=True)
    arrays = [s.largest, s.smallest, s.largest_residuals, s.smallest_residuals]
    density = s.density
    arrays += [density.grid, density.values, density.nodes, density.weights]
    for array in arrays:
        assert isinstance(array, np.ndarray)
        assert array.dtype == dtype
    assert isinstance(s.trace, float)
    assert s.largest.shape == s.smallest_residuals.shape == (6,)
    assert list(s.largest) == sorted(s.largest, reverse=True)
    assert list(s.smallest) == sorted(s.smallest)


def test_deterministic_under_the_seed(large):
    problem, X, Y, _ = large
    first, again, other = (
        spectra.spectrum(problem, X, Y, k=2, seed=seed, density=True, steps=8, probes=2)
        for seed in (3, 3, 4)
    )
    assert torch.equal(first.largest, again.largest)
    assert torch.equal(first.density.nodes, again.density.nodes)
    assert (first.trace, first.trace_error) == (again.trace, again.trace_error)
    assert first.trace != other.trace


def test_the_global_generator_is_not_used(large):
    problem, X, Y, _ = large
    state = torch.get_rng_state()
    spectra.spectrum(problem, X, Y, k=1, steps=8)
    assert torch.equal(torch.get_rng_state(), state)


def test_products_are_counted(large, monkeypatch):
    counted = []

    def counting(problem, layer, theta, directions, kind="full"):
        counted.append(directions.shape[1])
        return hessian_product(problem, layer, theta, directions, kind)

    monkeypatch.setattr(spectra, "hessian_product", counting)
    problem, X, Y, _ = large
    s = spectra.spectrum(problem, X, Y, k=2, density=True, steps=4, probes=3)
    assert s.products == sum(counted)
    assert counted[:4] == [3] * 4
    small = spectra.spectrum(BY_NAME["one sequence"].problem(), *BY_NAME["one sequence"].point())
    assert small.products == small.N + 12


def test_dense_density_is_exact():
    case = BY_NAME["two heads"]
    s = spectra.spectrum(case.problem(), *case.point(), k=1, density=True)
    exact = torch.linalg.eigvalsh(case.oracle[2])
    scale = float(exact.abs().max())
    assert float((s.density.nodes - exact).abs().max()) < 1e-10 * scale
    assert torch.allclose(s.density.weights, torch.full_like(exact, 1 / len(exact)))
    grid, values = s.density.grid, s.density.values
    assert float(torch.trapezoid(values, grid)) == pytest.approx(1, abs=1e-12)
    assert s.density.width == pytest.approx(float(exact[-1] - exact[0]) / 64)
    z = (grid[:, None] - exact) / s.density.width
    want = (torch.exp(-(z**2) / 2) / (2 * np.pi) ** 0.5).mean(1) / s.density.width
    # Four deviations of the outermost Gaussians are on the grid.
    assert float((values - want).abs().max()) < 1e-4 * float(want.max())


@pytest.mark.parametrize("name", ["zero", "identity", "rank one", "one", "five", "decay"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quadrature_breaks_down_gracefully(name, dtype):
    """Fewer distinct eigenvalues than steps: the quadrature ends early and is exact."""
    d = SPECTRA[name].to(dtype)
    product, _ = diagonal(d)
    generator = torch.Generator().manual_seed(0)
    nodes, weights, forms = lanczos_quadrature(product, d, 4, 40, generator)
    assert bool(torch.isfinite(nodes).all())
    assert float(weights.sum()) == pytest.approx(1, abs=1e-6)
    assert float(nodes @ weights) == pytest.approx(float(forms.mean()), rel=1e-5, abs=1e-12)
    if name != "decay":
        assert len(nodes) <= 4 * 6
    grid, values, width = spectra.broadened(nodes, weights, 40)
    assert width > 0
    assert float(torch.trapezoid(values, grid)) == pytest.approx(1, abs=1e-9)


def test_probes_one_by_one_give_the_same(monkeypatch):
    d = SPECTRA["uniform"].double()
    product, _ = diagonal(d)
    together, apart = [], []
    for got, limit in ((together, 1 << 28), (apart, 1)):
        monkeypatch.setattr(lanczos, "GROUP_BYTES", limit)
        generator = torch.Generator().manual_seed(0)
        got.extend(lanczos_quadrature(product, d, 3, 10, generator))
    for a, b in zip(together, apart, strict=True):
        assert torch.allclose(a, b, rtol=1e-9)


def test_errors(unchecked):
    case = BY_NAME["one sequence"]
    problem, (X, Y) = case.problem(), case.point()
    n = X.numel() + Y.numel()
    for settings, message in (
        ({"k": 0}, "k must be an integer of at least 1; found 0"),
        ({"k": 2.0}, "k must be an integer"),
        ({"k": True}, "k must be an integer"),
        ({"k": n + 1}, f"k must be at most the number of unknowns, {n}; found {n + 1}"),
        ({"kind": "fisher"}, 'kind must be "full" or "gauss-newton"'),
        ({"probes": 1}, "probes must be an integer of at least 2"),
        ({"steps": 1}, "steps must be an integer of at least 2"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"tol": 0.0}, "tol must be a number between 0 and 1"),
        ({"tol": float("nan")}, "tol must be a number between 0 and 1"),
        ({"tol": "small"}, "tol must be a number between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            spectra.spectrum(problem, X, Y, **settings)
    stack = nt.AttentionProblem.stack([STACK[0].problem(), STACK[4].problem()])
    with pytest.raises(ValueError, match="one problem"):
        spectra.spectrum(stack, torch.stack([X, X]), torch.stack([Y, Y]))


@pytest.mark.parametrize("k", [1, 22])
def test_every_eigenvalue_may_be_asked_for(k):
    case = BY_NAME["one sequence"]
    s = spectra.spectrum(case.problem(), *case.point(), k=k)
    exact = torch.linalg.eigvalsh(case.oracle[2])
    assert s.N == len(exact) == 22
    assert float((s.smallest - exact[:k]).abs().max()) < 1e-10 * float(exact.abs().max())


def test_smallest_problem():
    case = make("tiny", [(1, 1)], "single", widths=(1, 1, 1, 1))
    s = spectra.spectrum(case.problem(), *case.point(), k=2, density=True)
    assert s.N == 2
    assert bool(torch.isfinite(s.density.values).all())


def test_overflow_is_refused():
    case = BY_NAME["one sequence"]
    with pytest.raises(ValueError, match="overflow"):
        spectra.spectrum(case.problem(), case.X, case.Y * 1e300)


def test_memory_is_refused_before_it_is_taken(large, monkeypatch):
    problem, X, Y, _ = large
    monkeypatch.setattr(memory, "available_bytes", lambda device: 100_000)
    with pytest.raises(MemoryError, match="lower steps= or k="):
        spectra.spectrum(problem, X, Y)
    with pytest.raises(MemoryError, match="lower steps= or k="):
        spectra.spectrum(problem, X, Y, k=200)


def test_summary(large):
    problem, X, Y, _ = large
    text = spectra.spectrum(problem, X, Y, k=2, density=True, steps=8, probes=2).summary()
    for part in ("Hessian of 1600 unknowns", "block Lanczos", "standard error", "16 nodes"):
        assert part in text
    case = BY_NAME["one sequence"]
    s = spectra.spectrum(case.problem(), *case.point(), kind="gauss-newton", k=9)
    assert "Gauss-Newton matrix of 22 unknowns" in s.summary()
    assert "standard error" not in s.summary()
    assert "... (9 in all)" in s.summary()
    assert repr(s).startswith("Spectrum(gauss-newton, N 22: ")


def shown_spectrum(smallest, residuals, **changes):
    """What is shown of these smallest eigenvalues, under a largest of 7."""
    case = BY_NAME["one sequence"]
    found = spectra.spectrum(case.problem(), *case.point(), k=len(smallest))
    fields = {
        "smallest": np.array(smallest),
        "smallest_residuals": np.array(residuals),
        "largest": np.full(len(smallest), 7.0),
        "largest_residuals": np.full(len(smallest), 1e-12),
    }
    s = replace(found, **fields, **changes)
    return repr(s), s.summary(), s._repr_html_()


def test_eigenvalues_are_shown_with_their_bounds():
    line, *texts = shown_spectrum([-3e-3, 2e-3, 1.0], [2e-6, 3e-6, 4e-7])
    assert "-0.003 ± 2e-06 to 7 ± 1e-12, " in line
    assert "converged to 1e-04 of the largest" in line
    for text in texts:
        assert "7 ± 1e-12, 7 ± 1e-12" in text
        assert "-0.003 ± 2e-06, 0.002 ± 3e-06, 1 ± 4e-07" in text
        assert "Within each bound (±) lies an eigenvalue of the matrix." in text
    assert not any("indistinguishable" in text for text in (line, *texts))


def test_eigenvalues_below_their_bounds_are_called_indistinguishable_from_0():
    line, *texts = shown_spectrum([-3e-5, 2e-5, 1.0], [8e-5, 2e-6, 4e-7])
    assert "-3e-05 ± 8e-05 (indistinguishable from 0) to 7 ± 1e-12, " in line
    for text in texts:
        assert "1 ± 4e-07; 1 of 3 indistinguishable from 0" in text
    line = shown_spectrum([-3e-5], [8e-5], trace_error=0.5, converged=False)[0]
    assert "(standard error 0.5)" in line
    assert "converged to" not in line
