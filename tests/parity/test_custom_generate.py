"""``model.generate(custom_generate=...)`` returns what ``model.generate`` returns, or refuses by name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from specdiff.drafters.base import DraftRequest
from specdiff.errors import InputError, PairingError, UnsupportedModelError
from specdiff.integrations.transformers import generate_speculatively, speculative_generate
from specdiff.models.cached_decoder import cache_argument
from specdiff.randomness import Random
from specdiff.records import RoundEvent
from specdiff.testing import ScriptedDrafter
from specdiff.types import Budget, Chain, Draft, Provenance, Verdict
from specdiff.verify.base import TargetLaw
from specdiff.verify.walk import Walk
from support.tiny_targets import VOCAB, fresh_logits, path_to, tiny_model

PAD = 0
ROWS = torch.tensor([[PAD, PAD, 5, 6, 7], [1, 2, 3, 4, 5], [PAD, PAD, PAD, PAD, 8]])
MASK = (ROWS != PAD).long()
ONE = ROWS[1:2]


@functools.cache
def model() -> PreTrainedModel:
    made = tiny_model("llama", seed=1)
    made.generation_config.pad_token_id = PAD
    return made


def drafter() -> ScriptedDrafter:
    """What the prefix determines; sometimes right, since the model repeats itself."""

    def script(request: DraftRequest) -> list[int]:
        prefix = request.prefix.tolist()
        earlier = [i for i, t in enumerate(prefix[:-1]) if t == prefix[-1]]
        guess = prefix[earlier[-1] + 1 :] if earlier else []
        return [*guess, *range(1, 9)][: request.budget.gamma]

    return ScriptedDrafter(script, vocab_size=VOCAB)


def both(ids: Tensor, mask: Tensor | None = None, **arguments: Any) -> tuple[Any, Any]:
    """(ours, theirs)."""
    mask = torch.ones_like(ids) if mask is None else mask
    arguments = {"max_new_tokens": 12, "attention_mask": mask} | arguments
    fn = speculative_generate(drafter=drafter(), gamma=4)
    return model().generate(ids, custom_generate=fn, **arguments), model().generate(ids, **arguments)


class Favour(LogitsProcessor):
    """Favours a token that depends on the row of the batch and on the length, padding included."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row in range(scores.shape[0]):
            scores[row, (7 * row + 3 * input_ids.shape[1] + int(input_ids[row, 0])) % VOCAB] += 6.0
        return scores


