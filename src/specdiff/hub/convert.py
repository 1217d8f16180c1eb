"""GGUF to bf16 safetensors, the form every other part of the library loads.

`main` is run by `specdiff.hub.converter` in a process of its own: it takes over process-wide settings, and hands all
its memory back when done.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdiff.errors import CheckpointError, SpecdiffError
from specdiff.files import write_text
from specdiff.hub.catalog import Recipe
from specdiff.hub.safety import check_folder, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOADING_TRACES = ("_name_or_path", "_model_name_or_path", "is_local", "local_files_only", "backend")

_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_GPT2],
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2],
    "qwen2": [
        {"type": "Split", "pattern": {"Regex": _QWEN2_PATTERN}, "behavior": "Isolated", "invert": False},
        _GPT2 | {"use_regex": False},
    ],
}
"""How text is cut before BPE, by the value of the GGUF key ``tokenizer.ggml.pre``.

transformers does not read that key and cuts every text as GPT-2 does, which gives some texts (digits, line breaks,
capitals after an apostrophe) tokens that the model was not trained on.
"""


def convert_gguf(gguf: Path, folder: Path, recipe: Recipe, origin: dict[str, str]) -> dict[str, str]:
    """Dequantise ``gguf`` to bf16 and write it into ``folder`` as safetensors with tokenizer and configuration.

    Args:
        gguf: the file; nothing else of its folder is read.
        folder: existing and empty.
        recipe: what the file does not say.
        origin: stored in the configuration as ``specdiff_origin``, which sets the fingerprint apart.

    Returns:
        The versions of the packages that did it.

    Raises:
        CheckpointError: the result is not a sound model (tensors missing or not finite).
    """
    import torch
    import transformers

    location: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # versions without it always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    config = transformers.AutoConfig.from_pretrained(gguf.parent, **location)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, config=config, **location)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, config=config, dtype=torch.bfloat16, output_loading_info=True, **location, **options
    )
    model, loading = loaded
    if missing := sorted(set(loading["missing_keys"]) - ({"lm_head.weight"} if recipe.tied else set())):
        raise CheckpointError(f"{gguf}: lacks {len(missing)} tensors of the model, the first is {missing[0]}")
    if recipe.tied:
        _tie(model)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=recipe.bos, pad_token_id=recipe.pad, eos_token_id=list(recipe.eos)
    )
    for name, tensor in model.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{gguf}: tensor {name} has values that are not finite")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _finish_config(folder / "config.json", recipe, origin)
    _finish_tokenizer(folder, recipe, model.config.max_position_embeddings)
    check_folder(folder)
    packages = ("torch", "transformers", "gguf")
    return {package: importlib.metadata.version(package) for package in packages}


def _tie(model: PreTrainedModel) -> None:
    """Make input and output embeddings one table; where the GGUF holds two, the output's was quantised less."""
    inputs: Any = model.get_input_embeddings()
    outputs: Any = model.get_output_embeddings()
    if inputs.weight.data_ptr() != outputs.weight.data_ptr():
        inputs.weight.data.copy_(outputs.weight.data)
        outputs.weight = inputs.weight
    model.config.tie_word_embeddings = True


def _finish_config(path: Path, recipe: Recipe, origin: dict[str, str]) -> None:
    special = {"bos_token_id": recipe.bos, "pad_token_id": recipe.pad, "eos_token_id": recipe.eos[0]}
    _write_json(path, read_json(path) | special | {"specdiff_origin": origin})


def _finish_tokenizer(folder: Path, recipe: Recipe, context: int) -> None:
    path = folder / "tokenizer_config.json"
    _write_json(path, read_json(path) | {"model_max_length": context})
    path = folder / "tokenizer.json"
    cut = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[recipe.pre_tokenizer]}
    _write_json(path, read_json(path) | {"pre_tokenizer": cut})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    kept = {key: item for key, item in value.items() if key not in _LOADING_TRACES}
    write_text(path, json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    """Convert as the JSON request on stdin says; the answer, versions or an error, is the last line of stdout."""
    request = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    import gguf

    # Parsing the vocabulary takes most of the time, and transformers would do it once for each of its three loads.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    recipe = Recipe(**request["recipe"] | {"eos": tuple(request["recipe"]["eos"])})
    try:
        answer = {"versions": convert_gguf(Path(request["gguf"]), Path(request["folder"]), recipe, request["origin"])}
    except SpecdiffError as error:
        answer = {"error": str(error)}
    print(f"\n{json.dumps(answer)}")
