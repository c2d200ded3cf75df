"""The problems of the comparison.

Everybody minimises the same loss from the same start.  "random" starts are what `solve` does on its
own, and methods end in different local minima; "near" ones are the plant disturbed by ten per cent,
so that everybody should find the same minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

import newtention as nt
from benchmarks import minilm
from benchmarks.comparison.tasks import LayerTask, RegressionTask
from benchmarks.harness import Size
from newtention import zoo

Kind = Literal["planted", "head", "layer"]

NOISE = 0.1
NEAR = 0.1
RANK = 16
"""Of the layer's heads after truncation; the model has 32."""
GTOLS = (1e-4, 1e-6, 1e-8)
"""Norms of the gradient to reach; the last is the goal.  Layers in float32 have none."""


@dataclass(frozen=True)
class Problem:
    """A problem of the comparison.

    name: of the command line and the records.  title: for the page.
    make: the task of a seed and a size.
    seeds: how many, by size.  threads: of every run; None takes what the environment says.
    seconds: of every run, by size; None: multiples of our own time (`race`).
    """

    name: str
    title: str
    kind: Kind
    make: Callable[[int, Size], RegressionTask | LayerTask]
    seeds: Mapping[Size, int]
    threads: int | None = None
    seconds: Mapping[Size, float] | None = None

    @property
    def gtols(self) -> tuple[float, ...]:
        """Norms of the gradient at which clocks are read."""
        return () if self.kind == "layer" else GTOLS


def planted(d: int, n: int, tokens: str, start: str, seed: int, size: Size) -> RegressionTask:
    """A planted problem of the zoo with its start."""
    specimen = zoo.planted(d, n, noise=NOISE, tokens=tokens, seed=seed)
    if start == "random":
        return RegressionTask.of(specimen.problem, seed)
    X = specimen.X
    assert X is not None
    generator = torch.Generator().manual_seed(seed)
    bump = torch.randn(X.shape, generator=generator, dtype=X.dtype)
    return RegressionTask.of(specimen.problem, seed, X + NEAR * X.norm() / bump.norm() * bump)


def head(seed: int, size: Size) -> RegressionTask:
    """The packaged attention head: all of its data, 2048 unknowns."""
    tokens, targets, offsets = zoo.packaged_head()
    problem, single = (
        nt.AttentionProblem.from_ragged(
            tokens.to(dtype), targets.to(dtype), offsets=torch.tensor(offsets)
        )
        for dtype in (torch.float64, torch.float32)
    )
    return replace(RegressionTask.of(problem, seed), single=single)


def layer(seed: int, size: Size) -> LayerTask:
    """A whole layer of MiniLM from its activation-aware truncation; the seed draws sentences."""
    data = minilm.load(minilm.SENTENCES[size], seed)
    return LayerTask(data, nt.truncate(minilm.problems(data)[0], data.layer, RANK))


def _planted(d: int, n: int, tokens: str, start: str, quick: int, full: int) -> Problem:
    return Problem(
        name=f"d{d}-{tokens}-{start}",
        title=f"planted, d {d}, n {n}, {tokens} tokens, {start} start",
        kind="planted",
        make=partial(planted, d, n, tokens, start),
        seeds={"toy": 1, "quick": quick, "full": full},
        threads=1,
    )


TOY = _planted(2, 16, "real", "random", 1, 1)
"""For tests, and to load and compile what a method uses before its clock is set."""

PROBLEMS = {
    problem.name: problem
    for problem in (
        _planted(8, 256, "real", "random", 2, 2),
        _planted(8, 256, "real", "near", 1, 1),
        _planted(8, 256, "clustered", "random", 0, 1),
        _planted(16, 256, "real", "random", 0, 1),
        _planted(16, 256, "clustered", "near", 0, 1),
        Problem(
            name="head",
            title="the packaged MiniLM head, 1204 tokens in 40 sentences, d 32",
            kind="head",
            make=head,
            seeds={"toy": 1, "quick": 1, "full": 2},
        ),
        Problem(
            name="layer",
            title="layer 3 of MiniLM, 12 heads, rank 32 to 16, 1400 sentences",
            kind="layer",
            make=layer,
            seeds={"toy": 1, "quick": 0, "full": 1},
            seconds={"toy": 0.5, "quick": 20.0, "full": 60.0},
        ),
    )
}


def find(name: str) -> Problem:
    """By name; the toy as well."""
    return TOY if name == TOY.name else PROBLEMS[name]
