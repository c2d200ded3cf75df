"""Problems whose targets are attention maps: derivatives against autograd, shapes, refusals."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import newtention as nt
from newtention import chunks
from newtention.derivatives import maps
from newtention.derivatives.hessian import UpperTriangles
from newtention.layers import AttentionMap
from newtention.memory import LiveBytes
from newtention.reference import forward
from tests.checks import require_close, tolerance
from tests.map_cases import MAP_CASES, make_map
from tests.tolerances import REORDERED

TABLE = pytest.mark.parametrize("case", MAP_CASES, ids=lambda case: case.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
KINDS = pytest.mark.parametrize("kind", ["full", "gauss-newton"])
BY_NAME = {case.name: case for case in MAP_CASES}


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small(n=6, m=5, d1=3, d2=4, seed=0):
    """Tokens, a map of theirs, and the X behind it."""
    A1, A2, X = randn(seed, n, d1), randn(seed + 1, m, d2), randn(seed + 2, d1, d2)
    return A1, A2, (A1 @ X @ A2.T).softmax(1), X


@TABLE
@DTYPES
def test_loss_and_gradient(case, dtype):
    problem, X = case.problem(dtype), case.X.to(dtype)
    loss, gradient, _ = case.oracle
    got = nt.gradient(problem, X)
    assert got.shape == X.shape
    assert got.dtype == dtype
    tol = tolerance(case, dtype)
    require_close("loss", nt.loss(problem, X), loss, tol)
    # One key, or a saturated softmax, has no gradient but rounding.
    require_close("gradient", got, gradient, tol, gradient.abs().max() + loss)


@TABLE
@DTYPES
@KINDS
def test_hessian_and_its_products(case, kind, dtype):
    problem, X = case.problem(dtype), case.X.to(dtype)
    want = case.oracle[2] if kind == "full" else case.oracle_gauss_newton
    tol, size = tolerance(case, dtype), want.abs().max() + case.oracle[0]
    H = nt.hessian(problem, X, kind=kind)
    assert H.xy.shape == (X.numel(), 0)
    require_close("Hessian", H.to_dense(), want, tol, size)
    require_close("block of X", H.xx, want, tol, size)
    require_close(
        "products", nt.hessian_operator(problem, X, kind=kind).to_dense(), want, tol, size
    )


def test_checks_notice_a_wrong_hessian():
    case = BY_NAME["one sequence"]
    H = nt.hessian(case.problem(), case.X).to_dense()
    with pytest.raises(AssertionError, match="Hessian"):
        require_close("Hessian", 1.000001 * H, case.oracle[2], 1e-10)


@pytest.mark.parametrize("name", ["one sequence", "causal, tall", "query weights, padded"])
def test_agrees_with_the_general_problem_at_identity_values(name):
    """A3 = I and Y = I: the same loss, gradient in X and block of X, to rounding."""
    case = BY_NAME[name]
    weights = [s.get("weight") for s in case.case.sequences]
    loss, gradient, H = 0.0, 0.0, 0.0
    for s, B, q in zip(case.case.sequences, case.targets, weights, strict=True):
        eye = torch.eye(len(s["A2"])).double()
        general = nt.AttentionProblem(
            s["A1"], s["A2"], eye, B, mask=s["allowed"], scale=case.case.scale, query_weights=q
        )
        loss = loss + nt.loss(general, case.X, eye)
        gradient = gradient + nt.gradient(general, case.X, eye)[0]
        H = H + nt.hessian(general, case.X, eye).xx
    problem, tol = case.problem(), REORDERED[torch.float64]
    require_close("loss", nt.loss(problem, case.X), loss, tol)
    require_close("gradient", nt.gradient(problem, case.X), gradient, tol)
    require_close("Hessian", nt.hessian(problem, case.X).to_dense(), H, tol)


@pytest.mark.parametrize("budget", [1, 40, 400])
@pytest.mark.parametrize("name", ["one sequence", "query weights, padded", "one query"])
def test_tiles_and_blocks_of_keys_change_nothing(monkeypatch, name, budget):
    case = BY_NAME[name]
    problem = case.problem()
    want = nt.hessian(problem, case.X).to_dense()
    operator = nt.hessian_operator(problem, case.X).to_dense()
    monkeypatch.setattr(chunks.Chunk.tiles, "__defaults__", (budget,))
    monkeypatch.setattr(maps, "TILE_ELEMENTS", budget)
    require_close("Hessian", nt.hessian(problem, case.X).to_dense(), want, 1e-13)
    require_close("products", nt.hessian_operator(problem, case.X).to_dense(), operator, 1e-13)


@pytest.mark.parametrize("name", ["one sequence", "query weights, padded", "one query"])
def test_parts_of_the_hessian_in_one_pass(name):
    case = BY_NAME[name]
    problem, X = case.problem(), case.X[None, None]
    full = maps.map_second_order(problem, X)
    half = maps.map_second_order(problem, X, torch.zeros(1).double())[2]
    for got, want in zip(maps.map_second_order_parts(problem, X), (*full, half), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("n", [1, maps.FEW_ROWS, maps.FEW_ROWS + 1])
def test_moments_of_few_and_many_rows(n):
    W, A2 = randn(0, 2, 3, n, 7), randn(1, 2, 3, 7, 4)
    upper = UpperTriangles(2, 4, W.device)
    got = maps.weighted_moments(W, A2, upper)
    want = torch.einsum("osnm,osmb,osmc->osnbc", W, A2, A2)[..., upper.b, upper.b2]
    require_close("moments", got, want, 1e-13)


def test_one_row_forms_no_outer_products_of_keys():
    """m d2^2 numbers would be 80 MB here; the pass may hold a few arrays of the keys' own size."""
    A2, B = randn(0, 1000, 100), randn(1, 1, 1000).softmax(1)
    problem = nt.AttentionProblem.from_maps(torch.ones(1, 1).double(), A2, B)
    X = randn(2, 1, 1, 1, 100)
    with LiveBytes() as live:
        maps.map_second_order(problem, X)
    assert live.peak < 8 * (5 * A2.numel() + 5 * 100**2)


