"""Which logits processors can be asked at every node of a draft: those that are functions of the ids and scores alone.

A draft asks for the laws of many prefixes, in no fixed order, and most of them are of texts that are never committed. A
processor that remembers its earlier calls, or that runs a model beside the target's, would give another law than plain
decoding does. The list is checked against every processor of ``transformers`` in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from specdiff.errors import InputError

_REMEMBERS = "it remembers its earlier calls, which cannot be replayed at every node of a draft"
_SECOND_PASS = "it runs a pass of its own beside the target's, which cannot be repeated at every node of a draft"
_TWO_PROMPTS = "it needs a batch that pairs each prompt with a second one"
_SPEECH = "it is for speech or audio models, and reads what their own generate prepares"

UNREPLAYABLE: Mapping[str, str] = MappingProxyType(
    {
        "SynthIDTextWatermarkLogitsProcessor": _REMEMBERS,
        "UnbatchedClassifierFreeGuidanceLogitsProcessor": _SECOND_PASS,
        "ClassifierFreeGuidanceLogitsProcessor": _TWO_PROMPTS,
        "DiaClassifierFreeGuidanceLogitsProcessor": _TWO_PROMPTS,
        "DiaEOSDelayPatternLogitsProcessor": _REMEMBERS,
        "DiaEOSChannelFilterLogitsProcessor": _SPEECH,
        "WhisperNoSpeechDetection": _SECOND_PASS,
        "WhisperTimeStampLogitsProcessor": _SPEECH,
        "AlternatingCodebooksLogitsProcessor": _SPEECH,
        "BarkEosPrioritizerLogitsProcessor": _SPEECH,
        "HiggsAudioV2DelayPatternLogitsProcessor": _SPEECH,
        "VibeVoiceTokenConstraintProcessor": _SPEECH,
        "LinearTemperatureScheduleLogitsProcessor": "it follows the steps of a diffusion model, not a text's tokens",
    }
)
"""Processors of ``transformers`` that are refused, and why; read-only."""


def check_replayable(name: str, processors: Sequence[object]) -> None:
    """Refuse processors that are no functions of ids and scores, subclasses and those inside a list included.

    Args:
        name: of the argument, for the message. processors: any callables.

    Raises:
        InputError: one of them is in `UNREPLAYABLE`; says why.
    """
    for processor in processors:
        if isinstance(processor, (list, tuple)):  # transformers' LogitsProcessorList is one, and can be called
            check_replayable(name, processor)
        for base in type(processor).__mro__:
            if base.__name__ in UNREPLAYABLE:
                raise InputError.of(
                    name,
                    expected="functions of the ids and scores alone",
                    got=type(processor).__name__,
                    remedy=f"leave it out: {UNREPLAYABLE[base.__name__]}",
                )
