"""What a masked denoiser is, in validated fields: mask id, alignment of its logits, attention, block, context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from specdiff.errors import InputError

Attention = Literal["full", "block"]
"""``full``: every token sees every token. ``block``: full inside a block, causal between blocks (block-causal)."""


@dataclass(frozen=True, kw_only=True)
class MaskedDenoiserConfig:
    """The facts a drafter needs about a masked diffusion LM.

    Attributes:
        family: name of the family that the weights come from (see `specdiff.models.diffusion.families`).
        vocab_size: V, rows of the embedding table and columns of the logits, padding included.
        mask_id: id of the [MASK] token; never an EOS id.
        shift: whether row i - 1 of the network predicts token i (models adapted from autoregressive ones), or row i.
        attention: see `Attention`.
        block_size: tokens of a block; blocks start at position 0. 1 exactly where attention is full.
        context: most tokens that one pass may see, None for any.
        eos_ids: ids that end a text; checked against the mask id.
        name: free label, used in records.
    """

    family: str
    vocab_size: int
    mask_id: int
    shift: bool
    attention: Attention = "full"
    block_size: int = 1
    context: int | None = None
    eos_ids: tuple[int, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        _require("vocab_size", self.vocab_size, _is_count(self.vocab_size), "a positive integer", "fix config.json")
        _require(
            "mask_id",
            self.mask_id,
            _is_id(self.mask_id) and self.mask_id < self.vocab_size,
            f"an id in [0, {self.vocab_size}), the rows of the embedding table",
            "pass the mask_id that the weights were trained with",
        )
        _require(
            "mask_id",
            self.mask_id,
            self.mask_id not in self.eos_ids,
            f"an id that is no EOS id {self.eos_ids}",
            "a model that reads EOS as a mask cannot draft; pass the mask_id that the weights were trained with",
        )
        _require("shift", self.shift, isinstance(self.shift, bool), "True or False", "see the model's card")
        _require(
            "attention",
            self.attention,
            self.attention in get_args(Attention),
            "'full' or 'block'",
            "see the model's card",
        )
        fits = self.block_size > 1 if self.attention == "block" else self.block_size == 1
        _require(
            "block_size",
            self.block_size,
            _is_count(self.block_size) and fits,
            "an integer > 1 with attention='block', 1 with attention='full'",
            "see the model's card",
        )
        if self.context is not None:
            least = 2 * self.block_size + 2
            _require(
                "context",
                self.context,
                _is_count(self.context) and self.context >= least,
                f"None or an integer >= {least}",
                "fix config.json",
            )

    @property
    def crop_step(self) -> int | None:
        """By how many tokens a prefix that outgrew the context is cut on the left: half of it, in whole blocks."""
        return None if self.context is None else self.context // 2 // self.block_size * self.block_size

    @property
    def max_window(self) -> int | None:
        """Largest window that always leaves room for a prefix token, None for any."""
        if self.context is None or self.crop_step is None:
            return None
        return self.context - self.crop_step - self.block_size

    def first_shown(self, length: int, window: int) -> int:
        """First token of the prefix that fits into the context together with the window.

        It moves in steps of `crop_step`, so that a cached prefix survives many rounds, and depends on the two lengths
        only, so that a row is cropped alike alone and in a batch.

        Args:
            length: tokens of the prefix.
            window: rows after it.
        """
        if self.context is None or self.crop_step is None or length + window <= self.context:
            return 0
        return -(-(length + window - self.context) // self.crop_step) * self.crop_step


def _require(name: str, value: object, holds: bool, expected: str, remedy: str) -> None:
    if not holds:
        raise InputError.of(name, expected=expected, got=value, remedy=remedy)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count(value: object) -> bool:
    return _is_id(value) and value != 0
