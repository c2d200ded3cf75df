"""Rows of the comparison's tables, the same for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.comparison.methods import GROUP_OF, Group
from benchmarks.comparison.summary import GOAL
from benchmarks.harness import show

MIB = 2**20

Rows = tuple[list[str], list[list[str]]]
"""A header and rows."""


def goal_rows(problem: Mapping, *groups: Group) -> Rows:
    """Of a problem with a goal: who reached it, in which time, and with which loss."""
    header = ["method", "reached", "seconds", "quartiles", "times ours", "quartiles"]
    header += ["loss above the lowest", "gradient", "MiB"]
    rows = []
    for name, m in _of(problem, groups):
        if not m["finished"]:
            rows.append([_label(name, m), _status(m), *["-"] * 7])
            continue
        hits = m["reached"][GOAL]
        time = m["seconds"][GOAL] if hits else m["spent"]
        middle = show(time["median"]) if hits else f"({show(time['median'])})"
        mark = ">" if m["bound"] and m["ratio"]["count"] else ""
        rows.append(
            [
                _label(name, m),
                f"{hits} of {m['runs']}",
                middle,
                _quartiles(time),
                mark + show(m["ratio"]["median"]),
                _quartiles(m["ratio"]),
                _percent(m["excess"]["median"]),
                show(m["gradient"]["median"], 2),
                _mib(m),
            ]
        )
    return header, rows


def loss_rows(problem: Mapping, *groups: Group) -> Rows:
    """Of a problem where the loss in equal time is what counts."""
    header = ["method", "relative loss", "quartiles", "held out", "gradient", "seconds"]
    header += ["ours as good, times sooner", "ahead of ours in our time", "MiB"]
    rows = []
    for name, m in _of(problem, groups):
        if not m["finished"]:
            rows.append([_label(name, m), _status(m), *["-"] * 7])
            continue
        sooner = "never" if m["never"] == m["finished"] else show(m["lead"]["median"])
        if 0 < m["never"] < m["finished"]:
            sooner += f" (never in {m['never']})"
        rows.append(
            [
                _label(name, m),
                show(m["relative_loss"]["median"], 4),
                _quartiles(m["relative_loss"], 4),
                show(m["held_out"]["median"], 4),
                show(m["gradient"]["median"], 2),
                show(m["spent"]["median"]),
                sooner,
                f"{m['ahead']} of {m['finished']}",
                _mib(m),
            ]
        )
    empty = [i for i, _ in enumerate(header) if rows and all(row[i] == "-" for row in rows)]
    keep = [i for i in range(len(header)) if i not in empty]
    return [header[i] for i in keep], [[row[i] for i in keep] for row in rows]


def memory_rows(problems: Mapping[str, Mapping], titles: Mapping[str, str]) -> Rows:
    """Median peak beyond what the process held before, in MiB, by method and problem."""
    names = list(dict.fromkeys(n for p in problems.values() for n in p["methods"]))
    names = [n for n in names if GROUP_OF.get(n) != "ablation"]
    rows = [
        [name, *(_mib(problem["methods"].get(name)) for problem in problems.values())]
        for name in names
    ]
    return ["method", *(titles[key] for key in problems)], rows


def _of(problem: Mapping, groups: tuple[Group, ...]) -> list[tuple[str, Mapping]]:
    """Methods of some groups; all if none is named."""
    return [
        (n, m) for n, m in problem["methods"].items() if not groups or GROUP_OF.get(n) in groups
    ]


def _label(name: str, method: Mapping) -> str:
    return name if method["choice"] is None else f"{name} ({method['choice']:g})"


def _status(method: Mapping) -> str:
    return ", ".join(method["status"])


def _quartiles(stats: Mapping, digits: int = 3) -> str:
    if stats["count"] < 2:
        return "-"
    return f"{show(stats['lower'], digits)} to {show(stats['upper'], digits)}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2g} %"


def _mib(method: Mapping | None) -> str:
    if method is None or method["extra_bytes"]["median"] is None:
        return "-"
    return f"{method['extra_bytes']['median'] / MIB:.0f}"
