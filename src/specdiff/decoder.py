"""The library's face: load a target and a drafter once, then generate, stream, or decode batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdiff.chat import chat_ids
from specdiff.checking import callable_or_none, flag, integer, optional
from specdiff.control.base import Controller, FixedBudget
from specdiff.control.defaults import default_budget
from specdiff.decode import DecodeLoop, Request, Row
from specdiff.drafters.base import Drafter
from specdiff.drafters.checked import check_drafter
from specdiff.errors import InputError, SpecdiffError
from specdiff.hub.progress import ProgressCallback, ignore
from specdiff.loading import DEFAULT_TARGET, load_pair
from specdiff.models.target import Target
from specdiff.prompts import Message, Prompt, as_batch, is_ids
from specdiff.records import RoundEvent, Totals
from specdiff.sampling import SamplingOptions
from specdiff.stopping import FinishReason, StopOptions
from specdiff.text import TextStream, Tokenizer
from specdiff.types import Budget, Round
from specdiff.verify import registry as rules
from specdiff.verify.base import Rule

_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How drafts are made and verified; none of it can change the text's law.

    Attributes:
        rule: name of a verification rule, or ``"auto"`` (by the draft's kind and the temperature).
        budget: gamma, shape and draft temperature of each round; None = the drafter's default for the temperature.
        gamma: shortcut that changes only the default budget's window.
        controller: makes each request's controller from the budget.
    """

    rule: str = "auto"
    budget: Budget | None = None
    gamma: int | None = None
    controller: Callable[[Budget], Controller] = FixedBudget

    def __post_init__(self) -> None:
        if self.budget is not None and self.gamma is not None:
            raise InputError.of(
                "gamma", expected="no gamma beside a budget", got=self.gamma, remedy="set Budget.gamma instead"
            )
        optional("budget", self.budget, Budget, remedy="make one: Budget(gamma=...)")
        if self.budget is not None:
            self.budget.validate()
        if not callable(self.controller):  # pyright: ignore[reportUnnecessaryComparison]
            raise InputError.of(
                "controller",
                expected="a function from a Budget to a Controller",
                got=self.controller,
                remedy="pass the controller's class, or leave it out",
            )


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One finished text.

    Attributes:
        text: the new text. tokens: the new ids, EOS or stop id included where one came.
        prompt_tokens: length of the prompt. finish: why it ended. rounds: one record a round.
        error: what went wrong with this row (only with ``keep_errors``), else None.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish: FinishReason
    rounds: tuple[Round, ...] = field(repr=False)
    error: SpecdiffError | None = None

    @property
    def totals(self) -> Totals:
        """Sums over the rounds: tau, acceptance by position, passes, seconds."""
        return Totals.of(self.rounds)


