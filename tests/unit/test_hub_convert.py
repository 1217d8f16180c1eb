"""GGUF to bf16 safetensors, with a real, tiny GGUF file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdiff.errors import CheckpointError
from specdiff.hub import CATALOG, check_folder
from specdiff.hub.catalog import Recipe
from specdiff.hub.convert import PRE_TOKENIZERS, convert_gguf
from specdiff.hub.converter import convert_in_process
from support.gguf_file import write_llama

RECIPE = Recipe(bos=1, pad=2, eos=(0, 2), tied=True, pre_tokenizer="smollm")
ENTRY = replace(CATALOG["smollm2-135m"], name="tiny", gguf="tiny.gguf", recipe=RECIPE)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray], dict[str, str]]:
    """The folder, the tensors that went in, and the versions: converted once, in a process of its own."""
    root = tmp_path_factory.mktemp("convert")
    tensors = write_llama(root / "tiny.gguf", untied=True)
    (root / "model").mkdir()
    versions = convert_in_process(root / "tiny.gguf", root / "model", ENTRY)
    return root / "model", tensors, versions


def test_the_folder_is_complete_and_marked_as_dequantised(converted) -> None:
    folder, _, versions = converted
    assert [path.name for path in check_folder(folder)] == ["model.safetensors"]
    assert set(versions) == {"torch", "transformers", "gguf"}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["specdiff_origin"]["label"] == "Q4_1-dequantised to bf16"
    assert config["specdiff_origin"]["gguf_sha256"] == ENTRY.gguf_sha256
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.json"))
    assert str(folder.parent) not in text, "no path of the machine that converted"
    assert "is_local" not in text


def test_weights_are_the_dequantised_ones_and_the_finer_table_wins(converted) -> None:
    folder, tensors, _ = converted
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True)
    assert model.config.tie_word_embeddings
    assert model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    state = model.state_dict()

    def same(name: str, expected: np.ndarray) -> bool:
        return torch.equal(state[name], torch.from_numpy(expected).bfloat16())

    assert same("model.embed_tokens.weight", tensors["output.weight"])
    assert same("model.norm.weight", tensors["output_norm.weight"])
    assert same("model.layers.1.mlp.down_proj.weight", tensors["blk.1.ffn_down.weight"])
    assert all(tensor.dtype is torch.bfloat16 for tensor in state.values())


def test_generation_knows_every_eos(converted) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted[0])
    settings = model.generation_config
    assert (settings.bos_token_id, settings.pad_token_id, settings.eos_token_id) == (1, 2, [0, 2])
    assert not settings.do_sample


def test_the_tokenizer_cuts_as_the_model_was_trained(converted) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.model_max_length == 128
    text = "he had 12345\n\n  7 a's é"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    cut = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]
    assert cut["pretokenizers"] == PRE_TOKENIZERS["smollm"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [({"leave_out": "blk.1.ffn_down.weight"}, "down_proj"), ({"nan": True}, "not finite")],
)
def test_a_file_that_is_no_sound_model_is_refused(tmp_path: Path, fault: dict[str, object], words: str) -> None:
    write_llama(tmp_path / "tiny.gguf", **fault)
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match=words):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model", RECIPE, {})


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF but no more")
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: conversion failed \(.*the download is kept"):
        convert_in_process(tmp_path / "tiny.gguf", tmp_path / "model", ENTRY)
