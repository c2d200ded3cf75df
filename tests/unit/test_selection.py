"""Selected tokens: every layout against the definition, ties, saturation, and refusals."""

import warnings

import numpy as np
import pytest
import torch

import newtention as nt
from tests.selections import planted, selection_of

RNG = np.random.default_rng(0)


def map_problem(A1, A2, **options):
    """A problem of maps whose targets do not matter."""
    B = np.zeros((*A1.shape[:-1], A2.shape[-2]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that B is no attention map
        return nt.AttentionProblem.from_maps(A1, A2, B, **options)


def test_one_sequence():
    A1, A2 = RNG.normal(size=(9, 4)), RNG.normal(size=(7, 3))
    X = RNG.normal(size=(4, 3))
    found = nt.selected_tokens(map_problem(A1, A2, scale=0.5), X)
    keys, lead, weight = selection_of(0.5 * A1 @ X @ A2.T)
    assert (found.keys == keys).all()
    assert found.keys.dtype == np.int64
    np.testing.assert_allclose(found.margins, lead, rtol=1e-12)
    np.testing.assert_allclose(found.weights, weight, rtol=1e-13)
    np.testing.assert_allclose(found.relative_margins, lead / np.linalg.norm(X), rtol=1e-12)
    assert not found.tied.any()
    assert (found.X == X).all()


def test_bias_and_mask():
    A1, A2, X = RNG.normal(size=(6, 3)), RNG.normal(size=(6, 3)), RNG.normal(size=(3, 3))
    bias = RNG.normal(size=(6, 6))
    bias[2, :2] = -np.inf  # under the causal mask, row 2 is left with key 2
    found = nt.selected_tokens(map_problem(A1, A2, mask="causal", bias=bias), X)
    logits = A1 @ X @ A2.T + bias
    logits[np.triu_indices(6, 1)] = -np.inf
    keys, lead, weight = selection_of(logits)
    assert (found.keys == keys).all()
    np.testing.assert_allclose(found.margins, lead, rtol=1e-11)
    np.testing.assert_allclose(found.weights, weight, rtol=1e-12)
    assert (found.margins[[0, 2]] == np.inf).all()
    assert found.weights[2] == 1


def test_padded_heads_come_first():
    A1, A3 = RNG.normal(size=(3, 5, 4)), RNG.normal(size=(3, 6, 2))
    A2, B = RNG.normal(size=(3, 6, 4)), RNG.normal(size=(3, 5, 3))
    problem = nt.AttentionProblem(A1, A2, A3, B, lengths=[5, 2, 4], key_lengths=[6, 3, 1])
    X, Y = RNG.normal(size=(2, 4, 4)), RNG.normal(size=(2, 2, 3))
    found = nt.selected_tokens(problem, X, Y)
    assert found.keys.shape == found.margins.shape == found.relative_margins.shape == (2, 3, 5)
    for h in range(2):
        for s, (n, m) in enumerate(zip([5, 2, 4], [6, 3, 1], strict=True)):
            keys, lead, weight = selection_of(A1[s, :n] @ X[h] @ A2[s, :m].T)
            assert (found.keys[h, s, :n] == keys).all()
            np.testing.assert_allclose(found.margins[h, s, :n], lead, rtol=1e-11)
            np.testing.assert_allclose(found.weights[h, s, :n], weight, rtol=1e-12)
            own = found.margins[h, s] / np.linalg.norm(X[h])
            np.testing.assert_allclose(found.relative_margins[h, s], own, rtol=1e-12)
            assert (found.keys[h, s, n:] == -1).all()
            assert (found.weights[h, s, n:] == 0).all()
    assert not found.tied.any()
    with pytest.raises(ValueError, match="2 heads"):
        found.svm()
    assert nt.selected_tokens(problem, X[:1]).keys.shape == (1, 3, 5)


def test_ragged_and_torch_and_float32():
    tokens = torch.from_numpy(RNG.normal(size=(11, 3))).float()
    problem = nt.AttentionProblem.from_ragged(tokens, tokens, offsets=[0, 4, 11], mask="causal")
    X = torch.from_numpy(RNG.normal(size=(3, 3))).float()
    found = nt.selected_tokens(problem, X)
    assert found.keys.dtype == torch.int64
    assert found.margins.dtype == torch.float32
    for a, b in ((0, 4), (4, 11)):
        logits = (tokens[a:b] @ X @ tokens[a:b].T).double().numpy()
        logits[np.triu_indices(b - a, 1)] = -np.inf
        assert (found.keys[a:b].numpy() == selection_of(logits)[0]).all()
    assert torch.isinf(found.margins[[0, 4]]).all()  # the first token of each sees itself alone


def test_rows_in_tiles(monkeypatch):
    from newtention import chunks

    A1, A2, _ = planted(40, 30, 3)
    X = RNG.normal(size=(3, 3))
    whole = nt.selected_tokens(map_problem(A1, A2), X)
    monkeypatch.setattr(chunks, "TILE_ELEMENTS", 200)
    monkeypatch.setattr(chunks.Chunk.tiles, "__defaults__", (200,))
    tiled = nt.selected_tokens(map_problem(A1, A2), X)
    assert (whole.keys == tiled.keys).all()
    np.testing.assert_allclose(tiled.margins, whole.margins, rtol=1e-12)


def test_factored_layers_have_no_relative_margin():
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    layer = nt.FactoredAttention.from_torch(module)
    problem = nt.AttentionProblem(x, x, x, x)
    found = nt.selected_tokens(problem, layer)
    _, weights = module(x, x, x, average_attn_weights=False)
    best = weights.max(-1)
    assert (found.keys == best.indices.movedim(1, 0)).all()
    torch.testing.assert_close(found.weights, best.values.movedim(1, 0).detach())
    assert found.relative_margins is None
    assert found.angle is None
    with pytest.raises(ValueError, match="factored layer"):
        found.svm()


def test_ties_are_reported_and_rounding_is_no_lead():
    A1, A2 = RNG.normal(size=(5, 3)), RNG.normal(size=(6, 3))
    A2[4] = A2[1]
    X = 30 * RNG.normal(size=(3, 3))
    found = nt.selected_tokens(map_problem(A1, A2), X)
    keys, lead, _ = selection_of(A1 @ X @ A2.T)
    twins = np.isin(keys, [1, 4])
    assert twins.any()
    assert (found.tied == twins).all()
    assert (found.margins[twins] == 0).all()
    assert found.margins[~twins] == pytest.approx(lead[~twins])
    almost = A2.copy()
    almost[4] *= 1 + 2e-16
    assert (nt.selected_tokens(map_problem(A1, almost), X).tied == twins).all()
    still = nt.selected_tokens(map_problem(A1, A2), np.zeros((3, 3)))
    assert still.tied.all()
    assert (still.keys == 0).all()
    assert (still.relative_margins == 0).all()
    assert still.angle is None


def test_one_key_and_one_query():
    found = nt.selected_tokens(
        map_problem(RNG.normal(size=(4, 2)), np.ones((1, 3))), np.ones((2, 3))
    )
    assert (found.keys == 0).all()
    assert (found.weights == 1).all()
    assert (found.margins == np.inf).all()
    assert (found.relative_margins == np.inf).all()
    assert found.svm().status is nt.SvmStatus.NO_CONSTRAINTS
    assert found.angle is None
    one = nt.selected_tokens(map_problem(RNG.normal(size=(1, 2)), np.eye(3)), np.ones((2, 3)))
    assert one.keys.shape == (1,)
    assert one.tied.all()


@pytest.mark.parametrize("size", [500.0, 1e5, 1e150])
def test_saturated(size):
    A1, A2, selected = planted(8, 6, 3)
    X = nt.attention_svm(A1, A2, selected).X
    found = nt.selected_tokens(map_problem(A1, A2), size * X)
    assert (found.keys == selected).all()
    assert (found.weights == 1).all()
    assert found.margins.min() == pytest.approx(size)


def test_svm_of_a_selection():
    A1, A2, selected = planted(10, 8, 3)
    X = RNG.normal(size=(3, 3))
    problem = nt.selection_problem(A1, A2, selected, scale=0.25)
    solution = nt.solve(problem.with_regularizer(nt.Ridge(x=1e-3)))
    found = nt.selected_tokens(problem, solution)
    svm = nt.attention_svm(0.25 * A1, A2, found.keys)
    np.testing.assert_allclose(found.svm().X, svm.X, rtol=1e-7, atol=1e-9)
    cosine = (svm.X * solution.X).sum() / np.linalg.norm(svm.X) / np.linalg.norm(solution.X)
    assert found.angle == pytest.approx(np.degrees(np.arccos(cosine)), rel=1e-6)
    assert found.margins.min() / np.linalg.norm(X) < 1
    same = nt.selected_tokens(problem, 7.0 * svm.X)
    assert same.angle < 1e-5
    assert same.relative_margins.min() == pytest.approx(svm.margin)


def test_svm_leaves_forbidden_pairs_out():
    A1, A2, _ = planted(6, 6, 3)
    X = RNG.normal(size=(3, 3))
    bias = np.where(np.tril(np.ones((6, 6))) > 0, 0.1, -np.inf)
    causal = nt.selected_tokens(map_problem(A1, A2, mask="causal"), X)
    biased = nt.selected_tokens(map_problem(A1, A2, bias=bias), X)
    assert (causal.keys == biased.keys).all()
    np.testing.assert_allclose(causal.svm().X, biased.svm().X, atol=1e-12)
    assert causal.svm().objective == nt.attention_svm(A1, A2, causal.keys, mask="causal").objective


def test_tied_selections_have_no_svm():
    A1, A2, _ = planted(5, 4, 3)
    A2[:] = A2[0]
    found = nt.selected_tokens(map_problem(A1, A2), RNG.normal(size=(3, 3)))
    assert found.tied.all()
    assert found.svm().infeasible
    assert found.angle is None


def test_refusals():
    A1, A2, X = np.ones((2, 3)), np.eye(3), np.eye(3)
    problem = map_problem(A1, A2)
    with pytest.raises(ValueError, match="one problem"):
        nt.selected_tokens(nt.AttentionProblem.stack([problem, problem]), X)
    with pytest.raises(ValueError, match="X must be"):
        nt.selected_tokens(problem, np.eye(2))
    with pytest.raises(ValueError, match="finite"):
        nt.selected_tokens(problem, X * np.nan)
    with pytest.raises(ValueError, match="overflow"):
        nt.selected_tokens(map_problem(1e200 * A1, 1e200 * A2), X)


def test_selection_problem():
    A1, A2, selected = planted(7, 5, 3)
    problem = nt.selection_problem(A1, A2, selected, scale=2.0)
    same = nt.AttentionProblem.from_maps(A1, A2, np.eye(5)[selected], scale=2.0)
    X = RNG.normal(size=(3, 3))
    assert nt.loss(problem, X) == nt.loss(same, X)
    assert nt.predict(problem, X).dtype == np.float64
    read_only = A1[::-1]
    read_only.flags.writeable = False
    nt.selection_problem(read_only, A2, selected[::-1])
    torched = nt.selection_problem(
        torch.from_numpy(A1).float(), torch.from_numpy(A2).float(), selected
    )
    assert nt.predict(torched, torch.eye(3)).dtype == torch.float32
    with pytest.warns(UserWarning, match="integers"):
        nt.selection_problem(np.ones((2, 2), int), np.eye(2), [0, 1])
    with pytest.warns(UserWarning, match="float16"):
        nt.selection_problem(np.ones((2, 2), np.float16), np.eye(2, dtype=np.float32), [0, 1])


@pytest.mark.parametrize(
    ("selected", "error", "words"),
    [
        ([0, 1], ValueError, "selected must be 3"),
        ([0, 1, 4], ValueError, r"selected\[2\].*from 0 to 3; found 4"),
        ([0, -1, 2], ValueError, r"selected\[1\].*found -1"),
        ([0.0, 1.0, 2.0], TypeError, "integers"),
        ([0, 1, 3], ValueError, r"selected\[2\].*forbids key 3"),
    ],
)
def test_selection_problem_refuses(selected, error, words):
    with pytest.raises(error, match=words):
        nt.selection_problem(np.ones((3, 2)), np.ones((4, 2)), selected, mask="causal")


def test_selection_problem_refuses_tokens():
    with pytest.raises(ValueError, match="A1"):
        nt.selection_problem(np.ones((1, 3, 2)), np.ones((4, 2)), [0])
    with pytest.raises(ValueError, match="finite"):
        nt.selection_problem(np.full((1, 2), np.nan), np.ones((4, 2)), [0])
    with pytest.raises(ValueError, match="A1"):
        nt.selection_problem(np.ones((0, 2)), np.ones((4, 2)), np.zeros(0, int))
