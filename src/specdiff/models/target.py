"""The target: any transformers causal LM, scored over token trees on top of its own prefix cache.

Shapes: N nodes of a tree, V vocabulary, L tokens of a prompt, F width of the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from specdiff.errors import InputError, UnsupportedModelError
from specdiff.models.cached_decoder import CachedDecoder, NewRows, forward_parameters, input_device
from specdiff.models.prepacked import is_prepacked
from specdiff.models.supported import check_can_roll_back, self_check, usable_context
from specdiff.types import TokenTree

_PREFILL_CHUNK = 512  # rows; bounds the mask and the activations of long prompts


@dataclass(frozen=True)
class ScoreRequest:
    """One row of a target pass: the last committed token and the tree below it."""

    root: int
    tree: TokenTree


class TargetSession(Protocol):
    """A target's state for one batch of requests.

    Attributes:
        passes: decode passes so far (prefill excluded).
    """

    passes: int

    def prefill(self, prompts: Sequence[Tensor]) -> list[Tensor | None]:
        """Read all but the last token of every prompt ([L] int64); return their features [L - 1, F] if asked for."""
        ...

    def score(self, requests: Sequence[ScoreRequest | None]) -> list[Tensor | None]:
        """ONE pass: logits [N + 1, V] of every row that asks; row 0 is the root's, row n + 1 node n's."""
        ...

    def commit(self, paths: Sequence[tuple[int, ...] | None]) -> list[Tensor | None]:
        """Keep root and accepted nodes of each row's last tree; None drops a row that sat out. Returns features."""
        ...

    def finish(self, row: int) -> None:
        """Release a finished row."""
        ...


class Target(Protocol):
    """What the decode loop needs of a target.

    Attributes:
        name, vocab_size: V. context: most tokens of prompt and continuation, None for any.
        eos_ids: ids that end a text.
    """

    name: str
    vocab_size: int
    context: int | None
    eos_ids: tuple[int, ...]

    def open(self, rows: int, feature_layers: tuple[int, ...] = ()) -> TargetSession:
        """Start a session."""
        ...


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """What a target runs as, for records and reports.

    Attributes:
        dtype, device: of the weights, as torch names them. attention: kernel family, ``sdpa`` or ``eager``.
        tf32: whether fp32 matrix products may be rounded to TF32. quantised: name of the method, None for none.
        prepacked: whether linear layers multiply with packed weights (`specdiff.models.prepacked`).
        transformers: version.
    """

    dtype: str
    device: str
    attention: str
    tf32: bool
    quantised: str | None
    prepacked: bool
    transformers: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> TargetInfo:
        """Read off a loaded model."""
        device = input_device(model)
        quantiser = getattr(model, "hf_quantizer", None)
        method = None if quantiser is None else quantiser.quantization_config.quant_method
        return cls(
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(device),
            attention=str(model.config.get_text_config()._attn_implementation),
            tf32=device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32",
            prepacked=is_prepacked(model),
            quantised=None if method is None else str(getattr(method, "value", method)),
            transformers=transformers.__version__,
        )


class CausalTarget:
    """Adapter from a transformers causal LM to `Target`.

    Args:
        model: a loaded model in eval mode, with ``sdpa`` or ``eager`` attention, any dtype, device map or plan.
        name: used in records.

    Attributes:
        info: what the model runs as.

    Raises:
        UnsupportedModelError: the model's state cannot be rolled back (recurrent, hybrid, ...), and why.
    """

    def __init__(self, model: PreTrainedModel, *, name: str = "") -> None:
        check_can_roll_back(model)
        config = model.config.get_text_config()
        self.model = model.eval()
        self.name = name or config.model_type
        # not the head's own rows: a plan may have split them over devices
        self.vocab_size = int(config.vocab_size)
        self.context = usable_context(model)
        eos = model.generation_config.eos_token_id if model.generation_config is not None else config.eos_token_id
        self.eos_ids: tuple[int, ...] = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        self.info = TargetInfo.of(model)

    def self_check(self) -> float:
        """Compare tree passes to plain passes on a few tokens: about seven passes over at most a dozen tokens.

        Returns:
            The largest deviation, in standard deviations of the logits.

        Raises:
            UnsupportedModelError: they disagree (4-D masks ignored, state outside the cache), or cannot be made.
        """
        return self_check(self.model)

    def open(self, rows: int, feature_layers: tuple[int, ...] = ()) -> CausalTargetSession:
        """Start a session for ``rows`` requests that hands out the hidden states after the given layers."""
        layers = self.model.config.get_text_config().num_hidden_layers
        bad = [i for i in feature_layers if not 0 <= i < layers]
        if bad:
            raise InputError.of(
                "feature_layers",
                expected=f"layers 0..{layers - 1}",
                got=bad,
                remedy="use a drafter made for this target",
            )
        return CausalTargetSession(self, rows, feature_layers)


