"""Attention as a support vector machine, against solvers that see all constraints at once."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import optimize

import newtention as nt
from newtention.masks import Mask
from newtention.svm import SvmStatus, conflicts, generation, programs
from newtention.svm.conflicts import _Vertex, find_conflict
from newtention.svm.exchange import exchange, refine
from newtention.svm.generation import Objective
from newtention.svm.pairs import Block, Tokens, reduce
from newtention.svm.solve import NUCLEAR_MOST
from tests.pages import DOCS, block, run_example
from tests.unit.test_certificates_doc import broken_links

PAGE = DOCS / "attention-svm.md"


def problem(seed, n=9, m=7, d1=3, d2=4, kind="gaussian"):
    """(A1, A2, selected, mask), with an X that selects these keys."""
    rng = np.random.default_rng(seed)
    A1, A2 = rng.normal(size=(n, d1)), rng.normal(size=(m, d2))
    mask = np.ones((n, m), bool)
    if kind == "clustered":
        A1 = 2 * A1[rng.integers(0, 3, n)] + 0.1 * A1
        A2 = 2 * A2[rng.integers(0, 3, m)] + 0.3 * A2
    elif kind == "deficient":
        A1 = A1[:, :1] * np.arange(1.0, d1 + 1)
        A2 = A2[:, :2] @ rng.normal(size=(2, d2))
    elif kind == "masked":
        mask = rng.random((n, m)) < 0.6
        mask[:, 0] = True
    elif kind == "causal":
        mask = np.tril(mask)
    elif kind == "far":
        A2 = A2 + 1000 * rng.normal(size=d2)
    elif kind == "duplicate queries":
        A1 = A1[rng.integers(0, 4, n)]
    elif kind == "scaled":
        A1, A2 = A1 * np.exp(2 * rng.normal(size=(n, 1))), 1e-4 * A2
    logits = np.where(mask, A1 @ rng.normal(size=(d1, d2)) @ A2.T, -np.inf)
    return A1, A2, logits.argmax(1), mask


KINDS = ("gaussian", "clustered", "deficient", "masked", "causal", "far", "duplicate queries")
KINDS = (*KINDS, "scaled")


def all_pairs(A1, A2, selected, mask):
    n, m = mask.shape
    return [(j, k) for j in range(n) for k in range(m) if mask[j, k] and k != selected[j]]


def all_features(A1, A2, selected, mask):
    """(constraints, d1 d2)."""
    pairs = all_pairs(A1, A2, selected, mask)
    return np.array([np.outer(A1[j], A2[selected[j]] - A2[k]).reshape(-1) for j, k in pairs])


def least_distance(F):
    """argmin ||x|| s.t. F x >= 1, by non-negative least squares (Lawson, Hanson, chapter 23)."""
    unit = np.linalg.norm(F, axis=1).max()
    E = np.vstack([F.T / unit, np.ones(len(F))])
    f = np.zeros(len(E))
    f[-1] = 1.0
    y, _ = optimize.nnls(E, f, maxiter=100 * len(F))
    r = E @ y - f
    return -r[:-1] / r[-1] / unit


def separable(F):
    """Whether F x > 0 has a solution, by a linear program."""
    unit = F / np.linalg.norm(F, axis=1)[:, None]
    D = F.shape[1]
    found = optimize.linprog(
        np.append(np.zeros(D), -1.0),
        A_ub=np.hstack([-unit, np.ones((len(F), 1))]),
        b_ub=np.zeros(len(F)),
        bounds=[(-1, 1)] * D + [(None, 1)],
    )
    return -found.fun > 1e-8


def close(found, expected, tolerance):
    found, expected = np.asarray(found), np.asarray(expected)
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_hard_margin_is_the_least_distance(kind, seed):
    A1, A2, selected, mask = problem(seed, kind=kind)
    F = all_features(A1, A2, selected, mask)
    result = nt.attention_svm(A1, A2, selected, mask="causal" if kind == "causal" else mask)
    expected = least_distance(F).reshape(A1.shape[1], A2.shape[1])
    assert result.success
    close(result.X, expected, 1e-6)
    assert (F @ result.X.reshape(-1)).min() >= 1 - 1e-12
    assert result.margin == pytest.approx(1 / np.linalg.norm(expected))
    assert result.objective == pytest.approx(np.linalg.norm(result.X))
    assert result.distance < 1e-5 * result.objective
    assert np.linalg.norm(result.X - expected) < 1e-5 * result.objective


@pytest.mark.parametrize("norm", ["frobenius", "nuclear"])
@pytest.mark.parametrize("soft", [None, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_certificate_holds_by_itself(kind, soft, norm):
    """Weak duality, recomputed from X, the multipliers and all constraints."""
    A1, A2, selected, mask = problem(5, kind=kind)
    F = all_features(A1, A2, selected, mask)
    owner = np.array([j for j, _ in all_pairs(A1, A2, selected, mask)])
    result = nt.attention_svm(A1, A2, selected, norm, mask, soft)
    y = np.zeros(len(F))
    place = {pair: c for c, pair in enumerate(all_pairs(A1, A2, selected, mask))}
    for (j, k), dual in zip(result.support.tolist(), result.duals, strict=True):
        y[place[j, k]] = dual
    assert result.success
    assert y.min() >= 0
    M = (F.T @ y).reshape(result.X.shape)
    dual_norm = np.linalg.norm(M, 2 if norm == "nuclear" else "fro")
    size = np.linalg.norm(result.X, "nuc" if norm == "nuclear" else "fro")
    margins = F @ result.X.reshape(-1)
    if soft is None:
        lower, upper = y.sum() / dual_norm, size / margins.min()
    else:
        assert np.bincount(owner, y).max() <= soft * (1 + 1e-7)
        short = np.zeros(len(A1))
        np.maximum.at(short, owner, 1 - margins)
        close(result.slack, short, 1e-9)
        if norm == "nuclear":
            assert dual_norm <= 1 + 1e-7
        energy = 0 if norm == "nuclear" else 0.5 * dual_norm**2
        lower = y.sum() - energy
        upper = (size if norm == "nuclear" else 0.5 * size**2) + soft * short.sum()
    assert upper == pytest.approx(lower, rel=2e-7)
    assert result.objective == pytest.approx(upper, rel=1e-9)
    assert result.lower_bound == pytest.approx(lower, rel=1e-6)
    if norm == "frobenius" and soft is None:
        close(M, result.X, 1e-6)


@pytest.mark.parametrize("cap", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_soft_margin_against_a_general_solver(seed, cap):
    """The dual, min 1/2 ||F^T y||^2 - sum y with sum_k y_jk <= C, as a general program."""
    A1, A2, selected, mask = problem(seed, n=6, m=4, d1=2, d2=2)
    selected[:2] = 3 - selected[:2]
    F = all_features(A1, A2, selected, mask)
    owner = np.array([j for j, _ in all_pairs(A1, A2, selected, mask)])
    limits = optimize.LinearConstraint((owner == np.arange(6)[:, None]).astype(float), -np.inf, cap)
    found = optimize.minimize(
        lambda y: 0.5 * (F.T @ y) @ (F.T @ y) - y.sum(),
        np.zeros(len(F)),
        jac=lambda y: F @ (F.T @ y) - 1,
        bounds=[(0, cap)] * len(F),
        constraints=limits,
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 2000},
    )
    result = nt.attention_svm(A1, A2, selected, soft=cap)
    assert result.success
    assert result.objective == pytest.approx(-found.fun, rel=1e-6)
    close(result.X, (F.T @ found.x).reshape(2, 2), 1e-3)


def test_soft_margin_of_hopeless_wishes_is_zero_exactly():
    rng = np.random.default_rng(0)
    A1, A2 = rng.normal(size=(60, 2)), rng.normal(size=(30, 2))
    result = nt.attention_svm(A1, A2, rng.integers(0, 30, 60), soft=0.1)
    assert result.success
    assert (result.X == 0).all()
    assert result.objective == pytest.approx(6)
    assert result.slack.tolist() == [1] * 60


def test_soft_margin_tends_to_the_hard_one():
    A1, A2, selected, _ = problem(0)
    hard = nt.attention_svm(A1, A2, selected)
    enough = 1.01 * np.bincount(hard.support[:, 0], hard.duals).max()
    soft = nt.attention_svm(A1, A2, selected, soft=enough)
    close(soft.X, hard.X, 1e-6)
    assert soft.slack.max() < 1e-7
    assert nt.attention_svm(A1, A2, selected, soft=enough / 4).slack.max() > 0.01


def test_nuclear_norm_of_a_known_case():
    """Unit queries, two keys e_k and -e_k: 2 x_kk >= 1 and nothing else; the norm is the trace."""
    d = 4
    A1 = np.diag([1.0, 2.0, 4.0, 5.0])
    A2 = np.vstack([np.eye(d), -np.eye(d)])
    mask = np.hstack([np.eye(d, dtype=bool)] * 2)
    result = nt.attention_svm(A1, A2, np.arange(d), "nuclear", mask)
    close(result.X, np.diag(0.5 / np.array([1.0, 2.0, 4.0, 5.0])), 1e-7)
    assert result.objective == pytest.approx(0.5 * (1 + 0.5 + 0.25 + 0.2), rel=1e-7)
    assert nt.attention_svm(A1, A2, np.arange(d), "frobenius", mask).objective == pytest.approx(
        0.5 * math.sqrt(1 + 0.25 + 0.0625 + 0.04)
    )


def test_nuclear_norm_prefers_low_rank():
    """With one constraint, X is a multiple of its rank-one feature in either norm; with several,
    the nuclear norm is smaller than that of the Frobenius solution."""
    A1, A2, selected, mask = problem(3, n=20, m=5)
    F = all_features(A1, A2, selected, mask)
    frobenius = nt.attention_svm(A1, A2, selected)
    nuclear = nt.attention_svm(A1, A2, selected, "nuclear")
    assert nuclear.objective < np.linalg.norm(frobenius.X, "nuc") * (1 - 1e-3)
    assert frobenius.objective < np.linalg.norm(nuclear.X) * (1 - 1e-3)

    def penalised(x):  # an upper bound that a general method can lower no further
        size = np.linalg.norm(x.reshape(3, 4), "nuc")
        return size / max((F @ x).min(), 1e-9)

    start = nuclear.X.reshape(-1)
    found = optimize.minimize(penalised, start, method="Nelder-Mead", options={"maxfev": 2000})
    assert found.fun >= nuclear.lower_bound * (1 - 1e-12)


def test_one_constraint_has_a_closed_form():
    a1, u, v = np.array([3.0, 4.0]), np.array([1.0, 2.0, 2.0]), np.zeros(3)
    result = nt.attention_svm(a1[None], np.stack([u, v]), [0])
    close(result.X, np.outer(a1, u) / 225, 1e-14)
    assert (result.support.tolist(), result.margin) == ([[0, 1]], pytest.approx(15.0))
    assert result.duals == pytest.approx([1 / 225])


INFEASIBLE = [(kind, seed) for kind in ("gaussian", "masked", "integers") for seed in range(5)]


@pytest.mark.parametrize(("kind", "seed"), INFEASIBLE)
def test_conflicts_are_conflicts_and_irreducible(kind, seed):
    A1, A2, selected, mask = problem(seed, n=30, m=9, d1=2, d2=3, kind=kind)
    rng = np.random.default_rng(seed)
    selected = np.array([rng.choice(np.flatnonzero(row)) for row in mask])
    if kind == "integers":
        A1, A2 = np.round(3 * A1) + 0.5, np.round(3 * A2)
    result = nt.attention_svm(A1, A2, selected, mask=mask)
    conflict = result.conflict
    assert result.infeasible
    assert result.X is None
    assert result.margin == 0
    j, k = conflict.pairs.T
    assert mask[j, k].all()
    assert (k != selected[j]).all()
    assert (conflict.selected == selected[j]).all()
    F = np.array([np.outer(A1[a], A2[selected[a]] - A2[b]).reshape(-1) for a, b in conflict.pairs])
    sizes = np.linalg.norm(F, axis=1)
    assert conflict.weights.min() > 0
    assert conflict.weights.sum() == pytest.approx(1)
    assert np.linalg.norm(F.T @ conflict.weights) <= 1e-10 * (conflict.weights @ sizes)
    assert len(F) <= F.shape[1] + 1
    assert conflict.irreducible
    if sizes.min() > 0:
        assert not separable(F)
        for c in range(len(F)):
            assert len(F) == 1 or separable(np.delete(F, c, 0))
    assert nt.attention_svm(A1, A2, selected, "nuclear", mask).infeasible
    assert nt.attention_svm(A1, A2, selected, mask=mask, soft=1.0).success


def test_conflict_without_any_of_its_pairs_is_solved():
    A1, A2, selected, mask = problem(0, n=30, m=9, d1=2, d2=3)
    selected = np.random.default_rng(0).integers(0, 9, 30)
    pairs = nt.attention_svm(A1, A2, selected).conflict.pairs
    only = np.zeros_like(mask)
    only[np.arange(30), selected] = True
    only[pairs[:, 0], pairs[:, 1]] = True
    assert nt.attention_svm(A1, A2, selected, mask=only).infeasible
    only[pairs[0, 0], pairs[0, 1]] = False
    assert nt.attention_svm(A1, A2, selected, mask=only).success


def test_equal_keys_are_named():
    A1, A2, selected, _ = problem(1)
    A2[5] = A2[selected[3]]
    selected[selected == 5] = selected[3]
    result = nt.attention_svm(A1, A2, selected)
    (pair,) = result.conflict.pairs.tolist()
    assert {int(selected[pair[0]]), pair[1]} == {int(selected[3]), 5}
    assert result.conflict.proved
    assert f"query {pair[0]} selects key {selected[pair[0]]} over key {pair[1]}" in result.message


def test_equal_keys_that_are_not_both_allowed_do_not_matter():
    A1, A2, selected, mask = problem(1)
    A2[5] = A2[selected[3]]
    selected[selected == 5] = selected[3]
    mask[:, 5] = False
    assert nt.attention_svm(A1, A2, selected, mask=mask).success


def test_equal_queries_with_different_choices_are_named():
    A1, A2, selected, _ = problem(1)
    A1[4] = A1[2]
    selected[4] = (selected[2] + 1) % len(A2)
    conflict = nt.attention_svm(A1, A2, selected).conflict
    assert conflict.pairs.tolist() == [[2, selected[4]], [4, selected[2]]]
    assert conflict.proved


def test_a_query_of_zeros_is_named():
    A1, A2, selected, _ = problem(1)
    A1[2] = 0
    conflict = nt.attention_svm(A1, A2, selected).conflict
    assert conflict.pairs[:, 0].tolist() == [2]
    assert nt.attention_svm(A1, A2, selected, soft=2.0).slack[2] == pytest.approx(1)


def test_a_proved_conflict_is_one_of_the_given_numbers():
    """Parallel queries of opposite wishes, 1/3 apart from representable: exact or not claimed."""
    A2 = np.array([[0.0], [1.0]])
    exact = nt.attention_svm(np.array([[1.0, 2.0], [3.0, 6.0]]), A2, [0, 1]).conflict
    assert exact.proved
    assert exact.residual == 0
    weights = [Fraction(w).limit_denominator(100) for w in exact.weights.tolist()]
    assert weights == [Fraction(3, 4), Fraction(1, 4)]
    tilted = np.array([[1.0, 2.0], [3.0, 6.0 + 1e-14]])
    near = nt.attention_svm(tilted, A2, [0, 1])
    assert near.infeasible
    assert not near.conflict.proved
    assert "up to rounding" in near.message


@pytest.mark.parametrize("angle", [1e-3, 1e-5, 1e-7, 1e-9])
def test_small_margins_are_margins(angle):
    """The margin of two queries an angle apart with opposite wishes is angle / sqrt 2."""
    result = nt.attention_svm(np.array([[1.0, 0.0], [1.0, angle]]), np.eye(2), [0, 1])
    assert result.success
    assert result.margin == pytest.approx(angle / math.sqrt(2), rel=1e-6)


def test_numbers_too_far_apart_are_refused_or_unresolved():
    tokens = np.array([[1e-170, 0.0], [1.0, 1e-120]])
    result = nt.attention_svm(tokens, np.array([[1.0, 0], [0, 1], [1, 1e-170]]), [0, 1])
    assert result.status is SvmStatus.UNRESOLVED
    assert not result.success
    assert not result.infeasible
    with pytest.raises(ValueError, match=r"A1 and A2 must have entries whose products lie between"):
        nt.attention_svm(1e100 * np.eye(2), 1e100 * np.eye(2), [0, 1])


def test_without_a_second_key_there_is_nothing_to_do():
    for mask in (None, np.ones((3, 1), bool)):
        result = nt.attention_svm(np.ones((3, 2)), np.ones((1, 4)), [0, 0, 0], mask=mask)
        assert result.status is SvmStatus.NO_CONSTRAINTS
        assert result.success
        assert (result.X == 0).all()
        assert result.X.shape == (2, 4)
        assert result.margin == math.inf
        assert "no constraints" in result.summary()
    soft = nt.attention_svm(
        np.ones((3, 2)), np.ones((5, 4)), [0, 1, 2], mask=np.eye(3, 5) > 0, soft=1.0
    )
    assert soft.slack.tolist() == [0, 0, 0]


def test_input_kinds():
    A1, A2, selected, mask = problem(2)
    expected = nt.attention_svm(A1, A2, selected, mask=mask)
    assert isinstance(expected.X, np.ndarray)
    torch_result = nt.attention_svm(
        *map(torch.as_tensor, (A1, A2, selected)), mask=torch.as_tensor(mask)
    )
    assert isinstance(torch_result.X, torch.Tensor)
    assert isinstance(torch_result.support, torch.Tensor)
    close(torch_result.X, expected.X, 1e-15)
    frozen = A1.copy()
    frozen.setflags(write=False)
    strided = np.repeat(A2, 2, 1)[::-1, ::2][::-1]
    close(nt.attention_svm(frozen, strided, selected.tolist()).X, expected.X, 1e-12)
    with pytest.warns(UserWarning, match="A1 holds integers"):
        integers = nt.attention_svm(np.arange(1, 5).reshape(2, 2), A2[:, :2], [0, 0])
    assert integers.X is None or integers.X.dtype == np.float64


def test_float32_constraints_hold_for_what_is_returned():
    A1, A2, selected, mask = problem(2)
    A1, A2 = A1.astype(np.float32), A2.astype(np.float32)
    result = nt.attention_svm(A1, A2, selected)
    assert result.X.dtype == np.float32
    assert result.duals.dtype == np.float32
    F = all_features(A1.astype(float), A2.astype(float), selected, mask)
    assert (F @ result.X.reshape(-1).astype(float)).min() >= 1 - 1e-12
    assert result.success
    close(result.X, least_distance(F).reshape(3, 4), 1e-6)


BAD = [
    (dict(selected=[0, 1]), ValueError, "selected must be 9 (one key per query); found 2"),
    (dict(selected=[7] * 9), ValueError, "selected[0] must be the index of a key, from 0 to 6"),
    (dict(selected=[0] * 8 + [-1]), ValueError, "selected[8] must be the index of a key"),
    (dict(selected=[0.5] * 9), TypeError, "selected must hold integers; found float64"),
    (dict(A1=np.full((9, 3), np.nan)), ValueError, "A1 must hold finite numbers; found nan"),
    (dict(A2=np.full((7, 4), np.inf)), ValueError, "A2 must hold finite numbers; found inf"),
    (dict(A1=np.zeros((0, 3)), selected=np.zeros(0, int)), ValueError, "A1 must not be empty"),
    (dict(A2=np.zeros((7, 0))), ValueError, "A2 must not be empty"),
    (dict(A1=np.zeros(3)), ValueError, "A1 must be 2-D (one sequence) or 3-D (a padded batch)"),
    (dict(A1=np.zeros((9, 3), np.float32)), TypeError, "All arrays must have one floating type"),
    (dict(A1=torch.zeros(9, 3)), TypeError, "A1 is a torch tensor but A2 is ndarray"),
    (dict(norm="spectral"), ValueError, 'norm must be "frobenius" or "nuclear"; found'),
    (dict(soft=0.0), ValueError, "soft must be positive and finite; found 0.0"),
    (dict(soft=math.nan), ValueError, "soft must be positive and finite; found nan"),
    (dict(soft="1"), TypeError, "soft must be a number or None; found str"),
    (dict(tol=2.0), ValueError, "tol must be between 0 and 1; found 2.0"),
    (dict(max_rounds=0), ValueError, "max_rounds must be an integer of at least 1; found 0"),
    (dict(max_rounds=1.5), ValueError, "max_rounds must be an integer of at least 1; found 1.5"),
    (dict(mask="padding"), ValueError, 'mask must be "causal", booleans or None'),
    (dict(mask=np.ones((9, 7))), TypeError, "mask must be boolean, True where attention"),
    (dict(mask=np.ones((7, 9), bool)), ValueError, "mask must be 9 x 7 (queries x keys)"),
    (dict(mask=np.zeros((9, 7), bool)), ValueError, "the mask leaves none to query 0"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "words"), BAD, ids=[words for *_, words in BAD])
def test_mistakes_are_named(unchecked, changes, kind, words):
    A1, A2, selected, _ = problem(0)
    with pytest.raises(kind) as caught:
        nt.attention_svm(**(dict(A1=A1, A2=A2, selected=selected) | changes))
    assert words in str(caught.value)


def test_a_masked_selection_is_named():
    A1, A2, selected, mask = problem(0)
    mask[4, selected[4]] = False
    with pytest.raises(ValueError, match=rf"selected\[4\] must be .* forbids key {selected[4]}"):
        nt.attention_svm(A1, A2, selected, mask=mask)
    with pytest.raises(ValueError, match=r"selected\[0\] must be .* forbids key 3"):
        nt.attention_svm(A1, A2, np.full(9, 3), mask="causal")


def test_the_nuclear_norm_refuses_large_widths():
    rng = np.random.default_rng(0)
    A = rng.normal(size=(40, 40))
    with pytest.raises(ValueError, match=f"at most {NUCLEAR_MOST}"):
        nt.attention_svm(A, A, np.arange(40), "nuclear")
    low = A[:, :3] @ rng.normal(size=(3, 40))  # of low rank, it is solved
    result = nt.attention_svm(low, low, np.arange(40), "nuclear", soft=1.0)
    assert result.success
    assert result.X.shape == (40, 40)


def test_the_limit_of_rounds_is_kept():
    A1, A2, selected, _ = problem(0, n=60, m=60)
    for norm in ("frobenius", "nuclear"):
        result = nt.attention_svm(A1, A2, selected, norm, max_rounds=1)
        assert result.status is SvmStatus.ROUND_LIMIT
        assert result.rounds == 1
        assert not result.success
        assert result.lower_bound > 0
    whole = nt.attention_svm(A1, A2, selected)
    assert result.lower_bound <= nt.attention_svm(A1, A2, selected, "nuclear").objective
    assert whole.rounds > 1


def test_results_print_and_turn_into_plain_data():
    A1, A2, selected, _ = problem(0)
    result = nt.attention_svm(A1, A2, selected)
    assert str(result) == result.summary()
    assert result.summary().startswith("Solved: ")
    assert f"{len(result.support)} support pair(s)" in result.summary()
    data = result.to_dict()
    assert (data["status"], data["conflict"]) == ("SOLVED", None)
    worse = nt.attention_svm(np.ones((2, 1)), np.eye(2), [0, 1]).to_dict()
    assert worse["objective"] == "inf"
    assert worse["conflict"]["pairs"] == [[0, 1], [1, 0]]


# The parts


def tokens_of(A1, A2, selected, mask):
    rule = Mask(explicit=torch.as_tensor(mask)[None, None])
    return Tokens(A1, A2, selected, (Block(slice(0, len(A1)), slice(0, len(A2)), rule),))


def test_scan_finds_the_worst_rival_in_tiles(monkeypatch):
    A1, A2, selected, mask = problem(0, kind="masked")
    mask[2] = False
    mask[2, selected[2]] = True
    tokens = tokens_of(A1, A2, selected, mask)
    X = np.random.default_rng(0).normal(size=(3, 4))
    logits = np.where(mask, A1 @ X @ A2.T, -np.inf)
    own = logits[np.arange(9), selected].copy()
    logits[np.arange(9), selected] = -np.inf
    for tile in (1, 20, 1 << 20):
        monkeypatch.setattr("newtention.svm.pairs.TILE", tile)
        rival, margin = tokens.scan(X)
        assert margin[2] == np.inf
        rest = np.arange(9) != 2
        assert (rival[rest] == logits.argmax(1)[rest]).all()
        assert margin[rest] == pytest.approx((own - logits.max(1))[rest])


def test_reduction_keeps_margins_and_norms():
    A1, A2, selected, mask = problem(0, d1=5, d2=6, kind="deficient")
    tokens = tokens_of(A1, A2, selected, mask)
    reduced = reduce(tokens)
    assert reduced.tokens.shape == (1, 2)
    Z = np.random.default_rng(1).normal(size=(1, 2))
    X = reduced.back(Z)
    assert tokens.scan(X)[1] == pytest.approx(reduced.tokens.scan(Z)[1])
    assert np.linalg.norm(X) * reduced.scale == pytest.approx(np.linalg.norm(Z))


@pytest.mark.parametrize("count", [6, 25])
def test_programs_with_fewer_and_more_pairs_than_unknowns(count):
    """Both forms of the quadratic program; the active-set method and its refinement agree."""
    A1, A2, selected, mask = problem(1)
    tokens = tokens_of(A1, A2, selected, mask)
    pairs = np.array(all_pairs(A1, A2, selected, mask))[:: len(A1) * 6 // count]
    expected = least_distance(tokens.features(pairs)).reshape(3, 4)
    close(programs.solve_frobenius(tokens, pairs, None).X, expected, 1e-6)
    y = exchange(tokens.gram(pairs), np.zeros(len(pairs)), 12)
    close(tokens.combine(pairs, y), expected, 1e-9)
    refined, X = refine(tokens, pairs, y)
    close(X, expected, 1e-9)
    close(refined, y, 1e-8)
    rows = programs.short_rows(tokens, pairs, np.ones(len(pairs)))
    close(rows @ rows.T, tokens.gram(pairs), 1e-12)


def test_dual_objective_of_any_multipliers_is_a_lower_bound():
    """Feasible or not: they are scaled to be, in the best way."""
    A1, A2, selected, mask = problem(2)
    tokens = tokens_of(A1, A2, selected, mask)
    pairs = np.array(all_pairs(A1, A2, selected, mask))
    rng = np.random.default_rng(0)
    for norm in ("frobenius", "nuclear"):
        for cap in (None, 0.3, 3.0):
            optimum = nt.attention_svm(A1, A2, selected, norm, soft=cap).objective
            objective = Objective(norm, cap)
            for size in (1e-3, 1.0, 1e3):
                y = size * rng.random(len(pairs)) * (rng.random(len(pairs)) < 0.2)
                assert 0 < objective.lower(tokens, pairs, y) <= optimum
                X = size * rng.normal(size=(3, 4))
                assert objective.upper(X, tokens.scan(X)[1]) >= optimum


def test_distance_is_what_the_gap_allows():
    A1, A2, selected, _ = problem(0)
    for soft, expected in ((None, math.sqrt(2 * 0.1 + 0.1**2)), (1.0, math.sqrt(0.2))):
        result = nt.attention_svm(A1, A2, selected, soft=soft)
        worse = replace(result, objective=1.1, lower_bound=1.0)
        assert worse.distance == pytest.approx(expected)
    assert nt.attention_svm(A1, A2, selected, "nuclear").distance == math.inf


def test_no_conflict_is_claimed_of_pairs_without_one():
    A1, A2, selected, mask = problem(0, d1=1, d2=2)
    tokens = tokens_of(A1, A2, selected, mask)
    pairs = np.array(all_pairs(A1, A2, selected, mask))
    assert find_conflict(tokens, pairs, tokens) is None
    some, even = pairs[[0, 20, 30]], np.full(3, 1 / 3)
    lengths = tokens.lengths(some)
    assert conflicts._measured(tokens, some, _Vertex(np.arange(3), even, True), lengths) is None
    assert not conflicts._stable(tokens, some, even)


def test_exchange_gives_up_on_a_conflict():
    tokens = tokens_of(np.ones((2, 1)), np.eye(2), np.array([0, 1]), np.ones((2, 2), bool))
    pairs = np.array([[0, 1], [1, 0]])
    assert exchange(tokens.gram(pairs), np.zeros(2), 1) is None
    assert programs.solve_frobenius(tokens, pairs, None).conflict


def test_interior_points_do_where_exchange_does_not_settle(monkeypatch):
    A1, A2, selected, mask = problem(4)
    monkeypatch.setattr(generation, "exchange", lambda *_: None)
    result = nt.attention_svm(A1, A2, selected)
    close(result.X, least_distance(all_features(A1, A2, selected, mask)).reshape(3, 4), 1e-6)


# The page


@pytest.fixture(scope="module")
def page():
    """The names that the page's example defines, and what it printed."""
    return run_example(PAGE)


def test_page_prints_what_it_shows(page):
    assert page[1] == block(PAGE, "text")


def test_what_the_page_says_of_its_example(page):
    hard, low = page[0]["svm"], page[0]["nuclear"]
    assert np.linalg.matrix_rank(low.X, tol=1e-4) < np.linalg.matrix_rank(hard.X, tol=1e-4)
    assert low.objective == pytest.approx(np.linalg.norm(low.X, "nuc"))
    assert page[0]["svm"].active == 23
    assert page[0]["asked"].conflict.proved
    assert broken_links(PAGE, PAGE.read_text()) == []
