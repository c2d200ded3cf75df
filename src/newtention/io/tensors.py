"""The arrays of a source as tensors, checked under the names the user gave them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from newtention.inputs import as_lengths, as_offsets, require_finite, shape_text
from newtention.io.arrays import ArrayFile
from newtention.io.names import ArrayNames, option

OF_LAYERS = {"A1": "queries", "A2": "keys", "A3": "values", "B": "targets"}
OF_SOFTMAX = {"A": "queries", "b": "targets"}
"""What the library's messages call an array, and its role."""
_DEFAULTS = {"values": "keys", "keys": "queries"}
"""Which array takes a role that has none of its own."""


class SourceData:
    """The arrays of a file, converted and checked, under the names the user gave them.

    tensors: queries, targets, keys, values, those that there are; equal arrays are one object.
    rows: offsets, key_offsets, lengths, key_lengths, those that there are.
    """

    def __init__(self, file: ArrayFile, names: ArrayNames, dtype: torch.dtype) -> None:
        self.file = file
        self.names = names.given()
        read: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        for role, name in self.names.items():
            if role in ("queries", "targets", "keys", "values"):
                if name not in read:
                    read[name] = self._numbers(role, file.read(name), dtype)
                self.tensors[role] = read[name]
            else:
                self.rows[role] = file.read(name)

    def title(self, role: str) -> str:
        """How messages name the array of a role."""
        return f"{self.file.label}: array {self.names[role]!r} ({role.replace('_', ' ')})"

    @contextmanager
    def named(self, symbols: Mapping[str, str]) -> Iterator[None]:
        """Errors and warnings of the library inside name the file, and its arrays by their names.

        symbols: what these messages call an array, and its role.

        Raises:
            ValueError, TypeError: what is raised inside, in these words.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            except (ValueError, TypeError) as error:
                text = str(error)
                own = self._renamed(text, symbols)
                raise type(error)(own or f"{self.file.label}: {text}") from error
        for w in caught:
            own = self._renamed(str(w.message), symbols)
            warnings.warn(own or w.message, w.category, stacklevel=3)

    def _renamed(self, text: str, symbols: Mapping[str, str]) -> str | None:
        """The same about the user's array; None if the text begins with none."""
        word, _, rest = text.partition(" ")
        role = symbols.get(word, word)
        while role not in self.names and role in _DEFAULTS:
            role = _DEFAULTS[role]
        known = role in self.names and role in self.tensors
        return f"{self.title(role)} {rest.removeprefix('(the targets) ')}" if known else None

    def require_shapes(self) -> None:
        """Raise ValueError where shapes do not fit together."""
        t = self.tensors
        a1 = t["queries"]
        if a1.ndim not in (2, 3):
            raise ValueError(
                f"{self.title('queries')} must be 2-D (tokens x width) or 3-D (sequences x tokens "
                f"x width); found {shape_text(a1.shape)}."
            )
        for role, x in t.items():
            if x.ndim != a1.ndim or 0 in x.shape:
                raise ValueError(
                    f"{self.title(role)} must be {a1.ndim}-D like the queries and not empty; found "
                    f"{shape_text(x.shape)}."
                )
        self._require_rows("targets", "queries")
        if "keys" in t or "values" in t:
            self._require_rows("values", "keys" if "keys" in t else "queries")
        if "keys" in t and a1.ndim == 3 and t["keys"].shape[0] != a1.shape[0]:
            raise ValueError(
                f"{self.title('keys')} must hold {a1.shape[0]} sequences like the queries; found "
                f"{t['keys'].shape[0]}."
            )
        self._require_sequences(a1, t.get("keys", a1))

    def _require_rows(self, role: str, model: str) -> None:
        if role not in self.tensors:
            return
        want, found = self.tensors[model].shape, self.tensors[role].shape
        if want[:-1] != found[:-1]:
            raise ValueError(
                f"{self.title(role)} must have one row per row of {self.names[model]!r} ({model}, "
                f"{shape_text(want)}); found {shape_text(found)}."
            )

    def _require_sequences(self, a1: Tensor, a2: Tensor) -> None:
        rows = self.rows
        for role, x in (("offsets", a1), ("key_offsets", a2)):
            if role in rows:
                as_offsets(self.title(role), rows[role], len(x))
        for role, x in (("lengths", a1), ("key_lengths", a2)):
            if role in rows:
                as_lengths(self.title(role), rows[role], x.shape[0], x.shape[1])
        for role, partner, same in (
            ("offsets", "key_offsets", len(a1) == len(a2)),
            ("lengths", "key_lengths", a1.shape[-2] == a2.shape[-2]),
        ):
            if partner in rows and role not in rows:
                raise ValueError(
                    f"{self.title(partner)} needs {role} of the queries beside it; name them with "
                    f"{option(role)}."
                )
            if role in rows and partner not in rows and not same:
                raise ValueError(
                    f"{self.file.label}: keys of shape {shape_text(a2.shape)} beside queries of "
                    f"shape {shape_text(a1.shape)} need {partner.replace('_', ' ')}; name them "
                    f"with {option(partner)}."
                )

    def _numbers(self, role: str, t: Tensor, dtype: torch.dtype) -> Tensor:
        if t.is_complex() or t.dtype == torch.bool:
            raise TypeError(f"{self.title(role)} must hold real numbers; found {str(t.dtype)[6:]}.")
        target = str(dtype)[6:]
        if not t.is_floating_point():
            warnings.warn(
                f"{self.title(role)} holds integers; computing in {target}.", stacklevel=4
            )
        converted = t.to(dtype)
        if t.dtype == torch.float64 and bool((torch.isinf(converted) & torch.isfinite(t)).any()):
            raise ValueError(f"{self.title(role)} holds numbers beyond the range of {target}.")
        require_finite(self.title(role), converted)
        return converted
