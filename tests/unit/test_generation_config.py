"""Every field of transformers' `GenerationConfig` is honoured, without influence, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from specdiff.errors import ContextOverflowError, InputError
from specdiff.integrations.generation_config import (
    HONOURED,
    NO_INFLUENCE,
    REFUSED,
    from_generation_config,
    refuse_unsupported,
)
from specdiff.sampling import LawBuilder, SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.types import TokenTree
from support.tiny_targets import VOCAB, tiny_model

PROMPT = torch.tensor([5, 6, 7, 5, 8, 5, 6])
TREE = TokenTree(torch.tensor([7, 5, 9, 5]), (-1, 0, 1, -1))


def options(*, prompt_length: int = 7, **fields: Any) -> tuple[SamplingOptions, StopOptions]:
    return from_generation_config(GenerationConfig(**fields), prompt_length=prompt_length, eos_ids=[9])


def test_every_field_is_classified_once(figure: Callable[..., None]) -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    ignored = fields - HONOURED - NO_INFLUENCE - set(REFUSED) - {"cache_implementation"}
    counts = {"fields": len(fields), "refused": len(fields & set(REFUSED)), "ignored": len(ignored)}
    figure(5, "fields of GenerationConfig", **counts)
    assert not ignored
    assert not HONOURED & NO_INFLUENCE
    assert not (HONOURED | NO_INFLUENCE) & set(REFUSED)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_fields_are_refused_with_a_remedy(name: str) -> None:
    config = GenerationConfig()
    setattr(config, name, "asked for")
    message = rf"generation_config\.{name}: expected .*, got 'asked for'; {REFUSED[name][:9]}"
    with pytest.raises(InputError, match=message):
        refuse_unsupported(config)
    refuse_unsupported(config, except_for={name})


def test_unknown_fields_are_refused() -> None:
    config = GenerationConfig()
    config.frobnicate = 3
    with pytest.raises(InputError, match=r"generation_config\.frobnicate"):
        refuse_unsupported(config)


def test_defaults_and_switched_off_fields_pass() -> None:
    config = GenerationConfig()
    for name, value in GenerationConfig._get_default_generation_params().items():
        setattr(config, name, value)
    for name in REFUSED:
        if getattr(config, name, None) is None:
            setattr(config, name, False)
    config.guidance_scale, config.cache_implementation = 1.0, "hybrid"
    refuse_unsupported(config)
    config.cache_implementation = "quantized"
    with pytest.raises(InputError, match="cache_implementation"):
        refuse_unsupported(config)


def test_defaults_are_those_of_generate() -> None:
    assert options() == (
        SamplingOptions(temperature=0.0, top_k=50),
        StopOptions(max_new_tokens=20),
    )
    sampling, _ = options(do_sample=True)
    assert (sampling.temperature, sampling.top_k) == (1.0, 50)
    assert options(do_sample=True, top_k=0)[0].top_k is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_new_tokens": 4}, {"max_new_tokens": 4}),
        ({"max_length": 12}, {"max_new_tokens": 5}),
        ({"max_length": 12, "max_new_tokens": 9}, {"max_new_tokens": 9}),
        ({"stop_strings": "ab"}, {"stop_strings": ["ab"]}),
        ({"stop_strings": ["ab", "c"]}, {"stop_strings": ["ab", "c"]}),
        ({"max_time": 2.5}, {"max_time": 2.5}),
        ({"eos_token_id": 9}, {}),
        ({"eos_token_id": [9]}, {}),
        ({"eos_token_id": [4, 9]}, {"stop_ids": [4, 9], "ignore_eos": True}),
    ],
)
def test_stops(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert options(**fields)[1] == StopOptions(**({"max_new_tokens": 20} | expected))


@pytest.mark.parametrize(
    ("fields", "minimum"),
    [
        ({"min_new_tokens": 3}, 3),
        ({"min_length": 9}, 2),
        ({"min_length": 5}, 0),
        ({"min_length": 99, "min_new_tokens": 1}, 1),
    ],
)
def test_lengths_count_from_the_prompt(fields: dict[str, Any], minimum: int) -> None:
    assert options(**fields)[0].min_new_tokens == minimum


def test_no_room_is_an_error() -> None:
    with pytest.raises(ContextOverflowError, match="max_length"):
        options(max_length=7)


@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": True, "temperature": 0.0},
        {"do_sample": True, "temperature": -1.0},
        {"top_p": 2.0},
        {"stop_strings": [""]},
        {"bad_words_ids": [[]]},
        {"repetition_penalty": 0.0},
        {"max_time": -1.0},
    ],
)
def test_bad_values_are_typed_errors(fields: dict[str, Any]) -> None:
    config = GenerationConfig()
    for name, value in fields.items():  # past the checks of its own constructor
        setattr(config, name, value)
    with pytest.raises(InputError, match=list(fields)[-1]):
        from_generation_config(config, prompt_length=7, eos_ids=[9])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_k": 0, "top_p": 0.6},
    {"top_k": 0, "min_p": 0.2},
    {"top_k": 0, "top_h": 0.4},
    {"top_k": 0, "typical_p": 0.5},
    {"top_k": 0, "epsilon_cutoff": 0.02},
    {"top_k": 0, "eta_cutoff": 0.05},
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[3], [5, 9], [1, 2, 3]]},
    {"sequence_bias": [[[4], 3.0], [[6, 5], -4.0]]},
    {"min_new_tokens": 2},
    {"min_length": 9},
    {"min_new_tokens": 2, "eos_token_id": [5, 11]},
    {"suppress_tokens": [1, 2, 3]},
    {"begin_suppress_tokens": [7, 8]},
    {"forced_eos_token_id": 9, "max_new_tokens": 3},
    {"exponential_decay_length_penalty": (1, 1.5)},
    {"exponential_decay_length_penalty": (1, 1.5), "eos_token_id": 30},
    {"renormalize_logits": True},
    {"forced_bos_token_id": 3},
    {  # all at once, so that the order shows
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.95,
        "epsilon_cutoff": 0.001,
        "eta_cutoff": 0.002,
        "top_h": 0.9,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[3], [5, 9]],
        "sequence_bias": [[[4], 3.0]],
        "min_new_tokens": 2,
        "suppress_tokens": [1],
        "begin_suppress_tokens": [7],
        "forced_eos_token_id": 9,
        "max_new_tokens": 9,
        "exponential_decay_length_penalty": (1, 1.5),
    },
]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("fields", FIELDS, ids=lambda f: "all" if len(f) > 9 else "+".join(f))
def test_laws_are_those_of_generate(model: PreTrainedModel, fields: dict[str, Any], do_sample: bool) -> None:
    fields = {"eos_token_id": 9, "do_sample": do_sample, **fields}
    logits = torch.randn(len(TREE) + 1, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    sampling, stop = from_generation_config(GenerationConfig(**fields), prompt_length=6, eos_ids=[9])
    law = LawBuilder(sampling, prompt_length=6, eos_ids=[9], vocab_size=VOCAB).law(logits, PROMPT, TREE)

    config, _ = model._prepare_generation_config(GenerationConfig(**fields))
    model._prepare_special_tokens(config)
    config.max_length = 6 + stop.max_new_tokens
    processors = model._get_logits_processor(config, input_ids_seq_length=6, device="cpu")
    for row, path in enumerate([[], [7], [7, 5], [7, 5, 9], [5]]):
        ids = torch.cat([PROMPT, torch.tensor(path, dtype=torch.int64)])[None]
        scores = processors(ids, logits[row : row + 1].clone())[0]
        if do_sample:
            torch.testing.assert_close(law.row(row), torch.softmax(scores, dim=-1), rtol=1e-5, atol=1e-8)
        assert law.choice(row) == int(scores.argmax())
