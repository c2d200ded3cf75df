"""Layers with their weights: frozen values that convert to and from the flat vector and torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from newtention.display import Displayed, Table
from newtention.inputs import as_tensors, shape_text
from newtention.layers.attention_map import AttentionMap
from newtention.layers.bilinear import Bilinear
from newtention.layers.factored import Factored
from newtention.layers.named_arrays import named_weights
from newtention.layers.rotary import Rotary
from newtention.layers.torch_modules import module_of, weights_of
from newtention.notation import Array, ArrayLike


@dataclass(frozen=True, eq=False, repr=False)
class AttentionLayer(Displayed, ABC):
    """A parametrisation with its weights.

    Final subclasses: `BilinearAttention`, `FactoredAttention`, `MapAttention`.  Every block of the
    parametrisation is an attribute of the block's name.
    """

    @property
    @abstractmethod
    def parametrisation(self) -> Bilinear | Factored | AttentionMap:
        """Shapes and settings, without the weights."""

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.parametrisation.heads

    @property
    def theta(self) -> Float[Tensor, " N"]:
        """The flat vector: the parametrisation's blocks in order, row-major."""
        blocks = self.parametrisation.blocks
        return torch.cat([torch.as_tensor(getattr(self, b.name)).reshape(-1) for b in blocks])

    def with_theta(self, theta: ArrayLike) -> Self:
        """The same layer with the weights of a flat vector.

        Raises:
            ValueError: another length, NaN or infinity.
        """
        flat = torch.as_tensor(theta).detach()
        shape = self.parametrisation
        if tuple(flat.shape) != (shape.size,):
            raise ValueError(
                f"theta must have {shape.size} entries; found {shape_text(flat.shape)}."
            )
        parts: dict[str, Array] = {}
        for block in shape.blocks:
            old = getattr(self, block.name)
            t = flat[block.start : block.stop].reshape(old.shape)
            parts[block.name] = t if isinstance(old, Tensor) else t.numpy()
        return replace(self, **parts)

    def _table(self) -> Table:
        shape = self.parametrisation
        rows = [
            ("Heads", str(shape.heads)),
            *((b.name, shape_text(getattr(self, b.name).shape)) for b in shape.blocks),
            *self._settings(),
            ("Weights", f"{shape.size}, {str(self.theta.dtype)[6:]}"),
        ]
        return Table(type(self).__name__, rows)

    def _settings(self) -> list[tuple[str, str]]:
        """Rows on what is not an array."""
        return []

    def _store(self, tensors: Mapping[str, Tensor], numpy: bool) -> None:
        """Keep copies of the weights, so that the caller's arrays may change."""
        for name, t in tensors.items():
            object.__setattr__(self, name, t.numpy().copy() if numpy else t.clone())


@dataclass(frozen=True, eq=False, repr=False)
class BilinearAttention(AttentionLayer):
    """A layer of the paper's form.

        F = sum_h softmax(A1 X_h A2^T) A3 Y_h

    Args:
        X: (d1, d2), or (h, d1, d2).
        Y: (d3, p), or (h, d3, p).  A head axis is kept as given, also for one head.

    Raises:
        ValueError: shapes that do not fit, NaN or infinity.
        TypeError: torch and NumPy or float32 and float64 mixed.
    """

    X: ArrayLike
    Y: ArrayLike

    def __post_init__(self) -> None:
        """Convert to tensors (or NumPy arrays, as given) and check the shapes."""
        tensors, numpy = as_tensors({"X": self.X, "Y": self.Y})
        x, y = tensors["X"], tensors["Y"]
        for name, t in tensors.items():
            if t.ndim not in (2, 3) or 0 in t.shape:
                raise ValueError(
                    f"{name} must have 2 axes, or 3 with the heads first, and not be empty; found "
                    f"{shape_text(t.shape)}."
                )
        if x.ndim != y.ndim or x.shape[:-2] != y.shape[:-2]:
            raise ValueError(
                "X and Y must have the same heads along a leading axis, or both no such axis; "
                f"found {shape_text(x.shape)} and {shape_text(y.shape)}."
            )
        self._store(tensors, numpy)

    @property
    def parametrisation(self) -> Bilinear:
        """Shapes, without the weights."""
        heads = self.X.shape[0] if self.X.ndim == 3 else 1
        return Bilinear(heads, *self.X.shape[-2:], *self.Y.shape[-2:])

    def __repr__(self) -> str:
        """Shapes at a glance."""
        s = self.parametrisation
        heads = _counted(s.heads, "head")
        return f"BilinearAttention({heads}; d1 {s.d1}, d2 {s.d2}, d3 {s.d3}, p {s.p})"


@dataclass(frozen=True, eq=False, repr=False)
class MapAttention(AttentionLayer):
    """The query/key map alone: what it computes is the attention map softmax(A1 X A2^T).

    Args:
        X: (d1, d2).

    Raises:
        ValueError: another number of axes, an empty axis, NaN or infinity.
        TypeError: not real numbers.
    """

    X: ArrayLike

    def __post_init__(self) -> None:
        """Convert to a tensor (or a NumPy array, as given) and check the shape."""
        tensors, numpy = as_tensors({"X": self.X})
        shape = tensors["X"].shape
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"X must have 2 axes and not be empty; found {shape_text(shape)}.")
        self._store(tensors, numpy)

    @property
    def parametrisation(self) -> AttentionMap:
        """The shape, without the weights."""
        return AttentionMap(*self.X.shape)

    def __repr__(self) -> str:
        """The shape at a glance."""
        return f"MapAttention(d1 {self.X.shape[0]}, d2 {self.X.shape[1]})"


