"""THE LOOP: draft -> one target pass -> verify -> commit, for a ragged batch of requests.

`DecodeLoop.step` reads like the papers. Everything else here prepares a row's options or books what was decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specdiff.control.base import Controller, FixedBudget
from specdiff.drafters.base import Drafter, DraftRequest, DraftSession, Observation
from specdiff.drafters.checked import blaming, check_draft, check_drafter, declared_provenance
from specdiff.errors import ContextOverflowError, DrafterError, InputError, SpecdiffError
from specdiff.models.target import ScoreRequest, Target
from specdiff.randomness import RandomStream
from specdiff.records import RoundEvent
from specdiff.sampling import LawBuilder, SamplingOptions
from specdiff.stopping import FinishReason, StopCheck, StopOptions
from specdiff.types import Budget, Draft, Extra, Round, TokenTree, Verdict, ids_tensor, may_branch
from specdiff.verify.base import Rule, check, tokens_of
from specdiff.verify.registry import choose

_EMPTY = Draft(TokenTree(torch.empty(0, dtype=torch.int64), ()))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to produce.

    Attributes:
        prompt: [L] int64 ids, L >= 1. sampling: the law p. stop: when the text ends.
        seed: with ``index``, decides every random choice of this request. index: place in the caller's list.
        decode: ids -> text, needed for stop strings only.
    """

    prompt: Tensor
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: StopOptions = field(default_factory=StopOptions)
    seed: int = 0
    index: int = 0
    decode: Callable[[Sequence[int]], str] | None = None


