"""`newtention fit --kind softmax`: the x whose softmax(A x) is nearest to a vector."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import typer
from torch import Tensor

from newtention.cli.folders import removed_on_failure
from newtention.cli.progress import busy
from newtention.cli.terminal import say
from newtention.inputs import shape_text
from newtention.io import ArrayFile, open_arrays
from newtention.io.softmax import SOFTMAX, write_softmax
from newtention.io.sources import DTYPES
from newtention.regression import softmax_regression

NOT_CONVERGED = 3


def fit_softmax(
    source: str,
    out: Path,
    *,
    force: bool,
    as_json: bool,
    matrix: str,
    target: str,
    dtype: str,
    ridge: float,
    tol: float | None,
    max_iter: int,
    max_seconds: float | None,
    n_init: int,
    seed: int,
) -> None:
    """Minimise 1/2 ||softmax(A x) - b||^2 + ridge/2 ||x||^2 for A and b of a file.

    matrix, target: names of A (n, d) and b (n).

    Raises:
        OSError, ValueError, TypeError, MemoryError: as for `softmax_regression`, and bad arrays.
    """
    file = open_arrays(source)
    A, b = _read(file, matrix, 2, "--queries", dtype), _read(file, target, 1, "--targets", dtype)
    created = SOFTMAX.prepare(out, force)
    with removed_on_failure(out, created):
        with nullcontext() if as_json else busy("Solving"):
            try:
                result = softmax_regression(
                    A,
                    b,
                    ridge=ridge,
                    n_init=n_init,
                    tol=tol,
                    max_iter=max_iter,
                    max_seconds=max_seconds,
                    seed=seed,
                )
            except (ValueError, TypeError) as error:
                raise type(error)(f"{file.label}: {error}") from error
        about = {
            "source": file.reference,
            "sha256": file.sha256(),
            "arrays": {"A": matrix, "b": target},
            "ridge": ridge,
            "dtype": dtype,
            "n_init": n_init,
            "seed": seed,
            "rows": len(A),
            "unknowns": A.shape[1],
        }
        document = write_softmax(out, result, about)
    if as_json:
        say(json.dumps(document, indent=1))
    else:
        say(result.summary())
        say()
        say(f"Result  {out / SOFTMAX.result}")
        say(f"Arrays  {out / SOFTMAX.arrays}")
    if not result.success:
        raise typer.Exit(NOT_CONVERGED)


def _read(file: ArrayFile, name: str, axes: int, option: str, dtype: str) -> Tensor:
    if name not in file.arrays:
        raise ValueError(
            f"{file.label} has no array {name!r}; name it with {option}.  It holds "
            f"{file.listing()}."
        )
    t = file.read(name)
    if t.ndim != axes:
        raise ValueError(
            f"{file.label}: array {name!r} must be {axes}-D; found {shape_text(t.shape)}."
        )
    return t.to(DTYPES[dtype]) if t.is_floating_point() else t
