"""Expected accepted tokens of every rule over random targets: the toy table (docs/toy_table.md).

Target: an independent Dirichlet(a) row for every prefix, V = 40, gamma = 4. Drafter: q_j = 0.9 x the target's own
marginal at position j + 0.1 uniform, then the draft temperature. Monte Carlo over drafts and decisions with the
production builders and rules; intervals are over targets, the only level at which the samples are independent.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdiff.randomness import RandomStream
from specdiff.trees.best_first import best_first
from specdiff.trees.sampled import sample_chain, sample_paths, siblings_without_replacement
from specdiff.types import Draft, TokenTree
from specdiff.verify.registry import RULES

VOCAB, GAMMA, DRAWS_K = 40, 4, 8
CONCENTRATIONS = (0.02, 0.1, 0.5)
TEMPERATURES = (0.7, 1.0, 1.5)
WIDTHS = ((2, 2, 2, 2), (4, 2, 1, 1), (6, 2, 1, 1), (16, 1, 1), (8, 3, 1, 1))
NODES = (30, 60)

Key = tuple[float, float, str]
"""(Dirichlet concentration, draft temperature, column)."""


class ToyTarget:
    """Rows for every prefix of up to gamma - 1 tokens, and the marginals they imply.

    Args:
        concentration: Dirichlet parameter of every row. seed: decides all rows.
    """

    def __init__(self, concentration: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._levels: list[Tensor] = []
        marginals: list[Tensor] = []
        reach = torch.ones(1, dtype=torch.float64)
        for _ in range(GAMMA):
            shape = torch.full((reach.numel(), VOCAB), concentration, dtype=torch.float64)
            weights = torch._standard_gamma(shape, generator=generator)  # Dirichlet takes no generator
            rows = weights / weights.sum(dim=1, keepdim=True)
            marginals.append(reach @ rows)
            reach = (reach[:, None] * rows).flatten()
            self._levels.append(rows)
        self.marginals = torch.stack(marginals)
        """[gamma, V]: the target's own law of the j-th token ahead."""
        self._flat = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)

    def law(self, tree: TokenTree) -> ToyLaw:
        """The law at the root and every node."""
        index = [0]
        for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
            index.append(index[parent + 1] * VOCAB + token)
        return ToyLaw(self, index, (0, *tree.depths))

    def row(self, depth: int, index: int) -> Tensor:
        """One row; beyond the window, where no acceptance depends on it, a flat one."""
        return self._levels[depth][index] if depth < GAMMA else self._flat


@dataclass(frozen=True)
class ToyLaw:
    """Rows of one tree (a `specdiff.verify.base.TargetLaw`)."""

    target: ToyTarget
    index: Sequence[int]
    depths: Sequence[int]
    greedy: bool = False

    def row(self, index: int) -> Tensor:
        """Row 0 is the root's, row n + 1 node n's."""
        return self.target.row(self.depths[index], self.index[index])

    def choice(self, index: int) -> int:
        """Its argmax."""
        return int(self.row(index).argmax())


def shape_name(widths: Sequence[int]) -> str:
    """Widths and number of nodes, as the column headers give them."""
    nodes = sum(math.prod(widths[: depth + 1]) for depth in range(len(widths)))
    return f"{'-'.join(map(str, widths))} ({nodes})"


@dataclass(frozen=True)
class Shape:
    """One way of drafting, and the rules that verify its drafts.

    Attributes:
        name: column name. rules: names. sample: draws a draft given q [gamma, V] and a random stream.
    """

    name: str
    rules: Sequence[str]
    sample: Callable[[Tensor, RandomStream], Draft]


def shapes(marginals: Tensor) -> list[Shape]:
    """All shapes of the table; best-first trees are built once from the marginals themselves."""
    on_chain = ("point_mass", "ratio", "block")
    on_draws = ("self_selection", "walk", "without_replacement", "multi_round", "traversal")
    found = [
        Shape("1 chain", on_chain, sample_chain),
        Shape(f"K={DRAWS_K}", on_draws, lambda q, random: sample_paths(q, DRAWS_K, random)),
    ]
    for widths in WIDTHS:
        found.append(
            Shape(
                shape_name(widths),
                ("without_replacement", "traversal"),
                lambda q, random, widths=widths: siblings_without_replacement(q, widths, random),
            )
        )
    for nodes in NODES:
        best = best_first(marginals.log(), nodes)
        found.append(Shape(f"best-first {nodes}", ("walk",), lambda q, random, best=best: best))
    return found


