"""The schedule: who runs when, for how long, and what is known already.

For every problem and seed our own method goes first, as a pilot: its seconds to the goal set the
limits of that seed and count for nothing else.  On the first seed of a planted problem the choices
of a grid are tried for a share of the time.  Then all methods run, ours among them, in an order
that is rotated by the seed, so that a machine that changes its pace favours nobody.  Records are
appended to a file, one JSON object a line; a run that is in it already is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

from benchmarks import environment
from benchmarks.comparison import worker
from benchmarks.comparison.methods import OURS, Group, Method, methods_for
from benchmarks.comparison.problems import GTOLS, Kind, Problem
from benchmarks.comparison.processes import in_process
from benchmarks.comparison.records import Records, best_choice
from benchmarks.comparison.worker import Request, identity, key_of
from benchmarks.harness import Size

FACTORS: Mapping[Kind, Mapping[Group, float]] = {
    "planted": {"ours": 10, "ablation": 20, "scipy": 20, "autograd": 60, "first-order": 60},
    "head": {"ours": 1.2, "ablation": 1.2, "scipy": 1.2, "autograd": 1.2, "first-order": 1},
}
"""Seconds allowed, in units of our own."""
TRIES: Mapping[Kind, float] = {"planted": 1 / 6, "head": 1.0, "layer": 1.0}
"""Share of the time for each choice of a grid on the first seed; where it is 1, they are runs."""
SHORTEST: Mapping[Size, float] = {"toy": 0.2, "quick": 2.0, "full": 2.0}
LONGEST: Mapping[Size, float] = {"toy": 0.5, "quick": 10.0, "full": 90.0}
"""No run is given fewer or more seconds."""
PILOT: Mapping[Size, float] = {"toy": 5.0, "quick": 20.0, "full": 60.0}
"""Seconds of a pilot at most."""

Run = Callable[[Request, int], dict[str, Any]]
"""A request and a number of threads to a record."""


def race(
    file: Path,
    size: Size,
    problems: Iterable[Problem],
    only: Sequence[str] = (),
    run: Run = in_process,
) -> list[dict[str, Any]]:
    """Run what the file lacks and return all of its records.

    only: names of methods; all if empty.  run: how, for tests.
    """
    records = Records(file)
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    for problem in problems:
        width = problem.threads or threads
        # Runs on one thread go side by side, each on a core of its own.
        places = environment.cores() if width == 1 and threads > 1 else []
        for seed in range(problem.seeds[size]):
            reference = _reference(problem, seed, size, records, run, width)
            for batch in _batches(problem, seed, size, reference, records, only):
                missing = [r for r in batch if key_of(identity(r)) not in records.known]
                _in_places(missing, places[:threads] or [None], records, run, width)
    return records.all()


def _reference(
    problem: Problem, seed: int, size: Size, records: Records, run: Run, threads: int
) -> float | None:
    """Seconds of the pilot; None where the limits are fixed."""
    if problem.seconds is not None:
        return None
    pilot = Request(problem.name, OURS, None, seed, size, PILOT[size], kind="pilot")
    key = key_of(identity(pilot))
    if key not in records.known:
        records.add(run(pilot, threads))
    return reference_seconds(records.known[key])


def _batches(
    problem: Problem,
    seed: int,
    size: Size,
    reference: float | None,
    records: Records,
    only: Sequence[str],
) -> Iterator[list[Request]]:
    """The tries of a problem and a seed, if any, then the runs, which depend on their records."""
    wanted = methods_for(problem)
    wanted = [m for m in wanted if m.choices(size) and (not only or m.name in only)]
    turn = seed * len(wanted) // problem.seeds[size]
    wanted = wanted[turn:] + wanted[:turn]
    limits = {m.name: seconds_allowed(problem, m, size, reference) for m in wanted}

    def request(method: Method, choice: float | None, share: float, kind: worker.Kind) -> Request:
        limit = share * limits[method.name]
        return Request(problem.name, method.name, choice, seed, size, limit, kind=kind)

    share = TRIES[problem.kind]
    if seed == 0 and share < 1:
        grids = [(m, m.choices(size)) for m in wanted]
        yield [request(m, c, share, "try") for m, grid in grids if len(grid) > 1 for c in grid]
    known = records.all()
    yield [request(m, c, 1, "run") for m in wanted for c in choices(problem, m, seed, size, known)]


def reference_seconds(pilot: Mapping[str, Any]) -> float:
    """Our seconds to the goal, or as long as we tried."""
    return pilot.get("reached", {}).get(f"{GTOLS[-1]:.0e}") or pilot.get("seconds") or 0.0


def seconds_allowed(problem: Problem, method: Method, size: Size, reference: float | None) -> float:
    """The limit of a run."""
    if problem.seconds is not None:
        return problem.seconds[size]
    assert reference is not None
    factor = FACTORS[problem.kind][method.group] if method.budget is None else method.budget
    return min(max(factor * reference, SHORTEST[size]), LONGEST[size])


def choices(
    problem: Problem, method: Method, seed: int, size: Size, records: Iterable[Mapping[str, Any]]
) -> tuple[float | None, ...]:
    """The best of the grid; all of it on the first seed where nothing was tried before."""
    grid = method.choices(size)
    if len(grid) == 1 or (seed == 0 and TRIES[problem.kind] == 1):
        return grid
    return (best_choice(records, problem.name, method.name, grid[0]),)


def _in_places(
    batch: Sequence[Request],
    places: Sequence[int | None],
    records: Records,
    run: Run,
    threads: int,
) -> None:
    """Run a batch, at each time one request in each place."""
    free: Queue[int | None] = Queue()
    for place in places:
        free.put(place)

    def one(request: Request) -> dict[str, Any]:
        core = free.get()
        try:
            return run(replace(request, core=core), threads)
        finally:
            free.put(core)

    pool = ThreadPoolExecutor(len(places))
    try:
        for done in as_completed([pool.submit(one, request) for request in batch]):
            records.add(done.result())
    finally:
        pool.shutdown(cancel_futures=True)
