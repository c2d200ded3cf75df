"""One run of a method: consumes its iterates, keeps the history, applies limits, saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.checkpoint import Checkpoint, Saved
from newtention.derivatives.gradient import data_loss
from newtention.derivatives.penalty import penalty
from newtention.layers import AttentionLayer, BilinearAttention, MapAttention, Parametrisation
from newtention.newton.iterates import NEXT_MEMBER, Iterate
from newtention.notation import Array
from newtention.problem import AttentionProblem
from newtention.solution import TABLE_HEADER, History, Record, Solution, Status, table_row
from newtention.weights import as_layer


@dataclass(frozen=True, eq=False)
class Progress:
    """What a callback sees after each iteration.

    iteration: its number, from 0.
    records: the latest record of every start of every problem, in order; None before the first.
    record: the one with the lowest loss (of all problems, for `solve_many`).
    ended: whether each start has ended.
    seconds: since the start of the run.
    max_iter, max_seconds: the limits of the run.
    """

    iteration: int
    records: tuple[Record | None, ...]
    record: Record
    ended: tuple[bool, ...]
    seconds: float
    max_iter: int
    max_seconds: float | None
    _layer: Callable[[], AttentionLayer] = field(repr=False)

    def __repr__(self) -> str:
        """One line."""
        running = len(self.ended) - sum(self.ended)
        return (
            f"Progress(iteration {self.iteration}, loss {self.record.loss:.6g}, "
            f"{running} of {len(self.ended)} starts running, {self.seconds:.3g} s)"
        )

    @property
    def layer(self) -> AttentionLayer:
        """Current weights of the start that `record` belongs to."""
        return self._layer()

    @property
    def X(self) -> Array:
        """The query/key map of `layer`, in the bilinear form or of attention maps."""
        layer = self.layer
        return layer.X if isinstance(layer, MapAttention) else _bilinear(layer).X

    @property
    def Y(self) -> Array:
        """The value map of `layer`, in the bilinear form."""
        return _bilinear(self.layer).Y


Callback = Callable[[Progress], object]


@dataclass(frozen=True)
class Limits:
    """When a run ends without having converged.

    began: `time.perf_counter` at its start.  patience: iterations without a better validation loss.
    """

    began: float
    max_iter: int
    max_seconds: float | None
    patience: int

    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.began

    def expired(self) -> bool:
        """Whether the time limit has passed."""
        return self.max_seconds is not None and self.seconds() >= self.max_seconds


@dataclass(frozen=True, eq=False)
class Members:
    """The members of a batch.

    problem: the batch.  singles: the problem of each member, none a stack.
    one_head: the user's X has no head axis.  validation: a problem of held-out data, if any.
    """

    problem: AttentionProblem
    singles: Sequence[AttentionProblem]
    layer: Parametrisation
    one_head: bool
    validation: AttentionProblem | None = None

    def present(self, i: int, theta: Float[Tensor, " N"]) -> AttentionLayer:
        """Weights of member i for the user."""
        return as_layer(self.layer, theta, self.one_head, self.singles[i])

    def validation_loss(self, theta: Float[Tensor, " N"]) -> float:
        """Relative loss on the held-out data."""
        assert self.validation is not None
        loss = data_loss(self.validation, self.layer, theta[None])
        return float(_relative(loss, self.validation.target_energy()))


class Run:
    """Consumes the iterates: history, limits, callback, and the best point at the end."""

    def __init__(
        self,
        members: Members,
        limits: Limits,
        callback: Callback | None,
        verbose: bool,
        checkpoint: Checkpoint | None,
        choices: dict[str, Any],
    ) -> None:
        self.members = members
        self.limits = limits
        self.callback = callback
        self.verbose = verbose
        self.checkpoint = checkpoint
        self.choices = choices
        count = members.problem.batch
        self.start: Tensor | None = None
        self.theta: Tensor | None = None
        self.best: Tensor | None = None  # lowest validation loss of every member
        self.best_loss = [float("inf")] * count
        self.best_iteration = [0] * count
        self.records: list[list[Record]] = [[] for _ in range(count)]
        self.statuses: dict[int, Status] = {}
        self.earlier = 0.0  # seconds before a checkpoint

    def resume(self, saved: Saved) -> None:
        """Take over the state of a checkpoint, but for the point that the method yields again."""
        self.start, self.theta = saved.tensors["run.start"], saved.tensors["run.theta"]
        self.best = saved.tensors.get("run.best")
        self.best_loss, self.best_iteration = saved.run["best_loss"], saved.run["best_iteration"]
        self.records = [[Record(**row) for row in rows] for rows in saved.run["records"]]
        statuses = {int(i): Status(s) for i, s in saved.run["statuses"].items()}
        # Members at a limit are tried again: it may have been raised.
        self.statuses = {i: s for i, s in statuses.items() if s is not Status.ITERATION_LIMIT}
        self.earlier = saved.run["seconds"]

    def consume(self, iterates: Generator[Iterate, str | None, None]) -> None:
        """Run to the end, or to a limit, the callback's stop or Ctrl-C."""
        if self.verbose:
            print(TABLE_HEADER)
        reason = Status.INTERRUPTED
        try:
            command: str | None = None
            while True:
                try:
                    it = iterates.send(command)
                except StopIteration:
                    reason = Status.TIME_LIMIT  # of members that the method did not reach
                    break
                self._note(it)
                if self.callback is not None:
                    try:
                        self.callback(self._progress(it))
                    except StopIteration:
                        reason = Status.STOPPED
                        break
                if self.limits.expired():
                    reason = Status.TIME_LIMIT
                    break
                command = self._exhausted(it)
                running = set(range(self.members.problem.batch)) - self.statuses.keys()
                if command is not None and not running:
                    break
        except KeyboardInterrupt:
            if self.theta is None:
                raise
        for i in range(self.members.problem.batch):
            self.statuses.setdefault(i, reason)

    def solutions(self, n_init: int, method: str, tol: float) -> list[Solution]:
        """The best start of every problem."""
        assert self.theta is not None
        assert self.start is not None
        m = self.members
        theta = self.theta if self.best is None else self.best
        data = data_loss(m.problem, m.layer, theta)
        charge = penalty(m.problem, m.layer).value(theta)
        relative = _relative(data, m.problem.target_energy())
        total = data + charge
        held = None if m.validation is None else self.best_loss
        ranking = total.tolist() if held is None else held
        result = []
        for first in range(0, m.problem.batch, n_init):
            group = range(first, first + n_init)
            best = min(group, key=lambda i: ranking[i])
            result.append(
                Solution(
                    layer=m.present(best, theta[best]),
                    start=m.present(best, self.start[best]),
                    loss=float(total[best]),
                    data_loss=float(data[best]),
                    penalty=float(charge[best]),
                    relative_loss=float(relative[best]),
                    status=self.statuses[best],
                    iterations=max(0, len(self.records[best]) - 1),
                    seconds=self._seconds(),
                    method=method,
                    tol=tol,
                    history=History(self.records[best]),
                    start_losses=tuple(float(total[i]) for i in group),
                    validation_loss=None if held is None else held[best],
                )
            )
        return result

    def _note(self, it: Iterate) -> None:
        if self.start is None:
            self.start = it.theta
        self.theta = it.theta
        self.statuses |= it.ended
        for i, record in it.records.items():
            rows = self.records[i]
            if rows and rows[-1].iteration == record.iteration:  # a point from a checkpoint
                rows.pop()
            if record.iteration == 0 and self.start is not it.theta:
                self.start = self.start.index_copy(
                    0, torch.tensor([i], device=it.theta.device), it.theta[i : i + 1]
                )
            held = None
            if self.members.validation is not None:
                held = self._validate(i, record.iteration, it.theta[i])
            # The run's clock, not the method's, which starts anew with a member or a checkpoint.
            rows.append(replace(record, seconds=self._seconds(), validation=held))
        if self.checkpoint is not None:
            self._save(it)
        if self.verbose:
            rows = [self.records[i][-1] for i in it.records]
            print(table_row(min(rows, key=lambda r: r.loss)), flush=True)

    def _validate(self, i: int, iteration: int, theta: Float[Tensor, " N"]) -> float:
        loss = self.members.validation_loss(theta)
        if self.best is None:
            assert self.theta is not None
            self.best = self.theta.clone()
        if loss < self.best_loss[i]:
            self.best = self.best.index_copy(0, torch.tensor([i], device=theta.device), theta[None])
            self.best_loss[i], self.best_iteration[i] = loss, iteration
        return loss

    def _exhausted(self, it: Iterate) -> str | None:
        """End the members whose validation loss no longer falls; the command for the method."""
        if self.members.validation is None:
            return None
        command = None
        for i, record in it.records.items():
            if i not in self.statuses:
                wait = record.iteration - self.best_iteration[i]
                if wait >= self.limits.patience:
                    self.statuses[i] = Status.EARLY_STOP
                    command = NEXT_MEMBER
        return command

    def _save(self, it: Iterate) -> None:
        assert self.checkpoint is not None
        assert self.start is not None
        tensors = {**it.snapshot(), "run.start": self.start, "run.theta": it.theta}
        if self.best is not None:
            tensors["run.best"] = self.best
        run = {
            "best_loss": self.best_loss,
            "best_iteration": self.best_iteration,
            "records": [[asdict(r) for r in rows] for rows in self.records],
            "statuses": {str(i): s.value for i, s in self.statuses.items() if i not in it.ended},
            "seconds": self._seconds(),
        }
        self.checkpoint.save(Saved(tensors, self.choices, run))

    def _progress(self, it: Iterate) -> Progress:
        latest = tuple(rows[-1] if rows else None for rows in self.records)
        known = [i for i, record in enumerate(latest) if record is not None]
        best = min(known, key=lambda i: self.records[i][-1].loss)
        theta = it.theta[best]
        return Progress(
            iteration=max(r.iteration for r in it.records.values()),
            records=latest,
            record=self.records[best][-1],
            ended=tuple(i in self.statuses for i in range(len(latest))),
            seconds=self._seconds(),
            max_iter=self.limits.max_iter,
            max_seconds=self.limits.max_seconds,
            _layer=lambda: self.members.present(best, theta),
        )

    def _seconds(self) -> float:
        return self.earlier + self.limits.seconds()


def _bilinear(layer: AttentionLayer) -> BilinearAttention:
    if not isinstance(layer, BilinearAttention):
        raise AttributeError(f"A {type(layer).__name__} has no X and Y; use progress.layer.")
    return layer


def _relative(loss: Float[Tensor, " b"], energy: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    return torch.where(energy > 0, loss / energy.where(energy > 0, torch.ones_like(energy)), loss)
