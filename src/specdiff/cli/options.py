"""Options that several commands share, and how their text becomes settings."""

from __future__ import annotations

from typing import Annotated

import typer

from specdiff.errors import InputError
from specdiff.types import EAGLE_TREE, BestFirst, CausalPaths, Chain, DynamicTree, Samples, Shape, Siblings, StaticTree

Target = Annotated[str, typer.Option("--target", help="Catalog name, local folder, or Hugging Face id.")]
Drafter = Annotated[
    str,
    typer.Option(
        "--drafter", help="'default', 'none', 'ngram', a folder of weights, or several joined by '+' (an ensemble)."
    ),
]
Rule = Annotated[str, typer.Option("--rule", help="Verification rule; 'auto' picks by draft kind and temperature.")]
ShapeText = Annotated[
    str | None,
    typer.Option(
        "--shape",
        help="chain, samples:K, siblings:6,2,1,1, best-first:NODES or paths:KEEP (with --ngram; further values as "
        "paths:3,beam=5,mass=0.9,cap=20,weight=0.7); for autoregressive and EAGLE drafters also static:eagle, "
        "static:0,1,0.0,0.1 (nodes by rank; ',sampled' draws them) and dynamic:NODES[,top=K]; default by temperature.",
    ),
]
Ngram = Annotated[
    str | None,
    typer.Option(
        "--ngram",
        help="N-gram model for --shape paths: 'prompt' (learns from the text itself), an ARPA file "
        "(specdiff ngram train), or prompt+FILE (both).",
    ),
]
Controller = Annotated[
    str,
    typer.Option(
        "--controller",
        help="Who sizes the drafts: 'fixed', 'adl' (adaptive depth, within --gamma), or 'planner' (specdiff tune "
        "first; 'planner:FILE' for a plan kept elsewhere).",
    ),
]
Gamma = Annotated[int | None, typer.Option("--gamma", help="Draft window; default the drafter's.")]
DraftTemperature = Annotated[float, typer.Option("--draft-temperature", help="Temperature of the draft, > 0.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens to produce.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 = argmax.")]
TopK = Annotated[int | None, typer.Option("--top-k")]
TopP = Annotated[float, typer.Option("--top-p")]
MinP = Annotated[float, typer.Option("--min-p")]
RepetitionPenalty = Annotated[float, typer.Option("--repetition-penalty")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Stop string; may be given several times.")]
Seed = Annotated[int, typer.Option("--seed")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, bf16, fp16 or fp32.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...; default the best one.")]
Tf32 = Annotated[bool, typer.Option("--tf32", help="Allow TF32 matrix products on CUDA (recorded; off by default).")]


def parse_shape(text: str) -> Shape:
    """Read a draft shape.

    Raises:
        InputError: the text is none of the forms, or a value is out of range.
    """
    kind, _, value = text.partition(":")
    try:
        if kind == "chain" and not value:
            return Chain()
        if kind == "samples":
            return Samples(int(value))
        if kind == "siblings":
            return Siblings(tuple(int(w) for w in value.split(",")))
        if kind == "best-first":
            return BestFirst(int(value))
        if kind == "paths":
            return _paths(value)
        if kind == "static":
            return _static(value)
        if kind == "dynamic":
            return _dynamic(value)
    except InputError:
        raise
    except ValueError:
        pass
    raise InputError.of(
        "shape",
        expected="chain, samples:K, siblings:W1,W2,..., best-first:NODES, paths:KEEP, static:eagle, static:PATHS or "
        "dynamic:NODES",
        got=text,
        remedy="for example --shape best-first:24",
    )


def _paths(text: str) -> CausalPaths:
    """Read ``KEEP,beam=B,mass=M,cap=C,weight=W``, each part optional; the beam is as wide as KEEP at least."""
    first, *rest = text.split(",")
    if "=" in first:
        first, rest = "", [first, *rest]
    given = dict(part.split("=") for part in rest)
    keep = int(first) if first else 1
    beam = int(given.pop("beam", max(CausalPaths.beam, keep)))
    cap = int(given.pop("cap", CausalPaths.cap))
    mass, weight = float(given.pop("mass", CausalPaths.mass)), float(given.pop("weight", CausalPaths.weight))
    if given:
        raise ValueError(given)
    return CausalPaths(beam=beam, keep=keep, mass=mass, cap=cap, weight=weight)


def _static(text: str) -> StaticTree:
    """Read ``eagle`` or nodes such as ``0,1,0.0,0.1``, and ``,sampled`` behind either."""
    parts = text.split(",")
    sampled = parts[-1] == "sampled"
    nodes = parts[:-1] if sampled else parts
    if nodes == ["eagle"]:
        return StaticTree(EAGLE_TREE.paths, sampled)
    return StaticTree(tuple(tuple(int(rank) for rank in node.split(".")) for node in nodes), sampled)


def _dynamic(text: str) -> DynamicTree:
    """Read ``NODES,top=K``, each part optional."""
    nodes, _, rest = text.partition(",")
    name, _, top = rest.partition("=")
    if rest and name != "top":
        raise ValueError(rest)
    return DynamicTree(int(nodes) if nodes else DynamicTree.nodes, int(top) if rest else DynamicTree.top)
