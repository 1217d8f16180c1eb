"""Exactness with the filters of `specdiff.sampling` on either side: the law compared with is the filtered one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdiff.sampling import LawBuilder, SamplingOptions
from specdiff.trees.sampled import sample_chain, sample_paths, siblings_without_replacement
from specdiff.types import TokenTree
from specdiff.verify.base import TargetLaw

from .enumeration import Table, drafts_of
from .families import Pair, flat, marginals, sharp, tables
from .test_rules_exact import assert_exact, rules_for

VOCAB, GAMMA = 4, 2
PLAIN = SamplingOptions(temperature=1.0)
FILTERS = {
    "top-k": SamplingOptions(temperature=1.0, top_k=2),
    "top-p": SamplingOptions(temperature=1.0, top_p=0.7),
    "min-p": SamplingOptions(temperature=1.0, min_p=0.4),
    "all": SamplingOptions(temperature=1.0, top_k=3, top_p=0.9, min_p=0.05),
    "greedy": SamplingOptions(),
}
PREFIX = torch.tensor([0])
NO_TREE = TokenTree(torch.empty(0, dtype=torch.int64), ())


def builder(options: SamplingOptions) -> LawBuilder:
    """The production path from logits to laws."""
    return LawBuilder(options, prompt_length=1, eos_ids=[], vocab_size=VOCAB)


def view(options: SamplingOptions) -> Callable[[Tensor, TokenTree], TargetLaw]:
    """Rows of a table as log-probabilities through ``LawBuilder``."""

    def law(rows: Tensor, tree: TokenTree) -> TargetLaw:
        return builder(options).law(rows.log(), PREFIX, tree)

    return law


@pytest.mark.parametrize("pair", [flat, sharp], ids=lambda pair: pair.__name__)
@pytest.mark.parametrize("side", ["target", "draft", "both"])
@pytest.mark.parametrize("name", FILTERS)
def test_filters_keep_every_rule_exact(name: str, side: str, pair: Pair, figure: Callable[..., None]) -> None:
    """Chain, draws and siblings; rules that use q and rules that do not."""
    plain, q = tables(pair, VOCAB, GAMMA)
    target_options = FILTERS[name] if side != "draft" else PLAIN
    target = Table(plain.rows, plain.length, greedy=target_options.greedy, view=view(target_options))
    rows = marginals(q, GAMMA)
    if side != "target":
        filtered = builder(FILTERS[name])
        rows = torch.stack([filtered.law(row.log()[None], PREFIX, NO_TREE).row(0).double() for row in rows])
    assert (target.joint() == 0).any() or side == "draft" or name == "min-p", "the filter drops something"
    for sampler in (
        lambda random: sample_chain(rows, random),
        lambda random: sample_paths(rows[:1], 2, random),
        lambda random: siblings_without_replacement(rows, (2, 1), random),
    ):
        drafts = drafts_of(sampler)
        rules = rules_for(drafts, greedy=target.greedy)
        figure(1, f"{name} on {side}, {pair.__name__}", **assert_exact(target, drafts, rules))
