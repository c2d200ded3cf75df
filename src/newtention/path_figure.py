"""The figure of a regularisation path; `newtention.plots` offers it."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from newtention.diagnostics import as_array
from newtention.drawing import (
    BLUE,
    DOTTED,
    PANEL,
    VERMILION,
    axis_name,
    empty,
    figure,
    level,
    linear_line,
    log_lines,
    panel,
    tick,
    title,
)
from newtention.regularisation import RegularisationPath


def regularisation_path(path: RegularisationPath) -> Figure:
    """Loss, norm, angle, angle times norm, entropy and margin of a path, ridges falling rightwards.

    Dotted: the slope ||X_svm|| / 2 through the last norm, and the margin of the SVM.  Without an
    SVM the two panels of angles say so.
    """
    fig = figure((2 * PANEL[0], 3 * PANEL[1]))
    axes = fig.subplots(3, 2)
    ridges, norms = as_array(path.ridges), as_array(path.norms)
    for ax, values, name in (
        (axes[0, 0], path.losses, "Data loss"),
        (axes[2, 0], path.entropies, "Mean entropy of the attention, in nats"),
    ):
        title(panel(ax)[1], name)
        log_lines(ax, ridges, [(as_array(values), None, BLUE)])
    for ax, values, name in (
        (axes[0, 1], norms, "||X||"),
        (axes[1, 0], path.angles, "Angle to the SVM, in degrees"),
        (axes[1, 1], path.angles_times_norms, "Angle times ||X||"),
        (axes[2, 1], path.margins, "Smallest lead of a wanted key over ||X||"),
    ):
        title(panel(ax)[1], name)
        if values is None:
            empty(ax, "No SVM to compare with")
        else:
            linear_line(ax, ridges, as_array(values), BLUE)
    slope = path.predicted_growth
    if slope is not None:
        predicted = norms[-1] - slope * np.log(ridges / ridges[-1])
        low, high = axes[0, 1].get_ylim()
        axes[0, 1].plot(ridges, predicted, color=VERMILION, lw=0.9, ls=DOTTED)
        axes[0, 1].set_ylim(low, high)
        level(axes[2, 1], path.svm.margin, "margin of the SVM", VERMILION)
        low, high = axes[2, 1].get_ylim()
        axes[2, 1].set_ylim(low, high + 0.12 * (high - low))  # for the name
    for ax in axes.flat:
        if ax.lines:
            _ridge_axis(ax, ridges)
    return fig


def _ridge_axis(ax: Axes, ridges: np.ndarray) -> None:
    """Ridges on a log scale, falling to the right."""
    ax.set_xscale("log")
    ax.set_xlim(float(ridges[0]) * 1.5, float(ridges[-1]) / 1.5)
    first, last = math.floor(math.log10(ridges[0])), math.ceil(math.log10(ridges[-1]))
    step = max(1, math.ceil((first - last) / 6))
    ax.xaxis.set_major_locator(FixedLocator([10.0**k for k in range(first, last - 1, -step)]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tick(x)))
    axis_name(ax.xaxis, "ridge")
