"""A world without models for the planner: drafters that claim, texts that accept, costs by a table."""

from __future__ import annotations

import functools
import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdiff.control.base import Controller
from specdiff.control.calibration import Calibration, claimed
from specdiff.control.costs import CostTable
from specdiff.control.menu import Arm, Menu, Prediction
from specdiff.types import BestFirst, Budget, Draft, Round, Siblings, TokenTree, ids_tensor

NODES = (0, 1, 2, 4, 8, 16, 24)
GAMMA = 8


def costs(draft: float = 0.35, base: float = 1.04, node: float = 0.045) -> CostTable:
    """In plain steps; by default about what the default pair takes on two cores; longer contexts cost more."""
    row = tuple(base + node * n for n in NODES)
    return CostTable(
        contexts=(64, 1024),
        nodes=NODES,
        target=(row, tuple(1.6 * v for v in row)),
        draft=(draft, 1.5 * draft),
        plain=(1.0, 1.4),
    )


@dataclass(frozen=True)
class Text:
    """How a drafter does on a text.

    Attributes:
        claim: (low, high) of the drafter's probability of its best token, drawn anew for each position of a window.
        right: the share of its claims that is true: the target's token is drawn from q with this probability, at every
            position after a right one, and is none of q's else.
    """

    claim: tuple[float, float]
    right: float


GOOD = Text((0.5, 1.0), 0.93)
MIDDLING = Text((0.3, 1.0), 0.8)
POOR = Text((0.2, 0.8), 0.5)
HOPELESS = Text((0.5, 0.95), 0.03)
NEVER = Text((0.8, 1.0), 0.0)


@dataclass
class Window:
    """One window: a tree of its 24 best nodes, their claims, and which are on the target's path."""

    parents: tuple[int, ...]
    scores: tuple[float, ...]
    path: tuple[int, ...]


def window(text: Text, rng: random.Random) -> Window:
    """Draw one. The q of a position gives its best token the claim, the second two thirds of the rest, and so on."""
    rows: list[list[float]] = []
    for _ in range(GAMMA):
        left, row = 1.0, []
        share = rng.uniform(*text.claim)
        for _ in range(4):
            row.append(left * share)
            left -= row[-1]
            share = 2 / 3
        rows.append(row)
    truth: list[int] = []
    for row in rows:
        if rng.random() >= text.right:
            break
        rank = rng.choices(range(5), weights=[*row, 1 - sum(row)])[0]
        if rank == 4:
            break
        truth.append(rank)
    order: list[tuple[int, ...]] = []
    scores: list[float] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-math.log(rows[0][0]), (0,))]
    while heap and len(order) < NODES[-1]:
        cost, ranks = heapq.heappop(heap)
        order.append(ranks)
        scores.append(-cost)
        row, rank = rows[len(ranks) - 1], ranks[-1]
        if rank + 1 < len(row):
            heapq.heappush(heap, (cost + math.log(row[rank] / row[rank + 1]), (*ranks[:-1], rank + 1)))
        if len(ranks) < len(rows):
            heapq.heappush(heap, (cost - math.log(rows[len(ranks)][0]), (*ranks, 0)))
    place = {ranks: i for i, ranks in enumerate(order)}
    parents = tuple(place[ranks[:-1]] if len(ranks) > 1 else -1 for ranks in order)
    path = [place[tuple(truth[: i + 1])] for i in range(len(truth)) if tuple(truth[: i + 1]) in place]
    return Window(parents, tuple(scores), tuple(path))


@functools.cache
def windows(text: Text, count: int = 400) -> list[Window]:
    """So many of a text; drawing one takes longer than planning a round."""
    rng = random.Random(0)
    return [window(text, rng) for _ in range(count)]


def measured_prior(*texts: Text) -> tuple[float, ...]:
    """Acceptance rates by claim, as tuning sees them on such texts."""
    seen = Calibration(claimed(), weight=4, keep=1.0)
    for text in texts:
        for drawn in windows(text):
            seen.observe(drawn.scores, drawn.path)
    return tuple(seen.rates())


@dataclass(frozen=True)
class Outcome:
    """Of one text: tokens, time in plain steps, time of plain decoding, rounds that drafted, and the worst loss."""

    tokens: int
    time: float
    plain: float
    drafted: int
    rounds: int
    worst: float

    @property
    def speedup(self) -> float:
        return self.plain / self.time


def decode(
    controller: Controller, menu: Menu, texts: Callable[[int], Text], tokens: int, seed: int, start: int = 100
) -> Outcome:
    """Decode so many tokens of a text that may change with the place (``texts(done)``).

    The time is that of the table, and `Outcome.worst` the largest of (time - plain time) in plain steps of its moment.
    """
    done = drafted = rounds = 0
    time = plain = loss = worst = 0.0
    while done < tokens:
        budget, window_ = controller.budget(tokens - done - 1), _at(windows(texts(done)), seed, done)
        context, size = start + done, 0
        if budget is not None:
            size = _size(budget, window_)
        scores = window_.scores[:size] if budget is not None and isinstance(budget.shape, BestFirst) else ()
        path = tuple(node for node in window_.path if node < size)
        path = path[: budget.gamma] if budget else ()
        tree = TokenTree(ids_tensor(range(size)), window_.parents[:size])
        record = Round(
            proposed=tree.depth,
            nodes=size,
            accepted=len(path),
            committed=len(path) + 1,
            extra=None,
            rule="",
            reason="",
            source="",
            drafter_passes=int(budget is not None),
            start=context,
            path=path,
        )
        step = menu.costs.step(context)
        spent = step if budget is None else step * menu.cost(_arm(menu, budget), size, context)
        controller.observe(record, Draft(tree, scores=scores))
        time, plain, done, rounds = time + spent, plain + step * len(path) + step, done + len(path) + 1, rounds + 1
        loss += spent / step - len(path) - 1
        worst = max(worst, loss)
        drafted += budget is not None
    return Outcome(done, time, plain, drafted, rounds, worst)


def _at(drawn: list[Window], seed: int, place: int) -> Window:
    """The same one at a place of a text, whoever decodes it, so that controllers are compared on equal texts."""
    return drawn[((seed * 1_000_003 + place) * 2_654_435_761 >> 7) % len(drawn)]


def _size(budget: Budget, drawn: Window) -> int:
    shape = budget.shape
    if not isinstance(shape, BestFirst):
        assert isinstance(shape, Siblings)
        return math.prod(shape.widths) if len(shape.widths) == 1 else sum(shape.widths)
    scores = drawn.scores[: shape.nodes]
    return len(scores) if shape.size is None else shape.size(scores)


def _arm(menu: Menu, budget: Budget) -> Arm:
    """The menu's setting that a budget was made from."""
    kind = type(budget.shape)
    return next(a for a in menu.arms if type(a.budget.shape) is kind and (a.sized or a.budget.shape == budget.shape))


def sized_menu(table: CostTable, accepted: float = 1.6, speedup: float = 1.4, prior: Sequence[float] = ()) -> Menu:
    """A menu of one best-first tree of at most 24 nodes."""
    arm = Arm(budget=Budget(gamma=GAMMA, shape=BestFirst(24)), accepted=accepted, nodes=8.0)
    planned = Prediction(tau=1 + accepted, speedup=speedup, nodes=8.0)
    return Menu(costs=table, arms=(arm,), planned=planned, prior=tuple(prior))
