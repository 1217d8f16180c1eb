"""A masked diffusion LM: a transformers decoder with the attention and alignment its family was trained with.

Shape legend: B batch, N rows of a pass, H hidden size, V vocabulary, L tokens of a sequence, G tokens of a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdiff.models.diffusion.checkpoint import write_folder
from specdiff.models.diffusion.config import Attention, MaskedDenoiserConfig
from specdiff.models.diffusion.families import FAMILIES, SAVED, find_family
from specdiff.models.diffusion.loading import load_backbone, read_config
from specdiff.models.diffusion.probe import copy_probe
from specdiff.models.diffusion.windows import PrefixWindows


class DiffusionLM(nn.Module):
    """A masked diffusion LM behind the `MaskedDenoiser` protocol.

    Args:
        config: its facts. backbone: a causal-LM module of transformers, run with our masks instead of causal ones.
        raw: the published configuration, kept for `save_pretrained`.
    """

    def __init__(self, config: MaskedDenoiserConfig, backbone: PreTrainedModel, raw: Mapping[str, Any]) -> None:
        super().__init__()
        find_family(raw, config.family)  # raw and config must be of one family
        self.config, self.backbone, self.raw = config, backbone, dict(raw)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        family: str | None = None,
        mask_id: int | None = None,
        shift: bool | None = None,
        attention: Attention | None = None,
        block_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        attn_implementation: str = "sdpa",
        probe: bool = True,
        name: str | None = None,
    ) -> DiffusionLM:
        """Load a published checkpoint folder, or one that `save_pretrained` wrote.

        Reads ``config.json`` and safetensors only. Remote code that the configuration may ask for is never run.

        Args:
            directory: the folder.
            family: see `FAMILIES`; None = told by ``config.json``, where that says it.
            mask_id: in place of what the checkpoint states; None = the checkpoint's, or else the family's.
            shift: likewise.
            attention: likewise.
            block_size: likewise.
            dtype: of the weights; None = as stored.
            device: where they go.
            attn_implementation: ``sdpa`` or ``eager``.
            probe: check mask id and alignment by `copy_probe`; a contradiction raises.
            name: used in records; None = the folder's name.

        Raises:
            CheckpointError: files are missing, truncated, pickles, or do not fit each other.
            UnsupportedModelError: no known family, or a variant that our modules cannot run.
            InputError: no mask id, one beyond the vocabulary, an EOS id, or another option out of range.
            PairingError: the weights contradict mask id or alignment.
        """
        directory = Path(directory)
        config, kind, raw, module = read_config(
            directory,
            family=family,
            mask_id=mask_id,
            shift=shift,
            attention=attention,
            block_size=block_size,
            name=name,
        )
        backbone = load_backbone(
            directory, module, kind, raw, dtype=dtype, device=device, attn_implementation=attn_implementation
        )
        model = cls(config, backbone, raw)
        if probe:
            copy_probe(model, rival_mask_ids=(kind.mask_id,))
        return model.eval()

    @property
    def decoder(self) -> PreTrainedModel:
        """The network below the output head."""
        return self.backbone.model

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.backbone.lm_head.weight.device

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of states [..., H] after the final norm."""
        return self.backbone.lm_head(hidden)

    def visible(self, first: int, count: int) -> Tensor:
        """Which of ``count`` consecutive tokens, the first at position ``first``, see which: [count, count] bool."""
        if self.config.attention == "full":
            return torch.ones(count, count, dtype=torch.bool)
        block = torch.arange(first, first + count) // self.config.block_size
        return block[:, None] >= block[None, :]

    def rows(self, sequences: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """ONE pass without cache; differentiable.

        Args:
            sequences: [L] int64 ids of each sequence, masks included; ragged.
            spans: (start, stop) in each: the tokens to predict. With shifted logits a span may end at L + 1, but must
                start at 1 or later.

        Returns:
            For each sequence logits [stop - start, V]: row i predicts token ``start + i``, whatever the alignment.
        """
        picked = self.states(sequences, spans)
        return list(self.head(torch.cat(picked)).split([p.shape[0] for p in picked]))

    def states(
        self,
        sequences: Sequence[Tensor],
        spans: Sequence[tuple[int, int]],
        *,
        mask_embedding: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> list[Tensor]:
        """The states below `rows`' logits, for training.

        Args:
            sequences, spans: see `rows`.
            mask_embedding: [H] fed where a token is the mask; None = its row of the table.
            allowed: [S, S] bool, S the longest sequence: who may see whom, besides what the attention forbids.

        Returns:
            For each sequence [stop - start, H], after the final norm.
        """
        shift = int(self.config.shift)
        lengths = torch.tensor([s.numel() for s in sequences])
        size = int(lengths.max())
        tokens = torch.full((len(sequences), size), self.config.mask_id, dtype=torch.int64)
        for row, (sequence, (start, stop)) in enumerate(zip(sequences, spans, strict=True)):
            assert shift <= start <= stop <= sequence.numel() + shift, "span outside the sequence"
            tokens[row, : sequence.numel()] = sequence
        real = (torch.arange(size)[None, :] < lengths[:, None])[:, None, None, :]
        # With full attention all queries see the same keys, so one row of the mask serves them all.
        seen = real if self.config.attention == "full" else real & self.visible(0, size)
        if allowed is not None:
            seen = seen & allowed
        dtype = self.backbone.lm_head.weight.dtype
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        tokens = tokens.to(self.device)
        fed: dict[str, Tensor] = {"input_ids": tokens}
        if mask_embedding is not None:
            table = self.backbone.get_input_embeddings()
            is_mask = (tokens == self.config.mask_id)[..., None]
            fed = {"inputs_embeds": torch.where(is_mask, mask_embedding, table(tokens))}
        hidden = self.decoder(
            **fed,
            attention_mask=mask.to(self.device),
            position_ids=torch.arange(size, device=self.device).expand(len(sequences), -1),
            use_cache=False,
        ).last_hidden_state
        return [hidden[row, start - shift : stop - shift] for row, (start, stop) in enumerate(spans)]

    def open(self, rows: int, *, refresh: int | None = None) -> PrefixWindows:
        """Start a session; see `MaskedDenoiser.open`."""
        return PrefixWindows(self, rows, refresh=refresh)

    def save_pretrained(self, directory: str | Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write a folder that `from_pretrained` reads: published names, one safetensors file, dtype as it is.

        Args:
            directory: created if needed; files there are replaced.
            state: weights to write in place of the module's, by the names of a backbone without adapters.
        """
        kind, tied = FAMILIES[self.config.family], bool(self.backbone.config.tie_word_embeddings)
        tensors = {
            kind.keys.published(name): tensor
            for name, tensor in (self.backbone.state_dict() if state is None else state).items()
            if not (tied and name == "lm_head.weight")
        }
        kept = ("family", "mask_id", "shift", "attention", "block_size", "name")
        facts = {key: getattr(self.config, key) for key in kept}
        write_folder(Path(directory), {**self.raw, kind.tied_key: tied, SAVED: facts}, tensors)
