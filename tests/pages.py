"""Pages whose examples are run: their fenced blocks, and what they print."""

import contextlib
import io
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def block(page, language):
    """The page's only fenced block in the language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)
    return found


def run_example(page):
    """The names that the page's Python block defines, and what it prints."""
    names = {"__name__": page.stem}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block(page, "python"), str(page), "exec"), names)
    return names, printed.getvalue()
