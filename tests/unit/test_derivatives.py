"""Closed forms against autograd over the case table, and the checks against planted errors."""

from dataclasses import replace

import pytest
import torch

import newtention as nt
from newtention import chunks
from newtention.derivatives.hessian import second_order, second_order_parts
from newtention.functions import Hessian
from tests import checks
from tests.cases import BY_NAME, CASES, STACK, without
from tests.tolerances import REORDERED

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
TABLE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
KINDS = pytest.mark.parametrize("kind", ["full", "gauss-newton"])

RICH = BY_NAME["three heads, padded"]
"""Weights, padding and several heads: every term of every formula is present."""


@TABLE
@DTYPES
def test_loss(case, dtype):
    checks.check_loss(case, dtype)


@TABLE
@DTYPES
def test_gradient(case, dtype):
    checks.check_gradient(case, dtype)


@TABLE
@DTYPES
@KINDS
def test_hessian(case, kind, dtype):
    checks.check_hessian(case, kind, dtype)


@TABLE
@DTYPES
@KINDS
def test_hessian_product(case, kind, dtype):
    checks.check_product(case, kind, dtype)


@TABLE
def test_scipy(case):
    checks.check_scipy(case)


@KINDS
def test_blocks_between_heads_are_gauss_newton(kind):
    """The residual couples no two heads, so the full Hessian adds nothing off the diagonal."""
    case = BY_NAME["two heads"]
    k = case.X[0].numel()
    H = nt.hessian(case.problem(), *case.point(), kind=kind)
    want = case.oracle_gauss_newton
    checks.require_close("H_xx between heads", H.xx[:k, k:], want[:k, k : 2 * k], 1e-10)


def test_gauss_newton_is_positive_semidefinite():
    for case in CASES:
        values = torch.linalg.eigvalsh(
            nt.hessian(case.problem(), *case.point(), kind="gauss-newton").to_dense()
        )
        assert values[0] >= -1e-12 * values[-1], case.name


def test_stack_equals_singles():
    """Loss, gradient and both matrices of independent problems that differ in everything."""
    problem = nt.AttentionProblem.stack([case.problem() for case in STACK])
    X = torch.stack([case.X for case in STACK])
    Y = torch.stack([case.Y for case in STACK])
    loss, (GX, GY) = nt.loss(problem, X, Y), nt.gradient(problem, X, Y)
    H = {kind: nt.hessian(problem, X, Y, kind).to_dense() for kind in ("full", "gauss-newton")}
    for i, case in enumerate(STACK):
        value, gradient, full = case.oracle
        checks.require_close(f"loss {i}", loss[i], value, 1e-10)
        got = torch.cat([GX[i].flatten(), GY[i].flatten()])
        checks.require_close(f"gradient {i}", got, gradient, 1e-10)
        checks.require_close(f"Hessian {i}", H["full"][i], full, 1e-10)
        want = case.oracle_gauss_newton
        checks.require_close(f"Gauss-Newton {i}", H["gauss-newton"][i], want, 1e-10)


def test_stack_products_equal_singles():
    problem = nt.AttentionProblem.stack([case.problem() for case in STACK])
    X = torch.stack([case.X for case in STACK])[:, None]
    Y = torch.stack([case.Y for case in STACK])[:, None]
    g = torch.Generator().manual_seed(0)
    dX = torch.randn(X.shape, generator=g, dtype=X.dtype)
    dY = torch.randn(Y.shape, generator=g, dtype=X.dtype)
    for kind in ("full", "gauss-newton"):
        HX, HY = checks.product_xy(problem, X, Y, dX, dY, kind)
        for i, case in enumerate(STACK):
            want = case.oracle[2] if kind == "full" else case.oracle_gauss_newton
            want = want @ torch.cat([dX[i].flatten(), dY[i].flatten()])
            got = torch.cat([HX[i].flatten(), HY[i].flatten()])
            checks.require_close(f"{kind} product {i}", got, want, 1e-10)


@pytest.fixture
def tiny_tiles(monkeypatch):
    """Force tiles of a few rows: the default budget of `Chunk.tiles` is bound at definition."""
    original = chunks.Chunk.tiles

    def use(budget):
        seen = []

        def tiles(self, elements_per_row, budget=budget):
            parts = list(original(self, elements_per_row, budget))
            seen.append(len(parts))
            return iter(parts)

        monkeypatch.setattr(chunks.Chunk, "tiles", tiles)
        return seen

    return use


