"""Certificates: how often a solved problem is proved a local minimum, how tight, at what cost.

Usefulness: planted problems, with noise and without, solved until the gradient is below 1e-8, then
certified.  Each level of the Lipschitz constant is compared with `measured_lipschitz`, which
searches for large third derivatives: it is below the true constant, so the quotients are at least
the true ones.  The smallest ridge that is proved to leave one stationary point stands beside the
paper's thresholds.

Cost: `certify(unfolding=False)`, and the parts that it is made of, in units of one dense Hessian of
the same problem and point.  Without a ridge the bound on the gradient's rounding error, not the
gradient, is too large at most points: the proof then goes on with evaluations beyond float64.  A
ridge shows the cost where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np
import torch

import newtention as nt
from benchmarks.harness import Size, alternate, ratios, show, spread, table
from newtention import zoo
from newtention.bounds.unfolding import measured_lipschitz
from newtention.certify.evaluation import data_in_double, evaluate_point
from newtention.certify.lipschitz import LipschitzBounds
from newtention.layers import Bilinear
from newtention.weights import as_weights

THREADS = 1
"""The matrices are small, and the unit, one Hessian, should not depend on how threads share."""
GTOL = 1e-8
LEVELS = ("radii", "cauchy-schwarz", "covariances", "unfolding")
TOKENS: tuple[zoo.Tokens, ...] = ("real", "clustered")
NOISES = (0.0, 0.1)
ROWS = {2: 16, 4: 64, 8: 128, 16: 256}
SETTINGS: Mapping[str, dict] = {
    "toy": {"widths": (2,), "seeds": 1, "ascent": (2, 5), "cost": ((16, 2),), "repeats": 1},
    "quick": {"widths": (4, 8), "seeds": 3, "ascent": (4, 25), "cost": ((256, 8),), "repeats": 5},
    "full": {
        "widths": (4, 8, 16),
        "seeds": 8,
        "ascent": (4, 30),
        "cost": ((256, 8), (512, 16)),
        "repeats": 9,
    },
}
UNFOLD = 256
"""Unknowns up to which the unfolding is computed here; beyond, it would take minutes a problem."""
COST_SEEDS = {"toy": 1, "quick": 2, "full": 3}
RIDGES = (0.0, 1.0)
HESSIAN = "Hessian"
CERTIFY = "certify"
EVALUATION = "evaluation"
PRECISE = "beyond float64"
COVARIANCES = "covariances"
PARTS = (EVALUATION, PRECISE, COVARIANCES)


def run(size: Size) -> dict:
    """Every problem's certificate, and the cost of certificates."""
    setting = SETTINGS[size]
    cases = list(product(setting["widths"], TOKENS, NOISES))
    problems = [
        {"d": d, "n": ROWS[d], "tokens": tokens, "noise": noise, "seed": seed}
        | _certified(d, tokens, noise, seed, *setting["ascent"])
        for d, tokens, noise in cases
        for seed in range(setting["seeds"])
    ]
    summary = [
        {"d": d, "n": ROWS[d], "tokens": tokens, "noise": noise}
        | _summary([p for p in problems if (p["d"], p["tokens"], p["noise"]) == (d, tokens, noise)])
        for d, tokens, noise in cases
    ]
    cost = [
        _cost(n, d, tokens, ridge, COST_SEEDS[size], setting["repeats"])
        for n, d in setting["cost"]
        for tokens in TOKENS
        for ridge in RIDGES
    ]
    return {
        "gtol": GTOL,
        "threads": torch.get_num_threads(),
        "summary": summary,
        "cost": cost,
        "problems": problems,
    }


def _solved(
    d: int, n: int, tokens: zoo.Tokens, noise: float, seed: int, ridge: float = 0.0
) -> tuple[nt.AttentionProblem, torch.Tensor, torch.Tensor, float]:
    """A planted problem, the weights that `solve` finds, and the gradient's norm there."""
    problem = zoo.planted(d, n, noise=noise, tokens=tokens, seed=seed).problem
    if ridge > 0:
        problem = problem.with_regularizer(nt.Ridge(ridge, ridge))
    solution = nt.solve(problem, n_init=4 if d < 16 else 1, seed=seed)
    GX, GY = nt.gradient(problem, solution.X, solution.Y)
    norm = float(torch.sqrt(GX.square().sum() + GY.square().sum()))
    return problem, solution.X, solution.Y, norm


