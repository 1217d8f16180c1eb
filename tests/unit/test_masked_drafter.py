"""Masked diffusion LMs as drafters: one step, prefix caches, several steps, and the text of the decode loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdiff.drafters.marginal import MarginalDrafter
from specdiff.drafters.masked import MaskedSource
from specdiff.drafters.multistep import ORDERS, MultiStepDrafter, group_sizes
from specdiff.errors import InputError, NumericsError, PairingError
from specdiff.models.diffusion import DiffusionLM, Window
from specdiff.types import BestFirst, Budget, Chain, Provenance, Samples, Siblings
from specdiff.verify import registry as rules
from support.drafting import PROMPTS, ask, decode, llama, plain
from support.table_denoiser import TableDenoiser
from support.tiny_diffusion import CONTEXT, FAMILIES, MASK, VOCAB, tiny

SHAPES = [Chain(), Samples(3), Siblings((2, 2, 1)), BestFirst(8)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DiffusionLM]:
    """A random float64 model of each family."""
    return {f: tiny(tmp_path_factory.mktemp(f), f, dtype=torch.float64) for f in FAMILIES}


def masks(count: int) -> Tensor:
    """A window with nothing revealed."""
    return torch.full((count,), MASK)


def alone(model: DiffusionLM, prefix: Sequence[int] | Tensor, tokens: Tensor) -> Tensor:
    """What one full pass over prefix and window says, without batch, cache or padding."""
    prefix = torch.as_tensor(prefix)
    filling = -(prefix.numel() + tokens.numel()) % model.config.block_size
    whole = torch.cat([prefix, tokens, masks(filling)])
    with torch.inference_mode():
        return model.rows([whole], [(prefix.numel(), prefix.numel() + tokens.numel())])[0]


def without_mask(logits: Tensor) -> Tensor:
    """Columns of all ids but the mask."""
    return torch.cat([logits[:, :MASK], logits[:, MASK + 1 :]], dim=1)


class TestOneStep:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_prefix_and_masks_in_marginals_out(self, models: dict[str, DiffusionLM], family: str) -> None:
        """Ragged rows equal each row alone."""
        source = MaskedSource(models[family])
        session = source.open(3)
        requests = [ask(row, PROMPTS[row], Budget(gamma=gamma, shape=Chain())) for row, gamma in enumerate((4, 6, 1))]
        for request, logits in zip(requests, session.logits(requests), strict=True):
            expected = without_mask(alone(models[family], request.prefix, masks(request.budget.gamma)))
            assert (logits - expected).abs().max() < 1e-10
        assert session.passes == 1

    def test_columns(self, models: dict[str, DiffusionLM]) -> None:
        """The mask is never proposed, nor what is banned, nor ids beyond the target's vocabulary."""
        model = models["llada"]
        logits = alone(model, [5, 6], masks(2))
        for vocab_size, never, kept in (
            (None, (), [i for i in range(VOCAB) if i != MASK]),
            (VOCAB + 10, (), [i for i in range(VOCAB) if i != MASK]),
            (40, (), list(range(40))),
            (40, (3, 39, 77), [i for i in range(39) if i != 3]),
        ):
            source = MaskedSource(model, vocab_size=vocab_size, never=never)
            got = source.open(1).logits([ask(0, [5, 6], Budget(gamma=2, shape=Chain()))])[0]
            assert torch.equal(got, logits[:, kept])
            assert source.vocab.tolist() == kept
            assert source.vocab_size == min(vocab_size or VOCAB, VOCAB)

    def test_the_most_probable_mask_is_not_proposed(self) -> None:
        table = TableDenoiser(3)
        table.logits = lambda prefix, tokens: torch.tensor([0.0, 0, 0, 1e3]).double().expand(tokens.numel(), 4)
        drafter = MarginalDrafter(MaskedSource(table))
        for shape in SHAPES:
            draft = drafter.open(1).propose([ask(0, [1], Budget(gamma=4, shape=shape))])[0]
            assert int(draft.tree.tokens.max()) < 3

    @pytest.mark.parametrize("family", FAMILIES)
    def test_ids_that_the_drafter_does_not_know(self, models: dict[str, DiffusionLM], family: str) -> None:
        """A target with a larger table may have committed them; they are shown as masks."""
        session = MaskedSource(models[family]).open(1)
        budget = Budget(gamma=3, shape=Chain())
        got = session.logits([ask(0, [5, VOCAB + 3, 7], budget)])[0]
        assert torch.equal(got, MaskedSource(models[family]).open(1).logits([ask(0, [5, MASK, 7], budget)])[0])

    def test_broken_logits(self) -> None:
        table = TableDenoiser(3)
        for value in (float("nan"), float("inf"), -float("inf")):
            table.logits = lambda prefix, tokens, v=value: torch.tensor([0.0, v, 0, 0]).expand(tokens.numel(), 4)
            with pytest.raises(NumericsError, match="table"):
                MaskedSource(table).open(1).logits([ask(0, [1], Budget(gamma=2, shape=Chain()))])

    @pytest.mark.parametrize(
        "options", [{"vocab_size": 0}, {"window": 0}, {"never": (-1,)}, {"never": tuple(range(VOCAB))}]
    )
    def test_options_are_checked(self, models: dict[str, DiffusionLM], options: dict) -> None:
        with pytest.raises(InputError, match=next(iter(options))):
            MaskedSource(models["dream"], **options)

    def test_window(self, models: dict[str, DiffusionLM]) -> None:
        assert MaskedSource(models["dream"], window=5).max_gamma == 5
        assert MaskedSource(models["dream"], window=500).max_gamma == CONTEXT // 2 - 1
        assert MaskedSource(models["sdar"], window=500).max_gamma == CONTEXT // 2 - 4
        assert MaskedSource(models["dream"]).max_gamma == 31
        assert MaskedSource(TableDenoiser(3)).max_gamma == 32
        assert MaskedSource(models["dream"], name="n").name == "n"


