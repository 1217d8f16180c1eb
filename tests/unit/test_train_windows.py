"""The packed training pass, its data, the acceptance replay and the trainer's restarts."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from tests.unit.test_denoiser import DRAFT_VOCAB, HIDDEN, VOCAB, WINDOW, tiny_target
from transformers import DynamicCache

from specdiff.errors import SpecdiffError
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.models.target import CausalTarget
from specdiff.objectives.base import Objective
from specdiff.objectives.masked import IGNORED
from specdiff.objectives.registry import make
from specdiff.train.acceptance import best_first_depth, measure_acceptance
from specdiff.train.attention import WindowLayout, dense_mask, register_window_attention
from specdiff.train.features import TargetFeatures
from specdiff.train.packed import packed_window_states
from specdiff.train.trainer import DenoiserTrainer, TrainerConfig
from specdiff.train.windows import (
    AnswerRow,
    StreamConfig,
    WindowStream,
    draw_anchors,
    frequent_tokens,
    label_table,
    pack,
    read_rows,
)
from support.denoising import block_causal_mask

LABELS_OF = label_table(DRAFT_VOCAB, VOCAB)


def row(length: int, prompt: int, seed: int = 0, name: str = "r") -> AnswerRow:
    tokens = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return AnswerRow(id=name, tokens=tuple(tokens), prompt_length=prompt)


def make_denoiser(*, attention: bool = True, **options) -> BlockCausalDenoiser:
    options = {"draft_vocab": DRAFT_VOCAB, "layers": (0, 1), "window": WINDOW, **options}
    denoiser = BlockCausalDenoiser.from_target(tiny_target(), **options)
    with torch.no_grad():  # a mask row that stands out, so that a leak would show
        denoiser.mask_embedding.normal_(generator=torch.Generator().manual_seed(5))
    if attention:
        denoiser.decoder.set_attn_implementation(register_window_attention())
    return denoiser


ROWS = [row(18, 5, 1, "a"), row(11, 8, 2, "b"), row(15, 1, 3, "c")]
ANCHORS = [[4, 7, 8, 16], [7, 9], [0, 13, 5]]


def packed():
    return pack(ROWS, ANCHORS, window=WINDOW, labels_of=LABELS_OF)


def test_pack_shifts_labels_and_marks_what_is_unknown():
    batch = packed()
    assert batch.context.shape == (3, 16)
    assert batch.anchors.tolist() == [[4, 7, 8, 16], [7, 9, 0, 0], [0, 13, 5, 0]]
    for b, (answer, chosen) in enumerate(zip(ROWS, ANCHORS, strict=True)):
        assert batch.context[b, : max(chosen)].tolist() == list(answer.tokens[: max(chosen)])
        for a, anchor in enumerate(chosen):
            assert batch.last_tokens[b, a] == answer.tokens[anchor]
            for j in range(WINDOW):
                place = anchor + 1 + j
                expected = IGNORED
                if place < len(answer.tokens) and answer.tokens[place] in DRAFT_VOCAB:
                    expected = DRAFT_VOCAB.tolist().index(answer.tokens[place])
                assert batch.labels[b, a, j] == expected
        assert (batch.labels[b, len(chosen) :] == IGNORED).all()
    assert batch.num_windows <= 9


@pytest.mark.parametrize("anchors", [[], [3], [17], [-1]])
def test_anchors_outside_the_answer_are_refused(anchors):
    with pytest.raises(SpecdiffError, match="anchors of a"):
        pack(ROWS[:1], [anchors], window=WINDOW, labels_of=LABELS_OF)


def test_mask_terms():
    layout = WindowLayout.build(torch.tensor([[1, 3]]), 3, 2, torch.float32)
    assert (dense_mask(layout, torch.float32)[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 1, 1],
    ]
    assert layout.position_ids().tolist() == [[0, 1, 2, 1, 2, 3, 4]]


@pytest.mark.parametrize("feature_layers", [(), (1, 2)])
def test_blockwise_equals_dense_in_value_and_gradient(feature_layers):
    denoiser, batch = make_denoiser(feature_layers=feature_layers), packed()
    features = None
    if feature_layers:
        torch.nn.init.normal_(denoiser.feature_projection.weight, std=0.1)
        features = torch.randn(3, 16, 2 * HIDDEN, generator=torch.Generator().manual_seed(3))
    real = torch.tensor([[a < len(chosen) for a in range(4)] for chosen in ANCHORS])
    probe = torch.randn(3, 4, WINDOW, HIDDEN, generator=torch.Generator().manual_seed(4)) * real[..., None, None]
    results = {}
    for name in ("blockwise", "dense"):
        denoiser.decoder.set_attn_implementation(register_window_attention() if name == "blockwise" else "sdpa")
        denoiser.zero_grad()
        states = packed_window_states(denoiser, batch, features=features, dense=name == "dense")
        (states * probe).sum().backward()
        results[name] = (states.detach()[real], {n: p.grad.clone() for n, p in denoiser.named_parameters()})
    torch.testing.assert_close(results["blockwise"][0], results["dense"][0], atol=1e-5, rtol=1e-5)
    for name, gradient in results["dense"][1].items():
        torch.testing.assert_close(results["blockwise"][1][name], gradient, atol=1e-4, rtol=1e-4, msg=name)
    assert results["dense"][1]["mask_embedding"].abs().max() > 0


@pytest.mark.parametrize("feature_layers", [(), (1, 2)])
def test_packed_pass_equals_drafting_each_window(feature_layers):
    denoiser, batch = make_denoiser(feature_layers=feature_layers).eval(), packed()
    features = None
    if feature_layers:
        torch.nn.init.normal_(denoiser.feature_projection.weight, std=0.1)
        features = torch.randn(3, 16, 2 * HIDDEN, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        states = packed_window_states(denoiser, batch, features=features)
    for b, (answer, chosen) in enumerate(zip(ROWS, ANCHORS, strict=True)):
        for a, anchor in enumerate(chosen):
            drafted = draft_after(denoiser, answer, anchor, None if features is None else features[b, :anchor])
            torch.testing.assert_close(states[b, a], drafted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def draft_after(denoiser, answer, anchor, features=None):
    """Cache the prefix, then run the window: the form in which drafts are made."""
    cache = DynamicCache()
    width = 0 if features is None else features.shape[1]
    if anchor:
        prefix = torch.tensor([answer.tokens[:anchor]])
        embeds = denoiser.embed(
            prefix, torch.zeros_like(prefix, dtype=torch.bool), None if features is None else features[None]
        )
        mask = block_causal_mask(0, anchor, 0, dtype=torch.float32)
        denoiser.hidden(embeds, mask, torch.arange(anchor)[None], cache)
    window = torch.zeros(1, WINDOW, dtype=torch.int64)
    window[0, 0] = answer.tokens[anchor]
    is_mask = torch.arange(WINDOW)[None] > 0
    none = None if features is None else torch.zeros(1, WINDOW, width)
    embeds = denoiser.embed(window, is_mask, none)
    mask = block_causal_mask(anchor, 0, WINDOW, dtype=torch.float32)
    return denoiser.hidden(embeds, mask, torch.arange(anchor, anchor + WINDOW)[None], cache)[0]


def test_anchors_are_distinct_and_in_the_answer():
    answer = row(30, 10)
    drawn = draw_anchors(answer, 12, torch.Generator().manual_seed(0))
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 12
    assert set(drawn) <= set(range(9, 29))
    assert draw_anchors(answer, 99, torch.Generator().manual_seed(0)) == list(range(9, 29))


def test_draft_vocabulary_is_what_answers_use_most():
    rows = [
        AnswerRow(id="a", tokens=(9, 9, 9, 3, 3, 5), prompt_length=3),
        AnswerRow(id="b", tokens=(9, 3, 5, 7), prompt_length=1),
    ]
    assert frequent_tokens(rows, vocab_size=20, size=2, always=(12,)).tolist() == [3, 5, 12]
    assert frequent_tokens(rows, vocab_size=20, size=15).tolist() == [3, 5, 7]
    assert label_table(torch.tensor([3, 5, 12]), 14).tolist() == [-1, -1, -1, 0, -1, 1, -1, -1, -1, -1, -1, -1, 2, -1]


def test_rows_are_read_and_bad_lines_named(tmp_path):
    path = tmp_path / "answers.jsonl"
    good = {"id": "x/1", "prompt_ids": [1, 2], "ids": [3, 4]}
    lines = [
        good,
        {**good, "id": "x/2"},
        {**good, "id": "x/3", "ids": []},
        {**good, "id": "x/4", "prompt_ids": [1] * 9},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    rows = read_rows(path, max_length=8, keep=lambda name: name != "x/2")
    assert rows == [AnswerRow(id="x/1", tokens=(1, 2, 3, 4), prompt_length=2)]
    for bad in (
        "{",
        '{"id": "a"}',
        '{"id": "a", "prompt_ids": 3, "ids": [1]}',
        '{"id": "a", "prompt_ids": [], "ids": [1]}',
    ):
        path.write_text(json.dumps(good) + "\n" + bad)
        with pytest.raises(SpecdiffError, match="line 2: expected"):
            read_rows(path)


def counting_row(length: int, start: int) -> AnswerRow:
    """An answer that can be learnt: it walks through the draft vocabulary."""
    tokens = tuple(int(DRAFT_VOCAB[(start + i) % DRAFT_VOCAB.numel()]) for i in range(length))
    return AnswerRow(id=f"count/{start}", tokens=tokens, prompt_length=5)


def make_stream(seed: int = 0) -> WindowStream:
    one = [row(12 + i, 5, i, f"one/{i}") for i in range(7)]
    two = [row(20 + i, 5, 50 + i, f"two/{i}") for i in range(5)]
    config = StreamConfig(rows_per_batch=4, anchors_per_row=3, window=WINDOW, seed=seed, batches_per_pool=5)
    return WindowStream([(one, 65), (two, 35)], LABELS_OF, config)


def same(one, two) -> bool:
    return all(torch.equal(getattr(one, n), getattr(two, n)) for n in ("context", "anchors", "last_tokens", "labels"))


def test_stream_is_a_function_of_seed_and_number():
    stream, again = make_stream(), make_stream()
    batches = [stream.batch(i) for i in range(12)]
    assert all(same(again.batch(i), batches[i]) for i in (11, 3, 7, 0))
    assert not same(make_stream(seed=1).batch(0), batches[0])
    assert not any(same(a, b) for a, b in itertools.combinations(batches, 2))


def test_stream_keeps_the_mixture_and_visits_every_row():
    stream = make_stream()
    pools = [stream._draw_pool(i) for i in range(7)]
    names = [[r.id for batch in pool for r in batch] for pool in pools]
    assert all(sum(n.startswith("one") for n in pool) == 13 for pool in names)
    counts = {n: sum(pool.count(n) for pool in names) for n in set(itertools.chain(*names))}
    assert {counts[f"one/{i}"] for i in range(7)} == {13}  # 7 pools of 13 rows: each of the 7 rows 13 times
    assert len(counts) == 12
    assert stream.epochs(35)[0] == pytest.approx(13.0)


def test_empty_or_weightless_sources_are_refused():
    config = StreamConfig()
    for sources in ([], [([], 1.0)], [([row(9, 3)], 0.0)]):
        with pytest.raises(SpecdiffError, match="sources: expected rows"):
            WindowStream(sources, LABELS_OF, config)
    with pytest.raises(SpecdiffError, match="window: expected"):
        StreamConfig(window=0)


def test_best_first_depth_equals_the_tree_of_all_prefixes():
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        log_q = torch.randn(3, 5, generator=generator).log_softmax(-1).sort(-1, descending=True).values
        ranks = torch.randint(0, 6, (3,), generator=generator).tolist()  # 5 means the token is not there
        prefixes = [p for depth in (1, 2, 3) for p in itertools.product(range(5), repeat=depth)]
        prefixes.sort(key=lambda p: -sum(float(log_q[j, r]) for j, r in enumerate(p)))
        for size in (1, 4, 12, 200):
            tree = set(prefixes[:size])
            expected = sum(tuple(ranks[:d]) in tree for d in (1, 2, 3))
            assert best_first_depth(log_q, ranks, size) == expected


def test_acceptance_of_a_drafter_that_knows_the_answer():
    """With the marginals replaced by the truth, every round but the last commits the window and the extra token."""
    denoiser = make_denoiser()
    answer = AnswerRow(id="a", tokens=(0, *(int(t) for t in DRAFT_VOCAB[:12])), prompt_length=1)
    labels = pack([answer], [list(answer.anchors)], window=WINDOW, labels_of=LABELS_OF).labels[0]
    denoiser.head = lambda _: torch.nn.functional.one_hot(labels.clamp_min(0), DRAFT_VOCAB.numel()).float() * 50
    result = measure_acceptance(denoiser, [answer], LABELS_OF, tree_nodes=6)
    assert result.chain == result.tree == 12 / 3  # rounds of 5, 5 and 2 tokens
    assert result.by_offset == (1.0,) * WINDOW
    denoiser.head = lambda _: torch.nn.functional.one_hot((labels + 1) % 21, DRAFT_VOCAB.numel()).float() * 50
    assert measure_acceptance(denoiser, [answer], LABELS_OF, tree_nodes=1).chain == 1.0
    with pytest.raises(SpecdiffError, match="rows"):
        measure_acceptance(denoiser, [], LABELS_OF)


def trainer(output, steps: int = 6, objective: Objective | None = None, **options) -> DenoiserTrainer:
    config = TrainerConfig(steps=steps, learning_rate=3e-3, log_steps=1, evaluate_minutes=99.0, **options)
    rows = [counting_row(14, start) for start in range(12)]
    stream_config = StreamConfig(rows_per_batch=4, anchors_per_row=3, window=WINDOW, batches_per_pool=5)
    stream = WindowStream([(rows, 1.0)], LABELS_OF, stream_config)
    return DenoiserTrainer(make_denoiser(), stream, [counting_row(16, 15)], output, config, objective=objective)


def test_training_lowers_the_loss_and_leaves_a_usable_denoiser(tmp_path):
    run = trainer(tmp_path, steps=60)
    run.run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert [line["kind"] for line in lines if line["kind"] != "train"] == ["evaluate", "checkpoint", "evaluate"]
    target = tiny_target()
    weights = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    for name, values in (("raw", run.master.weights), ("ema", run.master.average)):
        loaded = BlockCausalDenoiser.from_pretrained(tmp_path / "export" / name, *weights)
        for key, value in run.master.named(values).items():
            torch.testing.assert_close(loaded.state_dict()[key], value.bfloat16().float())


def test_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.run()
    first = trainer(tmp_path / "parts")
    original = first._train_step

    def stop_after_three():
        original()
        if first.step == 3:
            first._request_stop()

    first._train_step = stop_after_three
    first.run()
    second = trainer(tmp_path / "parts")
    second.resume()
    assert second.step == 3
    second.run()
    assert second.windows == whole.windows
    for one, two in zip(whole.master.weights, second.master.weights, strict=True):
        assert torch.equal(one, two)
    for one, two in zip(whole.master.average, second.master.average, strict=True):
        assert torch.equal(one, two)


def test_resume_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(SpecdiffError, match="start without --resume"):
        trainer(tmp_path).resume()


def test_rate_rises_then_falls_to_its_floor():
    config = TrainerConfig(learning_rate=1.0, warmup=0.1, floor=0.05)
    rates = [config.rate(p / 100) for p in range(101)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[10] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.05)
    with pytest.raises(SpecdiffError, match="minutes"):
        TrainerConfig(minutes=0.0)
    with pytest.raises(SpecdiffError, match="ema_decay"):
        TrainerConfig(ema_decay=1.0)


def test_training_reads_the_states_that_decoding_hands_over():
    target, layers = tiny_target(), (0, 2)
    read = TargetFeatures(target, layers)
    long, short = row(9, 1, 1), row(5, 1, 2)
    context = torch.zeros(2, 9, dtype=torch.int64)
    context[0], context[1, :5] = torch.tensor(long.tokens), torch.tensor(short.tokens)
    states = read(context)
    session = CausalTarget(target).open(2, layers)
    handed = session.prefill([torch.tensor((*long.tokens, 0)), torch.tensor((*short.tokens, 0))])
    torch.testing.assert_close(states[0], handed[0])
    torch.testing.assert_close(states[1, :5], handed[1])


@pytest.mark.parametrize("name", ["streak", "d_pace", "tree_presence", "sampled_streak"])
def test_objectives_that_read_labels_train(tmp_path, name):
    run = trainer(tmp_path, steps=3, objective=make(name))
    before = [w.clone() for w in run.master.weights]
    run.run()
    assert any(not torch.equal(a, b) for a, b in zip(before, run.master.weights, strict=True))


@pytest.mark.parametrize("name", ["mdm", "distill_spec"])
def test_objectives_that_need_more_than_labels_are_refused(tmp_path, name):
    with pytest.raises(SpecdiffError, match=f"objective: .*{name}"):
        trainer(tmp_path, objective=make(name))
