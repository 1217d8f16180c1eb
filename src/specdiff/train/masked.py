r"""Training a masked diffusion LM as a one-step drafter, and turning an autoregressive model into one.

Where attention is full, the prefix sees the window's masks, so two windows of one answer cannot share a context: every
window is a sequence of its own, prefix and masks, cropped and padded by the code that drafts
(`specdiff.models.diffusion.windows.shown`), under the attention of the model's family.

**Conversion** (the recipe of DiffuLLaMA, Gong et al. 2024, and DiffuCoder, 2025). An autoregressive model becomes a
denoiser by training under a mask that opens from causal to full: each pair (row, later token) is visible with a
probability that rises linearly from 0 to 1 over the first `opening` of the training. Its logits keep their shift by
one: row i - 1 predicts token i.

Trained are the layers and the final norm (or LoRA adapters on the layers' linear maps), and the mask's embedding. The
embedding table and the output head stay frozen, tied or not: the objectives' chunked sweeps need a frozen head, and
unseen tokens keep their vectors. The mask itself is never proposed, so its row of a tied head may change.

Shape legend: B batch, A windows, W window rows, H hidden size, D draft vocabulary, S tokens of a padded sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from specdiff.drafters.masked import MaskedSource
from specdiff.errors import InputError
from specdiff.models.diffusion.base import Window
from specdiff.models.diffusion.lora import merged_weights
from specdiff.models.diffusion.model import DiffusionLM
from specdiff.models.diffusion.windows import shown as shown_tokens
from specdiff.models.tables import embedding_table, output_table
from specdiff.train.windows import WindowBatch

_TABLE = "model.embed_tokens.weight"


class MaskedLearner(nn.Module):
    """A `DiffusionLM` in training; see `specdiff.train.learner.Learner`.

    Args:
        lm: to train; a LoRA adapter of `specdiff.models.diffusion.lora.add_lora` may be in it, and is all that is
            trained of the layers then.
        window: W. vocab_size: of the target. opening: share of the training over which the attention opens from causal
            to the family's own; 0 = it is the family's own from the start.

    Raises:
        InputError: the window is wider than the model's context allows, or `opening` is no share.
    """

    def __init__(self, lm: DiffusionLM, *, window: int, vocab_size: int, opening: float = 0.0) -> None:
        super().__init__()
        limit = lm.config.max_window
        if limit is not None and window > limit:
            raise InputError.of(
                "window", expected=f"at most {limit}, by this model's context", got=window, remedy="draft fewer tokens"
            )
        if not 0.0 <= opening <= 1.0:
            raise InputError.of("opening", expected="a share in [0, 1]", got=opening, remedy="try 0.5")
        self.lm, self.opening, self.window = lm, opening, window
        self._as_drafter = MaskedSource(lm, vocab_size=min(vocab_size, lm.config.vocab_size), window=window)
        assert self._as_drafter.vocab is not None  # a masked source always has columns
        self.vocab_size, self.draft_vocab = vocab_size, self._as_drafter.vocab
        backbone = lm.backbone
        table, head = embedding_table(backbone), output_table(backbone)
        table.requires_grad_(False)
        head.requires_grad_(False)
        self.mask_embedding = nn.Parameter(table[lm.config.mask_id].detach().clone())
        self.head_weight = head.detach()[self.draft_vocab.to(head.device)]

    @property
    def module(self) -> nn.Module:
        """Itself."""
        return self

    def states(
        self,
        batch: WindowBatch,
        *,
        shown: Tensor | None = None,
        progress: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """See `Learner.states`; windows behind which there is no text are left at 0."""
        config = self.lm.config
        sequences: list[Tensor] = []
        spans: list[tuple[int, int]] = []
        real = batch.reached.any(-1)
        for b, a in real.nonzero().tolist():
            prefix = torch.cat([batch.context[b, : int(batch.anchors[b, a])], batch.last_tokens[b, a][None]])
            tokens = torch.full((self.window,), config.mask_id, dtype=torch.int64)
            if shown is not None:
                tokens = torch.where(shown[b, a] & batch.reached[b, a], batch.following[b, a], tokens)
            _, prefix, tail = shown_tokens(config, Window(0, prefix, tokens))
            sequences.append(torch.cat([prefix, tail]))
            spans.append((prefix.numel(), prefix.numel() + self.window))
        size = max(s.numel() for s in sequences)
        allowed = self._opened(size, progress, generator)
        rows = self.lm.states(sequences, spans, mask_embedding=self.mask_embedding, allowed=allowed)
        states = rows[0].new_zeros(*real.shape, self.window, rows[0].shape[-1])
        return states.index_put(tuple(real.nonzero().T), torch.stack(rows))

    def _opened(self, size: int, progress: float, generator: torch.Generator | None) -> Tensor | None:
        """[S, S] bool, who may see whom by now; None = everybody whom the family lets."""
        if progress >= self.opening:
            return None
        draws = torch.rand(size, size, generator=generator)
        return torch.ones(size, size, dtype=torch.bool).tril() | (draws < progress / self.opening)

    def head(self, states: Tensor) -> Tensor:
        """See `Learner.head`."""
        return nn.functional.linear(states, self.head_weight)

    @torch.no_grad()
    def source(self, weights: Mapping[str, Tensor]) -> MaskedSource:
        """The model itself, with these weights put into it."""
        for name, parameter in self.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
        table = embedding_table(self.lm.backbone)
        table[self.lm.config.mask_id] = self.mask_embedding
        return self._as_drafter

    def export(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """See `Learner.export`: a plain checkpoint folder in the model's dtype, adapters merged on the CPU in fp32."""
        prefix = "lm.backbone."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        state = merged_weights(self.lm.backbone, own)
        table = state[_TABLE].clone()
        table[self.lm.config.mask_id] = weights["mask_embedding"].to(table)
        state[_TABLE] = table
        self.lm.save_pretrained(directory, state)

    def checkpoint_activations(self) -> None:
        """See `Learner.checkpoint_activations`."""
        self.lm.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
