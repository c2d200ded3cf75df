"""Result folders of commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def removed_on_failure(folder: Path, created: bool) -> Iterator[None]:
    """Remove a folder that was made for a result which is not to come, if it is still empty."""
    try:
        yield
    except BaseException:
        if created:
            with suppress(OSError):
                folder.rmdir()
        raise
