"""Resident memory of this process, now and at its peak.

No import of torch: a process that has yet to choose its processor may ask.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import psutil


def resident_bytes() -> int:
    """Memory of the process now."""
    return psutil.Process().memory_info().rss


def forget_peak() -> None:
    """Let the peak begin here, where the system can: what came before belongs to nobody."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Highest resident memory.

    Of Linux's two counts the one that a child does not inherit from the process that starts it.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
