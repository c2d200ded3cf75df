"""Regularisers as quadratics, against the oracle's one-line definitions."""

import pytest
import torch

import newtention as nt
from newtention import reference
from newtention.regularizers import Quadratic
from tests.cases import BY_NAME, CASES, STACK, make
from tests.checks import require_close
from tests.unit.test_layers import weights

REGULARISED = [
    case for case in CASES if case.name.startswith(("ridge", "token weights", "proximity"))
]
TABLE = pytest.mark.parametrize("case", REGULARISED, ids=lambda case: case.name)


def with_axes(case):
    X, Y = case.point()
    return (X[None], Y[None]) if X.ndim == 3 else (X[None, None], Y[None, None])


def oracle(case):
    """(value, gradient, Hessian) of the penalty alone."""
    return reference.derivatives(lambda X, Y: case.penalty(case.sequences, X, Y), case.X, case.Y)


@TABLE
def test_value_gradient_curvature(case):
    quadratic = case.problem().quadratic
    X, Y = with_axes(case)
    value, gradient, hessian = oracle(case)
    require_close("value", quadratic.value(X, Y), value[None], 1e-12)
    got = torch.cat([t.flatten() for t in quadratic.gradient(X, Y)])
    require_close("gradient", got, gradient, 1e-12)
    g = torch.Generator().manual_seed(0)
    dX, dY = (torch.randn(t.shape, generator=g, dtype=t.dtype) for t in (X, Y))
    got = torch.cat([t.flatten() for t in quadratic.apply(dX, dY)])
    want = hessian @ torch.cat([dX.flatten(), dY.flatten()])
    require_close("curvature", got, want, 1e-12)
    k = case.X.shape[-2] * case.X.shape[-1]
    require_close("dense curvature", quadratic.curvature_x()[0], hessian[:k, :k], 1e-12)


@TABLE
def test_penalty_is_reported_apart(case):
    solution = nt.solve(case.problem(), start=case.point(), max_iter=3)
    want = case.penalty(case.sequences, solution.X, solution.Y)
    require_close("penalty", solution.penalty, want, 1e-10)
    require_close("loss", solution.loss, solution.data_loss + solution.penalty, 1e-15)
    problem = case.problem()
    require_close("relative", solution.relative_loss,
                  solution.data_loss / problem.target_energy()[0], 1e-14)  # fmt: skip


def test_stack_of_different_regularizers():
    """Missing terms and centres become zeros that change nothing."""
    stack = nt.AttentionProblem.stack([case.problem() for case in STACK])
    X, Y = (torch.stack([getattr(c, w) for c in STACK])[:, None] for w in "XY")
    values = stack.quadratic.value(X, Y)
    want = torch.stack([case.penalty(case.sequences, case.X, case.Y) for case in STACK])
    require_close("values", values, want, 1e-12)


def test_token_weights_are_the_papers():
    """Definitions 6.2 and 6.5: 1/2 ||A1 X A2^T W||^2 and 1/2 ||W A3 Y||^2, written out."""
    case = BY_NAME["token weights"]
    s = case.sequences[0]
    W = torch.diag(s["w"])
    want = 0.5 * (s["A1"] @ case.X @ s["A2"].T @ W).square().sum()
    want = want + 0.5 * (W @ s["A3"] @ case.Y).square().sum()
    require_close("value", case.problem().quadratic.value(*with_axes(case)), want[None], 1e-13)


def test_proximity_does_not_depend_on_the_units():
    """Tokens in other units with weights to match: the same penalty."""
    case = make("units", [(6, 8)], "single", regularizer="proximity")
    s = case.sequences[0]
    X0, Y0 = (torch.zeros_like(w) for w in (case.X, case.Y))
    values = [
        nt.AttentionProblem(
            s["A1"] * a, s["A2"] * b, s["A3"] * c, s["B"], regularizer=nt.Proximity((X0, Y0), 0.4)
        ).quadratic.value((case.X / a / b)[None, None], (case.Y / c)[None, None])
        for a, b, c in ((1.0, 1.0, 1.0), (3.0, 0.1, 7.0))
    ]
    require_close("value", values[1], values[0], 1e-12)


def test_proximity_is_zero_at_the_reference():
    X0, Y0 = BY_NAME["two heads"].point()
    s = BY_NAME["two heads"].sequences[0]
    problem = nt.AttentionProblem(
        s["A1"], s["A2"], s["A3"], s["B"], regularizer=nt.Proximity((X0, Y0), 1e3)
    )
    assert float(problem.quadratic.value(X0[None], Y0[None])) == 0.0
    solution = nt.solve(problem, start=(X0, Y0), max_iter=10)
    far = nt.solve(BY_NAME["two heads"].problem(), start=(X0, Y0), max_iter=10)
    assert (solution.X - X0).norm() < 0.1 * (far.X - X0).norm()


