"""Row 5: every sampling option acts at every position of a draft, through the whole loop; none is ignored.

At temperature 0 the tokens are those of transformers' ``generate`` with the same option. At temperature > 0 the law
that the rule is given at every node is the one that plain sampling computes for that node's prefix: a plain forward
pass, then transformers' own processors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.base import DraftRequest, Observation
from specdiff.models.target import CausalTarget
from specdiff.randomness import Random
from specdiff.sampling import LawBuilder, SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.testing import chain
from specdiff.types import Budget, Chain, Draft, Provenance, TokenTree, Verdict
from specdiff.verify.base import TargetLaw
from specdiff.verify.walk import Walk
from support.tiny_targets import VOCAB, fresh_logits, path_to, random_tree, tiny_model

EOS = 9
PROMPT = torch.tensor([5, 9, 11, 5, 9, 30, 2, 11])
NEW = 14


class Count(LogitsProcessor):
    """Favours the token whose id is the number of ids so far: the right prefix shows in the length alone."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        bias = torch.zeros_like(scores)
        bias[:, input_ids.shape[1] % scores.shape[1]] = 4.0
        return scores + bias


class Occurrences(LogitsProcessor):
    """Presence and frequency penalty, token by token."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        new = input_ids[0, len(PROMPT) :].tolist()
        for token in set(new):
            scores[0, token] -= self.presence + self.frequency * new.count(token)
        return scores


INF = float("inf")
# field of SamplingOptions -> values, each with what ``generate`` calls it (processors: what it has no name for)
CASES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "temperature": [({"temperature": 0.6}, {"temperature": 0.6}), ({"temperature": 1.8}, {"temperature": 1.8})],
    "top_k": [({"top_k": 4}, {"top_k": 4})],
    "top_p": [({"top_p": 0.7}, {"top_p": 0.7})],
    "min_p": [({"min_p": 0.1}, {"min_p": 0.1})],
    "typical_p": [({"typical_p": 0.6}, {"typical_p": 0.6})],
    "top_h": [({"top_h": 0.5}, {"top_h": 0.5})],
    "epsilon_cutoff": [({"epsilon_cutoff": 0.02}, {"epsilon_cutoff": 0.02})],
    "eta_cutoff": [({"eta_cutoff": 0.05}, {"eta_cutoff": 0.05})],
    "repetition_penalty": [({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6})],
    "presence_penalty": [({"presence_penalty": 2.5}, {"logits_processor": [Occurrences(2.5, 0.0)]})],
    "frequency_penalty": [
        ({"frequency_penalty": 1.5}, {"logits_processor": [Occurrences(0.0, 1.5)]}),
        ({"frequency_penalty": -0.5, "presence_penalty": 1.0}, {"logits_processor": [Occurrences(1.0, -0.5)]}),
    ],
    "no_repeat_ngram_size": [({"no_repeat_ngram_size": n}, {"no_repeat_ngram_size": n}) for n in (1, 2, 3)],
    "logit_bias": [
        ({"logit_bias": {4: 3.0, (5, 7): 6.0, 30: -INF}}, {"sequence_bias": {(4,): 3.0, (5, 7): 6.0, (30,): -INF}}),
    ],
    "bad_words_ids": [({"bad_words_ids": [[3], [5, 7], [11, 5, 2]]}, {"bad_words_ids": [[3], [5, 7], [11, 5, 2]]})],
    "min_new_tokens": [
        ({"min_new_tokens": n, "logit_bias": {EOS: 20.0}}, {"min_new_tokens": n, "sequence_bias": {(EOS,): 20.0}})
        for n in (1, 5)
    ],
    "processors": [({"processors": [Count()]}, {"logits_processor": [Count()]})],
}
ALL_AT_ONCE: tuple[dict[str, Any], dict[str, Any]] = (
    {
        "temperature": 0.8,
        "top_k": 60,
        "top_p": 0.97,
        "min_p": 0.001,
        "typical_p": 0.97,
        "top_h": 0.95,
        "epsilon_cutoff": 1e-4,
        "eta_cutoff": 2e-4,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "logit_bias": {4: 2.0, (5, 7): 3.0},
        "bad_words_ids": [[3], [5, 9]],
        "min_new_tokens": 6,
        "processors": [Count(), Occurrences(0.5, 0.2)],
    },
    {
        "temperature": 0.8,
        "top_k": 60,
        "top_p": 0.97,
        "min_p": 0.001,
        "typical_p": 0.97,
        "top_h": 0.95,
        "epsilon_cutoff": 1e-4,
        "eta_cutoff": 2e-4,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "sequence_bias": {(4,): 2.0, (5, 7): 3.0},
        "bad_words_ids": [[3], [5, 9]],
        "min_new_tokens": 6,
        "logits_processor": [Count(), Occurrences(0.5, 0.2)],
    },
)
EVERY_CASE = [*((name, *case) for name, cases in CASES.items() for case in cases), ("all at once", *ALL_AT_ONCE)]
each_case = pytest.mark.parametrize(("name", "ours", "theirs"), EVERY_CASE, ids=[c[0] for c in EVERY_CASE])


def test_every_option_has_a_case() -> None:
    assert set(CASES) == {f.name for f in dataclasses.fields(SamplingOptions)}
    assert all(name in ours for name, cases in CASES.items() for ours, _ in cases)


@functools.cache
def model() -> PreTrainedModel:
    made = tiny_model("llama", seed=2)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = EOS, 0
    return made


def their_arguments(theirs: dict[str, Any], **more: Any) -> tuple[dict[str, Any], LogitsProcessorList]:
    fields = {"top_k": 0, **theirs, **more}  # generate's own default is 50
    return fields, LogitsProcessorList(fields.pop("logits_processor", []))


RIGHT: tuple[Callable[[int], bool], ...] = (lambda _: True, lambda _: False, lambda i: i % 2 == 0, lambda i: i % 5 != 3)


class Oracle:
    """Drafts chains that are right where ``RIGHT[row](position)`` says so."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text
        self.name, self.vocab_size, self.max_gamma, self.feature_layers, self.passes = "oracle", VOCAB, None, (), 0

    def provenance(self, budget: Budget) -> Provenance:
        return Provenance.FIXED

    def open(self, rows: int) -> Oracle:
        return self

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for r in requests:
            at, right = len(r.prefix), RIGHT[r.row]
            text = self.text[at : at + r.budget.gamma]
            drafts.append(chain([t if right(at + i) else (t + 1) % VOCAB for i, t in enumerate(text)]))
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def rewind(self, row: int, length: int) -> None:
        """Nothing to forget."""


