"""The weights of ``torch.nn.MultiheadAttention``, in and out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from newtention.layers.factored import Factored


def weights_of(module: nn.Module) -> tuple[dict[str, Tensor], float]:
    """The blocks of a module by name, in its own dtype and device, and its logit scale 1/sqrt(e).

    Raises:
        TypeError: another kind of module.
        ValueError: add_bias_kv or add_zero_attn, which add keys rather than weights.
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(
            f"from_torch takes torch.nn.MultiheadAttention; found {type(module).__name__}."
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("add_bias_kv and add_zero_attn add keys; they are not supported.")
    h, width = module.num_heads, module.embed_dim
    e = width // h
    if module.in_proj_weight is not None:
        rows = module.in_proj_weight.detach().chunk(3)
    else:
        projections = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        rows = tuple(w.detach() for w in projections)
    names = ("W_Q", "W_K", "W_V")
    # (h e, d) to (h, d, e).
    parts = {n: w.unflatten(0, (h, e)).mT for n, w in zip(names, rows, strict=True)}
    parts["W_O"] = module.out_proj.weight.detach().T.unflatten(0, (h, e))
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.detach().chunk(3)
        for name, b in zip(("b_Q", "b_K", "b_V"), biases, strict=True):
            parts[name] = b.unflatten(0, (h, e))
        parts["b_O"] = module.out_proj.bias.detach()
    return parts, e**-0.5


def module_of(shape: Factored, w: Mapping[str, Tensor]) -> nn.MultiheadAttention:
    """A module with batch_first that computes the same outputs as a layer with blocks w.

    Raises:
        ValueError: what that module cannot express: rotary positions, grouped keys, a scale other
            than 1/sqrt(e), biases given in part, e not f, output width not h e.
    """
    h, e = shape.heads, shape.e
    refusals = {
        "rotary positions": shape.rotary is not None,
        "grouped keys and values": shape.kv_heads != h,
        f"a logit scale of {shape.scale:g}": abs(shape.scale * e**0.5 - 1) > 1e-12,
        "some biases but not all": len({shape.qk_bias, shape.v_bias, shape.out_bias}) > 1,
        "values of another width than keys": shape.f != e,
        "query or output width other than heads times e": {shape.d1, shape.p} != {h * e},
    }
    for what, true in refusals.items():
        if true:
            raise ValueError(f"torch.nn.MultiheadAttention cannot express {what}.")
    module = nn.MultiheadAttention(
        h * e,
        h,
        bias=shape.out_bias,
        batch_first=True,
        kdim=shape.d2,
        vdim=shape.d3,
        dtype=w["W_Q"].dtype,
        device=w["W_Q"].device,
    )
    rows = [w[n].mT.flatten(0, 1) for n in ("W_Q", "W_K", "W_V")]
    with torch.no_grad():
        if module.in_proj_weight is not None:
            module.in_proj_weight.copy_(torch.cat(rows))
        else:
            for name, row in zip(("q", "k", "v"), rows, strict=True):
                getattr(module, f"{name}_proj_weight").copy_(row)
        module.out_proj.weight.copy_(w["W_O"].flatten(0, 1).T)
        if shape.out_bias:
            module.in_proj_bias.copy_(torch.cat([w[n].flatten() for n in ("b_Q", "b_K", "b_V")]))
            module.out_proj.bias.copy_(w["b_O"])
    return module
