"""`newtention certify`: what can be proved about the weights of a fit."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from newtention.certify import certify as prove
from newtention.cli import options
from newtention.cli.progress import busy
from newtention.cli.report import NO_REPORT, has_report, make_report
from newtention.cli.softmax import certify_softmax_folder
from newtention.cli.terminal import complain, say
from newtention.cli.words import AGAIN, not_converged
from newtention.io import load_result, write_certificate
from newtention.io.results import CERTIFICATE, WEIGHTS, require_writable
from newtention.io.softmax import holds_softmax

NOT_PROVED = 3
EPSILON, ACCURACY = 0.01, 1e-8


def certify(
    folder: options.ResultFolder,
    require: Annotated[
        Literal["local", "global"] | None,
        typer.Option(
            help="Exit with status 3 unless this is proved: that an exact local minimum lies "
            "nearby (a global one will do), or that it is the global minimum.",
            show_default=False,
        ),
    ] = None,
    precise: Annotated[
        bool,
        typer.Option(
            "--precise",
            help="Compute decisive quantities beyond float64: slower, for proofs that rounding "
            "spoils.",
        ),
    ] = False,
    unfolding: Annotated[
        bool | None,
        typer.Option(
            "--unfolding/--no-unfolding",
            help="Compute the sharpest Lipschitz constant, from all third derivatives, or never.  "
            "Default: where it is affordable.",
            show_default=False,
        ),
    ] = None,
    epsilon: Annotated[
        float,
        typer.Option(
            metavar="FLOAT",
            help="Accuracy of approximate Hessians, relative, for the basin of their Newton steps.",
        ),
    ] = EPSILON,
    accuracy: Annotated[
        float,
        typer.Option(
            metavar="FLOAT",
            help="Count the steps that such an iteration takes to this share of its first error.",
        ),
    ] = ACCURACY,
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the data are now, if they have moved.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Leave an old report.html as it is.")
    ] = False,
) -> None:
    """Prove what can be proved about the weights of a fit.

    Whether an exact local minimum of the loss lies within a stated distance of them, whether it is
    the global one, and with which constants: proved in floating point, rounding accounted for,
    from the data and the weights alone.  Where a proof fails, the reasons are given; the weights
    may still be a minimum.

    Of a softmax regression (fit --kind softmax) a local minimum is proved; --precise, --unfolding,
    --epsilon and --accuracy do not go with it.

    The data are read again from where the fit found them, and must not have changed.  In DIR,
    certificate.json is written, and report.html, if the fit made one, is made anew with the
    certificate.

    [bold]Examples[/bold]

    [cyan]newtention certify result[/cyan]

    [cyan]newtention certify result --require local --precise --json[/cyan]

    [bold]Exit status[/bold]

    0 a verdict, whichever it is; 3 no proof of what --require asks for; 2 bad input or refused; 1 a
    bug.
    """
    if holds_softmax(folder):
        of_layers = {
            "--precise": precise,
            "--unfolding": unfolding is not None,
            "--epsilon": epsilon != EPSILON,
            "--accuracy": accuracy != ACCURACY,
        }
        certify_softmax_folder(
            folder,
            source,
            require=require,
            as_json=as_json,
            no_report=no_report,
            of_layers=of_layers,
        )
        return
    problem, solution, document = load_result(folder, source)
    require_writable(folder)  # or refused before the work
    with nullcontext() if as_json else busy("Certifying"):
        certificate = prove(
            problem,
            solution.layer,
            precise=precise,
            unfolding=unfolding,
            epsilon=epsilon,
            accuracy=accuracy,
        )
    if not as_json and "proved" not in (certificate.local_minimum, certificate.global_minimum):
        again = _again(folder, document)
        sentence = not_converged(solution.status, certificate.gradient, again)
        if sentence is not None:
            say(f"{sentence}\n")
    settings = {"unfolding": unfolding, "epsilon": epsilon, "accuracy": accuracy}
    record = write_certificate(folder, certificate, document, settings=settings)
    if as_json:
        say(json.dumps(record, indent=1))
    else:
        say(certificate.summary())
        if document.get("freeze"):
            kept = ", ".join(document["freeze"])
            say(f"The fit kept {kept} frozen; the certificate is about all weights.")
        say()
        say(f"Certificate  {folder / CERTIFICATE}")
    if not no_report and has_report(folder):
        try:
            with nullcontext() if as_json else busy("Making the report"):
                path = make_report(folder, problem, solution, document)
        except KeyboardInterrupt:
            complain(f"The certificate is complete.  Report: newtention report {folder}")
            raise
        if not as_json:
            say(f"Report       {path}")
    elif not (no_report or as_json):
        say(NO_REPORT.format(folder))
    verdicts = {"local": certificate.local_minimum, "global": certificate.global_minimum}
    sufficient = verdicts.values() if require == "local" else [certificate.global_minimum]
    if require is not None and "proved" not in sufficient:
        complain(
            f"--require {require} asks for a proved {require} minimum; the verdict is "
            f"{verdicts[require]!r}."
        )
        raise typer.Exit(NOT_PROVED)


def _again(folder: Path, document: dict[str, Any]) -> str:
    """How to continue a fit of layers."""
    if document.get("checkpoint"):
        return (
            "To go on, give the same newtention fit again with --force and higher limits; it "
            f"continues from {document['checkpoint']}."
        )
    if document["provenance"]["kind"] == "attention-map":
        return AGAIN
    return (
        f"To go on, give the same newtention fit with --layer {folder / WEIGHTS} and another --out."
    )
