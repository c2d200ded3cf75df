"""What is proved, estimated or not certified about a point: plain numbers and sentences."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Literal

from newtention.display import Displayed, Row, Table, sentences

Verdict = Literal["proved", "estimated", "not certified"]


def rounded_up(value: float) -> float:
    """An upper bound with three digits, for print: what is read is proved as well."""
    return _rounded(value, ROUND_CEILING)


def rounded_down(value: float) -> float:
    """A lower bound likewise."""
    return _rounded(value, ROUND_FLOOR)


def _rounded(value: float, rounding: str) -> float:
    if not math.isfinite(value):
        return value
    return float(Context(prec=3, rounding=rounding).create_decimal(Decimal(value)))


@dataclass(frozen=True)
class Flat:
    """Directions along which an invariance keeps the loss.

    name: of the invariance.  count: dimensions of the weights that it takes.
    """

    name: str
    count: int


@dataclass(frozen=True)
class Basin:
    """Where approximate Newton steps are proved to contract (the paper's Section 14, corrected).

    With flat directions all of it is about steps in the others.

    epsilon: accuracy of the approximate Hessians, (1 - epsilon) H <= H~ <= (1 + epsilon) H.
    curvature, lipschitz: the paper's l and M, on the ball that holds the basin.
    radius: of the basin, in the norm of the Hessian at the solution.
    factor: by which every step contracts at least.
    accuracy, iterations: steps after which the error is at most `accuracy` times the first.
    inside: whether the certified point is proved to lie inside.
    """

    epsilon: float
    curvature: float
    lipschitz: float
    radius: float
    factor: float
    accuracy: float
    iterations: int
    inside: bool

    def __repr__(self) -> str:
        """One line."""
        return (
            f"Basin(the point is {'inside' if self.inside else 'not proved to be inside'}; radius "
            f"{rounded_down(self.radius):.3g}, factor {self.factor:.2g} a step)"
        )


@dataclass(frozen=True)
class Certificate(Displayed):
    """The outcome of `newtention.certify`.

    local_minimum: "proved": within `distance` of the point lies an exact stationary point, a strict
        local minimum; if there are flat directions, of the loss on the plane through the point that
        leaves them out.  "estimated": the smallest eigenvalue is positive by an estimate only.
    global_minimum: "proved": the loss has exactly one stationary point, its global minimum.
    distance: proved bound on the weights' Euclidean distance to it; infinite if nothing is proved.
    uniqueness_radius: no other stationary point is this near; 0 if nothing is proved.  It may be
        smaller than `distance`, where the proof was led elsewhere or with stretched coordinates.
    smallest_eigenvalue: of the Hessian at the point, without the flat directions; a lower bound if
        `eigenvalue_proved`.
    gradient: bound on the gradient's norm.  step: bound on the Newton step's, ||H^-1 g||.
    kantorovich: h = M ||H^-1 g|| / lambda of the proof, below 1/2 if it succeeds; where the point
        is not near enough, of the one that Newton steps lead to.
    lipschitz, lipschitz_level, lipschitz_radius: proved Lipschitz constant M of the Hessian on the
        ball of that radius about the point, and which bound gave it; `lipschitz_levels` holds all
        that were computed on that ball.
    paper_log10_lipschitz: log10 of the constant composed as in the paper's Sections 8 to 12.
    certifying_ridge: smallest r for which `Ridge(r, r)`, or `Ridge(x=r)` for an attention map, is
        proved to leave one stationary point.
    paper_log10_threshold: log10 of 30 R^8 (Lemma 9.1), to be compared with it.
    block_eigenvalue: lower bound of the smallest eigenvalue from the blocks alone (Lemma 6.1); a
        map has one block.
    basin: of approximate Newton steps, where a local minimum is proved.
    flat: invariances found, which the tokens satisfy but for their rounding.
    unknowns, relative_loss: of the problem and the point.
    precise: whether decisive quantities were computed beyond float64.
    reasons: what stands in the way, one sentence each.
    """

    local_minimum: Verdict
    global_minimum: Verdict
    distance: float
    uniqueness_radius: float
    smallest_eigenvalue: float
    eigenvalue_proved: bool
    gradient: float
    step: float
    kantorovich: float
    lipschitz: float
    lipschitz_level: str
    lipschitz_radius: float
    lipschitz_levels: dict[str, float]
    paper_log10_lipschitz: float | None
    certifying_ridge: float
    paper_log10_threshold: float | None
    block_eigenvalue: float
    basin: Basin | None
    flat: tuple[Flat, ...]
    unknowns: int
    relative_loss: float
    precise: bool
    reasons: tuple[str, ...]

    @property
    def flat_directions(self) -> int:
        """Dimensions that invariances take."""
        return sum(f.count for f in self.flat)

    @property
    def alone(self) -> bool:
        """Whether the proved minimum is the only stationary point within `distance`."""
        return self.distance < self.uniqueness_radius

    def summary(self) -> str:
        """Sentences that can be quoted."""
        return "\n".join([*sentences(self._rows()), *self.reasons])

    def _rows(self) -> list[Row]:
        rows: list[Row] = [
            ("Local minimum", self.local_minimum),
            ("Global minimum", self.global_minimum),
        ]
        proved = "proved" in (self.local_minimum, self.global_minimum)
        if proved:
            where = ""
            if self.flat and self.global_minimum != "proved":
                where = f", among the weights without {self._flat_words()},"
            rows.append(
                (
                    f"Within a distance of {rounded_up(self.distance):.3g} of the weights lies "
                    f"{'exactly one' if self.alone else 'an'} exact stationary point{where} and it "
                    "is a strict local minimum.",
                )
            )
        if self.global_minimum == "proved":
            rows.append(("It is the only stationary point of the loss: the global minimum.",))
        elif proved and 0 < self.uniqueness_radius < math.inf:
            rows.append((f"There is no other within {rounded_down(self.uniqueness_radius):.3g}.",))
        smallest = f"about {self.smallest_eigenvalue:.3g} (an estimate)"
        if self.eigenvalue_proved:
            smallest = f"at least {rounded_down(self.smallest_eigenvalue):.3g}"
        gradient = f"gradient at most {rounded_up(self.gradient):.3g}"
        rows.append(("Smallest eigenvalue of the Hessian", f"{smallest}; {gradient}"))
        if math.isfinite(self.lipschitz):
            paper = ""
            if self.paper_log10_lipschitz is not None:
                paper = f"; composed as in the paper: 10^{self.paper_log10_lipschitz:.0f}"
            bound = f"at most {rounded_up(self.lipschitz):.3g} ({self.lipschitz_level}){paper}"
            within = f"within {rounded_down(self.lipschitz_radius):.3g}"
            rows.append((f"Lipschitz constant of the Hessian {within}", bound))
        if math.isfinite(self.certifying_ridge):
            paper = ""
            if self.paper_log10_threshold is not None:
                paper = f"; the paper's threshold is 10^{self.paper_log10_threshold:.1f}"
            label = "A ridge that is proved to leave a single stationary point"
            rows.append((label, f"{rounded_up(self.certifying_ridge):.3g}{paper}"))
        if self.basin is not None:
            b = self.basin
            rows.append(
                (
                    f"Approximate Newton steps (Hessians within {b.epsilon:g}) contract by "
                    f"{b.factor:.2g} from within {rounded_down(b.radius):.3g} in the norm of the "
                    f"Hessian: {b.iterations} steps for {b.accuracy:g} of the first error.",
                )
            )
        return rows

    def _table(self) -> Table:
        return Table(f"Certificate of {self.unknowns} unknowns", self._rows(), notes=self.reasons)

    def _flat_words(self) -> str:
        parts = [f"{f.count} flat directions ({f.name})" for f in self.flat]
        return " and ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; infinity and NaN as strings, so that any JSON reader takes it."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {k: plain(v) for k, v in value.items()}
            if isinstance(value, list | tuple):
                return [plain(v) for v in value]
            if isinstance(value, float) and not math.isfinite(value):
                return str(value)
            return value

        return plain(asdict(self))

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Certificate:
        """The inverse of `to_dict`."""

        def number(value: Any) -> Any:
            return float(value) if value in ("inf", "-inf", "nan") else value

        fields = {k: number(v) if isinstance(v, str) else v for k, v in data.items()}
        fields["flat"] = tuple(Flat(**f) for f in data["flat"])
        basin = data["basin"]
        if basin is not None:
            fields["basin"] = Basin(**{k: number(v) for k, v in basin.items()})
        levels = data["lipschitz_levels"]
        fields["lipschitz_levels"] = {k: number(v) for k, v in levels.items()}
        fields["reasons"] = tuple(data["reasons"])
        return cls(**fields)

    def __repr__(self) -> str:
        """One line."""
        far = f"within {rounded_up(self.distance):.3g}, " if math.isfinite(self.distance) else ""
        return (
            f"Certificate(local minimum {self.local_minimum}, global minimum "
            f"{self.global_minimum}; {far}{self.unknowns} unknowns)"
        )

    def __str__(self) -> str:
        """The summary."""
        return self.summary()
