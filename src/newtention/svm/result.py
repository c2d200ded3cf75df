"""The outcome of `attention_svm`: plain data and sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from newtention.display import Displayed, Table
from newtention.notation import Array

Norm = Literal["frobenius", "nuclear"]
_SHOWN = 6


class SvmStatus(Enum):
    """How a computation ended; each value is its sentence."""

    SOLVED = "Solved: the duality gap over all constraints is within the tolerance."
    NO_CONSTRAINTS = (
        "No query has a second key to attend to, so there are no constraints: X = 0 and the margin "
        "is infinite."
    )
    INFEASIBLE = "Infeasible: no X gives every selected key the largest logit."
    UNRESOLVED = (
        "Unresolved: neither an X nor a conflict was found; the margin, if there is one, is below "
        "what float64 resolves."
    )
    INACCURATE = "Stopped at the accuracy of the solver, with a duality gap above the tolerance."
    ROUND_LIMIT = "Stopped at the limit of rounds, with a duality gap above the tolerance."


@dataclass(frozen=True, eq=False)
class Conflict:
    """Pairs (j, k) whose constraints contradict each other.

    pairs: (c, 2), query and key; of several sequences (c, 3), sequence, query and key within it.
        Query j is to prefer its selected key to key k.
    selected: (c,), the selected key of each pair's query.
    weights: (c,), positive, of sum 1: sum_c weights_c f_c = 0, so that no X has all f_c . X > 0.
    residual: ||sum y f||_F / sum y ||f||_F as computed: an X of Frobenius norm below
        1 / (residual times the largest ||f_c||) satisfies the pairs in no case.  0 where the sum
        was found to be 0 in exact arithmetic.
    irreducible: without any one of the pairs, the others can be satisfied (judged in float64).
    proved: rounding is accounted for: the numbers given are in conflict, not just some near them.
    """

    pairs: Array
    selected: Array
    weights: Array
    residual: float
    irreducible: bool
    proved: bool

    def summary(self) -> str:
        """Which tokens, in sentences."""
        rows = list(zip(self.pairs.tolist(), self.selected.tolist(), strict=True))
        queries = {tuple(query) for (*query, _), _ in rows}
        parts = [
            f"{_named(query)} selects key {t} over key {k}" for (*query, k), t in rows[:_SHOWN]
        ]
        more = f"; and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        few = "that cannot be thinned out" if self.irreducible else "perhaps more than needed"
        how = "proved"
        if not self.proved:
            how = f"up to rounding: weighted, their features cancel to {self.residual:.1e}"
        return (
            f"{len(rows)} pair(s) of {len(queries)} query(ies), {few}, contradict each other "
            f"({how}): {'; '.join(parts)}{more}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "pairs": self.pairs.tolist(),
            "selected": self.selected.tolist(),
            "weights": self.weights.tolist(),
            "residual": self.residual,
            "irreducible": self.irreducible,
            "proved": self.proved,
        }

    def __repr__(self) -> str:
        """One line."""
        how = "proved" if self.proved else "up to rounding"
        few = ", irreducible" if self.irreducible else ""
        return f"Conflict({len(self.pairs)} pairs{few}, {how})"


@dataclass(frozen=True, eq=False)
class AttentionSVM(Displayed):
    """The smallest X that gives each query's selected key the largest logit by at least 1.

    X: (d1, d2), for which all constraints hold; None if there is none, or none was found.
    norm: "frobenius" or "nuclear".  soft: C, or None for the hard margin.
    margin: 1 / ||X|| in that norm, the smallest lead of a selected key for an X of norm 1; infinite
        for X = 0, 0 without X.
    objective: ||X|| for the hard margin; with C, 1/2 ||X||_F^2 + C sum xi or ||X||_* + C sum xi.
    lower_bound: no admissible X has a smaller objective, by weak duality from `duals`.
    gap: objective / lower_bound - 1; 0 if both are 0, infinite if nothing is known.
    violation: the largest violation of any constraint by X as returned, slack counted; 0 but for
        rounding.
    support: (s, 2), pairs (query, key) with a positive multiplier: the support tokens; of several
        sequences (s, 3), (sequence, query, key).
    duals: (s,), their multipliers; in the Frobenius norm X = sum duals_c f_c.
    slack: (n,), xi_j >= 0, one for each query, in the shape of `selected`, 0 in padded rows; None
        for the hard margin.
    active: pairs in the last program, of all n (m - 1).
    rounds: programs solved.
    status: why it ended; `message` says it in full.
    conflict: pairs that contradict each other, where there is no X.
    """

    X: Array | None
    norm: Norm
    soft: float | None
    margin: float
    objective: float
    lower_bound: float
    gap: float
    violation: float
    support: Array
    duals: Array
    slack: Array | None
    active: int
    rounds: int
    status: SvmStatus
    conflict: Conflict | None = None

    @property
    def success(self) -> bool:
        """Whether X is the solution, to the tolerance."""
        return self.status in (SvmStatus.SOLVED, SvmStatus.NO_CONSTRAINTS)

    @property
    def infeasible(self) -> bool:
        """Whether the constraints were found to contradict each other."""
        return self.status is SvmStatus.INFEASIBLE

    @property
    def message(self) -> str:
        """The status, and what conflicts."""
        conflict = "" if self.conflict is None else f"  {self.conflict.summary()}"
        return f"{self.status.value}{conflict}"

    @property
    def distance(self) -> float:
        """Bound on ||X - X*||_F from the gap, X* the solution; infinite for the nuclear norm.

        The objective is 1-strongly convex (the hard margin's as half its square), and X admissible:
        1/2 ||X - X*||_F^2 is at most what the objective can still fall.
        """
        if self.norm == "nuclear" or self.X is None:
            return math.inf
        if self.soft is not None:
            return math.sqrt(2.0 * max(0.0, self.objective - self.lower_bound))
        return math.sqrt(max(0.0, self.objective**2 - self.lower_bound**2))

    def summary(self) -> str:
        """Sentences that can be quoted."""
        lines, facts = [self.message], self._facts()
        if facts:
            lines.append(f"Margin {facts['Margin']}; objective {facts['Objective']}.")
            lines.append(f"{facts['Support']}; {facts['Programs']}.")
        if "Slack" in facts:
            lines.append(f"{facts['Slack']}.")
        return "\n".join(lines)

    def _facts(self) -> dict[str, str]:
        if self.X is None or self.status is SvmStatus.NO_CONSTRAINTS:
            return {}
        kind = "Frobenius" if self.norm == "frobenius" else "nuclear"
        queries = len({tuple(query) for *query, _ in self.support.tolist()})
        gap = f"at most {max(self.gap, 0.0):.1e} of it above the smallest (duality gap)"
        facts = {
            "Margin": f"{self.margin:.6g} in the {kind} norm",
            "Objective": f"{self.objective:.10g}, {gap}",
            "Support": f"{len(self.support)} support pair(s) of {queries} query(ies)",
            "Programs": f"{self.active} pairs in the last of {self.rounds} program(s)",
        }
        if self.slack is not None:
            short = int((self.slack > 1e-9).sum())  # less is rounding
            facts["Slack"] = f"{short} query(ies) fall short of the margin"
        return facts

    def _table(self) -> Table:
        margin = "hard margin" if self.soft is None else f"soft margin, C = {self.soft:g}"
        return Table(f"AttentionSVM: {margin}", [*self._facts().items()], notes=(self.message,))

    def to_dict(self) -> dict[str, Any]:
        """Plain data without X, support, duals and slack; infinity as a string."""

        def plain(value: float) -> float | str:
            return value if math.isfinite(value) else str(value)

        numbers = ("margin", "objective", "lower_bound", "gap", "violation", "distance")
        return {
            "status": self.status.name,
            "success": self.success,
            "message": self.message,
            "norm": self.norm,
            "soft": self.soft,
            **{name: plain(getattr(self, name)) for name in numbers},
            "support_pairs": len(self.support),
            "active": self.active,
            "rounds": self.rounds,
            "conflict": None if self.conflict is None else self.conflict.to_dict(),
        }

    def __repr__(self) -> str:
        """One line."""
        return (
            f"AttentionSVM({self.status.name.lower().replace('_', ' ')}, margin "
            f"{self.margin:.6g} in the {self.norm} norm, gap {self.gap:.1e}, "
            f"{len(self.support)} support pairs)"
        )

    def __str__(self) -> str:
        """The summary."""
        return self.summary()


def _named(query: list[int]) -> str:
    """(j) or (sequence, j) in words."""
    *sequence, j = query
    return f"query {j}" + "".join(f" of sequence {i}" for i in sequence)
