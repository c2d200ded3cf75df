"""Paths of falling ridges: where they go by theory, where they end, and what they say of it."""

import json

import numpy as np
import pytest
import torch

import newtention as nt
from newtention import plots
from newtention.solution import Status
from tests.pages import DOCS, block, run_example
from tests.selections import planted

SMALL = 10.0 ** -np.arange(5, 13, 2.0)


@pytest.fixture(scope="module")
def paths():
    """Two seeds, from ridge 1 to 1e-12."""
    problems = [nt.selection_problem(*planted(12, 9, 4, seed)) for seed in (0, 2)]
    return [(problem, nt.regularisation_path(problem)) for problem in problems]


def test_paths_tend_to_the_svm(paths):
    for _, path in paths:
        assert path.ridges == pytest.approx(10.0 ** -np.arange(13))
        assert path.statuses == (Status.CONVERGED,) * 13
        assert path.ended == "At ridge 1e-12 every wanted key is selected."
        assert (np.diff(path.losses) < 0).all()
        assert (np.diff(path.entropies) < 0).all()
        assert path.losses[-1] < 1e-9
        assert (path.shares[2:] == 1).all()
        assert (np.diff(path.angles[5:]) < 0).all()
        products = path.angles_times_norms[4:]
        assert products.max() < 1.4 * products.min()
        assert path.margins[-1] == pytest.approx(path.svm.margin, rel=0.06)
        assert path.margins[-1] < path.svm.margin
    assert np.median([path.angles[-1] for _, path in paths]) < 3.3
    assert np.median([path.angles[6] for _, path in paths]) > 4.0  # and never 0


def test_the_norm_grows_as_predicted(paths):
    """||X|| = ||X_svm|| / 2 (ln(1/ridge) - ln ln(1/ridge)) + O(1)."""
    for _, path in paths:
        L = -np.log(path.ridges[4:])
        rest = path.norms[4:] - path.predicted_growth * (L - np.log(L))
        assert np.ptp(rest) < 0.05 * np.ptp(path.norms[4:])
        slope = 1 - 1 / np.mean(L[2:])  # of L - ln L
        assert path.growth == pytest.approx(path.predicted_growth * slope, rel=0.03)
        assert path.predicted_growth == path.svm.objective / 2


def test_every_point_is_stationary_to_the_ridge(paths):
    for problem, path in paths:
        for ridge, X in zip(path.ridges, path.X, strict=True):
            ridged = problem.with_regularizer(nt.Ridge(x=ridge))
            slope = np.linalg.norm(nt.gradient(ridged, X))
            assert slope < 1e-4 * ridge * np.linalg.norm(X)


def test_values_are_kept_fixed(paths):
    A1, A2, selected = planted(12, 9, 4)
    eye = np.eye(9)
    problem = nt.AttentionProblem(A1, A2, eye, eye[selected])
    same = nt.regularisation_path(problem, [1e-8, 1e-10], Y=eye, start=paths[0][1].X[6])
    assert same.statuses == (Status.CONVERGED,) * 2
    np.testing.assert_allclose(same.X, paths[0][1].X[[8, 10]], rtol=1e-4, atol=1e-5)
    assert (same.selected == selected).all()


def test_the_selection_is_read_off_the_values():
    A1, A2, selected = planted(12, 9, 4, 3)
    rng = np.random.default_rng(5)
    A3, Y = rng.normal(size=(9, 6)), rng.normal(size=(6, 5))
    problem = nt.AttentionProblem(A1, A2, A3, A3[selected] @ Y, regularizer=nt.Ridge(y=1.0))
    path = nt.regularisation_path(problem, SMALL, Y=Y)
    assert (path.selected == selected).all()
    assert not path.wrong
    assert path.angles[-1] < 4
    assert path.growth == pytest.approx(path.predicted_growth, rel=0.08)


def wrong_start(seed, query):
    """The SVM without one query, where that query selects a key that is not the wanted one."""
    A1, A2, wanted = planted(8, 7, 4, seed)
    others = np.arange(8) != query
    svm = nt.attention_svm(A1[others], A2, wanted[others])
    return nt.selection_problem(A1, A2, wanted), svm


