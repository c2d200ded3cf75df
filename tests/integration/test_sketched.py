"""`sketched`: the minimum of the exact methods, to their accuracy."""

import math
from itertools import pairwise

import pytest
import scipy.linalg
import torch

import newtention as nt
from newtention import Status
from newtention.derivatives.hessian import second_order
from newtention.derivatives.linearised import Linearised
from newtention.layers import Bilinear
from newtention.newton.sampled import SampledInverse
from newtention.newton.varpro import eliminate_output
from tests.cases import randn
from tests.checks import require_close, require_finite

pytestmark = pytest.mark.usefixtures("unchecked")


def planted(n=600, d=4, h=1, seed=0, noise=0.1, dtype=torch.float64, size=1.0, **options):
    """Clustered tokens, a planted layer, and an X near its own."""
    g = torch.Generator().manual_seed(seed)
    A = size * (randn(g, 4 * d, d)[torch.arange(n) % (4 * d)] + 0.5 * randn(g, n, d))
    X, Y, away = (randn(g, h, d, d) / d**0.5 for _ in range(3))
    X, away = X / size**2, away / size**2
    blank = nt.AttentionProblem(A, A, A, torch.zeros_like(A), **options)
    B = nt.predict(blank, X, Y)
    B = B + noise * B.std() * randn(g, n, d)
    A, B = A.to(dtype), B.to(dtype)
    return nt.AttentionProblem(A, A, A, B, **options), (X + 0.2 * away).to(dtype)


def sketched(problem, start, rows=150, **settings):
    return nt.solve(
        problem,
        start=start,
        method="sketched",
        options=nt.Options(sample_rows=rows, gauss_newton_iterations=4),
        **settings,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"h": 2},
        {"mask": "causal"},
        {"regularizer": nt.Ridge(1e-2, 1e-2)},
        {"query_weights": 0.1 + randn(torch.Generator().manual_seed(1), 600).abs()},
    ],
    ids=["plain", "two heads", "causal", "ridge", "query weights"],
)
def test_it_ends_where_newton_ends(options):
    problem, start = planted(**options)
    want = nt.solve(problem, start=start, method="newton")
    got = sketched(problem, start)
    assert got.success
    assert got.method == "sketched"
    require_close("loss", got.loss, want.loss, 1e-12)
    outputs = [nt.predict(problem, s.X, s.Y) for s in (got, want)]
    require_close("outputs", *outputs, 1e-6)
    GX, _ = nt.gradient(problem, got.X, got.Y)
    assert float(GX.norm()) <= 1e-8 * float(problem.target_energy())
    assert got.history[-1].model == "newton"


def test_the_sample_bounds_the_condition_number():
    """Gaussian tokens, 32 equations for each unknown: a factor of 10 at most in 20 draws.

    The exact matrix has a condition number of hundreds.
    """
    g = torch.Generator().manual_seed(2)
    A = randn(g, 2000, 4) * torch.tensor([3.0, 1.0, 0.3, 0.1])
    problem = nt.AttentionProblem(A, A, A, randn(g, 2000, 4))
    X, Y = randn(g, 1, 1, 4, 4), randn(g, 1, 1, 4, 4)
    layer = Bilinear(1, 4, 4, 4, 4)
    _, GX, GY, blocks = second_order(problem, X, Y, X.new_zeros(1))
    H = eliminate_output(blocks, GX, GY).hessian[0]
    assert torch.linalg.cond(H) > 100
    point = Linearised(problem, layer, layer.pack(X, Y))
    for seed in range(20):
        inverse = SampledInverse.at(point, 128, seed)
        unit = torch.eye(32, dtype=torch.float64)[:16]
        K = torch.stack([inverse.solve(e)[:16] for e in unit])
        values = scipy.linalg.eigvals((K @ H).numpy()).real
        assert values.min() > 0
        assert values.max() / values.min() < 10


def test_fewer_rows_cost_products_not_accuracy():
    problem, start = planted(n=1500)
    few, many = (sketched(problem, start, rows) for rows in (70, 1500))
    assert few.success
    assert many.success
    require_close("loss", few.loss, many.loss, 1e-12)
    assert sum(few.history.column("inner")) > sum(many.history.column("inner"))


def test_float32():
    problem, start = planted(dtype=torch.float32)
    solution = sketched(problem, start)
    assert solution.success
    assert solution.X.dtype == torch.float32


@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_tokens_beyond_float32(size):
    """Products of four tokens over- or underflow float32: the sample is then taken in float64."""
    problem, start = planted(size=size, noise=0.05)
    solution = sketched(problem, start)
    want = nt.solve(problem, start=start, method="newton")
    require_finite("weights", solution.X, solution.Y)
    require_close("loss", solution.loss, want.loss, 1e-6)


def test_rank_deficient_tokens():
    """Equal columns leave directions without curvature; the floor of the preconditioner holds."""
    problem, start = planted(d=4)
    A = problem.chunks[0].A1[0, 0].clone()
    A[:, 3] = A[:, 2]
    flat = nt.AttentionProblem(A, A, A, problem.chunks[0].B[0, 0])
    got = sketched(flat, start)
    want = nt.solve(flat, start=start, method="newton")
    require_close("loss", got.loss, want.loss, 1e-9)


def test_a_random_start_never_gets_worse():
    problem, _ = planted()
    solution = sketched(problem, None, max_iter=25)
    losses = solution.history.column("loss")
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(losses))


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    problem, start = planted()
    whole = sketched(problem, start)
    path = tmp_path / "run.ckpt"
    sketched(problem, start, checkpoint=path, max_iter=3)
    rest = sketched(problem, start, checkpoint=path)
    assert torch.equal(rest.X, whole.X)
    assert rest.iterations == whole.iterations


def test_several_starts_and_a_stack():
    problem, start = planted(n=200)
    assert len(sketched(problem, start, n_init=3, max_iter=5).start_losses) == 3
    both = nt.solve_many([problem, problem], [start, start], method="sketched", max_iter=3)
    assert both[0].loss == both[1].loss


def test_limits():
    problem, start = planted()
    assert sketched(problem, start, max_iter=2).status is Status.ITERATION_LIMIT
    assert sketched(problem, start, max_seconds=0).status is Status.TIME_LIMIT


def test_it_is_for_the_bilinear_form():
    problem, start = planted(n=60)
    with pytest.raises(ValueError, match=r"Options\(freeze=\)"):
        nt.solve(problem, start, method="sketched", options=nt.Options(freeze=["Y"]))
    with pytest.raises(ValueError, match="layers of X and Y"):
        nt.solve(problem, method="sketched", options=nt.Options(ranks=2))
    with pytest.raises(ValueError, match="sample_rows"):
        nt.Options(sample_rows=0)
    assert math.isfinite(nt.solve(problem, start, method="sketched").loss)
