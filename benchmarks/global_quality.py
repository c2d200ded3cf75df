"""How good the minima are: planted layers found again, in equal time, by ours and by Adam.

Targets of one planted layer without noise, so that the least loss is 0.  Every method gets the same
seconds of one core, Adam for each of its rates, and restarts until they are over; ours stop where
the plant is found.  A problem counts as found where the relative loss ends below 1e-8; Adam's end
points are fitted by ours first, beyond its budget, so that it is charged for the wrong basin only
and not for slow convergence.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from torch import Tensor

import newtention as nt
from benchmarks import environment
from benchmarks.harness import Size, show, spread, table
from newtention import zoo
from newtention.newton.starts import random_start

THREADS = 1
MEMBERS = 16
FOUND = 1e-8
CASES = {
    "toy": ((2, 32, "clustered", 1.0),),
    "quick": (
        *((4, 256, tokens, 1.0) for tokens in ("real", "clustered", "gaussian")),
        *((8, 256, tokens, 1.0) for tokens in ("real", "clustered")),
    ),
    "full": (
        *((4, 256, tokens, 1.0) for tokens in ("real", "clustered", "gaussian")),
        (4, 256, "real", 3.0),
        *((8, 256, tokens, 1.0) for tokens in ("real", "clustered", "gaussian")),
        (8, 256, "clustered", 3.0),
        (8, 4096, "clustered", 1.0),
        (16, 1024, "real", 1.0),
    ),
}
"""Width, tokens, kind of tokens, root mean square of the planted logits."""
SEEDS = {"toy": 1, "quick": 3, "full": 3}
BUDGET = {"toy": 0.3, "quick": 10.0, "full": 10.0}
"""Seconds of a core for a method on a problem; one batch that has begun is finished."""
RATES = (1e-2, 3e-2)
"""Adam's, each with the whole budget: the better one counts."""
ADAM_RUNS = 2
"""Restarts of Adam's batch within the budget; more of them are shorter and end higher."""
NOISE = 0.3
"""Standard deviation of the noise on Adam's weights at each step, in learning rates; it falls to 0
over the first half of a run."""

Found = tuple[float, int]
"""Lowest relative loss and number of fits."""
Case = tuple[int, int, str, float]
Method = Callable[[nt.AttentionProblem, int, float], Found]
"""A problem, a seed and seconds of a core to what was found."""


def run(size: Size) -> dict:
    """Every method on every problem, one after another within a seed; seeds side by side."""
    seeds = range(SEEDS[size])
    jobs = [(case, seed, BUDGET[size]) for case in CASES[size] for seed in seeds]
    if len(jobs) == 1:
        found = [_of_seed(job) for job in jobs]
    else:
        # Each on a core of its own, in a fresh process: torch's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(environment.cores()) or 1, context) as pool:
            found = list(pool.map(_of_seed, jobs))
    cases = []
    for i, (d, n, tokens, scale) in enumerate(CASES[size]):
        mine = found[i * len(seeds) : (i + 1) * len(seeds)]
        methods = {name: _summary([runs[name] for runs in mine]) for name in METHODS}
        cases.append({"d": d, "n": n, "tokens": tokens, "scale": scale, "methods": methods})
    return {"cases": cases, "budget": BUDGET[size], "members": MEMBERS}


def _of_seed(job: tuple[Case, int, float]) -> dict[str, dict]:
    """All methods on one problem; seconds are the processor's."""
    (d, n, tokens, scale), seed, budget = job
    problem = zoo.planted(d, n, tokens=tokens, scale=scale, seed=seed).problem
    runs = {}
    for name, method in METHODS.items():
        began = time.process_time()
        loss, fits = method(problem, seed, budget)
        spent = time.process_time() - began
        runs[name] = {"seed": seed, "loss": loss, "fits": fits, "seconds": spent}
    return runs


def _summary(runs: list[dict]) -> dict:
    return {
        "found": sum(r["loss"] < FOUND for r in runs),
        "seeds": len(runs),
        "fits": sum(r["fits"] for r in runs),
        "hits": spread([r["seconds"] for r in runs if r["loss"] < FOUND]),
        "loss": spread([r["loss"] for r in runs]),
    }


def restarts(problem: nt.AttentionProblem, seed: int, budget: float) -> Found:
    """`solve` from random starts, a batch at a time."""
    return _batches(
        budget,
        lambda draw: nt.solve(problem, n_init=MEMBERS, seed=seed + 1000 * draw).relative_loss,
    )


