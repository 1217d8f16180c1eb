"""Measure a pair on this machine: what rounds cost, how far the drafter's claims hold, which drafts pay.

Three parts, in this order: seconds of a target pass against nodes and context (`costs`); at temperature 0, decoding of
sample prompts with the largest tree, from whose rounds every smaller tree can be replayed, since best-first trees are
nested; above, decoding with each candidate shape. Nothing of it changes a text's law.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specdiff.control.calibration import EDGES, Calibration, claimed
from specdiff.control.costs import CostTable
from specdiff.control.defaults import default_budget
from specdiff.control.plan_file import load_plan, plan_path
from specdiff.control.planner import Plan, Planner, Prediction
from specdiff.decoder import Generation, Settings, SpeculativeDecoder
from specdiff.drafters.base import Drafter
from specdiff.errors import InputError
from specdiff.machine import processor
from specdiff.models.layer_cut import target_fingerprint
from specdiff.models.tables import embedding_table, output_table
from specdiff.models.target import CausalTarget, ScoreRequest
from specdiff.records import RoundEvent
from specdiff.stopping import StopOptions
from specdiff.types import BestFirst, Budget, Chain, Draft, Round, Shape, Siblings, TokenTree

NODES = (0, 1, 2, 3, 4, 6, 8, 10, 12, 15, 20, 24)
CONTEXTS = (128, 512, 1024, 2048)
SAMPLED: tuple[Shape, ...] = (Siblings((2,)), Siblings((2, 1)), Siblings((3, 1, 1)), Siblings((4, 1)), BestFirst(8))
CHAINS = (1, 2, 4)
_SEEN = 4  # observations that a bin's claim counts for beside what tuning saw


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A plan, and what was seen on the way to it.

    Attributes:
        plan: for the planner. sampled: every candidate above temperature 0, best first. seconds: how long it took.
    """

    plan: Plan
    sampled: tuple[Prediction, ...]
    seconds: float


