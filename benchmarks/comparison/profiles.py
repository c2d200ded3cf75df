"""Performance profiles (Dolan and More, Mathematical Programming 91, 2002)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

Times = Mapping[str, Mapping[Hashable, float | None]]
"""Seconds by method and case; None where the method did not get there."""


def performance_profile(times: Times) -> dict[str, list[tuple[float, float]]]:
    """Steps (tau, share): of its cases, how many a method solved in tau times the least time.

    The least is over all methods of the case.  A case that nobody solved is a failure of all that
    tried it.  A method counts the cases that it tried.  Taus rise; the first is at least 1.
    """
    least = _least(times)
    profile = {}
    for method, cases in times.items():
        ratios = sorted(t / least[case] for case, t in cases.items() if t is not None)
        profile[method] = [(tau, (i + 1) / len(cases)) for i, tau in enumerate(ratios)]
    return profile


def share_within(profile: list[tuple[float, float]], tau: float) -> float:
    """The height of a profile at tau."""
    return max((share for at, share in profile if at <= tau), default=0.0)


def _least(times: Times) -> dict[Hashable, float]:
    least: dict[Hashable, float] = {}
    for cases in times.values():
        for case, t in cases.items():
            if t is not None:
                least[case] = min(t, least.get(case, t))
    return least
