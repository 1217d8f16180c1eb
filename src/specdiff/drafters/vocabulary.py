"""Whether target and drafter speak of the same tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from specdiff.errors import PairingError

_SHOWN = 3


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Tokens that stand for structure, not text (BOS, EOS, chat roles): id -> name."""
    return {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def check_same_vocabulary(
    target: PreTrainedTokenizerBase,
    drafter: PreTrainedTokenizerBase,
    *,
    target_size: int,
    drafter_size: int,
) -> int:
    """Refuse a drafter whose token ids mean something else than the target's.

    Sizes are no proof: two tokenizers of one size may map ids differently, and one tokenizer is often padded to
    different sizes (151936 and 152064). So every id that both know must carry the same token, and every token that both
    know the same id. Only control tokens may differ (reserved ones that a later release named): such a guess is wrong
    now and then, never harmful.

    Args:
        target: the target's tokenizer.
        drafter: the drafter's.
        target_size: logits of the target, padding included.
        drafter_size: logits of the drafter, padding included.

    Returns:
        Leading ids that both models have; beyond them, the drafter's q is 0.

    Raises:
        PairingError: tokens and ids do not agree; the first differing ones are named.
    """
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    if ours == theirs:
        return min(target_size, drafter_size)
    control = {*control_tokens(target).values(), *control_tokens(drafter).values()}
    differing = {t: (ours[t], theirs[t]) for t in ours.keys() & theirs.keys() - control if ours[t] != theirs[t]}
    our_tokens, their_tokens = ({i: t for t, i in vocabulary.items()} for vocabulary in (ours, theirs))
    for i in our_tokens.keys() & their_tokens.keys():
        a, b = our_tokens[i], their_tokens[i]
        if a != b and not {a, b} <= control:
            differing |= {a: (i, theirs.get(a)), b: (ours.get(b), i)}
    if differing or not ours.keys() & theirs.keys():
        first = sorted(differing.items(), key=lambda item: min(i for i in item[1] if i is not None))[:_SHOWN]
        shown = "; ".join(f"{token!r} has id {a} in the target and {b} in the drafter" for token, (a, b) in first)
        raise PairingError.of(
            "drafter",
            expected="token ids that mean the same as the target's",
            got=f"{len(differing)} tokens that differ: {shown}" if differing else "no common token",
            remedy="use a drafter of the target's family, or draft across tokenizers (CrossTokenizerDrafter)",
        )
    return min(target_size, drafter_size)
