"""Every logits processor of transformers: a function of ids and scores, shown by scrambled calls, or refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
import transformers.generation.logits_process as theirs
from transformers import LogitsProcessor, LogitsProcessorList

from specdiff.errors import InputError
from specdiff.integrations.transformers import generate_speculatively
from specdiff.processors import UNREPLAYABLE
from specdiff.sampling import SamplingOptions
from support.tiny_targets import VOCAB, tiny_model

ENCODER = torch.tensor([[5, 6, 7, 5]])
MAKE: dict[str, Callable[[], LogitsProcessor]] = {
    "MinLengthLogitsProcessor": lambda: theirs.MinLengthLogitsProcessor(6, 2),
    "MinNewTokensLengthLogitsProcessor": lambda: theirs.MinNewTokensLengthLogitsProcessor(2, 3, 2),
    "TemperatureLogitsWarper": lambda: theirs.TemperatureLogitsWarper(0.7),
    "RepetitionPenaltyLogitsProcessor": lambda: theirs.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=1),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda: theirs.EncoderRepetitionPenaltyLogitsProcessor(1.3, ENCODER),
    "TopPLogitsWarper": lambda: theirs.TopPLogitsWarper(0.6),
    "TopKLogitsWarper": lambda: theirs.TopKLogitsWarper(5),
    "TopHLogitsWarper": lambda: theirs.TopHLogitsWarper(0.5),
    "MinPLogitsWarper": lambda: theirs.MinPLogitsWarper(0.2),
    "TypicalLogitsWarper": lambda: theirs.TypicalLogitsWarper(0.6),
    "EpsilonLogitsWarper": lambda: theirs.EpsilonLogitsWarper(0.01),
    "EtaLogitsWarper": lambda: theirs.EtaLogitsWarper(0.01),
    "NoRepeatNGramLogitsProcessor": lambda: theirs.NoRepeatNGramLogitsProcessor(2),
    "EncoderNoRepeatNGramLogitsProcessor": lambda: theirs.EncoderNoRepeatNGramLogitsProcessor(2, ENCODER),
    "SequenceBiasLogitsProcessor": lambda: theirs.SequenceBiasLogitsProcessor([[[3], 2.0], [[4, 5], -3.0]]),
    "NoBadWordsLogitsProcessor": lambda: theirs.NoBadWordsLogitsProcessor([[3], [4, 5]], 2),
    "PrefixConstrainedLogitsProcessor": lambda: theirs.PrefixConstrainedLogitsProcessor(
        lambda _, ids: [len(ids) % VOCAB, int(ids[-1])], 1
    ),
    "ForcedBOSTokenLogitsProcessor": lambda: theirs.ForcedBOSTokenLogitsProcessor(1),
    "ForcedEOSTokenLogitsProcessor": lambda: theirs.ForcedEOSTokenLogitsProcessor(5, 2),
    "InfNanRemoveLogitsProcessor": lambda: theirs.InfNanRemoveLogitsProcessor(),
    "ExponentialDecayLengthPenalty": lambda: theirs.ExponentialDecayLengthPenalty((1, 1.5), [2], 2),
    "LogitNormalization": lambda: theirs.LogitNormalization(),
    "SuppressTokensAtBeginLogitsProcessor": lambda: theirs.SuppressTokensAtBeginLogitsProcessor([3, 4], 4),
    "SuppressTokensLogitsProcessor": lambda: theirs.SuppressTokensLogitsProcessor([3, 4]),
    "WatermarkLogitsProcessor": lambda: theirs.WatermarkLogitsProcessor(VOCAB, "cpu"),
}
_IDS = [[4], [4, 5, 4], [7, 8, 9, 7], [4, 5, 4, 9, 3], [1, 2, 3, 4, 5, 6, 4], [8, 4]]
PREFIXES = [torch.tensor([ids]) for ids in _IDS]


def synthid() -> LogitsProcessor:
    return theirs.SynthIDTextWatermarkLogitsProcessor(3, [1, 2, 3], 2**8, 0, 16, torch.device("cpu"))


def scores(index: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(index))


def names() -> set[str]:
    """Of every processor class of the installed transformers, those beside single models included."""
    classes = (c for _, c in inspect.getmembers(theirs, inspect.isclass) if c.__module__ == theirs.__name__)
    general = {c.__name__ for c in classes if issubclass(c, LogitsProcessor)} - {"LogitsProcessor"}
    beside_models = Path(transformers.__file__).parent.glob("models/*/generation_*.py")
    special = {n for p in beside_models for n in re.findall(r"class (\w+)\(LogitsProcessor\)", p.read_text("utf-8"))}
    return general | special


def test_the_whole_list_is_known() -> None:
    """A processor that a later transformers adds is examined before it is let through here."""
    assert names() == MAKE.keys() | UNREPLAYABLE.keys()
    assert not MAKE.keys() & UNREPLAYABLE.keys()


@pytest.mark.parametrize("name", MAKE)
def test_what_is_taken_gives_the_same_in_any_order(name: str) -> None:
    expected = [MAKE[name]()(ids, scores(i)) for i, ids in enumerate(PREFIXES)]
    shared = MAKE[name]()
    for i in (3, 0, 5, 3, 1, 4, 2, 0, 5):
        assert torch.equal(shared(PREFIXES[i], scores(i)), expected[i]), i
    SamplingOptions(processors=[shared])


def test_a_watermark_that_remembers_gives_something_else_the_second_time() -> None:
    watermark = synthid()
    first, second = (watermark(PREFIXES[4], scores(4)) for _ in range(2))
    assert not torch.equal(first, second)


class Mine(theirs.UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """A user's own variant."""


REFUSED = {
    "watermark": (synthid, "remembers its earlier calls"),
    "in a list": (lambda: LogitsProcessorList([synthid()]), "remembers its earlier calls"),
    "guidance": (lambda: Mine(1.5, tiny_model("llama")), "runs a pass of its own"),
    "paired": (lambda: theirs.ClassifierFreeGuidanceLogitsProcessor(1.5), "pairs each prompt with a second one"),
    "speech": (lambda: theirs.BarkEosPrioritizerLogitsProcessor(2, 0.5), "speech or audio"),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_replayed_is_refused_with_the_reason(make: Callable[[], LogitsProcessor], reason: str) -> None:
    with pytest.raises(InputError, match=rf"^processors: expected functions of the ids and scores alone.*{reason}"):
        SamplingOptions(processors=[make()])
    model = tiny_model("llama").eval()
    with pytest.raises(InputError, match=rf"^logits_processor: expected functions .*{reason}"):
        model.generate(
            torch.tensor([[1, 2, 3]]),
            max_new_tokens=4,
            logits_processor=LogitsProcessorList([make()]),
            custom_generate=generate_speculatively,
        )
