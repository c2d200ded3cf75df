"""The methods of the comparison, each with the setting that the page quotes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from benchmarks.comparison.problems import Kind, Problem
from benchmarks.harness import Size

Group = Literal["ours", "ablation", "truncation", "scipy", "autograd", "first-order"]

OURS = "newtention"
GROUPS: Mapping[Group, str] = {
    "ours": "Newtention",
    "ablation": "Newtention with a part taken out or exchanged",
    "truncation": "compression without a fit",
    "scipy": "scipy with our closed forms",
    "autograd": "on automatic differentiation",
    "first-order": "first order with a rate to choose, on automatic differentiation",
}
OTHERS: tuple[Group, ...] = ("truncation", "scipy", "autograd", "first-order")
"""What others have: no part of ours is in it but derivatives, where the setting says so."""
RATES = (3e-3, 1e-2, 3e-2)
LAYER_RATES = (1e-3, 2e-3)
STRENGTH = 1e-3
"""Of `Proximity` around the start of a layer, isotropic; docs/choices.md has others."""


@dataclass(frozen=True)
class Method:
    """A method on problems of some kinds.

    setting: a phrase for the page.  peer: module:function in `benchmarks.peers`.
    needs: the module it cannot do without; where it is missing, the method is left out and said so.
    grid: choices that are tried on the first seed; the best of them runs on the others.
    quick: the grid in a quick run; None leaves the method out of it.
    budget: time allowed, in units of our own time.  None takes that of its group (`race`).
    """

    name: str
    group: Group
    kinds: tuple[Kind, ...]
    setting: str
    peer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None
    grid: tuple[float | None, ...] = (None,)
    quick: tuple[float | None, ...] | None = None
    budget: float | None = None

    def choices(self, size: Size) -> tuple[float | None, ...]:
        """What to try on the first seed."""
        return self.grid if size == "full" else self.quick or ()

    def missing(self) -> str | None:
        """The module that is not there."""
        return self.needs if self.needs and find_spec(self.needs) is None else None

    def load(self) -> Callable[..., None]:
        """The function, its library imported."""
        module, function = self.peer.split(":")
        found = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)
        return partial(found, **self.options)


BOTH: tuple[Kind, ...] = ("planted", "head")
ONE = (None,)
LONGER = ", three times our time"
DENSE = {"method": "newton"}


def _ours() -> Iterator[Method]:
    default = "`solve` as it is: `newton` on planted problems, `sketched` on the head"
    yield Method(OURS, "ours", BOTH, default, "ours:solve", quick=ONE)
    yield Method(
        OURS,
        "ours",
        ("layer",),
        f'`method="newton-cg"`, `Proximity` around the start of strength {STRENGTH:g}',
        "ours:solve_layer",
        {"strength": STRENGTH},
        quick=ONE,
    )
    setting = '`solve` with `method="newton"`'
    name = f"{OURS}, dense"
    yield Method(name, "ours", ("head",), setting, "ours:solve", DENSE, quick=ONE)
    setting = '`solve` with `method="newton-cg"` in float32 until it ends, then in float64'
    name = f"{OURS}, float32 first"
    yield Method(name, "ours", ("head",), setting, "ours:solve_single_first", quick=ONE)


def _ablations() -> Iterator[Method]:
    yield Method(
        "without projection",
        "ablation",
        BOTH,
        "the dense loop on X and Y together: Y is not solved for",
        "ours:without_projection",
        quick=ONE,
    )
    yield Method(
        "Euclidean metric",
        "ablation",
        BOTH,
        "the trust region measures steps by their plain norm",
        "ours:solve",
        {"method": "newton", "metric_floor": 1e9},
        quick=ONE,
    )
    for kind, words in (
        ("attended", "our preconditioner"),
        ("inputs", "plain Kronecker factors"),
        ("none", "no preconditioner"),
    ):
        yield Method(
            f"matrix-free, {words}",
            "ablation",
            BOTH,
            f'`method="newton-cg"` with `Options(preconditioner="{kind}")`',
            "ours:solve",
            {"method": "newton-cg", "preconditioner": kind},
        )


def _truncation() -> Iterator[Method]:
    yield Method(
        "activation-aware SVD",
        "truncation",
        ("layer",),
        "`truncate`: SVD of each head's maps whitened by its activations, W_O by least squares; "
        "all the others start there",
        "layer_peers:svd",
        quick=ONE,
    )


def _scipy() -> Iterator[Method]:
    for method, second, words, quick in (
        ("trust-exact", "hess", "our dense Hessian", ONE),
        ("trust-krylov", "hessp", "our products", ONE),
        ("Newton-CG", "hessp", "our products", None),
        ("BFGS", None, "our gradient", ONE),
        ("L-BFGS-B", None, "our gradient, 50 pairs", ONE),
    ):
        yield Method(
            f"scipy {method}",
            "scipy",
            BOTH,
            f"`scipy.optimize.minimize` with {words}",
            "scipy_peers:minimize",
            {"method": method, "second": second},
            quick=quick,
        )
    for method, words in (("lm", "MINPACK"), ("trf", "trust region reflective")):
        yield Method(
            f"scipy least_squares {method}",
            "scipy",
            ("planted",),
            f"`scipy.optimize.least_squares` ({words}), our residual and Jacobian in closed form, "
            '`x_scale="jac"`',
            "scipy_peers:least_squares",
            {"method": method},
            quick=ONE if method == "trf" else None,
        )


def _autograd() -> Iterator[Method]:
    for method in ("newton-exact", "trust-exact", "trust-krylov", "l-bfgs"):
        yield Method(
            f"torchmin {method}",
            "autograd",
            ("planted",) if method in ("trust-exact", "l-bfgs") else BOTH,
            "pytorch-minimize, float64",
            "torchmin_peers:minimize",
            {"method": method},
            needs="torchmin",
            quick=ONE if method == "newton-exact" else None,
        )
    for solver in ("LevenbergMarquardt", "Dogleg", "BFGS"):
        yield Method(
            f"optimistix {solver}",
            "autograd",
            ("planted",) if solver == "Dogleg" else BOTH,
            "JAX in float64, every step compiled; compilation is timed apart and not counted",
            "jax_peers:solve",
            {"solver": solver},
            needs="optimistix",
            quick=ONE if solver != "Dogleg" else None,
        )
    setting = "`torch.optim.LBFGS`, strong Wolfe line search, 100 pairs, float64"
    yield Method("torch L-BFGS", "autograd", BOTH, setting, "torch_peers:lbfgs", quick=ONE)
    setting = "`torch.optim.LBFGS`, strong Wolfe line search, 20 pairs, all sentences, float32"
    yield Method("torch L-BFGS", "autograd", ("layer",), setting, "layer_peers:lbfgs", quick=ONE)


def _first_order() -> Iterator[Method]:
    for name, source, needs, quick in (
        ("Adam", "`torch.optim.Adam`", None, (1e-2,)),
        ("Muon", "`torch.optim.Muon`, its rates made Adam's", None, None),
        ("SOAP", "pytorch-optimizer", "pytorch_optimizer", (3e-2,)),
    ):
        common = partial(Method, group="first-order", needs=needs)
        schedule = source + "; best rate of {}, warm-up and cosine over its time; {}"
        yield common(
            name,
            kinds=("planted",),
            setting=schedule.format(_listed(RATES), "all data, float64"),
            peer="torch_peers:first_order",
            options={"optimizer": name},
            grid=RATES,
            quick=quick,
        )
        for budget, suffix in ((1.0, ""), (3.0, LONGER)):
            rates = RATES if budget == 1 else RATES[1:]
            if budget == 1 or name == "SOAP":
                yield common(
                    name + suffix,
                    kinds=("head",),
                    setting=schedule.format(_listed(rates), "all data, float32"),
                    peer="torch_peers:first_order",
                    options={"optimizer": name, "dtype": "float32"},
                    grid=rates,
                    quick=quick,
                    budget=budget,
                )
        yield common(
            name,
            kinds=("layer",),
            setting=schedule.format(
                _listed(LAYER_RATES), "batches of 512 tokens, gradients clipped, float32"
            ),
            peer="layer_peers:first_order",
            options={"optimizer": name},
            grid=LAYER_RATES,
            quick=None if quick is None else (2e-3,),
        )


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


METHODS: tuple[Method, ...] = (
    *_ours(),
    *_ablations(),
    *_truncation(),
    *_scipy(),
    *_autograd(),
    *_first_order(),
)
GROUP_OF: Mapping[str, Group] = {method.name: method.group for method in METHODS}
"""By name: methods of one name on several kinds of problems are of one group."""


def methods_for(problem: Problem) -> list[Method]:
    """Those that can do a problem, ours first."""
    return [method for method in METHODS if problem.kind in method.kinds]


def find(problem: Problem, name: str) -> Method:
    """By its name among those of a problem."""
    return next(method for method in methods_for(problem) if method.name == name)
