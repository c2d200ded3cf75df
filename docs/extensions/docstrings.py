"""Docstrings as reStructuredText.

Ours are Google style and plain text: formulas are full of bars, stars and trailing underscores, and
classes describe their fields one a line, as ``name: meaning``.
"""

import re
from typing import Any

_SECTION = re.compile(r"^(Args|Returns|Raises|Warns|Yields|Examples?):$")
_FIELD = re.compile(r"^(\w+(?:, \w+)*): (.*)$")
_NEXT = re.compile(r"(?<=\.)  (?=\w+(?:, \w+)*: )")
_PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")
_CODE = re.compile(r"(``.*?``|`.*?`)")


def escaped(line: str) -> str:
    """The line with accidental markup made plain, and pages as links."""
    parts = _CODE.split(line)
    for i in range(0, len(parts), 2):
        plain = re.sub(r"[*|]|_(?=\W|$)", r"\\\g<0>", parts[i])
        parts[i] = _PAGE.sub(r":doc:`/\1`", plain)
    return "".join(parts)


def converted(lines: list[str], names: set[str]) -> list[str]:
    """Fields as a list, indented blocks as literal ones, all other text escaped.

    names: what counts as a field.
    """
    out: list[str] = []
    lines = [part for line in lines for part in _fields(line, names)]
    section = literal = item = example = False
    for i, line in enumerate(lines):
        indented = line.startswith("    ")
        found = _FIELD.match(line)
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>>"))
        if example or (literal and (indented or not line)):
            out.append(line)
        elif indented and not section and not item and not lines[i - 1].strip():
            literal = True
            out += ["::", "", line]
        elif found and _named(line, names):
            literal, section = False, False
            if not item:
                out.append("")
            item = True
            named = ", ".join(f"**{name}**" for name in found[1].split(", "))
            out.append(f"* {named}: {escaped(found[2])}")
        elif item and line and (indented or not _SECTION.match(line)):
            out.append("  " + escaped(line.strip()))
        else:
            literal = False
            if item and line:
                out.append("")
            item = False
            if line and not indented:
                section = bool(_SECTION.match(line))
            out.append(escaped(line))
    return out


def _fields(line: str, names: set[str]) -> list[str]:
    """The fields that share a line, one each; any other line as it is."""
    parts = _NEXT.split(line)
    return parts if all(_named(part, names) for part in parts) else [line]


def _named(line: str, names: set[str]) -> bool:
    """Whether the line begins a field, or several that share a meaning."""
    found = _FIELD.match(line)
    return found is not None and all(name in names for name in found[1].split(", "))


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    names = set()
    if what == "class":
        for kind in obj.__mro__:
            names |= set(vars(kind).get("__annotations__", {})) | set(vars(kind))
    lines[:] = converted(lines, names)
    if what in ("property", "attribute", "data"):
        lines[:0] = ["..", ""]  # napoleon would take what is before a colon for a type


def _skip(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples: the class describes them."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Any) -> dict[str, Any]:
    """Run before napoleon, which turns the sections into fields."""
    app.connect("autodoc-process-docstring", _process, priority=400)
    app.connect("autodoc-skip-member", _skip)
    return {"parallel_read_safe": True}
