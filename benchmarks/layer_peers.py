"""What a factored attention layer is refitted with today: truncated SVD, Adam, L-BFGS.

The optimisers minimise ||F - B||^2 / ||B||^2 over every weight and bias that the start has, in
float32, by autograd, for a given wall time.  Time stands still while they are judged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

import newtention as nt
from benchmarks.minilm import CHUNK, Batch, Tokens, batches, padded

RATES = (5e-4, 1e-3, 2e-3, 4e-3)
"""Peak learning rates to try with Adam: around the best of runs of 12 to 55 s at rank 16."""
BATCH = 512
"""Tokens in one of Adam's batches.  At rank 16, 12 s of one thread left the held-out loss at 0.0905
with 2048, 0.0853 with 1024, 0.0843 with 512 and 0.0839 with 256 (one run at one or two rates)."""
CLIP = 0.1
"""Largest norm of the gradient of the relative loss.  Together with `balanced` it improved the
0.0843 to 0.0822."""
WARM_UP = 0.03
"""Fraction of the time in which Adam's rate rises to its peak."""
JITTER = 0.2
"""Relative noise of the lengths that sentences are sorted by, so that no two epochs have the same
batches while the sentences of one batch are of nearly equal length."""
HISTORY = 20
LOOKS = 16
"""Judgements of a run, at a geometric series of times that ends with the run."""
FIRST_LOOK = 0.02
"""Time of the first, as a fraction of the whole."""
JUDGED = 350
"""Training sentences that a run is judged on."""


@dataclass(frozen=True)
class Outcome:
    """A run: relative losses (seconds, train, held out) on the way, and the best layer judged.

    The training loss is that of the judge's subset; the layer is the best by it.  A run that
    diverges ends there, with infinite losses.
    """

    trace: list[tuple[float, float, float]]
    layer: nt.FactoredAttention
    steps: int


class Student(nn.Module):
    """A layer as autograd sees it: queries, keys and values by one product."""

    def __init__(self, layer: nt.FactoredAttention) -> None:
        super().__init__()
        shape = layer.parametrisation
        if shape.rotary is not None or shape.kv_heads != shape.heads:
            raise ValueError("The peers know neither rotary positions nor grouped keys.")
        self.shape = shape
        # Copies, or the optimiser would move the start itself.
        parts = {
            b.name: torch.as_tensor(getattr(layer, b.name)).float().clone() for b in shape.blocks
        }
        rows = [parts[name].mT.flatten(0, 1) for name in ("W_Q", "W_K", "W_V")]
        self.qkv = nn.Parameter(torch.cat(rows))
        self.out = nn.Parameter(parts["W_O"].flatten(0, 1).T.contiguous())
        self.biases = nn.ParameterDict(
            {n: nn.Parameter(t.flatten()) for n, t in parts.items() if n[0] == "b"}
        )
        h = shape.heads
        self.sizes = [h * shape.e, h * shape.e, h * shape.f]

    def forward(
        self, x: Float[Tensor, "s n d"], real: Bool[Tensor, "s n"] | None
    ) -> Float[Tensor, "s n p"]:
        """The layer's output."""
        h = self.shape.heads
        bias = [
            self.biases[name] if name in self.biases else x.new_zeros(size)
            for name, size in zip(("b_Q", "b_K", "b_V"), self.sizes, strict=True)
        ]
        rows = functional.linear(x, self.qkv, torch.cat(bias))
        q, k, v = (t.unflatten(-1, (h, -1)).transpose(1, 2) for t in rows.split(self.sizes, -1))
        mask = None if real is None else real[:, None, None]
        o = functional.scaled_dot_product_attention(q, k, v, mask, scale=self.shape.scale)
        return functional.linear(o.transpose(1, 2).flatten(2), self.out, self.biases.get("b_O"))

    def loss(self, batch: Batch) -> Tensor:
        """Sum of squared errors over the real rows."""
        error = self(batch.x, batch.real) - batch.target
        if batch.real is not None:
            error = error * batch.real[..., None]
        return error.square().sum()

    def layer(self) -> nt.FactoredAttention:
        """The weights in newtention's form."""
        h = self.shape.heads
        W_Q, W_K, W_V = (t.unflatten(0, (h, -1)).mT for t in self.qkv.detach().split(self.sizes))
        W_O = self.out.detach().T.unflatten(0, (h, -1))
        biases = {
            name: b.detach() if name == "b_O" else b.detach().unflatten(0, (h, -1))
            for name, b in self.biases.items()
        }
        return nt.FactoredAttention(W_Q, W_K, W_V, W_O, **biases, scale=self.shape.scale)


