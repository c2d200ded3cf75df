"""What the methods yield while they run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.solution import Record, Status

Snapshot = dict[str, Tensor]
"""All that a method depends on at a point, by name: a run continued from it repeats the rest."""


NEXT_MEMBER = "next member"
"""Sent to a method that runs the members one after another: leave the present one."""


@dataclass(frozen=True, eq=False)
class Iterate:
    """One point of a run.

    theta: the weights of the whole batch.
    records: the record of every member that is still running or ends here.
    ended: why, for the members that end here.
    snapshot: makes the state to continue from.
    """

    theta: Float[Tensor, "b N"]
    records: dict[int, Record]
    ended: dict[int, Status]
    snapshot: Callable[[], Snapshot]


@dataclass(frozen=True, eq=False)
class MemberState:
    """A point and what a method has learnt on the way, of one member of a batch.

    Methods add numbers of their own, each with a default that says its type.

    ended: this member is done, and not because of a limit.
    """

    theta: Float[Tensor, " N"]
    ended: bool = False

    @staticmethod
    def snapshot(states: Sequence[MemberState], theta: Float[Tensor, "b N"]) -> Snapshot:
        """The states and weights of all members."""
        names = [f.name for f in fields(states[0]) if f.name != "theta"]
        rows = [[float(getattr(state, name)) for name in names] for state in states]
        return {"theta": theta, "states": torch.tensor(rows, dtype=torch.float64)}

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> list[Self]:
        """The inverse."""
        kinds: dict[str, Any] = {f.name: type(f.default) for f in fields(cls) if f.name != "theta"}
        return [
            cls(theta, **{n: kind(x) for (n, kind), x in zip(kinds.items(), row, strict=True)})
            for theta, row in zip(snapshot["theta"], snapshot["states"].tolist(), strict=True)
        ]


S = TypeVar("S", bound=MemberState)


def one_by_one(
    states: list[S],
    theta: Float[Tensor, "b N"],
    points: Callable[[int, S], Iterable[tuple[S, Record, Status | None]]],
    expired: Callable[[], bool] = lambda: False,
) -> Generator[Iterate, str | None, None]:
    """Run every member of a batch to its end, one after another, yielding at every point.

    points: those of member i from a state on, with the record of each and, at the last, why it is
        the last; it ends without a reason if the time runs out.
    expired: whether the time limit has passed.
    """
    for i, first in enumerate(states):
        if first.ended:
            continue
        status = None
        for at, record, status in points(i, first):
            theta = theta.index_copy(0, torch.tensor([i], device=theta.device), at.theta[None])
            states[i] = at
            command = yield Iterate(
                theta,
                {i: record},
                {} if status is None else {i: status},
                partial(MemberState.snapshot, tuple(states), theta),
            )
            if command == NEXT_MEMBER:
                break
        if expired():
            return
        # Others go on where they are when a run with a higher limit continues from here.
        states[i] = replace(states[i], ended=status is not Status.ITERATION_LIMIT)
