"""The feature-level autoregressive head of EAGLE (Li et al., arXiv 2401.15077), beside a target of any size.

A *feature* is the target's last hidden state of a position, behind the final norm: what its LM head reads. Row i of the
head gets the feature of position i and the embedding of token i + 1, and predicts the feature of position i + 1:

    [embedding of token i + 1 ; feature i] -> fc (2 H -> H) -> one decoder layer of the target's kind -> feature i + 1

The layer's input norm and the final norm are left out, as in the published checkpoints. Their layout is read and
written here: ``fc.weight``, ``fc.bias`` (optional), ``layers.0.*``. An ``embed_tokens.weight`` is the target's own
table and is not kept. Embedding table and LM head are the target's modules.

Shapes: B batch, N rows of a pass, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from specdiff.errors import CheckpointError, PairingError, UnsupportedModelError
from specdiff.files import write_atomically, write_text
from specdiff.hub.headers import check_safetensors
from specdiff.hub.safety import check_no_code, check_weights, read_json
from specdiff.models.layer_cut import shrink_config, target_fingerprint
from specdiff.models.prepacked import prepack
from specdiff.models.tables import embedding_table, output_table

ARCHITECTURE = "EagleHead"
CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds of target whose decoder layer has the published layout."""
_FINGERPRINT = "target_fingerprint"
_TABLE = "embed_tokens.weight"


