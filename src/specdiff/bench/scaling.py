r"""Speed-up at sizes that were not measured: a memory-bound roofline and a power law of the drafter's misses.

With N_t and N_d the parameters of target and drafter, B the bytes of a parameter, gamma the window::

    speed-up = tau * step(N_t) / (draft(N_d) + g * step(N_t) + rest)
    step(N)  = o_t + B N / W_t          a plain step: its weights are read once, at W_t bytes a second
    draft(N) = o_d + B N / W_d          a draft; one pass of a one-step drafter, whatever gamma
    tau      = 1 + sum_{j <= gamma} prod_{k <= j} (1 - miss_k)
    log miss_k(N_d, N_t) = c_k - beta * log(N_d / N_t)

o, W are least-squares fits over the measured sizes (o = 0 where there is one size, or it would be negative). g is the
cost of a pass over the draft's nodes beside a plain step's, rest the seconds of laws and verification: both as measured
at the largest target. miss_k is the share of drafts right up to position k - 1 that are wrong at k; beyond the measured
positions the last one is held. beta is fitted where drafters of two or more relative sizes were measured, otherwise
drawn uniformly from an assumed range. What the model leaves out: other training of the drafter, several devices,
quantised kernels, batches that are no longer bound by memory.

Intervals are percentiles over resamples of the measured samples (prompts of a run, contexts of a plan), each refitted:
the spread of the inputs, not the error of the model's form. That one shows in `hold_out`, which projects each measured
pair from the others.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from specdiff.bench.intervals import percentiles
from specdiff.checking import integer, real
from specdiff.errors import InputError

ASSUMED_BETA = (0.0, 0.4)
_SMALLEST_MISS = 1e-3
_GRID = tuple(10 ** (-3 + 3 * i / 60) for i in range(61))  # drafter sizes as shares of the target's


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What was measured on one prompt (or at one context).

    Attributes:
        step: seconds of a plain step. target, draft, rest: mean seconds of a round's parts.
        acceptance: [G] share of rounds whose first j drafted tokens were all accepted, falling.
        weight: rounds it stands for.
    """

    step: float
    target: float
    draft: float
    rest: float
    acceptance: tuple[float, ...]
    weight: float = 1.0

    def __post_init__(self) -> None:
        positive, not_negative = (lambda v: 0 < v < math.inf), (lambda v: 0 <= v < math.inf)
        for name in ("step", "target", "weight"):
            real(name, getattr(self, name), positive, expected="a finite number > 0", remedy="measure again")
        for name in ("draft", "rest"):
            real(name, getattr(self, name), not_negative, expected="a finite number >= 0", remedy="measure again")
        if not self.acceptance or not all(0 <= a <= 1 for a in self.acceptance):
            raise InputError.of(
                "acceptance", expected="shares in [0, 1]", got=self.acceptance, remedy="measure with a drafter"
            )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A measured pair: name, parameters, bytes of a parameter, samples."""

    name: str
    target: float
    drafter: float
    samples: tuple[Sample, ...]
    bytes_per_parameter: float = 2.0

    def __post_init__(self) -> None:
        for name in ("target", "drafter", "bytes_per_parameter"):
            real(name, getattr(self, name), lambda v: 0 < v < math.inf, expected="a number > 0", remedy="give it")
        if not self.samples:
            raise InputError.of(f"pair {self.name}", expected="samples", got="none", remedy="measure it")

    @property
    def mean(self) -> Sample:
        """The samples' weighted mean; of the acceptance at a position, over the samples whose drafts went so far."""
        depth = max(len(s.acceptance) for s in self.samples)

        def mean(values: Sequence[float], samples: Sequence[Sample] = self.samples) -> float:
            return sum(v * s.weight for v, s in zip(values, samples, strict=True)) / sum(s.weight for s in samples)

        def accepted(j: int) -> float:
            deep = [s for s in self.samples if len(s.acceptance) > j]
            return mean([s.acceptance[j] for s in deep], deep)

        return Sample(
            step=mean([s.step for s in self.samples]),
            target=mean([s.target for s in self.samples]),
            draft=mean([s.draft for s in self.samples]),
            rest=mean([s.rest for s in self.samples]),
            acceptance=tuple(accepted(j) for j in range(depth)),
            weight=sum(s.weight for s in self.samples),
        )

    @property
    def speedup(self) -> float:
        """As measured: tau steps' time over a round's."""
        m = self.mean
        return (1 + sum(m.acceptance)) * m.step / (m.draft + m.target + m.rest)


