"""Timing: alternate the rivals, repeat, report medians and quartiles.

Other work on the machine slows everybody for seconds at a time.  So rivals take turns within each
repeat and ratios are formed between neighbours in time, never between separate runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Samples = dict[str, list[float]]


def alternate(rivals: Mapping[str, Callable[[], object]], repeats: int, patience: float) -> Samples:
    """Seconds of each rival in each repeat; one untimed call of each comes first.

    A rival whose warm-up took longer than `patience` is run once more only: its noise is small
    beside its time.
    """
    slow = set()
    for name, run in rivals.items():
        if seconds(run) > patience:
            slow.add(name)
    samples: Samples = {name: [] for name in rivals}
    names = list(rivals)
    for r in range(repeats):
        # Every rival goes first as often as any other.
        for name in names[r % len(names) :] + names[: r % len(names)]:
            if not (name in slow and samples[name]):
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
    """Each rival's time over the base's of the same repeat (its median where repeats differ)."""
    result = {}
    for name, times in samples.items():
        if name == base or not times:
            continue
        if len(times) == len(samples[base]):
            values = [t / b for t, b in zip(times, samples[base], strict=True)]
        else:
            values = [t / float(np.median(samples[base])) for t in times]
        result[name] = spread(values)
    return result


def show(value: float | None, digits: int = 3) -> str:
    """A number for a table."""
    return "-" if value is None else f"{value:.{digits}g}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned plain text."""
    cells = [[str(c) for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)