def is_eagle(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder holds such a head: its configuration says so, or its weights have an ``fc`` beside one layer.

    Published heads name the architecture of their target, so only the tensors tell.
    """
    if ARCHITECTURE in (config.get("architectures") or ()):
        return True
    if config.get("num_hidden_layers") != 1:
        return False
    return any("fc.weight" in check_safetensors(path) for path in sorted(folder.glob("*.safetensors")))


class EagleHead(nn.Module):
    """One decoder layer over features and embeddings.

    Args:
        target: the causal LM whose table, LM head, dtype and kind of layer it shares; it is never written.
        bias: whether ``fc`` has one.
        config: of the layer, as transformers reads it; None = the target's own, with one layer.
        name: free label.

    Attributes:
        fc: the projection 2 H -> H. decoder: a transformers decoder of one layer, without table and norms.

    Raises:
        UnsupportedModelError: the target's layers are of another layout.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        *,
        bias: bool = True,
        config: Mapping[str, Any] | None = None,
        name: str = "eagle",
    ) -> None:
        super().__init__()
        inner = target.get_decoder()
        kind = inner.config.model_type
        if kind not in FAMILIES:
            raise UnsupportedModelError(
                f"eagle: the layers of {kind!r} are not of the published layout; use a target of one of these kinds: "
                f"{', '.join(FAMILIES)}, or another drafter"
            )
        self.name = name
        last = inner.config.num_hidden_layers - 1
        self.layer_config: dict[str, Any] = (
            shrink_config(inner.config, [last]) if config is None else copy.deepcopy(dict(config))
        )
        self.kind, self.feature_layers = kind, (last,)
        table = embedding_table(target)
        self.hidden_size: int = table.shape[1]
        self.vocab_size = int(inner.config.vocab_size)
        base = AutoConfig.for_model(kind, **copy.deepcopy(self.layer_config))
        base.vocab_size, base.pad_token_id = 1, None  # the table is dropped below
        decoder: PreTrainedModel = AutoModel.from_config(base, dtype=table.dtype, attn_implementation="sdpa")
        decoder.set_input_embeddings(nn.Identity())
        decoder.norm = nn.Identity()
        decoder.layers[0].input_layernorm = nn.Identity()  # type: ignore[index] - a ModuleList
        nn.Module.to(decoder, table.device)
        self.decoder = decoder
        self.fc = nn.Linear(2 * self.hidden_size, self.hidden_size, bias=bias, dtype=table.dtype, device=table.device)
        # not registered: no part of the head's state, and packed or split as the target has them
        self._tables = (table, output_table(target))
        self._borrowed = cast(
            "tuple[nn.Module, nn.Module]", (target.get_input_embeddings(), target.get_output_embeddings())
        )

    def embed(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Join features [..., H] with the embeddings of the tokens [...] that follow them, to inputs [..., H]."""
        return self.fc(torch.cat([self._borrowed[0](tokens), features.to(self.fc.weight.dtype)], dim=-1))

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Predict features [B, N, H] in one causal pass.

        Args:
            tokens: [B, N] int64, token i + 1 in row i, padded on the right.
            features: [B, N, H] of position i in row i.
        """
        return self.decoder(inputs_embeds=self.embed(tokens, features), use_cache=False).last_hidden_state

    def logits(self, features: Tensor) -> Tensor:
        """The target's LM head: logits [..., V] of features [..., H]."""
        return self._borrowed[1](features)

    def prepack(self) -> None:
        """Keep packed copies of its own weights for drafting on CPUs, see `specdiff.models.prepacked`."""
        prepack(self)

    def published_state(self, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Tensors by their published names; of ``state`` where given, by names of this module."""
        own = self.state_dict() if state is None else state
        return {name.removeprefix("decoder."): tensor for name, tensor in own.items()}

    def save_pretrained(self, directory: str | Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write weights (bf16 safetensors), then configuration; no reader sees half a file.

        Args:
            directory: created if needed. state: weights to write in place of the module's, by the same names.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in self.published_state(state).items()
        }
        config = self.layer_config | {
            "architectures": [ARCHITECTURE],
            "model_type": self.kind,
            "bias": self.fc.bias is not None,
            "name": self.name,
            _FINGERPRINT: target_fingerprint(*self._tables),
        }
        write_atomically(directory / WEIGHTS_NAME, lambda path: save_file(tensors, path, {"format": "pt"}))
        write_text(directory / CONFIG_NAME, json.dumps(config, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, directory: str | Path, target: PreTrainedModel) -> EagleHead:
        """Load an exported or a published head beside its target.

        Raises:
            CheckpointError: files are missing, damaged, pickle, or of other shapes than the target's layers.
            PairingError: it was trained for another target (exports say so; of published heads only shapes tell).
        """
        directory = Path(directory)
        config = read_json(directory / CONFIG_NAME)
        check_no_code(directory)
        tensors: dict[str, Tensor] = {}
        for path in check_weights(directory):
            tensors |= load_file(path)
        tensors.pop(_TABLE, None)
        inner = target.get_decoder().config
        _check_pairing(config, inner.to_dict(), target)
        head = cls(
            target, bias="fc.bias" in tensors, config=_layer_config(config), name=str(config.get("name", "eagle"))
        )
        _check_shapes(head.published_state(), tensors, directory)
        head.load_state_dict({name if name.startswith("fc.") else f"decoder.{name}": t for name, t in tensors.items()})
        return head.eval()


def _layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a stored configuration describes the layer."""
    ours = ("architectures", "model_type", "bias", "name", _FINGERPRINT, "transformers_version", "dtype", "torch_dtype")
    return {name: value for name, value in config.items() if name not in ours}


def _check_pairing(config: Mapping[str, Any], inner: Mapping[str, Any], target: PreTrainedModel) -> None:
    for name in ("model_type", "hidden_size", "vocab_size"):
        if config.get(name) != inner[name]:
            raise PairingError.of(
                f"eagle: {name}",
                expected=f"{inner[name]!r}, the target's",
                got=config.get(name),
                remedy="use a head that was trained for this target",
            )
    wanted = config.get(_FINGERPRINT)
    got = target_fingerprint(embedding_table(target), output_table(target))
    if wanted is not None and wanted != got:
        raise PairingError.of(
            f"eagle: {_FINGERPRINT}", expected=wanted, got=got, remedy="use the target that this head was trained for"
        )


def _check_shapes(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], source: Path) -> None:
    missing, unknown = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{source}: expected the tensors of an EAGLE head, got missing {missing[:4]} and unknown {unknown[:4]}; "
            "heads with further parts (EAGLE-3, say) are not supported: use an EAGLE or EAGLE-2 head"
        )
    for name, tensor in expected.items():
        if got[name].shape != tensor.shape:
            raise CheckpointError(
                f"{source}: expected {name} of shape {tuple(tensor.shape)}, got {tuple(got[name].shape)}; weights and "
                "configuration are of different heads, fetch it again"
            )
