"""The HTML page about a softmax regression.

newtention.softmax_report.write_softmax_report("report.html", A, b, fit, ridge=0.1, title="Row 4")
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from newtention import plots
from newtention.diagnostics import as_array, run_epsilon
from newtention.drawing import number
from newtention.notation import ArrayLike
from newtention.page import curvature, explained, svg, write_page
from newtention.regression import SoftmaxCertificate, SoftmaxRegression
from newtention.regression.arguments import as_problem
from newtention.regression.fit import hessian_at

WORST = 10


def write_softmax_report(
    path: str | Path,
    A: ArrayLike,
    b: ArrayLike,
    result: SoftmaxRegression,
    *,
    ridge: float = 0.0,
    title: str,
    provenance: Mapping[str, Any] | None = None,
    certificate: SoftmaxCertificate | None = None,
) -> None:
    """Write the report of a softmax regression as one HTML file.

    Args:
        path: the file; an existing one is replaced.
        A: (n, d) design that was fitted.
        b: (n,) target.
        result: what `softmax_regression` returned for them.
        ridge: of that call.
        title: heading of the report.
        provenance: where the data came from, versions, settings: names and values, one level of
            nesting allowed.
        certificate: what is proved about the result's x.

    Raises:
        ValueError, TypeError: arrays that are no problem of softmax regression.
    """
    design, target, _ = as_problem(A, b)
    unknowns = design.shape[1]
    x = torch.as_tensor(result.x).to(design)
    write_page(
        path,
        "softmax.html.j2",
        result,
        title=title,
        provenance=provenance,
        kicker=_kicker(result),
        plain=result.form == "softmax",
        energy=_energy(result, bool((target == 0).all())),
        meaning="",
        data={
            "Rows of A": f"{len(design):,}",
            "Unknowns": f"{unknowns:,}",
            "Sum of the targets": number(float(target.double().sum()), 6),
            "Ridge": number(ridge) if ridge else "none",
            "Arithmetic": f"{str(design.dtype)[6:]} on {design.device}",
        },
        errors=_errors(as_array(result.fitted), as_array(target)),
        curvature=curvature(
            unknowns,
            lambda: as_array(hessian_at(design, target, x, ridge, result.form)),
            run_epsilon(result),
            ridge,
        ),
        certificate=certificate,
    )


def _kicker(result: SoftmaxRegression) -> str:
    rescaled = "" if result.form == "softmax" else f", rescaled with {result.form}"
    return f"Softmax regression{rescaled}"


def _energy(result: SoftmaxRegression, zero: bool) -> str:
    """The relative loss in one plain sentence."""
    if result.form != "softmax":
        left = number(100 * math.sqrt(result.relative_loss))
        return f"The residual is {left} percent of the fitted values, in the root mean square."
    if zero:
        return f"The targets are all zero; the data loss is {number(result.data_loss)}."
    return explained("The softmax", result.relative_loss)


def _errors(fitted: np.ndarray, target: np.ndarray) -> dict[str, Any]:
    """Fitted values against targets: a figure and the worst rows."""
    squares = np.nan_to_num(np.square(fitted - target))
    total = float(squares.sum()) or 1.0
    worst = np.argsort(-squares, kind="stable")[:WORST].tolist()
    return {
        "svg": svg(
            plots.probabilities(fitted, target), "probabilities", "fitted values against targets"
        ),
        "rows": [
            {
                "row": k,
                "target": target[k],
                "fitted": fitted[k],
                "difference": fitted[k] - target[k],
                "share": f"{100 * squares[k] / total:.2f} %",
            }
            for k in worst
        ],
    }
