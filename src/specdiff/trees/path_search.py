"""Causal-consistency path search (CPS): the paths of a lattice that a causal n-gram model finds plausible too.

One-step marginals know nothing of each other: "New" + "York" and "Los" + "Angeles" also give "New Angeles". DiffuSpec
(arXiv 2510.02358) runs a beam from left to right over the pruned lattice and maximises

    S(x) = sum_i [ w log q_i(x_i) + (1 - w) log p_ngram(x_i | committed tokens, x_1 .. x_{i-1}) ],   w = 1/2.

Paths that end in EOS are shorter, so S alone favours them. They are ranked by what they lose *at their own length*:

    F(x) = S(x) - R(|x|),   R(l) = the largest S of any path of l tokens in the search that has not ended
                                   (of any path, where all have).

A path of full length has F <= 0, the best of them F = 0. So a path that ends in EOS wins only if it beats everything
that goes on, after as many tokens; an EOS that loses to another token after the same prefix never wins, whatever
follows.

The paths depend on the prefix and on q, not on the verifier's randomness: provenance ``FIXED``, verified by match or
walk, exact at every temperature. They are no samples of q, so ratios p / q would be biased (as published, DiffuSpec is
lossless at temperature 0 only).

Shapes: G depth of the window, W draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdiff.errors import InputError
from specdiff.ngram.base import NgramScorer
from specdiff.trees.lattice import Lattice, prune
from specdiff.trees.sampled import merge
from specdiff.types import CausalPaths, Draft, TokenTree, ids_tensor


@dataclass(frozen=True)
class Path:
    """A path of the lattice.

    Attributes:
        tokens: target ids. log_q: log of the product of its marginals, after each of them.
        score: S. fair: F.
    """

    tokens: tuple[int, ...] = ()
    log_q: tuple[float, ...] = ()
    score: float = 0.0
    fair: float = 0.0


def check_scorer(shape: CausalPaths, scorer: object) -> None:
    """Refuse a weighted n-gram model that is not there.

    Raises:
        InputError: naming the remedies.
    """
    if scorer is None and shape.weight < 1:
        raise InputError.of(
            "scorer",
            expected="an n-gram model for causal paths of weight < 1",
            got=None,
            remedy="load with ngram='prompt' or a model's file (--ngram), or search by the marginals alone: weight=1",
        )


def search(lattice: Lattice, context: Sequence[int], scorer: NgramScorer | None, shape: CausalPaths) -> list[Path]:
    """Beam search.

    Each step extends every path of the beam by every candidate. Those that end are put aside, they take no place in the
    beam; of the others the ``beam`` largest S go on, equal ones by the rank of the path that they extend, then by the
    lattice's order. With a beam that holds all paths the result is the true maximum.

    Args:
        lattice: the candidates.
        context: committed tokens, the last ``scorer.order - 1`` of them at least (or all there are).
        scorer: the n-gram model, None at weight 1.
        shape: beam, keep and weight.

    Returns:
        At most ``keep`` distinct paths, by falling F; equal ones: the longer first, then by falling rank in the beam.
        None for the empty lattice.

    Raises:
        InputError: there is no scorer, and the weight is below 1.
    """
    check_scorer(shape, scorer)
    weight, last = shape.weight, 0
    if scorer is not None and weight < 1:
        last = scorer.order - 1
    committed = tuple(context[-last:]) if last else ()
    beam, ended = [Path()], list[Path]()
    for tokens, log_q in zip(lattice.tokens, lattice.log_q, strict=True):
        gains = [weight * value for value in log_q]
        steps: list[_Step] = []
        for path in beam:
            total = [path.score + gain for gain in gains]
            if scorer is not None and weight < 1:
                causal = scorer.log_probs((*committed, *path.tokens)[-last:] if last else (), tokens)
                total = [score + (1 - weight) * value for score, value in zip(total, causal, strict=True)]
            steps += [(score, path, index) for index, score in enumerate(total)]
        if not steps:  # all paths have ended
            break
        steps.sort(key=_by_score)  # stable: equal ones stay in the order of the beam, then of the lattice
        running = [step for step in steps if tokens[step[2]] not in lattice.ends]
        best = (running or steps)[0][0]
        ended += [_grown(step, tokens, log_q, best) for step in steps if tokens[step[2]] in lattice.ends]
        beam = [_grown(step, tokens, log_q, best) for step in running[: shape.beam]]
    found = [path for path in (*beam, *ended) if path.tokens]
    return sorted(found, key=lambda path: (-path.fair, -len(path.tokens)))[: shape.keep]


def causal_paths(
    log_probs: Tensor,
    shape: CausalPaths,
    context: Sequence[int],
    scorer: NgramScorer | None,
    vocab: Tensor | None = None,
    *,
    eos: Sequence[int] | None = None,
    source: str = "",
) -> Draft:
    """Prune, search, and merge the best paths into a trie: the nodes of the best path come first.

    Args:
        log_probs: [G, W] log-probabilities of the window's positions.
        shape: the options.
        context, scorer: see `search`.
        vocab: [W] sorted target ids of the columns, None where column = id.
        eos: columns of the tokens that end a text, None = not known.
        source: name of the drafter.

    Returns:
        A ``FIXED`` draft, empty for the empty window only; a window that begins with EOS drafts one token.

    Raises:
        InputError: there is no scorer, and the weight is below 1.
    """
    lattice = prune(log_probs, shape, vocab, eos=eos)
    found = search(lattice, context, scorer, shape)
    tokens, parents, nodes = merge([path.tokens for path in found])
    scores = [math.nan] * len(tokens)
    for path, line in zip(found, nodes, strict=True):
        for node, value in zip(line, path.log_q, strict=True):
            scores[node] = value
    tree = TokenTree(ids_tensor(tokens), tuple(parents))
    return Draft(tree, source=source, scores=tuple(scores), generated=lattice.generated)


_Step = tuple[float, Path, int]
"""S of a path with one more token, the path without it, the token's place in the lattice."""


def _by_score(step: _Step) -> float:
    return -step[0]


def _grown(step: _Step, tokens: Sequence[int], log_q: Sequence[float], best: float) -> Path:
    score, path, index = step
    above = path.log_q[-1] if path.log_q else 0.0
    return Path((*path.tokens, tokens[index]), (*path.log_q, above + log_q[index]), score, score - best)
