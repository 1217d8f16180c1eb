"""All rules by name, and the choice that ``rule="auto"`` makes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specdiff.checking import one_of
from specdiff.types import Provenance
from specdiff.verify.base import Rule
from specdiff.verify.block import Block
from specdiff.verify.match import Match
from specdiff.verify.multi_round import MultiRound
from specdiff.verify.point_mass import PointMass
from specdiff.verify.ratio import Ratio
from specdiff.verify.self_selection import SelfSelection
from specdiff.verify.traversal import Traversal
from specdiff.verify.walk import Walk
from specdiff.verify.without_replacement import WithoutReplacement

_ALL: tuple[Rule, ...] = (
    Match(),
    Ratio(),
    Block(),
    PointMass(),
    SelfSelection(),
    Walk(),
    MultiRound(),
    WithoutReplacement(),
    Traversal(),
)

RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _ALL})
"""Every rule by name; read-only."""

# Why, in numbers: docs/toy_table.md (target temperature 1, three sharpnesses, three draft temperatures).
_AUTO: Mapping[Provenance, tuple[str, str]] = MappingProxyType(
    {
        Provenance.FIXED: (
            "walk",
            "no q to use: the walk accepts the p-mass of all nodes, the most that any lossless rule can, 0.2 to 0.5 "
            "tokens more than self-selection over the same tree",
        ),
        Provenance.CHAIN: (
            "block",
            "one chain with its q: block verification never accepts less than the ratio rule, up to 0.19 tokens more, "
            "and is optimal for one path",
        ),
        Provenance.IID: (
            "multi_round",
            "independent draws with their q: testing each against what is left of p accepts 0.5 to 1.7 tokens more "
            "than a walk over the same tree (traversal, by name: up to 0.2 more still, for two to three times the "
            "checking time)",
        ),
        Provenance.WITHOUT_REPLACEMENT: (
            "without_replacement",
            "distinct siblings with their q: at 2-2-2-2, 0.3 to 0.7 tokens more than block on one chain (traversal, by "
            "name: up to 0.23 more still, for two to three times the checking time)",
        ),
    }
)
_FIXED_CHAIN = "one path without q: the walk is point-mass acceptance, with one draw a node instead of coin and draw"


def get(name: str) -> Rule:
    """The rule called ``name``.

    Raises:
        InputError: there is no such rule; the message lists all names.
    """
    return one_of("rule", name, RULES, remedy="use one of these names, or 'auto' to choose by draft and temperature")


def choose(provenance: Provenance, *, greedy: bool, tree: bool = True) -> tuple[Rule, str]:
    """The rule for ``rule="auto"``, and why.

    The choice may depend on what is known before the draft only. Chosen by the tokens of a sampled draft, rules that
    are exact one by one would no longer be exact together.

    Args:
        provenance: of the draft.
        greedy: whether the target runs at temperature 0.
        tree: whether the shape asked for may branch.

    Returns:
        The rule and one sentence that says why it was chosen.
    """
    if greedy:
        return RULES["match"], "temperature 0: the longest path of argmaxes is all that can be accepted"
    name, reason = _AUTO[provenance]
    if provenance is Provenance.FIXED and not tree:
        reason = _FIXED_CHAIN
    return RULES[name], reason
