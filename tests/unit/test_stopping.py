"""The convergence test, acceptance of steps and the radius, each by hand."""

import pytest
import torch

from newtention.newton.globalise import accepted, loss_noise, next_radius, ratio
from newtention.newton.stopping import converged, default_tol, relative_decrement


def t(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def b(*values):
    return torch.tensor(values)


def test_default_tol():
    assert default_tol(torch.float64) == 1e-10
    assert default_tol(torch.float32) == 1e-4


def test_relative_decrement():
    got = relative_decrement(t(4.0, -1e-30, 9.0), t(1.0, 2.0, 0.0))
    assert got.tolist() == [2.0, 0.0, 3.0]


@pytest.mark.parametrize("flaw", range(4))
def test_converged_needs_all_four(flaw):
    """A small decrement alone does not do: model, step and gradient count as well."""
    small, large = t(1e-11), t(1e-9)
    arguments = [small, small, b(True), b(True)]
    assert bool(converged(*arguments, 1e-10))
    arguments[flaw] = large if flaw < 2 else b(False)
    assert not bool(converged(*arguments, 1e-10))


def test_converged_refuses_nan():
    assert not bool(converged(t(torch.nan), t(0.0), b(True), b(True), 1e-10))


def test_ratio():
    got = ratio(t(1.0, -1.0, torch.nan, -torch.inf, 1.0), t(2.0, 1.0, 1.0, 1.0, 0.0))
    assert got[:4].tolist() == [0.5, -1.0, -torch.inf, -torch.inf]
    assert got[4] > 1e200


@pytest.mark.parametrize(
    ("actual", "predicted", "noise", "want"),
    [
        (0.5, 1.0, 0.0, True),
        (1e-5, 1.0, 0.0, False),
        (-0.1, 1.0, 0.0, False),
        (torch.nan, 1.0, 1e-3, False),
        # Below the noise: no measurable harm is enough.
        (-1e-9, 1e-10, 1e-8, True),
        (-1e-7, 1e-10, 1e-8, False),
        # Visible promise, invisible gain: refused.
        (-1e-9, 1e-7, 1e-8, False),
    ],
)
def test_accepted(actual, predicted, noise, want):
    assert bool(accepted(t(actual), t(predicted), t(noise))) is want


def test_next_radius():
    radius, step = t(1.0, 1.0, 1.0, 1.0, 5.0), t(0.8, 0.8, 0.8, 0.01, 0.8)
    gain = t(-1.0, 0.5, 0.9, 0.9, -torch.inf)
    no = b(False, False, False, False, False)
    got = next_radius(radius, step, gain, no)
    want = [0.25 * 0.8, 1.0, 3 * 0.8, 1.0, 0.25 * 0.8]
    assert got.tolist() == pytest.approx(want)
    assert bool((next_radius(radius, step, gain, ~no) >= radius).all())


def test_noise_bounds_the_rounding_of_the_loss():
    """Losses of one point computed in float32 and float64 differ by less than the float32 noise."""
    import newtention as nt
    from newtention import zoo

    for seed in range(20):
        noise = (0.0, 1e-3, 1.0)[seed % 3]
        made = zoo.planted(4, 60, noise=noise, tokens="clustered", seed=seed, dtype=torch.float32)
        low = made.problem
        A, B = low.chunks[0].A1[0, 0], low.chunks[0].B[0, 0]
        high = nt.AttentionProblem(A.double(), A.double(), A.double(), B.double())
        loss = nt.loss(low, made.X, made.Y)
        exact = nt.loss(high, made.X.double(), made.Y.double())
        value = t(loss, dtype=torch.float32)
        bound = loss_noise(value, value, low.target_energy())
        assert abs(loss - exact) <= float(bound)
        # A bound that is far too large would call visible steps invisible.
        assert float(bound) <= 1e-4 * (loss + float(low.target_energy()) * 1e-3)