@pytest.mark.parametrize(
    "budget", [1, *(pytest.param(b, marks=pytest.mark.full) for b in (40, 100))]
)
@pytest.mark.parametrize(
    "name",
    [
        "padded",
        "causal, tall",
        "causal, padded",
        "boolean mask, padded",
        "forbidding bias per head, causal",
        "three heads, padded",
        "token weights, heads",
        "self-attention",
    ],
)
def test_tiles_change_nothing(name, budget, tiny_tiles):
    case = BY_NAME[name]
    problem, (X, Y) = case.problem(), case.point()
    whole = nt.loss(problem, X, Y), nt.gradient(problem, X, Y), nt.hessian(problem, X, Y)
    seen = tiny_tiles(budget)
    loss, (GX, GY), H = (
        nt.loss(problem, X, Y),
        nt.gradient(problem, X, Y),
        nt.hessian(problem, X, Y),
    )
    assert max(seen) > 1
    tol = REORDERED[torch.float64]
    checks.require_close("loss", loss, whole[0], tol)
    checks.require_close("GX", GX, whole[1][0], tol)
    checks.require_close("GY", GY, whole[1][1], tol)
    checks.require_close("H", H.to_dense(), whole[2].to_dense(), tol)
    checks.check_product(case)


def test_tiles_of_a_stack(tiny_tiles):
    """Tiles that hold some of the owners only."""
    tiny_tiles(30)
    test_stack_equals_singles()
    test_stack_products_equal_singles()


# Planted errors: a check that passes them is worthless.

PLANTED = 1e-6
"""Relative size of the planted error; far below what the eye would notice in a wrong formula."""


def perturbed(t):
    t = t.clone()
    t.view(-1)[-1] += PLANTED * t.abs().max()
    return t


class WrongHessian:
    """A Hessian with one block replaced."""

    def __init__(self, H: Hessian, block: str):
        blocks = H.blocks
        if block == "yy":
            blocks = replace(blocks, gram=perturbed(blocks.gram))
        else:
            blocks = replace(blocks, **{block: perturbed(getattr(blocks, block))})
        self.H = Hessian(blocks, H.weights)

    def __getattr__(self, name):
        return getattr(self.H, name)


def test_check_loss_raises():
    with pytest.raises(AssertionError, match="loss"):
        checks.check_loss(RICH, loss=lambda *a: nt.loss(*a) * (1 + PLANTED))
    with pytest.raises(AssertionError, match="loss"):
        checks.check_loss(RICH, loss=lambda *a: float("nan"))


@pytest.mark.parametrize("part", [0, 1])
def test_check_gradient_raises(part):
    def gradient(*args):
        parts = list(nt.gradient(*args))
        parts[part] = perturbed(parts[part])
        return parts

    with pytest.raises(AssertionError, match="gradient in " + "XY"[part]):
        checks.check_gradient(RICH, gradient=gradient)


@pytest.mark.parametrize("block", ["xx", "xy", "yy"])
@KINDS
def test_check_hessian_raises(block, kind):
    def hessian(problem, X, Y, kind):
        return WrongHessian(nt.hessian(problem, X, Y, kind), block)

    with pytest.raises(AssertionError, match=f"Hessian {block}"):
        checks.check_hessian(RICH, kind, hessian=hessian)


@KINDS
def test_check_hessian_tells_the_kinds_apart(kind):
    other = {"full": "gauss-newton", "gauss-newton": "full"}[kind]
    with pytest.raises(AssertionError, match="Hessian"):
        checks.check_hessian(RICH, kind, hessian=lambda p, X, Y, kind: nt.hessian(p, X, Y, other))
    with pytest.raises(AssertionError, match="product"):
        checks.check_product(RICH, kind, product=lambda *a: checks.product_xy(*a[:-1], other))


def test_check_product_raises():
    def product(*args):
        HX, HY = checks.product_xy(*args)
        return HX, perturbed(HY)

    with pytest.raises(AssertionError, match="product"):
        checks.check_product(RICH, product=product)


@pytest.mark.parametrize("field", ["fun", "jac", "hess", "hessp", "x0"])
def test_check_scipy_raises(field):
    def to_scipy(*args, **kwargs):
        s = nt.to_scipy(*args, **kwargs)
        if field == "x0":
            return s._replace(x0=s.x0 * (1 + PLANTED))
        exact = getattr(s, field)
        return s._replace(**{field: lambda *a: exact(*a) * (1 + PLANTED)})

    with pytest.raises(AssertionError, match=field):
        checks.check_scipy(RICH, to_scipy=to_scipy)


