"""Measure a pair on this machine: what rounds cost, how far the drafter's claims hold, which drafts pay.

Two parts: seconds of whole rounds against nodes and context (`round_costs`); then the sample prompts are decoded with
every setting, and the planner is replayed over what was accepted. Best-first trees are nested, so one decoding with the
largest tells what every smaller one accepts. Nothing of it changes a text's law.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specdiff.bench.round_costs import Clock, Costs, measure_costs
from specdiff.control.calibration import EDGES, Calibration, claimed
from specdiff.control.costs import CostTable
from specdiff.control.defaults import default_budget
from specdiff.control.menu import Arm, Menu, Prediction
from specdiff.control.plan import Plan
from specdiff.control.plan_file import load_plan, plan_path
from specdiff.control.planner import Planner
from specdiff.decoder import Settings, SpeculativeDecoder
from specdiff.drafters.base import Drafter
from specdiff.drafters.checked import declared_provenance
from specdiff.errors import InputError, PairingError
from specdiff.machine import processor
from specdiff.models.layer_cut import target_fingerprint
from specdiff.models.tables import embedding_table, output_table
from specdiff.models.target import CausalTarget
from specdiff.records import RoundEvent
from specdiff.shapes import shape_text
from specdiff.types import BestFirst, Budget, Chain, Draft, Round, Shape, Siblings, TokenTree, ids_tensor, may_branch
from specdiff.verify import registry as rules
from specdiff.verify.base import check as check_pairing

NODES = (0, 1, 2, 4, 6, 8, 10, 12, 16, 24)
CONTEXTS = (128, 512, 1024, 2048)
SIBLINGS: tuple[Shape, ...] = (Siblings((2,)), Siblings((2, 1)), Siblings((3, 1, 1)), Siblings((4, 1)))
CHAINS = (1, 2, 4, 8)
DRAFT_TEMPERATURES = (0.7, 1.3)
_SEEN = 4  # observations that a bin's claim counts for beside what tuning saw


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A plan, and how sure it is.

    Attributes:
        plan: for the planner. seconds: how long it took. spread: of repeated timings, see `round_costs.Costs`.
    """

    plan: Plan
    seconds: float
    spread: float


@dataclass(frozen=True)
class Seen:
    """A round of a sample text: where it began (in new tokens), its tree's claims, size, and what was accepted."""

    start: int
    nodes: int
    scores: tuple[float, ...]
    path: tuple[int, ...]