class CausalTargetSession:
    """One batch on a `CausalTarget`: cache, last trees, features.

    Features are what transformers calls ``hidden_states[i + 1]``: the output of layer i (of the last layer: after the
    final norm), concatenated over the layers asked for.
    """

    def __init__(self, target: CausalTarget, rows: int, feature_layers: tuple[int, ...]) -> None:
        self._decoder = CachedDecoder(target.model, rows)
        self._layers = feature_layers
        self._features: Tensor | None = None
        self._finished: set[int] = set()
        last_row_only = "logits_to_keep" in forward_parameters(type(target.model))
        self._prefill_options: dict[str, Any] = {"logits_to_keep": 1} if last_row_only else {}
        self.passes = 0

    @property
    def lengths(self) -> list[int]:
        """Committed cache slots of each row: all committed tokens but the last."""
        return self._decoder.cache.lengths

    def prefill(self, prompts: Sequence[Tensor]) -> list[Tensor | None]:
        """Chunked, causal, without logits; features are None where all prompts have one token only."""
        rest = [p[:-1] for p in prompts]
        collected: list[list[Tensor]] = [[] for _ in prompts]
        for start in range(0, max((len(r) for r in rest), default=0), _PREFILL_CHUNK):
            chunk = [r[start : start + _PREFILL_CHUNK] for r in rest]
            output = self._decoder.run([NewRows.causal(c) for c in chunk], **self._prefill_options, **self._extra())
            self._check_layers(max(len(c) for c in chunk))
            self._remember(output)
            self._decoder.keep([range(len(c)) for c in chunk])
            for row, c in enumerate(chunk):
                if self._features is not None:
                    collected[row].append(self._features[row, : len(c)])
        return [torch.cat(c) if c else None for c in collected]

    def score(self, requests: Sequence[ScoreRequest | None]) -> list[Tensor | None]:
        """One pass over root and nodes of every row that asks; none where no row does."""
        if all(r is None for r in requests):
            return [None] * len(requests)
        empty = NewRows.causal(torch.empty(0, dtype=torch.int64))
        output = self._decoder.run(
            [empty if r is None else NewRows.tree(r.root, r.tree) for r in requests], **self._extra()
        )
        self.passes += 1
        self._remember(output)
        place = self._decoder.place
        return [None if r is None else output.logits[place(b), : len(r.tree) + 1] for b, r in enumerate(requests)]

    def commit(self, paths: Sequence[tuple[int, ...] | None]) -> list[Tensor | None]:
        """Compact the cache to the accepted paths."""
        kept = [[] if p is None else [0, *(node + 1 for node in p)] for p in paths]
        self._decoder.keep(kept)
        features, place = self._features, self._decoder.place
        if features is None:
            return [None] * len(paths)
        return [None if p is None else features[place(b), kept[b]] for b, p in enumerate(paths)]

    def finish(self, row: int) -> None:
        """Free the row's slots; later passes do not compute it."""
        if row not in self._finished:
            self._finished.add(row)
            self._decoder.release(row)

    def _extra(self) -> dict[str, Any]:
        return {"output_hidden_states": True} if self._layers else {}

    def _remember(self, output: Any) -> None:
        if not self._layers:
            return
        states = [output.hidden_states[i + 1] for i in self._layers]  # [0] is the embedding
        if any(s.shape[:2] != states[0].shape[:2] or s.ndim != 3 for s in states):
            raise UnsupportedModelError(
                f"target: hidden states of {self._decoder.model.config.model_type!r} are of shape "
                f"{tuple(states[0].shape)}, not one vector a token; use a drafter that reads no hidden states"
            )
        self._features = torch.cat(states, dim=-1)

    def _check_layers(self, rows: int) -> None:
        written = {layer.written for layer in self._decoder.cache.slot_layers}
        if written != {rows}:
            raise UnsupportedModelError(
                f"target: {self._decoder.model.config.model_type!r} wrote {sorted(written)} cache slots for {rows} "
                "tokens, so its cache cannot be rolled back; use a model with plain attention layers"
            )
