"""Printing that survives a closed pipe, and errors of our own."""

from __future__ import annotations

import os
import sys


class ReportFailedError(Exception):
    """The report could not be made from a valid result: a bug, whatever its cause says."""


def say(text: str = "", *, error: bool = False) -> None:
    """Print a line; a reader that has gone (``| head``) must not end a run."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # What is still buffered would fail again when Python exits.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def complain(text: str) -> None:
    """Print a line to stderr."""
    say(text, error=True)
