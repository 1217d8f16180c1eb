"""The embedded default pair on real weights: same text as ``transformers``, fewer passes, sound counts."""

from __future__ import annotations

import pytest
import torch

from specdiff.bench.compare import transformers_generate
from specdiff.bench.parity import compare_texts, teacher_force
from specdiff.control.adaptive_length import AdaptiveLength
from specdiff.decoder import Settings, SpeculativeDecoder, load
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.types import Budget, CausalPaths

pytestmark = pytest.mark.weights

PROMPTS = (
    "A baker sells 14 loaves in the morning and twice as many in the afternoon. How many loaves does she sell in all?",
    "Write a Python function that returns the largest of three numbers.",
    "Explain in two sentences why the sky is blue.",
)


@pytest.fixture(scope="module")
def pair() -> SpeculativeDecoder:
    return load(dtype="fp32", pull=False)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_equals_transformers_generate(pair, prompt):
    ids = pair.encode(prompt, chat=True)
    ours = pair.generate(ids, max_new_tokens=48)
    theirs = transformers_generate(pair.target.model, SamplingOptions(), StopOptions(max_new_tokens=48))(ids)
    assert compare_texts(pair.target.model, ids, ours.tokens, theirs).verdict() in ("equal", "tie")


def test_drafting_saves_target_passes(pair):
    generations = pair.generate([pair.encode(p, chat=True) for p in PROMPTS], max_new_tokens=48)
    for generation in generations:
        totals = generation.totals
        assert totals.tokens == len(generation.tokens)
        assert totals.accepted + totals.recovered + totals.bonus == totals.tokens
        assert totals.target_passes == totals.rounds
    tau = sum(g.totals.tokens for g in generations) / sum(g.totals.rounds for g in generations)
    assert tau > 1.5, "the embedded drafter has lost its skill"


def test_a_batch_equals_its_rows_alone(pair):
    ids = [pair.encode(p, chat=True) for p in PROMPTS]
    together = pair.generate(ids, max_new_tokens=32)
    for prompt, row in zip(ids, together, strict=True):
        alone = pair.generate(prompt, max_new_tokens=32)
        assert compare_texts(pair.target.model, prompt, row.tokens, alone.tokens).verdict() in ("equal", "tie")


def test_causal_paths_change_no_text():
    """DiffuSpec's search, with an n-gram model that learns from the text and an adaptive draft length."""
    shape = CausalPaths(keep=3)
    settings = Settings(budget=Budget(gamma=8, shape=shape), controller=AdaptiveLength)
    searched = load(dtype="fp32", pull=False, ngram="prompt", settings=settings)
    plain = SpeculativeDecoder(searched.target, None, searched.tokenizer)
    for prompt in PROMPTS:
        ids = searched.encode(prompt, chat=True)
        ours, theirs = searched.generate(ids, max_new_tokens=32), plain.generate(ids, max_new_tokens=32)
        assert compare_texts(searched.target.model, ids, ours.tokens, theirs.tokens).verdict() in ("equal", "tie")
        assert ours.totals.accepted > 0


def test_streaming_adds_up_to_the_text(pair):
    pieces = list(pair.stream(PROMPTS[0], chat=True, max_new_tokens=40))
    whole = pair.generate(PROMPTS[0], chat=True, max_new_tokens=40)
    assert "".join(p.text for p in pieces) == whole.text
    assert pieces[-1].generation.tokens == whole.tokens


def test_sampled_text_is_reproducible(pair):
    first = pair.generate(PROMPTS[2], chat=True, max_new_tokens=24, temperature=1.0, seed=3)
    again = pair.generate(PROMPTS[2], chat=True, max_new_tokens=24, temperature=1.0, seed=3)
    other = pair.generate(PROMPTS[2], chat=True, max_new_tokens=24, temperature=1.0, seed=4)
    assert first.tokens == again.tokens != other.tokens


def test_bf16_tokens_are_argmaxes_up_to_rounding():
    pair = load(dtype="bf16", pull=False)
    ids = pair.encode(PROMPTS[0], chat=True)
    forced = teacher_force(pair.target.model, ids, pair.generate(ids, max_new_tokens=48).tokens)
    assert forced.argmax >= 0.9 * forced.tokens
    assert max(forced.margins, default=0.0) < 0.5
    assert pair.target.model.dtype is torch.bfloat16
