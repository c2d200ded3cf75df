"""One run of the solver: consumes the iterates, keeps the history and applies the limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from newtention.derivatives.gradient import data_loss
from newtention.derivatives.penalty import penalty
from newtention.layers import Bilinear
from newtention.newton.loop import Iterate, Members
from newtention.notation import Array
from newtention.problem import AttentionProblem
from newtention.solution import TABLE_HEADER, History, Record, Solution, Status, table_row


@dataclass(frozen=True, eq=False)
class Progress:
    """What a callback sees after each iteration.

    iteration: its number, from 0.
    records: the latest record of every start of every problem, in order.
    record: the one with the lowest loss (of all problems, for `solve_many`).
    X, Y: current weights of that one, shaped like a solution's.
    ended: whether each start has ended.
    seconds: since the start of the run.
    """

    iteration: int
    records: tuple[Record, ...]
    record: Record
    X: Array
    Y: Array
    ended: tuple[bool, ...]
    seconds: float


Callback = Callable[[Progress], object]


class Run:
    """Consumes the iterates: history, limits, callback, and the best point at the end."""

    def __init__(
        self,
        problem: AttentionProblem,
        one_head: bool,
        began: float,
        max_seconds: float | None,
        callback: Callback | None,
        verbose: bool,
    ) -> None:
        self.problem = problem
        self.one_head = one_head
        self.began = began
        self.max_seconds = max_seconds
        self.callback = callback
        self.verbose = verbose
        self.start: Members | None = None
        self.members: Members | None = None
        self.records: list[list[Record]] = [[] for _ in range(problem.batch)]
        self.statuses: dict[int, Status] = {}

    def consume(self, iterates: Iterator[Iterate]) -> None:
        """Run to the end, or to a limit, the callback's stop or Ctrl-C."""
        if self.verbose:
            print(TABLE_HEADER)
        reason = Status.INTERRUPTED
        try:
            for it in iterates:
                self._note(it)
                if self.callback is not None:
                    try:
                        self.callback(self._progress(it))
                    except StopIteration:
                        reason = Status.STOPPED
                        break
                if self.max_seconds is not None and self._seconds() >= self.max_seconds:
                    reason = Status.TIME_LIMIT
                    break
        except KeyboardInterrupt:
            if self.members is None:
                raise
        for i in range(self.problem.batch):
            self.statuses.setdefault(i, reason)

    def solutions(self, n_init: int, tol: float) -> list[Solution]:
        """The best start of every problem."""
        assert self.members is not None
        assert self.start is not None
        X, Y = self.members.X, self.members.Y
        layer = Bilinear(X.shape[1], *self.problem.widths)
        theta = layer.pack(X, Y)
        data = data_loss(self.problem, layer, theta)
        charge = penalty(self.problem, layer).value(theta)
        energy = self.problem.target_energy()
        relative = torch.where(
            energy > 0, data / energy.where(energy > 0, torch.ones_like(energy)), data
        )
        total = data + charge
        result = []
        for first in range(0, self.problem.batch, n_init):
            group = range(first, first + n_init)
            best = min(group, key=lambda i: float(total[i]))
            result.append(
                Solution(
                    X=self._present(X[best]),
                    Y=self._present(Y[best]),
                    start_X=self._present(self.start.X[best]),
                    start_Y=self._present(self.start.Y[best]),
                    loss=float(total[best]),
                    data_loss=float(data[best]),
                    penalty=float(charge[best]),
                    relative_loss=float(relative[best]),
                    status=self.statuses[best],
                    iterations=max(0, len(self.records[best]) - 1),
                    seconds=self._seconds(),
                    method="newton",
                    tol=tol,
                    history=History(self.records[best]),
                    start_losses=tuple(float(total[i]) for i in group),
                )
            )
        return result

    def _note(self, it: Iterate) -> None:
        if self.members is None:
            self.start = it.members
        self.members = it.members
        self.statuses |= it.ended
        for i, record in it.records.items():
            self.records[i].append(record)
        if self.verbose:
            best = min(it.records.values(), key=lambda r: r.loss)
            print(table_row(best), flush=True)

    def _progress(self, it: Iterate) -> Progress:
        latest = tuple(rows[-1] for rows in self.records)
        best = min(range(len(latest)), key=lambda i: latest[i].loss)
        return Progress(
            iteration=max(r.iteration for r in it.records.values()),
            records=latest,
            record=latest[best],
            X=self._present(it.members.X[best]),
            Y=self._present(it.members.Y[best]),
            ended=tuple(i in self.statuses for i in range(len(latest))),
            seconds=self._seconds(),
        )

    def _present(self, weights: Tensor) -> Array:
        return self.problem.present(weights[0].clone() if self.one_head else weights.clone())

    def _seconds(self) -> float:
        return time.perf_counter() - self.began
