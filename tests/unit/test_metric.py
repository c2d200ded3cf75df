"""Kronecker preconditioners: against moments summed token by token, and against the curvature."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import pytest
import safetensors.torch
import torch

import newtention as nt
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.penalty import penalty
from newtention.linsolve.kronecker import KroneckerInverse
from newtention.newton import metric
from newtention.newton.metric import FLOOR, Metric
from newtention.newton.reduced import Curvature
from newtention.newton.varpro import OutputMap
from newtention.weights import as_weights
from tests.cases import BY_NAME, make
from tests.checks import require_close
from tests.unit.test_layers import naive_rotation, weights

DATA = Path(__file__).parents[2] / "data"
KINDS = pytest.mark.parametrize("kind", ["attended", "inputs"])


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Kronecker inverses


@pytest.mark.parametrize("heads", [(1, 3), (3, 1), (3, 3)])
@pytest.mark.parametrize("floor", [1e-3, 0.5])
def test_kronecker_inverse(heads, floor):
    """Of the lifted product, head by head; a factor may be shared."""
    left, right = (randn(h, k, 2 * k, seed=k) for h, k in zip(heads, (4, 3), strict=True))
    left, right = left @ left.mT, right @ right.mT
    inverse = KroneckerInverse.of(left, right, floor, torch.float64)
    W = randn(3, 4, 3)
    got = inverse.apply(W)
    for h in range(3):
        A, B = left[h % heads[0]], right[h % heads[1]]
        A = A + floor * A.diagonal().mean() * torch.eye(4).double()
        B = B + floor * B.diagonal().mean() * torch.eye(3).double()
        want = torch.linalg.solve(torch.kron(A, B), W[h].flatten()).view(4, 3)
        require_close(f"head {h}", got[h], want, 1e-10)


def test_kronecker_inverse_of_singular_and_empty_factors():
    left = torch.stack([torch.zeros(3, 3), torch.diag(torch.tensor([2.0, 1.0, 0.0]))]).double()
    right = torch.stack([torch.eye(2), torch.zeros(2, 2)]).double()
    inverse = KroneckerInverse.of(left, right, 0.1, torch.float32)
    W = torch.ones(2, 3, 2)
    got = inverse.apply(W)
    assert got.dtype == torch.float32
    require_close("empty left", got[0], torch.full((3, 2), 1 / 1.1), 1e-6)
    want = 1 / torch.tensor([2.1, 1.1, 0.1])[:, None].expand(3, 2)
    require_close("empty right", got[1], want, 1e-6)


# The moments, token by token


@dataclass(frozen=True)
class Sequence:
    """Real tokens of one sequence, its allowed pairs and the weights of its queries."""

    A1: torch.Tensor
    A2: torch.Tensor
    A3: torch.Tensor
    allowed: torch.Tensor
    weight: torch.Tensor


LENGTHS, KEY_LENGTHS = (6, 7, 7, 2), (8, 8, 7, 3)
"""Two buckets, one of them with padded queries and keys."""

LAYERS = {
    "biases, groups": ({}, {}),
    "no biases": ({"biases": False, "scale": 0.3}, {"scale": 0.7}),
    "one group per head": ({"g": 4}, {"mask": "boolean"}),
    "one head": ({"h": 1, "g": 1}, {"weights": True}),
    "rotary halves": ({"rotary": nt.Rotary(100.0)}, {"mask": "causal", "weights": True}),
    "rotary neighbours": ({"rotary": nt.Rotary(50.0, "neighbours"), "biases": False}, {}),
}
"""Settings of the layer and of the problem."""


def factored(name):
    """(problem, layer, sequences) with padding, as the library and as the oracle take them."""
    of_layer, settings = LAYERS[name]
    layer = weights(**of_layer)
    g = torch.Generator().manual_seed(1)
    A1, A2, A3, B = (
        torch.randn(4, n, d, generator=g, dtype=torch.float64)
        for n, d in ((8, 5), (9, 6), (9, 3), (8, 7))
    )
    allowed = torch.ones(4, 8, 9, dtype=torch.bool)
    options = {"scale": settings.get("scale", 1.0)}
    if settings.get("mask") == "boolean":
        allowed = torch.rand(4, 8, 9, generator=g) < 0.6
        allowed[..., 0] = True
        options["mask"] = allowed
    elif settings.get("mask") == "causal":
        allowed = allowed.tril()
        options["mask"] = "causal"
    q = torch.ones(4, 8, dtype=torch.float64)
    if settings.get("weights"):
        q = torch.rand(4, 8, generator=g, dtype=torch.float64)
        q[0, 1] = 0.0
        options["query_weights"] = q
    problem = nt.AttentionProblem(
        A1, A2, A3, B, lengths=LENGTHS, key_lengths=KEY_LENGTHS, **options
    )
    assert len(problem.chunks) == 2
    sequences = [
        Sequence(A1[i, :n], A2[i, :m], A3[i, :m], allowed[i, :n, :m], q[i, :n])
        for i, (n, m) in enumerate(zip(LENGTHS, KEY_LENGTHS, strict=True))
    ]
    return problem, layer, sequences


class OtherNoise:
    """torch with another randn, for the module under test alone."""

    def __init__(self, randn):
        self.randn = randn

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def noises(monkeypatch):
    """The white residuals drawn, in order."""
    drawn = []

    def record(*args, **kwargs):
        drawn.append(torch.randn(*args, **kwargs))
        return drawn[-1]

    monkeypatch.setattr(metric, "torch", OtherNoise(record))
    return drawn


def by_sequence(problem, noises):
    """The rows of noise of every sequence, in the user's order."""
    rows = [None] * len(problem.layout.queries)
    for places, noise in zip(problem.layout.order, noises, strict=True):
        for place, i in enumerate(places):
            rows[i] = noise[0, place, : problem.layout.queries[i]]
    return rows


