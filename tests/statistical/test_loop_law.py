"""Row 2: the whole loop produces the target's law, for every drafter and every rule that is declared exact for it.

The default suite runs every pair of drafter and rule once, with few sequences; ``-m proof`` runs every pair at every
gamma and temperature with 200,000 (``SPECDIFF_LAW_SEQUENCES`` changes that number). A sequence takes about a third of
a millisecond of one core, the whole of it about ten hours: name a file in ``SPECDIFF_LAW_RECORD``, and a case that is
on record there, for at least so many sequences and the same sources, is not run again.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdiff.drafters.base import Drafter, DraftRequest
from specdiff.randomness import Random
from specdiff.sampling import LawBuilder, SamplingOptions
from specdiff.testing import ScriptedDrafter
from specdiff.types import BestFirst, Budget, Chain, Draft, Extra, Provenance, Round, Siblings, TokenTree, Verdict
from specdiff.verify.base import Rule, TargetLaw, acceptance, dense_q
from specdiff.verify.registry import RULES
from statistical.law import (
    CASES,
    GAMMAS,
    KINDS,
    LEVEL,
    PAIRS,
    PROMPT,
    TARGET,
    TEMPERATURES,
    Case,
    Q,
    V,
    argmax_chain,
    check,
    joint_law,
    marginals,
    p_value,
    run,
    sampled_chain,
)
from statistical.record import Record, loop_sources

FEW = 600
MANY = int(os.environ.get("SPECDIFF_LAW_SEQUENCES", "200000"))
RECORD = os.environ.get("SPECDIFF_LAW_RECORD")
QUICK = [Case(*pair, GAMMAS[(2 * i + 2) % 5], TEMPERATURES[i % 3]) for i, pair in enumerate(PAIRS)]


@pytest.fixture(scope="session")
def record() -> Record | None:
    return Record(Path(RECORD)) if RECORD else None


@pytest.mark.parametrize(
    ("case", "sequences"),
    [
        *(pytest.param(case, FEW, id=f"{case.name}-{FEW}") for case in QUICK),
        *(pytest.param(case, MANY, id=f"{case.name}-{MANY}", marks=pytest.mark.proof) for case in CASES),
    ],
)
def test_law(
    case: Case,
    sequences: int,
    record: Record | None,
    figure: Callable[..., None],
    record_property: Callable[[str, object], None],
) -> None:
    values = case.p_values(sequences) if record is None else record.p_values(case, sequences)
    rejected = int(min(values) < LEVEL)
    figure(2, case.name, sequences=sequences, rejected=rejected)
    record_property("law_p_values", values)
    assert not rejected


def test_a_recorded_case_runs_again_only_for_more_sequences_or_other_sources(tmp_path: Path) -> None:
    asked: list[int] = []

    class Known(Case):
        seed = 0

        def p_values(self, sequences: int) -> list[float]:
            asked.append(sequences)
            return [0.5, 0.25]

    case, path = Known("chain", "block", 3, 1.0), tmp_path / "law.jsonl"
    for sequences in (100, 100, 50, 200, 100):
        assert Record(path, sources="a").p_values(case, sequences) == [0.5, 0.25]
    assert asked == [100, 200]
    Record(path, sources="b").p_values(case, 100)
    Record(path, sources="a").p_values(Known("chain", "block", 2, 1.0), 100)
    assert asked == [100, 200, 100, 100]


def test_sources_are_those_the_loop_runs_on() -> None:
    names = {path.stem for path in loop_sources()}
    assert {"decode", "sampling", "randomness", "marginal", "traversal", "law"} <= names
    assert "trainer" not in names


def test_pairs_cover_every_rule_and_every_kind() -> None:
    assert {rule for _, rule in PAIRS} == {r.name for r in RULES.values() if not r.greedy_only} | {"auto"}
    assert {kind for kind, _ in PAIRS} == set(KINDS)
    assert {(case.gamma, case.temperature) for case in QUICK} == set(itertools.product(GAMMAS, TEMPERATURES))


def test_the_planner_of_the_law_changes_between_all_its_settings() -> None:
    """Else its law would be that of one shape."""
    shapes: set[str] = set()

    class Watched:
        def __init__(self, budget: Budget) -> None:
            self._inner = KINDS["planner"].controller(budget)

        def budget(self, room: int) -> Budget | None:
            wish = self._inner.budget(room)
            shapes.add("plain" if wish is None else type(wish.shape).__name__)
            return wish

        def observe(self, record: Round, draft: Draft) -> None:
            self._inner.observe(record, draft)

    budget = Budget(gamma=3, shape=BestFirst(7), temperature=0.8)
    run(marginals(), budget, None, SamplingOptions(temperature=1.0), 200, controller=Watched)
    assert shapes == {"plain", "BestFirst", "Siblings", "Chain"}


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
