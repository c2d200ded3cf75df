"""Softmax regression: derivatives, the fit, bad input, and certificates, against autograd."""

import math
import warnings
from itertools import pairwise

import mpmath
import numpy as np
import pytest
import torch

import newtention as nt
from newtention import memory
from newtention.bounds.softmax import SPREAD, rescaled_lipschitz, softmax_lipschitz
from newtention.regression import certificate as certificates
from newtention.regression import fit, starts
from newtention.regression.errors import rescaled_point, softmax_point
from newtention.regression.rescaled import KINDS, RescaledLoss, values
from newtention.regression.rows import Rows
from newtention.regression.softmax import SoftmaxLoss
from newtention.solution import Status
from tests.checks import require_close
from tests.pages import DOCS, block, run_example
from tests.unit.test_certificates_doc import broken_links

PAGE = DOCS / "softmax-regression.md"
FORMS = ("softmax", *KINDS)
ridge_of = {"softmax": 0.0, "exp": 0.1, "sinh": 0.1, "cosh": 0.1}


def batch(form, seed=0, n=17, d=4, scale=1.0, ragged=False):
    """Three members of two problems, the second shorter if ragged, and a point."""
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(2, n, d, generator=g, dtype=torch.float64)
    B = torch.rand(2, n, generator=g, dtype=torch.float64)
    real = None
    if ragged:
        A[1, n - 6 :], B[1, n - 6 :] = 0.0, 0.0
        real = torch.ones(2, n, dtype=torch.bool)
        real[1, n - 6 :] = False
    ridge = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    rows = Rows(A, B, real, torch.tensor([0, 1, 1]), ridge)
    x = scale * torch.randn(3, d, generator=g, dtype=torch.float64)
    objective = SoftmaxLoss.of(rows) if form == "softmax" else RescaledLoss.at(form, rows, x)
    return objective, x


def residual(objective, form, i):
    """The residual of member i from its definition, in the objective's units."""
    rows, k = objective.rows, int(objective.rows.owner[i])
    n = rows.A.shape[1] if rows.real is None else int(rows.real[k].sum())
    A, b = rows.A[k, :n], rows.B[k, :n]
    if form == "softmax":
        return lambda x: torch.softmax(A @ x, 0) - b
    u = getattr(torch, form)
    unit = torch.exp(-0.5 * objective.log_unit[i])
    return lambda x: unit * (u(A @ x) - u(A @ x).sum() * b)


def total(objective, form, i):
    r = residual(objective, form, i)
    ridge = objective.rows.ridge[i] * torch.exp(-objective.log_unit[i])
    return lambda x: 0.5 * r(x).square().sum() + 0.5 * ridge * x @ x


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("form", FORMS)
def test_derivatives(form, scale, ragged):
    objective, x = batch(form, scale=scale, ragged=ragged)
    full = torch.tensor([True, False, True])
    got = objective.derivatives(x, full)
    require_close("loss", objective.loss(x), got.loss, 1e-12)
    for i in range(3):
        f = total(objective, form, i)
        require_close("loss", got.loss[i], f(x[i]), 1e-12)
        g, H = torch.func.grad(f)(x[i]), torch.func.hessian(f)(x[i])
        J = torch.func.jacfwd(residual(objective, form, i))(x[i])
        ridge = objective.rows.ridge[i] * torch.exp(-objective.log_unit[i])
        if not full[i]:
            H = J.mT @ J + ridge * torch.eye(len(g), dtype=g.dtype)
        # Gradients may cancel: against their terms.
        size = float(J.abs().max()) + float(ridge * x[i].abs().max())
        require_close("gradient", got.gradient[i], g, 1e-12, scale=max(size, 1e-12))
        require_close("Hessian", got.hessian[i], H, 1e-11)


def test_tiles_change_nothing(monkeypatch):
    objective, x = batch("softmax", n=101)
    rescaled, _ = batch("cosh", n=101)
    every = torch.ones(3, dtype=torch.bool)
    whole = [o.derivatives(x, every) for o in (objective, rescaled)]
    monkeypatch.setattr("newtention.regression.rows.TILE_ELEMENTS", 60)
    assert len(list(objective.rows.tiles())) > 10
    for o, want in zip((objective, rescaled), whole, strict=True):
        for a, b in zip(o.derivatives(x, every), want, strict=True):
            require_close("tiled", a, b, 1e-12)


