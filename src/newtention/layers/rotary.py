"""Rotary positions (Su et al. 2021): pairs of features turned by position times a frequency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

Pairing = Literal["halves", "neighbours"]


@dataclass(frozen=True)
class Rotary:
    """Pair i of a head of width e turns by position * base^(-2 i / e).

    A smaller layer keeps some of the pairs, other ones in each key/value head; they turn as they
    did in the layer they come from.

    base: 10,000 in the paper, larger for long contexts.
    pairing: "halves" pairs feature i with i + e/2 (Llama, NeoX); "neighbours" pairs 2 i with
        2 i + 1 (RoFormer, GPT-J).
    kept: for each key/value head the original indices of its pairs, in their present order, the
        same number in every head; None for all of them, 0 to e/2 - 1.
    width: the original e, beside kept.

    Raises:
        ValueError: a setting out of range, kept without width or width without kept.
    """

    base: float = 10_000.0
    pairing: Pairing = "halves"
    kept: Sequence[Sequence[int]] | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        """Check the settings; kept becomes a tuple of tuples."""
        if not 1 < self.base < float("inf"):
            raise ValueError(f"Rotary(base=) must be a finite number above 1; found {self.base}.")
        if self.pairing not in ("halves", "neighbours"):
            raise ValueError(
                f'Rotary(pairing=) must be "halves" or "neighbours"; found {self.pairing!r}.'
            )
        if (self.kept is None) != (self.width is None):
            raise ValueError("Rotary(kept=) and Rotary(width=) must be given together.")
        if self.kept is not None:
            object.__setattr__(self, "kept", _checked_pairs(self.kept, self.width))

    def __repr__(self) -> str:
        """Settings; of kept pairs the number alone."""
        pairs = ""
        if self.kept is not None and self.width is not None:
            heads, count = len(self.kept), len(self.kept[0])
            pairs = f", {count} of {self.width // 2} pairs in {heads} head(s)"
        return f"Rotary(base={self.base}, pairing={self.pairing!r}{pairs})"

    def require_fits(self, kv_heads: int, e: int) -> None:
        """Raise ValueError unless `kept` is for so many key/value heads of width e."""
        if self.kept is None:
            return
        heads, pairs = len(self.kept), len(self.kept[0])
        if heads != kv_heads or 2 * pairs != e:
            raise ValueError(
                f"Rotary(kept=) must hold e/2 = {e / 2:g} pairs for each of {kv_heads} key/value "
                f"head(s); found {pairs} for {heads}."
            )

    def keep(self, pairs: Sequence[Sequence[int]], e: int) -> Rotary:
        """With the pairs at these places only, for each key/value head; e is the width so far."""
        width = e if self.width is None else self.width
        kept = self.kept or [range(e // 2)] * len(pairs)
        chosen = [[own[i] for i in places] for own, places in zip(kept, pairs, strict=True)]
        return Rotary(self.base, self.pairing, chosen, width)

    def take_heads(self, heads: Sequence[int]) -> Rotary:
        """For these key/value heads only."""
        kept = None if self.kept is None else [self.kept[g] for g in heads]
        return Rotary(self.base, self.pairing, kept, self.width)

    def split(
        self, t: Shaped[Tensor, "*lead e"]
    ) -> tuple[Shaped[Tensor, "*lead e//2"], Shaped[Tensor, "*lead e//2"]]:
        """First and second members of every pair."""
        half = t.shape[-1] // 2
        if self.pairing == "halves":
            return t[..., :half], t[..., half:]
        return t[..., 0::2], t[..., 1::2]

    def join(
        self, first: Shaped[Tensor, "*lead half"], second: Shaped[Tensor, "*lead half"]
    ) -> Shaped[Tensor, "*lead 2*half"]:
        """The inverse of `split`."""
        if self.pairing == "halves":
            return torch.cat([first, second], -1)
        return torch.stack([first, second], -1).flatten(-2)

    def rotate(
        self, t: Float[Tensor, "*lead n e"], first: int | Tensor = 0, back: bool = False
    ) -> Float[Tensor, "*lead n e"]:
        """Turn row j by position first + j; `back` is the transpose, which is the inverse.

        first may also hold the position of every row, as integers that broadcast to (*lead, n).

        With `kept`, the axis before the rows must be heads: the key/value heads, or query heads of
        which each key/value head has an equal number, one after another.
        """
        n, e = t.shape[-2:]
        places = torch.arange(n, device=t.device) + first if isinstance(first, int) else first
        pair = torch.arange(e // 2, dtype=torch.float64, device=t.device)
        if self.kept is not None:
            pair = torch.tensor(self.kept, dtype=torch.float64, device=t.device)[:, None]
        angle = places.double()[..., None] * self.base ** (-2.0 * pair / (self.width or e))
        cos, sin = angle.cos().to(t.dtype), angle.sin().to(t.dtype)
        if self.kept is not None:
            group = t.shape[-3] // len(self.kept)
            cos, sin = (x.repeat_interleave(group, -3) for x in (cos, sin))
        if back:
            sin = -sin
        x, y = self.split(t)
        return self.join(x * cos - y * sin, x * sin + y * cos)


def _checked_pairs(kept: Sequence[Sequence[int]], width: int | None) -> tuple[tuple[int, ...], ...]:
    """kept as tuples of integers."""
    if not isinstance(width, int) or isinstance(width, bool) or width < 2 or width % 2:
        raise ValueError(f"Rotary(width=) must be an even number above 0; found {width!r}.")
    listed = isinstance(kept, Sequence) and all(isinstance(head, Sequence) for head in kept)
    heads = tuple(map(tuple, kept)) if listed else ()
    sizes = {len(head) for head in heads}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            "Rotary(kept=) must hold equally many pairs, at least one, for each key/value head; "
            f"found {kept!r}."
        )
    for head in heads:
        whole = all(type(i) is int and 0 <= i < width // 2 for i in head)
        if not whole or len(set(head)) != len(head):
            raise ValueError(
                f"Rotary(kept=) must hold different pairs from 0 to {width // 2 - 1}; "
                f"found {head!r}."
            )
    return heads
