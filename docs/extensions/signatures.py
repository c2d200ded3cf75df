"""Signatures with types that can be read, and the dashes after the names of parameters."""

import re
from typing import Any

from docutils import nodes
from sphinx.util.inspect import TypeAliasForwardRef

_PRIVATE = re.compile(r", _\w+: .*(?=\)$)")


def _without_private(
    app: Any,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    arguments: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """The signature without private fields, which come last."""
    return arguments and _PRIVATE.sub("", arguments), returned


def _dashes(app: Any, doctree: nodes.document) -> None:
    """Make a dash of the two hyphens that sphinx sets; smartquotes would, but are off."""
    for text in list(doctree.findall(nodes.Text)):
        if text.startswith(" -- "):
            text.parent.replace(text, nodes.Text(" \N{EN DASH} " + text[4:]))


def setup(app: Any) -> dict[str, Any]:
    """Register both, and the printing of aliases."""
    # Within unions, sphinx prints the representation of what stands for an alias.
    TypeAliasForwardRef.__repr__ = lambda self: self.name
    app.connect("autodoc-process-signature", _without_private)
    app.connect("doctree-read", _dashes)
    return {"parallel_read_safe": True}
