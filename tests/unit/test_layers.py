"""Factored layers: values, conversion to and from torch, and derivatives against autograd."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import newtention as nt
from newtention.chunks import Chunk
from newtention.derivatives.products import hessian_product
from newtention.layers import AttentionLayer


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


@pytest.mark.usefixtures("unchecked")
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
    # A budget of 40 elements is about one query row per tile, so positions must be kept.
    tiles, count = Chunk.tiles, 0

    def narrow(chunk, elements):
        nonlocal count
        for tile in tiles(chunk, elements, 40):
            count += 1
            yield tile

    monkeypatch.setattr(Chunk, "tiles", narrow)
    assert_close(hessian_product(problem, shape, theta, d), whole, 1e-13)
    assert count > 3 * len(problem.chunks)


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
        ({"W_K": torch.zeros(0, 6, 4).double()}, "not be empty; found 0 x 6 x 4"),
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
    with pytest.raises(ValueError, match=r"use hessian_operator\(problem, layer\)"):
        nt.hessian(problem, layer)
    size = layer.parametrisation.size
    assert nt.hessian_operator(problem, layer).to_dense().shape == (size, size)
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


def bilinear_problem(numpy=False, **settings):
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal((n, d)) for n, d in ((9, 3), (8, 4), (8, 2), (9, 5))]
    return nt.AttentionProblem(*(arrays if numpy else map(torch.tensor, arrays)), **settings)


def bilinear_weights(*heads, numpy=False):
    draw = np.random.default_rng(1)
    X, Y = draw.standard_normal((*heads, 3, 4)), draw.standard_normal((*heads, 2, 5))
    return (X, Y) if numpy else (torch.tensor(X), torch.tensor(Y))


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("heads", [(), (1,), (3,)])
def test_bilinear_layers_stand_for_their_weights(heads, numpy):
    problem = bilinear_problem(numpy, regularizer=nt.Ridge(0.1, 0.2))
    X, Y = bilinear_weights(*heads, numpy=numpy)
    layer = nt.BilinearAttention(X, Y)
    assert isinstance(layer, AttentionLayer)
    assert layer.heads == (heads[0] if heads else 1)
    assert nt.loss(problem, layer) == nt.loss(problem, X, Y)
    pairs = [
        (nt.predict(problem, layer), nt.predict(problem, X, Y)),
        (nt.attention_weights(problem, layer), nt.attention_weights(problem, X, Y)),
        (nt.hessian(problem, layer).to_dense(), nt.hessian(problem, X, Y).to_dense()),
        *zip(nt.gradient(problem, layer), nt.gradient(problem, X, Y), strict=True),
    ]
    for found, wanted in pairs:
        assert type(found) is type(wanted) is (np.ndarray if numpy else torch.Tensor)
        assert found.shape == wanted.shape
        assert (found == wanted).all()


def test_bilinear_layers_are_starts():
    problem = bilinear_problem(regularizer=nt.Ridge(0.1, 0.1))
    X, Y = bilinear_weights(2)
    one, other = (
        nt.solve(problem, start=s, max_iter=2) for s in (nt.BilinearAttention(X, Y), (X, Y))
    )
    assert torch.equal(one.X, other.X)
    assert torch.equal(one.start.X, X)


def pair(layer):
    return layer.X, layer.Y


def test_bilinear_flat_vector_round_trip():
    for heads in ((), (1,), (3,)):
        for numpy in (False, True):
            layer = nt.BilinearAttention(*bilinear_weights(*heads, numpy=numpy))
            assert torch.equal(
                layer.theta, torch.tensor(np.concatenate([np.ravel(w) for w in pair(layer)]))
            )
            doubled = layer.with_theta(2 * layer.theta)
            for old, new in zip(pair(layer), pair(doubled), strict=True):
                assert type(new) is type(old)
                assert new.shape == old.shape
                assert (new == 2 * old).all()
    with pytest.raises(ValueError, match="theta must have 66 entries; found 3"):
        layer.with_theta(torch.zeros(3))


def test_layers_keep_copies():
    X, Y = bilinear_weights()
    layer, kept = nt.BilinearAttention(X, Y), X.clone()
    X.zero_()
    assert torch.equal(layer.X, kept)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.X = Y


def test_layers_show_their_shapes():
    assert repr(nt.BilinearAttention(*bilinear_weights())) == (
        "BilinearAttention(1 head; d1 3, d2 4, d3 2, p 5)"
    )
    assert repr(weights(rotary=nt.Rotary())) == (
        "FactoredAttention(4 heads (2 for keys and values); d1 5, d2 6, d3 3, p 7, e 4, f 2; "
        "scale 1, rotary)"
    )


@pytest.mark.parametrize(
    ("X", "Y", "message"),
    [
        (torch.zeros(3), torch.zeros(2, 2), "X must have 2 axes, or 3 .*found 3"),
        (torch.zeros(3, 2), torch.zeros(1, 2, 2, 2), "Y must have 2 axes.*1 x 2 x 2 x 2"),
        (torch.zeros(0, 3, 2), torch.zeros(0, 2, 2), "not be empty; found 0 x 3 x 2"),
        (torch.zeros(2, 3, 2), torch.zeros(3, 2, 2), "the same heads.*2 x 3 x 2 and 3 x 2 x 2"),
        (torch.zeros(1, 3, 2), torch.zeros(2, 2), "or both no such axis"),
        (torch.full((3, 2), torch.nan), torch.zeros(2, 2), "X must hold finite"),
    ],
)
def test_bad_bilinear_layers_are_refused(X, Y, message):
    with pytest.raises(ValueError, match=message):
        nt.BilinearAttention(X, Y)


def test_bad_uses_of_bilinear_layers_are_refused():
    X, Y = bilinear_weights()
    with pytest.raises(TypeError, match="X is a torch tensor but Y is ndarray"):
        nt.BilinearAttention(X, Y.numpy())
    with pytest.raises(TypeError, match="one floating type"):
        nt.BilinearAttention(X.float(), Y)
    with pytest.warns(UserWarning, match="X is float16"):
        assert nt.BilinearAttention(X.half(), Y.float()).X.dtype == torch.float32
    layer, problem = nt.BilinearAttention(X, Y), bilinear_problem()
    with pytest.raises(ValueError, match="Y must be left out"):
        nt.loss(problem, layer, Y)
    with pytest.raises(ValueError, match=r"widths.*\(3, 4, 2, 5\); found \(4, 3, 2, 5\)"):
        nt.loss(problem, nt.BilinearAttention(X.T, Y))
    ragged = nt.AttentionProblem(
        torch.zeros(9, 3),
        torch.zeros(8, 4),
        torch.zeros(8, 2),
        torch.zeros(9, 5),
        bias=torch.zeros(2, 9, 8),
    )
    with pytest.raises(ValueError, match="for 2 head"):
        nt.loss(ragged, layer)


NAMES = {
    "W_Q": {n: (f"W_{n}", f"b_{n}", "heads") for n in "QKVO"},
    "wq": {n: (f"w{n}".lower(), f"b{n}".lower(), "flat") for n in "QKVO"},
    "to_q_W": {
        n: (f"to_{s}_W", f"to_{s}_b", "flat")
        for n, s in zip("QKVO", ("q", "k", "v", "out"), strict=True)
    },
    "q_proj": {n: (f"{n}_proj.weight".lower(), f"{n}_proj.bias".lower(), "torch") for n in "QKVO"},
    "diffusers": {
        n: (f"to_{s}.weight", f"to_{s}.bias", "torch")
        for n, s in zip("QKVO", ("q", "k", "v", "out.0"), strict=True)
    },
    "BERT": {
        n: (f"{s}.weight", f"{s}.bias", "torch")
        for n, s in zip(
            "QKVO", ("self.query", "self.key", "self.value", "output.dense"), strict=True
        )
    },
}


def as_named(layer, style):
    """The arrays of a layer under the names and in the layout of a style."""
    arrays = {}
    for role, (weight, bias, layout) in NAMES[style].items():
        W, b = getattr(layer, f"W_{role}"), getattr(layer, f"b_{role}")
        if layout != "heads":
            W = W.flatten(0, 1) if role == "O" else W.transpose(0, 1).flatten(1)
            b = None if b is None else b.reshape(-1)
        arrays[weight] = W.T.contiguous() if layout == "torch" else W
        if b is not None:
            arrays[bias] = b
    return arrays


def assert_same_layer(found, wanted):
    assert found.parametrisation == wanted.parametrisation
    for block in wanted.parametrisation.blocks:
        a, b = getattr(found, block.name), getattr(wanted, block.name)
        assert type(a) is type(b)
        assert a.dtype == b.dtype
        assert (a == b).all()


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("style", NAMES)
def test_arrays_under_usual_names(style, biases):
    layer = weights(biases=biases, scale=0.5)  # 1/sqrt(e), the default
    arrays = as_named(layer, style) | {"tokens": torch.zeros(3, 2), "offsets": torch.tensor([0])}
    heads = {} if style == "W_Q" else {"heads": 4, "kv_heads": 2}
    assert_same_layer(nt.FactoredAttention.from_arrays(arrays, **heads), layer)
    upper = {name.upper(): a for name, a in arrays.items()}
    assert_same_layer(nt.FactoredAttention.from_arrays(upper, **heads), layer)
    numpy = nt.FactoredAttention.from_arrays({n: a.numpy() for n, a in arrays.items()}, **heads)
    assert isinstance(numpy.W_Q, np.ndarray)
    assert torch.equal(numpy.theta, layer.theta)


def test_linear_modules_and_torch_attention_agree():
    """The layout against torch itself: nn.Linear, grouped keys in scaled_dot_product_attention."""
    torch.manual_seed(0)
    h, g, e, f, d1, d2, d3, p = 6, 2, 4, 3, 7, 5, 8, 9
    linear = torch.nn.ModuleDict(
        {
            "q_proj": torch.nn.Linear(d1, h * e),
            "k_proj": torch.nn.Linear(d2, g * e),
            "v_proj": torch.nn.Linear(d3, g * f),
            "o_proj": torch.nn.Linear(h * f, p),
        }
    ).double()
    A1, A2, A3 = (torch.randn(n, d).double() for n, d in ((6, d1), (8, d2), (8, d3)))
    q, k, v = (
        linear[name](A).unflatten(1, (count, -1)).transpose(0, 1)
        for name, A, count in (("q_proj", A1, h), ("k_proj", A2, g), ("v_proj", A3, g))
    )
    heads = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(h // g, 0), v.repeat_interleave(h // g, 0)
    )
    wanted = linear["o_proj"](heads.transpose(0, 1).flatten(1)).detach()
    problem = nt.AttentionProblem(A1, A2, A3, torch.zeros_like(wanted))
    layer = nt.FactoredAttention.from_arrays(linear.state_dict(), heads=h, kv_heads=g)
    assert_close(nt.predict(problem, layer), wanted, 1e-13)


def test_shared_queries_and_keys():
    draw = torch.Generator().manual_seed(0)
    W, V, O = (torch.randn(n, p, generator=draw).double() for n, p in ((5, 6), (5, 4), (4, 3)))
    b = torch.randn(6, generator=draw).double()
    plain = {"to_qk_W": W, "to_qk_b": b, "to_v_W": V, "to_out_W": O}
    torch_like = {"to_qk.weight": W.T, "to_qk.bias": b, "to_v.weight": V.T, "to_out.weight": O.T}
    settings = {"heads": 2, "scale": 0.3, "rotary": nt.Rotary(50.0)}
    with pytest.raises(ValueError, match="even head width"):
        nt.FactoredAttention.from_arrays(plain, **settings)
    settings |= {"rotary": None}
    for arrays in (plain, torch_like):
        layer = nt.FactoredAttention.from_arrays(arrays, **settings)
        assert torch.equal(layer.W_Q, layer.W_K)
        assert torch.equal(layer.W_Q, torch.stack([W[:, :3], W[:, 3:]]))
        assert torch.equal(layer.b_Q, b.view(2, 3))
        assert torch.equal(layer.b_K, b.view(2, 3))
        assert torch.equal(layer.W_V, torch.stack([V[:, :2], V[:, 2:]]))
        assert torch.equal(layer.W_O, torch.stack([O[:2], O[2:]]))
        assert layer.scale == 0.3


def test_scale_and_rotary_positions_are_taken_over():
    arrays = as_named(weights(), "W_Q")
    layer = nt.FactoredAttention.from_arrays(arrays, scale=2.0, rotary=nt.Rotary(7.0))
    assert (layer.scale, layer.rotary) == (2.0, nt.Rotary(7.0))


def zeros(**shapes):
    return {name: torch.zeros(shape).double() for name, shape in shapes.items()}


FLAT = zeros(Wq=(5, 12), Wk=(6, 6), Wv=(3, 4), Wo=(8, 7))
"""Four heads of width 3, two for keys and values, of width 2."""


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({}, {"heads": None}, r"'Wq' \(W_Q\) has no head axis; .*heads="),
        ({}, {"heads": 0}, "heads must be at least 1; found 0"),
        ({}, {"kv_heads": -1}, "kv_heads must be at least 1"),
        ({}, {"heads": 5}, "'Wq' .* columns for 5 heads; found 5 x 12"),
        ({}, {"kv_heads": None}, "'Wk' .* 12 columns, .* found 6; kv_heads=2 would fit"),
        ({}, {"kv_heads": 4}, r"'Wk' .* 12 columns, 4 heads of the queries' width 3; found 6\."),
        (zeros(Wv=(3, 5)), {}, "'Wv' .* columns for 2 heads"),
        (zeros(Wo=(9, 7)), {}, "'Wo' .* 8 inputs, 4 heads of the values' width 2; found 9"),
        (zeros(Wq=(3, 5, 4)), {}, r"heads is 4, but 'Wq' \(W_Q\) is 3 x 5 x 4"),
        (zeros(Wk=(1, 6, 3)), {}, "kv_heads is 2, but 'Wk'"),
        (zeros(Wq=(5,)), {}, "'Wq' .* must have 2 or 3 axes and not be empty; found 5"),
        (zeros(bo=(1, 7)), {}, "'bo' .* must have 1 axes"),
        (zeros(bq=(12,)), {}, "b_Q and b_K must be given together"),
        (zeros(bq=(11,), bk=(6,)), {}, "'bq' .* columns for 4 heads"),
        (zeros(bo=(6,)), {}, "b_O must be 7 .* found 6"),
        (zeros(W_V=(3, 4)), {}, "'Wv' and 'W_V' are both W_V; leave one of them out"),
        (zeros(to_qk_W=(5, 12)), {}, "'Wq' and 'to_qk_W' are both W_Q"),
        ({"Wv": None}, {}, r"no array for W_V .*v_proj\.weight.*; found 'Wk' \(6 x 6\), 'Wo'"),
        ({"q_proj.lora_A": torch.zeros(2)}, {}, r"'q_proj\.lora_A' .* not understood"),
        ({"q_norm.weight": torch.zeros(3)}, {}, "'q_norm.weight' changes the attention"),
        (
            {"Wk": None, "to_k.weight": torch.zeros(2, 3, 6).double()},
            {},
            r"'to_k\.weight' must be 2-D",
        ),
        ({"Wk": torch.full((6, 6), torch.inf).double()}, {}, "Wk must hold finite"),
    ],
)
def test_bad_arrays_are_refused(change, settings, message):
    arrays = {name: a for name, a in (FLAT | change).items() if a is not None}
    with pytest.raises(ValueError, match=message):
        nt.FactoredAttention.from_arrays(arrays, **{"heads": 4, "kv_heads": 2} | settings)


def test_no_arrays_and_many_arrays_are_listed():
    with pytest.raises(ValueError, match="found no arrays"):
        nt.FactoredAttention.from_arrays({})
    many = {f"layer{i}": torch.zeros(2) for i in range(20)}
    with pytest.raises(ValueError, match=r"'layer19' \(2\) and 8 more"):
        nt.FactoredAttention.from_arrays(many)
    with pytest.raises(TypeError, match="Wq must be a rectangular array"):
        nt.FactoredAttention.from_arrays(
            {"Wq": [[1.0], [1.0, 2.0]], "Wk": [[1.0]], "Wv": [[1.0]], "Wo": [[1.0]]}, heads=1
        )
    with pytest.raises(TypeError, match="Wq is a torch tensor but Wk is ndarray"):
        nt.FactoredAttention.from_arrays(FLAT | {"Wk": np.zeros((6, 6))}, heads=4, kv_heads=2)
