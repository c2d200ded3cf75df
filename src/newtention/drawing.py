"""The style of the figures: panels, scales, ticks, colours.  `plots` builds on it."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

INK, MUTED, RULE, PAPER = "#1f2328", "#67707b", "#dfe3e8", "#ffffff"
BLUE, VERMILION, GREEN = "#0072b2", "#d55e00", "#009e73"
"""Okabe and Ito's colours, told apart with any colour vision."""
PANEL = (4.4, 2.7)
"""Inches of a single panel."""
WIDE = 8.8
"""Inches of a figure as wide as the page."""
SMALL = 8.5
"""Points of the text in a figure."""
DOTTED = (0, (1, 2))
HEAT = LinearSegmentedColormap.from_list("newtention", ["#ffffff", "#9cc7e8", "#2a78b8", "#062a52"])
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Series = Sequence[tuple[np.ndarray, str | None, str]]
"""(values, name, colour) of each line."""

_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    BLUE: "var(--blue)",
    VERMILION: "var(--vermilion)",
    GREEN: "var(--green)",
}
"""Colours of a web page in place of the figure's."""


def number(value: float | None, digits: int = 3) -> str:
    """A number for reading, such as 0.0806 or 1.2×10⁻¹⁵; a dash for None."""
    if value is None:
        return "–"
    value = float(value)
    if math.isnan(value):
        return "undefined"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        text = f"{value:.{digits}g}"
        return (f"{value:.0f}" if "e" in text else text).replace("-", "−")
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if float(mantissa) == int(float(mantissa)):
        mantissa = str(int(float(mantissa)))
    lead = {"1": "", "-1": "−"}.get(mantissa, mantissa.replace("-", "−") + "×")
    return lead + "10" + str(int(exponent)).translate(SUPERSCRIPT)


class ShownFigure(Figure):
    """A figure that a notebook shows, whether or not pyplot was ever imported there."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png")
        return image.getvalue()


def figure(size: tuple[float, float]) -> Figure:
    """An empty figure of so many inches on an Agg canvas."""
    fig = ShownFigure(figsize=size, layout="constrained", facecolor=PAPER)
    FigureCanvasAgg(fig)
    return fig


def panel(ax: Axes | None, size: tuple[float, float] = PANEL) -> tuple[Figure, Axes]:
    """A styled panel, on its own figure unless an axes is given."""
    if ax is None:
        ax = figure(size).subplots()
    ax.set_facecolor("none")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(MUTED)
        ax.spines[side].set_linewidth(0.7)
    ax.tick_params(which="both", color=MUTED, labelcolor=INK, labelsize=SMALL, width=0.7)
    ax.grid(True, axis="y", color=RULE, lw=0.7)
    ax.set_axisbelow(True)
    root = ax.figure.figure  # the whole figure, even from within a subfigure
    assert isinstance(root, Figure)
    return root, ax


def title(ax: Axes, text: str) -> None:
    """Name the panel, flush left."""
    ax.set_title(text, loc="left", fontsize=9.5, color=INK)


def axis_name(axis: Axis, text: str) -> None:
    """Name an axis."""
    axis.set_label_text(text, fontsize=SMALL, color=MUTED)


def legend(ax: Axes) -> None:
    """Names of the lines in place of the title, in a row."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=3,
            frameon=False,
            fontsize=9.5,
            labelcolor=INK,
            handlelength=1.2,
            columnspacing=1.4,
            borderpad=0.2,
        )


