"""From a ``transformers`` `GenerationConfig` to our options: every field is honoured, without influence, or refused.

Nothing is ignored: a field that asks for something we do not do, and is not at its default, raises. Fields left at None
take the defaults that ``generate`` would give them, which means ``top_k = 50`` when sampling, and 20 new tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specdiff.errors import ContextOverflowError, InputError
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions

HONOURED = frozenset(
    {
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "max_time",
        "stop_strings",
        "eos_token_id",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "bad_words_ids",
        "sequence_bias",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
    }
)
"""Fields that `from_generation_config` turns into options."""

NO_INFLUENCE = frozenset(
    {
        # padding and the shape of the return value are the caller's business; laws are normalised anyway
        "pad_token_id",
        "bos_token_id",
        "decoder_start_token_id",
        "return_dict_in_generate",
        "renormalize_logits",
        # where and how transformers' own loop keeps its cache and compiles; we keep our own cache
        "use_cache",
        "cache_config",
        "max_cache_len",
        "compile_config",
        "disable_compile",
        "low_memory",
        "prefill_chunk_size",
        "continuous_batching_config",
        # settings of transformers' own assisted decoding; asking for it is refused
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
        "max_matching_ngram_size",
        "transformers_version",
    }
)
"""Fields that change no text here, whatever they hold."""

REFUSED = {
    "num_beams": "beam search has no lossless draft verification; use num_beams=1",
    "num_beam_groups": "use num_beams=1",
    "diversity_penalty": "use num_beams=1",
    "early_stopping": "it belongs to beam search; leave it out",
    "length_penalty": "it belongs to beam search; leave it out",
    "constraints": "constrained beam search is not supported; pass a logits processor instead",
    "force_words_ids": "constrained beam search is not supported; pass a logits processor instead",
    "num_return_sequences": "ask for several requests with seeds of their own",
    "penalty_alpha": "contrastive search has no law to verify drafts against; use do_sample=True",
    "dola_layers": "contrasting layers needs the hidden states of every step; leave it out",
    "guidance_scale": "guidance runs the model on a second prompt; leave it out",
    "watermarking_config": "watermarks come after the filters; use generate(custom_generate=...), which takes them",
    "encoder_repetition_penalty": "it needs the encoder's ids; pass a logits processor instead",
    "encoder_no_repeat_ngram_size": "it needs the encoder's ids; pass a logits processor instead",
    "remove_invalid_values": "NaN logits raise an error here instead of being hidden; leave it out",
    "token_healing": "heal the prompt's last token yourself, before passing it",
    "output_scores": "scores of rejected drafts are not kept; leave it out",
    "output_logits": "logits of rejected drafts are not kept; leave it out",
    "output_attentions": "attention maps of draft passes are not kept; leave it out",
    "output_hidden_states": "states of draft passes are not kept; leave it out",
    "use_mtp": "it asks for another speculative method; give a drafter instead",
    "prompt_lookup_num_tokens": "it asks for another speculative method; use the n-gram drafter instead",
    "assistant_early_exit": "it asks for another speculative method; give a drafter instead",
    "speculation_type": "it asks for another speculative method; give a drafter instead",
    "is_assistant": "a model that drafts for transformers cannot be the target here; leave it out",
}
"""Fields that raise unless they hold their default, and what to do instead."""

_ROUNDING_CACHES = frozenset({"quantized"})


def from_generation_config(
    config: GenerationConfig, *, prompt_length: int, eos_ids: Sequence[int], device: torch.device | str = "cpu"
) -> tuple[SamplingOptions, StopOptions]:
    """Return the options under which we produce what ``generate`` would with this configuration.

    Args:
        config: with or without defaults filled in.
        prompt_length: tokens of the prompt; lengths in the configuration count from there.
        eos_ids: the target's, which hold where the configuration names none.
        device: where the logits will live.

    Returns:
        Sampling options and stop options for one request with such a prompt.

    Raises:
        InputError: a field asks for something that is not supported; names it, its value, and the remedy.
        ContextOverflowError: ``max_length`` leaves no room after the prompt.
    """
    refuse_unsupported(config)
    ends = _ids(config.eos_token_id)
    own_ends = ends is not None and set(ends) != set(eos_ids)
    effective_ends = list(eos_ids) if ends is None else ends
    total = _total_length(config, prompt_length)
    minimum = _minimum(config, prompt_length)
    ready = _ready_processors(config, prompt_length, total, effective_ends, device)
    if own_ends and minimum and effective_ends:
        ready.insert(0, MinNewTokensLengthLogitsProcessor(prompt_length, minimum, effective_ends, device=str(device)))
    stop = StopOptions(
        max_new_tokens=total - prompt_length,
        stop_ids=effective_ends if own_ends else (),
        ignore_eos=own_ends,
        stop_strings=config.stop_strings or (),
        max_time=config.max_time,
    )
    return _sampling(config, 0 if own_ends else minimum, ready), stop


def refuse_unsupported(config: GenerationConfig, *, except_for: Collection[str] = ()) -> None:
    """Raise for the first field that is neither honoured nor at its default.

    Args:
        config: with or without defaults filled in.
        except_for: fields that the caller honours by itself.

    Raises:
        InputError: naming the field, its value, and the remedy.
    """
    defaults = GenerationConfig._get_default_generation_params()
    for name, value in vars(config).items():
        known = name in HONOURED or name in NO_INFLUENCE or name in except_for or name.startswith("_")
        if known or value is None or (name in defaults and value == defaults[name]):
            continue
        if name == "cache_implementation":
            if value in _ROUNDING_CACHES:
                raise InputError.of(
                    name,
                    expected="a cache that keeps keys and values as they are",
                    got=value,
                    remedy="leave it out; our own cache is used",
                )
            continue
        if value is False and name in REFUSED:  # switched off
            continue
        if name == "guidance_scale" and value == 1:
            continue
        remedy = REFUSED.get(name, "it is no field that we know; leave it out")
        raise InputError.of(f"generation_config.{name}", expected=f"{defaults.get(name)!r}", got=value, remedy=remedy)


def _value(config: GenerationConfig, name: str) -> Any:
    value = getattr(config, name, None)
    return GenerationConfig._get_default_generation_params().get(name) if value is None else value


def _ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return [value] if isinstance(value, int) else list(value)


def _total_length(config: GenerationConfig, prompt_length: int) -> int:
    if config.max_new_tokens is not None:
        return prompt_length + config.max_new_tokens
    if config.max_length is None:  # generate's own default counts new tokens
        return prompt_length + _value(config, "max_length")
    if config.max_length <= prompt_length:
        raise ContextOverflowError.of(
            "generation_config.max_length",
            expected=f"more than the {prompt_length} tokens of the prompt",
            got=config.max_length,
            remedy="raise it, or set max_new_tokens",
        )
    return config.max_length


def _minimum(config: GenerationConfig, prompt_length: int) -> int:
    if config.min_new_tokens is not None:
        return config.min_new_tokens
    return max(0, _value(config, "min_length") - prompt_length)


def _ready_processors(
    config: GenerationConfig, prompt_length: int, total: int, ends: Sequence[int], device: torch.device | str
) -> list[LogitsProcessor]:
    """Those without an option of their own, in ``generate``'s order, in which they come last but the caller's."""
    ready: list[LogitsProcessor] = []
    if config.forced_bos_token_id is not None:
        ready.append(ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
    if config.forced_eos_token_id is not None:
        ready.append(ForcedEOSTokenLogitsProcessor(total, config.forced_eos_token_id, device=str(device)))
    if config.exponential_decay_length_penalty is not None:
        if not ends:
            raise InputError.of(
                "generation_config.exponential_decay_length_penalty",
                expected="an EOS id to favour",
                got=None,
                remedy="set eos_token_id",
            )
        penalty = config.exponential_decay_length_penalty
        ready.append(ExponentialDecayLengthPenalty(penalty, list(ends), prompt_length))
    if config.suppress_tokens is not None:
        ready.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=str(device)))
    if config.begin_suppress_tokens is not None:
        late = prompt_length <= 1 and config.forced_bos_token_id is not None
        ready.append(
            SuppressTokensAtBeginLogitsProcessor(
                config.begin_suppress_tokens, prompt_length + int(late), device=str(device)
            )
        )
    return ready


def _sampling(config: GenerationConfig, minimum: int, ready: Sequence[LogitsProcessor]) -> SamplingOptions:
    sample, temperature = bool(_value(config, "do_sample")), _value(config, "temperature")
    if sample and temperature == 0:
        raise InputError.of(
            "generation_config.temperature",
            expected="a number > 0 with do_sample=True",
            got=temperature,
            remedy="use do_sample=False for argmax",
        )
    given: Any = config.sequence_bias or {}
    bias: dict[int | tuple[int, ...], float] = (
        given if isinstance(given, dict) else {tuple(ids): value for ids, value in given}
    )
    top_p, min_p = _value(config, "top_p"), config.min_p
    return SamplingOptions(
        temperature=temperature if sample else 0.0,
        top_k=_value(config, "top_k") or None,
        top_p=top_p,
        min_p=0.0 if min_p is None else min_p,
        top_h=config.top_h,
        typical_p=_value(config, "typical_p"),
        epsilon_cutoff=_value(config, "epsilon_cutoff"),
        eta_cutoff=_value(config, "eta_cutoff"),
        repetition_penalty=_value(config, "repetition_penalty"),
        no_repeat_ngram_size=_value(config, "no_repeat_ngram_size"),
        logit_bias=bias,
        bad_words_ids=config.bad_words_ids or (),
        min_new_tokens=minimum,
        processors=ready,
    )
