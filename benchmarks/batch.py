"""Many small independent problems: one batch against one solve after the other."""

from __future__ import annotations

import newtention as nt
from benchmarks.harness import Size, alternate, ratios, show, spread, table
from newtention import zoo

BATCH = "solve_many"
SINGLE = "single solves"
CASES = {
    "toy": [(3, 16, 2)],
    "quick": [(64, 32, 3)],
    "full": [(64, 32, 3), (64, 32, 4), (64, 64, 8)],
}
REPEATS = {"toy": 1, "quick": 3, "full": 7}


def run(size: Size) -> dict:
    """Seconds for all problems, and the largest difference between the losses found."""
    cases = []
    for count, n, d in CASES[size]:
        problems = [zoo.planted(d, n, noise=0.1, seed=s).problem for s in range(count)]
        many = nt.solve_many(problems)
        single = [nt.solve(p) for p in problems]
        samples = alternate(
            {
                BATCH: lambda ps=problems: nt.solve_many(ps),
                SINGLE: lambda ps=problems: [nt.solve(p) for p in ps],
            },
            REPEATS[size],
            patience=20.0,
        )
        cases.append(
            {
                "problems": count,
                "n": n,
                "d": d,
                "seconds": {name: spread(times) for name, times in samples.items()},
                "ratios": ratios(samples, BATCH),
                "converged": [sum(s.success for s in many), sum(s.success for s in single)],
                "iterations": {
                    "longest": max(s.iterations for s in many),
                    "mean": sum(s.iterations for s in many) / count,
                },
                # Rounding differs between batched and single products, and a nonconvex problem may
                # send a run to another minimum for it.
                "same_loss": sum(
                    abs(a.loss - b.loss) <= 1e-8 * b.loss for a, b in zip(many, single, strict=True)
                ),
            }
        )
    return {"cases": cases}


def report(data: dict) -> str:
    """The table."""
    rows = []
    for case in data["cases"]:
        ratio = case["ratios"][SINGLE]
        rows.append(
            [case["problems"], case["n"], case["d"]]
            + [show(case["seconds"][name]["median"]) for name in (BATCH, SINGLE)]
            + [show(ratio[k]) for k in ("median", "lower", "upper")]
            + [case["same_loss"], "{} / {}".format(*case["converged"])]
        )
    header = ["problems", "n", "d", "batch s", "single s", "ratio", "25 %", "75 %", "same loss"]
    return table([*header, "converged"], rows)
