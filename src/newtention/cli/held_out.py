"""Held-out data: another file, or a share of the sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from newtention.io import Provenance, load_problem
from newtention.problem import AttentionProblem

ROLES = ("queries", "keys", "values", "targets")


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Data to validate on.

    record: for result.json.
    """

    problem: AttentionProblem
    record: dict[str, Any]

    def sentence(self) -> str:
        """What was held out."""
        layout = self.problem.layout
        size = f"{len(layout.queries)} sequence(s), {sum(layout.queries)} queries"
        every = self.record["every"]
        if every:
            return f"Held out: every {_ordinal(every)} sequence of {self.record['source']}; {size}."
        return f"Held out: {self.record['source']}; {size}."


def hold_out_of(file: str | None, share: float | None, patience: int | None) -> int:
    """Every so many-th sequence of SOURCE is held out; 0 for none.

    Raises:
        ValueError: a share out of range, or options that do not go together.
    """
    if patience is not None and file is None and share is None:
        raise ValueError("--patience goes with --validation or --validation-share.")
    if share is None:
        return 0
    if file is not None:
        raise ValueError("--validation and --validation-share exclude each other.")
    if not 0 < share <= 0.5:
        raise ValueError(f"--validation-share must be above 0 and at most 0.5; found {share:g}.")
    return round(1 / share)


def load_held_out(
    file: str | None, problem: AttentionProblem, provenance: Provenance
) -> HeldOut | None:
    """The validation data of a problem, from a file or from what its `hold_out` leaves out.

    Raises:
        OSError, ValueError, TypeError: as for `load_problem`; also targets missing, other widths.
    """
    if file is None and not provenance.hold_out:
        return None
    held, origin = load_problem(
        provenance.source if file is None else file,
        provenance.arrays.exact() if file is None else provenance.arrays.elsewhere(),
        mask=provenance.mask,
        scale=provenance.scale,
        dtype=provenance.dtype,
        hold_out=provenance.hold_out,
        held_out=file is None,
        kind=provenance.kind,
    )
    different = unequal_width(held, problem.widths)
    if different is not None:
        role, found, wanted = different
        raise ValueError(
            f"The {role} of {origin.source} must have width {wanted}, as those of "
            f"{provenance.source}; found {found}."
        )
    record = {
        "source": origin.source,
        "sha256": origin.sha256,
        "arrays": origin.to_dict()["arrays"],
        "every": provenance.hold_out or None,
        "sequences": len(held.layout.queries),
        "queries": sum(held.layout.queries),
    }
    return HeldOut(held, record)


def unequal_width(
    problem: AttentionProblem, widths: tuple[int, ...]
) -> tuple[str, int, int] | None:
    """(role, found, wanted) of the first width that is not as wanted, (d1, d2, d3, p)."""
    for role, found, wanted in zip(ROLES, problem.widths, widths, strict=True):
        if found != wanted:
            return role, found, wanted
    return None


def _ordinal(n: int) -> str:
    """2 as 'second', 21 as '21st'."""
    words = {2: "second", 3: "third", 4: "fourth", 5: "fifth"}
    tens = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return words.get(n, f"{n}{tens}")
