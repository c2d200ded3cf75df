"""`python -m benchmarks --out DIR`: run the benchmarks, print tables, write JSON and charts."""

from __future__ import annotations

import os

# Before torch loads its OpenMP.  Threads that spin while they wait make everything ten or a hundred
# times slower, for us and our rivals alike, when something else needs a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import (
    batch,
    certificates,
    charts,
    choices,
    environment,
    global_quality,
    growth,
    hessian,
    maps,
    methods,
    paper,
    path,
    preconditioners,
    products,
    sketches,
    softmax,
    svm,
    symmetric,
)
from benchmarks.comparison import benchmark as comparison
from benchmarks.comparison.methods import METHODS
from benchmarks.comparison.problems import PROBLEMS

BENCHMARKS = {
    "comparison": comparison,
    "hessian": hessian,
    "products": products,
    "growth": growth,
    "global_quality": global_quality,
    "preconditioners": preconditioners,
    "batch": batch,
    "symmetric": symmetric,
    "certificates": certificates,
    "sketches": sketches,
    "svm": svm,
    "softmax": softmax,
    "maps": maps,
    "methods": methods,
    "paper": paper,
    "path": path,
    "choices": choices,
}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for results.json and charts"
    )
    parser.add_argument("--quick", action="store_true", help="smaller cases, fewer repeats")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="may be repeated")
    names = dict.fromkeys(method.name for method in METHODS)
    parser.add_argument(
        "--problem", action="append", choices=PROBLEMS, help="of the comparison; may be repeated"
    )
    parser.add_argument(
        "--method", action="append", choices=names, help="of the comparison; may be repeated"
    )
    parser.add_argument("--seconds", type=float, help="of the comparison's runs on a layer")
    parser.add_argument("--seeds", type=int, help="of every problem of the comparison")
    arguments = parser.parse_args()
    threads = environment.set_threads()
    arguments.out.mkdir(parents=True, exist_ok=True)
    size = "quick" if arguments.quick else "full"
    # The comparison's runs are many: some can be chosen, and those of an earlier call stay.
    settings = {
        "comparison": {
            "folder": arguments.out,
            "names": arguments.problem or (),
            "methods": arguments.method or (),
            "seconds": arguments.seconds,
            "seeds": arguments.seeds,
        }
    }
    for name in arguments.only or BENCHMARKS:
        module = BENCHMARKS[name]
        fewer = getattr(module, "THREADS", threads)
        if fewer < threads:
            # BLAS libraries read their thread counts once, at the start of the process.
            command = [sys.executable, "-m", "benchmarks", "--out", arguments.out, "--only", name]
            variables = dict.fromkeys(environment.THREAD_VARIABLES, str(fewer))
            quick = ["--quick"] if arguments.quick else []
            subprocess.run([*command, *quick], env=os.environ | variables, check=True)
            continue
        print(f"\n{name}: {module.__doc__.splitlines()[0]}", flush=True)
        where = environment.describe()
        began = time.perf_counter()
        data = module.run(size, **settings.get(name, {}))
        record = {
            "size": size,
            "environment": where,
            "load_average_after": list(os.getloadavg()),
            "seconds": time.perf_counter() - began,
            "data": data,
        }
        save(arguments.out / "results.json", name, record)
        if name in charts.CHARTS:
            charts.CHARTS[name](data).savefig(arguments.out / f"{name}.png", dpi=150)
        print(module.report(data), flush=True)
    print(f"\nResults: {arguments.out}")


def save(path: Path, name: str, record: dict) -> None:
    """Put one benchmark's record into the file, beside those already there."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = record
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(known, indent=1, allow_nan=False))
    partial.replace(path)


if __name__ == "__main__":
    main()
