"""Charts of the results, one per benchmark."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from benchmarks import batch, certificates, global_quality, growth, methods, paper, symmetric
from benchmarks.chart_style import FAINT, OTHERS, OURS, one_panel, plain
from benchmarks.comparison.charts import profile_chart


def hessian_chart(data: dict) -> Figure:
    """Seconds against width at the smallest n."""
    figure, axes = one_panel("One dense Hessian of attention regression")
    n = min(case["n"] for case in data["cases"])
    cases = [case for case in data["cases"] if case["n"] == n]
    names = list(cases[0]["seconds"])
    for name, colour in zip(names, (OURS, *OTHERS), strict=False):
        known = [c for c in cases if name in c["seconds"]]
        stats = [c["seconds"][name] for c in known]
        middle = [s["median"] for s in stats]
        bars = [
            [s["median"] - s["lower"] for s in stats],
            [s["upper"] - s["median"] for s in stats],
        ]
        axes.errorbar(
            [c["d"] for c in known], middle, yerr=bars, marker="o", label=name, color=colour
        )
    axes.set(xlabel=f"width d (n = {n})", ylabel="seconds", yscale="log")
    axes.legend(frameon=False)
    return figure


def _ratio_bars(title: str, label: str, names: list[str], stats: list[dict]) -> Figure:
    figure, axes = one_panel(title)
    middle = [s["median"] for s in stats]
    bars = [
        [s["median"] - s["lower"] for s in stats],
        [s["upper"] - s["median"] for s in stats],
    ]
    axes.bar(names, middle, yerr=bars, color=OURS, width=0.6, capsize=3)
    axes.axhline(1.0, color=OTHERS[0], linewidth=0.8)
    axes.set(ylabel=label)
    return figure


def batch_chart(data: dict) -> Figure:
    """Speed-up of the batch."""
    cases = data["cases"]
    names = [f"{c['problems']} problems\nn {c['n']}, d {c['d']}" for c in cases]
    stats = [c["ratios"][batch.SINGLE] for c in cases]
    return _ratio_bars("Many small problems", "single solves / one batch", names, stats)


def symmetric_chart(data: dict) -> Figure:
    """Speed-up of the packed product."""
    names = [f"{c['d']}" for c in data["cases"]]
    stats = [c["ratios"][symmetric.WIDE] for c in data["cases"]]
    n = data["cases"][0]["n"]
    return _ratio_bars(
        f"Symmetric halves in KR(A1, A1)^T M, by width d (n = {n})",
        "full width / packed",
        names,
        stats,
    )


def products_chart(data: dict) -> Figure:
    """Seconds of a product against the number of sequences and against their length."""
    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    what = {
        "sequences": f"sequences of {data['fixed_length']} tokens",
        "length": "tokens of a sequence",
    }
    for axes, (name, label) in zip(panels, what.items(), strict=True):
        plain(axes)
        part = data[name]
        middle = [part["seconds"][str(v)]["median"] for v in part["values"]]
        axes.loglog(part["values"], middle, marker="o", color=OURS)
        power = 1 if name == "sequences" else 2
        last, end = part["values"][-1], middle[-1]
        axes.loglog(
            part["values"],
            [end * (v / last) ** power for v in part["values"]],
            color=FAINT,
            linestyle="--",
            label="linear" if power == 1 else "quadratic",
        )
        axes.set(xlabel=label, ylabel="seconds of a Gauss-Newton product")
        axes.set_title(f"exponent {part['exponent']:.2f}", loc="left")
        axes.legend(frameon=False)
    return figure


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
        runs = [run for run in method["runs"] if run["outcome"] == growth.DONE]
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


def global_quality_chart(data: dict) -> Figure:
    """Lowest relative losses, a row for each problem and a colour for each method."""
    cases = data["cases"]
    figure = Figure(figsize=(8.0, 1.2 + 0.5 * len(cases)), layout="constrained")
    axes = figure.add_subplot()
    plain(axes)
    for k, (name, colour) in enumerate(zip(global_quality.METHODS, (OURS, *OTHERS), strict=False)):
        rows = [len(cases) - i - 0.18 * k for i in range(len(cases))]
        stats = [case["methods"][name]["loss"] for case in cases]
        middle = [s["median"] for s in stats]
        bars = [
            [s["median"] - s["lower"] for s in stats],
            [s["upper"] - s["median"] for s in stats],
        ]
        axes.errorbar(middle, rows, xerr=bars, fmt="o", markersize=4, color=colour, label=name)
    labels = [f"{c['tokens']}, d {c['d']}, n {c['n']}, logits {c['scale']:g}" for c in cases]
    axes.set_yticks([len(cases) - i for i in range(len(cases))], labels)
    axes.set(xscale="log", xlabel="lowest relative loss (the plant's is 0)")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def preconditioners_chart(data: dict) -> Figure:
    """Relative loss against products, a panel for each layer."""
    cases = data["cases"]
    figure = Figure(figsize=(3.6 * len(cases) + 1, 4.0), layout="constrained")
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for axes, case in zip(panels, cases, strict=True):
        plain(axes)
        for (kind, r), colour in zip(case["runs"].items(), (OURS, *OTHERS), strict=False):
            axes.plot(
                data["budgets"], list(r["loss"].values()), marker="o", color=colour, label=kind
            )
        axes.set(xlabel="products", yscale="log", title=f"{case['layer']}, ranks {case['ranks']}")
    panels[0].set_ylabel("relative loss")
    panels[0].legend(frameon=False)
    return figure


def certificates_chart(data: dict) -> Figure:
    """Each level over the largest third derivative found, a group of bars for each problem."""
    figure, axes = one_panel(
        "Lipschitz constants of the Hessian over what a search finds", 9.0, 4.6
    )
    cases = data["summary"]
    width = 0.8 / len(certificates.LEVELS)
    for i, (level, colour) in enumerate(
        zip(certificates.LEVELS, (*reversed(OTHERS[:3]), OURS), strict=True)
    ):
        known = [
            (x, case["over_measured"][level])
            for x, case in enumerate(cases)
            if case["over_measured"][level] is not None
        ]
        axes.bar(
            [x + (i - 1.5) * width for x, _ in known],
            [value for _, value in known],
            width,
            color=colour,
            label=level,
        )
    labels = [f"d {c['d']}\n{c['tokens']}\nnoise {c['noise']:g}" for c in cases]
    axes.set_xticks(range(len(cases)), labels, fontsize=7)
    axes.set(yscale="log", ylabel="times the largest found (median over seeds)")
    axes.axhline(1.0, color=FAINT)
    axes.legend(frameon=False)
    return figure


def methods_chart(data: dict) -> Figure:
    """Seconds against rows, a panel for each width; hollow where the fit did not end in time."""
    cases = [c for c in data["cases"] if c["start"] == methods.NEAR]
    cases = [c for c in cases if c["tokens"] == methods.LENGTH] or cases
    widths = sorted({c["d"] for c in cases})
    figure = Figure(figsize=(3.6 * len(widths) + 1, 3.8), layout="constrained")
    panels = figure.subplots(1, len(widths), sharey=True, squeeze=False)[0]
    for axes, d in zip(panels, widths, strict=True):
        plain(axes)
        axes.set_title(f"d = {d}", loc="left")
        own = sorted((c for c in cases if c["d"] == d), key=lambda c: c["sequences"])
        rows = [c["sequences"] * c["tokens"] for c in own]
        for name, colour in zip(methods.METHODS, (OURS, *OTHERS), strict=False):
            found = [c["methods"][name] for c in own]
            times = [m["seconds"]["median"] for m in found]
            axes.plot(rows, times, color=colour, label=name)
            for x, t, m in zip(rows, times, found, strict=True):
                whole = m["successes"] == m["seeds"]
                axes.plot(x, t, "o", color=colour, markerfacecolor=colour if whole else "white")
        axes.set(xscale="log", yscale="log", xlabel="query rows")
    panels[0].set_ylabel("seconds to the end of the fit")
    panels[0].legend(frameon=False)
    return figure


def paper_chart(data: dict) -> Figure:
    """Errors of the first seed's runs; dotted, what the theorem allows from the step before."""
    figure, axes = one_panel("The paper's method in its regime")
    for sketch, colour in zip(paper.SKETCHES, (OURS, *OTHERS), strict=False):
        run = data["contraction"][sketch]
        errors, bounds = run["energy"], run["bounds"]
        label = "exact Kronecker inverse" if sketch == "none" else sketch
        axes.plot(errors, marker="o", markersize=3, color=colour, label=label)
        allowed = [(k + 1, b * e) for k, (e, b) in enumerate(zip(errors, bounds, strict=True))]
        allowed = [(k, bound) for k, bound in allowed[:-1] if bound < errors[k - 1]]
        if allowed:
            axes.plot(*zip(*allowed, strict=True), linestyle=":", color=colour)
    axes.set(yscale="log", xlabel="iteration", ylabel="error in the norm of the Hessian")
    axes.legend(frameon=False)
    return figure


