"""The paper's method: where its regime begins, how errors shrink, what a sketch costs.

*Regime.*  The smallest equal token weights for which a start is inside, by the exact Hessian's
eigenvalues and by the bound, and for which the run then converges, beside the paper's threshold at
that start; and what the fit is worth there.  Starts are that of `solve` (logits of size 2, Y solved
for) and X = 0.  R_x is inverted exactly.

*Contraction.*  Errors in the norm of the solution's Hessian, step by step, and the proved bound.

*Time.*  R_x inverted exactly and by sketches, an iteration of the method, and whole solves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

import newtention as nt
from benchmarks.harness import Size, alternate, show, spread, table
from newtention import zoo
from newtention.approximate_newton import Contraction, contraction, paper_regime
from newtention.bounds.dominance import accuracy
from newtention.layers import Bilinear
from newtention.newton.regime import (
    accuracy_at,
    dominance_at,
    output_map,
    paper_threshold,
    sufficient_factor,
    with_weights_times,
)
from newtention.newton.starts import random_start
from newtention.newton.token_metric import SketchName, TokenMetric

THREADS = 1
SKETCHES: tuple[SketchName, ...] = ("none", "leverage", "tensor-srht")
SETTINGS: Mapping[str, dict] = {
    "toy": {"planted": (2, 12), "sentences": 1, "width": 2, "seeds": 1, "time": ((12, 2),)},
    "quick": {"planted": (4, 64), "sentences": 10, "width": 4, "seeds": 5, "time": ((128, 4),)},
    "full": {
        "planted": (4, 64),
        "sentences": 40,
        "width": 8,
        "seeds": 20,
        "time": ((128, 4), (256, 8), (512, 16)),
    },
}
REPEATS = {"toy": 1, "quick": 5, "full": 7}
GROWTH = {"toy": 3.0, "quick": 1.1, "full": 1.1}
"""Between the weights at which a run is tried."""
STARTS = {"toy": ("zero",), "quick": ("random", "zero"), "full": ("random", "zero")}
TOL = {"toy": 1e-3, "quick": None, "full": None}
WEAK = 1e-3
"""Equal token weights that hardly regularise: what the layer can fit."""
STRONG = 3.0
"""Multiple of the smallest weights of a start at which contraction and times are taken."""


def run(size: Size) -> dict:
    """All three."""
    setting = SETTINGS[size]
    problems = {
        "planted": _planted(*setting["planted"], seed=0),
        "real head": _real(setting["sentences"], setting["width"]),
    }
    return {
        "regime": [
            _regime(problem, start, GROWTH[size], TOL[size]) | {"problem": name, "start": start}
            for name, problem in problems.items()
            for start in STARTS[size]
        ],
        "contraction": _contraction(*setting["planted"], setting["seeds"], TOL[size]),
        "time": [_time(n, d, REPEATS[size], TOL[size]) for n, d in setting["time"]],
    }


def _weighted(problem: nt.AttentionProblem, w: float) -> nt.AttentionProblem:
    """The same data of one or several sequences under equal token weights."""
    sequences = [
        (chunk.A1[0, s, :n], chunk.B[0, s, :n])
        for chunk in problem.chunks
        for s, n in enumerate(chunk.query_lengths[0].tolist())
    ]
    queries, targets = (torch.cat(part) for part in zip(*sequences, strict=True))
    ends = torch.tensor([len(q) for q, _ in sequences]).cumsum(0).tolist()
    return _equal(queries, targets, [0, *ends], w)


def _equal(queries: Tensor, targets: Tensor, offsets: list[int], w: float) -> nt.AttentionProblem:
    weights = w * torch.ones(len(queries), dtype=queries.dtype)
    return nt.AttentionProblem.from_ragged(
        queries, targets, offsets=offsets, regularizer=nt.TokenWeights(weights)
    )


def _planted(d: int, n: int, seed: int) -> nt.AttentionProblem:
    made = zoo.planted(d, n, noise=0.1, tokens="clustered", seed=seed)
    return _weighted(made.problem, 1.0)


def _real(sentences: int, width: int) -> nt.AttentionProblem:
    """The packaged head: leading directions of its tokens, as many columns of its outputs."""
    tokens, outputs, offsets = zoo.packaged_head()
    last = offsets[sentences]
    directions = torch.linalg.svd(tokens, full_matrices=False).Vh[:width]
    return _equal(
        tokens[:last] @ directions.T, outputs[:last, :width], list(offsets[: sentences + 1]), 1.0
    )


def _start(problem: nt.AttentionProblem, kind: str) -> tuple[Bilinear, Tensor]:
    layer = Bilinear(1, *problem.widths)
    X = random_start(problem, 1, 0)
    X = X if kind == "random" else torch.zeros_like(X)
    return layer, layer.pack(X, X.new_zeros(1, 1, *problem.widths[2:]))


def _regime(problem: nt.AttentionProblem, kind: str, growth: float, tol: float | None) -> dict:
    """The smallest w^2 by either test, the paper's, and the relative loss of the fits there."""
    layer, theta = _start(problem, kind)
    metric = TokenMetric.of(problem)

    def epsilon(exact: bool) -> Callable[[float], float]:
        def at(factor: float) -> float:
            scaled = with_weights_times(problem, factor)
            other = replace(metric, sequences=TokenMetric.of(scaled).sequences)
            if metric.root is not None:
                other = replace(other, root=metric.root / factor)
            best = output_map(scaled, layer, theta).solved(theta)
            point = (scaled, layer, best, other, output_map(scaled, layer, best))
            return (accuracy_at(*point) if exact else accuracy(dominance_at(*point))).epsilon

        return at

    bound, exact = (sufficient_factor(epsilon(use)) for use in (False, True))
    threshold = paper_threshold(problem, layer, theta)
    start = tuple(t[0, 0] for t in layer.unpack(theta))
    converging = exact
    while not (solution := _run(problem, converging, start, tol)).success:
        converging *= growth
    fits = {
        name: nt.solve(_weighted(problem, w), start, method="newton").relative_loss
        for name, w in (("weak", WEAK), ("exact", exact), ("bound", bound))
    }
    return {
        "unknowns": layer.size,
        "log10_bound": 2 * _log10(bound),
        "log10_exact": 2 * _log10(exact),
        "log10_paper": threshold.log10,
        "log10_converging": 2 * _log10(converging),
        "relative_loss": fits | {"converging": solution.relative_loss},
        "iterations": solution.iterations,
    }


