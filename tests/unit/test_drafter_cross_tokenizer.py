"""Drafting across tokenizers: text goes over and back whole, half characters included, and caches go on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.autoregressive import AutoregressiveDrafter
from specdiff.drafters.base import DraftRequest, Observation
from specdiff.drafters.cross_tokenizer import CrossTokenizerDrafter, CrossTokenizerSession, node_limit
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.drafters.ngram import NgramDrafter
from specdiff.drafters.retokenize import HALF, TextCodec
from specdiff.drafters.windowed import WindowedDrafter
from specdiff.errors import InputError, PairingError
from specdiff.records import Totals
from specdiff.stopping import StopOptions
from specdiff.testing import ScriptedDrafter, TableMarginals
from specdiff.types import BestFirst, Budget, Chain, Draft, Provenance, Samples, Siblings
from support.drafting import ask, decode, llama, plain
from support.tokenizing import TEXTS, TOKENIZERS, ReciteTarget, byte_level, characters, metaspace

PAIRS = list(itertools.permutations(TOKENIZERS, 2))
CHAIN = Budget(gamma=6, shape=Chain())


class Reciter(ScriptedDrafter):
    """Knows how the texts go on, in its own tokens; remembers what it was shown and told."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
        super().__init__(self._next, vocab_size=len(tokenizer))
        self.codec, self.texts = TextCodec(tokenizer), texts
        self.shown: list[list[int]] = []
        self.told: list[Observation] = []
        self.rewound: list[int] = []

    def _next(self, request: DraftRequest) -> list[int]:
        ids = request.prefix.tolist()
        self.shown.append(ids)
        text = self.codec.text(ids[len(self.codec.start) :])
        return self.codec.following(ids, self.texts[request.row].removeprefix(text))

    def observe(self, observations: Sequence[Observation]) -> None:
        self.told += observations

    def rewind(self, row: int, length: int) -> None:
        self.rewound.append(length)


def cross(inner, target: PreTrainedTokenizerFast, drafter: PreTrainedTokenizerFast) -> CrossTokenizerDrafter:
    return CrossTokenizerDrafter(inner, target_tokenizer=target, drafter_tokenizer=drafter, vocab_size=len(target))


def recite(drafter: CrossTokenizerDrafter, texts: Sequence[str], prompt: int, budget: Budget = CHAIN) -> DecodeLoop:
    """Decode with a target that recites the texts after their first ``prompt`` tokens."""
    scripts = [drafter.target.ids(t) for t in texts]
    requests = [
        Request(prompt=torch.tensor(s[:prompt]), index=i, stop=StopOptions(max_new_tokens=len(s) - prompt))
        for i, s in enumerate(scripts)
    ]
    loop = DecodeLoop(ReciteTarget(scripts, drafter.vocab_size), drafter, requests, budget=budget)
    for _ in loop.run():
        pass
    for row, script in zip(loop.rows, scripts, strict=True):
        assert row.committed == script
    return loop


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
@pytest.mark.parametrize("text", range(len(TEXTS)))
def test_who_knows_the_text_has_it_accepted(target: str, drafter: str, text: int) -> None:
    inner = Reciter(TOKENIZERS[drafter](), [TEXTS[text]])
    known = all(c.text(c.ids(TEXTS[text])) == TEXTS[text] for c in (inner.codec, TextCodec(TOKENIZERS[target]())))
    loop = recite(cross(inner, TOKENIZERS[target](), TOKENIZERS[drafter]()), [TEXTS[text]], prompt=3)
    totals = Totals.of(loop.rows[0].rounds)
    if known:  # what is wrong are ends of drafts only, where the drafter stops within one of the target's tokens
        assert totals.accepted > 0.8 * totals.proposed
        assert totals.tau > 3.5
    else:
        assert totals.tau >= 1


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_the_drafter_is_shown_the_text_and_keeps_what_it_read(target: str, drafter: str) -> None:
    texts = [TEXTS[0], TEXTS[2], TEXTS[1] * 3]
    inner = Reciter(TOKENIZERS[drafter](), texts)
    crossed = cross(inner, TOKENIZERS[target](), TOKENIZERS[drafter]())
    recite(crossed, texts, prompt=4)
    start = inner.codec.start
    for ids in inner.shown:
        assert ids[: len(start)] == start
        text = inner.codec.text(ids[len(start) :])
        whole = next(t for t in texts if t.startswith(text))
        assert inner.codec.ids(text) == ids[len(start) :]  # as if all of it had been encoded at once
        assert whole
    # the few re-tokenized tokens are at the end of what was read: a row is emptied at its start and its end only
    assert inner.rewound.count(0) == 2 * len(texts)
    prompts = [o for o in inner.told if o.start == 0]
    assert sorted(o.row for o in prompts) == [0, 1, 2]
    assert any(o.accepted for o in inner.told)


