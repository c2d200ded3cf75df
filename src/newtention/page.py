"""What the HTML pages share: the template's machinery, and the parts that every run has.

A page is one self-contained file: no script, no request, light and dark, printable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from newtention import drawing, plots
from newtention.certify.certificate import rounded_down, rounded_up
from newtention.diagnostics import Run, zero_level
from newtention.drawing import number

LARGEST_SPECTRUM = 4096
"""Unknowns up to which a dense Hessian's eigenvalues are computed (about 20 s on one core)."""


def write_page(
    path: str | Path,
    template: str,
    run: Run,
    *,
    title: str,
    provenance: Mapping[str, Any] | None,
    **parts: Any,
) -> None:
    """Fill a template that extends page.html.j2.

    Args:
        path: the file; an existing one is replaced.
        template: its name.
        run: whose course is shown.
        title: heading of the page.
        provenance: where the data came from, versions, settings: names and values, one level of
            nesting allowed.
        parts: what the template itself asks for.
    """
    import newtention  # for its version; the package itself imports none of this

    environment = Environment(
        loader=PackageLoader("newtention"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    environment.filters["finite"] = math.isfinite
    environment.filters["power"] = power
    environment.filters["at_most"] = _at_most
    environment.filters["at_least"] = _at_least
    page = environment.get_template(template).render(
        title=title,
        version=newtention.__version__,
        run=run,
        last=run.history[-1] if run.history else None,
        gauss_newton=run.history.column("model").count("gauss-newton"),
        convergence=_convergence(run),
        starts=_starts(run.start_losses),
        provenance=_provenance(provenance or {}),
        **parts,
    )
    Path(path).write_text(page, encoding="utf-8")


def svg(figure: Figure, name: str, label: str) -> Markup:
    """A figure for a template; see `drawing.svg`."""
    return Markup(drawing.svg(figure, name, label))


def power(log10: float) -> Markup:
    """A power of ten that may be beyond any float."""
    return Markup("10<sup>{}</sup>").format(number(log10, 4))


def explained(what: str, relative: float, of: str = "energy of the targets") -> str:
    """The relative loss in one plain sentence.

    Args:
        what: that fits them, at the beginning of a sentence.
        relative: loss over that of outputs of zero.
        of: what is explained.
    """
    if not math.isfinite(relative):
        return f"{what}'s outputs overflow at this point."
    if relative == 0:
        return f"{what} reproduces the targets exactly."
    if relative < 1e-4:
        return f"{what} explains all but a fraction {number(relative)} of the {of}."
    if relative < 1:
        digits = 1 if relative > 0.01 else 2 if relative > 1e-3 else 3
        return f"{what} explains {100 * (1 - relative):.{digits}f} percent of the {of}."
    return f"The error is {number(relative)} times the {of}: outputs of zero would do no worse."


def curvature(
    unknowns: int,
    hessian: Callable[[], np.ndarray],
    eps: float,
    ridge: float = 0.0,
    ridge_name: str = "ridge",
) -> dict[str, Any]:
    """Eigenvalues of the full Hessian at the solution, or why they are left out.

    Args:
        unknowns: how many there are.
        hessian: computes it; may raise MemoryError.
        eps: spacing of the numbers that it is computed in.
        ridge: strength of a ridge on all unknowns, or on some; 0 if there is none.
        ridge_name: what its level is called.
    """
    if unknowns > LARGEST_SPECTRUM:
        return {
            "missing": f"The spectrum is left out: the dense Hessian of {unknowns:,} unknowns is "
            f"beyond the limit of {LARGEST_SPECTRUM:,} for a report."
        }
    try:
        H = hessian()
    except MemoryError as error:
        return {"missing": f"The spectrum is left out: {error}"}
    if not np.isfinite(H).all():
        return {"missing": "The spectrum is left out: the Hessian overflows at this point."}
    values = np.linalg.eigvalsh(H)
    zero = zero_level(values, eps)
    size = np.abs(values[np.abs(values) > zero])
    ridge = ridge if ridge > zero else 0.0
    marks = {ridge_name: ridge} if ridge else None
    return {
        "missing": "",
        "svg": svg(
            plots.spectrum(values, zero, marks), "spectrum", "sorted eigenvalues of the Hessian"
        ),
        "count": unknowns,
        "positive": int((values > zero).sum()),
        "negative": int((values < -zero).sum()),
        "zero": int((np.abs(values) <= zero).sum()),
        "level": zero,
        "largest": float(values.max()),
        "smallest": float(values.min()),
        "condition": float(size.max() / size.min()) if len(size) else None,
        "ridge": ridge,
        "at_ridge": int((np.abs(values - ridge) <= 1e-6 * ridge).sum()) if ridge else 0,
    }


def _at_most(bound: float) -> str:
    return number(rounded_up(bound))


def _at_least(bound: float) -> str:
    return number(rounded_down(bound))


def _convergence(run: Run) -> dict[str, Markup]:
    """The panels about the run."""
    panels = {
        "loss": plots.loss(run),
        "gap": plots.loss_gap(run),
        "gradient": plots.gradient(run),
        "trust": plots.trust_region(run),
        "gap_time": plots.loss_gap(run, "seconds"),
        "gradient_time": plots.gradient(run, "seconds"),
    }
    return {name: svg(fig, name, name.replace("_", " against ")) for name, fig in panels.items()}


def _starts(losses: tuple[float, ...]) -> Markup | None:
    if len(losses) < 2:
        return None
    return svg(plots.starts(losses), "starts", f"final losses of {len(losses)} starts")


def _provenance(given: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Names and lines of text."""
    rows = []
    for name, value in given.items():
        if isinstance(value, Mapping):
            lines = [f"{k}: {v}" for k, v in value.items()]
        elif isinstance(value, list | tuple):
            lines = [str(v) for v in value]
        else:
            lines = [str(value)]
        rows.append((name.replace("_", " "), lines))
    return rows
