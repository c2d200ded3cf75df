"""The options of all commands, as annotated types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

_ARRAYS = "Arrays (names in SOURCE; 'none' leaves one out)"
_PROBLEM, _SOLVER, _OUTPUT = "Problem", "Solver", "Output"


def _array(help: str) -> Any:
    return typer.Option(metavar="NAME", help=help, rich_help_panel=_ARRAYS)


def _number(panel: str, metavar: str, help: str, least: float | None = None) -> Any:
    return typer.Option(min=least, metavar=metavar, help=help, rich_help_panel=panel)


ResultFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder written by newtention fit.")
]
Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="A .safetensors or .npz file, or example:NAME.")
]

# Arrays
Queries = Annotated[str | None, _array("Query tokens A1.  Usual names: queries, tokens, hidden.")]
Keys = Annotated[str | None, _array("Key tokens A2.  Usual name: keys; otherwise the queries.")]
Values = Annotated[str | None, _array("Value tokens A3.  Usual name: values; otherwise the keys.")]
Targets = Annotated[
    str | None, _array("Outputs to reproduce.  Usual names: targets, head_output, output.")
]
Offsets = Annotated[
    str | None, _array("First row of each sequence of 2-D arrays, and the number of rows.")
]
KeyOffsets = Annotated[str | None, _array("The same for keys and values, if it differs.")]
Lengths = Annotated[str | None, _array("Real tokens of each sequence of 3-D (padded) arrays.")]
KeyLengths = Annotated[str | None, _array("The same for keys and values, if it differs.")]

# Problem
Ridge = Annotated[
    float,
    _number(_PROBLEM, "FLOAT", "Adds FLOAT/2 (||X||^2 + ||Y||^2) to the loss.", least=0),
]
RidgeX = Annotated[float | None, _number(_PROBLEM, "FLOAT", "For X, in place of --ridge.", least=0)]
RidgeY = Annotated[float | None, _number(_PROBLEM, "FLOAT", "For Y, in place of --ridge.", least=0)]
Mask = Annotated[
    Literal["none", "causal"],
    typer.Option(
        help="causal: a token attends to itself and those before it.", rich_help_panel=_PROBLEM
    ),
]
Scale = Annotated[float, _number(_PROBLEM, "FLOAT", "Factor of the logits A1 X A2^T.")]
Heads = Annotated[int, _number(_PROBLEM, "INT", "Attention heads to fit.", least=1)]
Dtype = Annotated[
    Literal["float64", "float32"],
    typer.Option(
        help="Precision of the computation; data are converted.", rich_help_panel=_PROBLEM
    ),
]

# Solver
Method = Annotated[
    Literal["auto", "newton"],
    typer.Option(help="newton: dense Newton; auto: the best choice.", rich_help_panel=_SOLVER),
]
Tol = Annotated[
    float | None,
    _number(
        _SOLVER,
        "FLOAT",
        "Converged when a Newton step would change the outputs by less than this, relative to the "
        "targets.  Default: 1e-10, in float32 1e-4.",
    ),
]
MaxIter = Annotated[int, _number(_SOLVER, "INT", "Iteration limit.", least=0)]
MaxSeconds = Annotated[float | None, _number(_SOLVER, "FLOAT", "Time limit.", least=0)]
Starts = Annotated[
    int,
    _number(_SOLVER, "INT", "Random starts, solved as one batch; the best is kept.", least=1),
]
Seed = Annotated[int, _number(_SOLVER, "INT", "Seed of the random starts.", least=0)]

# Output
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="Folder for the result; created if missing.  An existing one must be empty, or hold a "
        "result that --force replaces.",
        rich_help_panel=_OUTPUT,
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace the result in DIR.", rich_help_panel=_OUTPUT)
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the content of result.json, and nothing else, to standard output.",
        rich_help_panel=_OUTPUT,
    ),
]
NoReport = Annotated[
    bool, typer.Option("--no-report", help="Omit report.html.", rich_help_panel=_OUTPUT)
]