@pytest.mark.parametrize("form", KINDS)
def test_values_are_accurate_at_any_size(form):
    z = torch.tensor([[-1000.0, -700.0, -1e-9, 0.0, 1e-300, 1e-9, 0.3, 700.0, 1000.0]]).double()
    got = values(form, z, torch.tensor([999.0]).double())
    mpmath.mp.dps = 40
    order = {
        "exp": ("exp",) * 3,
        "sinh": ("sinh", "cosh", "sinh"),
        "cosh": ("cosh", "sinh", "cosh"),
    }
    for t, name in zip(got, order[form], strict=True):
        for a, b in zip(t[0].tolist(), z[0].tolist(), strict=True):
            want = getattr(mpmath, name)(mpmath.mpf(b)) * mpmath.exp(-999)
            assert abs(mpmath.mpf(a) - want) <= 1e-12 * abs(want) + mpmath.mpf(2) ** -1022


@pytest.mark.parametrize("form", KINDS)
def test_units_cancel(form):
    """The same derivatives in any units, and absolute ones where these are finite."""
    objective, x = batch(form)
    every = torch.ones(3, dtype=torch.bool)
    near, far = objective.near(x), objective.near(3.0 * x)
    assert bool((near.log_unit != far.log_unit).all())
    for o in (near, far):
        for i in range(3):
            f = total(objective, form, i)(x[i]) * torch.exp(objective.log_unit[i])
            require_close("loss", o.absolute(o.derivatives(x, every).loss)[i], f, 1e-12)


# The fit


def planted(seed=0, n=60, d=4, noise=0.0, scale=1.0):
    rng = np.random.default_rng(seed)
    A, x = rng.normal(size=(n, d)), scale * rng.normal(size=d) / d**0.5
    b = np.exp(A @ x + noise * rng.normal(size=n))
    return A, b / b.sum(), x


def test_planted_weights_come_back():
    A, b, x = planted()
    result = nt.softmax_regression(A, b)
    assert result.success
    assert np.abs(result.x - x).max() < 1e-10
    require_close("fitted", result.fitted, b, 1e-10)
    assert result.iterations == len(result.history) - 1
    assert result.relative_loss < 1e-20
    assert result.form == "softmax"
    for text in ("softmax regression", "Converged", "Newton decrement"):
        assert text in result.summary()
    assert "converged" in repr(result)


def test_large_logits_recovered():
    A, b, x = planted(scale=1.0)
    result = nt.softmax_regression(100 * A, b)
    assert np.abs(100 * result.x - x).max() < 1e-8


@pytest.mark.parametrize("kind", ["exp", "cosh"])
def test_rescaled_planted(kind):
    A, _, x = planted(n=200)
    u = getattr(np, kind)(A @ x)
    result = nt.softmax_regression(A, u / u.sum(), ridge=1e-9, rescaled=True, kind=kind, n_init=6)
    assert result.success
    assert min(np.abs(result.x - x).max(), np.abs(result.x + x).max()) < 1e-8
    require_close("fitted", result.fitted, u / u.sum(), 1e-8)
    assert result.form == kind
    assert f"rescaled {kind}" in result.summary()


def test_sinh_vanishes_at_zero():
    A, b, _ = planted()
    result = nt.softmax_regression(A, b, ridge=0.1, rescaled=True, kind="sinh")
    assert result.loss < 1e-15
    assert np.abs(result.x).max() < 1e-7
    zero = nt.softmax_regression(A, b, ridge=0.1, rescaled=True, kind="sinh", start=np.zeros(4))
    assert zero.loss == 0
    assert zero.log10_loss == -math.inf
    assert np.isfinite(zero.fitted).all()