def rounds(lengths: Sequence[int]) -> list[Tensor]:
    """Growing prefixes of one text."""
    text = torch.randint(0, 40, (max(lengths),), generator=torch.Generator().manual_seed(5))
    return [text[:length] for length in lengths]


class TestRefreshedCache:
    def test_refreshes_are_exact_and_the_rounds_between_are_close_by(self, models: dict[str, DiffusionLM]) -> None:
        for family in ("dream", "llada"):
            session = MaskedSource(models[family], refresh=3).open(1)
            errors = []
            for prefix in rounds([4, 5, 9, 10, 13, 14, 20]):
                got = session.logits([ask(0, prefix, Budget(gamma=4, shape=Chain()))])[0]
                errors.append(float((got - without_mask(alone(models[family], prefix, masks(4)))).abs().max()))
            assert max(errors[::3]) < 1e-10
            assert min(errors[1], errors[2], errors[4], errors[5]) > 1e-6

    def test_without_refresh_every_pass_is_a_full_one(self, models: dict[str, DiffusionLM]) -> None:
        for refresh in (None, 1):
            session = MaskedSource(models["dream"], refresh=refresh).open(1)
            for prefix in rounds([4, 5, 9, 10]):
                got = session.logits([ask(0, prefix, Budget(gamma=4, shape=Chain()))])[0]
                assert (got - without_mask(alone(models["dream"], prefix, masks(4)))).abs().max() < 1e-10

    @pytest.mark.parametrize("family", ["dream", "llada", "sdar"])
    def test_batch_equals_alone(self, models: dict[str, DiffusionLM], family: str) -> None:
        """Rows refresh at their own rounds, sit rounds out, and ask for windows of their own."""
        refresh = None if family == "sdar" else 2
        together = MaskedSource(models[family], refresh=refresh).open(3)
        single = [MaskedSource(models[family], refresh=refresh).open(1) for _ in range(3)]
        texts = [rounds([2, 5, 6, 11, 12, 13]), rounds([7, 8, 12, 13, 17, 21]), rounds([1, 2, 3, 4, 9, 10])]
        for step in range(6):
            requests = [
                ask(row, texts[row][step], Budget(gamma=1 + (step + 2 * row) % 5, shape=Chain()))
                for row in range(3) if (step + row) % 4
            ]  # fmt: skip
            for request, got in zip(requests, together.logits(requests), strict=True):
                expected = single[request.row].logits([replace(request, row=0)])[0]
                assert (got - expected).abs().max() < 1e-10

    def test_denoising_steps_share_the_prefix(self, models: dict[str, DiffusionLM]) -> None:
        """Further steps of a round are no further rounds: no refresh in between, and the same logits again."""
        session = models["dream"].open(1, refresh=2)
        for prefix in rounds([6, 9, 10, 14]):
            first = session.logits([Window(0, prefix, masks(4))])[0]
            session.logits([Window(0, prefix, torch.tensor([3, MASK, 4, MASK]))])
            again = session.logits([Window(0, prefix, masks(4))])[0]
            # the prefix's keys are reused; only its last token, which a shifted window reads, is run again
            assert (again - first).abs().max() < 1e-10

    def test_refused(self, models: dict[str, DiffusionLM]) -> None:
        with pytest.raises(InputError, match="refresh"):
            MaskedSource(models["dream"], refresh=0).open(1)
        with pytest.raises(InputError, match="exact and needs no refresh"):
            MaskedSource(models["sdar"], refresh=1).open(1)


