"""From request options to the law p that plain sampling of the target would use.

The order is that of ``GenerationMixin._get_logits_processor`` in ``transformers`` 5.19 and 5.24, whose own processors
are used:

1. always: ``logit_bias`` (sequence bias), ``repetition_penalty``, ``presence_penalty`` and ``frequency_penalty`` (ours;
   transformers has neither), ``no_repeat_ngram_size``, ``bad_words_ids``, ``min_new_tokens``, the caller's
   ``processors``;
2. at temperature > 0 only: ``temperature``, ``top_h``, ``top_k``, ``top_p``, ``min_p``, ``typical_p``,
   ``epsilon_cutoff``, ``eta_cutoff``;
3. softmax.

Every row (the root and each node of a draft) is processed with ITS OWN prefix, lazily: a rule pays for the rows it
looks at. Logits of half precision become float32 first; float64 stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specdiff.checking import integer, real, sequence, token_ids
from specdiff.errors import InputError, NumericsError, SpecdiffError
from specdiff.processors import check_replayable
from specdiff.types import TokenTree, ids_tensor

_NO_IDS = torch.empty(1, 0, dtype=torch.int64)
_LOWEST_TEMPERATURE = 1e-5  # below it, logits divided by the temperature overflow float32


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the target's logits become the law p. Defaults: argmax of the raw logits.

    Every option acts at every node of a draft with that node's own prefix. At temperature 0 the filters (``top_*``,
    ``min_p``, ``typical_p``, the cutoffs) are idle, as in ``transformers`` with ``do_sample=False``.

    Attributes:
        temperature: 0 = argmax; otherwise logits are divided by it.
        top_k: keep the k most probable tokens (None = all). top_p: smallest set whose mass reaches it, in (0, 1].
        min_p: drop tokens below min_p times the largest probability, in [0, 1].
        typical_p: keep the locally typical tokens of this mass, in (0, 1]. top_h: keep the tokens under this share of
            the entropy, in (0, 1] (None = off). epsilon_cutoff: drop tokens below this probability, in [0, 1).
            eta_cutoff: the same with an entropy-dependent threshold, in [0, 1).
        repetition_penalty: > 0, over prompt and continuation (CTRL). presence_penalty, frequency_penalty: subtracted
            from the logits of tokens already in the continuation, once and per occurrence.
        no_repeat_ngram_size: no n-gram of this size (prompt included) occurs twice (0 = off).
        logit_bias: token id (or tuple of ids, of which the last is biased after the others) -> bias to add; -inf bans.
        bad_words_ids: sequences of ids that never appear.
        min_new_tokens: EOS is banned before so many new tokens (stop ids and stop strings still end the text).
        processors: further ``transformers`` logits processors, called with ids [1, L] and scores [1, V] of a row. They
            must be functions of these two alone: rows come in no fixed order, and only those that a rule looks at.
            Those of ``transformers`` that are not are refused.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_h: float | None = None
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | Mapping[int | tuple[int, ...], float] = field(default_factory=dict)
    bad_words_ids: Sequence[Sequence[int]] = ()
    min_new_tokens: int = 0
    processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        def put_real(name: str, low: float, high: float, expected: str, remedy: str, *, open_low: bool = False) -> None:
            def holds(x: float) -> bool:
                return (low < x if open_low else low <= x) and x <= high

            put(name, real(name, getattr(self, name), holds, expected=expected, remedy=remedy))

        big = torch.finfo(torch.float32).max
        put(
            "temperature",
            real(
                "temperature",
                self.temperature,
                lambda t: t == 0 or _LOWEST_TEMPERATURE <= t <= big,
                expected=f"0 or a finite number >= {_LOWEST_TEMPERATURE}",
                remedy="use 0 for argmax",
            ),
        )
        if self.top_k is not None:
            put("top_k", integer("top_k", self.top_k, 1, expected="None or an integer >= 1", remedy="None keeps all"))
        put_real("top_p", 0, 1, "a number in (0, 1]", "1.0 keeps all", open_low=True)
        put_real("min_p", 0, 1, "a number in [0, 1]", "0.0 keeps all")
        put_real("typical_p", 0, 1, "a number in (0, 1]", "1.0 keeps all", open_low=True)
        if self.top_h is not None:
            put_real("top_h", 0, 1, "None or a number in (0, 1]", "None keeps all", open_low=True)
        for name in ("epsilon_cutoff", "eta_cutoff"):
            put_real(name, 0, math.nextafter(1, 0), "a number in [0, 1)", "0.0 keeps all")
        put_real("repetition_penalty", 0, big, "a finite number > 0", "1.0 = off", open_low=True)
        for name in ("presence_penalty", "frequency_penalty"):
            put_real(name, -big, big, "a finite number", "0.0 = off")
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            put(name, integer(name, getattr(self, name), 0, remedy="0 = off"))
        put("logit_bias", _logit_bias(self.logit_bias))
        put("bad_words_ids", _bad_words(self.bad_words_ids))
        processors = sequence("processors", self.processors, expected="logits processors", remedy="pass a list")
        if not all(callable(p) for p in processors):
            raise InputError.of(
                "processors",
                expected="callables (input_ids, scores) -> scores",
                got=processors,
                remedy="pass instances of transformers.LogitsProcessor",
            )
        check_replayable("processors", processors)
        put("processors", processors)

    @property
    def greedy(self) -> bool:
        """Whether p is one-hot at the argmax."""
        return self.temperature == 0


def _logit_bias(bias: object) -> dict[int | tuple[int, ...], float]:
    remedy = "give a mapping such as {id: -100.0} or {(id, id): 5.0}"
    if not isinstance(bias, Mapping):
        raise InputError.of("logit_bias", expected="a mapping from token ids to numbers", got=bias, remedy=remedy)
    checked: dict[int | tuple[int, ...], float] = {}
    for key, value in bias.items():
        ids = token_ids("logit_bias", key if isinstance(key, tuple) else (key,), remedy=remedy)
        if not ids:
            raise InputError.of("logit_bias", expected="at least one id a key", got=key, remedy=remedy)
        checked[ids if isinstance(key, tuple) else ids[0]] = real(
            "logit_bias",
            value,
            lambda x: x < math.inf,
            expected="numbers below infinity",
            remedy="use -inf to ban a token, a large finite number to favour it",
        )
    return checked


def _biased_sequences(
    bias: Mapping[int, float] | Mapping[int | tuple[int, ...], float],
) -> dict[tuple[int, ...], float]:
    return {key if isinstance(key, tuple) else (key,): value for key, value in bias.items()}


def _bad_words(words: object) -> tuple[tuple[int, ...], ...]:
    remedy = "give one list of ids a word, such as [[5], [7, 8]]"
    outer = sequence("bad_words_ids", words, expected="a sequence of sequences of ids", remedy=remedy)
    checked = tuple(token_ids("bad_words_ids", word, remedy=remedy) for word in outer)
    if not all(checked):
        raise InputError.of("bad_words_ids", expected="non-empty sequences", got=words, remedy="drop the empty one")
    return checked


class OccurrencePenalty(LogitsProcessor):
    """Presence and frequency penalty over the continuation (not the prompt), as the OpenAI API defines them."""

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
        device: where processors are built; where logits live elsewhere, they are built there when first needed.

    Raises:
        InputError: an option names a token id outside the vocabulary, or bans EOS as a bad word.
    """

    def __init__(
        self,
        options: SamplingOptions,
        *,
        prompt_length: int,
        eos_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.options = options
        self._prompt_length, self._eos_ids = prompt_length, list(eos_ids)
        _check_vocabulary(options, self._eos_ids, vocab_size)
        self._chains: dict[torch.device, tuple[list[LogitsProcessor], list[LogitsProcessor]]] = {}
        self._chain(torch.device(device))

    def law(self, logits: Tensor, prefix: Tensor | Sequence[int], tree: TokenTree) -> Law:
        """Law of the root row and every node.

        Args:
            logits: [N + 1, V].
            prefix: [L] committed ids; a list becomes a tensor only if a processor reads it.
            tree: N nodes.

        Raises:
            NumericsError: a logit is NaN or infinite.
        """
        check_finite(logits)
        return Law(logits, prefix, tree, *self._chain(logits.device), greedy=self.options.greedy)

    def _chain(self, device: torch.device) -> tuple[list[LogitsProcessor], list[LogitsProcessor]]:
        if device not in self._chains:
            processors = _processors(self.options, self._prompt_length, self._eos_ids, device)
            self._chains[device] = processors, [] if self.options.greedy else warpers(self.options, device)
        return self._chains[device]


class Law:
    """Laws of the rows of one target pass, built on demand (implements ``verify.base.TargetLaw``).

    Args:
        logits: [N + 1, V]. prefix: [L] committed ids. tree: N nodes. processors: applied in order to each row.
        warpers: applied after them; those of ``transformers``, which neither read the ids nor write in place.
        greedy: whether the law is the argmax.
    """

    def __init__(
        self,
        logits: Tensor,
        prefix: Tensor | Sequence[int],
        tree: TokenTree,
        processors: Sequence[LogitsProcessor],
        warpers: Sequence[LogitsProcessor],
        *,
        greedy: bool,
    ) -> None:
        self.greedy = greedy
        self._logits, self._prefix, self._tree = logits, prefix, tree
        self._processors, self._warpers = processors, warpers
        self._rows: dict[int, Tensor] = {}
        self._choices: dict[int, int] = {}
        # One kernel and one transfer where a transfer costs more than the rows nobody asks for.
        if greedy and not processors and logits.device.type != "cpu":
            self._choices = dict(enumerate(logits.argmax(dim=-1).tolist()))

    def row(self, index: int) -> Tensor:
        """Probabilities [V] (at least float32) of row ``index``; one-hot at temperature 0.

        Raises:
            InputError: the options leave no token, or a processor failed.
        """
        if index not in self._rows:
            if self.greedy:
                row = torch.zeros(self._logits.shape[-1], dtype=torch.float32, device=self._logits.device)
                row[self.choice(index)] = 1
            else:
                row = torch.softmax(self._scores(index), dim=-1)
                # softmax spreads NaN over the whole row, so one entry tells
                if (self._processors or self._warpers) and math.isnan(row[0].item()):
                    raise self._nothing_left()
            self._rows[index] = row
        return self._rows[index]

    def choice(self, index: int) -> int:
        """Most probable token of row ``index``, the first among equals.

        Raises:
            InputError: the options leave no token, or a processor failed.
        """
        if index not in self._choices:
            best, token = self._scores(index).max(dim=-1)  # as argmax, but several times faster on a CPU
            if self._processors and not math.isfinite(float(best)):
                raise self._nothing_left()
            self._choices[index] = int(token)
        return self._choices[index]

    def _scores(self, index: int) -> Tensor:
        if not self._processors and not self._warpers:
            return _at_least_float32(self._logits[index])
        logits = self._logits[index : index + 1]
        scores = _at_least_float32(logits)
        if self._processors:
            if scores.data_ptr() == logits.data_ptr():
                scores = scores.clone()  # a processor may write in place
            ids = self._ids(index)[None]
            for processor in self._processors:
                scores = _apply(processor, ids, scores)
        for warper in self._warpers:
            scores = _apply(warper, _NO_IDS, scores)
        return scores[0]

    def _ids(self, index: int) -> Tensor:
        if not isinstance(self._prefix, Tensor):
            self._prefix = ids_tensor(self._prefix)
        path: list[int] = []
        node = index - 1
        while node >= 0:
            path.append(int(self._tree.tokens[node]))
            node = self._tree.parents[node]
        ids = torch.cat([self._prefix, ids_tensor(path[::-1])])
        return ids.to(self._logits.device)

    def _nothing_left(self) -> InputError:
        names = ", ".join(type(p).__name__ for p in (*self._processors, *self._warpers))
        return InputError(
            f"sampling options: expected at least one token with a finite score, got none after {names}; "
            "loosen the bans and biases, or fix the processor"
        )


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def check_finite(logits: Tensor, model: str = "target") -> None:
    """Raise `NumericsError` if any logit of ``model`` is NaN or infinite (one pass over the data)."""
    low, high = torch.aminmax(logits)
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        bad = (~torch.isfinite(logits)).any(dim=-1).nonzero().flatten().tolist()
        raise NumericsError(
            f"{model}: logits of rows {bad} are NaN or infinite; check the checkpoint, or use a dtype with more range"
        )


def _apply(processor: LogitsProcessor, ids: Tensor, scores: Tensor) -> Tensor:
    name = type(processor).__name__
    try:
        result = processor(ids, scores)  # type: ignore[arg-type]
    except SpecdiffError:
        raise
    except Exception as error:
        raise InputError(
            f"processors: {name} raised {error!r} on scores of shape {tuple(scores.shape)}; fix it, or leave it out"
        ) from error
    if not isinstance(result, Tensor) or result.shape != scores.shape:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise InputError.of(
            "processors",
            expected=f"scores of shape {tuple(scores.shape)} from {name}",
            got=got,
            remedy="return the processed scores",
        )
    return result


def _check_vocabulary(o: SamplingOptions, eos_ids: list[int], vocab_size: int) -> None:
    for name, words in (("logit_bias", _biased_sequences(o.logit_bias)), ("bad_words_ids", o.bad_words_ids)):
        bad = [i for word in words for i in word if i >= vocab_size]
        if bad:
            raise InputError.of(
                name, expected=f"token ids below {vocab_size}", got=bad, remedy="use ids of the target's vocabulary"
            )
    ends = [list(word) for word in o.bad_words_ids if len(word) == 1 and word[0] in eos_ids]
    if ends:  # transformers drops them silently
        raise InputError.of(
            "bad_words_ids",
            expected="no EOS id as a word of its own",
            got=ends,
            remedy="use logit_bias={id: float('-inf')} or min_new_tokens to keep EOS away",
        )


def _processors(
    o: SamplingOptions, prompt_length: int, eos_ids: list[int], device: torch.device
) -> list[LogitsProcessor]:
    chain: list[LogitsProcessor] = []
    if o.logit_bias:
        chain.append(SequenceBiasLogitsProcessor(_biased_sequences(o.logit_bias)))  # type: ignore[arg-type]
    if o.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(o.repetition_penalty))
    if o.presence_penalty or o.frequency_penalty:
        chain.append(OccurrencePenalty(o.presence_penalty, o.frequency_penalty, prompt_length))
    if o.no_repeat_ngram_size:
        chain.append(NoRepeatNGramLogitsProcessor(o.no_repeat_ngram_size))
    if o.bad_words_ids:
        chain.append(NoBadWordsLogitsProcessor([list(w) for w in o.bad_words_ids], eos_token_id=eos_ids or None))
    if o.min_new_tokens and eos_ids:
        chain.append(MinNewTokensLengthLogitsProcessor(prompt_length, o.min_new_tokens, eos_ids, device=str(device)))
    return [*chain, *o.processors]


def warpers(o: SamplingOptions, device: torch.device) -> list[LogitsProcessor]:
    """Filters of a law above temperature 0, in the order of ``generate``; they read no ids and treat rows apart."""
    chain: list[LogitsProcessor] = []
    if o.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(o.temperature))
    if o.top_h is not None:
        chain.append(TopHLogitsWarper(o.top_h))
    if o.top_k is not None:
        chain.append(TopKLogitsWarper(o.top_k))
    if o.top_p < 1.0:
        chain.append(TopPLogitsWarper(o.top_p))
    if o.min_p > 0.0:
        chain.append(MinPLogitsWarper(o.min_p))
    if o.typical_p < 1.0:
        chain.append(TypicalLogitsWarper(o.typical_p))
    if o.epsilon_cutoff > 0.0:
        chain.append(EpsilonLogitsWarper(o.epsilon_cutoff))
    if o.eta_cutoff > 0.0:
        chain.append(EtaLogitsWarper(o.eta_cutoff, device=str(device)))
    return chain
