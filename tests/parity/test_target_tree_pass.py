"""The target pass against plain passes: every architecture, trees, ragged batches, windows, rolled-back slots."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specdiff.errors import UnsupportedModelError
from specdiff.models.cached_decoder import CachedDecoder, NewRows
from specdiff.models.target import CausalTarget, CausalTargetSession, ScoreRequest
from specdiff.types import TokenTree
from support.tiny_targets import FAMILIES, VOCAB, fresh_logits, path_to, random_tree, tiny_model

_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
_CASES = [(family, attention) for family in FAMILIES for attention in ("sdpa", "eager")]


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, str], PreTrainedModel]:
    return {}


@pytest.fixture
def model(models, request) -> PreTrainedModel:  # type: ignore[no-untyped-def]
    if request.param not in models:
        models[request.param] = tiny_model(request.param[0], attention=request.param[1])
    return models[request.param]


class _Row:
    """What one row of a session should have committed, and the checks against plain passes."""

    def __init__(self, model: PreTrainedModel, prompt: Tensor) -> None:
        self.model, self.ids = model, prompt

    def check_logits(self, tree: TokenTree, logits: Tensor) -> None:
        leaves = [n for n in range(-1, len(tree)) if n not in tree.parents]
        for leaf in leaves:
            path = path_to(tree, leaf)
            expected = fresh_logits(self.model, torch.cat([self.ids, tree.tokens[list(path)]]))[-len(path) - 1 :]
            torch.testing.assert_close(logits[[0, *(n + 1 for n in path)]], expected, **_TOLERANCE)

    def accept(self, tree: TokenTree, path: tuple[int, ...], extra: int) -> None:
        self.ids = torch.cat([self.ids, tree.tokens[list(path)], torch.tensor([extra])])


def _random_path(generator: torch.Generator, tree: TokenTree) -> tuple[int, ...]:
    return path_to(tree, int(torch.randint(-1, len(tree), (1,), generator=generator)))


@pytest.mark.parametrize("model", _CASES, indirect=True, ids="-".join)
def test_tree_rows_equal_plain_passes_over_their_paths_in_ragged_batches(
    model: PreTrainedModel, figure: Callable[..., None]
) -> None:
    checked = wrong = 0
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in (14, 1, 5)]
    rows = [_Row(model, p) for p in prompts]
    session = CausalTarget(model).open(3)
    session.prefill(prompts)
    for round_number in range(4):
        alive = [0, 1, 2] if round_number < 2 else [0, 2]  # row 1 finishes apart
        trees = {b: random_tree(generator, 0 if (b, round_number) == (2, 1) else 7) for b in alive}
        requests = [ScoreRequest(int(rows[b].ids[-1]), trees[b]) if b in alive else None for b in range(3)]
        logits = session.score(requests)
        paths: list[tuple[int, ...] | None] = [None] * 3
        for b in alive:
            got = logits[b]
            assert got is not None
            assert got.shape == (len(trees[b]) + 1, VOCAB)
            rows[b].check_logits(trees[b], got)
            path = _random_path(generator, trees[b])
            paths[b] = path
            rows[b].accept(trees[b], path, int(torch.randint(0, VOCAB, (1,), generator=generator)))
        session.commit(paths)
        if round_number == 1:
            session.finish(1)
        for b in (0, 2) if round_number else (0, 1, 2):
            checked += 1
            wrong += session.lengths[b] != len(rows[b].ids) - 1
    name = f"{model.config.model_type}, {model.config._attn_implementation}"
    figure(7, f"{name}: cache lengths after every round", lengths_checked=checked, lengths_wrong=wrong)
    assert not wrong
    assert len(rows[0].ids) > 2 * 9  # crossed the sliding window


@pytest.mark.parametrize("model", _CASES, indirect=True, ids="-".join)
def test_committed_slots_equal_a_plain_cache(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (4,), generator=generator)
    session = CausalTarget(model).open(1)
    session.prefill([ids])
    for _ in range(3):
        tree = random_tree(generator, 8)
        session.score([ScoreRequest(int(ids[-1]), tree)])
        path = _random_path(generator, tree)
        session.commit([path])
        ids = torch.cat([ids, tree.tokens[list(path)], torch.tensor([9])])
    plain = DynamicCache()  # without a configuration it keeps every slot, of sliding layers too
    name = session._decoder._cache_name
    with torch.inference_mode():
        model(input_ids=ids[None, :-1], use_cache=True, **{name: plain})
    cache = session._decoder.cache
    assert len(cache.layers) == len(plain.layers)
    for index, layer in enumerate(plain.layers):
        keys, values = cache.committed(0, index)
        torch.testing.assert_close(keys, layer.keys[0], **_TOLERANCE)
        torch.testing.assert_close(values, layer.values[0], **_TOLERANCE)


@pytest.mark.parametrize("model", _CASES, indirect=True, ids="-".join)
@pytest.mark.parametrize("huge", [1e4, 1e30])
def test_rejected_slots_that_hold_huge_values_change_nothing(
    model: PreTrainedModel, huge: float, figure: Callable[..., None]
) -> None:
    """Row 7: nothing that is not committed is ever read again."""
    (clean, lengths), *poisoned = [_decode_with_poison(model, value) for value in (None, huge, -huge)]
    assert all(math.isfinite(x) for x in clean)
    changed = sum(a != b for logits, _ in poisoned for a, b in zip(clean, logits, strict=True))
    wrong = sum(got != expected for _, pairs in poisoned for got, expected in pairs)
    window = getattr(model.config, "sliding_window", None)
    crossed = window is not None and lengths[0][0][0] < window < lengths[-1][0][0]
    figure(
        7,
        f"{model.config.model_type}: dead slots overwritten with +-{huge:g}",
        architectures=[model.config.model_type],
        logits_compared=2 * len(clean),
        logits_changed=changed,
        lengths_checked=sum(len(pairs) * 2 for _, pairs in poisoned),
        lengths_wrong=wrong,
        windows_crossed=int(crossed),
    )
    assert not changed
    assert not wrong
    assert crossed == (window is not None), "every sliding window is crossed mid-run"


def _decode_with_poison(
    model: PreTrainedModel, value: float | None
) -> tuple[list[float], list[tuple[list[int], list[int]]]]:
    """All logits of a run, and after each round the lengths that the cache has and should have."""
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in (6, 11)]
    session = CausalTarget(model).open(2)
    session.prefill(prompts)
    seen: list[float] = []
    committed = [len(p) - 1 for p in prompts]
    lengths: list[tuple[list[int], list[int]]] = []
    for _ in range(5):
        trees = [random_tree(generator, 6) for _ in prompts]
        logits = session.score([ScoreRequest(3, tree) for tree in trees])
        paths = [_random_path(generator, tree) for tree in trees]
        session.commit(paths)
        committed = [length + 1 + len(path) for length, path in zip(committed, paths, strict=True)]
        lengths.append((list(session.lengths), committed))
        for row in logits:
            assert row is not None
            seen += row.flatten().tolist()
        if value is not None:
            _poison(session, value)
    return seen, lengths


@torch.inference_mode()
def _poison(session: CausalTargetSession, value: float) -> None:
    for layer in session._decoder.cache.layers:
        for store in (layer.key_slots, layer.value_slots):
            for row, length in enumerate(session.lengths):
                store[row, length:] = value


def test_a_finished_row_that_held_nan_cannot_poison_the_row_that_takes_its_place() -> None:
    model = tiny_model("llama")
    prompts = [torch.arange(3, 9), torch.arange(20, 24)]
    session, alone = CausalTarget(model).open(2), CausalTarget(model).open(1)
    session.prefill(prompts)
    alone.prefill(prompts[1:])
    with torch.inference_mode():
        for layer in session._decoder.cache.layers:
            layer.key_slots[0], layer.value_slots[0] = torch.nan, torch.nan
    session.finish(0)
    session.finish(0)  # twice is once
    request = ScoreRequest(5, TokenTree(torch.tensor([4, 8]), (-1, -1)))
    got, expected = session.score([None, request])[1], alone.score([request])[0]
    assert got is not None
    assert expected is not None
    torch.testing.assert_close(got, expected, **_TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_long_prompts_are_read_in_chunks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import specdiff.models.target as module

    monkeypatch.setattr(module, "_PREFILL_CHUNK", 16)
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in (50, 17, 33)]
    session = CausalTarget(model).open(3, (0, 2))
    features = session.prefill(prompts)
    tree = random_tree(generator, 5)
    logits = session.score([ScoreRequest(int(p[-1]), tree) for p in prompts])
    assert session.passes == 1
    for prompt, row, feature in zip(prompts, logits, features, strict=True):
        assert row is not None
        assert feature is not None
        _Row(model, prompt).check_logits(tree, row)
        torch.testing.assert_close(feature, _fresh_features(model, prompt[:-1], (0, 2)), **_TOLERANCE)


@torch.inference_mode()
def _fresh_features(model: PreTrainedModel, ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    states = model(input_ids=ids[None], use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1][0] for i in layers], dim=-1)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gemma3n_text"])
def test_features_of_kept_rows_equal_a_plain_pass(family: str) -> None:
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(2)
    layers = (0, model.config.num_hidden_layers - 1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in (6, 1)]
    session = CausalTarget(model).open(2, layers)
    kept = [[f] for f in session.prefill(prompts)]
    ids = list(prompts)
    for _ in range(2):
        trees = [random_tree(generator, 6) for _ in prompts]
        session.score([ScoreRequest(int(i[-1]), tree) for i, tree in zip(ids, trees, strict=True)])
        paths = [_random_path(generator, tree) for tree in trees]
        for b, states in enumerate(session.commit(paths)):
            kept[b].append(states)
            ids[b] = torch.cat([ids[b], trees[b].tokens[list(paths[b])], torch.tensor([b + 4])])
    for b in range(2):
        got = torch.cat([f for f in kept[b] if f is not None])
        expected = _fresh_features(model, ids[b][:-1], layers)
        torch.testing.assert_close(got, expected, **_TOLERANCE)


def test_features_of_several_streams_are_refused() -> None:
    session = CausalTarget(tiny_model("gemma3n_text")).open(1, (0,))
    with pytest.raises(UnsupportedModelError, match="not one vector a token"):
        session.prefill([torch.arange(5)])


def test_one_token_prompts_need_no_prefill() -> None:
    session = CausalTarget(tiny_model("qwen3")).open(2, (1,))
    assert session.prefill([torch.tensor([4]), torch.tensor([5])]) == [None, None]
    assert session.lengths == [0, 0]
    logits = session.score([ScoreRequest(4, TokenTree(torch.tensor([6]), (-1,)))] * 2)
    assert [None if r is None else tuple(r.shape) for r in logits] == [(2, VOCAB), (2, VOCAB)]


def test_storage_grows_without_losing_slots() -> None:
    model = tiny_model("llama")
    decoder = CachedDecoder(model, 2)
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(0, VOCAB, (2, 400), generator=generator)
    for start in range(0, 400, 25):
        rows = [NewRows.causal(i[start : start + 25]) for i in ids]
        rows[1] = NewRows.causal(ids[1, start : start + 20])  # the second row lags behind
        logits = decoder.run(rows).logits
        decoder.keep([range(25), range(20)])
    assert decoder.cache.lengths == [400, 320]
    torch.testing.assert_close(logits[0], fresh_logits(model, ids[0])[-25:], **_TOLERANCE)


def test_a_growing_tree_sees_its_own_nodes_only() -> None:
    """Committed slots that hold nodes of an unfinished tree are visible as the caller says, window included."""
    model = tiny_model("gemma3_text")
    prompt = torch.arange(10, 24)
    decoder = CachedDecoder(model, 1)
    decoder.run([NewRows.causal(prompt)])
    decoder.keep([range(14)])
    level = NewRows(torch.tensor([3, 4]), torch.tensor([0, 0]), torch.eye(2, dtype=torch.bool))
    decoder.run([level])
    decoder.keep([[0, 1]])
    child = NewRows(  # one child of the second node, one position further
        torch.tensor([5]), torch.tensor([-1]), torch.tensor([[False, True, True]]), growing=torch.tensor([-2, -2])
    )
    got = decoder.run([child]).logits[0, 0]
    expected = fresh_logits(model, torch.cat([prompt, torch.tensor([4, 5])]))[-1]
    torch.testing.assert_close(got, expected, **_TOLERANCE)


def test_finished_rows_are_not_computed() -> None:
    model = tiny_model("llama")
    sizes: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda _m, args, _o: sizes.append(args[0].shape[0]))
    session = CausalTarget(model).open(3)
    session.prefill([torch.arange(1, n) for n in (4, 5, 6)])
    request = ScoreRequest(3, TokenTree(torch.tensor([4]), (-1,)))
    for finished in (0, 2):
        session.finish(finished)
        session.score([None if b in session._finished else request for b in range(3)])
    hook.remove()
    assert sizes == [3, 2, 1]
