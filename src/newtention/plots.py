"""Figures of a fit, from plain data.

Every function returns a Matplotlib `Figure` on an Agg canvas and touches no global state; with `ax`
it draws there and returns that figure.  Arrays may be NumPy or torch, on any device.

    newtention.plots.convergence(solution).savefig("convergence.png", dpi=150)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from newtention import diagnostics
from newtention.diagnostics import Run, as_array, run_epsilon, zero_level
from newtention.drawing import (
    BLUE,
    GREEN,
    MUTED,
    PANEL,
    VERMILION,
    WIDE,
    axis_name,
    boundary,
    colour_scale,
    empty,
    figure,
    heat_map,
    legend,
    level,
    linear_line,
    log_lines,
    log_scale,
    number,
    panel,
    symlog_scale,
    title,
)
from newtention.notation import ArrayLike
from newtention.path_figure import regularisation_path as regularisation_path
from newtention.softmax_figure import probabilities as probabilities
from newtention.solution import Solution

Against = Literal["iteration", "seconds"]


def convergence(solution: Run) -> Figure:
    """Loss, distance to the final loss, gradient and decrement, and trust region, per iteration."""
    fig = figure((2 * PANEL[0], 2 * PANEL[1]))
    axes = fig.subplots(2, 2)
    loss(solution, ax=axes[0, 0])
    loss_gap(solution, ax=axes[0, 1])
    gradient(solution, ax=axes[1, 0])
    trust_region(solution, ax=axes[1, 1])
    return fig


def loss(solution: Run, against: Against = "iteration", ax: Axes | None = None) -> Figure:
    """Total loss at each iteration."""
    fig, ax = panel(ax)
    title(ax, "Loss")
    x, (values,) = _history(solution, against, "loss")
    if len(values) and values.min() > 0 and values.max() > 100 * values.min():
        log_lines(ax, x, [(values, None, BLUE)])
    elif linear_line(ax, x, values, BLUE) and values.min() >= 0:
        ax.set_ylim(0, (float(values.max()) or 1) * 1.08)
    _finish_history(ax, solution, against)
    return fig


def loss_gap(solution: Run, against: Against = "iteration", ax: Axes | None = None) -> Figure:
    """Loss above the lowest loss of the run, on a log scale, and the rounding level."""
    fig, ax = panel(ax)
    title(ax, "Loss above its final value")
    x, (values,) = _history(solution, against, "loss")
    lowest = min([solution.loss, *values])
    gap = values - lowest if math.isfinite(lowest) else values[:0]
    if log_lines(ax, x, [(gap, None, BLUE)]):
        rounding = run_epsilon(solution) * abs(lowest)
        low, high = ax.get_ylim()
        if high > rounding > low / 100:
            log_scale(ax, min(low, rounding), high)
            level(ax, rounding, "rounding of the loss")
    _finish_history(ax, solution, against)
    return fig


def gradient(solution: Run, against: Against = "iteration", ax: Axes | None = None) -> Figure:
    """Gradient norm and relative Newton decrement on a log scale, with the tolerance."""
    fig, ax = panel(ax)
    x, (norm, decrement) = _history(solution, against, "gradient", "decrement")
    series = [(norm, "Gradient norm", BLUE), (decrement, "Newton decrement", VERMILION)]
    if log_lines(ax, x, series):
        low, high = ax.get_ylim()
        log_scale(ax, min(low, solution.tol), max(high, solution.tol))
        level(ax, solution.tol, "tolerance", VERMILION)
    _finish_history(ax, solution, against)
    return fig


def trust_region(solution: Run, ax: Axes | None = None) -> Figure:
    """Damping and trust-region radius at each iteration, on a log scale."""
    fig, ax = panel(ax)
    x, (damping, radius) = _history(solution, "iteration", "damping", "radius")
    if log_lines(ax, x, [(damping, "Damping", BLUE), (radius, "Trust-region radius", GREEN)]):
        low, high = ax.get_ylim()
        room = (math.log10(high) - math.log10(low)) / 10  # for the name of the boundary
        ax.set_ylim(low, min(high * 10**room, 1e300))
    _finish_history(ax, solution, "iteration")
    return fig


def attention(
    before: ArrayLike,
    after: ArrayLike,
    heads: Sequence[int] | None = None,
    vmax: float | None = None,
    labels: tuple[str, str] = ("Before the fit", "After the fit"),
) -> Figure:
    """Attention weights of one sequence before and after as heat maps with one colour scale.

    Args:
        before: (n, m), or (h, n, m), drawn as one row per head.
        after: of the same shape.
        heads: numbers of the heads, for the titles; 0, 1, ... by default.
        vmax: upper end of the colour scale; the largest weight by default.
        labels: titles of the two columns.
    """
    maps = [a if a.ndim == 3 else a[None] for a in (as_array(before), as_array(after))]
    h, n, m = maps[0].shape
    height = min(max(3.7 * n / m, 1.0), 5.2)
    fig = figure((WIDE, h * (height + 0.45) + 0.35))
    axes = fig.subplots(h, 2, squeeze=False, sharex=True, sharey=True)
    top = max(float(max(a.max() for a in maps)) if vmax is None else vmax, 1e-12)
    for i in range(h):
        for j in range(2):
            name = labels[j]
            if h > 1:
                name += f", head {i if heads is None else heads[i]}"
            heat_map(axes[i, j], maps[j][i], top, name)
        axis_name(axes[i, 0].yaxis, "query")
    for ax in axes[-1]:
        axis_name(ax.xaxis, "key")
    colour_scale(fig, axes, top)
    return fig


def errors(relative: ArrayLike, sequence: ArrayLike | None = None) -> Figure:
    """Histogram of the relative error per query, above the errors sequence by sequence.

    Args:
        relative: (N,) ||F_j - B_j|| / ||B_j||; entries that are not finite are left out.
        sequence: (N,) index of the sequence each query belongs to; one sequence by default.
    """
    fig = figure((WIDE, 5.0))
    axes = fig.subplots(2, 1)
    error_histogram(relative, ax=axes[0])
    error_strip(relative, sequence, ax=axes[1])
    return fig


def error_histogram(relative: ArrayLike, ax: Axes | None = None) -> Figure:
    """How many queries have which relative error."""
    fig, ax = panel(ax, (WIDE, 2.5))
    values = as_array(relative)
    values = values[np.isfinite(values)]
    title(ax, "Queries by relative error")
    if not len(values):
        empty(ax, "No query with a target")
        return fig
    top = float(values.max())
    count = int(np.clip(2 * len(values) ** (1 / 3), 8, 40))
    edges = np.linspace(0, top if top > 0 else 1, count + 1)
    ax.hist(values, edges.tolist(), color=BLUE, rwidth=0.92)
    median = float(np.median(values))
    ax.axvline(median, color=VERMILION, lw=1)
    right = median < 0.6 * edges[-1]
    ax.annotate(
        f"median {number(median)}",
        (median, 1),
        (4 if right else -4, -3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="left" if right else "right",
        va="top",
        fontsize=8,
        color=VERMILION,
    )
    ax.set_xlim(0, edges[-1])
    ax.margins(y=0.12)
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axis_name(ax.xaxis, "relative error")
    return fig


def error_strip(
    relative: ArrayLike, sequence: ArrayLike | None = None, ax: Axes | None = None
) -> Figure:
    """Relative error of every query by sequence (by position if there is one sequence only)."""
    fig, ax = panel(ax, (WIDE, 2.6))
    values = as_array(relative)
    place = np.zeros(len(values)) if sequence is None else as_array(sequence)
    alone = len(np.unique(place)) <= 1
    name = "position" if alone else "sequence"
    title(ax, f"Relative error by {name}")
    x = np.arange(len(values)) if alone else place
    known = np.isfinite(values)
    if not known.any():
        empty(ax, "No query with a target")
        return fig
    many = known.sum() > 3000
    style = {"s": 5 if many else 11, "alpha": 0.3 if many else 0.45, "linewidths": 0}
    ax.scatter(x[known], values[known], color=BLUE, rasterized=many, **style)
    if not alone:
        of = np.unique(place[known])
        medians = [np.median(values[known & (place == i)]) for i in of]
        ax.hlines(medians, of - 0.35, of + 0.35, color=VERMILION, lw=1.6)
    ax.set_ylim(0, (float(values[known].max()) or 1) * 1.06)
    ax.set_xlim(x.min() - 0.8, x.max() + 0.8)
    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    axis_name(ax.xaxis, name)
    return fig


def spectrum(
    values: ArrayLike,
    zero: float | None = None,
    marks: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Sorted eigenvalues on a symmetric log scale (a log scale when all are positive).

    Args:
        values: (N,) eigenvalues in any order.
        zero: size up to which an eigenvalue counts as zero; `zero_level` by default.
        marks: named levels, drawn as dotted lines.
        ax: where to draw.
    """
    fig, ax = panel(ax, (WIDE, 3.2))
    v = np.sort(as_array(values))[::-1]
    zero = zero_level(v) if zero is None else zero
    if not len(v):
        empty(ax, "No eigenvalues")
        return fig
    size = np.abs(v[np.abs(v) > zero])
    rank = np.arange(1, len(v) + 1)
    classes = (("positive", v > zero, BLUE), ("zero", np.abs(v) <= zero, MUTED))
    for name, which, colour in (*classes, ("negative", v < -zero, VERMILION)):
        if which.any():
            marker = "." if len(v) <= 200 or which.sum() == 1 else ""
            label = f"{which.sum()} {name}"
            ax.plot(rank[which], v[which], color=colour, lw=1.8, marker=marker, label=label)
    if len(size) == len(v) and v[-1] > 0:
        shown = [v[-1], v[0], *(x for x in (marks or {}).values() if x > 0)]
        log_scale(ax, float(min(shown)), float(max(shown)))
    elif len(size):
        symlog_scale(ax, float(size.min()), float(size.max()))
    for name, value in (marks or {}).items():
        level(ax, value, name)
    legend(ax)
    axis_name(ax.xaxis, "rank")
    return fig