def _run(
    problem: nt.AttentionProblem, w: float, start: tuple[Tensor, Tensor], tol: float | None
) -> nt.Solution:
    """The method with R_x inverted exactly."""
    options = nt.Options(sketch="none")
    return nt.solve(_weighted(problem, w), start, "paper", tol, options=options)


def _log10(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).log10())


def _strong(problem: nt.AttentionProblem) -> nt.AttentionProblem:
    """Under weights well inside the regime of the random start."""
    layer, theta = _start(problem, "random")
    best = output_map(problem, layer, theta).solved(theta)
    X, Y = (t[0, 0] for t in layer.unpack(best))
    return _weighted(problem, STRONG * paper_regime(problem, X, Y).w_factor)


def _contraction(d: int, n: int, seeds: int, tol: float | None) -> dict:
    """Every kind of sketch on planted problems; the first seed's errors in full."""
    found: dict = {}
    for sketch in SKETCHES:
        runs = []
        for seed in range(seeds):
            problem = _strong(_planted(d, n, seed))
            points: list = []
            solution = nt.solve(
                problem,
                method="paper",
                tol=tol,
                seed=seed,
                options=nt.Options(sketch=sketch),
                callback=lambda progress, points=points: points.append((progress.X, progress.Y)),
            )
            report = contraction(problem, points, solution, sketch=sketch, seed=seed)
            runs.append((solution, report))
        found[sketch] = {
            "seeds": seeds,
            "converged": sum(s.success for s, _ in runs),
            "held": sum(r.holds for _, r in runs),
            "iterations": spread([s.iterations for s, _ in runs]),
            "epsilon": spread([r.steps[-1].epsilon for _, r in runs]),
            "measured": spread([_last_ratio(r) for _, r in runs]),
            "promised": spread([r.steps[-1].energy_bound for _, r in runs]),
            "energy": [s.energy for s in runs[0][1].steps],
            "bounds": [min(s.energy_bound, 1e300) for s in runs[0][1].steps],
        }
    return found