def test_zero_strengths_change_nothing():
    case = BY_NAME["one sequence"]
    s = case.sequences[0]
    for regularizer in (
        nt.Ridge(),
        nt.TokenWeights(torch.zeros(9)),
        nt.Proximity(case.point(), strength=0.0),
    ):
        problem = nt.AttentionProblem(s["A1"], s["A2"], s["A3"], s["B"], regularizer=regularizer)
        require_close("loss", nt.loss(problem, *case.point()), case.oracle[0], 1e-13)


def test_proximity_takes_a_bilinear_layer():
    X, Y = torch.ones(3, 3).double(), torch.ones(3, 2).double()
    reference = nt.Proximity(nt.BilinearAttention(X, Y), 0.5).reference
    assert torch.equal(reference[0], X)
    assert torch.equal(reference[1], Y)


def test_describe():
    assert nt.Ridge(1, 2).describe() == {"name": "ridge", "x": 1.0, "y": 2.0}
    assert nt.TokenWeights([0.5, 2.0]).describe() == {
        "name": "token weights",
        "min": 0.5,
        "max": 2.0,
    }
    near = {"name": "proximity", "strength": 3.0}
    assert nt.Proximity(([[1.0]], [[1.0]]), 3).describe() == near | {"isotropic": False}
    layer = weights()
    assert nt.Proximity(layer, 3, isotropic=True).describe() == near | {"isotropic": True}


def test_take():
    stack = nt.AttentionProblem.stack([case.problem() for case in STACK])
    taken: Quadratic = stack.quadratic.take(torch.tensor([3, 1, 3]))
    X, Y = (torch.stack([getattr(STACK[i], w) for i in (3, 1, 3)])[:, None] for w in "XY")
    want = [STACK[i].penalty(STACK[i].sequences, STACK[i].X, STACK[i].Y) for i in (3, 1, 3)]
    require_close("values", taken.value(X, Y), torch.stack(want), 1e-12)


# Another regulariser on the same data


@TABLE
def test_with_regularizer(case):
    """As if it had been given with the data, which both problems share."""
    problem = case.problem()
    free = problem.with_regularizer(None)
    assert free.regularizer is None
    assert free.chunks is problem.chunks
    assert nt.loss(free, *case.point()) == pytest.approx(
        float(reference.data_loss(case.sequences, case.X, case.Y, case.scale)), rel=1e-12
    )
    if not isinstance(problem.regularizer, nt.TokenWeights):
        again = free.with_regularizer(problem.regularizer)
        assert again.chunks is problem.chunks
        require_close("loss", nt.loss(again, *case.point()), case.oracle[0], 1e-12)
    # The problem itself is as it was.
    require_close("loss", nt.loss(problem, *case.point()), case.oracle[0], 1e-12)


def test_with_regularizer_keeps_the_options():
    case = BY_NAME["forbidding bias per head, causal"]
    ridged = case.problem().with_regularizer(nt.Ridge(0.3, 0.7))
    want = case.oracle[0] + reference.ridge(case.X, case.Y, 0.3, 0.7)
    require_close("loss", nt.loss(ridged, *case.point()), want, 1e-12)
    assert ridged.mask == case.problem().mask
    assert "ridge" in repr(ridged)


@pytest.mark.usefixtures("unchecked")
def test_with_regularizer_refuses():
    problem = BY_NAME["bias per head"].problem()
    with pytest.raises(TypeError, match="Ridge, TokenWeights or Proximity; found float"):
        problem.with_regularizer(0.1)
    with pytest.raises(ValueError, match="TokenWeights must be given where the problem is made"):
        problem.with_regularizer(nt.TokenWeights(torch.ones(9)))
    stack = nt.AttentionProblem.stack([problem, problem])
    with pytest.raises(ValueError, match="one problem, not a stack"):
        stack.with_regularizer(None)
    for heads in (1, 3):
        X, Y = torch.zeros(heads, 3, 4), torch.zeros(heads, 2, 5)
        with pytest.raises(ValueError, match=f"bias is for 2 heads.*for {heads}"):
            problem.with_regularizer(nt.Proximity((X, Y)))
    with pytest.raises(ValueError, match=r"Proximity\(reference\[0\]\)"):
        problem.with_regularizer(nt.Proximity((torch.zeros(2, 4, 4), torch.zeros(2, 2, 5))))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "reference_of", [None, 1.0, (1, 2, 3), "layer", torch.zeros(3, 3)], ids=str
)
def test_proximity_refuses_references_of_another_kind(reference_of):
    with pytest.raises(TypeError, match=r"Proximity\(reference=\) must be a pair \(X, Y\)"):
        nt.Proximity(reference_of)


def test_proximity_around_layers():
    """A bilinear layer is a pair: (layer.X, layer.Y)."""
    layer = nt.BilinearAttention(torch.ones(2, 2), torch.ones(2, 2))
    assert not nt.Proximity(layer).around_layer
    assert not nt.Proximity((layer.X, layer.Y)).around_layer
    assert nt.Proximity(weights()).around_layer
    with pytest.raises(ValueError, match=r"isotropic=True.*factored"):
        nt.Proximity((layer.X, layer.Y), isotropic=True)
    with pytest.raises(ValueError, match=r"strength=.*at least 0; found -1"):
        nt.Proximity(weights(), -1)
