"""A block-causal one-step masked denoiser, cut from a causal decoder's own layers.

The draft of a round comes from one forward pass. Its rows are

    committed prefix without its last token : causal, so their keys and values can be cached for good
    window = [last committed token, MASK, ...] : ``window`` rows that see the whole prefix and each other

Outputs are shifted: window row ``j`` (0-based) predicts the token at offset ``j + 1`` after the last committed token,
so ``window`` rows give ``gamma = window`` draft tokens, each a marginal given the prefix.

The embedding table and the output head belong to the target; they are borrowed, frozen, and never written to disk.
The head is pruned to a draft vocabulary. Only the decoder layers, the final norm, the mask embedding and (optionally)
the projection of target features are the denoiser's own.

Shape legend: B batch, N rows of this pass, H hidden size, V target vocabulary, D draft vocabulary, C cached rows,
F feature layers.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from specdiff.errors import CheckpointError, InputError, PairingError
from specdiff.files import write_atomically, write_text
from specdiff.models.denoiser_config import (
    CONFIG_NAME,
    DenoiserConfig,
    check_borrowed,
    check_draft_vocab,
    check_state,
)
from specdiff.models.layer_cut import find_layer_list, layer_subset_state, shrink_config, target_fingerprint
from specdiff.models.prepacked import can_pack, multiply, pack, prepack
from specdiff.models.tables import embedding_table, output_table

WEIGHTS_NAME = "denoiser.safetensors"
_VOCAB_KEY = "draft_vocab"
_FEATURE_EPS = 1e-6


class BlockCausalDenoiser(nn.Module):
    """One-step masked drafter with the target's embedding table and output head.

    Build it with `from_target` (to train) or `from_pretrained` (to use). Its dtype is the embedding's, fixed when it
    is built: rebuild rather than cast, since a cast would also round the rotary frequencies.

    Attributes:
        config: the `DenoiserConfig`.
        decoder: a transformers decoder without an embedding table.
        mask_embedding: [H], what a MASK row feeds in.
        feature_projection: linear map from the target's states, each scaled to one length, to H; or None.
        draft_vocab: [D] int64, sorted target token ids that the head can predict.
        embedding_weight: [V, H], borrowed.
        head_weight: [D, H], borrowed rows of the target's output head.
    """

    draft_vocab: Tensor
    embedding_weight: Tensor
    head_weight: Tensor

    def __init__(
        self,
        config: DenoiserConfig,
        *,
        target_embedding: Tensor,
        target_head_weight: Tensor,
        draft_vocab: Tensor,
        attn_implementation: str = "sdpa",
    ) -> None:
        """Build a denoiser with untrained decoder weights.

        Args:
            config: what to build.
            target_embedding: [V, H] target embedding table, kept by reference.
            target_head_weight: [V, H] target output head; the rows of `draft_vocab` are copied.
            draft_vocab: [D] sorted, distinct target token ids.
            attn_implementation: name of a transformers attention function.

        Raises:
            ValueError: shapes or token ids do not fit `config`.
        """
        super().__init__()
        self.config = config
        check_borrowed(config, target_embedding, target_head_weight)
        check_draft_vocab(config, draft_vocab)
        dtype, device = target_embedding.dtype, target_embedding.device

        base = AutoConfig.for_model(config.base_model_type, **copy.deepcopy(config.base_config))
        self.decoder: PreTrainedModel = _build_decoder(base, dtype, attn_implementation)
        nn.Module.to(self.decoder, device)
        # transformers 5.24 renamed `past_key_values` to `cache`; ask rather than compare versions.
        names = inspect.signature(type(self.decoder).forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

        self.register_buffer("draft_vocab", draft_vocab.to(device=device, dtype=torch.int64), persistent=False)
        self.register_buffer("embedding_weight", target_embedding.detach(), persistent=False)
        rows = target_head_weight.detach().to(device=device, dtype=dtype)[self.draft_vocab]
        self.register_buffer("head_weight", rows, persistent=False)

        self._packed_head: Tensor | None = None
        self.mask_embedding = nn.Parameter(rows.new_zeros(config.hidden_size))
        self.feature_projection: nn.Linear | None = None
        if config.feature_layers:
            width = len(config.feature_layers) * config.hidden_size
            self.feature_projection = nn.Linear(width, config.hidden_size, bias=False, device=device, dtype=dtype)
            nn.init.zeros_(self.feature_projection.weight)  # starts as the plain decoder

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        draft_vocab: Tensor,
        layers: Sequence[int] = tuple(range(6)),
        window: int = 8,
        feature_layers: Sequence[int] = (),
        name: str = "denoiser",
        attn_implementation: str = "sdpa",
    ) -> BlockCausalDenoiser:
        """Cut a denoiser out of a causal language model.

        Args:
            target: a transformers causal LM; its dtype becomes the denoiser's.
            draft_vocab: [D] target token ids the drafter may propose (sorted here).
            layers: which of the target's layers to copy, in order.
            window: rows of the draft window.
            feature_layers: target layers to read hidden states from; empty for none.
            name: free label.
            attn_implementation: name of a transformers attention function.

        Returns:
            A denoiser whose decoder and norm equal the target's, ready to train.

        Raises:
            ValueError: a layer index or token id is out of range.
        """
        inner = target.get_decoder()
        num_layers = len(find_layer_list(inner)[1])
        for option, indices in (("layers", layers), ("feature_layers", feature_layers)):
            bad = [i for i in indices if not 0 <= i < num_layers]
            if bad:
                raise InputError(f"{option}: expected indices in [0, {num_layers}), got {bad}")
        table = target.get_input_embeddings()
        embedding, head = embedding_table(target), output_table(target)
        scale = getattr(table, "scalar_embed_scale", None) or getattr(table, "embed_scale", 1.0)
        base = shrink_config(inner.config, layers)
        config = DenoiserConfig(
            base_model_type=inner.config.model_type,
            base_config=base,
            layers=tuple(layers),
            window=window,
            vocab_size=embedding.shape[0],
            hidden_size=embedding.shape[1],
            feature_layers=tuple(feature_layers),
            embedding_scale=float(scale),
            target_fingerprint=target_fingerprint(embedding, head),
            name=name,
        )
        denoiser = cls(
            config,
            target_embedding=embedding,
            target_head_weight=head,
            draft_vocab=torch.unique(draft_vocab.to(torch.int64)),
            attn_implementation=attn_implementation,
        )
        denoiser.decoder.load_state_dict(layer_subset_state(inner, layers), strict=True)
        with torch.no_grad():
            denoiser.mask_embedding.copy_(embedding[denoiser.draft_vocab].float().mean(0) * config.embedding_scale)
        return denoiser

    @property
    def window(self) -> int:
        """Rows of the draft window, which is gamma."""
        return self.config.window

    def embed(self, tokens: Tensor, is_mask: Tensor, features: Tensor | None = None) -> Tensor:
        """Embed the rows of a pass.

        Args:
            tokens: [B, N] int64 target token ids; ids under a mask are ignored.
            is_mask: [B, N] bool, True where the row is a MASK.
            features: [B, N, F * H] concatenated target hidden states of `config.feature_layers`; zeros for rows that
                the target has not seen (the window). Required if and only if the denoiser has feature layers.

        Returns:
            [B, N, H] input embeddings.

        Raises:
            ValueError: features are missing, unexpected or of the wrong width.
        """
        embeds = nn.functional.embedding(tokens.masked_fill(is_mask, 0), self.embedding_weight)
        if self.config.embedding_scale != 1.0:
            embeds = embeds * self.config.embedding_scale
        if self.feature_projection is not None:
            width = self.feature_projection.in_features
            got = None if features is None else tuple(features.shape)
            if features is None or got != (*tokens.shape, width):
                raise InputError(
                    f"features: expected shape {(*tokens.shape, width)}, got {got}; "
                    f"concatenate the target's hidden states of layers {self.config.feature_layers}"
                )
            embeds = embeds + self.feature_projection(self._normalise(features).to(embeds.dtype))
        elif features is not None:
            raise InputError("features: expected None, got a tensor; this denoiser was built without feature_layers")
        return torch.where(is_mask.unsqueeze(-1), self.mask_embedding, embeds)

    def _normalise(self, features: Tensor) -> Tensor:
        """Scale each layer's state to length 1 / sqrt(F).

        Depth and attention sinks change a state's size a hundredfold; and an optimiser that moves every weight by the
        learning rate must not swamp the embeddings, which are small, within a few steps.
        """
        states = features.float().unflatten(-1, (-1, self.config.hidden_size))
        scale = features.shape[-1] ** -0.5
        return nn.functional.rms_norm(states, states.shape[-1:], eps=_FEATURE_EPS).mul(scale).flatten(-2)

    def hidden(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Any = None,
        **attention_arguments: Any,
    ) -> Tensor:
        """Run the decoder.

        Args:
            inputs_embeds: [B, N, H] from `embed`.
            attention_mask: [B or 1, 1, N, C + N] additive float mask; None leaves the mask to the
                attention function.
            position_ids: [B, N] int64 absolute positions.
            cache: a transformers ``Cache``, extended in place by the N rows, or None.
            **attention_arguments: handed to the attention function, for registered ones that take more.

        Returns:
            [B, N, H] states after the final norm.
        """
        kwargs = {self._cache_argument: cache, **attention_arguments}
        output = self.decoder(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=cache is not None,
            **kwargs,
        )
        return output.last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits over the draft vocabulary.

        Args:
            hidden: [..., H] states from `hidden`.

        Returns:
            [..., D] logits; column ``i`` belongs to target token ``draft_vocab[i]``.
        """
        if self._packed_head is not None and not torch.is_grad_enabled():
            return multiply(hidden, self._packed_head)
        return nn.functional.linear(hidden, self.head_weight)

    def prepack(self) -> None:
        """Keep packed copies of the weights for drafting on CPUs, see `specdiff.models.prepacked`."""
        if prepack(self) and can_pack(self.head_weight):
            self._packed_head = pack(self.head_weight)

    def save_pretrained(self, directory: str | Path, state: dict[str, Tensor] | None = None) -> None:
        """Write the denoiser's own weights (bf16 safetensors) and its configuration.

        Each file is written under a temporary name and renamed, weights first, so a reader never sees half a file.

        Args:
            directory: created if needed.
            state: weights to write in place of the module's, e.g. averaged ones; same names and shapes.

        Raises:
            ValueError: `state` has other names or shapes than the module.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        own = dict(self.state_dict())
        if state is not None:
            check_state(own, state, "state")
            own = state
        tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in own.items()}
        tensors[_VOCAB_KEY] = self.draft_vocab.to("cpu", torch.int32)
        write_atomically(directory / WEIGHTS_NAME, lambda path: save_file(tensors, path, {"format": "pt"}))
        text = json.dumps(self.config.to_dict(), indent=2) + "\n"
        write_text(directory / CONFIG_NAME, text)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        target_embedding: Tensor,
        target_head_weight: Tensor,
        *,
        check_target: bool = True,
        attn_implementation: str = "sdpa",
    ) -> BlockCausalDenoiser:
        """Load a denoiser beside its target.

        Args:
            directory: where `save_pretrained` wrote.
            target_embedding: [V, H] the target's embedding table; sets dtype and device.
            target_head_weight: [V, H] the target's output head.
            check_target: refuse a target other than the one the denoiser was trained for.
            attn_implementation: name of a transformers attention function.

        Returns:
            The denoiser, in eval mode.

        Raises:
            CheckpointError: files are missing or damaged. PairingError: they do not fit the target.
        """
        directory = Path(directory)
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if not (directory / name).is_file():
                raise CheckpointError(f"directory: expected a file {name} in {directory}, got none; is the path right?")
        try:
            data = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{CONFIG_NAME}: expected JSON, got {error}; export the denoiser again") from error
        config = DenoiserConfig.from_dict(data)
        try:
            tensors = load_file(directory / WEIGHTS_NAME)
        except SafetensorError as error:
            raise CheckpointError(
                f"{WEIGHTS_NAME}: expected a safetensors file, got {error}; copy or export the denoiser again"
            ) from error
        if _VOCAB_KEY not in tensors:
            raise CheckpointError(f"{WEIGHTS_NAME}: expected a tensor {_VOCAB_KEY}, got none; export it again")
        check_borrowed(config, target_embedding, target_head_weight)
        if check_target:
            got = target_fingerprint(target_embedding, target_head_weight)
            if got != config.target_fingerprint:
                raise PairingError(
                    f"target_fingerprint: expected {config.target_fingerprint}, got {got}; pass the target this "
                    "denoiser was trained for, or check_target=False to draft for another one with the same tokenizer"
                )
        denoiser = cls(
            config,
            target_embedding=target_embedding,
            target_head_weight=target_head_weight,
            draft_vocab=tensors.pop(_VOCAB_KEY),
            attn_implementation=attn_implementation,
        )
        check_state(dict(denoiser.state_dict()), tensors, WEIGHTS_NAME)
        denoiser.load_state_dict(tensors, strict=True)
        return denoiser.eval()


def _build_decoder(base: Any, dtype: torch.dtype, attn_implementation: str) -> PreTrainedModel:
    """Build a decoder whose embedding table is left out (it is the target's)."""
    base.vocab_size, base.pad_token_id = 1, None  # a one-row table: dropped below, so do not allocate V x H
    decoder = AutoModel.from_config(base, dtype=dtype, attn_implementation=attn_implementation)
    decoder.set_input_embeddings(nn.Identity())
    return decoder