def test_stack_equals_singles():
    names = ["query weights, padded", "scale, ragged, causal", "ridge", "proximity, padded"]
    cases = [BY_NAME[name] for name in names]
    problem = nt.AttentionProblem.stack([case.problem() for case in cases])
    X = torch.stack([case.X for case in cases])
    loss, gradient, H = (f(problem, X) for f in (nt.loss, nt.gradient, nt.hessian))
    for i, case in enumerate(cases):
        require_close("loss", loss[i], case.oracle[0], 1e-12)
        require_close("gradient", gradient[i], case.oracle[1], 1e-12)
        require_close("Hessian", H.to_dense()[i], case.oracle[2], 1e-12)


@TABLE
def test_predictions_are_the_maps(case):
    problem = case.problem()
    got = nt.predict(problem, case.X)
    if got.ndim == 2:
        counts = [len(B) for B in case.targets]
        got = torch.split(got, counts) if case.layout == "ragged" else [got]
    for i, (P, want) in enumerate(zip(got, case.maps(case.X), strict=True)):
        n, m = want.shape
        require_close("map", P[:n, :m], want, 1e-12)
        assert not P[n:].any()
        assert not P[:, m:].any()
        assert not P[:n, :m][~case.case.sequences[i]["allowed"]].any()
        weights = nt.attention_weights(problem, case.X, sequence=i)
        require_close("attention weights", weights, want, 1e-12)


def test_predictions_keep_small_weights():
    A1, A2, B, X = small()
    P = nt.predict(nt.AttentionProblem.from_maps(A1, A2, B), 20 * X)
    want = forward(A1, A2, torch.eye(5).double(), 20 * X, torch.eye(5).double())
    assert (P < 1e-30).any()
    torch.testing.assert_close(P, want, rtol=1e-9, atol=0)


def test_logits_of_hundreds():
    A1, A2, B, X = small(n=40, m=30)
    X = 500 * X / (A1 @ X @ A2.T).abs().max()
    problem = nt.AttentionProblem.from_maps(A1, A2, B)
    H = nt.hessian(problem, X).to_dense()
    assert all(torch.isfinite(t).all() for t in (nt.gradient(problem, X), H))
    want = torch.func.hessian(lambda x: 0.5 * ((A1 @ x @ A2.T).softmax(1) - B).square().sum())(X)
    require_close("Hessian", H, want.reshape(12, 12), 1e-10)
    assert nt.check_derivatives(problem, X).passed


