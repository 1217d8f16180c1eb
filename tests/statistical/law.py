"""Sequences of the whole loop over a table target, and how far their law is from the table's.

A target over four tokens whose law depends on the last two; the joint law of three tokens has 64 cells. Many sequences
run as rows of one batch, each from its own seed; their first three and their last three tokens are compared to the law
computed from the table alone, by a chi-square test (cells that expect fewer than 5 are pooled).
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from scipy.stats import chi2
from torch import Tensor

from specdiff.control.adaptive_length import AdaptiveLength, LengthRule
from specdiff.control.base import Controller, FixedBudget
from specdiff.control.costs import CostTable
from specdiff.control.menu import Arm, Menu, Prediction
from specdiff.control.planner import Planner
from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.base import Drafter, DraftRequest
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.ngram.prompt import PromptScorer
from specdiff.randomness import Cdf
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.testing import ScriptedDrafter, TableMarginals, TableTarget
from specdiff.types import BestFirst, Budget, CausalPaths, Chain, Samples, Shape, Siblings
from specdiff.verify.base import Rule
from specdiff.verify.registry import RULES

V = 4
LEVEL = 1e-6
PROMPT = torch.tensor([2, 1])
GAMMAS, TEMPERATURES = (1, 2, 3, 4, 5), (0.3, 1.0, 2.0)
TARGET = TableTarget.random(V, seed=3)
Q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
Q_CDF = Cdf(Q)


def marginals() -> Drafter:
    return MarginalDrafter(TableMarginals.random(V, max(GAMMAS), seed=4, scale=1.2))


def searched() -> Drafter:
    """Marginals beside an n-gram model that learns from each text; token 3 ends a path, though not the text."""
    source = TableMarginals.random(V, max(GAMMAS), seed=4, scale=1.2)
    return MarginalDrafter(source, scorer=lambda: PromptScorer(vocab_size=V, order=3), eos_ids=(3,))


def argmax_chain(request: DraftRequest) -> list[int]:
    """Some fixed function of the prefix."""
    last, length = int(request.prefix[-1]), len(request.prefix)
    return [(3 * last + i * i + length) % V for i in range(request.budget.gamma)]


def sampled_chain(request: DraftRequest) -> list[int]:
    """Drawn from Q, as the drafter claims."""
    return [request.random.draw(Q_CDF) for _ in range(request.budget.gamma)]


@dataclass(frozen=True)
class Kind:
    """A drafter, the shape it is asked for, and who sizes its drafts (``mixed``: shapes of several provenances)."""

    make: Callable[[], Drafter]
    shape: Shape
    branches: bool
    controller: Callable[[Budget], Controller] = FixedBudget
    mixed: bool = False


def adaptive(budget: Budget) -> Controller:
    """Depths that follow what was accepted, from 1 on."""
    return AdaptiveLength(budget, LengthRule(k_min=1, k_max=budget.gamma, delta=1))


def planned(budget: Budget) -> Controller:
    """A planner that has reason to change between a chain, siblings, a sized tree and plain steps within a text."""
    table = CostTable(contexts=(1,), nodes=(0, 7), target=((1.0, 1.3),), draft=(0.2,), plain=(1.0,))
    arms = [Arm(budget=replace(budget, shape=BestFirst(7)), accepted=0.75, nodes=4.0)]
    for shape, accepted, seconds in ((Siblings((2, 2, 1, 1, 1)), 0.8, 1.5), (Chain(), 0.65, 1.35)):
        arms.append(Arm(budget=replace(budget, shape=shape), accepted=accepted, nodes=3.0, seconds=(seconds,)))
    menu = Menu(costs=table, arms=tuple(arms), planned=Prediction(tau=1.8, speedup=1.2, nodes=4.0))
    return Planner(menu, opening=1.0, interest=0.3)


KINDS = {
    "chain": Kind(marginals, Chain(), False),
    "samples": Kind(marginals, Samples(3), True),
    "siblings": Kind(marginals, Siblings((2, 2, 1, 1, 1)), True),
    "best-first": Kind(marginals, BestFirst(7), True),
    "scripted": Kind(lambda: ScriptedDrafter(argmax_chain, vocab_size=V), Chain(), False),
    "scripted with q": Kind(lambda: ScriptedDrafter(sampled_chain, vocab_size=V, q=Q), Chain(), False),
    "paths": Kind(searched, CausalPaths(keep=3), True),
    "one path": Kind(searched, CausalPaths(), False),
    "adaptive paths": Kind(searched, CausalPaths(keep=3), True, adaptive),
    "adaptive siblings": Kind(marginals, Siblings((2, 2, 1, 1, 1)), True, adaptive),
    "planner": Kind(marginals, BestFirst(7), True, planned, mixed=True),
}


def exact_pairs() -> Iterator[tuple[str, str]]:
    """Every kind of draft with every rule that declares itself exact for it, and with the loop's own choice."""
    for name, kind in KINDS.items():
        provenance = kind.make().provenance(Budget(gamma=1, shape=kind.shape))
        for rule in RULES.values():
            fits = provenance in rule.exact_for and not (rule.needs_chain and kind.branches)
            if fits and not rule.greedy_only and not kind.mixed:
                yield name, rule.name
        yield name, "auto"


