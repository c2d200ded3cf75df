"""Softmax regression on the command line: its part of `fit`, `predict` and `certify`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import typer

from newtention.cli.folders import predictions_path, removed_on_failure
from newtention.cli.progress import busy
from newtention.cli.report import NO_REPORT, has_report, make_softmax_report
from newtention.cli.terminal import complain, say
from newtention.cli.words import AGAIN, meaning_of_softmax, not_converged, useless_softmax
from newtention.diagnostics import unexplained_softmax
from newtention.io import open_arrays, write_array
from newtention.io.results import CERTIFICATE, require_writable
from newtention.io.softmax import (
    SOFTMAX,
    SavedSoftmax,
    load_softmax,
    read_softmax,
    read_softmax_problem,
    write_softmax,
    write_softmax_certificate,
)
from newtention.io.sources import unchanged_file
from newtention.io.tensors import OF_SOFTMAX
from newtention.regression import certify_softmax, softmax_regression
from newtention.regression.fit import predict_softmax
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
    data = read_softmax_problem(file, matrix, target, dtype)
    A, b = data.tensors["queries"], data.tensors["targets"]
    created = SOFTMAX.prepare(out, force)
    with removed_on_failure(out, created):
        with nullcontext() if as_json else busy("Solving"), data.named(OF_SOFTMAX):
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
    share = unexplained_softmax(result.fitted, b)
    if as_json:
        say(json.dumps(document, indent=1))
    else:
        say(result.summary())
        say()
        say(meaning_of_softmax(share))
        say(f"Result  {out / SOFTMAX.result}")
        say(f"Arrays  {out / SOFTMAX.arrays}")
    warning = useless_softmax(share, result.penalty)
    if warning is not None:
        complain(f"Warning: {warning}")
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
    _refuse(of_layers)
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
    if not as_json and certificate.local_minimum != "proved":
        sentence = not_converged(saved.result.status, certificate.gradient, AGAIN)
        if sentence is not None:
            say(f"{sentence}\n")
    record = write_softmax_certificate(saved, certificate)
    if as_json:
        say(json.dumps(record, indent=1))
    else:
        say(certificate.summary())
        say()
        say(f"Certificate  {folder / CERTIFICATE}")
    if not (no_report or as_json or has_report(folder)):
        say(NO_REPORT.format(folder))
    if not no_report and has_report(folder):
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


def predict_softmax_folder(
    folder: Path,
    source: str | None,
    out: Path | None,
    *,
    force: bool,
    matrix: str | None,
    target: str | None,
    of_layers: Mapping[str, bool],
) -> None:
    """Compute softmax(A x), or its rescaled form, for the x of a folder that `fit_softmax` wrote.

    source: other data, of as many columns; None for those of the fit.
    matrix, target: names of A and b, if not those of the fit; of other data b is not needed.
    of_layers: options of predictions of layers, by name, and whether they were given.

    Raises:
        OSError, ValueError, TypeError: as for `load_softmax` and `read_softmax_problem`; an option
            that does not apply, or another width.
    """
    _refuse(of_layers)
    document, result = read_softmax(folder)
    if source is None:
        file = unchanged_file(document["source"], document["sha256"])
    else:
        file = open_arrays(source)
    names = document["arrays"]
    wanted = names["b"] if target is None else target
    known = target is not None or source is None or wanted in file.arrays
    data = read_softmax_problem(
        file, matrix or names["A"], wanted if known else None, document["dtype"]
    )
    x = torch.as_tensor(result.x)
    A = data.tensors["queries"].to(x)
    if A.shape[1] != len(x):
        raise ValueError(
            f"{data.title('queries')} must have {len(x)} columns, one for each entry of the x in "
            f"{folder}; found {A.shape[1]}."
        )
    b = data.tensors["targets"].to(x) if known else x.new_zeros(len(A))
    path = predictions_path(folder, out, file.reference)
    fitted, relative = predict_softmax(A, b, x, document["ridge"], result.form)
    write_array(path, "predictions", fitted, force=force or out is None)
    if known:
        say(f"Relative loss  {relative:.6g} on {file.label}: {len(A)} rows")
        say(meaning_of_softmax(unexplained_softmax(fitted, b)))
    say(f"Predictions    {path} ({len(A)}, {document['dtype']})")


def _refuse(of_layers: Mapping[str, bool]) -> None:
    """Raise ValueError for the first option that was given."""
    for name, given in of_layers.items():
        if given:
            raise ValueError(f"{name} does not go with a softmax regression.")


def _form(rescaled: Kind | None, ridge: float) -> dict[str, Any]:
    """The arguments of the library that say which loss."""
    return {"ridge": ridge} | ({} if rescaled is None else {"rescaled": True, "kind": rescaled})


def _report(saved: SavedSoftmax, as_json: bool, label: str) -> None:
    with nullcontext() if as_json else busy("Making the report"):
        path = make_softmax_report(saved)
    if not as_json:
        say(f"{label}{path}")
