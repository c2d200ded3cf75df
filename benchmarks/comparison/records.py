"""The file of records: one JSON object a line, appended as runs end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.comparison.worker import key_of


class Records:
    """The file, and what it holds by `key_of`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known: dict[tuple, dict[str, Any]] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = list(read(file))
        # Rewritten, so that the next line does not continue a broken one.
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for record in lines:
            self._learn(record)
        self._append({"kind": "environment", **environment.describe()})

    def add(self, record: dict[str, Any]) -> None:
        """Append a record and say so."""
        self._append(record)
        self._learn(record)
        print(line_of(record), flush=True)

    def all(self) -> list[dict[str, Any]]:
        """Those of runs, tries and pilots."""
        return list(self.known.values())

    def _learn(self, record: dict[str, Any]) -> None:
        if record["kind"] != "environment":
            self.known[key_of(record)] = record

    def _append(self, record: dict[str, Any]) -> None:
        with self.file.open("a") as out:
            out.write(json.dumps(record, allow_nan=False) + "\n")


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, without a line that was cut off."""
    if file.exists():
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def line_of(record: Mapping[str, Any]) -> str:
    """For the terminal."""
    parts = [record["problem"], f"seed {record['seed']}", record["method"]]
    if record["choice"] is not None:
        parts.append(f"{record['choice']:g}")
    if record["kind"] != "run":
        parts.append(f"({record['kind']})")
    parts.append(record["status"])
    if record.get("loss") is not None:
        parts.append(f"{record['seconds']:.3g} s, relative loss {record['relative_loss']:.5g}")
    if record.get("message"):
        parts.append(record["message"])
    return "  " + ", ".join(parts)


def best_choice(
    records: Iterable[Mapping[str, Any]], problem: str, method: str, default: float | None
) -> float | None:
    """Of the first seed: with the lowest held-out loss where there is one, else the lowest loss.

    Tries decide where there are any, for they had equal time; else the runs.
    """
    found = [
        r
        for r in records
        if (r["problem"], r["method"], r["seed"]) == (problem, method, 0)
        and r.get("loss") is not None
    ]
    tries = [r for r in found if r["kind"] == "try"]
    return min(tries or found, key=merit)["choice"] if found else default


def merit(record: Mapping[str, Any]) -> float:
    """What the best choice has the least of."""
    held_out = record.get("held_out")
    return record["loss"] if held_out is None else held_out
