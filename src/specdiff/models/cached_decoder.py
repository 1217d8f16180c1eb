"""One primitive for every model with an exact prefix cache: run new rows on top of the committed ones, keep some.

A target pass over a tree, a denoiser's window, an autoregressive drafter's step and chunked prefill are all
`CachedDecoder.run` with a different visibility among the new rows, followed by `CachedDecoder.keep`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdiff.errors import UnsupportedModelError
from specdiff.models.slot_cache import SlotCache
from specdiff.types import TokenTree

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class NewRows:
    """New rows of one sequence.

    Attributes:
        tokens: [n] int64 ids (or any placeholder where embeddings are passed).
        offsets: [n] position of each row relative to the committed length.
        visible: [n, n] bool, visible[i, j]: row i attends to new row j. Every row also sees all committed slots.
    """

    tokens: Tensor
    offsets: Tensor
    visible: Tensor

    @classmethod
    def causal(cls, tokens: Tensor) -> NewRows:
        """Rows that continue the sequence in order."""
        n = tokens.numel()
        return cls(tokens, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril())

    @classmethod
    def tree(cls, root: int, tree: TokenTree) -> NewRows:
        """The last committed token, then the nodes; each node sees the root, its ancestors and itself."""
        n = len(tree) + 1
        visible = torch.zeros(n, n, dtype=torch.bool)
        visible[0, 0] = True
        for node, parent in enumerate(tree.parents):
            visible[node + 1] = visible[parent + 1]
            visible[node + 1, node + 1] = True
        tokens = torch.cat([torch.tensor([root]), tree.tokens])
        return cls(tokens, torch.tensor([0, *tree.depths]), visible)


class CachedDecoder:
    """A transformers decoder and the `SlotCache` of one batch.

    Args:
        model: anything that takes ``inputs_embeds``/``input_ids``, a 4-D ``attention_mask``, ``position_ids`` and a cache.
        rows: batch size.
    """

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        self.model = model
        self.rows = rows
        self.cache = SlotCache(rows)
        self._cache_name = cache_argument(model)
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            window = None
        self._window: int | None = window if (not kinds or "sliding_attention" in kinds) else None
        self._mixed = self._window is not None and len(kinds) > 1

    def run(self, new: Sequence[NewRows], inputs_embeds: Tensor | None = None, **kwargs: Any) -> Any:
        """One forward pass over the new rows of every sequence (an empty `NewRows` for rows that sit out).

        Args:
            new: one entry a batch row; shorter ones are padded on the right.
            inputs_embeds: [B, M, H] embeddings instead of ids.
            kwargs: handed to the model (``logits_to_keep``, ``output_hidden_states``).

        Returns:
            The model's own output; row i of sequence b is ``[b, i]``.
        """
        device = self.model.get_input_embeddings().weight.device
        size = max(n.tokens.numel() for n in new)
        lengths = self.cache.lengths
        tokens = torch.zeros(len(new), size, dtype=torch.int64)
        positions = torch.zeros(len(new), size, dtype=torch.int64)
        for b, rows in enumerate(new):
            n = rows.tokens.numel()
            tokens[b, :n] = rows.tokens
            positions[b, :n] = rows.offsets + lengths[b]
        inputs: dict[str, Any] = {"position_ids": positions.to(device), **kwargs}
        if inputs_embeds is None:
            inputs["input_ids"] = tokens.to(device)
        else:
            inputs["inputs_embeds"] = inputs_embeds
        inputs["attention_mask"] = self._masks(new, positions, size, lengths, device)
        inputs[self._cache_name] = self.cache
        with torch.inference_mode():
            return self.model(use_cache=True, **inputs)

    def keep(self, kept: Sequence[Sequence[int]]) -> None:
        """Commit the given new rows (ascending indices) of every sequence; the others never existed."""
        self.cache.keep(kept)

    def _masks(
        self, new: Sequence[NewRows], positions: Tensor, size: int, lengths: list[int], device: torch.device
    ) -> Tensor | dict[str, Tensor]:
        """Additive masks [B, 1, M, max length + M] in the model's dtype (eager attention is wrong with bool masks)."""
        total = max(lengths) + size
        visible = torch.zeros(len(new), size, total, dtype=torch.bool)
        key_positions = torch.full((len(new), total), -1, dtype=torch.int64)
        for b, rows in enumerate(new):
            n, length = rows.tokens.numel(), lengths[b]
            visible[b, :, :length] = True
            visible[b, :n, length : length + n] = rows.visible
            # padding rows see themselves, so that no softmax is empty
            visible[b, range(n, size), range(length + n, length + size)] = True
            key_positions[b, :length] = torch.arange(length)
            key_positions[b, length : length + size] = positions[b]
        dtype = self.model.dtype
        full = _additive(visible, dtype, device)
        if self._window is None:
            return full
        near = positions[:, :, None] - key_positions[:, None, :] < self._window
        sliding = _additive(visible & near, dtype, device)
        return {"full_attention": full, "sliding_attention": sliding} if self._mixed else sliding


def _additive(visible: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
    return mask[:, None].to(device)


def cache_argument(model: nn.Module) -> str:
    """Name of the cache argument: ``cache`` from transformers 5.24 on, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def check_can_roll_back(model: PreTrainedModel) -> None:
    """Refuse models whose state cannot be cut back to an accepted path.

    Raises:
        UnsupportedModelError: recurrent or hybrid state, chunked attention, no cache, or no explicit positions.
    """
    config = model.config.get_text_config()
    name = config.model_type
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if kinds or getattr(model, "_is_stateful", False):
        what = ", ".join(sorted(kinds)) or "recurrent state"
        raise UnsupportedModelError(
            f"target: model type {name!r} has layers of kind {what}, whose state cannot be rolled back to the accepted "
            "tokens; use a model whose layers are all full or sliding attention"
        )
    parameters = inspect.signature(model.forward).parameters
    if cache_argument(model) not in parameters or "position_ids" not in parameters:
        raise UnsupportedModelError(
            f"target: model type {name!r} takes no {'position_ids' if cache_argument(model) in parameters else 'cache'}, "
            "so a token tree cannot be scored on top of its prefix; use a decoder with a key/value cache and explicit positions"
        )
