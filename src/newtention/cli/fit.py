"""`newtention fit`: from a file to a result folder."""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress

import typer
from rich.console import Console

from newtention.api import Options, solve
from newtention.cli import options
from newtention.cli.progress import Display, Lines, Silent, busy
from newtention.cli.report import make_report
from newtention.cli.terminal import complain, say
from newtention.io import ArrayNames, Provenance, load_problem, prepare_folder, write_result
from newtention.problem import AttentionProblem
from newtention.solution import Solution

NOT_CONVERGED = 3


def fit(
    source: options.Source,
    out: options.Out,
    force: options.Force = False,
    as_json: options.AsJson = False,
    no_report: options.NoReport = False,
    ridge: options.Ridge = 0.0,
    ridge_x: options.RidgeX = None,
    ridge_y: options.RidgeY = None,
    mask: options.Mask = "none",
    scale: options.Scale = 1.0,
    heads: options.Heads = 1,
    dtype: options.Dtype = "float64",
    method: options.Method = "auto",
    tol: options.Tol = None,
    max_iter: options.MaxIter = 200,
    max_seconds: options.MaxSeconds = None,
    n_init: options.Starts = 1,
    seed: options.Seed = 0,
    queries: options.Queries = None,
    keys: options.Keys = None,
    values: options.Values = None,
    targets: options.Targets = None,
    offsets: options.Offsets = None,
    key_offsets: options.KeyOffsets = None,
    lengths: options.Lengths = None,
    key_lengths: options.KeyLengths = None,
) -> None:
    """Fit an attention layer, softmax(scale A1 X A2^T) A3 Y, to given outputs.

    SOURCE holds query tokens A1 and the outputs (targets), and optionally key tokens A2 and value
    tokens A3; without them, queries, keys and values are the same tokens.  2-D arrays (tokens x
    width) are one sequence, or several if there are offsets; 3-D arrays (sequences x tokens x
    width) are a padded batch, with lengths if some are shorter.  A file is never unpickled.

    DIR will hold weights.safetensors (X and Y), start.safetensors (the weights the fit began from),
    result.json and report.html.  Ctrl-C ends the fit and keeps the best point so far.

    [bold]Examples[/bold]

    [cyan]newtention fit example:minilm-head --out result --ridge 0.1[/cyan]

    [cyan]newtention fit layer.safetensors --out result --targets attn --mask causal[/cyan]

    [cyan]newtention fit cross.npz --out result --keys image --n-init 8 --max-seconds 60[/cyan]

    [bold]Exit status[/bold]

    0 converged; 3 usable but not converged (a limit, stalled, Ctrl-C); 2 bad input or refused;
    1 a bug.
    """
    created = prepare_folder(out, force)
    try:
        names = ArrayNames(
            queries, targets, keys, values, offsets, key_offsets, lengths, key_lengths
        )
        problem, provenance = load_problem(
            source,
            names,
            mask=mask,
            scale=scale,
            ridge_x=ridge if ridge_x is None else ridge_x,
            ridge_y=ridge if ridge_y is None else ridge_y,
            dtype=dtype,
        )
        if not as_json:
            say(describe(problem, provenance, heads))
        with _display(as_json) as display:
            solution = solve(
                problem,
                method=method,
                tol=tol,
                max_iter=max_iter,
                max_seconds=max_seconds,
                n_init=n_init,
                seed=seed,
                callback=display,
                options=Options(heads=heads),
            )
        document = write_result(
            out,
            problem,
            solution,
            provenance,
            force=force,
            seed=seed,
            n_init=n_init,
            max_iter=max_iter,
            max_seconds=max_seconds,
        )
    except BaseException:
        if created:
            with suppress(OSError):
                out.rmdir()
        raise

    if as_json:
        say(json.dumps(document, indent=1))
    else:
        say()
        say(solution.summary())
        say()
        say(meaning(problem, solution))
        say(f"Weights  {out / 'weights.safetensors'}")
    if not no_report:
        try:
            with nullcontext() if as_json else busy("Making the report"):
                path = make_report(out, problem, solution, document)
        except KeyboardInterrupt:
            complain(f"Interrupted; the result is complete.  Report: newtention report {out}")
            raise typer.Exit(NOT_CONVERGED) from None
        if not as_json:
            say(f"Report   {path}")
    if not solution.success:
        raise typer.Exit(NOT_CONVERGED)


def describe(problem: AttentionProblem, provenance: Provenance, heads: int) -> str:
    """One line on what will be fitted, so that a wrong array is noticed at once."""
    d1, d2, d3, p = problem.widths
    arrays = provenance.arrays
    if arrays.keys is None:
        roles = [f"self-attention on {arrays.queries!r}"]
    elif arrays.values is None:
        roles = [f"queries {arrays.queries!r}", f"keys and values {arrays.keys!r}"]
    else:
        roles = [f"queries {arrays.queries!r}", f"keys {arrays.keys!r}"]
    if arrays.values is not None:
        roles.append(f"values {arrays.values!r}")
    layout = problem.layout
    return (
        f"Fitting {provenance.source}: {', '.join(roles)}, targets {arrays.targets!r}; "
        f"{len(layout.queries)} sequence(s), {sum(layout.queries)} queries, "
        f"{heads * (d1 * d2 + d3 * p)} unknowns, {provenance.dtype}."
    )


def meaning(problem: AttentionProblem, solution: Solution) -> str:
    """What the numbers say, in a sentence."""
    if float(problem.target_energy()) == 0:
        return "The targets are all zero, so that the relative loss is the data loss itself."
    ridge = "; the loss includes the penalty, this share does not" if solution.penalty else ""
    return (
        f"The fitted layer's outputs miss {100 * solution.relative_loss:.4g} % of the targets' sum "
        f"of squares (outputs of zero would miss 100 %){ridge}."
    )


def _display(as_json: bool) -> Silent:
    if as_json:
        return Silent()
    console = Console(highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return Display(console)
    return Lines()
