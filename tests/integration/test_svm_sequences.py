"""Several sequences share one X: the attention SVM, selections, paths; ragged and padded."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

import newtention as nt
from newtention.regularisation.fits import Fits, look_at
from tests.selections import selection_of

OFFSETS, KEY_OFFSETS = [0, 5, 7, 12], [0, 4, 10, 13]


def sequences(seed=0, d1=3, d2=2, X=None):
    """Three of different lengths, and the keys that one X selects within each."""
    rng = np.random.default_rng(seed)
    A1, A2 = rng.normal(size=(12, d1)), 5 + rng.normal(size=(13, d2))
    X = rng.normal(size=(d1, d2)) if X is None else X
    blocks = list(zip(pairwise(OFFSETS), pairwise(KEY_OFFSETS), strict=True))
    selected = [(A1[a:b] @ X @ A2[c:d].T).argmax(1) for (a, b), (c, d) in blocks]
    return A1, A2, np.concatenate(selected), blocks


def padded(A1, A2, selected, blocks, fill=0.0):
    """The same as one batch; rows of no sequence hold `fill`, their keys -1."""
    Q, K = np.full((3, 5, A1.shape[1]), fill), np.full((3, 6, A2.shape[1]), fill)
    keys = np.full((3, 5), -1)
    for i, ((a, b), (c, d)) in enumerate(blocks):
        Q[i, : b - a], K[i, : d - c], keys[i, : b - a] = A1[a:b], A2[c:d], selected[a:b]
    lengths = {"lengths": np.diff(OFFSETS), "key_lengths": np.diff(KEY_OFFSETS)}
    return Q, K, keys, lengths


def as_one(A1, A2, selected, blocks, mask=None):
    """One sequence of all rows, pairs of different sequences masked."""
    allowed = np.zeros((len(A1), len(A2)), bool)
    whole = selected.copy()
    for i, ((a, b), (c, d)) in enumerate(blocks):
        allowed[a:b, c:d] = True if mask is None else mask[i]
        whole[a:b] += c
    return whole, allowed


RAGGED = {"offsets": OFFSETS, "key_offsets": KEY_OFFSETS}


@pytest.mark.parametrize("soft", [None, 2.0])
@pytest.mark.parametrize("norm", ["frobenius", "nuclear"])
def test_one_x_for_all(norm, soft):
    A1, A2, selected, blocks = sequences()
    whole, allowed = as_one(A1, A2, selected, blocks)
    expected = nt.attention_svm(A1, A2, whole, norm, allowed, soft)
    ragged = nt.attention_svm(A1, A2, selected, norm, soft=soft, **RAGGED)
    assert ragged.success
    assert ragged.objective == pytest.approx(expected.objective, rel=1e-6)
    tol = 1e-4 if norm == "nuclear" else 1e-6
    np.testing.assert_allclose(ragged.X, expected.X, rtol=0, atol=tol * np.abs(expected.X).max())
    Q, K, keys, lengths = padded(A1, A2, selected, blocks, fill=7.0)
    batch = nt.attention_svm(Q, K, keys, norm, soft=soft, **lengths)
    assert np.array_equal(batch.X, ragged.X)
    assert np.array_equal(batch.support, ragged.support)
    if soft is not None:
        assert (ragged.slack.shape, batch.slack.shape) == ((12,), (3, 5))
        assert np.array_equal(batch.slack[keys >= 0], ragged.slack)
        assert not batch.slack[keys < 0].any()


def test_support_pairs_name_sequence_query_and_key():
    A1, A2, selected, blocks = sequences()
    svm = nt.attention_svm(A1, A2, selected, **RAGGED)
    total = np.zeros_like(svm.X)
    for (s, j, k), y in zip(svm.support, svm.duals, strict=True):
        (a, _), (c, d) = blocks[s]
        assert c + k < d
        assert k != selected[a + j]
        total += y * np.outer(A1[a + j], A2[c + selected[a + j]] - A2[c + k])
    np.testing.assert_allclose(total, svm.X, atol=1e-9 * np.abs(svm.X).max())
    queries = {tuple(row[:2]) for row in svm.support.tolist()}
    assert f"of {len(queries)} query(ies)" in svm.summary()


@pytest.mark.parametrize("seed", range(4))
def test_masks(seed):
    A1, A2, selected, blocks = sequences(seed)
    rng = np.random.default_rng(seed)
    masks = []
    for (a, b), (c, d) in blocks:
        mask = rng.random((b - a, d - c)) < 0.6
        mask[np.arange(b - a), selected[a:b]] = True
        masks.append(mask)
    whole, allowed = as_one(A1, A2, selected, blocks, masks)
    expected = nt.attention_svm(A1, A2, whole, mask=allowed)
    found = nt.attention_svm(A1, A2, selected, mask=masks, **RAGGED)
    np.testing.assert_allclose(found.X, expected.X, atol=1e-8 * np.abs(expected.X).max())
    causal = [np.tri(b - a, d - c, dtype=bool) for (a, b), (c, d) in blocks]
    first = np.zeros(12, int)
    whole, allowed = as_one(A1, A2, first, blocks, causal)
    expected = nt.attention_svm(A1, A2, whole, mask=allowed)
    found = nt.attention_svm(A1, A2, first, mask="causal", **RAGGED)
    assert found.status is expected.status
    if found.X is not None:
        np.testing.assert_allclose(found.X, expected.X, atol=1e-8 * np.abs(expected.X).max())


def test_a_conflict_between_sequences_is_named():
    """The same tokens with opposite wishes, in two sequences that could each have theirs."""
    rng = np.random.default_rng(0)
    A1, A2 = np.tile(rng.normal(size=(1, 3)), (2, 1)), np.tile(rng.normal(size=(2, 2)), (2, 1))
    svm = nt.attention_svm(A1, A2, [0, 1], offsets=[0, 1, 2], key_offsets=[0, 2, 4])
    assert svm.infeasible
    assert svm.conflict.proved
    assert svm.conflict.pairs.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert svm.conflict.selected.tolist() == [0, 1]
    text = "query 0 of sequence 0 selects key 0 over key 1; query 0 of sequence 1 selects key 1"
    assert text in svm.message


def test_kinds_and_types_of_arrays():
    A1, A2, selected, _ = sequences()
    expected = nt.attention_svm(A1, A2, selected, **RAGGED)
    for dtype in (torch.float64, torch.float32):
        a1, a2 = (torch.from_numpy(t).to(dtype) for t in (A1, A2))
        found = nt.attention_svm(a1, a2, torch.from_numpy(selected), **RAGGED)
        assert (found.X.dtype, found.support.dtype) == (dtype, torch.int64)
        tol = 1e-4 if dtype == torch.float32 else 1e-12
        np.testing.assert_allclose(found.X.double(), expected.X, rtol=tol, atol=tol)
    one = nt.attention_svm(A1[:5], A2[:4], selected[:5])
    alone = nt.attention_svm(A1[None, :5], A2[None, :4], selected[None, :5])
    assert np.array_equal(alone.X, one.X)
    assert np.array_equal(alone.support[:, 1:], one.support)
    same = nt.attention_svm(A1[:, :2], A1[:, :2], np.zeros(12, int), offsets=OFFSETS, soft=1.0)
    assert same.success


def test_refusals(unchecked):
    A1, A2, selected, blocks = sequences()
    Q, K, _, lengths = padded(A1, A2, selected, blocks)
    svm = nt.attention_svm
    with pytest.raises(ValueError, match=r"selected\[1\] of sequence 1 .* from 0 to 5; found 9"):
        svm(A1, A2, np.where(np.arange(12) == 6, 9, selected), **RAGGED)
    chosen = np.where(np.arange(12) == 4, 3, 0)
    masks = [np.tile(np.arange(d - c) < 3, (b - a, 1)) for (a, b), (c, d) in blocks]
    with pytest.raises(ValueError, match=r"selected\[4\] of sequence 0 .*forbids key 3"):
        svm(A1, A2, chosen, mask=masks, **RAGGED)
    with pytest.raises(ValueError, match="selected must be 12"):
        svm(A1, A2, selected[:5], **RAGGED)
    with pytest.raises(ValueError, match="selected must be 3 x 5"):
        svm(Q, K, selected, **lengths)
    with pytest.raises(ValueError, match="found both"):
        svm(A1, A2, selected, lengths=[1], **RAGGED)
    with pytest.raises(ValueError, match="offsets= must be given beside key_offsets="):
        svm(A1, A2, selected, key_offsets=KEY_OFFSETS)
    with pytest.raises(ValueError, match="lengths= and key_lengths= are for 3-D"):
        svm(A1, A2, selected, lengths=[12])
    with pytest.raises(ValueError, match="offsets"):
        svm(A1, A2, selected, offsets=[0, 5, 3, 12], key_offsets=KEY_OFFSETS)
    with pytest.raises(ValueError, match="finite"):
        svm(np.full_like(A1, np.nan), A2, selected, **RAGGED)
    with pytest.raises(TypeError, match="integers"):
        svm(A1, A2, selected.astype(float), **RAGGED)


def test_the_svm_of_a_selection():
    A1, A2, selected, blocks = sequences()
    X = np.random.default_rng(1).normal(size=(3, 2))
    svm = nt.attention_svm(A1, A2, sequences(X=X)[2], **RAGGED)
    ragged = nt.AttentionProblem.from_ragged(
        A1, np.zeros((12, 1)), keys=A2, values=A2, scale=0.5, **RAGGED
    )
    found = nt.selected_tokens(ragged, X)
    np.testing.assert_allclose(found.svm().X, 2 * svm.X, rtol=1e-9)
    assert found.angle == pytest.approx(nt.selected_tokens(ragged, 3 * X[None]).angle)
    Q, K, _, lengths = padded(A1, A2, selected, blocks)
    batch = nt.AttentionProblem(Q, K, K, np.zeros((3, 5, 1)), scale=0.5, **lengths)
    assert np.array_equal(nt.selected_tokens(batch, X).svm().X, found.svm().X)
    assert np.array_equal(nt.selected_tokens(batch, X[None]).svm().X, found.svm().X)
    with pytest.raises(ValueError, match="2 heads"):
        nt.selected_tokens(batch, np.stack([X, X])).svm()


def maps_of(selected, columns):
    maps = np.zeros((12, columns))
    maps[np.arange(12), selected] = 1
    return maps


def test_a_path_of_several_sequences():
    A1, A2, selected, blocks = sequences(seed=3)
    ragged = nt.AttentionProblem.from_ragged_maps(A1, maps_of(selected, 6), keys=A2, **RAGGED)
    ridges = 10.0 ** -np.arange(0, 13, 3)
    path = nt.regularisation_path(ragged, ridges)
    assert path.selected.tolist() == selected.tolist()
    assert path.wrong == ()
    assert "every wanted key is selected" in path.ended
    assert np.array_equal(path.svm.X, nt.attention_svm(A1, A2, selected, **RAGGED).X)
    assert path.angles[-1] < 6
    assert path.angles_times_norms[-1] < 1.5 * path.angles_times_norms[-3]
    assert path.growth == pytest.approx(path.predicted_growth, rel=0.12)
    # What is said of a fit, by the definitions.
    leads, entropies = [], []
    for (a, b), (c, d) in blocks:
        logits = A1[a:b] @ path.X[-1] @ A2[c:d].T
        leads.append(selection_of(logits)[1])
        P = np.exp(logits - logits.max(1, keepdims=True))
        P /= P.sum(1, keepdims=True)
        entropies.append(-(P * np.log(np.maximum(P, 1e-300))).sum(1))
    lead = np.concatenate(leads).min() / path.norms[-1]
    assert path.margins[-1] == pytest.approx(lead, rel=1e-9)
    assert path.entropies[-1] == pytest.approx(np.concatenate(entropies).mean(), rel=1e-6)

    Q, K, keys, lengths = padded(A1, A2, selected, blocks)
    B = np.zeros((3, 5, 6))
    np.put_along_axis(B, np.maximum(keys, 0)[..., None], 1.0, -1)
    B[keys < 0] = 0
    batch = nt.regularisation_path(nt.AttentionProblem.from_maps(Q, K, B, **lengths), ridges)
    np.testing.assert_allclose(batch.X, path.X, rtol=1e-9, atol=1e-12)
    assert np.array_equal(batch.selected, keys)
    assert batch.wrong == ()
    assert batch.shares[-1] == 1
    assert json.loads(json.dumps(batch.to_dict()))["ended"] == batch.ended


def test_wanted_keys_of_sequences_with_values():
    A1, A2, selected, blocks = sequences(seed=3)
    V, Y = np.random.default_rng(9).normal(size=(13, 3)), np.eye(3)
    own = np.concatenate([c + selected[a:b] for (a, b), (c, _) in blocks])
    problem = nt.AttentionProblem.from_ragged(A1, V[own], keys=A2, values=V, **RAGGED)
    path = nt.regularisation_path(problem, [1.0, 0.1], Y=Y)
    assert path.selected.tolist() == selected.tolist()
    given = nt.regularisation_path(problem, [1.0, 0.1], Y=Y, selected=selected)
    assert np.array_equal(given.X, path.X)
    targets = V[own]
    targets[6] = 0.0
    unclear = nt.AttentionProblem.from_ragged(A1, targets, keys=A2, values=V, **RAGGED)
    with pytest.raises(ValueError, match="query 1 of sequence 1 has 0 keys with the value"):
        nt.regularisation_path(unclear, [1.0], Y=Y)


def test_wrong_rows_are_counted_without_padding():
    A1, A2, selected, blocks = sequences(seed=3)
    Q, K, keys, lengths = padded(A1, A2, selected, blocks)
    B = np.zeros((3, 5, 6))
    np.put_along_axis(B, np.maximum(keys, 0)[..., None], 1.0, -1)
    problem = nt.AttentionProblem.from_maps(Q, K, B, **lengths)
    other = keys.copy()
    other[2, 4] = (other[2, 4] + 1) % 3  # the last of twelve rows
    path = nt.regularisation_path(problem, [1e-4, 1e-6], selected=other)
    assert path.wrong == (11,)
    assert "(1 of 12)" in path.ended
    fits = Fits.of(problem, None, None, 5)
    look = look_at(fits, torch.from_numpy(path.X[-1]), torch.from_numpy(other))
    assert look.share == pytest.approx(11 / 12)