def singular_values(
    X: ArrayLike, Y: ArrayLike, eps: float | None = None, ax: Axes | None = None
) -> Figure:
    """Singular values of X and Y, one line per head, without those that are zero to rounding."""
    fig, ax = panel(ax, (WIDE, 2.5))
    series = []
    for name, weights, colour in (("X", X, BLUE), ("Y", Y, VERMILION)):
        for i, sizes in enumerate(diagnostics.singular_values(weights, eps)):
            series.append((sizes, f"Singular values of {name}" if i == 0 else None, colour))
    longest = max(len(s) for s, _, _ in series)
    log_lines(ax, np.arange(1, longest + 1), series)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axis_name(ax.xaxis, "rank")
    return fig


def starts(losses: ArrayLike | Sequence[float], ax: Axes | None = None) -> Figure:
    """Final losses of several starts on one line, the lowest marked."""
    fig, ax = panel(ax, (WIDE, 1.25))
    values = as_array(losses)
    values = values[np.isfinite(values)]
    if not len(values):
        empty(ax, "No finite loss")
        return fig
    ax.plot(values, np.zeros(len(values)), "o", color=BLUE, ms=8, mew=0, alpha=0.45)
    ax.plot(values.min(), 0, "o", ms=9, mfc="none", mec=VERMILION, mew=1.6)
    ax.set_yticks([])
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.set_ylim(-1, 1)
    ax.margins(x=0.06)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x, 6)))
    axis_name(ax.xaxis, "final loss")
    return fig


