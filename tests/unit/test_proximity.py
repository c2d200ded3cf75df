"""Proximity around a factored layer, against its definition: means over tokens, head by head."""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import newtention as nt
from newtention.derivatives.penalty import penalty
from newtention.layers import Rotary
from tests.cases import BY_NAME
from tests.checks import require_close
from tests.unit.test_layers import naive_output, weights

STRENGTH = 0.7
LENGTHS, KEY_LENGTHS = (6, 7, 7, 2), (8, 8, 7, 3)
"""Two buckets, one of them with padded queries and keys."""

LAYERS = {
    "biases, groups": {},
    "no biases": {"biases": False},
    "one group per head": {"g": 4, "scale": 0.3},
    "one head": {"h": 1, "g": 1},
    "rotary halves": {"rotary": Rotary(100.0)},
    "rotary neighbours": {"rotary": Rotary(50.0, "neighbours"), "biases": False},
    "rotary, some pairs": {"rotary": Rotary(50.0, "halves", ((3, 0), (1, 2)), 8), "scale": 1.7},
}
"""Settings of `tests.unit.test_layers.weights`."""

TABLE = pytest.mark.parametrize("name", LAYERS)
ISOTROPIC = pytest.mark.parametrize("isotropic", [False, True], ids=["measured", "isotropic"])


@dataclass(frozen=True)
class Setup:
    """A layer to stay near, another of its shape, and the sequences of a padded problem."""

    reference: nt.FactoredAttention
    layer: nt.FactoredAttention
    problem: nt.AttentionProblem
    sequences: list[tuple[torch.Tensor, ...]]
    isotropic: bool = False

    @property
    def shape(self):
        return self.layer.parametrisation

    def blocks(self, theta):
        return {b.name: theta[b.start : b.stop].view(b.shape) for b in self.shape.blocks}

    def penalty(self, theta):
        """The oracle: a plain function of the flat vector."""
        A1, A2, A3 = (torch.cat([s[i] for s in self.sequences]) for i in range(3))
        w0 = self.blocks(self.reference.theta)
        d = self.blocks(theta - self.reference.theta)
        mean_square = isotropic_terms if self.isotropic else measured_terms
        scale = self.problem.scale * self.shape.scale
        total = sum(
            sum(mean_square(w0, d, h, scale, self.shape, (A1, A2, A3)))
            for h in range(self.shape.heads)
        )
        if "b_O" in d:
            total = total + d["b_O"].square().sum()
        return 0.5 * STRENGTH * len(A1) * total

    def residual(self, theta):
        """Outputs minus targets, all rows."""
        w = self.blocks(theta)
        settings = replace(self.shape, scale=self.shape.scale * self.problem.scale)
        parts = [naive_output(w, settings, *s[:3]) - s[3] for s in self.sequences]
        return torch.cat(parts).flatten()


def setup(name, isotropic=False, strength=STRENGTH, scale=0.6):
    reference, layer = (weights(seed=k, **LAYERS[name]) for k in (3, 4))
    g = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    # Tokens off the origin, so that their means count; padding that must not.
    A1, A2, A3, B = (0.5 + randn(4, n, d) for n, d in ((8, 5), (9, 6), (9, 3), (8, 7)))
    problem = nt.AttentionProblem(
        A1,
        A2,
        A3,
        B,
        lengths=LENGTHS,
        key_lengths=KEY_LENGTHS,
        scale=scale,
        query_weights=torch.rand(4, 8, generator=g, dtype=torch.float64),
        regularizer=nt.Proximity(reference, strength, isotropic),
    )
    rows = zip(A1, A2, A3, B, LENGTHS, KEY_LENGTHS, strict=True)
    sequences = [(a1[:n], a2[:m], a3[:m], b[:n]) for a1, a2, a3, b, n, m in rows]
    return Setup(reference, layer, problem, sequences, isotropic)


def quadratic(s: Setup):
    return penalty(s.problem, s.shape)


def dense(q, n):
    return q.curvature(torch.eye(n, dtype=torch.float64))


