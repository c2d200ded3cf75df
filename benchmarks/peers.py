"""The optimisers that Newtention is compared with, behind one interface.

Every peer minimises the same loss of the flat vector (X, Y) from the same start until the 2-norm of
the gradient meets the tolerance, or its time is up.  Peers are stopped from inside the functions
they call, where their gradients can be seen, so that their own stopping rules hardly matter.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torchmin
from scipy import optimize
from torch import Tensor

import newtention as nt


class Task:
    """One sequence without mask, as peers see it, and the start common to all."""

    def __init__(self, problem: nt.AttentionProblem, seed: int, X: Tensor | None = None) -> None:
        (chunk,) = problem.chunks
        self.problem = problem
        self.A1, self.A2, self.A3, self.B = (
            t[0, 0] for t in (chunk.A1, chunk.A2, chunk.A3, chunk.B)
        )
        start = nt.solve(problem, X, seed=seed, max_iter=0)
        self.derivatives = nt.to_scipy(problem, (start.X, start.Y))
        self.start = self.derivatives.x0
        """What `solve` would start from: X0 as given or random, Y0 solved for it."""

    def weights(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """X and Y of a flat vector."""
        d1, d2, d3, p = self.problem.widths
        return flat[: d1 * d2].reshape(d1, d2), flat[d1 * d2 :].reshape(d3, p)

    def gradient_norm(self, X: Tensor, Y: Tensor) -> float:
        """2-norm of the gradient in the flat vector."""
        GX, GY = nt.gradient(self.problem, X, Y)
        return float(torch.sqrt(GX.square().sum() + GY.square().sum()))

    def loss(self, flat: Tensor) -> Tensor:
        """The loss for autograd, as a careful user would write it."""
        X, Y = self.weights(flat)
        P = torch.softmax((self.A1 @ X) @ self.A2.T, 1)
        return 0.5 * (P @ (self.A3 @ Y) - self.B).square().sum()


class Ended(Exception):  # noqa: N818 - no error
    """The gradient is small enough, or the peer's time is over."""


class Watch:
    """Ends a run by an exception; notes when each tolerance is first met, and the best point."""

    def __init__(self, limit: float, gtols: Sequence[float]) -> None:
        self.gtols = sorted(gtols, reverse=True)
        self.gtol = self.gtols[-1]
        self.times: dict[float, float] = {}
        self.began = time.perf_counter()
        self.deadline = self.began + limit
        self.best = np.inf
        self.point: np.ndarray | None = None

    def value(self, x: np.ndarray, loss: float) -> None:
        """Called after each evaluation of the loss."""
        if loss <= self.best:
            self.best, self.point = loss, np.array(x)
        if time.perf_counter() > self.deadline:
            raise Ended

    def gradient(self, x: np.ndarray | None, norm: float) -> None:
        """Called after each evaluation of the gradient; x None if the peer keeps its point."""
        for gtol in self.gtols[len(self.times) :]:
            if norm <= gtol:
                self.times[gtol] = time.perf_counter() - self.began
        if norm <= self.gtol:
            self.point = None if x is None else np.array(x)
            raise Ended


@dataclass(frozen=True)
class Outcome:
    """One run: seconds to each tolerance reached and in all, loss and gradient at the end."""

    seconds: float
    reached: dict[str, float]
    loss: float
    gradient: float
    iterations: int | None = None
    error: str | None = None


Peer = Callable[[Task, Watch, np.ndarray], int | None]


def run(peer: Peer, task: Task, limit: float, gtols: Sequence[float]) -> Outcome:
    """Run one peer; loss and gradient at the end are ours, whatever the peer says."""
    watch = Watch(limit, gtols)
    iterations = error = None
    try:
        iterations = peer(task, watch, task.start.copy())
    except Ended:
        pass
    except RuntimeError as failure:
        if peer is newtention:
            raise
        error = str(failure)  # a rival that gives up with an exception keeps its best point
    seconds = time.perf_counter() - watch.began
    x = task.weights(torch.from_numpy(task.start if watch.point is None else watch.point))
    norm = task.gradient_norm(*x)
    # A trial point that a peer rejected because its loss rose by rounding counts for the peer.
    reached = {
        f"{gtol:.0e}": watch.times.get(gtol, seconds)
        for gtol in watch.gtols
        if gtol in watch.times or norm <= gtol
    }
    return Outcome(seconds, reached, nt.loss(task.problem, *x), norm, iterations, error)


def newtention(task: Task, watch: Watch, start: np.ndarray) -> int:
    """Our solver.  The callback pays for one full gradient per iteration, which peers get free."""

    def check(progress: nt.Progress) -> None:
        norm = task.gradient_norm(progress.X, progress.Y)
        try:
            watch.gradient(None, norm)
        except Ended:
            raise StopIteration from None

    solution = nt.solve(
        task.problem,
        task.weights(torch.from_numpy(start)),
        tol=1e-15,
        max_iter=1000,
        max_seconds=watch.deadline - watch.began,
        callback=check,
    )
    watch.point = solution.layer.theta.numpy()
    return solution.iterations


def scipy_with_ours(method: str, second: str | None) -> Callable:
    """A scipy method fed with our closed forms; second is "hess", "hessp" or None."""

    def peer(task: Task, watch: Watch, start: np.ndarray) -> int:
        ours = task.derivatives

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
                raise Ended
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
            now = x.detach().numpy()
            value = task.loss(x)
            watch.value(now, float(value.detach()))
            if x.requires_grad:
                # The first gradient after an evaluation is that of the loss; later ones belong to
                # Hessian products.
                def see(g: Tensor) -> None:
                    handle.remove()
                    watch.gradient(now, float(g.detach().norm()))

                handle = x.register_hook(see)
            return value

        settings = {"max_iter": 10**6, **options}
        if method == "newton-exact":
            settings |= {"xtol": 0.0}
        elif method == "l-bfgs":
            settings |= {"gtol": 0.0, "xtol": 0.0, "gtd_tol": 0.0}
        else:
            settings |= {"gtol": watch.gtol}
        with warnings.catch_warnings():
            # torchmin 0.1 calls functions that torch has deprecated.
            warnings.simplefilter("ignore")
            result = torchmin.minimize(fun, torch.from_numpy(start), method, options=settings)
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
