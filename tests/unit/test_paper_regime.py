"""The regime of the paper's method: its bound, the regulariser's inverse and sketch, refusals."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

import newtention as nt
from newtention.approximate_newton import paper_regime
from newtention.bounds.contraction import sharp_energy_factor
from newtention.bounds.dominance import Accuracy, Dominance, accuracy, spread
from newtention.bounds.paper import lemma_9_1_dominance
from newtention.derivatives.hessian import second_order
from newtention.layers import Bilinear
from newtention.memory import LiveBytes
from newtention.newton import regime
from newtention.newton.regime import (
    dominance_at,
    exact_accuracy,
    output_map,
    sufficient_factor,
    with_weights_times,
)
from newtention.newton.token_metric import TokenMetric, metric_bytes
from newtention.newton.varpro import project

SKETCHES = ("none", "leverage", "tensor-srht")


def randn(g, *shape):
    return torch.randn(shape, generator=g, dtype=torch.float64)


def random_case(seed):
    """A problem of one to three sequences and one or two heads, and a point, of any size."""
    rng = np.random.default_rng(seed)
    g = torch.Generator().manual_seed(seed)
    d1, d2, d3, p = (int(x) for x in rng.integers(1, 4, 4))
    count, h = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    n, m = (rng.integers(1, 12, count).tolist() for _ in range(2))
    A1, A2, A3 = randn(g, sum(n), d1), randn(g, sum(m), d2), randn(g, sum(m), d3)
    B = randn(g, sum(n), p) * 10 ** rng.uniform(-2, 2)
    kind = seed % 8
    if kind == 1:
        A1 *= 10 ** randn(g, sum(n), 1)
    elif kind == 2:
        A2 += 5 * randn(g, 1, d2)
    elif kind == 3:
        A1[:] = A1[:1].clone()
    elif kind == 4:
        A3 = A2
    elif kind == 5:
        A2[:, -1] = A2[:, 0].clone()
    elif kind == 6:
        A2[::2] = A2[:1].clone()
    w = (0.3 * randn(g, sum(m))).exp() * 10 ** rng.uniform(-1, 1.5)
    problem = nt.AttentionProblem.from_ragged(
        A1,
        B,
        offsets=[0, *np.cumsum(n).tolist()],
        keys=A2,
        values=A3,
        key_offsets=[0, *np.cumsum(m).tolist()],
        scale=float(rng.uniform(0.3, 2)),
        query_weights=0.1 + 2 * torch.rand(sum(n), generator=g, dtype=torch.float64),
        regularizer=nt.TokenWeights(w),
    )
    X, Y = randn(g, h, d1, d2) * 10 ** rng.uniform(-2, 1.5), randn(g, h, A3.shape[1], p)
    return problem, X, Y * 10 ** rng.uniform(-2, 1.5)


def at(problem, X, Y, sketch="none", seed=0):
    """The bound's parts, H and H~ in coordinates where K is the identity, and the metric."""
    layer = Bilinear(len(X), *problem.widths)
    theta = layer.pack(X[None], Y[None])
    metric = TokenMetric.of(problem, sketch, None, seed)
    output = output_map(problem, layer, theta)
    parts = dominance_at(problem, layer, theta, metric, output)
    H = second_order(problem, X[None], Y[None])[3].to_dense()[0]
    exact = TokenMetric.of(problem).whitening()
    root = output.inverse.root[0].contiguous()
    W = torch.block_diag(*[exact] * len(X), torch.kron(root, torch.eye(layer.p).double()))
    W = W[:, W.any(0)]
    sketched = metric.whitening()
    V = torch.block_diag(*[sketched] * len(X), torch.kron(root, torch.eye(layer.p).double()))
    V = V[:, V.any(0)]
    return parts, W.T @ H @ W, V.T @ H @ V


def violation(parts, sketch, whitened, both):
    """By how much the exact eigenvalues leave the bounds, relative; negative if they do not."""
    smallest, largest = parts.eigenvalues()
    exact = torch.linalg.eigvalsh(whitened) - 1
    found = [float(exact[-1]) - largest, smallest - float(exact[0])]
    bound = accuracy(parts, sketch)
    values = torch.linalg.eigvalsh(both)
    found.append(bound.lower - 1 / float(values[-1]))
    if values[0] > 0 and bound.upper < math.inf:
        found.append((1 / float(values[0]) - bound.upper) / bound.upper)
    return max(found) / (1 + abs(largest) + abs(smallest))


def cases(full):
    return range(1500 if full else 48)


