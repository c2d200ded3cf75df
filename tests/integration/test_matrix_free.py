"""`method="newton-cg"` on problems whose answer is known."""

import math
from itertools import pairwise

import pytest
import torch

import newtention as nt
from newtention.run import Limits


def planted(seed=0, rotary=None, biases=True, kv_heads=1, mask=None, n=12, s=6):
    """A small layer, a problem that it solves exactly, and a start nearby."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    h, d, e, p = 2, 6, 4, 5
    blocks = {
        "W_Q": randn(h, d, e),
        "W_K": randn(kv_heads, d, e),
        "W_V": randn(kv_heads, d, e),
        "W_O": randn(h, e, p),
    }
    if biases:
        blocks |= {"b_Q": randn(h, e), "b_K": randn(kv_heads, e)}
        blocks |= {"b_V": randn(kv_heads, e), "b_O": randn(p)}
    layer = nt.FactoredAttention(**blocks, scale=0.5 / e**0.5, rotary=rotary)
    x = randn(s, n, d)
    lengths = [n - i % 4 for i in range(s)]
    blank = nt.AttentionProblem(x, x, x, randn(s, n, p), lengths=lengths, mask=mask)
    B = torch.as_tensor(nt.predict(blank, layer))
    problem = nt.AttentionProblem(x, x, x, B, lengths=lengths, mask=mask)
    near = layer.with_theta(layer.theta * (1 + 0.01 * randn(layer.parametrisation.size)))
    return problem, layer, near


KINDS = {
    "plain": {"biases": False, "kv_heads": 2},
    "grouped, biases": {},
    "rotary, causal": {"rotary": nt.Rotary(100.0), "mask": "causal", "kv_heads": 2},
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("kind", "curvature"),
    [
        ("plain", "gauss-newton"),
        ("grouped, biases", "gauss-newton"),
        ("grouped, biases", "full"),
        pytest.param("rotary, causal", "gauss-newton", marks=pytest.mark.full),
    ],
)
def test_recovers_a_planted_layer(kind, curvature):
    problem, layer, near = planted(**KINDS[kind])
    solution = nt.solve(problem, start=near, options=nt.Options(curvature=curvature))
    assert solution.method == "newton-cg"
    assert solution.relative_loss < 1e-16
    assert solution.status is nt.Status.CONVERGED
    outputs = torch.as_tensor(nt.predict(problem, solution.layer))
    wanted = torch.as_tensor(nt.predict(problem, layer))
    assert float((outputs - wanted).abs().max()) < 1e-8 * float(wanted.abs().max())


def test_never_rises_and_counts_its_work():
    problem, _, near = planted(seed=3)
    ridged = problem.with_regularizer(nt.Ridge(0.01, 0.01))
    solution = nt.solve(ridged, start=near, max_iter=15)
    losses = solution.history.column("loss")
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(losses))
    assert sum(solution.history.column("inner")) > len(losses)
    assert solution.loss == pytest.approx(losses[-1], rel=1e-12)


@pytest.mark.usefixtures("unchecked")
def test_with_a_ridge_it_ends_stationary():
    problem, _, near = planted(seed=1)
    ridged = problem.with_regularizer(nt.Ridge(1.0, 1.0))
    full = nt.Options(curvature="full")
    solution = nt.solve(ridged, start=near, max_iter=100, tol=1e-7, options=full)
    assert solution.status in (nt.Status.CONVERGED, nt.Status.STALLED)
    slopes = nt.gradient(ridged, solution.layer)
    size = math.sqrt(sum(float(t.square().sum()) for t in slopes.values()))
    first = nt.gradient(ridged, near)
    assert size < 1e-6 * math.sqrt(sum(float(t.square().sum()) for t in first.values()))


@pytest.mark.usefixtures("unchecked")
def test_agrees_with_the_dense_method():
    problem, *_ = planted(seed=2)
    g = torch.Generator().manual_seed(7)
    X = torch.randn(6, 6, generator=g, dtype=torch.float64) / 6
    ridged = problem.with_regularizer(nt.Ridge(0.1, 0.1))
    dense = nt.solve(ridged, start=X, method="newton")
    again = nt.solve(ridged, start=dense, method="newton-cg")
    assert again.loss == pytest.approx(dense.loss, rel=1e-12)
    moved = dense.X + 1e-2 * torch.randn(6, 6, generator=g, dtype=torch.float64)
    back = nt.solve(ridged, start=moved, method="newton-cg", options=nt.Options(curvature="full"))
    assert back.loss == pytest.approx(dense.loss, rel=1e-9)
    assert torch.allclose(back.X, dense.X, atol=1e-4)


@pytest.mark.parametrize("freeze", [("W_V",), ("W_Q", "b_Q"), ("W_O",), ("b_O",)])
def test_frozen_blocks_keep_their_bits(freeze):
    problem, _, near = planted(seed=4)
    solution = nt.solve(problem, start=near, max_iter=3, options=nt.Options(freeze=freeze))
    for block in near.parametrisation.blocks:
        same = torch.equal(getattr(solution.layer, block.name), getattr(near, block.name))
        assert same == (block.name in freeze)
    assert solution.loss < nt.loss(problem, near)


def test_freezing_an_unknown_block_is_an_error():
    problem, _, near = planted()
    with pytest.raises(ValueError, match=r"freeze=.*W_Q.*found 'W_X'"):
        nt.solve(problem, start=near, options=nt.Options(freeze=["W_X"]))


def test_validation_returns_the_best_point():
    problem, layer, near = planted(seed=5)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, 12, 6, generator=g, dtype=torch.float64)
    blank = nt.AttentionProblem(x, x, x, torch.zeros(4, 12, 5, dtype=torch.float64))
    noise = torch.randn(4, 12, 5, generator=g, dtype=torch.float64)
    held_out = nt.AttentionProblem(x, x, x, nt.predict(blank, layer) + 0.1 * noise)
    solution = nt.solve(
        problem, start=near, validation=held_out, options=nt.Options(patience=2), tol=1e-14
    )
    seen = solution.history.column("validation")
    assert solution.validation_loss == min(seen)
    loss = nt.loss(held_out, solution.layer) / float(held_out.target_energy())
    assert loss == pytest.approx(solution.validation_loss, rel=1e-12)


def test_time_limit_ends_within_a_product(monkeypatch):
    problem, _, near = planted(seed=6)
    calls = []

    def expired(self):
        calls.append(None)
        return len(calls) > 6

    monkeypatch.setattr(Limits, "expired", expired)
    solution = nt.solve(problem, start=near, max_seconds=1e9)
    assert solution.status is nt.Status.TIME_LIMIT
    assert len(calls) <= 9  # asked again by the loops around, but no product was begun
    assert sum(solution.history.column("inner")) <= 6


def test_ranks_and_heads_shape_the_start():
    problem, layer, _ = planted(kv_heads=2, seed=8)
    solution = nt.solve(problem, start=layer, max_iter=2, options=nt.Options(ranks=2, heads=1))
    assert solution.layer.W_Q.shape == (1, 6, 2)
    assert solution.loss <= nt.loss(problem, solution.start)
    random = nt.solve(problem, max_iter=2, options=nt.Options(ranks=(2, 3), heads=2))
    assert random.layer.W_Q.shape == (2, 6, 2)
    assert random.layer.W_V.shape == (2, 6, 3)
    with pytest.raises(ValueError, match=r"rank"):
        nt.solve(problem, start=layer, options=nt.Options(ranks=7))


def test_several_starts_one_after_another():
    problem, _, near = planted(seed=9)
    solution = nt.solve(problem, start=near, n_init=2, max_iter=4)
    assert len(solution.start_losses) == 2
    assert solution.loss == min(solution.start_losses)


def test_curvature_from_some_of_the_sequences():
    problem, _, near = planted(seed=10, s=12)
    part = nt.solve(problem, start=near, options=nt.Options(curvature_share=0.5), max_iter=20)
    assert part.relative_loss < 0.1 * nt.loss(problem, near) / float(problem.target_energy())


def test_huge_logits_do_not_overflow():
    problem, layer, near = planted(seed=11)
    sharp = near.with_theta(near.theta * 8)
    solution = nt.solve(problem, start=sharp, max_iter=5)
    assert math.isfinite(solution.loss)
    assert solution.loss <= nt.loss(problem, sharp)
    assert layer.heads == 2
