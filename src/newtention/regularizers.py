"""Regularisers.  Each is a quadratic on the flat vector, so that no later stage has cases.

    R(x, y) = 1/2 sum_h sum_t <dX_h, L_t dX_h R_t> + 1/2 sum_h <dY_h, G dY_h>

with dX = X - X_centre, dY = Y - Y_centre: a sum of Kronecker products L_t (x) R_t on X and a Gram
matrix G (x) I_p on Y.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.chunks import Chunk, reduce
from newtention.inputs import as_like, shape_text
from newtention.notation import ArrayLike


@dataclass(frozen=True)
class Quadratic:
    """A regulariser compiled for a problem; b independent problems, t Kronecker terms."""

    left: Float[Tensor, "b t d1 d1"]
    right: Float[Tensor, "b t d2 d2"]
    gram: Float[Tensor, "b d3 d3"]
    centre_x: Float[Tensor, "b h d1 d2"] | None = None
    centre_y: Float[Tensor, "b h d3 p"] | None = None

    def apply(
        self, X: Float[Tensor, "b h d1 d2"], Y: Float[Tensor, "b h d3 p"]
    ) -> tuple[Float[Tensor, "b h d1 d2"], Float[Tensor, "b h d3 p"]]:
        """Curvature times a direction (X, Y)."""
        return self.apply_x(X), self.gram[:, None] @ Y

    def apply_x(self, X: Float[Tensor, "b h d1 d2"]) -> Float[Tensor, "b h d1 d2"]:
        """Curvature in X times a direction."""
        return (self.left[:, :, None] @ X[:, None] @ self.right[:, :, None]).sum(1)

    def gradient(
        self, X: Float[Tensor, "b h d1 d2"], Y: Float[Tensor, "b h d3 p"]
    ) -> tuple[Float[Tensor, "b h d1 d2"], Float[Tensor, "b h d3 p"]]:
        """Gradient at (X, Y)."""
        return self.apply(*self._offset(X, Y))

    def value(
        self, X: Float[Tensor, "b h d1 d2"], Y: Float[Tensor, "b h d3 p"]
    ) -> Float[Tensor, " b"]:
        """Value at (X, Y)."""
        dX, dY = self._offset(X, Y)
        KX, KY = self.apply(dX, dY)
        return 0.5 * ((dX * KX).flatten(1).sum(1) + (dY * KY).flatten(1).sum(1))

    def curvature_x(self) -> Float[Tensor, "b k k"]:
        """Dense curvature of one head's X block, k = d1 d2."""
        b, _, d1, _ = self.left.shape
        d2 = self.right.shape[-1]
        return torch.einsum("btac,btde->badce", self.left, self.right).reshape(b, d1 * d2, d1 * d2)

    def take(self, index: Int[Tensor, " k"]) -> Quadratic:
        """The quadratics of the independent problems at `index`."""
        return replace(
            self,
            left=self.left[index],
            right=self.right[index],
            gram=self.gram[index],
            centre_x=None if self.centre_x is None else self.centre_x[index],
            centre_y=None if self.centre_y is None else self.centre_y[index],
        )

    def cast(self, dtype: torch.dtype) -> Quadratic:
        """The same in another floating type."""
        return Quadratic(
            self.left.to(dtype),
            self.right.to(dtype),
            self.gram.to(dtype),
            None if self.centre_x is None else self.centre_x.to(dtype),
            None if self.centre_y is None else self.centre_y.to(dtype),
        )

    def _offset(self, X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
        if self.centre_x is None or self.centre_y is None:
            return X, Y
        return X - self.centre_x, Y - self.centre_y


class FlatQuadratic(NamedTuple):
    """A regulariser on the flat vector of a parametrisation.

    curvature: (b, N) directions to (b, N).  output_gram: its matrix on one column of the output map
        (see `newtention.layers.Parametrisation.output_start`).  centre: where it vanishes.
    """

    curvature: Callable[[Float[Tensor, "b N"]], Float[Tensor, "b N"]]
    output_gram: Float[Tensor, "b k k"]
    centre: Float[Tensor, "b N"] | None = None

    def value(self, theta: Float[Tensor, "b N"]) -> Float[Tensor, " b"]:
        """Value at theta."""
        offset = theta if self.centre is None else theta - self.centre
        return 0.5 * (offset * self.curvature(offset)).sum(1)

    def gradient(self, theta: Float[Tensor, "b N"]) -> Float[Tensor, "b N"]:
        """Gradient at theta."""
        return self.curvature(theta if self.centre is None else theta - self.centre)


def zero_quadratic(b: int, d1: int, d2: int, d3: int, like: Tensor) -> Quadratic:
    """No regularisation."""
    return Quadratic(
        like.new_zeros(b, 0, d1, d1), like.new_zeros(b, 0, d2, d2), like.new_zeros(b, d3, d3)
    )


def stack_quadratics(parts: Sequence[Quadratic]) -> Quadratic:
    """One quadratic for several independent problems; missing terms and centres become zeros."""
    terms = max(part.left.shape[1] for part in parts)
    pad = (0, 0, 0, 0, 0)
    centred = [part for part in parts if part.centre_x is not None]
    heads = {part.centre_x.shape[1] for part in parts if part.centre_x is not None}
    if len(heads) > 1:
        raise ValueError(
            "Proximity references of stacked problems must have equal numbers of heads; "
            f"found {sorted(heads)}."
        )

    def centre(part: Quadratic, name: str) -> Tensor:
        value = getattr(part, name)
        return torch.zeros_like(getattr(centred[0], name)) if value is None else value

    def padded(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (*pad, terms - t.shape[1]))

    return Quadratic(
        torch.cat([padded(part.left) for part in parts]),
        torch.cat([padded(part.right) for part in parts]),
        torch.cat([part.gram for part in parts]),
        torch.cat([centre(part, "centre_x") for part in parts]) if centred else None,
        torch.cat([centre(part, "centre_y") for part in parts]) if centred else None,
    )


class Regularizer(ABC):
    """What the user states; `quadratic` compiles it for the data of one problem."""

    @abstractmethod
    def quadratic(self, chunks: Sequence[Chunk]) -> Quadratic:
        """The quadratic for a single problem (b = 1) with these chunks."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Name and settings, for result files."""


def _strength(name: str, value: float) -> float:
    number = float(value)
    if not 0.0 <= number < float("inf"):
        raise ValueError(f"{name} must be a finite number of at least 0; found {value!r}.")
    return number


@dataclass(frozen=True)
class Ridge(Regularizer):
    """x/2 ||X||_F^2 + y/2 ||Y||_F^2, summed over heads.

    On a factored layer x acts on W_Q and W_K, y on W_V and W_O; biases are free.

    Args:
        x: strength on X, at least 0.
        y: strength on Y, at least 0.

    Raises:
        ValueError: a strength is negative or not finite.
    """

    x: float = 0.0
    y: float = 0.0

    def __post_init__(self) -> None:
        """Check the strengths."""
        object.__setattr__(self, "x", _strength("Ridge(x=)", self.x))
        object.__setattr__(self, "y", _strength("Ridge(y=)", self.y))

    def quadratic(self, chunks: Sequence[Chunk]) -> Quadratic:
        """Identity curvature scaled by x and y."""
        like = chunks[0].A1
        d1, d2, d3 = (t.shape[-1] for t in (chunks[0].A1, chunks[0].A2, chunks[0].A3))

        def eye(d: int) -> Tensor:
            return torch.eye(d, dtype=like.dtype, device=like.device)[None]

        return Quadratic(self.x * eye(d1)[:, None], eye(d2)[:, None], self.y * eye(d3))

    def describe(self) -> dict[str, object]:
        """Name and settings."""
        return {"name": "ridge", "x": self.x, "y": self.y}


@dataclass(frozen=True, eq=False)
class TokenWeights(Regularizer):
    """The paper's regulariser: 1/2 ||A1 X A2^T W||_F^2 + 1/2 ||W A3 Y||_F^2, W = diag(w).

    Summed over sequences and heads.  Masked pairs are counted, the logit scale and the query
    weights are not part of it.

    Args:
        w: one finite weight per key token: (m,), (s, m) for padded batches, or one entry per row of
            the concatenated keys for ragged data.

    Source: Gao, Song, Wang, Yin, Definitions 6.2 and 6.5 (the regularised loss).
    """

    w: ArrayLike

    def quadratic(self, chunks: Sequence[Chunk]) -> Quadratic:
        """One Kronecker term (A1^T A1) (x) (A2^T W^2 A2) per sequence."""
        left, right, gram = [], [], []
        for chunk in chunks:
            assert chunk.key_weight is not None  # the problem distributes w over its chunks
            w = chunk.key_weight[..., None]
            wA2, wA3 = w * chunk.A2, w * chunk.A3
            left.append(chunk.A1.mT @ chunk.A1)
            right.append(wA2.mT @ wA2)
            gram.append((wA3.mT @ wA3).sum(1))
        return Quadratic(torch.cat(left, 1), torch.cat(right, 1), torch.stack(gram).sum(0))

    def describe(self) -> dict[str, object]:
        """Name and the range of the weights."""
        w = torch.as_tensor(self.w)
        return {"name": "token weights", "min": float(w.min()), "max": float(w.max())}

    def __repr__(self) -> str:
        """How many weights."""
        shape = getattr(self.w, "shape", None)
        found = f"a {type(self.w).__name__}" if shape is None else f"{shape_text(shape)} weights"
        return f"TokenWeights({found})"


@dataclass(frozen=True, eq=False)
class Proximity(Regularizer):
    """Stay near reference weights, measured by the second moments of the inputs.

    With E1, E2, E3 the means of a a^T over all query, key and value tokens, and n the number of
    query tokens: strength n/2 (<dX, E1 dX E2> + <dY, E3 dY>).  The first term is the mean square
    of a1^T dX a2 over independent pairs of tokens (the change of a logit before the scale, which no
    regulariser knows), the second that of a value, both times n, so that a strength of 1 weighs
    them like the data loss, whatever the amount of data.

    Around a factored layer every map is measured by the moments of its own input, and the change of
    its result by what the reference makes of it: see `newtention.derivatives.proximity`.

    Args:
        reference: (X, Y), shaped like the solution, or a layer; a `MapAttention` for attention
            maps, whose penalty is the first term alone.
        strength: at least 0.
        isotropic: around a factored layer only: replace each moment matrix by the identity of equal
            trace.  That holds back directions which the data hardly show, the ones that overfit.

    Raises:
        ValueError: strength is negative or not finite.
        TypeError: a reference of another kind.
    """

    reference: Any = field(repr=False)
    strength: float = 1.0
    isotropic: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        object.__setattr__(self, "strength", _strength("Proximity(strength=)", self.strength))
        if hasattr(self.reference, "X"):  # a bilinear layer, or an attention map, without Y
            Y = getattr(self.reference, "Y", None)
            object.__setattr__(self, "reference", (self.reference.X, Y))
        pair = isinstance(self.reference, tuple | list) and len(self.reference) == 2
        if not pair and not self.around_layer:
            raise TypeError(
                "Proximity(reference=) must be a pair (X, Y) or a layer; found "
                f"{type(self.reference).__name__}."
            )
        if self.isotropic and not self.around_layer:
            raise ValueError("Proximity(isotropic=True) goes with a factored layer as reference.")

    @property
    def around_layer(self) -> bool:
        """Whether the reference is a factored layer."""
        return hasattr(self.reference, "parametrisation") and hasattr(self.reference, "W_O")

    def quadratic(self, chunks: Sequence[Chunk]) -> Quadratic:
        """One Kronecker term: (sum a1 a1^T) (x) (mean a2 a2^T), centred at the reference."""
        if self.around_layer:
            c = chunks[0]
            d1, d2, d3 = (t.shape[-1] for t in (c.A1, c.A2, c.A3))
            return zero_quadratic(1, d1, d2, d3, c.A1)
        S1, S2, S3, n, m = token_moments(chunks)
        X, Y = (None if t is None else _with_heads(t, S1) for t in self.reference)
        of_maps = S3.shape[-1] == 0
        if X is None or (Y is None) != of_maps:
            wanted = "a MapAttention, as the targets are attention maps" if of_maps else "(X, Y)"
            raise ValueError(f"Proximity(reference=) must be {wanted}.")
        if Y is None:
            Y = X[..., :0, :0]
        return Quadratic(
            self.strength * S1[:, None],
            S2[:, None] / m,
            self.strength * n * S3 / m,
            X,
            Y,
        )

    def describe(self) -> dict[str, object]:
        """Name and strength."""
        return {"name": "proximity", "strength": self.strength, "isotropic": self.isotropic}


def token_moments(
    chunks: Sequence[Chunk],
) -> tuple[
    Float[Tensor, "1 d1 d1"], Float[Tensor, "1 d2 d2"], Float[Tensor, "1 d3 d3"], float, float
]:
    """Sums of a a^T over query, key and value tokens of one problem, and how many there are."""

    def moments(chunk: Chunk) -> tuple[Tensor, ...]:
        return (
            (chunk.A1.mT @ chunk.A1).sum(1),
            (chunk.A2.mT @ chunk.A2).sum(1),
            (chunk.A3.mT @ chunk.A3).sum(1),
            chunk.query_count(),
            chunk.key_count(),
        )

    S1, S2, S3, n, m = reduce(chunks, 1, moments)
    return S1, S2, S3, float(n[0]), float(m[0])


def _with_heads(weights: ArrayLike, like: Tensor) -> Float[Tensor, "1 h a b"]:
    t = as_like("Proximity(reference=)", weights, like)
    return (t if t.ndim == 3 else t[None])[None]
