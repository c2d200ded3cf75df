"""Smaller layers: exact recovery, optimality against dense oracles, every option, refusals."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import newtention as nt
from newtention import compression
from newtention.compression import keep_heads, truncate
from newtention.linsolve.reduction import balanced, block_reduced_rank, eliminate
from tests.unit.test_layers import assert_close, weights

DATA = Path(__file__).parents[2] / "data"
LENGTHS = [6, 14, 14, 5]
"""Several chunks."""


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_problem(layer=None, d=(5, 6, 3), p=7, lengths=LENGTHS, seed=0, **settings):
    """Ragged cross-attention; the targets are the layer's outputs, zeros without a layer."""
    rows = sum(lengths)
    A1, A2, A3 = (randn(rows, width, seed=seed + i) for i, width in enumerate(d))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    if settings.get("query_weights") == "random":
        settings["query_weights"] = randn(rows, seed=9).abs()
    if settings.get("mask") == "random":
        draws = [torch.rand(n, n, generator=torch.Generator().manual_seed(n)) for n in lengths]
        settings["mask"] = [(t > 0.4) | torch.eye(len(t), dtype=torch.bool) for t in draws]

    def build(B):
        return nt.AttentionProblem.from_ragged(
            A1, B, offsets=offsets, keys=A2, values=A3, key_offsets=offsets, **settings
        )

    problem = build(torch.zeros(rows, p, dtype=torch.float64))
    return problem if layer is None else build(nt.predict(problem, layer))


def replaced(layer, **parts):
    return dataclasses.replace(layer, **parts)


