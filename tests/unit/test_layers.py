"""Factored layers: values, conversion to and from torch, and derivatives against autograd."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import newtention as nt
from newtention.derivatives.products import hessian_product


def weights(seed=0, h=4, g=2, d1=5, d2=6, d3=3, e=4, f=2, p=7, biases=True, **settings):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return 0.7 * torch.randn(*shape, generator=draw, dtype=torch.float64)

    parts = {"W_Q": normal(h, d1, e), "W_K": normal(g, d2, e), "W_V": normal(g, d3, f)}
    parts["W_O"] = normal(h, f, p)
    if biases:
        parts |= {"b_Q": normal(h, e), "b_K": normal(g, e), "b_V": normal(g, f), "b_O": normal(p)}
    return nt.FactoredAttention(**parts, **settings)


def naive_rotation(t, rotary):
    """Complex multiplication, pair by pair: (n, e) to (n, e)."""
    n, e = t.shape
    half = e // 2
    first = torch.arange(half) if rotary.pairing == "halves" else 2 * torch.arange(half)
    second = first + (half if rotary.pairing == "halves" else 1)
    powers = [rotary.base ** (-2 * i / e) for i in range(half)]
    angle = torch.arange(n)[:, None] * torch.tensor(powers, dtype=torch.float64)
    turned = torch.complex(t[:, first], t[:, second]) * torch.polar(torch.ones_like(angle), angle)
    columns = [torch.zeros(n, dtype=t.dtype)] * e
    for i in range(half):
        columns[first[i]], columns[second[i]] = turned.real[:, i], turned.imag[:, i]
    return torch.stack(columns, 1)


def naive_output(w, settings, A1, A2, A3, allowed=None, bias=None):
    """The layer's definition, one sequence, one head at a time."""
    heads, groups = len(w["W_Q"]), len(w["W_K"])
    out = 0.0
    for h in range(heads):
        g = h // (heads // groups)
        q, k, v = A1 @ w["W_Q"][h], A2 @ w["W_K"][g], A3 @ w["W_V"][g]
        if "b_Q" in w:
            q, k, v = q + w["b_Q"][h], k + w["b_K"][g], v + w["b_V"][g]
        if settings.rotary is not None:
            q, k = naive_rotation(q, settings.rotary), naive_rotation(k, settings.rotary)
        S = settings.scale * q @ k.T
        if bias is not None:
            S = S + bias[h]
        if allowed is not None:
            S = S.masked_fill(~allowed, -torch.inf)
        out = out + S.softmax(1) @ v @ w["W_O"][h]
    return out + w["b_O"] if "b_O" in w else out


CASES = {
    "biases": ({}, {}),
    "no biases": ({"biases": False}, {}),
    "scale": ({"scale": 0.3}, {"scale": 0.7}),
    "one group per head": ({"g": 4}, {}),
    "rotary halves": ({"rotary": nt.Rotary(100.0)}, {}),
    "rotary neighbours, causal": ({"rotary": nt.Rotary(50.0, "neighbours")}, {"mask": "causal"}),
    "boolean mask": ({}, {"mask": "random"}),
    "bias per head": ({}, {"bias": "random"}),
    "query weights": ({}, {"query_weights": "random"}),
    "ridge": ({}, {"regularizer": nt.Ridge(0.3, 0.2)}),
    "logits of 500": ({"scale": 200.0}, {}),
}


def case(name):
    """Layer, problem, and the total loss as a plain function of the flat vector."""
    layer_settings, problem_settings = CASES[name]
    layer = weights(**layer_settings)
    draw = torch.Generator().manual_seed(1)
    lengths, key_lengths = [6, 4, 5], [7, 3, 5]
    A1, A2, A3, B = (
        torch.randn(3, n, d, generator=draw, dtype=torch.float64)
        for n, d in ((6, 5), (7, 6), (7, 3), (6, 7))
    )
    settings = dict(problem_settings)
    if settings.get("mask") == "random":
        settings["mask"] = torch.rand(3, 6, 7, generator=draw) > 0.4
        settings["mask"][..., 0] = True
    if "bias" in settings:
        settings["bias"] = torch.randn(3, 4, 6, 7, generator=draw, dtype=torch.float64)
    if "query_weights" in settings:
        settings["query_weights"] = torch.rand(3, 6, generator=draw, dtype=torch.float64)
    problem = nt.AttentionProblem(
        A1, A2, A3, B, lengths=lengths, key_lengths=key_lengths, **settings
    )
    shape = layer.parametrisation
    logit_settings = dataclasses.replace(shape, scale=shape.scale * problem.scale)

    def outputs(theta):
        w = {b.name: theta[b.start : b.stop].reshape(b.shape) for b in shape.blocks}
        parts = []
        for i, (n, m) in enumerate(zip(lengths, key_lengths, strict=True)):
            allowed = None
            if isinstance(settings.get("mask"), str):
                allowed = torch.ones(n, m, dtype=torch.bool).tril()
            elif "mask" in settings:
                allowed = settings["mask"][i, :n, :m]
            bias = settings["bias"][i, :, :n, :m] if "bias" in settings else None
            parts.append(
                naive_output(w, logit_settings, A1[i, :n], A2[i, :m], A3[i, :m], allowed, bias)
            )
        return parts

    def residual(theta):
        q = settings.get("query_weights", torch.ones(3, 6, dtype=torch.float64))
        return torch.cat(
            [
                (q[i, :n].sqrt()[:, None] * (F - B[i, :n])).reshape(-1)
                for i, (F, n) in enumerate(zip(outputs(theta), lengths, strict=True))
            ]
        )

    def penalty(theta):
        ridge = settings.get("regularizer", nt.Ridge())
        on = {"W_Q": ridge.x, "W_K": ridge.x, "W_V": ridge.y, "W_O": ridge.y}
        return sum(
            0.5 * on.get(b.name, 0.0) * theta[b.start : b.stop].square().sum() for b in shape.blocks
        )

    return layer, problem, outputs, residual, penalty


