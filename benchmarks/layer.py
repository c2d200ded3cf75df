"""A whole real layer compressed: MiniLM layer 3 from rank 32 to 16, ours against Adam and L-BFGS.

Every method starts from the same activation-aware truncated layer and sees the same sentences.
Adam's learning rate and our regulariser's strength are chosen in the same way: every value of a
short list is run to the end on the first seed, and the one with the lowest held-out loss is used
for the others.  Losses are relative; evaluation does not count as time for the peers, but our
validation does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

import newtention as nt
from benchmarks import layer_peers, minilm
from benchmarks.harness import Size, show, table

RANK = 16
STRENGTHS = (0.0, 1e-3, 3e-3, 1e-2)
"""Of `Proximity` around the start, isotropic."""
SIZES: Mapping[str, dict] = {
    "toy": {"seconds": 0.5, "seeds": (0,), "rates": (2e-3,), "strengths": (0.0,)},
    "quick": {"seconds": 20.0, "seeds": (0,), "rates": (2e-3,), "strengths": (3e-3,)},
    "full": {
        "seconds": 200.0,
        "seeds": (0, 1, 2),
        "rates": layer_peers.RATES,
        "strengths": STRENGTHS,
    },
}


def run(size: Size) -> dict:
    """All methods on all seeds."""
    setting = SIZES[size]
    seconds = setting["seconds"]
    cases = []
    chosen: dict[str, float] = {}
    for seed in setting["seeds"]:
        data = minilm.load(minilm.SENTENCES[size], seed)
        train, held_out = minilm.problems(data)
        began = time.perf_counter()
        start = nt.truncate(train, data.layer, RANK)
        cut = time.perf_counter() - began
        judge = layer_peers.Judge(data.train, data.held_out)
        runs = {"start": {"trace": [(cut, *judge(start))]}}
        rates = [chosen["Adam"]] if "Adam" in chosen else setting["rates"]
        strengths = [chosen["ours"]] if "ours" in chosen else setting["strengths"]
        # Ours and theirs in turn, so that a busy machine slows both.
        for i in range(max(len(rates), len(strengths))):
            if i < len(strengths):
                name = f"ours {strengths[i]:g}"
                runs[name] = _ours(train, held_out, start, strengths[i], seconds, judge)
            if i < len(rates):
                outcome = layer_peers.adam(start, data.train, judge, rates[i], seconds, seed=seed)
                runs[f"Adam {rates[i]:g}"] = {"trace": outcome.trace, "steps": outcome.steps}
        outcome = layer_peers.lbfgs(start, data.train, judge, seconds)
        runs["L-BFGS"] = {"trace": outcome.trace, "steps": outcome.steps}
        plain = layer_peers.truncated(data.layer, RANK)
        runs["plain SVD"] = {"trace": [(0.0, *judge(plain))]}
        for family, values in (("Adam", rates), ("ours", strengths)):
            chosen.setdefault(
                family, min(values, key=lambda v, f=family: _best(runs[f"{f} {v:g}"]))
            )
        cases.append(_case(seed, runs, chosen, seconds))
    return {"seconds": seconds, "chosen": chosen, "cases": cases}


def _ours(
    train: nt.AttentionProblem,
    held_out: nt.AttentionProblem,
    start: nt.FactoredAttention,
    strength: float,
    seconds: float,
    judge: layer_peers.Judge,
) -> dict:
    """One run with early stopping on the held-out loss."""
    near = nt.Proximity(start, strength, isotropic=True) if strength else None
    problem = train.with_regularizer(near)
    began = time.perf_counter()
    solution = nt.solve(
        problem,
        start=start,
        method="newton-cg",
        max_seconds=seconds,
        validation=held_out,
        options=nt.Options(patience=4),
    )
    total = time.perf_counter() - began
    energy = float(train.target_energy())
    trace = [(r.seconds, r.loss / energy, r.validation) for r in solution.history]
    return {
        "trace": trace,
        "final": judge(solution.layer),
        "total_seconds": total,
        "iterations": solution.iterations,
        "products": int(sum(solution.history.column("inner"))),
        "status": solution.status.value,
    }


def _best(run: dict) -> float:
    return min(point[2] for point in run["trace"])


def _reached(trace: list, level: float) -> float | None:
    """Seconds until the held-out loss is at a level."""
    return next((float(t) for t, _, held in trace if held <= level), None)


def _case(seed: int, runs: dict, chosen: dict, seconds: float) -> dict:
    ours = runs[f"ours {chosen['ours']:g}"]
    peers = {name: r for name, r in runs.items() if name.startswith(("Adam", "L-BFGS"))}
    best = min(peers, key=lambda name: _best(peers[name]))
    level = _best(peers[best])
    arrival = _reached(ours["trace"], level)
    return {
        "seed": seed,
        "runs": runs,
        "peer": best,
        "peer_held_out": level,
        "peer_seconds": _reached(peers[best]["trace"], level),
        "ours_held_out": _best(ours),
        "ours_seconds_to_peer": arrival,
        "share": None if arrival is None else arrival / seconds,
    }


def report(data: dict) -> str:
    """A row for every run, then the comparison for every seed."""
    rows = []
    for case in data["cases"]:
        for name, r in case["runs"].items():
            last = r["trace"][-1]
            rows.append([case["seed"], name, show(last[0]), show(last[1], 4), show(_best(r), 4)])
    lines = [table(["seed", "run", "seconds", "train", "best held out"], rows), ""]
    for case in data["cases"]:
        lines.append(
            f"seed {case['seed']}: best peer {case['peer']} {case['peer_held_out']:.4f} after "
            f"{data['seconds']:g} s; ours {case['ours_held_out']:.4f}, at the peer's level after "
            f"{show(case['ours_seconds_to_peer'])} s"
        )
    shares = [c["share"] for c in data["cases"] if c["share"] is not None]
    if len(shares) == len(data["cases"]):
        lines.append(f"median share of the peers' time: {np.median(shares):.3f}")
    lines.append(f"threads: {torch.get_num_threads()}")
    return "\n".join(lines)