class TestBlockCache:
    @pytest.mark.parametrize("shift", [False, True])
    def test_exact(self, models: dict[str, DiffusionLM], shift: bool) -> None:
        """Every round equals a full pass, whatever was committed; slots behind the committed ones mean nothing."""
        sdar = models["sdar"]
        model = DiffusionLM(replace(sdar.config, shift=shift), sdar.backbone, sdar.raw)
        session = model.open(1)
        for prefix in rounds([1, 2, 4, 5, 8, 15, 16, 17, 29]):
            for tokens in (masks(3), masks(7), torch.tensor([MASK, 3, MASK, 9, MASK])):
                got = session.logits([Window(0, prefix, tokens)])[0]
                assert (got - alone(model, prefix, tokens)).abs().max() < 1e-10
                cache = session._decoder.cache  # committed whole blocks only
                assert cache.lengths == [(prefix.numel() - shift) // 4 * 4]
                with torch.inference_mode():
                    for layer in cache.layers:
                        layer.key_slots[:, cache.lengths[0] :] = 1e4
                        layer.value_slots[:, cache.lengths[0] :] = -1e4

    def test_the_poison_reaches_the_slots(self, models: dict[str, DiffusionLM]) -> None:
        """The check above would see a committed slot that is overwritten."""
        session = models["sdar"].open(1)
        prefix = rounds([9])[0]
        before = session.logits([Window(0, prefix, masks(3))])[0]
        with torch.inference_mode():
            session._decoder.cache.layers[0].key_slots[:, 7:] = 1e4
        assert (session.logits([Window(0, prefix, masks(3))])[0] - before).abs().max() > 1e-3

    def test_only_new_tokens_are_run(self, models: dict[str, DiffusionLM]) -> None:
        session = models["sdar"].open(1)
        sizes: list[int] = []
        model = models["sdar"].decoder
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        for prefix in rounds([9, 10, 14]):
            session.logits([Window(0, prefix, masks(3))])
        hook.remove()
        # 9 + 3; [8] 10 + 3 filled up to 16; [8] 14 + 3 filled up to 20
        assert sizes == [12, 8, 12]


class TestRewind:
    @pytest.mark.parametrize("length", [0, 1, 7, 9, 12])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_another_text_from_there_on(self, models: dict[str, DiffusionLM], family: str, length: int) -> None:
        """After a rewind to ``length`` tokens the rest may differ; for exact sessions nothing of it is left."""
        model = models[family]
        session = MaskedSource(model).open(2)
        budget = Budget(gamma=3, shape=Chain())
        text = rounds([12])[0]
        session.logits([ask(0, text[:5], budget), ask(1, text, budget)])
        session.logits([ask(1, text, budget)])
        session.rewind(1, length)
        other = torch.cat([text[:length], torch.arange(20, 33 - length)])
        for prefix in (other[:12], other):
            got = session.logits([ask(1, prefix, budget)])[0]
            assert (got - without_mask(alone(model, prefix, masks(3)))).abs().max() < 1e-10

    def test_a_refreshed_cache_starts_over_at_zero(self, models: dict[str, DiffusionLM]) -> None:
        """As a new session would, with its first refresh at once."""
        model, budget = models["dream"], Budget(gamma=3, shape=Chain())
        session = MaskedSource(model, refresh=3).open(1)
        text = rounds([12])[0]
        for length in (5, 8):
            session.logits([ask(0, text[:length], budget)])
        session.rewind(0, 0)
        fresh = MaskedSource(model, refresh=3).open(1)
        for prefix in (torch.arange(8), torch.arange(10), torch.arange(13)):
            assert torch.equal(session.logits([ask(0, prefix, budget)])[0], fresh.logits([ask(0, prefix, budget)])[0])

    def test_a_rewound_round_of_equal_length_is_a_new_round(self, models: dict[str, DiffusionLM]) -> None:
        """Otherwise a text that changes without growing would never see a refresh."""
        model, budget = models["dream"], Budget(gamma=3, shape=Chain())
        session = MaskedSource(model, refresh=2).open(1)
        for change in (3, 4, 5):
            prefix = torch.tensor([7, 8, 9, change])
            session.rewind(0, 3)
            got = session.logits([ask(0, prefix, budget)])[0]
        assert (got - without_mask(alone(model, prefix, masks(3)))).abs().max() < 1e-10

    def test_steps_pass_it_on(self, models: dict[str, DiffusionLM]) -> None:
        drafter = MultiStepDrafter(MaskedSource(models["sdar"]), steps=2)
        session, budget = drafter.open(1), Budget(gamma=3, shape=Chain())
        session.propose([ask(0, torch.arange(9), budget)])
        session.rewind(0, 0)
        other = torch.arange(20, 29)
        got = session.propose([ask(0, other, budget)])[0]
        assert torch.equal(got.law.rows, drafter.open(1).propose([ask(0, other, budget)])[0].law.rows)


class TestContext:
    @pytest.mark.parametrize("refresh", [None, 3])
    @pytest.mark.parametrize("family", ["dream", "sdar"])
    def test_a_prefix_beyond_the_context_is_cut_on_the_left(
        self, models: dict[str, DiffusionLM], family: str, refresh: int | None
    ) -> None:
        model = models[family]
        session = model.open(1, refresh=None if family == "sdar" else refresh)
        errors = []
        for prefix in rounds(list(range(50, 140, 3))):
            window = 5 + -(prefix.numel() + 5) % model.config.block_size
            start = model.config.first_shown(prefix.numel(), window)
            assert prefix.numel() - start + window <= CONTEXT
            got = session.logits([Window(0, prefix, masks(5))])[0]
            errors.append(float((got - alone(model, prefix[start:], masks(5))).abs().max()))
        exact = errors if family == "sdar" or refresh is None else errors[::3]
        assert max(exact) < 1e-10


class TestSteps:
    def test_groups(self) -> None:
        assert group_sizes(7, 3) == [3, 2, 2]
        assert group_sizes(2, 5) == [1, 1]
        assert all(sum(group_sizes(g, s)) == g for g in range(1, 9) for s in range(1, 9))

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("steps", [2, 3, 5])
    def test_left_to_right_rows(self, models: dict[str, DiffusionLM], family: str, steps: int) -> None:
        """Each q row is that of a full pass over the tokens of earlier groups and masks; passes are steps."""
        drafter = MultiStepDrafter(MaskedSource(models[family]), steps=steps)
        session = drafter.open(3)
        budgets = [Budget(gamma=g, shape=Chain(), temperature=0.7) for g in (5, 3, 5)]
        requests = [ask(i, p, b) for i, (p, b) in enumerate(zip(PROMPTS, budgets, strict=True))]
        drafts = session.propose(requests)
        assert session.passes == steps
        for request, draft in zip(requests, drafts, strict=True):
            gamma, tokens = request.budget.gamma, draft.tree.tokens
            assert draft.provenance is Provenance.CHAIN
            assert draft.tree.is_chain
            assert draft.law is not None
            assert draft.law.row_of == (*range(gamma), -1)
            position = 0
            for count in group_sizes(gamma, steps):
                shown = torch.cat([tokens[:position], masks(gamma - position)])
                rows = without_mask(alone(models[family], request.prefix, shown)) / 0.7
                expected = rows.softmax(dim=-1)[position : position + count]
                assert (draft.law.rows[position : position + count] - expected).abs().max() < 1e-10
                position += count

    @pytest.mark.parametrize("order", [o for o in ORDERS if o != "left_to_right"])
    def test_other_orders_fill_gaps_by_argmax(self, order: str) -> None:
        table = TableDenoiser(6, seed=4)
        drafter = MultiStepDrafter(MaskedSource(table), steps=3, order=order)
        session = drafter.open(1)
        budget = Budget(gamma=5, shape=Chain(), temperature=1.3)
        draft = session.propose([ask(0, [1, 2], budget, seed=9)])[0]
        assert session.passes == 3
        assert draft.provenance is Provenance.FIXED
        seen = [w[0].tokens for w in session._inner._windows.seen]
        assert [int((t == 6).sum()) for t in seen] == [5, 3, 1]
        for before, after in zip(seen, [*seen[1:], draft.tree.tokens], strict=True):
            logits = table.logits(torch.tensor([1, 2]), before)[:, :6]
            probs = (logits / 1.3).softmax(dim=-1)
            hidden = [i for i in range(5) if int(before[i]) == 6]
            revealed = [i for i in hidden if int(after[i]) != 6]
            for i in revealed:
                assert int(after[i]) == int(logits[i].argmax())
            top = probs.sort(dim=-1, descending=True).values
            score = {
                "confidence": top[:, 0], "margin": top[:, 0] - top[:, 1],
                "entropy": (probs * probs.log()).sum(dim=-1), "random": torch.zeros(5),
            }[order]  # fmt: skip
            rest = [i for i in hidden if i not in revealed]
            assert not rest or min(score[revealed]) >= max(score[rest])

    def test_ties_go_to_the_left(self) -> None:
        probs = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.9, 0.1], [0.5, 0.5]])
        for order in ("confidence", "entropy", "margin"):
            assert ORDERS[order](probs, 3, None) == [1, 2, 0]
        assert ORDERS["margin"](torch.ones(2, 1), 1, None) == [0]

    def test_random_order_is_the_requests_own(self) -> None:
        drafter = MultiStepDrafter(MaskedSource(TableDenoiser(6)), steps=4, order="random")
        budget = Budget(gamma=4, shape=Chain())

        def orders(seed: int) -> list[list[int]]:
            session = drafter.open(1)
            session.propose([ask(0, [1], budget, seed=seed)])
            return [(w[0].tokens == 6).nonzero().flatten().tolist() for w in session._inner._windows.seen]

        assert orders(0) == orders(0)
        assert len({str(orders(seed)) for seed in range(8)}) > 3

    def test_trees_take_one_step(self) -> None:
        source = MaskedSource(TableDenoiser(6))
        for shape in SHAPES[1:]:
            budget = Budget(gamma=3, shape=shape)
            for order in ORDERS:
                with pytest.raises(InputError, match="steps=1"):
                    MultiStepDrafter(source, steps=2, order=order).provenance(budget)
                one = MultiStepDrafter(source, steps=1, order=order)
                assert one.provenance(budget) is MarginalDrafter(source).provenance(budget)
                got = one.open(1).propose([ask(0, [1], budget)])[0]
                expected = MarginalDrafter(source).open(1).propose([ask(0, [1], budget)])[0]
                assert torch.equal(got.tree.tokens, expected.tree.tokens)

    def test_options_are_checked(self) -> None:
        source = MaskedSource(TableDenoiser(6))
        with pytest.raises(InputError, match="steps"):
            MultiStepDrafter(source, steps=0)
        with pytest.raises(InputError, match="left_to_right"):
            MultiStepDrafter(source, steps=2, order="l2r")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DiffusionLM]:
    """A random float32 model of each family."""
    return {f: tiny(tmp_path_factory.mktemp(f), f) for f in FAMILIES}