@dataclass(frozen=True, eq=False, repr=False)
class FactoredAttention(AttentionLayer):
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

    Example:
        >>> module = torch.nn.MultiheadAttention(8, 2)
        >>> nt.FactoredAttention.from_torch(module)
        FactoredAttention(2 heads; d1 8, d2 8, d3 8, p 8, e 4, f 4; scale 0.5)
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
            if t.ndim != want or 0 in t.shape:
                raise ValueError(
                    f"{name} must have {want} axes and not be empty; found {shape_text(t.shape)}."
                )
        shape = self._parametrisation(tensors)
        for block in shape.blocks:
            found = tuple(tensors[block.name].shape)
            if found != block.shape:
                raise ValueError(
                    f"{block.name} must be {shape_text(block.shape)} beside the other weights; "
                    f"found {shape_text(found)}."
                )
        self._store(tensors, numpy)

    @property
    def parametrisation(self) -> Factored:
        """Shapes, biases, scale and rotary positions, without the weights."""
        present = (n for n in _BLOCKS if getattr(self, n) is not None)
        return self._parametrisation({n: getattr(self, n) for n in present})

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, ArrayLike],
        heads: int | None = None,
        kv_heads: int | None = None,
        scale: float | None = None,
        rotary: Rotary | None = None,
    ) -> FactoredAttention:
        """The layer of plain arrays under usual names, upper or lower case.

        ======  ===========================  ===================================================
        weight  y = x W, (in, out)           y = x W^T, (out, in) as in ``torch.nn.Linear``
        ======  ===========================  ===================================================
        W_Q     W_Q, Wq, to_q_W, q_proj_W    to_q.weight, q_proj.weight, query.weight
        W_K     W_K, Wk, to_k_W, k_proj_W    to_k.weight, k_proj.weight, key.weight
        W_V     W_V, Wv, to_v_W, v_proj_W    to_v.weight, v_proj.weight, value.weight
        W_O     W_O, Wo, to_out_W            to_out.weight, o_proj.weight, out_proj.weight
        both    W_QK, Wqk, to_qk_W           to_qk.weight: shared by queries and keys
        ======  ===========================  ===================================================

        Biases, where there are any, are b_Q or bq, to_q_b, to_q.bias and so on.  The layout of a
        BERT checkpoint (self.query.weight, output.dense.weight) and of to_out.0 is known too.
        Arrays of other names are ignored, but for parts of the modules above (q_proj.lora_A) and
        normalised queries or keys, which would change the outputs.

        Args:
            arrays: by name.  Those that map y = x W are (in, out) for all heads side by side or
                have a leading head axis: (h, d1, e), (g, d2, e), (g, d3, f), (h, f, p).
            heads: query heads h; needed unless W_Q has a head axis.
            kv_heads: key/value heads g; that of W_K's head axis, or h.
            scale: of the logits; 1/sqrt(e) by default.
            rotary: see the class.

        Raises:
            ValueError: an array is missing, there are two for one weight, or shapes do not fit.
            TypeError: as for the class.
        """
        parts = named_weights(arrays, heads, kv_heads)
        e = parts["W_Q"].shape[-1]
        return cls(**parts, scale=e**-0.5 if scale is None else scale, rotary=rotary)

    @classmethod
    def from_torch(cls, module: nn.Module) -> FactoredAttention:
        """The layer of a ``torch.nn.MultiheadAttention``, in its own dtype and device.

        Raises:
            TypeError: another kind of module.
            ValueError: add_bias_kv or add_zero_attn, which add keys rather than weights.
        """
        parts, scale = weights_of(module)
        weights: dict[str, Any] = dict(parts)
        return cls(**weights, scale=scale)

    def to_torch(self) -> nn.MultiheadAttention:
        """A ``torch.nn.MultiheadAttention`` with batch_first that computes the same outputs.

        Raises:
            ValueError: what that module cannot express: rotary positions, grouped keys, a scale
                other than 1/sqrt(e), biases given in part, e not f, output width not h e.
        """
        shape = self.parametrisation
        weights = {b.name: torch.as_tensor(getattr(self, b.name)) for b in shape.blocks}
        return module_of(shape, weights)

    def __repr__(self) -> str:
        """Shapes at a glance."""
        s = self.parametrisation
        groups = "" if s.kv_heads == s.heads else f" ({s.kv_heads} for keys and values)"
        heads = _counted(s.heads, "head")
        return (
            f"FactoredAttention({heads}{groups}; d1 {s.d1}, d2 {s.d2}, d3 {s.d3}, "
            f"p {s.p}, e {s.e}, f {s.f}; scale {s.scale:g}{', rotary' if s.rotary else ''})"
        )

    def _settings(self) -> list[tuple[str, str]]:
        heads = ("Key/value heads", str(self.parametrisation.kv_heads))
        rotary = [] if self.rotary is None else [("Positions", repr(self.rotary))]
        return [heads, ("Scale", f"{self.scale:g}"), *rotary]

    def _parametrisation(self, w: Mapping[str, Array]) -> Factored:
        if ("b_Q" in w) != ("b_K" in w):
            raise ValueError(
                "b_Q and b_K must be given together; zeros stand for the one that is not there."
            )
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


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


_BLOCKS = ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "W_O", "b_O")
