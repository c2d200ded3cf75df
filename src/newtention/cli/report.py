"""`newtention report`: rebuild the report of a fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from newtention.cli.options import ResultFolder
from newtention.cli.progress import busy
from newtention.cli.terminal import ReportFailedError, complain, say
from newtention.files import TEMPORARY
from newtention.io import load_result, read_certificate
from newtention.io.results import REPORT
from newtention.io.softmax import (
    SavedSoftmax,
    holds_softmax,
    load_softmax,
    read_softmax_certificate,
)
from newtention.problem import AttentionProblem
from newtention.solution import MATRIX_FREE, Solution

C = TypeVar("C")

NO_REPORT = "Report       none, as the fit made none; newtention report {} makes one"
"""A line of commands that renew a report, for a folder."""


def report(
    folder: ResultFolder,
    source: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the data are now, if they have moved."),
    ] = None,
) -> None:
    """Rebuild report.html in a result folder.

    The data are read again from where the fit found them, and must not have changed.  A certificate
    of newtention certify is shown if it belongs to this fit.

    [bold]Examples[/bold]

    [cyan]newtention report result[/cyan]

    [cyan]newtention report result --source /new/place/layer.safetensors[/cyan]
    """
    if holds_softmax(folder):
        saved = load_softmax(folder, source)
        with busy("Making the report"):
            path = make_softmax_report(saved)
    else:
        problem, solution, document = load_result(folder, source)
        with busy("Making the report"):
            path = make_report(folder, problem, solution, document)
    say(f"Report  {path}")


def has_report(folder: Path) -> bool:
    """Whether there is a report to renew; a fit with --no-report leaves none."""
    return (folder / REPORT).exists()


def make_report(
    folder: Path, problem: AttentionProblem, solution: Solution, document: dict[str, Any]
) -> Path:
    """Write report.html into the folder and return its path; an old one stays if this fails.

    A certificate in the folder is shown unless it is damaged or of another fit; then a warning
    says so.

    Raises:
        OSError: it cannot be written.
        ReportFailedError: anything else; the inputs are known to be good.
    """
    # matplotlib takes a second to import; only commands that make a report need it.
    from newtention.report import write_report

    certificate = _shown(lambda: read_certificate(folder, document))
    return _written(
        folder,
        lambda path: write_report(
            path,
            problem,
            solution,
            title=_title(document["provenance"]["source"]),
            provenance=provenance_rows(document),
            certificate=certificate,
        ),
    )


def make_softmax_report(saved: SavedSoftmax) -> Path:
    """The same for a softmax regression.

    Raises:
        OSError, ReportFailedError: as for `make_report`.
    """
    from newtention.softmax_report import write_softmax_report

    certificate = _shown(lambda: read_softmax_certificate(saved))
    document = saved.document
    return _written(
        saved.folder,
        lambda path: write_softmax_report(
            path,
            saved.A,
            saved.b,
            saved.result,
            ridge=document["ridge"],
            title=_title(document["source"]),
            provenance={
                "source": document["source"],
                "sha256": document["sha256"],
                "arrays": _arrays(document["arrays"]),
                "starts": str(document["n_init"]),
                "seed": str(document["seed"]),
                "arithmetic": f"{document['dtype']} on cpu",
                "versions": _versions(document),
            },
            certificate=certificate,
        ),
    )


def _shown(read: Callable[[], C | None]) -> C | None:
    """The certificate of a folder; None, with a warning, if it cannot be shown."""
    try:
        return read()
    except ValueError as error:
        complain(f"Warning: the report shows no certificate: {error}")
        return None


def _title(source: str) -> str:
    return source if source.startswith("example:") else Path(source).name


def _written(folder: Path, write: Callable[[Path], None]) -> Path:
    """Write report.html whole, or leave the old one."""
    path = folder / REPORT
    temporary = folder / f"{TEMPORARY}{os.getpid()}-{REPORT}"
    try:
        write(temporary)
        os.replace(temporary, path)
    except Exception as error:
        # A full disk is the user's matter; a file that is not found is one of the package's own.
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        raise ReportFailedError(
            f"The result in {folder} is complete, but its report could not be made."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def provenance_rows(document: dict[str, Any]) -> dict[str, str]:
    """Where a fit came from, as label and text."""
    origin = document["provenance"]
    rows = {
        "source": origin["source"],
        "sha256": origin["sha256"],
        "arrays": _arrays(origin["arrays"]),
        "mask": origin["mask"],
        "scale": f"{origin['scale']:g}",
        "regulariser": _regulariser(document["regularizer"]),
        **_layer(document.get("layer")),
        "heads": str(document["heads"]),
    }
    if document.get("ranks"):
        rows["ranks"] = ", ".join(map(str, document["ranks"]))
    if document.get("freeze"):
        rows["frozen blocks"] = ", ".join(document["freeze"])
    held_out = document.get("validation")
    if held_out is not None:
        every = held_out["every"]
        rows["held out"] = (
            f"one sequence in {every} of the source"
            if every
            else f"{held_out['source']}, sha256 {held_out['sha256']}"
        ) + f", {held_out['sequences']} sequence(s), {held_out['queries']} queries"
    if document["method"] in MATRIX_FREE:
        rows["curvature"] = document.get("curvature", "gauss-newton")
    if document.get("continued_at") is not None:
        rows["continued"] = f"at iteration {document['continued_at']} of {document['checkpoint']}"
    return rows | {
        "starts": str(document["n_init"]),
        "seed": str(document["seed"]),
        "arithmetic": f"{origin['dtype']} on {document['device']}, {document['threads']} thread(s)",
        "versions": _versions(document),
    }


def _versions(document: dict[str, Any]) -> str:
    return ", ".join(f"{name} {v}" for name, v in document["versions"].items())


def _arrays(names: dict[str, str | None]) -> str:
    return ", ".join(f"{role} {name}" for role, name in names.items() if name)


def _regulariser(about: dict[str, Any] | None) -> str:
    if about is None:
        return "none"
    if about["name"] == "proximity":
        how = ", isotropic" if about["isotropic"] else ""
        return f"proximity {about['strength']:g} around the reduced layer{how}"
    return f"ridge {about['x']:g} on X, {about['y']:g} on Y"


def _layer(record: dict[str, Any] | None) -> dict[str, str]:
    """The layer that the fit began from."""
    if record is None:
        return {}
    text = record["source"]
    if record["prefix"]:
        text += f", names beginning with {record['prefix']}"
    if record["rope_base"] is not None:
        text += f", rotary base {record['rope_base']:g}, {record['rope_pairing']}"
    if record["logit_scale"] is not None:
        text += f", logits times {record['logit_scale']:g}"
    return {"layer to begin from": text, "its sha256": record["sha256"]}
