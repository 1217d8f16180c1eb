"""One primitive for every model with an exact prefix cache: run new rows on top of the committed ones, keep some.

A target pass over a tree, a denoiser's window, an autoregressive drafter's step and chunked prefill are all
`CachedDecoder.run` with a different visibility among the new rows, followed by `CachedDecoder.keep`.

Shapes: B sequences of the batch, M new rows of a pass, T slots (longest committed length + M), H hidden size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdiff.errors import ModelError, SpecdiffError
from specdiff.models.slot_cache import SlotCache
from specdiff.types import TokenTree


@dataclass(frozen=True)
class NewRows:
    """New rows of one sequence.

    Attributes:
        tokens: [n] int64 ids (or any placeholder where embeddings are passed).
        offsets: [n] position of each row relative to the committed length.
        visible: [n, m + n] bool, visible[i, m + j]: row i attends to new row j. Every row also sees all committed slots
            but the last m.
        growing: [m] offsets of the last m committed slots, where they hold nodes of a tree that is still growing; row i
            sees those that the first m columns of ``visible`` say. None by default.
    """

    tokens: Tensor
    offsets: Tensor
    visible: Tensor
    growing: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @classmethod
    def causal(cls, tokens: Tensor) -> NewRows:
        """Rows that continue the sequence in order."""
        n = tokens.numel()
        return cls(tokens, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril_())

    @classmethod
    def tree(cls, root: int, tree: TokenTree) -> NewRows:
        """The last committed token, then the nodes; each node sees the root, its ancestors and itself."""
        n = len(tree) + 1
        rows = [bytearray(n)]  # bytes, not tensors: a node's row is one copy of its parent's
        rows[0][0] = 1
        for node, parent in enumerate(tree.parents):
            row = bytearray(rows[parent + 1])
            row[node + 1] = 1
            rows.append(row)
        visible = torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(n, n)
        tokens = torch.cat([torch.tensor([root]), tree.tokens])
        return cls(tokens, torch.tensor([0, *tree.depths]), visible)


class CachedDecoder:
    """A transformers decoder and the `SlotCache` of one batch.

    Args:
        model: anything that takes ``input_ids`` or ``inputs_embeds``, a 4-D ``attention_mask``, ``position_ids`` and a
            cache.
        rows: batch size.
    """

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        self.model = model
        self.rows = rows
        self.cache = SlotCache(rows)
        self._cache_name = cache_argument(model)
        self._device = input_device(model)
        self._dtype = model.dtype
        self._window, self._mixed = attention_window(model)

    def run(self, new: Sequence[NewRows], inputs_embeds: Tensor | None = None, **kwargs: Any) -> Any:
        """One forward pass over the new rows of every sequence (an empty `NewRows` for rows that sit out).

        Args:
            new: one entry a sequence; shorter ones are padded on the right, those of released sequences are not read.
            inputs_embeds: [B, M, H] embeddings instead of ids, one entry a sequence.
            kwargs: handed to the model (``logits_to_keep``, ``output_hidden_states``).

        Returns:
            The model's own output; row i of sequence b is ``[place(b), i]``, where place(b) = b until a sequence is
            released.

        Raises:
            ModelError: the model raised, out of memory included. Nothing is committed, so the target stays usable.
        """
        order, lengths = self.cache.order, self.cache.lengths
        placed = [(new[row], lengths[row]) for row in order]
        size = max(rows.tokens.numel() for rows, _ in placed)
        positions = torch.zeros(len(placed), size, dtype=torch.int64)
        for place, (rows, length) in enumerate(placed):
            torch.add(rows.offsets, length, out=positions[place, : rows.offsets.numel()])
        inputs: dict[str, Any] = {"position_ids": positions.to(self._device), **kwargs}
        if inputs_embeds is None:
            tokens = torch.zeros(len(placed), size, dtype=torch.int64)
            for place, (rows, _) in enumerate(placed):
                tokens[place, : rows.tokens.numel()] = rows.tokens
            inputs["input_ids"] = tokens.to(self._device)
        else:
            inputs["inputs_embeds"] = inputs_embeds if len(order) == len(new) else inputs_embeds[order]
        inputs["attention_mask"] = self._masks(placed, positions)
        inputs[self._cache_name] = self.cache
        with torch.inference_mode():
            return _guarded(self.model, inputs)

    def keep(self, kept: Sequence[Sequence[int]]) -> None:
        """Commit the given new rows (ascending indices) of every sequence; the others never existed."""
        self.cache.keep(kept)

    def release(self, row: int) -> None:
        """Take a finished sequence out of the batch: later passes do not compute it."""
        self.cache.release(row)

    def place(self, row: int) -> int:
        """Where a sequence that was not released stands in the output of a pass."""
        return self.cache.order.index(row)

    def _masks(self, placed: list[tuple[NewRows, int]], positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive masks [B, 1, M, T] in the model's dtype (eager attention is silently wrong with bool masks)."""
        size = positions.shape[1]
        total = max(length for _, length in placed) + size
        hidden = torch.finfo(self._dtype).min
        full = torch.full((len(placed), 1, size, total), hidden, dtype=self._dtype)
        for place, (rows, length) in enumerate(placed):
            n, mask = rows.tokens.numel(), full[place, 0]
            settled = length - rows.growing.numel()
            mask[:, :settled] = 0
            mask[:n, settled : length + n].masked_fill_(rows.visible, 0)
            if n < size:  # padding rows see themselves, so that no softmax is empty
                mask[n:, length + n : length + size].fill_diagonal_(0)
        if self._window is None:
            return full.to(self._device)
        sliding = self._slide(full, placed, positions, self._window)
        if not self._mixed:
            return sliding.to(self._device)
        return {"full_attention": full.to(self._device), "sliding_attention": sliding.to(self._device)}

    def _slide(self, full: Tensor, placed: list[tuple[NewRows, int]], positions: Tensor, window: int) -> Tensor:
        """The mask ``full`` without what lies ``window`` or more positions back."""
        if int(positions.max()) < window:
            return full
        sliding = full.clone()
        slots = torch.arange(full.shape[-1])
        for place, (rows, length) in enumerate(placed):
            keys = slots.clone()  # a committed slot holds the position of its index, but for a growing tree's nodes
            keys[length - rows.growing.numel() : length] = rows.growing + length
            keys[length : length + positions.shape[1]] = positions[place]
            far = positions[place, :, None] - keys >= window
            sliding[place, 0].masked_fill_(far, torch.finfo(self._dtype).min)
        return sliding


def _guarded(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
    try:
        return model(use_cache=True, **inputs)
    except SpecdiffError:
        raise
    except Exception as error:
        name = model.config.model_type
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise ModelError(
                f"model: {name!r} ran out of memory in a pass over {tuple(inputs['position_ids'].shape)} rows "
                f"({error}); decode fewer requests at once, use a smaller draft, or a smaller dtype"
            ) from error
        raise ModelError(f"model: {name!r} raised {error!r} in its forward pass") from error


def attention_window(model: PreTrainedModel) -> tuple[int | None, bool]:
    """(window of the sliding layers or None, whether other layers attend to everything), as the configuration says."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False or (kinds and "sliding_attention" not in kinds):
        window = None
    return window, window is not None and len(kinds) > 1


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its inputs: the device of its first parameter that is not offloaded."""
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


def cache_argument(model: nn.Module) -> str:
    """Name of the cache argument: ``cache`` from transformers 5.24 on, ``past_key_values`` before."""
    return "cache" if "cache" in forward_parameters(type(model)) else "past_key_values"


@functools.cache
def forward_parameters(kind: type[nn.Module]) -> frozenset[str]:
    """Names of the arguments of a model class's forward."""
    return frozenset(inspect.signature(kind.forward).parameters)