def test_check_predictions_raises():
    with pytest.raises(AssertionError, match="padded"):
        checks.check_predictions(RICH, predict=lambda *a: nt.predict(*a) + PLANTED)
    with pytest.raises(AssertionError, match="outputs"):
        checks.check_predictions(RICH, predict=lambda *a: nt.predict(*a) * (1 + PLANTED))


def test_check_attention_weights_raises():
    case = BY_NAME["causal, padded"]

    def leaking(*args, **kwargs):
        P = nt.attention_weights(*args, **kwargs)
        return P.clamp(min=1e-30)

    with pytest.raises(AssertionError, match="forbidden"):
        checks.check_attention_weights(case, weights=leaking)
    with pytest.raises(AssertionError, match="attention weights"):
        checks.check_attention_weights(
            case, weights=lambda *a, **k: nt.attention_weights(*a, **k) * (1 + PLANTED)
        )


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("query weights, padded", "weight"),
        ("bias per head", "bias"),
        ("boolean masks, ragged", "allowed"),
        ("causal, tall", "allowed"),
        ("forbidding bias", "allowed"),
        ("scale", "scale"),
        ("ridge", "penalty"),
        ("token weights", "penalty"),
        ("proximity, padded", "penalty"),
    ],
)
def test_every_option_counts(name, option):
    """The oracle without the option disagrees: the table would notice if it were dropped."""
    case = without(BY_NAME[name], option)
    with pytest.raises(AssertionError):
        checks.check_loss(case)
    with pytest.raises(AssertionError):
        checks.check_gradient(case)
    with pytest.raises(AssertionError):
        checks.check_hessian(case)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (float("nan"), 1.0),
        (1.0, float("nan")),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])),
        (torch.ones(2), torch.ones(3)),
        (0.0, 1e-300),
        (1.0 + 2e-10, 1.0),
    ],
)
def test_require_close_raises(got, want):
    with pytest.raises(AssertionError):
        checks.require_close("planted", got, want, 1e-10)


def test_finite_differences_of_the_library():
    for name in ("padded", "two heads", "proximity, padded"):
        case = BY_NAME[name]
        checks.check_finite_differences(case.problem(), *case.point())


@pytest.mark.parametrize("target", ["loss_and_gradient", "hessian_product"])
def test_check_derivatives_notices_an_error(target, monkeypatch):
    from newtention import functions

    exact = getattr(functions, target)

    def wrong(*args):
        result = exact(*args)
        if isinstance(result, tuple):
            return (*result[:-1], result[-1] * 1.01)
        return result * 1.01

    monkeypatch.setattr(functions, target, wrong)
    case = BY_NAME["padded"]
    report = nt.check_derivatives(case.problem(), *case.point())
    assert not report.passed
    assert "FAILED" in str(report)
    with pytest.raises(AssertionError, match="finite differences"):
        checks.check_finite_differences(case.problem(), *case.point())


@pytest.mark.parametrize("widths", [(1, 3, 1, 2), (3, 2, 4, 2)])
def test_parts_of_the_hessian_in_one_pass(widths):
    """Widths of one, for which permuted blocks may be views, included."""
    d1, d2, d3, p = widths
    g = torch.Generator().manual_seed(0)
    sizes = ((6, d1), (5, d2), (5, d3), (6, p), (1, 1, d1, d2), (1, 1, d3, p))
    A1, A2, A3, B, X, Y = (torch.randn(s, generator=g, dtype=torch.float64) for s in sizes)
    problem = nt.AttentionProblem(A1, A2, A3, B)
    loss, GX, GY, full, gauss_newton = second_order_parts(problem, X, Y)
    expected = second_order(problem, X, Y)
    for got, want in zip((loss, GX, GY), expected[:3], strict=True):
        assert torch.equal(got, want)
    torch.testing.assert_close(full.to_dense(), expected[3].to_dense(), rtol=1e-13, atol=1e-13)
    half = second_order(problem, X, Y, torch.zeros(1, dtype=torch.float64))[3]
    torch.testing.assert_close(gauss_newton.to_dense(), half.to_dense(), rtol=1e-13, atol=1e-13)
