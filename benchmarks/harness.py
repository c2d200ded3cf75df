"""Timing: alternate the rivals, repeat, report medians and quartiles.

Other work on the machine slows everybody for seconds at a time.  So rivals take turns within each
repeat and ratios are formed between neighbours in time, never between separate runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

Size = Literal["toy", "quick", "full"]
"""toy: for tests; quick: minutes; full: what is published."""
Samples = dict[str, list[float]]

SLOW_REPEATS = 3


def alternate(rivals: Mapping[str, Callable[[], object]], repeats: int, patience: float) -> Samples:
    """Seconds of each rival in each repeat; one untimed call of each comes first.

    A rival whose warm-up took longer than `patience` takes part in the first three repeats only.
    """
    slow = {name for name, run in rivals.items() if seconds(run) > patience}
    samples: Samples = {name: [] for name in rivals}
    names = list(rivals)
    for r in range(repeats):
        # Every rival goes first as often as any other.
        for name in names[r % len(names) :] + names[: r % len(names)]:
            if r < SLOW_REPEATS or name not in slow:
                samples[name].append(seconds(rivals[name]))
    return samples


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Median, quartiles and count of a sample; None where there is nothing to summarise."""
    if not len(values):
        return {"median": None, "lower": None, "upper": None, "count": 0}
    lower, median, upper = np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75])
    return {
        "median": float(median),
        "lower": float(lower),
        "upper": float(upper),
        "count": len(values),
    }


def ratios(samples: Samples, base: str) -> dict[str, dict]:
    """Each rival's time over the base's of the same repeat."""
    return {
        name: spread([t / b for t, b in zip(times, samples[base], strict=False)])
        for name, times in samples.items()
        if name != base
    }


def show(value: float | None, digits: int = 3) -> str:
    """A number for a table."""
    return "-" if value is None else f"{value:.{digits}g}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned plain text."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)
