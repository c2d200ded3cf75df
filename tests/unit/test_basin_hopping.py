"""Basin hopping: finds plants that single starts miss, keeps its books, ends when told to."""

import importlib
import math

import numpy as np
import pytest
import torch

import newtention as nt
from newtention import zoo

module = importlib.import_module("newtention.basin_hopping")  # the function hides it


def problem(seed=1, d=3, n=60, tokens="clustered", noise=0.0):
    return zoo.planted(d, n, noise=noise, tokens=tokens, seed=seed).problem


@pytest.fixture(scope="module")
def noisy():
    return problem(noise=0.3, seed=3)


def test_finds_the_plant_where_single_starts_do_not():
    hits = single = 0
    for seed in (0, 1):
        p = problem(seed)
        found = nt.basin_hopping(p, members=8, rounds=10, seed=seed)
        hits += found.solution.relative_loss < 1e-20
        single += nt.solve(p, seed=seed).relative_loss < 1e-20
    assert hits == 2
    assert single < 2


def test_ends_when_a_fit_is_exact():
    found = nt.basin_hopping(problem(), members=8, rounds=50)
    assert len(found.rounds) < 51
    assert found.rounds[-1].losses[0] < 1e-20
    assert "exact" in found.message


def test_ctrl_c_ends_the_search_and_keeps_the_best(noisy, monkeypatch):
    calls = []

    def interrupted(problems, starts, method, tol=None, **settings):
        calls.append(len(problems))
        if len(calls) != 2:
            return nt.solve_many(problems, starts, method, tol, **settings)

        def stop(progress):
            raise KeyboardInterrupt

        return nt.solve_many(problems, starts, method, tol, callback=stop, **settings)

    monkeypatch.setattr(module, "solve_many", interrupted)
    found = nt.basin_hopping(noisy, members=4, rounds=5)
    assert calls == [4, 4, len(found.others) + 1]
    assert found.message == "it was interrupted."
    assert found.solution.success


def test_books(noisy):
    found = nt.basin_hopping(noisy, members=6, rounds=3)
    assert [r.number for r in found.rounds] == [0, 1, 2, 3]
    assert [r.fits for r in found.rounds] == [6, 12, 18, 24]
    lowest = [r.losses[0] for r in found.rounds]
    assert lowest == sorted(lowest, reverse=True)
    for r in found.rounds:
        assert len(r.losses) <= 6
        assert list(r.losses) == sorted(r.losses)
    assert "3 rounds" in found.message
    assert found.sampled_rows == 36  # 6 x 18 unknowns over 3 outputs
    losses = [found.solution.loss, *(s.loss for s in found.others)]
    assert losses == sorted(losses)
    assert found.solution.loss == pytest.approx(
        float(nt.loss(noisy, found.solution.X, found.solution.Y)), rel=1e-12
    )


def test_stands_for_its_best_fit(noisy):
    found = nt.basin_hopping(noisy, members=4, rounds=1)
    assert found.X is found.solution.X
    assert found.Y is found.solution.Y
    assert (found.loss, found.relative_loss) == (found.solution.loss, found.solution.relative_loss)
    loss, relative = f"{found.loss:.6g}", f"{found.relative_loss:.6g}"
    for text in (repr(found), found.summary(), found._repr_html_()):
        assert loss in text
        assert relative in text
    for text in (found.summary(), found._repr_html_()):
        assert f"{found.rounds[-1].fits} on {found.sampled_rows} rows" in text
        assert found.message in text
    assert "1 rounds" in repr(found)


def test_same_seed_same_result(noisy):
    a, b, other = (nt.basin_hopping(noisy, members=4, rounds=2, seed=s) for s in (5, 5, 6))
    assert torch.equal(a.solution.layer.theta, b.solution.layer.theta)
    assert [r.losses for r in a.rounds] == [r.losses for r in b.rounds]
    assert [r.losses for r in a.rounds] != [r.losses for r in other.rounds]


def test_never_above_a_given_fit_on_all_rows(noisy):
    start = nt.solve(noisy, seed=2)
    found = nt.basin_hopping(noisy, start=start, members=4, rounds=1, sample_rows=60)
    assert found.sampled_rows == 60
    assert found.solution.loss <= start.loss * (1 + 1e-9)


def test_regulariser_counts(noisy):
    strong = noisy.with_regularizer(nt.Ridge(x=1e3, y=1e3))
    found = nt.basin_hopping(strong, members=4, rounds=1)
    assert found.solution.penalty > 0
    assert found.solution.loss <= nt.solve(strong).loss * (1 + 1e-6)


def test_heads_and_sequences():
    p = zoo.planted(2, 40, tokens="clustered", seed=0, heads=2).problem
    found = nt.basin_hopping(p, members=4, rounds=2, options=nt.Options(heads=2))
    assert found.solution.X.shape == (2, 2, 2)
    rng = np.random.default_rng(0)
    tokens, targets = rng.standard_normal((2, 30, 2))
    ragged = nt.AttentionProblem.from_ragged(tokens, targets, offsets=[0, 12, 30])
    found = nt.basin_hopping(ragged, members=4, rounds=1)
    assert isinstance(found.solution.X, np.ndarray)
    assert found.solution.X.shape == (2, 2)
    assert math.isfinite(found.solution.loss)


def test_disturbances_have_the_stated_sizes():
    X = torch.eye(50, dtype=torch.float64)[None]
    generator = torch.Generator().manual_seed(0)
    sizes = [float((module._disturbed(X, generator) - X).norm()) / 50**0.5 for _ in range(400)]
    least, largest = module.STEPS
    assert min(sizes) > 0.95 * least
    assert max(sizes) < 1.05 * largest
    middle = math.sqrt(least * largest)
    assert sum(s < middle for s in sizes) == pytest.approx(200, abs=60)  # six deviations


def test_limits(noisy):
    def stop(r):
        seen.append(r)
        raise StopIteration

    seen = []
    found = nt.basin_hopping(noisy, members=2, rounds=9, callback=stop)
    assert len(found.rounds) == len(seen) == 1
    assert "callback" in found.message
    found = nt.basin_hopping(noisy, members=2, rounds=9, max_seconds=1e-9)
    assert len(found.rounds) == 1
    assert "time" in found.message


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"members": 0}, ValueError, "members"),
        ({"rounds": -1}, ValueError, "rounds"),
        ({"max_seconds": 0.0}, ValueError, "max_seconds"),
        ({"max_seconds": math.nan}, ValueError, "max_seconds"),
        ({"sample_rows": 0}, ValueError, "sample_rows"),
        ({"seed": -1}, ValueError, "seed"),
        ({"callback": 3}, TypeError, "callback"),
        ({"start": [3]}, TypeError, r"start\[0\]"),
    ],
)
def test_bad_settings(noisy, arguments, error, text):
    with pytest.raises(error, match=text):
        nt.basin_hopping(noisy, **arguments)


def test_bad_problems(noisy):
    with pytest.raises(TypeError, match="problem"):
        nt.basin_hopping(np.ones((3, 3)))
    with pytest.raises(ValueError, match="stack"):
        nt.basin_hopping(nt.AttentionProblem.stack([noisy, noisy]))
    A = np.random.default_rng(0).standard_normal((5, 2))
    maps = nt.AttentionProblem.from_maps(A, A, np.full((5, 5), 0.2))
    with pytest.raises(ValueError, match="maps"):
        nt.basin_hopping(maps)
    wide = nt.solve(problem(d=4), max_iter=0)
    with pytest.raises(ValueError, match=r"start\[0\].X"):
        nt.basin_hopping(noisy, start=wide)
