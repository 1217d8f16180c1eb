"""Our decoder inside ``model.generate``: same processors, stopping criteria, streamer and return value.

::

    fn = speculative_generate(drafter=drafter, gamma=5)
    model.generate(**inputs, max_new_tokens=100, do_sample=True, custom_generate=fn)
    # or
    model.generate(**inputs, custom_generate=generate_speculatively, drafter=drafter, gamma=5)

``generate`` prepares everything as for its own loop and hands it over: the list of logits processors is applied as it
stands (temperature and filters included, hence by nobody else), to every node of a draft, with the ids that its own
loop would show it: left padding, prompt and continuation. What cannot be honoured is refused.

``generate`` itself asks for a tokenizer it does not find when it has both ``stop_strings`` and a custom function: pass
``stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]`` instead.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessor,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdiff.checking import callable_or_none, integer, optional
from specdiff.control.defaults import default_budget
from specdiff.decode import Commit, DecodeLoop, Request
from specdiff.drafters.base import Drafter
from specdiff.errors import InputError, UnsupportedModelError
from specdiff.integrations.generation_config import refuse_unsupported
from specdiff.models.target import CausalTarget
from specdiff.processors import check_replayable
from specdiff.records import RoundEvent
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.types import Budget
from specdiff.verify.base import Rule
from specdiff.verify.registry import get

_DONE_BY_GENERATE = frozenset(
    {
        "num_return_sequences",
        "watermarking_config",
        "encoder_repetition_penalty",
        "encoder_no_repeat_ngram_size",
        "token_healing",
    }
)
# Exactly these look at one row at a time; any other processor is shown the whole batch, with this row in it.
_ROW_BY_ROW = frozenset(
    {
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        ExponentialDecayLengthPenalty,
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        LogitNormalization,
        MaxTimeCriteria,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        MinPLogitsWarper,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        SequenceBiasLogitsProcessor,
        StopStringCriteria,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopHLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)
_PREPARED = frozenset({"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"})


def speculative_generate(
    *,
    drafter: Drafter | None,
    gamma: int | None = None,
    budget: Budget | None = None,
    rule: str | Rule = "auto",
    seed: int | None = None,
    generator: torch.Generator | None = None,
    on_round: Callable[[RoundEvent], None] | None = None,
) -> Callable[..., Tensor | GenerateDecoderOnlyOutput]:
    """Return a function for ``model.generate(..., custom_generate=...)``.

    Args:
        drafter: proposes drafts; None = plain decoding by our loop.
        gamma: depth of a draft, whose shape is the drafter's default; None = the drafter's window.
        budget: depth, shape and temperature of drafts, instead of ``gamma``.
        rule: a verification rule or its name; "auto" chooses by draft and temperature.
        seed: decides every random choice; None draws one from ``generator``.
        generator: None = torch's global generator, so that ``torch.manual_seed`` decides.
        on_round: called with every round's draft, verdict and record.

    Returns:
        A callable; each of these arguments may also be passed to ``generate`` itself, and then has precedence.
    """
    return functools.partial(
        generate_speculatively,
        drafter=drafter,
        gamma=gamma,
        budget=budget,
        rule=rule,
        seed=seed,
        generator=generator,
        on_round=on_round,
    )


def generate_speculatively(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Sequence[LogitsProcessor],
    stopping_criteria: Sequence[StoppingCriteria],
    generation_config: GenerationConfig,
    *,
    drafter: Drafter | None = None,
    gamma: int | None = None,
    budget: Budget | None = None,
    rule: str | Rule = "auto",
    seed: int | None = None,
    generator: torch.Generator | None = None,
    on_round: Callable[[RoundEvent], None] | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Be the decoding loop of ``generate``, which calls this with the first five arguments prepared.

    Texts end at the model's context length, also where ``generate`` would go on with a warning.

    Args:
        model: the target.
        input_ids: [B, L] prompts, left-padded.
        logits_processor: prepared; applied to every node of every draft.
        stopping_criteria: prepared.
        generation_config: prepared.
        drafter: see `speculative_generate`, also for the following.
        gamma: depth of a draft.
        budget: instead of ``gamma``.
        rule: verification rule.
        seed: of all random choices.
        generator: of the seed.
        on_round: called every round.
        model_kwargs: attention mask [B, L] and what ``generate`` adds; anything else is refused.

    Returns:
        ids [B, L + new], padded on the right; in a `GenerateDecoderOnlyOutput` if ``return_dict_in_generate``.

    Raises:
        InputError: something was asked for that cannot be honoured.
        UnsupportedModelError: the model cannot be a target.
    """
    optional("generator", generator, torch.Generator, remedy="make one: torch.Generator()")
    callable_or_none("on_round", on_round, remedy="pass a function of one RoundEvent")
    streamer = _dropped_on_the_way(model, sys._getframe(1))
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError("target: encoder-decoder models are not supported; use a decoder-only model")
    refuse_unsupported(generation_config, except_for=_DONE_BY_GENERATE)
    _refuse_model_kwargs(model_kwargs)
    prompts = _unpadded(input_ids, model_kwargs)
    greedy = not generation_config.do_sample
    with _in_eval_mode(model):
        target = CausalTarget(model)
        stops = _StopPlan(stopping_criteria, input_ids, generation_config)
        _check_padding(stops, target, prompts, generation_config)
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device if generator else "cpu"))
        requests = [
            Request(
                prompt=prompt,
                sampling=SamplingOptions(  # at temperature 1 we add nothing to the list, which holds the temperature
                    temperature=0.0 if greedy else 1.0,
                    processors=_row_processors(logits_processor, input_ids, row, prompt),
                ),
                stop=stops.options(row, prompt),
                seed=integer("seed", seed, 0, remedy="pass an integer >= 0, or None"),
                index=row,
            )
            for row, prompt in enumerate(prompts)
        ]
        loop = DecodeLoop(
            target,
            drafter,
            requests,
            budget=_budget(drafter, gamma, budget, greedy=greedy),
            rule=_rule(rule),
            on_round=on_round,
        )
        pad = generation_config._pad_token_tensor
        output = _Output(input_ids, None if pad is None else int(pad), streamer)
        for commits in loop.run():
            output.add(commits, {i for i, row in enumerate(loop.rows) if row.finish is not None})
        sequences = output.sequences()
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type] - it asks for a LongTensor
        return sequences


