"""Extreme eigenvalues, trace and spectral density of the curvature, from products alone.

`newtention.linsolve.lanczos` has the methods and their sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from newtention.derivatives.products import Kind, hessian_product
from newtention.display import Displayed, Table
from newtention.functions import hessian_operator
from newtention.inputs import require_count
from newtention.linsolve.lanczos import lanczos_extremes, lanczos_quadrature
from newtention.memory import require_memory
from newtention.notation import Array, ArrayLike
from newtention.operators.curvature import CurvatureOperator
from newtention.problem import AttentionProblem
from newtention.weights import Point

DENSE_UNKNOWNS = 512
"""Up to here the matrix is formed: N products cost about as much as the iterations would."""
TOLERANCE = 1e-4
"""The default `tol`.  Eigenvalue errors fall with the square of the residual where eigenvalues lie
apart: below 1e-6 of the largest in trials."""
BASIS_BLOCKS = 16
"""Basis vectors per wanted eigenvalue at least; with 10, hard spectra took half more products."""


class SpectralDensity(NamedTuple):
    """The eigenvalues as a smooth density, and the quadrature behind it.

    grid, values: (g,) density at increasing points, each node a Gaussian of standard deviation
        `width`; its integral (trapezoids) is 1, so that N times an area counts eigenvalues.
    width: span of the nodes over the number of steps, the finest that so many nodes resolve.
    nodes, weights: (q,) of all probes, in no order; the weights sum to 1.
    """

    grid: Array
    values: Array
    width: float
    nodes: Array
    weights: Array

    def __repr__(self) -> str:
        """One line."""
        low, high = float(self.grid[0]), float(self.grid[-1])
        return (
            f"SpectralDensity({len(self.nodes)} nodes on [{low:.6g}, {high:.6g}], "
            f"width {self.width:.3g})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum(Displayed):
    """Extreme eigenvalues of the curvature H at a point, its trace and its density.

    largest, largest_residuals: (k,) eigenvalues, the largest first, and ||H v - lambda v|| of their
        unit vectors v.  An eigenvalue of H lies within the residual of each value (up to the
        rounding of the product itself); that no larger one exists is estimated, not proved.
    smallest, smallest_residuals: (k,) likewise, the smallest (most negative) first.
    trace, trace_error: the trace and its standard error, 0 where it is exact.
    density: `SpectralDensity`, or None if not asked for.
    N: number of unknowns.
    kind: "full" or "gauss-newton".
    method: "dense eigendecomposition" or "block Lanczos".
    tol: residual asked for, relative to the largest |eigenvalue| found.
    converged: whether every residual met it.
    products: products of H with a vector.
    """

    largest: Array
    smallest: Array
    largest_residuals: Array
    smallest_residuals: Array
    trace: float
    trace_error: float
    density: SpectralDensity | None
    N: int
    kind: Kind
    method: str
    tol: float
    converged: bool
    products: int

    def summary(self) -> str:
        """A few sentences, every eigenvalue with its bound."""
        facts = self._facts()
        ends = [f"{end}: {facts[end]}." for end in ("Largest eigenvalues", "Smallest eigenvalues")]
        lines = [f"{self._title()}.", *ends, f"Trace {facts['Trace']}.", *self._notes()]
        if "Density" in facts:
            lines.append(f"Density {facts['Density']}.")
        return "\n".join(lines)

    def _title(self) -> str:
        matrix = "Hessian" if self.kind == "full" else "Gauss-Newton matrix"
        return f"{matrix} of {self.N} unknowns by {self.method}, {self.products} products"

    def _facts(self) -> dict[str, str]:
        error = f" with standard error {self.trace_error:.1e}" if self.trace_error else ""
        facts = {
            "Largest eigenvalues": _listed(self.largest, self.largest_residuals),
            "Smallest eigenvalues": _listed(self.smallest, self.smallest_residuals),
            "Trace": f"{self.trace:.6g}{error}",
        }
        if self.density is not None:
            nodes = len(self.density.nodes)
            facts["Density"] = f"from {nodes} nodes, broadened by {self.density.width:.3g}"
        return facts

    def _notes(self) -> list[str]:
        bounds = ["Within each bound (±) lies an eigenvalue of the matrix."]
        if self.converged:
            return bounds
        return [
            *bounds,
            f"Not converged: residuals exceed {self.tol:.1e} of the largest |eigenvalue|; "
            "raise steps= or tol=.",
        ]

    def _table(self) -> Table:
        return Table(self._title(), [*self._facts().items()], notes=self._notes())

    def __repr__(self) -> str:
        """One line."""
        low = _end(self.smallest[0], self.smallest_residuals[0])
        high = _end(self.largest[0], self.largest_residuals[0])
        error = f" (standard error {self.trace_error:.2g})" if self.trace_error else ""
        reached = f"converged to {self.tol:.0e} of the largest"
        return (
            f"Spectrum({self.kind}, N {self.N}: {low} to {high}, trace {self.trace:.6g}{error}, "
            f"{reached if self.converged else 'not converged'})"
        )


def spectrum(
    problem: AttentionProblem,
    X: Point,
    Y: ArrayLike | None = None,
    k: int = 6,
    kind: Kind = "full",
    density: bool = False,
    probes: int = 8,
    steps: int = 64,
    seed: int = 0,
    tol: float | None = None,
) -> Spectrum:
    """Largest and smallest eigenvalues, trace and spectral density of the Hessian at a point.

    Args:
        problem: one problem.
        X: query/key map, or a layer.
        Y: value map; left out beside a layer.
        k: eigenvalues at each end, multiple ones counted as often as they occur.
        kind: "full" or "gauss-newton".
        density: compute the density as well: probes x steps further products.
        probes: random vectors for trace and density.
        steps: vectors of a Lanczos basis; the memory needed is that of max(steps, 16 k) + 10 k
            vectors of N numbers.
        seed: of the random vectors; not used where the matrix is formed.
        tol: residual at which eigenvalues are done, relative to the largest |eigenvalue|; 1e-4 by
            default.

    Problems of up to 512 unknowns, or twice the basis, are solved densely.  A run ends after 30
    restarts with what it then has, its residuals, and `converged` False: eigenvalues that crowd
    near zero beside far larger ones take many.

    Returns:
        Eigenvalues (k,) at both ends with their residuals, the trace and, if wanted, the density.

    Raises:
        ValueError: weights of the wrong shape, NaN, infinity, an unknown kind, a stack, a count out
            of range, derivatives that overflow.
        MemoryError: the basis or the matrix does not fit into free memory.

    Example:
        >>> A = np.eye(2)
        >>> problem = nt.AttentionProblem(A, A, A, A)
        >>> found = nt.spectrum(problem, np.zeros((2, 2)), np.eye(2), k=2)
        >>> found.largest
        array([1.25, 1.  ])
    """
    op = hessian_operator(problem, X, Y, kind)
    n, theta = op.shape[0], op.weights.theta
    for name, value, least in (("k", k, 1), ("probes", probes, 2), ("steps", steps, 2)):
        require_count(name, value, least)
    require_count("seed", seed, 0)
    k, probes, steps = int(k), int(probes), int(steps)
    if k > n:
        raise ValueError(f"k must be at most the number of unknowns, {n}; found {k}.")
    tol = TOLERANCE if tol is None else tol
    if isinstance(tol, bool) or not isinstance(tol, int | float | np.number) or not 0 < tol < 1:
        raise ValueError(f"tol must be a number between 0 and 1, or None; found {tol!r}.")

    H = _Products(op)
    width = max(steps, BASIS_BLOCKS * k)
    if n <= max(DENSE_UNKNOWNS, 2 * width):
        method = "dense eigendecomposition"
        vectors, nodes = _dense(H, n, k)
        weights = torch.full_like(nodes, 1 / n)
        trace, trace_error = float(nodes.sum()), 0.0
    else:
        method = "block Lanczos"
        require_memory(
            f"A Lanczos basis of {width} vectors of {n} unknowns",
            (width + 10 * k) * n * theta.element_size(),
            theta.device,
            "lower steps= or k=.",
        )
        generator = torch.Generator().manual_seed(int(seed))
        depth = steps if density else 1
        nodes, weights, forms = lanczos_quadrature(H, theta[0], probes, depth, generator)
        trace, trace_error = n * float(forms.mean()), n * float(forms.std()) / probes**0.5
        vectors = lanczos_extremes(H, theta[0], k, width, tol, generator)
    values, residuals = H.pairs(vectors)
    high, low = values[:k].argsort(descending=True), k + values[k:].argsort()

    def present(t: Tensor) -> Array:
        return problem.present(t.to(theta))

    smooth = None
    if density:
        grid, heights, spread = broadened(nodes, weights, steps)
        arrays = (present(grid), present(heights), spread, present(nodes), present(weights))
        smooth = SpectralDensity(*arrays)
    return Spectrum(
        largest=present(values[high]),
        smallest=present(values[low]),
        largest_residuals=present(residuals[high]),
        smallest_residuals=present(residuals[low]),
        trace=trace,
        trace_error=trace_error,
        density=smooth,
        N=n,
        kind=kind,
        method=method,
        tol=float(tol),
        converged=float(residuals.max()) <= tol * float(values.abs().max()),
        products=H.count,
    )


class _Products:
    """Products with the curvature at a point, counted."""

    def __init__(self, op: CurvatureOperator) -> None:
        self.op = op
        self.count = 0

    def __call__(self, V: Float[Tensor, "r N"]) -> Float[Tensor, "r N"]:
        """H times every row.

        Raises:
            ValueError: overflow.
        """
        w = self.op.weights
        product = hessian_product(w.problem, w.layer, w.theta, V[None], self.op.kind)[0]
        self.count += len(V)
        if not bool(torch.isfinite(product).all()):
            raise ValueError(
                "The curvature is not finite at these weights: logits or outputs overflow."
            )
        return product

    def pairs(self, V: Float[Tensor, "r N"]) -> tuple[Float[Tensor, " r"], Float[Tensor, " r"]]:
        """Rayleigh quotients and residual norms of the rows, in float64."""
        values, residuals = [], []
        for v in V:
            x, y = v.double(), self(v[None])[0].double()
            norm = torch.linalg.vector_norm(x)
            values.append((x / norm) @ (y / norm))
            residuals.append(torch.linalg.vector_norm(y - values[-1] * x) / norm)
        return torch.stack(values), torch.stack(residuals)


def _dense(H: _Products, n: int, k: int) -> tuple[Float[Tensor, "{2*k} N"], Float[Tensor, " N"]]:
    """Eigenvectors at both ends as rows, the largest first, and all eigenvalues."""
    theta = H.op.weights.theta
    require_memory(
        f"The eigendecomposition of {n} unknowns",
        6 * n * n * 8,
        theta.device,
        f"lower steps= or k=, so that {n} is more than 32 k and twice the steps.",
    )
    M = H(torch.eye(n, dtype=theta.dtype, device=theta.device)).double()
    values, S = torch.linalg.eigh((M + M.mT) / 2)
    ends = torch.cat([S[:, n - k :].flip(1), S[:, :k]], 1)
    return ends.mT.to(theta), values


def broadened(
    nodes: Float[Tensor, " q"], weights: Float[Tensor, " q"], steps: int
) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"], float]:
    """Grid, density and the standard deviation of its Gaussians: the span over the steps.

    The grid reaches four deviations beyond the nodes, in steps of an eighth.
    """
    low, high = float(nodes.min()), float(nodes.max())
    size = max(abs(low), abs(high))
    # A single point has no span; any width shows it.
    width = max(high - low, 1e-6 * size) / steps or 1.0
    grid = torch.linspace(
        low - 4 * width, high + 4 * width, 8 * (steps + 8) + 1, dtype=torch.float64
    ).to(nodes.device)
    values = torch.exp(-0.5 * ((grid[:, None] - nodes) / width).square()) @ weights
    return grid, values / torch.trapezoid(values, grid), width


def _bounded(value: Array, residual: Array) -> str:
    return f"{float(value):.6g} ± {float(residual):.2g}"


def _end(value: Array, residual: Array) -> str:
    """One eigenvalue with its bound, and whether that includes 0."""
    zero = " (indistinguishable from 0)" if bool(abs(value) < residual) else ""
    return _bounded(value, residual) + zero


def _listed(values: Array, residuals: Array) -> str:
    """Eigenvalues with their bounds, up to eight, and how many of all may be 0."""
    pairs = zip(values[:8], residuals[:8], strict=True)
    shown = ", ".join(_bounded(value, residual) for value, residual in pairs)
    shown = shown if len(values) <= 8 else f"{shown}, ... ({len(values)} in all)"
    zeros = int((abs(values) < residuals).sum())
    return shown + (f"; {zeros} of {len(values)} indistinguishable from 0" if zeros else "")
