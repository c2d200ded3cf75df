"""Truncated conjugate gradients against dense algebra: every iterate minimises over a Krylov space.

B is the preconditioner, an approximate inverse of H, and ||x|| = sqrt(x^T B^-1 x) its norm.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from newtention.linsolve.cg import SPACING, WINDOW, Ending, Path, Rule, truncated_cg
from tests.checks import require_close
from tests.quadratics import Subproblem

NEVER = Rule(accuracy=0.0, overhead=math.inf, limit=1000)
SEEDS = pytest.mark.parametrize("seed", range(6))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Model:
    """q(x) = g^T x + 1/2 x^T H x with a preconditioner B."""

    H: torch.Tensor
    g: torch.Tensor
    B: torch.Tensor

    def q(self, x):
        return float(self.g @ x + 0.5 * x @ self.H @ x)

    def length(self, x):
        return float(x @ torch.linalg.solve(self.B, x)) ** 0.5

    def path(self, radius=math.inf, rule=NEVER, **options):
        return truncated_cg(
            lambda v: self.H @ v, self.g, lambda v: self.B @ v, radius, rule, **options
        )

    @cached_property
    def iterates(self):
        """x_0 = 0, then the minimisers of q over span{(B H)^k B g, k < i}, for i up to N."""
        basis, result = [], [torch.zeros_like(self.g)]
        v = self.B @ self.g
        for _ in range(len(self.g)):
            for _ in range(2):  # once more for orthogonality to machine precision
                for b in basis:
                    v = v - (b @ v) * b
            basis.append(v / v.norm())
            K = torch.stack(basis, 1)
            result.append(-K @ torch.linalg.solve(K.T @ self.H @ K, K.T @ self.g))
            v = self.B @ self.H @ basis[-1]
        return result

    @cached_property
    def decreases(self):
        return [-self.q(x) for x in self.iterates]

    @cached_property
    def residuals(self):
        """Relative to the gradient, in the norm of the preconditioner."""
        r = [self.g + self.H @ x for x in self.iterates]
        sizes = [float(t @ self.B @ t) ** 0.5 for t in r]
        return [size / sizes[0] for size in sizes]


def model(values, seed=0, condition=10.0):
    """H with eigenvalues `values` in random directions; B of a condition number, unrelated."""
    n = len(values)
    Q, R = (torch.linalg.qr(randn(n, n, seed=seed + k)).Q for k in (100, 200))
    H = Q @ torch.diag(torch.as_tensor(values, dtype=torch.float64)) @ Q.T
    B = R @ torch.diag(torch.logspace(0, math.log10(condition), n).double()) @ R.T
    return Model(0.5 * (H + H.T), randn(n, seed=seed), 0.5 * (B + B.T))


def definite(n=12, seed=0, spread=2.0):
    """Eigenvalues over 10^spread."""
    return model(torch.logspace(-spread / 2, spread / 2, n).tolist(), seed)


def indefinite(n=12, seed=0, negative=1):
    values = torch.linspace(0.5, 3.0, n)
    values[:negative] = -0.3
    return model(values.tolist(), seed)


def check_path(m: Model, path: Path, tol=1e-9):
    """What every path promises of the points it keeps."""
    assert len(path.points) == len(path.lengths) == len(path.decreases) > 0
    for x, length, decrease in zip(path.points, path.lengths, path.decreases, strict=True):
        # Lengths come from inner products by recurrence, which drift as directions lose conjugacy.
        assert length == pytest.approx(m.length(x), rel=max(tol, 1e-5))
        assert decrease == pytest.approx(-m.q(x), rel=tol)
    for values in ([0.0, *path.lengths], [0.0, *path.decreases]):
        assert values == sorted(values)
        assert len(set(values)) == len(values)
    assert path.slope == pytest.approx(-float(m.g @ path.points[0]), rel=tol)


# Exact solution


@SEEDS
def test_solves_in_as_many_products_as_unknowns(seed):
    m = definite(8, seed)
    path = m.path(rule=Rule(1e-10, math.inf, 8))
    assert path.products <= 8
    require_close("x", path.points[-1], -torch.linalg.solve(m.H, m.g), 1e-8)
    check_path(m, path)


def test_products_are_as_many_as_distinct_eigenvalues():
    """Of B H: one where B is the inverse, three where there are three."""
    m = definite()
    exact = Model(m.H, m.g, torch.linalg.inv(m.H))
    path = exact.path(rule=Rule(1e-10, math.inf, 12))
    assert (path.products, path.ending) == (1, Ending.ACCURATE)
    require_close("x", path.points[-1], -torch.linalg.solve(m.H, m.g), 1e-10)
    three = model([1.0, 1.0, 2.0, 2.0, 2.0, 5.0], condition=1.0)
    path = three.path(rule=Rule(1e-10, math.inf, 6))
    assert (path.products, path.ending) == (3, Ending.ACCURATE)


@SEEDS
def test_iterates_minimise_over_krylov_spaces(seed):
    m = definite(10, seed, spread=1.0)
    for i in range(1, 11):
        path = m.path(rule=Rule(0.0, math.inf, i))
        assert path.products == i
        require_close(f"iterate {i}", path.points[-1], m.iterates[i], 1e-8)


@pytest.mark.parametrize("h", [2.0, 0.01])
def test_one_unknown(h):
    m = model([h])
    path = m.path(rule=Rule(1e-8, math.inf, 5))
    assert (path.products, path.ending) == (1, Ending.ACCURATE)
    require_close("x", path.points[-1], -m.g / h, 1e-14)
    check_path(m, path)
    at_radius = m.path(radius=0.5 * path.lengths[-1])
    assert at_radius.ending is Ending.BOUNDARY
    require_close("half", at_radius.points[-1], -0.5 * m.g / h, 1e-14)
    check_path(m, at_radius)


def test_float32():
    m = definite(12, spread=1.0)
    low = Model(m.H.float(), m.g.float(), m.B.float())
    path = low.path(rule=Rule(1e-4, math.inf, 40))
    assert path.ending is Ending.ACCURATE
    require_close("x", path.points[-1], -torch.linalg.solve(m.H, m.g), 1e-3)
    check_path(low, path, tol=1e-3)


# The path


@SEEDS
def test_path_of_a_definite_model(seed):
    m = definite(30, seed, spread=1.0)
    path = m.path(rule=Rule(0.0, math.inf, 20))
    check_path(m, path)
    # Each point is an iterate; indices grow by SPACING at most, but for rounding up.
    kept = []
    for x in path.points:
        errors = [float((x - y).norm()) for y in m.iterates]
        kept.append(errors.index(min(errors)))
    assert kept[:4] == [1, 2, 3, 4]
    assert len(kept) < path.products
    for i, j in itertools.pairwise(kept):
        assert i < j <= math.ceil(SPACING * i)


@SEEDS
@pytest.mark.parametrize("radius", [0.05, 1.0, math.inf])
def test_path_of_an_indefinite_model(seed, radius):
    m = indefinite(12, seed)
    path = m.path(radius)
    assert path.ending in (Ending.BOUNDARY, Ending.NEGATIVE)
    check_path(m, path)


@SEEDS
def test_within(seed):
    m = definite(15, seed)
    path = m.path(rule=Rule(0.0, math.inf, 12))
    assert len(path.points) > 4
    for i, length in enumerate(path.lengths):
        after = path.lengths[i + 1] if i + 1 < len(path.lengths) else 10 * length
        for radius in (length, 0.5 * (length + after), after * (1 - 1e-12)):
            x, found, decrease = path.within(radius)
            assert torch.equal(x, path.points[i])
            assert (found, decrease) == (length, path.decreases[i])
    assert torch.equal(path.within(math.inf)[0], path.points[-1])


@SEEDS
@pytest.mark.parametrize("share", [1e-9, 0.1, 0.7, 0.999])
@pytest.mark.parametrize("make", [definite, indefinite])
def test_within_before_the_first_point(make, seed, share):
    """The straight line to the first iterate, with the model's value there."""
    m = make(12, seed)
    path = m.path()
    radius = share * path.lengths[0]
    x, length, decrease = path.within(radius)
    require_close("direction", x, share * path.points[0], 1e-12)
    assert length == radius
    assert length == pytest.approx(m.length(x), rel=1e-10)
    assert decrease == pytest.approx(-m.q(x), rel=1e-9)
    assert 0 < decrease < path.decreases[0]


