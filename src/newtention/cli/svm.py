"""`newtention svm`: the smallest X that selects given keys, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from newtention.cli import options
from newtention.cli.folders import removed_on_failure
from newtention.cli.progress import busy
from newtention.cli.terminal import complain, say
from newtention.io import ABSENT, ArrayFile, ArrayNames, open_arrays
from newtention.io.names import choose_names
from newtention.io.svm import SVM, write_svm
from newtention.io.tensors import SourceData
from newtention.svm import attention_svm

NOT_SOLVED = 3


def svm(
    source: options.Source,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Folder for the result; created if missing.  An existing one must be empty, or "
            "hold such a result that --force replaces.",
        ),
    ],
    selected: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Array of integers: for every query the key that it is to select, from 0.",
        ),
    ] = "selected",
    norm: Annotated[
        Literal["frobenius", "nuclear"],
        typer.Option(help="Which norm of X to make small; nuclear: for widths up to about 30."),
    ] = "frobenius",
    soft: Annotated[
        float | None,
        typer.Option(
            metavar="C",
            help="Allow a query to fall short of the margin, at a price of C for each unit.",
            show_default=False,
        ),
    ] = None,
    mask: Annotated[
        Literal["none", "causal"],
        typer.Option(help="causal: a query may attend to keys up to its own place."),
    ] = "none",
    tol: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            help="Relative duality gap to reach.  Default: 1e-9, with --soft 1e-8, for the nuclear "
            "norm 1e-7.",
            show_default=False,
        ),
    ] = None,
    queries: options.Queries = None,
    keys: options.Keys = None,
    offsets: options.Offsets = None,
    key_offsets: options.KeyOffsets = None,
    lengths: options.Lengths = None,
    key_lengths: options.KeyLengths = None,
    require_separable: Annotated[
        bool,
        typer.Option(
            "--require-separable", help="Exit with status 3 if no X selects all these keys."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the result in DIR.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Find the smallest X for which each query's logit of its selected key leads by at least 1.

    Attention as a support vector machine: min ||X|| subject to (a2_selected - a2_k)^T X^T a1 >= 1
    for every query a1 and every other key a2_k that it may attend to.  SOURCE holds query tokens
    A1, optionally key tokens A2 (otherwise the queries are the keys), and the selected keys, of one
    sequence or of several that share X, numbered within each; as for newtention fit.

    DIR will hold svm.safetensors (X, the support pairs with their multipliers, slacks) and
    svm.json.  Where no X exists, both hold a small set of pairs that already contradict each other.

    [bold]Examples[/bold]

    [cyan]newtention svm tokens.npz --out separation --selected chosen --mask causal[/cyan]

    [cyan]newtention svm tokens.npz --out separation --norm nuclear --soft 10 --json[/cyan]

    [bold]Exit status[/bold]

    0 solved, or found to be impossible; 3 stopped before, or impossible under --require-separable;
    2 bad input or refused; 1 a bug.
    """
    file = open_arrays(source)
    rows = (offsets, key_offsets, lengths, key_lengths)
    arrays, several, names = _read(file, selected, ArrayNames(queries, ABSENT, keys, ABSENT, *rows))
    created = SVM.prepare(out, force)
    with removed_on_failure(out, created):
        with nullcontext() if as_json else busy("Solving"):
            try:
                result = attention_svm(
                    *arrays,
                    norm=norm,
                    mask=None if mask == "none" else mask,
                    soft=soft,
                    tol=tol,
                    **several,
                )
            except (ValueError, TypeError) as error:
                text = str(error).replace('norm="', "--norm ").replace('"', "")
                if selected != "selected" and text.startswith("selected"):
                    text = f"array {selected!r}" + text.removeprefix("selected")
                for option in ("soft", "tol"):
                    if text.startswith(f"{option} must"):
                        raise type(error)(f"--{text}") from error
                raise type(error)(f"{file.label}: {text}") from error
        about = {
            "source": file.reference,
            "sha256": file.sha256(),
            "arrays": names,
            "mask": mask,
            "tol": tol,
            "sequences": _count(arrays[0], several),
            "queries": _rows(arrays[0], several.get("lengths")),
            "keys": _rows(arrays[1], several.get("key_lengths", several.get("lengths"))),
            "widths": {"d1": arrays[0].shape[-1], "d2": arrays[1].shape[-1]},
        }
        document = write_svm(out, result, about)
    if as_json:
        say(json.dumps(document, indent=1))
    else:
        say(result.summary())
        say()
        say(f"Result  {out / SVM.result}")
        say(f"Arrays  {out / SVM.arrays}")
    if require_separable and result.infeasible:
        complain("--require-separable asks for an X that selects all these keys; there is none.")
    stopped = not (result.success or result.infeasible)
    if stopped or (require_separable and result.infeasible):
        raise typer.Exit(NOT_SOLVED)


def _read(
    file: ArrayFile, selected: str, asked: ArrayNames
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], dict[str, str]]:
    """Queries, keys and selected keys; where sequences begin or end; and the arrays' names."""
    data = SourceData(file, choose_names(file, asked, without_targets=True), torch.float64)
    data.require_shapes()
    a1 = data.tensors["queries"]
    if selected not in file.arrays:
        raise ValueError(
            f"{file.label} has no array {selected!r} (selected keys); name it with --selected.  It "
            f"holds {file.listing()}."
        )
    a2 = data.tensors.get("keys", a1)
    used = {**data.names, "selected": selected}
    return (a1, a2, file.read(selected)), data.rows, used


def _count(tokens: Tensor, several: Mapping[str, Tensor]) -> int:
    if "offsets" in several:
        return len(several["offsets"]) - 1
    return len(tokens) if tokens.ndim == 3 else 1


def _rows(tokens: Tensor, lengths: Tensor | None) -> int:
    return int(lengths.sum()) if lengths is not None else tokens.shape[:-1].numel()