def gradients(w, shape, scale, s: Sequence, noise):
    """P (h, n, m), and the gradients of <F, sqrt(q) noise> in the results of all maps, by head.

    In O too: what the values' map is charged with where its tokens are attended.
    """
    group = shape.heads // shape.kv_heads
    maps = {}
    for name, tokens in (("Q", s.A1), ("K", s.A2), ("V", s.A3)):
        W = w["W_" + name]
        out = torch.einsum("nd,hde->hne", tokens, W)
        if "b_" + name in w:
            out = out + w["b_" + name][:, None]
        maps[name] = out.detach().requires_grad_()
    F, attention = 0.0, []
    for h in range(shape.heads):
        q, k, v = maps["Q"][h], maps["K"][h // group], maps["V"][h // group]
        if shape.rotary is not None:
            q, k = (naive_rotation(t, shape.rotary) for t in (q, k))
        P = (scale * q @ k.T).masked_fill(~s.allowed, -torch.inf).softmax(1)
        attention.append(P.detach())
        F = F + P @ v @ w["W_O"][h]
    loss = (F * noise * s.weight.sqrt()[:, None]).sum()
    *by_map, by_output = torch.autograd.grad(loss, [*maps.values(), F])
    dO = torch.stack([by_output @ W.T for W in w["W_O"]])
    return torch.stack(attention), dict(zip(maps, by_map, strict=True)), dO


def oracle_moments(problem, layer, sequences, kind, noise):
    """(left, right) of every map and head, summed over tokens one at a time."""
    shape = layer.parametrisation
    w = {b.name: getattr(layer, b.name) for b in shape.blocks}
    group = shape.heads // shape.kv_heads
    rows = {}  # (map, head): pairs of a token and a gradient
    for s, own in zip(sequences, noise, strict=True):
        scale = problem.scale * shape.scale
        P, by_map, dO = gradients(w, shape, scale, s, own)
        for name, tokens in (("Q", s.A1), ("K", s.A2), ("V", s.A3)):
            for h, gradient in enumerate(by_map[name]):
                if kind == "inputs" or name != "V":
                    rows.setdefault((name, h), []).extend(zip(tokens, gradient, strict=True))
        if kind == "attended":
            for h in range(shape.heads):
                pairs = zip(P[h] @ s.A3, dO[h], strict=True)
                rows.setdefault(("V", h // group), []).extend(pairs)
    result = {}
    for (name, h), pairs in rows.items():
        left = right = total = 0.0
        for x, g in pairs:
            if "b_" + name in w:
                x = torch.cat([x, torch.ones(1).double()])
            e = g.square().mean() if kind == "attended" else 1.0
            left = left + e * torch.outer(x, x)
            right = right + torch.outer(g, g)
            total = total + e
        result[name, h] = left, right / total
    return result


@pytest.mark.parametrize("name", LAYERS)
@KINDS
def test_factors_are_the_moments_of_tokens_and_gradients(name, kind, noises):
    problem, layer, sequences = factored(name)
    at = as_weights(problem, layer)
    free = torch.ones(at.layer.size).double()
    m = Metric.at(
        Linearised(problem, at.layer, at.theta), free, kind, penalty(problem, at.layer), seed=3
    )
    moments = oracle_moments(problem, layer, sequences, kind, by_sequence(problem, noises))
    blocks = {b.name: b for b in at.layer.blocks}
    v = randn(len(free))
    got = m.solve(v)
    for (map_name, h), (left, right) in moments.items():
        places = rows_of(blocks, "W_" + map_name)[h]
        if "b_" + map_name in blocks:
            bias = rows_of(blocks, "b_" + map_name)[h]
            places = torch.cat([places, bias[None]])
        inverse = KroneckerInverse.of(left[None], right[None], FLOOR, torch.float64)
        want = inverse.apply(v[places][None])[0]
        require_close(f"W_{map_name} of head {h}", got[places], want, 1e-9)
    start = at.layer.output_start
    assert torch.equal(got[start:], v[start:])


def rows_of(blocks, name):
    """Places of a block in the flat vector, in its shape."""
    b = blocks[name]
    return torch.arange(b.start, b.stop).view(b.shape)


@KINDS
def test_bilinear_factors(kind, noises):
    """The keys are no map; X sees the scaled queries, Y the attended values."""
    case = BY_NAME["three heads, padded"]
    at = as_weights(case.problem(), *case.point())
    free = torch.ones(at.layer.size).double()
    m = Metric.at(
        Linearised(at.problem, at.layer, at.theta), free, kind, penalty(at.problem, at.layer), 0
    )
    rows = {}
    noise = by_sequence(at.problem, noises)
    for s, own in zip(case.sequences, noise, strict=True):
        residual = own * s["weight"].sqrt()[:, None]
        for h in range(3):
            q = (case.scale * s["A1"] @ case.X[h]).requires_grad_()
            v = (s["A3"] @ case.Y[h]).requires_grad_()
            P = (q @ s["A2"].T).masked_fill(~s["allowed"], -torch.inf).softmax(1)
            dq, dv = torch.autograd.grad((P @ v * residual).sum(), [q, v])
            rows.setdefault(("X", h), []).append((case.scale * s["A1"], dq))
            w = (P @ s["A3"]).detach()
            pair = (w, residual) if kind == "attended" else (s["A3"], dv)
            rows.setdefault(("Y", h), []).append(pair)
    v = randn(len(free))
    got = m.solve(v)
    blocks = {b.name: b for b in at.layer.blocks}
    for (name, h), parts in rows.items():
        x, g = (torch.cat([p[i] for p in parts]) for i in (0, 1))
        e = g.square().mean(1) if kind == "attended" else torch.ones(len(g)).double()
        left, right = (x.T * e) @ x, g.T @ g / e.sum()
        places = rows_of(blocks, name)[h]
        inverse = KroneckerInverse.of(left[None], right[None], FLOOR, torch.float64)
        require_close(f"{name} {h}", got[places], inverse.apply(v[places][None])[0], 1e-9)


# Symmetric, positive definite, zero where nothing is free


def point(name):
    if name in BY_NAME:
        w = as_weights(BY_NAME[name].problem(), *BY_NAME[name].point())
    else:
        problem, layer, _ = factored(name)
        w = as_weights(problem, layer)
    return Linearised(w.problem, w.layer, w.theta)


def dense(m: Metric):
    return torch.stack([m.solve(e) for e in torch.eye(len(m.free)).to(m.free)])


def masks(layer):
    """Ways to freeze: nothing, the output map, a block, entries here and there."""
    ones = torch.ones(layer.size, dtype=torch.float64)
    output, block, entries = ones.clone(), ones.clone(), ones.clone()
    output[layer.output_start :] = 0
    block[layer.blocks[0].start : layer.blocks[0].stop] = 0
    entries[::3] = 0
    return {"nothing": ones, "output": output, "block": block, "entries": entries}


@pytest.mark.parametrize("frozen", ["nothing", "output", "block", "entries"])
@pytest.mark.parametrize("kind", ["attended", "inputs", "none"])
@pytest.mark.parametrize(
    "name",
    ["biases, groups", "rotary neighbours", "three heads, padded", "token weights, masked",
     "rank-deficient tokens", "width one", "one key"],
)  # fmt: skip
def test_symmetric_positive_definite(name, kind, frozen):
    at = point(name)
    free = masks(at.layer)[frozen]
    B = dense(Metric.at(at, free, kind, penalty(at.problem, at.layer), seed=0))
    assert torch.isfinite(B).all()
    require_close("symmetry", B, B.T, 1e-12)
    on = free > 0
    assert not B[~on].any()
    if on.any():
        values = torch.linalg.eigvalsh(B[on][:, on])
        assert values[0] > 0
    if kind == "none":
        assert torch.equal(B, torch.diag(free))


def test_frozen_maps_are_not_built():
    at = point("biases, groups")
    regularizer = penalty(at.problem, at.layer)
    for name, count in (("W_Q", 2), ("b_Q", 3), ("W_V", 2), ("W_O", 3)):
        free = torch.ones(at.layer.size).double()
        block = next(b for b in at.layer.blocks if b.name == name)
        free[block.start : block.stop] = 0
        assert len(Metric.at(at, free, "attended", regularizer, 0).inverses) == count
    nothing = Metric.at(at, torch.zeros(at.layer.size).double(), "inputs", regularizer, 0)
    assert not nothing.solve(randn(at.layer.size)).any()


def test_seeds():
    at = point("biases, groups")
    regularizer = penalty(at.problem, at.layer)
    free = torch.ones(at.layer.size).double()
    one, same, other = (dense(Metric.at(at, free, "attended", regularizer, k)) for k in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@KINDS
def test_float32(kind):
    """The factors are inverted in float64; the noise is the same."""
    case = BY_NAME["three heads, padded"]
    results = []
    for dtype in (torch.float64, torch.float32):
        w = as_weights(case.problem(dtype), *case.point(dtype))
        at = Linearised(w.problem, w.layer, w.theta)
        free = torch.ones(w.layer.size, dtype=dtype)
        results.append(dense(Metric.at(at, free, kind, penalty(w.problem, w.layer), 0)))
    assert results[1].dtype == torch.float32
    require_close("metric", results[1], results[0], 1e-4)


def test_tiles_and_kept_evaluations():
    """Kept evaluations change nothing; the sums over tiles are those over chunks."""
    at = point("biases, groups")
    kept = Linearised.at(at.problem, at.layer, at.theta, 1 << 40)
    free = torch.ones(at.layer.size).double()
    regularizer = penalty(at.problem, at.layer)
    one, other = (dense(Metric.at(p, free, "attended", regularizer, 0)) for p in (at, kept))
    assert torch.equal(one, other)


# Where the block is a Kronecker product, the inverse is exact


def spanning_noise(n, p):
    """(n p, n, p): residuals whose outer products average to the identity exactly."""
    return math.sqrt(n * p) * torch.eye(n * p, dtype=torch.float64).view(n * p, n, p)


def copies(s, count, **options):
    A1, A2, A3, B = (t.expand(count, -1, -1) for t in s)
    return nt.AttentionProblem(A1, A2, A3, B, **options)


@pytest.fixture
def exact(monkeypatch):
    """White noise whose moments are exact, on a problem of n p copies of one sequence."""
    monkeypatch.setattr(metric, "FLOOR", 1e-13)

    def use(n, p):
        noise = spanning_noise(n, p)[None]

        def fixed(shape, **options):
            assert tuple(shape) == tuple(noise.shape)
            return noise

        monkeypatch.setattr(metric, "torch", OtherNoise(fixed))

    return use


def require_block_inverse(at, names, eliminate, regularizer=None, tol=1e-6):
    """On these blocks the metric inverts the whole Gauss-Newton matrix's diagonal block."""
    regularizer = regularizer or penalty(at.problem, at.layer)
    free = torch.ones(at.layer.size).double()
    if eliminate:
        free[at.layer.output_start :] = 0
    m = Metric.at(at, free, "attended", regularizer, seed=0)
    c = Curvature(at, regularizer, "gauss-newton", torch.ones_like(free), None)
    blocks = {b.name: b for b in at.layer.blocks}
    places = torch.cat([rows_of(blocks, name).flatten() for name in names])
    eye = torch.eye(len(free)).double()[places]
    H = torch.stack([c.product(v) for v in eye])[:, places]
    B = torch.stack([m.solve(v) for v in eye])[:, places]
    require_close("B H", B @ H, torch.eye(len(places)), tol)


@pytest.mark.parametrize("eliminate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_values_of_one_head_are_exact(eliminate, bias, weighted, exact):
    """Their block is sum_j q_j w_j w_j^T (x) W_O W_O^T, w = P A3."""
    # Eight queries, for full rank with four features and the constant.
    n, p = 8, 3
    layer = weights(h=1, g=1, d1=3, d2=3, d3=4, e=2, f=2, p=p, biases=False)
    if bias:
        layer = replace(layer, b_V=randn(1, 2))
    s = (randn(n, 3), randn(6, 3, seed=1), randn(6, 4, seed=2), randn(n, p, seed=3))
    q = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.5, 1.0, 0.3, 3.0]).double()
    options = {"query_weights": q.expand(n * p, -1)} if weighted else {}
    exact(n, p)
    problem = copies(s, n * p, **options)
    w = as_weights(problem, layer)
    at = Linearised(problem, w.layer, w.theta)
    names = ["W_V", "b_V"] if bias else ["W_V"]
    require_block_inverse(at, names, eliminate)


@pytest.mark.parametrize("heads", [1, 2])
def test_values_of_the_bilinear_form_are_exact_head_by_head(heads, exact):
    n, p = 5, 3
    exact(n, p)
    case = make("bilinear", [(n, 6)], "single", widths=(3, 3, 2, p), heads=heads)
    s = case.sequences[0]
    problem = copies([s[k] for k in ("A1", "A2", "A3", "B")], n * p)
    w = as_weights(problem, *case.point())
    at = Linearised(problem, w.layer, w.theta)
    if heads == 1:
        require_block_inverse(at, ["Y"], eliminate=False)
        return
    free = torch.ones(w.layer.size).double()
    m = Metric.at(at, free, "attended", penalty(problem, w.layer), 0)
    c = Curvature(at, penalty(problem, w.layer), "gauss-newton", free, None)
    for places in rows_of({b.name: b for b in w.layer.blocks}, "Y"):
        eye = torch.eye(len(free)).double()[places.flatten()]
        H, B = (torch.stack([f(v) for v in eye])[:, places.flatten()]
                for f in (c.product, m.solve))  # fmt: skip
        require_close("B H of a head", B @ H, torch.eye(2 * p), 1e-6)


@pytest.mark.parametrize("rotary", [None, nt.Rotary(10.0)])
def test_queries_are_exact_for_tokens_of_one_outer_product(rotary, exact):
    """Width 1 and values +-1.  Keys are not: the gradients of a row's keys are correlated."""
    n, m, p = 4, 5, 3
    exact(n, p)
    layer = weights(h=1, g=1, d1=1, d2=3, d3=3, e=2, f=2, p=p, biases=False, rotary=rotary)
    tokens = (randn(n, 1).sign(), randn(m, 3, seed=1), randn(m, 3, seed=2), randn(n, p, seed=3))
    problem = copies(tokens, n * p, scale=0.7)
    w = as_weights(problem, layer)
    at = Linearised(problem, w.layer, w.theta)
    require_block_inverse(at, ["W_Q"], eliminate=False)


def test_noise_with_other_moments_is_noticed(exact, monkeypatch):
    """The comparison can fail: with a white residual of the usual kind it does."""
    exact(5, 3)
    monkeypatch.undo()
    monkeypatch.setattr(metric, "FLOOR", 1e-13)
    case = make("bilinear", [(5, 6)], "single", widths=(3, 3, 2, 3))
    s = case.sequences[0]
    problem = copies([s[k] for k in ("A1", "A2", "A3", "B")], 15)
    w = as_weights(problem, *case.point())
    with pytest.raises(AssertionError, match="B H"):
        require_block_inverse(Linearised(problem, w.layer, w.theta), ["Y"], eliminate=False)


# Regularisers


@KINDS
def test_a_strong_ridge_is_inverted(kind):
    """Far above the data's curvature, the metric is 1 / strength on every map."""
    case = BY_NAME["one sequence"]
    problem = case.problem().with_regularizer(nt.Ridge(1e8, 1e8))
    w = as_weights(problem, *case.point())
    at = Linearised(problem, w.layer, w.theta)
    free = torch.ones(w.layer.size).double()
    B = dense(Metric.at(at, free, kind, penalty(problem, w.layer), 0))
    require_close("metric", 1e8 * B, torch.eye(len(free)), 1e-2)


@KINDS
def test_regularisers_enter_map_by_map(kind):
    """On X alone: the metric of Y is as it was, that of X smaller."""
    case = BY_NAME["one sequence"]
    free = torch.ones(22).double()
    parts = []
    for regularizer in (None, nt.Ridge(x=3.0)):
        problem = case.problem().with_regularizer(regularizer)
        w = as_weights(problem, *case.point())
        at = Linearised(problem, w.layer, w.theta)
        parts.append(dense(Metric.at(at, free, kind, penalty(problem, w.layer), 0)))
    plain, ridged = parts
    assert torch.equal(plain[12:, 12:], ridged[12:, 12:])
    values = [torch.linalg.eigvalsh(t[:12, :12]) for t in parts]
    assert (values[1] < values[0]).all()
    assert values[1][-1] < 1 / 3.0


def test_the_mean_curvature_of_a_regulariser_counts():
    """Proximity around a layer: stronger where its moments are larger, by its own traces."""
    problem, layer, _ = factored("biases, groups")
    shape = layer.parametrisation
    problem = problem.with_regularizer(nt.Proximity(weights(seed=5), strength=1e9))
    w = as_weights(problem, layer)
    at = Linearised(problem, w.layer, w.theta)
    free = torch.ones(shape.size).double()
    regularizer = penalty(problem, shape)
    B = dense(Metric.at(at, free, "attended", regularizer, 0)).diagonal()
    K = regularizer.curvature(torch.eye(shape.size).double()).diagonal()
    blocks = {b.name: b for b in shape.blocks}
    for name in ("Q", "K", "V"):
        places = torch.cat([rows_of(blocks, x + name).flatten() for x in ("W_", "b_")])
        # One number for all heads of a map, estimated with one random vector.
        assert 0.2 < float(B[places].mean() * K[places].mean()) < 5.0, name


# A real problem


def real_layer(heads, width=16, e=4):
    """MiniLM's layer 3 on 8 sentences: the first features of its tokens, e of each head's."""
    file = DATA / "minilm_layer3.safetensors"
    arrays = {k: t.double() if t.is_floating_point() else t
              for k, t in safetensors.torch.load_file(file).items()}  # fmt: skip
    whole = nt.load_layer(file)
    parts = {
        **{f"W_{k}": getattr(whole, f"W_{k}")[heads, :width, :e].double() for k in "QKV"},
        **{f"b_{k}": getattr(whole, f"b_{k}")[heads, :e].double() for k in "QKV"},
        "W_O": whole.W_O[heads, :e].double(),
        "b_O": whole.b_O.double(),
    }
    layer = nt.FactoredAttention(**parts, scale=e**-0.5)
    offsets = arrays["offsets"][:9]
    stop = int(offsets[-1])
    problem = nt.AttentionProblem.from_ragged(
        arrays["hidden"][:stop, :width],
        arrays["output"][:stop],
        offsets=offsets,
        regularizer=nt.Ridge(0.01, 0.01),
    )
    return problem, layer


@pytest.mark.parametrize("heads", [[0], [2, 9]], ids=str)
def test_preconditioners_lower_the_condition_number(heads, full):
    """Of the reduced curvature: by "inputs", and more so by "attended"; medians over seeds.

    Measured: 7.4e4, 2.9e6 and 3.1e7 with head 0; 9.8e4, 5.7e5 and 1.1e7 with heads 2 and 9.  The
    numbers of single seeds differ by factors up to 1.5 and 2.5.
    """
    problem, layer = real_layer(heads)
    w = as_weights(problem, layer)
    at = Linearised.at(problem, w.layer, w.theta, 1 << 40)
    regularizer = penalty(problem, w.layer)
    free = torch.ones(w.layer.size).double()
    free[w.layer.output_start :] = 0
    for b in w.layer.blocks:
        if b.name in ("b_K", "b_V"):  # which the outputs do not depend on, b_O being solved for
            free[b.start : b.stop] = 0
    output = OutputMap.at(at, regularizer)
    c = Curvature(at, regularizer, "gauss-newton", free, output)
    on = free > 0
    eye = torch.eye(len(free)).double()[on]
    H = torch.stack([c.product(v) for v in eye])[:, on]
    condition = {}
    for kind in ("attended", "inputs", "none"):
        found = []
        for seed in range(1 if kind == "none" else 5 if full else 3):
            m = Metric.at(at, free, kind, regularizer, seed)
            L = torch.linalg.cholesky(torch.stack([m.solve(v) for v in eye])[:, on])
            values = torch.linalg.eigvalsh(L.T @ (H + H.T) @ L)
            found.append(float(values[-1] / values[0]))
        condition[kind] = median(found)
    assert 3 * condition["attended"] < condition["inputs"]
    assert 3 * condition["inputs"] < condition["none"]