def assert_close(found, wanted, tolerance):
    error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-300))
    assert error <= tolerance, f"relative error {error:.1e} above {tolerance:.0e}"


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_derivatives_equal_autograd(name):
    layer, problem, outputs, residual, penalty = case(name)
    theta = layer.theta

    def total(t):
        return 0.5 * residual(t).square().sum() + penalty(t)

    predicted = nt.predict(problem, layer)
    for i, F in enumerate(outputs(theta)):
        assert_close(predicted[i, : len(F)], F, 1e-12)
    assert nt.loss(problem, layer) == pytest.approx(float(total(theta)), rel=1e-12)
    gradient = nt.gradient(problem, layer)
    flat = torch.cat([gradient[b.name].reshape(-1) for b in layer.parametrisation.blocks])
    assert_close(flat, torch.func.grad(total)(theta), 1e-10)

    H = torch.func.jacfwd(torch.func.grad(total))(theta)
    assert_close(nt.hessian_operator(problem, layer).to_dense(), H, 1e-10)
    J = torch.func.jacfwd(residual)(theta)
    G = J.T @ J + torch.func.jacfwd(torch.func.grad(penalty))(theta)
    assert_close(nt.hessian_operator(problem, layer, kind="gauss-newton").to_dense(), G, 1e-10)


def test_comparison_notices_a_dropped_term():
    layer, problem, _, residual, _ = case("biases")
    J = torch.func.jacfwd(residual)(layer.theta)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(nt.hessian_operator(problem, layer).to_dense(), J.T @ J, 1e-10)


def test_bilinear_operator_equals_the_closed_hessian():
    draw = torch.Generator().manual_seed(0)
    A1, A2, B = (torch.randn(9, d, generator=draw, dtype=torch.float64) for d in (3, 4, 2))
    problem = nt.AttentionProblem(A1, A2, A2, B, regularizer=nt.Ridge(0.1, 0.2))
    X, Y = (
        torch.randn(2, 3, 4, generator=draw).double(),
        torch.randn(2, 4, 2, generator=draw).double(),
    )
    for kind in ("full", "gauss-newton"):
        H = nt.hessian(problem, X, Y, kind).to_dense()
        assert_close(nt.hessian_operator(problem, X, Y, kind).to_dense(), H, 1e-12)


def test_several_vectors_equal_one_at_a_time():
    layer, problem, *_ = case("rotary neighbours, causal")
    w = layer.theta
    V = torch.randn(len(w), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    op = nt.hessian_operator(problem, layer)
    assert_close(op @ V, torch.stack([op @ V[:, i] for i in range(3)], 1), 1e-13)
    numpy = op @ V.numpy()
    assert isinstance(numpy, np.ndarray)
    assert_close(torch.from_numpy(numpy), op @ V, 1e-15)


def test_tiles_give_the_same_product(monkeypatch):
    layer, problem, *_ = case("rotary neighbours, causal")
    shape, theta = layer.parametrisation, layer.theta[None]
    d = torch.randn(1, 1, shape.size, generator=torch.Generator().manual_seed(0)).double()
    whole = hessian_product(problem, shape, theta, d)
    monkeypatch.setattr("newtention.chunks.Chunk.tiles.__defaults__", (40,))
    # A budget of 40 elements is about one query row per tile, so positions must be kept.
    assert_close(hessian_product(problem, shape, theta, d), whole, 1e-13)


def test_scipy_finds_the_extreme_eigenvalues():
    from scipy.sparse.linalg import eigsh

    layer, problem, *_ = case("ridge")
    op = nt.hessian_operator(problem, layer)
    dense = torch.linalg.eigvalsh(op.to_dense())
    values = eigsh(op.to_scipy(), k=2, which="LA", return_eigenvectors=False)
    assert np.allclose(np.sort(values), dense[-2:].numpy(), rtol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(None, None), (5, 3)])
