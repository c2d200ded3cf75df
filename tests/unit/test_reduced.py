"""Products with the curvature of the projected loss, against dense matrices from autograd."""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from newtention import chunks, reference
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.penalty import penalty
from newtention.newton.reduced import Curvature
from newtention.newton.varpro import OutputMap
from newtention.problem import AttentionProblem
from newtention.weights import as_weights
from tests.cases import BY_NAME, make
from tests.checks import require_close
from tests.unit import test_layers as layers
from tests.unit import test_proximity as near

KINDS = pytest.mark.parametrize("kind", ["gauss-newton", "full"])

BILINEAR = [
    "one sequence",
    "ragged self-attention",
    "forbidding bias per head, causal",
    "three heads, padded",
    "query weights, ragged",
    "rank-deficient tokens",
    "ridge, heads",
    "token weights, masked",
    "proximity, heads",
    "width one",
]
FACTORED = [
    "no biases",
    "scale",
    "one group per head",
    "rotary neighbours, causal",
    "boolean mask",
    "bias per head",
    "query weights",
    "ridge",
]
NEAR = ["biases, groups", "rotary halves"]
NAMES = [*BILINEAR, *(f"factored: {n}" for n in FACTORED), *(f"near: {n}" for n in NEAR)]
TABLE = pytest.mark.parametrize("name", NAMES)


@dataclass(frozen=True)
class Setup:
    """A problem at a point; residual: its weighted rows, penalty: a number, of the flat vector."""

    problem: AttentionProblem
    layer: object
    theta: torch.Tensor
    residual: object
    penalty: object

    @cached_property
    def gauss_newton(self):
        J = torch.func.jacfwd(self.residual)(self.theta)
        return J.T @ J + self.own

    @cached_property
    def full(self):
        def total(theta):
            return 0.5 * self.residual(theta).square().sum()

        return torch.func.jacfwd(torch.func.grad(total))(self.theta) + self.own

    @cached_property
    def own(self):
        return torch.func.hessian(lambda t: self.penalty(t) + 0 * t.square().sum())(self.theta)

    def whole(self, kind):
        return self.full if kind == "full" else self.gauss_newton

    def schur(self, kind):
        """H_tt - H_to H_oo^+ H_ot, zero on the output map."""
        H, o = self.whole(kind), self.layer.output_start
        inverse = torch.linalg.pinv(H[o:, o:], hermitian=True, rtol=1e-12)
        S = torch.zeros_like(H)
        S[:o, :o] = H[:o, :o] - H[:o, o:] @ inverse @ H[o:, :o]
        return S


SETUPS = {}


def setup(name) -> Setup:
    """Kept, because autograd's matrices take most of the time."""
    if name not in SETUPS:
        SETUPS[name] = _setup(name)
    return SETUPS[name]


def _setup(name):
    kind, _, rest = name.rpartition(": ")
    if kind == "factored":
        layer, problem, _, residual, own = layers.case(rest)
        w = as_weights(problem, layer)
        return Setup(problem, w.layer, w.theta[0], residual, own)
    if kind == "near":
        s = near.setup(rest)
        problem = near.unweighted(s)
        return Setup(problem, s.shape, s.layer.theta, s.residual, s.penalty)
    return bilinear(BY_NAME[name])


def bilinear(case):
    w = as_weights(case.problem(), *case.point())
    nx = case.X.numel()
    q = torch.cat([s.get("weight", torch.ones(len(s["B"])).double()) for s in case.sequences])
    B = torch.cat([s["B"] for s in case.sequences])

    def split(theta):
        return theta[:nx].view_as(case.X), theta[nx:].view_as(case.Y)

    def residual(theta):
        return (q.sqrt()[:, None] * (case.oracle_outputs(*split(theta)) - B)).flatten()

    def own(theta):
        return case.penalty(case.sequences, *split(theta))

    return Setup(w.problem, w.layer, reference.flat(case.X, case.Y), residual, own)


def curvature(s: Setup, kind, free=None, eliminate=True, budget=0):
    point = Linearised.at(s.problem, s.layer, s.theta[None], budget)
    regularizer = penalty(s.problem, s.layer)
    free = torch.ones_like(s.theta) if free is None else free.clone()
    output = None
    if eliminate:
        output = OutputMap.at(point, regularizer)
        free[s.layer.output_start :] = 0
    return Curvature(point, regularizer, kind, free, output)


