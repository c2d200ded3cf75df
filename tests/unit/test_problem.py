"""What a problem remembers of its data, and that equal problems said differently are equal."""

import numpy as np
import pytest
import torch

import newtention as nt
from newtention import zoo
from tests.cases import BY_NAME, CASES, STACK
from tests.checks import require_close

TABLE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@TABLE
def test_counts_and_energy(case):
    problem = case.problem()
    s = case.sequences
    assert problem.layout.queries == tuple(len(x["A1"]) for x in s)
    assert problem.layout.keys == tuple(len(x["A2"]) for x in s)
    assert problem.widths == (*case.X.shape[-2:], *case.Y.shape[-2:])
    ones = [torch.ones(len(x["B"])).double() for x in s]
    energy = sum(
        0.5 * (x.get("weight", one)[:, None] * x["B"].square()).sum()
        for x, one in zip(s, ones, strict=True)
    )
    require_close("energy", problem.target_energy(), energy[None], 1e-13)
    assert problem.batch == 1
    assert problem.parts == ()


@TABLE
def test_repr_names_the_sizes(case):
    text = repr(case.problem())
    assert f"{sum(len(x['A1']) for x in case.sequences)} quer" in text
    assert "float64 on cpu" in text


def test_stack_repr_and_parts():
    problems = [case.problem() for case in STACK]
    stack = nt.AttentionProblem.stack(problems)
    assert stack.batch == len(STACK)
    assert stack.parts == tuple(problems)
    assert f"stack of {len(STACK)}" in repr(stack)
    # A stack of stacks is flat.
    again = nt.AttentionProblem.stack([stack, problems[0]])
    assert again.parts == (*problems, problems[0])


def test_stack_shares_chunks_where_it_can():
    """64 equal shapes are one chunk: that is why many small problems are fast."""
    problems = [zoo.planted(3, 8, seed=i).problem for i in range(64)]
    assert len(nt.AttentionProblem.stack(problems).chunks) == 1


def test_problem_is_frozen():
    problem = CASES[0].problem()
    with pytest.raises(AttributeError):
        problem.scale = 2.0


def test_padded_equals_ragged():
    """The same sequences in both layouts, mask and weights included."""
    pairs = [
        ("padded", "ragged"),
        ("boolean mask, padded", "boolean masks, ragged"),
        ("padded self-attention", "ragged self-attention"),
    ]
    for a, b in pairs:
        first, second = BY_NAME[a], BY_NAME[b]
        require_close(
            f"{a} and {b}",
            nt.loss(first.problem(), *first.point()),
            nt.loss(second.problem(), *first.point()),
            1e-14,
        )


def test_padding_may_be_missing():
    """Without lengths every row counts; lengths for the queries alone serve square data."""
    g = torch.Generator().manual_seed(0)
    A, B = (torch.randn(3, 5, d, generator=g, dtype=torch.float64) for d in (4, 2))
    X, Y = (torch.randn(4, d, generator=g, dtype=torch.float64) for d in (4, 2))
    full = nt.AttentionProblem(A, A, A, B)
    ones = [nt.AttentionProblem(A[i], A[i], A[i], B[i]) for i in range(3)]
    require_close("all rows", nt.loss(full, X, Y), sum(nt.loss(p, X, Y) for p in ones), 1e-14)
    short = nt.AttentionProblem(A, A, A, B, lengths=[5, 3, 1])
    want = sum(
        nt.loss(nt.AttentionProblem(A[i, :n], A[i, :n], A[i, :n], B[i, :n]), X, Y)
        for i, n in enumerate((5, 3, 1))
    )
    require_close("lengths", nt.loss(short, X, Y), want, 1e-14)


def test_mask_of_all_true_is_no_mask():
    case = BY_NAME["one sequence"]
    s = case.sequences[0]
    masked = nt.AttentionProblem(
        s["A1"], s["A2"], s["A3"], s["B"], mask=np.ones((7, 9), bool), bias=np.zeros((7, 9))
    )
    require_close("loss", nt.loss(masked, *case.point()), case.oracle[0], 1e-14)


def test_causal_equals_its_boolean_mask():
    case = BY_NAME["causal, wide"]
    s = case.sequences[0]
    masked = nt.AttentionProblem(s["A1"], s["A2"], s["A3"], s["B"], mask=s["allowed"])
    got, want = (nt.hessian(p, *case.point()).to_dense() for p in (masked, case.problem()))
    require_close("Hessian", got, want, 1e-14)


def test_scale_is_folded_into_the_queries():
    case = BY_NAME["scale"]
    s = case.sequences[0]
    folded = nt.AttentionProblem(case.scale * s["A1"], s["A2"], s["A3"], s["B"])
    require_close("loss", nt.loss(folded, *case.point()), case.oracle[0], 1e-13)


def test_query_weights_are_repetitions():
    """A weight of 2 is the query given twice, a weight of 0 the query left out."""
    s = BY_NAME["one sequence"].sequences[0]
    X, Y = BY_NAME["one sequence"].point()
    q = torch.tensor([0.0, 1, 2, 1, 0, 3, 1]).double()
    rows = torch.repeat_interleave(torch.arange(7), q.long())
    weighted = nt.AttentionProblem(s["A1"], s["A2"], s["A3"], s["B"], query_weights=q)
    repeated = nt.AttentionProblem(s["A1"][rows], s["A2"], s["A3"], s["B"][rows])
    for f in (nt.loss, lambda *a: nt.gradient(*a)[0], lambda *a: nt.hessian(*a).to_dense()):
        require_close("weights", f(weighted, X, Y), f(repeated, X, Y), 1e-13)


