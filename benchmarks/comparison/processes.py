"""A run in a process of its own, its threads fixed before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.comparison.worker import Request, identity

ROOT = Path(__file__).parents[2]
GRACE = 90.0
"""Seconds beyond its limit after which a process is ended from outside: it begins, loads its data,
warms up, and may be in the middle of a long step."""


def in_process(request: Request, threads: int) -> dict[str, Any]:
    """Run a request in a process of its own; whatever becomes of it is a record."""
    variables = dict.fromkeys(environment.THREAD_VARIABLES, str(threads))
    # XLA takes its threads from the machine unless told otherwise.
    single = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"} if threads == 1 else {}
    limit = request.limit + GRACE
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        command = [sys.executable, "-m", "benchmarks.comparison.worker"]
        try:
            ended = subprocess.run(
                [*command, json.dumps(asdict(request)), str(file)],
                env=os.environ | variables | single | {"OMP_WAIT_POLICY": "PASSIVE"},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            why = f"The process was ended after {limit:.0f} s, {GRACE:.0f} s beyond its limit."
            return identity(request) | {"status": "killed", "message": why}
        if file.exists():
            return json.loads(file.read_text())
    return identity(request) | failure(ended.returncode, ended.stderr)


def failure(code: int, stderr: str) -> dict[str, Any]:
    """Status of a process that left no record."""
    if code < 0:
        why = f"The process was ended by signal {-code}"
        why += ", as the system does when memory runs out." if code == -9 else "."
        return {"status": "out of memory" if code == -9 else "killed", "message": why}
    last = stderr.strip().splitlines()
    return {"status": "error", "message": last[-1] if last else f"Exit status {code}."}
