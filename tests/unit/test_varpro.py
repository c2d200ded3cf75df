"""Projection of Y and elimination of its block."""

import pytest
import torch

import newtention as nt
from newtention import reference
from newtention.derivatives.gradient import data_loss, loss_and_gradient
from newtention.derivatives.hessian import second_order
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.penalty import penalty
from newtention.linsolve.pseudo_inverse import gram_inverse
from newtention.newton.varpro import OutputMap, eliminate_output, project
from newtention.weights import as_weights
from tests.cases import BY_NAME, CASES, SATURATED_CASES, STACK
from tests.checks import require_close
from tests.unit import test_layers as layers
from tests.unit import test_proximity as near

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


# The output map of any layer

FACTORED = [name for name in layers.CASES if name != "logits of 500"]


def output_map(problem, layer):
    """(at, the problem's weights, theta with the best output map)."""
    w = as_weights(problem, layer)
    regularizer = penalty(problem, w.layer)
    output = OutputMap.at(Linearised(problem, w.layer, w.theta), regularizer)
    return w, output, output.solved(w.theta)


def affine_in_output(w, residual):
    """Weighted rows, flat, as A o + c in the flat output map o at fixed other weights."""
    theta, start = w.theta[0], w.layer.output_start

    def of_output(o):
        return residual(torch.cat([theta[:start], o]))

    zero = torch.zeros_like(theta[start:])
    return torch.func.jacfwd(of_output)(zero), of_output(zero)


@pytest.mark.parametrize("name", FACTORED)
def test_output_map_is_least_squares(name):
    """Of all weighted rows, and of those that stand for a ridge on W_O."""
    layer, problem, _, residual, own = layers.case(name)
    w, output, solved = output_map(problem, layer)
    start = w.layer.output_start
    A, c = affine_in_output(w, residual)
    theta = w.theta[0]
    K = torch.func.hessian(own)(theta)[start:, start:]
    rows = torch.cat([A, K.diagonal().sqrt().diag()])  # a ridge is diagonal
    right = torch.cat([-c, torch.zeros(len(K), dtype=c.dtype)])
    best = torch.linalg.lstsq(rows, right, driver="gelsd").solution
    require_close("fit", A @ solved[0, start:], A @ best, 1e-8)
    assert torch.equal(solved[:, :start], w.theta[:, :start])
    gradient = torch.func.grad(lambda t: 0.5 * residual(t).square().sum() + own(t))(theta)
    require_close("gradient", output.gradient.flatten(), gradient[start:], 1e-10)


@pytest.mark.parametrize("name", FACTORED)
def test_output_map_solves_with_its_own_curvature(name):
    layer, problem, _, residual, own = layers.case(name)
    w, output, _ = output_map(problem, layer)
    A, _ = affine_in_output(w, residual)
    start = w.layer.output_start
    K = torch.func.hessian(own)(w.theta[0])[start:, start:]
    H = A.T @ A + K
    right = torch.randn(output.gradient.shape, generator=torch.Generator().manual_seed(0)).double()
    want = torch.linalg.pinv(H, hermitian=True, rtol=1e-12) @ right.flatten()
    require_close("solution", output.solve(right).flatten(), want, 1e-7)


@pytest.mark.parametrize("name", [*FACTORED, "near"])
def test_output_map_is_stationary(name):
    if name == "near":
        s = near.setup("biases, groups")
        layer, problem = s.layer, s.problem
    else:
        layer, problem, *_ = layers.case(name)
    w, _, solved = output_map(problem, layer)
    start = w.layer.output_start
    before, after = (loss_and_gradient(problem, w.layer, t) for t in (w.theta, solved))
    assert after[1][:, start:].abs().max() < 1e-9 * before[1][:, start:].abs().max()
    assert after[0] < before[0]
    again = OutputMap.at(Linearised(problem, w.layer, solved), penalty(problem, w.layer))
    require_close("again", again.solved(solved), solved, 1e-9)


def of_rank(rank, dtype, heads, seed, n=300, m=4000, d=4):
    """Tokens of a rank, off the origin: a problem's weights, the best loss and the features."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def rounded(t):
        return t.to(dtype).double()

    tokens = rounded((3 + randn(m, rank)) @ randn(rank, d))
    A1, B, X, Y = map(rounded, (randn(n, d), randn(n, 5), randn(heads, d, d), randn(heads, d, 5)))
    problem = nt.AttentionProblem(*(t.to(dtype) for t in (A1, tokens, tokens, B)))
    P = torch.einsum("nd,hde,me->hnm", A1, X, tokens).softmax(2)
    F = torch.cat(list(P @ tokens), 1)
    U = torch.linalg.svd(F, full_matrices=False).U[:, : heads * rank]
    best = 0.5 * (B - U @ (U.T @ B)).square().sum()
    return as_weights(problem, X.to(dtype), Y.to(dtype)), best, F


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_output_map_of_deficient_features(seed, heads, dtype):
    """Directions that only rounding shows are left where they are.

    In float32 the features are sums over 4000 keys, and their rounding is several eps.
    """
    w, best, F = of_rank(1, dtype, heads, seed)
    output = OutputMap.at(Linearised(w.problem, w.layer, w.theta), penalty(w.problem, w.layer))
    solved = output.solved(w.theta)
    kept = (output.inverse.root.abs().amax(1) > 0).sum()
    assert int(kept) == heads
    tol = 1e-4 if dtype == torch.float32 else 1e-9
    loss = data_loss(w.problem, w.layer, solved)
    require_close("loss", loss, best[None], tol)
    # What the features do not see stays as it was.
    null = torch.linalg.svd(F).Vh[heads:]
    start = w.layer.output_start
    change = (solved - w.theta)[0, start:].view(-1, 5).double()
    require_close("null part", null @ change, torch.zeros(len(null), 5), 1e-3, change.norm())
