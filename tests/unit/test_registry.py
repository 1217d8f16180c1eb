"""Names, declarations and the automatic choice of rules."""

from __future__ import annotations

import pytest

from specdiff.errors import InputError, PairingError
from specdiff.types import Provenance
from specdiff.verify.base import Rule, check
from specdiff.verify.registry import RULES, choose, get

NAMES = {
    "match",
    "ratio",
    "block",
    "point_mass",
    "self_selection",
    "walk",
    "multi_round",
    "without_replacement",
    "traversal",
}


def test_every_rule_is_registered_under_its_own_name() -> None:
    assert set(RULES) == NAMES
    assert all(get(name).name == name for name in NAMES)


def test_the_registry_is_read_only() -> None:
    with pytest.raises(TypeError):
        RULES["mine"] = RULES["walk"]  # type: ignore[index]


def test_an_unknown_name_is_refused_with_all_names() -> None:
    with pytest.raises(InputError) as caught:
        get("greedy")
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("provenance", Provenance)
def test_the_choice_is_exact_for_the_draft_and_says_why(provenance: Provenance, greedy: bool, tree: bool) -> None:
    if provenance is Provenance.CHAIN and tree:
        pytest.skip("one chain does not branch")
    rule, reason = choose(provenance, greedy=greedy, tree=tree)
    check(rule, provenance, greedy=greedy, tree=tree)
    assert len(reason.split()) > 4


@pytest.mark.parametrize(
    ("provenance", "name"),
    [
        (Provenance.FIXED, "walk"),
        (Provenance.CHAIN, "block"),
        (Provenance.IID, "multi_round"),
        (Provenance.WITHOUT_REPLACEMENT, "without_replacement"),
    ],
)
def test_the_choice_above_temperature_zero(provenance: Provenance, name: str) -> None:
    assert choose(provenance, greedy=False)[0].name == name


@pytest.mark.parametrize("provenance", Provenance)
def test_at_temperature_zero_match_is_chosen(provenance: Provenance) -> None:
    assert choose(provenance, greedy=True)[0].name == "match"


def test_match_is_refused_above_temperature_zero() -> None:
    with pytest.raises(PairingError, match="temperature"):
        check(get("match"), Provenance.FIXED, greedy=False)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_a_refusal_says_what_fits(rule: Rule) -> None:
    for provenance in set(Provenance) - rule.exact_for:
        with pytest.raises(PairingError, match="use rule='auto'") as caught:
            check(rule, provenance, greedy=True)
        assert all(fit.value in str(caught.value) for fit in rule.exact_for)
