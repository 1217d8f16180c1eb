"""From request options to the law p that plain sampling of the target would use.

One order, that of ``transformers``' ``generate``: logit bias, penalties, bad words, minimum new tokens, the caller's own
processors; then, at temperature > 0 only, temperature, top-k, top-p, min-p; then softmax. Every row (the root and each
node of a draft) is processed with ITS OWN prefix, lazily: a rule pays for the rows it looks at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdiff.errors import InputError, NumericsError
from specdiff.types import TokenTree


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the target's logits become the law p. Defaults: argmax of the raw logits.

    Attributes:
        temperature: 0 = argmax; otherwise logits are divided by it.
        top_k: keep the k most probable tokens (None = all). top_p: smallest set whose mass reaches it, in (0, 1].
        min_p: drop tokens below min_p times the largest probability, in [0, 1].
        repetition_penalty: > 0, over prompt and continuation (CTRL). presence_penalty, frequency_penalty: subtracted
            from the logits of tokens already in the continuation, once and per occurrence.
        logit_bias: token id -> additive bias. bad_words_ids: sequences of ids that never appear.
        min_new_tokens: EOS is banned before so many new tokens.
        processors: further ``transformers`` logits processors, called with the prefix of each row.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words_ids: Sequence[Sequence[int]] = ()
    min_new_tokens: int = 0
    processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, self.temperature >= 0 and math.isfinite(self.temperature),
                 "a finite number >= 0", "use 0 for argmax")
        _require("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "None or an integer >= 1", "None keeps all")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "a number in (0, 1]", "1.0 keeps all")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "a number in [0, 1]", "0.0 keeps all")
        _require("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "a number > 0", "1.0 = off")
        _require("min_new_tokens", self.min_new_tokens, self.min_new_tokens >= 0, "an integer >= 0", "0 = off")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(name, getattr(self, name), math.isfinite(getattr(self, name)), "a finite number", "0.0 = off")

    @property
    def greedy(self) -> bool:
        """Whether p is one-hot at the argmax."""
        return self.temperature == 0


def _require(name: str, value: object, holds: bool, expected: str, remedy: str) -> None:
    if not holds:
        raise InputError.of(name, expected=expected, got=value, remedy=remedy)


class OccurrencePenalty(LogitsProcessor):
    """Presence and frequency penalty over the continuation (not the prompt)."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency, self._prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return penalised ``scores`` [B, V] given ``input_ids`` [B, L] (prompt and continuation)."""
        counts = torch.zeros_like(scores)
        new = input_ids[:, self._prompt_length :]
        counts.scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


