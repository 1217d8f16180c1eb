"""Enumerates every outcome of a program over random decisions, with its probability.

The programs are the production rules and the production draft builders: they ask for coins and draws, the enumerator
answers from a script, records what else could have been answered and how probable that was, and runs them again until
every combination has been seen. No formula of a rule is repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from specdiff.randomness import Cdf, Random
from specdiff.types import Draft, TokenTree, Verdict
from specdiff.verify.base import Rule, TargetLaw

T = TypeVar("T")


@dataclass
class Decision:
    """One decision of the current run: all its possible answers, and which of them is being tried."""

    answers: list[tuple[int, float]]
    current: int = 0


class Enumerator:
    """Answers decisions from a script and extends it with first answers; see `outcomes`."""

    def __init__(self, script: list[Decision]) -> None:
        self.script = script
        self.position = 0

    def coin(self, probability: float) -> bool:
        """Either side that has a positive probability."""
        heads = min(1.0, max(0.0, probability))
        return bool(self._answer([(1, heads), (0, 1.0 - heads)]))

    def draw(self, weights: Tensor | Cdf, without: Sequence[int] = ()) -> int:
        """Every index of positive weight."""
        values = (weights.weights if isinstance(weights, Cdf) else weights).double().tolist()
        for index in without:
            values[index] = 0.0
        total = sum(values)
        assert total > 0, "a draw from weights without mass"
        return self._answer([(index, value / total) for index, value in enumerate(values)])

    def _answer(self, answers: list[tuple[int, float]]) -> int:
        if self.position == len(self.script):
            self.script.append(Decision([a for a in answers if a[1] > 0]))
        decision = self.script[self.position]
        self.position += 1
        return decision.answers[decision.current][0]


def outcomes(program: Callable[[Random], T]) -> Iterator[tuple[float, T]]:
    """Run ``program`` once for every combination of answers; yield (probability, result), summing to 1."""
    script: list[Decision] = []
    while True:
        result = program(Enumerator(script))
        probability = 1.0
        for decision in script:
            probability *= decision.answers[decision.current][1]
        yield probability, result
        while script and script[-1].current + 1 == len(script[-1].answers):
            script.pop()
        if not script:
            return
        script[-1].current += 1


class Table:
    """A target given by one row for every prefix of drafted tokens.

    Args:
        rows: prefix -> [V] float64 probabilities, for all prefixes shorter than ``length``.
        length: number of tokens whose joint law is compared (gamma + 1).
        view: turns the rows of a tree, [N + 1, V], into the law that rules see; default: the rows themselves.
    """

    def __init__(
        self,
        rows: dict[tuple[int, ...], Tensor],
        length: int,
        *,
        greedy: bool = False,
        view: Callable[[Tensor, TokenTree], TargetLaw] | None = None,
    ) -> None:
        self.rows, self.length, self.greedy, self.view = rows, length, greedy, view
        self.vocab = rows[()].numel()

    def law(self, tree: TokenTree) -> TargetLaw:
        """The law at the root and every node of ``tree``."""
        prefixes: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
            prefixes.append((*prefixes[parent + 1], token))
        if self.view is not None:
            return self.view(torch.stack([self.rows[prefix] for prefix in prefixes]), tree)
        return Rows([self.rows[prefix] for prefix in prefixes], self.greedy)

    def joint(self, committed: dict[tuple[int, ...], float] | None = None) -> Tensor:
        """Joint law [V] * length: each committed prefix, extended by plain sampling; by default plain sampling only."""
        masses: dict[tuple[int, ...], float] = dict(committed or {(): 1.0})
        for size in range(self.length):
            for prefix in [p for p in masses if len(p) == size]:
                mass = masses.pop(prefix)
                for token, probability in enumerate(self._row(prefix)):
                    masses[*prefix, token] = masses.get((*prefix, token), 0.0) + mass * probability
        joint = torch.zeros([self.vocab] * self.length, dtype=torch.float64)
        for cell, mass in masses.items():
            joint[cell] += mass
        return joint

    def _row(self, prefix: tuple[int, ...]) -> list[float]:
        if self.view is None:
            return self.rows[prefix].tolist()
        chain = TokenTree(torch.tensor(prefix, dtype=torch.int64), tuple(range(-1, len(prefix) - 1)))
        return self.law(chain).row(len(prefix)).tolist()


@dataclass(frozen=True)
class Rows:
    """A list of rows as a `TargetLaw`."""

    rows: Sequence[Tensor]
    greedy: bool = False

    def row(self, index: int) -> Tensor:
        """The row."""
        return self.rows[index]

    def choice(self, index: int) -> int:
        """Its argmax."""
        return int(self.rows[index].argmax())


@dataclass(frozen=True)
class Result:
    """What a rule did over all drafts and all its own decisions.

    Attributes:
        committed: committed tokens (accepted and extra) -> probability. accepted: expected accepted tokens.
        runs: how many times the rule was run.
    """

    committed: dict[tuple[int, ...], float]
    accepted: float
    runs: int


Drafts = Sequence[tuple[float, Draft]]


def drafts_of(sampler: Callable[[Random], Draft]) -> list[tuple[float, Draft]]:
    """All drafts of a sampler with their probabilities."""
    return list(outcomes(sampler))


def run(
    rule: Rule,
    drafts: Drafts,
    target: Table,
    *,
    change_random: Callable[[Random], Random] = lambda random: random,
) -> Result:
    """Verify every draft in every possible way; ``change_random`` is where tests plant faults."""
    committed: dict[tuple[int, ...], float] = {}
    accepted, runs = 0.0, 0
    for weight, draft in drafts:
        law = target.law(draft.tree)
        tokens = draft.tree.tokens.tolist()

        def verify(random: Random, draft: Draft = draft, law: TargetLaw = law) -> Verdict:
            return rule.verify(draft, law, change_random(random))

        for probability, verdict in outcomes(verify):
            text = (*(tokens[node] for node in verdict.path), verdict.token)
            committed[text] = committed.get(text, 0.0) + weight * probability
            accepted += weight * probability * len(verdict.path)
            runs += 1
    return Result(committed, accepted, runs)


def distance(result: Result, target: Table) -> tuple[float, float]:
    """Largest deviation of a cell, and the total variation, between the committed law and plain sampling."""
    difference = (target.joint(result.committed) - target.joint()).abs()
    return float(difference.max()), float(difference.sum() / 2)
