"""Tokenizers that agree pass, padded or not; others are refused by the first tokens that differ."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specdiff.drafters.registry import KINDS, describe
from specdiff.drafters.vocabulary import check_same_vocabulary
from specdiff.errors import PairingError


def tokenizer(words: list[str], *control: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    made.add_special_tokens([AddedToken(t, special=True) for t in control])
    return PreTrainedTokenizerFast(tokenizer_object=made)


WORDS = ["<unk>", "a", "b", "c"]


def test_one_vocabulary_padded_differently_shares_the_smaller_size() -> None:
    assert check_same_vocabulary(tokenizer(WORDS), tokenizer(WORDS), target_size=152064, drafter_size=151936) == 151936


def test_tokens_that_only_one_side_has_are_no_conflict() -> None:
    longer = tokenizer([*WORDS, "d"], "<eos>")
    assert check_same_vocabulary(longer, tokenizer(WORDS), target_size=6, drafter_size=8) == 6


def test_control_tokens_may_have_other_names() -> None:
    old, new = tokenizer(WORDS, "<reserved>"), tokenizer(WORDS, "<end of turn>")
    assert check_same_vocabulary(old, new, target_size=5, drafter_size=5) == 5


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["<unk>", "a", "c", "b"], r"'b' has id 2 in the target and 3 in the drafter"),
        (["<unk>", "a", "b", "x"], r"'c' has id 3 in the target and None in the drafter"),
        (["p", "q", "r", "s"], r"'<unk>' has id 0 in the target and None"),
    ],
)
def test_equal_sizes_with_different_maps_are_refused(words: list[str], named: str) -> None:
    with pytest.raises(PairingError, match=named):
        check_same_vocabulary(tokenizer(WORDS), tokenizer(words), target_size=4, drafter_size=4)


def test_kinds_are_read_only_and_described() -> None:
    assert set(KINDS) == {"none", "ngram", "autoregressive", "eagle", "denoiser", "diffusion"}
    assert all(name in describe() for name in KINDS)
    with pytest.raises(TypeError):
        KINDS["mine"] = KINDS["ngram"]  # type: ignore[index]