@pytest.mark.parametrize("size", [10.0, 1000.0, 5000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_rescaled_from_huge_logits(kind, size, monkeypatch):
    """No NaN, and the loss falls all the way, whether or not float64 can hold it."""
    monkeypatch.setattr(starts, "LARGE", math.inf)
    A, b, x = planted(n=30)
    start = x * size / np.abs(A @ x).max()
    result = nt.softmax_regression(
        A, b, ridge=1e-3, rescaled=True, kind=kind, start=start, max_iter=60
    )
    assert np.isfinite(result.x).all()
    assert np.isfinite(result.fitted).all()
    assert np.isfinite([result.relative_loss, result.penalty, result.log10_loss]).all()
    assert not any(math.isnan(v) for v in result.history.column("loss"))
    losses = result.history.column("loss")
    assert all(after <= before for before, after in pairwise(losses))
    if size == 10.0:
        assert result.success
    if size == 5000.0:
        assert result.loss == math.inf
        assert "exceeds the floating-point range" in result.message
        assert result.status is Status.ITERATION_LIMIT
        assert result.log10_loss < 2 * size / math.log(10) - 20
    else:
        assert result.loss >= 0


@pytest.mark.parametrize("size", [100.0, 1000.0, 5000.0])
@pytest.mark.parametrize("kind", ["exp", "cosh"])
def test_a_start_far_out_is_led_towards_zero(kind, size):
    """A Newton step moves the logits by about 1: from 5000 it would take 5000 of them."""
    for seed in range(5):
        A, b, _ = planted(n=30, seed=seed, noise=0.1)
        start = np.random.default_rng(seed).normal(size=4)
        start *= size / np.abs(A @ start).max()
        settings = {"ridge": 1e-2, "rescaled": True, "kind": kind, "start": start}
        result = nt.softmax_regression(A, b, **settings)
        assert result.success
        assert result.iterations < 80


def test_only_poor_starts_are_moved_and_only_along_their_ray():
    A, _, x = planted(n=30)
    x = torch.from_numpy(x / np.abs(A @ x).max())
    A, other = torch.from_numpy(A), torch.from_numpy(np.roll(x, 1))
    B = torch.stack([(size * A @ x).exp() / (size * A @ x).exp().sum() for size in (100.0, 1.0)])
    rows = Rows(A.expand(2, *A.shape), B, None, torch.tensor([0, 1, 1]), torch.full((3,), 1e-3))
    points = torch.stack([100.0 * x, 100.0 * other, other])
    moved = starts.nearer(RescaledLoss.at("exp", rows, points), points)
    assert moved[0].equal(points[0])  # its logits are large, but it fits
    assert moved[2].equal(points[2])
    factor = float((points[1] / moved[1])[0])
    assert factor in (8.0, 16.0, 32.0)
    assert moved[1].equal(points[1] / factor)


def log_fit(A, b):
    one = torch.zeros(1)
    A, b = (torch.as_tensor(t, dtype=torch.float64) for t in (A, b))
    return starts.log_fit(Rows(A[None], b[None], None, one.long(), one.double()))


def test_the_fit_of_logarithms():
    A, b, x = planted(n=50)
    require_close("x", log_fit(A, b), torch.from_numpy(x), 1e-9)
    some = np.where(np.arange(50) % 3 == 0, -1e-3 * (np.arange(50) % 2), b)  # no logarithm
    require_close("x", log_fit(A, some), torch.from_numpy(x), 1e-9)
    assert log_fit(A, -b) is None
    assert log_fit(A, 0 * b) is None
    twice = np.hstack([A, A])
    require_close("x", log_fit(twice, b), torch.from_numpy(np.tile(x / 2, 2)), 1e-9)
    assert float(log_fit(A[:1], b[:1]).abs().max()) == 0
    # Weighted least squares, by its definition.
    noisy = b * np.exp(np.random.default_rng(0).normal(size=50))
    columns = np.hstack([A, np.ones((50, 1))]) * noisy[:, None]
    expected = np.linalg.lstsq(columns, noisy * np.log(noisy))[0][:-1]
    require_close("x", log_fit(A, noisy), torch.from_numpy(expected), 1e-9)


def test_planted_weights_of_any_spread_are_found():
    """From random starts none would be: they lie behind where the loss is exponentially large."""
    rng = np.random.default_rng(0)
    A, x = rng.normal(size=(300, 10)), 4 * rng.normal(size=10) / 10**0.5
    b = np.exp(A @ x)
    found = nt.softmax_regression(A, b / b.sum(), ridge=1e-8, rescaled=True)
    assert found.success
    assert found.relative_loss < 1e-20


@pytest.mark.parametrize("form", FORMS)
def test_batch_gives_what_singles_give(form):
    cases = [planted(seed=i, n=20 + 5 * i, noise=0.2) for i in range(3)]
    keywords = {} if form == "softmax" else {"ridge": 0.1, "rescaled": True, "kind": form}
    many = nt.softmax_regression_many(
        [A for A, _, _ in cases], [b for _, b, _ in cases], n_init=2, **keywords
    )
    for result, (A, b, _) in zip(many, cases, strict=True):
        single = nt.softmax_regression(A, b, n_init=2, **keywords)
        assert result.fitted.shape == b.shape
        assert result.status is single.status
        require_close("x", result.x, single.x, 1e-7, scale=1.0)
        require_close("losses", result.start_losses, single.start_losses, 1e-9, scale=1.0)


def test_stack():
    cases = [planted(seed=i) for i in range(4)]
    A, b = np.stack([c[0] for c in cases]), np.stack([c[1] for c in cases])
    for result, (_, _, x) in zip(nt.softmax_regression_many(A, b), cases, strict=True):
        assert np.abs(result.x - x).max() < 1e-10
    start = [None, cases[1][2], None, None]
    again = nt.softmax_regression_many(A, b, starts=start)
    assert again[1].iterations <= 1


def test_kinds_of_arrays():
    A, b, x = planted()
    result = nt.softmax_regression(torch.tensor(A), torch.tensor(b))
    assert isinstance(result.x, torch.Tensor)
    assert isinstance(result.fitted, torch.Tensor)
    single = nt.softmax_regression(A.astype(np.float32), b.astype(np.float32))
    assert single.x.dtype == np.float32
    assert single.success
    assert np.abs(single.x - x).max() < 1e-2
    with pytest.warns(UserWarning, match="float32"):
        half = nt.softmax_regression(torch.tensor(A).half(), torch.tensor(b).half(), ridge=1e-4)
    assert half.x.dtype == torch.float32
    A.flags.writeable = False
    strided = np.asfortranarray(A)[::-1]
    assert np.abs(nt.softmax_regression(strided, b[::-1]).x - x).max() < 1e-10
    with pytest.warns(UserWarning, match="integers"):
        nt.softmax_regression(A, (np.arange(60) == 3).astype(int), ridge=0.1)


def test_degenerate_designs():
    """One row, equal rows, a column of ones, columns that depend on each other."""
    A, b, _ = planted()
    assert nt.softmax_regression(A[:1], np.ones(1)).loss == 0
    equal = nt.softmax_regression(np.ones((5, 2)), np.full(5, 0.2), n_init=2)
    assert equal.loss < 1e-30
    for design in (np.c_[A, np.ones(60)], np.c_[A, A[:, 0]], np.repeat(A, 2, 0)):
        target = b if len(design) == 60 else np.repeat(b, 2) / 2
        result = nt.softmax_regression(design, target)
        assert result.success
        assert np.abs(result.fitted - target).max() < 1e-10


def test_saturated_start_stays_finite():
    A, b, x = planted()
    result = nt.softmax_regression(A, b, start=500 * x, ridge=1e-4)
    assert np.isfinite(result.x).all()
    assert np.isfinite(result.loss)


def test_unmatched_targets_warn_once():
    A, b, _ = planted()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nt.softmax_regression(A, 2 * b)
        nt.softmax_regression_many([A, A], [b - 0.1, -b], ridge=1.0)
    assert [str(w.message) for w in caught] == [
        "b sums to 2, not 1: it cannot be matched exactly.",
        "bs[0] has 60 negative entries and sums to -5, not 1: it cannot be matched exactly.",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nt.softmax_regression(A, b)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"A": np.ones(3)}, ValueError, "A must be any x any"),
        ({"A": np.ones((0, 2)), "b": np.ones(0)}, ValueError, "A must not be empty"),
        ({"A": np.ones((2, 3, 4))}, ValueError, "A must be any x any"),
        ({"b": np.ones(59)}, ValueError, "b must be 60"),
        ({"b": torch.ones(60)}, TypeError, "torch"),
        ({"A": np.full((60, 4), np.nan)}, ValueError, "A must hold finite numbers"),
        ({"b": np.full(60, np.inf)}, ValueError, "b must hold finite numbers"),
        ({"ridge": -1.0}, ValueError, "ridge must be a finite number of at least 0"),
        ({"ridge": "1"}, ValueError, "ridge must be a finite number"),
        ({"kind": "tanh"}, ValueError, "kind must be one of exp, sinh, cosh"),
        ({"rescaled": True}, ValueError, "ridge must be positive with rescaled=True"),
        ({"kind": "sinh"}, ValueError, "goes with rescaled=True"),
        ({"start": np.ones(3)}, ValueError, "start must be 4"),
        ({"start": np.full(4, np.nan)}, ValueError, "start must hold finite"),
        ({"n_init": 0}, ValueError, "n_init must be an integer of at least 1"),
        ({"max_iter": -1}, ValueError, "max_iter"),
        ({"tol": 0.0}, ValueError, "tol must be a positive finite number"),
        ({"max_seconds": -1.0}, ValueError, "max_seconds"),
        ({"seed": -1}, ValueError, "seed"),
    ],
)
def test_bad_input(change, error, text, unchecked):
    A, b, _ = planted()
    with pytest.raises(error, match=text):
        nt.softmax_regression(**{"A": A, "b": b, **change})


