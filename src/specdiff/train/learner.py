"""What the training loop needs of a drafter in training, whatever kind it is.

Shape legend: B batch, A windows, W window rows, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from specdiff.drafters.marginal import MarginalSource
from specdiff.train.windows import WindowBatch


class Learner(Protocol):
    """A drafter in training.

    Attributes:
        module: holds the weights that are trained; those that stay frozen ask for no gradient.
        window: W, tokens drafted in one pass.
        vocab_size: of the ids that labels are made from.
        draft_vocab: [D] int64 sorted ids that it may propose.
        head_weight: [D, H] frozen output head.
    """

    module: nn.Module
    window: int
    vocab_size: int
    draft_vocab: Tensor
    head_weight: Tensor

    def states(
        self,
        batch: WindowBatch,
        *,
        shown: Tensor | None = None,
        progress: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """One pass: [B, A, W, H] states after the final norm; row j predicts token j + 1 after the anchor.

        Args:
            batch: contexts and windows.
            shown: [B, A, W] bool, the window tokens that are fed instead of a mask; None = none.
            progress: share of the training that is done, 0 to 1, for kinds that change on the way.
            generator: of what this pass draws; None only where nothing is drawn.
        """
        ...

    def head(self, states: Tensor) -> Tensor:
        """Logits [..., D] of states."""
        ...

    def source(self, weights: Mapping[str, Tensor]) -> MarginalSource:
        """The drafter as decoding runs it, with these weights (by the module's names); valid until the next step."""
        ...

    def export(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a drafter that `specdiff.load` reads, with these weights (by the module's names)."""
        ...

    def checkpoint_activations(self) -> None:
        """Keep only the layers' inputs for the backward pass, and make the rest again: less memory, a third slower."""
        ...