@pytest.mark.parametrize(("seed", "query"), [(7, 5), pytest.param(2, 6, marks=pytest.mark.full)])
def test_a_minimum_with_another_selection_is_named(seed, query):
    problem, svm = wrong_start(seed, query)
    path = nt.regularisation_path(problem, SMALL, start=8 * svm.X)
    assert path.wrong == (query,)
    assert path.statuses[-1] is Status.CONVERGED
    assert path.losses[-1] == pytest.approx(1, abs=1e-6)
    assert path.shares[-1] == 7 / 8
    assert path.last.angle < 4 < path.angles[-1]
    assert path.last.svm().objective == pytest.approx(svm.objective)
    assert f"rows {query} (1 of 8): a local minimum with another selection" in path.ended
    assert f"{path.last.angle:.3g} degrees" in path.ended
    # A wrong query is pushed harder than the right ones are held: it must lead by twice as much.
    margins = path.last.margins
    assert margins[query] > 2 * margins.min()
    # Without that start the same problem ends right.
    assert not nt.regularisation_path(problem, SMALL).wrong


def test_a_divided_query_is_no_selection():
    """Pushed from two keys alike, a query stays between them: half its loss is left."""
    problem, svm = wrong_start(11, 2)
    path = nt.regularisation_path(problem, SMALL, start=8 * svm.X)
    assert path.wrong == (2,)
    assert path.last.weights[2] == pytest.approx(0.5, abs=1e-6)
    assert path.losses[-1] == pytest.approx(0.75, abs=1e-6)
    assert path.ended.endswith("a local minimum where a query gives no key more than 0.50.")


def test_infeasible_selections():
    A1, A2, selected = planted(12, 9, 4)
    A1[1] = A1[0]
    selected[1] = (selected[0] + 1) % 9
    path = nt.regularisation_path(nt.selection_problem(A1, A2, selected), SMALL)
    assert path.svm.infeasible
    assert path.angles is None
    assert path.angles_times_norms is None
    assert path.predicted_growth is None
    assert path.losses[-1] == pytest.approx(0.5, abs=1e-4)  # both halve their attention
    assert "no X selects every wanted key" in path.ended
    assert "Infeasible" in path.summary()
    assert plots.regularisation_path(path).axes


def test_obtuse_values_have_minima_in_other_directions():
    """The right selection and a loss that tends to 0, but not the SVM's direction."""
    keys = np.array([[0.0, 0.0], [-1.0, 0.0], [-1.5, -1.0]])
    values = np.array([[0.0, 0.0], [1.0, 0.0], [-0.9, 0.19**0.5]])
    assert values[1] @ values[2] < 0
    problem = nt.AttentionProblem(np.ones((1, 1)), keys, np.eye(3), values[:1])
    ridges = 10.0 ** -np.arange(6, 13)  # longer strides would leave for the better minimum
    path = nt.regularisation_path(problem, ridges, Y=values, start=[[5.2, -2.4]])
    assert path.svm.X.tolist() == [pytest.approx([1.0, 0.0], abs=1e-9)]
    assert not path.wrong
    assert path.losses[-1] < 1e-11
    assert 25 < path.angles[-1] < 26.6  # tends to atan(1/2)
    ridged = problem.with_regularizer(nt.Ridge(x=ridges[-1]))
    assert np.linalg.eigvalsh(nt.hessian(ridged, path.X[-1], values).xx)[0] > 10 * ridges[-1]
    better = nt.regularisation_path(problem, ridges[-3:], Y=values, start=[[10.3, -0.1]])
    assert better.angles[-1] < 0.5
    assert nt.loss(ridged, better.X[-1], values) < nt.loss(ridged, path.X[-1], values)


