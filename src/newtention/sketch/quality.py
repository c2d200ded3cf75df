"""How good a sketch is on the data at hand: distortion, failure rates, calibrated sizes, time."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.inputs import require_count
from newtention.notation import ArrayLike
from newtention.sketch.arguments import require_fraction
from newtention.sketch.base import Distribution, Sketch
from newtention.sketch.gaussian import Gaussian
from newtention.sketch.kinds import find_kind
from newtention.sketch.leverage import LeverageSampling, orthonormal_bases
from newtention.sketch.sizes import size_after_transform, size_for
from newtention.sketch.tensor_srht import TensorSRHT

_TIMED = 3
"""Draws that are timed."""


@dataclass(frozen=True)
class Calibration:
    """The size that a kind of sketch needs on given factors, as measured.

    kind: of sketch, by name.
    size: rows.
    rate: share of the draws at this size whose distortion exceeds epsilon; at most delta.
    interval: Clopper-Pearson interval of the probability of that, of 95 percent at one given size.
    epsilon, delta, draws: as asked.
    """

    kind: str
    size: int
    rate: float
    interval: tuple[float, float]
    epsilon: float
    delta: float
    draws: int

    def __repr__(self) -> str:
        """One line."""
        low, high = self.interval
        return (
            f"Calibration({self.kind}: size {self.size}, rate {self.rate:.3g} in [{low:.3g}, "
            f"{high:.3g}], epsilon {self.epsilon:g}, delta {self.delta:g}, {self.draws} draws)"
        )


@dataclass(frozen=True)
class Measurement:
    """Distortion of several draws of a sketch on given factors, and the time of one.

    distortion: median.  high: 0.9 quantile.  seconds: median of drawing S and applying it.
    """

    kind: str
    size: int
    distortion: float
    high: float
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """One kind of sketch on given factors.

    formula: rows that are proved to suffice (`size_for`).  transformed: for a TensorSRHT, those
    that suffice given the first draw's signs (`size_after_transform`).
    """

    kind: str
    formula: int
    transformed: int | None
    calibration: Calibration
    measurements: tuple[Measurement, ...]


def distortion(sketch: Sketch | Distribution, A1: ArrayLike, A2: ArrayLike | None = None) -> float:
    """max |eig((S U)^T S U) - 1|, U = U1 (x) U2 an orthonormal basis of A1 (x) A2's columns.

    The least epsilon with (1 - epsilon) K^T K <= (S K)^T S K <= (1 + epsilon) K^T K for
    K = A1 (x) A2.  Below 1, S K has the rank of K.

    Args:
        sketch: a sampled one, or a distribution to draw from.
        A1: (n1, d1).
        A2: (n2, d2); may be omitted where n2 = 1.

    Returns:
        0 where S keeps all lengths on the columns; 1 or more where it loses rank.

    Raises:
        TypeError, ValueError: wrong shapes, or a factor is not a finite real matrix, or zero.
    """
    U1, U2 = _bases(A1, A2, sketch.n1, sketch.n2)
    return _distortion(
        sketch.sample(U1, U2) if isinstance(sketch, Distribution) else sketch, U1, U2
    )


def calibrate(
    kind: str | type[Distribution],
    A1: ArrayLike,
    A2: ArrayLike | None = None,
    epsilon: float = 0.5,
    delta: float = 0.05,
    *,
    draws: int = 400,
    seed: int = 0,
) -> Calibration:
    """The smallest size, to one percent, at which at most delta of the draws fail on these data.

    A draw fails when its distortion exceeds epsilon.  Bisection over sizes, with the same seeds,
    `seed` to `seed + draws - 1`, at each: a new estimate needs seeds of its own.  The result holds
    for these factors alone, and is an estimate, where `size_for` is proved for all.

    Args:
        kind: class or name.
        A1: (n1, d1).
        A2: (n2, d2); may be omitted where n2 = 1.
        epsilon: distortion allowed, positive.
        delta: rate of failure allowed, between 0 and 1; resolved to 1 / draws.
        draws: sketches drawn at each size.
        seed: of the first draw.

    Returns:
        The size, with the rate of failure measured there and its confidence interval.

    Raises:
        TypeError, ValueError: an argument is out of range, or a factor is not a finite real matrix,
            or zero.
    """
    kind, draws = find_kind(kind), require_count("draws", draws, 1)
    if not epsilon > 0:
        raise ValueError(f"epsilon must be positive; found {epsilon}.")
    require_fraction("delta", delta)
    U1, U2 = _reduced(kind, *_bases(A1, A2))
    allowed = math.floor(delta * draws + 1e-9)  # 0.29 * 100 is 28.999...
    seeds = range(seed, seed + draws)

    def failures(size: int) -> int:
        return count_failures(kind, U1, U2, size, epsilon, seeds, stop=allowed)

    low, high = 0, max(1, U1.shape[1] * U2.shape[1])
    while (count := failures(high)) > allowed:
        low, high = high, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        found = failures(middle)
        if found > allowed:
            low = middle
        else:
            high, count = middle, found
    from scipy.stats import binomtest  # half a second to import

    interval = binomtest(count, draws).proportion_ci(0.95, method="exact")
    bounds = float(interval.low), float(interval.high)
    return Calibration(kind.name, high, count / draws, bounds, epsilon, delta, draws)


def count_failures(
    kind: str | type[Distribution],
    A1: ArrayLike,
    A2: ArrayLike | None,
    size: int,
    epsilon: float,
    seeds: Sequence[int],
    stop: int | None = None,
) -> int:
    """Draws, one for each seed, whose distortion exceeds epsilon; `stop` ends the count above it.

    Raises:
        TypeError, ValueError: as in `calibrate`.
    """
    kind = find_kind(kind)
    U1, U2 = _reduced(kind, *_bases(A1, A2))
    draw = _sampler(kind, U1, U2)
    count = 0
    for seed in seeds:
        count += not _distortion(draw(size, seed), U1, U2) <= epsilon
        if stop is not None and count > stop:
            break
    return count


def measure(
    kind: str | type[Distribution],
    A1: ArrayLike,
    A2: ArrayLike | None,
    size: int,
    seeds: Sequence[int],
) -> Measurement:
    """Distortion and time of several draws; the time is that of `apply` on the factors themselves.

    Raises:
        TypeError, ValueError: as in `calibrate`.
    """
    kind = find_kind(kind)
    U1, U2 = _bases(A1, A2)
    rows = len(U1), len(U2)
    U1, U2 = _reduced(kind, U1, U2)
    draw = _sampler(kind, U1, U2)
    values, seconds = [], []
    for i, seed in enumerate(seeds):
        values.append(_distortion(draw(size, seed), U1, U2))
        if i >= _TIMED:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            start = time.perf_counter()
            kind(*rows, size, seed).apply(A1, A2)
            seconds.append(time.perf_counter() - start)
    sample = torch.tensor(values, dtype=torch.float64)
    middle, high = sample.quantile(sample.new_tensor([0.5, 0.9]))
    median = float(torch.tensor(seconds).median())
    return Measurement(kind.name, size, float(middle), float(high), median)


def compare(
    kind: str | type[Distribution],
    A1: ArrayLike,
    A2: ArrayLike,
    sizes: Sequence[int],
    *,
    epsilon: float = 0.5,
    delta: float = 0.05,
    draws: int = 100,
    seed: int = 0,
) -> Comparison:
    """Sizes by formula and by calibration, and distortion and time at given sizes.

    Raises:
        TypeError, ValueError: as in `calibrate`.
    """
    kind = find_kind(kind)
    U1, U2 = _bases(A1, A2)
    ranks = {"d1": U1.shape[1], "d2": U2.shape[1], "n1": len(U1), "n2": len(U2)}
    after = None
    if kind is TensorSRHT:
        after = size_after_transform(A1, A2, epsilon, delta, seed)
    seeds = range(seed, seed + draws)
    return Comparison(
        kind.name,
        size_for(kind, epsilon, delta, **ranks),
        after,
        calibrate(kind, A1, A2, epsilon, delta, draws=draws, seed=seed),
        tuple(measure(kind, A1, A2, size, seeds) for size in sizes),
    )


def huge_row(n: int, d: int, seed: int = 0) -> Float[Tensor, "n d"]:
    """Gaussian rows of which one is 10^4 times as large: it alone carries a direction."""
    A = _normal(n, d, seed)
    A[0] *= 1e4
    return A


def identical_rows(n: int, d: int, seed: int = 0) -> Float[Tensor, "n d"]:
    """n - d + 1 identical rows and d - 1 others, which alone carry d - 1 directions."""
    A = _normal(n, d, seed)
    A[d - 1 :] = A[d - 1].clone()
    return A


def _normal(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _bases(
    A1: ArrayLike, A2: ArrayLike | None, n1: int | None = None, n2: int | None = None
) -> tuple[Tensor, Tensor]:
    """Orthonormal bases of the two column spaces."""
    given = {"A1": (A1, n1)} | ({} if A2 is None else {"A2": (A2, n2)})
    if A2 is None and n2 not in (None, 1):
        raise ValueError(f"A2 is missing: it must have {n2} rows.")
    bases = orthonormal_bases(given)
    return bases[0], bases[1] if A2 is not None else torch.ones(1, 1, dtype=torch.float64)


def _reduced(kind: type[Distribution], U1: Tensor, U2: Tensor) -> tuple[Tensor, Tensor]:
    """Smaller factors for which the distortion has the same distribution, where there are any.

    A Gaussian S times any orthonormal U is a Gaussian matrix of D columns: U may be the identity.
    """
    if kind is not Gaussian:
        return U1, U2
    d1, d2 = U1.shape[1], U2.shape[1]
    return torch.eye(d1, dtype=U1.dtype), torch.eye(d2, dtype=U2.dtype)


def _sampler(kind: type[Distribution], U1: Tensor, U2: Tensor) -> Callable[[int, int], Sketch]:
    """A function of size and seed that draws for these bases, without a warning of the size."""
    scores = [U.square().sum(1) for U in (U1, U2)]

    def draw(size: int, seed: int) -> Sketch:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            distribution = kind(len(U1), len(U2), size, seed)
        if isinstance(distribution, LeverageSampling):
            return distribution.sample_scores(*scores)
        return distribution.sample()

    return draw


def _distortion(sketch: Sketch, U1: Tensor, U2: Tensor) -> float:
    SU = sketch._kronecker(U1, U2)
    return float((torch.linalg.eigvalsh(SU.mT @ SU) - 1).abs().max())
