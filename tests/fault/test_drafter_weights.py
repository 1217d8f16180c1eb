"""Drafters whose weights or folder are faulty: a typed error that names the drafter, never a silent loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdiff.decoder import SpeculativeDecoder, load
from specdiff.drafters.block_causal import BlockCausalSource
from specdiff.drafters.marginal import MarginalDrafter
from specdiff.errors import CheckpointError, InputError, NumericsError, SpecdiffError, UnsupportedModelError
from specdiff.models.denoiser import BlockCausalDenoiser
from specdiff.models.target import CausalTarget
from support.tiny_targets import VOCAB, tiny_model
from support.tokenizing import byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte-level tokenizer."""
    path, tokenizer = tmp_path_factory.mktemp("models") / "tiny", byte_level()
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_denoiser_of_nan_weights_is_told(temperature: float) -> None:
    model = tiny_model("llama")
    denoiser = BlockCausalDenoiser.from_target(model, draft_vocab=torch.arange(VOCAB), layers=(0,), window=4)
    with torch.no_grad():
        denoiser.mask_embedding.fill_(torch.nan)
    decoder = SpeculativeDecoder(CausalTarget(model), MarginalDrafter(BlockCausalSource(denoiser)), None)
    with pytest.raises(NumericsError, match=r"drafter .denoiser.: .*NaN"):
        decoder.generate([1, 2, 3], max_new_tokens=8, temperature=temperature)


def test_an_autoregressive_drafter_that_lacks_a_tensor_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "lacking"
    shutil.copytree(folder, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors.pop(next(name for name in tensors if "q_proj" in name))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"drafter .*q_proj"):
        load(str(folder), str(broken))


def test_an_autoregressive_drafter_of_wrong_shapes_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "shapes"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "config.json").read_text())
    config["intermediate_size"] *= 2
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecdiffError, match="drafter"):
        load(str(folder), str(broken))


@pytest.mark.parametrize("fault", ["no tokenizer", "unknown type"])
def test_an_autoregressive_drafter_that_cannot_be_read_is_refused(folder: Path, tmp_path: Path, fault: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    if fault == "no tokenizer":
        for path in broken.glob("tokenizer*"):
            path.unlink()
    else:
        config = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps({**config, "model_type": "nosuch"}))
    with pytest.raises((CheckpointError, UnsupportedModelError, InputError), match="drafter"):
        load(str(folder), str(broken))


def test_a_drafter_id_that_cannot_be_fetched_is_a_typed_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SpecdiffError, match="nobody/no-such"):
        load(str(folder), "nobody/no-such")


@pytest.mark.parametrize("prompts", [[[]], [[1, 2], []]])
def test_an_empty_row_of_ids_is_refused(prompts: list[list[int]]) -> None:
    decoder = SpeculativeDecoder(CausalTarget(tiny_model("llama")), None, None)
    with pytest.raises(InputError, match="at least one token"):
        decoder.generate(prompts)
