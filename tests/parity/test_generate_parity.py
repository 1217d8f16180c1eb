"""Row 4: at temperature 0 the loop's tokens are those of transformers' ``generate``, whatever the drafter proposes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.base import DraftRequest
from specdiff.models.target import CausalTarget
from specdiff.records import Totals
from specdiff.stopping import StopOptions
from specdiff.testing import ScriptedDrafter
from specdiff.types import BestFirst, Budget, Chain, Draft, TokenTree
from support.tiny_targets import SIX, VOCAB, fresh_logits, tiny_model

_PROMPTS = (torch.tensor([5, 9, 11, 5, 9, 30, 2]), torch.tensor([41]))
"""A ragged batch of two; with its continuation the first crosses every sliding window."""
_NEW = 20
_TIE = 1e-4
_PATTERNS: dict[str, Callable[[int], bool]] = {
    "all": lambda position: True,
    "none": lambda position: False,
    "alternating": lambda position: position % 2 == 0,
    "random": lambda position: hash((position, 12345)) % 5 < 3,  # hashes of ints are the same in every process
}


class Oracle(ScriptedDrafter):
    """Knows the continuation; drafts the true token at the positions that ``right`` picks, another one elsewhere.

    As a tree every node of the chain has a wrong sibling before it, which has a child of its own.
    """

    def __init__(self, truth: Sequence[list[int]], right: Callable[[int], bool], *, tree: bool) -> None:
        super().__init__(self._chain, vocab_size=VOCAB)
        self._truth, self._right, self._tree = truth, right, tree

    def _chain(self, request: DraftRequest) -> list[int]:
        start = len(request.prefix) - len(_PROMPTS[request.row])
        tokens = self._truth[request.row][start : start + request.budget.gamma]
        return [t if self._right(start + i) else (t + 1) % VOCAB for i, t in enumerate(tokens)]

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Chains, or trees around them."""
        drafts = super().propose(requests)
        return [Draft(_bushy(d.tree)) for d in drafts] if self._tree else drafts


def _bushy(chain: TokenTree) -> TokenTree:
    tokens: list[int] = []
    parents: list[int] = []
    parent = -1
    for depth, token in enumerate(chain.tokens.tolist()):
        wrong = len(tokens)
        tokens += [(token + 2) % VOCAB, token]
        parents += [parent, parent]
        if depth + 1 < len(chain):
            tokens.append((token + 3) % VOCAB)
            parents.append(wrong)
        parent = wrong + 1
    return TokenTree(torch.tensor(tokens, dtype=torch.int64), tuple(parents))


@functools.cache
def _model(family: str) -> PreTrainedModel:
    return tiny_model(family, seed=5 if family == "gpt_neox" else 4)  # seeds whose texts do not repeat one token


@functools.cache
def _generated(family: str) -> list[list[int]]:
    """What ``generate`` says, once a family."""
    options = {"max_new_tokens": _NEW, "do_sample": False}
    texts = [_model(family).generate(p[None], attention_mask=torch.ones_like(p[None]), **options) for p in _PROMPTS]
    return [text[0, len(p) :].tolist() for text, p in zip(texts, _PROMPTS, strict=True)]


def _differs(model: PreTrainedModel, prompt: Tensor, got: list[int], expected: list[int]) -> str:
    """``"same"``, ``"tie"`` (the two best logits at the first divergence are as good as equal), or ``"different"``."""
    if got == expected:
        return "same"
    at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
    best = fresh_logits(model, torch.cat([prompt, torch.tensor(expected[:at])]))[-1].topk(2)
    tie = float(best.values[0] - best.values[1]) < _TIE and {got[at], expected[at]} == set(best.indices.tolist())
    return "tie" if tie else "different"


def _run(family: str, gamma: int, pattern: str, tree: bool) -> list[str]:
    """Decode the batch; the verdict on each row."""
    model, truth = _model(family), _generated(family)
    drafter = Oracle(truth, _PATTERNS[pattern], tree=tree)
    budget = Budget(gamma=gamma, shape=BestFirst(3 * gamma) if tree else Chain())
    requests = [Request(prompt=p, index=i, stop=StopOptions(max_new_tokens=_NEW)) for i, p in enumerate(_PROMPTS)]
    loop = DecodeLoop(CausalTarget(model), drafter, requests, budget=budget)
    for _ in loop.run():
        for length, row in zip(loop._session.lengths, loop.rows, strict=True):  # type: ignore[attr-defined]
            assert row.finish is not None or length == len(row.committed) - 1, "the cache holds what is committed"
    verdicts = [_differs(model, p, row.new_tokens, t) for p, row, t in zip(_PROMPTS, loop.rows, truth, strict=True)]
    for row, verdict in zip(loop.rows, verdicts, strict=True):
        totals = Totals.of(row.rounds)
        if verdict == "same" and pattern == "all":
            assert all(r.accepted == r.proposed for r in row.rounds), "an oracle is always accepted"
            assert totals.rounds == -(-_NEW // (gamma + 1))
        elif verdict == "same" and pattern == "none":
            assert totals.accepted == 0, "what is wrong is never accepted"
            assert totals.rounds == _NEW
    return verdicts


def _compare(gammas: Sequence[int], figure: Callable[..., None]) -> None:
    verdicts: list[str] = []
    wrong: list[tuple[object, ...]] = []
    for family in SIX:
        for gamma in gammas:
            for pattern in _PATTERNS:
                for tree in (False, True):
                    got = _run(family, gamma, pattern, tree)
                    verdicts += got
                    if "different" in got:
                        wrong.append((family, gamma, pattern, "tree" if tree else "chain"))
    counts = {"equal": verdicts.count("same"), "ties": verdicts.count("tie"), "different": verdicts.count("different")}
    covered = {"architectures": list(SIX), "gammas": list(gammas), "acceptance": list(_PATTERNS)}
    figure(4, "texts equal to generate's", cases=len(verdicts), **counts, **covered)
    assert not wrong


QUICK = (1, 3, 7)


def test_tokens_equal_generate_quick_share(figure: Callable[..., None]) -> None:
    assert len({tuple(t) for f in SIX for t in _generated(f)}) == 2 * len(SIX)  # the models say different things
    assert all(len(set(t)) > 5 for f in SIX for t in _generated(f))
    _compare(QUICK, figure)


@pytest.mark.slow
def test_tokens_equal_generate_at_the_other_gammas(figure: Callable[..., None]) -> None:
    _compare([gamma for gamma in range(1, 17) if gamma not in QUICK], figure)
