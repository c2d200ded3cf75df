"""From records to what tables and charts show: pure functions of plain data.

A method with a grid is represented by its best choice (`records.best_choice`), the tuning runs cost
it nothing.  Times are seconds on the clock; ratios are formed seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.comparison.methods import GROUP_OF, OTHERS, OURS
from benchmarks.comparison.problems import GTOLS
from benchmarks.comparison.profiles import performance_profile
from benchmarks.comparison.records import best_choice, merit
from benchmarks.harness import spread

Record = dict[str, Any]

GOAL = f"{GTOLS[-1]:.0e}"
CLOSE = 1e-3
"""Excess over the lowest loss that anybody found within which a run counts as arrived."""
RIVALS = {OURS} | {n for n, group in GROUP_OF.items() if group in OTHERS}
EARLY = 0.9
"""Share of its time before which a run that ends has given up; schedules end a little early."""
LOWER = 1e-3
"""Relative difference of losses from which one is called lower than the other."""


def summarise(records: Sequence[Record], order: Sequence[str]) -> dict[str, Any]:
    """All problems that have records, in the given order, and the profiles over them."""
    runs = [r for r in records if r["kind"] == "run"]
    names = [name for name in order if any(r["problem"] == name for r in runs)]
    problems = {name: of_problem([r for r in runs if r["problem"] == name]) for name in names}
    return {"problems": problems, "profiles": profiles(runs)}


def of_problem(runs: Sequence[Record]) -> dict[str, Any]:
    """Methods by name, ours first, in the order of their first records."""
    methods: dict[str, list[Record]] = {}
    for record in runs:
        methods.setdefault(record["method"], []).append(record)
    chosen = {name: _chosen(name, tries) for name, tries in methods.items()}
    best = lowest_losses(runs)
    ours = {r["seed"]: r for r in chosen.get(OURS, ())}
    names = sorted(chosen, key=lambda name: name != OURS)
    return {
        "methods": {name: of_method(chosen[name], ours, best) for name in names},
        "curves": {name: _curves(chosen[name]) for name in names},
    }


def _chosen(name: str, tries: Sequence[Record]) -> list[Record]:
    choice = best_choice(tries, tries[0]["problem"], name, tries[0]["choice"])
    return [r for r in tries if r["choice"] == choice]


def _curves(runs: Sequence[Record]) -> list[list]:
    curves = []
    for r in runs:
        scale = r.get("scale") or 1.0
        curves.append([[t, loss / scale, *rest] for t, loss, *rest in r.get("curve", ())])
    return curves


def lowest_losses(runs: Iterable[Record]) -> dict[int, float]:
    """By seed: the lowest loss that anybody found, tuning runs and ablations included."""
    best: dict[int, float] = {}
    for r in runs:
        if r.get("loss") is not None:
            best[r["seed"]] = min(r["loss"], best.get(r["seed"], r["loss"]))
    return best


def of_method(
    runs: Sequence[Record], ours: dict[int, Record], best: dict[int, float]
) -> dict[str, Any]:
    """The row of a method.

    ratio: seconds to the goal over ours.  A run that did not get there counts with the time that it
    was given or gave up after, `bound` says that there are such: then the ratio is a lower bound.
    gave_up: runs that ended before their time without it: their bounds say less of the method.
    lead: how many times sooner ours was at the method's own best; see `lead`.
    ahead: seeds where its loss was lower than our final one by the time that ours had ended.
    """
    finished = [r for r in runs if r.get("loss") is not None]
    paired = [(r, ours[r["seed"]]) for r in finished if r["seed"] in ours]
    leads = [lead(r, own) for r, own in paired]
    return {
        "choice": runs[0]["choice"],
        "runs": len(runs),
        "finished": len(finished),
        "status": _counts(r["status"] for r in runs),
        "reached": {g: sum(g in r["reached"] for r in finished) for g in map(_word, GTOLS)},
        "seconds": {
            g: spread([r["reached"][g] for r in finished if g in r["reached"]])
            for g in map(_word, GTOLS)
        },
        "spent": _spread(finished, lambda r: r["seconds"]),
        "compile_seconds": _spread(finished, lambda r: r["compile_seconds"]),
        "ratio": spread([x for x in (ratio(r, own) for r, own in paired) if x is not None]),
        "bound": any(GOAL not in r["reached"] for r in finished),
        "gave_up": sum(gave_up(r) for r in finished),
        "close": sum(seconds_to_loss(r, best[r["seed"]]) is not None for r in finished),
        "excess": _spread(finished, lambda r: r["loss"] / best[r["seed"]] - 1),
        "relative_loss": _spread(finished, lambda r: r["relative_loss"]),
        "held_out": _spread(finished, lambda r: r["held_out"]),
        "gradient": _spread(finished, lambda r: r["gradient"]),
        "extra_bytes": _spread(finished, lambda r: r["extra_bytes"]),
        "lead": spread([x for x in leads if x is not None]),
        "never": sum(x is None for x in leads),
        "ahead": sum(ahead(r, own) for r, own in paired),
    }


def gave_up(run: Record) -> bool:
    """Whether it ended by itself, well before its time and short of the goal."""
    return GOAL not in run["reached"] and run["seconds"] < EARLY * run["limit"]


def ratio(run: Record, ours: Record) -> float | None:
    """Seconds to the goal over ours, or a lower bound of it; None if ours did not get there."""
    own = ours.get("reached", {}).get(GOAL)
    return None if own is None else run["reached"].get(GOAL, run["seconds"]) / own


def seconds_to_loss(run: Record, best: float) -> float | None:
    """Until the loss was within `CLOSE` of the best."""
    level = best + CLOSE * abs(best)
    on_the_way = next((t for t, loss, *_ in run["curve"] if loss <= level), None)
    if on_the_way is None and run["loss"] <= level:
        return run["seconds"]
    return on_the_way


def lead(run: Record, ours: Record) -> float | None:
    """Seconds of the run until its best merit over those of ours until as good; None: never.

    Merit is the held-out loss where there is one, else the loss.
    """
    column = 1 if run.get("held_out") is None else 3
    goal = merit(run)
    theirs = _first_at(run["curve"], column, goal * (1 + 1e-9)) or run["seconds"]
    own = _first_at(ours["curve"], column, goal)
    return None if own is None else theirs / max(own, 1e-9)


def _first_at(curve: Sequence[Sequence], column: int, level: float) -> float | None:
    return next((p[0] for p in curve if p[column] is not None and p[column] <= level), None)


def ahead(run: Record, ours: Record) -> bool:
    """Whether its merit was lower than our final one within the time that ours took."""
    column = 1 if run.get("held_out") is None else 3
    level = merit(ours) * (1 - LOWER)
    first = _first_at(run["curve"], column, level)
    if first is None and merit(run) <= level:
        first = run["seconds"]
    return first is not None and first <= ours["seconds"]


def profiles(runs: Sequence[Record]) -> dict[str, Any]:
    """Over problems with a goal x seeds, ablations and our other methods left out.

    gradient: seconds to the goal; loss: to within `CLOSE` of the lowest.
    """
    times: dict[str, dict[str, dict]] = {"gradient": {}, "loss": {}}
    for name in dict.fromkeys(r["problem"] for r in runs):
        mine = [r for r in runs if r["problem"] == name and r["status"] != "not installed"]
        if any(r.get("held_out") is not None for r in mine):
            continue
        best = lowest_losses(mine)
        for method in dict.fromkeys(r["method"] for r in mine if r["method"] in RIVALS):
            for r in _chosen(method, [r for r in mine if r["method"] == method]):
                case = (name, r["seed"])
                known = r.get("loss") is not None
                arrival = seconds_to_loss(r, best[r["seed"]]) if known else None
                times["loss"].setdefault(method, {})[case] = arrival
                reached = r.get("reached", {}).get(GOAL)
                times["gradient"].setdefault(method, {})[case] = reached
    return {
        name: {
            "steps": performance_profile(by_method),
            "cases": {method: len(cases) for method, cases in by_method.items()},
        }
        for name, by_method in times.items()
    }


def _spread(runs: Sequence[Record], of: Callable[[Record], float | None]) -> dict:
    return spread([x for x in map(of, runs) if x is not None])


def _counts(words: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return found


def _word(gtol: float) -> str:
    return f"{gtol:.0e}"