def _certified(
    d: int, tokens: zoo.Tokens, noise: float, seed: int, starts: int, steps: int
) -> dict:
    """One problem's verdict and constants."""
    problem, X, Y, gradient = _solved(d, ROWS[d], tokens, noise, seed)
    small = 2 * d * d <= UNFOLD
    certificate = nt.certify(problem, X, Y, unfolding=None if small else False)
    # All levels on the certificate's ball, whichever of them the proof needed.
    w, data = as_weights(problem, X, Y), data_in_double(problem)
    assert isinstance(w.layer, Bilinear)
    point = evaluate_point(problem, w.layer, w.theta)
    bounds = LipschitzBounds(data, point).with_statistics()
    levels = (bounds.with_unfolding() if small else bounds).at(certificate.lipschitz_radius).levels
    weights = w.layer.unpack(point.theta[None])[1][0]
    tiles = [tile for tile, _ in bounds._tiles()]
    found = measured_lipschitz(tiles, weights, certificate.lipschitz_radius, starts, steps)
    return {
        "gradient": gradient,
        "solved": gradient <= GTOL,
        "proved": certificate.local_minimum == "proved",
        "distance": _finite(certificate.distance),
        "level": certificate.lipschitz_level,
        "measured": found,
        "over_measured": {name: _finite(levels[name] / found) for name in levels},
        "composed_log10": _finite(certificate.paper_log10_lipschitz),
        "ridge": _finite(certificate.certifying_ridge),
        "threshold_log10": _finite(certificate.paper_log10_threshold),
        "reason": certificate.reasons[0],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def _summary(problems: Sequence[dict]) -> dict:
    """Shares and medians over seeds; only problems solved to the tolerance count."""
    solved = [p for p in problems if p["solved"]]
    proved = [p for p in solved if p["proved"]]

    def middle(values: Sequence[float | None]) -> float | None:
        return spread([v for v in values if v is not None])["median"]

    return {
        "problems": len(problems),
        "solved": len(solved),
        "proved": len(proved),
        "distance": middle([p["distance"] for p in proved]),
        "levels": {name: sum(p["level"] == name for p in proved) for name in LEVELS},
        "over_measured": {
            name: middle([p["over_measured"].get(name) for p in solved]) for name in LEVELS
        },
        "composed_log10": middle([p["composed_log10"] for p in solved]),
        "ridge": middle([p["ridge"] for p in solved]),
        "threshold_log10": middle([p["threshold_log10"] for p in solved]),
    }


def _cost(n: int, d: int, tokens: zoo.Tokens, ridge: float, seeds: int, repeats: int) -> dict:
    """All in turn, seed by seed; ratios are of neighbours in time."""
    samples: dict[str, list[float]] = {name: [] for name in (HESSIAN, CERTIFY, *PARTS)}
    proved, slowest = 0, 0.0
    for seed in range(seeds):
        problem, X, Y, _ = _solved(d, n, tokens, 0.1, seed, ridge)
        proved += nt.certify(problem, X, Y, unfolding=False).local_minimum == "proved"
        times = alternate(_rivals(problem, X, Y), repeats, patience=5.0)
        slowest = max(slowest, ratios(times, HESSIAN)[CERTIFY]["median"])
        for name, values in times.items():
            samples[name] += values
    return {
        "n": n,
        "d": d,
        "tokens": tokens,
        "ridge": ridge,
        "seeds": seeds,
        "proved": proved,
        "seconds": {name: spread(values) for name, values in samples.items()},
        "hessians": ratios(samples, HESSIAN),
        "slowest_seed": slowest,
    }


def _rivals(
    problem: nt.AttentionProblem, X: torch.Tensor, Y: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """One Hessian, a certificate, and what a certificate may need once or several times."""
    w, data = as_weights(problem, X, Y), data_in_double(problem)
    layer, theta = w.layer, w.theta
    assert isinstance(layer, Bilinear)
    bounds = LipschitzBounds(data, evaluate_point(problem, layer, theta))
    return {
        HESSIAN: lambda: nt.hessian(problem, X, Y),
        CERTIFY: lambda: nt.certify(problem, X, Y, unfolding=False),
        EVALUATION: lambda: evaluate_point(problem, layer, theta),
        PRECISE: lambda: evaluate_point(problem, layer, theta, precise=True),
        COVARIANCES: bounds.with_statistics,
    }


def report(data: dict) -> str:
    """Three tables: verdicts and tightness, ridges, cost."""
    keys = ("d", "n", "tokens", "noise")
    verdicts = [
        [case[k] for k in keys]
        + [f"{case['proved']}/{case['solved']}", show(case["distance"], 2)]
        + [", ".join(f"{k} {v}" for k, v in case["levels"].items() if v) or "-"]
        + [show(case["over_measured"][name]) for name in LEVELS]
        for case in data["summary"]
    ]
    ridges = [
        [case[k] for k in keys]
        + [show(case["ridge"])]
        + [_power(case["threshold_log10"]), _power(case["composed_log10"])]
        for case in data["summary"]
    ]
    costs = [
        [case["n"], case["d"], case["tokens"], show(case["ridge"])]
        + [f"{case['proved']}/{case['seeds']}"]
        + [show(1e3 * case["seconds"][name]["median"]) for name in (HESSIAN, CERTIFY)]
        + [show(case["hessians"][CERTIFY][k]) for k in ("median", "lower", "upper")]
        + [show(case["slowest_seed"])]
        + [show(case["hessians"][name]["median"]) for name in PARTS]
        for case in data["cost"]
    ]
    costs_header = ["n", "d", "tokens", "ridge", "proved", "Hessian ms", "certify ms"]
    costs_header += ["in Hessians", "25 %", "75 %", "slowest seed", *PARTS]
    return "\n".join(
        [
            f"Proved local minima among problems solved to a gradient of {data['gtol']:g}, level "
            "that the proof reports, and each level over the largest third derivative found:",
            table([*keys, "proved", "within", "level", *LEVELS], verdicts),
            "",
            "A ridge that is proved to leave one stationary point, the paper's 30 R^8, and the "
            "Lipschitz constant composed in the paper's manner:",
            table([*keys, "ridge", "30 R^8", "composed M"], ridges),
            "",
            "certify(unfolding=False) in Hessians, and its parts, each of which it needs once, "
            f"several times or not at all; threads: {data['threads']}",
            table(
                costs_header,
                costs,
            ),
        ]
    )


def _power(log10: float | None) -> str:
    return "-" if log10 is None else f"10^{log10:.0f}"
