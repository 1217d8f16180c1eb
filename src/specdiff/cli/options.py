"""Options that several commands share, and how their text becomes settings."""

from __future__ import annotations

from typing import Annotated

import typer

from specdiff.errors import InputError
from specdiff.types import BestFirst, Chain, Samples, Shape, Siblings

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
    typer.Option("--shape", help="chain, samples:K, siblings:6,2,1,1 or best-first:NODES; default by temperature."),
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
        InputError: the text is none of the four forms.
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
    except ValueError:
        pass
    raise InputError.of(
        "shape",
        expected="chain, samples:K, siblings:W1,W2,... or best-first:NODES",
        got=text,
        remedy="for example --shape best-first:24",
    )
