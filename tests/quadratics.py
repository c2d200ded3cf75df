"""Trust-region subproblems with their optimal values, for unit and property tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from newtention.linsolve.trust_region import EASY, HARD, rounding_floor, trust_region_step

KINDS = ("definite", "indefinite", "singular", "negative", "ill-conditioned", "zero")
GRADIENTS = ("general", "hard", "nearly hard", "zero")


@dataclass(frozen=True)
class Subproblem:
    """Minimise g.s + 1/2 s.H s in the ball; values and vectors are H's own."""

    H: torch.Tensor
    g: torch.Tensor
    radius: float
    values: torch.Tensor
    vectors: torch.Tensor

    def optimum(self) -> float:
        """The largest decrease: the least over lam of 1/2 (sum g_i^2 / (v_i + lam) + lam r^2).

        The dual is convex on lam > max(0, -lowest), attains the primal value (strong duality holds
        for this problem, hard case included) and any lam bounds it from above, so a coarse search
        errs on the strict side.
        """
        v, g = self.values, self.vectors.T @ self.g
        low = max(0.0, -float(v[0]))

        def dual(lam: torch.Tensor) -> torch.Tensor:
            shifted = v + lam[:, None]
            terms = torch.where(g == 0, 0.0, g.square() / shifted.clamp(min=0))
            return 0.5 * (terms.nan_to_num(posinf=torch.inf).sum(1) + lam * self.radius**2)

        grid = torch.cat([torch.zeros(1), torch.logspace(-18, 12, 3001, dtype=torch.float64)])
        lam = low + grid.double()
        for _ in range(4):
            best = int(dual(lam).argmin())
            a, b = lam[max(best - 1, 0)], lam[min(best + 1, len(lam) - 1)]
            lam = torch.linspace(float(a), float(b), 201, dtype=torch.float64)
        return float(dual(lam).min())

    def check(
        self, step: torch.Tensor, decrease: float, lam: float, interior: bool, guess: float = 0.0
    ) -> None:
        """Raise unless the step keeps the promises of `trust_region_step`."""
        n = len(self.g)
        floor = rounding_floor(n, self.H.dtype)
        size = max(float(self.values.abs().max()), floor)
        norm = float(step.norm())
        if not norm <= (1 + EASY) * self.radius * (1 + 1e-12):
            raise AssertionError(f"step of length {norm} in a ball of radius {self.radius}")
        model = -float(self.g @ step + 0.5 * step @ self.H @ step)
        noise = 1e-12 * (float(self.g.norm()) * self.radius + size * self.radius**2)
        if not abs(model - decrease) <= noise:
            raise AssertionError(f"decrease {decrease} reported, {model} found")
        # An easy step is optimal in a ball of at least (1 - EASY) r, and a fraction t of the best
        # step keeps t^2 of its decrease; a hard one misses at most HARD.  The shift of floor costs
        # at most floor/2 r^2.
        least = min((1 - EASY) ** 2, 1 - HARD) * self.optimum() - 0.5 * floor * self.radius**2
        if not decrease >= least - noise:
            raise AssertionError(f"decrease {decrease}, promised {least} of {self.optimum()}")
        slack = 1e-12 * size
        if not lam >= max(floor, -float(self.values[0])) - slack:
            raise AssertionError(f"multiplier {lam} with lowest eigenvalue {float(self.values[0])}")
        shifted = self.values + floor
        fits = (
            float(shifted[0]) > 1e-3 * floor + slack
            and float(((self.vectors.T @ self.g) / shifted).norm())
            < 0.99 * (1 - EASY) * self.radius
        )
        if fits and not interior and (guess == 0 or not self.g.any()):
            # What `converged` relies on.  With a guess, a step to the boundary that is nearly as
            # good may be taken first.
            raise AssertionError("the Newton step fits but is not called interior")
        if interior:
            # The unconstrained minimiser of the shifted model, which must be convex.
            if not float(self.values[0]) + floor > -slack:
                raise AssertionError(f"interior with lowest eigenvalue {float(self.values[0])}")
            residual = float((self.H @ step + floor * step + self.g).norm())
            if not residual <= 1e-10 * (size * norm + float(self.g.norm())):
                raise AssertionError(f"interior step with residual {residual}")


def draw(kind: str, gradient: str, n: int, radius: float, size: float, seed: int) -> Subproblem:
    """A random subproblem of size n; `size` is the length of g."""
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q
    u = torch.rand(n, generator=g, dtype=torch.float64)
    v = {
        "definite": 0.1 + 2 * u,
        "indefinite": 2 * u - 1,
        "singular": torch.where(torch.arange(n) < (n + 1) // 2, 0.0, 0.5 + u),
        "negative": -0.1 - u,
        "ill-conditioned": 10.0 ** (-10 * u),
        "zero": 0 * u,
    }[kind].sort()
    v = v.values
    H = Q @ torch.diag(v) @ Q.T
    H = 0.5 * (H + H.T)
    # The eigenvalues of the rounded matrix, so that the oracle solves the same problem.
    v, Q = torch.linalg.eigh(H)
    c = torch.randn(n, generator=g, dtype=torch.float64)
    if gradient == "hard":
        c[0] = 0.0
    elif gradient == "nearly hard":
        c[0] = 10.0 ** -(4 + 10 * float(torch.rand(1, generator=g)))
    elif gradient == "zero":
        c = 0 * c
    b = Q @ c
    if gradient == "hard":
        b = b - Q[:, 0] * (Q[:, 0] @ b)
    if float(b.norm()) > 0:
        b = b * (size / b.norm())
    return Subproblem(H, b, radius, v, Q)


def solve(problems: list[Subproblem], guesses: list[float]) -> None:
    """One batched call, every member checked."""
    steps = trust_region_step(
        torch.stack([p.H for p in problems]),
        torch.stack([p.g for p in problems]),
        torch.tensor([p.radius for p in problems], dtype=torch.float64),
        torch.tensor(guesses, dtype=torch.float64),
    )
    for i, p in enumerate(problems):
        got = (float(steps.decrease[i]), float(steps.lam[i]), bool(steps.interior[i]))
        p.check(steps.step[i], *got, guess=guesses[i])