def epochs(tokens: Tokens, size: int, seed: int) -> Iterator[Batch]:
    """Batches without end, drawn anew in each epoch."""
    random = np.random.default_rng(seed)
    lengths = tokens.offsets.diff().numpy()
    while True:
        key = lengths * (1 + JITTER * random.random(len(lengths)))
        groups = batches(lengths, size, key)
        for i in random.permutation(len(groups)):
            yield padded(tokens, groups[i])


def pieces(tokens: Tokens) -> list[Batch]:
    """All sentences, each once."""
    return [padded(tokens, group) for group in batches(tokens.offsets.diff().numpy(), CHUNK)]


def energy(tokens: Tokens) -> float:
    """||B||^2."""
    return float(tokens.output.double().square().sum())


class Judge:
    """Relative loss on a fixed part of the training sentences and on all held-out ones."""

    def __init__(self, train: Tokens, held_out: Tokens, judged: int = JUDGED) -> None:
        self.parts = [(pieces(t), energy(t)) for t in (train.first(judged), held_out)]

    def __call__(self, layer: nt.FactoredAttention | Student) -> tuple[float, float]:
        """(train, held out); infinite where the layer overflows."""
        student = layer if isinstance(layer, Student) else Student(layer)
        with torch.no_grad():
            train, held_out = (
                sum(float(student.loss(batch)) for batch in data) / scale
                for data, scale in self.parts
            )
        return tuple(x if math.isfinite(x) else math.inf for x in (train, held_out))


