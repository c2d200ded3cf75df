"""Which method, and with how much memory: decided from sizes before anything is allocated."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from newtention.chunks import TILE_ELEMENTS
from newtention.costs import sample_share, work
from newtention.derivatives.hessian import second_order_tile
from newtention.derivatives.linearised import evaluation_bytes
from newtention.derivatives.maps import map_tile
from newtention.layers import AttentionMap, Bilinear, Parametrisation
from newtention.memory import (
    WORKSPACE,
    available_bytes,
    newton_bytes,
    readable,
    require_memory,
)
from newtention.newton.footprint import matrix_free_bytes
from newtention.newton.matrix_free import LARGEST_OUTPUT_MAP, OVERHEAD, Settings, eliminates
from newtention.newton.regime import require_paper
from newtention.newton.sampled import default_rows
from newtention.newton.token_metric import SketchName, metric_bytes
from newtention.problem import AttentionProblem

MethodName = Literal["newton", "newton-cg", "sketched", "paper"]

PAPER_TILES = 8
"""Arrays of a tile's size alive in a pass of "paper"; measured 3.4 to 4.7."""
CACHE_SHARE = 0.25
"""Share of the free memory that evaluations may take by default."""


@dataclass(frozen=True)
class Plan:
    """A method and what it may use.

    cache_bytes: evaluations are kept if they take at most this.  needed: predicted peak in bytes.
    cached: whether evaluations are kept.  sample_rows: query rows behind the preconditioner of
    "sketched".  overhead: of one of its iterations, in products.
    """

    method: MethodName
    cache_bytes: int
    needed: int
    cached: bool
    sample_rows: int | None = None
    overhead: float = OVERHEAD

    @property
    def sentence(self) -> str:
        """For the user."""
        kept = ""
        if self.method in ("newton-cg", "sketched"):
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
        ValueError: as for `require_method`.
        MemoryError: the prediction exceeds the free memory.
    """
    free = available_bytes(problem.like.device)
    budget = int(CACHE_SHARE * free) if cache_bytes is None else cache_bytes
    cached = max(evaluation_bytes(p, layer) for p in problem.parts or (problem,)) <= budget
    possible = _possible(layer, frozen)
    if method == "auto":
        rows = settings.sample_rows
        fitting = [m for m in possible if _fits(m, problem, layer, n_init, 0.5 * free)]
        method = min(fitting, key=lambda m: _work(m, problem, layer, rows, cached))
    else:
        require_method(method, layer, frozen)
    if method == "newton":
        assert isinstance(layer, Bilinear | AttentionMap)
        needed = _require_dense(problem, layer, n_init)
        return Plan("newton", 0, needed, False)
    sketched = method == "sketched"

    def bytes_for(budget: int) -> int:
        members = problem.batch * n_init
        own = replace(settings, cache_bytes=budget)
        if not sketched:
            return matrix_free_bytes(problem, layer, members, own)
        own = replace(own, preconditioner="none")
        return matrix_free_bytes(problem, layer, members, own) + _sample_bytes(problem, layer)

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
    if not sketched:
        return Plan("newton-cg", budget, needed, cached)
    assert isinstance(layer, Bilinear)
    rows = default_rows(layer) if settings.sample_rows is None else settings.sample_rows
    costs = work(problem, layer, cached)
    overhead = costs.sketched_overhead(sample_share(problem, layer, rows))
    return Plan("sketched", budget, needed, cached, rows, overhead)


def plan_paper(
    problem: AttentionProblem,
    layer: Parametrisation,
    frozen: bool,
    sketch: SketchName,
    sketch_size: int | None,
    seed: int,
) -> Plan:
    """The plan of method "paper", where it applies.

    Raises:
        ValueError: a problem that it is not for.
        MemoryError: sketch and curvature do not fit into the free memory.
    """
    require_paper(problem, layer, frozen)
    assert isinstance(layer, Bilinear)
    keys = max(problem.layout.keys)
    tile = layer.heads * max(problem.layout.queries) * max(keys, layer.heads * layer.d3)
    passes = PAPER_TILES * problem.like.element_size() * min(TILE_ELEMENTS, tile)
    needed = metric_bytes(problem, sketch, sketch_size, seed) + passes + WORKSPACE
    require_memory(
        f"The regulariser's curvature of {layer.size} unknowns",
        needed,
        problem.like.device,
        'Options(sketch="none") needs the least, a smaller Options(sketch_size=) less.',
    )
    return Plan("paper", 0, needed, False)


def require_method(method: str, layer: Parametrisation, frozen: bool) -> None:
    """Refuse a method other than "auto" and "paper" where it does not apply.

    Raises:
        ValueError: "newton" or "sketched" for a layer that they are not for, or with frozen blocks.
    """
    possible = _possible(layer, frozen)
    if method in (*possible, "auto", "paper"):
        return
    if frozen:
        wrong = "does not go with Options(freeze=)"
    elif isinstance(layer, AttentionMap):
        wrong = "is not for attention maps"
    elif isinstance(layer, Bilinear):
        wrong = f"is for a Y of at most {LARGEST_OUTPUT_MAP} rows; this one has {layer.output_rows}"
    else:
        wrong = "is for layers of X and Y; this one has W_Q, W_K, W_V and W_O"
    use = " or ".join(f'method="{name}"' for name in possible)
    raise ValueError(f'method="{method}" {wrong}.  Use {use}.')


def _possible(layer: Parametrisation, frozen: bool) -> tuple[MethodName, ...]:
    """The methods for a layer, but for "paper", which must be asked for."""
    if frozen or not isinstance(layer, Bilinear | AttentionMap):
        return ("newton-cg",)
    if isinstance(layer, Bilinear) and eliminates(layer):
        return ("newton", "sketched", "newton-cg")
    return ("newton", "newton-cg")


def _fits(
    method: MethodName, problem: AttentionProblem, layer: Parametrisation, n_init: int, limit: float
) -> bool:
    """Whether a method's matrices leave room for other things."""
    if method == "newton-cg":
        return True
    if method == "sketched":
        return _sample_bytes(problem, layer) <= limit
    assert isinstance(layer, Bilinear | AttentionMap)
    tile = _dense_tile(problem, layer, n_init)
    itemsize = problem.like.element_size()
    return newton_bytes(layer, problem.batch * n_init, itemsize, tile) <= limit


