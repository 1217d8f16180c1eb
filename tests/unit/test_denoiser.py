"""The denoiser: what it is cut from, what a draft pass computes, and what a damaged directory says."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from specdiff.errors import SpecdiffError
from specdiff.models.denoiser import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    BlockCausalDenoiser,
    DenoiserConfig,
)
from specdiff.models.layer_cut import find_layer_list, target_fingerprint
from support.denoising import block_causal_mask

VOCAB, HIDDEN, WINDOW = 64, 32, 4
DRAFT_VOCAB = torch.arange(1, VOCAB, 3)


def tiny_target(seed: int = 0, model_type: str = "llama", dtype: torch.dtype = torch.float32):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def tables(target):
    return target.get_input_embeddings().weight, target.get_output_embeddings().weight


def cut(target, **options) -> BlockCausalDenoiser:
    options = {"draft_vocab": DRAFT_VOCAB, "layers": (0, 2), "window": WINDOW, **options}
    return BlockCausalDenoiser.from_target(target, **options).eval()


def draft(
    denoiser: BlockCausalDenoiser, tokens: torch.Tensor, cache=None, cached: int = 0, features=None
) -> torch.Tensor:
    """Draft after `tokens` [1, n] with the first `cached` of them in the cache: [window, H]."""
    prefix = tokens[:, cached:-1]
    window = torch.zeros(1, denoiser.window, dtype=torch.int64)
    window[:, 0] = tokens[:, -1]
    is_mask = torch.zeros(1, prefix.shape[1] + denoiser.window, dtype=torch.bool)
    is_mask[:, prefix.shape[1] + 1 :] = True
    embeds = denoiser.embed(torch.cat([prefix, window], 1), is_mask, features)
    mask = block_causal_mask(cached, prefix.shape[1], denoiser.window, dtype=embeds.dtype)
    positions = torch.arange(cached, cached + embeds.shape[1])[None]
    return denoiser.hidden(embeds, mask, positions, cache)[0, -denoiser.window :]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_layers_and_norm_are_the_targets(model_type):
    target = tiny_target(model_type=model_type)
    denoiser = cut(target)
    theirs, ours = target.model.state_dict(), denoiser.decoder.state_dict()
    assert not any("embed" in name for name in ours)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name.replace("layers.1.", "layers.2.")]), name


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_all_layers_and_a_causal_mask_give_the_target_back(model_type):
    target = tiny_target(model_type=model_type)
    denoiser = cut(target, layers=range(4))
    tokens = torch.arange(3, 12)[None]
    embeds = denoiser.embed(tokens, torch.zeros_like(tokens, dtype=torch.bool))
    hidden = denoiser.hidden(embeds, block_causal_mask(0, 9, 0, dtype=torch.float32), torch.arange(9)[None])
    torch.testing.assert_close(denoiser.head(hidden), target(tokens).logits[..., DRAFT_VOCAB], atol=1e-5, rtol=1e-5)


def test_head_columns_follow_the_sorted_draft_vocabulary():
    target = tiny_target()
    denoiser = cut(target, draft_vocab=torch.tensor([9, 4, 9, 2]))
    assert denoiser.draft_vocab.tolist() == [2, 4, 9]
    assert torch.equal(denoiser.head_weight, tables(target)[1][[2, 4, 9]])
    assert denoiser.head(torch.zeros(3, 5, HIDDEN)).shape == (3, 5, 3)


def test_table_and_head_are_borrowed_and_frozen():
    target = tiny_target()
    denoiser = cut(target)
    assert denoiser.embedding_weight.data_ptr() == tables(target)[0].data_ptr()
    trained = dict(denoiser.named_parameters())
    assert set(denoiser.state_dict()) == set(trained)
    assert not any(p.shape[0] in (VOCAB, DRAFT_VOCAB.numel()) for p in trained.values())
    assert not denoiser.head_weight.requires_grad


def test_mask_rows_feed_the_mask_embedding_whatever_their_token():
    denoiser = cut(tiny_target())
    is_mask = torch.tensor([[False, True, True]])
    one = denoiser.embed(torch.tensor([[5, 6, -1]]), is_mask)
    other = denoiser.embed(torch.tensor([[5, 0, 63]]), is_mask)
    assert torch.equal(one, other)
    assert torch.equal(one[0, 1], denoiser.mask_embedding)
    assert torch.equal(one[0, 0], denoiser.embedding_weight[5])


def test_mask_lets_the_prefix_look_back_and_the_window_look_everywhere():
    mask = block_causal_mask(2, 2, 3, dtype=torch.float32)[0, 0] == 0
    assert mask.int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1],
    ]


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_cached_prefix_gives_the_same_draft(attn_implementation):
    denoiser = cut(tiny_target(), attn_implementation=attn_implementation)
    tokens = torch.randint(0, VOCAB, (1, 14), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = draft(denoiser, tokens)
        cache = DynamicCache()
        draft(denoiser, tokens[:, :6], cache)
        cache.crop(-WINDOW)  # the window's rows are not prefix rows
        assert cache.get_seq_length() == 5
        in_two = draft(denoiser, tokens, cache, cached=5)
    torch.testing.assert_close(in_two, whole, atol=1e-5, rtol=1e-5)


def test_window_rows_see_each_other_and_the_prefix_sees_no_window():
    denoiser = cut(tiny_target())
    tokens = torch.arange(4, 12)[None]
    with torch.no_grad():
        before, cache = draft(denoiser, tokens), DynamicCache()
        draft(denoiser, tokens, cache)
        denoiser.mask_embedding.add_(0.5)
        after, other = draft(denoiser, tokens), DynamicCache()
        draft(denoiser, tokens, other)
    assert (before - after).abs().amax(-1).gt(1e-4).all()  # row 0 too: it looks ahead at the masks
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(one.keys[:, :, :7], two.keys[:, :, :7])


def test_features_start_as_nothing_and_then_reach_the_window():
    target = tiny_target()
    plain, reading = cut(target), cut(target, feature_layers=(1, 3))
    tokens = torch.arange(4, 12)[None]
    features = torch.zeros(1, 7 + WINDOW, 2 * HIDDEN)
    states = target(tokens, output_hidden_states=True).hidden_states
    features[:, :7] = torch.cat([states[2], states[4]], -1)[:, :7]
    with torch.no_grad():
        assert torch.equal(draft(plain, tokens), draft(reading, tokens, features=features))
        torch.nn.init.normal_(reading.feature_projection.weight, std=0.2)
        changed = draft(reading, tokens, features=features)
        assert not torch.allclose(draft(plain, tokens), changed, atol=1e-3)
        embeds = reading.embed(tokens, torch.zeros_like(tokens, dtype=torch.bool), features[:, :8])
    assert torch.equal(embeds[:, 7], reading.embedding_weight[tokens[:, 7]])  # a zero feature adds nothing


def test_wrong_features_are_refused():
    target = tiny_target()
    tokens, none = torch.ones(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.bool)
    with pytest.raises(SpecdiffError, match="built without feature_layers"):
        cut(target).embed(tokens, none, torch.zeros(1, 3, HIDDEN))
    reading = cut(target, feature_layers=(1,))
    for features in (None, torch.zeros(1, 3, HIDDEN + 1), torch.zeros(1, 2, HIDDEN)):
        with pytest.raises(SpecdiffError, match="features: expected shape"):
            reading.embed(tokens, none, features)


def test_embedding_scale_of_the_target_is_kept():
    target = tiny_target(model_type="gemma3_text")
    denoiser = cut(target)
    tokens = torch.arange(4, 9)[None]
    expected = target.get_input_embeddings()(tokens)
    torch.testing.assert_close(denoiser.embed(tokens, torch.zeros_like(tokens, dtype=torch.bool)), expected)


@pytest.mark.parametrize("feature_layers", [(), (0, 2)])
def test_saved_and_loaded_denoiser_drafts_the_same(tmp_path, feature_layers):
    target = tiny_target(dtype=torch.bfloat16)
    denoiser = cut(target, feature_layers=feature_layers, name="tiny")
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.1)
    denoiser.save_pretrained(tmp_path / "d")
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]
    loaded = BlockCausalDenoiser.from_pretrained(tmp_path / "d", *tables(target))
    assert loaded.config == denoiser.config
    assert not loaded.training
    assert torch.equal(loaded.draft_vocab, denoiser.draft_vocab)
    features = torch.randn(1, 4 + WINDOW, 2 * HIDDEN) if feature_layers else None
    tokens = torch.arange(5, 10)[None]
    with torch.no_grad():
        assert torch.equal(draft(loaded, tokens, features=features), draft(denoiser, tokens, features=features))


def test_given_state_is_saved_in_place_of_the_modules(tmp_path):
    target = tiny_target()
    denoiser = cut(target)
    state = {name: torch.full_like(value, 0.25) for name, value in denoiser.state_dict().items()}
    denoiser.save_pretrained(tmp_path, state)
    loaded = BlockCausalDenoiser.from_pretrained(tmp_path, *tables(target))
    assert all((value == 0.25).all() for value in loaded.state_dict().values())
    state.pop("mask_embedding")
    with pytest.raises(SpecdiffError, match="missing \\['mask_embedding'\\]"):
        denoiser.save_pretrained(tmp_path, state)


def test_fp32_target_has_the_fingerprint_of_its_bf16_checkpoint():
    target = tiny_target(dtype=torch.bfloat16)
    fingerprint = target_fingerprint(*tables(target))
    assert target_fingerprint(*(t.float() for t in tables(target))) == fingerprint
    assert target_fingerprint(*tables(tiny_target(seed=1))) != fingerprint


def test_another_target_is_refused_unless_asked_for(tmp_path):
    cut(tiny_target()).save_pretrained(tmp_path)
    other = tables(tiny_target(seed=1))
    with pytest.raises(SpecdiffError, match="check_target=False"):
        BlockCausalDenoiser.from_pretrained(tmp_path, *other)
    BlockCausalDenoiser.from_pretrained(tmp_path, *other, check_target=False)
    with pytest.raises(SpecdiffError, match="target_embedding: expected shape"):
        BlockCausalDenoiser.from_pretrained(tmp_path, other[0][:-1], other[1])
    with pytest.raises(SpecdiffError, match="target_head_weight: expected shape"):
        BlockCausalDenoiser.from_pretrained(tmp_path, other[0], other[1][:, :-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format_version: expected 1, got 99"),
        ({"window": 0}, "window: expected a positive integer"),
        ({"window": "8"}, "window: expected a positive integer"),
        ({"layers": []}, "layers: expected at least one"),
        ({"layers": 3}, "layers: expected a list"),
        ({"layers": [0, -1]}, "layers: expected a tuple of non-negative"),
        ({"shift": False}, "shift: expected True"),
        ({"surprise": 1}, "unknown \\['surprise'\\]"),
        ({"window": None, "hidden_size": HIDDEN}, "window: expected a positive integer"),
        ({"vocab_size": VOCAB + 1}, "target_embedding: expected shape"),
    ],
)
def test_damaged_configuration_is_refused(tmp_path, change, message):
    target = tiny_target()
    cut(target).save_pretrained(tmp_path)
    path = tmp_path / CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(SpecdiffError, match=message):
        BlockCausalDenoiser.from_pretrained(tmp_path, *tables(target))


def test_missing_field_and_broken_json_are_refused(tmp_path):
    target = tiny_target()
    cut(target).save_pretrained(tmp_path)
    path = tmp_path / CONFIG_NAME
    data = json.loads(path.read_text())
    data.pop("window")
    path.write_text(json.dumps(data))
    with pytest.raises(SpecdiffError, match="missing \\['window'\\]"):
        BlockCausalDenoiser.from_pretrained(tmp_path, *tables(target))
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(SpecdiffError, match=r"config\.json: expected"):
            BlockCausalDenoiser.from_pretrained(tmp_path, *tables(target))


def test_damaged_weights_are_refused(tmp_path):
    target = tiny_target()
    cut(target).save_pretrained(tmp_path)
    path = tmp_path / WEIGHTS_NAME
    good = load_file(path)

    def refused(tensors, message):
        save_file(tensors, path)
        with pytest.raises(SpecdiffError, match=message):
            BlockCausalDenoiser.from_pretrained(tmp_path, *tables(target))

    refused({k: v for k, v in good.items() if k != "mask_embedding"}, "missing \\['mask_embedding'\\]")
    refused({**good, "extra": torch.zeros(1)}, "unknown \\['extra'\\]")
    refused({**good, "mask_embedding": torch.zeros(3)}, "expected mask_embedding of shape \\(32,\\), got \\(3,\\)")
    refused({k: v for k, v in good.items() if k != "draft_vocab"}, "expected a tensor draft_vocab")
    refused({**good, "draft_vocab": torch.tensor([5, 3])}, "strictly increasing")
    refused({**good, "draft_vocab": torch.tensor([5, VOCAB])}, "strictly increasing ids in \\[0, 64\\)")
    refused({**good, "draft_vocab": torch.zeros(0, dtype=torch.int64)}, "non-empty")
    path.write_bytes(b"torn")
    with pytest.raises(SpecdiffError, match="expected a safetensors file"):
        BlockCausalDenoiser.from_pretrained(tmp_path, *tables(target))
    path.unlink()
    with pytest.raises(SpecdiffError, match=r"expected a file denoiser\.safetensors"):
        BlockCausalDenoiser.from_pretrained(tmp_path, *tables(target))


def test_layers_outside_the_target_are_refused():
    target = tiny_target()
    for option in ("layers", "feature_layers"):
        with pytest.raises(SpecdiffError, match=f"{option}: expected indices in \\[0, 4\\), got \\[7\\]"):
            cut(target, **{option: (0, 7)})


def test_layer_list_is_found_by_its_length():
    inner = tiny_target().get_decoder()
    assert find_layer_list(inner)[0] == "layers"
    inner.config.num_hidden_layers = 5
    with pytest.raises(SpecdiffError, match="expected one list of 5 layers"):
        find_layer_list(inner)


def test_configuration_survives_json():
    config = cut(tiny_target(), feature_layers=(1,)).config
    assert DenoiserConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
