"""Files that are either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".newtention-"
"""Start of the names of files that are being written."""


def write_atomically(contents: Mapping[Path, bytes]) -> None:
    """Write all files under temporary names, then move each into place, in the order given.

    Raises:
        OSError: a file cannot be written; no file has been touched unless a move failed.
    """
    staged: dict[Path, Path] = {}
    try:
        for target, data in contents.items():
            temporary = target.parent / f"{TEMPORARY}{os.getpid()}-{target.name}"
            staged[temporary] = target
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for temporary, target in staged.items():
            os.replace(temporary, target)
    finally:
        for temporary in staged:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
