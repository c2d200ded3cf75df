"""A problem as functions of one flat vector, for scipy's minimisers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from newtention.derivatives.gradient import loss_and_gradient
from newtention.derivatives.hessian import second_order
from newtention.derivatives.maps import map_second_order
from newtention.derivatives.products import hessian_product
from newtention.layers import AttentionLayer, AttentionMap, Bilinear
from newtention.newton.starts import random_start
from newtention.newton.varpro import project
from newtention.notation import ArrayLike
from newtention.problem import AttentionProblem
from newtention.solution import Solution
from newtention.weights import Weights, as_weights, start_weights


class ScipyProblem(NamedTuple):
    """A problem for ``scipy.optimize.minimize``: functions of the flat vector, in float64.

    Pass as ``minimize(s.fun, s.x0, jac=s.jac, hess=s.hess, method="trust-exact")`` or with
    ``hessp=s.hessp`` for matrix-free methods.

    fun: the loss at theta (N,).
    jac: its gradient (N,) there.
    hess: its Hessian (N, N); raises a ValueError for a factored layer, which has `hessp` alone.
    hessp: its Hessian times a vector, both (N,).
    x0: the start (N,).
    """

    fun: Callable[[np.ndarray], float]
    jac: Callable[[np.ndarray], np.ndarray]
    hess: Callable[[np.ndarray], np.ndarray]
    hessp: Callable[[np.ndarray, np.ndarray], np.ndarray]
    x0: np.ndarray

    def __repr__(self) -> str:
        """One line."""
        return f"ScipyProblem({len(self.x0)} unknowns: {', '.join(self._fields)})"


def to_scipy(
    problem: AttentionProblem,
    start: tuple[ArrayLike, ArrayLike] | ArrayLike | Solution | AttentionLayer | None = None,
    seed: int = 0,
) -> ScipyProblem:
    """Our loss and derivatives as scipy expects them; a factored layer has no `hess`.

    Args:
        problem: a single problem.
        start: (X, Y), X, a Solution or a layer for x0; by default the start that `solve` would
            use with this seed.
        seed: of the random start.

    Returns:
        `fun`, `jac`, `hess`, `hessp` and `x0` on flat NumPy vectors (N,).

    Raises:
        ValueError: a stack of problems, or a start of the wrong shape.
    """
    if problem.parts:
        raise ValueError(
            "to_scipy takes one problem; use it on each member of the stack's `parts`."
        )
    if start is None and problem.of_maps:
        w = as_weights(problem, torch.zeros(problem.widths[:2], dtype=problem.like.dtype))
    elif start is None:
        layer = Bilinear(problem.fixed_heads or 1, *problem.widths)
        X = random_start(problem, layer.heads, seed)
        Y = project(problem, X, X.new_zeros(1, layer.heads, layer.d3, layer.p))
        w = Weights(layer, layer.pack(X, Y), layer.heads == 1, problem)
    elif isinstance(start, AttentionLayer):
        w = as_weights(problem, start)
    else:
        w = start_weights(problem, start)
    known: dict[str, tuple[np.ndarray, float, np.ndarray]] = {}

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(x, dtype=np.float64)).to(w.theta)[None]

    def array(t: Tensor) -> np.ndarray:
        return t[0].cpu().double().numpy()

    def first_order(x: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
        """Value and gradient, kept because scipy asks for them at one point in separate calls."""
        if "last" not in known or not np.array_equal(known["last"][0], x):
            value, slope = loss_and_gradient(problem, w.layer, tensor(x))
            known["last"] = (np.array(x), float(value[0]), array(slope))
        return known["last"]

    def hess(x: np.ndarray) -> np.ndarray:
        if isinstance(w.layer, AttentionMap):
            return array(map_second_order(problem, w.layer.unpack(tensor(x)))[2])
        _, X, Y = Weights(w.layer, tensor(x), False, problem).bilinear
        return array(second_order(problem, X, Y)[3].to_dense())

    def hessp(x: np.ndarray, direction: np.ndarray) -> np.ndarray:
        return array(hessian_product(problem, w.layer, tensor(x), tensor(direction)[:, None])[:, 0])

    return ScipyProblem(
        fun=lambda x: first_order(x)[1],
        jac=lambda x: first_order(x)[2],
        hess=hess,
        hessp=hessp,
        x0=array(w.theta),
    )
