"""Which models cannot be targets, and what they are told: by what they say of themselves, then by what they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from specdiff.errors import UnsupportedModelError
from specdiff.models.target import CausalTarget
from support.tiny_targets import FAMILIES, VOCAB, tiny_model

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA: dict[str, Any] = {
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 64,
}
_LINEAR: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, "recurrent state"),
    "recurrent_gemma": (_SMALL | {"lru_width": 32, "head_dim": 8, "num_hidden_layers": 3}, "recurrent state"),
    "jamba": (_SMALL | {"num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False}, "recurrent state"),
    "qwen3_next": (_SMALL | _LINEAR, "recurrent state"),
    "falcon_h1": (_SMALL | _MAMBA | {"head_dim": 8}, "recurrent state"),
    "lfm2": (_SMALL | {"layer_types": ["conv", "full_attention"]}, "layers of kind conv"),
    "llama4_text": (
        _SMALL
        | {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 16,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        "chunked_attention",
    ),
    "bloom": ({"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "no position_ids"),
    "mpt": ({"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, "no position_ids"),
    "falcon": (_SMALL | {"alibi": True, "multi_query": True}, "ALiBi"),
    "gpt_neo": (
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 8,
            "attention_types": [[["global", "local"], 1]],
        },
        "by cache slot",
    ),
}


def _build(family: str, options: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **options)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", _REFUSED)
def test_state_that_cannot_be_rolled_back_is_refused(family: str) -> None:
    options, reason = _REFUSED[family]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        CausalTarget(_build(family, options))
    assert family in str(caught.value)


def test_encoder_decoders_are_refused() -> None:
    config = AutoConfig.for_model("t5", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        CausalTarget(AutoModelForSeq2SeqLM.from_config(config))


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"])
def test_attention_kernels_without_4d_masks_are_refused(kernel: str) -> None:
    model = tiny_model("llama")
    model.config._attn_implementation_internal = kernel
    with pytest.raises(UnsupportedModelError, match="takes no 4-D mask"):
        CausalTarget(model)


@pytest.mark.parametrize("change", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_models_that_see_the_future_are_refused(change: dict[str, Any]) -> None:
    model = tiny_model("llama")
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(UnsupportedModelError, match="both directions"):
        CausalTarget(model)


def test_windows_of_several_sizes_are_refused() -> None:
    model = tiny_model("mistral")
    model.config.__dict__["sliding_window"] = [8, 16, 32]
    with pytest.raises(UnsupportedModelError, match="several sizes"):
        CausalTarget(model)


# What only a pass shows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_supported_models_pass_their_self_check(family: str, attention: str) -> None:
    assert CausalTarget(tiny_model(family, attention=attention)).self_check() < 1e-4


def test_rounding_of_bf16_passes_the_self_check() -> None:
    assert CausalTarget(tiny_model("llama").to(torch.bfloat16)).self_check() < 0.05


def _ignoring(model: PreTrainedModel, name: str, replacement: Any = None) -> PreTrainedModel:
    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if kwargs.get(name) is not None:
            kwargs = kwargs | {name: replacement}
        return args, kwargs

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("argument", ["attention_mask", "position_ids"])
def test_models_that_ignore_masks_or_positions_are_found(argument: str, dtype: torch.dtype) -> None:
    target = CausalTarget(_ignoring(tiny_model("llama").to(dtype), argument))
    with pytest.raises(UnsupportedModelError, match="ignores 4-D masks or positions"):
        target.self_check()


def _rough(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose rounding depends on how many rows a pass has, as that of kernels does, by 7 % of its logits."""

    def hook(_module: Any, _args: Any, output: Any) -> None:
        logits = output.logits
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(logits.shape[1]))
        output.logits = logits + (0.07 * logits.std() * noise).to(logits.dtype)

    model.register_forward_hook(hook)
    return model


def test_rounding_that_the_model_itself_shows_is_no_fault() -> None:
    assert CausalTarget(_rough(tiny_model("llama").to(torch.bfloat16))).self_check() > 0.05
    with pytest.raises(UnsupportedModelError, match="differently"):  # full precision does not round so
        CausalTarget(_rough(tiny_model("llama"))).self_check()


@pytest.mark.parametrize("argument", ["attention_mask", "position_ids"])
def test_rounding_hides_no_ignored_argument(argument: str) -> None:
    with pytest.raises(UnsupportedModelError, match="ignores 4-D masks or positions"):
        CausalTarget(_ignoring(_rough(tiny_model("llama").to(torch.bfloat16)), argument)).self_check()


def test_bool_masks_under_eager_attention_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdiff.models.cached_decoder import CachedDecoder

    masks = CachedDecoder._masks
    monkeypatch.setattr(CachedDecoder, "_masks", lambda self, *args: masks(self, *args) == 0)
    assert CausalTarget(tiny_model("llama")).self_check() < 1e-4  # right under sdpa
    with pytest.raises(UnsupportedModelError, match="differently"):
        CausalTarget(tiny_model("llama", attention="eager")).self_check()


def test_models_that_are_bidirectional_without_saying_so_are_found() -> None:
    options = _SMALL | {"num_key_value_heads": None, "is_decoder": False, "initializer_range": 0.3}
    with pytest.raises(UnsupportedModelError, match="differently"):
        CausalTarget(_build("bert", options)).self_check()


def test_models_that_cannot_run_are_found() -> None:
    target = CausalTarget(tiny_model("llama"))
    target.model.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no kernel")))
    with pytest.raises(UnsupportedModelError, match="no kernel"):
        target.self_check()


def test_the_self_check_is_cheap() -> None:
    model = tiny_model("llama")
    rows: list[int] = []
    model.register_forward_hook(lambda _m, _a, output: rows.append(output.logits.shape[0] * output.logits.shape[1]))
    CausalTarget(model).self_check()
    assert len(rows) == 7
    assert sum(rows) < 70


# Context --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, 512),
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, 512),
        ({"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
          "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}, 128),
    ],
    ids=["default", "dynamic", "longrope"],
)  # fmt: skip
def test_growing_rotary_frequencies_limit_the_context(rope: dict[str, Any], context: int) -> None:
    """Beyond it a pass that looks ahead would change the frequencies of all its rows."""
    assert CausalTarget(tiny_model("llama", rope_parameters=rope)).context == context