def tune(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Tensor],
    *,
    new_tokens: int = 64,
    temperature: float = 1.0,
    contexts: Sequence[int] = CONTEXTS,
    clock: Clock = time.perf_counter,
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
    settings = {t: candidates(decoder.drafter, greedy=t == 0) for t in (0.0, temperature)}
    trees = any(isinstance(b.shape, BestFirst) for b in settings[0.0])
    costs = measure_costs(
        decoder,
        decoder.drafter,
        torch.cat(list(prompts)),
        {t: [b for b in budgets if not isinstance(b.shape, BestFirst)] for t, budgets in settings.items()},
        nodes=NODES if trees else (0,),
        contexts=contexts,
        clock=clock,
        progress=progress,
    )
    menus: dict[float, Menu] = {}
    for t, budgets in settings.items():
        seen: list[list[list[Seen]]] = []
        for budget in budgets:
            progress(f"temperature {t:g}: {describe(budget)}")
            seen.append(_decode(decoder, budget, prompts, new_tokens if t == 0 else max(2, new_tokens // 2), t))
        menus[t] = menu(costs[t], budgets, seen, [p.numel() for p in prompts])
    plan = Plan(greedy=menus[0.0], sampled=menus[temperature], temperature=temperature)
    return Tuning(plan=plan, seconds=clock() - began, spread=max(c.spread for c in costs.values()))


def candidates(drafter: Drafter, *, greedy: bool) -> list[Budget]:
    """Settings that the drafter can build: at temperature 0 a sized best-first tree, or chains; above also siblings."""
    base = default_budget(drafter, greedy=greedy)
    tree = replace(base, shape=BestFirst(NODES[-1]))
    chains = [Budget(gamma=min(g, base.gamma), shape=Chain()) for g in CHAINS]
    if greedy:
        return [tree] if _builds(drafter, tree) else [c for c in dict.fromkeys(chains) if _builds(drafter, c)]
    wide = [replace(base, shape=shape) for shape in SIBLINGS]
    wide += [replace(base, shape=SIBLINGS[2], temperature=t) for t in DRAFT_TEMPERATURES]
    return [b for b in dict.fromkeys([tree, *chains[:3], *wide]) if _builds(drafter, b)]


def describe(budget: Budget) -> str:
    """A setting in words."""
    heat = "" if budget.temperature == 1 else f", draft temperature {budget.temperature:g}"
    return f"{shape_text(budget.shape)}, gamma {budget.gamma}{heat}"


def menu(
    costs: Costs, budgets: Sequence[Budget], seen: Sequence[Sequence[Sequence[Seen]]], starts: Sequence[int]
) -> Menu:
    """What may be drafted, and what it promises, from rounds seen.

    Args:
        costs: at this temperature. seen: for each setting and each sample text its rounds. starts: prompts' lengths.
    """
    table, fixed, arms = costs.table, list[tuple[str, Prediction]](), list[Arm]()
    trees = [texts for budget, texts in zip(budgets, seen, strict=True) if isinstance(budget.shape, BestFirst)]
    prior = _rates([text for texts in trees for text in texts]) if trees else ()
    nothing = Prediction(tau=1.0, speedup=1.0, nodes=0.0)
    for budget, texts in zip(budgets, seen, strict=True):
        rounds = [r for text in texts for r in text]
        means = {
            "accepted": sum(len(r.path) for r in rounds) / len(rounds),
            "nodes": sum(r.nodes for r in rounds) / len(rounds),
        }
        arm = Arm(budget=budget, seconds=costs.seconds.get(budget, ()), **means)
        one = Menu(costs=table, arms=(arm,), planned=nothing, prior=prior)
        for size in table.nodes[1:] if isinstance(budget.shape, BestFirst) else (None,):
            shown = budget if size is None else replace(budget, shape=BestFirst(size))
            fixed.append((describe(shown), _always(one, texts, starts, size)))
        if isinstance(budget.shape, BestFirst):
            best = max(fixed, key=lambda item: item[1].speedup)[1]
            arm = replace(arm, accepted=best.tau - 1, nodes=best.nodes)
        arms.append(arm)
    fixed.sort(key=lambda item: -item[1].speedup)
    order = sorted(range(len(arms)), key=lambda i: -_value(table, arms[i]))
    rough = Menu(costs=table, arms=tuple(arms[i] for i in order), planned=fixed[0][1], prior=prior)
    planned = _replay(rough, [seen[i] for i in order], starts)
    return replace(rough, planned=planned, fixed=tuple(fixed))


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
        decoder: its rule is kept; settings whose drafts it is not exact for are left out. greedy: whether texts will be
            decoded at temperature 0. path: a plan; None = the one that ``specdiff tune`` keeps for the pair.

    Raises:
        InputError: no drafter, or no plan for this pair on this machine. PairingError: the rule fits no setting.
    """
    names = identity(decoder)
    assert decoder.drafter is not None
    return planned(decoder, load_plan(path or plan_path(names), names), greedy=greedy)


def planned(decoder: SpeculativeDecoder, plan: Plan, *, greedy: bool) -> SpeculativeDecoder:
    """The same, with a plan at hand."""
    assert decoder.drafter is not None, "a plan is of a pair"
    menu, rule = plan.menu(greedy=greedy), decoder.settings.rule
    if rule != "auto":
        fits: list[Arm] = []
        for arm in menu.arms:
            kind = declared_provenance(decoder.drafter, arm.budget)
            try:
                check_pairing(rules.get(rule), kind, greedy=greedy, tree=may_branch(arm.budget.shape))
            except PairingError as error:
                if arm is menu.arms[-1] and not fits:
                    raise error
                continue
            fits.append(arm)
        menu = replace(menu, arms=tuple(fits))
        plan = replace(plan, greedy=menu) if greedy else replace(plan, sampled=menu)
    settings = Settings(rule=rule, budget=menu.arms[0].budget, controller=plan.controller(greedy=greedy))
    return SpeculativeDecoder(decoder.target, decoder.drafter, decoder.tokenizer, settings)


def _builds(drafter: Drafter, budget: Budget) -> bool:
    try:
        drafter.provenance(budget)
    except InputError:
        return False
    return True


def _decode(
    decoder: SpeculativeDecoder, budget: Budget, prompts: Sequence[Tensor], new_tokens: int, temperature: float
) -> list[list[Seen]]:
    """The sample texts' rounds with one setting."""
    tuned = SpeculativeDecoder(decoder.target, decoder.drafter, decoder.tokenizer, Settings(budget=budget))
    texts: list[list[Seen]] = []
    for prompt in prompts:
        rounds: list[Seen] = []

        def hear(event: RoundEvent, rounds: list[Seen] = rounds, length: int = prompt.numel()) -> None:
            record = event.record
            rounds.append(Seen(record.start - length, record.nodes, event.draft.scores, record.path))

        tuned.generate(prompt, max_new_tokens=new_tokens, temperature=temperature, on_round=hear)
        texts.append(rounds)
    return texts


def _rates(texts: Sequence[Sequence[Seen]]) -> tuple[float, ...]:
    """Acceptance rates by claim; never falling with it, as too few rounds would have it."""
    seen = Calibration(claimed(), weight=_SEEN, keep=1.0)
    for rounds in texts:
        for r in rounds:
            seen.observe(r.scores, r.path)
    rates: list[float] = []
    for rate in seen.rates():
        rates.append(max(rate, rates[-1]) if rates else rate)
    assert len(rates) == len(EDGES) + 1
    return tuple(rates)


def _value(table_costs: CostTable, arm: Arm) -> float:
    context = table_costs.contexts[0]
    seconds = arm.seconds[0] if arm.seconds else table_costs.round(arm.nodes, context)
    return (1 + arm.accepted) * table_costs.step(context) / seconds


def _always(one: Menu, texts: Sequence[Sequence[Seen]], starts: Sequence[int], size: int | None) -> Prediction:
    """A setting used in every round; a best-first tree cut to ``size`` nodes."""
    total = _Sum()
    for rounds, length in zip(texts, starts, strict=True):
        for r in rounds:
            nodes = r.nodes if size is None else min(size, r.nodes)
            accepted = sum(node < nodes for node in r.path)
            total.add(one, one.arms[0], nodes, accepted, length + r.start)
    return total.prediction()


def _replay(menu: Menu, seen: Sequence[Sequence[Sequence[Seen]]], starts: Sequence[int]) -> Prediction:
    """The planner's own decisions: at each place of a text, the round that its choice had there or soon after."""
    total = _Sum()
    for text, length in enumerate(starts):
        planner, done = Planner(menu), 0
        rounds = [texts[text] for texts in seen]
        end = max(r[-1].start + len(r[-1].path) + 1 for r in rounds)
        while done < end:
            wish = planner.budget(end - done)
            nodes, scores, path, arm = 0, (), (), None
            if wish is not None:
                arm = planner.choice
                assert arm is not None
                mine = rounds[menu.arms.index(arm)]
                at = bisect.bisect_left([r.start for r in mine], done % (mine[-1].start + 1))
                nodes, scores, path = mine[at].nodes, mine[at].scores, mine[at].path
                if isinstance(wish.shape, BestFirst) and wish.shape.size is not None:
                    nodes = wish.shape.size(scores)
                    scores, path = scores[:nodes], tuple(node for node in path if node < nodes)
            tree = TokenTree(ids_tensor(range(nodes)), tuple(range(-1, nodes - 1)))
            planner.observe(_record(nodes, path, length + done), Draft(tree, scores=scores))
            total.add(menu, arm, nodes, len(path), length + done)
            done += len(path) + 1
    return total.prediction()


def _record(nodes: int, path: tuple[int, ...], start: int) -> Round:
    return Round(
        proposed=nodes,
        nodes=nodes,
        accepted=len(path),
        committed=len(path) + 1,
        extra=None,
        rule="",
        reason="replayed",
        source="",
        drafter_passes=0,
        start=start,
        path=path,
    )


@dataclass
class _Sum:
    """Tokens, rounds and time of rounds."""

    tokens: int = 0
    rounds: int = 0
    nodes: int = 0
    seconds: float = 0.0
    plain: float = 0.0

    def add(self, menu: Menu, arm: Arm | None, nodes: int, accepted: int, context: int) -> None:
        """Add a round; without a setting it is one of the loop's plain steps beside an idle drafter."""
        step = menu.costs.step(context)
        cost = menu.costs.scoring(0, context) if arm is None else menu.cost(arm, nodes, context) * step
        self.tokens, self.rounds, self.nodes = self.tokens + accepted + 1, self.rounds + 1, self.nodes + nodes
        self.seconds, self.plain = self.seconds + cost, self.plain + (accepted + 1) * step

    def prediction(self) -> Prediction:
        return Prediction(
            tau=self.tokens / self.rounds, speedup=self.plain / self.seconds, nodes=self.nodes / self.rounds
        )
