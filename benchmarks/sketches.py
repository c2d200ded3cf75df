"""Sketches: what TensorSRHT and its Walsh-Hadamard transform take beside moving their bytes.

The bound of a transform is one copy of its array, read and written once; that of a TensorSRHT is
the first touch of its output.  Sizes, distortions and times of all kinds on real data:
`newtention bench sketches`.
"""

from __future__ import annotations

import torch

from benchmarks.harness import Size, alternate, ratios, show, spread, table
from newtention import sketch
from newtention.memory import LiveBytes
from newtention.sketch.hadamard import transform

THREADS = 1
SETTINGS = {
    "toy": ((32, 4, 64), 1),
    "quick": ((4096, 64, 8192), 5),
    "full": ((4096, 64, 8192), 21),
}
TRANSFORM, CHECKED, COPY = "transform", "walsh_hadamard", "copy"
APPLY, TOUCH = "apply", "zeros"


def run(size: Size) -> dict:
    """Times, and the peak of live memory over the output."""
    (n, d, rows), repeats = SETTINGS[size]
    g = torch.Generator().manual_seed(0)
    A1, A2 = (torch.randn(n, d, generator=g, dtype=torch.float64) for _ in range(2))
    target = torch.empty_like(A1)
    transforms = {
        TRANSFORM: lambda: transform(A1),
        CHECKED: lambda: sketch.walsh_hadamard(A1),
        COPY: lambda: target.copy_(A1),
    }
    distribution = sketch.TensorSRHT(n, n, rows)
    with LiveBytes() as live:
        out = distribution.apply(A1, A2)
    peak = live.peak / (out.numel() * out.element_size())
    shape = tuple(out.shape)
    del out
    sketches = {
        APPLY: lambda: distribution.apply(A1, A2),
        TOUCH: lambda: torch.zeros(shape, dtype=torch.float64),
    }
    found = {}
    for name, rivals, base in (("hadamard", transforms, COPY), ("tensor-srht", sketches, TOUCH)):
        samples = alternate(rivals, repeats, patience=5.0)
        found[name] = {
            "seconds": {rival: spread(times) for rival, times in samples.items()},
            "ratios": ratios(samples, base),
        }
    return {"n": n, "d": d, "rows": rows, "peak_over_output": peak, **found}


def report(data: dict) -> str:
    """The table and the memory."""
    lines = []
    for name in ("hadamard", "tensor-srht"):
        for rival, times in data[name]["seconds"].items():
            ratio = data[name]["ratios"].get(rival, {"median": 1.0})
            lines.append([name, rival, show(1e3 * times["median"]), show(ratio["median"])])
    return "\n".join(
        [
            f"{data['n']} x {data['d']}, float64, {data['rows']} rows:",
            table(["work", "way", "ms", "over the bound"], lines),
            f"live memory of apply at its peak, over its output: {data['peak_over_output']:.3f}",
        ]
    )