@dataclass
class Row:
    """What the loop knows about one request while it runs."""

    request: Request
    laws: LawBuilder
    stop: StopCheck
    draft_random: RandomStream
    verify_random: RandomStream
    controller: Controller
    committed: list[int]
    rounds: list[Round] = field(default_factory=list)
    finish: FinishReason | None = None
    error: SpecdiffError | None = None

    @property
    def new_tokens(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.committed[self.request.prompt.numel() :]


@dataclass(frozen=True)
class Commit:
    """Tokens one row committed in one round; ``accepted`` of them, the first ones, came from the draft."""

    row: int
    tokens: tuple[int, ...]
    accepted: int
    extra: Extra | None


class DecodeLoop:
    """Decodes a batch. One instance serves one batch; target and drafter are shared.

    Args:
        target: scores drafts. drafter: proposes them; None = plain decoding by the same loop.
        rule: a verification rule, or None to let ``choose`` pick one for each draft.
        budget: what each round may draft. controller: makes each row's controller (default: always ``budget``).
        clock: seconds, for the records and for ``max_time``; None = records carry 0.0 and time is monotonic.
        on_round: called with every round's draft, verdict and record (the papers' DraftProbCollector).
        keep_errors: a row that fails keeps its error and its neighbours go on; otherwise the error is raised.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        requests: Sequence[Request],
        *,
        budget: Budget,
        rule: Rule | None = None,
        controller: Callable[[Budget], Controller] = FixedBudget,
        clock: Callable[[], float] | None = None,
        on_round: Callable[[RoundEvent], None] | None = None,
        keep_errors: bool = False,
    ) -> None:
        self._target, self._drafter, self._rule, self._budget = target, drafter, rule, budget
        self._clock = clock or (lambda: 0.0)
        self._stop_clock = clock or time.monotonic
        self._on_round, self._keep_errors = on_round, keep_errors
        check_drafter(drafter)
        if drafter is not None:
            provenance = declared_provenance(drafter, budget)
            if rule is not None:
                for request in requests:
                    check(rule, provenance, greedy=request.sampling.greedy, tree=may_branch(budget.shape))
        self.rows = [self._row(request, controller) for request in requests]
        self._session = target.open(len(requests), drafter.feature_layers if drafter else ())
        self._drafting: DraftSession | None = None
        if drafter is not None:
            with blaming(drafter):
                self._drafting = drafter.open(len(requests))

    def run(self) -> Iterator[list[Commit]]:
        """Prefill, then one list of commits a round, until every row has finished."""
        prompts = [row.request.prompt for row in self.rows]
        features = self._session.prefill(prompts)
        self._observe(
            [
                Observation(row=i, start=0, tokens=tuple(p[:-1].tolist()), accepted=0, features=f)
                for i, (p, f) in enumerate(zip(prompts, features, strict=True))
            ]
        )
        while any(row.finish is None for row in self.rows):
            yield self.step()

    def step(self) -> list[Commit]:
        """One round of every unfinished row."""
        active = [i for i, row in enumerate(self.rows) if row.finish is None]
        began, passes = self._clock(), self._draft_passes()
        drafts = self._draft(active)  # a row whose draft is faulty fails here
        drafted, passes = self._clock(), self._draft_passes() - passes
        logits = self._session.score(
            [
                ScoreRequest(self.rows[i].committed[-1], drafts[i].tree) if i in drafts else None
                for i in range(len(self.rows))
            ]
        )
        scored = self._clock()
        verdicts: dict[int, tuple[Verdict, str, str]] = {}
        for i in drafts:
            rows = logits[i]
            assert rows is not None
            try:
                verdicts[i] = self._verify(self.rows[i], drafts[i], rows)
            except SpecdiffError as error:
                self._fail(i, error)
        features = self._session.commit([verdicts[i][0].path if i in verdicts else None for i in range(len(self.rows))])
        ended = self._clock()
        commits: list[Commit] = []
        observations: list[Observation] = []
        for i, (verdict, rule, reason) in verdicts.items():
            row, draft, start = self.rows[i], drafts[i], len(self.rows[i].committed)
            commit = self._commit(i, draft, verdict)
            record = Round(
                proposed=draft.tree.depth,
                nodes=len(draft.tree),
                accepted=commit.accepted,
                committed=len(commit.tokens),
                extra=commit.extra,
                rule=rule,
                reason=reason,
                source=draft.chosen(verdict.path),
                drafter_passes=passes,
                draft_seconds=drafted - began,
                target_seconds=scored - drafted,
                verify_seconds=ended - scored,
                start=start,
                path=verdict.path[: commit.accepted],
            )
            row.rounds.append(record)
            row.controller.observe(record, draft)
            if self._on_round is not None:
                self._on_round(RoundEvent(row=i, draft=draft, verdict=verdict, record=record))
            commits.append(commit)
            observations.append(
                Observation(row=i, start=start, tokens=commit.tokens, accepted=commit.accepted, features=features[i])
            )
        self._observe([o for o in observations if self.rows[o.row].finish is None])
        for i in active:
            if self.rows[i].finish is not None:
                self._session.finish(i)
                if self._drafting is not None:
                    with blaming(self._drafter):
                        self._drafting.rewind(i, 0)
        return commits

    def _row(self, request: Request, controller: Callable[[Budget], Controller]) -> Row:
        length = request.prompt.numel()
        if length == 0:
            raise InputError.of(
                "prompt",
                expected="at least one token",
                got="an empty prompt",
                remedy="give a prompt, or a model that has a BOS token",
            )
        context = self._target.context
        if context is not None and length >= context:
            raise ContextOverflowError.of(
                "prompt",
                expected=f"fewer than {context} tokens (the target's context)",
                got=length,
                remedy="shorten the prompt",
            )
        low, high = map(int, torch.aminmax(request.prompt))
        if low < 0 or high >= self._target.vocab_size:
            raise InputError.of(
                "prompt",
                expected=f"ids in [0, {self._target.vocab_size})",
                got=(low, high),
                remedy="tokenize with the target's own tokenizer",
            )
        room = None if context is None else context - length
        return Row(
            request=request,
            laws=LawBuilder(
                request.sampling, prompt_length=length, eos_ids=self._target.eos_ids, vocab_size=self._target.vocab_size
            ),
            stop=StopCheck(
                request.stop,
                eos_ids=self._target.eos_ids,
                room=room,
                decode=request.decode,
                prompt=request.prompt,
                clock=self._stop_clock,
            ),
            draft_random=RandomStream(request.seed, "draft", request.index),
            verify_random=RandomStream(request.seed, "verify", request.index),
            controller=controller(self._budget),
            committed=request.prompt.tolist(),
        )

    def _draft(self, active: Sequence[int]) -> dict[int, Draft]:
        drafts = dict.fromkeys(active, _EMPTY)
        requests: list[DraftRequest] = []
        for i in active:
            row = self.rows[i]
            room = row.stop.remaining - 1  # the round ends with one token of the target's own
            if self._drafter is not None and self._drafter.max_gamma is not None:
                room = min(room, self._drafter.max_gamma)
            try:
                budget = _checked_budget(row.controller, room)
            except SpecdiffError as error:
                self._fail(i, error)
                del drafts[i]
                continue
            if self._drafting is not None and budget is not None and budget.gamma > 0:
                # the drafter's own: whatever it does to it, the law is that of the committed tokens
                prefix = ids_tensor(row.committed)
                requests.append(DraftRequest(row=i, prefix=prefix, budget=budget, random=row.draft_random))
        if requests and self._drafting is not None:
            assert self._drafter is not None
            declared = [declared_provenance(self._drafter, r.budget) for r in requests]
            with blaming(self._drafter):
                proposed = list(self._drafting.propose(requests))
            if len(proposed) != len(requests):
                raise DrafterError(f"drafter: expected {len(requests)} drafts, got {len(proposed)}")
            for request, draft, kind in zip(requests, proposed, declared, strict=True):
                try:
                    drafts[request.row] = check_draft(
                        draft, gamma=request.budget.gamma, vocab_size=self._target.vocab_size, declared=kind
                    )
                except DrafterError as error:
                    self._fail(request.row, error)
                    del drafts[request.row]
        return drafts

    def _verify(self, row: Row, draft: Draft, logits: Tensor) -> tuple[Verdict, str, str]:
        law = row.laws.law(logits, row.committed, draft.tree)
        if self._rule is None or len(draft.tree) == 0:
            rule, reason = choose(draft.provenance, greedy=law.greedy)
        else:
            rule, reason = self._rule, "asked for"
            check(rule, draft.provenance, greedy=law.greedy)
        return rule.verify(draft, law, row.verify_random), rule.name, reason

    def _commit(self, index: int, draft: Draft, verdict: Verdict) -> Commit:
        row = self.rows[index]
        tokens = tokens_of(draft.tree)
        drafted = [tokens[node] for node in verdict.path]
        kept: list[int] = []
        for place, token in enumerate((*drafted, verdict.token)):
            kept.append(token)
            row.committed.append(token)
            try:
                row.finish = row.stop.feed(token, ends_round=place == len(drafted))
            except SpecdiffError as error:  # the request's own tokenizer or criterion; its neighbours go on
                self._fail(index, error)
            if row.finish is not None:
                break
        accepted = min(len(drafted), len(kept))
        return Commit(index, tuple(kept), accepted, verdict.extra if len(kept) > len(drafted) else None)

    def _observe(self, observations: list[Observation]) -> None:
        if self._drafting is not None:
            with blaming(self._drafter):
                self._drafting.observe(observations)

    def _draft_passes(self) -> int:
        if self._drafting is None:
            return 0
        with blaming(self._drafter):
            return self._drafting.passes

    def _fail(self, index: int, error: SpecdiffError) -> None:
        if not self._keep_errors:
            raise error
        self.rows[index].error, self.rows[index].finish = error, FinishReason.ERROR


def _checked_budget(controller: Controller, room: int) -> Budget | None:
    """What the controller asks for, within what the request can still commit.

    Raises:
        InputError: it is no budget, or has numbers that mean nothing.
    """
    budget = controller.budget(room)
    if budget is None:
        return None
    if not isinstance(budget, Budget):  # pyright: ignore[reportUnnecessaryIsInstance] - other people's code
        raise InputError.of(
            "controller", expected="a Budget or None", got=budget, remedy="return one from Controller.budget"
        )
    if budget.gamma != 0:  # 0: no draft this round
        budget.validate()
    return budget if budget.gamma <= room else replace(budget, gamma=max(room, 0))