def test_bound_dominates_the_exact_eigenvalues(full, unchecked):
    inside = 0
    for seed in cases(full):
        sketch = SKETCHES[seed % 3]
        problem, X, Y = random_case(seed)
        spectrum = TokenMetric.of(problem, sketch, None, seed).spectrum
        if not spectrum[0] > 0:  # too few rows to invert: nothing is claimed
            assert accuracy(Dominance(0.0, 0.0, 0.0, 0.0, 0.0), spectrum).epsilon == 1.0
            continue
        parts, whitened, both = at(problem, X, Y, sketch, seed)
        assert violation(parts, spectrum, whitened, both) <= 1e-9, seed
        inside += accuracy(parts, spectrum).epsilon < 0.5
    assert inside > len(cases(full)) / 4


@pytest.mark.full
def test_a_search_finds_no_violation(unchecked):
    """Hill climbing on the point, towards an exact eigenvalue of E at its bound."""
    closest = 0.0
    for seed in range(24):
        problem, X, Y = random_case(seed)
        g = torch.Generator().manual_seed(seed)
        best = 0.0
        for _ in range(150):
            near = (1 + 0.5 * randn(g, *X.shape)) * X, (1 + 0.5 * randn(g, *Y.shape)) * Y
            parts, whitened, _ = at(problem, *near)
            exact = torch.linalg.eigvalsh(whitened) - 1
            if max(abs(exact[0]), exact[-1]) < 1e-6:
                continue  # rounding
            smallest, largest = parts.eigenvalues()
            found = max(float(exact[-1]) / largest, float(exact[0]) / smallest)
            if found > best:
                best, (X, Y) = found, near
        assert best <= 1 + 1e-9
        closest = max(closest, best)
    assert closest > 0.9


@pytest.mark.parametrize("part", ["gauss_newton", "positive", "negative", "mixed"])
def test_every_part_of_the_bound_is_needed(part, unchecked):
    caught = 0
    for seed in range(200):
        problem, X, Y = random_case(seed)
        parts, whitened, both = at(problem, X, Y)
        caught += violation(parts._replace(**{part: 0.0}), (1.0, 1.0), whitened, both) > 1e-9
        if caught:
            break
    assert caught


def test_a_sketch_taken_for_exact_would_be_noticed(unchecked):
    problem = noise_problem(100.0)
    parts, *exact = at(
        problem, torch.zeros(1, 3, 3).double(), torch.eye(3).double()[None], "leverage"
    )
    assert violation(parts, TokenMetric.of(problem, "leverage").spectrum, *exact) <= 1e-9
    assert violation(parts, (1.0, 1.0), *exact) > 1e-2


def test_spread_is_both_bounds_of_the_form(unchecked):
    g = torch.Generator().manual_seed(0)
    M, q, a, mu = (
        torch.rand(1, 6, 5, generator=g).double(),
        *(randn(g, *s) for s in ((6, 2), (1, 5, 3), (1, 6, 3))),
    )
    differences = a[0][None] - mu[0][:, None]
    rows = torch.einsum("ja,jkb->jkab", q, differences).flatten(2)
    form = torch.einsum("jk,jkx,jky->xy", M[0], rows, rows)
    found = spread(M, q, a, mu)
    tight = float(torch.linalg.eigvalsh(form)[-1])
    for matrix in (found.left, found.right):
        assert float(torch.linalg.eigvalsh(matrix[0])[-1]) >= tight
        assert float(matrix[0].trace()) == pytest.approx(float(form.trace()))
    assert found.bound() == pytest.approx(
        min(float(torch.linalg.eigvalsh(t[0])[-1]) for t in found)
    )
    one = spread(M, q[:, :1], a[..., :1], mu[..., :1])  # a single direction: sharp
    rows = q[:, :1, None] * differences[..., :1].mT
    assert one.bound() == pytest.approx(float((M[0] * rows[:, 0].square()).sum()))


def test_epsilon_is_what_contraction_needs():
    """||I - S^-1|| <= e / (1 - e) and S >= 1 - e for S between lower and upper."""
    for lower, upper in ((0.9, 1.05), (0.6, 1.0), (0.99, 3.0), (0.7, 0.8)):
        found = Accuracy(lower, upper)
        e = found.epsilon
        worst = max(abs(1 - 1 / s) for s in np.linspace(lower, upper, 100))
        assert e / (1 - e) == pytest.approx(max(1 / lower - 1, 1 - 1 / upper))
        assert worst <= e / (1 - e) * (1 + 1e-12)
        assert lower >= 1 - e - 1e-12
        assert e <= found.two_sided + 1e-12
        assert sharp_energy_factor(e, 0.0) == pytest.approx(found.rate)
    assert Accuracy(0.5, math.inf).epsilon == 0.5
    assert Accuracy(0.0, math.inf).epsilon == 1.0