def test_within_before_a_single_point_on_the_boundary():
    m = definite()
    path = m.path(radius=1e-3)
    assert (len(path.points), path.ending) == (1, Ending.BOUNDARY)
    x, length, decrease = path.within(4e-4)
    assert m.length(x) == pytest.approx(length) == pytest.approx(4e-4)
    assert decrease == pytest.approx(-m.q(x), rel=1e-9)


# The radius


def transformed(m: Model, radius: float) -> Subproblem:
    """The same subproblem in the Euclidean norm: x = L y with B = L L^T."""
    L = torch.linalg.cholesky(m.B)
    H = L.T @ m.H @ L
    values, vectors = torch.linalg.eigh(0.5 * (H + H.T))
    return Subproblem(H, L.T @ m.g, radius, values, vectors)


@SEEDS
@pytest.mark.parametrize("share", [0.01, 0.3, 0.8, 0.99])
def test_boundary(seed, share):
    """Exactly at the radius, with at least half of the best decrease there (Yuan 2000)."""
    m = definite(12, seed)
    whole = m.path(rule=Rule(1e-10, math.inf, 40))
    radius = share * whole.lengths[-1]
    path = m.path(radius)
    assert path.ending is Ending.BOUNDARY
    assert path.lengths[-1] == radius
    assert m.length(path.points[-1]) == pytest.approx(radius, rel=1e-7)
    check_path(m, path)
    best = transformed(m, radius).optimum()
    assert 0.5 * best <= path.decreases[-1] <= best * (1 + 1e-9)
    # A cut of the longer path ends before.
    assert whole.within(radius)[2] <= path.decreases[-1] * (1 + 1e-12)


