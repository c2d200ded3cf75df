"""Newtention beside what a reader would otherwise use: problems x methods, one process a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.comparison.problems import PROBLEMS
from benchmarks.comparison.race import race
from benchmarks.comparison.records import read
from benchmarks.comparison.summary import summarise
from benchmarks.comparison.tables import goal_rows, loss_rows
from benchmarks.harness import Size, table


def run(
    size: Size,
    folder: Path,
    names: Sequence[str] = (),
    methods: Sequence[str] = (),
    seconds: float | None = None,
    seeds: int | None = None,
) -> dict[str, Any]:
    """What is missing in the folder's file of records, then the summary of all that is there.

    names, methods: of problems and methods to run; all if empty.  seconds: of every run on a layer.
    seeds: of every problem.
    """
    file = folder / f"comparison-{size}.jsonl"
    wanted = [problem for name, problem in PROBLEMS.items() if not names or name in names]
    if seconds is not None:
        wanted = [replace(p, seconds={size: seconds}) if p.seconds else p for p in wanted]
    if seeds is not None:
        wanted = [replace(p, seeds={size: seeds}) for p in wanted]
    race(file, size, wanted, methods)
    return collect(file)


def collect(file: Path) -> dict[str, Any]:
    """The summary of a file of records."""
    records = list(read(file))
    return {
        "size": file.stem.removeprefix("comparison-"),
        "environment": next(r for r in reversed(records) if r["kind"] == "environment"),
        "summary": summarise(records, list(PROBLEMS)),
    }


def report(data: Mapping[str, Any]) -> str:
    """A table for every problem."""
    parts = []
    for name, problem in data["summary"]["problems"].items():
        rows = goal_rows if PROBLEMS[name].kind == "planted" else loss_rows
        parts.append(f"{PROBLEMS[name].title}\n{table(*rows(problem))}")
    parts.append(
        "> marks ratios that count the time given (or until a method gave up) for a seed that did "
        "not reach the goal: lower bounds.  In brackets: time spent without arriving."
    )
    return "\n\n".join(parts)
