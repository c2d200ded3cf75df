"""`newtention predict`: outputs of a fitted layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

import newtention.functions as functions
from newtention.cli import options
from newtention.cli.folders import predictions_path
from newtention.cli.held_out import unequal_width
from newtention.cli.softmax import predict_softmax_folder
from newtention.cli.terminal import say
from newtention.derivatives.gradient import data_loss
from newtention.diagnostics import QueryErrors
from newtention.inputs import shape_text
from newtention.io import (
    ArrayNames,
    Provenance,
    SavedResult,
    load_problem,
    open_arrays,
    read_result,
    recorded_file,
    write_array,
)
from newtention.io.softmax import holds_softmax
from newtention.problem import AttentionProblem
from newtention.weights import as_weights


def predict(
    folder: options.ResultFolder,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Other data with the same widths; targets are not needed.  Default: the data of "
            "the fit.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="A .safetensors or .npz file; it will hold one array, predictions.  Default: "
            "predictions.safetensors in DIR, replaced if there is one.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    queries: options.Queries = None,
    keys: options.Keys = None,
    values: options.Values = None,
    targets: options.Targets = None,
    offsets: options.Offsets = None,
    key_offsets: options.KeyOffsets = None,
    lengths: options.Lengths = None,
    key_lengths: options.KeyLengths = None,
) -> None:
    """Compute the outputs of a fitted layer, for the data of the fit or for others.

    Mask, scale and precision are those of the fit, and so are the arrays' names unless others are
    given; of the data of the fit, sequences held out by --validation-share are part.  Where there
    are targets, the relative loss is printed too, with the rows that it is of, and if some were
    held out, those fitted and those held out apart: on data that the fit has not seen, it tells how
    well the layer generalises.

    Of a softmax regression (fit --kind softmax) softmax(A x) is computed, or its rescaled form; of
    the arrays --queries (A) and --targets (b) alone go with it.

    [bold]Examples[/bold]

    [cyan]newtention predict result[/cyan]

    [cyan]newtention predict result --source heldout.safetensors --out heldout_outputs.npz[/cyan]
    """
    if holds_softmax(folder):
        of_layers = {
            "--keys": keys,
            "--values": values,
            "--offsets": offsets,
            "--key-offsets": key_offsets,
            "--lengths": lengths,
            "--key-lengths": key_lengths,
        }
        predict_softmax_folder(
            folder,
            source,
            out,
            force=force,
            matrix=queries,
            target=targets,
            of_layers={name: value is not None for name, value in of_layers.items()},
        )
        return
    saved = read_result(folder)
    names = ArrayNames(queries, targets, keys, values, offsets, key_offsets, lengths, key_lengths)
    problem, provenance = _data(saved, source, names)
    widths = tuple(saved.document["widths"][symbol] for symbol in ("d1", "d2", "d3", "p"))
    different = unequal_width(problem, widths)
    if different is not None:
        role, found, fitted = different
        raise ValueError(
            f"The layer in {saved.folder} was fitted to {role} of width {fitted}; those of "
            f"{provenance.source} have width {found}."
        )
    path = predictions_path(folder, out, provenance.source)
    layer = saved.solution.layer
    outputs = torch.as_tensor(functions.predict(problem, layer))
    write_array(path, "predictions", outputs, force=force or out is None)
    if provenance.arrays.targets is not None:
        w = as_weights(problem, layer)
        energy = float(problem.target_energy())
        relative = float(data_loss(problem, w.layer, w.theta)) / (energy or 1.0)
        layout = problem.layout
        size = _size(len(layout.queries), sum(layout.queries))
        say(f"Relative loss  {relative:.6g} on {provenance.source}: {size}")
        if source is None:
            for line in _parts(saved, problem):
                say(line)
    say(f"Predictions    {path} ({shape_text(outputs.shape)}, {provenance.dtype})")


def _parts(saved: SavedResult, problem: AttentionProblem) -> Iterator[str]:
    """On the data of the fit: what was fitted and what was held out, apart."""
    held_out = saved.document.get("validation")
    every = saved.provenance.hold_out
    if held_out is not None and not every:
        yield (
            f"  held out     {saved.solution.validation_loss:.6g} on {held_out['source']}, by the "
            "fit"
        )
    if not every:
        return
    errors = QueryErrors(problem, saved.solution)
    out = errors.sequence % every == every - 1
    for name, rows in (("fitted", ~out), ("held out", out)):
        loss = errors.relative_loss(rows)
        size = _size(len(set(errors.sequence[rows])), int(rows.sum()))
        yield f"  {name:<12} {'no target' if loss is None else f'{loss:.6g}'} on {size}"


def _size(sequences: int, queries: int) -> str:
    return f"{sequences} sequence(s), {queries} queries"


def _data(
    saved: SavedResult, source: str | None, names: ArrayNames
) -> tuple[AttentionProblem, Provenance]:
    recorded = saved.provenance
    if source is None:
        recorded_file(recorded)
        asked = recorded.arrays.exact().updated(names)
    else:
        asked = recorded.arrays.elsewhere()
        if asked.targets not in open_arrays(source).arrays:
            asked = replace(asked, targets=None)  # they are not needed
        asked = asked.updated(names)
    return load_problem(
        recorded.source if source is None else source,
        asked,
        mask=recorded.mask,
        scale=recorded.scale,
        dtype=recorded.dtype,
        targets_width=saved.document["widths"]["p"],
        kind=recorded.kind,
    )
