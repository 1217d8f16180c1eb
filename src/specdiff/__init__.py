"""specdiff: lossless speculative decoding with diffusion drafters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specdiff.decoder import Generation, Piece, Settings, SpeculativeDecoder, load
    from specdiff.errors import SpecdiffError
    from specdiff.sampling import SamplingOptions
    from specdiff.stopping import StopOptions
    from specdiff.types import BestFirst, Budget, Chain, Samples, Siblings

# Resolved on first use, so that `import specdiff` does not import torch.
_HOMES = {
    "load": "specdiff.decoder",
    "SpeculativeDecoder": "specdiff.decoder",
    "Settings": "specdiff.decoder",
    "Generation": "specdiff.decoder",
    "Piece": "specdiff.decoder",
    "SamplingOptions": "specdiff.sampling",
    "StopOptions": "specdiff.stopping",
    "Budget": "specdiff.types",
    "Chain": "specdiff.types",
    "Samples": "specdiff.types",
    "Siblings": "specdiff.types",
    "BestFirst": "specdiff.types",
    "SpecdiffError": "specdiff.errors",
}

__all__ = [
    "BestFirst",
    "Budget",
    "Chain",
    "Generation",
    "Piece",
    "Samples",
    "SamplingOptions",
    "Settings",
    "Siblings",
    "SpecdiffError",
    "SpeculativeDecoder",
    "StopOptions",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'specdiff' has no attribute {name!r}")
