"""Where a run took place: versions, processor, threads, load."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def set_threads() -> int:
    """Give torch the number of threads that the BLAS libraries were given.

    Raises:
        SystemExit: the variables are missing or disagree; by now it is too late to set them.
    """
    values = {os.environ.get(name, "") for name in THREAD_VARIABLES}
    if len(values) != 1 or not (threads := values.pop()).isdigit() or threads == "0":
        names = ", ".join(THREAD_VARIABLES)
        raise SystemExit(
            f"Set {names} to one positive number before Python starts, or use `make bench`: "
            "uncapped BLAS threads make scipy's methods many times slower, which would flatter us."
        )
    torch.set_num_threads(int(threads))
    return int(threads)


def describe() -> dict[str, object]:
    """Everything that a reader needs to judge the figures."""
    names = ("newtention", "torch", "numpy", "scipy", "pytorch-minimize")
    return {
        "versions": {"python": platform.python_version()} | {n: version(n) for n in names},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "variables": {n: os.environ.get(n) for n in (*THREAD_VARIABLES, "OMP_WAIT_POLICY")},
        "load_average": list(os.getloadavg()),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
