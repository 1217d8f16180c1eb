"""The tokenizer of a published checkpoint, whose own class may be remote code: it is read, never run."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

from specdiff.errors import CheckpointError, UnsupportedModelError
from specdiff.models.diffusion.checkpoint import CONFIG_NAME, read_json_if_any


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a masked diffusion LM.

    Dream's and DiffuCoder's class is a copy of Qwen2's with the same files, which transformers' own class reads.

    Args:
        directory: a checkpoint folder.

    Raises:
        CheckpointError: the tokenizer's files are missing or damaged.
        UnsupportedModelError: only remote code could read them.
    """
    directory = Path(directory)
    files = ("tokenizer_config.json", CONFIG_NAME)
    remote = any("auto_map" in read_json_if_any(directory / name) for name in files)
    if not remote:
        kind = AutoTokenizer
    elif (directory / "tokenizer.json").is_file():
        kind = PreTrainedTokenizerFast
    elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        kind = Qwen2Tokenizer
    else:
        raise UnsupportedModelError(
            f"{directory}: its tokenizer asks for remote code, which is never run, and there is no tokenizer.json, nor "
            "vocab.json with merges.txt; fetch the model again, or save its tokenizer as tokenizer.json"
        )
    try:
        return kind.from_pretrained(directory)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise CheckpointError(f"{directory}: no usable tokenizer ({error}); fetch the model again") from error
