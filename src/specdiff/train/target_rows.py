"""The frozen target's next-token rows under the windows of a batch, for objectives that compare whole rows."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.errors import UnsupportedModelError
from specdiff.models.tables import output_table
from specdiff.objectives.base import TargetRows
from specdiff.objectives.distill_spec import frozen_head_rows
from specdiff.train.windows import WindowBatch

_SCALED = {"final_logit_softcapping": (None,), "logits_scaling": (None, 1, 1.0), "logit_scale": (None, 1, 1.0)}


class TargetPass:
    """One causal pass over each answer; logits are made from its states chunk by chunk, when a row is asked for.

    Args:
        target: a transformers causal LM. draft_vocab: [D] its ids of the draft columns.

    Raises:
        UnsupportedModelError: the target changes its logits after the output head.
    """

    def __init__(self, target: PreTrainedModel, draft_vocab: Tensor) -> None:
        for name, plain in _SCALED.items():
            got = getattr(target.config, name, None)
            if got not in plain:
                raise UnsupportedModelError(
                    f"target: expected logits straight from the output head, got {name} = {got}; choose an objective "
                    "that reads labels only"
                )
        head = target.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise UnsupportedModelError(
                "target: expected an output head without bias, got one with; choose an objective that reads labels only"
            )
        self._decoder = target.get_decoder().eval()
        self._head, self._draft_vocab = output_table(target).detach(), draft_vocab

    @torch.no_grad()
    def __call__(self, batch: WindowBatch) -> TargetRows:
        """Return the rows: number ``(b * A + a) * W + k`` is the target's after the text up to window token k - 1."""
        window = batch.following.shape[2]
        tokens = torch.cat([batch.context, batch.context.new_zeros(len(batch.context), window + 1)], dim=1)
        for offset in range(window + 1):
            fed = batch.last_tokens if offset == 0 else batch.following[..., offset - 1]
            real = batch.reached.any(-1) if offset == 0 else batch.reached[..., offset - 1]
            rows, columns = real.nonzero().T
            tokens[rows, batch.anchors[rows, columns] + offset] = fed[rows, columns]
        hidden = self._decoder(input_ids=tokens.to(self._head.device), use_cache=False).last_hidden_state
        places = (batch.anchors[..., None] + torch.arange(window)).flatten(1).to(hidden.device)
        states = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])).unflatten(1, (-1, window))
        return frozen_head_rows(states.flatten(0, 1), self._head, self._draft_vocab)
