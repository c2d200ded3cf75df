"""The peak memory of the matrix-free method: predicted, and what is alive at most."""

import gc
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import newtention as nt
from newtention.memory import WORKSPACE, LiveBytes
from newtention.newton import footprint
from newtention.newton.footprint import matrix_free_bytes
from newtention.newton.matrix_free import Settings

pytestmark = pytest.mark.usefixtures("unchecked")

WITHIN = 0.25
"""Predictions were 0.83 to 1.15 of the peaks."""
LIVE_WITHIN = 0.15


def layer_and_problem(kind, tokens):
    """A layer with random weights, and sequences of random tokens."""
    g = torch.Generator().manual_seed(0)
    dtype = torch.float64 if kind == "bilinear" else torch.float32

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    def projections(heads, groups, width, e):
        return dict(
            W_Q=normal(heads, width, e) / width**0.5,
            W_K=normal(groups, width, e) / width**0.5,
            W_V=normal(groups, width, e) / width**0.5,
            W_O=normal(heads, e, width) / (heads * e) ** 0.5,
            b_O=normal(width),
            scale=e**-0.5,
        )

    mean, mask = 30, None
    if kind == "sentences":  # many short sequences, as of a sentence encoder
        layer = nt.FactoredAttention(**projections(12, 12, 384, 16))
    elif kind == "wide":  # the weights and their factors count, too
        layer = nt.FactoredAttention(**projections(16, 16, 1024, 64))
    elif kind == "language":  # long causal sequences, rotary positions, grouped keys
        layer = nt.FactoredAttention(**projections(9, 3, 576, 64), rotary=nt.Rotary(10000.0))
        mean, mask = 400, "causal"
    else:
        layer = nt.BilinearAttention(normal(4, 96, 96) / 96, normal(4, 96, 96) / 10)
        mean = 100
    lengths = torch.randint(mean // 2, 2 * mean, (tokens // mean,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    width = layer.parametrisation.blocks[0].shape[1]
    A, B = normal(int(offsets[-1]), width), normal(int(offsets[-1]), width)
    return layer, nt.AttentionProblem.from_ragged(A, B, offsets=offsets, mask=mask)


def run(kind, tokens, cached, share, measure=None):
    """Solve with two iterations; `measure` wraps the call. Returns the prediction."""
    layer, problem = layer_and_problem(kind, tokens)
    cache = (1 << 40) if cached else 0
    fields = dict(cache_bytes=cache, curvature_share=share, max_products=6)
    settings = Settings(tol=1e-8, max_iter=2, **fields)
    predicted = matrix_free_bytes(problem, layer.parametrisation, 1, settings)
    options = nt.Options(**fields)
    with measure:
        nt.solve(problem, start=layer, method="newton-cg", max_iter=2, options=options)
    return predicted


class Resident:
    """How far the resident memory of this process rises, which has not been higher before."""

    def __enter__(self):
        import psutil

        gc.collect()
        self.before = psutil.Process().memory_info().rss

    def __exit__(self, *_):
        # Not ru_maxrss, which a child inherits from the process that starts it.
        status = Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in status if line.startswith("VmHWM"))
        self.peak = int(line.split()[1]) * 1024 - self.before


def main(kind, tokens, cached, share):
    """Print the measured and the predicted bytes."""
    from newtention import zoo

    torch.set_num_threads(1)
    nt.solve(zoo.planted(2, 8).problem, method="newton-cg", max_iter=1)  # load every library
    measure = Resident()
    predicted = run(kind, int(tokens), cached == "True", float(share), measure)
    print(measure.peak, predicted)


def full(*case):
    return pytest.param(case, marks=pytest.mark.full, id="-".join(map(str, case)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "case",
    [
        ("sentences", 3000, True, 1.0),
        full("sentences", 6000, True, 1.0),
        full("bilinear", 12000, True, 1.0),
        full("sentences", 20000, True, 1.0),
        full("sentences", 12000, False, 0.25),
        full("sentences", 12000, True, 0.25),
        full("language", 3000, False, 1.0),
        full("language", 3000, True, 1.0),
        full("wide", 2000, False, 1.0),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_resident_peak(case):
    command = f"from tests.unit.test_footprint import main; main(*{tuple(map(str, case))})"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True
    )
    used, predicted = map(int, done.stdout.split())
    assert used > 100 << 20
    assert abs(predicted - used) <= WITHIN * used, f"{predicted / used:.2f} of the peak"


@pytest.mark.parametrize(
    "case",
    [
        ("sentences", 2000, True, 1.0),
        full("sentences", 2000, False, 0.25),
        full("bilinear", 3000, True, 1.0),
        full("language", 2000, False, 1.0),
        full("wide", 600, False, 1.0),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_live_peak(case, monkeypatch):
    """Smaller tiles, so that there are many; a point kept alive too long shows here."""
    monkeypatch.setattr("newtention.chunks.TILE_ELEMENTS", 1 << 18)
    monkeypatch.setattr("newtention.chunks.Chunk.tiles.__defaults__", (1 << 18,))
    live = LiveBytes()
    monkeypatch.setattr(footprint, "ALLOCATOR", 1.0)
    predicted = run(*case, live) - WORKSPACE
    assert abs(predicted - live.peak) <= LIVE_WITHIN * live.peak, f"{predicted / live.peak:.2f}"


def test_live_bytes_are_counted():
    with LiveBytes() as live:
        a = torch.zeros(1000, dtype=torch.float64)
        view, b = a[:10], a + 1
        assert live.now == live.peak == 16000
        del a
        assert live.now == 16000  # the view holds it
        del view
        assert live.now == 8000
        b += torch.ones(250, dtype=torch.float32).double().repeat(4)
        assert live.peak == 8000 + 2000 + 8000 or live.peak == 8000 + 1000 + 2000 + 8000
        assert live.restart() == live.now == live.peak == 8000


def test_path_points_are_counted():
    from newtention.linsolve.cg import Rule, points_kept, truncated_cg

    H = torch.linspace(1, 1000, 60, dtype=torch.float64)
    for limit in (1, 2, 7, 30, 55):
        path = truncated_cg(
            lambda v: H * v, H.sqrt(), lambda v: v, torch.inf, Rule(0.0, torch.inf, limit)
        )
        assert len(path.points) == points_kept(limit)


@pytest.mark.parametrize("kind", ["sentences", "bilinear", "language"])
@pytest.mark.parametrize("cache", [0, 1 << 40])
def test_the_estimate_for_small_problems_is_generous(kind, cache, monkeypatch):
    layer, problem = layer_and_problem(kind, 450)
    shape, settings = layer.parametrisation, Settings(tol=1e-8, max_iter=2, cache_bytes=cache)
    monkeypatch.setattr(footprint, "SMALL", math.inf)
    estimate = matrix_free_bytes(problem, shape, 1, settings)
    monkeypatch.setattr(footprint, "SMALL", 0)
    assert estimate >= matrix_free_bytes(problem, shape, 1, settings)
