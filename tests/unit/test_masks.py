"""Mask rules against explicit arrays."""

import pytest
import torch

from newtention.masks import Mask

CPU = torch.device("cpu")


def test_no_rule_is_none():
    assert Mask().allowed(3, 4, CPU) is None


@pytest.mark.parametrize(("n", "m"), [(5, 5), (3, 6), (6, 3)])
def test_causal_is_lower_triangular(n, m):
    got = Mask(causal=True).allowed(n, m, CPU)[0, 0]
    assert torch.equal(got, torch.ones(n, m, dtype=torch.bool).tril())


def test_causal_agrees_with_torch():
    """True where `scaled_dot_product_attention` attends with is_causal=True."""
    n, m = 4, 6
    values = torch.eye(m)[None]
    P = torch.nn.functional.scaled_dot_product_attention(
        torch.zeros(1, n, 2), torch.zeros(1, m, 2), values, is_causal=True
    )[0]
    assert torch.equal(Mask(causal=True).allowed(n, m, CPU)[0, 0], P > 0)


def test_key_lengths():
    got = Mask(key_lengths=torch.tensor([[1, 3], [2, 0]])).allowed(2, 3, CPU)
    assert got.shape == (2, 2, 1, 3)
    assert got[0, 1].all()
    assert got[1, 0, 0].tolist() == [True, True, False]
    assert not got[1, 1].any()


def test_rules_combine():
    g = torch.Generator().manual_seed(0)
    explicit = torch.rand(2, 3, 4, 5, generator=g) < 0.5
    lengths = torch.tensor([[5, 2, 3], [1, 4, 5]])
    got = Mask(True, lengths, explicit).allowed(4, 5, CPU)
    real = torch.arange(5) < lengths[..., None, None]
    assert torch.equal(got, explicit & real & torch.ones(4, 5, dtype=torch.bool).tril())


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 4), (3, 4)])
def test_selections_are_selections_of_the_whole(start, stop):
    g = torch.Generator().manual_seed(0)
    mask = Mask(
        True, torch.tensor([[5, 2, 3], [1, 4, 5]]), torch.rand(2, 3, 4, 5, generator=g) < 0.5
    )
    whole = mask.allowed(4, 5, CPU)
    rows = mask.rows(start, stop)
    assert torch.equal(rows.allowed(stop - start, 5, CPU), whole[:, :, start:stop])
    # Rows of rows: positions add up.
    last = rows.rows(stop - start - 1, stop - start)
    assert torch.equal(last.allowed(1, 5, CPU), whole[:, :, stop - 1 : stop])
    assert torch.equal(mask.owners(slice(1, 2)).allowed(4, 5, CPU), whole[1:2])
    assert torch.equal(mask.owners(torch.tensor([1, 1])).allowed(4, 5, CPU), whole[[1, 1]])
    assert torch.equal(mask.sequences(slice(1, 3)).allowed(4, 5, CPU), whole[:, 1:3])
