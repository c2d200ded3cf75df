"""First-order methods of torch: which optimisers, and the loop that drives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.comparison.watch import Watch

LOOKS = 64
"""Looks at a run at even distances, and as many at a geometric series of times."""
FIRST_LOOK = 2e-3
"""Time of the first, as a fraction of the whole."""
FINISH = 0.98
"""Fraction of the time at which the rate has fallen to zero, so that the end is seen in time."""
WARM_UP = 0.03
"""Fraction of the time in which the rate rises to its peak."""
Optimizers = list[torch.optim.Optimizer]


def adam(parameters: list[Tensor], rate: float) -> Optimizers:
    """torch.optim.Adam as it is."""
    return [torch.optim.Adam(parameters, lr=rate)]


def muon(parameters: list[Tensor], rate: float) -> Optimizers:
    """torch.optim.Muon for matrices, its rates made those of Adam, which gets the rest."""
    matrices = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim != 2]
    first = torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [first, *(adam(rest, rate) if rest else [])]


def soap(parameters: list[Tensor], rate: float) -> Optimizers:
    """SOAP of pytorch-optimizer, without weight decay."""
    from pytorch_optimizer import SOAP

    return [SOAP(parameters, lr=rate, weight_decay=0.0)]


MAKERS: dict[str, Callable[[list[Tensor], float], Optimizers]] = {
    "Adam": adam,
    "Muon": muon,
    "SOAP": soap,
}


def descend(
    parameters: Iterable[Tensor],
    optimizer: str,
    rate: float,
    backward: Callable[[], object],
    watch: Watch,
    point: Callable[[], Any],
    clip: float | None = None,
) -> None:
    """Steps until the time is over; the rate rises to `rate`, then falls to 0 along a cosine.

    backward: fills the gradients of the next batch.  point: what the watch looks at.
    clip: largest norm of the gradient.
    The weights on the way are those of a high rate: the last look is the one that counts.
    """
    parameters = list(parameters)
    optimizers = MAKERS[optimizer](parameters, rate)
    marks = sorted([*np.geomspace(FIRST_LOOK, 1, LOOKS), *np.linspace(0, 1, LOOKS)[1:-1]])
    while marks:
        done = min(1.0, watch.share() / FINISH)
        if done >= marks[0]:
            with watch.still():
                now = point()
            watch.look(now)
            marks = [m for m in marks if m > done]
            if not math.isfinite(watch.curve[-1][1]):
                return
        factor = min(1.0, done / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))
        for o in optimizers:
            for group in o.param_groups:
                group["lr"] = rate * factor
            o.zero_grad()
        backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        for o in optimizers:
            o.step()


def lbfgs(
    parameters: Iterable[Tensor], memory: int, backward: Callable[[], float], **settings: Any
) -> None:
    """torch.optim.LBFGS with its line search, in one long step; backward ends it."""
    optimizer = torch.optim.LBFGS(
        list(parameters),
        max_iter=10**6,
        max_eval=10**7,
        history_size=memory,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
        **settings,
    )

    def closure() -> float:
        optimizer.zero_grad()
        return backward()

    optimizer.step(closure)
