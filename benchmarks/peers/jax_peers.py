"""optimistix on JAX in float64, step by step, every step compiled beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx

from benchmarks.comparison.tasks import RegressionTask
from benchmarks.comparison.watch import Watch

jax.config.update("jax_enable_x64", True)
TOL = 1e-15
"""Relative and absolute tolerance of the solvers: the watch ends the run."""

SOLVERS = {
    "LevenbergMarquardt": optx.LevenbergMarquardt,
    "Dogleg": optx.Dogleg,
    "BFGS": optx.BFGS,
}


def solve(task: RegressionTask, watch: Watch, choice: None, solver: str) -> None:
    """The interactive interface: the same `init` and `step` that optimistix's own loop calls.

    The seconds of compilation go to the watch, apart from the run's.
    """
    method = SOLVERS[solver](rtol=TOL, atol=TOL)
    target = partial(residuals, _data(task), task.problem.widths)
    function = _with_aux(target if solver != "BFGS" else lambda y: 0.5 * _squares(target(y)))
    y = jnp.asarray(task.start)
    with watch.still():
        began = time.perf_counter()
        f_struct, aux_struct = jax.eval_shape(function, y, None)
        tags: frozenset[object] = frozenset()
        state = method.init(function, y, None, {}, f_struct, aux_struct, tags)
        dynamic, static = eqx.partition(state, eqx.is_array)

        def advance(y: jax.Array, dynamic: object) -> tuple[jax.Array, object]:
            whole = eqx.combine(dynamic, static)
            new, whole, _ = method.step(function, y, None, {}, whole, tags)
            return new, eqx.filter(whole, eqx.is_array)

        step = jax.jit(advance).lower(y, dynamic).compile()
        watch.compile_seconds += time.perf_counter() - began
    while True:
        y, dynamic = step(y, dynamic)
        y.block_until_ready()
        watch.look(np.array(y))


def _with_aux(fn: Callable) -> Callable:
    return lambda y, args: (fn(y), None)


def _squares(r: jax.Array) -> jax.Array:
    return (r * r).sum()


def _data(task: RegressionTask) -> list[tuple]:
    return [tuple(map(_array, (pile.A, pile.B, pile.real))) for pile in task.piles]


def _array(t: object) -> jax.Array | None:
    return None if t is None else jnp.asarray(t.numpy())


def residuals(data: list[tuple], widths: tuple[int, ...], flat: jax.Array) -> jax.Array:
    """All residuals of (X, Y), zero on padding."""
    d1, d2, d3, p = widths
    X, Y = flat[: d1 * d2].reshape(d1, d2), flat[d1 * d2 :].reshape(d3, p)
    parts = []
    for A, B, real in data:
        S = A @ X @ A.swapaxes(1, 2)
        if real is not None:
            S = jnp.where(real.swapaxes(1, 2), S, -jnp.inf)
        R = jax.nn.softmax(S, -1) @ (A @ Y) - B
        parts.append((R if real is None else jnp.where(real, R, 0)).ravel())
    return jnp.concatenate(parts)