def test_bad_batches(unchecked):
    A, b, _ = planted()
    for As, bs, text in (
        ([A], [b, b], "equally many"),
        ([], [], "at least one"),
        (3, 4, "at least one"),
        ([A, A[:, :2]], [b, b], "one number of columns"),
        ([A, A], [b, b[1:]], r"bs\[1\] must be 60"),
    ):
        with pytest.raises(ValueError, match=text):
            nt.softmax_regression_many(As, bs)
    with pytest.raises(ValueError, match="starts must be a list of 1"):
        nt.softmax_regression_many([A], [b], starts=[None, None])


def test_limits():
    A, b, x = planted(noise=0.3)
    none = nt.softmax_regression(A, b, max_iter=0)
    assert none.iterations == 0
    assert none.status is Status.ITERATION_LIMIT
    late = nt.softmax_regression(A, b, max_seconds=0)
    assert late.status is Status.TIME_LIMIT
    assert np.isfinite(late.loss)
    assert nt.softmax_regression(A, b, start=x, n_init=3).loss == pytest.approx(
        nt.softmax_regression(A, b).loss
    )


def test_interrupt_keeps_the_best_point(monkeypatch):
    A, b, _ = planted()
    whole = fit.loop.iterate

    def interrupted(*arguments):
        for count, it in enumerate(whole(*arguments)):
            yield it
            if count == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(fit.loop, "iterate", interrupted)
    result = nt.softmax_regression(A, b)
    assert result.status is Status.INTERRUPTED
    assert result.loss < result.history[0].loss


