"""How to open each backend; plain data, so that worker processes can be told, and nothing heavy is imported before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdiff.corpus.backend import Backend
from specdiff.corpus.plan import Sampling


@dataclass(frozen=True, kw_only=True)
class TransformersSpec:
    """The backend ``transformers``.

    Attributes:
        source: model folder or hub id. dtype, device, device_map, tf32, trust_remote_code: as for
            `specdiff.models.load_target.load_target`.
        attention: ``sdpa``, ``eager``, or None = the best of both that the model has.
    """

    source: str
    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    tf32: bool = False
    trust_remote_code: bool = False
    attention: str | None = None

    def open(self, sampling: Sampling) -> Backend:
        """Load the model."""
        from specdiff.corpus.decoding import DecodingBackend
        from specdiff.models.load_target import load_target

        target, _ = load_target(
            self.source,
            dtype=self.dtype,
            device=self.device,
            device_map=self.device_map,
            tf32=self.tf32,
            trust_remote_code=self.trust_remote_code,
            attn_implementation=self.attention,
        )
        return DecodingBackend(target, sampling)

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        return {"name": "transformers", "tf32": self.tf32, "attention": self.attention or "auto"}


@dataclass(frozen=True, kw_only=True)
class VllmSpec:
    """The backend ``vllm``.

    Attributes:
        source: model folder or hub id. eos_ids: ids that end an answer. dtype: auto, bf16, fp16 or fp32.
        options: further arguments of ``vllm.LLM``.
    """

    source: str
    eos_ids: tuple[int, ...]
    dtype: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, sampling: Sampling) -> Backend:
        """Start the engine."""
        from specdiff.corpus.vllm_engine import VllmBackend

        return VllmBackend(self.source, sampling, eos_ids=self.eos_ids, dtype=self.dtype, options=self.options)

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        return {"name": "vllm"}


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """The backend ``server``. The manifest trusts the caller that the server runs the target it names.

    Attributes:
        url: of the server. eos_ids: ids that end an answer. model: name the server knows the target by, "" = its only.
    """

    url: str
    eos_ids: tuple[int, ...]
    model: str = ""

    def open(self, sampling: Sampling) -> Backend:
        """Ask the server which model it serves."""
        from specdiff.corpus.vllm_server import ServerBackend

        return ServerBackend(self.url, sampling, eos_ids=self.eos_ids, model=self.model)

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        return {"name": "server", "model": self.model}
