"""Evaluations kept or computed again, what a layer says of its maps, samples of a problem."""

from dataclasses import replace

import pytest
import torch

import newtention as nt
from newtention import chunks
from newtention.derivatives.gradient import backward, data_loss, data_loss_and_gradient
from newtention.derivatives.linearised import Linearised, evaluation_bytes
from newtention.derivatives.products import data_product
from newtention.layers import Evaluation, Heads
from newtention.weights import as_weights
from tests.cases import BY_NAME, make
from tests.checks import require_close
from tests.unit import test_layers as layers

BILINEAR = [
    "one sequence",
    "padded",
    "ragged self-attention",
    "forbidding bias per head, causal",
    "three heads, padded",
    "query weights, ragged",
    "scale",
]
FACTORED = [
    "biases",
    "no biases",
    "scale",
    "one group per head",
    "rotary halves",
    "rotary neighbours, causal",
    "boolean mask",
    "bias per head",
    "query weights",
]
TABLE = pytest.mark.parametrize("name", [*BILINEAR, *(f"factored: {n}" for n in FACTORED)])


def point(name, **options):
    """The problem of a case at its weights."""
    kind, _, rest = name.partition("factored: ")
    if kind:
        w = as_weights(BY_NAME[name].problem(), *BY_NAME[name].point())
    else:
        layer, problem, *_ = layers.case(rest)
        w = as_weights(problem, layer)
    return Linearised.at(w.problem, w.layer, w.theta, **options)


@pytest.fixture
def tiny_tiles(monkeypatch):
    tiles = chunks.Chunk.tiles
    monkeypatch.setattr(chunks.Chunk, "tiles", lambda self, elements: tiles(self, elements, 60))


# Kept evaluations


@TABLE
def test_kept_evaluations_change_nothing(name, tiny_tiles):
    """Bit for bit, pass after pass, also over many tiles."""
    fresh, kept = point(name), point(name, budget=1 << 40)
    assert fresh.kept is None
    assert kept.kept is not None
    assert len(kept.kept) == len(list(fresh.evaluations())) > len(fresh.problem.chunks)
    v = torch.randn(1, 2, fresh.layer.size, generator=torch.Generator().manual_seed(0)).double()
    for f in (
        lambda at: data_loss_and_gradient(at)[0],
        lambda at: data_loss_and_gradient(at)[1],
        lambda at: data_product(at, v, "full"),
        lambda at: data_product(at, v, "gauss-newton"),
    ):
        want = f(fresh)
        assert torch.equal(f(kept), want)
        assert torch.equal(f(kept), want)
    loss = data_loss(fresh.problem, fresh.layer, fresh.theta)
    assert torch.equal(data_loss_and_gradient(kept)[0], loss)


@TABLE
def test_budget_is_counted_in_bytes(name):
    fresh = point(name)
    size = evaluation_bytes(fresh.problem, fresh.layer)
    assert point(name, budget=size - 1).kept is None
    assert point(name, budget=size).kept is not None
    low = as_weights(fresh.problem, *_float32(name)) if name in BY_NAME else None
    if low is not None:
        assert evaluation_bytes(BY_NAME[name].problem(torch.float32), low.layer) == size // 2


def _float32(name):
    return (t.float() for t in BY_NAME[name].point())


@TABLE
def test_evaluation_elements_count_every_tensor(name):
    at = point(name)
    total = 0
    for chunk in at.problem.chunks:
        (only,) = Linearised(at.problem.with_chunks((chunk,)), at.layer, at.theta).evaluations()
        found = sum(t.numel() for t in tensors(only))
        o, s, n = chunk.weight.shape
        assert found == o * s * at.layer.evaluation_elements(n, chunk.A2.shape[2])
        total += found
    assert total * 8 == evaluation_bytes(at.problem, at.layer)


def tensors(at: Evaluation):
    """What an evaluation holds beside tokens and targets; tensors that share memory count once."""
    q, k, v = at.heads
    own = (k,) if k is not None and k.data_ptr() != at.tile.A2.data_ptr() else ()
    features = () if at.features.data_ptr() == at.O.data_ptr() else (at.features,)
    return (q, *own, v, at.P, at.O, at.C, *features)


@TABLE
def test_other_output_map(name):
    """Kept evaluations at weights that differ in the output map alone."""
    for budget in (0, 1 << 40):
        at = point(name, budget=budget)
        theta = at.theta.clone()
        change = torch.randn(theta.shape, generator=torch.Generator().manual_seed(0)).double()
        start = at.layer.output_start
        theta[:, start:] += change[:, start:]
        got = data_loss_and_gradient(at.with_output(theta))
        want = data_loss_and_gradient(Linearised(at.problem, at.layer, theta))
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


# What a layer says of its maps


@TABLE
def test_output_map(name):
    """F = features @ (the entries behind output_start), and the features do not depend on them."""
    at = point(name)
    start, k = at.layer.output_start, at.layer.output_rows
    assert at.layer.size - start == k * at.problem.widths[3]
    matrix = at.theta[0, start:].view(k, -1)
    other = at.theta.clone()
    other[:, start:] = 0
    moved = Linearised(at.problem, at.layer, other).evaluations()
    for here, there in zip(at.evaluations(), moved, strict=True):
        F = here.C + here.tile.B
        assert here.features.shape[-1] == k
        require_close("outputs", here.features @ matrix, F, 1e-13)
        assert torch.equal(here.features, there.features)
        require_close("no output", there.C + here.tile.B, torch.zeros_like(F), 1e-15, 1.0)