def test_numpy_read_only_and_strided_arrays():
    A1, A2, B, X = small()
    arrays = [np.asfortranarray(t.numpy()) for t in (A1, A2, B)]
    arrays[1] = np.repeat(arrays[1], 2, 1)[:, ::2]
    for a in arrays:
        a.flags.writeable = False
    problem = nt.AttentionProblem.from_maps(*arrays)
    gradient = nt.gradient(problem, X.numpy())
    assert isinstance(gradient, np.ndarray)
    assert isinstance(nt.predict(problem, X.numpy()), np.ndarray)
    tensors = nt.AttentionProblem.from_maps(A1, A2, B)
    require_close("gradient", gradient, nt.gradient(tensors, X), 0.0)


def test_half_precision_and_integers_are_promoted_with_a_warning():
    A1, A2, B, _ = small()
    with pytest.warns(UserWarning, match="float16"):
        half = nt.AttentionProblem.from_maps(*(t.half() for t in (A1, A2, B)))
    assert half.like.dtype == torch.float32
    chosen = torch.nn.functional.one_hot(torch.arange(6) % 5)
    with pytest.warns(UserWarning, match="integers"):
        whole = nt.AttentionProblem.from_maps(A1, A2, chosen)
    assert whole.like.dtype == torch.float64


def test_unmatchable_targets_give_one_warning():
    A1, A2, B, _ = small()
    B = torch.full_like(B, 0.2)
    B[0] *= 2
    B[1, 0] -= 1
    B[1, 1] += 1
    with pytest.warns(UserWarning, match="no attention map") as caught:
        nt.AttentionProblem.from_maps(A1, A2, B, mask="causal")
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "1 that do not sum to 1 (off by up to 1)" in text
    assert "1 with negative entries" in text
    assert "4 with weight on pairs" in text


def test_rows_without_weight_give_no_warning():
    A1, A2, B, _ = small()
    B[2] = 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = torch.ones(6).double()
        q[2] = 0
        nt.AttentionProblem.from_maps(A1, A2, B, query_weights=q)
        nt.AttentionProblem.from_maps(A1, A2, B[:2].repeat(3, 1).float().double())


