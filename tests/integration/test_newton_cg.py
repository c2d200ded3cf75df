"""`newton-cg` as a solver: what it finds, that it never gets worse, limits, bad data."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch

import newtention as nt
from newtention import Status, zoo
from newtention.newton.matrix_free import _Method
from newtention.newton.reduced import Curvature
from tests.cases import BY_NAME, STACK, randn
from tests.checks import require_close, require_finite
from tests.unit.test_layers import weights

pytestmark = pytest.mark.usefixtures("unchecked")
"""Thousands of iterations, which the run-time type checker makes five times as slow."""

CURVATURES = pytest.mark.parametrize("curvature", ["gauss-newton", "full"])
RIDGE = nt.Ridge(1.0, 1.0)


def long(*values):
    """Parameters for the full tier."""
    return pytest.param(*values, marks=pytest.mark.full)


def solve(problem, start=None, **settings):
    """`newton-cg`, with fields of Options among the settings."""
    fields = {f.name for f in dataclasses.fields(nt.Options)} & settings.keys()
    options = nt.Options(**{name: settings.pop(name) for name in fields})
    return nt.solve(problem, start=start, method="newton-cg", options=options, **settings)


def nearby(X, size, seed=0):
    """X with Gaussian noise of `size` times its root mean square."""
    noise = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed)).to(X)
    return X + size * X.square().mean().sqrt() * noise


def near_layer(layer, size):
    """The same block by block."""
    names = [b.name for b in layer.parametrisation.blocks]
    moved = {n: nearby(getattr(layer, n), size, seed) for seed, n in enumerate(names)}
    return dataclasses.replace(layer, **moved)


PLANTS = {
    "plain": {},
    "no biases": {"biases": False},
    "groups": {"h": 4},
    "one group": {"h": 3, "g": 1},
    "rotary, causal": {"g": 1, "e": 4, "rotary": nt.Rotary(100.0), "mask": "causal"},
    "query weights": {"query_weights": randn(torch.Generator().manual_seed(1), 80).abs()},
    "cross-attention": {"d2": 4, "d3": 6, "cross": True},
}
WIDTHS = {"h": 2, "g": 2, "d1": 5, "d2": 5, "d3": 5, "e": 2, "f": 3, "p": 4}


def plant(name="plain", seed=0, noise=0.0, dtype=torch.float64, **settings):
    """A problem of five ragged sequences, and the factored layer that made its targets.

    noise: relative to the outputs' root mean square.
    """
    settings = WIDTHS | {"scale": 1.0} | PLANTS[name] | settings
    cross = settings.pop("cross", False)
    data = {n: settings.pop(n) for n in ("mask", "query_weights", "regularizer") if n in settings}
    layer = weights(seed, **settings)
    blocks = {b.name: getattr(layer, b.name).to(dtype) for b in layer.parametrisation.blocks}
    layer = dataclasses.replace(layer, **blocks)
    g = torch.Generator().manual_seed(seed)
    A, keys, values, B = (randn(g, 80, settings[d]).to(dtype) for d in ("d1", "d2", "d3", "p"))
    data["offsets"] = [0, 10, 26, 43, 52, 80]
    if cross:
        data |= {"keys": keys, "values": values, "key_offsets": [0, 16, 26, 50, 52, 80]}
    F = nt.predict(nt.AttentionProblem.from_ragged(A, B, **data), layer)
    B = F + noise * F.square().mean().sqrt() * B
    return nt.AttentionProblem.from_ragged(A, B, **data), layer


def gradient_norm(problem, layer, frozen=()):
    """Euclidean, by the public function, without the frozen blocks."""
    blocks = nt.gradient(problem, layer)
    kept = [t.flatten() for n, t in blocks.items() if n not in frozen]
    return float(torch.linalg.vector_norm(torch.cat(kept)))


# What is found

PLANTED = [
    *((name, "gauss-newton") for name in PLANTS),
    ("groups", "full"),
    *(long(name, "full") for name in PLANTS if name != "groups"),
]


@pytest.mark.parametrize(("name", "curvature"), PLANTED)
def test_planted_layers_are_recovered(name, curvature):
    problem, layer = plant(name, seed=1)
    solution = solve(problem, near_layer(layer, 0.1), curvature=curvature)
    assert solution.status is Status.CONVERGED, solution.summary()
    assert solution.history[0].loss > 1e-4 * float(problem.target_energy())
    assert solution.relative_loss < 1e-17
    wanted = nt.predict(problem, layer)
    require_close("outputs", nt.predict(problem, solution.layer), wanted, 1e-8)


BILINEAR = {
    "clustered": lambda: zoo.planted(4, 64, tokens="clustered", seed=0),
    "real": lambda: zoo.planted(4, 64, tokens="real", seed=1),
    "heads": lambda: zoo.planted(3, 64, tokens="clustered", heads=2, seed=3),
    "rank-deficient": lambda: zoo.rank_deficient(5, 40, 3, seed=4),
    "duplicates": lambda: zoo.duplicate_tokens(4, 40, seed=5),
    "saturated": lambda: zoo.saturated(3, 40, seed=1),
}


@CURVATURES
@pytest.mark.parametrize("name", BILINEAR)
def test_planted_weights_are_recovered(name, curvature):
    made = BILINEAR[name]()
    start = nearby(made.X, 1e-3 if name == "saturated" else 0.02)
    solution = solve(made.problem, start, curvature=curvature)
    assert solution.success, solution.summary()
    assert solution.relative_loss < 1e-17


@CURVATURES
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("regularizer", [None, nt.Ridge(0.1, 0.1)], ids=["plain", "ridge"])
def test_the_dense_method_ends_at_the_same_point(regularizer, heads, curvature):
    """From the same start beside a minimum whose residual is not zero."""
    made = zoo.planted(3, 40, noise=0.1, tokens="clustered", heads=heads, seed=4)
    problem = made.problem.with_regularizer(regularizer)
    start = nearby(nt.solve(problem, start=(made.X, made.Y), method="newton").X, 0.02)
    dense = nt.solve(problem, start=start, method="newton")
    found = solve(problem, start, curvature=curvature)
    assert dense.success
    assert found.success, found.summary()
    assert found.loss == pytest.approx(dense.loss, rel=1e-12)
    require_close("X", found.X, dense.X, 1e-7)
    require_close("Y", found.Y, dense.Y, 1e-7)


STATIONARY = [
    ("plain", "gauss-newton", None),
    ("one group", "full", RIDGE),
    long("rotary, causal", "full", RIDGE),
]


@pytest.mark.parametrize(("name", "curvature", "regularizer"), STATIONARY)
def test_noise_is_met_to_stationarity(name, curvature, regularizer):
    problem, layer = plant(name, noise=0.1, regularizer=regularizer)
    start = near_layer(layer, 0.1)
    solution = solve(problem, start, curvature=curvature)
    assert solution.success, solution.summary()
    assert gradient_norm(problem, solution.layer) < 1e-8 * gradient_norm(problem, start)
    # A minimum: the exact Hessian has no negative eigenvalue beyond rounding.
    values = torch.linalg.eigvalsh(nt.hessian_operator(problem, solution.layer).to_dense())
    assert float(values[0]) > -1e-9 * float(values[-1])


def test_the_exact_hessian_takes_over():
    """Where the loss no longer shows the steps; and the run ends at the limit of the arithmetic."""
    problem, layer = plant(noise=0.1)
    solution = solve(problem, near_layer(layer, 0.1), tol=1e-300)
    assert solution.status is Status.STALLED
    models = solution.history.column("model")
    first = models.index("newton")
    assert models == first * ["gauss-newton"] + (len(models) - first) * ["newton"]
    assert 2 <= len(models) - first <= 15
    gradients = solution.history.column("gradient")
    assert min(gradients[first:]) < 1e-4 * gradients[first]


@pytest.mark.parametrize(
    "frozen", [("b_Q",), ("W_O",), long(("W_K", "b_K")), long(("W_V",)), long(("b_O",))]
)
def test_frozen_blocks_stay_and_the_rest_is_stationary(frozen):
    """With W_O or b_O frozen the output map is among the unknowns, not eliminated."""
    problem, layer = plant(noise=0.1, regularizer=RIDGE)
    start = near_layer(layer, 0.1)
    solution = solve(problem, start, curvature="full", freeze=frozen)
    assert solution.success, solution.summary()
    for name in (b.name for b in start.parametrisation.blocks):
        same = torch.equal(getattr(solution.layer, name), getattr(start, name))
        assert same == (name in frozen)
    size = gradient_norm(problem, start, frozen)
    assert gradient_norm(problem, solution.layer, frozen) < 1e-8 * size
    if frozen != ("b_O",):  # the value bias gives the same
        assert gradient_norm(problem, solution.layer) > 1e-4 * size


@pytest.mark.parametrize("seed", range(8))
def test_full_curvature_leaves_a_saddle(seed):
    """X = 0 is stationary and the Gauss-Newton matrix vanishes: negative curvature leads away."""
    made = zoo.saddle(3, 20, seed)
    full = solve(made.problem, (made.X, made.Y), curvature="full", max_iter=40)
    assert full.loss < 0.99 * made.loss
    if seed in (0, 1, 3):  # elsewhere a long step along rounding happens to land lower
        found = solve(made.problem, (made.X, made.Y), max_iter=60)
        before = [r.loss for r in found.history if r.model == "gauss-newton"]
        assert min(before) > (1 - 1e-9) * made.loss
        assert found.loss < 0.99 * made.loss  # by the exact Hessian, which took over


def test_several_problems_and_starts_equal_single_solves():
    """Different masks, layouts, lengths and regularisers; the best start is returned."""
    problems = [case.problem() for case in STACK[:4]]
    settings = {"method": "newton-cg", "max_iter": 3, "n_init": 2}
    together = nt.solve_many(problems, **settings)
    for problem, batch in zip(problems, together, strict=True):
        single = nt.solve(problem, **settings)
        first = nt.solve(problem, **settings | {"n_init": 1})
        assert batch.start_losses == single.start_losses
        assert batch.start_losses[0] == first.loss != batch.start_losses[1]
        assert batch.loss == min(batch.start_losses)
        assert torch.equal(batch.X, single.X)
        assert batch.status is single.status
        assert batch.history.column("loss") == single.history.column("loss")


# Every run

RUNS = {
    "plain": lambda: plant(noise=0.3),
    "groups, ridge": lambda: plant("groups", noise=0.3, regularizer=RIDGE),
    "rotary": lambda: plant("rotary, causal", noise=0.3),
    "float32": lambda: plant("cross-attention", noise=0.3, dtype=torch.float32),
    "bilinear": lambda: (zoo.planted(4, 48, 0.3, "clustered", seed=1).problem, None),
    "bilinear float32": lambda: (zoo.planted(4, 48, seed=2, dtype=torch.float32).problem, None),
    "saturated": lambda: (zoo.saturated(4, 40).problem, None),
    "deficient": lambda: (BY_NAME["rank-deficient tokens"].problem(), None),
    "proximity": lambda: (BY_NAME["proximity, heads"].problem(), None),
    "tokens": lambda: (BY_NAME["token weights, masked"].problem(), None),
}


@CURVATURES
@pytest.mark.parametrize("name", RUNS)
def test_losses_never_rise(name, curvature):
    problem, layer = RUNS[name]()
    start = None if layer is None else near_layer(layer, 0.5)
    solution = solve(problem, start, curvature=curvature, max_iter=12)
    eps, energy = torch.finfo(problem.like.dtype).eps, float(problem.target_energy())
    losses = solution.history.column("loss")
    noise = [16 * eps * (x + 2 * (x * energy) ** 0.5) + 128 * eps**2 * energy for x in losses]
    assert all(b <= a + n for (a, b), n in zip(pairwise(losses), noise, strict=False))
    assert losses[-1] < 0.99 * losses[0]
    # The numbers are those of the point, and the start is where the run began.
    assert nt.loss(problem, solution.layer) == solution.loss
    assert solution.loss == pytest.approx(losses[-1], abs=noise[-1])
    assert losses[0] == pytest.approx(nt.loss(problem, solution.start), abs=noise[0])
    if start is not None:
        assert losses[0] <= nt.loss(problem, start)
    changes = solution.history.column("change")
    assert sum(changes) == pytest.approx(losses[0] - losses[-1], rel=1e-4, abs=noise[0])


def test_float32_reaches_the_float64_minimum():
    losses = {}
    for dtype in (torch.float32, torch.float64):
        problem, layer = plant(noise=0.1, dtype=dtype)
        solution = solve(problem, near_layer(layer, 0.1))
        assert solution.layer.W_Q.dtype == dtype
        assert solution.success, solution.summary()
        losses[dtype] = solution.loss
    assert losses[torch.float32] == pytest.approx(losses[torch.float64], rel=1e-5)


@pytest.mark.parametrize("allowed", [0, 1, 9, 30])
def test_no_product_begins_after_the_time_limit(allowed, monkeypatch):
    """The limit passes during product number `allowed`, or before the run."""
    problem, layer = plant(noise=0.1)
    products = []
    original = Curvature.product

    def counted(self, v):
        if not v.is_meta:  # those predict the memory
            products.append(1)
        return original(self, v)

    monkeypatch.setattr(Curvature, "product", counted)
    monkeypatch.setattr("newtention.run.Limits.expired", lambda self: len(products) >= allowed)
    solution = solve(problem, near_layer(layer, 0.1), max_seconds=1e9)
    assert solution.status is Status.TIME_LIMIT
    assert len(products) == allowed
    require_finite("solution", solution.layer.theta, *solution.history.column("decrement"))
    assert solution.loss <= nt.loss(problem, solution.start) * (1 + 1e-12)


def test_steps_that_never_help_end_the_run(monkeypatch):
    problem, layer = plant(noise=0.1)
    point = _Method.point
    monkeypatch.setattr(
        _Method, "point", lambda self, theta: dataclasses.replace(point(self, theta), loss=1e9)
    )
    solution = solve(problem, near_layer(layer, 0.1))
    assert solution.status is Status.STALLED
    assert solution.loss == nt.loss(problem, solution.start)


# Degenerate and bad data

G = torch.Generator().manual_seed(0)
A, B = randn(G, 12, 4), randn(G, 12, 3)
FORMS = {"bilinear": {}, "factored": {"ranks": 2, "heads": 2}}
DEGENERATE = {
    "one query": (A[:1], A, A, B[:1]),
    "one key": (A, A[:1], A[:1], B),
    "one of each": (A[:1], A[:1], A[:1], B[:1]),
    "equal rows": (*3 * [A[:1].expand(12, 4)], B),
    "duplicate rows": (*3 * [A[:6].repeat(2, 1)], B),
    "rank one": (*3 * [A[:, :1] @ A[:1]], B),
    "zero queries": (0 * A, A, A, B),
    "zero keys": (A, 0 * A, A, B),
    "zero values": (A, A, 0 * A, B),
    "zero targets": (A, A, A, 0 * B),
    "constant targets": (A, A, A, torch.ones_like(B)),
}


def check_sound(problem, solution):
    """Finite, not worse than the start, and no NaN anywhere."""
    require_finite("weights", solution.layer.theta)
    assert math.isfinite(solution.loss + solution.relative_loss)
    assert not any(math.isnan(r.step + r.gradient + r.decrement) for r in solution.history)
    assert solution.loss <= nt.loss(problem, solution.start) * (1 + 1e-12) + 1e-28
    assert "nan" not in solution.summary()


@pytest.mark.parametrize("regularizer", [None, nt.Ridge(0.1, 0.1)], ids=["plain", "ridge"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_data(name, form, regularizer):
    problem = nt.AttentionProblem(*DEGENERATE[name], regularizer=regularizer)
    solution = solve(problem, max_iter=10, **FORMS[form])
    assert solution.status is not Status.OVERFLOW
    check_sound(problem, solution)


def test_exact_fits_end_by_themselves():
    one_key = zoo.one_key(3, 7)
    problems = [nt.AttentionProblem(*DEGENERATE[n]) for n in ("one query", "zero targets")]
    for problem, least in [(one_key.problem, one_key.loss), *((p, 0.0) for p in problems)]:
        solution = solve(problem)
        assert solution.status is Status.CONVERGED
        assert solution.loss == pytest.approx(least, rel=1e-12, abs=1e-28)
        assert solution.iterations <= 2
    problem, layer = plant()
    solution = solve(problem, layer)
    assert solution.iterations == 0
    for block in layer.parametrisation.blocks[:-2]:  # all but the output map
        assert torch.equal(getattr(solution.layer, block.name), getattr(layer, block.name))


def test_logits_of_500():
    """Most rows attend to one key, and the fit must not flip them."""
    problem, layer = plant(scale=50.0)
    heads = [layer.parametrisation.qkv(chunk, layer.theta[None]) for chunk in problem.chunks]
    assert max(float((q @ k.mT).abs().max()) for q, k, _ in heads) > 500
    solution = solve(problem, near_layer(layer, 1e-4), max_iter=20)
    assert solution.history[0].loss > 1e-7 * float(problem.target_energy())
    assert solution.relative_loss < 1e-12


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("factor", [1e-162, 1e-100, 1e100, 1e150])
@pytest.mark.parametrize("what", ["A1", "A2", "A3", "B", "all tokens"])
def test_units_of_the_data(what, factor, form):
    """A unit changes nothing while squares are representable; a sound answer in any case.

    A random factored layer ignores the units of values and targets, so its first fit cancels.
    """
    scaled = {"A1", "A2", "A3"} if what == "all tokens" else {what}
    data = {"A1": A, "A2": A, "A3": A, "B": B}
    problem = nt.AttentionProblem(*(t * factor if n in scaled else t for n, t in data.items()))
    solution = solve(problem, max_iter=4, **FORMS[form])
    check_sound(problem, solution)
    free = {"A1", "A2"} if form == "factored" else data
    if what in free and factor != 1e-162:
        usual = solve(nt.AttentionProblem(*data.values()), max_iter=4, **FORMS[form])
        assert solution.relative_loss == pytest.approx(usual.relative_loss, rel=1e-8)


@pytest.mark.parametrize("factors", [(1e150, 1e150, 1e150), (1.0, 1.0, 1e160)])
def test_overflow_is_said(factors):
    problem = nt.AttentionProblem(*(A * f for f in factors), B)
    solution = solve(problem)
    assert solution.status is Status.OVERFLOW
    check_sound(problem, solution)


def test_refusals():
    mask = torch.ones(12, 12, dtype=torch.bool)
    mask[3] = False
    with pytest.raises(ValueError, match=r"quer.*\b3\b"):
        solve(nt.AttentionProblem(A, A, A, B, mask=mask))
    problem, layer = plant()
    with pytest.raises(ValueError, match="start must have a finite loss"):
        solve(problem, layer.with_theta(layer.theta * 1e110))