def test_torch_round_trip(bias, widths):
    torch.manual_seed(0)
    kdim, vdim = widths
    module = torch.nn.MultiheadAttention(
        12, 3, bias=bias, batch_first=True, kdim=kdim, vdim=vdim, dtype=torch.float64
    )
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    q, k, v = (
        torch.randn(2, n, d).double() for n, d in ((6, 12), (8, kdim or 12), (8, vdim or 12))
    )
    with torch.no_grad():
        wanted = module(q, k, v)[0]
    layer = nt.FactoredAttention.from_torch(module)
    problem = nt.AttentionProblem(q, k, v, torch.zeros_like(wanted))
    assert_close(nt.predict(problem, layer), wanted, 1e-13)
    with torch.no_grad():
        assert_close(layer.to_torch()(q, k, v)[0], wanted, 1e-15)


def test_flat_vector_round_trip():
    layer = weights(rotary=nt.Rotary())
    again = layer.with_theta(layer.theta)
    for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
        assert torch.equal(getattr(again, name), getattr(layer, name))
    assert again.rotary == layer.rotary


def test_numpy_in_numpy_out():
    layer = weights()
    parts = {b.name: getattr(layer, b.name).numpy() for b in layer.parametrisation.blocks}
    rng = np.random.default_rng(0)
    A1, A2, A3 = (rng.standard_normal((n, d)) for n, d in ((6, 5), (7, 6), (7, 3)))
    problem = nt.AttentionProblem(A1, A2, A3, np.zeros((6, 7)))
    numpy = nt.FactoredAttention(**parts)
    assert isinstance(numpy.W_Q, np.ndarray)
    assert isinstance(nt.predict(problem, numpy), np.ndarray)
    assert isinstance(nt.gradient(problem, numpy)["W_Q"], np.ndarray)


def test_rotation_depends_on_relative_positions_only():
    rotary = nt.Rotary(1000.0)
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0)).double()
    near = (rotary.rotate(q, 3) * rotary.rotate(k, 1)).sum()
    far = (rotary.rotate(q, 103) * rotary.rotate(k, 101)).sum()
    assert math.isclose(float(near), float(far), rel_tol=1e-10)
    assert_close(rotary.rotate(rotary.rotate(q, 5), 5, back=True), q, 1e-14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"W_K": torch.zeros(3, 6, 4).double()}, "W_K has 3 heads"),
        ({"W_K": torch.zeros(2, 6, 3).double()}, "W_K must be 2 x 6 x 4"),
        ({"W_O": torch.zeros(4, 3, 7).double()}, "W_O must be 4 x 2 x 7"),
        ({"b_K": None}, "b_Q and b_K"),
        ({"W_Q": torch.zeros(4, 5).double()}, "W_Q must have 3 axes"),
        ({"W_V": torch.full((2, 3, 2), torch.nan).double()}, "W_V must hold finite"),
        ({"rotary": nt.Rotary(), "W_Q": torch.zeros(4, 5, 3).double()}, "even head width"),
    ],
)
def test_bad_layers_are_refused(change, message):
    layer = weights()
    names = [b.name for b in layer.parametrisation.blocks]
    with pytest.raises(ValueError, match=message):
        nt.FactoredAttention(**{n: getattr(layer, n) for n in names} | change)


def test_bad_uses_are_refused(unchecked):
    layer, problem, *_ = case("biases")
    with pytest.raises(ValueError, match="Y must be left out"):
        nt.loss(problem, layer, torch.zeros(3, 7))
    with pytest.raises(ValueError, match="widths"):
        nt.loss(problem, weights(d1=4))
    with pytest.raises(ValueError, match="closed blocks"):
        nt.hessian(problem, layer)
    with pytest.raises(ValueError, match="vectors of length"):
        nt.hessian_operator(problem, layer) @ torch.zeros(3).double()
    A1, A2, A3, B = (torch.zeros(2, d).double() for d in (5, 6, 3, 7))
    weighted = nt.AttentionProblem(A1, A2, A3, B, regularizer=nt.TokenWeights(torch.ones(2)))
    with pytest.raises(ValueError, match="takes Ridge"):
        nt.loss(weighted, layer)
    with pytest.raises(ValueError, match="rotary positions"):
        weights(rotary=nt.Rotary()).to_torch()
    with pytest.raises(ValueError, match="base"):
        nt.Rotary(0.5)
    with pytest.raises(ValueError, match="pairing"):
        nt.Rotary(pairing="thirds")
    with pytest.raises(TypeError, match="MultiheadAttention"):
        nt.FactoredAttention.from_torch(torch.nn.Linear(2, 2))
