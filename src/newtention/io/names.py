"""Which array of a file plays which role in a problem."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from newtention.inputs import shape_text
from newtention.io.arrays import ArrayFile

ABSENT = "none"
"""As an array name: this role has no array, even if the file has one of the usual name."""

USUAL_NAMES = {
    "queries": ("tokens", "hidden"),
    "targets": ("head_output", "output"),
}
"""Names tried where the file has no array named like the role itself."""


@dataclass(frozen=True)
class ArrayNames:
    """Which array of a file plays which role.

    None means the usual choice (see `load_problem`), "none" that the role has no array.
    """

    queries: str | None = None
    targets: str | None = None
    keys: str | None = None
    values: str | None = None
    offsets: str | None = None
    key_offsets: str | None = None
    lengths: str | None = None
    key_lengths: str | None = None

    def given(self) -> dict[str, str]:
        """Role and name of the arrays that there are."""
        return {role: name for role, name in asdict(self).items() if name not in (None, ABSENT)}

    def exact(self) -> ArrayNames:
        """The same choice with nothing left to the usual one."""
        return ArrayNames(
            **{role: ABSENT if name is None else name for role, name in asdict(self).items()}
        )

    def updated(self, other: ArrayNames) -> ArrayNames:
        """These names, with those that `other` gives in their place."""
        return replace(self, **{r: n for r, n in asdict(other).items() if n is not None})

    def elsewhere(self) -> ArrayNames:
        """What to look for in another file than the one these names were used for.

        Self-attention stays self-attention.  The file may be divided into sequences where the first
        was not.
        """
        return replace(self, keys=self.keys or ABSENT, values=self.values or ABSENT)


def choose_names(file: ArrayFile, asked: ArrayNames, without_targets: bool) -> ArrayNames:
    """The array of every role; None where there is none.

    Raises:
        ValueError: a required or named array is missing, the usual names are ambiguous, or offsets
            are named for padded data and the like.
    """
    used: dict[str, str | None] = {}

    def usual(role: str) -> str | None:
        if role in file.arrays:
            return role
        found = [name for name in USUAL_NAMES.get(role, ()) if name in file.arrays]
        if len(found) > 1:
            raise ValueError(
                f"{file.label} holds {' and '.join(map(repr, found))}; say which are the {role} "
                f"with {option(role)}."
            )
        return found[0] if found else None

    def choose(role: str, optional: bool = True) -> None:
        name = getattr(asked, role)
        if name == ABSENT and optional:
            used[role] = None
            return
        if name is None:
            name = usual(role)
        if name is None and not optional:
            usually = " or ".join(map(repr, (role, *USUAL_NAMES[role])))
            raise ValueError(
                f"{file.label} has no array named {usually}; name the {role} with "
                f"{option(role)}.  It holds {file.listing()}."
            )
        if name is not None and name not in file.arrays:
            raise ValueError(
                f"{file.label} has no array {name!r} ({role}); it holds {file.listing()}."
            )
        used[role] = name

    choose("queries", optional=False)
    choose("targets", optional=without_targets)
    choose("keys")
    choose("values")
    # Offsets suit 2-D arrays, lengths 3-D ones; whatever is named explicitly is not ignored.
    shape = file.arrays[used["queries"] or ""].shape
    kinds = (("offsets", "key_offsets"), ("lengths", "key_lengths"))
    suitable, other = kinds if len(shape) == 2 else kinds[::-1]
    for role in other:
        if getattr(asked, role) not in (None, ABSENT):
            raise ValueError(
                f"{file.label}: {role.replace('_', ' ')} do not go with queries of shape "
                f"{shape_text(shape)}; offsets are for 2-D arrays, lengths for 3-D ones."
            )
    choose(suitable[0])
    if used["keys"] is not None or getattr(asked, suitable[1]) is not None:
        choose(suitable[1])
    return ArrayNames(**used)


def option(role: str) -> str:
    """The command line's option for a role, for messages."""
    return "--" + role.replace("_", "-")