def test_the_norm_is_the_preconditioners():
    """In the Euclidean norm the radius would be met elsewhere."""
    m = definite()
    x = m.path(radius=0.1).points[-1]
    assert abs(float(x.norm()) - 0.1) > 0.01


def test_a_radius_that_does_not_bind_changes_nothing():
    m = definite()
    rule = Rule(1e-8, math.inf, 40)
    free = m.path(rule=rule)
    bound = m.path(radius=1.001 * free.lengths[-1], rule=rule)
    assert torch.equal(free.points[-1], bound.points[-1])
    assert bound.ending is Ending.ACCURATE


@SEEDS
@pytest.mark.parametrize("radius", [0.3, 100.0, 1e6])
def test_negative_curvature_is_followed_to_the_radius(seed, radius):
    m = indefinite(12, seed, negative=3)
    path = m.path(radius)
    check_path(m, path)
    assert path.ending is (Ending.NEGATIVE if radius > 1 else Ending.BOUNDARY)
    assert path.lengths[-1] == radius
    assert path.decreases[-1] <= transformed(m, radius).optimum() * (1 + 1e-9)
    assert path.decreases[-1] > 0


@pytest.mark.parametrize("h", [-2.0, 0.0])
@pytest.mark.parametrize("radius", [0.7, math.inf])
def test_one_unknown_of_no_positive_curvature(h, radius):
    """Without a radius: the step B g of a unit curvature in the preconditioner's norm."""
    m = model([h])
    path = m.path(radius)
    assert (path.products, path.ending) == (1, Ending.NEGATIVE)
    want = radius if math.isfinite(radius) else m.length(m.B @ m.g)
    assert path.lengths == [pytest.approx(want, rel=1e-12)]
    assert path.points[0] @ m.g < 0
    check_path(m, path)


@SEEDS
def test_negative_curvature_without_a_radius(seed):
    """As far along it as the path has come: finite, and a decrease."""
    m = indefinite(12, seed)
    path = m.path()
    assert path.ending is Ending.NEGATIVE
    assert math.isfinite(path.lengths[-1])
    check_path(m, path)
    before = m.iterates[path.products - 1]
    last = path.points[-1] - before
    if path.products > 1:
        assert m.length(last) == pytest.approx(m.length(before), rel=1e-6)
        # Conjugate directions: the curvature along the last one is the negative one.
        assert last @ m.H @ last < 0
        assert abs(last @ m.H @ before) < 1e-6 * float(last @ last)


def test_negative_curvature_appears_in_one_of_the_tests_after_some_iterates():
    assert max(indefinite(12, seed).path().products for seed in range(6)) > 2


# When to end


