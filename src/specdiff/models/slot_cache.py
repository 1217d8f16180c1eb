"""A key/value cache with one write position a row, compacted in place.

Rows of a batch grow at their own pace. Each pass writes its M new slots of row b at ``lengths[b]``; afterwards `keep`
moves the slots that stay (the accepted path) next to the committed ones, and everything behind is dead: overwritten by
the next pass, and masked until then. Nothing committed is moved or recomputed. Sliding layers keep all slots; the mask
limits what they see, so a roll-back can never meet a wrapped ring buffer.

Storage is [places, slots, heads, dim], so that any set of slots of any rows is one index into [places * slots].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specdiff.errors import UnsupportedModelError

_GROWTH = 256  # slots; storage grows by half its size, at least by this


class _Slots:
    """Which rows a pass holds, and where it writes; shared by all layers.

    Attributes:
        lengths: committed slots of each row. order: the row in each place of the batch; released rows have none.
    """

    def __init__(self, rows: int) -> None:
        self.lengths = [0] * rows
        self.order = list(range(rows))
        self._written: dict[tuple[int, int, torch.device], Tensor] = {}

    @property
    def longest(self) -> int:
        """Committed slots of the longest row in the batch."""
        return max((self.lengths[row] for row in self.order), default=0)

    def even(self) -> bool:
        """Whether all rows of the batch write at the same slot."""
        return len({self.lengths[row] for row in self.order}) == 1

    def written(self, new: int, capacity: int, device: torch.device) -> Tensor:
        """[places * new] flat indices of the slots that this pass writes; computed once for all layers."""
        key = (new, capacity, device)
        if key not in self._written:
            starts = torch.tensor([[place * capacity + self.lengths[row]] for place, row in enumerate(self.order)])
            self._written[key] = (starts + torch.arange(new)).flatten().to(device)
        return self._written[key]

    def moved(self) -> None:
        """Lengths or places have changed."""
        self._written.clear()


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer.

    Attributes:
        key_slots, value_slots: [places, capacity, heads, dim] storage, None before the first pass. The ``keys`` and
            ``values`` of transformers' layers stay None, so that a model which reads them fails its self-check.
        written: slots that the last pass wrote in each row, 0 where the layer took no part in it.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, slots: _Slots) -> None:
        super().__init__()
        self._slots = slots
        self.key_slots: Tensor | None = None
        self.value_slots: Tensor | None = None
        self.written = 0

    def __deepcopy__(self, memo: object) -> SlotLayer:
        raise UnsupportedModelError("its forward pass copies cache layers, which a roll-back cannot follow")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate nothing yet; `update` reserves what it needs."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new slots [B, heads, M, dim]; return views [B, heads, slots, dim] over all that some row uses."""
        self.is_initialized = True
        self.written = key_states.shape[2]
        self.key_slots, keys = self._write(self.key_slots, key_states)
        self.value_slots, values = self._write(self.value_slots, value_states)
        return keys, values

    def _write(self, store: Tensor | None, states: Tensor) -> tuple[Tensor, Tensor]:
        places, _, new, _ = states.shape
        start = self._slots.longest
        total = start + new
        slots = _grown(store, states, total) if store is None or store.shape[1] < total else store
        if self._slots.even():
            slots[:places, start:total] = states.transpose(1, 2)
        else:
            index = self._slots.written(new, slots.shape[1], slots.device)
            slots.flatten(0, 1).index_copy_(0, index, states.transpose(1, 2).flatten(0, 1))
        return slots, slots[:places, :total].transpose(1, 2)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Move slots within rows; both [n] are flat indices into [places * capacity]."""
        for store in (self.key_slots, self.value_slots):
            if store is not None:
                flat = store.flatten(0, 1)
                flat.index_copy_(0, targets.to(store.device), flat.index_select(0, sources.to(store.device)))

    def copy_place(self, source: int, target: int) -> None:
        """Copy all slots of one place over another's, the dead ones too: they may hold what would poison a row."""
        for store in (self.key_slots, self.value_slots):
            if store is not None:
                store[target] = store[source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(key length, offset) that transformers' own masks would use."""
        return self._slots.longest + query_length, 0

    def get_seq_length(self) -> int:
        """Committed slots of the longest row."""
        return self._slots.longest

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum (the name used before transformers 5.24)."""
        return -1


def _grown(store: Tensor | None, states: Tensor, total: int) -> Tensor:
    """Storage for at least ``total`` slots of the places that are still in use, holding what ``store`` holds."""
    places, heads, _, dim = states.shape
    size = total + _GROWTH if store is None else max(total, store.shape[1] * 3 // 2 + _GROWTH)
    # zeros, not empty: a masked slot that holds NaN would still poison 0 * NaN.
    grown = states.new_zeros((places, size, heads, dim))
    if store is not None:
        grown[:, : store.shape[1]] = store[:places]
    return grown


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

    @property
    def slot_layers(self) -> list[SlotLayer]:
        """The layers that hold slots; a layer that reads another one's keys has none of its own."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer) and layer.key_slots is not None]

    @property
    def order(self) -> list[int]:
        """The row in each place of the batch (a copy): 0, 1, ... until a row is released."""
        return list(self._slots.order)

    @torch.inference_mode()
    def keep(self, kept: Sequence[Sequence[int]]) -> None:
        """Commit, for each row, the given slots of the last pass (ascending offsets), dropping the others."""
        sources: list[tuple[int, int]] = []
        targets: list[tuple[int, int]] = []
        for place, row in enumerate(self._slots.order):
            length = self._slots.lengths[row]
            for slot, offset in enumerate(kept[row]):
                if slot != offset:
                    sources.append((place, length + offset))
                    targets.append((place, length + slot))
        if sources:
            self._move(sources, targets)
        for row in self._slots.order:
            self._slots.lengths[row] += len(kept[row])
        self._slots.moved()

    def _move(self, sources: list[tuple[int, int]], targets: list[tuple[int, int]]) -> None:
        indices: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        for layer in self.slot_layers:
            assert layer.key_slots is not None
            key = (layer.key_slots.shape[1], layer.key_slots.device)
            if key not in indices:
                flat = [torch.tensor([p * key[0] + s for p, s in pairs]).to(key[1]) for pairs in (sources, targets)]
                indices[key] = (flat[0], flat[1])
            layer.move(*indices[key])

    def drop(self, row: int) -> None:
        """Forget the contents of a row; it stays in the batch, empty."""
        self._slots.lengths[row] = 0
        self._slots.moved()

    @torch.inference_mode()
    def release(self, row: int) -> None:
        """Take a finished row out of the batch for good: passes no longer compute it, the last row takes its place."""
        place, last = self._slots.order.index(row), len(self._slots.order) - 1
        if place != last:
            for layer in self.slot_layers:
                layer.copy_place(last, place)
            self._slots.order[place] = self._slots.order[last]
        self._slots.order.pop()
        self.drop(row)

    def truncate(self, row: int, length: int) -> None:
        """Forget all but the first ``length`` committed slots of a row."""
        assert 0 <= length <= self._slots.lengths[row], "cannot truncate to more than what is committed"
        self._slots.lengths[row] = length
        self._slots.moved()

    def committed(self, row: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, length, dim] of what is committed in one row of one layer (views)."""
        place, length = self._slots.order.index(row), self._slots.lengths[row]
        slots = self.layers[layer]
        assert isinstance(slots, SlotLayer)
        keys, values = slots.key_slots, slots.value_slots
        assert keys is not None, "nothing was run yet"
        assert values is not None
        return keys[place, :length].transpose(0, 1), values[place, :length].transpose(0, 1)