def test_exact_accuracy_is_the_generalised_spectrum(unchecked):
    problem, X, Y = random_case(16)
    layer = Bilinear(len(X), *problem.widths)
    theta = layer.pack(X[None], Y[None])
    metric = TokenMetric.of(problem, "leverage", 40)
    output = output_map(problem, layer, theta)
    H = second_order(problem, X[None], Y[None])[3].to_dense()[0]
    unit = torch.eye(layer.size_x, dtype=H.dtype).view(-1, layer.heads, layer.d1, layer.d2)
    inverse = torch.stack([metric.solve(e).flatten() for e in unit])
    K = H.clone()
    K[: layer.size_x] = K[:, : layer.size_x] = 0
    K[: layer.size_x, : layer.size_x] = torch.linalg.inv(inverse)
    values = scipy.linalg.eigh(H.numpy(), K.numpy(), eigvals_only=True)
    found = exact_accuracy(problem, layer, theta, metric, output)
    assert found.lower == pytest.approx(1 / values[-1])
    assert found.upper == (pytest.approx(1 / values[0]) if values[0] > 0 else math.inf)


# The regulariser's curvature


def tokens_problem(lengths, d=3, rank=None, dtype=torch.float64, seed=0, w=2.0):
    g = torch.Generator().manual_seed(seed)
    total, offsets = sum(lengths), [0, *np.cumsum(lengths).tolist()]
    A = randn(g, total, d) if rank is None else randn(g, total, rank) @ randn(g, rank, d)
    weights = w * (1 + torch.rand(total, generator=g, dtype=torch.float64))
    return nt.AttentionProblem.from_ragged(
        A.to(dtype),
        randn(g, total, 2).to(dtype),
        offsets=offsets,
        keys=randn(g, total, d).to(dtype),
        key_offsets=offsets,
        values=randn(g, total, 2).to(dtype),
        regularizer=nt.TokenWeights(weights.to(dtype)),
    )


@pytest.mark.parametrize("lengths", [[20], [7, 12, 12, 5]])
@pytest.mark.parametrize("rank", [None, 2])
def test_solve_inverts_the_curvature(lengths, rank):
    problem = tokens_problem(lengths, rank=rank)
    R = problem.quadratic.curvature_x()[0]
    g = torch.Generator().manual_seed(1)
    X = (R @ randn(g, 9, 2)).T.reshape(2, 3, 3).contiguous()  # in the range
    found = TokenMetric.of(problem).solve(X)
    torch.testing.assert_close((R @ found.flatten(1).T).T.view_as(X), X, rtol=1e-9, atol=1e-9)
    expected = (torch.linalg.pinv(R, hermitian=True) @ X.flatten(1).T).T.view_as(X)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("lengths", [[20], [7, 12, 12, 5]])
@pytest.mark.parametrize("sketch", ["leverage", "tensor-srht"])
def test_sketch_is_measured_not_trusted(lengths, sketch):
    problem = tokens_problem(lengths)
    metric = TokenMetric.of(problem, sketch, 60, seed=3)
    assert metric.rows == 60 * len(lengths)
    R = problem.quadratic.curvature_x()[0]
    unit = torch.eye(9, dtype=R.dtype).view(9, 1, 3, 3)
    sketched = torch.linalg.inv(torch.stack([metric.solve(e).flatten() for e in unit]))
    values = scipy.linalg.eigh(sketched.numpy(), R.numpy(), eigvals_only=True)
    assert metric.spectrum == pytest.approx((values[0], values[-1]))
    assert metric.spectrum[0] < 1 < metric.spectrum[1]
    W = metric.whitening()
    torch.testing.assert_close(W @ W.T, torch.linalg.inv(sketched), rtol=1e-8, atol=1e-12)


def test_sketch_with_too_few_rows_proves_nothing():
    problem = tokens_problem([20])
    metric = TokenMetric.of(problem, "leverage", 4)
    assert metric.spectrum[0] < 1e-9
    X = torch.zeros(3, 3).double()
    found = paper_regime(problem, X, torch.zeros(2, 2).double(), sketch="leverage", sketch_size=4)
    assert not found.inside
    assert found.w_factor == math.inf
    assert "the sketch alone" in found.sentence
    for sketch in ("leverage", "tensor-srht"):
        options = nt.Options(sketch=sketch, sketch_size=2)
        with pytest.raises(ValueError, match=r"the sketch alone is wrong by 1,.*more rows"):
            nt.solve(problem, method="paper", options=options)