@SEEDS
@pytest.mark.parametrize("accuracy", [0.5, 0.1, 1e-3])
def test_accuracy(seed, accuracy):
    m = definite(20, seed, spread=1.0)
    path = m.path(rule=Rule(accuracy, math.inf, 40))
    wanted = next(i for i, r in enumerate(m.residuals) if r <= accuracy)
    assert (path.products, path.ending) == (wanted, Ending.ACCURATE)
    require_close("last point", path.points[-1], m.iterates[wanted], 1e-5)


def poor(m: Model, overhead: float, residual: bool = True) -> int | None:
    """The first index at which the rule's definition says to end."""
    D = m.decreases
    for i in range(WINDOW, len(D)):
        recent = (D[i] - D[i - WINDOW]) / WINDOW
        if recent < D[i] / (i + overhead) and (m.residuals[i] <= 1 or not residual):
            return i
    return None


@SEEDS
@pytest.mark.parametrize("overhead", [0.0, 2.0, 5.0, 20.0])
@pytest.mark.parametrize("spread", [1.0, 2.0])
def test_poor_gain(seed, overhead, spread):
    m = definite(25, seed, spread)
    path = m.path(rule=Rule(0.0, overhead, 25))
    wanted = poor(m, overhead)
    assert wanted is not None
    assert (path.products, path.ending) == (wanted, Ending.POOR_GAIN)
    require_close("last point", path.points[-1], m.iterates[wanted], 1e-6)
    check_path(m, path, tol=1e-7)


def test_poor_gain_waits_while_the_residual_is_above_the_gradient():
    """A small gain says little then; one of the models above would have ended before."""
    m = definite(25, 0, 2.0)
    assert (poor(m, 0.0, residual=False), poor(m, 0.0)) == (5, 6)


def test_costlier_steps_take_more_products():
    m = definite(40, spread=4.0)
    products = [m.path(rule=Rule(0.0, o, 40)).products for o in (0.0, 1.0, 5.0, 20.0, 100.0)]
    assert products == sorted(products)
    assert products[0] < products[-1]
    assert m.path(rule=Rule(0.0, math.inf, 30)).ending is Ending.LIMIT


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_limit(limit):
    m = definite()
    path = m.path(rule=Rule(0.0, math.inf, limit))
    assert (path.products, path.ending) == (limit, Ending.LIMIT)
    require_close("last point", path.points[-1], m.iterates[limit], 1e-8)


@pytest.mark.parametrize("after", [1, 6])
def test_deadline(after):
    """Asked after every product; the iterate it leaves is the step."""
    m = definite(30)
    answers = iter([False] * (after - 1) + [True])
    path = m.path(expired=lambda: next(answers))
    assert (path.products, path.ending) == (after, Ending.DEADLINE)
    require_close("last point", path.points[-1], m.iterates[after], 1e-8)
    assert next(answers, None) is None


# What cannot be solved


def test_zero_gradient():
    def product(v):
        raise AssertionError("no product is needed")

    path = truncated_cg(product, torch.zeros(3).double(), lambda v: v, 1.0, NEVER)
    assert path.points == []
    assert path.products == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_finite_gradient_or_preconditioner(bad):
    g = torch.tensor([1.0, bad]).double()
    assert truncated_cg(lambda v: v, g, lambda v: v, 1.0, NEVER).points == []
    one = torch.ones(2).double()
    assert truncated_cg(lambda v: v, one, lambda v: bad * v, 1.0, NEVER).points == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("radius", [100.0, math.inf])
def test_product_that_is_not_finite(bad, at, radius):
    """The path ends before it, and holds finite points only."""
    m = definite()
    count = 0

    def product(v):
        nonlocal count
        count += 1
        return m.H @ v * (bad if count == at else 1.0)

    path = truncated_cg(product, m.g, lambda v: m.B @ v, radius, NEVER)
    assert path.products == at
    assert len(path.points) == at - 1
    if at > 1:
        check_path(m, path)
        require_close("last point", path.points[-1], m.iterates[at - 1], 1e-8)


@pytest.mark.parametrize("at", [2, 5])
def test_preconditioner_that_is_not_finite(at):
    """The iterate before it was finite, and so is all that the path holds."""
    m = definite()
    count = 0

    def precondition(v):
        nonlocal count
        count += 1
        return m.B @ v * (math.nan if count == at else 1.0)

    path = truncated_cg(lambda v: m.H @ v, m.g, precondition, math.inf, NEVER)
    check_path(m, path)
    require_close("last point", path.points[-1], m.iterates[at - 1], 1e-8)