def measure(task: tuple[float, int, int]) -> dict[Key, float]:
    """Mean accepted tokens of one target for every temperature and column.

    Args:
        task: (concentration, seed of the target, drafts a column).
    """
    concentration, seed, draws = task
    torch.set_num_threads(1)
    target = ToyTarget(concentration, seed)
    marginals = 0.9 * target.marginals + 0.1 / VOCAB
    sums: dict[Key, float] = {}
    for temperature in TEMPERATURES:
        q = torch.softmax(marginals.log() / temperature, dim=-1)
        for shape in shapes(marginals):
            # streams of their own, so that no column depends on which others there are
            draft_random = RandomStream(seed, f"draft/{temperature}/{shape.name}")
            verify_randoms = {
                rule: RandomStream(seed, f"verify/{temperature}/{shape.name}/{rule}") for rule in shape.rules
            }
            nodes_key = (concentration, temperature, f"nodes, {shape.name}")
            for _ in range(draws):
                draft = shape.sample(q, draft_random)
                law = target.law(draft.tree)
                for rule, random in verify_randoms.items():
                    key = (concentration, temperature, f"{rule}, {shape.name}")
                    sums[key] = sums.get(key, 0.0) + len(RULES[rule].verify(draft, law, random).path) / draws
                sums[nodes_key] = sums.get(nodes_key, 0.0) + len(draft.tree) / draws
    return sums


def interval(values: Sequence[float], digits: int = 2) -> str:
    """Mean and half-width of the 95 % interval."""
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.{digits}f} ± {half:.{digits}f}"


COMPARISONS = (
    ("block, 1 chain", "ratio, 1 chain"),
    (f"walk, K={DRAWS_K}", f"self_selection, K={DRAWS_K}"),
    (f"multi_round, K={DRAWS_K}", f"without_replacement, K={DRAWS_K}"),
    (f"traversal, K={DRAWS_K}", f"multi_round, K={DRAWS_K}"),
    ("traversal, 2-2-2-2 (30)", "without_replacement, 2-2-2-2 (30)"),
    ("traversal, 6-2-1-1 (42)", "without_replacement, 6-2-1-1 (42)"),
    ("traversal, 8-3-1-1 (80)", "without_replacement, 8-3-1-1 (80)"),
    ("traversal, 4-2-1-1 (28)", "traversal, 2-2-2-2 (30)"),
    ("traversal, 4-2-1-1 (28)", "walk, best-first 30"),
    ("traversal, 6-2-1-1 (42)", f"traversal, K={DRAWS_K}"),
)


def report(results: Sequence[dict[Key, float]], command: str) -> str:
    """The Markdown of both tables."""
    by_key: dict[Key, list[float]] = {}
    for result in results:
        for key, value in result.items():
            by_key.setdefault(key, []).append(value)
    settings = [(a, t) for a in CONCENTRATIONS for t in TEMPERATURES]
    names = [column for a, t, column in by_key if (a, t) == settings[0]]
    targets = len(next(iter(by_key.values())))

    def table(first: str, rows: Sequence[tuple[str, Callable[[tuple[float, float]], str]]]) -> str:
        head = [first, *(f"a={a}, T={t}" for a, t in settings)]
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join([label, *(cell(s) for s in settings)]) + " |" for label, cell in rows]
        return "\n".join(lines)

    accepted = [
        (name, lambda s, name=name: interval(by_key[*s, name])) for name in names if not name.startswith("nodes")
    ]
    nodes = [
        (name, lambda s, name=name: f"{statistics.fmean(by_key[*s, name]):.1f}")
        for name in names
        if name.startswith("nodes")
    ]
    differences = [
        (
            f"{left} - {right}",
            lambda s, left=left, right=right: interval(
                [x - y for x, y in zip(by_key[*s, left], by_key[*s, right], strict=True)], digits=3
            ),
        )
        for left, right in COMPARISONS
    ]
    return (
        "\n\n".join(
            [
                "# Toy table: expected accepted tokens of every rule",
                f"Made by `{command}`.",
                f"Accepted drafted tokens a round, without the extra one. V = {VOCAB}, gamma = {GAMMA}; target: an "
                f"independent Dirichlet(a) row for every prefix, {targets} targets for each a; q_j = 0.9 x the "
                "target's own marginal at position j + 0.1 uniform, then draft temperature T (best-first trees are "
                "built at T = 1). Rules on one shape verify the same drafts. Mean ± half-width of the 95 % interval "
                "over targets.",
                table("rule, draft", accepted),
                "Nodes of the tree that the target scores:",
                table("draft", nodes),
                "Differences within each target:",
                table("left - right", differences),
            ]
        )
        + "\n"
    )


def main() -> None:
    """Run all targets in parallel and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=100, help="random targets for each concentration")
    parser.add_argument("--draws", type=int, default=100, help="drafts for each target, shape and temperature")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="Markdown file; a section '## Reading' already in it is kept")
    args = parser.parse_args()
    tasks = [
        (a, args.seed * 1_000_003 + 1000 * number + target, args.draws)
        for number, a in enumerate(CONCENTRATIONS)
        for target in range(args.targets)
    ]
    with ProcessPoolExecutor(args.processes) as pool:
        results = list(pool.map(measure, tasks, chunksize=1))
    command = f"python scripts/toy_table.py --targets {args.targets} --draws {args.draws} --seed {args.seed}"
    text = report(results, command)
    if args.out is None:
        sys.stdout.write(text)
        return
    old = args.out.read_text() if args.out.exists() else ""
    args.out.write_text(text + ("\n## Reading" + old.split("\n## Reading", 1)[1] if "\n## Reading" in old else ""))


if __name__ == "__main__":
    main()