def test_default_sizes_keep_the_distortion():
    problem = tokens_problem([60], d=2)
    for sketch in ("leverage", "tensor-srht"):
        low, high = TokenMetric.of(problem, sketch).spectrum
        assert 0.75 <= low <= high <= 1.25


def test_padding_changes_nothing(unchecked):
    g = torch.Generator().manual_seed(0)
    A1, A2, B = randn(g, 2, 6, 3), randn(g, 2, 5, 2), randn(g, 2, 6, 2)
    w = 1 + torch.rand(2, 5, generator=g).double()
    padded = nt.AttentionProblem(
        A1, A2, A2, B, lengths=[6, 4], key_lengths=[3, 5], regularizer=nt.TokenWeights(w)
    )
    ragged = nt.AttentionProblem.from_ragged(
        torch.cat([A1[0], A1[1, :4]]),
        torch.cat([B[0], B[1, :4]]),
        offsets=[0, 6, 10],
        keys=torch.cat([A2[0, :3], A2[1]]),
        key_offsets=[0, 3, 8],
        regularizer=nt.TokenWeights(torch.cat([w[0, :3], w[1]])),
    )
    X, Y = randn(g, 3, 2), randn(g, 2, 2)
    one, other = paper_regime(padded, X, Y), paper_regime(ragged, X, Y)
    for name in ("epsilon", "mixed", "gauss_newton", "positive", "negative", "output"):
        assert getattr(one, name) == pytest.approx(getattr(other, name)), name


def test_tiles_add_up(unchecked, monkeypatch):
    problem, X, Y = random_case(1)
    whole = at(problem, X, Y)[0]
    monkeypatch.setattr("newtention.chunks.TILE_ELEMENTS", 1)
    monkeypatch.setattr("newtention.chunks.Chunk.tiles.__defaults__", (1,))
    assert at(problem, X, Y)[0] == pytest.approx(whole)


# The report


