"""`solve` and `solve_many` from end to end."""

import itertools
import math
import os
import statistics

import pytest
import torch

import newtention as nt
from newtention import Status, zoo
from tests.cases import BY_NAME, STACK
from tests.checks import require_close, require_finite

NEWTON = nt.Options(gauss_newton_iterations=0)


def nearby(X, size, seed=0):
    """X with Gaussian noise of `size` times its root mean square."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(X.shape, generator=g, dtype=torch.float64).to(X)
    return X + size * X.square().mean().sqrt() * noise


def require_stationary(problem, solution, tol=1e-6):
    """Gradient small, Hessian positive semidefinite to rounding."""
    GX, GY = nt.gradient(problem, solution.X, solution.Y)
    H = nt.hessian(problem, solution.X, solution.Y).to_dense()
    values = torch.linalg.eigvalsh(torch.as_tensor(H))
    size = float(values[-1])
    norm = max(float(torch.as_tensor(g).abs().max()) for g in (GX, GY))
    assert norm <= tol * size, f"gradient {norm} with curvature {size}"
    assert float(values[0]) >= -tol * size, f"lowest eigenvalue {float(values[0])}"


# What is found


@pytest.mark.parametrize(
    "made",
    [
        zoo.planted(4, 64, tokens="clustered", seed=0),
        zoo.planted(4, 64, tokens="real", seed=1),
        zoo.planted(4, 64, tokens="gaussian", seed=2),
        zoo.planted(3, 64, tokens="clustered", heads=2, seed=3),
        zoo.rank_deficient(5, 40, 3, seed=4),
        zoo.duplicate_tokens(4, 40, seed=5),
        zoo.saturated(3, 40, seed=1),
    ],
    ids=["clustered", "real", "gaussian", "heads", "rank-deficient", "duplicates", "saturated"],
)
def test_plant_is_recovered(made):
    """Zero residual: the loss to the square of rounding, the outputs to rounding."""
    saturated = bool(made.X.abs().max() > 20)
    size = 1e-3 if saturated else 0.02
    solution = nt.solve(made.problem, start=nearby(made.X, size))
    energy = float(made.problem.target_energy())
    assert solution.success
    # Saturated rows make some directions all but flat: there the tolerance ends the run, and
    # elsewhere the last, quadratic step overshoots it.
    tol = 1e-8 if saturated else 1e-12
    assert solution.loss <= tol**2 * energy
    outputs = nt.predict(made.problem, solution.X, solution.Y)
    require_close("outputs", outputs, nt.predict(made.problem, made.X, made.Y), 10 * tol)


def test_plant_is_recovered_from_random_starts():
    made = zoo.planted(3, 128, tokens="real", seed=2)
    solution = nt.solve(made.problem, n_init=8, seed=2)
    assert solution.success
    assert solution.relative_loss < 1e-24


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_fitted_better_than_the_plant(seed):
    made = zoo.planted(4, 64, noise=0.1, tokens="clustered", seed=seed)
    solution = nt.solve(made.problem, start=(made.X, made.Y))
    assert solution.success
    assert 0.5 * made.loss < solution.loss < made.loss
    require_stationary(made.problem, solution)


@pytest.mark.parametrize(
    "name",
    ["ridge", "ridge, heads", "token weights", "token weights, masked", "proximity, padded",
     "proximity, heads"],
)  # fmt: skip
def test_regularised_solutions_are_minima(name):
    problem = BY_NAME[name].problem()
    solution = nt.solve(problem, n_init=2)
    assert solution.success
    require_stationary(problem, solution)


def test_one_key_is_solved_at_once():
    made = zoo.one_key(3, 7)
    solution = nt.solve(made.problem)
    assert solution.success
    assert solution.iterations <= 2
    assert solution.loss == pytest.approx(made.loss, rel=1e-12)


# How fast


def order_of(decrements):
    """Slope of log d_{k+1} against log d_k, from below 1e-3 down to the rounding floor."""
    pairs = [
        (math.log(a), math.log(b))
        for a, b in itertools.pairwise(decrements)
        if 1e-13 < b < a < 1e-3
    ]
    if len(pairs) < 2:
        raise AssertionError(f"too few decrements for an order: {decrements}")
    return statistics.linear_regression(*zip(*pairs, strict=True)).slope


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("d", "noise", "tokens", "heads"),
    [
        (4, 0.1, "clustered", 1),
        (4, 0.0, "gaussian", 1),
        (3, 0.3, "gaussian", 2),
        (3, 0.1, "real", 1),
    ],
)
def test_convergence_is_quadratic(d, noise, tokens, heads, seed):
    """With Y projected after every step, on residuals that are not zero as well."""
    made = zoo.planted(d, 64, noise, tokens, seed=seed, heads=heads)
    best = nt.solve(made.problem, start=(made.X, made.Y), options=NEWTON)
    start = nearby(best.X, 0.02, seed)
    solution = nt.solve(made.problem, start=start, tol=1e-14, options=NEWTON)
    assert solution.relative_loss <= best.relative_loss * (1 + 1e-6) + 1e-20
    order = order_of(solution.history.column("decrement"))
    assert order > 1.7, f"order {order:.2f}: {solution.history.column('decrement')}"


def test_the_order_of_linear_convergence_is_one():
    """The measure tells quadratic from linear."""
    assert order_of([0.3**k for k in range(30)]) == pytest.approx(1.0)
    with pytest.raises(AssertionError, match="too few"):
        order_of([1.0, 0.5])


def test_gauss_newton_alone_is_slower_on_large_residuals():
    """The full Hessian earns its keep: same start, same tolerance, more iterations without it."""
    made = zoo.planted(4, 64, noise=0.5, tokens="clustered", seed=1)
    best = nt.solve(made.problem, start=(made.X, made.Y), options=NEWTON)
    start = nearby(best.X, 0.01)
    quick = nt.solve(made.problem, start=start, options=NEWTON)
    assert quick.success
    assert quick.iterations <= 8


# Every run


RUNS = {
    "clustered": lambda: zoo.planted(4, 48, 0.1, "clustered", seed=1).problem,
    "gaussian": lambda: zoo.planted(4, 48, 0.0, "gaussian", seed=2).problem,
    "saturated": lambda: zoo.saturated(4, 40).problem,
    "saddle": lambda: zoo.saddle(3, 20).problem,
    "causal": lambda: BY_NAME["causal, padded"].problem(),
    "masked": lambda: BY_NAME["forbidding bias per head, causal"].problem(),
    "weights": lambda: BY_NAME["query weights, ragged"].problem(),
    "deficient": lambda: BY_NAME["rank-deficient tokens"].problem(),
    "float32": lambda: zoo.planted(4, 48, 0.1, "clustered", seed=1, dtype=torch.float32).problem,
}


@pytest.mark.parametrize("name", RUNS)
def test_losses_never_rise(name):
    problem = RUNS[name]()
    eps = torch.finfo(problem.like.dtype).eps
    solution = nt.solve(problem, max_iter=60, seed=1)
    energy = float(problem.target_energy())
    losses = solution.history.column("loss")
    noise = [8 * eps * (x + 2 * (x * energy) ** 0.5) + 64 * eps**2 * energy for x in losses]
    assert all(
        after <= before + 2 * n for before, after, n in zip(losses, losses[1:], noise, strict=False)
    )
    # The best point is what is returned, and the numbers are those of the point.
    assert solution.loss <= min(losses) + 2 * max(noise[-1], 0.0)
    assert nt.loss(problem, solution.X, solution.Y) == solution.loss
    assert solution.loss == solution.data_loss + solution.penalty
    start = nt.loss(problem, solution.start.X, solution.start.Y)
    assert losses[0] == pytest.approx(start, rel=1e-4 if eps > 1e-10 else 1e-10)
    assert solution.iterations == len(solution.history) - 1
    for record in solution.history:
        require_finite("record", record.loss, record.gradient, record.decrement, record.radius,
                       record.change, record.step, record.damping)  # fmt: skip
    assert solution.history.column("iteration") == list(range(len(losses)))
    seconds = solution.history.column("seconds")
    assert seconds == sorted(seconds)
    assert seconds[-1] <= solution.seconds


@pytest.mark.parametrize("name", ["clustered", "causal"])
def test_changes_add_up(name):
    """The recorded decreases are the differences of the recorded losses."""
    solution = nt.solve(RUNS[name](), max_iter=30)
    losses, changes = (solution.history.column(c) for c in ("loss", "change"))
    assert sum(changes) == pytest.approx(losses[0] - losses[-1], rel=1e-6)


# How it ends


def slow():
    """A problem that takes more than a few iterations."""
    return zoo.planted(4, 64, 0.1, "clustered", seed=3).problem


def test_converged():
    solution = nt.solve(slow())
    assert solution.status is Status.CONVERGED
    assert solution.success
    assert solution.message.startswith("Converged")
    assert solution.history[-1].decrement <= solution.tol == 1e-10
    assert solution.history[-1].model == "newton"


def test_iteration_limit():
    solution = nt.solve(slow(), max_iter=2)
    assert solution.status is Status.ITERATION_LIMIT
    assert not solution.success
    assert solution.iterations == 2
    assert len(solution.history) == 3


def test_no_iterations_at_all():
    """max_iter=0: the start with Y solved for, judged but not moved."""
    made = zoo.planted(4, 48, 0.1, "clustered", seed=1)
    solution = nt.solve(made.problem, start=made.X, max_iter=0)
    assert solution.status is Status.ITERATION_LIMIT
    assert solution.iterations == 0
    assert torch.equal(solution.X, made.X)
    assert torch.equal(solution.start.X, solution.X)
    assert solution.loss <= made.loss
    again = nt.solve(made.problem, start=nt.solve(made.problem, start=made.X), max_iter=0)
    assert again.status is Status.CONVERGED


def test_time_limit():
    solution = nt.solve(slow(), max_seconds=0)
    assert solution.status is Status.TIME_LIMIT
    assert solution.iterations == 0
    require_finite("weights", solution.X, solution.Y, solution.loss)
    assert solution.summary()


def test_stopped_by_the_callback():
    seen = []

    def callback(progress):
        seen.append(progress)
        if progress.iteration == 3:
            raise StopIteration

    problem = slow()
    solution = nt.solve(problem, callback=callback)
    assert solution.status is Status.STOPPED
    assert [p.iteration for p in seen] == [0, 1, 2, 3]
    assert seen[-1].record == solution.history[-1]
    for p in seen:
        require_close("loss", nt.loss(problem, p.X, p.Y), p.record.loss, 1e-10)
    assert torch.equal(seen[-1].X, solution.X)


def test_interrupted():
    def callback(progress):
        if progress.iteration == 2:
            raise KeyboardInterrupt

    solution = nt.solve(slow(), callback=callback)
    assert solution.status is Status.INTERRUPTED
    assert solution.iterations == 2
    reference = nt.solve(slow(), max_iter=2)
    require_close("loss", solution.loss, reference.loss, 1e-12)


def test_errors_of_the_callback_are_the_users():
    def callback(progress):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        nt.solve(slow(), callback=callback)


@pytest.mark.parametrize(("noise", "status"), [(0.0, Status.CONVERGED), (0.1, Status.STALLED)])
def test_a_tolerance_that_no_arithmetic_meets(noise, status):
    """An exact fit is recognised as such; otherwise the run ends after a few idle steps."""
    made = zoo.planted(4, 64, noise, "clustered", seed=1)
    solution = nt.solve(made.problem, start=nearby(made.X, 0.02), tol=1e-300)
    assert solution.status is status
    assert solution.iterations < 40
    usual = nt.solve(made.problem, start=nearby(made.X, 0.02))
    assert solution.loss <= usual.loss * (1 + 1e-10) + 1e-24


def test_stalled_in_float32():
    made = zoo.planted(4, 64, 0.1, "clustered", seed=1, dtype=torch.float32)
    solution = nt.solve(made.problem, start=nearby(made.X, 0.02), tol=1e-12)
    assert solution.status is Status.STALLED
    assert solution.iterations < 60


def test_an_exact_fit_ends_by_itself():
    """One query, fitted by Y alone: the Hessian in X is rounding and must not be followed."""
    g = torch.Generator().manual_seed(0)
    A1, A2, A3, B = (
        torch.randn(s, generator=g, dtype=torch.float64) for s in ((1, 3), (7, 4), (7, 2), (1, 5))
    )
    solution = nt.solve(nt.AttentionProblem(A1, A2, A3, B), max_iter=60)
    assert solution.status in (Status.CONVERGED, Status.STALLED)
    assert solution.iterations < 30
    assert solution.relative_loss < 1e-28


def test_overflow():
    """Derivatives beyond the largest number: the last finite point, and it is said."""
    s = BY_NAME["one sequence"].sequences[0]
    problem = nt.AttentionProblem(s["A1"], s["A2"], s["A3"] * 1e160, s["B"])
    solution = nt.solve(problem)
    assert solution.status is Status.OVERFLOW
    require_finite("solution", solution.X, solution.Y, solution.loss, solution.relative_loss)


def test_targets_too_large_are_refused():
    """1/2 ||B||^2 overflows: there is no relative loss, so the data are bad."""
    s = BY_NAME["one sequence"].sequences[0]
    with pytest.raises(ValueError, match=r"B|targets|overflow"):
        nt.solve(nt.AttentionProblem(s["A1"], s["A2"], s["A3"], s["B"] * 1e160))


def test_a_start_too_large_is_refused():
    """Logits overflow, so the start has no loss at all."""
    case = BY_NAME["one sequence"]
    with pytest.raises(ValueError, match="start"):
        nt.solve(case.problem(), start=case.X * 1e308)


@pytest.mark.parametrize("status", list(Status))
def test_every_status_is_a_sentence(status):
    assert status.sentence.endswith(".")
    assert len(status.sentence.split()) >= 4


def test_summary_and_table(capsys):
    solution = nt.solve(slow(), n_init=2, verbose=True)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("method newton, up to ")
    assert lines[1].split()[:2] == ["iter", "loss"]
    assert lines[2].split()[0] == "0"
    assert solution.message in out
    assert "Relative loss" in out
    assert "2, final losses" in out
    assert "relative_loss" in repr(solution)
    assert len(solution.history.to_dicts()) == len(solution.history)
    nt.solve(slow(), max_iter=1)
    assert capsys.readouterr().out == ""


# Saddles


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [None, NEWTON], ids=["default", "newton"])
def test_saddle_is_left(seed, options):
    """X = 0 has a zero gradient: only negative curvature leads away."""
    made = zoo.saddle(3, 20, seed)
    solution = nt.solve(made.problem, start=(made.X, made.Y), options=options)
    assert solution.loss < 0.99 * made.loss
    assert solution.X.abs().max() > 0
    require_finite("weights", solution.X, solution.Y)


def test_saddle_is_not_a_solution():
    made = zoo.saddle(3, 20)
    solution = nt.solve(made.problem, start=(made.X, made.Y), max_iter=0)
    assert solution.status is not Status.CONVERGED


# Starts


def test_start_forms():
    """X, (X, Y) and a Solution: the same X, hence the same run."""
    made = zoo.planted(4, 48, 0.1, "clustered", seed=1)
    X = nearby(made.X, 0.1)
    first = nt.solve(made.problem, start=X, max_iter=3)
    for start in ((X, made.Y), (X, torch.zeros_like(made.Y)), X.tolist(), X.numpy()):
        other = nt.solve(made.problem, start=start, max_iter=3)
        require_close("loss", other.loss, first.loss, 1e-9)
    resumed = nt.solve(made.problem, start=first, max_iter=0)
    assert torch.equal(resumed.X, first.X)
    require_close("loss", resumed.loss, first.loss, 1e-12)
    again = nt.solve(made.problem, start=nt.solve(made.problem, start=X))
    assert again.iterations <= 2


def test_heads_of_the_start_are_kept():
    problem = slow()
    for lead in ((), (1,), (2,)):
        X = torch.randn(*lead, 4, 4, generator=torch.Generator().manual_seed(0)).double()
        solution = nt.solve(problem, start=X, max_iter=1)
        assert solution.X.shape == (*lead, 4, 4)
        assert solution.Y.shape == (*lead, 4, 4)
    assert nt.solve(problem, options=nt.Options(heads=3), max_iter=1).X.shape == (3, 4, 4)


@pytest.mark.usefixtures("unchecked")
def test_more_heads_fit_better():
    made = zoo.planted(3, 48, 0.3, "clustered", heads=3, seed=0)
    losses = [
        nt.solve(made.problem, options=nt.Options(heads=h), n_init=4, max_iter=40).loss
        for h in (1, 2, 3)
    ]
    assert losses == sorted(losses, reverse=True)


def test_seeds():
    problem = slow()
    first, again, other = (nt.solve(problem, seed=s, max_iter=4) for s in (1, 1, 2))
    assert torch.equal(first.X, again.X)
    assert first.loss == again.loss
    assert not torch.allclose(first.start.X, other.start.X)


@pytest.mark.usefixtures("unchecked")
def test_n_init_is_a_batch_of_separate_solves():
    problem = zoo.planted(4, 48, 0.1, "real", seed=1).problem
    batch = nt.solve(problem, n_init=5, seed=3)
    singles = [
        nt.solve(problem, start=(nt.newton.starts.random_start(problem, 1, 3, r)[0, 0]))
        for r in range(5)
    ]
    require_close("losses", batch.start_losses, [s.loss for s in singles], 1e-8)
    best = min(singles, key=lambda s: s.loss)
    require_close("X", batch.X, best.X, 1e-6)
    assert batch.status is best.status
    require_close("outputs", nt.predict(problem, batch.X, batch.Y),
                  nt.predict(problem, best.X, best.Y), 1e-7)  # fmt: skip


def test_a_given_start_is_the_first_of_n_init():
    made = zoo.planted(4, 48, 0.1, "clustered", seed=1)
    X = nearby(made.X, 0.02)
    alone = nt.solve(made.problem, start=X)
    several = nt.solve(made.problem, start=X, n_init=3)
    assert several.start_losses[0] == pytest.approx(alone.loss, rel=1e-9)
    assert several.loss <= alone.loss * (1 + 1e-9)


# Many problems


@pytest.mark.usefixtures("unchecked")
def test_many_small_problems_equal_single_solves(full):
    """Problems of different data, scale and regularisation, with both kinds of start."""
    problems, starts = [], []
    for seed in range(64 if full else 24):
        made = zoo.planted(3, 12 + seed % 5, 0.2, "clustered", seed=seed)
        A, B = made.problem.chunks[0].A1[0, 0], made.problem.chunks[0].B[0, 0]
        regularizer = [None, nt.Ridge(0.1, 0.1), nt.Proximity((made.X, made.Y), 0.1)][seed % 3]
        mask = "causal" if seed % 4 == 0 else None
        problems.append(nt.AttentionProblem(A, A, A, B, mask=mask, regularizer=regularizer))
        starts.append(nearby(made.X, 0.05, seed) if seed % 2 else None)
    together = nt.solve_many(problems, starts, max_iter=25)
    assert len(together) == len(problems)
    for i, (problem, start, batch) in enumerate(zip(problems, starts, together, strict=True)):
        single = nt.solve(problem, start=start, max_iter=25)
        assert batch.status is single.status, i
        require_close(f"loss {i}", batch.loss, single.loss, 1e-8, scale=max(single.loss, 1e-12))
        require_close(f"start {i}", batch.start.X, single.start.X, 1e-12)
        assert abs(batch.iterations - single.iterations) <= 1, i
        if single.success and single.penalty > 0:
            require_close(f"X {i}", batch.X, single.X, 1e-6)


def test_many_different_problems():
    """Different masks, layouts, lengths and regularisers in one batch, two starts each."""
    problems = [case.problem() for case in STACK]
    together = nt.solve_many(problems, n_init=2, max_iter=6)
    for problem, batch in zip(problems, together, strict=True):
        single = nt.solve(problem, n_init=2, max_iter=6)
        require_close("losses", batch.start_losses, single.start_losses, 1e-6)
        assert nt.loss(problem, batch.X, batch.Y) == pytest.approx(batch.loss, rel=1e-12)


def test_members_end_on_their_own():
    """One converges at once, one runs to the limit; a status each."""
    easy, hard = zoo.one_key(3, 7).problem, zoo.planted(3, 40, 0.1, "gaussian", seed=1).problem
    statuses = [s.status for s in nt.solve_many([easy, hard], max_iter=3)]
    assert statuses == [Status.CONVERGED, Status.ITERATION_LIMIT]
    seen = []
    nt.solve_many([easy, hard], max_iter=5, callback=lambda p: seen.append(p.ended))
    assert seen[-1][0]
    assert seen[0] == (False, False) or seen[0] == (True, False)


def test_numpy_problems_in_a_batch():
    import numpy as np

    rng = np.random.default_rng(0)
    problems = [nt.AttentionProblem(*rng.standard_normal((4, 6, 3))) for _ in range(3)]
    assert all(isinstance(s.X, np.ndarray) for s in nt.solve_many(problems, max_iter=2))


# float32


@pytest.mark.parametrize("seed", range(3))
def test_float32_reaches_the_float64_minimum(seed):
    made = zoo.planted(4, 64, 0.1, "clustered", seed=seed)
    low = zoo.planted(4, 64, 0.1, "clustered", seed=seed, dtype=torch.float32)
    start = nearby(made.X, 0.02)
    solution = nt.solve(low.problem, start=start.float())
    assert solution.X.dtype == torch.float32
    assert solution.tol == 1e-4
    assert solution.success
    exact = nt.solve(made.problem, start=start)
    assert solution.loss == pytest.approx(exact.loss, rel=1e-4)


# The packaged head


def packaged(dtype=torch.float64):
    tokens, outputs, offsets = zoo.packaged_head()
    return nt.AttentionProblem.from_ragged(
        tokens.to(dtype), outputs.to(dtype), offsets=offsets, regularizer=nt.Ridge(0.1, 0.1)
    )


def test_packaged_head_gets_better_quickly():
    solution = nt.solve(packaged(torch.float32), max_iter=6)
    assert solution.relative_loss < 0.15
    assert not math.isnan(solution.loss)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_packaged_head_converges(seed):
    solution = nt.solve(packaged(), seed=seed)
    assert solution.success, solution.summary()
    assert solution.relative_loss < 0.12


@pytest.mark.full
def test_packaged_head_figures():
    """Design figures: median of eight seeds and best of four starts after 40 iterations."""
    tokens, outputs, offsets = zoo.packaged_head()
    problem = nt.AttentionProblem.from_ragged(tokens, outputs, offsets=offsets)
    losses = [nt.solve(problem, seed=seed, max_iter=40).relative_loss for seed in range(8)]
    assert statistics.median(losses) <= 0.078, losses
    assert nt.solve(problem, n_init=4, max_iter=40).relative_loss <= 0.0765


# Processes


def test_threads_do_not_change_the_answer():
    problem = slow()
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(nt.solve(problem, seed=1))
    finally:
        torch.set_num_threads(before)
    require_close("loss", results[0].loss, results[1].loss, 1e-9)


def test_the_suite_respects_the_thread_count():
    if "OMP_NUM_THREADS" in os.environ:
        assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
