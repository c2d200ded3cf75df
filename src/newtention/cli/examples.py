"""`newtention examples`: what data come with the package."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from newtention.examples import EXAMPLES
from newtention.io import open_arrays


def examples() -> None:
    """List the packaged example data, with the command that fits each.

    Nothing is downloaded; the files are part of the installation.
    """
    console = Console(highlight=False)
    for example in EXAMPLES.values():
        file = open_arrays(f"example:{example.name}")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        for name, info in sorted(file.arrays.items()):
            table.add_row(name, str(info))
        console.print(f"[bold]example:{example.name}[/bold]")
        console.print(example.description, markup=False)
        console.print(table)
        # One line, whatever the width, so that it can be copied.
        console.print(
            f"  newtention fit example:{example.name} --out result --ridge {example.ridge:g}",
            soft_wrap=True,
        )
