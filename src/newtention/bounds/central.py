"""Central moments of a query row's keys under its attention weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class KeyMoments(NamedTuple):
    """With t = a2 - E a2 under P_j, the largest over heads, in the order of the rows.

    spread: lambda_max of Cov(a2).  moment4, 6, 8: lambda_max of E[|t|^2 t t^T], E[|t|^4 t t^T],
    E[|t|^6 t t^T], bounds of E (e . t)^4, ^6, ^8 over unit e.
    size: the scale of rounding errors, see `newtention.bounds.cumulants.token_sizes`.
    """

    spread: Float[Tensor, " n"]
    moment4: Float[Tensor, " n"]
    moment6: Float[Tensor, " n"]
    moment8: Float[Tensor, " n"]
    size: Float[Tensor, " n"]


def higher_moments(
    P: Float[Tensor, "s h n m"], A2: Float[Tensor, "s m d2"]
) -> tuple[Float[Tensor, " sn"], Float[Tensor, " sn"], Float[Tensor, " sn"]]:
    """Moments of orders 4, 6 and 8 as in `KeyMoments`.

    A2 should be near its attended mean: little cancels then.
    """
    fourth, sixth, eighth = _moments(P, A2, (1, 2, 3))
    return fourth, sixth, eighth


def key_moments(
    P: Float[Tensor, "s h n m"], A2: Float[Tensor, "s m d2"], size: Float[Tensor, " sn"]
) -> KeyMoments:
    """All moments, those of order 2 included."""
    return KeyMoments(*_moments(P, A2, (0, 1, 2, 3)), size=size)


def _moments(
    P: Float[Tensor, "s h n m"], A2: Float[Tensor, "s m d2"], powers: Sequence[int]
) -> list[Float[Tensor, " sn"]]:
    """lambda_max of E[|t|^2k t t^T], the largest over heads, for every k of `powers`."""
    mu = P @ A2[:, None]
    squares = A2.square().sum(-1)[:, None, None] - 2 * mu @ A2.mT[:, None]
    squares = (squares + mu.square().sum(-1, keepdim=True)).clamp_min(0)  # |t|^2, (s, h, n, m)
    pairs = (A2[..., :, None] * A2[..., None, :]).flatten(-2)[:, None]
    moments = []
    for power in powers:
        weights = P * squares**power
        raw = (weights @ pairs).unflatten(-1, (A2.shape[-1],) * 2)
        first = (weights @ A2[:, None])[..., :, None] * mu[..., None, :]
        total = weights.sum(-1)[..., None, None] * mu[..., :, None] * mu[..., None, :]
        scatter = raw - first - first.mT + total
        moments.append(largest_eigenvalue(scatter).amax(1).flatten())
    return moments


def largest_eigenvalue(M: Float[Tensor, "*lead d d"]) -> Float[Tensor, "*lead"]:
    """lambda_max of positive semidefinite matrices."""
    return torch.linalg.eigvalsh(M)[..., -1].clamp_min(0)