def noise_problem(w, n=30, d=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    A1, A2, B = randn(g, n, d), randn(g, n, d), randn(g, n, d)
    return nt.AttentionProblem(
        A1, A2, A2, B, regularizer=nt.TokenWeights(w * torch.ones(n).double())
    )


def test_factor_suffices_and_little_less_does_not(unchecked):
    problem = noise_problem(0.05)
    g = torch.Generator().manual_seed(1)
    X, Y = randn(g, 3, 3), torch.zeros(3, 3).double()
    found = paper_regime(problem, X, Y)
    assert not found.inside
    for share, inside in ((1.0, True), (0.98, False)):
        scaled = noise_problem(0.05 * found.w_factor * share)
        best = project(scaled, X[None, None], Y[None, None])[0, 0]
        assert paper_regime(scaled, X, best).inside is inside
    text = str(found)
    assert "Outside the regime" in text
    assert f"{found.w_factor:.3g} times as large" in text
    assert f"10^{found.log10_threshold:.1f}" in text


def test_scaled_weights_are_those_of_a_new_problem():
    one, other = with_weights_times(noise_problem(0.5), 3.0), noise_problem(1.5)
    torch.testing.assert_close(one.quadratic.curvature_x(), other.quadratic.curvature_x())
    torch.testing.assert_close(one.quadratic.gram, other.quadratic.gram)
    torch.testing.assert_close(one.chunks[0].key_weight, other.chunks[0].key_weight)


def test_report_has_the_papers_threshold_and_the_smallest_weight(unchecked):
    g = torch.Generator().manual_seed(0)
    A, w = randn(g, 10, 2), torch.linspace(3, 7, 10).double()
    problem = nt.AttentionProblem(A, A, A, A, scale=2.0, regularizer=nt.TokenWeights(-w))
    X, Y = 10 * randn(g, 2, 2), randn(g, 2, 2)
    found = paper_regime(problem, X, Y)
    R = max(2 * A.norm(dim=1).max() * torch.linalg.matrix_norm(A, 2), X.norm(), Y.norm())
    assert found.log10_threshold == pytest.approx(lemma_9_1_dominance(float(R)).log10)
    assert found.log10_weight == pytest.approx(2 * math.log10(3))


def test_bound_alone_where_the_unknowns_are_many(unchecked, monkeypatch):
    problem, X, Y = noise_problem(0.7), torch.zeros(3, 3).double(), torch.eye(3).double()
    exact = paper_regime(problem, X, Y)
    assert exact.epsilon < 0.5 <= exact.bound
    assert "by the exact Hessian" in exact.sentence
    monkeypatch.setattr(regime, "FEW_UNKNOWNS", 17)
    alone = paper_regime(problem, X, Y)
    assert alone.epsilon == alone.bound == exact.bound
    assert exact.w_factor < 1 < alone.w_factor


def test_sufficient_factor():
    for edge in (0.01, 0.5, 0.99, 1.0, 1.7, 1e6):
        found = sufficient_factor(lambda f, edge=edge: 0.1 if f > edge else 0.9)
        assert edge < found <= 1.011 * edge
    assert sufficient_factor(lambda f: 1.0) == math.inf
    assert sufficient_factor(lambda f: 0.0) < 1e-11


@pytest.mark.parametrize("scale", [1.0, 500.0])
def test_saturated_rows_and_single_keys(scale, unchecked):
    g = torch.Generator().manual_seed(0)
    A1, A2, B = randn(g, 5, 2), randn(g, 4, 2), randn(g, 5, 2)
    for rows, keys in ((5, 4), (1, 4), (5, 1), (1, 1)):
        problem = nt.AttentionProblem(
            A1[:rows],
            A2[:keys],
            A2[:keys],
            B[:rows],
            regularizer=nt.TokenWeights(9 * torch.ones(keys).double()),
        )
        X = randn(g, 2, 2)
        X = X * scale / (A1 @ X @ A2.T).abs().max()
        found = paper_regime(problem, X, 0.1 * randn(g, 2, 2))
        assert all(math.isfinite(x) for x in (found.epsilon, found.mixed, found.positive))
        if keys == 1:
            assert found.epsilon < 1e-6


REFUSED = {
    "a stack": lambda p: p,
    "a ridge": lambda p: p.with_regularizer(nt.Ridge(1.0, 1.0)),
    "no regulariser": lambda p: p.with_regularizer(None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_problems(name, unchecked):
    problem = REFUSED[name](noise_problem(5.0))
    words = {"a stack": "stack", "a ridge": "found Ridge", "no regulariser": "found none"}
    given, call = [problem], nt.solve
    if name == "a stack":
        given, call = [[noise_problem(5.0)] * 2], nt.solve_many
    with pytest.raises(ValueError, match=words[name]):
        call(*given, method="paper")


def test_refused_settings(unchecked):
    problem = noise_problem(5.0)
    with pytest.raises(ValueError, match="frozen blocks"):
        nt.solve(problem, method="paper", options=nt.Options(freeze=["X"]))
    e = torch.ones(1, 3, 2).double()
    layer = nt.FactoredAttention(W_Q=e, W_K=e, W_V=e, W_O=e.mT)
    with pytest.raises(ValueError, match="factored"):
        nt.solve(problem, layer, method="paper")
    w = torch.ones(30).double()
    w[3] = 0
    A = randn(torch.Generator().manual_seed(0), 30, 3)
    zero = nt.AttentionProblem(A, A, A, A, regularizer=nt.TokenWeights(w))
    with pytest.raises(ValueError, match="other than 0 for every key token"):
        paper_regime(zero, torch.eye(3).double(), torch.eye(3).double())
    for options in ({"sketch": "gaussian"}, {"sketch_size": 0}, {"sketch_size": 2.5}):
        with pytest.raises(ValueError, match="sketch"):
            nt.Options(**options)
        with pytest.raises(ValueError, match="sketch"):
            paper_regime(problem, torch.eye(3).double(), torch.eye(3).double(), **options)


@pytest.mark.parametrize("lengths", [[200], [60, 60, 50]])
@pytest.mark.parametrize("sketch", SKETCHES)
def test_memory_is_predicted(lengths, sketch):
    problem = tokens_problem(lengths, d=6)
    needed = metric_bytes(problem, sketch, None)
    with LiveBytes() as live:
        TokenMetric.of(problem, sketch)
    assert 0.3 * needed < live.peak < needed + (4 << 20)  # the sketch works in tiles


def test_refused_memory(unchecked, monkeypatch):
    monkeypatch.setattr("newtention.memory.available_bytes", lambda device: 1000)
    with pytest.raises(MemoryError, match="sketch_size"):
        nt.solve(noise_problem(5.0), method="paper")


def test_dominance_of_nothing():
    assert Dominance(0.0, 0.0, 0.0, 0.0, 1.0).eigenvalues() == (0.0, 0.0)
    assert accuracy(Dominance(0.0, 0.0, 0.0, 0.0, 1.0)) == (1.0, 1.0)
