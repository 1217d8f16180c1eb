"""Who answered: fingerprints of tokenizer, weights and tables, and prompts as that target reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from specdiff.chat import chat_ids
from specdiff.corpus.manifest import PromptRecord, TargetIdentity
from specdiff.corpus.plan import EncodedPrompt
from specdiff.corpus.problems import CorpusError
from specdiff.corpus.prompts import Prompt
from specdiff.errors import DownloadError, InputError
from specdiff.hub.fingerprint import model_fingerprint
from specdiff.hub.safety import check_folder
from specdiff.hub.store import Location
from specdiff.models.layer_cut import target_fingerprint
from specdiff.models.load_target import dtype_of
from specdiff.models.supported import usable_context

_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Identity of a tokenizer: ``sha256:`` and 64 hex digits over which id is which token.

    Rows hold ids, so what an id means is all that must agree; how text is cut into tokens, the chat template and the
    version of the tokenizer's file do not matter.
    """
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index} {json.dumps(token)}\n".encode())
    return "sha256:" + digest.hexdigest()


def localise(where: Location, *, allow_remote_code: bool = False) -> Location:
    """Fetch what a hub id names, so that it has fingerprints; a folder stays what it is.

    Raises:
        DownloadError: it cannot be fetched. CheckpointError: it is not safe and sound.
    """
    if where.folder is not None:
        return where
    try:
        folder = Path(huggingface_hub.snapshot_download(where.source, allow_patterns=list(_MODEL_FILES)))
    except Exception as error:  # one of a dozen kinds, some of them of the HTTP client
        raise DownloadError(f"target: {where.source!r} could not be fetched: {error}") from error
    check_folder(folder, allow_remote_code=allow_remote_code)
    return replace(where, source=str(folder), folder=folder)


def identify(
    where: Location, tokenizer: PreTrainedTokenizerBase, *, dtype: str, trust_remote_code: bool = False
) -> TargetIdentity:
    """The identity of a target from its files, without loading its weights.

    Args:
        where: from `specdiff.hub.ModelStore.resolve`. tokenizer: the target's. dtype: what the rows are made in.
        trust_remote_code: as for loading.

    Raises:
        CheckpointError: the folder is not a whole model.
    """
    config = AutoConfig.from_pretrained(where.source, trust_remote_code=trust_remote_code)
    return TargetIdentity(
        name=where.name if where.name.count("/") == 1 and not Path(where.name).exists() else Path(where.name).name,
        weights_fingerprint=where.fingerprint or (model_fingerprint(where.folder) if where.folder else ""),
        tables_fingerprint=tables_fingerprint(where.folder, config, trust_remote_code=trust_remote_code)
        if where.folder
        else "",
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        vocab_size=int(config.get_text_config().vocab_size),
        eos_ids=eos_ids(where.source, config),
        dtype=str(config.dtype if dtype == "auto" else dtype_of(dtype)).removeprefix("torch."),
    )


def eos_ids(source: str, config: Any) -> tuple[int, ...]:
    """Ids that end an answer, as ``generate`` takes them: of the generation configuration, else of the model's."""
    try:
        found = GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:
        found = config.get_text_config().eos_token_id
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def context_of(source: str, *, trust_remote_code: bool = False) -> int | None:
    """Most tokens of prompt and answer, None for any."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    return usable_context(_skeleton(config, trust_remote_code))


def tables_fingerprint(folder: Path, config: Any, *, trust_remote_code: bool = False) -> str:
    """`target_fingerprint` read from a folder's files; "" where they do not hold the tables as plain tensors."""
    model = _skeleton(config, trust_remote_code)
    places: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            places |= dict.fromkeys(tensors.keys(), path)
    head_module = model.get_output_embeddings()
    tables: list[torch.Tensor] = []
    for weight in (model.get_input_embeddings().weight, None if head_module is None else head_module.weight):
        shared = [n for n, p in model.named_parameters(remove_duplicate=False) if p is weight]
        name = next((n for n in shared if n in places), None)
        if name is None:
            return ""
        with safe_open(places[name], framework="pt") as tensors:
            table = tensors.get_tensor(name)
        if not table.is_floating_point():
            return ""
        tables.append(table)
    return target_fingerprint(tables[0], tables[1])


def _skeleton(config: Any, trust_remote_code: bool) -> PreTrainedModel:
    """The model without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return cast(PreTrainedModel, model)


def encode_prompts(
    prompts: Iterable[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool | None = None,
    longest: int | None = None,
    source: dict[str, Any],
) -> tuple[list[EncodedPrompt], PromptRecord]:
    """Turn prompts into token ids.

    Args:
        prompts: texts or messages. tokenizer: the target's.
        chat: wrap them in the chat template; None = where the tokenizer has one.
        longest: most tokens of a prompt; longer ones are left out, and named in the record. None = any.
        source: what the record says of where they came from.

    Raises:
        InputError: the chat template is asked for, or needed for messages, but there is none. CorpusError: no prompt is
            left, or one has no tokens.
    """
    template = getattr(tokenizer, "chat_template", None)
    wrap = bool(template) if chat is None else chat
    if wrap and not template:
        raise InputError.of("chat", expected="a tokenizer with a chat template", got="none", remedy="use --raw")
    encoded: list[EncodedPrompt] = []
    left_out: list[str] = []
    for prompt in prompts:
        ids = _ids(prompt, tokenizer, chat=wrap)
        if longest is not None and len(ids) > longest:
            left_out.append(prompt.id)
        else:
            encoded.append(EncodedPrompt(id=prompt.id, ids=tuple(ids)))
    if not encoded:
        raise CorpusError(f"prompts: all {len(left_out)} are longer than {longest} tokens; ask for fewer new tokens")
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return encoded, PromptRecord(
        source=source,
        count=len(encoded),
        sha256=_digest(encoded),
        left_out=tuple(left_out),
        chat=wrap,
        chat_template_sha256=hashlib.sha256(text.encode()).hexdigest() if wrap else "",
    )


def _ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> Sequence[int]:
    if chat:
        ids = chat_ids(tokenizer, prompt.content)
    elif isinstance(prompt.content, str):
        ids = cast("list[int]", tokenizer(prompt.content)["input_ids"])
    else:
        raise InputError.of("chat", expected="a chat template for messages", got="--raw", remedy="use --chat")
    if not ids:
        raise CorpusError(f"prompt {prompt.id!r}: expected at least one token, got none; give it a text")
    return ids


def _digest(prompts: Sequence[EncodedPrompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.ids]).encode() + b"\n")
    return digest.hexdigest()