def overview(solution: Solution, before: ArrayLike, after: ArrayLike) -> Figure:
    """Convergence above the attention of one head and sequence before and after."""
    fig = figure((WIDE, 7.0))
    upper, lower = fig.subfigures(2, 1, squeeze=False, height_ratios=(2.5, 4))[:, 0]
    left, right = upper.subplots(1, 2)
    loss_gap(solution, ax=left)
    gradient(solution, ax=right)
    axes = lower.subplots(1, 2, squeeze=False, sharey=True)
    maps = as_array(before), as_array(after)
    top = max(float(a.max()) for a in maps)
    names = ("Attention before the fit", "Attention after the fit")
    for ax, values, name in zip(axes[0], maps, names, strict=True):
        heat_map(ax, values, top, name)
        axis_name(ax.xaxis, "key")
    axis_name(axes[0, 0].yaxis, "query")
    colour_scale(lower, axes, top)
    return fig


def _history(solution: Run, against: Against, *names: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """The horizontal axis and columns of the history, finite or not."""
    history = solution.history
    return as_array(history.column(against)), [as_array(history.column(name)) for name in names]


def _finish_history(ax: Axes, solution: Run, against: Against) -> None:
    """Horizontal axis, and where the full Hessian takes over from the Gauss-Newton matrix."""
    axis_name(ax.xaxis, "iteration" if against == "iteration" else "seconds")
    history = solution.history
    if not history or not ax.lines:
        return
    x = history.column(against)
    low, high = 0.0, float(max(x))
    if len(x) == 1 or not high > 0:
        low, high = x[0] - 0.5, x[0] + 0.5
    ax.set_xlim(low - 0.02 * (high - low), high + 0.02 * (high - low))
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=against == "iteration"))
    models = history.column("model")
    if models[0] == "gauss-newton" and "newton" in models:
        boundary(ax, x[models.index("newton")], "full Hessian")
