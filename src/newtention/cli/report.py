"""`newtention report`: rebuild the report of a fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from newtention.cli.options import ResultFolder
from newtention.cli.progress import busy
from newtention.cli.terminal import ReportFailedError, complain, say
from newtention.io import load_result, read_certificate
from newtention.problem import AttentionProblem
from newtention.solution import MATRIX_FREE, Solution


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
    problem, solution, document = load_result(folder, source)
    with busy("Making the report"):
        path = make_report(folder, problem, solution, document)
    say(f"Report  {path}")


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
    # matplotlib takes a second to import; only this command and fit need it.
    from newtention.report import write_report

    try:
        certificate = read_certificate(folder, document)
    except ValueError as error:
        complain(f"Warning: the report shows no certificate: {error}")
        certificate = None
    path = folder / "report.html"
    temporary = folder / f".newtention-{os.getpid()}-report.html"
    name = document["provenance"]["source"]
    title = name if name.startswith("example:") else Path(name).name
    try:
        write_report(
            temporary,
            problem,
            solution,
            title=title,
            provenance=provenance_rows(document),
            certificate=certificate,
        )
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
    versions = ", ".join(f"{name} {v}" for name, v in document["versions"].items())
    return rows | {
        "starts": str(document["n_init"]),
        "seed": str(document["seed"]),
        "arithmetic": f"{origin['dtype']} on {document['device']}, {document['threads']} thread(s)",
        "versions": versions,
    }


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