class RowEnds(StoppingCriteria):
    """Row i ends after ``lengths[i]`` ids, padding included."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.shape[1] >= self.lengths[: input_ids.shape[0]]


ENDS = [3, 10, 20, 30, 40, 50, 60, 70, 80]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_length": 9, "max_new_tokens": None},
    {"eos_token_id": ENDS},
    {"eos_token_id": ENDS, "min_new_tokens": 5},
    {"eos_token_id": ENDS, "min_length": 9},
    {"repetition_penalty": 1.6},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [6, 7]], "sequence_bias": {(4,): 2.0}},
    {"suppress_tokens": [1, 2, 3, 4], "begin_suppress_tokens": [40, 41]},
    {"forced_eos_token_id": 9, "eos_token_id": 9},
    {"exponential_decay_length_penalty": (2, 1.6), "eos_token_id": ENDS},
    {"encoder_repetition_penalty": 1.4},
    {"encoder_no_repeat_ngram_size": 1},
    {"renormalize_logits": True, "use_cache": True, "top_k": None},
    {"watermarking_config": WatermarkingConfig(bias=4.0)},
    {"logits_processor": [Favour()]},
    {"stopping_criteria": [RowEnds([8, 11, 7])], "eos_token_id": 96},
    {"prefix_allowed_tokens_fn": lambda batch, ids: [(len(ids) * 5 + batch) % VOCAB, (len(ids) * 3 + batch) % VOCAB]},
]


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("batch", ["one", "padded"])
def test_argmax_text_is_that_of_generate(options: dict[str, Any], batch: str) -> None:
    ids, mask = (ROWS, MASK) if batch == "padded" else (ONE, None)
    ours, theirs = both(ids, mask, **options)
    assert ours.dtype == theirs.dtype
    assert ours.tolist() == theirs.tolist()


def test_arguments_may_go_through_generate() -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 12, "attention_mask": torch.ones_like(ONE)}
    theirs = model().generate(ONE, **arguments)
    for more in ({"gamma": 3}, {"budget": Budget(gamma=2, shape=Chain()), "rule": "match"}, {"drafter": None}):
        fn = generate_speculatively if "drafter" not in more else speculative_generate(drafter=drafter())
        ours = model().generate(ONE, custom_generate=fn, **{"drafter": drafter()} | more, **arguments)
        assert ours.tolist() == theirs.tolist()


def test_return_type() -> None:
    ours, theirs = both(ROWS, MASK, return_dict_in_generate=True)
    assert type(ours) is type(theirs) is GenerateDecoderOnlyOutput
    assert ours.sequences.tolist() == theirs.sequences.tolist()


class Tape(BaseStreamer):
    """Writes down what it is given."""

    def __init__(self) -> None:
        self.tape: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.tape.append(value.tolist())

    def end(self) -> None:
        self.tape.append("end")


@pytest.mark.parametrize("batch", ["one", "padded"])
def test_streamers_hear_what_they_hear_from_generate(batch: str) -> None:
    ids, mask = (ROWS, MASK) if batch == "padded" else (ONE, torch.ones_like(ONE))
    tapes = [Tape(), Tape()]
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "eos_token_id": ENDS}
    fn = speculative_generate(drafter=drafter(), gamma=4)
    model().generate(ids, custom_generate=fn, streamer=tapes[0], **arguments)
    model().generate(ids, streamer=tapes[1], **arguments)
    assert tapes[0].tape == tapes[1].tape


def test_a_wrapped_custom_function_still_hears_of_the_streamer() -> None:
    tapes = [Tape(), Tape()]
    fn = speculative_generate(drafter=drafter(), gamma=4)
    model().generate(ONE, custom_generate=lambda *a, **k: fn(*a, **k), streamer=tapes[0], max_new_tokens=12)
    model().generate(ONE, streamer=tapes[1], max_new_tokens=12)
    assert tapes[0].tape == tapes[1].tape


def test_a_model_in_training_is_decoded_without_dropout_and_left_in_training() -> None:
    ours = tiny_model("llama", seed=1)
    expected = ours.generate(ONE, max_new_tokens=6, pad_token_id=PAD).tolist()
    ours.train()
    ours.model.layers[0].eval()  # as a frozen part may be
    text = ours.generate(
        ONE, max_new_tokens=6, pad_token_id=PAD, custom_generate=generate_speculatively, drafter=drafter()
    )
    assert text.tolist() == expected
    assert ours.training
    assert not ours.model.layers[0].training
    assert ours.model.layers[1].training


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One or two characters a token."""
    letters = [chr(ord("a") + i) for i in range(26)]
    pieces = [*letters, *(a + b for a, b in zip(letters, letters[3:], strict=False)), *(c.upper() for c in letters)]
    pieces += map(str, range(VOCAB - len(pieces)))
    made = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, "a"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_stop_strings() -> None:
    _, plain = both(ONE)
    text = tokenizer().decode(plain[0, 5:].tolist())
    for stop in (text[2:4], text[5:9], [text[7], text[8:10]], "never"):
        criteria = [StopStringCriteria(tokenizer(), stop)]  # generate gives custom functions no tokenizer
        ours, theirs = both(ONE, stopping_criteria=criteria)
        assert ours.tolist() == theirs.tolist()
        assert (ours.shape[1] < 17) == (stop != "never")


class Spy:
    """Walk, which first writes down the law of every row."""

    name, exact_for, greedy_only, needs_chain = "spy", frozenset(Provenance), False, False

    def __init__(self) -> None:
        self.laws: list[list[Tensor]] = []

    def verify(self, draft: Draft, law: TargetLaw, random: Random) -> Verdict:
        self.laws.append([law.row(i) for i in range(len(draft.tree) + 1)])
        return Walk().verify(draft, law, random)


def test_sampling_laws_are_those_of_generate() -> None:
    """At every node, the list of processors is applied once, to the whole padded batch with this row in it."""
    spy, events = Spy(), []
    arguments: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 30,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "eos_token_id": ENDS,
        "min_new_tokens": 6,
        "logits_processor": [Favour()],
    }
    prepared: dict[str, Any] = {}

    def fn(model: PreTrainedModel, input_ids: Tensor, *, logits_processor: Any, **more: Any) -> Any:
        prepared["processors"] = logits_processor
        return generate_speculatively(
            model,
            input_ids,
            logits_processor,
            drafter=drafter(),
            gamma=3,
            rule=spy,
            seed=4,
            on_round=events.append,
            **more,
        )

    model().generate(ROWS, attention_mask=MASK, max_new_tokens=8, custom_generate=fn, **arguments)
    drafted = [e for e in events if len(e.draft.tree)]
    assert len(drafted) == len(spy.laws) > 6
    new: list[list[int]] = [[], [], []]
    checked = 0
    laws = iter(spy.laws)
    for event in events:
        assert isinstance(event, RoundEvent)
        tree = event.draft.tree
        for node, law in enumerate(next(laws), -1) if len(tree) else ():
            path = [int(tree.tokens[n]) for n in path_to(tree, node)]
            padded = torch.cat([ROWS[event.row], torch.tensor([*new[event.row], *path], dtype=torch.int64)])
            logits = fresh_logits(model(), padded[int((MASK[event.row] == 0).sum()) :])[-1:]
            batch = prepared["processors"](padded.expand(3, -1), logits.expand(3, -1).clone())
            torch.testing.assert_close(law, torch.softmax(batch[event.row], dim=-1), rtol=2e-4, atol=1e-6)
            checked += 1
        path = [int(tree.tokens[n]) for n in event.verdict.path]
        new[event.row] += [*path, event.verdict.token][: event.record.committed]
    assert checked > 20