def low_rank(layer, e, f):
    """The layer with queries of rank e and values of rank f in heads of the same width."""
    s = layer.parametrisation
    R, T = randn(s.kv_heads, e, s.e, seed=5), randn(s.kv_heads, f, s.f, seed=6)
    R = R.repeat_interleave(s.heads // s.kv_heads, 0)
    parts = {"W_Q": layer.W_Q[..., :e] @ R, "W_V": layer.W_V[..., :f] @ T}
    if layer.b_Q is not None:
        parts["b_Q"] = (layer.b_Q[:, None, :e] @ R)[:, 0]
    if layer.b_V is not None:
        parts["b_V"] = (layer.b_V[:, None, :f] @ T)[:, 0]
    return replaced(layer, **parts)


SETTINGS = {
    "plain": {},
    "causal": {"mask": "causal"},
    "boolean masks": {"mask": "random"},
    "query weights": {"query_weights": "random", "scale": 0.4},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("biases", [True, False])
def test_a_layer_of_that_rank_is_recovered(name, groups, biases):
    layer = low_rank(weights(g=groups, e=5, f=4, d3=6, biases=biases, scale=0.5), 3, 2)
    problem = make_problem(layer, d=(5, 6, 6), **SETTINGS[name])
    small = truncate(problem, layer, (3, 2))
    shape = small.parametrisation
    assert (shape.e, shape.f, shape.scale) == (3, 2, 0.5)
    assert (shape.qk_bias, shape.v_bias, shape.out_bias) == (biases,) * 3
    assert_close(nt.predict(problem, small), nt.predict(problem, layer), 1e-10)
    # One less in either width is not enough.
    for ranks in ((2, 2), (3, 1)):
        error = nt.predict(problem, truncate(problem, layer, ranks)) - nt.predict(problem, layer)
        assert float(error.norm() / nt.predict(problem, layer).norm()) > 1e-3


def test_keys_of_low_rank_are_recovered_whatever_their_bias():
    layer = weights(g=4, e=5)
    layer = replaced(layer, W_K=layer.W_K[..., :2] @ randn(4, 2, 5))
    problem = make_problem(layer)
    small = truncate(problem, layer, (2, 2))
    assert_close(nt.predict(problem, small), nt.predict(problem, layer), 1e-10)


def test_more_rank_than_the_layer_has_is_harmless():
    layer = low_rank(weights(g=4, e=5, f=4, d3=6), 1, 1)
    problem = make_problem(layer, d=(5, 6, 6))
    small = truncate(problem, layer, 3)
    assert_close(nt.predict(problem, small), nt.predict(problem, layer), 1e-10)
    far = make_problem(d=(5, 6, 6), seed=50)
    assert_close(nt.predict(far, small), nt.predict(far, layer), 1e-6)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("rotary", [None, nt.Rotary(30.0)])
def test_directions_that_no_token_reaches_are_left_out(rank, rotary):
    layer = weights(g=4, e=4, f=3, biases=False, rotary=rotary)
    A1, A2, A3 = (randn(20, rank, seed=d) @ randn(rank, d, seed=9) for d in (5, 6, 3))
    problem = nt.AttentionProblem(A1, A2, A3, torch.zeros(20, 7).double())
    small = truncate(problem, layer, (2, 3))
    if rotary is None:
        assert_close(nt.predict(problem, small), nt.predict(problem, layer), 1e-10)
    assert small.theta.norm() < 3 * layer.theta.norm()
    assert keep_heads(problem, layer, 2).theta.norm() < 3 * layer.theta.norm()


def test_widths_that_stay_keep_their_weights():
    layer = weights(e=5, f=4, d3=6)
    problem = make_problem(d=(5, 6, 6))
    values = truncate(problem, layer, (5, 2))
    for name in ("W_Q", "W_K", "b_Q", "b_K"):
        assert torch.equal(getattr(values, name), getattr(layer, name))
    logits = truncate(problem, layer, (2, 4))
    assert torch.equal(logits.W_V, layer.W_V)
    assert_close(truncate(problem, layer, (5, 4)).W_O, layer.W_O, 1e-10)


def test_targets_play_no_part_in_truncation():
    layer = weights()
    one, other = make_problem(), make_problem(weights(seed=3))
    assert torch.equal(truncate(one, layer, 1).theta, truncate(other, layer, 1).theta)


def test_the_logits_are_the_truncated_svd_in_the_metric_of_the_activations():
    """Oracle: the dense SVD of M^1/2 [W_Q; b_Q] W_K^T K^1/2, with the tokens' moments in loops."""
    layer = weights(h=2, g=2, e=4)
    problem = make_problem(layer, lengths=[8, 5], query_weights="random")
    small = truncate(problem, layer, (2, 2))
    q = problem.chunks
    for h in range(2):
        X = torch.cat([layer.W_Q[h], layer.b_Q[h][None]]) @ layer.W_K[h].T
        M, K = torch.zeros(6, 6).double(), torch.zeros(6, 6).double()
        for chunk in q:
            for i in range(chunk.A1.shape[1]):
                n = int(chunk.query_lengths[0, i])
                A1, A2 = chunk.A1[0, i, :n], chunk.A2[0, i, :n]
                a = torch.cat([A1, torch.ones(n, 1).double()], 1)
                P = (a @ X @ A2.T).softmax(1)
                for j in range(n):
                    w = chunk.weight[0, i, j]
                    M += w * torch.outer(a[j], a[j])
                    centred = A2 - P[j] @ A2
                    K += w * centred.T @ (P[j][:, None] * centred)
        roots = []
        for moment in (M, K):
            values, vectors = torch.linalg.eigh(moment)
            roots.append(vectors * values.sqrt() @ vectors.T)
        U, s, Vh = torch.linalg.svd(roots[0] @ X @ roots[1])
        wanted = roots[0].inverse() @ (U[:, :2] * s[:2]) @ Vh[:2] @ roots[1].inverse()
        found = torch.cat([small.W_Q[h], small.b_Q[h][None]]) @ small.W_K[h].T
        assert_close(found, wanted, 1e-9)


def test_keys_that_are_shared_are_truncated_together():
    """The sum of the moments of a group, and no perturbation of the shared projection is better."""
    left, right = (t @ t.mT for t in (randn(1, 5, 7), randn(1, 5, 6, seed=1)))
    A, B = balanced(left, right, 2)

    def error(N):
        D = torch.eye(5) - N
        return float((D.T @ left[0] @ D @ right[0]).trace())

    best = error(A[0] @ B[0].T)
    root = np.linalg.cholesky(left[0].numpy()).T @ np.linalg.cholesky(right[0].numpy())
    assert best == pytest.approx((np.linalg.svd(root)[1][2:] ** 2).sum(), rel=1e-10)
    for seed in range(50):
        step = 10.0 ** -(seed % 4) * randn(2, 5, 2, seed=seed)
        assert error((A[0] + step[0]) @ (B[0] + step[1]).T) >= best
    assert_close((A.mT @ left @ A)[0], (B.mT @ right @ B)[0], 1e-10)


def gram_of(O, F):
    return O.T @ O, O.T @ F


def test_values_of_one_head_are_reduced_rank_regression():
    """Oracle: the projection of the fitted values on their leading singular vectors."""
    O, F = randn(40, 4), randn(40, 6, seed=1)
    G, c = gram_of(O, F)
    C, W = block_reduced_rank(G, c, torch.linalg.solve(G, c), 1, 4, 2, 1)
    fitted = O @ torch.linalg.lstsq(O, F).solution
    U, s, Vh = torch.linalg.svd(fitted, full_matrices=False)
    assert_close(O @ C[0] @ W, U[:, :2] * s[:2] @ Vh[:2], 1e-9)
    # The new values and W_O share the size.
    for moment in ((O @ C[0]).T @ O @ C[0], W @ W.T):
        assert_close(moment, torch.diag(s[:2].flip(0)), 1e-9)


@pytest.mark.parametrize("groups", [3, 1])
def test_values_of_several_heads_reach_a_local_minimum(groups):
    """Heads with values of their own: monotone, and stationary in the end.  Shared: monotone."""
    O, F = randn(60, 12) @ (torch.eye(12) + 0.4 * randn(12, 12, seed=2)), randn(60, 5, seed=1)
    G, c = gram_of(O, F)

    def fit(sweeps):
        C, W = block_reduced_rank(G, c, torch.linalg.solve(G, c), groups, 4, 2, sweeps)
        T = torch.block_diag(*C.repeat_interleave(3 // groups, 0))
        return C, W, float((O @ T @ W - F).square().sum())

    losses = [fit(k)[2] for k in (1, 2, 4, 300, 301)]
    assert all(
        b <= a * (1 + 1e-12) for a, b in itertools.pairwise(losses[: 3 if groups < 3 else 5])
    )
    if groups < 3:
        return
    C, _, least = fit(301)
    for seed in range(30):
        step = 1e-4 * randn(3, 4, 2, seed=seed)
        T = torch.block_diag(*(C + step * C.norm()))
        best = torch.linalg.lstsq(O @ T, F).solution
        assert float((O @ T @ best - F).square().sum()) >= least * (1 - 1e-9)


@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
@pytest.mark.parametrize("groups", [4, 2])
def test_rotary_layers_keep_the_pairs_that_count(pairing, groups):
    rotary = nt.Rotary(30.0, pairing)
    layer = weights(g=groups, e=8, rotary=rotary)
    kept = [((g + 1) % 4, 3 - (g % 2) * 3) for g in range(groups)]
    kept = [tuple(sorted(set(k))) if len(set(k)) == 2 else (1, 2) for k in kept]
    mask = torch.zeros(4, 8, dtype=torch.float64)
    group = 4 // groups
    for h in range(4):
        for i in kept[h // group]:
            mask[h, [i, i + 4] if pairing == "halves" else [2 * i, 2 * i + 1]] = 1.0
    layer = replaced(layer, W_Q=layer.W_Q * mask[:, None], b_Q=layer.b_Q * mask)
    problem = make_problem(layer, mask="causal")
    small = truncate(problem, layer, (4, 2))
    assert small.rotary == nt.Rotary(30.0, pairing, kept, 8)
    assert_close(nt.predict(problem, small), nt.predict(problem, layer), 1e-10)
    again = truncate(problem, small, (2, 2))
    assert all(set(a) < set(b) for a, b in zip(again.rotary.kept, kept, strict=True))


def test_scaled_pairs_fit_the_logits_better():
    """The variance under P of what is left of the logits: never above that of unscaled pairs."""
    rotary = nt.Rotary(30.0)
    layer = weights(h=1, g=1, e=8, biases=False, rotary=rotary)
    problem = make_problem(layer, lengths=[12])
    small = truncate(problem, layer, (4, 2))
    chunk = problem.chunks[0]
    A1, A2 = chunk.A1[0, 0], chunk.A2[0, 0]

    def logits(part):
        q, k = (part.rotary.rotate(A @ W) for A, W in ((A1, part.W_Q), (A2, part.W_K)))
        return q[0] @ k[0].T

    P = logits(layer).softmax(1)

    def variance(S):
        D = S - logits(layer)
        return float((P * (D - (P * D).sum(1, keepdim=True)).square()).sum())

    (pairs,) = small.rotary.kept
    columns = [*pairs, *(i + 4 for i in pairs)]
    plain = replaced(small, W_Q=layer.W_Q[..., columns], W_K=layer.W_K[..., columns])
    assert variance(logits(small)) < variance(logits(plain))
    for i in range(4):
        for factor in (0.99, 1.01):
            W = small.W_Q.clone()
            W[..., [i % 2, i % 2 + 2]] *= factor
            assert variance(logits(replaced(small, W_Q=W))) > variance(logits(small))


def brute_force(O, F, blocks, count):
    """The best subset of the blocks by dense least squares, and its squares."""

    def squares(kept):
        columns = np.concatenate([blocks[i] for i in kept])
        return float(np.square(O[:, columns] @ np.linalg.lstsq(O[:, columns], F)[0] - F).sum())

    return min((squares(k), list(k)) for k in itertools.combinations(range(len(blocks)), count))


@pytest.mark.parametrize("seed", range(20))
def test_elimination_of_one_unit_is_exact(seed):
    O = randn(50, 10, seed=seed) @ (torch.eye(10) + 0.5 * randn(10, 10, seed=seed + 100))
    F = randn(50, 3, seed=seed + 200)
    blocks = np.arange(10).reshape(5, 2)
    kept = eliminate(*(t[None] for t in gram_of(O, F)), 2, 1, 4)
    assert kept == brute_force(O.numpy(), F.numpy(), blocks, 4)[1]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_elimination_of_uncorrelated_units_is_exact(seed, count):
    O = torch.linalg.qr(randn(50, 10, seed=seed)).Q * (1 + randn(10, seed=seed).abs())
    F = randn(50, 3, seed=seed + 200)
    kept = eliminate(*(t[None] for t in gram_of(O, F)), 2, 1, count)
    assert kept == brute_force(O.numpy(), F.numpy(), np.arange(10).reshape(5, 2), count)[1]


def test_elimination_with_empty_and_equal_features():
    O, F = randn(50, 6), randn(50, 3, seed=1)
    O[:, 2:4] = 0.0
    O[:, 4:6] = O[:, 0:2]
    kept = eliminate(*(t[None] for t in gram_of(O, F)), 2, 1, 1)
    assert kept in ([0], [2])


def test_elimination_keeps_equal_numbers_in_every_group():
    O = randn(50, 6) * torch.tensor([1.0, 1, 1, 0.1, 0.1, 0.1])
    F = O[:, :3].sum(1, keepdim=True) + O[:, 3:] @ torch.tensor([[3.0], [1.0], [2.0]]).double()
    G, c = gram_of(O, F)
    assert eliminate(G[None], c[None], 1, 1, 3) == [0, 1, 2]
    assert eliminate(G[None], c[None], 1, 2, 1)[1] == 3


def heads_only(layer, kept):
    s = layer.parametrisation
    group = s.heads // s.kv_heads
    groups = sorted({h // group for h in kept})
    parts = {}
    for name in ("W_Q", "b_Q", "W_O"):
        parts[name] = getattr(layer, name)[list(kept)]
    for name in ("W_K", "b_K", "W_V", "b_V"):
        parts[name] = getattr(layer, name)[groups]
    return replaced(layer, **parts)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("useless", [0, 2])
def test_a_useless_head_goes(name, useless):
    layer = weights(g=4)
    others = [h for h in range(4) if h != useless]
    problem = make_problem(heads_only(layer, others), **SETTINGS[name])
    small = keep_heads(problem, layer, 3)
    assert torch.equal(small.W_Q, layer.W_Q[others])
    assert torch.equal(small.b_V, layer.b_V[others])
    assert nt.loss(problem, small) < 1e-18 * float(problem.target_energy())


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_heads_are_the_best_subset(heads, monkeypatch):
    """Dense least squares over all subsets; on these draws the greedy choice is the best one."""
    monkeypatch.setattr(compression, "PRIOR_ROWS", 0.0)
    layer, teacher = weights(g=4), weights(g=4, seed=7)
    problem = make_problem(teacher, lengths=[30, 30, 25])
    eye, zero = torch.eye(2, 7).double()[None], torch.zeros(7).double()
    alone = (replaced(heads_only(layer, [h]), W_O=eye, b_O=zero) for h in range(4))
    O = [nt.predict(problem, one)[:, :2].numpy() for one in alone]
    B = nt.predict(problem, teacher).numpy()

    def squares(kept):
        columns = np.concatenate([O[h] for h in kept] + [np.ones((85, 1))], 1)
        return float(np.square(columns @ np.linalg.lstsq(columns, B)[0] - B).sum())

    best = min(itertools.combinations(range(4), heads), key=squares)
    small = keep_heads(problem, layer, heads)
    assert torch.equal(small.W_Q, layer.W_Q[list(best)])
    assert nt.loss(problem, small) == pytest.approx(0.5 * squares(best), rel=1e-10)


def test_all_heads_may_stay():
    layer = weights()
    problem = make_problem(layer)
    assert_close(keep_heads(problem, layer, 4).W_O, layer.W_O, 1e-9)


def test_groups_go_whole_or_in_equal_parts():
    """Six heads on three keys: three heads may be one of each group only, four two whole groups
    or, not being a multiple of 3, nothing else."""
    layer = weights(h=6, g=3)
    for kept, heads in (([0, 1, 4, 5], 4), ([1, 2, 4], 3), ([2, 3], 2)):
        part = heads_only(layer, kept)
        problem = make_problem(part)
        small = keep_heads(problem, layer, heads)
        assert torch.equal(small.W_Q, part.W_Q)
        assert torch.equal(small.W_K, part.W_K)
        assert nt.loss(problem, small) < 1e-18 * float(problem.target_energy())
    with pytest.raises(ValueError, match="multiple of 2, for whole groups, or of 3"):
        keep_heads(problem, layer, 5)


@pytest.mark.parametrize("kept", [[0, 1], [0, 3]])
def test_of_both_ways_to_keep_the_better_one_is_taken(kept):
    layer = weights(h=4, g=2)
    problem = make_problem(heads_only(layer, kept))
    small = keep_heads(problem, layer, 2)
    assert torch.equal(small.W_Q, layer.W_Q[kept])


def test_pairs_go_with_their_groups():
    rotary = nt.Rotary(30.0, "halves", ((0, 1), (2, 3)), 8)
    layer = weights(h=4, g=2, rotary=rotary)
    problem = make_problem(layer)
    reduced = replaced(layer, W_O=layer.W_O * torch.tensor([0.0, 0, 1, 1]).double()[:, None, None])
    problem = make_problem(reduced)
    small = keep_heads(problem, layer, 2)
    assert small.rotary.kept == ((2, 3),)
    assert nt.loss(problem, small) < 1e-18 * float(problem.target_energy())


def real_layer(name, **settings):
    """A layer of data/, and the problems of its first two thirds of sequences and of the rest."""
    d = load_file(DATA / f"{name}.safetensors")
    names = {"W_Q": "Wq", "W_K": "Wk", "W_V": "Wv", "W_O": "Wo", "b_Q": "bq", "b_K": "bk"}
    names |= {"b_V": "bv", "b_O": "bo"}
    layer = nt.FactoredAttention(**{n: d[k] for n, k in names.items() if k in d}, **settings)
    offsets = d["offsets"]
    last = len(offsets) - 1
    problems = []
    for a, b in ((0, last * 2 // 3), (last * 2 // 3, last)):
        rows = slice(int(offsets[a]), int(offsets[b]))
        problems.append(
            nt.AttentionProblem.from_ragged(
                d["hidden"][rows],
                d["output"][rows],
                offsets=offsets[a : b + 1] - offsets[a],
                mask=None if layer.rotary is None else "causal",
            )
        )
    return layer, problems


MINILM = ("minilm_layer3", {"scale": 32**-0.5}, 16, 8)
SMOLLM2 = ("smollm2_layer14", {"scale": 1 / 8, "rotary": nt.Rotary(1e5)}, 32, 6)


@pytest.mark.parametrize(
    ("source", "truncated", "pruned"), [(MINILM, 0.080, 0.090), (SMOLLM2, 0.22, 0.135)]
)
def test_real_layers(source, truncated, pruned):
    """Relative loss on the rest; without made-up rows 0.10 and 0.14, 1.29 and 1.59."""
    name, settings, ranks, heads = source
    layer, (train, held) = real_layer(name, **settings)
    for smaller, bound in (
        (truncate(train, layer, ranks), truncated),
        (keep_heads(train, layer, heads), pruned),
    ):
        assert nt.loss(held, smaller) < bound * float(held.target_energy())


def shrink(problem, layer):
    return truncate(problem, layer, 2), keep_heads(problem, layer, 2)


@pytest.mark.parametrize("rotary", [None, nt.Rotary(30.0)])
def test_tiles_and_padding_change_nothing(rotary, monkeypatch):
    layer = weights(rotary=rotary)
    ragged = make_problem(weights(seed=1), mask="causal", query_weights="random")
    wanted = shrink(ragged, layer)
    arrays = [torch.zeros(4, 15, d).double() for d in (5, 6, 3, 7)]
    q = torch.ones(4, 15).double()
    for places, c in zip(ragged.layout.order, ragged.chunks, strict=True):
        for place, i in enumerate(places):
            n = LENGTHS[i]
            for t, part in zip(arrays, (c.A1, c.A2, c.A3, c.B), strict=True):
                t[i, :n] = part[0, place, :n]
                t[i, n:] = 17.0
            q[i, :n] = c.weight[0, place, :n]
    padded = nt.AttentionProblem(
        *arrays, lengths=LENGTHS, key_lengths=LENGTHS, mask="causal", query_weights=q
    )
    for got, want in zip(shrink(padded, layer), wanted, strict=True):
        assert_close(nt.predict(ragged, got), nt.predict(ragged, want), 1e-9)
    monkeypatch.setattr("newtention.chunks.Chunk.tiles.__defaults__", (40,))
    for got, want in zip(shrink(ragged, layer), wanted, strict=True):
        assert_close(nt.predict(ragged, got), nt.predict(ragged, want), 1e-9)


@pytest.mark.parametrize("rotary", [None, nt.Rotary(30.0)])
def test_rows_of_weight_zero_do_not_count(rotary):
    layer = weights(rotary=rotary)
    A1, A2, A3 = (randn(40, d, seed=d) for d in (5, 6, 3))
    B = randn(40, 7, seed=1)
    q = torch.ones(40).double()
    q[::3] = 0.0
    other = torch.where(q[:, None] > 0, A1, 50 * randn(40, 5, seed=2))
    one, two = (nt.AttentionProblem(a, A2, A3, B, query_weights=q) for a in (A1, other))
    for a, b in zip(shrink(one, layer), shrink(two, layer), strict=True):
        assert_close(a.theta, b.theta, 1e-12)


@pytest.mark.parametrize("rotary", [None, nt.Rotary(30.0)])
def test_dtype_and_kind_stay(rotary):
    layer = weights(rotary=rotary)
    parts = {b.name: getattr(layer, b.name) for b in layer.parametrisation.blocks}
    single = replaced(layer, **{n: t.float() for n, t in parts.items()})
    numpy = replaced(layer, **{n: t.numpy() for n, t in parts.items()})
    A1, A2, A3, B = (randn(40, d, seed=d) for d in (5, 6, 3, 7))
    problem = nt.AttentionProblem(A1, A2, A3, B)
    half = nt.AttentionProblem(*(t.float() for t in (A1, A2, A3, B)))
    for want, got, array in zip(
        shrink(problem, layer), shrink(half, single), shrink(problem, numpy), strict=True
    ):
        assert got.theta.dtype == torch.float32
        assert isinstance(array.W_V, np.ndarray)
        assert array.W_V.dtype == np.float64
        assert_close(array.theta, want.theta, 1e-14)
        outputs = nt.predict(problem, want)
        assert_close(nt.predict(half, got).double(), outputs, 1e-4)


def test_few_rows_do_not_spoil_the_output_map(monkeypatch):
    """With 20 rows for 32 unknowns per output, least squares alone would fit noise: held out, the
    made-up rows at least halve the error of either reduction."""
    layer = weights(h=8, g=8, d1=12, d2=12, d3=12, e=6, f=4, p=12)
    few = make_problem(layer, d=(12, 12, 12), p=12, lengths=[8, 12])
    fresh = make_problem(layer, d=(12, 12, 12), p=12, lengths=[200], seed=30)

    def errors():
        return [
            nt.loss(fresh, small) for small in (truncate(few, layer, 3), keep_heads(few, layer, 6))
        ]

    with_rows = errors()
    monkeypatch.setattr(compression, "PRIOR_ROWS", 0.0)
    assert all(2 * a < b for a, b in zip(with_rows, errors(), strict=True))


@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        (0, ValueError, "between 1 and the layer's width of queries and keys, 4; found 0"),
        (5, ValueError, "queries and keys, 4; found 5"),
        ((4, 3), ValueError, "width of values, 2; found 3"),
        ((2, 0), ValueError, "values, 2; found 0"),
        ((2, 2, 2), ValueError, "pair .e, f.; found 3"),
        (2.0, TypeError, "ranks must be whole numbers; found 2.0"),
        ("2", TypeError, "ranks must be whole numbers"),
        (True, TypeError, "ranks must be whole numbers"),
    ],
)
def test_bad_ranks_are_refused(ranks, error, message, unchecked):
    with pytest.raises(error, match=message):
        truncate(make_problem(), weights(), ranks)


def test_bad_uses_are_refused(unchecked, monkeypatch):
    problem, layer = make_problem(), weights()
    with pytest.raises(ValueError, match="even for the queries"):
        truncate(problem, weights(rotary=nt.Rotary()), (3, 2))
    for heads in (0, 5, -1):
        with pytest.raises(ValueError, match="between 1 and the layer's 4"):
            keep_heads(problem, layer, heads)
    with pytest.raises(TypeError, match="heads must be whole numbers"):
        keep_heads(problem, layer, 2.5)
    bilinear = (randn(5, 6), randn(3, 7))
    for call in (truncate, keep_heads):
        with pytest.raises(TypeError, match="FactoredAttention; found tuple"):
            call(problem, bilinear, 1)
        with pytest.raises(TypeError, match="AttentionProblem; found"):
            call(layer, layer, 1)
        with pytest.raises(ValueError, match="widths"):
            call(problem, weights(d1=4), 2)
        with pytest.raises(ValueError, match="not with a stack"):
            call(nt.AttentionProblem.stack([problem, problem]), layer, 2)
        huge = replaced(layer, W_Q=1e200 * layer.W_Q, W_K=1e200 * layer.W_K)
        with pytest.raises(ValueError, match="finite"):
            call(problem, huge, 2)
    A1, A2, A3, B = (randn(6, d) for d in (5, 6, 3, 7))
    biased = nt.AttentionProblem(A1, A2, A3, B, bias=randn(4, 6, 6))
    assert truncate(biased, layer, 2).parametrisation.e == 2
    with pytest.raises(ValueError, match="for 4 head"):
        keep_heads(biased, layer, 2)
    monkeypatch.setattr("newtention.memory.available_bytes", lambda device: 1000)
    with pytest.raises(MemoryError, match="Gram matrix of 8"):
        truncate(problem, layer, 2)