class LawBuilder:
    """Turns rows of logits into laws for one request.

    Args:
        options: the request's sampling options.
        prompt_length: tokens of the prompt. eos_ids: banned before ``min_new_tokens``. vocab_size: V, to check ids.
        device: where logits live.
    """

    def __init__(
        self, options: SamplingOptions, *, prompt_length: int, eos_ids: Sequence[int], vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.options = options
        self._processors = _processors(options, prompt_length, list(eos_ids), vocab_size, device)
        self._warpers = [] if options.greedy else _warpers(options)

    def law(self, logits: Tensor, prefix: Tensor, tree: TokenTree) -> Law:
        """Law of the root row and every node.

        Args:
            logits: [N + 1, V]; prefix: [L] committed ids; tree: N nodes.

        Raises:
            NumericsError: a logit is NaN or infinite.
        """
        check_finite(logits)
        return Law(logits, prefix, tree, self._processors, self._warpers, greedy=self.options.greedy)


class Law:
    """Laws of the rows of one target pass, built on demand (implements ``verify.base.TargetLaw``)."""

    def __init__(
        self, logits: Tensor, prefix: Tensor, tree: TokenTree,
        processors: Sequence[LogitsProcessor], warpers: Sequence[LogitsProcessor], *, greedy: bool,
    ) -> None:
        self.greedy = greedy
        self._logits, self._prefix, self._tree = logits, prefix, tree
        self._processors, self._warpers = processors, warpers
        self._rows: dict[int, Tensor] = {}
        self._choices: dict[int, int] = {}
        if greedy and not processors:  # one vectorised argmax, one transfer
            self._choices = dict(enumerate(logits.argmax(dim=-1).tolist()))

    def row(self, index: int) -> Tensor:
        """Probabilities [V] (at least float32) of row ``index``; one-hot at temperature 0."""
        if index not in self._rows:
            if self.greedy:
                row = torch.zeros(self._logits.shape[-1], dtype=torch.float32, device=self._logits.device)
                row[self.choice(index)] = 1
            else:
                row = torch.softmax(self._scores(index), dim=-1)
            self._rows[index] = row
        return self._rows[index]

    def choice(self, index: int) -> int:
        """Most probable token of row ``index``."""
        if index not in self._choices:
            self._choices[index] = int(self._scores(index).argmax())
        return self._choices[index]

    def _scores(self, index: int) -> Tensor:
        logits = self._logits[index : index + 1]
        scores = logits if logits.dtype == torch.float64 else logits.float()
        ids = self._ids(index)[None] if self._processors or self._warpers else None
        for processor in (*self._processors, *self._warpers):
            scores = processor(ids, scores)  # type: ignore[arg-type]
        return scores[0]

    def _ids(self, index: int) -> Tensor:
        path: list[int] = []
        node = index - 1
        while node >= 0:
            path.append(int(self._tree.tokens[node]))
            node = self._tree.parents[node]
        ids = torch.cat([self._prefix, torch.tensor(path[::-1], dtype=torch.int64)])
        return ids.to(self._logits.device)


def check_finite(logits: Tensor) -> None:
    """Raise `NumericsError` if any logit is NaN or infinite (one pass over the data)."""
    low, high = torch.aminmax(logits)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        bad = (~torch.isfinite(logits)).any(dim=-1).nonzero().flatten().tolist()
        raise NumericsError(
            f"target: logits of rows {bad} are NaN or infinite; check the checkpoint, or use a dtype with more range"
        )


def _processors(
    o: SamplingOptions, prompt_length: int, eos_ids: list[int], vocab_size: int, device: torch.device | str
) -> list[LogitsProcessor]:
    for name, ids in (("logit_bias", list(o.logit_bias)), ("bad_words_ids", [t for w in o.bad_words_ids for t in w])):
        bad = [i for i in ids if not 0 <= i < vocab_size]
        _require(name, bad, not bad, f"token ids below {vocab_size}", "use ids of the target's vocabulary")
    _require("bad_words_ids", o.bad_words_ids, all(len(w) > 0 for w in o.bad_words_ids), "non-empty sequences", "drop []")
    chain: list[LogitsProcessor] = []
    if o.logit_bias:
        chain.append(SequenceBiasLogitsProcessor({(k,): float(v) for k, v in o.logit_bias.items()}))
    if o.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(o.repetition_penalty))
    if o.presence_penalty or o.frequency_penalty:
        chain.append(OccurrencePenalty(o.presence_penalty, o.frequency_penalty, prompt_length))
    if o.bad_words_ids:
        chain.append(NoBadWordsLogitsProcessor([list(w) for w in o.bad_words_ids], eos_token_id=eos_ids or None))
    if o.min_new_tokens and eos_ids:
        chain.append(MinNewTokensLengthLogitsProcessor(prompt_length, o.min_new_tokens, eos_ids, device=str(device)))
    chain.extend(o.processors)
    return chain


def _warpers(o: SamplingOptions) -> list[LogitsProcessor]:
    chain: list[LogitsProcessor] = []
    if o.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(float(o.temperature)))
    if o.top_k is not None:
        chain.append(TopKLogitsWarper(o.top_k))
    if o.top_p < 1.0:
        chain.append(TopPLogitsWarper(o.top_p))
    if o.min_p > 0.0:
        chain.append(MinPLogitsWarper(o.min_p))
    return chain