def test_half_a_character_waits_and_its_draft_goes_on_from_there() -> None:
    text = "fox 🦊 🦊🐶 end"
    target = byte_level()
    ids = TextCodec(target).ids(text)
    for end in range(1, len(ids)):
        prefix = ids[:end]
        inner = Reciter(metaspace(), [text])
        (draft,) = cross(inner, target, metaspace()).open(1).propose([ask(0, prefix, CHAIN)])
        shown = inner.codec.text(inner.shown[0][1:])
        assert HALF not in shown
        whole = target.decode(prefix).rstrip(HALF)
        assert shown == whole
        found = draft.tree.tokens.tolist()
        assert found == ids[end : end + len(found)]
        assert found


def test_what_the_target_would_join_is_encoded_alone() -> None:
    codec = TextCodec(byte_level())
    before = codec.ids("The quick br")
    assert codec.text([*before, *codec.following(before, "own fox")]) == "The quick brown fox"
    joined = codec.ids("The quick brown fox")
    assert joined[: len(before)] != before  # "br" + "own" is not how the tokenizer cuts "brown"
    llama_like = TextCodec(metaspace())
    before = llama_like.ids("The quick")
    assert llama_like.text([*before, *llama_like.following(before, " fox")]) == "The quick fox"
    assert llama_like.text([*before, *llama_like.following(before, "er")]) in ("The quicker", "The quick")


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_text_that_grows_in_any_pieces_is_encoded_as_a_whole(name: str) -> None:
    codec = TextCodec(TOKENIZERS[name]())
    for text in (TEXTS[0], TEXTS[1], TEXTS[2] * 2):
        for step in (1, 3, 10):
            ids = codec.ids(text[:step])
            for at in range(step, len(text), step):
                grown = codec.appended(ids, text[at : at + step])
                ids = grown if grown is not None else codec.ids(text[: at + step])
            assert ids == codec.ids(text)


def test_control_tokens_pass_by_name_and_others_end_the_draft() -> None:
    target, drafter = byte_level(), metaspace()
    end, their_end, user = target.eos_token_id, drafter.eos_token_id, target.convert_tokens_to_ids("<|user|>")
    codec = TextCodec(drafter)
    seen: list[list[int]] = []

    def script(request: DraftRequest) -> list[int]:
        seen.append(request.prefix.tolist())
        return [*codec.following(request.prefix.tolist(), " fox"), their_end, their_end]

    inner = ScriptedDrafter(script, vocab_size=len(drafter))
    prefix = [user, *TextCodec(target).ids("The quick")]
    (draft,) = cross(inner, target, drafter).open(1).propose([ask(0, prefix, CHAIN)])
    assert codec.text(seen[0][1:]) == "The quick"  # <|user|> means nothing to this drafter
    assert draft.tree.tokens.tolist() == [*TextCodec(target).ids(" fox"), end, end]
    # <stop> means nothing to the target
    letters = characters()
    script_of_letters = [*TextCodec(letters).ids("ab"), letters.eos_token_id, 5]
    ending = ScriptedDrafter(lambda request: script_of_letters, vocab_size=len(letters))
    (draft,) = cross(ending, target, letters).open(1).propose([ask(0, prefix, CHAIN)])
    assert target.decode(draft.tree.tokens) == "ab"


