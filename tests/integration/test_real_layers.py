"""Whole layers of real models (data/), refitted from their own weights plus noise."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import newtention as nt

DATA = Path(__file__).parents[2] / "data"


def in_float64(layer):
    blocks = layer.parametrisation.blocks
    return replace(layer, **{b.name: getattr(layer, b.name).double() for b in blocks})


def noisy(layer, size=0.05, seed=0):
    """Every block with Gaussian noise of `size` times its root mean square."""
    g = torch.Generator().manual_seed(seed)
    blocks = {}
    for block in layer.parametrisation.blocks:
        t = getattr(layer, block.name)
        noise = torch.randn(t.shape, generator=g, dtype=torch.float64)
        blocks[block.name] = t + size * t.square().mean().sqrt() * noise
    return replace(layer, **blocks)


def whole_layer(name, **settings):
    """A layer, and the problem whose targets are its own outputs, so that the least loss is 0."""
    file = DATA / f"{name}.safetensors"
    arrays = load_file(file)
    layer = in_float64(nt.load_layer(file, rotary=settings.pop("rotary", None)))
    x = arrays["hidden"].double()

    def problem(targets):
        return nt.AttentionProblem.from_ragged(x, targets, offsets=arrays["offsets"], **settings)

    return layer, problem(nt.predict(problem(torch.zeros_like(x)), layer))


def lighterglue(direction):
    file = DATA / "lighterglue_cross.safetensors"
    a = {name: t.double() for name, t in load_file(file).items()}
    layer = in_float64(nt.load_layer(file, heads=1, prefix="layer2."))
    queries, keys = (a[f"layer2.X{i}"] for i in (direction, 1 - direction))
    return layer, nt.AttentionProblem(queries, keys, keys, a[f"layer2.O{direction}"])


@pytest.mark.parametrize("direction", [0, 1])
def test_lighterglue_with_logits_of_500(direction):
    layer, problem = lighterglue(direction)
    solution = nt.solve(problem, start=noisy(layer), max_iter=8)
    losses = solution.history.column("loss")
    assert all(math.isfinite(loss) for loss in losses)
    assert all(b <= a for a, b in pairwise(losses))
    assert losses[-1] < 0.5 * losses[0]


CASES = {
    "minilm_layer3": {},
    "smollm2_layer14": {"rotary": nt.Rotary(100_000.0), "mask": "causal"},
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_returns_from_five_percent_noise(name):
    layer, problem = whole_layer(name, **CASES[name])
    energy = float(problem.target_energy())

    def enough(progress):
        if progress.record.loss < 1e-6 * energy:
            raise StopIteration

    start = noisy(layer)
    assert nt.loss(problem, start) > 1e-2 * energy
    solution = nt.solve(problem, start=start, max_iter=30, callback=enough)
    assert solution.relative_loss < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("direction", [0, 1])
def test_lighterglue_returns_too(direction):
    layer, problem = lighterglue(direction)
    solution = nt.solve(problem, start=noisy(layer), max_iter=60)
    assert solution.relative_loss < 1e-6
