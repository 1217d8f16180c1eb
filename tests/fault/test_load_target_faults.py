"""Loading: what is broken or not allowed is refused with the reason; what is fine decodes; options are recorded."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import BertConfig, BertLMHeadModel, BitsAndBytesConfig, PreTrainedTokenizerFast

from specdiff.errors import CheckpointError, DownloadError, InputError, SpecdiffError, UnsupportedModelError
from specdiff.models.diffusion import DiffusionLM
from specdiff.models.load_target import dtype_of, load_target
from specdiff.models.target import ScoreRequest
from specdiff.types import TokenTree
from support.tiny_diffusion import EOS, checkpoint
from support.tiny_targets import VOCAB, fresh_logits, tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model("llama").save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    copy = tmp_path / saved.name
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_a_loaded_target_scores_as_the_model_it_was_saved_from(saved: Path) -> None:
    target, tokenizer = load_target(saved)
    assert tokenizer.convert_ids_to_tokens(5) == "w5"
    assert (target.name, target.vocab_size, target.context, target.eos_ids) == ("tiny-llama", VOCAB, 512, ())
    ids = torch.arange(9)
    session = target.open(1)
    session.prefill([ids])
    got = session.score([ScoreRequest(8, TokenTree(torch.tensor([3]), (-1,)))])[0]
    assert got is not None
    torch.testing.assert_close(got, fresh_logits(tiny_model("llama"), torch.cat([ids, torch.tensor([3])]))[-2:])


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({}, {"dtype": "float32", "device": "cpu", "attention": "sdpa", "tf32": False, "quantised": None}),
        ({"dtype": "bf16"}, {"dtype": "bfloat16"}),
        ({"dtype": torch.float16, "device": "cpu"}, {"dtype": "float16", "device": "cpu"}),
        ({"dtype": "fp32", "attn_implementation": "eager"}, {"dtype": "float32", "attention": "eager"}),
        ({"device_map": "auto"}, {"device": "cpu"}),
        ({"device_map": {"": "cpu"}, "dtype": "bf16"}, {"device": "cpu", "dtype": "bfloat16"}),
        ({"revision": "main"}, {}),
    ],
)
def test_options_are_honoured_and_recorded(saved: Path, options: dict[str, Any], recorded: dict[str, Any]) -> None:
    target, _ = load_target(saved, **options)
    info = vars(target.info)
    assert {name: info[name] for name in recorded} == recorded
    assert str(target.model.dtype).removeprefix("torch.") == info["dtype"]
    assert info["transformers"].startswith("5.")


def test_tf32_is_off_unless_asked_for(saved: Path) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        with pytest.warns(UserWarning, match="tf32 has no effect"):  # the weights lie on the CPU
            target, _ = load_target(saved, tf32=True, device="cpu")
        assert target.info.tf32 is False
        assert matmul.fp32_precision == "tf32"
        load_target(saved)
        assert matmul.fp32_precision == "ieee"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), (torch.float64,) * 2])
def test_dtype_names(name: str | torch.dtype, dtype: torch.dtype) -> None:
    assert dtype_of(name) is dtype


_OPTIONS: dict[str, tuple[dict[str, Any], type[SpecdiffError], str]] = {
    "unknown dtype": ({"dtype": "int3"}, InputError, "dtype: expected one of bf16, fp16, fp32"),
    "two placements": ({"device": "cpu", "device_map": "auto"}, InputError, "one way to place"),
    "tensor parallel without torchrun": ({"tp_plan": "auto"}, InputError, "torchrun"),
    "flash attention": ({"attn_implementation": "flash_attention_2"}, InputError, "4-D masks"),
    "kernel from a hub": ({"attn_implementation": "someone/kernel"}, InputError, "4-D masks"),
    "no such accelerator": ({"device": "cuda:99"}, SpecdiffError, "device|cuda"),
    "unknown device": ({"device": "abacus"}, SpecdiffError, "abacus"),
}


@pytest.mark.parametrize("fault", _OPTIONS)
def test_options_that_cannot_be_honoured_are_refused(
    saved: Path, fault: str, monkeypatch: pytest.MonkeyPatch, met: Callable[[str], None]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    options, error, text = _OPTIONS[fault]
    with pytest.raises(error, match=text):
        load_target(saved, **options)
    met("option that cannot be honoured")


def _rewrite_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _reshape_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _pickle_only(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


_BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
_FOLDERS: dict[str, tuple[Callable[[Path], object], type[SpecdiffError], str]] = {
    "no configuration": (lambda f: (f / "config.json").unlink(), CheckpointError, "config.json"),
    "configuration cut off": (
        lambda f: (f / "config.json").write_text('{"model_type": "lla'),
        CheckpointError,
        "config.json",
    ),
    "configuration of no model": (lambda f: (f / "config.json").write_text("{}"), CheckpointError, "model_type"),
    "unknown architecture": (_rewrite_config(model_type="no-such-model"), CheckpointError, "no-such-model"),
    "weights of another architecture": (_rewrite_config(model_type="gpt_neox"), CheckpointError, "lacks .* tensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), CheckpointError, "safetensors"),
    "pickled weights": (_pickle_only, CheckpointError, "pickle"),
    "weights cut off": (_truncate, CheckpointError, "model.safetensors"),
    "weights that are no safetensors": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x00" * 400),
        CheckpointError,
        "model.safetensors",
    ),
    "a tensor missing": (_drop_tensor, CheckpointError, "lacks 1 tensors .*up_proj"),
    "a tensor of another shape": (_reshape_tensor, CheckpointError, "tiny-llama"),
    "remote code": (_rewrite_config(auto_map={"AutoModelForCausalLM": "evil.Model"}), CheckpointError, "Python code"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], CheckpointError, "cannot be loaded"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", _FOLDERS)
def test_broken_folders_are_refused(folder: Path, fault: str, met: Callable[[str], None]) -> None:
    breaks, error, text = _FOLDERS[fault]
    breaks(folder)
    with pytest.raises(error, match=text):
        load_target(folder)
    met("truncated safetensors" if fault == "weights cut off" else "broken checkpoint")


@pytest.mark.filterwarnings("ignore")
def test_weights_are_quantised_while_loading_and_read_back(saved: Path, tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    target, _ = load_target(saved, dtype="bf16", quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig()))
    assert target.info.quantised == "torchao"
    target.model.save_pretrained(tmp_path)
    for file in saved.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    again, _ = load_target(tmp_path)  # weights stored quantised say so themselves
    assert again.info.quantised == "torchao"


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_a_quantiser_that_is_not_installed_is_named(saved: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"package that is not installed.*bitsandbytes"):
        load_target(saved, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


def test_what_is_no_model_is_refused(saved: Path, tmp_path: Path) -> None:
    for wrong in (tmp_path / "missing", saved / "config.json", "no spaces in ids", "../relative/path"):
        with pytest.raises(CheckpointError, match="no model folder"):
            load_target(wrong)
    with pytest.raises(DownloadError, match="neither a folder here nor"):
        load_target("specdiff-tests/no-such-model")


def test_models_that_cannot_be_targets_are_refused_when_loaded(
    tmp_path: Path, saved: Path, met: Callable[[str], None]
) -> None:
    """The self-check runs at load time."""
    BertLMHeadModel(BertConfig(**_BERT)).eval().save_pretrained(tmp_path)
    for file in saved.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedModelError, match="differently"):
            load_target(tmp_path)
    met("unfit pair")


@pytest.mark.parametrize(
    "mask", [None, EOS, 10**6], ids=["no mask id", "mask id is EOS", "mask id beyond the vocabulary"]
)
def test_a_masked_drafter_without_a_usable_mask_id_is_refused(
    tmp_path: Path, mask: int | None, met: Callable[[str], None]
) -> None:
    with pytest.raises(InputError, match="mask_id"):
        DiffusionLM.from_pretrained(checkpoint(tmp_path, "dream", mask_token_id=mask))
    met("no mask id")