@pytest.mark.parametrize("shape", [Chain(), Samples(3), Siblings((2, 2)), BestFirst(8)])
@pytest.mark.parametrize(("target", "drafter"), [("byte-level", "characters"), ("metaspace", "byte-level")])
def test_models_draft_across_tokenizers_and_the_text_is_the_targets_own(target: str, drafter: str, shape) -> None:
    ours, theirs = TOKENIZERS[target](), TOKENIZERS[drafter]()
    model = llama(1, vocab=len(ours))  # writes bytes that form no characters, too
    inner = AutoregressiveDrafter(llama(2, vocab=len(theirs)), vocab_size=len(theirs))
    crossed = cross(WindowedDrafter(inner, context=32), ours, theirs)
    budget = Budget(gamma=3, shape=shape)
    assert crossed.provenance(budget) is Provenance.FIXED
    prompts = [torch.tensor(TextCodec(ours).ids(t)[:n]) for t, n in zip(TEXTS[2:], (9, 4), strict=True)]
    loop, events = decode(model, crossed, budget, prompts=prompts, new_tokens=12)
    for row, prompt in zip(loop.rows, prompts, strict=True):
        assert row.new_tokens == plain(model, prompt, 12)
    assert all(len(e.draft.tree) <= node_limit(budget) for e in events)
    assert any(len(e.draft.tree) for e in events)


def test_marginal_drafters_draft_across_tokenizers() -> None:
    ours, theirs = byte_level(), characters()
    inner = MarginalDrafter(TableMarginals.random(len(theirs), 5))
    model = llama(1, vocab=len(ours))
    prompt = torch.tensor(ours("The quick")["input_ids"])
    budget = Budget(gamma=5, shape=BestFirst(9))
    loop, events = decode(model, cross(inner, ours, theirs), budget, prompts=[prompt], new_tokens=15)
    assert loop.rows[0].new_tokens == plain(model, prompt, 15)
    assert any(len(e.draft.tree) for e in events)


def test_the_inner_cache_goes_on_from_round_to_round() -> None:
    theirs = metaspace()
    model = llama(2, vocab=len(theirs))
    sizes: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    crossed = cross(AutoregressiveDrafter(model, vocab_size=len(theirs)), byte_level(), theirs)
    recite(crossed, [TEXTS[0] * 3], prompt=40, budget=Budget(gamma=2, shape=Chain()))
    assert sizes[0] > 15
    assert max(sizes[1:]) < 12  # never the text again


def test_rows_without_text_draft_nothing() -> None:
    target = byte_level()
    ids = TextCodec(target).ids("🦊")
    inner = Reciter(characters(), ["🦊"])
    (draft,) = cross(inner, target, characters()).open(1).propose([ask(0, ids[:1], CHAIN)])
    assert len(draft.tree) == 0
    assert inner.shown == []


def test_budgets_are_counted_in_the_drafters_tokens() -> None:
    inner = AutoregressiveDrafter(llama(2, vocab=8), vocab_size=8)
    crossed = cross(inner, byte_level(), characters())
    assert crossed.inner_budget(Budget(gamma=4, shape=BestFirst(10)), 2.5) == Budget(gamma=10, shape=BestFirst(25))
    assert crossed.inner_budget(Budget(gamma=4, shape=Siblings((2, 1))), 0.5) == Budget(gamma=2, shape=Siblings((2, 1)))
    bounded = cross(MarginalDrafter(TableMarginals.random(8, 3)), byte_level(), characters())
    assert bounded.inner_budget(Budget(gamma=4, shape=Chain()), 2.5).gamma == 3


def test_bad_pairs_are_refused() -> None:
    class Reader(ScriptedDrafter):
        def __init__(self) -> None:
            super().__init__(lambda r: [], vocab_size=8)
            self.feature_layers = (1,)

    with pytest.raises(PairingError, match="features"):
        cross(Reader(), byte_level(), metaspace())


def test_shapes_are_the_inner_drafters_affair() -> None:
    crossed = cross(NgramDrafter(vocab_size=72), byte_level(), characters())
    with pytest.raises(InputError, match="n-gram"):
        crossed.provenance(Budget(gamma=2, shape=Samples(2)))
    session = crossed.open(1)
    assert isinstance(session, CrossTokenizerSession)
    draft: Draft = session.propose([ask(0, TextCodec(byte_level()).ids("The fox. The f"), CHAIN)])[0]
    assert byte_level().decode(draft.tree.tokens).startswith("ox. ")
