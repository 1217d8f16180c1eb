"""Which models can be scored over token trees on a prefix cache, and why others cannot.

First what a model says of itself (`check_can_roll_back`, free), then whether it does what it says (`self_check`, about
seven passes over a dozen tokens): models that ignore a 4-D mask or hide state outside the cache show only there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.errors import ModelError, NumericsError, UnsupportedModelError
from specdiff.models.cached_decoder import CachedDecoder, NewRows, cache_argument, forward_parameters, input_device
from specdiff.types import TokenTree

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_KNOWN_ATTENTION = {"sdpa", "eager"}
_GROWING_ROPE = {"dynamic", "longrope"}
# Largest deviation of a tree pass from sequential passes, in standard deviations of the logits: rounding stays below,
# a mask that is ignored far above.
_LIMITS = {torch.float32: 3e-3, torch.float64: 1e-6}
_HALF_LIMIT = 0.05  # also for products rounded to TF32
# Some models round worse than that on some machines. Then it is three times what a text's own rows move when it is fed
# in pieces, but never as much as what a mask or positions that are ignored bring (0.5 and more).
_ROUNDING_FACTOR, _ROUNDING_LIMIT = 3.0, 0.4


def check_can_roll_back(model: PreTrainedModel) -> None:
    """Refuse models that say of themselves that a token tree cannot be scored or rolled back.

    Raises:
        UnsupportedModelError: recurrent or hybrid state, chunked attention, encoder-decoder, not causal, ALiBi, an
            attention kernel without 4-D masks, no cache, or no explicit positions; the message says which.
    """
    reason = next(_reasons(model), None)
    if reason is not None:
        raise UnsupportedModelError(f"model: {model.config.model_type!r} {reason}")


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    config = model.config.get_text_config()
    attention_only = "use a model whose layers are all full or sliding attention"
    if model.config.is_encoder_decoder or config.is_encoder_decoder:
        yield "is an encoder-decoder, but the text to continue is one sequence; use a decoder-only model"
    if any(getattr(module, "_is_stateful", False) for module in model.modules()):
        yield f"carries recurrent state that cannot be rolled back to the accepted tokens; {attention_only}"
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if kinds:
        yield f"has layers of kind {', '.join(sorted(kinds))}, whose state cannot be rolled back; {attention_only}"
    if getattr(config, "attention_chunk_size", None) is not None:
        yield f"attends in chunks, whose state cannot be rolled back; {attention_only}"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        yield f"cuts its local attention by cache slot, not by position, which a tree breaks; {attention_only}"
    if not isinstance(getattr(config, "sliding_window", None), int | None):
        yield f"has sliding windows of several sizes ({config.sliding_window}); {attention_only}"
    both_ways = getattr(config, "use_bidirectional_attention", None)  # "vision": image tokens only
    if getattr(config, "is_causal", True) is False or both_ways in (True, "all"):
        yield "attends in both directions, so it is no autoregressive target; use a causal language model"
    if getattr(config, "alibi", False):
        yield "derives positions from cache slots (ALiBi), which are wrong inside a tree; use a model with position_ids"
    names = forward_parameters(type(model))
    if cache_argument(model) not in names:
        yield "takes no key/value cache, so a tree cannot be scored on top of its prefix; use a decoder that has one"
    if "position_ids" not in names:
        yield "takes no position_ids, so a tree cannot be scored on top of its prefix; use a model with position_ids"
    attention = config._attn_implementation
    if attention not in _KNOWN_ATTENTION:
        yield (
            f"was loaded with attn_implementation={attention!r}, which takes no 4-D mask, so siblings of a tree would "
            "see each other; load it with attn_implementation='sdpa' or 'eager'"
        )


def usable_context(model: PreTrainedModel) -> int | None:
    """Tokens that a model can hold, None for any.

    Rotary frequencies that grow with the pass (dynamic NTK, LongRoPE) would make the law depend on how many tokens a
    pass looks ahead, so such models are used up to the length where the frequencies first change.
    """
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    limits = [int(context)] if context else []
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") in _GROWING_ROPE:
            original = parameters.get("original_max_position_embeddings") or context
            limits += [int(original)] if original else []
    return min(limits, default=None)


@torch.inference_mode()
def self_check(model: PreTrainedModel) -> float:
    """Compare tree passes on a ragged batch, with a commit between them, to plain passes over every path.

    Costs about seven passes over at most a dozen tokens; in half precision, where rounding shows, a dozen more.

    Returns:
        The largest deviation, in standard deviations of the logits.

    Raises:
        UnsupportedModelError: the passes disagree, or the model cannot make them.
        NumericsError: the logits are not finite.
    """
    name = model.config.model_type
    try:
        deviations = list(_deviations(model))
    except ModelError as error:
        raise UnsupportedModelError(f"model: {name!r} cannot score a token tree: {error}") from error
    worst = max(deviations)
    if worst != worst:
        raise NumericsError(f"model: {name!r} gives logits that are NaN; check the checkpoint, or use a wider dtype")
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32" or input_device(model).type != "cuda"
    limit = _LIMITS.get(model.dtype, _HALF_LIMIT) if exact else _HALF_LIMIT
    if worst > limit == _HALF_LIMIT:
        limit = min(max(limit, _ROUNDING_FACTOR * _rounding(model)), _ROUNDING_LIMIT)
    if worst > limit:
        raise UnsupportedModelError(
            f"model: {name!r} scores a token tree differently from its paths one by one (by {worst:.2g} standard "
            f"deviations of the logits, allowed {limit:.2g}): it ignores 4-D masks or positions, or keeps state "
            "outside its cache; use attn_implementation='eager', or another model"
        )
    return worst


_KEPT = (1, 3)


def _probes(vocab: int) -> tuple[list[Tensor], int, TokenTree, TokenTree]:
    """Two prompts, the token before the tree, a tree of two branches of two nodes, and one for the round after."""
    prompts = [torch.arange(start, start + 37 * n, 37) % vocab for start, n in ((11, 6), (5, 3))]
    fork = TokenTree(torch.arange(3, 3 + 4 * 29, 29) % vocab, (-1, -1, 0, 1))
    return prompts, 7 % vocab, fork, TokenTree(torch.tensor([17 % vocab]), (-1,))


def _paths(root: int, fork: TokenTree, twig: TokenTree) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The tree's branches, and the tokens that follow a prompt on each."""
    head = torch.tensor([root])
    yield (0, 2), torch.cat([head, fork.tokens[[0, 2]]])
    yield _KEPT, torch.cat([head, fork.tokens[list(_KEPT)], head, twig.tokens])


