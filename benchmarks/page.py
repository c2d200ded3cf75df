"""`python -m benchmarks.page RESULTS`: the page docs/benchmarks.md and its charts from results.

RESULTS is a folder that `python -m benchmarks --only comparison --out RESULTS` has written.  Every
number of the page and every sentence with one is computed from what lies there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import charts
from benchmarks.comparison import benchmark, prose
from benchmarks.comparison.charts import curves_chart, profile_chart, seconds_chart
from benchmarks.comparison.methods import GROUPS, METHODS, OTHERS
from benchmarks.comparison.problems import NEAR, PROBLEMS
from benchmarks.comparison.race import FACTORS, LONGEST, TRIES
from benchmarks.comparison.tables import goal_rows, loss_rows, memory_rows

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = Path("images") / "benchmarks"
TITLES = {name: problem.title for name, problem in PROBLEMS.items()}
WIDTH = 104
SECTIONS = {
    "products": "Products with the Hessian",
    "growth": "Products as a sequence grows",
    "global_quality": "How good the minima are",
}
"""Other benchmarks that get a section where the results hold them."""

Draw = Callable[[str, Figure], str]
"""A name and a figure to the line that shows it."""


def write(results: Path, out: Path) -> Path:
    """Write the page and its charts; the page's path.

    Raises:
        SystemExit: the folder has no records of a comparison.
    """
    files = sorted(results.glob("comparison-*.jsonl"))
    if not files:
        raise SystemExit(
            f"{results} holds no comparison-*.jsonl; make one with "
            f"python -m benchmarks --only comparison --out {results}"
        )
    # Where there are several, the largest: "full" sorts before "quick".
    data = benchmark.collect(files[0])
    stored = results / "results.json"
    others = json.loads(stored.read_text()) if stored.exists() else {}
    (out / IMAGES).mkdir(parents=True, exist_ok=True)

    def draw(name: str, figure: Figure) -> str:
        figure.savefig(out / IMAGES / f"{name}.png", dpi=110)
        title = name.replace("-", " ").capitalize()
        return f"![{title}]({IMAGES.as_posix()}/{name}.png)"

    page = out / "benchmarks.md"
    page.write_text("\n\n".join(map(wrapped, blocks(data, others, draw))) + "\n")
    return page


def blocks(data: Mapping[str, Any], others: Mapping[str, Any], draw: Draw) -> list[str]:
    """The page, paragraph by paragraph."""
    problems = data["summary"]["problems"]
    parts = [*_opening(data), *_short(problems)]
    parts += _measured(data)
    parts += _goal(problems, draw)
    parts += _profiles(data, draw)
    for key, title in (("head", "The packaged head"), ("layer", "A whole layer")):
        if key in problems:
            parts += _loss(key, title, problems[key], draw)
    parts += _ablations(problems)
    parts += ["## Memory", MEMORY, markdown(*memory_rows(problems, TITLES))]
    for name, title in SECTIONS.items():
        if name in others:
            parts += _other(name, title, others[name], draw)
    return [*parts, *_settings(problems), "## Limits", LIMITS]


def _opening(data: Mapping[str, Any]) -> list[str]:
    target = "bench" if data["size"] == "quick" else "bench-full"
    folder = f"benchmarks/results/{data['size']}"
    where = data["environment"]
    versions = ", ".join(f"{n} {v}" for n, v in where["versions"].items() if v is not None)
    memory = where["memory_bytes"] / 2**30
    return [
        "# Benchmarks",
        "Newtention beside what one would otherwise use, on one machine. This page is made from "
        "the records of the runs, its sentences as well as its numbers:",
        f"    make {target}\n    python -m benchmarks.page {folder}",
        "Where it shows fewer problems, seeds or methods than that target runs, `--problem`, "
        "`--seeds` and `--method` of `python -m benchmarks --only comparison` have chosen them.",
        f"{where['cpu']}, {where['cores']} cores, {memory:.0f} GiB of memory; {versions}. "
        f"Load average when it began: {where['load_average'][0]:.1f}.",
    ]


def _short(problems: Mapping[str, Mapping]) -> list[str]:
    lines = [
        f"- *{TITLES[key]}*. " + " ".join(prose.goal_sentences(problem))
        for key, problem in problems.items()
        if PROBLEMS[key].kind == "planted"
    ]
    lines += [
        f"- *{TITLES[key]}*. " + " ".join(prose.equal_loss_sentences(problem))
        for key, problem in problems.items()
        if PROBLEMS[key].kind != "planted"
    ]
    losses = prose.losers(TITLES, problems)
    worse = "\n".join(f"- {line}" for line in losses)
    parts = ["## In short", "\n".join(lines)]
    parts.append("**Where another method wins:**" if losses else "On no problem did another win.")
    missing = prose.missing_sentence(problems)
    return [p for p in (*parts, worse, missing) if p]


def _measured(data: Mapping[str, Any]) -> list[str]:
    factors = FACTORS["planted"]
    threads = int(data["environment"]["variables"]["OMP_NUM_THREADS"] or 1)
    return [
        "## How it is measured",
        MEASURED.format(
            autograd=factors["autograd"],
            scipy=factors["scipy"],
            tries=TRIES["planted"],
            head=FACTORS["head"]["scipy"],
            longest=LONGEST[data["size"]],
            near=100 * NEAR,
            beside=BESIDE.format(count=threads) if threads > 1 else "",
        ),
    ]


def _goal(problems: Mapping[str, Mapping], draw: Draw) -> list[str]:
    planted = {k: p for k, p in problems.items() if PROBLEMS[k].kind == "planted"}
    if not planted:
        return []
    parts = ["## Time to a minimum", GOAL, *prose.compilation(planted)]
    parts.append(draw("seconds", seconds_chart(planted, TITLES)))
    for key, problem in planted.items():
        parts.append(f"### {capitalised(TITLES[key])}")
        parts.append(markdown(*goal_rows(problem, "ours", *OTHERS)))
    return parts


def _profiles(data: Mapping[str, Any], draw: Draw) -> list[str]:
    sentences = list(prose.profile_sentences(data["summary"]["profiles"]))
    if not sentences:
        return []
    chart = draw("profiles", profile_chart(data))
    return ["## Performance profiles", PROFILES, chart, " ".join(sentences)]


def _loss(key: str, title: str, problem: Mapping, draw: Draw) -> list[str]:
    held_out = any(m["held_out"]["count"] for m in problem["methods"].values())
    columns = {1: "relative loss", 2: "norm of the gradient"}
    if held_out:
        columns = {1: "relative loss, part of the training sentences", 3: "held-out relative loss"}
    chart = draw(key, curves_chart(problem, columns))
    rows = loss_rows(problem, "ours", *OTHERS)
    sentences = " ".join(prose.equal_loss_sentences(problem))
    words = f"{capitalised(TITLES[key])}. {LOSS[key]}"
    return [f"## {title}", words, chart, sentences, markdown(*rows)]


def _ablations(problems: Mapping[str, Mapping]) -> list[str]:
    parts = []
    for key, problem in problems.items():
        rows = goal_rows if PROBLEMS[key].kind == "planted" else loss_rows
        table = rows(problem, "ours", "ablation")
        if len(table[1]) > 1:
            parts += [f"*{TITLES[key]}*", markdown(*table)]
    return ["## What each part brings", ABLATIONS, *parts] if parts else []


def _other(name: str, title: str, record: Mapping[str, Any], draw: Draw) -> list[str]:
    """A section of another benchmark: its own command, first sentence, chart and table."""
    module = importlib.import_module(f"benchmarks.{name}")
    what = " ".join(module.__doc__.split(".")[0].split())
    quick = " --quick" if record["size"] == "quick" else ""
    parts = [f"## {title}", f"`python -m benchmarks{quick} --only {name}`: {what}."]
    if name in charts.CHARTS:
        parts.append(draw(name.replace("_", "-"), charts.CHARTS[name](record["data"])))
    return [*parts, f"```text\n{module.report(record['data'])}\n```"]


def _settings(problems: Mapping[str, Mapping]) -> list[str]:
    kinds = {PROBLEMS[key].kind for key in problems}
    rows = [
        [method.name, " and ".join(k for k in method.kinds if k in kinds), method.setting]
        for method in METHODS
        if kinds & set(method.kinds)
    ]
    parts = ["## Methods and settings", SETTINGS]
    for group, words in GROUPS.items():
        names = {m.name for m in METHODS if m.group == group}
        mine = [row for row in rows if row[0] in names]
        if mine:
            parts += [
                f"*{capitalised(words)}*",
                markdown(["method", "on", "setting"], mine),
            ]
    return parts


def capitalised(words: str) -> str:
    """With a capital first, all else as it is."""
    return words[0].upper() + words[1:]


def wrapped(block: str) -> str:
    """Prose and lists in lines of the width of the other pages; all else as it is."""
    if block.startswith(("|", "#", "!", "```", "    ")):
        return block
    fill = partial(textwrap.fill, width=WIDTH, break_long_words=False, break_on_hyphens=False)
    parts = []
    for paragraph in block.split("\n\n"):
        items = re.split(r"\n(?=- )", paragraph)
        lines = [" ".join(item.split()) for item in items]
        parts.append("\n".join(fill(x, subsequent_indent="  " * x.startswith("- ")) for x in lines))
    return "\n\n".join(parts)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


MEASURED = """\
Every run is a process of its own with fixed numbers of threads: one for the planted
problems{beside}, and all of them for the head and the layer. All methods minimise the same loss
from the same start: the one that `solve` would take on its own, with a *near* start the planted X
disturbed by {near:g} % of its norm, Y solved for in both; for the layer its truncation, W_O solved
for. The order is rotated from seed to seed. A run ends when the norm of the gradient of (X, Y) is
1e-8, when the method's own rule says so, or when its time is over. Before the clock is set, the
method runs on a small problem, so that libraries are loaded; JAX's compilation is timed apart and
not counted. Looks at loss and gradient stop the clock, for everybody.

