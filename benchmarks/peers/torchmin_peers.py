"""pytorch-minimize: all derivatives by autograd."""

from __future__ import annotations

import warnings

import torch
import torchmin
from torch import Tensor

from benchmarks.comparison.tasks import RegressionTask
from benchmarks.comparison.watch import Watch

ENDLESS = 10**6


def minimize(task: RegressionTask, watch: Watch, choice: None, method: str) -> None:
    """torchmin.minimize, its own tolerances set to what nobody meets before us."""

    def fun(x: Tensor) -> Tensor:
        now = x.detach().numpy()
        value = task.loss(x)
        watch.see(now, loss=float(value.detach()))
        if x.requires_grad:
            # The first gradient after an evaluation is that of the loss; later ones belong to
            # Hessian products.
            def show(g: Tensor) -> None:
                handle.remove()
                watch.see(now, gradient=float(g.detach().norm()))

            handle = x.register_hook(show)
        return value

    options: dict[str, object] = {"max_iter": ENDLESS}
    if method == "newton-exact":
        options |= {"xtol": 0.0}
    elif method == "l-bfgs":
        options |= {"gtol": 0.0, "xtol": 0.0, "gtd_tol": 0.0}
    else:
        options |= {"gtol": watch.smallest}
    with warnings.catch_warnings():
        # torchmin 0.1 calls functions that torch has deprecated.
        warnings.simplefilter("ignore")
        torchmin.minimize(fun, torch.from_numpy(task.start.copy()), method, options=options)
