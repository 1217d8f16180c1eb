"""Is the text really the target's? Token-for-token against ``transformers``, ties told from differences.

At temperature 0 in float32 the speculative text must equal ``generate``'s. Where the two first differ, the logits of
that position are recomputed by one plain pass over the common prefix: if the two tokens' logits differ by less than a
stated margin it is a *tie* (rounding chose), otherwise a *difference* (a bug). In bfloat16, rows are rounded
differently in passes of different size, so every committed token is checked instead against the argmax of a fresh pass
over the text (teacher forcing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.bench.compare import first_difference
from specdiff.models.cached_decoder import input_device

TIE_MARGIN = 1e-4
"""Logits closer than this count as equal in float32 (rounding of fp32 passes of different size)."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Comparison of one text.

    Attributes:
        tokens: how many tokens were compared. equal: whether all were equal.
        position: index of the first difference, None if equal. margin: difference of the two tokens' logits there.
    """

    tokens: int
    equal: bool
    position: int | None = None
    margin: float | None = None

    def verdict(self, tie_margin: float = TIE_MARGIN) -> str:
        """``"equal"``, ``"tie"`` or ``"different"``."""
        if self.equal:
            return "equal"
        return "tie" if self.margin is not None and self.margin < tie_margin else "different"


@torch.inference_mode()
def compare_texts(model: PreTrainedModel, prompt: Tensor, ours: Sequence[int], theirs: Sequence[int]) -> Parity:
    """Compare two continuations of one prompt.

    Args:
        model: recomputes the logits of the first difference. prompt: [L] ids.
        ours, theirs: new tokens.
    """
    length = max(len(ours), len(theirs))
    at = first_difference(ours, theirs)
    if at is None:
        return Parity(tokens=length, equal=True)
    if at == min(len(ours), len(theirs)):
        return Parity(tokens=length, equal=False, position=at, margin=None)
    ids = torch.cat([prompt, torch.tensor(list(ours[:at]), dtype=torch.int64)])[None]
    logits = model(ids.to(input_device(model)), logits_to_keep=1).logits[0, -1].float()
    return Parity(tokens=length, equal=False, position=at, margin=abs(float(logits[ours[at]] - logits[theirs[at]])))


@dataclass(frozen=True, kw_only=True)
class Forced:
    """Teacher forcing of one text.

    Attributes:
        tokens: tokens checked. argmax: how many are the argmax of a fresh pass.
        margins: for the others, how far (in logits) they lie below it.
    """

    tokens: int
    argmax: int
    margins: tuple[float, ...]


@torch.inference_mode()
def teacher_force(model: PreTrainedModel, prompt: Tensor, tokens: Sequence[int]) -> Forced:
    """Check every committed token against the argmax of one fresh pass over prompt and text."""
    ids = torch.cat([prompt, torch.tensor(list(tokens), dtype=torch.int64)])[None]
    device = input_device(model)
    logits = model(ids.to(device), logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
    picked = torch.tensor(list(tokens), device=device)
    best, chosen = logits.max(dim=-1).values, logits.gather(1, picked[:, None])[:, 0]
    gaps = (best - chosen).tolist()
    return Forced(tokens=len(tokens), argmax=sum(g == 0 for g in gaps), margins=tuple(g for g in gaps if g > 0))
