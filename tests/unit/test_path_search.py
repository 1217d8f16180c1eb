"""The token lattice and the search for causally consistent paths."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdiff.decode import DecodeLoop, Request
from specdiff.drafters.autoregressive import AutoregressiveDrafter
from specdiff.drafters.base import DraftRequest, Observation
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.drafters.scoring import RowScorers
from specdiff.errors import InputError, PairingError
from specdiff.randomness import RandomStream
from specdiff.sampling import SamplingOptions
from specdiff.stopping import StopOptions
from specdiff.testing import TableMarginals, TableTarget
from specdiff.trees.lattice import Lattice, columns_of, prune, raw_length
from specdiff.trees.path_search import causal_paths, search
from specdiff.types import BestFirst, Budget, CausalPaths, Chain, Provenance, Samples, Siblings, may_branch
from specdiff.verify.registry import RULES
from support.scoring import CountingScorer, HashScorer, TableScorer
from support.tiny_targets import tiny_model

ALONE = CausalPaths(weight=1)


def logs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


# the lattice


def test_the_smallest_set_with_the_mass_is_kept() -> None:
    rows = logs([0.1, 0.5, 0.3, 0.1], [0.05, 0.9, 0.03, 0.02], [0.25, 0.25, 0.25, 0.25])
    lattice = prune(rows, ALONE)
    assert lattice.tokens == ((1, 2), (1,), (0, 1, 2, 3))
    assert lattice.log_q[0] == pytest.approx([math.log(0.5), math.log(0.3)])
    assert lattice.generated is None
    assert prune(rows, CausalPaths(mass=0.85)).tokens[0] == (1, 2, 0)  # equal ones by column
    assert prune(rows, CausalPaths(mass=1.0)).tokens == ((1, 2, 0, 3), (1, 0, 2, 3), (0, 1, 2, 3))
    assert prune(rows, CausalPaths(cap=1)).tokens[:2] == ((1,), (1,))


def test_tokens_of_probability_zero_are_left_out() -> None:
    lattice = prune(logs([0.5, 0.5, 0.0, 0.0]), CausalPaths(mass=1.0), eos=(3,))
    assert lattice.tokens == ((0, 1),)


def test_eos_is_kept_beside_the_cap() -> None:
    lattice = prune(logs([0.55, 0.34, 0.01, 0.1]), CausalPaths(cap=2), eos=(2, 3))
    assert lattice.tokens == ((0, 1, 3, 2),)
    assert lattice.ends == {2, 3}
    assert lattice.generated == 1


def test_the_lattice_ends_after_the_first_eos_of_the_raw_draft() -> None:
    rows = logs([0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.3, 0.2, 0.5], [0.8, 0.1, 0.1])
    lattice = prune(rows, ALONE, eos=(2,))
    assert lattice.generated == 2
    assert lattice.tokens == ((0, 1, 2), (0, 1, 2), (2, 0))
    assert len(prune(rows, ALONE, eos=())) == 4  # no EOS can be drafted
    assert prune(rows, ALONE, eos=()).generated == 4


def test_a_draft_vocabulary_is_mapped() -> None:
    vocab = torch.tensor([3, 5, 8])
    assert columns_of((8, 4, 3, 8), vocab, 10) == (2, 0)
    assert columns_of((8, 4, 3, 8), None, 8) == (4, 3)
    lattice = prune(logs([0.1, 0.85, 0.05]), ALONE, vocab, eos=columns_of((8,), vocab, 10))
    assert lattice.tokens == ((5, 8),)
    assert lattice.ends == {8}


def test_raw_length() -> None:
    rows = logs([0.9, 0.1], [0.1, 0.9], [0.1, 0.9])
    assert [raw_length(rows, eos) for eos in ((), (0,), (1,), (0, 1))] == [3, 0, 1, 0]
    assert raw_length(rows[:0], (1,)) == 0


# the search


def test_paths_agree_with_the_scorer() -> None:
    """Marginals mix two names; the n-gram model knows which words go together."""
    new, los, york, angeles = 0, 1, 2, 3
    rows = logs([0.5, 0.45, 0.03, 0.02], [0.02, 0.03, 0.45, 0.5])
    names = TableScorer({(new, york): -0.1, (los, angeles): -0.1, (9, new): -1.0, (9, los): -1.0})
    assert causal_paths(rows, ALONE, [9], None).tree.tokens.tolist() == [new, angeles]
    found = causal_paths(rows, CausalPaths(keep=2), [9], names)
    assert found.tree.tokens.tolist() == [new, york, los, angeles]
    assert found.tree.parents == (-1, 0, -1, 2)
    # 0.5 (log 0.5 + log 0.45) + 0.5 (-1.0 - 0.1) for both, found first by falling q
    assert found.scores == pytest.approx([math.log(0.5), math.log(0.225), math.log(0.45), math.log(0.225)])
    assert causal_paths(rows, CausalPaths(), [7], names).tree.is_chain


def test_scores_see_the_committed_tokens_and_the_path() -> None:
    seen: list[tuple[int, ...]] = []

    class Listening(HashScorer):
        def log_probs(self, context, tokens):
            seen.append(tuple(context))
            return super().log_probs(context, tokens)

    lattice = Lattice(((1,), (2,), (3,)), ((-0.1,), (-0.1,), (-0.1,)))
    search(lattice, [5, 6, 7], Listening(3), CausalPaths())
    assert seen == [(6, 7), (7, 1), (1, 2)]
    seen.clear()
    search(lattice, [7], Listening(3), CausalPaths())
    assert seen == [(7,), (7, 1), (1, 2)]
    seen.clear()
    search(lattice, [7], Listening(1), CausalPaths())
    assert seen == [(), (), ()]


def test_ties_are_broken_by_rank() -> None:
    lattice = Lattice(((4, 2), (3, 1)), ((-1.0, -1.0), (-1.0, -1.0)))
    found = [path.tokens for path in search(lattice, [], None, CausalPaths(beam=4, keep=4, weight=1))]
    assert found == [(4, 3), (4, 1), (2, 3), (2, 1)]


def test_an_improbable_eos_never_wins() -> None:
    """EOS costs 4.6, twenty good tokens cost 30: the plain sum would end at once."""
    good = -1.5
    eos = -4.6
    lattice = Lattice(((1, 0),) * 20, ((good, eos),) * 20, frozenset({0}))
    for keep in (1, 3):
        best = search(lattice, [], None, CausalPaths(weight=1, keep=keep))[0]
        assert best.tokens == (1,) * 20
        assert best.score == pytest.approx(20 * good)
        assert best.fair == 0
    # nor by the mean, which an early end among certain tokens would win: (-0.02 - 4.6) / 3 against (-0.02 - 9) / 5
    uneven = Lattice(((1, 0),) * 5, ((-0.01, eos),) * 2 + ((-3.0, eos),) * 3, frozenset({0}))
    assert search(uneven, [], None, ALONE)[0].tokens == (1,) * 5


def test_an_eos_that_is_best_at_its_place_wins() -> None:
    lattice = Lattice(((1, 0), (0, 1), (1, 0)), ((-0.1, -5.0), (-0.2, -2.0), (-0.1, -6.0)), frozenset({0}))
    found = search(lattice, [], None, CausalPaths(weight=1, keep=3))
    assert [path.tokens for path in found] == [(1, 0), (1, 1, 1), (0,)]
    assert [path.fair for path in found] == pytest.approx([1.8, 0.0, -4.9])


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        ([[0.1, 0.9]], [1]),  # one position, EOS
        ([[0.9, 0.1]], [0]),  # one position
        ([[0.1, 0.9]] * 4, [1]),  # all EOS: the first one, and the target may accept the end
        ([[0.45, 0.55], [1.0, 0.0]], [1]),  # begins with EOS
        ([[0.0, 1.0]], [1]),  # nothing but EOS
    ],
)
def test_degenerate_lattices(rows: list[list[float]], tokens: list[int]) -> None:
    draft = causal_paths(logs(*rows), ALONE, [0], None, eos=(1,))
    assert draft.tree.tokens.tolist() == tokens
    assert draft.generated == (0 if tokens == [1] else 1)


def test_an_empty_window_gives_the_empty_draft() -> None:
    draft = causal_paths(torch.empty(0, 4), ALONE, [0], None, eos=(1,))
    assert (len(draft.tree), draft.generated) == (0, 0)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"beam": 0}, "beam"),
        ({"keep": 0}, "keep"),
        ({"keep": 4}, "keep"),
        ({"cap": 0}, "cap"),
        ({"cap": 1.5}, "cap"),
        ({"mass": 0.0}, "mass"),
        ({"mass": 1.01}, "mass"),
        ({"mass": float("nan")}, "mass"),
        ({"weight": -0.1}, "weight"),
        ({"weight": 1.1}, "weight"),
    ],
)
def test_options_out_of_range_are_refused(values: dict[str, float], name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: expected"):
        CausalPaths(**values)  # type: ignore[arg-type]


# as a shape

V = 6
SOURCE = TableMarginals.random(V, 4, seed=5, scale=2.0)
PROMPT = torch.tensor([1, 2])


def ask(prefix: list[int], shape: CausalPaths | Chain | Samples | Siblings | BestFirst, row: int = 0) -> DraftRequest:
    budget = Budget(gamma=4, shape=shape)
    return DraftRequest(row=row, prefix=torch.tensor(prefix), budget=budget, random=RandomStream(0, "draft"))


def test_the_drafter_builds_fixed_paths() -> None:
    drafter = MarginalDrafter(SOURCE, scorer=HashScorer(), eos_ids=(0,))
    shape = CausalPaths(keep=3)
    assert drafter.provenance(Budget(gamma=4, shape=shape)) is Provenance.FIXED
    (draft,) = drafter.open(1).propose([ask([1, 2], shape)])
    rows = SOURCE.table[2].log_softmax(-1)
    wanted = causal_paths(rows, shape, [1, 2], HashScorer(), eos=(0,), source="table-marginals")
    assert draft.tree.tokens.tolist() == wanted.tree.tokens.tolist()
    assert draft.tree.parents == wanted.tree.parents
    assert (draft.provenance, draft.source, draft.generated) == (Provenance.FIXED, "table-marginals", wanted.generated)


def test_every_shape_tells_the_length_of_the_raw_draft_where_it_is_asked() -> None:
    best = SOURCE.table[2].argmax(-1).tolist()
    shapes = (Chain(), Samples(2), Siblings((2, 1)), BestFirst(5), CausalPaths(), CausalPaths(weight=1))
    for shape in shapes:
        plain = ask([1, 2], shape)
        request = [replace(plain, budget=replace(plain.budget, raw_length=True))]
        known = MarginalDrafter(SOURCE, scorer=HashScorer(), eos_ids=(best[1],)).open(1).propose(request)
        none = MarginalDrafter(SOURCE, scorer=HashScorer(), eos_ids=()).open(1).propose(request)
        unknown = MarginalDrafter(SOURCE, scorer=HashScorer()).open(1).propose(request)
        assert [d.generated for d in (*known, *none, *unknown)] == [best.index(best[1]), 4, None]
        (silent,) = MarginalDrafter(SOURCE, scorer=HashScorer(), eos_ids=(best[1],)).open(1).propose([plain])
        assert silent.generated is None or isinstance(shape, CausalPaths)


def test_a_scorer_is_needed_below_weight_one() -> None:
    budget = Budget(gamma=4, shape=CausalPaths())
    with pytest.raises(InputError, match=r"^scorer: expected an n-gram model .*--ngram.* weight=1"):
        MarginalDrafter(SOURCE).provenance(budget)
    with pytest.raises(InputError, match=r"^scorer: expected an n-gram model"):
        DecodeLoop(TableTarget.random(V), MarginalDrafter(SOURCE), [Request(prompt=PROMPT)], budget=budget)
    assert MarginalDrafter(SOURCE).provenance(Budget(gamma=4, shape=ALONE)) is Provenance.FIXED
    scorer = HashScorer()
    MarginalDrafter(SOURCE, scorer=scorer).open(1).propose([ask([1], ALONE)])
    assert scorer.calls == 0


def test_what_is_no_scorer_is_refused() -> None:
    with pytest.raises(InputError, match=r"^scorer: expected an NgramScorer"):
        MarginalDrafter(SOURCE, scorer="prompt")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^scorer: expected a function that makes"):
        MarginalDrafter(SOURCE, scorer=CountingScorer(V))


def test_scorers_that_learn_hear_each_token_once() -> None:
    made: list[CountingScorer] = []

    def make() -> CountingScorer:
        made.append(CountingScorer(V))
        return made[-1]

    scorers = RowScorers(make, 2)
    assert scorers.at(1, torch.tensor([4, 5]))[0] is made[0]
    scorers.at(1, torch.tensor([4, 5, 1]))
    scorers.at(0, torch.tensor([2]))
    assert [s.text for s in made] == [[4, 5, 1], [2]]
    scorers.rewind(1, 3)  # nothing beyond
    scorers.at(1, torch.tensor([4, 5, 1, 3]))
    assert made[0].text == [4, 5, 1, 3]
    scorers.rewind(1, 2)
    scorers.at(1, torch.tensor([4, 5, 2]))
    assert [s.text for s in made] == [[4, 5, 1, 3], [2], [4, 5, 2]]
    assert RowScorers(HashScorer(3), 1).at(0, torch.tensor([4, 5, 2]))[1] == [5, 2]
    assert RowScorers(make, 1).at(0, torch.tensor([4]))[1] == ()


def test_a_rewound_session_drafts_as_a_new_one() -> None:
    session = MarginalDrafter(SOURCE, scorer=lambda: CountingScorer(V)).open(1)
    session.observe([Observation(row=0, start=0, tokens=(1,), accepted=0)])
    session.propose([ask([1, 3, 3, 3, 3, 3], CausalPaths())])
    session.rewind(0, 1)
    again = session.propose([ask([1, 2, 2], CausalPaths())])[0]
    new = MarginalDrafter(SOURCE, scorer=lambda: CountingScorer(V)).open(1).propose([ask([1, 2, 2], CausalPaths())])[0]
    assert again.tree.tokens.tolist() == new.tree.tokens.tolist()
    assert again.scores == new.scores


@pytest.mark.parametrize("shape", [CausalPaths(), CausalPaths(keep=3), CausalPaths(weight=1)])
def test_paths_change_no_greedy_text(shape: CausalPaths) -> None:
    target = TableTarget(TableTarget.random(V, seed=8).table, eos_ids=(0,))
    drafter = MarginalDrafter(SOURCE, scorer=lambda: CountingScorer(V), eos_ids=(0,))

    def text(drafter: MarginalDrafter | None) -> list[int]:
        stop = StopOptions(max_new_tokens=24, ignore_eos=True)
        loop = DecodeLoop(target, drafter, [Request(prompt=PROMPT, stop=stop)], budget=Budget(gamma=4, shape=shape))
        for _ in loop.run():
            pass
        rules = {record.rule for record in loop.rows[0].rounds if record.nodes}
        assert rules <= {"match"}
        return loop.rows[0].new_tokens

    assert text(drafter) == text(None)


def test_rules_that_use_q_are_refused() -> None:
    drafter = MarginalDrafter(SOURCE, scorer=HashScorer())
    request = Request(prompt=PROMPT, sampling=SamplingOptions(temperature=1.0))

    def loop(rule: str, shape: CausalPaths) -> None:
        budget = Budget(gamma=4, shape=shape)
        DecodeLoop(TableTarget.random(V), drafter, [request], budget=budget, rule=RULES[rule])

    for rule in ("ratio", "block", "multi_round", "without_replacement", "traversal"):
        with pytest.raises(PairingError):
            loop(rule, CausalPaths())
    loop("walk", CausalPaths(keep=2))
    loop("point_mass", CausalPaths())  # one path
    with pytest.raises(PairingError):
        loop("point_mass", CausalPaths(keep=2))
    assert [may_branch(s) for s in (Chain(), CausalPaths(), CausalPaths(keep=2), BestFirst(2))] == [0, 0, 1, 1]


def test_drafters_without_marginals_refuse_the_shape() -> None:
    with pytest.raises(InputError, match=r"^shape: expected a shape other than CausalPaths"):
        AutoregressiveDrafter(tiny_model("llama"), vocab_size=32).provenance(Budget(gamma=2, shape=CausalPaths()))