NEW = 16


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Plain greedy decoding of every prompt."""
    return [plain(llama(1), p, NEW) for p in PROMPTS]


class TestDecoding:
    def check(self, drafter: object, budget: Budget, expected: list[list[int]]) -> int:
        """Decode the batch at temperature 0, require plain decoding's text, return the passes of the drafter."""
        loop, events = decode(llama(1), drafter, budget, new_tokens=NEW, rule=rules.get("match"))
        assert [row.new_tokens for row in loop.rows] == expected
        return max(e.record.drafter_passes for e in events)

    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: type(s).__name__)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_one_step(
        self, small: dict[str, DiffusionLM], expected: list[list[int]], family: str, shape: object
    ) -> None:
        drafter = MarginalDrafter(MaskedSource(small[family], vocab_size=VOCAB))
        assert self.check(drafter, Budget(gamma=5, shape=shape), expected) == 1

    @pytest.mark.parametrize("family", ["dream", "llada"])
    def test_refreshed_cache(self, small: dict[str, DiffusionLM], expected: list[list[int]], family: str) -> None:
        drafter = MarginalDrafter(MaskedSource(small[family], refresh=3))
        assert self.check(drafter, Budget(gamma=4, shape=BestFirst(6)), expected) == 1

    @pytest.mark.parametrize("order", list(ORDERS))
    @pytest.mark.parametrize(("family", "refresh"), [("dream", None), ("llada", 2), ("sdar", None)])
    def test_several_steps(
        self, small: dict[str, DiffusionLM], expected: list[list[int]], family: str, refresh: int | None, order: str
    ) -> None:
        drafter = MultiStepDrafter(MaskedSource(small[family], refresh=refresh), steps=3, order=order)
        assert self.check(drafter, Budget(gamma=5, shape=Chain()), expected) == 3

    @pytest.mark.parametrize("steps", [1, 2])
    def test_batch_equals_alone_at_temperature_one(self, small: dict[str, DiffusionLM], steps: int) -> None:
        """Sampled text: the same seeds, the same tokens, alone and in a ragged batch."""
        for family in ("dream", "sdar"):
            drafter = MultiStepDrafter(MaskedSource(small[family], vocab_size=VOCAB), steps=steps)
            budget = Budget(gamma=4, shape=Chain())
            rule = rules.get("ratio")
            together, _ = decode(llama(1), drafter, budget, new_tokens=NEW, temperature=1.0, rule=rule)
            first, _ = decode(
                llama(1), drafter, budget, prompts=PROMPTS[:1], new_tokens=NEW, temperature=1.0, rule=rule
            )
            assert together.rows[0].new_tokens == first.rows[0].new_tokens

    def test_rules_that_need_q_refuse_adaptive_orders(self, small: dict[str, DiffusionLM]) -> None:
        drafter = MultiStepDrafter(MaskedSource(small["dream"]), steps=2, order="confidence")
        with pytest.raises(PairingError, match="ratio"):
            decode(llama(1), drafter, Budget(gamma=4, shape=Chain()), temperature=1.0, rule=rules.get("ratio"))

    def test_a_text_longer_than_the_drafters_context(self, tmp_path: Path) -> None:
        model = tiny(tmp_path, "dream")
        drafter = MarginalDrafter(MaskedSource(model, refresh=2))
        prompt = torch.arange(CONTEXT + 9) % 40
        loop, _ = decode(
            llama(1), drafter, Budget(gamma=4, shape=Chain()), prompts=[prompt], new_tokens=6, rule=rules.get("match")
        )
        assert loop.rows[0].new_tokens == plain(llama(1), prompt, 6)
