"""The optimisers that Newtention is compared with, behind one interface.

Every peer minimises the same loss of the flat vector (X, Y) from the same start until the 2-norm of
the gradient is at most `gtol`, or its time is up.  Peers are stopped from inside the functions they
call, so that their own stopping rules, which differ, play no part; the few that compute gradients
out of reach are given the nearest rule they have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torchmin
from scipy import optimize
from torch import Tensor

import newtention as nt


@dataclass(frozen=True)
class Task:
    """A problem as peers see it: arrays for autograd, derivatives for scipy, the common start."""

    problem: nt.AttentionProblem
    A1: Tensor
    A2: Tensor
    A3: Tensor
    B: Tensor
    seed: int

    def start(self) -> np.ndarray:
        """The start that `solve` makes: X0 random, Y0 solved."""
        return nt.to_scipy(self.problem, seed=self.seed).x0

    def weights(self, flat):  # noqa: ANN001, ANN201 - an array or a tensor
        """X and Y of a flat vector."""
        d1, d2, d3, p = self.A1.shape[1], self.A2.shape[1], self.A3.shape[1], self.B.shape[1]
        return flat[: d1 * d2].reshape(d1, d2), flat[d1 * d2 :].reshape(d3, p)

    def loss(self, flat: Tensor) -> Tensor:
        """The loss for autograd, as a careful user would write it."""
        X, Y = self.weights(flat)
        P = torch.softmax((self.A1 @ X) @ self.A2.T, 1)
        return 0.5 * (P @ (self.A3 @ Y) - self.B).square().sum()


class Reached(Exception):
    """The gradient is small enough."""


class TimeUp(Exception):
    """The peer's time is over."""


class Watch:
    """Ends a run by an exception; remembers the last point and the point of the lowest loss."""

    def __init__(self, limit: float, gtol: float) -> None:
        self.gtol = gtol
        self.began = time.perf_counter()
        self.deadline = self.began + limit
        self.best = np.inf
        self.point: np.ndarray | None = None
        self.stopped: float | None = None

    def value(self, x: np.ndarray, loss: float) -> None:
        """Called after each evaluation of the loss."""
        if loss <= self.best:
            self.best, self.point = loss, np.array(x)
        if time.perf_counter() > self.deadline:
            raise TimeUp

    def gradient(self, x: np.ndarray, norm: float) -> None:
        """Called after each evaluation of the gradient."""
        if norm <= self.gtol:
            self.point = np.array(x)
            raise Reached

    def stop(self) -> None:
        """Take the time."""
        self.stopped = time.perf_counter() - self.began


@dataclass(frozen=True)
class Outcome:
    """One run: seconds taken, and the true loss and gradient norm where it ended."""

    seconds: float
    reached: bool
    loss: float
    gradient: float
    iterations: int | None = None


def run(peer: Callable[[Task, Watch, np.ndarray], int | None], task: Task, limit: float, gtol: float) -> Outcome:
    """Run one peer; whatever it says, the verdict is our gradient at the point it ended at."""
    start = task.start()
    watch = Watch(limit, gtol)
    iterations = None
    try:
        iterations = peer(task, watch, start)
    except (Reached, TimeUp):
        pass
    watch.stop()
    assert watch.stopped is not None
    x = start if watch.point is None else watch.point
    GX, GY = nt.gradient(task.problem, *task.weights(x))
    norm = float(np.hypot(np.linalg.norm(GX), np.linalg.norm(GY)))
    # Gradients by another formula differ by rounding, so an autograd peer gets one per cent of room.
    return Outcome(
        watch.stopped, norm <= 1.01 * gtol, nt.loss(task.problem, *task.weights(x)), norm, iterations
    )


