"""Options are checked by name, and rows of logits become the right laws."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor

from specdiff.errors import InputError, NumericsError
from specdiff.sampling import Law, LawBuilder, SamplingOptions
from specdiff.types import TokenTree

V = 12
TREE = TokenTree(torch.tensor([3, 4, 5, 3]), (-1, 0, 1, -1))
PREFIX = torch.tensor([1, 2])
NAN, INF = float("nan"), float("inf")


def build(options: SamplingOptions, logits: torch.Tensor, *, eos_ids: tuple[int, ...] = (7,)) -> Law:
    builder = LawBuilder(options, prompt_length=1, eos_ids=eos_ids, vocab_size=logits.shape[-1])
    return builder.law(logits, PREFIX, TREE)


def some_logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(len(TREE) + 1, V, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)


BAD: dict[str, list[Any]] = {
    "temperature": [-1, 1e-9, NAN, INF, "1", True, None, 1j, 10**400],
    "top_k": [0, -1, 1.5, True, "5"],
    "top_p": [0, -0.1, 1.1, NAN, True, "0.5", None],
    "min_p": [-0.1, 1.1, NAN, False, None],
    "typical_p": [0, 1.5, NAN, None],
    "top_h": [0, 1.5, NAN, True],
    "epsilon_cutoff": [-0.1, 1, NAN, None],
    "eta_cutoff": [-0.1, 1.0, NAN, None],
    "repetition_penalty": [0, -1, INF, NAN, True, None],
    "presence_penalty": [INF, NAN, "x", None],
    "frequency_penalty": [-INF, NAN, False, None],
    "no_repeat_ngram_size": [-1, 2.0, True, None],
    "logit_bias": [[], None, {"a": 1.0}, {1.5: 1.0}, {-1: 1.0}, {True: 1.0}, {(): 1.0}, {1: INF}, {1: NAN}, {1: "1"}],
    "bad_words_ids": [None, 5, [5], ["ab"], [[]], [[-1]], [[1.0]], {1: [2]}],
    "min_new_tokens": [-1, 0.5, True, None],
    "processors": [None, 5, [None], "ab"],
}


def test_every_option_has_bad_values() -> None:
    assert set(BAD) == {f.name for f in dataclasses.fields(SamplingOptions)}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^{name}: expected .*; "):
        SamplingOptions(**{name: value})


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="mirostat"):
        SamplingOptions(mirostat=2)  # type: ignore[call-arg]


def test_numbers_of_other_types_are_taken() -> None:
    bias = {np.int64(1): np.float32(2)}
    options = SamplingOptions(temperature=1, top_k=np.int64(3), top_p=np.float32(0.5), logit_bias=bias)
    assert (options.temperature, options.top_k, options.top_p) == (1.0, 3, 0.5)
    assert type(options.top_k) is int
    assert type(options.logit_bias[1]) is float


def test_options_are_values() -> None:
    words = [[1, 2]]
    options = SamplingOptions(temperature=0.5, logit_bias={3: 1.0, (1, 2): -INF}, bad_words_ids=words)
    words[0].append(9)
    assert options.bad_words_ids == ((1, 2),)
    assert pickle.loads(pickle.dumps(options)) == copy.deepcopy(options) == options
    assert dataclasses.replace(options, top_k=4).logit_bias == options.logit_bias
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.top_k = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(logit_bias={V: 1.0}),
        SamplingOptions(logit_bias={(1, V): 1.0}),
        SamplingOptions(bad_words_ids=[[1, V]]),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(options: SamplingOptions) -> None:
    with pytest.raises(InputError, match=f"token ids below {V}, got \\[{V}\\]"):
        build(options, some_logits())


def test_eos_as_a_bad_word_is_refused_rather_than_dropped() -> None:
    with pytest.raises(InputError, match=r"bad_words_ids.*min_new_tokens"):
        build(SamplingOptions(bad_words_ids=[[5], [7]]), some_logits())
    build(SamplingOptions(bad_words_ids=[[5], [7, 8]]), some_logits())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_laws_are_at_least_single_precision(dtype: torch.dtype, temperature: float) -> None:
    logits = some_logits(dtype)
    law = build(SamplingOptions(temperature=temperature), logits)
    row = law.row(2)
    assert row.dtype in (torch.float32, torch.float64)
    if temperature:
        wide = logits if dtype is torch.float64 else logits.float()
        torch.testing.assert_close(row, torch.softmax(wide[2] / temperature, dim=-1), rtol=1e-6, atol=0)
        assert row.dtype == wide.dtype
    else:
        assert row.tolist() == torch.nn.functional.one_hot(logits[2].argmax(), V).tolist()


def test_the_first_of_equals_is_chosen() -> None:
    logits = torch.zeros(len(TREE) + 1, 3000, dtype=torch.bfloat16)
    logits[:, [1500, 2999]] = 1.0
    for options in (SamplingOptions(), SamplingOptions(logit_bias={0: -1.0})):
        assert [build(options, logits).choice(i) for i in range(len(TREE) + 1)] == [1500] * (len(TREE) + 1)


class Record(LogitsProcessor):
    """Remembers the ids it was shown, and scribbles over the scores."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids[0].tolist())
        scores[:, 0] = 50.0
        return scores


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_row_is_processed_once_with_its_own_prefix(temperature: float) -> None:
    record, logits = Record(), some_logits()
    before = logits.clone()
    law = build(SamplingOptions(temperature=temperature, processors=[record]), logits)
    assert not record.seen  # nothing is paid for before it is asked for
    assert [law.choice(i) for i in (3, 0, 4)] == [0, 0, 0]
    assert float(law.row(3)[0]) == pytest.approx(1.0)
    law.choice(3)
    expected = [[1, 2, 3, 4, 5], [1, 2], [1, 2, 3]]
    assert record.seen == (expected if temperature == 0 else [*expected, expected[0]])  # row and choice each once
    torch.testing.assert_close(logits, before, rtol=0, atol=0)