@each_case
def test_tokens_at_temperature_zero(
    name: str, ours: dict[str, Any], theirs: dict[str, Any], figure: Callable[..., None]
) -> None:
    fields, processors = their_arguments(theirs, do_sample=False)
    expected = (
        model()
        .generate(
            PROMPT[None],
            attention_mask=torch.ones_like(PROMPT[None]),
            max_new_tokens=NEW,
            logits_processor=processors,
            **fields,
        )[0]
        .tolist()
    )
    options = SamplingOptions(**{**ours, "temperature": 0.0})
    requests = [Request(prompt=PROMPT, sampling=options, stop=StopOptions(max_new_tokens=NEW)) for _ in RIGHT]
    different = 0
    for gamma in (1, 4, 9):
        loop = DecodeLoop(CausalTarget(model()), Oracle(expected), requests, budget=Budget(gamma=gamma, shape=Chain()))
        list(loop.run())
        different += sum(row.committed != expected for row in loop.rows)
    figure(5, f"temperature 0, {name}", cases=3 * len(RIGHT), different=different, options=sorted(ours))
    assert not different


class RandomTrees(Oracle):
    """Drafts random trees, whose paths end at different depths."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for r in requests:
            generator = torch.Generator().manual_seed(len(r.prefix))
            tree = random_tree(generator, 7, vocab=12)
            deep = [n for n, d in enumerate(tree.depths) if d <= r.budget.gamma]
            place = {n: i for i, n in enumerate(deep)} | {-1: -1}
            drafts.append(Draft(TokenTree(tree.tokens[deep], tuple(place[tree.parents[n]] for n in deep))))
        return drafts


class Spy:
    """Walk, which first writes down the law of every row."""

    name, exact_for, greedy_only, needs_chain = "spy", frozenset(Provenance), False, False

    def __init__(self) -> None:
        self.seen: list[tuple[TokenTree, list[Tensor]]] = []

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        self.seen.append((draft.tree, [law.row(i) for i in range(len(draft.tree) + 1)]))
        return Walk().verify(draft, law, random)


@each_case
def test_law_at_every_node(
    name: str, ours: dict[str, Any], theirs: dict[str, Any], figure: Callable[..., None]
) -> None:
    fields, custom = their_arguments({"temperature": 1.0, **theirs}, do_sample=True)
    config, _ = model()._prepare_generation_config(GenerationConfig(**fields))
    model()._prepare_special_tokens(config)
    processors = model()._get_logits_processor(
        config, input_ids_seq_length=len(PROMPT), logits_processor=custom, device="cpu"
    )
    spy = Spy()
    request = Request(
        prompt=PROMPT,
        sampling=SamplingOptions(**{"temperature": 1.0, **ours}),
        stop=StopOptions(max_new_tokens=7, ignore_eos=True),
        seed=1,
    )
    loop = DecodeLoop(
        CausalTarget(model()), RandomTrees(()), [request], budget=Budget(gamma=4, shape=Chain()), rule=spy
    )
    prefix, laws, rounds = PROMPT.tolist(), 0, 0
    for commits in loop.run():
        if len(spy.seen) == rounds:  # no room for a draft: the loop chooses the rule
            break
        rounds += 1
        tree, rows = spy.seen[-1]
        for row, law in enumerate(rows):
            path = [int(tree.tokens[n]) for n in path_to(tree, row - 1)]
            ids = torch.tensor(prefix + path)
            scores = processors(ids[None], fresh_logits(model(), ids)[-1:].clone())
            torch.testing.assert_close(law, torch.softmax(scores[0], dim=-1), rtol=2e-4, atol=1e-6)
            laws += 1
        prefix += commits[0].tokens
    assert rounds >= 2  # the prefix of a later round holds tokens of an earlier one
    figure(5, f"temperature > 0, {name}", laws=laws)


def test_the_cases_have_effect() -> None:
    """Each option changes what is tested: were it ignored on both sides, the tests above would not notice."""
    logits = fresh_logits(model(), PROMPT)[-1:]
    ids = torch.cat([PROMPT, torch.tensor([5, 5, 7, 11, 5])])
    for name, ours, _ in EVERY_CASE:
        laws = []
        for options in ({"temperature": 1.0}, {"temperature": 1.0, **ours}):
            builder = LawBuilder(SamplingOptions(**options), prompt_length=len(PROMPT), eos_ids=[EOS], vocab_size=VOCAB)
            laws.append(builder.law(logits, ids, TokenTree(torch.empty(0, dtype=torch.int64), ())).row(0))
        assert float((laws[0] - laws[1]).abs().sum()) > 1e-3, name
