"""`newtention bench`: what the methods of the library achieve on packaged data."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from newtention import sketch
from newtention.cli import options
from newtention.cli.progress import busy, terminal
from newtention.cli.terminal import say
from newtention.examples import KEYPOINTS, find_example
from newtention.files import write_atomically
from newtention.sketch import quality

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

SIZES = (64, 128, 256, 512, 1024)
"""Rows of the sketches that are drawn."""
LARGEST = 256
"""Rows of a factor: as many keypoints as there are."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#67707b")
"""Okabe and Ito's, one for each kind; grey for the Gaussian sketch, the oracle."""

bench = typer.Typer(no_args_is_help=True, help="Measure methods of the library on packaged data.")


@bench.callback()
def _root() -> None:
    """Measure methods of the library on packaged data."""


@bench.command("sketches")
def sketches(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Write sketches.json and the chart sketches.png there, replacing old ones.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=8, max=LARGEST, help="Rows of each factor.")] = 128,
    columns: Annotated[int, typer.Option(min=1, max=16, help="Columns of each factor.")] = 4,
    epsilon: Annotated[float, typer.Option(help="Distortion allowed, between 0 and 1.")] = 0.5,
    delta: Annotated[float, typer.Option(help="Rate of failure allowed, between 0 and 1.")] = 0.05,
    draws: Annotated[int, typer.Option(min=1, help="Sketches drawn of each size.")] = 100,
    as_json: options.AsJson = False,
) -> None:
    """Compare the kinds of sketch of a Kronecker product A1 (x) A2.

    On tokens of a sentence encoder, queries and keys of a keypoint matcher, and two coherent worst
    cases: the rows that each kind needs to keep all eigenvalues of the sketched Gram matrix within
    1 +- epsilon of the true ones, by formula and as measured; the distortion at several sizes; and
    the time.  Seeds are fixed: all but the times comes out the same again.

    [bold]Examples[/bold]

    [cyan]newtention bench sketches[/cyan]

    [cyan]newtention bench sketches --rows 256 --columns 6 --out sketches[/cyan]
    """
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < value < 1:
            raise typer.BadParameter(
                f"must lie between 0 and 1; found {value:g}.", param_hint=f"--{name}"
            )
    if columns > rows // 2:
        raise typer.BadParameter(
            f"at most half of --rows, {rows // 2}; found {columns}.", param_hint="--columns"
        )
    if out is not None:
        _prepare(out)
    results: dict[str, list[quality.Comparison]] = {}
    for name, (A1, A2) in cases(rows, columns).items():
        results[name] = []
        for kind in sketch.KINDS:
            with busy(f"{name}: {kind}"):
                results[name].append(
                    quality.compare(kind, A1, A2, SIZES, epsilon=epsilon, delta=delta, draws=draws)
                )
    record = {
        "format": "newtention-bench-sketches",
        "version": 1,
        "rows": rows,
        "columns": columns,
        "epsilon": epsilon,
        "delta": delta,
        "draws": draws,
        "cases": {name: [asdict(c) for c in kinds] for name, kinds in results.items()},
    }
    if as_json:
        say(json.dumps(record, indent=1))
    else:
        for name, kinds in results.items():
            _show(name, kinds)
        say(_meaning(rows * rows, epsilon, delta, draws))
    if out is not None:
        image = io.BytesIO()
        chart(results, epsilon).savefig(image, format="png", dpi=150)
        text = json.dumps(record, indent=1).encode()
        write_atomically({out / "sketches.json": text, out / "sketches.png": image.getvalue()})
        if not as_json:
            say(f"Written to {out / 'sketches.json'} and {out / 'sketches.png'}")


