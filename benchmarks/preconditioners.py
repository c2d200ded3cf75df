"""Preconditioners of "newton-cg": loss after so many products with the curvature.

Real layers (data/) from a truncated start; `attended` and `inputs` are described in
`newtention.newton.metric`.  Products rather than seconds, which the three share but for a few
percent; the seconds are recorded beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

import newtention as nt
from benchmarks.harness import Size, show, table

DATA = Path(__file__).parents[1] / "data"
KINDS = ("attended", "inputs", "none")
SIZES: Mapping[str, dict] = {
    "toy": {"cases": ("LighterGlue",), "budgets": (5, 10)},
    "quick": {"cases": ("MiniLM", "LighterGlue"), "budgets": (20, 50, 100)},
    "full": {"cases": ("MiniLM", "SmolLM2", "LighterGlue"), "budgets": (25, 50, 100, 200)},
}


def run(size: Size) -> dict:
    """Every layer with every preconditioner."""
    setting = SIZES[size]
    cases = []
    for name in setting["cases"]:
        problem, layer, ranks = _layer(name)
        start = nt.truncate(problem, layer, ranks)
        runs = {kind: _run(problem, start, kind, setting["budgets"]) for kind in KINDS}
        cases.append({"layer": name, "ranks": ranks, "runs": runs})
    return {"budgets": list(setting["budgets"]), "cases": cases}


def _layer(name: str) -> tuple[nt.AttentionProblem, nt.FactoredAttention, int]:
    """Problem, layer and the ranks of the start."""
    if name == "LighterGlue":
        file = DATA / "lighterglue_cross.safetensors"
        a = load_file(file)
        layer = nt.load_layer(file, heads=1, prefix="layer2.")
        keys, targets = a["layer2.X1"], a["layer2.O0"]
        return nt.AttentionProblem(a["layer2.X0"], keys, keys, targets), layer, 48
    file = DATA / {"MiniLM": "minilm_layer3", "SmolLM2": "smollm2_layer14"}[name]
    file = file.with_suffix(".safetensors")
    a = load_file(file)
    causal = name == "SmolLM2"
    rotary = nt.Rotary(100_000.0) if causal else None
    problem = nt.AttentionProblem.from_ragged(
        a["hidden"], a["output"], offsets=a["offsets"], mask="causal" if causal else None
    )
    return problem, nt.load_layer(file, rotary=rotary), 32 if causal else 16


def _run(
    problem: nt.AttentionProblem,
    start: nt.FactoredAttention,
    kind: str,
    budgets: tuple[int, ...],
) -> dict:
    """Relative loss of the last point that took at most each budget of products."""
    energy = float(problem.target_energy())
    points: list[tuple[int, float, float]] = []

    def note(progress: nt.Progress) -> None:
        record = progress.record
        used = sum(r.inner for r in history)
        history.append(record)
        points.append((used, record.loss / energy, progress.seconds))
        if used > budgets[-1]:
            raise StopIteration

    history: list[nt.Record] = []
    nt.solve(
        problem,
        start=start,
        method="newton-cg",
        callback=note,
        options=nt.Options(preconditioner=kind),
    )
    within = {b: [p for p in points if p[0] <= b][-1] for b in budgets}
    return {
        "loss": {str(b): p[1] for b, p in within.items()},
        "seconds": points[-1][2],
        "products": points[-1][0],
        "iterations": len(points) - 1,
    }


def report(data: dict) -> str:
    """A row for every layer and preconditioner."""
    header = ["layer", "ranks", "preconditioner", *(f"{b} products" for b in data["budgets"]), "s"]
    rows = [
        [
            case["layer"],
            case["ranks"],
            kind,
            *(show(r["loss"][str(b)], 4) for b in data["budgets"]),
            show(r["seconds"]),
        ]
        for case in data["cases"]
        for kind, r in case["runs"].items()
    ]
    note = f"Relative loss after so many products; threads: {torch.get_num_threads()}"
    return f"{note}\n{table(header, rows)}"
