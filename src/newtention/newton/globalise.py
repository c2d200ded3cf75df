"""Acceptance of trial steps and the trust-region radius."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ACCEPT = 1e-4
"""Least ratio of actual to predicted decrease (Nocedal and Wright 2006, algorithm 4.1: any
number in [0, 1/4))."""
SHRINK, GROW = 0.25, 3.0
"""Radius after a poor step (ratio < 1/4) and a good one (ratio > 3/4), in step lengths."""
LITTLE_GAIN = 1e-3
"""A Gauss-Newton step that lowers the loss by less than this fraction ends that phase."""


def loss_noise(
    loss: Float[Tensor, " b"], data_loss: Float[Tensor, " b"], energy: Float[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """Size of the rounding error in a computed loss.

    The residual C = F - B carries errors of about eps ||B||, so 1/2 ||C||^2 carries eps ||B|| ||C||
    plus the square; the summation adds eps times the loss.  The factor 8 covers the few products
    behind F.
    """
    eps = 8.0 * torch.finfo(loss.dtype).eps
    return eps * (loss.abs() + 2.0 * data_loss.sqrt() * energy.sqrt()) + eps**2 * energy


def ratio(actual: Float[Tensor, " b"], predicted: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Actual over predicted decrease; minus infinity where the trial loss was not finite."""
    tiny = torch.finfo(actual.dtype).tiny
    value = actual / predicted.clamp(min=tiny)
    return torch.where(torch.isfinite(value), value, -torch.inf)


def accepted(
    actual: Float[Tensor, " b"],
    predicted: Float[Tensor, " b"],
    noise: Float[Tensor, " b"],
) -> Bool[Tensor, " b"]:
    """A step is accepted for its ratio or, when it promises less than rounding can show, for doing
    no measurable harm.
    """
    invisible = (predicted <= noise) & (actual >= -noise)
    return (ratio(actual, predicted) > ACCEPT) | invisible


def next_radius(
    radius: Float[Tensor, " b"],
    step_norm: Float[Tensor, " b"],
    gain: Float[Tensor, " b"],
    invisible: Bool[Tensor, " b"],
) -> Float[Tensor, " b"]:
    """Shrink after a poor step, grow after a good one, keep otherwise or if rounding decided."""
    shrunk = torch.where(gain < 0.25, SHRINK * step_norm, radius)
    grown = torch.where(gain > 0.75, torch.maximum(radius, GROW * step_norm), shrunk)
    return torch.where(invisible, torch.maximum(radius, GROW * step_norm), grown)
