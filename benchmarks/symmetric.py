"""Whether packing symmetric halves pays in the Hessian's dominant product, KR(A1, A1)^T M.

Both sides are symmetric in a pair of indices, so a quarter of the product suffices, at the price of
gathering the halves and spreading the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.harness import Size, alternate, ratios, show, spread, table

PACKED = "packed"
WIDE = "full width"
WIDTHS = {"toy": (2, 3), "quick": (4, 8, 16, 32), "full": (4, 8, 12, 16, 24, 32, 48, 64)}
ROWS = {"toy": 16, "quick": 256, "full": 1024}
REPEATS = {"toy": 1, "quick": 5, "full": 11}


def run(size: Size) -> dict:
    """Seconds of both ways from A1 (n, d) and M (n, d, d) to the (d d) x (d d) block."""
    cases = []
    n = ROWS[size]
    for d in WIDTHS[size]:
        generator = torch.Generator().manual_seed(0)
        A1 = torch.randn(n, d, generator=generator, dtype=torch.float64)
        M = torch.randn(n, d, d, generator=generator, dtype=torch.float64)
        M = M + M.mT
        i, j = torch.triu_indices(d, d)
        place = torch.empty(d, d, dtype=torch.int64)
        place[i, j] = place[j, i] = torch.arange(len(i))
        place = place.flatten()

        def packed(A1=A1, M=M, i=i, j=j, place=place, d=d) -> Tensor:
            half = (A1[:, i] * A1[:, j]).T @ M[:, i, j]
            rows = half.index_select(0, place).index_select(1, place)
            return rows.view(d, d, d, d).permute(0, 2, 1, 3).reshape(d * d, d * d)

        def wide(A1=A1, M=M, d=d) -> Tensor:
            KR = (A1[:, :, None] * A1[:, None, :]).flatten(1)
            return (KR.T @ M.flatten(1)).view(d, d, d, d).permute(0, 2, 1, 3).reshape(d * d, -1)

        assert torch.allclose(packed(), wide(), rtol=1e-10, atol=1e-8)
        samples = alternate({PACKED: packed, WIDE: wide}, REPEATS[size], patience=5.0)
        cases.append(
            {
                "n": n,
                "d": d,
                "seconds": {name: spread(times) for name, times in samples.items()},
                "ratios": ratios(samples, PACKED),
            }
        )
    return {"cases": cases}


def report(data: dict) -> str:
    """The table."""
    rows = []
    for case in data["cases"]:
        ratio = case["ratios"][WIDE]
        rows.append(
            [case["n"], case["d"]]
            + [show(1e3 * case["seconds"][name]["median"]) for name in (PACKED, WIDE)]
            + [show(ratio[k]) for k in ("median", "lower", "upper")]
        )
    return table(["n", "d", "packed ms", "full width ms", "ratio", "25 %", "75 %"], rows)
