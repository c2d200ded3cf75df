"""Basin hopping on the command line: its part of `newtention fit`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

from newtention.api import Options
from newtention.basin_hopping import BasinHopping, basin_hopping
from newtention.cli.progress import busy
from newtention.inputs import require_positive
from newtention.problem import AttentionProblem

ROUNDS = 10**6
"""More than there is ever time for: the seconds are the limit."""


def require_alone(seconds: float | None, others: Mapping[str, object]) -> None:
    """Refuse what a search does not go with: it makes its own starts, and fits all data densely.

    Raises:
        ValueError: seconds that are not positive, or one of the other options was given.
    """
    if seconds is None:
        return
    require_positive("--hopping", seconds)
    for name, given in others.items():
        if given:
            raise ValueError(f"--hopping does not go with {name}.")


def hop(
    problem: AttentionProblem,
    seconds: float,
    tol: float | None,
    seed: int,
    chosen: Options,
    silent: bool,
) -> BasinHopping:
    """Look for a low minimum for so long, then fit the best to all data."""
    with nullcontext() if silent else busy(f"Basin hopping for {seconds:g} s"):
        return basin_hopping(
            problem,
            rounds=ROUNDS,
            max_seconds=seconds,
            seed=seed,
            tol=tol,
            options=chosen,
        )


def sentence(found: BasinHopping) -> str:
    """What was searched."""
    last = found.rounds[-1]
    return (
        f"Basin hopping: {last.fits} fits on {found.sampled_rows} queries in {last.seconds:.3g} s; "
        f"{found.message}  The best, fitted to all data:"
    )