def directions(n, count=6):
    return torch.randn(count, n, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def check(what, c: Curvature, H, tol=1e-9):
    """Products with random directions, each of which sees every entry of the matrix."""
    for v in directions(len(c.free)):
        got = c.product(v.to(c.free))
        require_close(what, got, H @ v, tol, scale=H.abs().max() * v.norm())


def dense(c: Curvature):
    return torch.stack([c.product(v) for v in torch.eye(len(c.free)).to(c.free)])


def some_free(s: Setup, block=None):
    """1 but for one block, or for about a third of all entries."""
    if block is None:
        g = torch.Generator().manual_seed(0)
        return (torch.rand(len(s.theta), generator=g) < 0.7).double()
    free = torch.ones_like(s.theta)
    found = next(b for b in s.layer.blocks if b.name == block)
    free[found.start : found.stop] = 0
    return free


@TABLE
@KINDS
def test_whole_matrix(name, kind):
    s = setup(name)
    check("product", curvature(s, kind, eliminate=False), s.whole(kind))


@TABLE
@KINDS
def test_schur_complement(name, kind):
    s = setup(name)
    check("product", curvature(s, kind), s.schur(kind))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "rank-deficient tokens"])
def test_elimination_changes_the_matrix(name):
    """What is compared is no block of the whole matrix."""
    s = setup(name)
    S = s.schur("gauss-newton")
    o = s.layer.output_start
    block = s.gauss_newton[:o, :o]
    assert (S[:o, :o] - block).abs().max() > 1e-3 * block.abs().max()


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("three heads, padded", None),
        ("factored: rotary neighbours, causal", None),
        ("factored: ridge", "W_K"),
        ("factored: ridge", "b_Q"),
        ("near: biases, groups", "W_V"),
    ],
)
@KINDS
@pytest.mark.parametrize("eliminate", [False, True])
def test_frozen_unknowns(name, block, kind, eliminate):
    """Rows and columns of what is not free are zero; the rest is as it was."""
    s = setup(name)
    free = some_free(s, block)
    H = s.schur(kind) if eliminate else s.whole(kind)
    c = curvature(s, kind, free, eliminate)
    check("product", c, free[:, None] * H * free)
    for v in directions(len(free), 2):
        assert not c.product(v)[free == 0].any()
        assert not c.product(v * (1 - free)).any()


@pytest.mark.parametrize("block", ["W_O", "b_O"])
def test_frozen_output_map(block):
    """The output map is not eliminated then; what is left of it is an unknown like others."""
    s = setup("factored: ridge")
    free = some_free(s, block)
    c = curvature(s, "gauss-newton", free, eliminate=False)
    check("product", c, free[:, None] * s.gauss_newton * free)


@pytest.mark.parametrize(
    "name",
    [
        "three heads, padded",
        "token weights, masked",
        "factored: rotary neighbours, causal",
        "factored: query weights",
        "near: biases, groups",
    ],
)
@KINDS
@pytest.mark.parametrize("eliminate", [False, True])
def test_kept_evaluations_give_the_same_bits(name, kind, eliminate, monkeypatch):
    """Over many tiles, so that tangents of one pass must meet their tiles in the next."""
    tiles = chunks.Chunk.tiles
    monkeypatch.setattr(chunks.Chunk, "tiles", lambda self, elements: tiles(self, elements, 60))
    s = setup(name)
    assert len(list(curvature(s, kind).point.evaluations())) > len(s.problem.chunks)
    fresh, kept = (curvature(s, kind, None, eliminate, budget) for budget in (0, 1 << 40))
    assert fresh.point.kept is None
    assert kept.point.kept is not None
    H = s.schur(kind) if eliminate else s.whole(kind)
    for v in directions(len(s.theta), 2):
        got = kept.product(v)
        assert torch.equal(got, fresh.product(v))
        require_close("product", got, H @ v, 1e-9, scale=H.abs().max() * v.norm())


@pytest.mark.parametrize("name", BILINEAR)
def test_projected_gauss_newton_is_semidefinite(name):
    S = dense(curvature(setup(name), "gauss-newton"))
    require_close("symmetry", S, S.T, 1e-10)
    values = torch.linalg.eigvalsh(0.5 * (S + S.T))
    assert values[0] >= -1e-10 * values[-1]


@pytest.mark.parametrize("name", ["three heads, padded", "ridge, heads", "token weights, masked"])
@KINDS
def test_float32(name, kind):
    s = bilinear(BY_NAME[name])
    case = BY_NAME[name]
    low = Setup(case.problem(torch.float32), s.layer, s.theta.float(), None, None)
    c = curvature(low, kind)
    assert c.product(low.theta).dtype == torch.float32
    check("product", c, s.schur(kind), 2e-4)


def test_one_problem_of_equal_sequences():
    """Twice the data is twice the curvature."""
    one = make("one", [(5, 6)], "ragged")
    two = make("two", [(5, 6)], "ragged")
    w = as_weights(one.problem(), *one.point())
    s = two.sequences[0]
    A1, A2, A3, B = (s[k].expand(2, -1, -1) for k in ("A1", "A2", "A3", "B"))
    double = AttentionProblem(A1, A2, A3, B)
    single = Setup(w.problem, w.layer, w.theta[0], None, None)
    both = Setup(double, w.layer, w.theta[0], None, None)
    for kind in ("gauss-newton", "full"):
        got = dense(curvature(both, kind))
        require_close(kind, got, 2 * dense(curvature(single, kind)), 1e-10)
