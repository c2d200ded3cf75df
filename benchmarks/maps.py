"""Fits of attention maps: cost of the exact Hessian, planted maps found, local minima proved.

How often a start finds the planted map, and how often a solved fit is proved a local minimum.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import torch
from torch import Tensor

import newtention as nt
from benchmarks.harness import Size, alternate, ratios, show, spread, table

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
CERTIFIED = {
    "toy": ((16, 3, 1.0),),
    "quick": ((60, 3, 1.0), (60, 3, 6.0), (128, 5, 3.0), (256, 8, 1.0), (256, 8, 6.0)),
    "full": ((60, 3, 1.0), (60, 3, 6.0), (128, 5, 3.0), (256, 8, 1.0), (256, 8, 6.0)),
}
NOISES = (0.0, 0.1)
"""Share of another random map that is mixed into the target."""
COSTS = {"toy": 1, "quick": 5, "full": 9}
"""Repeats of a certificate's cost."""


def run(size: Size) -> dict:
    """All measurements."""
    return {
        "hessian": [_hessian(n, d) for n, d in HESSIANS[size]],
        "planted": [_planted(n, d, scale, SEEDS[size]) for n, d, scale in PLANTED[size]],
        "certified": [
            _certified(*case, noise, SEEDS[size], COSTS[size])
            for case, noise in product(CERTIFIED[size], NOISES)
        ],
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


def _certified(n: int, d: int, scale: float, noise: float, seeds: int, repeats: int) -> dict:
    """Solved fits of planted maps, certified; the first one's costs in Hessians."""
    found, cost = [], {}
    for seed in range(seeds):
        A1, A2, X = _tokens(n, d, seed)
        B = (scale * A1 @ X @ A2.T).softmax(1)
        B = (1 - noise) * B + noise * _tokens(n, n, seed + 1000)[0].softmax(1)
        problem = nt.AttentionProblem.from_maps(A1, A2, B)
        solution = nt.solve(problem)
        if solution.success:
            found.append(nt.certify(problem, solution.X))
        if seed == 0:
            X = solution.X
            rivals = {
                "Hessian": lambda problem=problem, X=X: nt.hessian(problem, X),
                "certify": lambda problem=problem, X=X: nt.certify(problem, X, unfolding=False),
                "unfolding": lambda problem=problem, X=X: nt.certify(problem, X, unfolding=True),
            }
            cost = ratios(alternate(rivals, repeats, PATIENCE), "Hessian")
    proved = [c for c in found if c.local_minimum == "proved"]
    loose = [c.lipschitz_levels["covariances"] / c.lipschitz_levels["unfolding"] for c in proved]
    return {
        "n": n,
        "d": d,
        "scale": scale,
        "noise": noise,
        "solved": len(found),
        "proved": len(proved),
        "distance": float(np.median([c.distance for c in proved])) if proved else None,
        "levels": dict(Counter(c.lipschitz_level for c in proved)),
        "covariances_over_unfolding": float(np.median(loose)) if proved else None,
        "ridge": float(np.median([c.certifying_ridge for c in found])) if found else None,
        "cost": cost,
    }


def report(data: dict) -> str:
    """Three tables."""
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
    found = table(["n", "d", "scale", "start", "found", "iterations", "s"], rows)
    rows = [
        [
            str(c["n"]),
            str(c["d"]),
            f"{c['scale']:g}",
            f"{c['noise']:g}",
            f"{c['proved']} of {c['solved']}",
            show(c["distance"], 2),
            show(c["covariances_over_unfolding"], 2),
            show(c["ridge"]),
            *(show(c["cost"][name]["median"], 2) for name in ("certify", "unfolding")),
        ]
        for c in data["certified"]
    ]
    header = ["n", "d", "scale", "noise", "proved", "distance", "covariances / unfolding"]
    header += ["certifying ridge", "Hessians", "with unfolding"]
    return "\n\n".join((costs, found, table(header, rows)))
