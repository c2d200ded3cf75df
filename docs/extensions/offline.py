"""The site needs no network: a page that loads something from elsewhere fails the build."""

import re
from pathlib import Path
from typing import Any

_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*?\bsrc=["']((?:https?:)?//[^"']+)"""
    r"""|<link\b(?=[^>]*\brel=["'](?:stylesheet|preload|icon))[^>]*?\bhref=["']((?:https?:)?//[^"']+)"""
)


def loaded_from_elsewhere(html: str) -> list[str]:
    """Addresses that a page loads; links to follow do not count."""
    return [first or second for first, second in _LOADED.findall(html)]


def _check(app: Any, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    for page in sorted(Path(app.outdir).rglob("*.html")):
        addresses = loaded_from_elsewhere(page.read_text())
        if addresses:
            raise ValueError(f"{page.relative_to(app.outdir)} loads {', '.join(addresses)}.")


def setup(app: Any) -> dict[str, Any]:
    """Run when all pages are written."""
    app.connect("build-finished", _check)
    return {"parallel_read_safe": True}