def tune(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Tensor],
    *,
    new_tokens: int = 64,
    temperature: float = 1.0,
    contexts: Sequence[int] = CONTEXTS,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda what: None,
) -> Tuning:
    """Measure the decoder's pair.

    Args:
        prompts: ids [L] of sample prompts, like those to come. new_tokens: for each of them. temperature: of the
            sampled part. contexts: lengths at which costs are measured, as far as the models' contexts go.
        clock: seconds; on an accelerator it must wait for the device. progress: told what is measured next.

    Raises:
        InputError: no drafter, or no prompts.
    """
    if decoder.drafter is None:
        raise InputError.of("drafter", expected="a drafter to tune", got=None, remedy="name one")
    if not prompts:
        raise InputError.of("prompts", expected="at least one", got=0, remedy="give sample prompts")
    began = clock()
    progress("costs of a round")
    costs = measure_costs(decoder, decoder.drafter, torch.cat(list(prompts)), contexts, clock)
    prior = claimed()
    budget = default_budget(decoder.drafter, greedy=True)
    if isinstance(budget.shape, BestFirst):
        progress("temperature 0")
        widest = replace(budget, shape=BestFirst(NODES[-1]))
        rounds = _events(decoder, widest, prompts, new_tokens, temperature=0.0)
        prior = _rates(rounds)
        greedy = _replay(costs, prior, widest, rounds)
    else:
        greedy = _measured(decoder, budget, prompts, new_tokens, 0.0, costs)
    sampled: list[Prediction] = []
    for candidate in _candidates(decoder.drafter):
        progress(f"temperature {temperature:g}: {candidate.shape}")
        sampled.append(_measured(decoder, candidate, prompts, new_tokens // 2, temperature, costs))
    sampled.sort(key=lambda p: -p.speedup)
    plan = Plan(costs=costs, prior=prior, greedy=greedy, sampled=sampled[0])
    return Tuning(plan=plan, sampled=tuple(sampled), seconds=clock() - began)


def identity(decoder: SpeculativeDecoder) -> dict[str, str]:
    """What a plan holds for: the pair and all of the machine that decides how long its passes take.

    Raises:
        InputError: the decoder has no drafter.
    """
    if decoder.drafter is None:
        raise InputError.of("drafter", expected="a drafter to tune", got=None, remedy="name one")
    return {"drafter": decoder.drafter.name} | target_identity(decoder)


def target_identity(decoder: SpeculativeDecoder) -> dict[str, str]:
    """The part of `identity` that holds without a drafter too: the target and the machine."""
    facts = {
        "target": decoder.target.name,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "processor": processor(),
    }
    if isinstance(decoder.target, CausalTarget):
        model = decoder.target.model
        table = embedding_table(model)
        facts |= {
            "weights": target_fingerprint(table, output_table(model)),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(table.device) if table.device.type == "cuda" else table.device.type,
        }
    return facts


def with_plan(decoder: SpeculativeDecoder, *, greedy: bool, path: Path | None = None) -> SpeculativeDecoder:
    """The same pair under the planner.

    Args:
        decoder: its rule is kept. greedy: whether texts will be decoded at temperature 0. path: a plan; None = the one
            that ``specdiff tune`` keeps for the pair.

    Raises:
        InputError: no drafter, or no plan for this pair on this machine.
    """
    names = identity(decoder)
    plan = load_plan(path or plan_path(names), names)
    settings = Settings(rule=decoder.settings.rule, budget=plan.best(greedy=greedy).budget, controller=plan.controller)
    return SpeculativeDecoder(decoder.target, decoder.drafter, decoder.tokenizer, settings)


def measure_costs(
    decoder: SpeculativeDecoder,
    drafter: Drafter,
    text: Tensor,
    contexts: Sequence[int],
    clock: Callable[[], float],
    *,
    repeats: int = 5,
) -> CostTable:
    """Time target passes, drafts and plain steps after prefixes of some lengths; medians.

    Args:
        text: ids to make prefixes of, repeated as often as needed.
    """
    limit = min(c for c in (decoder.target.context, 1 << 30) if c is not None) - 8 * len(NODES)
    lengths = [c for c in contexts if c <= limit] or [max(1, limit // 2)]
    budget = default_budget(drafter, greedy=True)
    target, draft, rest, plain = [], [], [], []
    for length in lengths:
        prompt = text.repeat(-(-length // text.numel()))[:length]
        passes, one = _passes(decoder, drafter, prompt, clock, repeats)
        rounds = _rounds(decoder, budget, prompt, clock, 2 * repeats)
        rest.append(statistics.median(r.verify_seconds for r in rounds))
        # as a share of the pass it was followed by, so that a busy moment slows both
        row: dict[int, float] = dict(zip(NODES, passes, strict=True))
        draft.append(statistics.median(r.draft_seconds / r.target_seconds * _at(row, r.nodes) for r in rounds))
        target.append(passes)
        plain.append(one + rest[-1])
    return CostTable(
        contexts=tuple(lengths),
        nodes=NODES,
        target=tuple(target),
        draft=tuple(draft),
        rest=tuple(rest),
        plain=tuple(plain),
    )


def _at(row: dict[int, float], nodes: int) -> float:
    """The entry for a size, or for the nearest one."""
    return row[min(row, key=lambda n: abs(n - nodes))]


def _passes(
    decoder: SpeculativeDecoder, drafter: Drafter, prompt: Tensor, clock: Callable[[], float], repeats: int
) -> tuple[tuple[float, ...], float]:
    """Seconds of a pass by nodes, and of one without a drafter, all in turn."""
    session, alone = decoder.target.open(1, drafter.feature_layers), decoder.target.open(1, ())
    token = int(prompt[-1])
    seconds: dict[int | None, list[float]] = {n: [] for n in (*NODES, None)}
    for each in (session, alone):
        each.prefill([prompt])
    for repeat in range(repeats + 1):
        for nodes in seconds:
            # a star: the mask and the positions of a tree, and every node at depth 1
            count = nodes or 0
            tree = TokenTree(torch.full((count,), token, dtype=torch.int64), (-1,) * count)
            one = alone if nodes is None else session
            began = clock()
            one.score([ScoreRequest(token, tree)])
            if repeat:  # the first pass of each size warms up
                seconds[nodes].append(clock() - began)
            one.commit([()])
    return tuple(statistics.median(seconds[n]) for n in NODES), statistics.median(seconds[None])


def _rounds(
    decoder: SpeculativeDecoder, budget: Budget, prompt: Tensor, clock: Callable[[], float], count: int
) -> list[Round]:
    tuned = SpeculativeDecoder(decoder.target, decoder.drafter, decoder.tokenizer, Settings(budget=budget))
    rounds: list[Round] = []
    stop = StopOptions(max_new_tokens=(budget.gamma + 1) * (count + 1), ignore_eos=True)
    for _ in tuned.stream(prompt, stop=stop, clock=clock, on_round=lambda event: rounds.append(event.record)):
        if len(rounds) > count:
            break
    return rounds[1:]


def _candidates(drafter: Drafter) -> list[Budget]:
    base = default_budget(drafter, greedy=False)
    budgets = [Budget(gamma=min(g, base.gamma), shape=Chain()) for g in CHAINS]
    budgets += [replace(base, shape=shape) for shape in SAMPLED]
    builds: list[Budget] = []
    for budget in dict.fromkeys(budgets):
        try:
            drafter.provenance(budget)
        except InputError:
            continue
        builds.append(budget)
    return builds


def _events(
    decoder: SpeculativeDecoder, budget: Budget, prompts: Sequence[Tensor], new_tokens: int, temperature: float
) -> list[list[RoundEvent]]:
    tuned = SpeculativeDecoder(decoder.target, decoder.drafter, decoder.tokenizer, Settings(budget=budget))
    texts: list[list[RoundEvent]] = []
    for prompt in prompts:
        events: list[RoundEvent] = []
        tuned.generate(prompt, max_new_tokens=new_tokens, temperature=temperature, on_round=events.append)
        texts.append(events)
    return texts


def _rates(texts: Sequence[Sequence[RoundEvent]]) -> tuple[float, ...]:
    """Acceptance rates by claim; never falling with it, as too few rounds would have it."""
    seen = Calibration(claimed(), weight=_SEEN, keep=1.0)
    for events in texts:
        for event in events:
            seen.observe(event.draft.scores, event.record.path)
    rates: list[float] = []
    for rate in seen.rates():
        rates.append(max(rate, rates[-1]) if rates else rate)
    assert len(rates) == len(EDGES) + 1
    return tuple(rates)


def _replay(
    costs: CostTable, prior: tuple[float, ...], budget: Budget, texts: Sequence[Sequence[RoundEvent]]
) -> Prediction:
    """The planner's own decisions on rounds that were drafted with the largest tree."""
    tokens = seconds = plain = nodes = 0.0
    rounds = 0
    for events in texts:
        planner = Planner(costs, budget, prior)
        for event in events:
            record, draft = event.record, event.draft
            wish = planner.budget(1 << 30)
            size = 0
            if wish is not None:
                assert isinstance(wish.shape, BestFirst)
                assert wish.shape.size is not None
                size = wish.shape.size(draft.scores)
            path = tuple(node for node in record.path if node < size)
            committed = len(path) + 1
            tree = TokenTree(draft.tree.tokens[:size], draft.tree.parents[:size])
            kept = Draft(tree, source=draft.source, scores=draft.scores[:size])
            planner.observe(
                replace(record, nodes=size, accepted=len(path), committed=committed, path=path),
                kept if wish else Draft(tree),
            )
            tokens, rounds, nodes = tokens + committed, rounds + 1, nodes + size
            seconds += costs.round(size, record.start, drafted=wish is not None)
            plain += committed * costs.step(record.start)
    return Prediction(budget=budget, tau=tokens / rounds, speedup=plain / seconds, nodes=nodes / rounds)


def _measured(
    decoder: SpeculativeDecoder,
    budget: Budget,
    prompts: Sequence[Tensor],
    new_tokens: int,
    temperature: float,
    costs: CostTable,
) -> Prediction:
    """Acceptance as decoded, time by the table: a busy moment must not decide between shapes."""
    tuned = SpeculativeDecoder(decoder.target, decoder.drafter, decoder.tokenizer, Settings(budget=budget))
    rounds: list[Round] = []
    for prompt in prompts:
        result = tuned.generate(prompt, max_new_tokens=new_tokens, temperature=temperature)
        assert isinstance(result, Generation)
        rounds += result.rounds
    tokens = sum(r.committed for r in rounds)
    seconds = sum(costs.round(r.nodes, r.start, drafted=r.drafter_passes > 0 or r.nodes > 0) for r in rounds)
    plain = sum(r.committed * costs.step(r.start) for r in rounds)
    return Prediction(
        budget=budget,
        tau=tokens / len(rounds),
        speedup=plain / seconds,
        nodes=sum(r.nodes for r in rounds) / len(rounds),
    )