The time allowed is a multiple of what our own solver took in a separate run on the same seed just
before: {autograd:g} for methods on automatic differentiation, {scipy:g} for scipy on planted
problems; {head:g} on the head, where first-order methods, whose rates fall over the time they are
given, get 1 and SOAP 3 as well; {longest:g} s at most. A method that does not arrive counts with
the time it was given, and `>` marks the ratio as a lower bound. Rates are those that did best on
the first seed, where all of the list were tried, on planted problems for {tries:.2g} of the time;
the tries cost nothing. Losses and gradients at the end are computed by our formulas, which the
tests hold against automatic differentiation. Memory is the peak of resident memory during the run
beyond what the process held before."""
BESIDE = ", {count} of which run side by side on cores of their own"
GOAL = """\
Seconds on the clock until the norm of the gradient is 1e-8; medians and quartiles over seeds,
ratios to ours formed seed by seed. In brackets, and hollow in the chart: the time spent without
arriving. *Loss above the lowest*: over the lowest that any method found on the same problem and
seed. From random starts methods end in different minima, and the times are to different ends."""
PROFILES = """\
The share of problems and seeds that a method solved within so many times the least time of all
methods ([Dolan and Moré 2002](https://doi.org/10.1007/s101070100263)). A case that nobody solved
counts against all; a method counts the cases that it tried."""
LOSS = {
    "head": "Loss and gradient against seconds; the first seed in colour.",
    "layer": "Every method is given the same time and judged on the same sentences; its best "
    "held-out loss on the way counts.",
}
ABLATIONS = "The same runs with a part of the solver taken out or exchanged."
MEMORY = (
    "Peak beyond what the process held before the run, MiB, medians over seeds. What JAX takes to "
    "compile is in it."
)
SETTINGS = "Each at the best documented setting that we know of."
LIMITS = """\
- One machine, problems of one family, a few seeds. Times of different machines do not compare.
- Random starts end in different minima: speed to a minimum is not quality of it. The profile by
  loss shows the latter.
- Settings of other packages are those that their documents recommend for small dense problems in
  double precision, and lists of rates; somebody who knows a package better may get more from it.
- Methods on automatic differentiation pay for their derivatives, and that is what is compared.
  scipy is fed with ours: there the difference is that of the methods."""


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("results", type=Path, help="folder of the results")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the page; docs")
    arguments = parser.parse_args()
    print(f"Written: {write(arguments.results, arguments.out)}")


if __name__ == "__main__":
    main()
