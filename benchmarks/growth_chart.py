"""The chart of `growth`: processor seconds and peak memory of a product against the length."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.chart_style import OTHERS, OURS, plain
from benchmarks.growth import DONE


def growth_chart(data: dict) -> Figure:
    """Two panels; a colour for each library, dashed where the matrix is that of Gauss-Newton."""
    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    panels = figure.subplots(1, 2)
    family = {name: name.split(",")[0] for name in data["methods"]}
    colours = dict(zip(dict.fromkeys(family.values()), (OURS, *OTHERS), strict=False))
    drawn: list[str] = []
    for name, method in data["methods"].items():
        style = {
            "color": colours[family[name]],
            "linestyle": "-" if method["kind"] == "full" else "--",
            "marker": "osD^"[drawn.count(family[name])],
            "markersize": 4,
        }
        drawn.append(family[name])
        runs = [run for run in method["runs"] if run["outcome"] == DONE]
        lengths = [run["n"] for run in runs]
        for axes, column in zip(panels, ("cpu_seconds", "peak_mib"), strict=True):
            axes.plot(lengths, [run[column] for run in runs], label=name, **style)
    for axes, label in zip(
        panels, ("processor seconds of a product", "peak memory, MiB"), strict=True
    ):
        plain(axes)
        axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel=label)
        axes.set_xticks(data["lengths"], map(str, data["lengths"]))
        axes.minorticks_off()
    panels[0].set_title(f"width {data['d']}, {data['dtype']}", loc="left")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", frameon=False)
    return figure