def _work(
    method: MethodName,
    problem: AttentionProblem,
    layer: Parametrisation,
    rows: int | None,
    cached: bool,
) -> float:
    """Predicted work of a method to a common end, relative to the others'."""
    costs = work(problem, layer, cached)
    if method == "newton":
        return costs.newton
    if method == "newton-cg":
        return costs.newton_cg
    assert isinstance(layer, Bilinear)
    return costs.sketched(sample_share(problem, layer, rows))


def _sample_bytes(problem: AttentionProblem, layer: Parametrisation) -> int:
    """Peak bytes of forming and factoring the preconditioner of "sketched", in float32."""
    assert isinstance(layer, Bilinear)
    return newton_bytes(layer, 1, torch.float32.itemsize, second_order_tile(problem, layer.heads))


def _dense_tile(problem: AttentionProblem, layer: Bilinear | AttentionMap, starts: int) -> int:
    """Elements of the widest intermediate of a pass for the exact Hessian."""
    if isinstance(layer, AttentionMap):
        return map_tile(problem, starts)
    return second_order_tile(problem, layer.heads, starts)


def _require_dense(problem: AttentionProblem, layer: Bilinear | AttentionMap, n_init: int) -> int:
    """Predicted bytes of a dense solve; refused if they are not free."""
    itemsize = problem.like.element_size()

    def bytes_for(starts: int) -> int:
        tile = _dense_tile(problem, layer, starts)
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
