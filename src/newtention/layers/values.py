"""Layers with their weights: frozen values that convert to and from the flat vector and torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from newtention.inputs import as_tensors, shape_text
from newtention.layers.factored import Factored
from newtention.layers.rotary import Rotary
from newtention.notation import Array, ArrayLike


@dataclass(frozen=True, eq=False, repr=False)
class FactoredAttention:
    """A real attention layer.

        q_h = scale rot(A1 W_Q,h + b_Q,h),  k_g = rot(A2 W_K,g + b_K,g),  v_g = A3 W_V,g + b_V,g
        F = sum_h softmax(q_h k_g^T) v_g W_O,h + b_O,    g = h // (h heads / g heads)

    Args:
        W_Q: (h, d1, e).
        W_K: (g, d2, e); g divides h (grouped keys and values).
        W_V: (g, d3, f).
        W_O: (h, f, p).
        b_Q: (h, e) or None.
        b_K: (g, e) or None.
        b_V: (g, f) or None.
        b_O: (p,) or None.
        scale: multiplies the logits, together with the problem's own scale; 1/sqrt(e) in usual
            layers.
        rotary: turns queries and keys by their position in the sequence.

    Raises:
        ValueError: shapes that do not fit, NaN or infinity, an odd e with rotary positions.
        TypeError: torch and NumPy or float32 and float64 mixed.
    """

    W_Q: ArrayLike
    W_K: ArrayLike
    W_V: ArrayLike
    W_O: ArrayLike
    b_Q: ArrayLike | None = None
    b_K: ArrayLike | None = None
    b_V: ArrayLike | None = None
    b_O: ArrayLike | None = None
    scale: float = 1.0
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        """Convert to tensors (or NumPy arrays, as given) and check the shapes."""
        if not 0 < float(self.scale) < float("inf"):
            raise ValueError(f"scale must be a positive finite number; found {self.scale}.")
        if self.rotary is not None and not isinstance(self.rotary, Rotary):
            raise TypeError(f"rotary must be Rotary(...) or None; found {self.rotary!r}.")
        given = {n: getattr(self, n) for n in _BLOCKS if getattr(self, n) is not None}
        tensors, numpy = as_tensors(given)
        for name, t in tensors.items():
            want = 3 if name.startswith("W") else 1 if name == "b_O" else 2
            if t.ndim != want:
                raise ValueError(f"{name} must have {want} axes; found {shape_text(t.shape)}.")
        shape = self._parametrisation(tensors)
        for block in shape.blocks:
            found = tuple(tensors[block.name].shape)
            if found != block.shape:
                raise ValueError(
                    f"{block.name} must be {shape_text(block.shape)} beside the other weights; "
                    f"found {shape_text(found)}."
                )
        for name, t in tensors.items():
            object.__setattr__(self, name, t.numpy().copy() if numpy else t.clone())

    @property
    def parametrisation(self) -> Factored:
        """Shapes, biases, scale and rotary positions, without the weights."""
        return self._parametrisation({n: getattr(self, n) for n in self._names})

    @property
    def theta(self) -> Float[Tensor, " N"]:
        """The flat vector: W_Q, b_Q, W_K, b_K, W_V, b_V, W_O, b_O, row-major, where they exist."""
        return torch.cat([torch.as_tensor(getattr(self, n)).reshape(-1) for n in self._names])

    def with_theta(self, theta: ArrayLike) -> FactoredAttention:
        """The same layer with the weights of a flat vector."""
        flat = torch.as_tensor(theta)
        size = self.parametrisation.size
        if tuple(flat.shape) != (size,):
            raise ValueError(f"theta must have {size} entries; found {shape_text(flat.shape)}.")
        numpy = not isinstance(self.W_Q, Tensor)
        parts: dict[str, Array] = {}
        for block in self.parametrisation.blocks:
            t = flat[block.start : block.stop].reshape(block.shape)
            parts[block.name] = t.numpy() if numpy else t
        return FactoredAttention(**parts, scale=self.scale, rotary=self.rotary)

    @classmethod
    def from_torch(cls, module: nn.Module) -> FactoredAttention:
        """The layer of a ``torch.nn.MultiheadAttention``, in its own dtype and device.

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
            q, k, v = module.in_proj_weight.detach().chunk(3)
        else:
            projections = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
            q, k, v = (w.detach() for w in projections)

        def per_head(w: Tensor) -> Tensor:
            return w.unflatten(0, (h, e)).mT.clone()  # (width, d) to (h, d, e)

        biases: dict[str, Any] = {}
        if module.in_proj_bias is not None:
            for name, b in zip(("b_Q", "b_K", "b_V"), module.in_proj_bias.chunk(3), strict=True):
                biases[name] = b.detach().unflatten(0, (h, e)).clone()
            biases["b_O"] = module.out_proj.bias.detach().clone()
        W_O = module.out_proj.weight.detach().T.unflatten(0, (h, e)).clone()
        return cls(per_head(q), per_head(k), per_head(v), W_O, **biases, scale=e**-0.5)

    def to_torch(self) -> nn.MultiheadAttention:
        """A ``torch.nn.MultiheadAttention`` with batch_first that computes the same outputs.

        Raises:
            ValueError: what that module cannot express: rotary positions, grouped keys, a scale
                other than 1/sqrt(e), biases given in part, e not f, output width not h e.
        """
        shape = self.parametrisation
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
        w = {n: torch.as_tensor(getattr(self, n)) for n in self._names}
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
                module.in_proj_bias.copy_(
                    torch.cat([w[n].flatten() for n in ("b_Q", "b_K", "b_V")])
                )
                module.out_proj.bias.copy_(w["b_O"])
        return module

    def __repr__(self) -> str:
        """Shapes at a glance."""
        s = self.parametrisation
        groups = "" if s.kv_heads == s.heads else f" ({s.kv_heads} for keys and values)"
        return (
            f"FactoredAttention({s.heads} heads{groups}; d1 {s.d1}, d2 {s.d2}, d3 {s.d3}, "
            f"p {s.p}, e {s.e}, f {s.f}; scale {s.scale:g}{', rotary' if s.rotary else ''})"
        )

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(n for n in _BLOCKS if getattr(self, n) is not None)

    def _parametrisation(self, w: Mapping[str, Array]) -> Factored:
        if ("b_Q" in w) != ("b_K" in w):
            raise ValueError("b_Q and b_K must be given together.")
        (h, d1, e), (g, d2, _), (_, d3, f) = (w[n].shape for n in ("W_Q", "W_K", "W_V"))
        if h % g:
            raise ValueError(f"W_K has {g} heads, which must divide the {h} heads of W_Q.")
        if self.rotary is not None and e % 2:
            raise ValueError(f"Rotary positions need an even head width; W_Q has {e}.")
        return Factored(
            heads=h,
            kv_heads=g,
            d1=d1,
            d2=d2,
            d3=d3,
            p=w["W_O"].shape[-1],
            e=e,
            f=f,
            qk_bias="b_Q" in w,
            v_bias="b_V" in w,
            out_bias="b_O" in w,
            scale=float(self.scale),
            rotary=self.rotary,
        )


_BLOCKS = ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "W_O", "b_O")
