"""Result folders of commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from newtention.io.results import PREDICTIONS


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


def predictions_path(folder: Path, out: Path | None, source: str) -> Path:
    """Where predictions go: the file asked for, or one in the result folder.

    Raises:
        ValueError: it is the file of the data.
    """
    path = out or folder / PREDICTIONS
    if path.exists() and path.resolve() == Path(source).resolve():
        raise ValueError(f"{path} holds the data; choose another file for the predictions.")
    return path
