"""Sentences that are computed from a summary, so that they are true for any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.comparison.methods import GROUP_OF, OTHERS, OURS
from benchmarks.comparison.profiles import share_within
from benchmarks.comparison.summary import CLOSE, GOAL, LOWER
from benchmarks.harness import show


def rivals(problem: Mapping, *groups: str) -> dict[str, Mapping]:
    """Methods that ran, ours and ablations left out."""
    wanted = groups or OTHERS
    return {
        name: m
        for name, m in problem["methods"].items()
        if GROUP_OF.get(name) in wanted and m["finished"]
    }


def goal_sentences(problem: Mapping) -> Iterator[str]:
    """How we and the nearest rival of either kind did on a problem with a goal."""
    ours = problem["methods"].get(OURS)
    if ours is None or not ours["finished"]:
        yield "Newtention did not run."
        return
    hits, seconds = ours["reached"][GOAL], ours["seconds"][GOAL]["median"]
    if not hits:
        yield f"Newtention reached the goal on none of {ours['runs']} seeds."
        return
    yield f"Newtention: {show(seconds)} s (median), {hits} of {ours['runs']} seeds."
    for groups, words in (
        (("scipy",), "scipy's methods with our closed forms"),
        (("autograd", "first-order"), "the methods on automatic differentiation"),
    ):
        found = rivals(problem, *groups)
        if found:
            yield nearest(found, words)


def nearest(found: Mapping[str, Mapping], words: str) -> str:
    """The fastest of some methods, or the bound that all of them share."""
    arrived = {n: m for n, m in found.items() if m["reached"][GOAL] == m["runs"]}
    timed = {n: m for n, m in arrived.items() if m["ratio"]["count"]}
    if timed:
        name = min(timed, key=lambda n: timed[n]["ratio"]["median"])
        ratio = timed[name]["ratio"]["median"]
        return f"Fastest of {words} on all seeds: {name}, {show(ratio)} times our time."
    some = {n: m for n, m in found.items() if m["reached"][GOAL]}
    if some:
        name = max(some, key=lambda n: some[n]["reached"][GOAL])
        m = some[name]
        return (
            f"None of {words} got there on all seeds; {name} did on {m['reached'][GOAL]} of "
            f"{m['runs']}."
        )
    tried = [m for m in found.values() if not m["gave_up"] and m["ratio"]["count"]]
    if not tried:
        return f"None of {words} got there."
    bound = show(min(m["ratio"]["median"] for m in tried))
    rest = "" if len(tried) == len(found) else "; the others gave up before"
    return f"None of {words} got there in {bound} times our time or more{rest}."


def losers(titles: Mapping[str, str], problems: Mapping[str, Mapping]) -> list[str]:
    """Where others win: a sentence for each problem."""
    found = []
    for key, problem in problems.items():
        ours = problem["methods"].get(OURS)
        if ours is None or not ours["finished"]:
            continue
        others = rivals(problem)
        wins = {name: _win(name, m, ours) for name, m in others.items()}
        phrases = [p for p in wins.values() if p]
        lower = {n: m for n, m in others.items() if not wins[n] and _lower(m, ours)}
        if lower:
            phrases.append(_ended_lower(lower, len(others), ours))
        if phrases:
            found.append(f"*{titles[key]}*: " + "; ".join(phrases) + ".")
    return found


def _ended_lower(lower: Mapping[str, Mapping], others: int, ours: Mapping) -> str:
    """How many ended lower in more time, and the lowest of them."""
    key = _key(ours)
    name = min(lower, key=lambda n: lower[n][key]["median"])
    m = lower[name]
    return (
        f"{len(lower)} of {others} others ended lower with more time, {name} lowest: "
        f"{_merit(m)} against {_number(ours)}, after {show(m['spent']['median'])} s; ours ended "
        f"after {show(ours['spent']['median'])} s"
    )


def _win(name: str, method: Mapping, ours: Mapping) -> str | None:
    """How a rival did better than ours in our time; None if it did not."""
    ratio = method["ratio"]["median"]
    if ratio is not None and ratio < 1 and not method["bound"]:
        return f"{name} needed {show(ratio)} of our time to the goal"
    if method["ahead"] > method["finished"] / 2:
        return (
            f"{name} was below our final loss within our time on {method['ahead']} of "
            f"{method['finished']} seeds ({_merit(method)} against {_number(ours)} at the end)"
        )
    return None


def _lower(method: Mapping, ours: Mapping) -> bool:
    return method[_key(method)]["median"] < ours[_key(method)]["median"] * (1 - LOWER)


def _key(method: Mapping) -> str:
    return "held_out" if method["held_out"]["count"] else "relative_loss"


def _number(method: Mapping) -> str:
    return show(method[_key(method)]["median"], 4)


def _merit(method: Mapping) -> str:
    held_out = "held-out " if method["held_out"]["count"] else ""
    return f"{held_out}relative loss {_number(method)}"


def profile_sentences(profiles: Mapping) -> Iterator[str]:
    """Shares at the left end and at ten times the least."""
    for key, words in (
        ("gradient", f"To a gradient of {GOAL}"),
        ("loss", f"To a loss within {100 * CLOSE:g} % of the lowest that anybody found"),
    ):
        steps = profiles[key]["steps"]
        if OURS not in steps:
            continue
        others = {n: share_within(s, 10.0) for n, s in steps.items() if n != OURS}
        text = (
            f"{words}: Newtention was the fastest of all in "
            f"{100 * share_within(steps[OURS], 1.0):.0f} % of its "
            f"{profiles[key]['cases'][OURS]} cases, and within ten times the least time in "
            f"{100 * share_within(steps[OURS], 10.0):.0f} %"
        )
        if others:
            name = max(others, key=lambda n: others[n])
            text += f"; of the others, {name} was so most often ({100 * others[name]:.0f} %)"
        yield text + "."


def equal_loss_sentences(problem: Mapping) -> Iterator[str]:
    """How much sooner ours was as good as the best rival."""
    ours = problem["methods"].get(OURS)
    found = rivals(problem)
    if ours is None or not ours["finished"] or not found:
        return
    name = min(found, key=lambda n: found[n][_key(ours)]["median"])
    m = found[name]
    yield (
        f"The best of the others is {name}: {_merit(m)} after {show(m['spent']['median'])} s. "
        f"Ours: {_merit(ours)} after {show(ours['spent']['median'])} s."
    )
    if m["lead"]["count"]:
        yield (
            f"On {m['lead']['count']} of {m['finished']} seeds ours was as good as that method's "
            f"best at some time: {show(m['lead']['median'])} times as soon (median)."
        )
    else:
        yield "On no seed was ours ever as good as that method's best."
    for other, own in problem["methods"].items():
        if GROUP_OF.get(other) == "ours" and other != OURS and own["finished"]:
            yield f"{other.capitalize()}: {_merit(own)} after {show(own['spent']['median'])} s."


def compilation(problems: Mapping[str, Mapping]) -> Iterator[str]:
    """What is not counted."""
    found = [
        m["compile_seconds"]
        for problem in problems.values()
        for m in problem["methods"].values()
        if m["compile_seconds"]["count"] and m["compile_seconds"]["median"] > 0
    ]
    if found:
        least, most = (f(s["median"] for s in found) for f in (min, max))
        yield (
            "To compile a step of a method of optimistix took "
            f"{show(least)} to {show(most)} s (medians), which are not counted."
        )


def missing_sentence(problems: Mapping[str, Mapping]) -> str | None:
    """Methods that are not installed."""
    names = {
        name
        for problem in problems.values()
        for name, m in problem["methods"].items()
        if "not installed" in m["status"]
    }
    return f"Not installed, and left out: {', '.join(sorted(names))}." if names else None
