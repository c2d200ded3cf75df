"""Rotary positions (Su et al. 2021): pairs of features turned by position times a frequency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Pairing = Literal["halves", "neighbours"]


@dataclass(frozen=True)
class Rotary:
    """Pair i of a head of width e turns by position * base^(-2 i / e).

    base: 10,000 in the paper, larger for long contexts.
    pairing: "halves" pairs feature i with i + e/2 (Llama, NeoX); "neighbours" pairs 2 i with
        2 i + 1 (RoFormer, GPT-J).
    """

    base: float = 10_000.0
    pairing: Pairing = "halves"

    def __post_init__(self) -> None:
        """Check the settings."""
        if not 1 < self.base < float("inf"):
            raise ValueError(f"Rotary(base=) must be a finite number above 1; found {self.base}.")
        if self.pairing not in ("halves", "neighbours"):
            raise ValueError(
                f'Rotary(pairing=) must be "halves" or "neighbours"; found {self.pairing!r}.'
            )

    def rotate(
        self, t: Float[Tensor, "*lead n e"], first: int = 0, back: bool = False
    ) -> Float[Tensor, "*lead n e"]:
        """Turn row j by position first + j; `back` is the transpose, which is the inverse."""
        n, e = t.shape[-2:]
        pair = torch.arange(e // 2, dtype=torch.float64, device=t.device)
        place = torch.arange(first, first + n, dtype=torch.float64, device=t.device)
        angle = place[:, None] * self.base ** (-2.0 * pair / e)
        cos, sin = angle.cos().to(t.dtype), angle.sin().to(t.dtype)
        if back:
            sin = -sin
        if self.pairing == "halves":
            x, y = t[..., : e // 2], t[..., e // 2 :]
            return torch.cat([x * cos - y * sin, x * sin + y * cos], -1)
        x, y = t[..., 0::2], t[..., 1::2]
        return torch.stack([x * cos - y * sin, x * sin + y * cos], -1).flatten(-2)
