"""Fakes that ship with the library: loop tests need no weights, and users can test their own rules and drafters.

`TableTarget` is an order-2 Markov model given by a table; `TableMarginals` draws its marginals from a table;
`ScriptedDrafter` proposes what a function says (oracle drafters that force all / none / alternating acceptance).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdiff.drafters.base import DraftRequest, Observation
from specdiff.models.target import ScoreRequest
from specdiff.types import Budget, Draft, DraftLaw, Provenance, TokenTree, ids_tensor


class TableTarget:
    """A target whose next-token law depends on the last two tokens.

    Args:
        table: [V, V, V] probabilities; ``table[a, b]`` is the law after ``..., a, b`` (a = 0 at the start).
    """

    def __init__(self, table: Tensor, *, eos_ids: tuple[int, ...] = (), context: int | None = None) -> None:
        self.table = table.double()
        self.name, self.vocab_size, self.context, self.eos_ids = "table", table.shape[-1], context, eos_ids
        # numpy: picking rows by a list costs a quarter of what it does in torch
        self._logits = self.table.clamp_min(1e-300).log().flatten(end_dim=1).numpy()

    @classmethod
    def random(cls, vocab: int, *, seed: int = 0, concentration: float = 0.7) -> TableTarget:
        """A table of Dirichlet rows."""
        gamma = torch.distributions.Gamma(torch.tensor(concentration, dtype=torch.float64), 1.0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            rows = gamma.sample((vocab, vocab, vocab)) + 1e-6
        return cls(rows / rows.sum(-1, keepdim=True))

    def logits(self, pairs: Sequence[tuple[int, int]]) -> Tensor:
        """Log-probabilities [len(pairs), V] after each pair of tokens."""
        return torch.from_numpy(self._logits[[a * self.vocab_size + b for a, b in pairs]])

    def open(self, rows: int, feature_layers: tuple[int, ...] = ()) -> TableTargetSession:
        """Start a session."""
        return TableTargetSession(self, rows)


class TableTargetSession:
    """Committed tokens of one batch."""

    def __init__(self, target: TableTarget, rows: int) -> None:
        self._target = target
        self._cache: list[list[int]] = [[] for _ in range(rows)]
        self._last: list[ScoreRequest | None] = [None] * rows
        self.passes = 0

    @property
    def lengths(self) -> list[int]:
        """Committed tokens but the last, as `CausalTargetSession.lengths`."""
        return [len(c) for c in self._cache]

    def prefill(self, prompts: Sequence[Tensor]) -> list[Tensor | None]:
        """Remember the prompts."""
        self._cache = [p[:-1].tolist() for p in prompts]
        return [None] * len(prompts)

    def score(self, requests: Sequence[ScoreRequest | None]) -> list[Tensor | None]:
        """Log-probabilities of every row."""
        self.passes += 1
        self._last = list(requests)
        pairs = [[] if r is None else self._pairs(self._cache[b], r) for b, r in enumerate(requests)]
        logits = self._target.logits([pair for row in pairs for pair in row]).split([len(row) for row in pairs])
        return [None if r is None else rows for r, rows in zip(requests, logits, strict=True)]

    def _pairs(self, cache: list[int], request: ScoreRequest) -> list[tuple[int, int]]:
        pairs = [(cache[-1] if cache else 0, request.root)]
        for parent, token in zip(request.tree.parents, request.tree.tokens.tolist(), strict=True):
            pairs.append((pairs[parent + 1][1], token))
        return pairs

    def commit(self, paths: Sequence[tuple[int, ...] | None]) -> list[Tensor | None]:
        """Append root and accepted tokens."""
        for b, (path, request) in enumerate(zip(paths, self._last, strict=True)):
            if path is not None and request is not None:
                tokens = request.tree.tokens.tolist()
                self._cache[b] += [request.root, *(tokens[n] for n in path)]
        return [None] * len(paths)

    def finish(self, row: int) -> None:
        """Forget the row."""
        self._cache[row] = []


class TableMarginals:
    """A marginal source whose window rows depend on the last committed token.

    Args:
        logits: [V, G, V]; ``logits[b]`` are the window's logits after ``..., b``.
    """

    def __init__(self, logits: Tensor) -> None:
        self.table = logits.double()
        self.name, self.vocab_size, self.max_gamma = "table-marginals", logits.shape[-1], logits.shape[1]
        self.feature_layers: tuple[int, ...] = ()
        self.vocab: Tensor | None = None

    @classmethod
    def random(cls, vocab: int, gamma: int, *, seed: int = 1, scale: float = 1.0) -> TableMarginals:
        """Gaussian logits."""
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randn(vocab, gamma, vocab, generator=generator, dtype=torch.float64) * scale)

    def open(self, rows: int) -> TableMarginalSession:
        """Start a session."""
        return TableMarginalSession(self)


class TableMarginalSession:
    """Counts passes; has no other state."""

    def __init__(self, source: TableMarginals) -> None:
        self._source = source
        self.passes = 0

    def logits(self, requests: Sequence[DraftRequest]) -> list[Tensor]:
        """Rows of the table."""
        self.passes += 1
        return [self._source.table[int(r.prefix[-1]), : r.budget.gamma] for r in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def rewind(self, row: int, length: int) -> None:
        """Nothing to forget."""


def chain(tokens: Sequence[int], *, source: str = "") -> Draft:
    """A chain of given tokens as a draft without q."""
    ids = ids_tensor(tokens)
    return Draft(TokenTree(ids, tuple(range(-1, len(ids) - 1))), source=source)


class ScriptedDrafter:
    """Proposes the chain that ``script(request)`` returns; with ``q`` (one [W] row) it claims to be sampled from it."""

    def __init__(self, script: Callable[[DraftRequest], Sequence[int]], *, vocab_size: int, q: Tensor | None = None):
        self._script, self._q = script, q
        self.name, self.vocab_size, self.max_gamma, self.feature_layers = "scripted", vocab_size, None, ()
        self.passes = 0

    def provenance(self, budget: Budget) -> Provenance:
        """FIXED unless a q row was given."""
        return Provenance.FIXED if self._q is None else Provenance.CHAIN

    def open(self, rows: int) -> ScriptedDrafter:
        """The drafter is its own session."""
        return self

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One chain a request, cut to the budget."""
        self.passes += 1
        drafts = []
        for r in requests:
            draft = chain(self._script(r)[: r.budget.gamma], source=self.name)
            if self._q is not None and len(draft.tree):
                n = len(draft.tree)
                law = DraftLaw(self._q[None], (0,) * n + (-1,))
                draft = Draft(draft.tree, Provenance.CHAIN, law, (tuple(range(n)),), self.name)
            drafts.append(draft)
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def rewind(self, row: int, length: int) -> None:
        """Nothing to forget."""
