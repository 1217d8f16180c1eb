"""GGUF to bf16 safetensors, the form every other part of the library loads."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specdiff.errors import CheckpointError, InputError
from specdiff.hub.catalog import CatalogEntry
from specdiff.hub.folders import write_text
from specdiff.hub.safety import check_folder, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PACKAGES = ("torch", "transformers", "gguf")
_LOADING_TRACES = ("_name_or_path", "_model_name_or_path", "is_local", "local_files_only", "backend")

# How text is cut before BPE, by the GGUF key tokenizer.ggml.pre. transformers does not read that key and cuts as GPT-2
# does, which gives some texts (digits, line breaks, capitals after an apostrophe) tokens the model never saw.
_DIGITS = {"type": "Digits", "individual_digits": True}
_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = {"type": "Split", "pattern": {"Regex": _QWEN2_PATTERN}, "behavior": "Isolated", "invert": False}
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [_DIGITS, _GPT2],
    "qwen2": [_QWEN2, _GPT2 | {"use_regex": False}],
}


class Converter(Protocol):
    """The seam to conversion: reads the GGUF of ``entry``, writes a model folder, returns the versions used."""

    def __call__(self, gguf: Path, folder: Path, entry: CatalogEntry) -> dict[str, str]:
        """Convert ``gguf`` into the existing, empty ``folder``."""
        ...


def require_packages() -> None:
    """Check that conversion can run; called before a download begins, not after.

    Raises:
        InputError: a package is missing.
    """
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise InputError.of(
            "environment",
            expected=f"packages {', '.join(_PACKAGES)} to convert a GGUF file",
            got=f"no {', '.join(missing)}",
            remedy=f"run `pip install {' '.join(missing)}`",
        )


def convert_gguf(gguf: Path, folder: Path, entry: CatalogEntry) -> dict[str, str]:
    """Dequantise ``gguf`` to bf16 and write it into ``folder`` as safetensors with tokenizer and configuration.

    Returns:
        The versions of the packages that did it.

    Raises:
        CheckpointError: the result is not a sound model (weights missing or not finite).
        InputError: a package is missing.
    """
    require_packages()
    import gguf as gguf_package
    import torch
    import transformers

    location: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    dequantise = {}
    if hasattr(transformers, "GgufConfig"):  # versions without it always dequantise
        dequantise["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about reading GGUF at all
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **location)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.bfloat16, **location, **dequantise
        )
    if entry.tied:
        _tie(model)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=entry.tokens.bos, pad_token_id=entry.tokens.pad, eos_token_id=list(entry.tokens.eos)
    )
    for name, tensor in model.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{gguf}: tensor {name} has values that are not finite; the file is damaged")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _finish_config(folder, entry)
    _finish_tokenizer(folder, _pre_tokenizer(gguf), model.config.max_position_embeddings)
    check_folder(folder)
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gguf": importlib.metadata.version(gguf_package.__name__),
    }


def _tie(model: PreTrainedModel) -> None:
    """Make input and output embeddings one table; where the GGUF holds two, the output's was quantised less."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if inputs.weight.data_ptr() != outputs.weight.data_ptr():
        inputs.weight.data.copy_(outputs.weight.data)
        outputs.weight = inputs.weight
    model.config.tie_word_embeddings = True


def _finish_config(folder: Path, entry: CatalogEntry) -> None:
    config = read_json(folder / "config.json")
    config.update(bos_token_id=entry.tokens.bos, pad_token_id=entry.tokens.pad, eos_token_id=entry.tokens.eos[0])
    config["specdiff_origin"] = {
        "title": entry.title, "label": entry.label, "gguf": entry.gguf, "gguf_sha256": entry.gguf_sha256
    }  # fmt: skip
    _write_json(folder / "config.json", config)


def _finish_tokenizer(folder: Path, pre_tokenizer: list[dict[str, Any]] | None, context: int) -> None:
    config = read_json(folder / "tokenizer_config.json") | {"model_max_length": context}
    _write_json(folder / "tokenizer_config.json", config)
    if pre_tokenizer is not None:
        tokenizer = read_json(folder / "tokenizer.json")
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre_tokenizer}
        _write_json(folder / "tokenizer.json", tokenizer)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    kept = {key: item for key, item in value.items() if key not in _LOADING_TRACES}
    write_text(path, json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def _pre_tokenizer(gguf: Path) -> list[dict[str, Any]] | None:
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return None if field is None else _PRE_TOKENIZERS.get(str(field.contents()))
