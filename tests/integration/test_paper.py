"""method="paper": converges where it is proved to, as fast as it is proved to, and nowhere else."""

import math
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import newtention as nt
from newtention import Status
from newtention.approximate_newton import contraction, paper_regime

SKETCHES = ("none", "leverage", "tensor-srht")
pytestmark = pytest.mark.usefixtures("unchecked")


def randn(g, *shape):
    return torch.randn(shape, generator=g, dtype=torch.float64)


def planted(seed, w, n=40, d=3):
    """Outputs of a random layer plus noise, under equal token weights."""
    g = torch.Generator().manual_seed(seed)
    A1, A2, A3 = randn(g, n, d), randn(g, n - 10, d), randn(g, n - 10, d)
    X, Y = randn(g, d, d) / d, randn(g, d, d)
    B = nt.predict(nt.AttentionProblem(A1, A2, A3, A1), X, Y) + 0.1 * randn(g, n, d)
    weights = w * torch.ones(n - 10, dtype=torch.float64)
    return nt.AttentionProblem(A1, A2, A3, B, regularizer=nt.TokenWeights(weights))


def run(problem, sketch="none", **settings):
    """The solution and the points that a callback saw."""
    points = []
    options = nt.Options(sketch=sketch)
    solution = nt.solve(
        problem,
        method="paper",
        options=options,
        callback=lambda progress: points.append((progress.X, progress.Y)),
        **settings,
    )
    return solution, points


def sequences(seed=0, w=3.0, heads=None, dtype=torch.float64, mask=None, B=1.0):
    g = torch.Generator().manual_seed(seed)
    A, targets = randn(g, 30, 3), B * randn(g, 30, 2)
    weights = w * (1 + torch.rand(30, generator=g, dtype=torch.float64))
    return nt.AttentionProblem.from_ragged(
        A.to(dtype),
        targets.to(dtype),
        offsets=[0, 9, 18, 30],
        mask=mask,
        scale=0.7,
        query_weights=(0.5 + torch.rand(30, generator=g).double()).to(dtype),
        regularizer=nt.TokenWeights(weights.to(dtype)),
    )


@pytest.mark.parametrize("sketch", SKETCHES)
def test_reaches_the_minimum_of_newton(sketch):
    problem = planted(0, 1.0)
    found, _ = run(problem, sketch)
    exact = nt.solve(problem, found, method="newton", tol=1e-14)
    assert found.success
    assert found.method == "paper"
    assert found.loss == pytest.approx(exact.loss, rel=1e-13)
    torch.testing.assert_close(found.X, exact.X, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.Y, exact.Y, rtol=1e-6, atol=1e-9)
    losses = found.history.column("loss")
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(losses))
    assert all(0 < bound < 0.5 for bound in found.history.column("bound"))
    assert set(found.history.column("model")) == {"paper"}
    assert "Error of the Hessian  at most" in found.summary()