def cases(rows: int, columns: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Factors by name, float64, of so many rows and columns."""
    tokens = load_file(find_example("minilm-head").path)["tokens"].double()[:rows, :columns]
    points = {name: t.double() for name, t in load_file(KEYPOINTS).items()}
    W, b = points["to_qk_W"], points["to_qk_b"]
    queries, keys = (_leading(points[n] @ W + b, columns)[:rows] for n in ("queries", "keys"))
    huge, identical = quality.huge_row, quality.identical_rows
    return {
        "MiniLM tokens": (tokens, tokens),
        "LighterGlue queries and keys": (queries, keys),
        "one huge row": (huge(rows, columns, 0), huge(rows, columns, 1)),
        "identical rows": (identical(rows, columns, 0), identical(rows, columns, 1)),
    }


def _leading(A: torch.Tensor, columns: int) -> torch.Tensor:
    """A in its leading principal directions."""
    return A @ A.svd().V[:, :columns]


def _prepare(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file; expected a folder.")
    out.mkdir(parents=True, exist_ok=True)


def _show(name: str, kinds: list[quality.Comparison]) -> None:
    """Print the figures of a case whole: on a narrow terminal in two tables, elsewhere in one."""
    columns = _columns(kinds)
    table = _table(name, columns)
    console = terminal()
    if console is None or _width(table) <= console.width:
        tables = [table]
    else:
        tables = [_table(name, columns[:4]), _table("", [columns[0], *columns[4:]])]
    for table in tables:
        Console(highlight=False, width=_width(table)).print(table)


def _width(table: Table) -> int:
    """Characters of a line if nothing is cut."""
    return max(1, Console(width=1000).measure(table).maximum)


def _table(name: str, columns: list[tuple[str, list[str]]]) -> Table:
    table = Table(
        title=name or None, title_justify="left", title_style="bold", box=None, padding=(0, 1)
    )
    for i, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    return table


def _columns(kinds: list[quality.Comparison]) -> list[tuple[str, list[str]]]:
    """Headings and cells: the kind, three columns on sizes, and those on fixed sizes."""
    sizes, rates = [], []
    for c in kinds:
        sizes.append(str(c.formula) if c.transformed is None else f"{c.formula} ({c.transformed})")
        low, high = c.calibration.interval
        rates.append(f"{c.calibration.rate:.2f} ({low:.2f} to {high:.2f})")
    distortions = [
        (f"e({n})", [f"{c.measurements[i].distortion:.2f}" for c in kinds])
        for i, n in enumerate(SIZES)
    ]
    return [
        ("kind", [c.kind for c in kinds]),
        ("formula", sizes),
        ("calibrated", [str(c.calibration.size) for c in kinds]),
        ("rate of failure", rates),
        *distortions,
        (f"ms({SIZES[-1]})", [f"{1e3 * c.measurements[-1].seconds:.2g}" for c in kinds]),
    ]


def _meaning(product: int, epsilon: float, delta: float, draws: int) -> str:
    return (
        f"\nformula     rows proved to keep the distortion within {epsilon:g} but with probability "
        f"{delta:g},\n            for any data (in brackets: given the first draw's signs); often "
        f"more than the\n            {product} rows of A1 (x) A2 itself\n"
        f"calibrated  rows with which that was so on these data; rate and 95 % interval of "
        f"{draws} draws\ne(m)        median distortion with m rows; below 1 the rank is kept\n"
        f"ms(m)       milliseconds to draw a sketch of m rows and apply it\n"
    )


def chart(results: dict[str, list[quality.Comparison]], epsilon: float) -> Figure:
    """Median distortion against size, and against time, one row of panels per case."""
    from newtention import drawing

    fig = drawing.figure((drawing.WIDE, 2.3 * len(results) + 0.5))
    axes = fig.subplots(len(results), 2, squeeze=False, sharey="row")
    for (left, right), (name, kinds) in zip(axes, results.items(), strict=True):
        values = [m.distortion for c in kinds for m in c.measurements]
        for ax, text in ((left, name), (right, "")):
            drawing.panel(ax)
            drawing.title(ax, text)
            for c, colour in zip(kinds, COLOURS, strict=True):
                x = [m.size if ax is left else 1e3 * m.seconds for m in c.measurements]
                y = [m.distortion for m in c.measurements]
                ax.plot(x, y, color=colour, label=c.kind, lw=1.5, marker="o", ms=3, mew=0)
            _log_axis(ax, ax is left)
        drawing.log_scale(left, min(*values, epsilon), max(*values, epsilon))
        drawing.level(left, epsilon, f"epsilon {epsilon:g}")
        drawing.level(right, epsilon, "")
        drawing.axis_name(left.yaxis, "median distortion")
    drawing.axis_name(axes[-1, 0].xaxis, "rows of the sketch")
    drawing.axis_name(axes[-1, 1].xaxis, "milliseconds to draw and apply it")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", ncols=6, frameon=False, fontsize=9)
    return fig


def _log_axis(ax: Any, sizes: bool) -> None:
    """Powers of two for sizes, of ten for times."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    from newtention.drawing import number

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(SIZES) if sizes else LogLocator(numticks=8))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(float(x), 4)))
