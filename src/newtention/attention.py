"""The attention core: (queries, keys, values, mask) -> attended values, and its derivatives.

Bare tensors in, bare tensors out.  Leading axes (o, s, h) are owners, sequences, heads; keys may
have a head axis of 1, which is shared by all heads.  Values of None are the identity: the attended
values o are then P itself.  Arrays of the size of P make the peak of memory, so they are changed in
place where they are the function's own.  Formulas: docs/mathematics.md.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def attention_weights(
    q: Float[Tensor, "o s h n e"],
    k: Float[Tensor, "o s #h m e"],
    bias: Float[Tensor, "o s #h n m"] | None = None,
    allowed: Bool[Tensor, "#o #s #n m"] | None = None,
) -> Float[Tensor, "o s h n m"]:
    """P = softmax(q k^T + bias) along keys; a pair that is not allowed has P = 0 exactly.

    The row maximum is subtracted (by torch's softmax), so logits of any finite size are safe.
    """
    return attention_logits(q, k, bias, allowed).softmax(-1)


def attention_logits(
    q: Float[Tensor, "o s h n e"],
    k: Float[Tensor, "o s #h m e"],
    bias: Float[Tensor, "o s #h n m"] | None = None,
    allowed: Bool[Tensor, "#o #s #n m"] | None = None,
) -> Float[Tensor, "o s h n m"]:
    """The logits q k^T + bias; minus infinity where a pair is not allowed."""
    logits = q @ k.mT
    if bias is not None:
        logits += bias
    if allowed is not None:
        logits.masked_fill_(~allowed[:, :, None], -torch.inf)
    return logits


def score_gradient(
    P: Float[Tensor, "o s h n m"],
    v: Float[Tensor, "o s h m p"] | None,
    o: Float[Tensor, "o s h n p"],
    do: Float[Tensor, "o s #h n p"],
) -> Float[Tensor, "o s h n m"]:
    """dS = P o (do v^T - rowsum(do o o)): the loss gradient in the logits, given the one in o."""
    return _shifted(do, v, (do * o).sum(-1, keepdim=True)).mul_(P)


def weights_tangent(
    P: Float[Tensor, "o s h n m"], S_t: Float[Tensor, "o s h n m"]
) -> Float[Tensor, "o s h n m"]:
    """P' = P o S' - P rowsum(P o S'): the attention weights' tangent, in the place of S'."""
    S_t *= P
    return S_t.addcmul_(P, S_t.sum(-1, keepdim=True), value=-1)


def score_gradient_tangent(
    P: Float[Tensor, "o s h n m"],
    P_t: Float[Tensor, "o s h n m"],
    v: Float[Tensor, "o s h m p"] | None,
    v_t: Float[Tensor, "o s h m p"] | None,
    o: Float[Tensor, "o s h n p"],
    o_t: Float[Tensor, "o s h n p"],
    do: Float[Tensor, "o s #h n p"],
    do_t: Float[Tensor, "o s #h n p"],
) -> tuple[Float[Tensor, "o s h n m"], Float[Tensor, "o s h n m"]]:
    """`score_gradient` and its tangent; arguments ending in _t are their namesakes' tangents.

    v_t is None where v is: the identity does not move.
    """
    rho = (do * o).sum(-1, keepdim=True)
    rho_t = (do_t * o + do * o_t).sum(-1, keepdim=True)
    D = _shifted(do, v, rho)
    if v is None or v_t is None:
        D_t = _shifted(do_t, None, rho_t)
    else:
        both = torch.cat([do_t.expand_as(o), do.expand_as(o)], -1)
        D_t = _shifted(both, torch.cat([v, v_t], -1), rho_t)
    dS_t = D_t.mul_(P).addcmul_(P_t, D)
    return D.mul_(P), dS_t


def fixed_weights_tangent(
    P: Float[Tensor, "o s h n m"],
    v: Float[Tensor, "o s h m p"],
    v_t: Float[Tensor, "o s h m p"] | None,
    o: Float[Tensor, "o s h n p"],
    o_t: Float[Tensor, "o s h n p"] | None,
    do: Float[Tensor, "o s #h n p"],
    do_t: Float[Tensor, "o s #h n p"],
) -> Float[Tensor, "o s h n m"]:
    """The tangent of `score_gradient` where P stands still; v_t and o_t are None if they vanish."""
    if v_t is None or o_t is None:
        return score_gradient(P, v, o, do_t)
    rho_t = (do_t * o + do * o_t).sum(-1, keepdim=True)
    both = torch.cat([do_t.expand_as(o), do.expand_as(o)], -1)
    return _shifted(both, torch.cat([v, v_t], -1), rho_t).mul_(P)


def _shifted(
    left: Float[Tensor, "o s #h n p"],
    right: Float[Tensor, "o s h m p"] | None,
    shift: Float[Tensor, "o s h n 1"],
) -> Float[Tensor, "o s h n m"]:
    """left right^T - shift as one product, without a pass over its result."""
    if right is None:
        return left - shift
    left = torch.cat([left.expand(*shift.shape[:-1], -1), -shift], -1)
    return left @ torch.cat([right, right.new_ones(*right.shape[:-1], 1)], -1).mT
