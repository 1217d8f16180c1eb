r"""A smooth count of the target's tokens that the best-first tree of B nodes holds.

Walking the tree accepts the target's text as deep as its prefixes are nodes. With :math:`S_j = \sum_{k \le j} \log
q_k(x_k)` and :math:`T` the B-th largest log product of all prefixes (`specdiff.objectives.tree_threshold`), it is

.. math::
    \mathrm{depth} = \sum_{j=1}^{\gamma} [S_j \ge T],

since :math:`S_j` falls with :math:`j`. Two smooth forms of it, at a distance measured in units of :math:`\tau` nats:

.. math::
    L_\mathrm{sigmoid} = -\sum_j \sigma\Big(\frac{S_j - T}{\tau}\Big), \qquad
    L_\mathrm{softplus} = \tau \sum_j \log\Big(1 + e^{(T - S_j)/\tau}\Big).

As :math:`\tau \to 0` the first tends to minus the depth, the second to the sum of how far each missing prefix is from
entering. The second bounds the number of missing prefixes: :math:`\sum_j [S_j < T] \le L_\mathrm{softplus} / (\tau
\log 2)`. Either way the gradient is a weighted cross-entropy with

.. math::
    w_k = \sum_{m \ge k} \sigma'\Big(\frac{S_m - T}{\tau}\Big) \Big/ \tau \quad \text{or} \quad
    w_k = \sum_{m \ge k} \sigma\Big(\frac{T - S_m}{\tau}\Big):

a prefix that is safely in the tree asks for no more mass, which is what streak cannot say. The sigmoid also gives up on
those far outside; the softplus works on them as cross-entropy does. Both are scale-free: for a uniform q over D tokens
the first prefix sits at the threshold, so training does not start flat, as streak's does.

The threshold moves with q, too. Held fixed (``moving=False``, the default), raising a label's probability is all that
helps. With ``moving=True`` the gradient also lowers the B-th node's product: what path and node share cancels, and only
the difference is learnt. A product is then right or wrong relative to the node alone, and nothing fixes the scale of
the logits; give it some calibration.

The calibration term is :math:`\lambda / \gamma \sum_k -\log q_k(x_k)`, as in `specdiff.objectives.calibrated_streak`.
An unknown label ends the streak: q is 0 from there on, those prefixes are in no tree, and they add nothing to either
form (softplus would count a constant infinity); their rows still take part in the threshold, as they do in drafting.

Shape legend: A windows, G rows of a window, K top tokens of a row, B nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

from specdiff.checking import flag, integer, real
from specdiff.errors import InputError
from specdiff.objectives.path import PathObjective, PathScores
from specdiff.objectives.prefixes import alive, mean_nll, prefix_log_products, reference_rows
from specdiff.objectives.tree_threshold import tree_threshold

FORMS = ("sigmoid", "softplus")
"""The smooth forms there are."""


def tree_presence(
    log_q: Tensor, known: Tensor, threshold: Tensor, *, width: float = 1.0, form: str = "sigmoid"
) -> Tensor:
    """Return the presence loss of each window, given what it takes to be a node.

    Args:
        log_q: [A, G] log q of the path's tokens.
        known: [A, G] bool, whether the label is known.
        threshold: [A] log product of the last node; -inf where every possible prefix is a node. Detach it to hold it
            fixed.
        width: tau, in nats.
        form: one of `FORMS`.

    Returns:
        [A]; of the sigmoid in [-G, 0], of the softplus not negative.
    """
    floor = torch.finfo(threshold.dtype).min / 4  # -inf less -inf is nothing
    margins = (prefix_log_products(log_q, known) - threshold.clamp_min(floor)[:, None]) / width
    if form == "sigmoid":
        return -torch.where(alive(known), margins.sigmoid(), 0.0).sum(dim=-1)
    return -width * functional.logsigmoid(torch.where(alive(known), margins, float("inf"))).sum(dim=-1)


def tree_presence_reference(
    log_q: Tensor, known: Tensor, threshold: Tensor, *, width: float = 1.0, form: str = "sigmoid"
) -> Tensor:
    """Return the same by loops, in float64."""
    losses: list[Tensor] = []
    for (row, row_known), level in zip(reference_rows(log_q, known), threshold.double(), strict=True):
        loss, product = row.new_zeros(()), row.new_zeros(())
        for k in range(row.numel()):
            if not row_known[k]:
                break
            product = product + row[k]
            if form == "sigmoid":
                loss = loss - 1.0 / (1.0 + ((level - product) / width).exp())
            else:
                loss = loss + width * (1.0 + ((level - product) / width).exp()).log()
        losses.append(loss)
    return torch.stack(losses)


@final
@dataclass(frozen=True, kw_only=True)
class TreePresence(PathObjective):
    """The smooth depth of the path in a best-first tree.

    Attributes:
        nodes: B, of the tree that decoding will draft.
        width: tau, over how many nats of log product being in the tree fades to being out.
        form: ``"sigmoid"`` or ``"softplus"``.
        moving: whether the threshold's own gradient counts.
        calibration: lambda, weight of the cross-entropy beside it.
    """

    name: ClassVar[str] = "tree_presence"
    reads_all_rows: ClassVar[bool] = True

    nodes: int = 24
    width: float = 1.0
    form: str = "sigmoid"
    moving: bool = False
    calibration: float = 0.0

    def __post_init__(self) -> None:
        """Reject parameters out of range."""
        limit = float("inf")
        integer("nodes", self.nodes, 1, remedy="give the size of the tree that decoding will draft")
        real("width", self.width, lambda x: 0 < x < limit, expected="a number > 0", remedy="about 1 nat is smooth")
        if self.form not in FORMS:
            raise InputError.of("form", expected="one of " + ", ".join(FORMS), got=self.form, remedy="choose one")
        flag("moving", self.moving, remedy="say whether the threshold's gradient counts")
        remedy = "0 leaves the cross-entropy out"
        real("calibration", self.calibration, lambda x: 0 <= x < limit, expected="a number >= 0", remedy=remedy)

    @property
    def num_top(self) -> int:
        """No rank beyond B can be in a tree of B nodes."""
        return self.nodes

    def window_losses(self, scores: PathScores) -> Tensor:
        """See `tree_presence`."""
        threshold = tree_threshold(scores.top if self.moving else scores.top.detach(), self.nodes)
        losses = tree_presence(scores.log_q, scores.known, threshold, width=self.width, form=self.form)
        if self.calibration:
            losses = losses + self.calibration * mean_nll(scores.log_q, scores.known)
        return losses
