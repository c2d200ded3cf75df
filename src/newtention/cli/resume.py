"""The checkpoint of a fit: where it may lie, and what continuing from it looks like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from newtention.checkpoint import read_document
from newtention.cli.terminal import say
from newtention.io.results import DERIVED, REFERENCE, RESULT, START, WEIGHTS
from newtention.run import Progress


class Resume:
    """A checkpoint as the command sees it.

    beside: its name, if it lies in the result folder.
    place: its absolute path, for result.json.
    iteration: where the fit continued, once it does; None if it begins.
    """

    def __init__(self, path: Path | None, folder: Path) -> None:
        """Look at the file.

        Raises:
            ValueError: it is damaged, not a checkpoint, or has the name of a file of the result.
            OSError: it cannot be read.
        """
        self.path = path
        self.beside: tuple[str, ...] = ()
        self.place: str | None = None
        self.iteration: int | None = None
        self._found = False
        if path is None:
            return
        self.place = str(path.absolute())
        inside = path.resolve().parent == folder.resolve()
        if inside:
            self.beside = (path.name,)
        if inside and path.name in (WEIGHTS, START, REFERENCE, RESULT, *DERIVED):
            raise ValueError(f"{path} is for the result itself; give --checkpoint another file.")
        if inside and not folder.exists():
            return
        self._found = read_document(path) is not None

    def announcing(
        self, callback: Callable[[Progress], object], silent: bool
    ) -> Callable[[Progress], object]:
        """The callback, with a line before its first call that says where the fit continues.

        Not earlier: only now is it known that the checkpoint belongs to this fit.
        """
        if not self._found:
            return callback

        def call(progress: Progress) -> object:
            if self.iteration is None:
                self.iteration = progress.iteration
                if not silent:
                    say(f"Continuing at iteration {progress.iteration} from {self.path}")
            return callback(progress)

        return call