def newtention(task: Task, watch: Watch, start: np.ndarray) -> int:
    """Our solver.  The callback pays for one full gradient per iteration, which peers get free."""

    def check(progress: nt.Progress) -> None:
        GX, GY = nt.gradient(task.problem, progress.X, progress.Y)
        norm = float(np.hypot(np.linalg.norm(GX), np.linalg.norm(GY)))
        watch.point = np.concatenate([progress.X.ravel(), progress.Y.ravel()])
        if norm <= watch.gtol:
            raise StopIteration

    limit = watch.deadline - watch.began
    solution = nt.solve(
        task.problem, task.weights(start), tol=1e-15, max_iter=1000, max_seconds=limit, callback=check
    )
    watch.point = np.concatenate([solution.X.ravel(), solution.Y.ravel()])
    return solution.iterations


def scipy_with_ours(method: str, second: str | None) -> Callable:
    """A scipy method fed with our closed forms; second is "hess", "hessp" or None."""

    def peer(task: Task, watch: Watch, start: np.ndarray) -> int:
        ours = nt.to_scipy(task.problem, seed=task.seed)

        def fun(x: np.ndarray) -> float:
            value = ours.fun(x)
            watch.value(x, value)
            return value

        def jac(x: np.ndarray) -> np.ndarray:
            g = ours.jac(x)
            watch.gradient(x, float(np.linalg.norm(g)))
            return g

        def hessp(x: np.ndarray, v: np.ndarray) -> np.ndarray:
            if time.perf_counter() > watch.deadline:
                raise TimeUp
            return ours.hessp(x, v)

        extra = {"hess": {"hess": ours.hess}, "hessp": {"hessp": hessp}}.get(second or "", {})
        options = {"maxiter": 10**6, "gtol": 0.0 if second is None else watch.gtol}
        if method == "L-BFGS-B":
            options |= {"maxcor": 50, "ftol": 0.0, "maxfun": 10**7}
        return optimize.minimize(fun, start, jac=jac, method=method, options=options, **extra).nit

    return peer


def torchmin_autograd(method: str, **options: object) -> Callable:
    """A method of pytorch-minimize, all derivatives by autograd."""

    def peer(task: Task, watch: Watch, start: np.ndarray) -> int:
        def fun(x: Tensor) -> Tensor:
            value = task.loss(x)
            watch.value(x.detach().numpy(), float(value.detach()))
            return value

        def small(x: Tensor) -> bool:
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                (g,) = torch.autograd.grad(task.loss(leaf), leaf)
            watch.gradient(x.numpy(), float(g.norm()))
            return False

        settings = {"max_iter": 10**6, **options}
        if method == "newton-exact":  # no gradient test of its own
            settings |= {"xtol": 0.0, "callback": small}
        elif method == "l-bfgs":
            settings |= {"gtol": watch.gtol, "normp": 2, "xtol": 0.0, "gtd_tol": 0.0}
        else:
            settings |= {"gtol": watch.gtol}
        result = torchmin.minimize(fun, torch.from_numpy(start), method, options=settings)
        watch.point = result.x.numpy()
        return int(result.nit)

    return peer


def torch_lbfgs(task: Task, watch: Watch, start: np.ndarray) -> None:
    """torch.optim.LBFGS with its line search."""
    x = torch.from_numpy(start.copy()).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [x],
        max_iter=10**6,
        max_eval=10**7,
        history_size=100,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = task.loss(x)
        value.backward()
        now = x.detach().numpy()
        watch.gradient(now, float(x.grad.norm()))
        watch.value(now, float(value.detach()))
        return value

    optimizer.step(closure)


def adam(rate: float) -> Callable:
    """Full-batch Adam; the rate falls to zero along a cosine over the time allowed."""

    def peer(task: Task, watch: Watch, start: np.ndarray) -> int:
        x = torch.from_numpy(start.copy()).requires_grad_()
        optimizer = torch.optim.Adam([x], lr=rate)
        limit = watch.deadline - watch.began
        step = 0
        while True:
            optimizer.zero_grad()
            value = task.loss(x)
            value.backward()
            if step % 10 == 0:
                now = x.detach().numpy()
                watch.gradient(now, float(x.grad.norm()))
                watch.value(now, float(value.detach()))
                done = min(1.0, (time.perf_counter() - watch.began) / limit)
                optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + np.cos(np.pi * done))
            optimizer.step()
            step += 1

    return peer
