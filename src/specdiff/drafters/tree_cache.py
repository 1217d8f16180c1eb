"""A causal model's prefix cache that also holds the nodes of the tree that grows on top of it.

Each pass feeds the new nodes only. When the next prefix is known, the nodes it runs through stay in the cache and the
others go, so nothing committed is computed twice.

Shapes: L tokens of a prefix, n nodes of a level, V vocabulary of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.drafters.growing import Level
from specdiff.models.cached_decoder import CachedDecoder, NewRows, forward_parameters
from specdiff.trees.paths import descend

_CHUNK = 512  # rows; bounds the mask and the activations of long prefixes
_EMPTY = NewRows.causal(torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class Nodes:
    """Nodes of one row's tree, in cache order, which is the order they were evaluated in.

    Attributes:
        tokens, parents: of each node. lines: each node's ancestors, root down, and itself.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    lines: tuple[tuple[int, ...], ...] = ()

    def grown(self, level: Level) -> Nodes:
        """These nodes and a further level."""
        lines = list(self.lines)
        for parent, _ in level:
            lines.append((*(lines[parent] if parent >= 0 else ()), len(lines)))
        parents, tokens = zip(*level, strict=True)
        return Nodes((*self.tokens, *tokens), (*self.parents, *parents), tuple(lines))

    def last(self, count: int) -> NewRows:
        """The last ``count`` nodes as new rows over the cached others."""
        cached = len(self.tokens) - count
        visible = torch.zeros(count, len(self.tokens), dtype=torch.bool)
        for i, line in enumerate(self.lines[cached:]):
            visible[i, list(line)] = True
        # a node of depth d has the position (prefix + d - 1); offsets count from behind the cached nodes
        offsets = torch.tensor([len(line) - 1 - cached for line in self.lines])
        return NewRows(torch.tensor(self.tokens[cached:]), offsets[cached:], visible, growing=offsets[:cached])


class TreeCache:
    """Prefix and growing tree of every row of a batch.

    Attributes:
        passes: forward passes so far.
    """

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        self._decoder = CachedDecoder(model, rows)
        self._nodes = [Nodes() for _ in range(rows)]
        self._picks_logits = "logits_to_keep" in forward_parameters(type(model))
        self.passes = 0

    @property
    def lengths(self) -> list[int]:
        """Prefix tokens in the cache of each row."""
        return [length - len(n.tokens) for length, n in zip(self._decoder.cache.lengths, self._nodes, strict=True)]

    def settle(self, row: int, prefix: Tensor) -> Tensor:
        """Keep the nodes that the prefix [L] runs through and forget the others.

        Returns:
            The tokens of the prefix that are not in the cache, never none of them: the last one's logits are wanted.
        """
        length = min(self.lengths[row], prefix.numel() - 1)
        nodes = self._nodes[row]
        passed = descend(nodes.tokens, nodes.parents, prefix[length:-1].tolist())
        self._cut(row, length, passed)
        return prefix[length + len(passed) :]

    def rewind(self, row: int, length: int) -> None:
        """Forget all nodes of a row and its prefix beyond the first ``length`` tokens."""
        self._cut(row, min(self.lengths[row], length), ())

    def extend(self, tokens: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Append tokens to the settled prefixes of some rows; return the logits [V] after each row's last one."""
        tokens = dict(tokens)
        while max(t.numel() for t in tokens.values()) > _CHUNK:
            chunk = {row: t[:-1][:_CHUNK] for row, t in tokens.items()}
            self._append({row: NewRows.causal(t) for row, t in chunk.items()}, keep_logits=torch.tensor([0]))
            tokens = {row: t[chunk[row].numel() :] for row, t in tokens.items()}
        last = sorted({t.numel() - 1 for t in tokens.values()})
        logits = self._append({row: NewRows.causal(t) for row, t in tokens.items()}, keep_logits=torch.tensor(last))
        return {row: logits[row][last.index(t.numel() - 1)] for row, t in tokens.items()}

    def evaluate(self, levels: Mapping[int, Level]) -> dict[int, Tensor]:
        """Add nodes to the trees of some rows in one pass; return each row's logits [n, V]."""
        grown = {row: self._nodes[row].grown(level) for row, level in levels.items()}
        logits = self._append({row: nodes.last(len(levels[row])) for row, nodes in grown.items()})
        for row, nodes in grown.items():
            self._nodes[row] = nodes
        return {row: logits[row][: len(level)] for row, level in levels.items()}

    def _append(self, new: Mapping[int, NewRows], keep_logits: Tensor | None = None) -> dict[int, Tensor]:
        options: dict[str, Any] = {}
        if keep_logits is not None and self._picks_logits:
            options["logits_to_keep"] = keep_logits
        entries = [new.get(row, _EMPTY) for row in range(self._decoder.rows)]
        logits = self._decoder.run(entries, **options).logits
        if keep_logits is not None and not self._picks_logits:
            logits = logits[:, keep_logits]
        self._decoder.keep([range(e.tokens.numel()) for e in entries])
        self.passes += 1
        return {row: logits[self._decoder.place(row)] for row in new}

    def _cut(self, row: int, length: int, nodes: Sequence[int]) -> None:
        """Of what is cached behind the first ``length`` tokens, keep the given nodes."""
        kept: list[Sequence[int]] = [()] * self._decoder.rows
        kept[row] = nodes
        self._decoder.cache.truncate(row, length)
        self._decoder.cache.keep(kept)
        self._nodes[row] = Nodes()