def test_order_of_sequences_does_not_matter():
    case = BY_NAME["ragged"]
    s = case.sequences[::-1]
    q, k = (torch.tensor([0, *(len(x[a]) for x in s)]).cumsum(0) for a in ("A1", "A2"))
    A1, A2, A3, B = (torch.cat([x[a] for x in s]) for a in ("A1", "A2", "A3", "B"))
    turned = nt.AttentionProblem.from_ragged(A1, B, offsets=q, keys=A2, values=A3, key_offsets=k)
    require_close("loss", nt.loss(turned, *case.point()), case.oracle[0], 1e-13)
    # and predictions come back in the order given
    rows = torch.cat([case.oracle_outputs(case.X, case.Y).split([5, 2, 6, 6, 1])[i]
                      for i in range(4, -1, -1)])  # fmt: skip
    require_close("outputs", nt.predict(turned, *case.point()), rows, 1e-12)


@pytest.mark.parametrize(
    "specimen",
    [
        zoo.planted(4, 20, seed=1),
        zoo.planted(4, 20, noise=0.1, tokens="clustered", heads=2),
        zoo.planted(3, 30, tokens="real", scale=2.0),
        zoo.rank_deficient(5, 20, 2),
        zoo.saturated(3, 20),
        zoo.saddle(3, 20),
        zoo.one_key(3, 7),
        zoo.duplicate_tokens(3, 12),
        zoo.planted(4, 20, dtype=torch.float32),
    ],
    ids=["planted", "noise", "real", "deficient", "saturated", "saddle", "one key", "duplicate",
         "float32"],
)  # fmt: skip
def test_zoo_losses_are_those_of_their_plants(specimen):
    assert specimen.loss == nt.loss(specimen.problem, specimen.X, specimen.Y)
    assert specimen.X.dtype == specimen.problem.like.dtype


def test_zoo_planted_properties():
    from newtention.newton.starts import logit_spread

    for kind in ("gaussian", "clustered", "real"):
        made = zoo.planted(4, 30, tokens=kind, scale=1.7, heads=2)
        assert made.loss == 0.0
        spread = logit_spread(made.problem, made.X[None])
        require_close("spread", spread, torch.full((1, 2), 1.7, dtype=torch.float64), 1e-12)
        assert not torch.equal(made.X, zoo.planted(4, 30, tokens=kind, seed=1, heads=2).X)
        again = zoo.planted(4, 30, tokens=kind, scale=1.7, heads=2)
        assert torch.equal(made.X, again.X)
        assert torch.equal(made.problem.like, again.problem.like)
    noisy = zoo.planted(4, 4000, noise=0.1)
    energy = float(noisy.problem.target_energy())
    assert noisy.loss == pytest.approx(0.01 * energy / 1.01, rel=0.05)


@pytest.mark.usefixtures("unchecked")
def test_zoo_refuses():
    with pytest.raises(ValueError, match="gaussian"):
        zoo.planted(4, 8, tokens="text")
    for d, n in ((33, 8), (4, 1205)):
        with pytest.raises(ValueError, match="1204 rows"):
            zoo.planted(d, n, tokens="real")
    for call in (lambda: zoo.saddle(3, 7), lambda: zoo.saddle(1, 8)):
        with pytest.raises(ValueError, match="even"):
            call()
    with pytest.raises(ValueError, match="even"):
        zoo.duplicate_tokens(3, 7)


def test_zoo_special_properties():
    deficient = zoo.rank_deficient(6, 30, 2)
    assert int(torch.linalg.matrix_rank(deficient.problem.like[0, 0])) == 2
    logits = zoo.saturated(3, 20)
    A = logits.problem.like[0, 0]
    assert float((A @ logits.X @ A.T).abs().max()) == pytest.approx(500.0)
    tokens = zoo.duplicate_tokens(3, 12).problem.like[0, 0]
    assert torch.equal(tokens[:6], tokens[6:])


@pytest.mark.parametrize("seed", range(3))
def test_zoo_saddle_is_a_saddle(seed):
    made = zoo.saddle(3, 20, seed)
    GX, GY = nt.gradient(made.problem, made.X, made.Y)
    energy = float(made.problem.target_energy())
    assert max(GX.abs().max(), GY.abs().max()) < 1e-13 * energy
    values = torch.linalg.eigvalsh(nt.hessian(made.problem, made.X, made.Y).to_dense())
    assert values[0] < -1.0
    assert values[-1] > 1.0
    assert not nt.hessian(made.problem, made.X, made.Y, "gauss-newton").xx.abs().max() > 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_zoo_one_key_is_minimal(seed):
    made = zoo.one_key(3, 7, seed)
    g = torch.Generator().manual_seed(seed)
    for _ in range(5):
        dX, dY = (torch.randn(w.shape, generator=g).double() for w in (made.X, made.Y))
        assert nt.loss(made.problem, made.X + dX, made.Y + 0.1 * dY) >= made.loss
        assert nt.loss(made.problem, made.X + dX, made.Y) == pytest.approx(made.loss)
