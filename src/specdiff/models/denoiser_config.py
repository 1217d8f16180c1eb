"""What a denoiser is: its configuration, and the checks between configuration, weights and target."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from specdiff.errors import CheckpointError, InputError, PairingError

FORMAT_VERSION = 1
CONFIG_NAME = "config.json"


@dataclass(frozen=True, kw_only=True)
class DenoiserConfig:
    """Everything needed to rebuild a denoiser next to its target.

    Attributes:
        base_model_type: ``model_type`` of the target's decoder, as transformers names it.
        base_config: the decoder's configuration, already reduced to ``len(layers)`` layers.
        layers: indices of the target's layers that the denoiser starts from, in order.
        window: rows of the draft window, which is also gamma.
        vocab_size: size of the target's vocabulary.
        hidden_size: width of the decoder.
        feature_layers: target layers whose hidden states are added to the prefix rows; empty for none.
        target_fingerprint: digest of the target's embedding table and output head.
        embedding_scale: factor the target applies after its embedding table (1 for most families).
        shift: whether window row ``j`` predicts offset ``j + 1``; only ``True`` is supported.
        name: free label.
        format_version: layout of the saved directory.
    """

    base_model_type: str
    base_config: dict[str, Any]
    layers: tuple[int, ...]
    window: int
    vocab_size: int
    hidden_size: int
    target_fingerprint: str
    feature_layers: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    shift: bool = True
    name: str = "denoiser"
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Reject values no denoiser can be built from."""
        if self.format_version != FORMAT_VERSION:
            raise InputError(
                f"format_version: expected {FORMAT_VERSION}, got {self.format_version!r}; "
                "load it with the specdiff release that wrote it, or export it again"
            )
        for name in ("window", "vocab_size", "hidden_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name}: expected a positive integer, got {value!r}; fix it in {CONFIG_NAME}")
        for name in ("layers", "feature_layers"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(type(i) is int and i >= 0 for i in value):
                raise InputError(f"{name}: expected a tuple of non-negative integers, got {value!r}")
        if not self.layers:
            raise InputError("layers: expected at least one target layer, got none; pass e.g. layers=(0, 1, 2)")
        if self.shift is not True:
            raise InputError(f"shift: expected True, got {self.shift!r}; unshifted windows are not supported")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DenoiserConfig:
        """Rebuild a configuration from its JSON form.

        Args:
            data: what `to_dict` gave, after a trip through JSON.

        Returns:
            The configuration.

        Raises:
            ValueError: a field is missing, unknown, or has a value that cannot be used.
        """
        if not isinstance(data, dict):
            raise CheckpointError(f"{CONFIG_NAME}: expected a JSON object, got {type(data).__name__}")
        known = {f.name for f in fields(cls)}
        missing, unknown = sorted(known - data.keys()), sorted(data.keys() - known)
        if missing or unknown:
            raise CheckpointError(
                f"{CONFIG_NAME}: expected the fields {sorted(known)}, got missing {missing} and unknown {unknown}; "
                "is this directory a denoiser of this specdiff release?"
            )
        lists = {n: data[n] for n in ("layers", "feature_layers")}
        for name, value in lists.items():
            if not isinstance(value, (list, tuple)):
                raise InputError(f"{name}: expected a list of layer indices, got {value!r}; fix it in {CONFIG_NAME}")
        return cls(**{**data, **{n: tuple(v) for n, v in lists.items()}})


def check_borrowed(config: DenoiserConfig, embedding: Tensor, head: Tensor) -> None:
    """Check the target's table and head against the configuration.

    Args:
        config: of the denoiser.
        embedding: [V, H] the target's embedding table.
        head: [V, H] the target's output head.

    Raises:
        ValueError: a shape differs.
    """
    expected = (config.vocab_size, config.hidden_size)
    for name, weight in (("target_embedding", embedding), ("target_head_weight", head)):
        if tuple(weight.shape) != expected:
            raise PairingError(
                f"{name}: expected shape {expected}, got {tuple(weight.shape)}; pass the target of this denoiser"
            )


def check_draft_vocab(config: DenoiserConfig, draft_vocab: Tensor) -> None:
    """Check that the draft vocabulary is a sorted set of target token ids.

    Args:
        config: of the denoiser.
        draft_vocab: [D] token ids.

    Raises:
        ValueError: it is empty, unsorted, repeats ids, or has ids the target lacks.
    """
    if draft_vocab.ndim != 1 or draft_vocab.numel() == 0 or draft_vocab.is_floating_point():
        raise InputError(
            f"draft_vocab: expected a non-empty 1-D integer tensor, got {draft_vocab.dtype} {tuple(draft_vocab.shape)}"
        )
    low, high = int(draft_vocab[0]), int(draft_vocab[-1])
    if low < 0 or high >= config.vocab_size or not bool((draft_vocab[1:] > draft_vocab[:-1]).all()):
        raise InputError(
            f"draft_vocab: expected strictly increasing ids in [0, {config.vocab_size}), got ids from {low} to {high}; "
            "sort it with torch.unique"
        )


def check_state(expected: dict[str, Tensor], got: dict[str, Tensor], source: str) -> None:
    """Check tensor names and shapes.

    Args:
        expected: the denoiser's own tensors by name.
        got: tensors to be put in their place.
        source: what to call `got` in the message.

    Raises:
        ValueError: names or shapes differ.
    """
    missing, unknown = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{source}: expected the denoiser's tensors, got missing {missing[:4]} and unknown {unknown[:4]}; "
            "weights and config are of different denoisers"
        )
    for name, tensor in expected.items():
        if got[name].shape != tensor.shape:
            raise CheckpointError(
                f"{source}: expected {name} of shape {tuple(tensor.shape)}, got {tuple(got[name].shape)}; "
                "weights and config are of different denoisers"
            )
