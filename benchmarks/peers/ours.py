"""Newtention, whole and with parts taken out."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import newtention as nt
from benchmarks.comparison.tasks import LayerTask, RegressionTask
from benchmarks.comparison.watch import Watch
from newtention.derivatives.hessian import second_order
from newtention.layers import Bilinear
from newtention.newton import loop
from newtention.newton.globalise import loss_noise
from newtention.newton.objective import Derivatives
from newtention.newton.projected import ProjectedLoss

TOL = 1e-15
"""Relative decrement: never met before the gradient is small enough."""
MAX_ITER = 1000


def solve(
    task: RegressionTask, watch: Watch, choice: None, method: str = "auto", **options: Any
) -> None:
    """`nt.solve` from the common start; the callback shows every iterate to the watch."""
    solution = nt.solve(
        task.problem,
        task.weights(torch.from_numpy(task.start)),
        method=method,
        tol=TOL,
        max_iter=MAX_ITER,
        callback=lambda progress: watch.look(progress.layer.theta.numpy()),
        options=nt.Options(**options),
    )
    watch.look(solution.layer.theta.numpy())


def solve_single_first(task: RegressionTask, watch: Watch, choice: None) -> None:
    """The matrix-free method in float32, as first-order methods have it, then in float64."""
    assert task.single is not None
    X, Y = task.weights(torch.from_numpy(task.start))
    rough = nt.solve(
        task.single,
        (X.float(), Y.float()),
        method="newton-cg",
        tol=TOL,
        max_iter=MAX_ITER,
        callback=lambda progress: watch.look(progress.layer.theta.double().numpy()),
    )
    X, Y = (torch.as_tensor(w).double() for w in (rough.X, rough.Y))
    solution = nt.solve(
        task.problem,
        (X, Y),
        method="newton-cg",
        tol=TOL,
        max_iter=MAX_ITER,
        callback=lambda progress: watch.look(progress.layer.theta.numpy()),
    )
    watch.look(solution.layer.theta.numpy())


def solve_layer(task: LayerTask, watch: Watch, choice: None, strength: float) -> None:
    """`nt.solve` on a whole layer, held near its start by an isotropic Proximity."""
    nt.solve(
        task.problem.with_regularizer(nt.Proximity(task.start, strength, isotropic=True)),
        start=task.start,
        method="newton-cg",
        max_iter=MAX_ITER,
        callback=lambda progress: watch.look(progress.layer),
    )


class JointLoss(ProjectedLoss):
    """The loss in X and Y together: Y is an unknown like X, and nothing is solved for."""

    def solved(
        self, theta: Float[Tensor, "b N"]
    ) -> tuple[Float[Tensor, "b N"], Float[Tensor, " b"]]:
        """As it is."""
        return theta, self.loss(theta)

    def derivatives(self, theta: Float[Tensor, "b N"], full: Bool[Tensor, " b"]) -> Derivatives:
        """Gradient and Hessian of all unknowns."""
        X, Y = self.layer.unpack(theta)
        share = None if bool(full.all()) else full.to(self.energy.dtype)
        loss, GX, GY, blocks = second_order(self.problem, X, Y, share)
        data = (loss - self.problem.quadratic.value(X, Y)).clamp(min=0)
        noise = loss_noise(loss, data, self.energy)
        gradient = torch.cat([GX.flatten(1), GY.flatten(1)], 1)
        return Derivatives(loss, noise, gradient, blocks.to_dense())


def without_projection(task: RegressionTask, watch: Watch, choice: None) -> None:
    """The dense loop on X and Y together."""
    layer = Bilinear(1, *task.problem.widths)
    objective = JointLoss.of(task.problem, layer)
    theta = torch.from_numpy(task.start)[None]
    for at in loop.iterate(objective, theta, loop.Settings(tol=TOL, max_iter=MAX_ITER)):
        watch.look(at.theta[0].numpy())
