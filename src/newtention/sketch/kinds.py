"""The kinds of sketch by name."""

from __future__ import annotations

from newtention.sketch.base import Distribution
from newtention.sketch.countsketch import CountSketch
from newtention.sketch.gaussian import Gaussian
from newtention.sketch.leverage import LeverageSampling
from newtention.sketch.srht import SRHT
from newtention.sketch.tensor_sketch import TensorSketch
from newtention.sketch.tensor_srht import TensorSRHT

KINDS: dict[str, type[Distribution]] = {
    kind.name: kind
    for kind in (LeverageSampling, TensorSRHT, TensorSketch, SRHT, CountSketch, Gaussian)
}


def find_kind(kind: str | type[Distribution]) -> type[Distribution]:
    """The kind of this name; a kind stays as it is.

    Raises:
        ValueError: there is none.
    """
    if isinstance(kind, type) and kind in KINDS.values():
        return kind
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; found {kind!r}.")
    return KINDS[kind]
