r"""A draft temperature fitted after training: the one whose best-first tree holds most of the target's text.

With a row's logits :math:`z` and temperature :math:`T`, :math:`\log q_k^{(T)}(v) = z_{k,v} / T - \log \sum_u e^{z_{k,u}
/ T}`. Two things to ask of it, on text the drafter was not trained on:

* **presence**: the mean depth of the text in the tree of B nodes, :math:`\sum_j [S_j^{(T)} \ge \Theta^{(T)}]` (the B-th
  largest product, `specdiff.objectives.tree_threshold`). One temperature for all rows leaves the order of prefixes of
  the same depth alone, since they share their normalisers; what it moves is how depths compare: a hot q spends nodes on
  breadth, a cold one on depth. It is a step function of T, so it is searched on a grid.
* **likelihood**: the mean of :math:`\log q_k^{(T)}(x_k)`, which calibrates; concave in :math:`1 / T`, and what rules
  that use q at temperature 1 want.

Sums over batches add up (`TemperatureScores` + `TemperatureScores`), so no more than a batch's logits are ever needed.

Shape legend: A windows, G rows of a window, D draft vocabulary, N temperatures, B nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from specdiff.checking import integer, real, sequence
from specdiff.errors import InputError
from specdiff.objectives.base import IGNORED
from specdiff.objectives.prefixes import alive, prefix_log_products
from specdiff.objectives.tree_threshold import tree_threshold

GRID = tuple(round(2.0 ** (step / 8), 4) for step in range(-8, 13))
"""Temperatures from 0.5 to 2.83, each 9 % above the one before."""

CRITERIA = ("presence", "likelihood")
"""What a temperature can be chosen for."""

_ROUNDING = 1e-9  # a node's product summed in another order is the same product


@dataclass(frozen=True, kw_only=True)
class TemperatureScores:
    """How each temperature did.

    Attributes:
        temperatures: the N temperatures.
        nodes: B.
        depth: [N] float64 sum over windows of the text's depth in the tree.
        log_likelihood: [N] float64 sum over known labels of log q.
        num_windows: windows with a known label.
        num_labels: known labels.
    """

    temperatures: tuple[float, ...]
    nodes: int
    depth: Tensor
    log_likelihood: Tensor
    num_windows: int
    num_labels: int

    def __add__(self, other: TemperatureScores) -> TemperatureScores:
        """Pool two batches.

        Raises:
            InputError: they were scored at other temperatures or for another tree.
        """
        if (self.temperatures, self.nodes) != (other.temperatures, other.nodes):
            raise InputError.of(
                "other",
                expected=f"temperatures {self.temperatures} and {self.nodes} nodes",
                got=(other.temperatures, other.nodes),
                remedy="score all batches alike",
            )
        return TemperatureScores(
            temperatures=self.temperatures,
            nodes=self.nodes,
            depth=self.depth + other.depth,
            log_likelihood=self.log_likelihood + other.log_likelihood,
            num_windows=self.num_windows + other.num_windows,
            num_labels=self.num_labels + other.num_labels,
        )

    def best(self, criterion: str = "presence") -> float:
        """Return the temperature with the largest sum; of equals, the one nearest to 1 (as a ratio).

        Raises:
            InputError: there is no such criterion, or nothing was scored.
        """
        if criterion not in CRITERIA:
            raise InputError.of(
                "criterion", expected="one of " + ", ".join(CRITERIA), got=criterion, remedy="choose one"
            )
        if not self.num_labels:
            raise InputError.of("labels", expected="a known label", got="none", remedy="fit on text with known labels")
        score = self.depth if criterion == "presence" else self.log_likelihood
        sums = cast("list[float]", score.tolist())  # pyright: ignore[reportUnknownMemberType]
        return max(zip(sums, self.temperatures, strict=True), key=lambda one: (one[0], -max(one[1], 1.0 / one[1])))[1]


@torch.no_grad()
def score_temperatures(
    logits: Tensor, labels: Tensor, *, nodes: int = 24, temperatures: Sequence[float] = GRID
) -> TemperatureScores:
    """Score temperatures on a batch.

    Args:
        logits: [A, G, D] the windows' logits, or log q (the normaliser does not matter).
        labels: [A, G] int64 columns, `IGNORED` where unknown; an unknown label ends the path, as in the objectives.
        nodes: B, of the tree that decoding will draft.
        temperatures: what to try.

    Returns:
        The sums.

    Raises:
        InputError: a shape does not fit, or a value is out of range.
    """
    remedy = "a temperature of about 1 is what training aimed at"
    tried = tuple(
        real("temperatures", x, lambda x: 0 < x < float("inf"), expected="numbers > 0", remedy=remedy)
        for x in sequence("temperatures", temperatures, expected="numbers > 0", remedy=remedy)
    )
    if not tried:
        raise InputError.of("temperatures", expected="at least one", got=temperatures, remedy=remedy)
    integer("nodes", nodes, 1, remedy="give the size of the tree that decoding will draft")
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise InputError.of(
            "logits and labels",
            expected="shapes [A, G, D] and [A, G]",
            got=(tuple(logits.shape), tuple(labels.shape)),
            remedy="give each row its label",
        )
    known = labels != IGNORED
    logits, rows = logits[known.any(dim=-1)], labels[known.any(dim=-1)]
    known = rows != IGNORED
    picked = logits.gather(2, rows.clamp_min(0)[..., None])[..., 0].double()
    top = logits.topk(min(nodes, logits.shape[-1]), dim=-1).values.double()
    depth, log_likelihood = torch.zeros(len(tried), dtype=torch.float64), torch.zeros(len(tried), dtype=torch.float64)
    for number, temperature in enumerate(tried):
        normaliser = torch.logsumexp(logits.float() / temperature, dim=-1).double()
        log_q = picked / temperature - normaliser
        threshold = tree_threshold(top / temperature - normaliser[..., None], nodes)
        inside = (prefix_log_products(log_q, known) >= threshold[:, None] - _ROUNDING) & alive(known)
        depth[number] = inside.sum().double()
        log_likelihood[number] = log_q[known].sum()
    return TemperatureScores(
        temperatures=tried,
        nodes=nodes,
        depth=depth,
        log_likelihood=log_likelihood,
        num_windows=rows.shape[0],
        num_labels=int(known.sum()),
    )


def fit_temperature(
    logits: Tensor,
    labels: Tensor,
    *,
    nodes: int = 24,
    criterion: str = "presence",
    temperatures: Sequence[float] = GRID,
) -> float:
    """Return the best of the temperatures on one batch; see `score_temperatures` and `TemperatureScores.best`."""
    return score_temperatures(logits, labels, nodes=nodes, temperatures=temperatures).best(criterion)
