"""Row 2: the whole loop produces the target's law, for every drafter and every rule that is declared exact for it.

A target over four tokens whose law depends on the last two; the joint law of three tokens has 64 cells. Per case many
sequences run as rows of one batch, each from its own seed; their first three and their last three tokens are compared
to the law computed from the table alone, by a chi-square test at 1e-6 (cells that expect fewer than 5 are pooled).

The default suite runs every pair of drafter and rule once, with few sequences; ``-m proof`` runs every pair at every
gamma and temperature with 200,000 (``SPECDIFF_LAW_SEQUENCES`` changes that number: a sequence takes about a millisecond
of one core, the whole of it more than a day).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.base import Drafter, DraftRequest
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.randomness import Random
from specdiff.sampling import LawBuilder, SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.testing import ScriptedDrafter, TableMarginals, TableTarget
from specdiff.types import (
    BestFirst,
    Budget,
    Chain,
    Draft,
    Extra,
    Provenance,
    Samples,
    Shape,
    Siblings,
    TokenTree,
    Verdict,
)
from specdiff.verify.base import Rule, TargetLaw, acceptance, dense_q
from specdiff.verify.registry import RULES

V = 4
LEVEL = 1e-6
PROMPT = torch.tensor([2, 1])
GAMMAS, TEMPERATURES = (1, 2, 3, 4, 5), (0.3, 1.0, 2.0)
TARGET = TableTarget.random(V, seed=3)
Q = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)


def marginals() -> Drafter:
    return MarginalDrafter(TableMarginals.random(V, max(GAMMAS), seed=4, scale=1.2))


def argmax_chain(request: DraftRequest) -> list[int]:
    """Some fixed function of the prefix."""
    return [(3 * int(request.prefix[-1]) + i * i + len(request.prefix)) % V for i in range(request.budget.gamma)]


def sampled_chain(request: DraftRequest) -> list[int]:
    """Drawn from Q, as the drafter claims."""
    return [request.random.draw(Q) for _ in range(request.budget.gamma)]


@dataclass(frozen=True)
class Kind:
    """A drafter and the shape it is asked for."""

    make: Callable[[], Drafter]
    shape: Shape
    branches: bool


KINDS = {
    "chain": Kind(marginals, Chain(), False),
    "samples": Kind(marginals, Samples(3), True),
    "siblings": Kind(marginals, Siblings((2, 2, 1, 1, 1)), True),
    "best-first": Kind(marginals, BestFirst(7), True),
    "scripted": Kind(lambda: ScriptedDrafter(argmax_chain, vocab_size=V), Chain(), False),
    "scripted with q": Kind(lambda: ScriptedDrafter(sampled_chain, vocab_size=V, q=Q), Chain(), False),
}


def exact_pairs() -> Iterator[tuple[str, str]]:
    """Every kind of draft with every rule that declares itself exact for it, and with the loop's own choice."""
    for name, kind in KINDS.items():
        provenance = kind.make().provenance(Budget(gamma=1, shape=kind.shape))
        for rule in RULES.values():
            fits = provenance in rule.exact_for and not (rule.needs_chain and kind.branches)
            if fits and not rule.greedy_only:
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
) -> Tensor:
    """Tokens [sequences, new] of the loop."""
    new = max(3, budget.gamma + 1)  # as long as the draft and the extra token, so that gamma is not cut
    texts: list[list[int]] = []
    for first in range(0, sequences, batch):
        requests = [
            Request(prompt=PROMPT, sampling=sampling, stop=StopOptions(max_new_tokens=new), seed=seed, index=i)
            for i in range(first, min(first + batch, sequences))
        ]
        loop = DecodeLoop(TARGET, drafter, requests, budget=budget, rule=rule)
        for _ in loop.run():
            pass
        texts += [row.new_tokens for row in loop.rows]
    return torch.tensor(texts)


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


def law_case(kind: str, rule: str, gamma: int, temperature: float, sequences: int) -> list[float]:
    budget = Budget(gamma=gamma, shape=KINDS[kind].shape, temperature=0.8)
    chosen = None if rule == "auto" else RULES[rule]
    seed = PAIRS.index((kind, rule))  # cases with equal seeds would not be independent: the walk's draws ignore drafts
    sampling = SamplingOptions(temperature=temperature)
    return check(run(KINDS[kind].make(), budget, chosen, sampling, sequences, seed=seed), temperature)


FEW = 600
MANY = int(os.environ.get("SPECDIFF_LAW_SEQUENCES", "200000"))
SPREAD = [(GAMMAS[(2 * i + 2) % 5], TEMPERATURES[i % 3]) for i in range(len(PAIRS))]
QUICK = [(*pair, *point, FEW) for pair, point in zip(PAIRS, SPREAD, strict=True)]
FULL = [(*pair, g, t, MANY) for pair, g, t in itertools.product(PAIRS, GAMMAS, TEMPERATURES)]