def _rounding(model: PreTrainedModel) -> float:
    """How far rows of a plain pass move, in standard deviations of the logits, when less of the text follows them."""
    prompts, root, fork, twig = _probes(model.config.get_text_config().vocab_size)
    found: list[float] = []
    for prompt in prompts:
        for _, tail in _paths(root, fork, twig):
            ids = torch.cat([prompt, tail])
            whole = _plain(model, ids)
            found += [_deviation(_plain(model, ids[:end])[-1:], whole[end - 1 : end]) for end in range(1, len(ids))]
    return max(found)


def _deviations(model: PreTrainedModel) -> Iterator[float]:
    config = model.config.get_text_config()
    prompts, root, fork, twig = _probes(config.vocab_size)
    decoder = CachedDecoder(model, len(prompts))
    decoder.run([NewRows.causal(p) for p in prompts])
    decoder.keep([range(len(p)) for p in prompts])
    tree = decoder.run([NewRows.tree(root, fork)] * 2).logits
    decoder.keep([[0, *(n + 1 for n in _KEPT)]] * 2)
    written = {layer.written for layer in decoder.cache.slot_layers}
    if written != {len(fork) + 1}:
        raise ModelError(f"its layers wrote {sorted(written)} cache slots for {len(fork) + 1} tokens")
    if len(decoder.cache.layers) > config.num_hidden_layers:
        raise ModelError(f"it keeps {len(decoder.cache.layers)} cache layers for {config.num_hidden_layers} layers")
    after = decoder.run([NewRows.tree(root, twig)] * 2).logits
    for row, prompt in enumerate(prompts):
        for path, tail in _paths(root, fork, twig):
            got = tree[row, [0, *(n + 1 for n in path)]]
            if path == _KEPT:
                got = torch.cat([got, after[row]])
            expected = _plain(model, torch.cat([prompt, tail]))[-len(got) :]
            yield _deviation(got, expected)


def _plain(model: PreTrainedModel, ids: Tensor) -> Tensor:
    try:
        return model(input_ids=ids[None].to(input_device(model)), use_cache=False).logits[0]
    except Exception as error:
        raise ModelError(f"it raised {error!r} in a plain pass") from error


def _deviation(got: Tensor, expected: Tensor) -> float:
    got, expected = got.float(), expected.float()
    scale = expected.std(dim=-1).clamp_min(1e-6)
    return float(((got - expected).pow(2).mean(dim=-1).sqrt() / scale).max())
