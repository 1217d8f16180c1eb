"""The target's hidden states of a training context, as decoding hands them to the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

Features = Callable[[Tensor], Tensor | None]
"""From a context [B, T] int64, padded on the right, to its features [B, T, F * H]; None for drafters without."""


def no_features(context: Tensor) -> None:
    """Stand in for denoisers that read no target states."""


class TargetFeatures:
    """One causal pass of the frozen target over the context; see `specdiff.models.target.CausalTargetSession`.

    Attributes:
        layers: target layers whose output is read (the last one's after the final norm).
    """

    def __init__(self, target: PreTrainedModel, layers: Sequence[int]) -> None:
        """Keep the target's decoder.

        Args:
            target: a transformers causal LM.
            layers: indices of decoder layers.
        """
        self._decoder = target.get_decoder().eval()
        self.layers = tuple(layers)

    @torch.no_grad()
    def __call__(self, context: Tensor) -> Tensor:
        """Return [B, T, F * H] states; those of padding mean nothing, and no window sees them.

        Args:
            context: [B, T] int64 token ids, padded on the right.

        Returns:
            The layers' states side by side, in the target's dtype.
        """
        output = self._decoder(input_ids=context, output_hidden_states=True, use_cache=False)
        return torch.cat([output.hidden_states[i + 1] for i in self.layers], dim=-1)
