"""The solver's defaults against their alternatives: where runs end after a fixed number of steps.

No times: the figure of merit is the relative loss, so this may run on a busy machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

import newtention as nt
from benchmarks.harness import table
from newtention import zoo
from newtention.newton.starts import START_SCALE, logit_spread

VARIANTS: dict[str, tuple[nt.Options, str]] = {
    "default": (nt.Options(), "default"),
    "start: Gaussian instead of positive semidefinite": (nt.Options(), "gaussian"),
    "start: logits 0.5": (nt.Options(start_scale=0.5), "default"),
    "start: logits 1": (nt.Options(start_scale=1.0), "default"),
    "start: logits 4": (nt.Options(start_scale=4.0), "default"),
    "full Hessian from the start": (nt.Options(gauss_newton_iterations=0), "default"),
    "Gauss-Newton for 5 iterations": (nt.Options(gauss_newton_iterations=5), "default"),
    "Gauss-Newton for 20 iterations": (nt.Options(gauss_newton_iterations=20), "default"),
    "metric: floor 1e-6": (nt.Options(metric_floor=1e-6), "default"),
    "metric: floor 0.1": (nt.Options(metric_floor=0.1), "default"),
    "metric: Euclidean": (nt.Options(metric_floor=1e9), "default"),
}


def measure(seeds: Sequence[int], iterations: int, names: Sequence[str] = tuple(VARIANTS)) -> dict:
    """Relative losses of every variant on every problem, one per seed."""
    result: dict[str, dict[str, list[float]]] = {}
    for problem_name, make in _problems().items():
        result[problem_name] = {}
        for name in names:
            options, start = VARIANTS[name]
            losses = []
            for seed in seeds:
                problem = make(seed)
                first = _gaussian_start(problem, seed) if start == "gaussian" else None
                solution = nt.solve(problem, first, seed=seed, max_iter=iterations, options=options)
                losses.append(solution.relative_loss)
            result[problem_name][name] = losses
    return result


def run(size: str) -> dict:
    """Every variant with eight seeds and 40 iterations; a toy size for tests."""
    if size == "toy":
        return measure(range(1), 1, ("default",))
    return measure(range(8 if size == "full" else 2), 40)


def report(result: dict) -> str:
    """Median, lowest and highest relative loss of every variant."""
    rows = [
        [problem, name, *(f"{f(losses):.4f}" for f in (np.median, min, max))]
        for problem, variants in result.items()
        for name, losses in variants.items()
    ]
    return table(["problem", "variant", "median", "lowest", "highest"], rows)


def _problems() -> dict[str, Callable[[int], nt.AttentionProblem]]:
    tokens, output, offsets = zoo.packaged_head()
    head = nt.AttentionProblem.from_ragged(tokens, output, offsets=offsets)
    return {
        "packaged head": lambda seed: head,
        "planted, clustered tokens, d 8": lambda seed: (
            zoo.planted(8, 256, 0.1, "clustered", seed=seed).problem
        ),
        "planted, real tokens, d 8": lambda seed: (
            zoo.planted(8, 256, 0.1, "real", seed=seed).problem
        ),
    }


def _gaussian_start(problem: nt.AttentionProblem, seed: int) -> torch.Tensor:
    d1, d2, _, _ = problem.widths
    X = torch.from_numpy(np.random.default_rng(seed).standard_normal((1, 1, d1, d2)))
    return (X * START_SCALE / logit_spread(problem, X)[:, :, None, None])[0, 0]
