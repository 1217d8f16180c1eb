"""What a drafter is: a proposer of token trees, asked once a round, told afterwards what was committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from specdiff.randomness import Random
from specdiff.types import (
    BestFirst,
    Budget,
    CausalPaths,
    Chain,
    Draft,
    DynamicTree,
    Provenance,
    Samples,
    Shape,
    Siblings,
    StaticTree,
)

PROVENANCE: Mapping[type, Provenance] = MappingProxyType(
    {
        Chain: Provenance.CHAIN,
        Samples: Provenance.IID,
        Siblings: Provenance.WITHOUT_REPLACEMENT,
        BestFirst: Provenance.FIXED,
        CausalPaths: Provenance.FIXED,
        StaticTree: Provenance.FIXED,
        DynamicTree: Provenance.FIXED,
    }
)
"""What each shape yields where the drafter knows q at every node; see `provenance_of` for sampled static trees."""


def provenance_of(shape: Shape) -> Provenance:
    """What a shape yields where the drafter knows q at every node."""
    if isinstance(shape, StaticTree) and shape.sampled:
        return Provenance.WITHOUT_REPLACEMENT
    return PROVENANCE[type(shape)]


@dataclass(frozen=True, kw_only=True)
class DraftRequest:
    """One row's wish for a draft.

    Attributes:
        row: index of the request within the batch the session was opened for; finished rows no longer ask.
        prefix: [L] int64 CPU, all committed tokens: prompt and continuation. L >= 1.
        budget: what may be drafted; ``budget.gamma`` >= 1 and never beyond what the request can still commit.
        random: the request's own ``draft`` stream.
    """

    row: int
    prefix: Tensor
    budget: Budget
    random: Random


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the target decided about one row.

    Attributes:
        row: index of the request. start: how many tokens were committed before.
        tokens: newly committed ids (for the first observation: the prompt without its last token, start = 0).
        accepted: how many of them came from the draft.
        features: [F, H * len(feature_layers)] target hidden states of the rows that were fed and kept: the positions
            ``start - 1 .. start - 1 + F - 1`` (``0 .. F - 1`` for the first); None unless the drafter asked for them.
    """

    row: int
    start: int
    tokens: tuple[int, ...]
    accepted: int
    features: Tensor | None = None


class DraftSession(Protocol):
    """State of a drafter for one batch of requests."""

    @property
    def passes(self) -> int:
        """Forward passes of the drafter so far."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order; depth <= ``budget.gamma``; the empty tree is allowed.

        A draft is of the kind that `Drafter.provenance` names for its budget. Whether it is empty, and where a sampled
        one ends, may depend on the prefix but not on the tokens drawn: a sample kept back because of what it is (an
        EOS, say) is a sample of another law than q, and no rule can tell.
        """
        ...

    def observe(self, observations: Sequence[Observation]) -> None:
        """Hear what was committed. Called once before the first round (prompts), then after every round."""
        ...

    def rewind(self, row: int, length: int) -> None:
        """Forget a row beyond its first ``length`` tokens; its next prefix may go on differently from there.

        Afterwards the session stands as if ``length`` tokens were committed: observations go on from there, those of
        length 0 with a prompt (``start`` = 0). Wrappers that shorten or re-tokenize a prefix need it; length 0 also
        frees what a finished row holds.
        """
        ...


class Drafter(Protocol):
    """A drafter: weights and settings, shared by all sessions.

    Attributes:
        name: used in records. vocab_size: ids it may propose are below it.
        max_gamma: the largest window it can draft, None for any.
        feature_layers: target layers whose hidden states it reads (output of decoder layer i; () = none).
    """

    name: str
    vocab_size: int
    max_gamma: int | None
    feature_layers: tuple[int, ...]

    def provenance(self, budget: Budget) -> Provenance:
        """What kind of draft `DraftSession.propose` returns under this budget; refuses shapes it cannot build.

        Raises:
            InputError: the drafter cannot build ``budget.shape``.
        """
        ...

    def open(self, rows: int) -> DraftSession:
        """Start a session for ``rows`` requests."""
        ...
