"""What the methods yield while they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