def test_masks_and_biases():
    rng = np.random.default_rng(1)
    A, X = rng.normal(size=(10, 5)), rng.normal(size=(5, 5))
    logits = A @ X @ A.T
    logits[np.triu_indices(10, 1)] = -np.inf
    problem = nt.selection_problem(A, A, logits.argmax(1), "causal")
    path = nt.regularisation_path(problem, SMALL)
    svm = nt.attention_svm(A, A, logits.argmax(1), mask="causal")
    assert path.svm.objective == svm.objective
    assert not path.wrong
    assert path.growth == pytest.approx(path.predicted_growth, rel=0.1)
    bias = np.where(np.tril(np.ones((10, 10))) > 0, rng.normal(size=(10, 10)), -np.inf)
    biased = nt.AttentionProblem.from_maps(A, A, np.eye(10)[logits.argmax(1)], bias=bias)
    other = nt.regularisation_path(biased, SMALL)
    assert other.svm.objective == pytest.approx(svm.objective)
    assert other.growth == pytest.approx(path.growth, rel=0.05)


def test_units_do_not_matter(paths):
    """Tokens, scale and ridges in other units: the same angles and losses; float32 as well."""
    A1, A2, selected = planted(12, 9, 4)
    path = paths[0][1]
    scaled = nt.selection_problem(
        torch.from_numpy(100 * A1).float(), torch.from_numpy(A2).float() + 3, selected, scale=0.1
    )
    other = nt.regularisation_path(scaled)
    assert other.ridges.tolist() == pytest.approx((100 * path.ridges).tolist())
    assert other.X.dtype == torch.float32
    assert other.angles.tolist() == pytest.approx(path.angles.tolist(), rel=1e-3)
    assert other.losses.tolist() == pytest.approx(path.losses.tolist(), rel=1e-3)
    assert (10 * other.norms).tolist() == pytest.approx(path.norms.tolist(), rel=1e-3)
    assert not other.wrong


def test_one_key_or_one_query():
    A1, A2, _ = planted(5, 4, 3)
    alone = nt.regularisation_path(nt.selection_problem(A1, A2[:1], np.zeros(5, int)))
    assert (alone.X == 0).all()
    assert (alone.margins == np.inf).all()
    assert alone.angles is None
    assert not alone.wrong
    assert json.loads(json.dumps(alone.to_dict(), allow_nan=False))["margins"][0] == "inf"
    assert plots.regularisation_path(alone).axes
    single = nt.regularisation_path(nt.selection_problem(A1[:1], A2, [2]), SMALL)
    assert not single.wrong
    assert single.angles[-1] < 10


def test_duplicate_keys():
    """Two keys that are one cannot be told apart: a tie at every ridge."""
    A1, A2, selected = planted(6, 5, 3)
    A2[(selected[0] + 1) % 5] = A2[selected[0]]
    path = nt.regularisation_path(nt.selection_problem(A1, A2, selected), [1e-2, 1e-6])
    assert path.svm.infeasible
    assert 0 in path.wrong
    assert path.last.tied[0]


def test_limits_are_told():
    problem = nt.selection_problem(*planted(12, 9, 4))
    path = nt.regularisation_path(problem, [1e-3, 1e-4], max_iter=1)
    assert path.statuses == (Status.ITERATION_LIMIT,) * 2
    still = nt.regularisation_path(problem, [1e-3], max_iter=0)
    assert still.angles.tolist() == [90.0]
    assert still.margins.tolist() == [0.0]
    assert still.growth is None
    assert "before it converged" in still.ended
    assert plots.regularisation_path(still).axes


def test_words_and_plain_data(paths):
    _, path = paths[0]
    data = json.loads(json.dumps(path.to_dict(), allow_nan=False))
    assert data["norms"] == pytest.approx(path.norms)
    assert data["selected"] == data["last_selected"] == path.selected.tolist()
    assert data["growth"] == path.growth
    lines = path.summary().splitlines()
    assert len(lines) == 1 + 13 + 2
    assert lines[-1] == path.ended
    assert str(path) == path.summary()
    assert repr(path) == f"RegularisationPath(ridges 1 to 1e-12; {path.ended})"


def test_figure(paths, tmp_path):
    figure = plots.regularisation_path(paths[0][1])
    figure.savefig(tmp_path / "path.png")
    assert len(figure.axes) == 6
    low, high = figure.axes[0].get_xlim()
    assert low > 1 > 1e-12 > high


