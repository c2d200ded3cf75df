"""Which method when: seconds of a core of "newton", "sketched" and "newton-cg" to the end of a fit.

Sequences of 256 tokens, or one long one; clustered tokens; targets of a planted layer with 10%
noise; starts near the planted weights, so that all methods end in one minimum and time alone
differs, and random starts, where the loss at the end differs, too.  Time is that of the process, on
one thread, so that other work on the machine hardly counts.
"""

from __future__ import annotations

import time

import numpy as np

import newtention as nt
from benchmarks.harness import Size, show, spread, table
from newtention.costs import sample_share, work
from newtention.layers import Bilinear

THREADS = 1
METHODS = ("newton", "sketched", "newton-cg")
NEAR, RANDOM = "near", "random"
LENGTH = 256
CASES = {
    "toy": ((1, 64, 4, NEAR),),
    "quick": (
        (4, LENGTH, 16, NEAR),
        (1, 1024, 16, NEAR),
        (4, LENGTH, 32, NEAR),
        (16, LENGTH, 32, NEAR),
        (4, LENGTH, 16, RANDOM),
    ),
    "full": (
        *((s, LENGTH, d, NEAR) for d in (16, 32, 64) for s in (4, 16, 64)),
        (256, LENGTH, 16, NEAR),
        (1, 4096, 16, NEAR),
        *((4, LENGTH, d, RANDOM) for d in (16, 32)),
    ),
}
"""Sequences, tokens in each, width, start."""
LIMIT = {"toy": 20.0, "quick": 30.0, "full": 60.0}
"""Seconds on the clock for one fit."""
SEEDS = {"toy": 1, "quick": 3, "full": 1}

SAMPLES = {
    "toy": ((1, 64, 4), (32, 64)),
    "quick": ((16, LENGTH, 32), (1024, 2048, 4096)),
    "full": ((16, LENGTH, 32), (1024, 2048, 4096)),
}
"""Sequences, tokens and width of a problem, and query rows that "sketched" takes of it."""


def run(size: Size) -> dict:
    """All methods on every case, one after another within a seed; samples of several sizes."""
    cases = []
    for s, n, d, start in CASES[size]:
        runs: dict[str, list[dict]] = {method: [] for method in METHODS}
        for seed in range(SEEDS[size]):
            problem, near = planted(s, n, d, seed)
            for method in METHODS:
                given = near if start == NEAR else None
                runs[method].append(_fit(problem, given, method, seed, LIMIT[size]))
        cases.append(
            {
                "sequences": s,
                "tokens": n,
                "d": d,
                "start": start,
                "chosen": _auto(problem),
                "predicted": _predicted(problem),
                "methods": {method: _summary(found) for method, found in runs.items()},
            }
        )
    return {"cases": cases, "limit": LIMIT[size], "samples": _samples(size)}


def _samples(size: Size) -> list[dict]:
    """Products of a fit with samples of several sizes."""
    shape, counts = SAMPLES[size]
    problem, near = planted(*shape, seed=0)
    found = []
    for rows in counts:
        options = nt.Options(sample_rows=rows)
        s = nt.solve(problem, near, method="sketched", options=options, max_seconds=LIMIT[size])
        products = sum(s.history.column("inner"))
        found.append({"shape": shape, "rows": rows, "products": products, "success": s.success})
    return found


def planted(s: int, n: int, d: int, seed: int) -> tuple[nt.AttentionProblem, np.ndarray]:
    """A problem with clustered tokens, and an X near the one behind its targets."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((4 * d, d))
    A = centres[rng.integers(0, 4 * d, (s, n))] + 0.5 * rng.standard_normal((s, n, d))
    X, Y, away = rng.standard_normal((3, d, d)) / d**0.5
    ridge = nt.Ridge(x=1e-3, y=1e-3)
    blank = nt.AttentionProblem(A, A, A, np.zeros_like(A))
    B = nt.predict(blank, X, Y)
    B = B + 0.1 * B.std() * rng.standard_normal(B.shape)
    return nt.AttentionProblem(A, A, A, B, regularizer=ridge), X + 0.3 * away


def _fit(
    problem: nt.AttentionProblem, start: np.ndarray | None, method: str, seed: int, limit: float
) -> dict:
    began = time.process_time()
    s = nt.solve(problem, start=start, method=method, seed=seed, max_seconds=limit)
    return {
        "seconds": time.process_time() - began,
        "success": s.success,
        "loss": s.relative_loss,
        "gradient": s.history[-1].gradient,
        "iterations": s.iterations,
        "inner": sum(s.history.column("inner")),
    }


def _predicted(problem: nt.AttentionProblem) -> dict[str, float]:
    """Work of each method, relative to "newton"."""
    layer = Bilinear(1, *problem.widths)
    costs = work(problem, layer, cached=True)
    share = sample_share(problem, layer, None)
    return {
        "newton": 1.0,
        "sketched": costs.sketched(share) / costs.newton,
        "newton-cg": costs.newton_cg / costs.newton,
    }


def _auto(problem: nt.AttentionProblem) -> str:
    return nt.solve(problem, max_iter=0).method


def _summary(runs: list[dict]) -> dict:
    return {
        **{
            name: spread([r[name] for r in runs])
            for name in ("seconds", "loss", "gradient", "iterations", "inner")
        },
        "successes": sum(r["success"] for r in runs),
        "seeds": len(runs),
    }


def report(data: dict) -> str:
    """A row for every case and method."""
    rows = []
    for case in data["cases"]:
        base = case["methods"]["newton"]["seconds"]["median"]
        for method, m in case["methods"].items():
            rows.append(
                [
                    f"{case['sequences']} x {case['tokens']}",
                    case["d"],
                    case["start"],
                    method + (" (auto)" if method == case["chosen"] else ""),
                    show(m["seconds"]["median"]),
                    show(m["seconds"]["median"] / base),
                    show(case["predicted"][method]),
                    f"{m['successes']}/{m['seeds']}",
                    show(m["loss"]["median"], 5),
                    show(m["gradient"]["median"], 2),
                    show(m["iterations"]["median"]),
                    show(m["inner"]["median"]),
                ]
            )
    header = ["tokens", "d", "start", "method", "s", "over newton", "predicted", "converged"]
    lines = [table([*header, "relative loss", "gradient", "iterations", "inner"], rows), ""]
    for sample in data["samples"]:
        s, n, d = sample["shape"]
        lines.append(
            f"{s} x {n}, d {d}, near: {sample['rows']} sampled rows, {sample['products']} products"
        )
    return "\n".join(lines)