@dataclass
class Watch:
    """Clock and judge of one run."""

    judge: Judge
    seconds: float
    looks: int = LOOKS
    trace: list[tuple[float, float, float]] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)
    began: float = 0.0

    def start(self, student: Student) -> None:
        """Judge the start and set the clock going."""
        marks = np.geomspace(FIRST_LOOK * self.seconds, self.seconds, self.looks)
        self.marks = marks.tolist()
        self._note(0.0, student)
        self.began = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds of the run itself."""
        return time.perf_counter() - self.began

    def over(self, student: Student) -> bool:
        """Judge the weights if that is due; whether the time is up or the run has diverged."""
        now = self.elapsed()
        if not self.marks or now < self.marks[0]:
            return False
        while self.marks and now >= self.marks[0]:
            self.marks.pop(0)
        self._note(now, student)
        self.began = time.perf_counter() - now
        return not self.marks or not math.isfinite(self.trace[-1][1])

    def outcome(self, student: Student, steps: int) -> Outcome:
        """The run, judged a last time if its optimiser gave up early, and its best weights."""
        if self.marks and math.isfinite(self.trace[-1][1]):
            self._note(self.elapsed(), student)
        student.load_state_dict(self.best)
        return Outcome(self.trace, student.layer(), steps)

    def _note(self, now: float, student: Student) -> None:
        train, held_out = self.judge(student)
        if all(train < earlier for _, earlier, _ in self.trace):
            self.best = {n: t.clone() for n, t in student.state_dict().items()}
        self.trace.append((now, train, held_out))


def adam(
    start: nt.FactoredAttention,
    train: Tokens,
    judge: Judge,
    rate: float,
    seconds: float,
    *,
    batch: int = BATCH,
    clip: float | None = CLIP,
    seed: int = 0,
) -> Outcome:
    """Adam with minibatches; the rate rises to `rate`, then falls to zero along a cosine.

    rate: peak learning rate.  seconds: wall time, judging excluded.  batch: tokens.
    clip: largest norm of the gradient of the relative loss, or None.
    The weights between are those of a high rate: only the last judgement is Adam's best.
    """
    student = Student(balanced(start))
    optimizer = torch.optim.Adam(student.parameters(), lr=rate, fused=True)
    per_token = energy(train) / len(train.output)
    watch = Watch(judge, seconds)
    watch.start(student)
    steps = 0
    for data in epochs(train, batch, seed):
        if watch.over(student):
            break
        done = min(1.0, watch.elapsed() / seconds)
        rising = min(1.0, done / WARM_UP)
        optimizer.param_groups[0]["lr"] = rate * rising * 0.5 * (1 + math.cos(math.pi * done))
        optimizer.zero_grad()
        count = data.x.shape[:2].numel() if data.real is None else int(data.real.sum())
        (student.loss(data) / (count * per_token)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(student.parameters(), clip)
        optimizer.step()
        steps += 1
    return watch.outcome(student, steps)


class Ended(Exception):  # noqa: N818 - no error
    """The time is up."""


def lbfgs(start: nt.FactoredAttention, train: Tokens, judge: Judge, seconds: float) -> Outcome:
    """torch.optim.LBFGS with its line search on all training sentences at once.

    seconds: wall time, judging excluded.  The best weights evaluated so far are judged.
    The start stays as it is: equal norms of the factors, good for Adam, slowed this one down.
    """
    student, best = Student(start), Student(start)
    data = pieces(train)
    scale = energy(train)
    optimizer = torch.optim.LBFGS(
        student.parameters(),
        max_iter=10**6,
        max_eval=10**7,
        history_size=HISTORY,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    lowest, evaluations = math.inf, 0
    watch = Watch(judge, seconds)
    watch.start(student)

    def closure() -> float:
        nonlocal lowest, evaluations
        if watch.over(best):
            raise Ended
        optimizer.zero_grad()
        total = 0.0
        for piece in data:
            value = student.loss(piece) / scale
            value.backward()
            total += float(value.detach())
        evaluations += 1
        if total < lowest:
            lowest = total
            best.load_state_dict(student.state_dict())
        return total

    with suppress(Ended):
        optimizer.step(closure)
    return watch.outcome(best, evaluations)


def balanced(layer: nt.FactoredAttention) -> nt.FactoredAttention:
    """The same layer with W_Q and W_K, W_V and W_O of each head of equal norms.

    A rate common to all weights suits factors of one size best; those of a whitened SVD differ.
    """
    parts = {b.name: torch.as_tensor(getattr(layer, b.name)) for b in layer.parametrisation.blocks}
    for left, right in ("QK", "VO"):
        norms = [parts[f"W_{n}"].norm(dim=(1, 2)) for n in (left, right)]
        ratio = (norms[1] / norms[0]).sqrt()
        # A head without weights stays as it is.
        ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio))
        for name, factor in ((left, ratio), (right, 1 / ratio)):
            parts[f"W_{name}"] = parts[f"W_{name}"] * factor[:, None, None]
            if name != "O" and f"b_{name}" in parts:
                parts[f"b_{name}"] = parts[f"b_{name}"] * factor[:, None]
    return nt.FactoredAttention(**parts, scale=layer.scale)


def truncated(layer: nt.FactoredAttention, rank: int) -> nt.FactoredAttention:
    """The layer with W_Q W_K^T and W_V W_O of each head cut to `rank` by their SVD.

    b_Q and b_K go along as the weights of a constant token entry; b_V moves into b_O, which is
    exact, since attention weights sum to one.
    """
    W_Q, W_K, W_V, W_O = (torch.as_tensor(getattr(layer, f"W_{n}")).double() for n in "QKVO")
    shape = layer.parametrisation

    def cut(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of the nearest products of that rank, by way of the small triangles."""
        (Q1, R1), (Q2, R2) = torch.linalg.qr(left), torch.linalg.qr(right)
        U, s, Vh = torch.linalg.svd(R1 @ R2.mT)
        root = s[:, None, :rank].sqrt()
        return Q1 @ U[..., :rank] * root, Q2 @ Vh[:, :rank].mT * root

    biases: dict[str, Tensor] = {}
    if shape.qk_bias:
        b_Q, b_K = (torch.as_tensor(b).double()[:, None] for b in (layer.b_Q, layer.b_K))
        Q, K = cut(torch.cat([W_Q, b_Q], 1), torch.cat([W_K, b_K], 1))
        W_Q, W_K = Q[:, :-1], K[:, :-1]
        biases |= {"b_Q": Q[:, -1], "b_K": K[:, -1]}
    else:
        W_Q, W_K = cut(W_Q, W_K)
    if shape.v_bias or shape.out_bias:
        b_O = W_O.new_zeros(shape.p) if layer.b_O is None else torch.as_tensor(layer.b_O).double()
        if shape.v_bias:
            b_O = b_O + (torch.as_tensor(layer.b_V).double()[:, None] @ W_O).sum((0, 1))
        biases["b_O"] = b_O
    W_V, W_O = cut(W_V, W_O.mT)
    parts = {"W_Q": W_Q, "W_K": W_K, "W_V": W_V, "W_O": W_O.mT, **biases}
    like = torch.as_tensor(layer.W_Q)
    return nt.FactoredAttention(**{n: t.to(like) for n, t in parts.items()}, scale=layer.scale)