def test_verbose(capsys):
    A, b, _ = planted()
    nt.softmax_regression(A, b, verbose=True)
    shown = capsys.readouterr().out
    assert "iter" in shown
    assert "Converged" in shown


def test_memory_is_refused(monkeypatch):
    A, b, _ = planted()
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 10)
    with pytest.raises(MemoryError, match=r"4 unknowns.*newton-cg"):
        nt.softmax_regression(A, b)


@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize(
    ("n", "d", "problems", "n_init"), [(300, 200, 1, 1), (100_000, 5, 1, 1), (200, 40, 2, 4)]
)
def test_predicted_memory_suffices(n, d, problems, n_init, rescaled):
    rng = np.random.default_rng(0)
    A, b = rng.normal(size=(problems, n, d)), rng.dirichlet(np.ones(n), size=problems)
    with memory.LiveBytes() as live:
        nt.softmax_regression_many(
            list(A), list(b), n_init=n_init, max_iter=3, ridge=0.1, rescaled=rescaled
        )
    predicted = fit.regression_bytes(problems, problems * n_init, n, d, 8) - memory.WORKSPACE
    assert 0.3 * predicted <= live.peak <= predicted


# Certificates


def third_derivative(f, x, e):
    """f along e, three times."""

    def along(t):
        return f(x + t * e)

    zero = torch.zeros((), dtype=torch.float64)
    return torch.func.grad(torch.func.grad(torch.func.grad(along)))(zero)


