"""Central moments of a query row's keys under its attention weights."""

from __future__ import annotations

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
    mu = P @ A2[:, None]
    squares = A2.square().sum(-1)[:, None, None] - 2 * mu @ A2.mT[:, None]
    squares = (squares + mu.square().sum(-1, keepdim=True)).clamp_min(0)  # |t|^2, (s, h, n, m)
    return (
        _largest_scatter(P * squares, A2, mu),
        _largest_scatter(P * squares**2, A2, mu),
        _largest_scatter(P * squares**3, A2, mu),
    )


def key_moments(
    P: Float[Tensor, "s h n m"], A2: Float[Tensor, "s m d2"], size: Float[Tensor, " sn"]
) -> KeyMoments:
    """All moments, those of order 2 included."""
    return KeyMoments(_largest_scatter(P, A2, P @ A2[:, None]), *higher_moments(P, A2), size)


def _largest_scatter(
    weights: Float[Tensor, "s h n m"], A2: Float[Tensor, "s m d2"], mu: Float[Tensor, "s h n d2"]
) -> Float[Tensor, " sn"]:
    """lambda_max of sum_k w_k (a2_k - mu)(a2_k - mu)^T, the largest over heads."""
    pairs = (A2[..., :, None] * A2[..., None, :]).flatten(-2)
    first = (weights @ A2[:, None])[..., :, None] * mu[..., None, :]
    total = weights.sum(-1)[..., None, None] * mu[..., :, None] * mu[..., None, :]
    raw = (weights @ pairs[:, None]).unflatten(-1, (A2.shape[-1],) * 2)
    return largest_eigenvalue(raw - first - first.mT + total).amax(1).flatten()


def largest_eigenvalue(M: Float[Tensor, "*lead d d"]) -> Float[Tensor, "*lead"]:
    """lambda_max of positive semidefinite matrices."""
    return torch.linalg.eigvalsh(M)[..., -1].clamp_min(0)
