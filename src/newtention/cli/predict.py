"""`newtention predict`: outputs of a fitted layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

import newtention.functions as functions
from newtention.cli import options
from newtention.cli.held_out import unequal_width
from newtention.cli.terminal import say
from newtention.derivatives.gradient import data_loss
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
    are targets, the relative loss is printed too: on data that the fit has not seen, it tells how
    well the layer generalises.

    [bold]Examples[/bold]

    [cyan]newtention predict result[/cyan]

    [cyan]newtention predict result --source heldout.safetensors --out heldout_outputs.npz[/cyan]
    """
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
    path = out or folder / "predictions.safetensors"
    if path.exists() and path.resolve() == Path(provenance.source).resolve():
        raise ValueError(f"{path} holds the data; choose another file for the predictions.")
    layer = saved.solution.layer
    outputs = torch.as_tensor(functions.predict(problem, layer))
    write_array(path, "predictions", outputs, force=force or out is None)
    if provenance.arrays.targets is not None:
        w = as_weights(problem, layer)
        energy = float(problem.target_energy())
        relative = float(data_loss(problem, w.layer, w.theta)) / (energy or 1.0)
        say(f"Relative loss  {relative:.6g}")
    say(f"Predictions    {path} ({shape_text(outputs.shape)}, {provenance.dtype})")


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