@contextmanager
def _in_eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Decode without dropout, and leave the caller's model as it was, as a training loop that samples expects."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _dropped_on_the_way(model: Any, caller: FrameType | None) -> Any:
    """Return the streamer given to ``generate``, which hands its custom functions neither it nor what is refused here.

    Without a look at the callers, a streamer would wait for tokens forever and the others would be silently ignored.
    There may be some between, as where the custom function is wrapped in a lambda.
    """
    while caller is not None and not (caller.f_code.co_name == "generate" and caller.f_locals.get("self") is model):
        caller = caller.f_back
    given = {} if caller is None else caller.f_locals
    for name in ("assistant_model", "synced_gpus"):
        if given.get(name):
            raise InputError.of(
                name,
                expected="None",
                got=type(given[name]).__name__,
                remedy="leave it out; the drafter is an argument of speculative_generate",
            )
    return given.get("streamer")


def _refuse_model_kwargs(model_kwargs: dict[str, Any]) -> None:
    for name, value in model_kwargs.items():
        if value is not None and name not in _PREPARED:
            raise InputError.of(
                name, expected="token ids and an attention mask only", got=type(value).__name__, remedy="leave it out"
            )
    for name in ("cache", "past_key_values"):
        cache = model_kwargs.get(name)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
            raise InputError.of(
                name, expected="none", got=type(cache).__name__, remedy="leave it out; our own cache is used"
            )