@dataclass(frozen=True, kw_only=True)
class Line:
    """Seconds against bytes: ``overhead + bytes / bandwidth``; bandwidth in bytes a second."""

    overhead: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """Of reading ``size`` bytes."""
        return self.overhead + size / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Model:
    """Fitted parameters, as in the module's formula.

    Attributes:
        step, draft: the two lines. nodes_factor: g. rest: seconds.
        intercepts: [G] c_k. beta: the power. fitted: whether beta was fitted rather than assumed.
    """

    step: Line
    draft: Line
    nodes_factor: float
    rest: float
    intercepts: tuple[float, ...]
    beta: float
    fitted: bool

    def tau(self, target: float, drafter: float, gamma: int) -> float:
        """Tokens a target pass, the extra one included."""
        shift, total, alive = self.beta * math.log(drafter / target), 1.0, 1.0
        for k in range(gamma):
            miss = math.exp(self.intercepts[min(k, len(self.intercepts) - 1)] - shift)
            alive *= 1 - min(miss, 1.0)
            total += alive
        return total

    def speedup(self, target: float, drafter: float, gamma: int, bytes_per_parameter: float = 2.0) -> float:
        """Over plain decoding of the same target."""
        step = self.step.seconds(bytes_per_parameter * target)
        draft = self.draft.seconds(bytes_per_parameter * drafter)
        return self.tau(target, drafter, gamma) * step / (draft + self.nodes_factor * step + self.rest)

    def best(self, target: float, gamma: int, bytes_per_parameter: float = 2.0) -> float:
        """Parameters of the drafter with the largest speed-up, on a grid of a thousandth to the target's own size."""
        sizes = [share * target for share in _GRID]
        return max(sizes, key=lambda size: self.speedup(target, size, gamma, bytes_per_parameter))


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A projected pair with 95 % intervals from the inputs' spread."""

    target: float
    drafter: float
    gamma: int
    tau: float
    tau_interval: tuple[float, float]
    speedup: float
    speedup_interval: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What `project` returns.

    Attributes:
        projections: one a drafter size. best: parameters of the best drafter; best_interval: 95 % over resamples.
        best_speedup: at ``best``. beta, beta_interval, fitted: see `Model`. samples: in all pairs together.
    """

    projections: tuple[Projection, ...]
    best: float
    best_interval: tuple[float, float]
    best_speedup: float
    beta: float
    beta_interval: tuple[float, float]
    fitted: bool
    samples: int


@dataclass(frozen=True, kw_only=True)
class HoldOut:
    """A measured pair as the others project it; ``error`` = projected / measured - 1."""

    name: str
    measured: float
    projected: float
    error: float


def fit(pairs: Sequence[Pair], *, beta: float | None = None, bandwidth: float | None = None) -> Model:
    """Fit the model.

    Args:
        pairs: measured. beta: used where it cannot be fitted; None = the middle of `ASSUMED_BETA`.
        bandwidth: bytes a second of another machine: both lines become ``bytes / bandwidth``, without overhead.

    Raises:
        InputError: no pairs, or a bandwidth or beta that is none.
    """
    if not pairs:
        raise InputError.of("pairs", expected="at least one", got=0, remedy="measure one")
    means = [pair.mean for pair in pairs]
    if bandwidth is None:
        step = fit_line([(p.bytes_per_parameter * p.target, m.step) for p, m in zip(pairs, means, strict=True)])
        draft = fit_line([(p.bytes_per_parameter * p.drafter, m.draft) for p, m in zip(pairs, means, strict=True)])
    else:
        real("bandwidth", bandwidth, lambda v: 0 < v < math.inf, expected="bytes a second > 0", remedy="e.g. 2e12")
        step = draft = Line(overhead=0.0, bandwidth=bandwidth)
    misses = [[math.log(m) for m in miss_rates(mean.acceptance)] for mean in means]
    sizes = [math.log(p.drafter / p.target) for p in pairs]
    slope = _slope(sizes, misses)
    assumed = sum(ASSUMED_BETA) / 2 if beta is None else beta
    power = assumed if slope is None else -slope
    intercepts = []
    for k in range(max(map(len, misses))):
        seen = [row[k] + power * size for row, size in zip(misses, sizes, strict=True) if len(row) > k]
        intercepts.append(statistics.fmean(seen))
    largest = max(range(len(pairs)), key=lambda i: pairs[i].target)
    return Model(
        step=step,
        draft=draft,
        nodes_factor=means[largest].target / means[largest].step,
        rest=means[largest].rest,
        intercepts=tuple(intercepts),
        beta=power,
        fitted=slope is not None,
    )


def project(
    pairs: Sequence[Pair],
    target: float,
    drafters: Sequence[float],
    *,
    gamma: int,
    bytes_per_parameter: float = 2.0,
    bandwidth: float | None = None,
    assumed_beta: tuple[float, float] = ASSUMED_BETA,
    resamples: int = 500,
    seed: int = 0,
) -> Scaling:
    """Project speed-ups.

    Args:
        pairs: measured. target, drafters: parameters asked for. gamma: window, >= 1.
        bytes_per_parameter: of the projected models. bandwidth: see `fit`.
        assumed_beta: range of beta where it cannot be fitted. resamples, seed: of the intervals.

    Raises:
        InputError: a number is out of range, or there are no pairs.
    """
    integer("gamma", gamma, 1, remedy="draft at least one token")
    integer("resamples", resamples, 1, remedy="500 are usual")
    for name, value in (("target", target), ("bytes_per_parameter", bytes_per_parameter)):
        real(name, value, lambda v: 0 < v < math.inf, expected="a number > 0", remedy="for example 72e9")
    for size in drafters:
        real("drafter", size, lambda v: 0 < v < math.inf, expected="parameters > 0", remedy="for example 7e9")
    low, high = assumed_beta
    if not -math.inf < low <= high < math.inf:
        raise InputError.of("assumed_beta", expected="a range low <= high", got=assumed_beta, remedy="e.g. 0,0.4")
    middle = fit(pairs, beta=(low + high) / 2, bandwidth=bandwidth)
    rng = random.Random(seed)
    models = [
        fit([_resample(p, rng) for p in pairs], beta=rng.uniform(low, high), bandwidth=bandwidth)
        for _ in range(resamples)
    ]
    projections = [
        Projection(
            target=target,
            drafter=size,
            gamma=gamma,
            tau=middle.tau(target, size, gamma),
            tau_interval=percentiles([m.tau(target, size, gamma) for m in models]),
            speedup=middle.speedup(target, size, gamma, bytes_per_parameter),
            speedup_interval=percentiles([m.speedup(target, size, gamma, bytes_per_parameter) for m in models]),
        )
        for size in drafters
    ]
    best = middle.best(target, gamma, bytes_per_parameter)
    return Scaling(
        projections=tuple(projections),
        best=best,
        best_interval=percentiles([m.best(target, gamma, bytes_per_parameter) for m in models]),
        best_speedup=middle.speedup(target, best, gamma, bytes_per_parameter),
        beta=middle.beta,
        beta_interval=percentiles([m.beta for m in models]),
        fitted=middle.fitted,
        samples=sum(len(p.samples) for p in pairs),
    )


def hold_out(pairs: Sequence[Pair]) -> list[HoldOut]:
    """The model's error where it can be measured: each pair projected from the others ([] for fewer than two)."""
    found: list[HoldOut] = []
    for pair in pairs if len(pairs) > 1 else ():
        model = fit([p for p in pairs if p is not pair])
        gamma = len(pair.mean.acceptance)
        guess = model.speedup(pair.target, pair.drafter, gamma, pair.bytes_per_parameter)
        found.append(HoldOut(name=pair.name, measured=pair.speedup, projected=guess, error=guess / pair.speedup - 1))
    return found


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """Least squares through (bytes, seconds); through the origin where that is all the points can say."""
    sizes, seconds = [p[0] for p in points], [p[1] for p in points]
    if len(set(sizes)) > 1:
        slope, overhead = statistics.linear_regression(sizes, seconds)
        if slope > 0 and overhead >= 0:
            return Line(overhead=overhead, bandwidth=1 / slope)
    slope = sum(x * y for x, y in points) / sum(x * x for x in sizes)
    return Line(overhead=0.0, bandwidth=1 / slope if slope > 0 else math.inf)