def test_penalties_count_the_continuation_of_each_node() -> None:
    logits = torch.zeros(len(TREE) + 1, V)
    law = build(SamplingOptions(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5), logits)
    # the prompt is [1], the continuation [2]; node 2 adds 3, 4, 5
    row = law.row(3).log()
    penalised = {2, 3, 4, 5}
    for token in range(V):
        assert float(row[token] - row[0]) == pytest.approx(-1.5 if token in penalised else 0.0, abs=1e-6)


def test_minus_infinity_bans() -> None:
    law = build(SamplingOptions(temperature=1.0, logit_bias={3: -INF, (2, 5): -INF}), torch.zeros(len(TREE) + 1, V))
    assert law.row(0)[[3, 5]].tolist() == [0, 0]  # the prefix ends in 2
    assert float(law.row(1)[5]) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_new_tokens_bans_eos_by_depth(temperature: float) -> None:
    logits = torch.zeros(len(TREE) + 1, V)
    logits[:, 7] = 9.0
    law = build(SamplingOptions(temperature=temperature, min_new_tokens=3), logits)
    assert [law.choice(i) == 7 for i in range(5)] == [False, False, True, True, False]  # 1 new token at the root
    assert float(law.row(0)[7]) == 0


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_broken_logits_are_reported_by_row(value: float) -> None:
    logits = some_logits()
    logits[3, 4] = value
    with pytest.raises(NumericsError, match=r"rows \[3\]"):
        build(SamplingOptions(), logits)


def _raises(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of paper")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (_raises, "function raised RuntimeError\\('out of paper'\\)"),
        (lambda ids, scores: scores[:, :5], "shape \\(1, 12\\) from function, got \\(1, 5\\)"),
        (lambda ids, scores: 5, "got 'int'"),
        (lambda ids, scores: scores * NAN, "at least one token with a finite score"),
        (lambda ids, scores: scores - INF, "at least one token with a finite score"),
        (lambda ids, scores: scores + torch.tensor([INF] + [0.0] * 11), "at least one token with a finite score"),
    ],
)
def test_faulty_processors_are_reported(temperature: float, processor: Any, message: str) -> None:
    law = build(SamplingOptions(temperature=temperature, processors=[processor]), some_logits())
    with pytest.raises(InputError, match=message):
        law.row(1)


def test_options_that_leave_nothing_are_reported() -> None:
    law = build(SamplingOptions(temperature=1.0, logit_bias=dict.fromkeys(range(V), -INF)), some_logits())
    with pytest.raises(InputError, match="after SequenceBiasLogitsProcessor; loosen"):
        law.row(0)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"typical_p": 0.5},
        {"top_h": 0.4},
        {"epsilon_cutoff": 0.1},
        {"eta_cutoff": 0.2},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_filters_cut_and_renormalise(options: dict[str, float], dtype: torch.dtype) -> None:
    logits = some_logits(dtype)
    row = build(SamplingOptions(temperature=1.0, **options), logits).row(0)  # type: ignore[arg-type]
    plain = torch.softmax(logits[0], dim=-1)
    kept = row > 0
    assert 0 < int(kept.sum()) < V
    torch.testing.assert_close(row[kept], plain[kept] / plain[kept].sum())
    idle = build(SamplingOptions(temperature=0.0, **options), logits)  # type: ignore[arg-type]
    assert idle.choice(0) == int(logits[0].argmax())
    assert math.isclose(float(row.sum()), 1.0, rel_tol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.9},
        {"temperature": 1.0, "eta_cutoff": 0.01, "epsilon_cutoff": 0.01, "top_h": 0.9},
        {"repetition_penalty": 1.5, "presence_penalty": 0.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
        {"temperature": 1.0, "logit_bias": {3: 2.0, (2, 5): 1.0}, "bad_words_ids": [[4], [3, 5]], "min_new_tokens": 3},
    ],
)
def test_laws_on_a_gpu_are_those_on_the_cpu(options: dict[str, Any]) -> None:
    logits = some_logits()
    here, there = (build(SamplingOptions(**options), logits.to(device)) for device in ("cpu", "cuda"))
    for row in range(len(TREE) + 1):
        torch.testing.assert_close(there.row(row).cpu(), here.row(row), rtol=1e-5, atol=1e-7)
        assert there.choice(row) == here.choice(row)
