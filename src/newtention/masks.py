"""Mask rules: which keys a query may attend to, evaluated for a tile of query rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Allowed pairs of a chunk as a rule; no (n, m) array exists unless the user gave one.

    causal: key k is allowed for query j when k <= j (positions counted from the sequence's start,
        as in ``torch.nn.functional.scaled_dot_product_attention``).
    key_lengths: (o, s) number of real keys per sequence, or None when none is padded.
    explicit: (o, s, n, m) boolean, True where attention is allowed, or None.
    first_row: position of the tile's first query row in its sequence.
    picked: (o, s, n) positions of the query rows, where they are a selection; None: first_row and
        those that follow.
    """

    causal: bool = False
    key_lengths: Int[Tensor, "o s"] | None = None
    explicit: Bool[Tensor, "o s n m"] | None = None
    first_row: int = 0
    picked: Int[Tensor, "o s n"] | None = None

    def allowed(self, n: int, m: int, device: torch.device) -> Bool[Tensor, "#o #s #n m"] | None:
        """Boolean array that broadcasts to (o, s, n, m); None when every pair is allowed."""
        result = self.explicit
        if self.key_lengths is not None:
            real = torch.arange(m, device=device) < self.key_lengths[..., None]
            real = real[:, :, None, :]
            result = real if result is None else result & real
        if self.causal:
            past = torch.arange(m, device=device) <= self.places(n, device)[..., None]
            past = past[:, :, 0] if past.ndim == 5 else past[None, None]
            result = past if result is None else result & past
        return result

    def places(self, n: int, device: torch.device) -> Int[Tensor, "*os1 n"]:
        """Positions of the n query rows, (n,), or (o, s, 1, n) with an axis for heads."""
        if self.picked is not None:
            return self.picked[:, :, None]
        return torch.arange(self.first_row, self.first_row + n, device=device)

    def to(self, device: torch.device | str) -> Mask:
        """The same on another device."""
        return self._mapped(lambda t: t.to(device))

    def owners(self, index: slice | Tensor) -> Mask:
        """The rule for a selection of owners."""
        return self._mapped(lambda t: t[index])

    def sequences(self, index: slice | Int[Tensor, " k"]) -> Mask:
        """The rule for some of the sequences of every owner."""
        return self._mapped(lambda t: t[:, index])

    def rows(self, start: int, stop: int) -> Mask:
        """The rule for the query rows start to stop."""
        explicit = None if self.explicit is None else self.explicit[:, :, start:stop]
        picked = None if self.picked is None else self.picked[:, :, start:stop]
        return replace(self, explicit=explicit, first_row=self.first_row + start, picked=picked)

    def pick(self, index: Int[Tensor, "o s k"], n: int) -> Mask:
        """The rule for a selection of the n query rows of every sequence."""
        explicit = self.explicit
        if explicit is not None:
            explicit = explicit.take_along_dim(index[..., None], 2)
        places = self.places(n, index.device).expand(*index.shape[:2], n)
        return replace(self, explicit=explicit, picked=places.gather(2, index))

    def _mapped(self, f: Callable[[Tensor], Tensor]) -> Mask:
        return replace(
            self,
            key_lengths=None if self.key_lengths is None else f(self.key_lengths),
            explicit=None if self.explicit is None else f(self.explicit),
            picked=None if self.picked is None else f(self.picked),
        )