@pytest.mark.parametrize("form", FORMS)
def test_lipschitz_constants_dominate(form, full):
    """The third derivative along any direction, anywhere on the ball."""
    tightest = 0.0
    for seed in range(300 if full else 25):
        rng = np.random.default_rng(seed)
        n, d = int(rng.integers(2, 8)), int(rng.integers(1, 4))
        A = torch.tensor(rng.normal(size=(n, d)) * rng.choice([0.3, 1.0, 3.0]))
        if seed % 3 == 0:  # two-point distributions are the extreme ones
            A[1:] = -A[0]
        b = torch.tensor(rng.random(n)) * float(rng.choice([0.1, 1.0]))
        x, delta = torch.tensor(rng.normal(size=d)), float(rng.choice([0.0, 0.1, 1.0]))
        rows = Rows(
            A[None], b[None], None, torch.zeros(1, dtype=torch.long), torch.zeros(1).double()
        )
        problem = certificates._Problem(rows, form)
        rows = Rows(rows.A, rows.B, None, rows.owner, torch.ones(1).double() * 1e-3)
        point = certificates._Problem(rows, form).at(x)
        M = problem.lipschitz(point, A, 0.0)(delta) * math.exp(point.log_unit)
        r = residual(_Shell(rows), form, 0)
        for _ in range(8):
            e, move = (torch.tensor(rng.normal(size=d)) for _ in range(2))
            at = x + delta * float(rng.random()) ** 0.2 * move / move.norm()
            got = third_derivative(lambda y, r=r: 0.5 * r(y).square().sum(), at, e / e.norm())
            assert abs(float(got)) <= M * (1 + 1e-9)
            tightest = max(tightest, abs(float(got)) / M)
    assert tightest > 1e-2


class _Shell:
    """What `residual` needs, in absolute units."""

    def __init__(self, rows):
        self.rows, self.log_unit = rows, torch.zeros(1).double()


def test_spread_constants(full):
    """|t|, |t^2 - s|, |t^3 - 3 s t - k| over distributions on [-1, 1]; 2, 4 and 8 are reached."""
    rng = np.random.default_rng(0)
    largest = np.zeros(3)
    for _ in range(20_000 if full else 1500):
        k = int(rng.integers(2, 5))
        sigma = np.sign(rng.normal(size=k)) * rng.random(k) ** 0.1
        p = rng.dirichlet(np.full(k, 0.2))
        t = sigma - p @ sigma
        s, third = p @ t**2, p @ t**3
        found = [abs(t), abs(t**2 - s), abs(t**3 - 3 * s * t - third)]
        largest = np.maximum(largest, [f.max() for f in found])
    assert (largest <= SPREAD).all()
    assert (largest >= 0.9 * np.array(SPREAD)).all()


def exact(A, b, x, ridge, form, digits=50):
    """Gradient and Hessian with mpmath, from autograd-free definitions, in absolute units."""
    mpmath.mp.dps = digits
    A, b, x = (np.vectorize(mpmath.mpf, otypes=[object])(t) for t in (A, b, x))
    d = A.shape[1]
    z = A.dot(x)
    if form == "softmax":
        u = np.array([mpmath.exp(v) for v in z])
        f = u / sum(u)
        mean = f.dot(A)
        T = A - mean
        J = f[:, None] * T
        r = f - b
        second = [
            f * ((T[:, i] * T[:, j]) - f.dot(T[:, i] * T[:, j])) for i in range(d) for j in range(d)
        ]
    else:
        names = {"exp": ("exp",) * 3, "sinh": ("sinh", "cosh", "sinh")}
        names["cosh"] = ("cosh", "sinh", "cosh")
        u, u1, u2 = (np.array([getattr(mpmath, m)(v) for v in z]) for m in names[form])
        r = u - sum(u) * b
        J = u1[:, None] * A
        J = J - np.outer(b, J.sum(0))
        second = []
        for i in range(d):
            for j in range(d):
                w = u2 * A[:, i] * A[:, j]
                second.append(w - b * sum(w))
    H = J.T.dot(J) + np.array([r.dot(s) for s in second]).reshape(d, d)
    for i in range(d):
        H[i, i] += mpmath.mpf(ridge)
    return J.T.dot(r) + mpmath.mpf(ridge) * x, H


