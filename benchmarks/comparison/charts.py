"""Charts of the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.chart_style import FAINT, OURS, plain
from benchmarks.comparison.methods import GROUP_OF
from benchmarks.comparison.methods import OURS as OURSELVES
from benchmarks.comparison.summary import CLOSE, GOAL

LINES = {
    "ours": "-",
    "ablation": "-.",
    "truncation": "-",
    "scipy": "-",
    "autograd": "--",
    "first-order": ":",
}
FARTHEST = 1e3
"""Right end of a profile."""
DECADES = 1e3
"""Longest over shortest time of a chart of curves."""


def colours(names: Sequence[str]) -> dict[str, str]:
    """Red for ours, the rest from a map of twenty."""
    others = [name for name in names if name != OURSELVES]
    table = matplotlib.colormaps["tab20"].colors
    dull = [matplotlib.colors.to_hex(c) for c in table if c != table[6]]
    return {OURSELVES: OURS} | {n: dull[i % len(dull)] for i, n in enumerate(others)}


def profile_chart(data: Mapping) -> Figure:
    """Share of the cases solved against time over the least: two panels."""
    figure = Figure(figsize=(11.0, 4.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    words = {
        "gradient": f"to a gradient of {GOAL}",
        "loss": f"to a loss within {100 * CLOSE:g} % of the lowest",
    }
    profiles = data["summary"]["profiles"]
    names = list(dict.fromkeys(n for key in words for n in profiles[key]["steps"]))
    colour = colours(names)
    for axes, (key, label) in zip(panels, words.items(), strict=True):
        plain(axes)
        for name, steps in profiles[key]["steps"].items():
            taus, shares = [1.0, *(t for t, _ in steps)], [0.0, *(s for _, s in steps)]
            axes.step(
                [*taus, FARTHEST],
                [*shares, shares[-1]],
                where="post",
                color=colour[name],
                linestyle=LINES[GROUP_OF[name]],
                linewidth=2.4 if name == OURSELVES else 1.2,
                label=name,
            )
        axes.set(xscale="log", xlim=(1, FARTHEST), ylim=(-0.02, 1.02))
        axes.set(xlabel="seconds over the least of all methods", title=label)
    panels[0].set_ylabel("share of problems and seeds")
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside right", frameon=False)
    return figure


def seconds_chart(problems: Mapping[str, Mapping], titles: Mapping[str, str]) -> Figure:
    """Seconds to the goal, a panel for each problem; hollow arrows: time spent without arriving."""
    names = list(dict.fromkeys(n for p in problems.values() for n in p["methods"]))[::-1]
    names = [n for n in names if GROUP_OF.get(n) != "ablation"]
    figure = Figure(figsize=(3.4 * len(problems) + 2.4, 0.26 * len(names) + 1.4))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, len(problems), sharey=True, squeeze=False)[0]
    for axes, (key, problem) in zip(panels, problems.items(), strict=True):
        plain(axes)
        axes.set_title(titles[key].removeprefix("planted, "), loc="left", fontsize=9)
        for row, name in enumerate(names):
            _seconds(axes, row, name, problem["methods"].get(name))
        axes.set(xscale="log", xlabel=f"seconds to a gradient of {GOAL}")
    panels[0].set_yticks(range(len(names)), names)
    return figure


def _seconds(axes: Axes, row: int, name: str, method: Mapping | None) -> None:
    if method is None or not method["finished"]:
        return
    colour = OURS if name == OURSELVES else "#2c3e50"
    hits = method["reached"][GOAL]
    s = method["seconds"][GOAL] if hits else method["spent"]
    axes.plot([s["lower"], s["upper"]], [row, row], color=colour, linewidth=2)
    fill = colour if hits else "white"
    axes.plot(s["median"], row, "o" if hits else ">", color=colour, markerfacecolor=fill)
    axes.annotate(
        f"{hits}/{method['runs']}",
        (1.01, row),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=7,
        color=colour,
    )


def curves_chart(problem: Mapping, columns: Mapping[int, str]) -> Figure:
    """Columns of the curves against seconds: the first seed of every method, others faint."""
    curves = {n: c for n, c in problem["curves"].items() if GROUP_OF.get(n) != "ablation"}
    figure = Figure(figsize=(11.0, 4.8), layout="constrained")
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    colour = colours(list(curves))
    longest = max((p[0] for runs in curves.values() for c in runs for p in c), default=1.0)
    for axes, (column, label) in zip(panels, columns.items(), strict=True):
        plain(axes)
        for name, runs in curves.items():
            for i, curve in enumerate(runs):
                points = [(p[0], p[column]) for p in curve if p[column] is not None and p[0] > 0]
                if points:
                    axes.step(
                        *zip(*points, strict=True),
                        where="post",
                        color=colour[name] if i == 0 else FAINT,
                        linestyle=LINES[GROUP_OF[name]],
                        linewidth=2.2 if name == OURSELVES and i == 0 else 1.1 if i == 0 else 0.6,
                        zorder=2 if i == 0 else 1,
                        label=name if i == 0 else None,
                    )
        axes.set(xscale="log", yscale="log", xlabel="seconds", ylabel=label)
        axes.set_xlim(longest / DECADES, 1.1 * longest)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", frameon=False)
    return figure
