"""Documents in JSON, which can hold neither NaN nor infinity: they are written as null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from newtention.solution import History, Record


def with_null(value: Any) -> Any:
    """The same plain data, null in place of NaN and infinity."""
    if isinstance(value, Mapping):
        return {name: with_null(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [with_null(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def without_null(value: Any, unknown: float = math.nan) -> Any:
    """A value that was read, `unknown` in place of null."""
    return unknown if value is None else value


def as_history(rows: Sequence[Mapping[str, Any]], unknown: float = math.nan) -> History:
    """Records that were read, `unknown` in place of null; a radius was then infinite.

    Raises:
        KeyError, TypeError: a field that there is not.
    """
    optional = {"ratio", "validation", "bound"}
    lost: dict[str, Any] = {f.name: None if f.name in optional else unknown for f in fields(Record)}
    lost["radius"] = math.inf
    return History(
        Record(**{name: lost[name] if v is None else v for name, v in row.items()}) for row in rows
    )


def as_text(document: Mapping[str, Any]) -> bytes:
    """The content of a file; ValueError for NaN or infinity."""
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def read_document(path: Path, name: str, version: int, hint: str = "") -> dict[str, Any]:
    """A file of JSON that is of this format and version; `hint` ends the sentence if it is not.

    Raises:
        FileNotFoundError, OSError: it is not there, or cannot be read.
        ValueError: it is something else.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}){hint}.") from error
    if not isinstance(document, dict) or document.get("format") != name:
        raise ValueError(f"{path} was not written by Newtention{hint}.")
    if document.get("format_version") != version:
        raise ValueError(
            f"{path} has format version {document.get('format_version')}; this version of "
            f"Newtention reads {version}{hint}."
        )
    return document