def test_seeds() -> None:
    def sample(**more: Any) -> list[list[int]]:
        fn = speculative_generate(drafter=drafter(), gamma=4)
        return (
            model()
            .generate(ROWS, attention_mask=MASK, max_new_tokens=8, do_sample=True, custom_generate=fn, **more)
            .tolist()
        )

    assert sample(seed=3) == sample(seed=3) != sample(seed=4)
    torch.manual_seed(5)
    first = sample()
    assert sample() != first
    torch.manual_seed(5)
    assert sample() == first
    state = torch.get_rng_state()
    assert sample(generator=torch.Generator().manual_seed(6)) == sample(generator=torch.Generator().manual_seed(6))
    assert torch.equal(torch.get_rng_state(), state)


def test_several_sequences_differ() -> None:
    fn = speculative_generate(drafter=drafter(), gamma=4)
    ours = model().generate(
        ONE,
        attention_mask=torch.ones_like(ONE),
        max_new_tokens=8,
        do_sample=True,
        num_return_sequences=4,
        seed=1,
        custom_generate=fn,
    )
    assert ours.shape == (4, 13)
    assert len({tuple(row) for row in ours.tolist()}) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"remove_invalid_values": True}, "remove_invalid_values"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)}, "SynthIDText"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"assistant_model": "x"}, "assistant_model"),
        ({"labels": ONE}, "labels"),
        ({"position_ids": torch.arange(3, 8)[None]}, "position_ids"),
        ({"gamma": 0}, "gamma"),
        ({"gamma": 2, "budget": Budget(gamma=2, shape=Chain())}, "gamma or budget"),
        ({"rule": "best"}, "rule: expected one of match, ratio"),
        ({"rule": "ratio"}, "exact for"),
        ({"rule": 3}, "rule: expected a rule or its name"),
        ({"seed": -1}, "seed"),
        ({"budget": 3}, "budget: expected a Budget or None"),
        ({"drafter": 3}, "drafter: expected a Drafter or None, got 'int without name"),
        ({"generator": 3}, "generator: expected a Generator or None"),
        ({"on_round": 3}, "on_round: expected a function or None"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(ONE), "max_new_tokens": 4, "drafter": drafter()}
    with pytest.raises((InputError, PairingError), match=message):
        model().generate(ONE, custom_generate=generate_speculatively, **arguments | options)


def test_a_used_cache_is_refused() -> None:
    cache = DynamicCache()
    model()(ONE[:, :2], use_cache=True, **{_cache_name(): cache})
    with pytest.raises(InputError, match=f"{_cache_name()}: expected none"):
        model().generate(
            ONE,
            attention_mask=torch.ones_like(ONE),
            custom_generate=generate_speculatively,
            drafter=drafter(),
            max_new_tokens=3,
            **{_cache_name(): cache},
        )


def _cache_name() -> str:
    return cache_argument(model())


@pytest.mark.parametrize("mask", [[[1, 1, 1, 1, 0]], [[1, 0, 1, 1, 1]], [[0, 0, 0, 0, 0]]])
def test_padding_must_be_on_the_left(mask: list[list[int]]) -> None:
    with pytest.raises(InputError, match=r"attention_mask.*left"):
        model().generate(
            ONE,
            attention_mask=torch.tensor(mask),
            custom_generate=generate_speculatively,
            drafter=None,
            max_new_tokens=3,
        )


@pytest.mark.parametrize(
    "options",
    [
        {"stopping_criteria": [RowEnds([8, 11, 7])], "max_new_tokens": 9},
        {"max_new_tokens": 600},
    ],
)
def test_rows_that_may_end_early_need_a_padding_id(options: dict[str, Any]) -> None:
    config = model().generation_config
    config.pad_token_id = None
    try:
        with pytest.raises(InputError, match="pad_token_id"):
            model().generate(ROWS, attention_mask=MASK, custom_generate=generate_speculatively, drafter=None, **options)
    finally:
        config.pad_token_id = PAD


def test_other_models_are_refused() -> None:
    class Translator:
        class config:
            is_encoder_decoder = True

    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        generate_speculatively(Translator(), ONE, [], [], None)  # type: ignore[arg-type]
