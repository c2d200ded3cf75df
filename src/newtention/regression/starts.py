"""Where softmax regression begins.

Plain: at x = 0.  Rescaled: where A x fits the logarithms of the target, for exp and if it has any,
else at random.  A rescaled loss grows like exp(2 |A x|), and a Newton step on an exponential moves
the logits by about 1: a start far out is therefore first led towards 0, along its own ray.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.regression.arguments import Settings
from newtention.regression.rescaled import RescaledLoss
from newtention.regression.rows import Rows

START_SCALE = 1.0
"""Root mean square of the centred logits of a random start."""
LARGE = 16.0
"""Size of logits beyond which halving them saves Newton steps."""
POOR = 0.1
"""Relative loss beyond which a start is not worth its size."""
_HALVINGS = 100


def starting_points(
    rows: Rows, given: Sequence[Float[Tensor, " d"] | None], settings: Settings
) -> Float[Tensor, "b d"]:
    """For every problem its first start, given or by default, then random ones."""
    n_init = settings.n_init
    x = []
    for k, start in enumerate(given):
        one = rows.take(torch.tensor([k * n_init], device=rows.A.device))
        x.append(_default(one, settings) if start is None else start)
        x += [_random(one, settings.seed, draw) for draw in range(1, n_init)]
    points = torch.stack(x)
    if not settings.rescaled:
        return points
    return nearer(RescaledLoss.at(settings.kind, rows, points), points)


def nearer(objective: RescaledLoss, x: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
    """Members with large logits and a poor fit, halved for as long as their loss falls."""
    for _ in range(_HALVINGS):
        here, half = objective.near(x), objective.near(0.5 * x)
        large = objective.rows.logits(x).abs().amax(1) > LARGE
        poor = here.data_loss(x) > POOR * here.sizes(x)
        falls = _log(half, 0.5 * x) < _log(here, x)
        moving = large & poor & falls
        if not bool(moving.any()):
            break
        x = torch.where(moving[:, None], 0.5 * x, x)
    return x


def log_fit(one: Rows) -> Float[Tensor, " d"] | None:
    """The shortest x with A x nearest to ln b, up to a constant; None if no b_k is positive.

    Weighted by b^2: to first order an error of a logit is, times b_k, one of the fitted value.
    """
    b = one.target.clamp(min=0.0)
    largest = b.amax(1, keepdim=True)
    if not bool(largest > 0):
        return None
    share = b / largest
    weight = share.square()
    weight = weight / weight.sum(1, keepdim=True)
    logs = share.where(weight > 0, torch.ones_like(share)).log()
    right = weight * (logs - (weight * logs).sum(1, keepdim=True))
    mean = one.transposed(weight)
    inverse = torch.linalg.pinv(one.gram(weight, mean)[0], hermitian=True)
    x = inverse @ (one.transposed(right) - right.sum(1, keepdim=True) * mean)[0]
    return x if bool(x.isfinite().all()) else None


def _default(one: Rows, settings: Settings) -> Float[Tensor, " d"]:
    if not settings.rescaled:
        return one.A.new_zeros(one.A.shape[2])
    fitted = log_fit(one) if settings.kind == "exp" else None
    return _random(one, settings.seed, 0) if fitted is None else fitted


def _random(one: Rows, seed: int, draw: int) -> Float[Tensor, " d"]:
    """Centred logits of size START_SCALE.

    Seeded by the draw alone, so that a batch gives what single fits give.
    """
    A = one.A[one.owner[0]]
    generator = torch.Generator().manual_seed(seed * 1_000_003 + draw)
    direction = torch.randn(A.shape[1], generator=generator, dtype=torch.float64).to(A)
    logits = A @ direction
    real = logits if one.real is None else logits[one.real[one.owner[0]]]
    size = real.std(correction=0)
    usable = bool(size > 0) and bool(torch.isfinite(size))
    return direction * (START_SCALE / size) if usable else torch.zeros_like(direction)


def _log(objective: RescaledLoss, x: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
    return objective.loss(x).log() + objective.log_unit
