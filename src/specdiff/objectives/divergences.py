r"""Divergences between rows of the target, p, and of the drafter, q, both given as log-probabilities.

.. math::
    \mathrm{TV} = \tfrac12 \sum_v |p - q|, \quad
    \mathrm{KL}(p \,\|\, q) = \sum_v p \log \tfrac{p}{q}, \quad
    \mathrm{KL}(q \,\|\, p) = \sum_v q \log \tfrac{q}{p}, \quad
    \mathrm{JSD} = \tfrac12 \mathrm{KL}(p \,\|\, m) + \tfrac12 \mathrm{KL}(q \,\|\, m), \; m = \tfrac{p + q}{2}

A draft vocabulary may lack tokens of the target's. The rows then hold the target's probabilities of the D draft tokens,
which sum to less than 1; q is 0 at the others. With :math:`r = 1 - \sum_v p` the missing mass, TV has :math:`r / 2`
more and JSD :math:`r \log 2 / 2` more; the forward divergence would be infinite whatever q is, and leaves that
constant out; the reverse has no part there.

A filtered target (top-p, top-k) has zeros, where the reverse divergence is infinite and says nothing about direction:
there log p counts as `LOWEST_LOG_P`. A q of 0 costs the forward divergence an infinity, as it must.

Shape legend: R rows, D draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

Divergence: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From [R, D] log p and [R, D] log q to [R]."""

LOWEST_LOG_P = -20.0
"""The smallest log p that the reverse divergence knows (about 2e-9)."""

_NOTHING = -1e4  # exp of it is 0, and 0 times it is 0, which 0 times -inf is not


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return [R] the probability that a draft drawn from q is rejected by the ratio rule."""
    p, q = log_p.exp(), log_q.exp()
    return 0.5 * ((p - q).abs().sum(dim=-1) + _missing(p))


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return [R] KL(p || q): q covers what p does."""
    p = log_p.exp()
    terms = p * (log_p.clamp_min(_NOTHING) - torch.where(p > 0, log_q, 0.0))
    return terms.sum(dim=-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return [R] KL(q || p): q stays where p is."""
    return (log_q.exp() * (log_q.clamp_min(_NOTHING) - log_p.clamp_min(LOWEST_LOG_P))).sum(dim=-1)


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return [R] the Jensen-Shannon divergence, in nats."""
    p, q = log_p.exp(), log_q.exp()
    log_m = (0.5 * (p + q)).clamp_min(torch.finfo(p.dtype).tiny).log()
    from_p = (p * (log_p.clamp_min(_NOTHING) - log_m)).sum(dim=-1)
    from_q = (q * (log_q.clamp_min(_NOTHING) - log_m)).sum(dim=-1)
    return 0.5 * (from_p + from_q + math.log(2.0) * _missing(p))


DIVERGENCES: Mapping[str, Divergence] = MappingProxyType(
    {"tv": total_variation, "forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jensen_shannon}
)
"""Every divergence by name; read-only."""


def divergence_reference(name: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the divergence of that name by loops, in float64."""
    results: list[Tensor] = []
    for p_row, q_row in zip(log_p.double().exp(), log_q.double().exp(), strict=True):
        total, missing = q_row.new_zeros(()), max(0.0, 1.0 - float(p_row.sum()))
        for p, q in zip(p_row, q_row, strict=True):
            m = (p + q) / 2
            if name == "tv":
                total = total + (p - q).abs() / 2
            if name == "forward_kl" and p > 0:
                total = total + p * (p / q).log()
            if name == "reverse_kl" and q > 0:
                total = total + q * (q / p.clamp_min(math.exp(LOWEST_LOG_P))).log()
            if name == "jsd" and p > 0:
                total = total + p * (p / m).log() / 2
            if name == "jsd" and q > 0:
                total = total + q * (q / m).log() / 2
        total = total + {"tv": missing / 2, "jsd": missing * math.log(2.0) / 2}.get(name, 0.0)
        results.append(total)
    return torch.stack(results)


def _missing(p: Tensor) -> Tensor:
    """Return [R] the target's mass outside the rows."""
    return (1.0 - p.sum(dim=-1)).clamp_min(0.0)
