"""What an attention problem holds, and the problems and facts that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.chunks import Chunk, reduce
from newtention.display import Displayed, Table
from newtention.inputs import require_shape
from newtention.layout import Layout
from newtention.notation import Array
from newtention.regularizers import Quadratic, Regularizer, TokenWeights, zero_quadratic


@dataclass(frozen=True, eq=False, repr=False)
class ProblemData(Displayed):
    """The data of `AttentionProblem`, which makes them from the user's arrays."""

    chunks: tuple[Chunk, ...]
    batch: int
    """Number of independent problems; 1 unless made by `stack`."""
    quadratic: Quadratic
    regularizer: Regularizer | None
    layout: Layout
    scale: float
    mask: str
    """"none", "causal" or "explicit"."""
    numpy: bool
    """True when the data came as NumPy arrays."""
    parts: tuple[Self, ...]
    """The stacked problems; empty for a single one."""

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """(d1, d2, d3, p); d3 and p are 0 where the targets are attention maps."""
        return _widths(self.chunks[0])

    @property
    def of_maps(self) -> bool:
        """Whether the targets are attention maps: the values are the identity, there is no Y."""
        return self.widths[2] == 0

    @property
    def kind(self) -> tuple[object, ...]:
        """What stacked problems must have in common."""
        array = "NumPy" if self.numpy else "torch"
        return *self.widths, str(self.like.dtype)[6:], str(self.like.device), array

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the data."""
        return self.chunks[0].A1

    @property
    def bias_heads(self) -> int | None:
        """Number of heads the bias was given for, or None if it suits any number."""
        heads = {c.bias.shape[2] for c in self.chunks if c.bias is not None} - {1}
        return heads.pop() if heads else None

    @property
    def fixed_heads(self) -> int | None:
        """The number of heads that the bias or a Proximity reference asks for, if any."""
        centre = self.quadratic.centre_x
        return self.bias_heads or (None if centre is None else centre.shape[1])

    def target_energy(self) -> Float[Tensor, " b"]:
        """1/2 sum_j q_j ||B_j||^2 of each independent problem."""

        def energy(c: Chunk) -> tuple[Tensor]:
            return (0.5 * (c.weight * c.B.square().sum(-1)).sum((1, 2)),)

        return reduce(self.chunks, self.batch, energy)[0]

    def take(self, index: Int[Tensor, " k"]) -> Self:
        """The independent problems at `index`, repeats allowed, as one batch without `parts`."""
        chunks = []
        for chunk in self.chunks:
            # Places (i, j): the new problem i draws on the chunk's owner j.
            new, old = (index[:, None] == chunk.owner[None, :]).nonzero(as_tuple=True)
            if len(new):
                chunks.append(chunk.take(old, new))
        quadratic = self.quadratic.take(index)
        return self._changed(chunks=tuple(chunks), batch=len(index), quadratic=quadratic, parts=())

    def with_regularizer(self, regularizer: Regularizer | None) -> Self:
        """The same data under another regulariser, shared, not copied.

        Raises:
            ValueError: a stack of problems, `TokenWeights`, whose weights belong to the data, or a
                Proximity reference that does not fit the data.
            TypeError: not a regulariser.
        """
        if self.parts:
            raise ValueError("with_regularizer takes one problem, not a stack.")
        if isinstance(regularizer, TokenWeights):
            raise ValueError("TokenWeights must be given where the problem is made.")
        quadratic = compiled(regularizer, self.chunks)
        other = self._changed(regularizer=regularizer, quadratic=quadratic)
        other._require_heads()
        return other

    def sample(self, share: float) -> Self:
        """One problem's every (1/share)th sequence, its weights raised to those of all.

        Sequences are taken evenly over the lengths; at least one stays.  The regulariser is not
        part of the sample.  For curvature, not for results: rows have no place in the user's order.
        """
        wanted = max(1, round(share * len(self.layout.queries)))
        count = len(self.layout.queries)
        if wanted >= count:
            return self
        places = {int((i + 0.5) * count / wanted) for i in range(wanted)}
        chunks, first = [], 0
        for chunk in self.chunks:
            size = chunk.weight.shape[1]
            own = [p - first for p in sorted(places) if first <= p < first + size]
            if own:
                chunks.append(chunk.sequences(torch.tensor(own, device=chunk.owner.device)))
            first += size
        total, part = (sum(float(c.weight.sum()) for c in cs) for cs in (self.chunks, chunks))
        if part <= 0:
            return self
        return self.with_chunks(tuple(replace(c, weight=c.weight * (total / part)) for c in chunks))

    def with_chunks(self, chunks: tuple[Chunk, ...], layout: Layout | None = None) -> Self:
        """The same with other data; without their layout, rows lose the user's order."""
        return self._changed(chunks=chunks, layout=self.layout if layout is None else layout)

    def cast(self, dtype: torch.dtype) -> Self:
        """The same data in another floating type, for curvature: targets may overflow."""
        chunks = tuple(chunk.cast(dtype) for chunk in self.chunks)
        return self._changed(chunks=chunks, quadratic=self.quadratic.cast(dtype))

    def rows_from_chunks(
        self, values: Sequence[Float[Tensor, "1 _ _ _"]], width: int = 0
    ) -> Tensor:
        """Arrange per-query results of every chunk in the layout of the user's arrays.

        Padded rows of a padded batch are zero.  Narrower results (attention maps of shorter
        sequences) are filled up with zeros to the widest, and to `width`.
        """
        rows: list[Tensor] = [torch.empty(0)] * len(self.layout.queries)
        width = max(width, *(value.shape[-1] for value in values))
        for places, value in zip(self.layout.order, values, strict=True):
            missing = width - value.shape[-1]
            whole = torch.nn.functional.pad(value, (0, missing)) if missing else value
            for place, i in enumerate(places):
                rows[i] = whole[0, place, : self.layout.queries[i]]
        return self.layout.join(rows)

    def present(self, t: Tensor) -> Array:
        """A result as the user's kind of array."""
        return t.detach().cpu().numpy() if self.numpy else t

    def __repr__(self) -> str:
        """Shapes at a glance."""
        facts = self._facts()
        if self.parts:
            widths, numbers = facts["Widths"], facts["Numbers"]
            return f"AttentionProblem(stack of {self.batch}; {widths}, {numbers})"
        extra = "" if self.regularizer is None else f", {self.regularizer.describe()['name']}"
        return (
            f"AttentionProblem({facts['Sequences']} sequence(s), {facts['Queries']} queries, "
            f"{facts['Keys']} keys; {facts['Widths']}; scale {facts['Scale']}, "
            f"mask {facts['Mask']}{extra}; {facts['Numbers']})"
        )

    def _facts(self) -> dict[str, str]:
        names = ("d1", "d2") if self.of_maps else ("d1", "d2", "d3", "p")
        sizes = [f"{name} {width}" for name, width in zip(names, self.widths, strict=False)]
        shared = {
            "Widths": ", ".join(sizes + ["attention maps"] * self.of_maps),
            "Numbers": f"{str(self.like.dtype)[6:]} on {self.like.device}",
        }
        if self.parts:
            return {"Problems": str(self.batch), **shared}
        described = {"name": "none"} if self.regularizer is None else self.regularizer.describe()
        settings = [f"{name} {value}" for name, value in described.items() if name != "name"]
        return {
            "Sequences": str(len(self.layout.queries)),
            "Queries": str(sum(self.layout.queries)),
            "Keys": str(sum(self.layout.keys)),
            **shared,
            "Scale": f"{self.scale:g}",
            "Mask": self.mask,
            "Regulariser": ", ".join([str(described["name"]), *settings]),
        }

    def _table(self) -> Table:
        title = "AttentionProblem, a stack" if self.parts else "AttentionProblem"
        return Table(title, [*self._facts().items()])

    def _changed(self, **fields: Any) -> Self:
        """The same with other fields, unchecked."""
        other = type(self).__new__(type(self))
        ProblemData.__init__(other, **{**self.__dict__, **fields})
        return other

    def _require_heads(self) -> None:
        centre = self.quadratic.centre_x
        if centre is not None and self.bias_heads not in (None, centre.shape[1]):
            raise ValueError(
                f"bias is for {self.bias_heads} heads, Proximity(reference=) for {centre.shape[1]}."
            )


