"""Ways to multiply the Hessian or the Gauss-Newton matrix of one attention layer with a vector.

One sequence, one head, self-attention.  Autograd gets the leanest formula that we know: plain
matrices without axes of length one, and nothing evaluated twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import newtention as nt
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.products import Kind, data_product
from newtention.layers import Parametrisation

KEEP_ALL = 1 << 40
"""A budget, in bytes, that holds every evaluation."""

Product = Callable[[], Tensor]
"""The matrix times a vector of ones, flat."""


@dataclass(frozen=True)
class Method:
    """A way to make products.

    kind: of which matrix.  build: everything that a solver would do once for many products.
    """

    kind: Kind
    build: Callable[[Linearised], Product]


def random_point(form: str, s: int, n: int, d: int, dtype: torch.dtype) -> Linearised:
    """Self-attention on Gaussian tokens, width d in all places, logits of about 2."""
    g = torch.Generator().manual_seed(n + s)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    tokens = randn(s, n, d)
    problem = nt.AttentionProblem(tokens, tokens, tokens, randn(s, n, d))
    layer: nt.BilinearAttention | nt.FactoredAttention
    if form == "bilinear":
        layer = nt.BilinearAttention(2 * randn(1, d, d) / d, randn(1, d, d) / d**0.5)
    else:
        W = [randn(1, d, d) / d**0.5 for _ in range(4)]
        layer = nt.FactoredAttention(*W, scale=2 * d**-0.5)
    return Linearised(problem, layer.parametrisation, layer.theta[None])


def plain_output(layer: Parametrisation, theta: Tensor, A: Tensor) -> Tensor:
    """The output of one head of a bilinear or a factored layer, from its definition."""
    W = [theta[b.start : b.stop].view(b.shape)[0] for b in layer.blocks]
    if len(W) == 2:
        return (A @ W[0] @ A.mT).softmax(-1) @ (A @ W[1])
    q, k, v = (A @ m for m in W[:3])
    return (layer.scale * q @ k.mT).softmax(-1) @ v @ W[3]


def fused_output(layer: Parametrisation, theta: Tensor, A: Tensor) -> Tensor:
    """The same by scaled_dot_product_attention, in its one backend that differentiates twice."""
    W = [theta[b.start : b.stop].view(b.shape)[0] for b in layer.blocks]
    q, k, v = ((A @ m)[None, None] for m in W[:3])
    with sdpa_kernel(SDPBackend.MATH):
        attended = nn.functional.scaled_dot_product_attention(q, k, v, scale=layer.scale)
    return attended[0, 0] @ W[3]


def double_backward(
    point: Linearised, output: Callable[[Parametrisation, Tensor, Tensor], Tensor] = plain_output
) -> Product:
    """Forward, backward with a graph, and backward again."""
    A, B = _data(point)
    theta = point.theta[0].clone().requires_grad_(True)
    v = torch.ones_like(theta)

    def product() -> Tensor:
        loss = 0.5 * (output(point.layer, theta, A) - B).square().sum()
        (g,) = torch.autograd.grad(loss, theta, create_graph=True)
        return torch.autograd.grad(g @ v, theta)[0]

    return product


def _ours(kind: Kind, budget: int) -> Callable[[Linearised], Product]:
    def build(point: Linearised) -> Product:
        at = Linearised.at(point.problem, point.layer, point.theta, budget)
        v = torch.ones_like(at.theta)[:, None]
        return lambda: data_product(at, v, kind)[0, 0]

    return build


def _forward_over_reverse(point: Linearised) -> Product:
    gradient, theta, v = _gradient(point)
    return lambda: torch.func.jvp(gradient, (theta,), (v,))[1]


def _reverse_over_reverse(point: Linearised) -> Product:
    gradient, theta, v = _gradient(point)
    return lambda: torch.func.vjp(gradient, theta)[1](v)[0]


def _jvp_then_vjp(point: Linearised) -> Product:
    A, _ = _data(point)
    theta, v = point.theta[0], torch.ones_like(point.theta[0])

    def output(t: Tensor) -> Tensor:
        return plain_output(point.layer, t, A)

    def product() -> Tensor:
        _, transposed = torch.func.vjp(output, theta)
        return transposed(torch.func.jvp(output, (theta,), (v,))[1])[0]

    return product


def _gradient(point: Linearised) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    A, B = _data(point)

    def loss(t: Tensor) -> Tensor:
        return 0.5 * (plain_output(point.layer, t, A) - B).square().sum()

    return torch.func.grad(loss), point.theta[0], torch.ones_like(point.theta[0])


class _Layer(nn.Module):
    """The layer as curvlinops wants it: blocks as parameters, the batch as the first axis."""

    def __init__(self, point: Linearised) -> None:
        super().__init__()
        blocks = (point.theta[0, b.start : b.stop].view(b.shape)[0] for b in point.layer.blocks)
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Parameter(m.clone()) for m in blocks)
        self.scale = point.layer.scale

    def forward(self, A: Tensor) -> Tensor:
        A = A[0]
        q, k, v = A @ self.W_Q, A @ self.W_K, A @ self.W_V
        return ((self.scale * q @ k.mT).softmax(-1) @ v @ self.W_O)[None]


def _curvlinops(operator: str) -> Callable[[Linearised], Product]:
    def build(point: Linearised) -> Product:
        import curvlinops  # takes a second, and only two of the methods need it

        A, B = _data(point)
        module = _Layer(point)
        matrix = getattr(curvlinops, operator)(
            module,
            nn.MSELoss(reduction="sum"),  # twice our loss
            list(module.parameters()),
            [(A[None], B[None])],
            check_deterministic=False,
            num_data=1,
        )
        v = torch.full_like(point.theta[0], 0.5)
        return lambda: matrix @ v

    return build


def _data(point: Linearised) -> tuple[Tensor, Tensor]:
    """Tokens and targets of the only sequence."""
    (chunk,) = point.problem.chunks
    return chunk.A1[0, 0], chunk.B[0, 0]


METHODS: Mapping[str, Method] = {
    "newtention, Hessian": Method("full", _ours("full", 0)),
    "newtention, Hessian, kept": Method("full", _ours("full", KEEP_ALL)),
    "double backward": Method("full", double_backward),
    "double backward, sdpa": Method("full", lambda point: double_backward(point, fused_output)),
    "torch.func, jvp of grad": Method("full", _forward_over_reverse),
    "torch.func, vjp of grad": Method("full", _reverse_over_reverse),
    "curvlinops, Hessian": Method("full", _curvlinops("HessianLinearOperator")),
    "newtention, Gauss-Newton": Method("gauss-newton", _ours("gauss-newton", 0)),
    "newtention, Gauss-Newton, kept": Method("gauss-newton", _ours("gauss-newton", KEEP_ALL)),
    "torch.func, vjp of jvp": Method("gauss-newton", _jvp_then_vjp),
    "curvlinops, GGN": Method("gauss-newton", _curvlinops("GGNLinearOperator")),
}
"""Of each kind, the first is the one that the others are checked against."""
