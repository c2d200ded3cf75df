"""Attention SVM: seconds and pairs held, of all constraints, on separable and hopeless problems."""

from __future__ import annotations

import numpy as np

import newtention as nt
from benchmarks.harness import Size, seconds, show, spread, table
from newtention.svm.result import Norm

THREADS = 1
CASES = {
    "toy": ((16, 12, 3, "frobenius", None, True),),
    "quick": (
        (512, 512, 16, "frobenius", None, True),
        (512, 512, 16, "frobenius", 1.0, True),
        (64, 64, 16, "nuclear", None, True),
        (512, 512, 16, "frobenius", None, False),
    ),
}
CASES["full"] = (
    *CASES["quick"],
    (4096, 4096, 16, "frobenius", None, True),
    (1000, 1000, 32, "frobenius", None, True),
    (512, 512, 16, "frobenius", 1.0, False),
    (200, 64, 30, "nuclear", None, True),
)
"""Queries, keys, width, norm, C, and whether some X selects the keys."""
SEEDS = {"toy": 1, "quick": 3, "full": 3}


def run(size: Size) -> dict:
    """Each case over several seeds."""
    cases = []
    for n, m, d, norm, soft, separable in CASES[size]:
        runs = [_run(n, m, d, norm, soft, separable, seed) for seed in range(SEEDS[size])]
        cases.append(
            {
                "n": n,
                "m": m,
                "d": d,
                "norm": norm,
                "soft": soft,
                "separable": separable,
                "seconds": spread([r["seconds"] for r in runs]),
                "active": max(r["active"] for r in runs),
                "gap": max((r["gap"] for r in runs if r["gap"] is not None), default=None),
                "statuses": sorted({r["status"] for r in runs}),
            }
        )
    return {"cases": cases}


def _run(
    n: int, m: int, d: int, norm: Norm, soft: float | None, separable: bool, seed: int
) -> dict:
    rng = np.random.default_rng(seed)
    A1, A2, X = (rng.standard_normal(shape) for shape in ((n, d), (m, d), (d, d)))
    selected = (A1 @ X @ A2.T).argmax(1) if separable else rng.integers(0, m, n)
    found: list[nt.AttentionSVM] = []
    taken = seconds(lambda: found.append(nt.attention_svm(A1, A2, selected, norm, soft=soft)))
    result = found[0]
    gap = result.gap if np.isfinite(result.gap) else None
    return {"seconds": taken, "active": result.active, "gap": gap, "status": result.status.name}


def report(data: dict) -> str:
    """One row per case."""
    rows = [
        [
            f"{c['n']} x {c['m']} x {c['d']}",
            c["norm"],
            show(c["soft"]),
            "planted" if c["separable"] else "random",
            show(c["seconds"]["median"]),
            f"{c['active']} of {c['n'] * (c['m'] - 1)}",
            show(c["gap"], 1),
            ", ".join(c["statuses"]),
        ]
        for c in data["cases"]
    ]
    header = ["n x m x d", "norm", "C", "keys", "seconds", "held at most", "gap at most", "ended"]
    return table(header, rows)
