"""Packaged example data: small pieces of real attention layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Example:
    """One packaged data file.

    name: as in ``example:NAME``.
    file: file name beside this module.
    description: what it holds and where it comes from.
    ridge: strength at which a first fit is well posed and quick.
    """

    name: str
    file: str
    description: str
    ridge: float

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return Path(__file__).parent / self.file


EXAMPLES = {
    example.name: example
    for example in (
        Example(
            name="minilm-head",
            file="minilm_head.safetensors",
            description=(
                "One attention head of a sentence encoder (all-MiniLM-L6-v2, layer 3, head 4) on "
                "40 sentences: its input tokens, reduced to 31 leading directions and a constant, "
                "and the output it computes from them."
            ),
            ridge=0.1,
        ),
    )
}

KEYPOINTS = Path(__file__).parent / "lighterglue_keypoints.safetensors"
"""Cross-attention of a keypoint matcher (XFeat's LighterGlue, layer 0) on 256 + 256 keypoints of a
photograph and its rotated copy: `queries` and `keys` (256 x 96), the layer's output `targets` for
the queries, and the map that both share, q = x `to_qk_W` + `to_qk_b`, logits divided by sqrt(96).
No example: a fit of its 18,432 unknowns is not quick at any ridge."""


MAPS = Path(__file__).parent / "minilm_maps.safetensors"
"""Attention maps of the head of example:minilm-head on its first 32 sentences, computed from tokens
of full width: `maps`, rows of weights filled up with zeros to the longest sentence, and `offsets`
of the sentences; `X` (32 x 32), the head's own query/key map, scale included, in the coordinates of
the example's tokens."""


def find_example(name: str) -> Example:
    """The example of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in EXAMPLES:
        known = ", ".join(f"example:{n}" for n in EXAMPLES)
        raise ValueError(f"There is no example {name!r}; packaged with Newtention: {known}.")
    return EXAMPLES[name]