@TABLE
def test_projections_give_the_gradient(name):
    """tokens^T gradient and column sums, map by map; together they are the transposed map."""
    at = point(name)
    g = torch.Generator().manual_seed(0)
    blocks = {block.name: block for block in at.layer.blocks}
    for here in at.evaluations():
        q, k, v = (
            None if t is None else torch.randn(t.shape, generator=g, dtype=t.dtype)
            for t in here.heads
        )
        gradients = Heads(q, None if at.layer.fixed_keys else k, v)
        want = at.layer.qkv_transposed(here.tile, gradients)
        got = torch.zeros_like(want)
        for p in at.layer.projections(here.tile, gradients):
            W, b = blocks[p.weight], blocks.get(p.bias)
            product = torch.einsum("osnd,osgne->ogde", p.tokens, p.gradient)
            got[:, W.start : W.stop] = product.flatten(1)
            if b is not None:
                got[:, b.start : b.stop] = p.gradient.sum((1, 3)).flatten(1)
        require_close("gradient", got, want, 1e-12)


@TABLE
def test_projections_with_the_adjoint_of_the_linear_map(name):
    """<L d, g> = <d, L^T g>: the maps are those that `qkv_tangent` applies."""
    at = point(name)
    g = torch.Generator().manual_seed(1)
    d = torch.randn(at.theta.shape, generator=g, dtype=at.theta.dtype)
    for here in at.evaluations():
        tangent = at.layer.qkv_tangent(here.tile, d)
        gradients = Heads(*(None if t is None else torch.randn(t.shape, generator=g).double()
                            for t in tangent))  # fmt: skip
        left = sum((t * r).sum() for t, r in zip(tangent, gradients, strict=True) if t is not None)
        right = (d * at.layer.qkv_transposed(here.tile, gradients)).sum()
        require_close("adjoint", left, right, 1e-12)


@TABLE
def test_backward_of_the_residual_is_the_gradient(name):
    at = point(name)
    got = at.reduce(lambda here: (backward(here, at.layer, at.theta, here.qC),))[0]
    require_close("gradient", got, data_loss_and_gradient(at)[1], 1e-14)


# Samples


MANY = [(n, n + 1) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)]


def total_weight(problem):
    return sum(float(c.weight.sum()) for c in problem.chunks)


def lengths(problem):
    """Real queries of every sequence, in the chunks' order."""
    return [int(n) for c in problem.chunks for n in c.query_lengths[0]]


@pytest.mark.parametrize("layout", ["padded", "ragged"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.34, 0.5, 0.9])
def test_sample(layout, weights, share):
    case = make("sample", MANY, layout, weights=weights, mask="boolean", heads=2, bias="heads")
    problem = case.problem()
    sample = problem.sample(share)
    kept = lengths(sample)
    assert len(kept) == max(1, round(12 * share))
    assert len(set(kept)) == len(kept)
    # Evenly over the lengths: as many above the median as below.
    above, below = (sum(n > 6 for n in kept), sum(n <= 6 for n in kept))
    assert abs(above - below) <= 1
    assert total_weight(sample) == pytest.approx(total_weight(problem), rel=1e-12)
    # Its loss is that of the sequences kept, times one factor.
    rows = [case.sequences[[m for m, _ in MANY].index(n)] for n in kept]
    part = replace(case, sequences=rows)
    factor = total_weight(problem) / sum(
        float(s["weight"].sum()) if weights else len(s["B"]) for s in rows
    )
    w = as_weights(sample, *case.point())
    want = factor * part.oracle_loss(case.X, case.Y)
    require_close("loss", data_loss(sample, w.layer, w.theta), want[None], 1e-12)


def test_sample_of_everything_is_the_problem():
    problem = make("sample", MANY, "ragged").problem()
    for share in (1.0, 0.99, 2.0):
        assert problem.sample(share) is problem
    single = BY_NAME["one sequence"].problem()
    assert single.sample(0.1) is single


@pytest.mark.parametrize("share", [0.0, 1e-9, 1 / 12])
def test_at_least_one_sequence_stays(share):
    sample = make("sample", MANY, "ragged").problem().sample(share)
    assert len(lengths(sample)) == 1
    assert 5 <= lengths(sample)[0] <= 8


def test_sample_without_weight_is_the_problem():
    """Sequences whose rows all have weight 0 stand for nothing."""
    A, B = torch.ones(3, 4, 2), torch.ones(3, 4, 1)
    q = torch.zeros(3, 4)
    q[0] = 1.0
    problem = nt.AttentionProblem(A, A, A, B, query_weights=q)
    assert problem.sample(0.3) is problem


def test_sample_of_curvature_is_unbiased_over_equal_sequences():
    """Copies of one sequence: any sample has the curvature of all."""
    s = BY_NAME["one sequence"].sequences[0]
    A1, A2, A3, B = (s[k].expand(6, -1, -1) for k in ("A1", "A2", "A3", "B"))
    problem = nt.AttentionProblem(A1, A2, A3, B)
    w = as_weights(problem, *BY_NAME["one sequence"].point())
    eye = torch.eye(w.layer.size).double()[None]
    for share in (0.2, 0.5):
        sample = Linearised(problem.sample(share), w.layer, w.theta)
        want = data_product(Linearised(problem, w.layer, w.theta), eye, "gauss-newton")
        require_close("curvature", data_product(sample, eye, "gauss-newton"), want, 1e-12)