@pytest.mark.parametrize(
    ("kind", "rule", "gamma", "temperature", "sequences"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.proof) for case in FULL)],
)
def test_law(kind: str, rule: str, gamma: int, temperature: float, sequences: int, figure: Callable[..., None]) -> None:
    values = law_case(kind, rule, gamma, temperature, sequences)
    rejected = int(min(values) < LEVEL)
    figure(2, f"{kind}, {rule}, gamma {gamma}, T {temperature}", sequences=sequences, rejected=rejected)
    assert not rejected


def test_pairs_cover_every_rule_and_every_kind() -> None:
    assert {rule for _, rule in PAIRS} == {r.name for r in RULES.values() if not r.greedy_only} | {"auto"}
    assert {kind for kind, _ in PAIRS} == set(KINDS)
    assert {(g, t) for _, _, g, t, _ in QUICK} == set(itertools.product(GAMMAS, TEMPERATURES))


def test_law_under_processors() -> None:
    """The law of a token depends on all tokens before it, so a wrong prefix inside a draft shows."""
    sampling = SamplingOptions(temperature=1.2, repetition_penalty=1.8, frequency_penalty=0.4, top_k=3)
    tokens = run(marginals(), Budget(gamma=2, shape=Siblings((2, 2))), RULES["without_replacement"], sampling, 1200)
    builder = LawBuilder(sampling, prompt_length=2, eos_ids=(), vocab_size=V)
    empty = TokenTree(torch.empty(0, dtype=torch.int64), ())

    def after(*new: int) -> Tensor:
        ids = torch.cat([PROMPT, torch.tensor(new, dtype=torch.int64)])
        return builder.law(TARGET.table[ids[-2], ids[-1]].log()[None], ids, empty).row(0)

    law = torch.zeros(V, V, V, dtype=torch.float64)
    for a, b in itertools.product(range(V), range(V)):
        law[a, b] = after()[a] * after(a)[b] * after(a, b)
    assert p_value(tokens, law) >= LEVEL
    assert p_value(tokens, joint_law(1.2, 0)) < LEVEL


def best_and_worst(request: DraftRequest) -> list[int]:
    """Looks at the target: its best token, then its worst, in turn."""
    ids, drafted = request.prefix.tolist(), []
    for depth in range(request.budget.gamma):
        row = TARGET.table[ids[-2], ids[-1]]
        token = int(row.argmax() if depth % 2 == 0 else row.argmin())
        ids.append(token)
        drafted.append(token)
    return drafted


@pytest.mark.parametrize("rule", ["walk", "point_mass"])
def test_positive_controls(rule: str) -> None:
    """A drafter that peeks at the target looks unfair, but only the verifier's uniforms must be hidden from it."""
    drafter = ScriptedDrafter(best_and_worst, vocab_size=V)
    tokens = run(drafter, Budget(gamma=4, shape=Chain()), RULES[rule], SamplingOptions(temperature=1.0), 1200, seed=99)
    assert min(check(tokens, 1.0)) >= LEVEL


class PlainResidual:
    """The ratio rule, drawing from p instead of the residual after a rejection."""

    name, exact_for, greedy_only, needs_chain = "faulty", frozenset({Provenance.CHAIN}), False, True

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        path, row = draft.paths[0] if draft.paths else (), 0
        for depth, node in enumerate(path):
            token, p = int(draft.tree.tokens[node]), law.row(row)
            if not random.coin(acceptance(p, dense_q(draft.law, row - 1, like=p), token)):
                return Verdict(path[:depth], random.draw(p), Extra.RECOVERED)
            row = node + 1
        return Verdict(path, random.draw(law.row(row)), Extra.BONUS)


class FirstUnverified:
    """Accepts the first drafted token as it is, then walks."""

    name, exact_for, greedy_only, needs_chain = "faulty", frozenset(Provenance), False, True

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        tokens, row = draft.tree.tokens.tolist(), 0
        path: list[int] = []
        while row < len(tokens):
            if row and (drawn := random.draw(law.row(row))) != tokens[row]:
                return Verdict(tuple(path), drawn, Extra.RECOVERED)
            path.append(row)
            row += 1
        return Verdict(tuple(path), random.draw(law.row(row)), Extra.BONUS)


def argmax_of_q(request: DraftRequest) -> Sequence[int]:
    return [int(Q.argmax())] * request.budget.gamma


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (ScriptedDrafter(sampled_chain, vocab_size=V, q=Q), PlainResidual()),
        (ScriptedDrafter(argmax_chain, vocab_size=V), FirstUnverified()),
        (ScriptedDrafter(argmax_of_q, vocab_size=V, q=Q), RULES["ratio"]),
        (ScriptedDrafter(sampled_chain, vocab_size=V, q=Q.flip(0)), RULES["block"]),
    ],
    ids=["residual is p", "first token unverified", "argmax draft with a softmax q", "drawn from another q"],
)
def test_planted_faults_are_found(drafter: Drafter, rule: Rule) -> None:
    """With the number of sequences of the default suite."""
    tokens = run(drafter, Budget(gamma=3, shape=Chain()), rule, SamplingOptions(temperature=1.0), FEW)
    assert min(check(tokens, 1.0)) < LEVEL
