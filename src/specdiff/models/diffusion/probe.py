"""Copy probe: do the weights agree with the configured mask id and alignment of the logits?

Random tokens are repeated four times and one of them is masked, so that a language model knows the answer. Whichever of
the two rows that might predict it gives it probability tells the alignment. Only MASKED tokens are evidence: at visible
ones a network with tied embeddings echoes its input even with random weights.

Three states: confirmed, contradicted, inconclusive (the weights cannot copy: untrained, or trained on something else).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdiff.errors import PairingError
from specdiff.models.diffusion.config import MaskedDenoiserConfig

_PATTERN, _REPEATS, _SEQUENCES = 8, 4, 8
_KNOWN, _MARGIN, _IGNORANT = 0.5, 0.25, 0.1  # in shares of log V, see `ProbeReport`


class ProbeState(enum.Enum):
    """What the probe found."""

    CONFIRMED = "confirmed"
    CONTRADICTED = "contradicted"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """What the probe measured.

    A share is ``1 + mean log-probability of the right token / log V``: 1 = certain, 0 = chance, below = worse.

    Attributes:
        state: the conclusion. message: why, in words.
        right, wrong: share at the configured row, and at the one that the other alignment would read.
        rivals: share at the configured row with other ids in place of the mask.
        unmasked: share of a continuation read without any mask, for shifted logits; None otherwise.
    """

    state: ProbeState
    message: str
    right: float
    wrong: float
    rivals: tuple[tuple[int, float], ...] = ()
    unmasked: float | None = None


class Probed(Protocol):
    """What the probe needs of a denoiser; see `DiffusionLM`."""

    config: MaskedDenoiserConfig

    def rows(self, sequences: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Logits of the spans."""
        ...


@torch.inference_mode()
def copy_probe(denoiser: Probed, *, rival_mask_ids: Sequence[int] = (), strict: bool = True) -> ProbeReport:
    """Check mask id and alignment against the weights.

    Args:
        denoiser: what is checked.
        rival_mask_ids: ids that the mask might be instead, such as the family's published one.
        strict: raise on a contradiction instead of only reporting it.

    Raises:
        PairingError: ``strict``, and the weights contradict the configuration.
    """
    config = denoiser.config
    sequences = _sequences(config)
    if sequences is None:
        return ProbeReport(
            state=ProbeState.INCONCLUSIVE, message="the vocabulary is too small to probe", right=0.0, wrong=0.0
        )
    # one masked token a sequence, in the third of four repetitions, at every place of the pattern
    places = [2 * _PATTERN + i % _PATTERN for i in range(_SEQUENCES)]
    before, own = _shares(denoiser, sequences, places, config.mask_id)
    right, wrong = (before, own) if config.shift else (own, before)
    rivals = []
    for rival in dict.fromkeys(rival_mask_ids):
        if rival != config.mask_id and 0 <= rival < config.vocab_size:
            shares = _shares(denoiser, sequences, places, rival)
            rivals.append((rival, shares[0] if config.shift else shares[1]))
    unmasked = _unmasked(denoiser, sequences) if config.shift else None
    report = _conclude(config, right, wrong, tuple(rivals), unmasked)
    if strict and report.state is ProbeState.CONTRADICTED:
        raise PairingError(report.message)
    return report


def _sequences(config: MaskedDenoiserConfig) -> list[Tensor] | None:
    special = {config.mask_id, *config.eos_ids}
    ids = torch.tensor([i for i in range(config.vocab_size) if i not in special])
    if len(ids) > 1000:  # the first ids are often bytes and control tokens, the last ones rare or unused
        ids = ids[len(ids) // 8 : len(ids) // 2]
    if len(ids) < _PATTERN:
        return None
    generator = torch.Generator().manual_seed(0)
    return [ids[torch.randperm(len(ids), generator=generator)[:_PATTERN]].repeat(_REPEATS) for _ in range(_SEQUENCES)]


def _shares(denoiser: Probed, sequences: Sequence[Tensor], places: Sequence[int], mask_id: int) -> tuple[float, float]:
    """Share of the hidden token at the row before it and at its own row."""
    shift = int(denoiser.config.shift)
    hidden = [s.index_fill(0, torch.tensor([i]), mask_id) for s, i in zip(sequences, places, strict=True)]
    # rows of the network i - 1 and i are those that predict tokens i - 1 + shift and i + shift
    rows = denoiser.rows(hidden, [(i - 1 + shift, i + 1 + shift) for i in places])
    answers = [int(s[i]) for s, i in zip(sequences, places, strict=True)]
    before, own = (_share([r[k] for r in rows], answers) for k in (0, 1))
    return before, own


def _unmasked(denoiser: Probed, sequences: Sequence[Tensor]) -> float:
    """Share of the token that continues the pattern, with nothing masked (shifted logits only)."""
    end = (_REPEATS - 1) * _PATTERN
    rows = denoiser.rows([s[:end] for s in sequences], [(end, end + 1)] * len(sequences))
    return _share([r[0] for r in rows], [int(s[end]) for s in sequences])


def _share(rows: Sequence[Tensor], answers: Sequence[int]) -> float:
    logs = torch.stack(list(rows)).float().log_softmax(dim=-1)
    mean = float(logs[torch.arange(len(answers)), torch.tensor(answers, device=logs.device)].mean())
    return 1 + mean / math.log(logs.shape[-1])


def _conclude(
    config: MaskedDenoiserConfig,
    right: float,
    wrong: float,
    rivals: tuple[tuple[int, float], ...],
    unmasked: float | None,
) -> ProbeReport:
    state, message = ProbeState.INCONCLUSIVE, "the weights do not copy a repeated pattern, so nothing can be concluded"
    best = max(rivals, key=lambda r: r[1], default=(config.mask_id, -math.inf))
    if wrong >= _KNOWN and wrong - right >= _MARGIN:
        state = ProbeState.CONTRADICTED
        message = (
            f"shift: expected {not config.shift} (the weights put a masked token's prediction on "
            f"{'its own row' if config.shift else 'the row before it'}), got {config.shift}; "
            f"load the model with shift={not config.shift}"
        )
    elif best[1] >= _KNOWN and best[1] - right >= _MARGIN:
        state = ProbeState.CONTRADICTED
        message = (
            f"mask_id: expected {best[0]} (with it the weights recover a masked token), got {config.mask_id}; "
            f"load the model with mask_id={best[0]}"
        )
    elif unmasked is not None and unmasked >= _KNOWN and right < _IGNORANT:
        state = ProbeState.CONTRADICTED
        message = (
            "mask_id: expected the id that the weights were trained to fill in (they continue a pattern, but do not "
            f"fill a masked gap in it), got {config.mask_id}; pass the right mask_id, or weights of a masked denoiser"
        )
    elif right >= _KNOWN and right - wrong >= _MARGIN:
        state, message = ProbeState.CONFIRMED, "the weights fill gaps in a repeated pattern at the configured row"
    return ProbeReport(state=state, message=message, right=right, wrong=wrong, rivals=rivals, unmasked=unmasked)
