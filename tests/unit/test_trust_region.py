"""The trust-region subproblem against its eigen-decomposition."""

from dataclasses import replace

import pytest
import torch

from newtention.linsolve.trust_region import rounding_floor, trust_region_step
from tests.quadratics import GRADIENTS, KINDS, draw, solve

RADII = (1e-4, 1e-2, 0.3, 1.0, 10.0, 1e3)
SIZES = (1e-8, 1e-3, 1.0, 100.0)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_grid(kind, gradient):
    """All radii and gradient sizes, in one batch of mixed members."""
    problems = [
        draw(kind, gradient, 6, radius, size, seed)
        for radius in RADII
        for size in SIZES
        for seed in range(3)
    ]
    solve(problems, [0.0] * len(problems))


@pytest.mark.parametrize("guess", [0.0, 1e-6, 0.5, 1e3])
def test_guess_changes_cost_only(guess):
    problems = [draw(kind, gradient, 5, 0.7, 1.0, 3) for kind in KINDS for gradient in GRADIENTS]
    solve(problems, [guess] * len(problems))


@pytest.mark.parametrize("n", [1, 2, 40])
def test_sizes(n):
    problems = [draw(k, g, n, r, 1.0, 5) for k in KINDS for g in GRADIENTS for r in (0.1, 5.0)]
    solve(problems, [0.0] * len(problems))


def test_batch_equals_singles():
    problems = [
        draw(k, g, 7, r, 1.0, 11) for k in KINDS for g in GRADIENTS for r in (0.05, 1.0, 50.0)
    ]
    H, g = torch.stack([p.H for p in problems]), torch.stack([p.g for p in problems])
    radius = torch.tensor([p.radius for p in problems]).double()
    guess = torch.zeros_like(radius)
    batch = trust_region_step(H, g, radius, guess)
    for i in range(len(problems)):
        one = trust_region_step(H[i : i + 1], g[i : i + 1], radius[i : i + 1], guess[i : i + 1])
        assert bool(one.interior) == bool(batch.interior[i])
        assert (one.step[0] - batch.step[i]).norm() <= 1e-8 * radius[i]
        assert torch.allclose(one.lam[0], batch.lam[i], rtol=1e-8, atol=0)
        assert one.factorisations <= batch.factorisations


def test_newton_step_when_it_fits():
    p = draw("definite", "general", 6, 1e3, 1.0, 0)
    step = trust_region_step(
        p.H[None], p.g[None], torch.tensor([p.radius]).double(), torch.zeros(1).double()
    )
    assert bool(step.interior)
    assert step.factorisations == 1
    assert float(step.lam) == rounding_floor(6, torch.float64)
    want = -torch.linalg.solve(p.H, p.g)
    assert (step.step[0] - want).norm() <= 1e-8 * want.norm()


def test_saddle_without_gradient_moves_to_the_boundary():
    """g = 0 at a saddle: the step follows negative curvature over the whole radius."""
    p = draw("indefinite", "zero", 6, 2.0, 1.0, 0)
    assert p.values[0] < -0.1
    step = trust_region_step(
        p.H[None], p.g[None], torch.tensor([2.0]).double(), torch.zeros(1).double()
    )
    assert not bool(step.interior)
    assert float(step.step.norm()) == pytest.approx(2.0, rel=0.1)
    assert float(step.decrease) >= 0.8 * 0.5 * -float(p.values[0]) * 4


@pytest.mark.parametrize("guess", [0.0, 1e-9, 0.5, 1e3])
@pytest.mark.parametrize("kind", ["definite", "singular", "zero"])
def test_minimum_without_gradient_stays(kind, guess):
    """Whatever the multiplier before: a saturated layer has no derivatives at all."""
    p = draw(kind, "zero", 6, 2.0, 1.0, 0)
    step = trust_region_step(
        p.H[None], p.g[None], torch.tensor([2.0]).double(), torch.tensor([guess]).double()
    )
    assert bool(step.interior)
    assert step.factorisations <= 3
    assert float(step.step.norm()) == 0.0


def test_hard_case_uses_few_factorisations():
    """The eigenvector estimate ends the search; without it lam would only creep towards -lambda."""
    counts = []
    for seed in range(20):
        p = draw("indefinite", "hard", 8, 50.0, 1.0, seed)
        step = trust_region_step(
            p.H[None], p.g[None], torch.tensor([50.0]).double(), torch.zeros(1).double()
        )
        counts.append(step.factorisations)
    assert max(counts) <= 20
    assert sorted(counts)[10] <= 10


def test_float32():
    for kind in KINDS:
        p = draw(kind, "general", 6, 0.5, 1.0, 1)
        step = trust_region_step(
            p.H[None].float(), p.g[None].float(), torch.tensor([0.5]), torch.zeros(1)
        )
        assert step.step.dtype == torch.float32
        assert float(step.step.norm()) <= 0.5 * 1.1 * (1 + 1e-6)
        assert float(step.decrease) >= 0.8 * p.optimum() * (1 - 1e-4) - 1e-4


# The checker itself must notice wrong steps.


@pytest.mark.parametrize(
    "change",
    [
        lambda s: (2.5 * s[0], *s[1:]),
        lambda s: (0.3 * s[0], *s[1:]),
        lambda s: (s[0], 1.001 * s[1], *s[2:]),
        lambda s: (*s[:2], 0.0, s[3]),
        lambda s: (*s[:3], True),
    ],
    ids=["too long", "too short", "wrong decrease", "wrong multiplier", "not interior"],
)
def test_the_checker_raises(change):
    p = draw("indefinite", "general", 6, 0.5, 1.0, 1)
    s = trust_region_step(
        p.H[None], p.g[None], torch.tensor([0.5]).double(), torch.zeros(1).double()
    )
    right = (s.step[0], float(s.decrease), float(s.lam), bool(s.interior))
    p.check(*right)
    step, *rest = change(right)
    if step is not right[0]:
        # A wrong step with its own true decrease: only the promise is broken.
        rest[0] = -float(p.g @ step + 0.5 * step @ p.H @ step)
    with pytest.raises(AssertionError):
        p.check(step, *rest)


def test_the_oracle_agrees_with_brute_force():
    """The best of many points of the ball, polished, is the dual optimum."""
    for kind in KINDS:
        for gradient in GRADIENTS:
            p = draw(kind, gradient, 2, 1.3, 1.0, 2)
            angle = torch.linspace(0, 2 * torch.pi, 1001, dtype=torch.float64)
            circle = torch.stack([angle.cos(), angle.sin()], 1)
            r = torch.linspace(0, 1.3, 101, dtype=torch.float64)
            s = (r[:, None, None] * circle).reshape(-1, 2)
            best = float((-(s @ p.g) - 0.5 * ((s @ p.H) * s).sum(1)).max())
            assert best == pytest.approx(p.optimum(), rel=1e-3, abs=1e-9), (kind, gradient)


def test_replaced_radius_is_respected():
    """The same model in shrinking balls: decreases shrink, steps fit."""
    p = draw("indefinite", "general", 6, 1.0, 1.0, 4)
    problems = [replace(p, radius=float(r)) for r in torch.logspace(1, -6, 15)]
    solve(problems, [0.0] * len(problems))
    optima = [q.optimum() for q in problems]
    assert optima == sorted(optima, reverse=True)
