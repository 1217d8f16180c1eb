"""The face: kinds of prompts, settings, streams, batches, and errors that name the remedy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdiff.decoder import Settings, SpeculativeDecoder, as_batch
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.errors import ContextOverflowError, InputError, PairingError
from specdiff.sampling import SamplingOptions
from specdiff.stopping import FinishReason, StopOptions
from specdiff.testing import TableMarginals, TableTarget
from specdiff.types import BestFirst, Budget, Chain, Samples, Siblings
from support.tokenizing import byte_level

TOKENIZER = byte_level()
V = len(TOKENIZER)
_LOGITS = torch.randn(V, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
TARGET = TableTarget(torch.softmax(_LOGITS, -1).expand(V, V, V))
DRAFTER = MarginalDrafter(TableMarginals.random(V, 3, seed=2, scale=2.0))


def decoder(**settings) -> SpeculativeDecoder:
    return SpeculativeDecoder(TARGET, DRAFTER, TOKENIZER, Settings(**settings))


def test_text_ids_and_tensors_are_the_same_prompt():
    ids = TOKENIZER("The fox")["input_ids"]
    texts = {decoder().generate(p, max_new_tokens=12).text for p in ("The fox", ids, torch.tensor(ids))}
    assert len(texts) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_adds_up_to_the_generation(temperature):
    pieces = list(decoder().stream("The fox", max_new_tokens=25, temperature=temperature, seed=5))
    whole = decoder().generate("The fox", max_new_tokens=25, temperature=temperature, seed=5)
    assert "".join(p.text for p in pieces) == whole.text
    assert [t for p in pieces for t in p.tokens] == list(whole.tokens)
    assert pieces[-1].generation == whole
    assert all(p.generation is None for p in pieces[:-1])
    assert {s.kind for p in pieces for s in p.spans} <= {"accepted", "recovered", "bonus"}


def test_a_batch_returns_a_list_whose_rows_equal_the_rows_alone():
    prompts = ["The fox", "def add", "日本"]
    batch = decoder().generate(prompts, max_new_tokens=10)
    assert [g.tokens for g in batch] == [decoder().generate(p, max_new_tokens=10).tokens for p in prompts]
    assert isinstance(decoder().generate(["The fox"], max_new_tokens=3), list)


def test_greedy_text_does_not_depend_on_drafter_shape_or_rule():
    plain = SpeculativeDecoder(TARGET, None, TOKENIZER).generate("The fox", max_new_tokens=20).tokens
    for shape in (Chain(), Samples(3), Siblings((2, 1)), BestFirst(6)):
        for rule in ("auto", "match", "walk", "self_selection"):
            budget = Budget(gamma=3, shape=shape, temperature=0.8)
            assert decoder(rule=rule, budget=budget).generate("The fox", max_new_tokens=20).tokens == plain


@pytest.mark.parametrize(
    ("prompts", "single", "count"),
    [
        ("a", True, 1),
        (["a", "b"], False, 2),
        ([1, 2], True, 1),
        (torch.tensor([1, 2]), True, 1),
        (torch.tensor([[1, 2], [3, 4]]), False, 2),
        ([{"role": "user", "content": "a"}], True, 1),
        ([[1], [2, 3]], False, 2),
    ],
)
def test_one_prompt_is_told_from_many(prompts, single, count):
    told, batch = as_batch(prompts)
    assert (told, len(batch)) == (single, count)


def test_chat_needs_a_template():
    with pytest.raises(InputError, match="chat template"):
        decoder().generate("hello", chat=True)


def test_an_empty_prompt_starts_from_bos_or_is_refused():
    with pytest.raises(InputError, match="no BOS token"):
        decoder().generate("")


@pytest.mark.parametrize("prompt", [torch.tensor([1.5]), torch.zeros(2, 2, 2, dtype=torch.int64)])
def test_ids_of_a_wrong_kind_are_refused(prompt):
    with pytest.raises(InputError, match="prompt"):
        decoder().encode(prompt)


def test_ids_beyond_the_vocabulary_are_refused():
    with pytest.raises(InputError, match="tokenizer"):
        decoder().generate([V])


def test_no_prompts_are_refused():
    with pytest.raises(InputError, match="at least one prompt"):
        decoder().generate([])


def test_a_prompt_that_fills_the_context_is_refused_and_a_text_ends_at_it():
    small = TableTarget(TARGET.table, context=8)
    with pytest.raises(ContextOverflowError, match="shorten"):
        SpeculativeDecoder(small, DRAFTER, TOKENIZER).generate(list(range(8)))
    done = SpeculativeDecoder(small, DRAFTER, TOKENIZER).generate(list(range(5)), max_new_tokens=50)
    assert (len(done.tokens), done.finish) == (3, FinishReason.CONTEXT)


@pytest.mark.parametrize(
    "budget",
    [
        Budget(gamma=0, shape=Chain()),
        Budget(gamma=2, shape=Samples(0)),
        Budget(gamma=2, shape=BestFirst(0)),
        Budget(gamma=2, shape=Siblings(())),
        Budget(gamma=2, shape=Siblings((2, 0))),
        Budget(gamma=2, shape=Chain(), temperature=0.0),
        Budget(gamma=2, shape=Chain(), temperature=float("nan")),
    ],
)
def test_budgets_that_mean_nothing_are_refused(budget):
    with pytest.raises(InputError, match="expected"):
        Settings(budget=budget)


def test_unfit_rules_are_refused_before_anything_runs():
    with pytest.raises(PairingError, match="ratio"):
        decoder(rule="ratio", budget=Budget(gamma=2, shape=BestFirst(4))).generate("a", temperature=1.0)
    with pytest.raises(InputError, match="one of"):
        decoder(rule="nonsense")
    with pytest.raises(PairingError, match="temperature"):
        decoder(rule="match").generate("a", temperature=1.0)


@pytest.mark.parametrize("gamma", [0, 4])
def test_gamma_outside_the_window_is_refused(gamma):
    with pytest.raises(InputError, match="gamma"):
        decoder(gamma=gamma).generate("a")


def test_shortcuts_go_into_the_options():
    stop = StopOptions(max_new_tokens=50, stop_ids=(5,))
    done = decoder().generate(
        "The fox", max_new_tokens=4, stop=stop, sampling=SamplingOptions(top_k=3), temperature=0.7
    )
    assert len(done.tokens) <= 4


def test_a_stop_string_in_a_special_token_ends_nothing_and_one_across_it_ends_the_text():
    """Special tokens are not part of the text, so they neither hold a stop string nor break one apart."""
    special = TOKENIZER.convert_tokens_to_ids("<|user|>")
    a, b = (TOKENIZER.convert_tokens_to_ids(c) for c in "Qz")
    table = torch.zeros(V, V, dtype=torch.float64)
    table[:, a] = 1
    table[a] = torch.nn.functional.one_hot(torch.tensor(special), V)
    table[special] = torch.nn.functional.one_hot(torch.tensor(b), V)
    recite = SpeculativeDecoder(TableTarget(table.expand(V, V, V)), DRAFTER, TOKENIZER)
    inside = recite.generate([b], stop=StopOptions(max_new_tokens=6, stop_strings=("user",)))
    assert (inside.finish, inside.text) == (FinishReason.LENGTH, "QzQz")
    across = recite.generate([b], stop=StopOptions(max_new_tokens=6, stop_strings=("Qz",)))
    assert (across.finish, across.text, len(across.tokens)) == (FinishReason.STOP_STRING, "", 3)


def test_the_hook_hears_every_round_with_its_q_rows():
    heard = []
    budget = Budget(gamma=3, shape=Chain())
    done = decoder(budget=budget).generate("The fox", max_new_tokens=12, temperature=1.0, on_round=heard.append)
    assert [e.record for e in heard] == list(done.rounds)
    drafted = [e for e in heard if len(e.draft.tree)]
    assert all(e.draft.law.rows.shape == (e.record.proposed, V) for e in drafted)
    assert all(e.record.accepted == len(e.verdict.path) or e.record.extra is None for e in heard)


@pytest.mark.parametrize("seed", [None, -1, 1.0, True, "x"])
def test_seeds_that_are_no_seeds_are_refused(seed):
    with pytest.raises(InputError, match="seed"):
        decoder().generate("The fox", max_new_tokens=3, temperature=1.0, seed=seed)


@pytest.mark.parametrize(
    "options",
    [
        *({"sampling": {"temperature": 1}}, {"sampling": 3}, {"stop": 3}),
        *({"clock": 3}, {"on_round": "x"}, {"keep_errors": 3}, {"keep_errors": None}),
    ],
)
def test_options_of_another_type_are_refused(options):
    with pytest.raises(InputError, match=f"{next(iter(options))}: expected"):
        decoder().generate("The fox", **options)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: SpeculativeDecoder(TARGET, 3, TOKENIZER), "drafter"),
        (lambda: SpeculativeDecoder(TARGET, object(), TOKENIZER), "drafter"),
        (lambda: SpeculativeDecoder(TARGET, DRAFTER, TOKENIZER, {"rule": "auto"}), "settings"),
        (lambda: decoder(budget=3), "budget"),
        (lambda: decoder(controller=3), "controller"),
        (lambda: decoder(rule=3), "rule"),
        (lambda: decoder(rule=["ratio"]), "rule"),
    ],
)
def test_parts_of_another_type_are_refused_when_the_decoder_is_made(make, name):
    with pytest.raises(InputError, match=f"{name}: expected"):
        make()


@pytest.mark.parametrize(
    "budget",
    [
        Budget(gamma="a", shape=Chain()),
        Budget(gamma=2.5, shape=Chain()),
        Budget(gamma=True, shape=Chain()),
        Budget(gamma=2, shape=None),
        Budget(gamma=2, shape=Samples(True)),
        Budget(gamma=2, shape=Siblings(3)),
        Budget(gamma=2, shape=Siblings((1.5,))),
        Budget(gamma=2, shape=BestFirst(0)),
        Budget(gamma=2, shape=Chain(), temperature="a"),
        Budget(gamma=2, shape=Chain(), temperature=float("nan")),
    ],
    ids=repr,
)
def test_budgets_that_mean_nothing_are_refused_in_settings_and_from_controllers(budget):
    with pytest.raises(InputError, match="expected"):
        decoder(budget=budget)
    with pytest.raises(InputError, match="expected"):
        decoder(controller=lambda _: Asks(budget)).generate("The fox", max_new_tokens=6)


class Asks:
    """A controller that asks for the same whatever there is room for."""

    def __init__(self, wish):
        self.wish = wish

    def budget(self, room):
        return self.wish

    def observe(self, record, draft):
        pass


def test_a_controller_that_returns_no_budget_is_named():
    with pytest.raises(InputError, match="controller: expected a Budget or None"):
        decoder(controller=lambda _: Asks(3)).generate("The fox", max_new_tokens=6)


def test_a_budget_beyond_the_room_is_cut_to_it():
    seen = []
    greedy = decoder(controller=lambda _: Asks(Budget(gamma=500, shape=Chain())))
    text = greedy.generate("The fox", max_new_tokens=6, on_round=lambda event: seen.append(event.record.proposed))
    assert text.tokens == decoder().generate("The fox", max_new_tokens=6).tokens
    assert max(seen) <= 3  # the drafter's window


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, 5, 1.5, [1.5, 2], [[1, "a"]], [2**70], [True], np.array([1.5])),
        *(torch.tensor([True]), torch.tensor(3), torch.tensor([[[1, 2]]]), torch.empty(0, 3, dtype=torch.int64)),
    ],
    ids=repr,
)
def test_prompts_of_another_kind_are_refused(prompt):
    with pytest.raises(InputError, match="prompt"):
        decoder().generate(prompt, max_new_tokens=3)


def test_ids_come_from_numpy_too():
    ids = TOKENIZER("The fox")["input_ids"]
    expected = decoder().generate(ids, max_new_tokens=6).tokens
    for prompt in (np.array(ids), [np.int64(i) for i in ids], np.array(ids, dtype=np.int32)):
        assert decoder().generate(prompt, max_new_tokens=6).tokens == expected
    assert [g.tokens for g in decoder().generate(np.array([ids, ids]), max_new_tokens=6)] == [expected] * 2