def sampled_restarts(problem: nt.AttentionProblem, seed: int, budget: float) -> Found:
    """The same on samples of the rows."""
    return _batches(
        budget,
        lambda draw: (
            nt.basin_hopping(
                problem, members=MEMBERS, rounds=0, seed=seed + 1000 * draw
            ).solution.relative_loss
        ),
    )


def hopping(problem: nt.AttentionProblem, seed: int, budget: float) -> Found:
    """`basin_hopping` for as long as there is time."""
    deadline = time.process_time() + budget

    def check(_: object) -> None:
        if time.process_time() > deadline:
            raise StopIteration

    found = nt.basin_hopping(problem, members=MEMBERS, rounds=10**6, seed=seed, callback=check)
    return found.solution.relative_loss, found.rounds[-1].fits


def _batches(budget: float, fit: Callable[[int], float]) -> Found:
    """Batches until one has found the plant or the time is over."""
    deadline = time.process_time() + budget
    lowest, draw = float("inf"), 0
    while lowest > FOUND and (draw == 0 or time.process_time() < deadline):
        lowest = min(lowest, fit(draw))
        draw += 1
    return lowest, draw * MEMBERS


def adam(problem: nt.AttentionProblem, seed: int, budget: float) -> Found:
    """Adam with noise, a batch of restarts at a time; the better of its rates."""
    lowest = float("inf")
    for rate in RATES:
        for draw in range(ADAM_RUNS):
            first = 1000 * draw
            X = torch.cat([random_start(problem, 1, seed, first + i)[0] for i in range(MEMBERS)])
            generator = torch.Generator().manual_seed(seed + first)
            ends = _adam(problem, X, rate, budget / ADAM_RUNS, generator)
            fits = nt.solve_many([problem] * MEMBERS, ends)
            lowest = min(lowest, *(s.relative_loss for s in fits))
    return lowest, ADAM_RUNS * MEMBERS


def _adam(
    problem: nt.AttentionProblem,
    X: Tensor,
    rate: float,
    budget: float,
    generator: torch.Generator,
) -> list[tuple[Tensor, Tensor]]:
    """Where a batch of runs ends: every point's best Y first, then both by Adam in float32."""
    (chunk,) = problem.chunks
    A, B = chunk.A1[0, 0].float(), chunk.B[0, 0].float()
    firsts = nt.solve_many([problem] * len(X), list(X), max_iter=0)
    Y = torch.stack([torch.as_tensor(s.Y) for s in firsts]).float().requires_grad_()
    X = X.float().requires_grad_()
    optimizer = torch.optim.Adam([X, Y], lr=rate)
    began = time.process_time()
    while (share := (time.process_time() - began) / budget) < 1:
        optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + np.cos(np.pi * share))
        optimizer.zero_grad()
        P = torch.softmax(A @ X @ A.T, -1)
        (P @ (A @ Y) - B).square().sum().backward()
        optimizer.step()
        level = NOISE * rate * max(0.0, 1 - 2 * share)
        if level:
            with torch.no_grad():
                for w in (X, Y):
                    w += level * torch.randn(w.shape, generator=generator)
    ends = zip(X.detach().double(), Y.detach().double(), strict=True)
    return [(x, y) for x, y in ends]


METHODS: dict[str, Method] = {
    "basin hopping": hopping,
    "restarts on samples": sampled_restarts,
    "restarts": restarts,
    "Adam with noise and restarts": adam,
}


def report(data: dict) -> str:
    """A row for every problem and method."""
    rows = [
        [
            case["tokens"],
            case["d"],
            case["n"],
            case["scale"],
            name,
            f"{m['found']}/{m['seeds']}",
            show(m["hits"]["median"], 2),
            m["fits"],
            *(show(m["loss"][k], 2) for k in ("median", "lower", "upper")),
        ]
        for case in data["cases"]
        for name, m in case["methods"].items()
    ]
    header = ["tokens", "d", "n", "logits", "method", "found", "seconds", "fits"]
    note = (
        f"{data['budget']:g} seconds of a core for each; seconds: median of those that found it, "
        "Adam's with both of its rates and the fits of its ends."
    )
    return f"{table([*header, 'relative loss', '25 %', '75 %'], rows)}\n{note}"