PAIRS = list(exact_pairs())


def run(
    drafter: Drafter,
    budget: Budget,
    rule: Rule | None,
    sampling: SamplingOptions,
    sequences: int,
    *,
    seed: int = 0,
    batch: int = 2000,
    controller: Callable[[Budget], Controller] = FixedBudget,
) -> Tensor:
    """Tokens [sequences, new] of the loop."""
    new = max(3, budget.gamma + 1)  # as long as the draft and the extra token, so that gamma is not cut
    if controller is not FixedBudget:
        new += 4  # controllers act from the second round on
    stop = StopOptions(max_new_tokens=new)
    texts: list[list[int]] = []
    # no records for autograd; the loop leaves no cycles, and a collection would walk all that torch holds
    with torch.inference_mode(), _without_collector():
        for first in range(0, sequences, batch):
            requests = [
                Request(prompt=PROMPT, sampling=sampling, stop=stop, seed=seed, index=i)
                for i in range(first, min(first + batch, sequences))
            ]
            loop = DecodeLoop(TARGET, drafter, requests, budget=budget, rule=rule, controller=controller)
            for _ in loop.run():
                pass
            texts += [row.new_tokens for row in loop.rows]
    return torch.tensor(texts)


@contextmanager
def _without_collector() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def joint_law(temperature: float, skip: int) -> Tensor:
    """Law [V, V, V] of tokens skip, skip + 1, skip + 2 after the prompt."""
    p = torch.softmax(TARGET.table.log() / temperature, dim=-1)
    pair = torch.zeros(V, V, dtype=torch.float64)
    pair[PROMPT[0], PROMPT[1]] = 1
    for _ in range(skip):
        pair = torch.einsum("ab,abc->bc", pair, p)
    return torch.einsum("ab,abc,bcd,cde->cde", pair, p, p, p)


def p_value(tokens: Tensor, law: Tensor) -> float:
    """Of Pearson's chi-square test that rows [n, 3] are drawn from ``law``; cells expecting fewer than 5 are pooled."""
    cells = (tokens * torch.tensor([V * V, V, 1])).sum(dim=1)
    observed = torch.bincount(cells, minlength=V**3).double()
    expected = law.flatten() * len(tokens)
    order = expected.argsort()
    small = int((expected < 5).sum())
    while 0 < small < V**3 and float(expected[order[:small]].sum()) < 5:
        small += 1
    if small:
        merged = order[:small]
        observed = torch.cat([observed[order[small:]], observed[merged].sum()[None]])
        expected = torch.cat([expected[order[small:]], expected[merged].sum()[None]])
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, len(expected) - 1))


def check(tokens: Tensor, temperature: float) -> list[float]:
    """P-values of the first and of the last three tokens."""
    last = tokens.shape[1] - 3
    windows = sorted({0, last})
    return [p_value(tokens[:, w : w + 3], joint_law(temperature, w)) for w in windows]


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    kind: str
    rule: str
    gamma: int
    temperature: float

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.rule}, gamma {self.gamma}, T {self.temperature}"

    @property
    def seed(self) -> int:
        """Its own: cases with equal seeds would not be independent, as the walk's draws ignore drafts."""
        return CASES.index(self)

    def p_values(self, sequences: int) -> list[float]:
        """Of the first and of the last three tokens, of so many sequences of the loop."""
        budget = Budget(gamma=self.gamma, shape=KINDS[self.kind].shape, temperature=0.8)
        rule = None if self.rule == "auto" else RULES[self.rule]
        sampling = SamplingOptions(temperature=self.temperature)
        kind = KINDS[self.kind]
        tokens = run(kind.make(), budget, rule, sampling, sequences, seed=self.seed, controller=kind.controller)
        return check(tokens, self.temperature)


CASES = [Case(*pair, g, t) for pair, g, t in itertools.product(PAIRS, GAMMAS, TEMPERATURES)]
