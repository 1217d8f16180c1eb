"""Speculative against plain decoding in one process: interleaved prompt by prompt, ratios of total times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.decoder import Generation, SpeculativeDecoder
from specdiff.errors import InputError
from specdiff.models.cached_decoder import input_device
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions

Method = Callable[[Tensor], Sequence[int]]
"""Prompt ids [L] -> new token ids."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Seconds and tokens by method, prompt by prompt.

    Attributes:
        seconds, tokens: method -> one number a prompt. generations: what the speculative decoder returned.
        parted: method -> for each prompt, the first new token that differs from the speculative decoder's, None where
            all are equal. Above temperature 0 texts differ by chance.
    """

    seconds: Mapping[str, tuple[float, ...]]
    tokens: Mapping[str, tuple[int, ...]]
    parted: Mapping[str, tuple[int | None, ...]]
    generations: tuple[Generation, ...]

    def rate(self, method: str) -> float:
        """Tokens per second over all prompts."""
        return sum(self.tokens[method]) / sum(self.seconds[method])

    def fastest(self) -> str:
        """The plain method with the highest rate."""
        return max((m for m in self.seconds if m != "specdiff"), key=self.rate)

    def speedup(self, method: str) -> float:
        """How many times the rate of ``method`` the speculative decoder reaches (ratio of totals)."""
        return self.rate("specdiff") / self.rate(method)

    def interval(self, method: str, *, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
        """Bootstrap 95 % interval of `speedup` over prompts."""
        rng, n = random.Random(seed), len(self.seconds["specdiff"])
        ratios = []
        for _ in range(resamples):
            picks = [rng.randrange(n) for _ in range(n)]
            rates = [
                sum(self.tokens[m][i] for i in picks) / sum(self.seconds[m][i] for i in picks)
                for m in ("specdiff", method)
            ]
            ratios.append(rates[0] / rates[1])
        ratios.sort()
        return ratios[int(0.025 * resamples)], ratios[int(0.975 * resamples)]


def plain_loop(decoder: SpeculativeDecoder, sampling: SamplingOptions, stop: StopOptions, seed: int) -> Method:
    """Our own loop without a drafter on the same target."""
    plain = SpeculativeDecoder(decoder.target, None, decoder.tokenizer)

    def run(prompt: Tensor) -> Sequence[int]:
        result = plain.generate(prompt, sampling=sampling, stop=stop, seed=seed)
        assert isinstance(result, Generation)
        return result.tokens

    return run


def transformers_generate(model: PreTrainedModel, sampling: SamplingOptions, stop: StopOptions) -> Method:
    """``model.generate`` with the same options.

    Raises:
        InputError: an option that this baseline does not have.
    """
    if stop.stop_strings or sampling.presence_penalty or sampling.frequency_penalty or sampling.processors:
        raise InputError.of(
            "compare",
            expected="options that transformers' generate shares",
            got=sampling,
            remedy="leave out stop strings, presence and frequency penalty, and processors",
        )
    options: dict[str, object] = {
        "max_new_tokens": stop.max_new_tokens,
        "do_sample": not sampling.greedy,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": sampling.min_new_tokens or None,
        "pad_token_id": 0,
    }
    if not sampling.greedy:
        options |= {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    if sampling.logit_bias:
        options["sequence_bias"] = {(k,): v for k, v in sampling.logit_bias.items()}
    if sampling.bad_words_ids:
        options["bad_words_ids"] = [list(w) for w in sampling.bad_words_ids]
    eos = model.generation_config.eos_token_id if model.generation_config else None
    ends = [] if stop.ignore_eos else [eos] if isinstance(eos, int) else list(eos or [])
    options["eos_token_id"] = [*ends, *stop.stop_ids] or None

    def run(prompt: Tensor) -> Sequence[int]:
        ids = prompt[None].to(input_device(model))
        with torch.inference_mode():
            out = cast(Any, model).generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, prompt.numel() :].tolist()

    return run


def compare(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Tensor],
    baselines: Mapping[str, Method],
    *,
    sampling: SamplingOptions,
    stop: StopOptions,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Run every method on every prompt, in turn, after one untimed warm-up of each.

    Args:
        prompts: ids [L] each. baselines: plain methods by name. progress: told how many prompts are done.
    """
    generations: list[Generation] = []

    def speculative(prompt: Tensor) -> Sequence[int]:
        result = decoder.generate(prompt, sampling=sampling, stop=stop, seed=seed, clock=time.perf_counter)
        assert isinstance(result, Generation)
        generations.append(result)
        return result.tokens

    methods: dict[str, Method] = {"specdiff": speculative, **baselines}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    tokens: dict[str, list[int]] = {name: [] for name in methods}
    parted: dict[str, list[int | None]] = {name: [] for name in baselines}
    for method in methods.values():
        method(prompts[0])
    generations.clear()
    for done, prompt in enumerate(prompts):
        order, texts = list(methods), dict[str, Sequence[int]]()
        for name in order[done % len(order) :] + order[: done % len(order)]:
            began = time.perf_counter()
            texts[name] = methods[name](prompt)
            seconds[name].append(time.perf_counter() - began)
            tokens[name].append(len(texts[name]))
        for name in baselines:
            parted[name].append(first_difference(texts["specdiff"], texts[name]))
        progress(done + 1)
    return Comparison(
        seconds={k: tuple(v) for k, v in seconds.items()},
        tokens={k: tuple(v) for k, v in tokens.items()},
        parted={k: tuple(v) for k, v in parted.items()},
        generations=tuple(generations),
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Where two texts part: the first index at which they differ or one has ended; None where they are equal."""
    if list(left) == list(right):
        return None
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
