"""Projection of Y and elimination of its block."""

import pytest
import torch

import newtention as nt
from newtention import reference
from newtention.derivatives.hessian import second_order
from newtention.linsolve.pseudo_inverse import gram_inverse
from newtention.newton.varpro import eliminate_output, project
from newtention.weights import as_weights
from tests.cases import BY_NAME, CASES, SATURATED_CASES, STACK
from tests.checks import require_close

SMALL = [c for c in CASES if c.name not in SATURATED_CASES]
TABLE = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


def attended(case, X):
    """(all queries, h d3): the matrix that the outputs are linear in."""
    heads = X if X.ndim == 3 else X[None]
    rows = []
    for s in case.sequences:
        eye = torch.eye(s["A3"].shape[1]).double()
        bias = s.get("bias")
        parts = []
        for h in range(len(heads)):
            b = bias[h] if bias is not None and bias.ndim == 3 else bias
            parts.append(
                reference.forward(
                    s["A1"], s["A2"], s["A3"], heads[h], eye, case.scale, b, s["allowed"]
                )
            )
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)


def weighted_rows(case):
    q = torch.cat([s.get("weight", torch.ones(len(s["B"])).double()) for s in case.sequences])
    return q.sqrt()[:, None], torch.cat([s["B"] for s in case.sequences])


@pytest.mark.parametrize(
    "case", [c for c in SMALL if c.problem().regularizer is None], ids=lambda case: case.name
)
def test_projection_is_least_squares(case):
    """The fit is that of lstsq, also where the minimiser is not unique."""
    w = as_weights(case.problem(), *case.point())
    Y = project(w.problem, w.bilinear[1], w.bilinear[2])
    root, B = weighted_rows(case)
    W = root * attended(case, case.X)
    best = torch.linalg.lstsq(W, root * B, driver="gelsd").solution
    got = W @ Y[0].reshape(-1, B.shape[1])
    # The pseudo-inverse of the Gram matrix drops directions below sqrt(k eps) of the largest.
    require_close("fit", got, W @ best, 1e-7, scale=(root * B).abs().max())


@TABLE
def test_projection_is_stationary_and_stable(case):
    w = as_weights(case.problem(), *case.point())
    Y = project(w.problem, w.bilinear[1], w.bilinear[2])
    _, GY = nt.gradient(w.problem, w.bilinear[1][0], Y[0])
    _, before = nt.gradient(w.problem, w.bilinear[1][0], w.bilinear[2][0])
    assert GY.abs().max() <= 1e-9 * before.abs().max()
    require_close("again", project(w.problem, w.bilinear[1], Y), Y, 1e-9)


def test_projection_keeps_what_the_data_do_not_determine():
    """Rank-deficient values: the minimiser nearest to the given Y, so null directions stay."""
    case = BY_NAME["rank-deficient tokens"]
    w = as_weights(case.problem(), *case.point())
    Y = project(w.problem, w.bilinear[1], w.bilinear[2])
    # Values are multiples of (1, 2): Y along (2, -1) is free.
    null = torch.tensor([2.0, -1.0]).double()
    require_close("null part", null @ Y[0, 0], null @ w.bilinear[2][0, 0], 1e-12)
    least = project(w.problem, w.bilinear[1], torch.zeros_like(w.bilinear[2]))
    assert (null @ least[0, 0]).abs().max() < 1e-12
    require_close(
        "same fit", *(nt.loss(w.problem, w.bilinear[1][0], y[0]) for y in (Y, least)), 1e-12
    )


def test_projection_of_a_stack():
    stack = nt.AttentionProblem.stack([case.problem() for case in STACK])
    X, Y = (torch.stack([getattr(c, w) for c in STACK])[:, None] for w in "XY")
    got = project(stack, X, Y)
    for i, case in enumerate(STACK):
        one = project(case.problem(), X[i : i + 1], Y[i : i + 1])
        require_close(case.name, got[i : i + 1], one, 1e-10)


def closed_form(case):
    """f(X) = min_Y L(X, Y) by solving for Y in closed form; differentiable by torch.func."""
    root, B = weighted_rows(case)
    d3, p = case.Y.shape[-2:]
    h = case.X.shape[0] if case.X.ndim == 3 else 1
    # The penalty is quadratic in Y: its Hessian and gradient at 0 say all.
    zero = torch.zeros_like(case.Y)

    def of_y(flat):
        return case.penalty(case.sequences, torch.zeros_like(case.X), flat.view_as(case.Y)) + 0 * (
            flat.sum()
        )

    K = torch.func.hessian(of_y)(zero.flatten())
    k = torch.func.grad(of_y)(zero.flatten())

    def f(flat_X):
        X = flat_X.view_as(case.X)
        W = root * attended(case, X)
        gram = torch.kron(W.T @ W, torch.eye(p).double()) + K
        right = (W.T @ (root * B)).reshape(-1) - k
        Y = torch.linalg.solve(gram, right).reshape(h * d3, p)
        shaped = Y.view_as(case.Y)
        return 0.5 * (W @ Y - root * B).square().sum() + case.penalty(case.sequences, X, shaped)

    return f


@pytest.mark.parametrize(
    "name",
    [
        "one sequence",
        "query weights, ragged",
        "causal, padded",
        "ridge",
        "ridge, heads",
        "token weights",
        "proximity",
        "scale",
        "bias per head, ragged",
    ],
)
def test_schur_complement_is_the_hessian_of_the_projected_loss(name):
    case = BY_NAME[name]
    w = as_weights(case.problem(), *case.point())
    Y = project(w.problem, w.bilinear[1], w.bilinear[2])
    _, GX, GY, blocks = second_order(w.problem, w.bilinear[1], Y)
    reduced = eliminate_output(blocks, GX, GY)
    f = closed_form(case)
    theta = case.X.flatten()
    require_close("value", nt.loss(w.problem, w.bilinear[1][0], Y[0]), f(theta), 1e-10)
    require_close("gradient", reduced.gradient[0], torch.func.grad(f)(theta), 1e-8)
    require_close("Hessian", reduced.hessian[0], torch.func.hessian(f)(theta), 1e-8)


def test_elimination_away_from_the_projection():
    """With Y off its optimum the Newton step in X is still that of the whole system."""
    case = BY_NAME["ridge"]
    w = as_weights(case.problem(), *case.point())
    _, GX, GY, blocks = second_order(w.problem, w.bilinear[1], w.bilinear[2])
    reduced = eliminate_output(blocks, GX, GY)
    whole = torch.linalg.solve(blocks.to_dense()[0], torch.cat([GX.flatten(), GY.flatten()]))
    step = torch.linalg.solve(reduced.hessian[0], reduced.gradient[0])
    require_close("step", step, whole[: step.numel()], 1e-8)


@pytest.mark.parametrize("rank", [0, 1, 3, 5])
def test_gram_inverse_is_the_pseudo_inverse(rank):
    g = torch.Generator().manual_seed(rank)
    left, mix = (torch.randn(2, *k, generator=g).double() for k in ((7, rank), (rank, 5)))
    gram = (left @ mix).mT @ (left @ mix)
    inverse = gram_inverse(gram)
    want = torch.linalg.pinv(gram, hermitian=True, rtol=1e-12)
    right = torch.randn(2, 5, 3, generator=g).double()
    scale = max(1.0, float(want.abs().max()))
    require_close("solve", inverse.solve(right), want @ right, 1e-9, scale)
    require_close("root", inverse.root @ inverse.root.mT, want, 1e-9, scale)