def _unpadded(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[Tensor]:
    """Prompts [n] int64 on the CPU, without their left padding."""
    ids = input_ids.cpu()
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask.cpu()
    if mask.shape != ids.shape or bool((mask.long().diff(dim=1) < 0).any()) or bool((mask[:, -1:] == 0).any()):
        raise InputError.of(
            "attention_mask",
            expected=f"{list(ids.shape)}, zeros on the left only",
            got=mask.tolist(),
            remedy="set padding_side='left' in the tokenizer, and give every row a prompt",
        )
    prompts = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        for prompt, row in zip(prompts, positions.cpu().expand(ids.shape[0], -1), strict=True):
            if not torch.equal(row[-prompt.numel() :], torch.arange(prompt.numel())):
                raise InputError.of(
                    "position_ids",
                    expected="0, 1, 2, ... from the first token",
                    got=row.tolist(),
                    remedy="leave them out",
                )
    return prompts


def _budget(drafter: Drafter | None, gamma: int | None, budget: Budget | None, *, greedy: bool) -> Budget:
    optional("budget", budget, Budget, remedy="make one: Budget(gamma=...)")
    if budget is None:
        if gamma is not None:
            integer("gamma", gamma, 1, remedy="draft at least one token")
        return default_budget(drafter, greedy=greedy, gamma=gamma)
    if gamma is not None:
        raise InputError.of("gamma", expected="gamma or budget", got=(gamma, budget), remedy="leave one out")
    budget.validate()
    return budget


def _rule(rule: str | Rule) -> Rule | None:
    if isinstance(rule, str):
        return None if rule == "auto" else get(rule)
    if not hasattr(rule, "verify"):
        remedy = "name one of specdiff.verify.registry.RULES, or 'auto'"
        raise InputError.of("rule", expected="a rule or its name", got=rule, remedy=remedy)
    return rule


class _InBatch:
    """A processor or criterion that was made for the whole batch, as seen by one row of it."""

    def __init__(self, inner: Any, input_ids: Tensor, row: int, prompt: Tensor) -> None:
        self._padding = input_ids[row, : input_ids.shape[1] - prompt.numel()]
        alone = type(inner) in _ROW_BY_ROW
        self._inner, self._rows, self._row = inner, 1 if alone else input_ids.shape[0], 0 if alone else row

    def _ids(self, input_ids: Tensor) -> Tensor:
        padded = torch.cat([self._padding.to(input_ids.device), input_ids[0]])
        return padded.expand(self._rows, -1)


class _RowProcessor(_InBatch, LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        own = scores.expand(self._rows, -1).clone() if self._rows > 1 else scores
        return self._inner(self._ids(input_ids), own)[self._row : self._row + 1]


class _RowCriterion(_InBatch, StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        verdict = torch.as_tensor(self._inner(self._ids(input_ids), scores))
        return verdict.expand(self._rows)[self._row] if verdict.ndim == 0 else verdict[self._row]


def _row_processors(
    processors: Sequence[LogitsProcessor], input_ids: Tensor, row: int, prompt: Tensor
) -> list[LogitsProcessor]:
    check_replayable("logits_processor", processors)
    if input_ids.shape[0] == 1:
        return list(processors)
    return [_RowProcessor(p, input_ids, row, prompt) for p in processors]


class _StopPlan:
    """Stopping criteria of ``generate`` as stop options of each row."""

    def __init__(self, criteria: Sequence[StoppingCriteria], input_ids: Tensor, config: GenerationConfig) -> None:
        self._input_ids = input_ids
        lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        self.max_new = min(lengths, default=config.max_length) - input_ids.shape[1]
        self._eos = [int(i) for c in criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id]
        self.others = [c for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]

    def options(self, row: int, prompt: Tensor) -> StopOptions:
        criteria = [_RowCriterion(c, self._input_ids, row, prompt) for c in self.others]
        return StopOptions(max_new_tokens=self.max_new, stop_ids=self._eos, ignore_eos=True, criteria=criteria)


def _check_padding(stops: _StopPlan, target: CausalTarget, prompts: Sequence[Tensor], config: GenerationConfig) -> None:
    """Ask for a padding id while nothing is lost, where rows may end unevenly (by EOS: ``generate`` has one then)."""
    lengths = [p.numel() for p in prompts]
    overflow = target.context is not None and max(lengths) + stops.max_new > target.context
    if len(prompts) > 1 and config._pad_token_tensor is None and (stops.others or overflow):
        raise InputError.of(
            "pad_token_id",
            expected="an id to fill rows that end early",
            got=None,
            remedy="pass pad_token_id to generate",
        )


class _Output:
    """Collects what rows commit, and feeds the streamer as ``generate`` would: one token of every row at a time."""

    def __init__(self, input_ids: Tensor, pad: int | None, streamer: Any) -> None:
        self._input_ids, self._pad, self._streamer = input_ids, pad, streamer
        self._new: list[list[int]] = [[] for _ in range(input_ids.shape[0])]
        self._streamed = 0

    def add(self, commits: Sequence[Commit], finished: set[int]) -> None:
        for commit in commits:
            self._new[commit.row] += commit.tokens
        if self._streamer is None:
            return
        everybody = max if len(finished) == len(self._new) else min
        ready = everybody(len(tokens) for i, tokens in enumerate(self._new) if everybody is max or i not in finished)
        for step in range(self._streamed, ready):
            self._streamer.put(torch.tensor([self._at(tokens, step) for tokens in self._new]))
        self._streamed = max(self._streamed, ready)

    def sequences(self) -> Tensor:
        if self._streamer is not None:
            self._streamer.end()
        width = max(map(len, self._new))
        new = [[self._at(tokens, step) for step in range(width)] for tokens in self._new]
        return torch.cat([self._input_ids, torch.tensor(new).to(self._input_ids)], dim=1)

    def _at(self, tokens: list[int], step: int) -> int:
        if step < len(tokens):
            return tokens[step]
        assert self._pad is not None, "see _check_padding"
        return self._pad
