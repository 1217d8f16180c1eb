"""A key/value cache with one write position a row, compacted in place.

Rows of a batch grow at their own pace. Each pass writes its M new slots of row b at ``lengths[b]``; afterwards `keep`
moves the slots that stay (the accepted path) next to the committed ones, and everything behind is dead: overwritten by
the next pass, and masked until then. Nothing committed is moved or recomputed. Sliding layers keep all slots; the mask
limits what they see, so a roll-back can never meet a wrapped ring buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_GROWTH = 256  # slots; storage grows by half its size, at least by this


class _Slots:
    """Where the current pass writes; shared by all layers."""

    def __init__(self, rows: int) -> None:
        self.lengths = [0] * rows
        self.new = 0  # slots written by the current pass, in every row


class SlotLayer(CacheLayerMixin):
    """Storage [B, heads, capacity, dim] of one layer."""

    is_sliding = False
    is_croppable = False

    def __init__(self, slots: _Slots) -> None:
        super().__init__()
        self._slots = slots
        self.written = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate nothing yet; remember that `_reserve` will."""
        self.is_initialized = True

    def _reserve(self, name: str, states: Tensor, capacity: int) -> Tensor:
        store: Tensor | None = getattr(self, name)
        if store is None or store.shape[2] < capacity:
            size = max(capacity, capacity + _GROWTH if store is None else store.shape[2] * 3 // 2 + _GROWTH)
            # zeros, not empty: a masked slot that holds NaN would still poison 0 * NaN.
            grown = states.new_zeros((states.shape[0], states.shape[1], size, states.shape[3]))
            if store is not None:
                grown[:, :, : store.shape[2]] = store
            setattr(self, name, grown)
            store = grown
        return store

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new slots [B, heads, M, dim] and return views over all slots that some row uses."""
        lengths, new = self._slots.lengths, key_states.shape[2]
        total = max(lengths) + new
        self.is_initialized = True
        self.written = new
        keys = self._reserve("keys", key_states, total)
        values = self._reserve("values", value_states, total)
        if len(set(lengths)) == 1:
            keys[:, :, lengths[0] : total] = key_states
            values[:, :, lengths[0] : total] = value_states
        else:
            for row, length in enumerate(lengths):
                keys[row, :, length : length + new] = key_states[row]
                values[row, :, length : length + new] = value_states[row]
        return keys[:, :, :total], values[:, :, :total]

    def move(self, row: int, sources: Tensor, start: int) -> None:
        """Move slots ``sources`` (ascending) of one row to ``start``, ``start + 1``, ..."""
        assert self.keys is not None and self.values is not None
        for store in (self.keys, self.values):
            store[row, :, start : start + len(sources)] = store[row].index_select(1, sources.to(store.device))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(key length, offset) that transformers' own masks would use."""
        return max(self._slots.lengths) + query_length, 0

    def get_seq_length(self) -> int:
        """Committed slots of the longest row."""
        return max(self._slots.lengths)

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum (the name used before transformers 5.24)."""
        return -1


class SlotCache(Cache):
    """One `SlotLayer` a decoder layer, created as layers first write.

    Attributes:
        lengths: committed slots of each row.
    """

    def __init__(self, rows: int) -> None:
        self._slots = _Slots(rows)
        slots = self._slots

        class _Layer(SlotLayer):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(slots)

        super().__init__(layer_class_to_replicate=_Layer)

    @property
    def lengths(self) -> list[int]:
        """Committed slots of each row (a copy)."""
        return list(self._slots.lengths)

    def keep(self, kept: Sequence[Sequence[int]]) -> None:
        """Commit, for each row, the given slots of the last pass (ascending offsets), dropping the others."""
        for row, offsets in enumerate(kept):
            length = self._slots.lengths[row]
            in_place = next((i for i, o in enumerate(offsets) if i != o), len(offsets))
            if in_place < len(offsets):
                sources = torch.tensor([length + o for o in offsets[in_place:]])
                for layer in self.layers:
                    layer.move(row, sources, length + in_place)
            self._slots.lengths[row] = length + len(offsets)

    def drop(self, row: int) -> None:
        """Forget a finished row, so that it no longer sets the length of the batch."""
        self._slots.lengths[row] = 0

    def truncate(self, row: int, length: int) -> None:
        """Forget all but the first ``length`` committed slots of a row."""
        assert 0 <= length <= self._slots.lengths[row], "cannot truncate to more than what is committed"
        self._slots.lengths[row] = length
