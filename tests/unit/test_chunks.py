"""Chunks, tiles, buckets and reduce."""

import itertools

import pytest
import torch

from newtention import AttentionProblem
from newtention.chunks import length_buckets, reduce
from tests.cases import BY_NAME, STACK
from tests.checks import require_close


def chunk_of(name):
    return max(BY_NAME[name].problem().chunks, key=lambda c: c.weight.numel())


@pytest.mark.parametrize("budget", [1, 7, 20, 10**9])
@pytest.mark.parametrize("name", ["padded", "causal, padded", "boolean mask, padded"])
def test_tiles_cover_every_row_once(name, budget):
    chunk = chunk_of(name)
    tiles = list(chunk.tiles(4, budget))
    rows = torch.cat([t.B.flatten(0, 2) for t in tiles])
    want = chunk.B.flatten(0, 2)
    assert len(rows) == len(want)
    require_close("rows", rows.sort(0).values, want.sort(0).values, 0.0)
    if budget == 10**9:
        assert tiles == [chunk]
    for tile in tiles:
        assert tile.weight.numel() * 4 <= max(budget, 4)


@pytest.mark.parametrize("name", ["causal, tall", "boolean mask, padded", "forbidding bias"])
def test_tiles_keep_their_masks(name):
    """The rule of a tile is the rows of the whole rule."""
    chunk = chunk_of(name)
    o, s, n = chunk.weight.shape
    m = chunk.A2.shape[2]
    whole = chunk.allowed.expand(o, s, n, m)
    parts = [t.allowed.expand(*t.weight.shape, m) for t in chunk.tiles(1, 3)]
    got = torch.cat([part.flatten(0, 2) for part in parts])
    assert torch.equal(got, whole.flatten(0, 2))


def test_tiles_share_what_the_chunk_shares():
    """Self-attention stays self-attention: the closed forms save work by it."""
    chunk = BY_NAME["self-attention"].problem().chunks[0]
    assert chunk.A1 is chunk.A2
    assert chunk.A3 is chunk.A2
    # Rows of queries are a part of the keys, so only values and keys can stay one.
    assert all(t.A3 is t.A2 for t in chunk.tiles(1, 3))


def test_reduce_sums_by_owner():
    problem = AttentionProblem.stack([case.problem() for case in STACK])
    counts = reduce(problem.chunks, problem.batch, lambda c: (c.query_count(),), 10**9)[0]
    got = reduce(problem.chunks, problem.batch, lambda c: (c.query_count(), c.key_count()))
    want = [[sum(len(s[a]) for s in case.sequences) for case in STACK] for a in ("A1", "A2")]
    require_close("queries", got[0], torch.tensor(want[0]), 0.0)
    require_close("keys", got[1], torch.tensor(want[1]), 0.0)
    # One tile per row: every owner is counted once for each of its tiles.
    assert bool((counts >= got[0]).all())


def test_owners_are_sorted_and_unique():
    """`Chunk.of` and `reduce` take a chunk of as many owners as problems to hold all, in order."""
    problem = AttentionProblem.stack([case.problem() for case in STACK])
    for chunk in problem.chunks:
        owner = chunk.owner.tolist()
        assert owner == sorted(set(owner))


@pytest.mark.parametrize("index", [[0], [6, 0], [2, 2, 1], [4, 0, 4, 3]])
def test_take_selects_problems(index):
    from newtention.derivatives.gradient import loss_and_gradient
    from newtention.layers import Bilinear

    problem = AttentionProblem.stack([case.problem() for case in STACK])
    taken = problem.take(torch.tensor(index))
    X, Y = (torch.stack([getattr(STACK[i], w) for i in index])[:, None] for w in "XY")
    layer = Bilinear(1, *taken.widths)
    loss, _ = loss_and_gradient(taken, layer, layer.pack(X, Y))
    require_close("loss", loss, torch.stack([STACK[i].oracle[0] for i in index]), 1e-10)
    for chunk in taken.chunks:
        owner = chunk.owner.tolist()
        assert owner == sorted(set(owner))


def test_buckets_by_hand():
    assert length_buckets([(4, 4), (4, 4)]) == [[0, 1]]
    # 10 x 10 beside 1 x 1 would pad 99 pairs.
    assert length_buckets([(1, 1), (10, 10)]) == [[1], [0]]
    assert length_buckets([(10, 10), (10, 9)]) == [[0, 1]]
    assert length_buckets([(10, 10), (10, 7)]) == [[0], [1]]


def test_real_lengths_need_few_buckets():
    from newtention.zoo import packaged_head

    _, _, offsets = packaged_head()
    lengths = [(b - a, b - a) for a, b in itertools.pairwise(offsets)]
    assert len(length_buckets(lengths)) < len(lengths) / 3
