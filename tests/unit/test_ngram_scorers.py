"""Scorers: in memory, by KenLM, of the prompt, mixed."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from specdiff.errors import CheckpointError, InputError, PairingError
from specdiff.ngram.arpa import ArpaError, read_arpa
from specdiff.ngram.base import BOS, EOS, UNK, Learner, NgramScorer
from specdiff.ngram.kenlm_scorer import KenlmScorer
from specdiff.ngram.kneser_ney import estimate
from specdiff.ngram.load import load_scorer
from specdiff.ngram.memory import MemoryScorer
from specdiff.ngram.mixture import InterpolatedScorer
from specdiff.ngram.prompt import PromptScorer
from specdiff.ngram.train import train
from support.ngram_texts import zipf_texts

FILES = Path(__file__).parent.parent / "support" / "ngram"
TOKENIZER = "sha256:" + "a" * 64
TEXTS = zipf_texts(200, 90)


def kenlm_or_skip() -> None:
    pytest.importorskip("kenlm", reason="kenlm is not installed (pip install 'specdiff[ngram]')")


def queries(count: int = 400) -> list[tuple[list[int], list[int]]]:
    """Contexts seen, unseen, unknown, empty and begun by BOS; candidates of every kind."""
    rng = random.Random(3)
    found: list[tuple[list[int], list[int]]] = []
    for _ in range(count):
        text = rng.choice(TEXTS)
        context = text[: rng.randrange(len(text) + 1)] if rng.random() < 0.6 else rng.choices(range(95), k=4)
        context = [BOS, *context] if rng.random() < 0.3 else context
        found.append((context, [*rng.choices(range(100), k=12), *text[:3], EOS, UNK]))
    return found


def test_memory_looks_at_the_last_ids_only() -> None:
    scorer = MemoryScorer(estimate(TEXTS, order=3).table, name="mine")
    assert (scorer.order, scorer.name) == (3, "mine")
    scored: NgramScorer = scorer
    assert scored.log_probs([5, 6, 1, 2], [3, 4]) == scorer.log_probs((1, 2), (3, 4))
    assert scorer.log_probs([1, 2], []) == []


def test_unknown_ids_have_the_probability_of_unk() -> None:
    scorer = MemoryScorer(estimate(TEXTS, order=3).table)
    for context in ([], [1, 2], [1000, 2], [2, 1000]):
        unknown, a, b = scorer.log_probs(context, [UNK, 1000, 10**9])
        assert unknown == a == b
    assert scorer.log_probs([2, 1000], [3]) == scorer.log_probs([], [3])


def test_memory_forgets_old_contexts_not_their_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = MemoryScorer(estimate(TEXTS, order=3).table)
    before = [scorer.log_probs(*query) for query in queries(50)]
    monkeypatch.setattr("specdiff.ngram.memory._CACHED", 3)
    again = MemoryScorer(estimate(TEXTS, order=3).table)
    assert [again.log_probs(*query) for query in queries(50)] == before
    assert len(again._chains) <= 3


@pytest.mark.parametrize("order", [2, 3, 5])
def test_memory_equals_kenlm(tmp_path: Path, order: int) -> None:
    """KenLM computes in float32: each weight is rounded, and so is their sum."""
    kenlm_or_skip()
    path = tmp_path / "model.arpa"
    train(TEXTS, path, tokenizer_fingerprint=TOKENIZER, order=order)
    memory = MemoryScorer(read_arpa(path)[1])
    fast = KenlmScorer(path, tokenizer_fingerprint=TOKENIZER)
    assert (fast.order, fast.name) == (order, "ngram-kenlm")
    for context, tokens in queries():
        assert fast.log_probs(context, tokens) == pytest.approx(memory.log_probs(context, tokens), rel=1e-6, abs=1e-6)


def test_memory_equals_kenlm_on_lmplz_s_own_file() -> None:
    kenlm_or_skip()
    memory, fast = MemoryScorer(read_arpa(FILES / "lmplz.arpa")[1]), KenlmScorer(FILES / "lmplz.arpa")
    for context, tokens in queries():
        assert fast.log_probs(context, tokens) == pytest.approx(memory.log_probs(context, tokens), rel=1e-6, abs=1e-6)


def test_kenlm_forgets_old_contexts_not_their_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kenlm_or_skip()
    path = tmp_path / "model.arpa"
    train(TEXTS, path, tokenizer_fingerprint=TOKENIZER)
    before = [KenlmScorer(path).log_probs(*query) for query in queries(20)]
    monkeypatch.setattr("specdiff.ngram.kenlm_scorer._CACHED", 3)
    scorer = KenlmScorer(path)
    assert [scorer.log_probs(*query) for query in queries(20)] == before
    assert len(scorer._states) <= 3


def test_kenlm_refusals(tmp_path: Path) -> None:
    kenlm_or_skip()
    path = tmp_path / "model.arpa"
    train(TEXTS, path, tokenizer_fingerprint=TOKENIZER, order=1)
    with pytest.raises(CheckpointError, match=r"model\.arpa: KenLM cannot load it .*bigram.*; give a model of order 2"):
        KenlmScorer(path)
    with pytest.raises(CheckpointError, match="KenLM cannot load it"):
        KenlmScorer(tmp_path / "none")
    with pytest.raises(PairingError, match="tokenizer: expected sha256:b, got"):
        KenlmScorer(path, tokenizer_fingerprint="sha256:b")


def test_without_kenlm_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kenlm", None)
    path = tmp_path / "model.arpa"
    train(TEXTS, path, tokenizer_fingerprint=TOKENIZER)
    with pytest.raises(InputError, match=r"expected the package `kenlm`, got .*; pip install 'specdiff\[ngram\]'"):
        KenlmScorer(path)
    with pytest.raises(InputError, match="kenlm"):
        load_scorer(path, engine="kenlm")
    assert load_scorer(path).name == "ngram-memory"


def test_loading_picks_the_engine(tmp_path: Path) -> None:
    kenlm_or_skip()
    for order, name in ((1, "ngram-memory"), (2, "ngram-kenlm"), (6, "ngram-kenlm"), (7, "ngram-memory")):
        path = tmp_path / f"{order}.arpa"
        train(TEXTS, path, tokenizer_fingerprint=TOKENIZER, order=order)
        assert load_scorer(str(path), tokenizer_fingerprint=TOKENIZER).name == name
    assert load_scorer(path, engine="memory").name == "ngram-memory"


def test_loading_refuses(tmp_path: Path) -> None:
    path = tmp_path / "model.arpa"
    train(TEXTS, path, tokenizer_fingerprint=TOKENIZER)
    with pytest.raises(InputError, match="engine: expected auto, kenlm or memory, got 'other'"):
        load_scorer(path, engine="other")
    with pytest.raises(PairingError, match="tokenizer"):
        load_scorer(path, tokenizer_fingerprint="sha256:b")
    with pytest.raises(ArpaError, match="cannot be read"):
        load_scorer(tmp_path / "none")


def witten_bell(text: list[int], context: tuple[int, ...], token: int, size: int) -> float:
    """The formula by counting."""
    n = len(context)
    below = witten_bell(text, context[1:], token, size) if n else 1 / size
    followers = Counter(text[i + n] for i in range(len(text) - n) if tuple(text[i : i + n]) == context)
    return (followers[token] + len(followers) * below) / (followers.total() + len(followers)) if followers else below


def test_prompt_scorer_is_witten_bell_of_the_text() -> None:
    text = [x % 20 for x in itertools.chain(*zipf_texts(30, 40))]
    scorer = PromptScorer(vocab_size=25, order=4, tokens=text[:40])
    scorer.extend(text[40:41])
    scorer.extend(text[41:])
    assert isinstance(scorer, Learner)
    for context in ([], [3], text[5:11], text[-3:], [1, 2, 3, 4], [24, 3], [3, 24]):
        scores = scorer.log_probs(context, range(25))
        assert math.fsum(map(math.exp, scores)) == pytest.approx(1, abs=1e-12)
        kept = tuple(context[-3:])
        assert scores == pytest.approx([math.log(witten_bell(text, kept, t, 25)) for t in range(25)], abs=1e-12)


def test_prompt_scorer_learns_and_starts_from_nothing() -> None:
    scorer = PromptScorer(vocab_size=10, order=1)
    assert scorer.log_probs([1, 2], [3, 9]) == pytest.approx([math.log(0.1)] * 2)
    scorer.extend([3, 3])
    after_three, after_two = scorer.log_probs([], [3, 9]), scorer.log_probs([2], [3, 9])
    assert after_three == after_two
    assert after_three[0] > after_three[1]
    text = PromptScorer(vocab_size=10, order=3, tokens=[1, 2, 3, 1, 2])
    assert max(range(10), key=lambda t: text.log_probs([1, 2], [t])[0]) == 3
    for options in ({"vocab_size": 0}, {"vocab_size": 5, "order": 0}):
        with pytest.raises(InputError, match=r"vocab_size|order"):
            PromptScorer(**options)


def test_a_mixture_adds_probabilities_and_learns() -> None:
    corpus, text = MemoryScorer(estimate(TEXTS, order=3).table), PromptScorer(vocab_size=100, order=4)
    mixed = InterpolatedScorer(text, corpus, weight=0.25)
    assert (mixed.order, mixed.name) == (4, "ngram-prompt+ngram-memory")
    mixed.extend(TEXTS[2])
    assert text.log_probs([], [5]) == PromptScorer(vocab_size=100, tokens=TEXTS[2]).log_probs([], [5])
    for context, tokens in queries(30):
        parts = zip(text.log_probs(context, tokens), corpus.log_probs(context, tokens), strict=True)
        expected = [math.log(0.25 * math.exp(a) + 0.75 * math.exp(b)) for a, b in parts]
        assert mixed.log_probs(context, tokens) == pytest.approx(expected, abs=1e-12)
    for weight in (0.0, 1.0, -1, math.nan, "half"):
        with pytest.raises(InputError, match="weight: expected a number in"):
            InterpolatedScorer(text, corpus, weight=weight)
