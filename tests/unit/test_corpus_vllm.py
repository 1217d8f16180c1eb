"""The real vLLM beside the backend in this process, on the default target's real weights.

Run in an environment of its own that has vLLM: ``pytest -m vllm tests/unit/test_corpus_vllm.py``.
"""

from __future__ import annotations

import os

import pytest
import torch

from specdiff.corpus.identity import encode_prompts, eos_ids
from specdiff.corpus.plan import Batching, Sampling, plan_groups
from specdiff.corpus.prompts import Prompt
from specdiff.corpus.row import CorpusRow
from specdiff.corpus.specs import TransformersSpec, VllmSpec
from specdiff.errors import InputError
from specdiff.hub import ModelStore

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

# A logit gap below this is rounding: the two may take either token, and differ from there on.
TIE = 1e-3
SUBJECTS = ("tides", "bread", "prime numbers", "the moon", "bicycles", "photosynthesis", "chess", "volcanoes")
PROMPTS = [
    *(f"Explain {subject} to a child in two sentences." for subject in SUBJECTS),
    *(f"A box holds {6 + n} eggs. How many eggs are in {3 + n} boxes? Explain step by step." for n in range(6)),
    *(f"Write a Python function that returns the {word} of a list." for word in ("sum", "length", "largest", "median")),
    "Translate 'good morning' into French, German and Spanish.",
    "Write a haiku about rain.",
]


def test_both_backends_give_the_same_tokens_at_temperature_zero(figure) -> None:
    pytest.importorskip("vllm")
    assert len(PROMPTS) == 20
    try:
        source = ModelStore().resolve("smollm2-135m").source
    except InputError:
        pytest.skip("the default target is not in the store")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    sampling = Sampling(temperature=0, max_new_tokens=64)
    tokenizer = AutoTokenizer.from_pretrained(source)
    prompts, _ = encode_prompts([Prompt(id=p, content=p) for p in PROMPTS], tokenizer, source={})
    [group] = plan_groups(prompts, sampling, Batching())
    eos = eos_ids(source, AutoConfig.from_pretrained(source))

    def answers(spec: TransformersSpec | VllmSpec) -> dict[tuple[str, int], CorpusRow]:
        return {row.key: row for rows in spec.open(sampling).answer(group) for row in rows}

    ours = answers(TransformersSpec(source=source, dtype="fp32", device="cpu"))
    options = {"max_model_len": 512, "enforce_eager": True}
    theirs = answers(VllmSpec(source=source, eos_ids=eos, dtype="fp32", options=options))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ties, worst = 0, 0.0
    for key, row in ours.items():
        other = theirs[key]
        same = next((i for i, (a, b) in enumerate(zip(row.ids, other.ids, strict=False)) if a != b), len(row.ids))
        gaps = [abs(a - b) for a, b in zip(row.logprobs[:same], other.logprobs[:same], strict=True)]
        worst = max(worst, *gaps)
        if row.ids != other.ids:
            with torch.inference_mode():
                logits = model(torch.tensor([[*row.prompt_ids, *row.ids[:same]]])).logits[0, -1]
            gap = float(logits[row.ids[same]] - logits[other.ids[same]])
            assert abs(gap) < TIE, f"{key[0]!r} differs at token {same} by {gap} in the logit"
            ties += 1
        else:
            assert row.finish == other.finish
    assert worst < 2e-3
    figure(
        14, "prompts answered alike by transformers and vLLM at T = 0", equal=20 - ties, ties=ties, max_logprob=worst
    )
    print(f"equal {20 - ties} of 20, ties {ties}, largest difference of a log-probability {worst:.2e}")