def test_a_known_svm_is_used(unchecked):
    A1, A2, selected = planted(8, 6, 3)
    svm = nt.attention_svm(A1, A2, selected)
    problem = nt.selection_problem(A1, A2, selected)
    assert nt.regularisation_path(problem, [1e-3], svm=svm).svm is svm
    nuclear = nt.attention_svm(A1, A2, selected, "nuclear")
    with pytest.raises(ValueError, match="Frobenius"):
        nt.regularisation_path(problem, [1e-3], svm=nuclear)
    with pytest.raises(TypeError, match="svm must be"):
        nt.regularisation_path(problem, [1e-3], svm=svm.X)


def test_starts():
    problem = nt.selection_problem(*planted(8, 6, 3))
    first = nt.regularisation_path(problem, [1e-2])
    solution = nt.solve(problem.with_regularizer(nt.Ridge(x=1e-2)))
    again = nt.regularisation_path(problem, [1e-2, 1e-3], start=solution)
    np.testing.assert_allclose(again.X[0], first.X[0], atol=1e-7)
    with pytest.raises(ValueError, match="start must be 3 x 3"):
        nt.regularisation_path(problem, start=np.eye(2))


@pytest.mark.parametrize(
    "ridges", [[], [1e-3, 1e-2], [1e-2, 1e-2], [0.0], [-1.0], [np.nan], [np.inf], [[1e-2]]]
)
def test_ridges_must_fall(ridges):
    with pytest.raises(ValueError, match="ridges must be"):
        nt.regularisation_path(nt.selection_problem(*planted(4, 3, 2)), ridges)


def test_refusals(unchecked):
    A1, A2, selected = planted(4, 3, 2)
    problem, eye = nt.selection_problem(A1, A2, selected), np.eye(3)
    path = nt.regularisation_path
    with pytest.raises(TypeError, match="AttentionProblem"):
        path(A1)
    with pytest.raises(ValueError, match="stack"):
        path(nt.AttentionProblem.stack([problem, problem]))
    with pytest.raises(ValueError, match="Y must be left out"):
        path(problem, Y=eye)
    with pytest.raises(ValueError, match=r"selected\[0\]"):
        path(problem, selected=[3, 0, 0, 0])
    with pytest.raises(ValueError, match="query 0 has 3 keys with the largest entry"):
        path(nt.AttentionProblem.from_maps(A1, A2, np.full((4, 3), 1 / 3)))
    valued = nt.AttentionProblem(A1, A2, eye, eye[selected])
    with pytest.raises(ValueError, match="Y must be given"):
        path(valued)
    with pytest.raises(ValueError, match="Y must be 3 x 3"):
        path(valued, Y=np.eye(2))
    with pytest.raises(ValueError, match="query 0 has 0 keys with the value"):
        path(valued, Y=2 * eye)
    with pytest.raises(ValueError, match="query_weights"):
        path(nt.AttentionProblem.from_maps(A1, A2, eye[selected], query_weights=[1, 0, 1, 1.0]))
    heads = np.zeros((2, 4, 3))
    with pytest.raises(ValueError, match=r"bias must be for one head.*no theorem"):
        path(nt.AttentionProblem(A1, A2, eye, eye[selected], bias=heads), Y=eye)
    with pytest.raises(ValueError, match="max_iter"):
        path(problem, max_iter=-1)


def test_page_prints_what_it_shows():
    page = DOCS / "regularisation-path.md"
    assert run_example(page)[1] == block(page, "text")


@pytest.mark.full
@pytest.mark.parametrize("seed", range(30))
def test_many_paths(seed):
    """Shapes and seeds: paths whose loss tends to 0 tend to the SVM, all others are recognised."""
    n, m, d = ((12, 9, 4), (30, 20, 6), (64, 64, 8))[seed % 3]
    path = nt.regularisation_path(nt.selection_problem(*planted(n, m, d, seed)))
    assert (path.losses[-1] < 1e-7) == (not path.wrong)
    if path.wrong:
        assert path.last.weights[list(path.wrong)].min() < 0.9 or path.last.angle < 6
    else:
        assert path.angles[-1] < 6
        assert path.growth == pytest.approx(path.predicted_growth, rel=0.12)
        products = path.angles_times_norms[6:]
        assert products.max() < 1.6 * products.min()
