"""How far drafts would be accepted, measured on the target's own greedy answers.

With the T = 0 answer in hand, the target need not run: a drafted token is accepted if and only if the answer has it
there. The walk below replays whole answers round by round, so its figure is the exact number of committed tokens a
round for greedy decoding (counting the target's extra token), up to the end of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdiff.errors import InputError
from specdiff.objectives.masked import IGNORED
from specdiff.train.features import Features, no_features
from specdiff.train.packed import packed_window_states
from specdiff.train.windows import AnswerRow, pack
from specdiff.trees.best_first import best_first
from specdiff.trees.paths import descend

if TYPE_CHECKING:
    from specdiff.models.denoiser import BlockCausalDenoiser


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Tokens a round on greedy answers.

    Attributes:
        chain: accepted tokens a round of the most likely chain, plus the extra token.
        tree: the same for the best-first tree of `tree_nodes` nodes.
        tree_nodes: size of the tree.
        by_offset: for each offset, how often the most likely token is right (whatever came before).
        num_rows: answers replayed.
    """

    chain: float
    tree: float
    tree_nodes: int
    by_offset: tuple[float, ...]
    num_rows: int


@torch.no_grad()
def measure_acceptance(
    denoiser: BlockCausalDenoiser,
    rows: Sequence[AnswerRow],
    labels_of: Tensor,
    *,
    tree_nodes: int = 24,
    features: Features = no_features,
) -> Acceptance:
    """Replay answers with the denoiser's drafts.

    Args:
        denoiser: with the blockwise attention set.
        rows: prompts with the target's T = 0 answers.
        labels_of: [V] from `specdiff.train.windows.label_table`.
        tree_nodes: nodes of the best-first tree.
        features: makes the target's states, for denoisers that read them.

    Returns:
        Mean tokens a round over all rounds of all rows.

    Raises:
        ValueError: there is no row.
    """
    if not rows:
        raise InputError("rows: expected at least one held-out answer, got none")
    was_training = denoiser.training
    denoiser.eval()
    totals = {"chain": [0, 0], "tree": [0, 0]}
    right = torch.zeros(denoiser.window)
    known = torch.zeros(denoiser.window)
    width = min(tree_nodes, denoiser.draft_vocab.numel())  # no rank beyond the size of the tree can be in it
    for row in rows:
        batch = pack([row], [list(row.anchors)], window=denoiser.window, labels_of=labels_of)
        states = packed_window_states(denoiser, batch, features=features(batch.context))[0]
        log_q, columns = torch.log_softmax(denoiser.head(states).float(), -1).topk(width, dim=-1)
        labels = batch.labels[0]
        correct = columns[..., 0] == labels
        right += correct.sum(0)
        known += (labels != IGNORED).sum(0)
        chain = correct.long().cumprod(-1).sum(-1)
        # A label the draft vocabulary lacks is IGNORED = -1, which no column equals, so it ends the draft.
        ranks = torch.where(
            (columns == labels[..., None]).any(-1), (columns == labels[..., None]).long().argmax(-1), tree_nodes
        )
        rank_rows = ranks.tolist()
        for name, totalled in totals.items():
            place, count = 0, len(row.anchors)
            while place < count:
                if name == "chain":
                    accepted = int(chain[place])
                else:
                    accepted = best_first_depth(log_q[place], rank_rows[place], tree_nodes)
                step = min(accepted + 1, count - place)
                totalled[0] += step
                totalled[1] += 1
                place += step
    denoiser.train(was_training)
    return Acceptance(
        chain=totals["chain"][0] / totals["chain"][1],
        tree=totals["tree"][0] / totals["tree"][1],
        tree_nodes=tree_nodes,
        by_offset=tuple((right / known.clamp_min(1)).tolist()),
        num_rows=len(rows),
    )


def best_first_depth(log_q: Tensor, ranks: Sequence[int], num_nodes: int) -> int:
    """Return how deep the true path runs in the tree that decoding would draft.

    Args:
        log_q: [G, W] for each offset, log-probabilities in descending order.
        ranks: for each offset, the rank of the true token (any number beyond the list where it is not there).
        num_nodes: size of the tree.

    Returns:
        The number of leading true tokens whose prefix is a node.
    """
    tree = best_first(log_q, num_nodes).tree  # a column is a rank
    return len(descend(tree.tokens.tolist(), tree.parents, ranks))