def compiled(regularizer: Regularizer | None, chunks: tuple[Chunk, ...]) -> Quadratic:
    """The regulariser of a problem as a quadratic.

    Raises:
        ValueError: a Proximity reference that does not fit the data.
        TypeError: not a regulariser.
    """
    d1, d2, d3, p = _widths(chunks[0])
    if regularizer is None:
        return zero_quadratic(1, d1, d2, d3, chunks[0].A1)
    if not isinstance(regularizer, Regularizer):
        raise TypeError(
            "regularizer must be Ridge, TokenWeights or Proximity; "
            f"found {type(regularizer).__name__}."
        )
    quadratic = regularizer.quadratic(chunks)
    _require_centre(quadratic, d1, d2, d3, p)
    return quadratic


def _widths(c: Chunk) -> tuple[int, int, int, int]:
    d1, d2, d3, p = (t.shape[-1] for t in (c.A1, c.A2, c.A3, c.B))
    return d1, d2, d3, p if d3 else 0  # no values: the columns of B are the keys


def _require_centre(quadratic: Quadratic, d1: int, d2: int, d3: int, p: int) -> None:
    X, Y = quadratic.centre_x, quadratic.centre_y
    if X is None or Y is None:
        return
    require_shape("Proximity(reference[0])", X[0], (None, d1, d2), "the shape of X")
    require_shape("Proximity(reference[1])", Y[0], (X.shape[1], d3, p), "the shape of Y")
