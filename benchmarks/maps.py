"""Fits of attention maps: cost of the exact Hessian, and how often a planted map is found."""

from __future__ import annotations

import torch
from torch import Tensor

import newtention as nt
from benchmarks.harness import Size, alternate, show, spread, table

THREADS = 1
HESSIANS = {
    "toy": ((16, 3),),
    "quick": ((256, 8), (256, 16)),
    "full": ((256, 8), (256, 16), (1024, 32)),
}
"""Queries (and keys) and width."""
WIDEST_AUTOGRAD = 16
REPEATS, PATIENCE = 9, 1.0
NAMES = ("gradient", "hessian", "autograd")
PLANTED = {
    "toy": ((16, 3, 1.0),),
    "quick": ((64, 8, 1.0), (64, 8, 6.0), (128, 16, 8.0)),
    "full": ((64, 8, 1.0), (64, 8, 6.0), (128, 16, 8.0)),
}
"""Queries (and keys), width d, and the scale of X = scale randn / d."""
SEEDS = {"toy": 1, "quick": 10, "full": 20}
FOUND = 1e-12
"""Relative loss of a map that counts as found."""


def run(size: Size) -> dict:
    """Both measurements."""
    return {
        "hessian": [_hessian(n, d) for n, d in HESSIANS[size]],
        "planted": [_planted(n, d, scale, SEEDS[size]) for n, d, scale in PLANTED[size]],
    }


def _tokens(n: int, d: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    A1, A2, X = (torch.randn(k, d, generator=g, dtype=torch.float64) for k in (n, n, d))
    return A1, A2, X / d


def _hessian(n: int, d: int) -> dict:
    A1, A2, X = _tokens(n, d, 0)
    B = _tokens(n, n, 1)[0].softmax(1)
    problem = nt.AttentionProblem.from_maps(A1, A2, B)

    def loss(x: Tensor) -> Tensor:
        return 0.5 * ((A1 @ x.view(d, d) @ A2.T).softmax(1) - B).square().sum()

    rivals = {
        "gradient": lambda: nt.gradient(problem, X),
        "hessian": lambda: nt.hessian(problem, X),
    }
    if d <= WIDEST_AUTOGRAD:
        rivals["autograd"] = lambda: torch.func.hessian(loss)(X.flatten())
    times = alternate(rivals, REPEATS, PATIENCE)
    return {"n": n, "d": d, **{name: spread(times.get(name, [])) for name in NAMES}}


def _planted(n: int, d: int, scale: float, seeds: int) -> dict:
    runs = {"X = 0": [], "random": []}
    for seed in range(seeds):
        A1, A2, X = _tokens(n, d, seed)
        problem = nt.AttentionProblem.from_maps(A1, A2, (scale * A1 @ X @ A2.T).softmax(1))
        g = torch.Generator().manual_seed(seed + 1000)
        other = torch.randn(d, d, generator=g, dtype=torch.float64)
        other *= 2 / (A1 @ other @ A2.T).std()
        runs["X = 0"].append(nt.solve(problem))
        runs["random"].append(nt.solve(problem, start=other))
    return {
        "n": n,
        "d": d,
        "scale": scale,
        "starts": {
            name: {
                "found": sum(s.relative_loss < FOUND for s in solutions),
                "of": len(solutions),
                "iterations": spread([s.iterations for s in solutions]),
                "seconds": spread([s.seconds for s in solutions]),
            }
            for name, solutions in runs.items()
        },
    }


def report(data: dict) -> str:
    """Two tables."""
    rows = [
        [
            str(c["n"]),
            str(c["d"]),
            *(show(c[name]["median"]) for name in NAMES),
        ]
        for c in data["hessian"]
    ]
    costs = table(["n", "d", "gradient s", "Hessian s", "torch.func.hessian s"], rows)
    rows = [
        [
            str(c["n"]),
            str(c["d"]),
            f"{c['scale']:g}",
            name,
            f"{s['found']} of {s['of']}",
            show(s["iterations"]["median"]),
            show(s["seconds"]["median"]),
        ]
        for c in data["planted"]
        for name, s in c["starts"].items()
    ]
    return costs + "\n\n" + table(["n", "d", "scale", "start", "found", "iterations", "s"], rows)
