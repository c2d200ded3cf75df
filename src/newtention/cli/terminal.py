"""Printing that survives a closed pipe, and errors of our own."""

from __future__ import annotations

import os
import sys
from typing import TextIO


class ReportFailedError(Exception):
    """The report could not be made from a valid result: a bug, whatever its cause says."""


def say(text: str = "") -> None:
    """Print a line to stdout; a reader that has gone (``| head``) must not end a run."""
    _print(text, sys.stdout)


def complain(text: str) -> None:
    """Print a line to stderr."""
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