def _last_ratio(report: Contraction) -> float:
    """The last ratio well above rounding."""
    known = [
        s.energy_ratio
        for s in report.steps
        if s.energy_ratio is not None and s.energy > 1e4 * report.rounding
    ]
    return known[-1]


def _time(n: int, d: int, repeats: int, tol: float | None) -> dict:
    """One problem's inverses of R_x, and whole solves from the same start."""
    problem = _strong(_planted(d, n, 0))
    build = {
        sketch: lambda sketch=sketch: TokenMetric.of(problem, sketch, seed=1) for sketch in SKETCHES
    }
    solves = {
        f"paper, {sketch}": lambda sketch=sketch: nt.solve(
            problem, method="paper", tol=tol, options=nt.Options(sketch=sketch)
        )
        for sketch in SKETCHES
    }
    solves["newton"] = lambda: nt.solve(problem, method="newton")
    iterations = {name: solve().iterations for name, solve in solves.items()}
    metrics = {sketch: build[sketch]() for sketch in SKETCHES}
    return {
        "n": n,
        "d": d,
        "rows": {sketch: metric.rows for sketch, metric in metrics.items()},
        "spectrum": {sketch: list(metric.spectrum) for sketch, metric in metrics.items()},
        "build": {k: spread(v) for k, v in alternate(build, repeats, 5.0).items()},
        "solve": {k: spread(v) for k, v in alternate(solves, repeats, 5.0).items()},
        "iterations": iterations,
    }


def report(data: dict) -> str:
    """Three tables."""
    places = ("exact", "bound", "converging")
    regime = [
        [
            *(r[key] for key in ("problem", "start", "unknowns")),
            *(f"10^{r[f'log10_{key}']:.1f}" for key in (*places, "paper")),
            *(show(r["relative_loss"][key]) for key in ("weak", *places)),
            r["iterations"],
        ]
        for r in data["regime"]
    ]
    shrink = [
        [
            sketch,
            *(f"{r[key]}/{r['seeds']}" for key in ("converged", "held")),
            *(show(r[key]["median"]) for key in ("iterations", "epsilon", "measured", "promised")),
        ]
        for sketch, r in data["contraction"].items()
    ]
    cost = [
        [
            *(case["n"], case["d"], sketch, case["rows"][sketch]),
            " to ".join(f"{x:.2f}" for x in case["spectrum"][sketch]),
            show(1e3 * case["build"][sketch]["median"]),
            show(1e3 * case["solve"][f"paper, {sketch}"]["median"]),
            case["iterations"][f"paper, {sketch}"],
            show(1e3 * case["solve"]["newton"]["median"]),
            case["iterations"]["newton"],
        ]
        for case in data["time"]
        for sketch in SKETCHES
    ]
    fits = ("weak fit", "at exact", "at bound", "at run")
    timed = ("rows", "spectrum", "prepare", "solve", "steps", "Newton", "steps")
    return "\n".join(
        [
            "Smallest w^2 of equal weights with the start inside (exact Hessian, bound) and with a "
            "run that converges, the paper's threshold; the fit's relative loss with hardly any "
            "weights and with those, and the steps of that run:",
            table(
                ["problem", "start", "unknowns", "exact", "bound", "run", "paper", *fits, "steps"],
                regime,
            ),
            "",
            f"Contraction at {STRONG:g} times the smallest weights; medians over seeds:",
            table(
                ["sketch", "converged", "bound held", "steps", "epsilon", "last ratio", "bound"],
                shrink,
            ),
            "",
            "Milliseconds to prepare R_x^-1, and of whole solves, one thread:",
            table(["n", "d", "sketch", *timed], cost),
        ]
    )
