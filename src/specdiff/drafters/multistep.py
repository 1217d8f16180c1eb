"""Several denoising steps a draft, with named orders of unmasking.

**Left to right** keeps an exact q. Step s reveals the next group of positions; the rows it draws from saw the prefix,
the tokens of earlier groups and masks, never a token of its own or a later group. So the row of position j is the law
of token j given ALL earlier tokens of the draft (on those of its own group it does not depend), which is what the rules
that use q assume: provenance ``CHAIN`` (docs/rules.md, fact 1).

**Every other order** fills gaps: the row of position j saw tokens behind j, and which position came when may depend on
what was drawn. The recorded probabilities are not left-to-right conditionals, and a rule that used them would change
the law of the text. Such drafts carry no q: provenance ``FIXED``, tokens by argmax.

One step is the one-step drafter, in all its shapes, whatever the order: then nothing is revealed before anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from specdiff.drafters.base import DraftRequest, DraftSession, Observation
from specdiff.drafters.block_causal import BlockCausalSource
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.drafters.masked import MaskedSource
from specdiff.errors import InputError
from specdiff.models.diffusion.base import Window
from specdiff.randomness import Random
from specdiff.types import Budget, Chain, Draft, DraftLaw, Provenance, TokenTree

Order = Callable[[Tensor, int, Random], list[int]]
"""Chooses among the hidden positions: ([M, W] probabilities of each, how many, the draft stream) -> indices into M."""


def left_to_right(probs: Tensor, count: int, random: Random) -> list[int]:
    """The leftmost ones."""
    return list(range(count))


def random_order(probs: Tensor, count: int, random: Random) -> list[int]:
    """Any ones, drawn from the draft stream."""
    weights = torch.ones(len(probs), dtype=torch.float64)
    picked: list[int] = []
    for _ in range(count):
        picked.append(random.draw(weights, without=picked))
    return picked


def confidence(probs: Tensor, count: int, random: Random) -> list[int]:
    """Those whose most probable token is the most probable."""
    return _largest(probs.amax(dim=-1), count)


def entropy(probs: Tensor, count: int, random: Random) -> list[int]:
    """Those of least entropy."""
    return _largest(torch.xlogy(probs, probs).sum(dim=-1), count)


def margin(probs: Tensor, count: int, random: Random) -> list[int]:
    """Those whose best token leads the second best by most."""
    top = torch.nn.functional.pad(probs, (0, 1)).topk(2, dim=-1).values  # padded: a row may have one column only
    return _largest(top[:, 0] - top[:, 1], count)


def _largest(scores: Tensor, count: int) -> list[int]:
    """Indices of the largest scores; ties go to the left."""
    return torch.sort(scores, descending=True, stable=True).indices[:count].tolist()


ORDERS: Mapping[str, Order] = MappingProxyType({
    "left_to_right": left_to_right, "confidence": confidence, "entropy": entropy, "margin": margin,
    "random": random_order,
})  # fmt: skip
"""Every order by name; read-only."""


class MultiStepDrafter:
    """Denoises a window in several steps. The forward passes of a round are its steps.

    Args:
        source: the one-step drafter whose denoiser, columns and cache are used.
        steps: denoising steps; a window of fewer tokens takes one step a token.
        order: a name of `ORDERS`.

    Raises:
        InputError: ``steps`` is below 1, or the order is unknown.
    """

    def __init__(self, source: MaskedSource | BlockCausalSource, *, steps: int, order: str = "left_to_right") -> None:
        if steps < 1:
            raise InputError.of("steps", expected="an integer >= 1", got=steps, remedy="1 is the one-step drafter")
        if order not in ORDERS:
            raise InputError.of(
                "order",
                expected="one of " + ", ".join(ORDERS),
                got=order,
                remedy="left_to_right is the one that keeps q",
            )
        self.source, self.steps, self.order = source, steps, order
        self.one_step = MarginalDrafter(source)
        self.name = source.name
        self.vocab_size = source.vocab_size
        self.max_gamma = source.max_gamma
        self.feature_layers = source.feature_layers

    def provenance(self, budget: Budget) -> Provenance:
        """``CHAIN`` from left to right, ``FIXED`` in any other order; with one step as the one-step drafter.

        Raises:
            InputError: a tree of several steps was asked for.
        """
        if self.steps == 1:
            return self.one_step.provenance(budget)
        if not isinstance(budget.shape, Chain):
            raise InputError.of(
                "shape",
                expected=f"Chain() for {self.steps} denoising steps",
                got=budget.shape,
                remedy="draft a chain, or use steps=1 for trees",
            )
        return Provenance.CHAIN if self.order == "left_to_right" else Provenance.FIXED

    def open(self, rows: int) -> DraftSession:
        """Start a session for ``rows`` requests."""
        return self.one_step.open(rows) if self.steps == 1 else _Session(self, rows)


def group_sizes(gamma: int, steps: int) -> list[int]:
    """How many positions each step reveals: as even as possible, larger groups first, never an empty one."""
    steps = min(gamma, steps)
    return [gamma // steps + (s < gamma % steps) for s in range(steps)]


@dataclass
class _Canvas:
    """The window of one row while it is denoised."""

    request: DraftRequest
    tokens: Tensor
    groups: list[int]
    hidden: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)


class _Session:
    def __init__(self, drafter: MultiStepDrafter, rows: int) -> None:
        self._drafter, self._order = drafter, ORDERS[drafter.order]
        self._inner = drafter.source.open(rows)

    @property
    def passes(self) -> int:
        return self._inner.passes

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        provenances = [self._drafter.provenance(r.budget) for r in requests]
        canvases = [self._blank(r) for r in requests]
        while busy := [c for c in canvases if c.groups]:
            windows = [Window(c.request.row, c.request.prefix, c.tokens) for c in busy]
            for canvas, logits in zip(busy, self._inner.denoise(windows), strict=True):
                self._reveal(canvas, logits)
        return [self._draft(c, p) for c, p in zip(canvases, provenances, strict=True)]

    def observe(self, observations: Sequence[Observation]) -> None:
        self._inner.observe(observations)

    def rewind(self, row: int, length: int) -> None:
        self._inner.rewind(row, length)

    def _blank(self, request: DraftRequest) -> _Canvas:
        gamma = request.budget.gamma
        tokens = torch.full((gamma,), self._drafter.source.mask_id, dtype=torch.int64)
        return _Canvas(request, tokens, group_sizes(gamma, self._drafter.steps), list(range(gamma)))

    def _reveal(self, canvas: _Canvas, logits: Tensor) -> None:
        """One step: choose positions by the order, and their tokens by drawing (left to right) or argmax."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        probs = torch.softmax(logits[canvas.hidden] / canvas.request.budget.temperature, dim=-1)
        vocab, random = self._drafter.source.vocab, canvas.request.random
        picked = self._order(probs, canvas.groups.pop(0), random)
        positions = [canvas.hidden[i] for i in picked]
        for index, position in zip(picked, positions, strict=True):
            if self._order is left_to_right:
                column = random.draw(probs[index])
                canvas.rows.append(probs[index])
            else:
                column = int(probs[index].argmax())
            canvas.tokens[position] = column if vocab is None else vocab[column]
        canvas.hidden = [p for p in canvas.hidden if p not in positions]

    def _draft(self, canvas: _Canvas, provenance: Provenance) -> Draft:
        count, name = canvas.tokens.numel(), self._drafter.name
        tree = TokenTree(canvas.tokens, tuple(range(-1, count - 1)))
        if provenance is Provenance.FIXED:
            return Draft(tree, source=name)
        law = DraftLaw(torch.stack(canvas.rows), (*range(count), -1), self._drafter.source.vocab)
        return Draft(tree, provenance, law, (tuple(range(count)),), name)