@dataclass(frozen=True)
class Span:
    """Text released by one committed token; ``kind`` is ``"accepted"``, ``"recovered"`` or ``"bonus"``."""

    text: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What streaming hands out after each round.

    Attributes:
        spans: the new text by kind of token, safe to print (never half a character). tokens: ids this round committed.
        generation: the finished text, with the last piece only.
    """

    spans: tuple[Span, ...]
    tokens: tuple[int, ...]
    generation: Generation | None = None

    @property
    def text(self) -> str:
        """The new text of this round."""
        return "".join(span.text for span in self.spans)


class SpeculativeDecoder:
    """A target, a drafter and the settings that bring them together.

    Args:
        target: scores drafts; decides every token. tokenizer: the target's.
        drafter: proposes; None = plain decoding by the same loop.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: Settings | None = None,
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        check_drafter(drafter)
        optional("settings", settings, Settings, remedy="make them: Settings(...)")
        self.settings = settings or Settings()
        self._rule: Rule | None = None if self.settings.rule == "auto" else rules.get(self.settings.rule)

    @classmethod
    def from_pretrained(
        cls,
        target: str = DEFAULT_TARGET,
        drafter: str = "default",
        *,
        dtype: str | torch.dtype = "auto",
        drafter_dtype: str | torch.dtype = "auto",
        device: str | None = None,
        device_map: str | None = None,
        tf32: bool = False,
        trust_remote_code: bool = False,
        steps: int = 1,
        order: str = "left_to_right",
        family: str | None = None,
        adapter: str | Path | None = None,
        refresh: int | None = None,
        ngram: str | Path | None = None,
        settings: Settings | None = None,
        pull: bool = True,
        progress: ProgressCallback = ignore,
        prepack: bool = True,
    ) -> Self:
        """Load a target and a drafter; ``specdiff.load`` is the same function.

        Args:
            target: catalog name (``specdiff models list``), a local folder, or a Hugging Face id.
            drafter: ``"default"`` (the denoiser that ships with the default target), ``"none"``, ``"ngram"``, a folder
                or id of weights (block-causal denoiser, EAGLE head, masked diffusion LM, any causal LM), or several
                joined by ``+``.
            dtype: of the target: ``"auto"``, ``"bf16"``, ``"fp16"``, ``"fp32"`` or a torch dtype. drafter_dtype: the
                same for the drafter; ``"auto"`` = the target's.
            device: ``"cpu"``, ``"cuda"``, ...; None = the best there is. device_map: accelerate's, e.g. ``"auto"``.
            tf32: allow TF32 products on CUDA. trust_remote_code: run code that comes with the target's checkpoint.
            steps, order: denoising steps of a masked diffusion LM and the order of unmasking. family: its family, where
                its configuration does not say (``"diffullama"``). adapter: folder of a LoRA adapter (PEFT's) for it,
                merged in float32 on the CPU. refresh: rounds between two computations of its prefix, if it is fully
                bidirectional (None: every round; more is faster, and drafts get worse, never the text).
            ngram: n-gram model that the shape `CausalPaths` asks, beside a one-step diffusion drafter: ``"prompt"`` (it
                learns from each text itself), an ARPA file of the target's token ids (``specdiff ngram train``), or
                ``"prompt+FILE"`` (both, half each).
            settings: see `Settings`. pull: fetch a catalog target that is not stored yet. progress: told how that goes.
            prepack: on CPUs, keep second copies of the weights, of target and drafter, for speed; see `load_target`.

        Raises:
            InputError: a name, option or pairing is wrong. CheckpointError, UnsupportedModelError: a model cannot be
                used. DownloadError: fetching failed.
        """
        pair = load_pair(
            target,
            drafter,
            dtype=dtype,
            drafter_dtype=drafter_dtype,
            device=device,
            device_map=device_map,
            tf32=tf32,
            trust_remote_code=trust_remote_code,
            steps=steps,
            order=order,
            family=family,
            adapter=adapter,
            refresh=refresh,
            ngram=ngram,
            pull=pull,
            progress=progress,
            prepack=prepack,
        )
        return cls(pair.target, pair.drafter, pair.tokenizer, settings)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        max_time: float | None = None,
        temperature: float | None = None,
        sampling: SamplingOptions | None = None,
        stop: StopOptions | None = None,
        seed: int = 0,
        chat: bool = False,
        clock: Callable[[], float] | None = None,
        on_round: Callable[[RoundEvent], None] | None = None,
        keep_errors: bool = False,
    ) -> Generation | list[Generation]:
        """Produce the continuation of one prompt, or of a list of prompts decoded as one batch.

        Args:
            prompts: one `Prompt` (returns one `Generation`) or a list of texts, message lists or id rows.
            max_new_tokens, max_time, temperature: shortcuts into ``stop`` and ``sampling``. Time runs from this call on
                (from the first piece on when streaming, the reader's own time included); the tokens are the first ones
                of the text without a limit.
            seed: with the prompt's place in the list, decides every random choice.
            chat: wrap each text as a user message in the tokenizer's chat template.
            clock: e.g. ``time.perf_counter``; fills the records' seconds and measures ``max_time``.
            on_round: see `RoundEvent`. keep_errors: a failing row keeps its error, its neighbours go on.

        Raises:
            InputError: a bad option or prompt. NumericsError, DrafterError: a model failed.
        """
        single, batch = as_batch(prompts)
        requests = [
            self._request(p, i, sampling, stop, max_new_tokens, max_time, temperature, seed, chat)
            for i, p in enumerate(batch)
        ]
        loop = self._loop(requests, clock=clock, on_round=on_round, keep_errors=keep_errors)
        for _ in loop.run():
            pass
        results = [self._finished(row) for row in loop.rows]
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        max_time: float | None = None,
        temperature: float | None = None,
        sampling: SamplingOptions | None = None,
        stop: StopOptions | None = None,
        seed: int = 0,
        chat: bool = False,
        clock: Callable[[], float] | None = None,
        on_round: Callable[[RoundEvent], None] | None = None,
    ) -> Iterator[Piece]:
        """Yield a `Piece` a round; the concatenated texts equal ``generate``'s text. Arguments as for `generate`."""
        request = self._request(prompt, 0, sampling, stop, max_new_tokens, max_time, temperature, seed, chat)
        loop = self._loop([request], clock=clock, on_round=on_round, keep_errors=False)
        text = self._text_stream(request)
        for (commit,) in loop.run():
            row = loop.rows[0]
            kinds = ["accepted"] * commit.accepted + ([commit.extra.value] if commit.extra else [])
            spans = [Span(text.push([t]) if text else "", k) for t, k in zip(commit.tokens, kinds, strict=True)]
            generation = None
            if row.finish is not None:
                spans.append(Span(text.finish() if text else "", kinds[-1]))
                generation = self._finished(row)
            yield Piece(spans=tuple(s for s in spans if s.text), tokens=commit.tokens, generation=generation)

    def encode(self, prompt: Prompt, *, chat: bool = False) -> Tensor:
        """Token ids [L] of a prompt: texts through the tokenizer, messages through its chat template.

        Raises:
            InputError: no tokenizer, no chat template, an empty prompt without a BOS token, or ids of a wrong kind.
        """
        if is_ids(prompt):
            try:
                ids = torch.as_tensor(prompt)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise InputError.of(
                    "prompt", expected="integer ids [L]", got=prompt, remedy="pass one row of token ids"
                ) from error
            if ids.ndim == 2 and ids.shape[0] == 1:
                ids = ids[0]
            if ids.ndim != 1 or ids.dtype not in _ID_DTYPES:
                raise InputError.of(
                    "prompt",
                    expected="integer ids [L]",
                    got=(ids.dtype, tuple(ids.shape)),
                    remedy="pass one row of token ids",
                )
            return ids.to("cpu", torch.int64)
        if self.tokenizer is None:
            raise InputError.of(
                "prompt",
                expected="token ids (this decoder has no tokenizer)",
                got=type(prompt).__name__,
                remedy="pass ids, or build the decoder with a tokenizer",
            )
        if isinstance(prompt, str) and not chat:
            ids = self.tokenizer(prompt, return_tensors=None)["input_ids"]
        else:
            if not getattr(self.tokenizer, "chat_template", None):
                raise InputError.of(
                    "chat",
                    expected="a tokenizer with a chat template",
                    got=self.target.name,
                    remedy="pass plain text with chat=False",
                )
            ids = chat_ids(self.tokenizer, cast("str | Sequence[Message]", prompt))
        if not ids:
            bos = self.tokenizer.bos_token_id
            if bos is None:
                raise InputError.of(
                    "prompt",
                    expected="text (this model has no BOS token to start from)",
                    got=prompt,
                    remedy="give at least one character",
                )
            ids = [bos]
        return torch.tensor(ids, dtype=torch.int64)

    def _request(
        self,
        prompt: Prompt,
        index: int,
        sampling: SamplingOptions | None,
        stop: StopOptions | None,
        max_new_tokens: int | None,
        max_time: float | None,
        temperature: float | None,
        seed: int,
        chat: bool,
    ) -> Request:
        sampling, stop = sampling or SamplingOptions(), stop or StopOptions()
        optional("sampling", sampling, SamplingOptions, remedy="make one: SamplingOptions(...)")
        optional("stop", stop, StopOptions, remedy="make one: StopOptions(...)")
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        if max_new_tokens is not None:
            stop = replace(stop, max_new_tokens=max_new_tokens)
        if max_time is not None:
            stop = replace(stop, max_time=max_time)
        decode = None
        if self.tokenizer is not None:  # the very text that is handed out, so that both find the same stop strings
            decode = cast(
                "Callable[[Sequence[int]], str]", functools.partial(self.tokenizer.decode, skip_special_tokens=True)
            )
        seed = integer("seed", seed, 0, remedy="pass an integer >= 0; the same one gives the same text")
        return Request(
            prompt=self.encode(prompt, chat=chat), sampling=sampling, stop=stop, seed=seed, index=index, decode=decode
        )

    def _loop(
        self,
        requests: Sequence[Request],
        *,
        clock: Callable[[], float] | None,
        on_round: Callable[[RoundEvent], None] | None,
        keep_errors: bool,
    ) -> DecodeLoop:
        callable_or_none("clock", clock, remedy="pass time.perf_counter, without calling it")
        callable_or_none("on_round", on_round, remedy="pass a function of one RoundEvent")
        flag("keep_errors", keep_errors, remedy="say whether a failing row keeps its error")
        greedy = all(r.sampling.greedy for r in requests)
        budget = self.settings.budget or default_budget(self.drafter, greedy=greedy, gamma=self.settings.gamma)
        return DecodeLoop(
            self.target,
            self.drafter,
            requests,
            budget=budget,
            rule=self._rule,
            controller=self.settings.controller,
            clock=clock,
            on_round=on_round,
            keep_errors=keep_errors,
        )

    def _text_stream(self, request: Request) -> TextStream | None:
        if self.tokenizer is None:
            return None
        stop = request.stop
        return TextStream(
            cast(Tokenizer, self.tokenizer), stop_strings=stop.stop_strings, include_stop=stop.include_stop
        )

    def _finished(self, row: Row) -> Generation:
        assert row.finish is not None
        text = ""
        stream = self._text_stream(row.request)
        if stream is not None:
            text = stream.push(row.new_tokens) + stream.finish()
        return Generation(
            text=text,
            tokens=tuple(row.new_tokens),
            prompt_tokens=row.request.prompt.numel(),
            finish=row.finish,
            rounds=tuple(row.rounds),
            error=row.error,
        )


load = SpeculativeDecoder.from_pretrained
"""The short name: ``specdiff.load()`` is the embedded default pair."""
