"""Really different tokenizers, trained on a few lines of text, and a target that recites a text."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specdiff.models.target import ScoreRequest

TEXTS = (
    "The quick brown fox jumps over the lazy dog. The quick brown dog sleeps; the lazy fox does not.\n\nThe end?",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n# that is all there is",
    "日本語のテキストと English が混ざる。速い茶色の狐は怠け者の犬を飛び越える。速い狐、怠け者の犬。",
    "Emoji: 🦊🐶🦊🐶 and 👩‍👩‍👧 families, naïve café, Ελληνικά, 한국어 텍스트, 🏳️‍🌈!",
)


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's kind: BPE over bytes, so that a character may come in several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(TEXTS[:3], trainer)
    made.add_special_tokens([AddedToken("<|user|>", special=True), AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


@functools.cache
def metaspace() -> PreTrainedTokenizerFast:
    """Llama's kind: BPE over characters with a space before the text, BOS, and bytes for what it does not know."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=220, special_tokens=["<unk>", "<s>", "<|end|>"], show_progress=False)
    made.train_from_iterator(TEXTS[:2], trainer)
    state = json.loads(made.to_str())
    vocab = state["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    state["model"]["byte_fallback"] = True
    state["decoder"] = json.loads(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ).__getstate__()
    )
    made = Tokenizer.from_str(json.dumps(state))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<|end|>", unk_token="<unk>")


@functools.cache
def characters() -> PreTrainedTokenizerFast:
    """One token a character; characters that it does not know are lost."""
    known = sorted({c for text in TEXTS[:3] for c in text})
    made = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["<unk>", *known])}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<stop>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<stop>")


TOKENIZERS = {"byte-level": byte_level, "metaspace": metaspace, "characters": characters}


class ReciteTarget:
    """At every position, the only possible token is that of the row's script."""

    def __init__(self, scripts: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.scripts, self.vocab_size = scripts, vocab_size
        self.name, self.context, self.eos_ids = "recite", None, ()

    def open(self, rows: int, feature_layers: tuple[int, ...] = ()) -> ReciteSession:
        return ReciteSession(self, rows)


class ReciteSession:
    """Knows how far each row has come."""

    def __init__(self, target: ReciteTarget, rows: int) -> None:
        self._target = target
        self._read = [0] * rows  # committed tokens but the last
        self.passes = 0

    def prefill(self, prompts: Sequence[Tensor]) -> list[Tensor | None]:
        self._read = [p.numel() - 1 for p in prompts]
        return [None] * len(prompts)

    def score(self, requests: Sequence[ScoreRequest | None]) -> list[Tensor | None]:
        self.passes += 1
        return [None if r is None else self._rows(row, r) for row, r in enumerate(requests)]

    def _rows(self, row: int, request: ScoreRequest) -> Tensor:
        script = self._target.scripts[row]
        positions = [self._read[row] + 1 + depth for depth in (0, *request.tree.depths)]
        rows = torch.full((len(positions), self._target.vocab_size), -20.0)
        for i, position in enumerate(positions):
            rows[i, script[position] if position < len(script) else 0] = 20.0
        return rows

    def commit(self, paths: Sequence[tuple[int, ...] | None]) -> list[Tensor | None]:
        for row, path in enumerate(paths):
            self._read[row] += 0 if path is None else 1 + len(path)
        return [None] * len(paths)

    def finish(self, row: int) -> None:
        """Nothing to free."""
