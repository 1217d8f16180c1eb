"""A model's embedding table and output head, as plain tensors."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from transformers import PreTrainedModel

from specdiff.errors import UnsupportedModelError


def embedding_table(model: PreTrainedModel) -> Tensor:
    """The input embedding table [V, H]."""
    return cast(Tensor, model.get_input_embeddings().weight)


def output_table(model: PreTrainedModel) -> Tensor:
    """The output head's weight [V, H].

    Raises:
        UnsupportedModelError: the model has no output head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(
            f"model: {model.config.model_type!r} has no output head; load it as a causal language model"
        )
    return cast(Tensor, head.weight)
