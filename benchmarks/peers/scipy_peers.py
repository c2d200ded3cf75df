"""scipy's minimisers, fed with our closed forms."""

from __future__ import annotations

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from benchmarks.comparison.tasks import Pile, RegressionTask
from benchmarks.comparison.watch import Watch

MEMORY = 50
"""Pairs that L-BFGS-B keeps; its default is 10."""
ENDLESS = 10**7


def minimize(
    task: RegressionTask, watch: Watch, choice: None, method: str, second: str | None = None
) -> None:
    """scipy.optimize.minimize; second is "hess", "hessp" or None."""
    ours = task.derivatives

    def fun(x: np.ndarray) -> float:
        value = ours.fun(x)
        watch.see(x, loss=value)
        return value

    def jac(x: np.ndarray) -> np.ndarray:
        g = ours.jac(x)
        watch.see(x, gradient=float(np.linalg.norm(g)))
        return g

    extra = {} if second is None else {second: getattr(ours, second)}
    options: dict[str, object] = {"maxiter": ENDLESS}
    if method == "L-BFGS-B":
        options |= {"maxcor": MEMORY, "ftol": 0.0, "gtol": 0.0, "maxfun": ENDLESS}
    elif method == "Newton-CG":
        options |= {"xtol": 0.0}
    elif method == "BFGS":
        options |= {"gtol": 0.0}
    else:
        options |= {"gtol": watch.smallest}
    optimize.minimize(fun, task.start.copy(), jac=jac, method=method, options=options, **extra)


def least_squares(task: RegressionTask, watch: Watch, choice: None, method: str) -> None:
    """scipy.optimize.least_squares with the residual and its Jacobian in closed form."""

    def residual(x: np.ndarray) -> np.ndarray:
        X, Y = task.weights(torch.from_numpy(x))
        r = torch.cat([_rows(p, p.residual(X, Y)).flatten() for p in task.piles]).numpy()
        watch.see(x, loss=0.5 * float(r @ r))
        return r

    def jacobian(x: np.ndarray) -> np.ndarray:
        X, Y = task.weights(torch.from_numpy(x))
        J = torch.cat([residual_jacobian(p, X, Y) for p in task.piles]).numpy()
        with watch.still():
            slope = float(np.linalg.norm(task.derivatives.jac(x)))
        watch.see(x, gradient=slope)
        return J

    optimize.least_squares(
        residual,
        task.start.copy(),
        jacobian,
        method=method,
        x_scale="jac",
        ftol=None if method == "trf" else 1e-15,
        xtol=1e-15,
        gtol=None if method == "trf" else 1e-15,
        max_nfev=ENDLESS,
    )


def residual_jacobian(pile: Pile, X: Tensor, Y: Tensor) -> Tensor:
    """(rows x p, d1 d2 + d3 p): r' = A1 U Rho_j + w_j^T Z, with Rho_j = Cov_{P_j}(a2, v)."""
    A = pile.A
    S = A @ X @ A.mT
    if pile.real is not None:
        S = S.masked_fill(~pile.real.mT, -torch.inf)
    P = torch.softmax(S, -1)
    V, w = A @ Y, P @ A
    s, n, d = A.shape
    p = V.shape[-1]
    pairs = (A[..., :, None] * V[..., None, :]).reshape(s, n, d * p)
    rho = (P @ pairs).reshape(s, n, d, p) - w[..., :, None] * (P @ V)[..., None, :]
    in_x = torch.einsum("sna,snbi->sniab", A, rho).reshape(s, n, p, d * d)
    in_y = torch.einsum("sne,ik->sniek", w, torch.eye(p, dtype=A.dtype)).reshape(s, n, p, d * p)
    return _rows(pile, torch.cat([in_x, in_y], -1)).flatten(0, 1)


def _rows(pile: Pile, t: Tensor) -> Tensor:
    """The real rows of (s, n, ...)."""
    return t.flatten(0, 1) if pile.real is None else t[pile.real[..., 0]]
