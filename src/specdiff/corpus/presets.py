"""The prompt mixtures of the SpecDiff-2 paper, by data set name; streamed, nothing of them is shipped.

About 128 prompts with up to 32 answers each at temperature 1: for Qwen a third each of GSM8K, Alpaca and LiveCodeBench,
for LLaMA the prompts of chat sets (beemo and UltraFeedback). The paper does not say which rows; a preset takes the
first ones of each set's training split, in the set's own order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specdiff.corpus.prompts import DatasetPart
from specdiff.errors import InputError

GSM8K = DatasetPart(dataset="openai/gsm8k", config="main", fields=("question",), label="gsm8k")
ALPACA = DatasetPart(dataset="tatsu-lab/alpaca", fields=("instruction", "input"), label="alpaca")
# The set's own loader is a script, which `datasets` no longer runs; its files are plain JSON lines.
LIVECODEBENCH = DatasetPart(
    dataset="json",
    data_files=tuple(
        f"hf://datasets/livecodebench/code_generation_lite/test{n}.jsonl" for n in ("", "2", "3", "4", "5", "6")
    ),
    fields=("question_content", "starter_code"),
    id_field="question_id",
    label="livecodebench",
)
BEEMO = DatasetPart(dataset="toloka/beemo", fields=("prompt",), id_field="prompt_id", label="beemo")
ULTRAFEEDBACK = DatasetPart(dataset="openbmb/UltraFeedback", fields=("instruction",), label="ultrafeedback")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A mixture of equal shares.

    Attributes:
        parts: the sets. prompts, samples, temperature: the paper's, used where the caller says nothing else.
    """

    parts: tuple[DatasetPart, ...]
    prompts: int = 128
    samples: int = 32
    temperature: float = 1.0


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "specdiff2-qwen": Preset(parts=(GSM8K, ALPACA, LIVECODEBENCH)),
        "specdiff2-llama": Preset(parts=(BEEMO, ULTRAFEEDBACK)),
    }
)


def find_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        InputError: there is none.
    """
    if name not in PRESETS:
        raise InputError.of("preset", expected="one of " + ", ".join(PRESETS), got=name, remedy="check the name")
    return PRESETS[name]