def empty(ax: Axes, text: str) -> None:
    """Say why there is nothing to draw."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=MUTED)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(False)


def level(ax: Axes, value: float, text: str, colour: str = MUTED, right: bool = False) -> None:
    """A dotted horizontal line with its name."""
    ax.axhline(value, color=colour, lw=0.9, ls=DOTTED)
    note = ax.annotate(
        text,
        (1 if right else 0, value),
        (-3 if right else 3, 2),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=8,
        color=MUTED,
    )
    note.set_in_layout(False)


def boundary(ax: Axes, x: float, text: str) -> None:
    """A dotted vertical line with its name at the top, on the side with more room."""
    low, high = ax.get_xlim()
    right = x < low + 0.6 * (high - low)
    ax.axvline(x, color=MUTED, lw=0.9, ls=DOTTED)
    ax.annotate(
        text,
        (x, 1),
        (3 if right else -3, -2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="left" if right else "right",
        va="top",
        fontsize=8,
        color=MUTED,
    )


def log_lines(ax: Axes, x: np.ndarray, series: Series) -> bool:
    """Lines on a log scale; entries that are not positive and finite are left out.

    Returns:
        False if nothing was left.
    """
    drawn = []
    for values, name, colour in series:
        known = np.isfinite(values) & (values > 0)
        at = x[: len(values)][known]
        if len(at):
            _line(ax, at, values[known], name, colour)
            drawn.append(values[known])
    if not drawn:
        empty(ax, "No positive values" if any(len(s[0]) for s in series) else "Nothing recorded")
        return False
    everything = np.concatenate(drawn)
    log_scale(ax, float(everything.min()), float(everything.max()))
    legend(ax)
    return True


def linear_line(ax: Axes, x: np.ndarray, values: np.ndarray, colour: str) -> bool:
    """One line on a linear scale; False if there is nothing finite to draw."""
    known = np.isfinite(values)
    if not known.any():
        empty(ax, "Nothing recorded")
        return False
    _line(ax, x[known], values[known], None, colour)
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: number(y, 4)))
    return True


def _line(ax: Axes, x: np.ndarray, y: np.ndarray, name: str | None, colour: str) -> None:
    """Dots that are joined; a long line needs none."""
    marker = "o" if len(x) <= 80 else ""
    ax.plot(x, y, color=colour, label=name, lw=1.5, marker=marker, ms=3, mew=0)


def log_scale(ax: Axes, low: float, high: float) -> None:
    """A log scale that holds [low, high], with at least half a decade on show."""
    first, last = math.log10(low), math.log10(high)
    room = max(0.06 * (last - first), 0.1 if last - first > 0.5 else 0.3)
    first, last = max(first - room, -300.0), min(last + room, 300.0)
    decades = last - first
    ax.set_autoscaley_on(False)
    ax.set_yscale("log")
    ax.set_ylim(10.0**first, 10.0**last)
    if decades > 2:
        step = math.ceil(decades / 6)
        powers = range(math.ceil(first / step), math.floor(last / step) + 1)
        ax.yaxis.set_major_locator(FixedLocator([10.0 ** (step * k) for k in powers]))
    else:
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: tick(y)))
    ax.yaxis.set_minor_formatter(NullFormatter())


def symlog_scale(ax: Axes, threshold: float, largest: float) -> None:
    """Log from the threshold to the largest size and its mirror image, linear between."""
    ax.set_yscale("symlog", linthresh=threshold, linscale=0.8)
    first, last = math.ceil(math.log10(threshold) - 1e-9), math.floor(math.log10(largest) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / 5))
    powers = [10.0**k for k in range(first, last + 1, step)] or [threshold]
    ticks = [-y for y in reversed(powers)] + [0.0, *powers]
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: tick(y)))


def tick(value: float) -> str:
    """Label of a tick on a log scale: powers of ten as such from 10³ and 10⁻³ on."""
    exponent = math.log10(abs(value)) if value else 0.0
    if abs(exponent) > 2.5 and abs(exponent - round(exponent)) < 1e-9:
        sign = "−" if value < 0 else ""
        return f"{sign}10" + str(round(exponent)).translate(SUPERSCRIPT)
    return number(value)


def heat_map(ax: Axes, values: np.ndarray, top: float, name: str) -> None:
    """One matrix of attention weights, queries downwards."""
    n, m = values.shape
    # One scale for all maps, with the square root's emphasis on small weights.
    norm = PowerNorm(0.5, 0, top)
    ax.imshow(values, cmap=HEAT, norm=norm, aspect="auto", interpolation="none")
    title(ax, name)
    for spine in ax.spines.values():
        spine.set_color(MUTED)
        spine.set_linewidth(0.7)
    ax.tick_params(color=MUTED, labelcolor=INK, labelsize=SMALL, width=0.7)
    for axis, count in ((ax.xaxis, m), (ax.yaxis, n)):
        axis.set_major_locator(MaxNLocator(min(7, max(count, 2)), integer=True, min_n_ticks=1))
    ax.set_xlim(-0.5, m - 0.5)
    ax.set_ylim(n - 0.5, -0.5)


def colour_scale(fig: FigureBase, axes: np.ndarray, top: float) -> None:
    """The scale of the heat maps, to the right of them."""
    inset = axes[0, -1].inset_axes((1.05, 0, 0.045, 1))
    ramp = np.linspace(0, 1, 256)[:, None]
    inset.imshow(ramp, cmap=HEAT, aspect="auto", origin="lower", extent=(0, 1, 0, 1))
    decade = 10.0 ** math.ceil(math.log10(top) - 1e-9)
    weights = decade * np.array([0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1])
    shown = weights[weights <= top * (1 + 1e-9)]
    inset.yaxis.set_major_locator(FixedLocator([math.sqrt(w / top) for w in shown]))
    inset.yaxis.set_major_formatter(FuncFormatter(lambda y, _: number(top * y * y, 2)))
    inset.yaxis.tick_right()
    inset.set_xticks([])
    inset.tick_params(color=MUTED, labelcolor=INK, labelsize=SMALL, width=0.7)
    for spine in inset.spines.values():
        spine.set_color(MUTED)
        spine.set_linewidth(0.7)
    title(inset, "weight")


def svg(fig: Figure, name: str, label: str) -> str:
    """A figure as inline SVG that takes its colours and its font from the page.

    Args:
        fig: the figure.
        name: unique in the page; keeps the identifiers of two figures apart.
        label: what it shows, for screen readers.
    """
    buffer = io.StringIO()
    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "svg.image_inline": True}
    with matplotlib.rc_context(settings):
        fig.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.S)
    text = re.sub(r' id="[a-zA-Z][a-zA-Z0-9.]*_\d+"', "", text)
    text = re.sub(r"(font: [\d.]+px) [^;\"]*", r"\1 var(--sans)", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    head = f'<svg {box[0]} role="img" aria-label="{html.escape(label)}">'
    text = head + text[text.index(">") + 1 :]
    return text.replace("xlink:href", "href")
