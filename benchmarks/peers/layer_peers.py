"""What a factored attention layer is compressed with today: truncation, Adam and others, L-BFGS.

All but the first minimise ||F - B||^2 / ||B||^2 over every weight and bias that the start has, in
float32, by autograd.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

import newtention as nt
from benchmarks.comparison.problems import RANK
from benchmarks.comparison.tasks import LayerTask, epochs, pieces
from benchmarks.comparison.watch import Watch
from benchmarks.minilm import Batch
from benchmarks.peers import descent

BATCH = 512
"""Tokens in one batch.  At rank 16, 12 s of one thread left Adam's held-out loss at 0.0905 with
2048, 0.0853 with 1024, 0.0843 with 512 and 0.0839 with 256 (one run at one or two rates)."""
CLIP = 0.1
"""Largest norm of the gradient of the relative loss.  Together with `balanced` it improved the
0.0843 to 0.0822."""
MEMORY = 20
"""Pairs that L-BFGS keeps."""


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
        """A copy of the weights in newtention's form."""
        h = self.shape.heads
        W_Q, W_K, W_V = (
            t.unflatten(0, (h, -1)).mT for t in self.qkv.detach().clone().split(self.sizes)
        )
        W_O = self.out.detach().clone().T.unflatten(0, (h, -1))
        biases = {
            name: b.detach().clone() if name == "b_O" else b.detach().clone().unflatten(0, (h, -1))
            for name, b in self.biases.items()
        }
        return nt.FactoredAttention(W_Q, W_K, W_V, W_O, **biases, scale=self.shape.scale)


def svd(task: LayerTask, watch: Watch, choice: None) -> None:
    """The truncation that the others start from, timed."""
    watch.look(nt.truncate(task.problem, task.data.layer, RANK))


def first_order(task: LayerTask, watch: Watch, rate: float, optimizer: str) -> None:
    """Adam and others with minibatches of sentences of nearly equal length."""
    student = Student(balanced(task.start))
    train = task.data.train
    per_token = task.scale * 2 / len(train.output)
    batches = epochs(train, BATCH, 0)

    def backward() -> None:
        data = next(batches)
        count = data.x.shape[:2].numel() if data.real is None else int(data.real.sum())
        (student.loss(data) / (count * per_token)).backward()

    descent.descend(
        student.parameters(), optimizer, rate, backward, watch, student.layer, clip=CLIP
    )


def lbfgs(task: LayerTask, watch: Watch, choice: None) -> None:
    """L-BFGS on all training sentences at once.

    The start stays as it is: equal norms of the factors, good for Adam, slowed this one down.
    """
    student = Student(task.start)
    data = pieces(task.data.train)
    scale = 2 * task.scale
    lowest = math.inf

    def backward() -> float:
        nonlocal lowest
        total = 0.0
        for piece in data:
            value = student.loss(piece) / scale
            value.backward()
            total += float(value.detach())
        if total < lowest:
            lowest = total
            with watch.still():
                layer = student.layer()
            watch.look(layer)
        return total

    descent.lbfgs(student.parameters(), MEMORY, backward)


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
