"""Projections against cases worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from specdiff.bench.scaling import Line, Model, Pair, Sample, fit, fit_line, hold_out, miss_rates, project
from specdiff.bench.scaling_inputs import geometric, plan_samples, read_pairs
from specdiff.control.costs import CostTable
from specdiff.control.menu import Arm, Menu, Prediction
from specdiff.control.plan import Plan
from specdiff.control.plan_file import save_plan
from specdiff.errors import InputError
from specdiff.types import BestFirst, Budget


def pair(name: str, target: float, drafter: float, *acceptance: float, rest: float = 0.0) -> Pair:
    """Two bytes a parameter at 1e9 bytes a second, a pass over the draft a quarter dearer than a step."""
    step, draft = 2 * target / 1e9, 2 * drafter / 1e9
    sample = Sample(step=step, target=1.25 * step, draft=draft, rest=rest, acceptance=acceptance)
    return Pair(name=name, target=target, drafter=drafter, samples=(sample,))


def test_one_pair_projected_onto_itself_is_what_was_measured():
    one = pair("a", 1e9, 1e8, 0.8, 0.4, rest=0.3)
    # tau 1 + .8 + .4 = 2.2; step 2 s; round .2 + 2.5 + .3 = 3 s
    assert one.speedup == pytest.approx(2.2 * 2 / 3)
    model = fit([one])
    assert model.tau(1e9, 1e8, 2) == pytest.approx(2.2)
    assert model.speedup(1e9, 1e8, 2) == pytest.approx(one.speedup)
    # a third position keeps the last rate, .4 / .8
    assert model.tau(1e9, 1e8, 3) == pytest.approx(2.4)


def test_a_larger_pair_of_the_same_ratio_by_hand():
    # 70 times larger: step 140 s, draft 14 s, pass 175 s, rest still .3; the ratio, and so tau, is the same
    found = project([pair("a", 1e9, 1e8, 0.8, 0.4, rest=0.3)], 70e9, [7e9], gamma=2)
    assert found.projections[0].tau == pytest.approx(2.2)
    assert found.projections[0].speedup == pytest.approx(2.2 * 140 / (14 + 175 + 0.3))
    assert found.projections[0].speedup_interval == pytest.approx((found.projections[0].speedup,) * 2)
    assert not found.fitted


def test_the_power_of_the_misses_is_found_again():
    # misses .4 at a tenth of the size; a drafter 4 times larger misses half as often: beta = log 2 / log 4
    small, large = pair("s", 1e9, 1e8, 0.6), pair("l", 1e9, 4e8, 0.8)
    model = fit([small, large])
    assert model.fitted
    assert model.beta == pytest.approx(0.5)
    assert model.tau(1e9, 16e8, 1) == pytest.approx(1.9)
    # speed: 16e8 is slower than the target itself
    assert model.speedup(1e9, 16e8, 1) == pytest.approx(1.9 * 2 / (3.2 + 2.5))


def test_the_assumed_power_is_stated_and_its_range_is_in_the_interval():
    found = project([pair("a", 1e9, 1e8, 0.5)], 1e9, [4e8], gamma=1, assumed_beta=(0.0, 1.0), resamples=400)
    assert found.beta == 0.5
    assert found.projections[0].tau == pytest.approx(1.75)  # a miss of .5 halved
    low, high = found.projections[0].tau_interval
    # at the 2.5 and 97.5 % quantiles of beta
    assert low == pytest.approx(2 - 0.5 * 4**-0.025, abs=0.02)
    assert high == pytest.approx(2 - 0.5 * 4**-0.975, abs=0.02)


def test_a_bandwidth_replaces_both_lines():
    model = fit([pair("a", 1e9, 1e8, 0.5)], bandwidth=2e12)
    assert model.step.seconds(144e9) == pytest.approx(0.072)
    assert model.draft.seconds(14e9) == pytest.approx(0.007)


def test_lines_have_an_overhead_only_where_the_points_show_one():
    line = fit_line([(1e9, 3.0), (3e9, 5.0)])
    assert (line.overhead, line.bandwidth) == pytest.approx((2.0, 1e9))
    one = fit_line([(2e9, 4.0)])
    assert (one.overhead, one.bandwidth) == pytest.approx((0.0, 5e8))
    assert fit_line([(1e9, 1.0), (2e9, 3.0)]).overhead == 0.0  # would be negative
    assert fit_line([(1e9, 0.0)]).seconds(5e9) == 0.0  # a draft without weights


def test_misses_are_shares_of_the_drafts_still_alive():
    assert miss_rates([0.8, 0.4, 0.4]) == pytest.approx([0.2, 0.5, 0.001])
    assert miss_rates([0.0, 0.0]) == [1.0]


def test_the_best_size_weighs_time_against_misses():
    lines = {"step": Line(overhead=0.0, bandwidth=1e9), "draft": Line(overhead=0.0, bandwidth=1e9)}
    flat = Model(**lines, nodes_factor=1.0, rest=0.0, intercepts=(math.log(0.5),), beta=0.0, fitted=True)
    assert flat.best(1e9, 1) == pytest.approx(1e6)  # size buys nothing: the smallest
    steep = Model(**lines, nodes_factor=1.0, rest=0.0, intercepts=(math.log(0.01),), beta=1.0, fitted=True)
    best = steep.best(1e9, 1)
    # miss .01 / r, round 1 + r: the maximum of (2 - .01 / r) / (1 + r) is the root of 2 r^2 - .02 r - .01
    assert best / 1e9 == pytest.approx((0.02 + math.sqrt(0.0004 + 0.08)) / 4, rel=0.07)


def test_held_out_pairs_show_the_models_error():
    exact = [pair("s", 1e9, 1e8, 0.6), pair("m", 2e9, 4e8, 0.6 + 0.4 * (1 - 2**-0.5)), pair("l", 4e9, 16e8, 0.8)]
    for found in hold_out(exact):
        assert found.error == pytest.approx(0.0, abs=1e-9)
    assert hold_out(exact[:1]) == []
    wrong = [*exact[:2], pair("l", 4e9, 16e8, 0.3)]
    last = hold_out(wrong)[-1]
    assert (last.name, last.error > 0.3) == ("l", True)
    assert last.projected / last.measured - 1 == pytest.approx(last.error)


def test_intervals_come_from_the_samples():
    samples = tuple(
        Sample(step=2.0, target=2.5, draft=0.2, rest=0.3, acceptance=(a,)) for a in (0.4, 0.5, 0.6, 0.7, 0.8)
    )
    spread = Pair(name="a", target=1e9, drafter=1e8, samples=samples)
    low, high = project([spread], 1e9, [1e8], gamma=1).projections[0].tau_interval
    assert 1.4 <= low < 1.6 < high <= 1.8


def test_means_weigh_rounds_and_a_short_text_hides_no_position():
    short = Sample(step=1.0, target=2.0, draft=0.0, rest=0.0, acceptance=(0.2,), weight=1)
    long = Sample(step=3.0, target=4.0, draft=0.4, rest=0.0, acceptance=(0.6, 0.3), weight=3)
    mean = Pair(name="a", target=1e9, drafter=1e8, samples=(short, long)).mean
    assert (mean.step, mean.target, mean.draft, mean.weight) == pytest.approx((2.5, 3.5, 0.3, 4))
    assert mean.acceptance == pytest.approx((0.5, 0.3))


@pytest.mark.parametrize(
    "change", [{"gamma": 0}, {"target": 0.0}, {"drafters": [-1.0]}, {"bandwidth": 0.0}, {"assumed_beta": (1.0, 0.0)}]
)
def test_numbers_that_mean_nothing_are_refused(change):
    options = {"target": 1e9, "drafters": [1e8], "gamma": 1} | change
    with pytest.raises(InputError, match=next(iter(change)).removesuffix("s")):
        project([pair("a", 1e9, 1e8, 0.5)], **options)


def test_geometric_acceptance_has_the_plans_tau():
    assert geometric(1.75, 2) == pytest.approx((0.5, 0.25))
    assert geometric(1.0, 3) == pytest.approx((0, 0, 0), abs=1e-12)
    with pytest.raises(InputError, match="tau"):
        geometric(4.1, 3)


def test_pairs_are_read_from_plans_and_rows(tmp_path: Path):
    costs = CostTable(
        contexts=(8, 16),
        nodes=(0, 4),
        target=((1.0, 2.0), (1.0, 3.0)),
        draft=(0.5, 0.6),
        plain=(1.1, 1.2),
    )
    arm = Arm(budget=Budget(gamma=2, shape=BestFirst(4)), accepted=0.75, nodes=2.0)
    best = Prediction(tau=1.75, speedup=1.0, nodes=2.0)
    menu = Menu(costs=costs, arms=(arm,), planned=best, fixed=())
    save_plan(tmp_path / "plan.json", Plan(greedy=menu, sampled=menu), {})
    one, two = plan_samples(tmp_path / "plan.json", greedy=True)
    assert (one.step, one.draft, one.rest, two.rest) == (1.1, 0.5, 0.0, 0.0)
    assert (one.target, two.target) == pytest.approx((1.5, 2.0))
    assert one.acceptance == pytest.approx((0.5, 0.25))
    times = {"target_seconds": 6.0, "draft_seconds": 3.0, "verify_seconds": 1.0}
    drafted = {"prompt": "a", "totals": times | {"rounds": 2, "proposed": 4, "acceptance_by_position": [0.5, 0.5]}}
    plain = {"prompt": "a", "totals": times | {"rounds": 5, "proposed": 0}}
    (tmp_path / "d.jsonl").write_text(json.dumps(drafted) + "\n")
    (tmp_path / "p.jsonl").write_text(json.dumps(plain) + "\n")
    sizes = {"target_parameters": 1e9, "drafter_parameters": 1e8}
    entries = [
        sizes | {"name": "a", "plan": "plan.json"},
        sizes | {"name": "b", "drafted": "d.jsonl", "plain": "p.jsonl"},
    ]
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps({"pairs": entries}))
    pairs = read_pairs(file)
    assert len(pairs[0].samples) == 2
    only = pairs[1].samples[0]
    assert (only.step, only.target, only.draft, only.rest, only.weight) == (2.0, 3.0, 1.5, 0.5, 2)
    for broken in (
        {"pairs": []},
        {"pairs": [sizes | {"name": "a"}]},
        {"pairs": [sizes | {"name": "a", "plan": "none.json"}]},
        {"pairs": [sizes | {"name": "a", "plan": "plan.json", "speed": 1}]},
        {"pairs": [sizes | {"name": "a", "plan": "pairs.json"}]},
        {"pairs": [sizes | {"name": "a", "drafted": "d.jsonl", "plain": "d.jsonl"}]},
        {"pairs": [sizes | {"name": "a", "plan": "plan.json", "target_parameters": "big"}]},
        [1],
    ):
        file.write_text(json.dumps(broken))
        with pytest.raises(InputError):
            read_pairs(file)
