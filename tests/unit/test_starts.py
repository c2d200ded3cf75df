"""Random starts: their size, their seeds, and what they may depend on."""

import pytest
import torch

import newtention as nt
from newtention.newton.starts import logit_spread, random_start
from tests.cases import BY_NAME, STACK
from tests.checks import require_close

NAMES = ["one sequence", "self-attention", "causal, padded", "boolean masks, ragged",
         "query weights, padded", "scale, ragged, causal", "bias per head, ragged"]  # fmt: skip


def oracle_spread(case, X):
    """Centred logits of every query with weight over its allowed keys, sequence by sequence."""
    squares, count = 0.0, 0
    for s in case.sequences:
        S = case.scale * s["A1"] @ X @ s["A2"].T
        for j in range(len(S)):
            if "weight" in s and s["weight"][j] == 0:
                continue
            row = S[j][s["allowed"][j]]
            squares += float((row - row.mean()).square().sum())
            count += len(row)
    return (squares / count) ** 0.5


@pytest.mark.parametrize("name", NAMES)
def test_spread_is_that_of_the_definition(name):
    case = BY_NAME[name]
    X = case.X if case.X.ndim == 3 else case.X[None]
    got = logit_spread(case.problem(), X[None])
    require_close("spread", got[0], [oracle_spread(case, x) for x in X], 1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1.0, 0.01, 30.0])
def test_start_has_the_scale_asked_for(name, scale):
    case = BY_NAME[name]
    X = random_start(case.problem(), 2, seed=5, scale=scale)
    for x in X[0]:
        assert oracle_spread(case, x) == pytest.approx(scale, rel=1e-12)


def test_start_does_not_depend_on_units():
    """Tokens in other units: the same logits."""
    s = BY_NAME["one sequence"].sequences[0]
    starts = [
        random_start(nt.AttentionProblem(a * s["A1"], b * s["A2"], s["A3"], s["B"]), 1, 0) * a * b
        for a, b in ((1.0, 1.0), (1e3, 1e-5))
    ]
    require_close("logits", starts[1], starts[0], 1e-12)


def test_square_starts_are_positive_semidefinite():
    X = random_start(BY_NAME["self-attention"].problem(), 2, seed=1)[0]
    require_close("symmetry", X, X.mT, 0.0)
    assert bool((torch.linalg.eigvalsh(X) > -1e-12).all())


def test_draw_depends_on_seed_and_number_only():
    problem = BY_NAME["one sequence"].problem()
    first = random_start(problem, 2, seed=3, draw=1)
    assert torch.equal(first, random_start(problem, 2, seed=3, draw=1))
    others = [random_start(problem, 2, seed=a, draw=b) for a, b in ((3, 0), (1, 3), (4, 1), (4, 0))]
    assert not any(torch.allclose(first, other) for other in others)


def test_draw_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    random_start(BY_NAME["one sequence"].problem(), 1, seed=7)
    assert torch.equal(torch.rand(3), want)


def test_problems_of_a_stack_share_the_draw():
    """Up to the scale, and equal to what each gets alone."""
    problems = [case.problem() for case in STACK]
    X = random_start(nt.AttentionProblem.stack(problems), 1, seed=2)
    directions = X / torch.linalg.vector_norm(X, dim=(2, 3), keepdim=True)
    require_close("directions", directions, directions[:1].expand_as(directions), 1e-14)
    for i, problem in enumerate(problems):
        require_close("alone", X[i], random_start(problem, 1, seed=2)[0], 1e-14)


def test_float32_draws_the_same_numbers():
    case = BY_NAME["one sequence"]
    X = random_start(case.problem(torch.float32), 1, seed=2)
    assert X.dtype == torch.float32
    require_close("start", X, random_start(case.problem(), 1, seed=2), 1e-6)


@pytest.mark.parametrize("name", ["one key"])
def test_no_spread_at_all(name):
    """One key: every X gives the same logits, and the start is finite and not zero."""
    X = random_start(BY_NAME[name].problem(), 1, seed=0)
    assert bool(torch.isfinite(X).all())
    assert bool(X.any())
