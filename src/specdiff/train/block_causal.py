"""Training a block-causal denoiser cut from a target: all windows of an answer share one causal context."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specdiff.drafters.block_causal import BlockCausalSource
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.train.attention import register_window_attention
from specdiff.train.features import Features, no_features
from specdiff.train.packed import packed_window_states
from specdiff.train.windows import WindowBatch


class BlockCausalLearner:
    """A `BlockCausalDenoiser` in training; see `specdiff.train.learner.Learner`.

    Args:
        denoiser: to train; it is given the blockwise attention.
        features: makes the target's states, for denoisers that read them.
    """

    def __init__(self, denoiser: BlockCausalDenoiser, features: Features = no_features) -> None:
        denoiser.decoder.set_attn_implementation(register_window_attention())
        self.module, self.features = denoiser, features
        self.window: int = denoiser.window
        self.vocab_size: int = denoiser.config.vocab_size
        self.draft_vocab: Tensor = denoiser.draft_vocab
        self.head_weight: Tensor = denoiser.head_weight
        self._twin: BlockCausalDenoiser | None = None

    def states(
        self,
        batch: WindowBatch,
        *,
        shown: Tensor | None = None,
        progress: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """See `Learner.states`; draws nothing."""
        return packed_window_states(self.module, batch, features=self.features(batch.context), shown=shown)

    def head(self, states: Tensor) -> Tensor:
        """See `Learner.head`."""
        return self.module.head(states)

    def source(self, weights: Mapping[str, Tensor]) -> BlockCausalSource:
        """A second denoiser with the attention that decoding uses; the one in training is not touched."""
        if self._twin is None:
            # only the rows of the draft vocabulary are ever read of the head
            head = self.module.embedding_weight.new_zeros(self.module.embedding_weight.shape)
            head[self.draft_vocab] = self.head_weight
            self._twin = BlockCausalDenoiser(
                self.module.config,
                target_embedding=self.module.embedding_weight,
                target_head_weight=head,
                draft_vocab=self.draft_vocab,
            ).eval()
        self._twin.load_state_dict(dict(weights))
        return BlockCausalSource(self._twin)

    def export(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """See `Learner.export`: bf16, without the target's table and head."""
        self.module.save_pretrained(directory, dict(weights))

    def checkpoint_activations(self) -> None:
        """See `Learner.checkpoint_activations`."""
        self.module.decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
