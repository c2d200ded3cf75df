"""Random cases: the trust region, buckets, tiles, invariances of the loss, derivatives."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import newtention as nt
from newtention.chunks import length_buckets
from tests import cases, checks
from tests.quadratics import GRADIENTS, KINDS, draw, solve

EXAMPLES = settings.default.max_examples
"""40 in the quick tier, 1000 in the full one."""

subproblems = st.builds(
    draw,
    st.sampled_from(KINDS),
    st.sampled_from(GRADIENTS),
    st.integers(1, 9),
    st.floats(-5, 4).map(lambda e: 10.0**e),
    st.floats(-12, 4).map(lambda e: 10.0**e),
    st.integers(0, 2**31),
)
guesses = st.one_of(st.just(0.0), st.floats(-12, 6).map(lambda e: 10.0**e))


@settings(max_examples=4 * EXAMPLES)
@given(subproblems, guesses)
def test_trust_region(problem, guess):
    solve([problem], [guess])


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=40))
def test_buckets(lengths):
    buckets = length_buckets(lengths)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(lengths)))
    shapes = []
    for bucket in buckets:
        n, m = (max(lengths[i][k] for i in bucket) for k in (0, 1))
        assert len(bucket) * n * m <= 1.15 * sum(lengths[i][0] * lengths[i][1] for i in bucket)
        shapes.append((len(bucket), n, m))
    # Stacking merges chunks of equal shapes; a problem must not meet itself there.
    assert len(set(shapes)) == len(shapes)


options = st.fixed_dictionaries(
    {
        "sizes": st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
        "layout": st.sampled_from(["single", "padded", "ragged"]),
        "heads": st.sampled_from([None, 1, 2]),
        "widths": st.tuples(*[st.integers(1, 4)] * 4),
        "mask": st.sampled_from([None, "causal", "boolean"]),
        "bias": st.sampled_from([None, "one", "heads", "one forbidding"]),
        "scale": st.sampled_from([1.0, 0.3, 2.0]),
        "weights": st.booleans(),
        "regularizer": st.sampled_from([None, "ridge", "tokens", "proximity"]),
        "size": st.sampled_from([0.0, 0.5, 30.0]),
        "seed": st.integers(0, 2**31),
    }
)


def build(drawn):
    drawn = dict(drawn)
    if drawn["layout"] == "single":
        drawn["sizes"] = drawn["sizes"][:1]
    return cases.make("random", **drawn)


@given(options)
def test_derivatives_of_random_problems(drawn):
    case = build(drawn)
    checks.check_loss(case)
    checks.check_gradient(case)
    checks.check_hessian(case, "full")
    checks.check_hessian(case, "gauss-newton")
    checks.check_product(case, "full")
    checks.check_product(case, "gauss-newton")
    checks.check_predictions(case)
    checks.check_attention_weights(case)


@given(options, st.integers(0, 2**31))
def test_invariances(drawn, seed):
    """Permuting keys, or shifting all logits of a query, changes nothing."""
    case = build(drawn | {"regularizer": None, "mask": None, "bias": None})
    g = torch.Generator().manual_seed(seed)
    X, Y = case.point()
    s = case.sequences[0]
    weight = s.get("weight")
    order = torch.randperm(len(s["A2"]), generator=g)

    def loss(A2, A3, bias=None):
        problem = nt.AttentionProblem(
            s["A1"], A2, A3, s["B"], query_weights=weight, scale=case.scale, bias=bias
        )
        return nt.loss(problem, X, Y)

    want = loss(s["A2"], s["A3"])
    size = max(want, 1.0)
    assert abs(loss(s["A2"][order], s["A3"][order]) - want) <= 1e-11 * size
    shift = torch.randn(len(s["A1"]), 1, generator=g).double().expand(-1, len(s["A2"]))
    assert abs(loss(s["A2"], s["A3"], shift) - want) <= 1e-11 * size
    # A constant added to the keys adds the same number to all logits of a query.
    assert abs(loss(s["A2"] + torch.ones(1, s["A2"].shape[1]), s["A3"]) - want) <= 1e-9 * size


@settings(max_examples=EXAMPLES // 2)
@given(options)
def test_solve_is_monotone_and_finite(drawn):
    """From any start on any problem: finite, no worse than the start, and true to its own word."""
    case = build(drawn)
    problem = case.problem()
    solution = nt.solve(problem, start=case.point(), max_iter=8)
    checks.require_finite("weights", solution.X, solution.Y)
    energy = float(problem.target_energy())
    noise = 1e-12 * energy
    assert solution.loss <= nt.loss(problem, *case.point()) * (1 + 1e-12) + noise
    assert abs(nt.loss(problem, solution.X, solution.Y) - solution.loss) <= 1e-14 * solution.loss
    losses = solution.history.column("loss")
    assert all(b <= a * (1 + 1e-12) + noise for a, b in itertools.pairwise(losses))
    assert len(solution.history) == solution.iterations + 1