@pytest.mark.parametrize("form", FORMS)
def test_errors_dominate(form, full):
    """The computed derivatives are within the stated errors of the exact ones."""
    worst = 0.0
    for seed in range(60 if full else 8):
        rng = np.random.default_rng(seed)
        n, d = int(rng.integers(1, 12)), int(rng.integers(1, 4))
        A = rng.normal(size=(n, d)) * rng.choice([0.1, 1.0, 10.0])
        if seed % 3 == 0:
            A = A + 1e6 * (form == "softmax")
        if seed % 4 == 1:
            A[: n // 2] = A[0]
        x = rng.normal(size=d) * rng.choice([0.1, 1.0]) * (1e-5 if abs(A).max() > 1e5 else 1.0)
        b, ridge = rng.random(n), float(rng.choice([1e-3, 1.0]))
        tensors = (torch.tensor(A)[None], torch.tensor(b)[None])
        rows = Rows(
            *tensors,
            None,
            torch.zeros(1, dtype=torch.long),
            torch.full((1,), ridge, dtype=torch.float64),
        )
        at = torch.tensor(x)
        point = softmax_point(rows, at) if form == "softmax" else rescaled_point(form, rows, at)
        g, H = exact(A, b, x, ridge, form)
        unit = mpmath.exp(mpmath.mpf(point.log_unit))
        dg = np.array([mpmath.mpf(v) for v in point.gradient.tolist()]) - g / unit
        rows_of = np.array([[mpmath.mpf(v) for v in row] for row in point.hessian.tolist()])
        error_g = mpmath.sqrt(sum(v**2 for v in dg))
        error_H = mpmath.sqrt(sum(v**2 for v in (rows_of - H / unit).reshape(-1)))
        assert error_g <= point.gradient_error
        assert error_H <= point.hessian_error
        worst = max(worst, float(error_H / point.hessian_error))
        assert point.hessian_error < 1e-6 * max(1.0, float(point.hessian.abs().max()))
    assert worst > 1e-4


@pytest.mark.parametrize("form", ["softmax", "exp", "cosh"])
@pytest.mark.parametrize("max_iter", [4, 200])
def test_a_proved_distance_holds_to_fifty_digits(form, max_iter):
    A, b, _ = planted(n=12, d=3, noise=0.3)
    ridge = ridge_of[form]
    keywords = {"ridge": ridge}
    if form != "softmax":
        keywords |= {"rescaled": True, "kind": form}
    result = nt.softmax_regression(A, b, max_iter=max_iter + 4 * (form == "cosh"), **keywords)
    proof = nt.certify_softmax(A, b, result.x, **keywords)
    assert proof.local_minimum == "proved"
    x = np.vectorize(mpmath.mpf, otypes=[object])(result.x)
    for _ in range(12):
        g, H = exact(A, b, x, ridge, form)
        x = (
            x
            - np.array(
                mpmath.lu_solve(mpmath.matrix(H.tolist()), mpmath.matrix(g.tolist()))
            ).ravel()
        )
    assert max(abs(v) for v in exact(A, b, x, ridge, form)[0]) < mpmath.mpf(10) ** -40
    distance = mpmath.sqrt(sum((v - mpmath.mpf(w)) ** 2 for v, w in zip(x, result.x, strict=True)))
    assert distance <= proof.distance
    # The proof is worth its name: within some orders of the truth, or of rounding.
    assert proof.distance <= 10 * distance + mpmath.mpf(10) ** -10
    assert max_iter == 4 or proof.distance < proof.uniqueness_radius
    lowest = mpmath.eigsy(mpmath.matrix(H.tolist()), eigvals_only=True)[0]
    assert proof.smallest_eigenvalue > 0
    assert max_iter == 4 or proof.smallest_eigenvalue <= lowest * (1 + 1e-6)


def test_certificates_of_noisy_fits():
    A, b, _ = planted(n=300, d=8, noise=0.5)
    result = nt.softmax_regression(A, b)
    proof = nt.certify_softmax(A, b, result.x)
    assert proof.local_minimum == "proved"
    assert proof.distance < 1e-9
    assert proof.kantorovich < 1e-4
    assert proof.eigenvalue_proved
    assert "strict local minimum" in str(proof)
    assert '"local_minimum": "proved"' in proof.to_json()


def test_what_is_not_certified():
    A, b, x = planted(noise=0.2)
    fitted = nt.softmax_regression(A, b).x
    far = nt.certify_softmax(A, b, fitted + 3.0)
    assert far.local_minimum == "not certified"
    assert far.distance == math.inf
    assert far.uniqueness_radius == 0
    saturated = nt.certify_softmax(A, b, 1000 * x)
    assert saturated.local_minimum == "not certified"
    assert saturated.reasons
    flat = np.c_[A, np.ones(60)]
    point = np.r_[fitted, 0.0]
    unproved = nt.certify_softmax(flat, b, point)
    assert unproved.local_minimum == "not certified"
    assert not unproved.eigenvalue_proved
    assert any("A e is a multiple of 1" in reason for reason in unproved.reasons)
    assert "not certified" in unproved.summary()
    result = nt.softmax_regression(flat, b, ridge=1e-3)
    assert nt.certify_softmax(flat, b, result.x, ridge=1e-3).local_minimum == "proved"


def test_no_maximum_or_saddle_is_certified():
    """x = 0 of a symmetric design: stationary, with negative curvature."""
    A = np.array([[1.0], [-1.0]])
    b = np.array([0.5, 0.5])
    assert nt.certify_softmax(A, b, [0.0]).local_minimum == "proved"
    b = np.array([0.0, 0.0])
    top = nt.certify_softmax(np.array([[1.0], [-1.0], [0.0]]), np.array([1.0, 1.0, -1.0]), [0.0])
    assert top.local_minimum == "not certified"
    assert top.smallest_eigenvalue < 0
    with pytest.warns(UserWarning, match="not 1"):
        assert nt.softmax_regression(A, b, start=[0.0]).x == pytest.approx(0)


def test_point_far_from_the_minimum_is_led_there():
    A, b, _ = planted(n=200, d=3, noise=0.3)
    fitted = nt.softmax_regression(A, b).x
    proof = nt.certify_softmax(A, b, fitted + 0.05)
    assert proof.local_minimum == "proved"
    assert 0.05 * 3**0.5 <= proof.distance < 0.1


@pytest.mark.parametrize("kind", ["exp", "cosh"])
def test_certificates_are_free_of_overflow(kind):
    A, b, x = planted(n=30)
    start = x * 1000 / np.abs(A @ x).max()
    proof = nt.certify_softmax(A, b, start, ridge=1.0, rescaled=True, kind=kind)
    assert proof.local_minimum == "not certified"
    assert not math.isnan(proof.smallest_eigenvalue)
    assert not math.isnan(proof.gradient)
    assert "not certified" in str(proof)
    with pytest.raises(ValueError, match="x must be 4"):
        nt.certify_softmax(A, b, np.ones(3))


def test_float32_points_are_certified_as_they_are():
    A, b, _ = (t.astype(np.float32) for t in planted(noise=0.3))
    result = nt.softmax_regression(A, b, ridge=1e-3)
    proof = nt.certify_softmax(A, b, result.x, ridge=1e-3)
    assert proof.local_minimum == "proved"
    assert proof.distance < 1e-2


def test_lipschitz_edge_cases():
    assert softmax_lipschitz(1.0, 0.5, 1.0, 10, 1e9) < math.inf  # softmax is globally smooth
    e, norms = torch.zeros(3).double(), torch.ones(3).double()
    assert rescaled_lipschitz(e, norms, 1.0, 1.0, 1e9) == math.inf
    assert rescaled_lipschitz(e, torch.zeros(3).double(), 1.0, 1.0, 1.0) < 1e-300


@pytest.fixture(scope="module")
def page():
    """The names that the page's example defines, and what it printed."""
    return run_example(PAGE)


def test_page_prints_what_it_shows(page):
    assert page[1] == block(PAGE, "text")


def test_page_links():
    assert broken_links(PAGE, PAGE.read_text()) == []
