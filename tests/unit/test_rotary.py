"""Rotary positions with some of the pairs kept: the same turns, derivatives, settings."""

import dataclasses
import json

import pytest
import torch

import newtention as nt
from newtention.derivatives.products import hessian_product
from tests.unit.test_layers import assert_close, naive_output, weights

PAIRINGS = ("halves", "neighbours")
KEPT = ((3, 0), (1, 3))
"""Two of the four pairs of a head of width 8, other ones in each of two key/value heads."""


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def columns(pairs, width, pairing):
    """Features of the pairs in a head of the full width, in the layout of a smaller head."""
    if pairing == "halves":
        return [*pairs, *(i + width // 2 for i in pairs)]
    return [c for i in pairs for c in (2 * i, 2 * i + 1)]


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("back", [False, True])
def test_all_pairs_kept_equal_the_plain_rotation(pairing, back):
    plain = nt.Rotary(50.0, pairing)
    kept = nt.Rotary(50.0, pairing, kept=(range(4), range(4)), width=8)
    t = randn(3, 2, 5, 8)
    assert torch.equal(kept.rotate(t, 7, back), plain.rotate(t, 7, back))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("group", [1, 3])
def test_kept_pairs_turn_as_in_the_full_head(pairing, group):
    plain, kept = nt.Rotary(50.0, pairing), nt.Rotary(50.0, pairing, KEPT, 8)
    full = randn(2, 2 * group, 5, 8)
    turned = plain.rotate(full, 3)
    small, wanted = (
        torch.stack(
            [t[:, h][..., columns(KEPT[h // group], 8, pairing)] for h in range(2 * group)], 1
        )
        for t in (full, turned)
    )
    assert torch.equal(kept.rotate(small, 3), wanted)
    assert_close(kept.rotate(kept.rotate(small, 3), 3, back=True), small, 1e-14)


def test_order_of_the_pairs_counts():
    t = randn(2, 5, 4)
    one, other = (nt.Rotary(50.0, "halves", k, 8).rotate(t) for k in (KEPT, ((0, 3), (1, 3))))
    assert not torch.allclose(one, other)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_split_and_join_are_inverse(pairing):
    rotary, t = nt.Rotary(pairing=pairing), randn(2, 3, 8)
    first, second = rotary.split(t)
    assert torch.equal(rotary.join(first, second), t)
    assert torch.equal(first[..., 1], t[..., columns([1], 8, pairing)[0]])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("pairing", "mask"), [("halves", None), ("neighbours", "causal")])
def test_outputs_and_derivatives_equal_autograd(pairing, mask):
    """Oracle: the full head, complex turns, with zeros in the pairs that are gone."""
    small = weights(rotary=nt.Rotary(50.0, pairing, KEPT, 8), scale=0.6)
    lengths = [6, 4]
    A1, A2, A3, B = (randn(2, 6, d, seed=d) for d in (5, 6, 3, 7))
    problem = nt.AttentionProblem(A1, A2, A3, B, lengths=lengths, key_lengths=lengths, mask=mask)
    shape = small.parametrisation
    plain = dataclasses.replace(shape, e=8, rotary=nt.Rotary(50.0, pairing))

    def widened(t, group):
        out = t.new_zeros(*t.shape[:-1], 8)
        for h in range(len(t)):
            out[h][..., columns(KEPT[h // group], 8, pairing)] = t[h]
        return out

    def residual(theta):
        w = {b.name: theta[b.start : b.stop].reshape(b.shape) for b in shape.blocks}
        for name in ("W_Q", "b_Q", "W_K", "b_K"):
            w[name] = widened(w[name], 2 if name.endswith("Q") else 1)
        parts = []
        for i, n in enumerate(lengths):
            allowed = None if mask is None else torch.ones(n, n, dtype=torch.bool).tril()
            F = naive_output(w, plain, A1[i, :n], A2[i, :n], A3[i, :n], allowed)
            parts.append((F - B[i, :n]).reshape(-1))
        return torch.cat(parts)

    def total(theta):
        return 0.5 * residual(theta).square().sum()

    theta = small.theta
    C = nt.predict(problem, small) - B
    C = torch.cat([C[i, :n].reshape(-1) for i, n in enumerate(lengths)])
    assert_close(C, residual(theta), 1e-12)
    gradient = nt.gradient(problem, small)
    flat = torch.cat([gradient[b.name].reshape(-1) for b in shape.blocks])
    assert_close(flat, torch.func.grad(total)(theta), 1e-10)
    H = torch.func.jacfwd(torch.func.grad(total))(theta)
    assert_close(nt.hessian_operator(problem, small).to_dense(), H, 1e-10)
    J = torch.func.jacfwd(residual)(theta)
    G = nt.hessian_operator(problem, small, kind="gauss-newton").to_dense()
    assert_close(G, J.T @ J, 1e-10)


def test_tiles_keep_the_positions(monkeypatch):
    layer = weights(rotary=nt.Rotary(50.0, "halves", KEPT, 8))
    A1, A2, A3, B = (randn(9, d, seed=d) for d in (5, 6, 3, 7))
    problem = nt.AttentionProblem(A1, A2, A3, B, mask="causal")
    d = randn(1, 1, layer.parametrisation.size)

    def product():
        return hessian_product(problem, layer.parametrisation, layer.theta[None], d)

    whole = product()
    monkeypatch.setattr("newtention.chunks.Chunk.tiles.__defaults__", (40,))
    assert_close(product(), whole, 1e-13)


def test_pairs_of_pairs_and_heads():
    rotary = nt.Rotary(50.0).keep(((0, 2, 3), (1, 2, 3)), 8)
    assert rotary == nt.Rotary(50.0, "halves", ((0, 2, 3), (1, 2, 3)), 8)
    again = rotary.keep(((2, 0), (0, 1)), 6)
    assert again.kept == ((3, 0), (1, 2))
    assert again.width == 8
    assert again.take_heads([1]).kept == ((1, 2),)
    assert nt.Rotary(50.0).take_heads([1]) == nt.Rotary(50.0)


def test_settings_are_values():
    rotary = nt.Rotary(50.0, "neighbours", [[3, 0], [1, 3]], 8)
    assert rotary.kept == KEPT
    assert hash(rotary) == hash(nt.Rotary(50.0, "neighbours", KEPT, 8))
    saved = json.loads(json.dumps(dataclasses.asdict(rotary)))
    assert nt.Rotary(**saved) == rotary


@pytest.mark.parametrize(
    ("kept", "width", "message"),
    [
        (KEPT, None, "given together"),
        (None, 8, "given together"),
        (KEPT, 7, "even number"),
        (KEPT, 0, "even number"),
        (KEPT, 8.0, "even number"),
        (KEPT, 6, "from 0 to 2; found .3, 0"),
        (((0, 0), (1, 2)), 8, "different pairs"),
        (((0, -1), (1, 2)), 8, "different pairs"),
        (((0, True), (1, 2)), 8, "different pairs"),
        (((0, 1.0), (1, 2)), 8, "different pairs"),
        (((0,), (1, 2)), 8, "equally many"),
        (((), ()), 8, "equally many"),
        ((), 8, "equally many"),
        (3, 8, "equally many"),
        ((0, 1), 8, "equally many"),
        ("ab", 8, "different pairs"),
    ],
)
def test_bad_settings_are_refused(kept, width, message, unchecked):
    with pytest.raises(ValueError, match=message):
        nt.Rotary(50.0, "halves", kept, width)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ((KEPT[0],), "2 key/value head.*found 2 for 1"),
        (((0,), (1,)), "e/2 = 2 pairs.*found 1 for 2"),
    ],
)
def test_pairs_for_another_layer_are_refused(kept, message):
    with pytest.raises(ValueError, match=message):
        weights(rotary=nt.Rotary(50.0, "halves", kept, 8))
