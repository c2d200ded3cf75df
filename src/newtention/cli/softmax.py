"""Softmax regression on the command line: its part of `newtention fit` and `newtention certify`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import typer

from newtention.cli.folders import removed_on_failure
from newtention.cli.progress import busy
from newtention.cli.report import make_softmax_report
from newtention.cli.terminal import complain, say
from newtention.io import open_arrays
from newtention.io.results import CERTIFICATE, require_writable
from newtention.io.softmax import (
    SOFTMAX,
    SavedSoftmax,
    load_softmax,
    read_softmax_problem,
    write_softmax,
    write_softmax_certificate,
)
from newtention.regression import certify_softmax, softmax_regression
from newtention.regression.rescaled import Kind

NOT_CONVERGED = NOT_PROVED = 3


def fit_softmax(
    source: str,
    out: Path,
    *,
    force: bool,
    as_json: bool,
    no_report: bool,
    matrix: str,
    target: str,
    dtype: str,
    rescaled: Kind | None,
    ridge: float,
    tol: float | None,
    max_iter: int,
    max_seconds: float | None,
    n_init: int,
    seed: int,
) -> None:
    """Fit softmax(A x), or a rescaled form, to b, for A and b of a file.

    matrix, target: names of A (n, d) and b (n).
    rescaled: u of the rescaled form; None for the plain one.

    Raises:
        OSError, ValueError, TypeError, MemoryError: as for `softmax_regression`, and bad arrays.
        typer.Exit: the run has not converged.
    """
    if rescaled is not None and not ridge > 0:
        raise ValueError(
            f"--rescaled {rescaled} needs a positive --ridge; without it the loss may fall to 0 as "
            "x goes to infinity, and there is no minimum."
        )
    file = open_arrays(source)
    A, b = read_softmax_problem(file, matrix, target, dtype)
    created = SOFTMAX.prepare(out, force)
    with removed_on_failure(out, created):
        with nullcontext() if as_json else busy("Solving"):
            try:
                result = softmax_regression(
                    A,
                    b,
                    **_form(rescaled, ridge),
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
            "max_iter": max_iter,
            "max_seconds": max_seconds,
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
    if not no_report:
        like = torch.as_tensor(result.x)
        saved = SavedSoftmax(out, A.to(like), b.to(like), result, document)
        try:
            _report(saved, as_json, "Report  ")
        except KeyboardInterrupt:
            complain(f"Interrupted; the result is complete.  Report: newtention report {out}")
            raise typer.Exit(NOT_CONVERGED) from None
    if not result.success:
        raise typer.Exit(NOT_CONVERGED)


def certify_softmax_folder(
    folder: Path,
    source: Path | None,
    *,
    require: str | None,
    as_json: bool,
    no_report: bool,
    of_layers: Mapping[str, bool],
) -> None:
    """Prove what can be proved about the x of a folder that `fit_softmax` wrote.

    of_layers: options of certificates of layers, by name, and whether they were given.

    Raises:
        OSError, ValueError: as for `load_softmax`; an option that does not apply.
        typer.Exit: there is no proof of what `require` asks for.
    """
    for name, given in of_layers.items():
        if given:
            raise ValueError(f"{name} does not go with a softmax regression.")
    saved = load_softmax(folder, source)
    require_writable(folder)  # or refused before the work
    document, form = saved.document, saved.result.form
    with nullcontext() if as_json else busy("Certifying"):
        certificate = certify_softmax(
            saved.A,
            saved.b,
            saved.result.x,
            **_form(None if form == "softmax" else form, document["ridge"]),
        )
    record = write_softmax_certificate(saved, certificate)
    if as_json:
        say(json.dumps(record, indent=1))
    else:
        say(certificate.summary())
        say()
        say(f"Certificate  {folder / CERTIFICATE}")
    if not no_report:
        try:
            _report(saved, as_json, "Report       ")
        except KeyboardInterrupt:
            complain(f"The certificate is complete.  Report: newtention report {folder}")
            raise
    if require == "global":
        complain(
            "--require global asks for a proved global minimum; the certificate of a softmax "
            "regression is of a local one."
        )
    elif require == "local" and certificate.local_minimum != "proved":
        complain(
            "--require local asks for a proved local minimum; the verdict is "
            f"{certificate.local_minimum!r}."
        )
    else:
        return
    raise typer.Exit(NOT_PROVED)


def _form(rescaled: Kind | None, ridge: float) -> dict[str, Any]:
    """The arguments of the library that say which loss."""
    return {"ridge": ridge} | ({} if rescaled is None else {"rescaled": True, "kind": rescaled})


def _report(saved: SavedSoftmax, as_json: bool, label: str) -> None:
    with nullcontext() if as_json else busy("Making the report"):
        path = make_softmax_report(saved)
    if not as_json:
        say(f"{label}{path}")