# The definition


def affine(w, name, h, tokens):
    """tokens W + b of one head; a tangent if w holds tangents."""
    out = tokens @ w["W_" + name][h]
    return out + w["b_" + name][h] if "b_" + name in w else out


def turns(x, shape):
    """(turns, n, e): the rows turned by every combination of quarter turns of the pairs.

    Second moments are trigonometric polynomials of degree 2 in every angle, so that four angles
    give the mean over all of them.
    """
    if shape.rotary is None:
        return x[None]
    e = shape.e
    halves = shape.rotary.pairing == "halves"
    pairs = [(i, i + e // 2) if halves else (2 * i, 2 * i + 1) for i in range(e // 2)]
    out = []
    for angles in itertools.product(range(4), repeat=e // 2):
        R = torch.zeros(e, e, dtype=x.dtype)
        for (i, j), quarter in zip(pairs, angles, strict=True):
            cos, sin = (
                round(math.cos(quarter * math.pi / 2)),
                round(math.sin(quarter * math.pi / 2)),
            )
            R[i, i] = R[j, j] = cos
            R[i, j], R[j, i] = -sin, sin
        out.append(x @ R.T)
    return torch.stack(out)


def head_output(w, h, g, tokens):
    """Mean square of the values of a head through its W_O."""
    return (affine(w, "V", g, tokens) @ w["W_O"][h]).square().sum(1).mean()


def measured_terms(w0, d, h, scale, shape, tokens):
    """Mean squares of the changes that each map of a head makes alone."""
    A1, A2, A3 = tokens
    g = h // (shape.heads // shape.kv_heads)
    output = head_output(w0, h, g, A3)
    q, k, v = affine(w0, "Q", h, A1), affine(w0, "K", g, A2), affine(w0, "V", g, A3)
    dq, dk, dv = affine(d, "Q", h, A1), affine(d, "K", g, A2), affine(d, "V", g, A3)
    by_query = torch.einsum("ne,tme->tnm", dq, turns(k, shape)).square().mean()
    by_key = torch.einsum("tne,me->tnm", turns(q, shape), dk).square().mean()
    by_value = (dv @ w0["W_O"][h]).square().sum(1).mean()
    by_output = (v @ d["W_O"][h]).square().sum(1).mean()
    return scale**2 * output * by_query, scale**2 * output * by_key, by_value, by_output


def isotropic_terms(w0, d, h, scale, shape, tokens):
    """The same with every second moment replaced by its mean eigenvalue times the identity."""
    A1, A2, A3 = tokens
    g = h // (shape.heads // shape.kv_heads)
    output = head_output(w0, h, g, A3)
    q, k, v = affine(w0, "Q", h, A1), affine(w0, "K", g, A2), affine(w0, "V", g, A3)

    def change(name, index, tokens, size):
        total = tokens.square().mean() * d["W_" + name][index].square().sum()
        if "b_" + name in d:
            total = total + d["b_" + name][index].square().sum()
        return size * total

    by_query = scale**2 * output * change("Q", h, A1, k.square().mean())
    by_key = scale**2 * output * change("K", g, A2, q.square().mean())
    mixing = w0["W_O"][h].square().sum() / shape.f
    by_value = change("V", g, A3, mixing)
    by_output = v.square().mean() * d["W_O"][h].square().sum()
    return by_query, by_key, by_value, by_output


@TABLE
@ISOTROPIC
def test_value_gradient_and_curvature_equal_the_definition(name, isotropic):
    s = setup(name, isotropic)
    q, theta = quadratic(s), s.layer.theta
    require_close("value", q.value(theta[None]), s.penalty(theta)[None], 1e-12)
    gradient = torch.func.grad(s.penalty)(theta)
    require_close("gradient", q.gradient(theta[None])[0], gradient, 1e-11)
    K = torch.func.hessian(s.penalty)(theta)
    require_close("curvature", dense(q, len(theta)), K, 1e-11)


@TABLE
@ISOTROPIC
def test_the_oracle_notices_every_block(name, isotropic):
    """Each block moved alone changes the value, so that none is compared at zero."""
    s = setup(name, isotropic)
    for block in s.shape.blocks:
        theta = s.reference.theta.clone()
        theta[block.start : block.stop] += 0.1
        assert float(s.penalty(theta)) > 1e-3, block.name


@TABLE
@ISOTROPIC
def test_centre(name, isotropic):
    s = setup(name, isotropic)
    q, theta = quadratic(s), s.reference.theta[None]
    assert torch.equal(q.centre, theta)
    assert float(q.value(theta)) == 0.0
    assert not q.gradient(theta).any()


@TABLE
@ISOTROPIC
def test_curvature_is_symmetric_and_positive_definite(name, isotropic):
    """Definite, because there are more tokens than features here."""
    s = setup(name, isotropic)
    K = dense(quadratic(s), s.shape.size)
    require_close("symmetry", K, K.T, 1e-13)
    values = torch.linalg.eigvalsh(K)
    assert values[0] > 1e-6 * values[-1]


def test_curvature_is_semidefinite_where_tokens_are_few():
    """One token: the directions it does not show are free."""
    reference = weights(biases=False)
    A1, A2, A3, B = (torch.ones(1, d).double() for d in (5, 6, 3, 7))
    problem = nt.AttentionProblem(A1, A2, A3, B, regularizer=nt.Proximity(reference))
    shape = reference.parametrisation
    values = torch.linalg.eigvalsh(dense(penalty(problem, shape), shape.size))
    assert values[0] >= -1e-12 * values[-1]
    assert int((values < 1e-12 * values[-1]).sum()) > shape.size // 2


@TABLE
@ISOTROPIC
def test_output_gram_is_the_block_of_the_output_map(name, isotropic):
    s = setup(name, isotropic)
    q, start = quadratic(s), s.shape.output_start
    K = dense(q, s.shape.size)
    eye = torch.eye(s.shape.p, dtype=torch.float64)
    require_close("block", torch.kron(q.output_gram[0], eye), K[start:, start:], 1e-12)
    assert not K[:start, start:].any()


@TABLE
def test_isotropic_keeps_the_traces(name):
    """Of every map, bias and head: the same strength on average."""
    s = setup(name)
    plain, isotropic = (quadratic(setup(name, flag)) for flag in (False, True))
    diagonals = [dense(q, s.shape.size).diagonal() for q in (plain, isotropic)]
    for block in s.shape.blocks:
        sums = [t[block.start : block.stop].view(block.shape[0], -1).sum(1) for t in diagonals]
        require_close(block.name, sums[1], sums[0], 1e-12)
    # and is another matrix
    assert (diagonals[0] - diagonals[1]).abs().max() > 0.01 * diagonals[0].max()


@pytest.mark.parametrize("name", ["biases, groups", "rotary neighbours"])
@ISOTROPIC
def test_loss_and_its_derivatives_hold_the_penalty(name, isotropic):
    s = setup(name, isotropic)
    s = replace(s, problem=unweighted(s))

    def total(theta):
        return 0.5 * s.residual(theta).square().sum() + s.penalty(theta)

    theta = s.layer.theta
    require_close("loss", nt.loss(s.problem, s.layer), total(theta), 1e-12)
    gradient = nt.gradient(s.problem, s.layer)
    flat = torch.cat([gradient[b.name].flatten() for b in s.shape.blocks])
    require_close("gradient", flat, torch.func.grad(total)(theta), 1e-11)
    free = s.problem.with_regularizer(None)
    V = torch.randn(len(theta), 3, generator=torch.Generator().manual_seed(0)).double()
    HV = [nt.hessian_operator(p, s.layer) @ V for p in (s.problem, free)]
    KV = torch.func.hessian(s.penalty)(theta) @ V
    require_close("Hessian", HV[0] - HV[1], KV, 1e-10, scale=HV[0].abs().max())


def unweighted(s):
    A1, A2, A3, B = (torch.cat([t[i] for t in s.sequences]) for i in range(4))
    offsets, key_offsets = (np.cumsum([0, *n]) for n in (LENGTHS, KEY_LENGTHS))
    return nt.AttentionProblem.from_ragged(
        A1,
        B,
        offsets=offsets,
        keys=A2,
        values=A3,
        key_offsets=key_offsets,
        scale=s.problem.scale,
        regularizer=s.problem.regularizer,
    )


@ISOTROPIC
def test_masks_weights_and_layout_are_no_part_of_it(isotropic):
    s = setup("biases, groups", isotropic)
    theta = s.layer.theta[None]
    other = penalty(unweighted(s), s.shape)
    require_close("ragged", other.value(theta), quadratic(s).value(theta), 1e-13)
    require_close("gram", other.output_gram, quadratic(s).output_gram, 1e-13)


def test_strength_is_linear():
    one, three = (quadratic(setup("biases, groups", strength=x)) for x in (1.0, 3.0))
    theta = setup("biases, groups").layer.theta[None]
    require_close("value", three.value(theta), 3 * one.value(theta), 1e-14)
    require_close("gram", three.output_gram, 3 * one.output_gram, 1e-14)
    assert float(quadratic(setup("biases, groups", strength=0.0)).value(theta)) == 0.0


def test_float32_and_numpy_references():
    """The reference is converted to the problem's dtype; its kind of array does not matter."""
    s = setup("biases, groups")
    parts = {b.name: getattr(s.reference, b.name).numpy() for b in s.shape.blocks}
    numpy = nt.FactoredAttention(**parts)
    theta = s.layer.theta[None]
    want = quadratic(s).value(theta)
    same = s.problem.with_regularizer(nt.Proximity(numpy, STRENGTH))
    require_close("NumPy", penalty(same, s.shape).value(theta), want, 1e-14)
    A1, A2, A3, B = (torch.cat([t[i] for t in s.sequences]).float() for i in range(4))
    low = nt.AttentionProblem(A1, A2, A3, B, scale=0.6)
    low = low.with_regularizer(nt.Proximity(s.reference, STRENGTH))
    q = penalty(low, s.shape)
    assert q.output_gram.dtype == torch.float32
    require_close("float32", q.value(theta.float()), want, 1e-5)


# Errors


@pytest.mark.parametrize(
    "change",
    [
        {"h": 2},
        {"g": 4},
        {"e": 6},
        {"f": 3},
        {"biases": False},
        {"scale": 0.9},
        {"rotary": Rotary(100.0)},
    ],
    ids=str,
)
def test_another_shape_is_refused(change):
    s = setup("biases, groups")
    with pytest.raises(ValueError, match=r"Proximity\(reference=\).*shape.*FactoredAttention"):
        nt.loss(s.problem, weights(**change))


def test_other_widths_are_refused():
    s = setup("biases, groups")
    problem = s.problem.with_regularizer(nt.Proximity(weights(d1=4)))
    with pytest.raises(ValueError, match=r"Proximity\(reference=\)"):
        nt.loss(problem, s.layer)


def test_weights_of_another_kind_are_refused():
    s = setup("biases, groups")
    g = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(4, *k, generator=g, dtype=torch.float64) for k in ((5, 6), (3, 7)))
    with pytest.raises(ValueError, match="factored layers only"):
        nt.loss(s.problem, X, Y)
    pair = s.problem.with_regularizer(nt.Proximity((X, Y)))
    with pytest.raises(ValueError, match=r"takes Ridge.*found Proximity"):
        nt.loss(pair, s.layer)
    tokens = BY_NAME["token weights"].problem()
    with pytest.raises(ValueError, match=r"takes Ridge.*found TokenWeights"):
        nt.loss(tokens, weights(d1=3, d2=4, d3=2, p=5))


def test_a_stack_is_refused():
    """Its problems keep no layer to stay near."""
    s = setup("biases, groups")
    free = s.problem.with_regularizer(None)
    with pytest.raises(ValueError, match=r"Proximity.*one problem"):
        nt.AttentionProblem.stack([free, s.problem])
