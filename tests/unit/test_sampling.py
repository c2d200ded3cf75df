"""Sampled query rows: the right rows, the right weights, the right means."""

import pytest
import torch

import newtention as nt
from newtention.sampling import stratified
from tests.cases import BY_NAME, randn
from tests.checks import require_close

pytestmark = pytest.mark.usefixtures("unchecked")

SEEDS = 150


def planted(n=300, d=4, **options):
    g = torch.Generator().manual_seed(0)
    A = randn(g, n, d) * randn(g, n, 1).exp()
    X, Y = randn(g, d, d), randn(g, d, d)
    return nt.AttentionProblem(A, A, A, randn(g, n, d), **options), X, Y


def test_stratified_draws_follow_the_probabilities():
    """Within one draw of k p_j for entries at least as wide as a stratum, never where p_j = 0."""
    p = torch.tensor([[0.5, 0.0, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    index = stratified(p, 8, torch.Generator().manual_seed(1))
    counts = torch.stack([(index == j).sum(1) for j in range(4)], 1)
    assert counts.tolist() == [[4, 0, 2, 2], [0, 0, 8, 0]]


@pytest.mark.parametrize("scores", ["leverage", "uniform"])
def test_sums_over_rows_keep_their_means(scores):
    """Within 4 standard errors of the whole: 1 chance in 10^4 for each of the 34 numbers."""
    weights = randn(torch.Generator().manual_seed(2), 300).abs()
    problem, X, Y = planted(query_weights=weights)

    def numbers(p):
        _, GY = nt.gradient(p, X, Y)
        H = nt.hessian(p, X, Y).xx
        return torch.cat([torch.tensor([nt.loss(p, X, Y)]), H[0], H[5], GY[0][:1]]).double()

    found = torch.stack(
        [
            numbers(nt.sample_queries(problem, 80, X, Y, scores=scores, seed=seed))
            for seed in range(SEEDS)
        ]
    )
    error = (found.mean(0) - numbers(problem)).abs()
    assert (error <= 4 * found.std(0) / SEEDS**0.5).all()
    # The test would see rows taken with weights a tenth off.
    assert (0.1 * numbers(problem)[0]).abs() > 4 * found[:, 0].std() / SEEDS**0.5


def test_leverage_follows_the_rows_that_matter():
    """A single row that carries a direction is always there; uniform draws miss it."""
    g = torch.Generator().manual_seed(3)
    A1, A2 = 0.1 * randn(g, 1000, 3), randn(g, 20, 3)
    A1[:, 0] = 0
    A1[17] = torch.tensor([1.0, 0.0, 0.0])
    problem = nt.AttentionProblem(A1, A2, A2, randn(g, 1000, 2))
    X, Y = randn(g, 3, 3), randn(g, 3, 2)

    def has(scores, seed):
        sample = nt.sample_queries(problem, 70, X, Y, scores=scores, seed=seed)
        return bool((sample.chunks[0].mask.picked == 17).any())

    assert all(has("leverage", seed) for seed in range(50))
    assert not all(has("uniform", seed) for seed in range(50))


@pytest.mark.parametrize(
    "name",
    ["causal, tall", "boolean mask, padded", "forbidding bias", "padded", "three heads, padded"],
)
def test_a_sampled_row_is_that_row(name, monkeypatch):
    """Masks, biases and positions go with it: its output is that of the whole problem."""
    monkeypatch.setattr("newtention.sampling.LEAST_ROWS", 1)
    case = BY_NAME[name]
    problem = case.problem()
    total = sum(problem.layout.queries)
    sample = nt.sample_queries(problem, total // 2, case.X, case.Y, seed=4)
    assert sum(sample.layout.queries) < total
    whole, part = nt.predict(problem, case.X, case.Y), nt.predict(sample, case.X, case.Y)
    real = whole.reshape(-1, whole.shape[-1])
    gaps = (part[:, None] - real[None]).norm(dim=-1)
    assert (gaps.amin(1) <= 1e-12 * real.norm()).all()
    targets = torch.cat([c.B[0, i] for c in sample.chunks for i in range(c.B.shape[1])])
    given = torch.cat([c.B[0, i] for c in problem.chunks for i in range(c.B.shape[1])])
    assert ((targets[:, None] - given[None]).norm(dim=-1).amin(1) == 0).all()


def test_rotary_layers_turn_sampled_rows_by_their_own_positions():
    g = torch.Generator().manual_seed(5)
    x = randn(g, 120, 6)
    W = {name: randn(g, 2, 6, 4) for name in ("W_Q", "W_K", "W_V")}
    layer = nt.FactoredAttention(**W, W_O=randn(g, 2, 4, 6), rotary=nt.Rotary(50.0))
    problem = nt.AttentionProblem(x, x, x, x, mask="causal")
    sample = nt.sample_queries(problem, 64, layer)
    places = sample.chunks[0].mask.picked[0, 0]
    require_close("rows", nt.predict(sample, layer), nt.predict(problem, layer)[places], 1e-12)


def test_padding_is_never_drawn():
    g = torch.Generator().manual_seed(6)
    A = randn(g, 3, 200, 3)
    problem = nt.AttentionProblem(A, A, A, A, lengths=torch.tensor([200, 190, 180]))
    sample = nt.sample_queries(problem, 200, randn(g, 3, 3), randn(g, 3, 3), scores="uniform")
    for chunk, whole in zip(sample.chunks, problem.chunks, strict=True):
        assert (chunk.mask.picked < whole.query_lengths[..., None]).all()
        assert (chunk.weight > 0).all()


def test_a_sample_that_is_no_smaller_is_the_problem():
    problem, X, Y = planted(50)
    assert nt.sample_queries(problem, 50, X, Y) is problem


def test_bad_arguments():
    problem, X, Y = planted(50)
    with pytest.raises(ValueError, match="rows must be"):
        nt.sample_queries(problem, 0, X, Y)
    with pytest.raises(ValueError, match="scores must be"):
        nt.sample_queries(problem, 10, X, Y, scores="norms")
    with pytest.raises(ValueError, match="one problem"):
        nt.sample_queries(nt.AttentionProblem.stack([problem, problem]), 10, X, Y)
    with pytest.raises(ValueError, match="X"):
        nt.sample_queries(problem, 10, X[:2], Y)