BAD = {
    "B of one row too few": (lambda A1, A2, B: (A1, A2, B[1:]), {}, "B must be 6 x 5"),
    "B of one column too few": (lambda A1, A2, B: (A1, A2, B[:, 1:]), {}, "B must be 6 x 5"),
    "NaN": (lambda A1, A2, B: (A1, A2, B * torch.nan), {}, "B must hold finite"),
    "infinite tokens": (lambda A1, A2, B: (A1, A2 / 0, B), {}, "A2 must hold finite"),
    "no keys": (lambda A1, A2, B: (A1, A2[:0], B[:, :0]), {}, "must not be empty"),
    "vectors": (lambda A1, A2, B: (A1[0], A2, B), {}, "A1 must be 2-D"),
    "several heads": (lambda *t: t, {"bias": torch.zeros(2, 6, 5).double()}, "for one head"),
    "ridge on Y": (lambda *t: t, {"regularizer": nt.Ridge(1, 1)}, r"Ridge\(y=\) must be 0"),
    "reference with Y": (
        lambda *t: t,
        {"regularizer": nt.Proximity((torch.zeros(3, 4), torch.zeros(4, 2)))},
        "must be a MapAttention",
    ),
    "reference of another shape": (
        lambda *t: t,
        {"regularizer": nt.Proximity(nt.MapAttention(torch.zeros(4, 3)))},
        "the shape of X",
    ),
    "a row without keys": (
        lambda *t: t,
        {"mask": torch.ones(6, 5, dtype=torch.bool).tril(-1)},
        "at least one allowed key",
    ),
    "scale": (lambda *t: t, {"scale": 0.0}, "scale must be"),
    "lengths of one sequence": (lambda *t: t, {"lengths": [6]}, "3-D"),
    "weights": (lambda *t: t, {"query_weights": torch.ones(5)}, "query_weights must be 6"),
    "token weights": (lambda *t: t, {"regularizer": nt.TokenWeights(torch.ones(6))}, "must be 5"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("unchecked")
def test_bad_problems(name):
    change, options, message = BAD[name]
    A1, A2, B, _ = small()
    with pytest.raises(ValueError, match=message):
        nt.AttentionProblem.from_maps(*change(A1, A2, B), **options)


@pytest.mark.usefixtures("unchecked")
def test_bad_ragged_problems():
    A1, _, B, _ = small(n=6, m=6, d1=4)
    with pytest.raises(ValueError, match="a column for every key of the longest sequence"):
        nt.AttentionProblem.from_ragged_maps(A1, B[:, :3], offsets=[0, 2, 6])
    with pytest.raises(ValueError, match="start at 0"):
        nt.AttentionProblem.from_ragged_maps(A1, B, offsets=[0, 2])
    with pytest.raises(TypeError, match="torch tensor"):
        nt.AttentionProblem.from_ragged_maps(A1, B.numpy(), offsets=[0, 6])


@pytest.mark.usefixtures("unchecked")
def test_bad_weights():
    A1, A2, B, X = small()
    problem = nt.AttentionProblem.from_maps(A1, A2, B)
    general = nt.AttentionProblem(A1, A2, A2, B)
    bilinear = nt.BilinearAttention(X, torch.zeros(4, 5).double())
    for weights, message in (
        ((X, torch.eye(5)), "Y must be left out"),
        ((X.T,), "X must be 3 x 4"),
        ((X[None],), "X must be 3 x 4"),
        ((X * torch.nan,), "X must hold finite"),
        ((bilinear,), "takes a MapAttention"),
        ((nt.MapAttention(X.T),), "widths"),
    ):
        with pytest.raises(ValueError, match=message):
            nt.loss(problem, *weights)
    with pytest.raises(ValueError, match="another layer"):
        nt.loss(general, nt.MapAttention(X))
    with pytest.raises(ValueError, match=r"must be \(X, Y\)"):
        nt.AttentionProblem(A1, A2, A2, B, regularizer=nt.Proximity(nt.MapAttention(X)))
    with pytest.raises(ValueError, match="equal widths"):
        nt.AttentionProblem.stack([problem, general])


def test_value_tokens_of_width_zero_are_no_maps():
    A1, A2, B, _ = small()
    with pytest.raises(ValueError, match="A3 must not be empty"):
        nt.AttentionProblem(A1, A2, A2[:, :0], B)


def test_layer():
    X = randn(0, 3, 4)
    layer = nt.MapAttention(X)
    assert layer.parametrisation == AttentionMap(3, 4)
    assert repr(layer) == "MapAttention(d1 3, d2 4)"
    assert torch.equal(layer.theta, X.flatten())
    assert torch.equal(layer.with_theta(2 * X.flatten()).X, 2 * X)
    assert isinstance(nt.MapAttention(X.numpy()).X, np.ndarray)
    for bad in (X[0], X[:0], X[None]):
        with pytest.raises(ValueError, match="X must have 2 axes"):
            nt.MapAttention(bad)


def test_problem_says_what_it_is():
    A1, A2, B, _ = small()
    problem = nt.AttentionProblem.from_maps(A1, A2, B)
    assert problem.of_maps
    assert problem.widths == (3, 4, 0, 0)
    assert "attention maps" in repr(problem)
    assert not nt.AttentionProblem(A1, A2, A2, B).of_maps


def test_no_identity_is_stored():
    case = make_map("padded")
    assert all(chunk.A3.numel() == 0 for chunk in case.problem().chunks)


def test_weights_of_a_layer_and_of_its_map_agree():
    A1, A2, B, X = small()
    problem = nt.AttentionProblem.from_maps(A1, A2, B)
    assert nt.loss(problem, nt.MapAttention(X)) == nt.loss(problem, X)
    gradient = nt.gradient(problem, nt.MapAttention(X))
    assert torch.equal(gradient, nt.gradient(problem, X))
    regular = problem.with_regularizer(nt.Ridge(x=2.0))
    assert nt.loss(regular, X) == pytest.approx(nt.loss(problem, X) + float(X.square().sum()))
    assert replace(nt.MapAttention(X), X=2 * X).X[0, 0] == 2 * X[0, 0]
