"""The options of all commands, as annotated types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from newtention.api import Options

_ARRAYS = "Arrays (names in SOURCE; 'none' leaves one out)"
_PROBLEM, _SOLVER, _OUTPUT = "Problem", "Solver", "Output"
_LAYER = "Layer to begin from"
_VALIDATION = "Validation"


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
FitKind = Annotated[
    Literal["layer", "attention-map", "softmax"],
    typer.Option(
        "--kind",
        help="layer: outputs of attention.  attention-map: the targets are maps (queries x keys), "
        "fitted by softmax(A1 X A2^T) itself.  softmax: one vector b, fitted by softmax(A x).",
        rich_help_panel=_PROBLEM,
    ),
]
Rescaled = Annotated[
    Literal["exp", "sinh", "cosh"] | None,
    typer.Option(
        help="With --kind softmax: fit u(A x) / <u(A x), 1> for this u, the division multiplied "
        "out.  Needs a --ridge.",
        rich_help_panel=_PROBLEM,
    ),
]
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
Heads = Annotated[
    int | None,
    _number(
        _PROBLEM,
        "INT",
        "Attention heads to fit.  Fewer than those of --layer: the most useful are kept.  Default: "
        "1, or those of --layer.",
        least=1,
    ),
]
Ranks = Annotated[
    str | None,
    typer.Option(
        metavar="INT[,INT]",
        help="Width of each head's queries and keys, and of its values; one number for both.  A "
        "layer is truncated; without --layer, random W_Q, W_K, W_V, W_O are the start.",
        rich_help_panel=_PROBLEM,
    ),
]
Freeze = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[,NAME]",
        help="Blocks that keep their values: X, Y, or W_Q, b_Q, W_K, b_K, W_V, b_V, W_O, b_O.",
        rich_help_panel=_PROBLEM,
    ),
]
Proximity = Annotated[
    float | None,
    _number(
        _PROBLEM,
        "FLOAT",
        "Penalty for leaving --layer as it is after --heads and --ranks; 1 weighs a change of the "
        "outputs like their error.",
        least=0,
    ),
]
Isotropic = Annotated[
    bool,
    typer.Option(
        "--isotropic",
        help="With --proximity: hold back directions that the data hardly show as well.",
        rich_help_panel=_PROBLEM,
    ),
]
Dtype = Annotated[
    Literal["float64", "float32"],
    typer.Option(
        help="Precision of the computation; data are converted.", rich_help_panel=_PROBLEM
    ),
]

# Layer
Layer = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|source",
        help="Weights of a real layer, W_Q, W_K, W_V, W_O and biases under their usual names, or a "
        "saved layer; 'source': they are in SOURCE, beside the tokens.",
        rich_help_panel=_LAYER,
    ),
]
LayerPrefix = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="What their names begin with, to the last dot: 'layer2.', say.",
        rich_help_panel=_LAYER,
    ),
]
LayerHeads = Annotated[
    int | None,
    _number(_LAYER, "INT", "Heads of weights that have no head axis.", least=1),
]
KvHeads = Annotated[
    int | None,
    _number(_LAYER, "INT", "The same for keys and values; default: as many.", least=1),
]
RopeBase = Annotated[
    float | None,
    _number(_LAYER, "FLOAT", "The layer has rotary positions with this base, such as 10000."),
]
RopePairing = Annotated[
    Literal["halves", "neighbours"] | None,
    typer.Option(
        help="Features that turn together: i and i + width/2 (Llama), or 2i and 2i + 1 (GPT-J).  "
        "Default: halves.",
        rich_help_panel=_LAYER,
    ),
]
LogitScale = Annotated[
    float | None,
    _number(_LAYER, "FLOAT", "Factor of the layer's logits.  Default: 1/sqrt(head width)."),
]

# Validation
Validation = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Held-out data, arrays named as in SOURCE: the point that does best on them is kept, "
        "and the fit ends when they gain no more.",
        rich_help_panel=_VALIDATION,
    ),
]
ValidationShare = Annotated[
    float | None,
    _number(
        _VALIDATION,
        "FLOAT",
        "Hold out this share of SOURCE's sequences, evenly spaced, instead: 0.2 takes every fifth.",
        least=0,
    ),
]
Patience = Annotated[
    int | None,
    _number(
        _VALIDATION,
        "INT",
        "Iterations without a better validation loss before the fit ends.  Default: "
        f"{Options().patience}.",
        least=1,
    ),
]

# Solver
Method = Annotated[
    Literal["auto", "newton", "newton-cg", "sketched"],
    typer.Option(
        help="newton: dense, for X and Y; newton-cg: matrix-free, for any layer; sketched: "
        "matrix-free for X and Y, preconditioned by a sample of the rows; auto: the best choice.",
        rich_help_panel=_SOLVER,
    ),
]
Curvature = Annotated[
    Literal["gauss-newton", "full"],
    typer.Option(
        help="Of newton-cg.  full: the exact Hessian, negative curvature included.",
        rich_help_panel=_SOLVER,
    ),
]
CacheBytes = Annotated[
    int | None,
    _number(
        _SOLVER,
        "INT",
        "newton-cg keeps attention weights between its products if they take at most this.  "
        "Default: a quarter of the free memory.",
        least=0,
    ),
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
Hopping = Annotated[
    float | None,
    _number(
        _SOLVER,
        "FLOAT",
        "Seconds of basin hopping, a search for a low minimum, before the best is fitted to all "
        "data.",
    ),
]
Seed = Annotated[int, _number(_SOLVER, "INT", "Seed of the random starts.", least=0)]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keep the state of the fit here.  If it is there already, the fit continues from it, "
        "as if it had never stopped.",
        rich_help_panel=_SOLVER,
    ),
]

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
        help="Print the content of the JSON file, and nothing else, to standard output.",
        rich_help_panel=_OUTPUT,
    ),
]
NoReport = Annotated[
    bool, typer.Option("--no-report", help="Omit report.html.", rich_help_panel=_OUTPUT)
]


def as_ranks(text: str | None) -> tuple[int, ...] | None:
    """'16' or '16,8' as numbers.

    Raises:
        ValueError: anything else.
    """
    if text is None:
        return None
    try:
        ranks = tuple(int(part) for part in text.split(","))
    except ValueError:
        ranks = ()
    if len(ranks) not in (1, 2) or min(ranks) < 1:
        raise ValueError(
            "--ranks must be a number of at least 1, or two with a comma between them for queries "
            f"and keys and for values, such as 16,8; found {text!r}."
        )
    return ranks


def as_names(text: str | None) -> list[str]:
    """'W_Q,b_Q' as names."""
    return [] if text is None else [name.strip() for name in text.split(",") if name.strip()]


def require_kind(
    kind: str,
    of_layers: Mapping[str, object],
    of_data: Mapping[str, object],
    of_softmax: Mapping[str, object],
) -> None:
    """Raise ValueError for options (by name, None where not given) that --kind does not go with.

    of_layers: for layers alone.  of_data: for sequences of tokens, which one softmax has not.
    of_softmax: for one softmax alone.
    """
    refused = {} if kind == "layer" else dict(of_layers)
    refused |= of_data if kind == "softmax" else of_softmax
    for name, value in refused.items():
        if value is not None:
            raise ValueError(f"{name} does not go with --kind {kind}.")
