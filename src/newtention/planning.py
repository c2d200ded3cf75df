"""Which method, and with how much memory: decided from sizes before anything is allocated."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from newtention.derivatives.hessian import second_order_tile
from newtention.derivatives.linearised import evaluation_bytes
from newtention.layers import Bilinear, Parametrisation
from newtention.memory import (
    available_bytes,
    newton_bytes,
    readable,
    require_memory,
)
from newtention.newton.footprint import matrix_free_bytes
from newtention.newton.matrix_free import Settings
from newtention.problem import AttentionProblem

MethodName = Literal["newton", "newton-cg"]

DENSE_ADVANTAGE = 10.0
"""A dense iteration may cost this many times one of "newton-cg": it solves its system exactly,
converges in fewer iterations, and sees negative curvature."""
PASSES = 60.0
"""Multiply-adds of a "newton-cg" iteration in forward passes over the data: some ten products of
three passes each, evaluations and the preconditioner."""
CACHE_SHARE = 0.25
"""Share of the free memory that evaluations may take by default."""


@dataclass(frozen=True)
class Plan:
    """A method and what it may use.

    cache_bytes: evaluations are kept if they take at most this.  needed: predicted peak in bytes.
    cached: whether evaluations are kept.
    """

    method: MethodName
    cache_bytes: int
    needed: int
    cached: bool

    @property
    def sentence(self) -> str:
        """For the user."""
        kept = ""
        if self.method == "newton-cg":
            kept = (
                "; attention weights kept between products"
                if self.cached
                else "; attention weights computed again for every product"
            )
        return f"method {self.method}, up to {readable(self.needed)} of memory{kept}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def plan(
    problem: AttentionProblem,
    layer: Parametrisation,
    n_init: int,
    method: str,
    settings: Settings,
    cache_bytes: int | None,
    frozen: bool = False,
) -> Plan:
    """Choose a method (unless one is given) and refuse what does not fit.

    settings: of a matrix-free solve, its cache apart.
    cache_bytes: budget for evaluations that are kept; None: a share of the free memory.

    Raises:
        ValueError: "newton" for a factored layer or with frozen blocks.
        MemoryError: the prediction exceeds the free memory.
    """
    dense_only = isinstance(layer, Bilinear) and not frozen
    if method == "newton" and not dense_only:
        raise ValueError(
            'method="newton" is for the bilinear form without frozen blocks; use "newton-cg".'
        )
    if method == "auto":
        method = "newton" if dense_only and _dense_pays(problem, layer, n_init) else "newton-cg"
    if method == "newton":
        assert isinstance(layer, Bilinear)
        needed = _require_dense(problem, layer, n_init)
        return Plan("newton", 0, needed, False)
    free = available_bytes(problem.like.device)
    budget = int(CACHE_SHARE * free) if cache_bytes is None else cache_bytes
    cached = max(evaluation_bytes(p, layer) for p in problem.parts or (problem,)) <= budget

    def bytes_for(budget: int) -> int:
        members = problem.batch * n_init
        return matrix_free_bytes(problem, layer, members, replace(settings, cache_bytes=budget))

    needed = bytes_for(budget)
    alternative = ""
    if needed > free:
        least = bytes_for(0)
        fits = cached and least <= free
        lower = "" if problem.like.element_size() == 4 else ", or float32,"
        alternative = (
            f"Options(cache_bytes=0) keeps no attention weights and needs {readable(least)}."
            if fits
            else f"one tile and the weights alone need {readable(least)}: fewer heads or shorter "
            f"sequences{lower} would need less."
        )
    require_memory(
        f"A matrix-free solve of {layer.size} unknowns", needed, problem.like.device, alternative
    )
    return Plan("newton-cg", budget, needed, cached)


def _dense_pays(problem: AttentionProblem, layer: Parametrisation, n_init: int) -> bool:
    """Whether dense Newton fits into half the free memory and is not much slower."""
    assert isinstance(layer, Bilinear)
    tile = second_order_tile(problem, layer.heads, n_init)
    itemsize = problem.like.element_size()
    needed = newton_bytes(layer, problem.batch * n_init, itemsize, tile)
    if needed > 0.5 * available_bytes(problem.like.device):
        return False
    nx, ny, h = layer.size_x, layer.size_y, layer.heads
    dense = nx * nx * ny + 4 / 3 * nx**3
    forward = 0.0
    for chunk in problem.chunks:
        o, s, n = chunk.weight.shape
        m = chunk.A2.shape[2]
        pairs = o * s * n * m
        dense += 0.25 * o * s * n * nx * nx + 0.5 * pairs * h * layer.d2**2
        tokens = o * s * (n * layer.d1 * layer.d2 + m * layer.d3 * layer.p)
        forward += h * (tokens + pairs * (layer.d2 + layer.p))
    return dense <= DENSE_ADVANTAGE * PASSES * forward


def _require_dense(problem: AttentionProblem, layer: Bilinear, n_init: int) -> int:
    """Predicted bytes of a dense solve; refused if they are not free."""
    itemsize = problem.like.element_size()

    def bytes_for(starts: int) -> int:
        tile = second_order_tile(problem, layer.heads, starts)
        return newton_bytes(layer, problem.batch * starts, itemsize, tile)

    needed = bytes_for(n_init)
    free = available_bytes(problem.like.device)
    fitting = next((starts for starts in range(n_init, 0, -1) if bytes_for(starts) <= free), 0)
    if fitting:
        alternative = f"n_init up to {fitting} would fit."
    else:
        one = readable(bytes_for(1))
        half = "" if itemsize == 4 else "; float32 would halve it"
        several = f" of {problem.batch} problems" if problem.batch > 1 else ""
        fewer = "solve fewer at a time, or " if problem.batch > 1 else ""
        alternative = (
            f"a single start{several} of these widths needs {one}{half}: {fewer}use "
            'method="newton-cg", which forms no matrix.'
        )
    require_memory(
        f"A dense solve of {layer.size} unknowns", needed, problem.like.device, alternative
    )
    return needed
