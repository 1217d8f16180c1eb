"""The kinds of drafters there are, as the command line and the loader name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of drafter.

    Attributes:
        summary: what it is, in one line.
        needs_path: whether it has weights, hence a path (or model id) to load them from.
        shapes: budget shapes it can build, by name.
    """

    summary: str
    needs_path: bool
    shapes: tuple[str, ...]


_ALL_SHAPES = ("chain", "samples", "siblings", "best-first")

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "none": Kind(summary="no drafter: plain decoding by the same loop", needs_path=False, shapes=()),
        "ngram": Kind(
            summary="prompt lookup: repeats what followed the last tokens before",
            needs_path=False,
            shapes=("chain", "best-first"),
        ),
        "autoregressive": Kind(
            summary="a small causal language model, with the target's tokenizer or another",
            needs_path=True,
            shapes=(*_ALL_SHAPES, "static", "dynamic"),
        ),
        "denoiser": Kind(
            summary="a one-step masked denoiser trained for the target", needs_path=True, shapes=_ALL_SHAPES
        ),
        "eagle": Kind(
            summary="an EAGLE head over the target's features",
            needs_path=True,
            shapes=(*_ALL_SHAPES, "static", "dynamic"),
        ),
        "diffusion": Kind(
            summary="a masked diffusion LM (Dream, DiffuCoder, LLaDA, DiffuLLaMA, SDAR)",
            needs_path=True,
            shapes=_ALL_SHAPES,
        ),
    }
)
"""Every kind by name; read-only."""


def describe() -> str:
    """One line a kind, for help texts and error messages."""
    width = max(map(len, KINDS))
    path = {True: " (needs a path)", False: ""}
    return "\n".join(f"{name:<{width}}  {kind.summary}{path[kind.needs_path]}" for name, kind in KINDS.items())
