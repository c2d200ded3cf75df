"""Hessian and Gauss-Newton products as a sequence grows: seconds and peak memory, beside autograd.

Each method at each length runs in a process of its own, so that its peak is its own, under limits
of time and address space; what does not fit is a result.  All products are compared with ours.
Processor time stands beside wall time: other work on the machine changes it less, and here rivals
cannot take turns.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.environment import set_threads
from benchmarks.harness import Size, show, table
from benchmarks.memory import forget_peak, peak_bytes, resident_bytes
from benchmarks.product_peers import METHODS, Product, random_point

SIZES: Mapping[str, dict] = {
    "toy": {
        "d": 4,
        "dtype": "float64",
        "lengths": (16,),
        "methods": ["newtention, Hessian", "double backward"],
    },
    "quick": {"d": 64, "dtype": "float32", "lengths": (512, 1024, 2048, 4096)},
    "full": {"d": 64, "dtype": "float32", "lengths": (512, 1024, 2048, 4096, 8192, 16384)},
}
AGREEMENT = {"float32": 1e-3, "float64": 1e-10}
"""Most that a product may differ from ours, in relative norm."""
FIGURES = {
    "seconds": "Seconds of a product",
    "cpu_seconds": "Processor seconds of a product, all threads",
    "peak_mib": "Peak memory, MiB",
}
DONE, NO_MEMORY, NO_TIME = "done", "out of memory", "out of time"
REPEATS = 5
"""At most, within a quarter of the time."""


@dataclass(frozen=True)
class Limits:
    """What one process may take: seconds, its start included, and GiB of address space."""

    seconds: float = 60.0
    gib: float = 12.0


def run(size: Size) -> dict:
    """Seconds, peak and difference of every method at every length."""
    setting, limits = SIZES[size], Limits()
    names = setting.get("methods", list(METHODS))
    d, dtype = setting["d"], setting["dtype"]
    records: dict[str, list[dict]] = {name: [] for name in names}
    with TemporaryDirectory() as folder:
        for n in setting["lengths"]:
            for name in names:
                record = {"n": n} | measure(name, n, d, dtype, limits, Path(folder))
                record["difference"] = _difference(name, names, Path(folder), dtype)
                records[name].append(record)
            for file in Path(folder).iterdir():
                file.unlink()
    return {
        "d": d,
        "dtype": dtype,
        "lengths": list(setting["lengths"]),
        "limits": asdict(limits),
        "methods": {name: {"kind": METHODS[name].kind, "runs": records[name]} for name in names},
    }


def measure(name: str, n: int, d: int, dtype: str, limits: Limits, folder: Path) -> dict:
    """One method at one length in a process of its own; its product goes into the folder."""
    case = map(str, (name, n, d, dtype, limits.seconds, limits.gib, _file(folder, name)))
    failed = dict.fromkeys(FIGURES)
    try:
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.growth", *case],
            capture_output=True,
            text=True,
            timeout=limits.seconds,
        )
    except subprocess.TimeoutExpired:
        return {"outcome": NO_TIME, **failed}
    if child.returncode:
        raise RuntimeError(f"{name} at n = {n} failed: {child.stderr[-2000:]}")
    found = json.loads(child.stdout)
    return {"outcome": DONE, **found} if found else {"outcome": NO_MEMORY, **failed}


def _difference(name: str, names: list[str], folder: Path, dtype: str) -> float | None:
    """From our product of that kind; None where there is none, or no other, to compare.

    Raises:
        AssertionError: it is more than rounding.
    """
    ours = next(other for other in names if METHODS[other].kind == METHODS[name].kind)
    files = [_file(folder, other) for other in (name, ours)]
    if name == ours or not all(file.exists() for file in files):
        return None
    theirs, own = map(np.load, files)
    difference = float(np.linalg.norm(theirs - own) / np.linalg.norm(own))
    if not difference <= AGREEMENT[dtype]:
        raise AssertionError(f"The product of {name} differs from ours by {difference:.1e}.")
    return difference


def _file(folder: Path, name: str) -> Path:
    return folder / f"{list(METHODS).index(name)}.npy"


def main(arguments: list[str]) -> None:
    """The process of `measure`: prints the figures, or null where memory did not suffice."""
    name, n, d, dtype, most_seconds, gib, file = arguments
    began = time.perf_counter()
    set_threads()
    resource.setrlimit(resource.RLIMIT_AS, (int(float(gib) * 2**30),) * 2)
    build = METHODS[name].build
    build(random_point("layer", 1, 8, int(d), torch.float64))()  # libraries load at first use
    point = random_point("layer", 1, int(n), int(d), getattr(torch, dtype))
    forget_peak()
    before = resident_bytes()
    try:
        product = build(point)
        times = [timed(product, Path(file))]
        while len(times) <= REPEATS and (
            time.perf_counter() - began + 2 * times[0][0] < 0.25 * float(most_seconds)
        ):
            times.append(timed(product))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        print("null")
        return
    wall, cpu = map(median, zip(*(times[1:] or times), strict=True))  # the first warms up
    peak = (peak_bytes() - before) / 2**20
    print(json.dumps({"seconds": wall, "cpu_seconds": cpu, "peak_mib": peak}))


def timed(product: Product, file: Path | None = None) -> tuple[float, float]:
    """Wall and processor seconds of a product, which goes into the file if there is one."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = product()
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    if file is not None:
        np.save(file, result.detach().numpy())
    return seconds


def report(data: dict) -> str:
    """A table of each figure."""
    lengths = data["lengths"]
    limits = f"{data['limits']['seconds']:.0f} s, {data['limits']['gib']:.0f} GiB"
    lines = []
    for column, what in FIGURES.items():
        rows = [
            [name, *(show(r[column]) if r["outcome"] == DONE else r["outcome"] for r in m["runs"])]
            for name, m in data["methods"].items()
        ]
        lines.append(f"{what}, one sequence, d {data['d']}, {data['dtype']} (limits {limits}):")
        lines.append(table(["method", *(f"n {n}" for n in lengths)], rows))
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