def path_chart(data: dict) -> Figure:
    """Medians over seeds against the ridge: angle, angle times norm, and norm."""
    figure = Figure(figsize=(11.0, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    names = {"angle": "degrees to the SVM", "product": "degrees times ||X||", "norm": "||X||"}
    for axes, (column, label) in zip(panels, names.items(), strict=True):
        plain(axes)
        for case, colour in zip(data["cases"], (OURS, *OTHERS), strict=False):
            middle = [s["median"] for s in case[column]]
            axes.plot(case["ridges"], middle, marker="o", markersize=3, color=colour)
            axes.lines[-1].set_label(f"n {case['n']}, d {case['d']}")
        axes.set(xscale="log", xlabel="ridge", ylabel=label)
        axes.invert_xaxis()
    panels[0].legend(frameon=False)
    return figure


CHARTS: dict[str, Callable[[dict], Figure]] = {
    "comparison": profile_chart,
    "hessian": hessian_chart,
    "batch": batch_chart,
    "symmetric": symmetric_chart,
    "products": products_chart,
    "growth": growth_chart,
    "global_quality": global_quality_chart,
    "preconditioners": preconditioners_chart,
    "certificates": certificates_chart,
    "methods": methods_chart,
    "paper": paper_chart,
    "path": path_chart,
}
