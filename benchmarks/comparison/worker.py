"""One run in a process of its own: `python -m benchmarks.comparison.worker REQUEST RECORD`.

REQUEST is a JSON object, see `Request`; the record is written to the file RECORD.  Thread counts
are those of the environment that the process was started with.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.harness import Size
from benchmarks.memory import forget_peak, peak_bytes, resident_bytes

WARM_UP = 0.3
"""Seconds of a toy problem before the clock is set: first calls load and compile things."""
LONGEST_MESSAGE = 300

Kind = Literal["pilot", "try", "run"]
"""A pilot sets the limits of others, a try chooses from a method's grid; only runs are compared."""
KEY = ("kind", "problem", "seed", "method", "choice")
"""What makes it the same run."""


@dataclass(frozen=True)
class Request:
    """What to run.

    problem, method: names.  choice: of the method's grid.  limit: seconds.
    core: the processor to stay on; None leaves that to the system.
    """

    problem: str
    method: str
    choice: float | None
    seed: int
    size: Size
    limit: float
    core: int | None = None
    kind: Kind = "run"


def identity(request: Request) -> dict[str, Any]:
    """The fields of a record that say which run it is of."""
    return {name: value for name, value in asdict(request).items() if name != "core"}


def key_of(record: Mapping[str, Any]) -> tuple:
    """What a record has in common with that of the same run, and with no other."""
    return tuple(record[name] for name in KEY)


def measure(request: Request) -> dict[str, Any]:
    """The record of a run, whatever became of it."""
    from benchmarks.comparison import methods, problems

    problem = problems.find(request.problem)
    method = methods.find(problem, request.method)
    record = identity(request)
    if absent := method.missing():
        return record | {"status": "not installed", "message": f"{absent} is not installed."}
    try:
        peer = method.load()
        task = problem.make(request.seed, request.size)
    except ModuleNotFoundError as missing:
        return record | {"status": "not installed", "message": str(missing)}
    if problem.kind != "layer":
        toy = problems.TOY.make(0, "toy")
        warm_up(peer, toy, None if method.grid == (None,) else 1e-3)
    return record | run(peer, task, request.choice, request.limit, problem.gtols)


def warm_up(peer: Any, toy: Any, choice: float | None) -> None:
    """A short run, which no alarm cuts off: an import that is interrupted stays broken."""
    from benchmarks.comparison.watch import Watch

    with suppress(Exception):
        peer(toy, Watch(toy.judge, WARM_UP, (1e-8,)), choice)


def run(peer: Any, task: Any, choice: float | None, limit: float, gtols: tuple) -> dict[str, Any]:
    """Run a peer; loss and gradient at the end are ours, whatever the peer says."""
    from benchmarks.comparison.watch import Ended, Watch, alarm

    watch = Watch(task.judge, limit, gtols)
    status, message = "ended", None
    gc.collect()
    forget_peak()
    before = resident_bytes()
    watch.start()
    try:
        with alarm(watch):
            watch.look(task.start)
            peer(task, watch, choice)
    except Ended:
        status = "time limit"
    except MemoryError as failure:
        status, message = "out of memory", str(failure)
    except Exception as failure:
        # Code that the alarm interrupts may turn it into an exception of its own.
        late = watch.seconds() > limit
        status = "time limit" if late else "error"
        message = None if late else f"{type(failure).__name__}: {failure}"
    seconds, process_seconds = watch.seconds(), watch.process_seconds()
    peak = peak_bytes()
    end = task.final(task.start if watch.point is None else watch.point)
    # A trial point that a peer rejected because its loss rose by rounding counts for the peer.
    reached = {
        f"{gtol:.0e}": watch.reached.get(gtol, seconds)
        for gtol in watch.gtols
        if gtol in watch.reached or (end.gradient is not None and end.gradient <= gtol)
    }
    if gtols and len(reached) == len(gtols):
        status = "reached"
    held_out = [h for h in (watch.best_held_out, end.held_out) if h is not None]
    return {
        "status": status,
        "message": None if message is None else message[:LONGEST_MESSAGE],
        "seconds": seconds,
        "process_seconds": process_seconds,
        "compile_seconds": watch.compile_seconds,
        "reached": reached,
        "loss": finite(end.loss),
        "relative_loss": finite(end.loss / task.scale),
        "gradient": finite(end.gradient),
        "held_out": finite(min(held_out)),
        "scale": task.scale,
        "peak_bytes": peak,
        "extra_bytes": max(0, peak - before),
        "curve": watch.thinned(),
    }


def finite(value: float | None) -> float | None:
    """None for what JSON has no word for."""
    return value if value is not None and np.isfinite(value) else None


def main() -> None:
    """Pin the process, run, write."""
    request = Request(**json.loads(sys.argv[1]))
    if request.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {request.core})
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    Path(sys.argv[2]).write_text(json.dumps(measure(request), allow_nan=False))


if __name__ == "__main__":
    main()