PROBLEMS = {
    "sequences": lambda: (sequences(), None),
    "causal": lambda: (sequences(mask="causal"), None),
    "two heads": lambda: (sequences(), nt.Options(heads=2, sketch="leverage")),
    "one row": lambda: (planted(0, 3.0, n=11), nt.Options(sketch="none")),
    "wide": lambda: (planted(3, 5.0, n=15, d=6), nt.Options(sketch="none")),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_reaches_a_minimum(name):
    problem, options = PROBLEMS[name]()
    found = nt.solve(problem, method="paper", options=options)
    assert found.success
    GX, GY = nt.gradient(problem, found.X, found.Y)
    assert max(float(GX.abs().max()), float(GY.abs().max())) < 1e-6
    assert nt.solve(problem, found, method="newton").loss == pytest.approx(found.loss, rel=1e-12)


def test_rank_deficient_and_repeated_tokens():
    """Directions that no token shows keep their start."""
    g = torch.Generator().manual_seed(0)
    A1, A2 = randn(g, 20, 2) @ randn(g, 2, 3), randn(g, 8, 3)[[0, 0, 1, 1, 2, 3, 3, 3]]
    A2[:, 2] = A2[:, 0]
    problem = nt.AttentionProblem(
        A1, A2, A2, randn(g, 20, 2), regularizer=nt.TokenWeights(4 * torch.ones(8).double())
    )
    for sketch in SKETCHES:
        found, _ = run(problem, sketch)
        assert found.success
        GX, GY = nt.gradient(problem, found.X, found.Y)
        assert max(float(GX.abs().max()), float(GY.abs().max())) < 1e-7


def test_numpy_and_float32():
    problem = planted(1, 3.0)
    c = problem.chunks[0]
    parts = [t[0, 0].numpy() for t in (c.A1, c.A2, c.A3, c.B)]
    w = problem.regularizer.w.numpy()
    arrays = nt.AttentionProblem(*parts, regularizer=nt.TokenWeights(w))
    found = nt.solve(arrays, method="paper")
    assert isinstance(found.X, np.ndarray)
    np.testing.assert_array_equal(found.X, nt.solve(problem, method="paper").X.numpy())
    halves = [t.astype(np.float32) for t in parts]
    single = nt.AttentionProblem(*halves, regularizer=nt.TokenWeights(w.astype(np.float32)))
    rounded = nt.solve(single, method="paper")
    assert rounded.success
    assert rounded.X.dtype == np.float32
    assert rounded.relative_loss == pytest.approx(found.relative_loss, rel=1e-4)


def test_several_starts_are_solved_one_by_one():
    problem = planted(2, 2.0)
    both = nt.solve(problem, method="paper", n_init=2)
    single = nt.solve(problem, both.start, method="paper")
    assert both.success
    assert len(both.start_losses) == 2
    assert both.start_losses[0] == pytest.approx(both.start_losses[1], rel=1e-10)  # convex here
    torch.testing.assert_close(both.X, single.X, rtol=1e-9, atol=1e-15)


# Contraction


@pytest.mark.parametrize("sketch", SKETCHES)
def test_converges_within_the_corrected_bound(sketch, full):
    for seed in range(20 if full else 3 if sketch == "none" else 1):
        problem = planted(seed, 1.5)
        found, points = run(problem, sketch, seed=seed)
        table = contraction(problem, points, found, sketch=sketch, seed=seed)
        assert found.success
        assert table.holds, str(table)
        assert table.first_bounded is not None
        assert table.first_bounded <= 6
        for accuracy in (1e-1, 1e-3, 1e-5):
            taken, allowed = table.iterations(accuracy)
            if taken is not None and allowed is not None:
                assert taken <= allowed
        bounded = [s for s in table.steps if s.energy_bound < 1 and s.energy_ratio is not None]
        assert bounded
        assert all(s.energy_ratio < 1 for s in bounded)


def test_contraction_is_measured_in_the_norm_of_the_solutions_hessian():
    problem = planted(0, 1.5)
    found, points = run(problem, "leverage")
    table = contraction(problem, points[:4], found, sketch="leverage")
    exact = nt.solve(problem, found, method="newton", tol=1e-15)
    H = nt.hessian(problem, exact.X, exact.Y).to_dense()
    for (X, Y), step in zip(points[:4], table.steps, strict=True):
        e = torch.cat([(X - exact.X).flatten(), (Y - exact.Y).flatten()])
        assert step.energy == pytest.approx(float((e @ H @ e).sqrt()), rel=1e-6)
        assert step.euclidean == pytest.approx(float(e.norm()), rel=1e-6)
        condition = torch.linalg.cond(nt.hessian(problem, X, Y).to_dense())
        assert step.condition == pytest.approx(float(condition), rel=1e-6)
        assert step.epsilon == pytest.approx(paper_regime(problem, X, Y, sketch="leverage").epsilon)
    assert table.steps[-1].energy_ratio is None
    ratio = table.steps[1].energy / table.steps[0].energy
    assert table.steps[0].energy_ratio == pytest.approx(ratio)
    assert "yes" in str(table)
    assert "NO" not in str(table)


def test_broken_promises_are_noticed():
    problem = planted(0, 3.0)
    found, points = run(problem)
    slow = [points[2], points[2], points[3]]  # a step that did not contract
    table = contraction(problem, slow, found, sketch="none")
    assert not table.holds
    assert "NO" in str(table)
    # The error of the sketch left out.
    found, points = run(problem, "tensor-srht")
    assert not contraction(problem, points, found, sketch="none").holds
    assert contraction(problem, points, found, sketch="tensor-srht").holds


def test_contraction_of_bad_input():
    problem = planted(0, 3.0)
    found, points = run(problem, max_iter=1)
    with pytest.raises(ValueError, match="at least one"):
        contraction(problem, [], found)
    with pytest.raises(ValueError, match="finite numbers"):
        contraction(problem, [(points[0][0] * math.nan, points[0][1])], found)
    with pytest.raises(ValueError, match="found 2 x 3"):
        contraction(problem, [(points[0][0][:2], points[0][1])], found)
    single = sequences(dtype=torch.float32)
    with pytest.raises(ValueError, match="float64"):
        contraction(single, [(torch.eye(3), torch.zeros(3, 2))], (torch.eye(3), torch.zeros(3, 2)))
    with pytest.raises(ValueError, match="Ridge"):
        contraction(problem.with_regularizer(nt.Ridge(1.0, 1.0)), points, found)
    g = torch.Generator().manual_seed(0)
    A = randn(g, 20, 2) @ randn(g, 2, 3)
    flat = nt.AttentionProblem(
        A, A, A, randn(g, 20, 2), regularizer=nt.TokenWeights(9 * torch.ones(20).double())
    )
    with pytest.raises(ValueError, match="positive definite"):
        contraction(flat, *reversed(run(flat)))
    table = contraction(problem, points, found)
    with pytest.raises(ValueError, match="accuracy"):
        table.iterations(1.0)
    outside = replace(table, steps=tuple(replace(s, energy_bound=2.0) for s in table.steps))
    assert outside.iterations(0.1) == (None, None)


# Outside the regime


def test_refused_start_says_what_would_do():
    problem = sequences(w=0.01)
    with pytest.raises(ValueError, match=r'Outside the regime.*Use method="auto"') as error:
        nt.solve(problem, method="paper", options=nt.Options(sketch="none"))
    factor = float(str(error.value).split("weights w ")[1].split(" times")[0])
    assert factor > 1
    assert "The paper asks for w^2 above 10^" in str(error.value)
    enough = sequences(w=0.01 * factor * 1.01)
    assert nt.solve(enough, method="paper", options=nt.Options(sketch="none")).history


def left(seed):
    """From 0, where the regime holds, to where it does not, or where the loss rises."""
    g = torch.Generator().manual_seed(seed)
    n, m, d = (int(torch.randint(*r, (1,), generator=g)) for r in ((2, 12), (2, 8), (1, 3)))
    A1, A2, A3 = randn(g, n, d), randn(g, m, d), randn(g, m, d)
    B = 10 ** float(randn(g, 1)) * randn(g, n, d)
    w = 10 ** (0.5 * float(randn(g, 1)) - 0.5) * torch.ones(m, dtype=torch.float64)
    problem = nt.AttentionProblem(A1, A2, A3, B, regularizer=nt.TokenWeights(w))
    return problem, (torch.zeros(d, d).double(), torch.zeros(d, d).double())


@pytest.mark.parametrize(("seed", "bound"), [(227, False), (245, True)])
def test_a_run_that_leaves_the_regime_says_so(seed, bound):
    problem, start = left(seed)
    found = nt.solve(problem, start, method="paper", options=nt.Options(sketch="none"))
    assert found.status is Status.LEFT_REGIME
    assert not found.success
    assert found.message.startswith("Left the regime")
    assert (found.history[-1].bound >= 0.5) is bound
    assert found.loss == min(found.history.column("loss"))
    assert found.loss == pytest.approx(nt.loss(problem, found.X, found.Y), rel=1e-14)
    better = nt.solve(problem, found)
    assert better.success
    assert better.loss < found.loss


def test_no_targets_and_start_at_the_solution():
    problem = sequences(B=0.0)
    found = nt.solve(problem, method="paper")
    assert found.success
    assert found.data_loss <= 1e-10
    again = nt.solve(problem, found, method="paper")
    assert again.iterations == 0


# The run around the method


def test_limits_and_callback(capsys):
    problem = planted(0, 1.5)
    assert nt.solve(problem, method="paper", max_iter=2).status is Status.ITERATION_LIMIT
    assert nt.solve(problem, method="paper", max_seconds=0).status is Status.TIME_LIMIT

    def stop(progress):
        if progress.iteration == 1:
            raise StopIteration

    stopped = nt.solve(problem, method="paper", callback=stop, verbose=True)
    assert stopped.status is Status.STOPPED
    printed = capsys.readouterr().out
    assert "method paper, up to" in printed
    assert "error 0." in printed
    tight = nt.solve(problem, method="paper", tol=1e-300)
    assert tight.status is Status.STALLED


def outcome(solution):
    rows = [asdict(r) for r in solution.history]
    for row in rows:
        del row["seconds"]
        row["radius"] = repr(row["radius"])
    return solution.layer.theta.tolist(), rows, solution.status, solution.start_losses


@pytest.mark.parametrize("n_init", [1, 2])
@pytest.mark.parametrize("sketch", ["none", "tensor-srht"])
def test_resumed_runs_repeat_uninterrupted_ones(sketch, n_init, tmp_path):
    problem = sequences()
    settings = {"method": "paper", "n_init": n_init, "options": nt.Options(sketch=sketch)}
    whole = nt.solve(problem, **settings)
    path = tmp_path / "run"
    for max_iter in (0, 3):
        part = nt.solve(problem, checkpoint=path, max_iter=max_iter, **settings)
        assert part.status is Status.ITERATION_LIMIT
    assert outcome(nt.solve(problem, checkpoint=path, **settings)) == outcome(whole)
    other = settings | {"options": nt.Options(sketch="leverage")}
    with pytest.raises(ValueError, match="sketch"):
        nt.solve(problem, checkpoint=path, **other)


def test_validation_data_stop_the_run():
    problem, held = planted(0, 1.0), planted(0, 1.0)
    found = nt.solve(problem, method="paper", validation=held)
    assert found.validation_loss == pytest.approx(found.relative_loss, rel=0.1)
    assert found.status in (Status.EARLY_STOP, Status.CONVERGED)