def miss_rates(acceptance: Sequence[float]) -> list[float]:
    """[G] shares wrong at a position of those right before it, never below a thousandth.

    Positions that no draft reached tell nothing and are left out, but the first.
    """
    rates: list[float] = []
    before = 1.0
    for accepted in acceptance:
        if before <= 0:
            break
        rates.append(min(1.0, max(_SMALLEST_MISS, 1 - accepted / before)))
        before = accepted
    return rates


def _slope(sizes: Sequence[float], misses: Sequence[Sequence[float]]) -> float | None:
    """Common slope of log miss against log relative size, each position with an intercept of its own."""
    across = along = 0.0
    for k in range(max(map(len, misses))):
        points = [(x, row[k]) for x, row in zip(sizes, misses, strict=True) if len(row) > k]
        middle_x, middle_y = (statistics.fmean(p[i] for p in points) for i in (0, 1))
        across += sum((x - middle_x) * (y - middle_y) for x, y in points)
        along += sum((x - middle_x) ** 2 for x, _ in points)
    return across / along if along > 1e-9 else None


def _resample(pair: Pair, rng: random.Random) -> Pair:
    samples = tuple(rng.choice(pair.samples) for _ in pair.samples)
    return Pair(
        name=pair.name,
        target=pair.target,
        drafter=pair.drafter,
        samples=samples,
        bytes_per_parameter=pair.bytes_per_parameter,
    )
