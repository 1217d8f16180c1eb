"""EAGLE's loss (Li et al., arXiv 2401.15077): predict the next feature, and through the LM head the next token's law.

Shapes: N positions, M of them whose laws are compared, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CLASSIFICATION_WEIGHT = 0.1
"""The paper's w_cls."""


@dataclass(frozen=True)
class EagleLoss:
    """The loss and its parts, scalars.

    Attributes:
        loss: regression + weight x classification, with gradients. regression: smooth L1, mean over positions and H.
        classification: cross-entropy of the head's law to the target's, mean over positions.
        agreement: share of the M positions where both laws have the same argmax.
    """

    loss: Tensor
    regression: Tensor
    classification: Tensor
    agreement: Tensor


def eagle_loss(
    predicted: Tensor,
    features: Tensor,
    head_logits: Tensor,
    target_logits: Tensor,
    *,
    weight: float = CLASSIFICATION_WEIGHT,
) -> EagleLoss:
    """Smooth L1 on features plus soft cross-entropy on laws.

    Args:
        predicted: [N, H] of the head. features: [N, H] of the target; no gradient.
        head_logits: [M, V] of predicted features. target_logits: [M, V] of the target's; no gradient.
        weight: of the classification.
    """
    regression = torch.nn.functional.smooth_l1_loss(_wide(predicted), _wide(features).detach())
    p = torch.softmax(_wide(target_logits).detach(), dim=-1)
    classification = -(p * torch.log_softmax(_wide(head_logits), dim=-1)).sum(-1).mean()
    agreement = (head_logits.argmax(-1) == target_logits.argmax(-1)).float().mean()
    return EagleLoss(regression + weight * classification, regression, classification, agreement)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
