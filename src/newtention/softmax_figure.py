"""Figures of softmax regression; `newtention.plots` offers them."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from newtention.diagnostics import as_array
from newtention.drawing import (
    BLUE,
    DOTTED,
    PANEL,
    VERMILION,
    axis_name,
    empty,
    figure,
    linear_line,
    log_scale,
    panel,
    tick,
    title,
)
from newtention.notation import ArrayLike

MANY = 3000
"""Dots from which on they are drawn as an image, faintly."""
LONGEST_CURVE = 2000
"""Points of a curve; of more ranks as many are shown, denser among the first."""


def probabilities(fitted: ArrayLike, target: ArrayLike) -> Figure:
    """Fitted values against targets, and how the loss is spread over the rows.

    Args:
        fitted: (n,) softmax(A x), or what is fitted in its place.
        target: (n,) b.
    """
    fig = figure((2 * PANEL[0], PANEL[1] + 0.5))
    left, right = fig.subplots(1, 2)
    f, b = as_array(fitted), as_array(target)
    _against_targets(left, f, b)
    _concentration(right, np.square(f - b))
    return fig


def _against_targets(ax: Axes, f: np.ndarray, b: np.ndarray) -> None:
    """Dots around the line f = b, on log scales if all values are positive and wide apart."""
    panel(ax)
    title(ax, "Fitted value against target")
    known = np.isfinite(f)
    if not known.any():
        empty(ax, "No finite value")
        return
    f, b = f[known], b[known]
    low, high = float(min(f.min(), b.min())), float(max(f.max(), b.max()))
    many = len(f) > MANY
    style = {"s": 4 if many else 10, "alpha": 0.3 if many else 0.5, "linewidths": 0}
    if low > 0 and high > 30 * low:
        log_scale(ax, low, high)
        ax.set_xscale("log")
        ax.set_xlim(ax.get_ylim())
        ax.xaxis.set_major_locator(ax.yaxis.get_major_locator())
        ax.xaxis.set_minor_locator(ax.yaxis.get_minor_locator())
        ax.xaxis.set_major_formatter(lambda x, _: tick(x))
    else:
        room = 0.06 * (high - low or abs(high) or 1.0)
        ax.set_xlim(low - room, high + room)
        ax.set_ylim(low - room, high + room)
    ax.plot(ax.get_xlim(), ax.get_xlim(), color=VERMILION, lw=0.9, ls=DOTTED)
    ax.scatter(b, f, color=BLUE, rasterized=many, **style)
    axis_name(ax.xaxis, "target")
    axis_name(ax.yaxis, "fitted")


def _concentration(ax: Axes, squares: np.ndarray) -> None:
    """Share of the data loss that the worst k rows hold, against k."""
    panel(ax)
    title(ax, "Share of the data loss in the worst rows")
    total = float(squares.sum())
    if not 0 < total < np.inf:
        empty(ax, "No loss to share" if total == 0 else "No finite value")
        return
    shares = np.cumsum(np.sort(squares)[::-1]) / total
    count = len(shares)
    ranks = np.unique(np.geomspace(1, count, min(count, LONGEST_CURVE)).round().astype(int))
    linear_line(ax, ranks.astype(float), shares[ranks - 1], BLUE)
    if count > 30:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda x, _: tick(x))
    ax.set_ylim(0, 1.06)
    axis_name(ax.xaxis, "rows, the worst first")
