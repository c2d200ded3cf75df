"""The clock of a run, which stands still while somebody looks at it.

A method is stopped from inside the functions that it calls, where its points can be seen, so that
its own stopping rule hardly matters.  What a look costs is nobody's time: loss and gradient on the
way are free for all methods alike.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PATIENCE = 0.05
"""Seconds between two tries of the alarm to end a run that is being looked at."""
NEWS = 1e-4
"""Relative decrease of the loss that is worth a point of the curve; a gradient must halve."""
LONGEST_CURVE = 200
"""Points of a curve that are kept."""


class Ended(Exception):  # noqa: N818 - no error
    """The gradient is small enough, or the time is over."""


@dataclass(frozen=True)
class Look:
    """What somebody sees at a point; None is not known.

    loss: total.  gradient: its 2-norm.  held_out: relative loss on held-out data.
    """

    loss: float
    gradient: float | None = None
    held_out: float | None = None


class Watch:
    """Seconds of a run, its curve, the times of the tolerances, and the point to judge it by.

    judge: loss and gradient at a point, for methods that do not compute both.
    limit: seconds.  gtols: norms of the gradient; the run ends at the smallest.
    point: where the gradient met the smallest tolerance, else where the loss was lowest.
    """

    def __init__(
        self, judge: Callable[[Any], Look], limit: float, gtols: Sequence[float] = ()
    ) -> None:
        self.judge = judge
        self.limit = limit
        self.gtols = sorted(gtols, reverse=True)
        self.reached: dict[float, float] = {}
        self.curve: list[tuple[float, float, float | None, float | None]] = []
        self.compile_seconds = 0.0
        self.point: Any = None
        self.lowest = math.inf
        self.least_gradient = math.inf
        self.best_held_out = math.inf
        self.looking = False
        self.start()

    @property
    def smallest(self) -> float:
        """The norm of the gradient that ends the run; 0 if none does."""
        return self.gtols[-1] if self.gtols else 0.0

    def start(self) -> None:
        """Set the clock to zero."""
        self.excluded = self.excluded_cpu = 0.0
        self.began, self.began_cpu = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        """On the clock, looks excluded."""
        return time.perf_counter() - self.began - self.excluded

    def process_seconds(self) -> float:
        """Of all threads of the process, looks excluded."""
        return time.process_time() - self.began_cpu - self.excluded_cpu

    def share(self) -> float:
        """Of the time that is used up, 1 at most."""
        return min(1.0, self.seconds() / self.limit)

    @contextmanager
    def still(self) -> Iterator[None]:
        """The clock stands still."""
        if self.looking:
            yield
            return
        now, cpu = time.perf_counter(), time.process_time()
        self.looking = True
        try:
            yield
        finally:
            self.looking = False
            self.excluded += time.perf_counter() - now
            self.excluded_cpu += time.process_time() - cpu

    def look(self, point: Any) -> None:
        """Judge a point, and end the run if it is good enough or the time is over."""
        with self.still():
            found = self.judge(point)
        self.see(point, found.loss, found.gradient, found.held_out)

    def see(
        self,
        point: Any,
        loss: float | None = None,
        gradient: float | None = None,
        held_out: float | None = None,
    ) -> None:
        """Note what a method has computed at a point; a NumPy point is copied if it is kept.

        Raises:
            Ended: the gradient is small enough, or the time is over.
        """
        now = self.seconds()
        with self.still():
            arrived = self._note(point, now, loss, gradient, held_out)
        if arrived or now > self.limit:
            raise Ended

    def _note(
        self,
        point: Any,
        now: float,
        loss: float | None,
        gradient: float | None,
        held_out: float | None,
    ) -> bool:
        news = False
        if loss is not None and loss <= self.lowest:
            news = not self.curve or loss < (1 - NEWS) * self.curve[-1][1]
            self.lowest, self.point = loss, _copy(point)
        if gradient is not None:
            news = news or gradient < 0.5 * self.least_gradient
            self.least_gradient = min(self.least_gradient, gradient)
            for gtol in self.gtols[len(self.reached) :]:
                if gradient <= gtol:
                    self.reached[gtol] = now
        if held_out is not None:
            news = news or held_out < self.best_held_out
            self.best_held_out = min(self.best_held_out, held_out)
        if news and math.isfinite(self.lowest):
            least = _known(self.least_gradient), _known(self.best_held_out)
            self.curve.append((now, self.lowest, *least))
        arrived = bool(self.gtols) and len(self.reached) == len(self.gtols)
        if arrived:
            self.point = _copy(point)
        return arrived

    def thinned(self) -> list[tuple[float, float, float | None, float | None]]:
        """The curve, (seconds, lowest loss, least gradient, best held out) so far, in few points.

        The points that stay are evenly spread over its length; first and last are among them.
        """
        count = len(self.curve)
        if count <= LONGEST_CURVE:
            return self.curve
        step = (count - 1) / (LONGEST_CURVE - 1)
        return [self.curve[round(i * step)] for i in range(LONGEST_CURVE)]


def _copy(point: Any) -> Any:
    return point.copy() if hasattr(point, "copy") else point


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def alarm(watch: Watch) -> Iterator[None]:
    """Ends the block by `Ended` once the watch's time is over, wherever Python is by then.

    Methods that look at the clock between two of their steps only would otherwise go on.
    """
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: object) -> None:
        left = watch.limit - watch.seconds()
        if watch.looking or left > 0:
            signal.setitimer(signal.ITIMER_REAL, max(left, PATIENCE))
        else:
            raise Ended

    earlier = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(watch.limit, PATIENCE))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
